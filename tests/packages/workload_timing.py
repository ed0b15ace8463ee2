"""getWorkload of (sizes, timing); the memory by one of the two functions."""

from packages.plain import baseline, check, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401


def getWorkload(testcase):
    sizes, (warmup, iters) = testcase
    return {"flops": sizes[0][0] + warmup + iters, "memory_bytes": 32, "dtype": "bf16"}


def getDesignedVramSize():
    return 16.5
