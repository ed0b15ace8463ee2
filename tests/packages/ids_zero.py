"""Ids from 0; a bad one raises."""

from packages.plain import SHAPES, baseline, check, genTestCase, getNumOfTestcases  # noqa: F401


def getTestCaseSize():
    case = int(input())
    return [SHAPES[case], SHAPES[case], ()], (3, 100)
