"""Errors that are not a submission's: a package's fault, no memory, a broken device, a full disk. Imports no torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from harness.catalog import shown_path

# How the errors that are no class of their own begin or name themselves: torch's CPU allocator, the runtime (torch's
# AcceleratorError, raised at whatever call comes next), the driver, cuBLAS, Triton's launcher.
_NO_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PackageError(Exception):
    """A package is at fault. `function` is the one that failed ("import" for the file itself)."""

    def __init__(self, path: Path, function: str, problem: str) -> None:
        super().__init__(f"{shown_path(path)}: {problem}")
        self.path = path
        self.function = function


class BaselineUnavailable(PackageError):
    """The baseline cannot run on this machine: a Python module that it needs, `module`, is not installed."""

    def __init__(self, path: Path, module: str) -> None:
        super().__init__(path, "baseline", f"baseline needs the Python module {module}, which is not installed here")
        self.module = module


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's and Python's out-of-memory errors, those that only their text tells from others included."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def is_device_fault(error: BaseException) -> bool:
    """True for an error of the device itself, after which the process can no longer use it."""
    if is_out_of_memory(error):  # which leaves it as it was
        return False
    if type(error).__name__ == "AcceleratorError":
        return True
    return isinstance(error, RuntimeError) and str(error).lstrip().startswith(("CUDA error", "CUDA driver error"))


def cannot_write(error: BaseException) -> str:
    """A sentence for an error of the disk or its permissions, "" for any other."""
    if not isinstance(error, OSError) or error.errno not in _UNWRITABLE:
        return ""
    where = shown_path(os.fsdecode(error.filename)) if error.filename else "a file"
    return f"{where} cannot be written or read: {error.strerror}."
