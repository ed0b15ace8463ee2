"""A baseline that imports its library when it is called."""

from packages.plain import check, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401


def baseline(x, out, factor):
    from a_module_that_is_nowhere.inner import function

    return function(x, out, factor)
