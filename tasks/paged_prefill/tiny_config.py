"""paged_prefill, small and nasty: edge lengths around pages and tiles, pages in random order, NaN in every dead slot.

Runs on any device, on the same data (see tasks/common/values.py). The expected output is reference.py's, rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tasks.common import values
from tasks.common.suite import Suite, compare, offsets
from tasks.paged_prefill import reference as truth

SPARE_PAGES = 3
INPUT_CLASS = ["INPUT"] * 2 + ["OUTPUT"] + ["INPUT"] * 11


class Case(NamedTuple):
    """Lengths of every sequence; heads = (query, KV); `last_of_empty`: last_page_len of a sequence without pages."""

    label: str
    seed: int
    page: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int]
    dim: int
    causal: int
    style: values.Style = values.PLAIN
    last_of_empty: int = 0


# Six kernels (heads, dim, causal) serve all ten cases: TileLang compiles one for each.
_GROUP_2 = ((4, 2), 128, 1)
_GROUP_3 = ((3, 1), 128, 0)
_GROUP_1 = ((8, 8), 64, 0)
_GROUP_7 = ((7, 1), 64, 1)
_GROUP_5 = ((5, 1), 256, 0)
_GROUP_8 = ((8, 1), 256, 1)

CASES = (
    Case("around page 16", 201, 16, (1, 15, 0, 16, 17), (1, 15, 0, 16, 17), *_GROUP_2),
    Case("page 8, q < kv", 202, 8, (9, 1), (64, 65), *_GROUP_2, values.RISING),
    Case("page 1, q > kv", 203, 1, (20, 3, 5), (9, 0, 33), *_GROUP_2, last_of_empty=1),
    Case("page 64, two row tiles", 204, 64, (130,), (127,), *_GROUP_2),
    Case("page 32, q past a tile", 205, 32, (129, 2, 1, 0), (33, 0, 32, 31), *_GROUP_3, last_of_empty=32),
    Case("page 64, kv past a tile", 206, 64, (1, 31), (191, 128), *_GROUP_3, values.HIGH),
    Case("8 KV heads, dim 64", 207, 16, (5,), (31,), *_GROUP_1),
    Case("dim 64, page 64", 208, 64, (19,), (65,), *_GROUP_7, values.LOW),
    Case("dim 256, page 32", 209, 32, (17, 1), (63, 1), *_GROUP_5),
    Case("dim 256, page 1", 210, 1, (16,), (33,), *_GROUP_8, values.RISING),
)
CASE_LABELS = tuple(case.label for case in CASES)


def _page_counts(case: Case) -> list[int]:
    return [-(-length // case.page) for length in case.kv_lens]


def _shapes(case: Case) -> list[tuple[int, ...]]:
    (heads, kv_heads), batch, used = case.heads, len(case.q_lens), sum(_page_counts(case))
    q_shape = (sum(case.q_lens), heads, case.dim)
    pool = (used + SPARE_PAGES, 2, case.page, kv_heads, case.dim)
    return [q_shape, pool, q_shape, (batch + 1,), (batch + 1,), (used,), (batch,), *[()] * 7]


def _arguments(case: Case, device: str) -> list[Any]:
    generator = torch.Generator("cpu").manual_seed(case.seed)
    heads, kv_heads = case.heads
    q = values.draw_q(generator, sum(case.q_lens), heads, case.dim, case.style).to(device)
    rows = [values.draw_kv(generator, n, kv_heads, case.dim, case.dim, case.style) for n in case.kv_lens]
    pages = values.place(generator, case.kv_lens, case.page, SPARE_PAGES)
    k_pool, v_pool = (values.fill(pages, list(part)) for part in zip(*rows, strict=True))
    kv_data = torch.stack((k_pool, v_pool), dim=1).to(device)
    output = torch.empty_like(q)
    indices = [page for table in pages.tables for page in table]
    last = [(n - 1) % case.page + 1 if n else case.last_of_empty for n in case.kv_lens]
    tables = (
        offsets(case.q_lens, device),
        offsets(_page_counts(case), device),
        torch.tensor(indices, dtype=torch.int32, device=device),
        torch.tensor(last, dtype=torch.int32, device=device),
    )
    sizes = (len(case.q_lens), max(case.q_lens + case.kv_lens), heads, kv_heads, case.dim, case.page, case.causal)
    return [q, kv_data, output, *tables, *sizes]


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: (1, 10))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate


def baseline(q: Tensor, kv_data: Tensor, output: Tensor, *rest: Any) -> None:
    """The ground truth, rounded to bf16."""
    output.copy_(truth.reference(q, kv_data, output, *rest)["output"])


def check(
    testcase_sizes: list[Any],
    original_inputs: list[Any],
    target_args: list[Any],
    baseline_args: list[Any],
    rtol: float = 1e-2,
    atol: float = 1e-2,
) -> bool:
    """Every element within the judge's tolerance."""
    return compare(target_args[2], baseline_args[2], rtol, atol)
