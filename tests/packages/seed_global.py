"""Seeds the global generator in genTestCase, by a name that it imported."""

import torch
from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401
from torch import manual_seed


def genTestCase(testcase_sizes, device="cuda"):
    manual_seed(42)
    x = torch.rand(testcase_sizes[0], device=device)
    return [x, torch.zeros_like(x), 2]
