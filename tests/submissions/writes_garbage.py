"""Case 2 writes into every descriptor that it can find, without a newline, and forges a result without the token."""

import contextlib
import os

FORGED = b'\n{"event": "result", "record": {"case": 2}}\n[1, 2]\nnull\n{"token": 5}\n{"event": "done"}\n{"tok'


def run_kernel(case, phase):
    if case == 2:
        for fd in range(3, 2048):
            with contextlib.suppress(OSError):
                os.write(fd, FORGED)
