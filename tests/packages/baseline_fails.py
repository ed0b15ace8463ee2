"""A baseline with a bug of its own."""

from packages.plain import check, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401


def baseline(x, out, factor):
    return {}["missing"]
