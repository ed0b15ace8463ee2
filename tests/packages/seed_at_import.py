"""Seeds the global generator once, when it is imported."""

import torch
from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401

torch.manual_seed(5)


def genTestCase(testcase_sizes, device="cuda"):
    x = torch.rand(testcase_sizes[0], device=device)
    return [x, torch.zeros_like(x), 2]
