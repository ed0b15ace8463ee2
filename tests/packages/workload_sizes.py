"""getWorkload of the sizes, with float flops and no dtype."""

from packages.plain import baseline, check, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401

DESIGNED_VRAM_SIZE = 48


def getWorkload(testcase_sizes):
    return {"flops": 2.0 * testcase_sizes[0][0], "memory_bytes": 32}
