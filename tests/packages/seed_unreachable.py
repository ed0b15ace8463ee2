"""Draws from a generator that no seeding call reaches: the same data whatever the shift."""

import torch
from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401


def genTestCase(testcase_sizes, device="cuda"):
    torch.default_generator.manual_seed(4)
    x = torch.rand(testcase_sizes[0]).to(device)
    return [x, torch.zeros_like(x), 2]
