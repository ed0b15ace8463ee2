"""Triton submissions: compiled on a GPU, interpreted (harness/cpu/triton_interpreter.py) without one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.devices import Device
from harness.languages import Submission
from harness.languages.python_source import describe, load_run_kernel
from harness.verdict import ExitCode, KernelFault, KitError, Verdict


def variants(device: Device) -> tuple[str, ...]:
    """A Triton file runs in one way on every device."""
    return ("",)


def load(path: Path, arguments: Sequence[str], device: Device, variant: str, settings: Mapping[str, Any]) -> Submission:
    """Import a Triton submission.

    Without a GPU the environment must have had TRITON_INTERPRET=1 before Triton was first imported (Triton decides at
    that moment what its own library functions are), and with one it must not. Raises KitError for that and for a
    missing Triton, KernelFault(COMPILE_ERROR) for a file that does not import or has another signature.
    """
    try:
        runtime: Any = importlib.import_module("triton.runtime")
        standard: Any = importlib.import_module("triton.language.standard")
    except ImportError as error:
        raise KitError(f"Triton cannot be imported ({error}); install triton.", ExitCode.ENVIRONMENT) from error
    interpreted = not isinstance(standard.cdiv, runtime.JITFunction)
    if interpreted == device.is_gpu:
        wanted = "must not be set" if device.is_gpu else "must be set to 1 before Triton is imported"
        raise KitError(f"TRITON_INTERPRET {wanted} to run on {device.kind}.", ExitCode.ENVIRONMENT)
    if interpreted:
        importlib.import_module("harness.cpu.triton_interpreter").install()
    function = load_run_kernel(path, arguments, device, settings)

    def run(args: Sequence[Any]) -> None:
        try:
            function(*args)
        except Exception as error:
            fault = _fault(error, path, function.__module__)
            if fault is None:
                raise
            raise fault from error

    return Submission("triton", path, run)


def _fault(error: Exception, path: Path, module: str) -> KernelFault | None:
    """The named fault behind an exception of a launch, None when it is the submission's own ordinary exception."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KernelFault):
            return seen
        kind = type(seen).__name__
        if kind == "OutOfResources":
            first = str(seen).split(". ")[0]
            return KernelFault(Verdict.RESOURCE_LIMIT, f"{path.name}: {first}; use smaller blocks or fewer stages.")
        if _is_triton(seen) and kind != "InterpreterError":
            return KernelFault(Verdict.COMPILE_ERROR, _compile_message(seen, path, module))
        if isinstance(seen, RuntimeError) and "PassManager" in str(seen):
            return KernelFault(Verdict.COMPILE_ERROR, f"{path.name}: the compiler failed: {str(seen).splitlines()[0]}")
        if kind == "InterpreterError" and seen.__cause__ is not None and not _is_triton(seen.__cause__):
            if not isinstance(seen.__cause__, KernelFault):
                return KernelFault(Verdict.RUNTIME_ERROR, describe(seen.__cause__, path))
        seen = seen.__cause__
    return None


def _is_triton(error: BaseException) -> bool:
    """True for the exceptions that Triton itself defines: CompilationError, PTXASError, InterpreterError, ..."""
    return any(base.__module__.startswith("triton.") for base in type(error).__mro__)


def _compile_message(error: BaseException, path: Path, module: str) -> str:
    """`file:line: reason` for a CompilationError; the first line that says something for other compiler errors."""
    innermost, line = error, None
    seen: BaseException | None = error
    while seen is not None:  # an error in an inlined function is wrapped once per call; the innermost says most
        node, source = getattr(seen, "node", None), getattr(seen, "src", None)
        if _is_triton(seen):
            innermost = seen
        for value in vars(sys.modules.get(module, object)).values() if node is not None else ():
            if source is not None and getattr(value, "src", None) == source and hasattr(value, "starting_line_number"):
                line = value.starting_line_number + node.lineno - 1
        seen = seen.__cause__
    where = path.name if line is None else f"{path.name}:{line}"
    cause = innermost.__cause__
    reason = getattr(innermost, "error_message", None) or str(cause if cause is not None else innermost)
    first = next((part.strip() for part in reason.splitlines() if part.strip()), type(innermost).__name__)
    return f"{where}: {first}"
