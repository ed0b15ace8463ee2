"""The model that runs the Hopper variants in Triton. Some of it needs an interpreting Triton: a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import plan
from harness.devices import Device
from harness.languages import triton
from harness.verdict import ExitCode, KitError

ROOT = Path(__file__).resolve().parent.parent


def test_right_kernels_pass_and_each_planted_fault_shows() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gluon_model_cases.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    passed = re.match(r"(\d+) passed", summary)
    assert passed, summary
    assert int(passed.group(1)) >= 30, summary
    assert "skipped" not in summary


def test_a_triton_without_gluon_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = triton.importlib.import_module

    def missing(name: str) -> Any:
        if "gluon" in name:
            raise ImportError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(triton.importlib, "import_module", missing)
    with pytest.raises(KitError, match=r"need Gluon, as in Triton 3\.6 and 3\.7, and this is \d") as caught:
        triton._needs_gluon()
    assert caught.value.code == ExitCode.ENVIRONMENT


def test_another_gpu_is_refused_and_a_cpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    request = plan.Request(task="mla_decode", language="triton", variant="hopper")
    with pytest.raises(KitError, match=r"compute capability 9\.x") as caught:
        plan.make(request, Device("cuda", "cuda", "A100", "sm80"))
    assert caught.value.code == ExitCode.NEEDS_DEVICE
    jobs = plan.make(request, Device("cpu", "cpu", "CPU", "c500")).jobs
    assert [(job.variant, Path(job.submission).name, job.settings["lint"]) for job in jobs] == [
        ("hopper", "hopper.py", False)  # the judge's sandbox has no say in it
    ]
