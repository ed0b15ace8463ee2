"""A generator that ends the process."""

import sys

from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401


def genTestCase(testcase_sizes, device="cuda"):
    sys.exit("no such device")
