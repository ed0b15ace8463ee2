"""Triton on the CPU. Triton decides at its import whether it interprets, so the cases run in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_interpreter_cases():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/triton_cpu_cases.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    passed = re.match(r"(\d+) passed", summary)
    assert passed, summary
    assert int(passed.group(1)) >= 32, summary
    assert "skipped" not in summary
