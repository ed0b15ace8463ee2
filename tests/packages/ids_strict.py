"""Ids from 1; a bad one raises."""

from packages.plain import SHAPES, baseline, check, genTestCase, getNumOfTestcases  # noqa: F401


def getTestCaseSize():
    case = int(input())
    if not 1 <= case <= len(SHAPES):
        raise ValueError(f"no case {case}")
    return [SHAPES[case - 1], SHAPES[case - 1], ()], (3, 100)
