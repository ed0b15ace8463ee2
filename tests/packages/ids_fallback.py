"""Ids from 1; a bad one, or none, silently means the first case."""

from packages.plain import SHAPES, baseline, check, genTestCase, getNumOfTestcases  # noqa: F401


def getTestCaseSize():
    try:
        case = int(input())
    except (EOFError, ValueError):
        case = 1
    case = case if 1 <= case <= len(SHAPES) else 1
    return [SHAPES[case - 1], SHAPES[case - 1], ()], (3, 100)
