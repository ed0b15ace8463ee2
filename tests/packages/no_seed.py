"""Draws from the global generator and never seeds it."""

import torch
from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401


def genTestCase(testcase_sizes, device="cuda"):
    x = torch.rand(testcase_sizes[0], device=device)
    return [x, torch.zeros_like(x), 2]
