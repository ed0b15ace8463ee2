"""Everything inside try/except: the failed import shows up as missing functions."""

try:
    import a_module_that_is_nowhere  # noqa: F401
    from packages.plain import baseline, check, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401
except Exception:
    pass
