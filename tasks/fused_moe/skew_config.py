"""fused_moe under more and less skew, sorted and unsorted: does each expert's weight leave DRAM once, and what is lost?

    make bench TASK=fused_moe CONFIG=tasks/fused_moe/skew_config.py

Experts of the tiles are drawn with probability proportional to 1 / rank^exponent over a random ranking: 0 is uniform,
1.2 the judge suite's skew, 2 more than any router is let do. An unsorted case has the sorted one's tiles, shuffled.
Data, scales, baseline and check are the judge suite's; seeds are ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tasks.common.suite import Suite
from tasks.fused_moe import testcase_config as judge

BASE_SEED = 20260870
INPUT_CLASS = judge.INPUT_CLASS


class Case(NamedTuple):
    """`exponent` of the ranks; `order` of the tiles: "sorted" by expert or "unsorted"."""

    em: int
    n: int
    k: int
    exponent: float
    order: str


CASES = tuple(
    Case(em, 4096, 7168, exponent, order)
    for em in (32768, 4096)
    for exponent in (0.0, 1.2, 2.0)
    for order in ("sorted", "unsorted")
)
CASE_LABELS = tuple(f"EM{case.em} Zipf {case.exponent:g} {case.order}" for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return judge.argument_shapes(case.em, case.n, case.k)


def tile_experts(tiles: int, experts: int, exponent: float, order: str, generator: torch.Generator) -> Tensor:
    """(tiles,) int32: the expert of each row tile."""
    device = generator.device
    rank = torch.randperm(experts, generator=generator, device=device) + 1
    drawn = torch.multinomial(rank.double() ** -exponent, tiles, replacement=True, generator=generator).sort().values
    if order == "unsorted":
        drawn = drawn[torch.randperm(tiles, generator=generator, device=device)]
    return drawn.int()


def _arguments(case: Case, device: str) -> list[Any]:
    args = judge.allocate(_shapes(case), device)
    # The same seed for both orders, so that they have the same tiles.
    generator = torch.Generator(device).manual_seed(BASE_SEED + round(10 * case.exponent))
    judge.fill(args, generator)
    args[6].copy_(tile_experts(len(args[6]), len(args[1]), case.exponent, case.order, generator))
    return args


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: judge.TIMING)
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
baseline, check = judge.baseline, judge.check
