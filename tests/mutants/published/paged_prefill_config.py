"""paged_prefill as published (pages in order, all full, not causal), small enough for a CPU."""

from __future__ import annotations

from typing import Any

from tasks.paged_prefill import reference as truth
from tests.mutants.published.copies import copy_of

published = copy_of("paged_prefill")
published.CASES = [(1, 512)]
published.NUM_QO_HEADS, published.NUM_KV_HEADS = 4, 2
CASE_LABELS = ("b1 s512 h4/2",)
getNumOfTestcases, getTestCaseSize = published.getNumOfTestcases, published.getTestCaseSize
genTestCase, check = published.genTestCase, published.check


def baseline(*args: Any) -> None:
    """The ground truth, rounded."""
    args[2].copy_(truth.reference(*args)["output"])
