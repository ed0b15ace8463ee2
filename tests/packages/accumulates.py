"""An OUTPUT that must keep its generated contents: the kernel only adds to it."""

import torch
from packages.plain import check, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401

INPUT_CLASS = ("INPUT", "OUTPUT", "INPUT")


def baseline(x, out, factor):
    out += x * factor
    assert torch.is_tensor(out)
