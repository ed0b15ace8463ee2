"""check that forgets to answer."""

from packages.plain import baseline, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401


def check(testcase_sizes, original_inputs, target_args, baseline_args, rtol=1e-2, atol=1e-2):
    assert len(target_args) == len(baseline_args)
