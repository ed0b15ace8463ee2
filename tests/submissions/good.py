"""Passes, and prints on every way out, from C too."""

import ctypes
import os
import sys


def run_kernel(case, phase):
    print(f"python {case} \u2713")
    print(f"error {case}", file=sys.stderr)
    ctypes.CDLL(None).printf(b"libc %d\n", case)
    os.write(1, f"write {case}\n".encode())
