"""kvcache_decode, small and nasty: lengths around pages and tiles, every headdim, NaN in every dead slot, table entries
past a sequence's end that point at other sequences' pages and at NaN.

Runs on any device, on the same data (see tasks/common/values.py). The expected output is reference.py's, rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tasks.common import values
from tasks.common.suite import Suite, compare
from tasks.kvcache_decode import reference as truth

INPUT_CLASS = ["INPUT"] * 3 + ["OUTPUT"] + ["INPUT"] * 11


class Case(NamedTuple):
    """heads = (query, KV); `row`: entries in a row of block_table, more than any sequence fills; `odd`: blocks that
    num_blocks // batch_size rounds away."""

    label: str
    seed: int
    heads: tuple[int, int]
    dim: int
    page: int
    lengths: tuple[int, ...]
    row: int
    style: values.Style = values.PLAIN
    odd: int = 0
    causal: int = 0

    @property
    def num_blocks(self) -> int:
        """Pages in the pool."""
        return self.row * len(self.lengths) + self.odd


# Nine head dimensions make nine kernels for TileLang to compile, one more than the suite would need otherwise.
CASES = (
    Case("d128 around 16", 401, (8, 1), 128, 16, (1, 15, 0, 16, 17), 3),
    Case("d128 long", 402, (8, 1), 128, 16, (300,), 22, values.RISING, causal=1),
    Case("d64 group of 2", 403, (4, 2), 64, 16, (33, 63), 6, values.RISING, odd=1),
    Case("d32 group of 1", 404, (3, 3), 32, 16, (65, 1), 6),
    Case("d96 page 64", 405, (6, 2), 96, 64, (63, 64, 65), 3, odd=2),
    Case("d160 group of 5", 406, (5, 1), 160, 16, (31, 128), 9, values.LOW),
    Case("d192 group of 7", 407, (7, 1), 192, 64, (129, 0), 4),
    Case("d224", 408, (2, 2), 224, 16, (47,), 5, values.HIGH),
    Case("d256 page 256", 409, (2, 1), 256, 256, (257, 255), 3),
    Case("d512", 410, (2, 2), 512, 16, (20, 32), 4),
)
CASE_LABELS = tuple(case.label for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    (heads, kv_heads), batch = case.heads, len(case.lengths)
    q_shape, pool = (batch, 1, heads, case.dim), (case.num_blocks, case.page, kv_heads, case.dim)
    return [q_shape, pool, pool, q_shape, (batch,), (batch, case.row), *[()] * 9]


def _arguments(case: Case, device: str) -> list[Any]:
    generator = torch.Generator("cpu").manual_seed(case.seed)
    (heads, kv_heads), batch = case.heads, len(case.lengths)
    q = values.draw_q(generator, batch, heads, case.dim, case.style).unsqueeze(1).to(device)
    rows = [values.draw_kv(generator, n, kv_heads, case.dim, case.dim, case.style) for n in case.lengths]
    used = sum(-(-n // case.page) for n in case.lengths)
    pages = values.place(generator, case.lengths, case.page, case.num_blocks - used)
    k_pool, v_pool = (values.fill(pages, list(part)).to(device) for part in zip(*rows, strict=True))
    table = torch.randint(case.num_blocks, (batch, case.row), generator=generator, dtype=torch.int32)
    for b, own in enumerate(pages.tables):
        table[b, : len(own)] = torch.tensor(own, dtype=torch.int32)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    capacity = (case.row - 1) * case.page + 1 + case.seed % case.page  # an upper bound of the lengths, not a multiple
    sizes = (batch, capacity, 1, heads, kv_heads, case.dim, case.page, case.num_blocks, case.causal)
    return [q, k_pool, v_pool, torch.empty_like(q), lengths, table.to(device), *sizes]


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: (1, 10))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate


def baseline(q: Tensor, k: Tensor, v: Tensor, output: Tensor, *rest: Any) -> None:
    """The ground truth, rounded to bf16."""
    output.copy_(truth.reference(q, k, v, output, *rest)["output"])


def check(
    testcase_sizes: list[Any],
    original_inputs: list[Any],
    target_args: list[Any],
    baseline_args: list[Any],
    rtol: float = 1e-2,
    atol: float = 1e-2,
) -> bool:
    """Every element within the judge's tolerance."""
    return compare(target_args[3], baseline_args[3], rtol, atol)
