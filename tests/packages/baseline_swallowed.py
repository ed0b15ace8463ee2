"""A baseline whose library is None after a failed import at the top."""

from packages.plain import check, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401

try:
    import a_module_that_is_nowhere as library
except ImportError:
    library = None


def baseline(x, out, factor):
    return library.function(x, out, factor)
