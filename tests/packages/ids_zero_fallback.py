"""Ids from 0; a bad one silently means the first case."""

from packages.plain import SHAPES, baseline, check, genTestCase, getNumOfTestcases  # noqa: F401


def getTestCaseSize():
    case = int(input())
    case = case if 0 <= case < len(SHAPES) else 0
    return [SHAPES[case], SHAPES[case], ()], (3, 100)
