"""A device without room is told from a device that failed, however the error comes."""

from __future__ import annotations

import pytest
import torch

from harness import faults


class AcceleratorError(RuntimeError):
    """By name what torch raises at the call after the one that failed."""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB."),
        MemoryError(),
        AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_no_room(error: BaseException) -> None:
    assert faults.is_out_of_memory(error)
    assert not faults.is_device_fault(error)


@pytest.mark.parametrize(
    "error",
    [AcceleratorError("CUDA error: an illegal memory access was encountered"), RuntimeError("CUDA error: unknown")],
)
def test_a_fault(error: BaseException) -> None:
    assert faults.is_device_fault(error)
    assert not faults.is_out_of_memory(error)


def test_neither() -> None:
    error = ValueError("CUDA error: out of memory, says a submission")
    assert not faults.is_out_of_memory(error)
    assert not faults.is_device_fault(error)
