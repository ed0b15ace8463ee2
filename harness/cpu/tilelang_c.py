"""Run TileLang submissions on CPU tensors, untouched, without a GPU.

`install()` makes `tilelang.jit` and `tilelang.compile` hand back a CpuKernel: the program that the front end parsed,
written as C++ (tilelang_emit.py), compiled by g++ and called through ctypes. TileLang's own C back end is not used: it
has no bf16, lowers neither fragments nor T.Parallel unless the language is patched under the submission's feet, needs
2 s of lowering for each kernel, and turns an access outside a tensor into silence.

Only compiled code is cached (.cache/tilelang/<hash of text and flags>.so), never a result.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness import cache
from harness.cpu.compiler import UNHARDENED
from harness.cpu.tilelang_emit import Parameter, Program, emit
from harness.cpu.tilelang_expr import Unsupported
from harness.verdict import ExitCode, KernelFault, KitError, Verdict

SHARED_LIMIT = 64 * 1024  # bytes per block on the C500
CACHE = cache.folder() / "tilelang"
_HEADER = Path(__file__).with_name("tilelang_tile.h")
# -fwrapv: int32 indices wrap as on the device instead of being undefined.
_FLAGS = (
    *("-std=c++17", "-O2", "-ftree-vectorize", "-fwrapv", "-fno-math-errno", "-shared", "-fPIC", "-w"),
    *UNHARDENED,
)
_FAULTS = {1: Verdict.OUT_OF_BOUNDS, 2: Verdict.RUNTIME_ERROR, 3: Verdict.RUNTIME_ERROR}


def _compile(text: str) -> ctypes.CDLL:
    """The shared object of `text`, from the cache or from g++."""
    source = _HEADER.read_text(encoding="utf-8") + text
    key = hashlib.sha256("\0".join((platform.machine(), *_FLAGS, source)).encode()).hexdigest()[:32]
    target = CACHE / f"{key}.so"
    with contextlib.suppress(OSError):  # missing, or damaged: a full disk or a power cut left half a file
        return ctypes.CDLL(str(target))
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise KitError(
            "TileLang on the CPU needs g++, which is not on PATH; install it or name it in CXX.",
            ExitCode.ENVIRONMENT,
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        (Path(folder) / "kernel.cpp").write_text(source, encoding="utf-8")
        built = Path(folder) / "kernel.so"
        command = [compiler, *_FLAGS, "-o", str(built), str(Path(folder) / "kernel.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise KitError(f"g++ rejected the C++ written for a TileLang kernel: {first.strip()}", ExitCode.ENVIRONMENT)
        os.replace(built, target)  # atomic: another process sees all of the file or none
    return ctypes.CDLL(str(target))


class CpuKernel:
    """What `tilelang.jit` returns on the CPU: called with the kernel's tensors and scalars, it works in place."""

    def __init__(self, program: Program, name: str) -> None:
        self.name = name
        self.program = program
        self._run = _compile(program.text).tile_run
        self._run.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_char_p]
        self._run.restype = ctypes.c_int

    def get_kernel_source(self) -> str:
        """The C++ text that runs."""
        return self.program.text

    def __call__(self, *args: Any) -> None:
        """Run all blocks. Raises KernelFault for wrong arguments and for accesses outside a buffer's shape."""
        parameters = self.program.parameters
        if len(args) != len(parameters):
            names = ", ".join(parameter.name for parameter in parameters)
            raise self._wrong(f"expected {len(parameters)} arguments ({names}), found {len(args)}")
        data: list[int] = []
        values: list[int] = []
        reals: list[float] = []
        for parameter, value in zip(parameters, args, strict=True):
            if parameter.rank:
                data.append(self._pointer(parameter, value))
                values.extend(value.shape)
            elif parameter.dtype.startswith("float"):
                reals.append(float(value))
            elif isinstance(value, int):
                values.append(int(value))
            else:
                raise self._wrong(
                    f"argument {parameter.name} must be an int ({parameter.dtype}), got {type(value).__name__}"
                )
        message = ctypes.create_string_buffer(512)
        status = self._run(
            (ctypes.c_void_p * max(1, len(data)))(*data),
            (ctypes.c_int64 * max(1, len(values)))(*values),
            (ctypes.c_double * max(1, len(reals)))(*reals),
            message,
        )
        if status:
            raise KernelFault(_FAULTS[status], f"{self.name}: {message.value.decode()}.")

    def _wrong(self, text: str) -> KernelFault:
        return KernelFault(Verdict.RUNTIME_ERROR, f"{self.name}: {text}.")

    def _pointer(self, parameter: Parameter, value: Any) -> int:
        if not isinstance(value, torch.Tensor):
            raise self._wrong(f"argument {parameter.name} must be a tensor, got {type(value).__name__}")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype != parameter.dtype or value.dim() != parameter.rank:
            raise self._wrong(
                f"argument {parameter.name} must be {parameter.dtype} with {parameter.rank} dimensions, "
                f"got {dtype} with {value.dim()}"
            )
        if value.device.type != "cpu" or not value.is_contiguous():
            raise self._wrong(f"argument {parameter.name} must be a contiguous CPU tensor")
        return value.data_ptr()


def compile_for_cpu(
    func: Any, out_idx: Any = None, pass_configs: Mapping[str, Any] | None = None, **_: Any
) -> CpuKernel:
    """Stands in for `tilelang.compile`: same arguments, of which the target and the back end mean nothing here.

    Raises KernelFault: COMPILE_ERROR for what cannot run, RESOURCE_LIMIT above 64 KiB of shared memory.
    """
    name = str(func.attrs["global_symbol"])
    if out_idx is not None:
        raise KernelFault(
            Verdict.COMPILE_ERROR, f"{name}: out_idx returns a new tensor; write into the output argument instead."
        )
    configs = {str(getattr(key, "value", key)): value for key, value in (pass_configs or {}).items()}
    try:
        program = emit(func, configs)
    except Unsupported as error:
        raise KernelFault(Verdict.COMPILE_ERROR, f"{name}: {error}.") from error
    if program.shared_bytes > SHARED_LIMIT:
        raise KernelFault(
            Verdict.RESOURCE_LIMIT,
            f"{name}: a block needs {program.shared_bytes} bytes of shared memory, the C500 has {SHARED_LIMIT}.",
        )
    return CpuKernel(program, name)


def compile_all_for_cpu(funcs: Sequence[Any], **options: Any) -> list[CpuKernel]:
    """Stands in for `tilelang.par_compile`."""
    return [compile_for_cpu(func, **options) for func in funcs]


@functools.cache
def install() -> None:
    """Point `tilelang`'s compile functions at the CPU, in this process, once."""
    tilelang = importlib.import_module("tilelang")
    jit_module = sys.modules["tilelang.jit"]  # the attribute `tilelang.jit` is the decorator
    for place in (tilelang, jit_module):
        for name, function in (("compile", compile_for_cpu), ("par_compile", compile_all_for_cpu)):
            if hasattr(place, name):
                setattr(place, name, function)
