"""Calls a compiled run_kernel on arguments read from files. No torch: all that a sanitizer instruments is run_kernel's.

    python -m harness.sanitize.driver LIBRARY MEMORY FILL FOLDER...

LIBRARY: what exports run_kernel. MEMORY: the path of libcudart, or `host` for a library of the simulator. FILL: 1 to
overwrite the outputs before each run, 0 to leave them as they were allocated. FOLDER: one per case, see cases.py.

Each tensor is an allocation of its own of just its size, so that a sanitizer sees an access one byte past it. A case
runs twice; what each run left in the outputs goes to `run-<number>-<argument>.bin` in its folder.

run_kernel's library may have the CUDA runtime linked into it (nvcc's default), and this driver has another instance.
That is no harm: a runtime keeps no memory of its own but allocates in the device's primary context, which all runtimes
of a process share, so a pointer from one is good in the other, and a device fault reaches both. Only the error of a
launch that was refused stays in the instance that launched; such a run leaves the outputs as they were, which shows.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from harness.cpu.maca_runtime import Piece, Simulator
from harness.languages.cuda import to_c
from harness.verdict import KernelFault

RUNS = (1, 2)
_POISON = (0xFF, 0xA5)  # by run: NaN in every floating-point type, and a value that differs from it
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind
_ALIGNMENT = 256  # cudaMalloc's


class DriverError(Exception):
    """One sentence that says why nothing more can run."""


class Memory(Protocol):
    """Where the arguments lie."""

    def allocate(self, size: int) -> int:
        """The address of `size` new bytes."""

    def free(self, pointer: int) -> None:
        """Give an allocation back."""

    def upload(self, pointer: int, data: bytes) -> None:
        """Copy bytes from the host."""

    def fill(self, pointer: int, byte: int, size: int) -> None:
        """Set every byte."""

    def download(self, pointer: int, size: int) -> bytes:
        """Copy bytes to the host."""

    def finish(self) -> None:
        """Wait for the device. DriverError when it reports a fault."""


class Cuda:
    """Device memory by a CUDA runtime, libcudart at `path`."""

    def __init__(self, path: str) -> None:
        try:
            self._runtime = ctypes.CDLL(path)
        except OSError as error:
            raise DriverError(f"{path} cannot be loaded: {error}") from None
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._runtime.cudaMalloc.argtypes = [ctypes.POINTER(pointer), size]
        self._runtime.cudaFree.argtypes = [pointer]
        self._runtime.cudaMemcpy.argtypes = [pointer, pointer, size, number]
        self._runtime.cudaMemset.argtypes = [pointer, number, size]
        self._runtime.cudaGetErrorString.argtypes = [number]
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._runtime, name)(*args)
        if code:
            said = (self._runtime.cudaGetErrorString(code) or b"").decode("utf-8", "replace")
            raise DriverError(f"{name} failed with error {code}: {said}")

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), size)
        return int(pointer.value or 0)

    def free(self, pointer: int) -> None:
        self._call("cudaFree", pointer)

    def upload(self, pointer: int, data: bytes) -> None:
        self._call("cudaMemcpy", pointer, data, len(data), _TO_DEVICE)

    def fill(self, pointer: int, byte: int, size: int) -> None:
        self._call("cudaMemset", pointer, byte, size)

    def download(self, pointer: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self._call("cudaMemcpy", data, pointer, size, _TO_HOST)
        return data.raw

    def finish(self) -> None:
        self._call("cudaDeviceSynchronize")


class Host:
    """Host memory, aligned as device memory is."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self._libc.aligned_alloc.restype = ctypes.c_void_p
        self._libc.free.argtypes = [ctypes.c_void_p]

    def allocate(self, size: int) -> int:
        pointer = self._libc.aligned_alloc(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
        if not pointer:
            raise DriverError(f"no memory for an argument of {size} bytes")
        return int(pointer)

    def free(self, pointer: int) -> None:
        self._libc.free(pointer)

    def upload(self, pointer: int, data: bytes) -> None:
        ctypes.memmove(pointer, data, len(data))

    def fill(self, pointer: int, byte: int, size: int) -> None:
        ctypes.memset(pointer, byte, size)

    def download(self, pointer: int, size: int) -> bytes:
        return ctypes.string_at(pointer, size)

    def finish(self) -> None:
        """Nothing runs behind the caller's back."""


class Argument(NamedTuple):
    """A tensor argument. `pointer` is 0 for one without elements, as torch's data_ptr() is."""

    name: str
    pointer: int
    bytes: int
    output: bool

    def data_ptr(self) -> int:
        """What to_c asks a tensor for."""
        return self.pointer


def load(library: str, simulated: bool) -> Callable[[Sequence[Any]], None]:
    """run_kernel by the judge's ABI. On the simulator it is told of the arguments' memory, and its findings raise."""
    simulator = Simulator(Path(library), Path(library)) if simulated else None
    loaded = simulator.library if simulator is not None else ctypes.CDLL(library)
    function = getattr(loaded, "run_kernel", None)
    if function is None:
        raise DriverError(f"{library} exports no run_kernel")
    function.restype = None

    def call(args: Sequence[Any]) -> None:
        tensors = [arg for arg in args if isinstance(arg, Argument) and arg.bytes]
        if simulator is not None:
            simulator.begin([Piece(arg.name, arg.pointer, arg.bytes, arg.output) for arg in tensors])
        function(*map(to_c, args))
        if simulator is not None:
            simulator.end()

    return call


def run_case(folder: Path, memory: Memory, call: Callable[[Sequence[Any]], None], fill: bool) -> None:
    """One case, twice. DriverError for a device fault, KernelFault for a finding of the simulator."""
    args: list[Any] = []
    for entry in json.loads((folder / "call.json").read_text(encoding="utf-8")):
        if "file" not in entry:
            args.append(entry["value"])
            continue
        size = entry["bytes"]
        pointer = memory.allocate(size) if size else 0
        if size and not entry["output"]:
            memory.upload(pointer, (folder / entry["file"]).read_bytes())
        args.append(Argument(entry["name"], pointer, size, entry["output"]))
    tensors = [arg for arg in args if isinstance(arg, Argument) and arg.bytes]
    outputs = [arg for arg in tensors if arg.output]
    for number, byte in zip(RUNS, _POISON, strict=True):
        for arg in outputs if fill else ():
            memory.fill(arg.pointer, byte, arg.bytes)
        memory.finish()
        call(args)
        memory.finish()
        for arg in outputs:
            (folder / f"run-{number}-{arg.name}.bin").write_bytes(memory.download(arg.pointer, arg.bytes))
    for arg in tensors:
        memory.free(arg.pointer)


def main(words: Sequence[str]) -> int:
    """0 when every case has run, whatever is in its outputs; 1 with a sentence on stderr when one could not."""
    library, where, fill, *folders = words
    memory: Memory
    try:
        memory = Host() if where == "host" else Cuda(where)
        call = load(library, simulated=where == "host")
        for folder in folders:
            run_case(Path(folder), memory, call, fill == "1")
    except (DriverError, KernelFault) as error:
        print(f"driver: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
