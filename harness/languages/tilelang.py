"""TileLang submissions: TileLang's own compiler on a GPU, checked C++ (harness/cpu/tilelang_c.py) without one."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.devices import Device
from harness.languages import Submission
from harness.languages.python_source import describe, load_run_kernel
from harness.verdict import ExitCode, KernelFault, KitError, Verdict

# Functions of tilelang/jit/__init__.py: an exception that passed through one of them arose before any kernel ran.
_COMPILING = frozenset({"compile", "get_tir", "_infer_jit_mode", "initialize_jit_mode"})


def variants(device: Device) -> tuple[str, ...]:
    """A TileLang file runs in one way on every device."""
    return ("",)


def load(path: Path, arguments: Sequence[str], device: Device, variant: str, settings: Mapping[str, Any]) -> Submission:
    """Import a TileLang submission; without a GPU its kernels are compiled for the CPU from then on, in this process.

    Raises KitError when TileLang cannot be imported, KernelFault(COMPILE_ERROR) for a file that does not import or has
    another signature. Kernels compile at the first run that needs them.
    """
    try:
        importlib.import_module("tilelang")
    except ImportError as error:
        raise KitError(f"TileLang cannot be imported ({error}); install tilelang.", ExitCode.ENVIRONMENT) from error
    if variant == "hopper":
        _needs_wgmma()
    if not device.is_gpu:
        importlib.import_module("harness.cpu.tilelang_c").install()
    function = load_run_kernel(path, arguments, device, settings)

    def run(args: Sequence[Any]) -> None:
        try:
            function(*args)
        except (KernelFault, KitError):
            raise
        except Exception as error:
            fault = _fault(error, path)
            if fault is None:
                raise
            raise fault from error

    return Submission("tilelang", path, run)


def _needs_wgmma() -> None:
    """KitError where TileLang has no wgmma_gemm, which the Hopper variants import."""
    try:
        importlib.import_module("tilelang.cuda.language").wgmma_gemm  # noqa: B018
    except (ImportError, AttributeError) as error:
        version = getattr(importlib.import_module("tilelang"), "__version__", "of no version")
        message = (
            f"Hopper variants in TileLang need wgmma_gemm, as in TileLang 0.1.15, and this is {version} ({error})."
        )
        raise KitError(message, ExitCode.ENVIRONMENT) from error


def _fault(error: Exception, path: Path) -> KernelFault | None:
    """The named fault behind an exception of a call; None when it is the submission's own ordinary exception."""
    text = str(error)
    if "shared memory" in text and ("Failed to set" in text or "exceeds" in text):
        # Launching asked the driver for more shared memory than a block may have.
        first = next(line.strip() for line in text.splitlines() if "shared memory" in line)
        return KernelFault(Verdict.RESOURCE_LIMIT, f"{path.name}: {first}; use smaller tiles or fewer stages.")
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name in _COMPILING and frame.filename.endswith("tilelang/jit/__init__.py") for frame in frames):
        return KernelFault(Verdict.COMPILE_ERROR, describe(error, path))
    return None
