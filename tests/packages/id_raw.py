"""Reads the id past Python's stdin, from the descriptor, up to the end of the file."""

import os

from packages.plain import SHAPES, baseline, check, genTestCase, getNumOfTestcases  # noqa: F401

RECEIVED = []


def getTestCaseSize():
    data = b""
    while chunk := os.read(0, 100):
        data += chunk
    RECEIVED.append(data)
    return [SHAPES[int(data) - 1], SHAPES[int(data) - 1], ()], (3, 100)
