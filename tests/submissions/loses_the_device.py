"""After case 2 the device does not answer any more; prints the process that each case ran in."""

import os

LOST = []


def run_kernel(case, phase):
    print(os.getpid())
    if case == 2:
        LOST.append(True)
