"""Case 2 reads address 0."""

import ctypes


def run_kernel(case, phase):
    if case == 2:
        ctypes.string_at(0)
