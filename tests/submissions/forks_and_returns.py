"""Case 2 forks, and both processes come back to the harness."""

import os


def run_kernel(case, phase):
    if case == 2:
        os.fork()
