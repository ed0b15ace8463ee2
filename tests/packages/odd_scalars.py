"""Float, bool, None and numpy arguments; the list is a tuple."""

import numpy
import torch
from packages.plain import getNumOfTestcases  # noqa: F401


def getTestCaseSize():
    input()
    return ([(4,), (), (), (), ()], [0, 1])


def genTestCase(testcase_sizes, device="cuda"):
    return torch.ones(testcase_sizes[0], device=device), 0.5, True, None, numpy.int64(3)


def baseline(x, scale, flag, nothing, count):
    x.mul_(scale)


def check(testcase_sizes, original_inputs, target_args, baseline_args, rtol=1e-2, atol=1e-2):
    return torch.equal(target_args[0], baseline_args[0])
