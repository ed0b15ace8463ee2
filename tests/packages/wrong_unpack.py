"""A generator that unpacks the sizes as if the timing came with them."""

import torch
from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401


def genTestCase(testcase_sizes, device="cuda"):
    sizes, (warmup, iters) = testcase_sizes
    assert warmup < iters
    return [torch.zeros(size, device=device) for size in sizes]
