"""Two outputs, a 0-dim one among them, and a workspace that nobody checks."""

import torch
from packages.plain import getNumOfTestcases  # noqa: F401

INPUT_CLASS = ["INPUT", "OUTPUT", "OUTPUT", "INOUT", "INPUT"]


def getTestCaseSize():
    input()
    return [(4,), (4,), (), (2,), ()], (3, 100)


def genTestCase(testcase_sizes, device="cuda"):
    shapes = testcase_sizes[:4]
    return [*(torch.ones(shape, device=device) for shape in shapes), 2]


def baseline(x, out, total, workspace, factor):
    out.copy_(x * factor)
    total.copy_(out.sum())
    workspace.zero_()


def check(testcase_sizes, original_inputs, target_args, baseline_args, rtol=1e-2, atol=1e-2):
    return torch.equal(target_args[1], baseline_args[1]) and torch.equal(target_args[2], baseline_args[2])
