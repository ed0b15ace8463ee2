"""Case 2 calls exit(0)."""

import sys


def run_kernel(case, phase):
    if case == 2:
        sys.exit(0)
