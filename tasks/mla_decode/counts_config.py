"""mla_decode: the cases whose accesses the simulator counts for the README, in the format of a suite.

A sequence in the shortest parts there are, four in parts that fill the chip, and so many that none is cut.
"""

from __future__ import annotations

from tasks.common.suite import Suite
from tasks.mla_decode import tiny_config
from tasks.mla_decode.tiny_config import INPUT_CLASS, Case, baseline, check

__all__ = ["INPUT_CLASS", "baseline", "check"]

CASES = (
    Case("h64 b1 s1024", 391, 64, 1, (1024,)),
    Case("h64 b4 s4096", 392, 64, 1, (4096,) * 4),
    Case("h64 b104 s512", 393, 64, 64, (512,) * 104),
)
CASE_LABELS = tuple(case.label for case in CASES)
TILE = "64 heads by 32 keys"
TILES = tuple(sum(-(-length // 32) for length in case.kv_lens) for case in CASES)

SUITE = Suite(CASES, tiny_config._shapes, tiny_config._arguments, timing=lambda case: (1, 10))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
