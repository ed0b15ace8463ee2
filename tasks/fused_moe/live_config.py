"""fused_moe under other routings than the judge suite's: tiles in no order, no expert twice, one expert for all.

Nothing is known about how the running judge differs from the published shapes, so these are its four shapes under
routings that its contract allows. Data, scales, baseline and check are the judge suite's; seeds are ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tasks.common.suite import Suite
from tasks.fused_moe import testcase_config as judge

BASE_SEED = 20260860
INPUT_CLASS = judge.INPUT_CLASS


class Case(NamedTuple):
    """`routing`: "unsorted" (the judge's skew, tiles shuffled), "distinct" (no expert twice), "single" (one)."""

    em: int
    n: int
    k: int
    routing: str


CASES = (
    Case(4096, 4096, 7168, "distinct"),
    Case(32768, 4096, 7168, "unsorted"),
    Case(4096, 7168, 2048, "single"),
    Case(32768, 7168, 2048, "distinct"),
)
CASE_LABELS = tuple(f"EM{case.em} N{case.n} K{case.k} {case.routing}" for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return judge.argument_shapes(case.em, case.n, case.k)


def _arguments(case: Case, device: str) -> list[Any]:
    args = judge.allocate(_shapes(case), device)
    generator = torch.Generator(device).manual_seed(BASE_SEED + CASES.index(case))
    judge.fill(args, generator)
    experts = args[6]
    tiles = len(experts)
    order = torch.randperm(judge.E, generator=generator, device=device)
    if case.routing == "distinct":
        experts.copy_(order[:tiles])
    elif case.routing == "single":
        experts.copy_(order[:1].expand(tiles))
    else:
        drawn = judge.tile_experts(tiles, judge.E, True, generator)
        experts.copy_(drawn[torch.randperm(tiles, generator=generator, device=device)])
    return args


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: judge.TIMING)
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
baseline, check = judge.baseline, judge.check
