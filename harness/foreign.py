"""Keeping foreign code (a judge package) apart from the harness: its imports, its stdin, its seeds, its torch flags.

A package is written for a process of its own. Here several of its functions are called in one process, so everything
that it can change globally is put back after each call, and given back to it before the next.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from harness.source import load_module


def swallowed_error(path: Path) -> str:
    """The exception that a try/except around the whole file swallowed, found by a second run under a trace."""
    seen: list[str] = []

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != str(path) or frame.f_code.co_name != "<module>":
            return None
        if event == "exception":
            seen.append(f"{arg[0].__name__}: {arg[1]}, line {frame.f_lineno}")
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(Exception):
            load_module(path, "package_again")
    finally:
        sys.settrace(previous)
    return seen[0] if seen else ""


def missing_modules(path: Path) -> list[str]:
    """Root modules that a file imports somewhere and that are not installed, in the order of the file."""
    roots: dict[str, None] = {}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            roots.update(dict.fromkeys(alias.name.split(".")[0] for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots[node.module.split(".")[0]] = None
    return [root for root in roots if root not in sys.modules and importlib.util.find_spec(root) is None]


@contextlib.contextmanager
def stdin_of(text: str) -> Iterator[None]:
    """Within the block, file descriptor 0 is a pipe that holds exactly `text`, and sys.stdin is fresh on top of it.

    The text must fit a pipe (64 KiB). Both are put back afterwards, a closed descriptor included.
    """
    try:
        saved = os.dup(0)
    except OSError:
        saved = -1
    read_end, write_end = os.pipe()
    os.write(write_end, text.encode("utf-8"))
    os.close(write_end)
    if read_end != 0:
        os.dup2(read_end, 0)
        os.close(read_end)
    old, old_original = sys.stdin, sys.__stdin__
    fresh = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdin = fresh
    sys.__stdin__ = fresh  # type: ignore[misc]
    try:
        yield
    finally:
        sys.stdin = old
        sys.__stdin__ = old_original  # type: ignore[misc]
        # Not closed: a package may have kept it (`from sys import stdin`); it holds no descriptor of its own.
        if saved >= 0:
            os.dup2(saved, 0)
            os.close(saved)
        else:
            with contextlib.suppress(OSError):
                os.close(0)


# The order matters: torch refuses to read allow_tf32 while it disagrees with the newer fp32_precision, and setting the
# older name also sets the newer one, so the newer one comes last.
_FLAGS = (
    ("backends.cuda.matmul", "allow_tf32"),
    ("backends.cudnn", "allow_tf32"),
    ("backends.cuda.matmul", "fp32_precision"),
    ("backends.cudnn", "fp32_precision"),
    ("backends.cudnn.conv", "fp32_precision"),
    ("backends.cuda.matmul", "allow_fp16_reduced_precision_reduction"),
    ("backends.cuda.matmul", "allow_bf16_reduced_precision_reduction"),
    ("backends.cudnn", "benchmark"),
    ("backends.cudnn", "deterministic"),
    ("backends.cudnn", "enabled"),
)
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_num_threads, torch.set_num_threads),
)


def _holder(path: str) -> Any:
    holder: Any = torch
    for name in path.split("."):
        holder = getattr(holder, name, None)
    return holder


class TorchFlags:
    """torch's global switches that a package may turn: TF32, cuDNN, default dtype and device, grad mode, threads."""

    def __init__(self) -> None:
        """Takes the state of this moment."""
        self._flags: dict[tuple[str, str], Any] = {}
        for path, name in _FLAGS:
            # Absent in some versions of torch; RuntimeError while old and new TF32 names disagree.
            with contextlib.suppress(AttributeError, RuntimeError):
                self._flags[path, name] = getattr(_holder(path), name)
        self._switches = [read() for read, _ in _SWITCHES]
        self._device = torch.get_default_device()

    def apply(self) -> None:
        """Makes the taken state current again; touches nothing that already agrees."""
        now = TorchFlags()
        if self._flags != now._flags:
            for (path, name), value in self._flags.items():
                with contextlib.suppress(AttributeError, RuntimeError):
                    setattr(_holder(path), name, value)
        for (_, write), wanted, current in zip(_SWITCHES, self._switches, now._switches, strict=True):
            if wanted != current:
                write(wanted)
        if self._device != now._device:
            torch.set_default_device(None if self._device.type == "cpu" else self._device)


def start_gpu() -> None:
    """Initialises torch's GPU side, so that its random generators exist."""
    cuda: Any = torch.cuda
    cuda.init()


class RandomState:
    """The global random generators: torch's (every initialised device), Python's, and numpy's where it is loaded."""

    def __init__(self) -> None:
        """Takes the state of this moment."""
        cuda: Any = torch.cuda  # parts of it carry no types
        self._torch = torch.get_rng_state()
        self._cuda = cuda.get_rng_state_all() if cuda.is_initialized() else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def apply(self) -> None:
        """Makes the taken state current again."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def reseed_globals(seed: int) -> None:
    """Seeds the global random generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


class _Seeds:
    """Replaces every seeding function by one that adds `shift` to the seed; see `seeds`."""

    def __init__(self) -> None:
        self.shift = 0
        self._inside = False

    def seed(self, seed: Any, bits: int = 64) -> Any:
        """`seed` moved by the shift, wrapped into what the function takes; None (no seed) stays None."""
        if not self.shift or seed is None:
            return seed
        if isinstance(seed, (list, tuple)):
            return [*seed, self.shift]
        try:
            moved = int(seed) + self.shift
        except (TypeError, ValueError):  # random.seed takes strings and bytes
            return f"{seed!r}{self.shift:+d}"
        lowest = -(2**63) if bits == 64 else 0
        return moved if lowest <= moved < 2**bits else moved % 2**bits

    def wrap(self, function: Callable[..., Any], bits: int = 64) -> Callable[..., Any]:
        """`function(seed, ...)` with the seed moved, unless it is called from inside another such function."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # torch.manual_seed calls torch.cuda.manual_seed_all: one shift must not become two.
            if not self.shift or self._inside:
                return function(*args, **kwargs)
            if args:
                args = (self.seed(args[0], bits), *args[1:])
            for name in {"seed", "a"} & kwargs.keys():
                kwargs[name] = self.seed(kwargs[name], bits)
            self._inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False

        return wrapped


_seeds = _Seeds()
_PlainGenerator = torch.Generator


class ShiftedGenerator(torch.Generator):
    """torch.Generator whose manual_seed adds the current shift. torch's own type cannot be patched in place."""

    def manual_seed(self, seed: int) -> ShiftedGenerator:
        """Seeds with `seed` plus the shift in force; returns self, as torch's does."""
        super().manual_seed(_seeds.seed(seed))
        return self


def _replacements() -> list[tuple[Any, str, Any]]:
    """(holder, name, replacement) of every seeding function of torch, random and (where it is loaded) numpy."""
    table: list[tuple[Any, str, Any]] = [(torch, "Generator", ShiftedGenerator)]
    table += [(holder, "manual_seed", _seeds.wrap(torch.manual_seed)) for holder in (torch, torch.random)]
    for name in ("manual_seed", "manual_seed_all"):
        wrapped = _seeds.wrap(getattr(torch.cuda, name))
        table += [(holder, name, wrapped) for holder in (torch.cuda, torch.cuda.random)]
    table.append((random, "seed", _seeds.wrap(random.seed)))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        table.append((numpy.random, "seed", _seeds.wrap(numpy.random.seed, bits=32)))
        table.append((numpy.random, "default_rng", _seeds.wrap(numpy.random.default_rng)))
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" or name == __name__:
            continue
        # Others may hold torch.Generator by `from torch import Generator`.
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is _PlainGenerator:
                table.append((module, key, ShiftedGenerator))
    return table


@contextlib.contextmanager
def seeds(shift: int = 0) -> Iterator[None]:
    """Within the block every seeding call made by name uses its seed plus `shift`.

    Covers torch.Generator(...).manual_seed, torch.manual_seed, torch.cuda.manual_seed(_all), random.seed and numpy's
    seed and default_rng. A module executed inside such a block (with shift 0, say) keeps the replaced
    functions in its `from torch import Generator`, and so obeys the shift of later blocks too.
    """
    if torch.Generator is ShiftedGenerator:
        raise RuntimeError("seeds() does not nest")
    saved = []
    for holder, name, replacement in _replacements():
        saved.append((holder, name, getattr(holder, name)))
        setattr(holder, name, replacement)
    _seeds.shift = shift
    try:
        yield
    finally:
        _seeds.shift = 0
        for holder, name, original in saved:
            setattr(holder, name, original)
