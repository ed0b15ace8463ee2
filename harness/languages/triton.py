"""Triton submissions: compiled on a GPU, interpreted (harness/cpu/triton_interpreter.py) without one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
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
    if variant != "hopper":
        function = load_run_kernel(path, arguments, device, settings)
    elif device.is_gpu:
        _needs_gluon()
        function = load_run_kernel(path, arguments, device, settings)
    else:
        function = importlib.import_module("harness.cpu.gluon_model").load(path, arguments, settings)

    def run(args: Sequence[Any]) -> None:
        try:
            function(*args)
        except Exception as error:
            fault = _fault(error, path, function.__globals__)
            if fault is None:
                raise
            raise fault from error

    return Submission("triton", path, run)


def _needs_gluon() -> None:
    """KitError where Triton lacks what the Hopper variants need."""
    try:
        importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    except ImportError as error:
        version = getattr(importlib.import_module("triton"), "__version__", "of no version")
        message = f"Hopper variants in Triton need Gluon, as in Triton 3.6 and 3.7, and this is {version} ({error})."
        raise KitError(message, ExitCode.ENVIRONMENT) from error


def _fault(error: Exception, path: Path, names: Mapping[str, Any]) -> KernelFault | None:
    """The named fault behind an exception of a launch; None when it is the submission's own ordinary exception.

    `names` are the globals of the submission, in which the kernels are.
    """
    chain = list(_causes(error))
    for seen, cause in zip(chain, [*chain[1:], None], strict=True):
        if isinstance(seen, KernelFault):
            return seen
        kind = type(seen).__name__
        if kind == "OutOfResources":
            first = str(seen).split(". ")[0]
            return KernelFault(Verdict.RESOURCE_LIMIT, f"{path.name}: {first}; use smaller blocks or fewer stages.")
        if kind == "InterpreterError":
            if cause is not None and not _is_triton(cause) and not isinstance(cause, KernelFault):
                return KernelFault(Verdict.RUNTIME_ERROR, describe(cause, path))
        elif _is_triton(seen):
            return KernelFault(Verdict.COMPILE_ERROR, _compile_message(seen, path, names))
        elif isinstance(seen, RuntimeError) and "PassManager" in str(seen):
            return KernelFault(Verdict.COMPILE_ERROR, f"{path.name}: the compiler failed: {str(seen).splitlines()[0]}")
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it was raised from, outermost first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _is_triton(error: BaseException) -> bool:
    """True for the exceptions that Triton itself defines: CompilationError, PTXASError, InterpreterError, ..."""
    return any(base.__module__.startswith("triton.") for base in type(error).__mro__)


def _compile_message(error: BaseException, path: Path, names: Mapping[str, Any]) -> str:
    """`file:line: reason` for a CompilationError; the first line that says something for other compiler errors."""
    # An error inside an inlined function is wrapped once per call: the innermost says most.
    innermost = [seen for seen in _causes(error) if _is_triton(seen)][-1]
    where = path.name
    for seen in _causes(error):
        node, source = getattr(seen, "node", None), getattr(seen, "src", None)
        for value in names.values():
            if node is not None and source is not None and getattr(value, "src", None) == source:
                decorators = len(value.raw_src) - len(source.splitlines())  # cut off before compiling
                where = f"{path.name}:{value.starting_line_number + decorators + node.lineno - 1}"
    cause = innermost.__cause__
    reason = getattr(innermost, "error_message", None) or str(cause if cause is not None else innermost)
    first = next((part.strip() for part in reason.splitlines() if part.strip()), type(innermost).__name__)
    return f"{where}: {first}"
