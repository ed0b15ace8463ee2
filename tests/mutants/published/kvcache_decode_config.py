"""kvcache_decode as published (as many KV heads as query heads, full caches), small enough for a CPU."""

from __future__ import annotations

from typing import Any

from tasks.kvcache_decode import reference as truth
from tests.mutants.published.copies import copy_of

published = copy_of("kvcache_decode")
published.CASES = [(2048, 1)]
published.NUM_HEADS, published.NUM_HEADS_K = 2, 2
CASE_LABELS = ("b1 s2048 h2/2",)
getNumOfTestcases, getTestCaseSize = published.getNumOfTestcases, published.getTestCaseSize
genTestCase, check = published.genTestCase, published.check


def baseline(*args: Any) -> None:
    """The ground truth, rounded."""
    args[3].copy_(truth.reference(*args)["output"])
