"""check that says why, on both streams."""

import sys

import torch
from packages.plain import baseline, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401


def check(testcase_sizes, original_inputs, target_args, baseline_args, rtol=1e-2, atol=1e-2):
    print("compared")
    good = torch.equal(target_args[1], baseline_args[1])
    if not good:
        print("max error too large", file=sys.stderr)
    return good
