"""ragged_prefill, small and nasty: every length that can go wrong, in a second of interpreted Triton per case.

Runs on any device, on the same data (see tasks/common/values.py). The expected output is reference.py's, rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tasks.common import values
from tasks.common.suite import Suite, compare, offsets
from tasks.ragged_prefill import reference as truth

INPUT_CLASS = ["INPUT"] * 3 + ["OUTPUT"] + ["INPUT"] * 9


class Case(NamedTuple):
    """Lengths of every sequence; heads = (query, KV); dims = (qk, vo); `slack`: by how much seq_len is too large."""

    label: str
    seed: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int]
    dims: tuple[int, int]
    causal: int
    style: values.Style = values.PLAIN
    slack: int = 0


# Six kernels (heads, dims, causal) serve all ten cases: TileLang compiles one for each.
_GROUP_2 = ((4, 2), (128, 128), 1)
_GROUP_3 = ((3, 1), (128, 128), 0)
_GROUP_1 = ((3, 3), (64, 64), 1)
_GROUP_5 = ((5, 1), (192, 128), 1)
_GROUP_7 = ((7, 1), (64, 64), 0)
_GROUP_8 = ((8, 1), (256, 256), 1)

CASES = (
    Case("around 16", 101, (1, 15, 0, 16, 17), (1, 15, 0, 16, 17), *_GROUP_2, slack=9),
    Case("around 64", 102, (63, 64, 65), (63, 64, 65), *_GROUP_2, values.RISING),
    Case("q < kv", 103, (1, 33), (129, 127), *_GROUP_2, values.LOW),
    Case("q > kv, no kv", 104, (70, 20, 3), (9, 0, 65), *_GROUP_2, slack=64),
    Case("q past a tile", 105, (129, 0, 2), (33, 5, 0), *_GROUP_3),
    Case("kv past a tile", 106, (1, 31), (191, 128), *_GROUP_3, values.RISING),
    Case("diagonal past a tile", 107, (130,), (130,), *_GROUP_1),
    Case("192/128", 108, (32, 1), (96, 31), *_GROUP_5, values.HIGH),
    Case("packed group of 7", 109, (19,), (65,), *_GROUP_7, values.LOW),
    Case("256/256", 110, (17,), (33,), *_GROUP_8, values.RISING),
)
CASE_LABELS = tuple(case.label for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    q_rows, kv_rows, batch = sum(case.q_lens), sum(case.kv_lens), len(case.q_lens)
    (heads, kv_heads), (dim_qk, dim_vo) = case.heads, case.dims
    tensors = [(q_rows, heads, dim_qk), (kv_rows, kv_heads, dim_qk), (kv_rows, kv_heads, dim_vo)]
    return [*tensors, (q_rows, heads, dim_vo), (batch + 1,), (batch + 1,), *[()] * 7]


def _arguments(case: Case, device: str) -> list[Any]:
    generator = torch.Generator("cpu").manual_seed(case.seed)
    (heads, kv_heads), (dim_qk, dim_vo) = case.heads, case.dims
    q = values.draw_q(generator, sum(case.q_lens), heads, dim_qk, case.style).to(device)
    parts = [values.draw_kv(generator, n, kv_heads, dim_qk, dim_vo, case.style) for n in case.kv_lens]
    k, v = (torch.cat(rows).to(device) for rows in zip(*parts, strict=True))
    output = torch.empty(_shapes(case)[3], device=device, dtype=torch.bfloat16)
    indptrs = offsets(case.q_lens, device), offsets(case.kv_lens, device)
    seq_len = max(case.q_lens + case.kv_lens) + case.slack
    return [q, k, v, output, *indptrs, len(case.q_lens), seq_len, heads, kv_heads, dim_qk, dim_vo, case.causal]


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
