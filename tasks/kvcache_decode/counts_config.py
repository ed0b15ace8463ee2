"""kvcache_decode: the cases whose accesses the simulator counts for the README, in the format of a suite.

A length that one split takes (17 keys) and lengths that many share; heads of the published suite and of the live one.
"""

from __future__ import annotations

from tasks.common.suite import Suite
from tasks.kvcache_decode import tiny_config
from tasks.kvcache_decode.tiny_config import INPUT_CLASS, Case, baseline, check

__all__ = ["INPUT_CLASS", "baseline", "check"]

CASES = (
    Case("b1 s17, 8 / 8 heads", 491, (8, 8), 128, 16, (17,), 2),
    Case("b1 s4096, 8 / 8 heads", 492, (8, 8), 128, 16, (4096,), 257),
    Case("b16 s4096, 32 / 4 heads", 493, (32, 4), 128, 16, (4096,) * 16, 257),
)
CASE_LABELS = tuple(case.label for case in CASES)
TILE = "128 keys of one KV head and its query heads"
TILES = tuple(sum(-(-length // 128) for length in case.lengths) * case.heads[1] for case in CASES)

SUITE = Suite(CASES, tiny_config._shapes, tiny_config._arguments, timing=lambda case: (1, 10))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
