"""genTestCase takes the sizes alone and makes its tensors wherever it likes."""

import torch
from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401


def genTestCase(testcase_sizes):
    x = torch.ones(testcase_sizes[0])
    return [x, torch.zeros_like(x), 2]
