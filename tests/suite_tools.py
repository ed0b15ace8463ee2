"""How the tests of the suites reach a config, choose a case and name its arguments."""

from __future__ import annotations

import functools
import importlib
import io
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import catalog
from harness.package import Package, load_package

TASKS = ("fused_moe", "kvcache_decode", "mla_decode", "paged_prefill", "ragged_prefill")
ATTENTION = TASKS[1:]
FILES = {"judge": "testcase_config", "live": "live_config", "tiny": "tiny_config", "demo": "demo_config"}


def config(task: str, suite: str) -> ModuleType:
    """The module of a suite."""
    return importlib.import_module(f"tasks.{task}.{FILES[suite]}")


def contract(task: str) -> ModuleType:
    """The module reference.py of a task."""
    return importlib.import_module(f"tasks.{task}.reference")


@functools.cache
def package(task: str, suite: str) -> Package:
    """A suite as the harness loads it."""
    return load_package(catalog.suite_path(task, suite))


def choose(module: ModuleType, text: str | int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """getTestCaseSize with `text` on standard input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}\n" if text != "" else ""))
    return module.getTestCaseSize()


def shapes(args: Sequence[Any]) -> list[tuple[int, ...]]:
    """Shape of every argument, () for a scalar."""
    return [tuple(arg.shape) if isinstance(arg, Tensor) else () for arg in args]


def same(one: Any, two: Any) -> bool:
    """Equal bit for bit, NaN included."""
    if not isinstance(one, Tensor):
        return bool(one == two)
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def named(task: str, args: Sequence[Any]) -> dict[str, Any]:
    """Arguments by name."""
    return dict(zip(contract(task).ARGUMENTS, args, strict=True))
