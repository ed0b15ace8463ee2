"""check whose tolerances have no defaults; it answers with a 0-dim tensor."""

import torch
from packages.plain import baseline, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401


def check(testcase_sizes, original_inputs, target_args, baseline_args, rtol, atol):
    return torch.isclose(target_args[1], baseline_args[1], rtol=rtol, atol=atol).all()
