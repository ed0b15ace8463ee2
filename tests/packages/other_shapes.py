"""A generator whose tensor is not of the announced shape."""

import torch
from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401


def genTestCase(testcase_sizes, device="cuda"):
    return [torch.ones(5, device=device), torch.zeros(5, device=device), 2]
