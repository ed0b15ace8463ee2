"""Import a Python submission from disk: shared by Triton and TileLang.

The file is imported, never exec-ed as text: Triton and TileLang read a kernel's source back through `inspect`, which
needs a real file behind the code. Every load gets a module name of its own, so two submissions never see each other.
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from harness import source
from harness.devices import Device
from harness.verdict import ExitCode, KernelFault, KitError, Verdict


def load_module(path: Path, device: Device) -> ModuleType:
    """Import `path` under a unique module name and set its DEVICE.

    DEVICE becomes `device.tuning` when the module's TUNING has that row; otherwise the file keeps what it says, as on
    the judge. Raises KitError when there is no such file, KernelFault(COMPILE_ERROR) when it does not import.
    """
    if not path.is_file():
        raise KitError(f"{path}: no such file; give the submission with FILE=.", ExitCode.MISSING_FILE)
    try:
        module = source.load_module(path, "submission")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and pytest-like BaseExceptions are the file's fault too
        raise KernelFault(Verdict.COMPILE_ERROR, describe(error, path)) from error
    tuning = getattr(module, "TUNING", None)
    if isinstance(tuning, dict) and device.tuning in tuning:
        vars(module)["DEVICE"] = device.tuning
    return module


def load_run_kernel(
    path: Path, arguments: Sequence[str], device: Device, settings: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The file's `run_kernel`, whose parameters are exactly `arguments` in that order.

    `settings["tuning"]` names a row of TUNING to run instead of the device's own; it must exist (KitError).
    Raises as `load_module` does, and KernelFault(COMPILE_ERROR) for a missing run_kernel or another signature.
    """
    tuning = (settings or {}).get("tuning")
    module = load_module(path, dataclasses.replace(device, tuning=tuning) if tuning else device)
    if tuning and vars(module).get("DEVICE") != tuning:
        raise KitError(f"{path.name}: TUNING has no row {tuning!r}; add it, or name one that is there.")
    function = getattr(module, "run_kernel", None)
    expected = f"run_kernel({', '.join(arguments)})"
    if function is None:
        raise KernelFault(Verdict.COMPILE_ERROR, f"{path.name}: expected {expected}, found no run_kernel.")
    if not isinstance(function, FunctionType):
        kind = type(function).__name__
        raise KernelFault(
            Verdict.COMPILE_ERROR,
            f"{path.name}: expected {expected} as a plain function, found run_kernel as a {kind}.",
        )
    signature = inspect.signature(function)
    star: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = tuple(star.get(parameter.kind, "") + name for name, parameter in signature.parameters.items())
    keyword_only = any(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in signature.parameters.values())
    if found != tuple(arguments) or keyword_only:
        reason = "keyword-only parameters cannot be passed by position" if keyword_only else _why(arguments, found)
        raise KernelFault(
            Verdict.COMPILE_ERROR,
            f"{path.name}:{function.__code__.co_firstlineno}: expected {expected}, "
            f"found run_kernel({', '.join(found)}): {reason}.",
        )
    return function


def _why(arguments: Sequence[str], found: Sequence[str]) -> str:
    """What separates two parameter lists, in words: missing, unexpected, or only out of order."""
    missing = [name for name in arguments if name not in found]
    unexpected = [name for name in found if name not in arguments]
    parts = []
    if missing:
        parts.append(f"missing {', '.join(missing)}")
    if unexpected:
        parts.append(f"unexpected {', '.join(unexpected)}")
    if parts:
        return "; ".join(parts)
    wrong = next((a, b) for a, b in zip(arguments, found, strict=True) if a != b)
    return f"wrong order, {wrong[1]} stands where {wrong[0]} belongs"


def line_of(error: BaseException, path: Path) -> int | None:
    """The line of `path` in which `error` arose: the innermost frame of its traceback that lies in that file."""
    target = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == target]
    return lines[-1] if lines else None


def describe(error: BaseException, path: Path) -> str:
    """One sentence for an exception of a submission: `file:line: what`, never a traceback."""
    if isinstance(error, SyntaxError) and (error.filename in (None, str(path.resolve())) or error.lineno is None):
        where = path.name if error.lineno is None else f"{path.name}:{error.lineno}"
        text = (error.text or "").strip()
        return f"{where}: {error.msg}: {text}" if text else f"{where}: {error.msg}"
    line = line_of(error, path)
    where = path.name if line is None else f"{path.name}:{line}"
    first = next((part.strip() for part in str(error).splitlines() if part.strip()), "")
    return f"{where}: {type(error).__name__}: {first}" if first else f"{where}: {type(error).__name__}"
