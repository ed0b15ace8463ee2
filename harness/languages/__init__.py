"""One small interface to three languages: a file in, a callable out, or a named error.

Each module of this package offers

    variants(device) -> tuple[str, ...]     ways in which one file is to be run on that device, "" being the plain one
    load(path, arguments, device, variant, settings) -> Submission

and raises KernelFault (COMPILE_ERROR, LINT_ERROR, RESOURCE_LIMIT, ...) for a fault of the file, KitError for a fault of
the machine (a compiler or a package is missing).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.devices import Device


@dataclasses.dataclass
class Submission:
    """A loaded submission. `run(args)` enqueues one call with the judge's argument list and returns at once on a GPU.

    `run` raises KernelFault when the fault has a name (OUT_OF_BOUNDS, RACE, ...); any other exception is the
    submission's own and becomes RUNTIME_ERROR. `drain()` gives the counters since the last call (simulator only).
    """

    language: str
    path: Path
    run: Callable[[Sequence[Any]], None]
    notes: list[str] = dataclasses.field(default_factory=list)
    drain: Callable[[], dict[str, Any]] = dict


def module(language: str) -> Any:
    """The module of this package that serves a language."""
    return importlib.import_module(f"harness.languages.{language}")


def load(
    language: str,
    path: Path,
    arguments: Sequence[str],
    device: Device,
    variant: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Submission:
    """Load a submission file. `arguments`: the parameter names that its run_kernel must have, in order."""
    loaded: Submission = module(language).load(path, tuple(arguments), device, variant, dict(settings or {}))
    return loaded
