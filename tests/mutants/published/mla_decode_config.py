"""mla_decode as published (both rope parts zero, rows in order, one length), small enough for a CPU."""

from __future__ import annotations

from typing import Any

from tasks.mla_decode import reference as truth
from tests.mutants.published.copies import copy_of

published = copy_of("mla_decode")
published.CASES = [(16, 1, 1024)]
CASE_LABELS = ("h16 b1 s1024",)
getNumOfTestcases, getTestCaseSize = published.getNumOfTestcases, published.getTestCaseSize
genTestCase, check = published.genTestCase, published.check


def baseline(*args: Any) -> None:
    """The ground truth, rounded."""
    args[4].copy_(truth.reference(*args)["output"])
