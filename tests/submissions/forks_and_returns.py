"""Case 2 forks, and the child comes back to the harness with an error while its parent waits for it."""

import os


def run_kernel(case, phase):
    if case == 2:
        child = os.fork()
        if child == 0:
            raise RuntimeError("this is the child")
        os.waitpid(child, 0)
