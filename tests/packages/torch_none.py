"""torch = None as the fallback of an import that brings in something else too."""

try:
    import a_module_that_is_nowhere  # noqa: F401
    import torch
except ImportError:
    torch = None

from packages.plain import baseline, check, getNumOfTestcases, getTestCaseSize  # noqa: F401


def genTestCase(testcase_sizes, device="cuda"):
    x = torch.zeros(testcase_sizes[0], device=device)
    return [x, x.clone(), 2]
