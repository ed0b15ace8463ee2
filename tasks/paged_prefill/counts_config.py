"""paged_prefill: the cases whose accesses the simulator counts for the README, in the format of a suite.

A few row tiles against a few hundred keys, whole tiles of both; one KV head of the published suite.
"""

from __future__ import annotations

from tasks.common.suite import Suite
from tasks.paged_prefill import tiny_config
from tasks.paged_prefill.tiny_config import INPUT_CLASS, Case, baseline, check

__all__ = ["INPUT_CLASS", "baseline", "check"]

CASES = (
    Case("q256 kv512 page 16, 8 / 1 heads", 291, 16, (256,), (512,), (8, 1), 128, 0),
    Case("the same, causal", 292, 16, (256,), (512,), (8, 1), 128, 1),
)
CASE_LABELS = tuple(case.label for case in CASES)
TILE = "128 rows, which are 16 queries of 8 heads, by 64 keys"
# One that the mask hides altogether is left out.
TILES = (16 * 8, sum(-(-(256 + 16 * (row + 1)) // 64) for row in range(16)))

SUITE = Suite(CASES, tiny_config._shapes, tiny_config._arguments, timing=lambda case: (1, 10))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
