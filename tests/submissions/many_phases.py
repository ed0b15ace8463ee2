"""Case 2 never ends, but goes on to another phase twice a second."""

import itertools
import time


def run_kernel(case, phase):
    for number in itertools.count() if case == 2 else ():
        phase(("run", "check")[number % 2])
        time.sleep(0.5)
