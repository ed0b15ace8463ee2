"""fused_moe as the judge draws it (values in [-20, 20], 99 % rule), small enough for a CPU."""

from __future__ import annotations

from typing import Any

from tasks.fused_moe import reference as truth
from tests.mutants.published.copies import copy_of

published = copy_of("fused_moe")
published.E = 8
published.CASES = [(128 * 128, 128, 128, "skewed")]
CASE_LABELS = ("EM16384 N128 K128",)
INPUT_CLASS = published.INPUT_CLASS
getNumOfTestcases, getTestCaseSize = published.getNumOfTestcases, published.getTestCaseSize
genTestCase, check = published.genTestCase, published.check


def baseline(*args: Any) -> None:
    """The ground truth, rounded."""
    args[8].copy_(truth.reference(*args)["out"])
