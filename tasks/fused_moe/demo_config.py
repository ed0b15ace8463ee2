"""fused_moe, the tutorial's local test: three cases of small closed formulas whose corner values are known.

check also compares C[0] and C[last] with the values that the tutorial prints, and prints a line per case.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tasks.common.suite import Suite, compare
from tasks.fused_moe import reference as truth

E, N, K, TILE = 2, 128, 128, 128
INPUT_CLASS = ["INPUT"] * 8 + ["OUTPUT"]


class Case(NamedTuple):
    """`first`, `last`: C[0] and C[last] before they are rounded to bf16."""

    tokens: int
    topk: int
    experts: tuple[int, ...]
    first: float
    last: float


CASES = (
    Case(256, 1, (0, 1), 0.69337, -0.44513),
    Case(256, 2, (0, 1, 1, 0), -0.57678, -0.49749),
    Case(128, 3, (0, 1, 0), -1.08748, -0.33618),
)
CASE_LABELS = tuple(f"topk{case.topk}" for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    rows = case.tokens * case.topk
    return [(rows, K), (E, N, K), (rows,), (E, N), (rows,), (rows,), (rows // TILE,), (), (rows, N)]


def _arguments(case: Case, device: str) -> list[Any]:
    topk = case.topk
    row = torch.arange(case.tokens * topk, device=device)
    token = row // topk
    e, n, k = (torch.arange(size, device=device) for size in (E, N, K))
    a = (13 * token[:, None] + 7 * k + 5 * topk + 3) % 11 - 5
    b = (17 * e[:, None, None] + 5 * n[:, None] + 3 * k + topk) % 9 - 4
    return [
        a.to(torch.int8),
        b.to(torch.int8),
        (0.125 + 0.015625 * ((token + topk) % 7)).float(),
        (0.25 + 0.03125 * ((3 * e[:, None] + n + topk) % 9)).float(),
        (0.5 + 0.03125 * ((row + topk) % 5)).float(),
        token.int(),
        torch.tensor(case.experts, dtype=torch.int32, device=device),
        topk,
        torch.empty((len(row), N), dtype=torch.bfloat16, device=device),
    ]


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: (1, 10))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate


def baseline(*args: Any) -> None:
    """The ground truth, rounded to bf16."""
    out: Tensor = args[-1]
    out.copy_(truth.reference(*args)["out"])


def check(
    testcase_sizes: list[Any],
    original_inputs: list[Any],
    target_args: list[Any],
    baseline_args: list[Any],
    rtol: float = 2e-2,
    atol: float = 5e-3,
) -> bool:
    """Every element within tolerance, and the corners as the tutorial prints them; says so on standard output."""
    out, case = target_args[8], SUITE.case
    corners = torch.tensor([case.first, case.last])
    passed = compare(out, baseline_args[8], rtol, atol) and compare(
        out.flatten()[[0, -1]].float().cpu(), corners, rtol=2**-8, atol=1e-5
    )
    first, last = (float(x) for x in out.flatten()[[0, -1]])
    verdict, (rows, cols) = "passed" if passed else "FAILED", out.shape
    print(
        f"fused_moe_i8_tn_topk{case.topk} {verdict}: rows={rows}, cols={cols}, "
        f"sample C[0]={first:.5f}, C[last]={last:.5f}"
    )
    return passed
