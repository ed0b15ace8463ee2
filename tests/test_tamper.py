"""Replaced functions are named; what torch does to itself is not."""

from __future__ import annotations

import builtins
import functools
import math
import random
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import guard, tamper

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tamper, "_taken", None)
    tamper.snapshot()


@pytest.mark.parametrize(
    ("holder", "key", "name"),
    [
        (time, "perf_counter", "time.perf_counter"),
        (time, "sleep", "time.sleep"),
        (builtins, "abs", "builtins.abs"),
        (math, "isfinite", "math.isfinite"),
        (random, "sample", "random.sample"),
        (statistics, "median", "statistics.median"),
        (torch, "allclose", "torch.allclose"),
        (torch, "isclose", "torch.isclose"),
        (torch, "isfinite", "torch.isfinite"),
        (torch.Tensor, "backward", "torch.Tensor.backward"),
        (torch.cuda, "Event", "torch.cuda.Event"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.Event.elapsed_time"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.testing, "assert_close", "torch.testing.assert_close"),
        (torch.nn.functional, "scaled_dot_product_attention", "torch.nn.functional.scaled_dot_product_attention"),
        (torch.profiler, "profile", "torch.profiler.profile"),
        (guard, "differences", "harness.guard.differences"),
        (guard.Buffers, "damage", "harness.guard.Buffers.damage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_replaced_function_is_named(monkeypatch: pytest.MonkeyPatch, holder: Any, key: str, name: str) -> None:
    real = getattr(holder, key)
    with monkeypatch.context() as patch:
        patch.setattr(holder, key, functools.wraps(real)(lambda *args, **options: True))
        assert name in tamper.changed()
    assert tamper.changed() == []


def test_methods_that_tensors_inherit_are_watched() -> None:
    assert "abs" not in vars(torch.Tensor)
    torch.Tensor.abs = lambda self: self  # type: ignore[method-assign]
    try:
        assert tamper.changed() == ["torch.Tensor.abs"]
    finally:
        del torch.Tensor.abs
    assert tamper.changed() == []


def test_a_deleted_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "equal")
    assert tamper.changed() == ["torch.equal"]


def test_a_package_loaded_from_disk_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("package_77")
    package.check = lambda *args: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "package_77", package)
    tamper.snapshot()
    package.check = lambda *args: True  # type: ignore[attr-defined]
    assert tamper.changed() == ["package_77.check"]


def test_new_names_flags_and_state_are_no_tampering() -> None:
    torch.something_new = lambda: None  # type: ignore[attr-defined]
    random.seed(3)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert tamper.changed() == []
    finally:
        del torch.something_new


def test_the_wrapper_that_torch_puts_around_manual_seed_is_no_tampering_but_another_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    assert tamper.changed() == ["torch.manual_seed"]
    monkeypatch.setattr(torch, "manual_seed", torch.random.seed)  # code that lies in torch's folder
    assert tamper.changed() == []


def test_ensure_keeps_an_earlier_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *args: True)
    tamper.ensure()
    assert tamper.changed() == ["torch.equal"]
    tamper.snapshot()
    assert tamper.changed() == []


WORKLOAD = """
from harness import judge, tamper
tamper.snapshot()
import numpy, torch, triton, triton.language as tl
from harness.cpu import triton_interpreter
triton_interpreter.install()
import torch._dynamo
x = torch.randn(1, 1, 4, 8)
torch.nn.functional.scaled_dot_product_attention(x, x, x)
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
print(tamper.changed())
"""


def test_real_libraries_raise_no_alarm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKLOAD],
        cwd=ROOT,
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.stdout == "[]\n", done.stderr
