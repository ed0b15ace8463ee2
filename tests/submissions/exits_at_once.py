"""Case 2 ends the process with status 0, past every handler."""

import os


def run_kernel(case, phase):
    if case == 2:
        print("goodbye")
        os._exit(0)
