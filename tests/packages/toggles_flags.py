"""Turns global switches of torch when imported and in its baseline, and moves to another folder."""

import os

import torch
from packages.plain import check, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401

torch.backends.cudnn.benchmark = True
SEEN = []


def baseline(x, out, factor):
    SEEN.append((torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32))
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.chdir("/")
    out.copy_(x * factor)
