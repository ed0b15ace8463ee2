"""fused_moe: the cases whose accesses the simulator counts for the README, in the format of a suite.

Two row tiles of one expert, two column tiles; K as long as it takes for the loop to outweigh the rest.
"""

from __future__ import annotations

from tasks.common.suite import Suite
from tasks.fused_moe import tiny_config
from tasks.fused_moe.tiny_config import INPUT_CLASS, Case, baseline, check

__all__ = ["INPUT_CLASS", "baseline", "check"]

CASES = (
    Case("EM256 N256 K1024, one expert", 591, 2, 256, 1024, (1, 1), 8),
    Case("EM512 N256 K512, four experts", 592, 4, 256, 512, (3, 0, 2, 1), 8),
)
CASE_LABELS = tuple(case.label for case in CASES)
TILE = "128 x 128 of the output by 128 of K"
TILES = tuple(len(case.tiles) * case.n // 128 * case.k // 128 for case in CASES)

SUITE = Suite(CASES, tiny_config._shapes, tiny_config._arguments, timing=lambda case: (1, 10))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
