"""Data from Python's random and numpy's two interfaces."""

import random

import numpy as np
import torch
from packages.plain import check, getNumOfTestcases  # noqa: F401


def getTestCaseSize():
    input()
    return [(4,), (4,), (4,)], (3, 100)


def genTestCase(testcase_sizes, device="cuda"):
    random.seed(1)
    np.random.seed(2**32 - 1)
    first = torch.tensor([random.random() for _ in range(4)])
    second = torch.from_numpy(np.random.rand(4))
    third = torch.from_numpy(np.random.default_rng(3).random(4))
    return [first.to(device), second.to(device), third.to(device)]


def baseline(first, second, third):
    return [first, second, third]
