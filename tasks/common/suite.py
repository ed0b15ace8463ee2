"""The judge's protocol over a table of cases: what live_config.py and tiny_config.py share.

A config builds one `Suite` and hands out its methods under the protocol's names:

    SUITE = Suite(CASES, sizes, generate)
    getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

CaseT = TypeVar("CaseT")
CHUNK = 1 << 26  # elements compared at a time, so that a 1e9-element output needs no second copy of itself


class Suite(Generic[CaseT]):
    """Cases of one task. `arguments(case, device)` draws the argument list from generators seeded inside it.

    `shapes(case)` gives the shape of every argument, () for an integer; `timing` is (warm-up, timed) calls.
    """

    def __init__(
        self,
        cases: tuple[CaseT, ...],
        shapes: Callable[[CaseT], list[tuple[int, ...]]],
        arguments: Callable[[CaseT, str], list[Any]],
        timing: Callable[[CaseT], tuple[int, int]],
    ) -> None:
        self._cases, self._shapes, self._arguments, self._timing = cases, shapes, arguments, timing
        self.case = cases[0]  # the case that read_case chose last; the shapes alone do not tell two seeds apart

    def count(self) -> int:
        """Number of cases."""
        return len(self._cases)

    def read_case(self) -> tuple[list[tuple[int, ...]], tuple[int, int]]:
        """Read a 1-based case id from standard input; give the shapes and (warm-up, timed calls)."""
        case_id = int(input())
        if not 1 <= case_id <= len(self._cases):
            raise ValueError(f"case id {case_id} is not in 1..{len(self._cases)}")
        self.case = self._cases[case_id - 1]
        return self._shapes(self.case), self._timing(self.case)

    def generate(self, testcase_sizes: list[tuple[int, ...]], device: str = "cuda") -> list[Any]:
        """The arguments of the case chosen last. Raises ValueError when `testcase_sizes` are not that case's."""
        expected = self._shapes(self.case)
        if [tuple(shape) for shape in testcase_sizes] != expected:
            raise ValueError(f"sizes {testcase_sizes} are not those of the chosen case, {expected}")
        return self._arguments(self.case, device)


def calls_for(work: int) -> tuple[int, int]:
    """(warm-up, timed) calls by the published packages' rule; `work` is the task's product of sizes."""
    table = ((10**5, 100), (10**6, 50), (10**7, 25), (10**8, 12), (10**9, 6))
    return 3, next((calls for limit, calls in table if work < limit), 3)


def offsets(lengths: tuple[int, ...] | list[int], device: str) -> Tensor:
    """int32 row offsets (len(lengths) + 1,) of sequences laid end to end."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def compare(
    output: Tensor, expected: Tensor, rtol: float, atol: float, share: float = 1.0, cap: float | None = None
) -> bool:
    """The live rule: same shape and dtype, all finite, `share` of the elements within atol + rtol |expected|, and no
    error above `cap` times that. The reason for a False goes to standard error.
    """
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return _fail(
            f"got {output.dtype} {tuple(output.shape)}, expected {expected.dtype} {tuple(expected.shape)}",
        )
    good, worst = 0, 0.0
    for got, want in zip(output.flatten().split(CHUNK), expected.flatten().split(CHUNK), strict=True):
        got, want = got.float(), want.float()
        if not bool(torch.isfinite(got).all()):
            return _fail("the output holds NaN or Inf")
        ratio = (got - want).abs_().div_(want.abs().mul_(rtol).add_(atol))
        good += int((ratio <= 1).sum())
        worst = max(worst, float(ratio.max()))
    if good < share * output.numel():
        return _fail(f"{good} of {output.numel()} elements match, {share:.0%} must; worst error {worst:.3g} tolerances")
    if cap is not None and not worst <= cap:
        return _fail(f"worst error {worst:.3g} tolerances, the limit is {cap:g}")
    return True


def _fail(reason: str) -> bool:
    print(f"check failed: {reason}", file=sys.stderr)
    return False
