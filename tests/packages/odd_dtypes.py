"""fp8, uint8, bool, int64 and float64 tensors, one of them empty and one 0-dim."""

import torch
from packages.plain import getNumOfTestcases  # noqa: F401

DTYPES = (torch.float8_e4m3fn, torch.uint8, torch.bool, torch.int64, torch.float64)


def getTestCaseSize():
    input()
    return [(3,), (0, 2), (), (2, 2), (5,)], (1, 1)


def genTestCase(testcase_sizes, device="cuda"):
    generator = torch.Generator(device).manual_seed(1)
    draws = [torch.randint(0, 2, size, generator=generator, device=device) for size in testcase_sizes]
    return [draw.to(dtype) for draw, dtype in zip(draws, DTYPES, strict=True)]


def baseline(*args):
    return None


def check(testcase_sizes, original_inputs, target_args, baseline_args, rtol=1e-2, atol=1e-2):
    return all(a.dtype is b.dtype for a, b in zip(original_inputs, baseline_args, strict=True))
