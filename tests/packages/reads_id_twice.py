"""Asks for the id again where there is none."""

from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401


def genTestCase(testcase_sizes, device="cuda"):
    return [int(input())]
