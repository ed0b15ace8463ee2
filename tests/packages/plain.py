"""A package without quirks: out = 2 x. Bare int(input()), and a bad id may wrap around by a negative index."""

import torch

SHAPES = [(4,), (8,), (6, 2)]
CASE = 0


def getNumOfTestcases():
    return len(SHAPES)


def getTestCaseSize():
    global CASE
    CASE = int(input())
    return [SHAPES[CASE - 1], SHAPES[CASE - 1], ()], (3, 100)


def genTestCase(testcase_sizes, device="cuda"):
    generator = torch.Generator(device=device)
    generator.manual_seed(20260610 + CASE)
    x = torch.rand(testcase_sizes[0], generator=generator, device=device)
    return [x, torch.zeros_like(x), 2]


def baseline(x, out, factor):
    out.copy_(factor * x)
    return [x, out, factor]


def check(testcase_sizes, original_inputs, target_args, baseline_args, rtol=1e-2, atol=1e-2):
    return torch.allclose(target_args[1], baseline_args[1], rtol=rtol, atol=atol)
