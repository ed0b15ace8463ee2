"""check without tolerance keywords, which looks at the inputs instead of the baseline."""

import torch
from packages.plain import baseline, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401


def check(testcase_sizes, original_inputs, target_args, baseline_args):
    assert torch.equal(original_inputs[0], target_args[0]), "input changed"
    return torch.equal(target_args[1], 2 * original_inputs[0])
