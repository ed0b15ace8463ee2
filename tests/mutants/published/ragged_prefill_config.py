"""ragged_prefill as published (uniform values, one length, causal), small enough for a CPU."""

from __future__ import annotations

from typing import Any

from tasks.ragged_prefill import reference as truth
from tests.mutants.published.copies import copy_of

published = copy_of("ragged_prefill")
published.CASES = [(1, 512)]
published.NUM_QO_HEADS, published.NUM_KV_HEADS = 8, 2
CASE_LABELS = ("b1 s512 h8/2",)
INPUT_CLASS = published.INPUT_CLASS
getNumOfTestcases, getTestCaseSize = published.getNumOfTestcases, published.getTestCaseSize
genTestCase, check = published.genTestCase, published.check


def baseline(*args: Any) -> None:
    """The ground truth, rounded."""
    args[3].copy_(truth.reference(*args)["output"])
