"""Holds on to the stdin object that it saw when it was imported."""

from sys import stdin

from packages.plain import SHAPES, baseline, check, genTestCase, getNumOfTestcases  # noqa: F401


def getTestCaseSize():
    case = int(stdin.readline())
    return [SHAPES[case - 1], SHAPES[case - 1], ()], (3, 100)
