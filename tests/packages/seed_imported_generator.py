"""Its generator class is imported by name, under another name."""

import torch
from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401
from torch import Generator as Source


def genTestCase(testcase_sizes, device="cuda"):
    x = torch.rand(testcase_sizes[0], generator=Source(device=torch.device(device)).manual_seed(3), device=device)
    return [x, torch.zeros_like(x), 2]
