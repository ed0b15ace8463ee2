"""fused_moe, small and nasty: the whole int8 range, experts in any order, one never used, token_ids that mislead.

Runs on any device, on the same data. The expected output is reference.py's, rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tasks.common.suite import Suite, compare
from tasks.fused_moe import reference as truth

TILE = 128
INPUT_CLASS = ["INPUT"] * 8 + ["OUTPUT"]


class Case(NamedTuple):
    """`tiles`: expert of each 128-row tile; `extreme`: only -128 and 127 occur, and the corner sum is K * 2^14."""

    label: str
    seed: int
    experts: int
    n: int
    k: int
    tiles: tuple[int, ...]
    topk: int
    extreme: bool = False


CASES = (
    Case("one tile", 501, 3, 128, 128, (1,), 1),
    Case("experts unsorted", 502, 4, 256, 128, (3, 0, 3, 1), 8),
    Case("one expert for all", 503, 5, 128, 256, (4, 4, 4), 2),
    Case("every tile another expert", 504, 5, 128, 384, (2, 4, 0, 3, 1), 8),
    Case("extreme values", 505, 3, 256, 384, (2, 0), 3, extreme=True),
    Case("N over K", 506, 4, 384, 128, (1, 3, 1), 8),
)
CASE_LABELS = tuple(case.label for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    rows, experts, n, k = len(case.tiles) * TILE, case.experts, case.n, case.k
    return [(rows, k), (experts, n, k), (rows,), (experts, n), (rows,), (rows,), (len(case.tiles),), (), (rows, n)]


def _arguments(case: Case, device: str) -> list[Any]:
    generator = torch.Generator("cpu").manual_seed(case.seed)

    def integers(shape: tuple[int, ...]) -> torch.Tensor:
        if case.extreme:
            return (torch.randint(2, shape, generator=generator) * 255 - 128).to(torch.int8)
        return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)

    def scales(shape: tuple[int, ...]) -> torch.Tensor:  # of either sign
        sign = 1 - 2 * torch.randint(2, shape, generator=generator)
        return sign * (0.01 + 0.02 * torch.rand(shape, generator=generator))

    shapes = _shapes(case)
    rows = shapes[0][0]
    weights = 0.1 + torch.rand(rows, generator=generator)
    tensors = [
        integers(shapes[0]),
        integers(shapes[1]),
        scales(shapes[2]),
        scales(shapes[3]),
        weights,
        torch.randperm(rows, generator=generator).int(),  # rows of a, but in an order that must not be followed
        torch.tensor(case.tiles, dtype=torch.int32),
    ]
    if case.extreme:
        tensors[0][0], tensors[1][:, 0] = -128, -128
    out = torch.empty(shapes[8], dtype=torch.bfloat16, device=device)
    return [*(tensor.to(device) for tensor in tensors), case.topk, out]


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: (1, 10))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate


def baseline(*args: Any) -> None:
    """The ground truth, rounded to bf16."""
    args[-1].copy_(truth.reference(*args)["out"])


def check(
    testcase_sizes: list[Any],
    original_inputs: list[Any],
    target_args: list[Any],
    baseline_args: list[Any],
    rtol: float = 1e-2,
    atol: float = 1e-2,
) -> bool:
    """Every element within the judge's tolerance."""
    return compare(target_args[8], baseline_args[8], rtol, atol)
