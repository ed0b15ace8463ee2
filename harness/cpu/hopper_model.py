"""Run a Hopper variant without a GPU: compile it with g++ for the model in harness/cpu/hopper, name what went wrong.

The variants use instructions that the C500 simulator does not have (TMA, mbarriers, wgmma), and the model has nothing
else: it checks schedules and index arithmetic, not memory accesses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from harness.cpu.compiler import UNHARDENED
from harness.cpu.maca_build import cached, compiler_version, digest, rewritten, run_compiler
from harness.cpu.maca_runtime import Piece
from harness.verdict import KernelFault, Verdict

MODEL = Path(__file__).resolve().parent / "hopper"
_FLAGS = (
    *("-std=c++17", "-fPIC", "-fno-gnu-unique", "-w", "-DHOPPER_MODEL=1", "-fdiagnostics-color=never"),
    *UNHARDENED,
)


def _runtime() -> Path:
    """The object file of the model's own part, which does the arithmetic of the products."""
    command = ["g++", *_FLAGS, "-O3", f"-I{MODEL / 'include'}", "-c", str(MODEL / "runtime.cpp"), "-o"]
    key = digest("hopper runtime", *command, compiler_version("g++"), *_texts())

    def make(folder: Path) -> None:
        run_compiler([*command, str(folder / "runtime.o")], MODEL / "runtime.cpp")

    return cached(f"hopper-runtime-{key}", make) / "runtime.o"


def _texts() -> list[bytes]:
    return [path.read_bytes() for path in sorted(MODEL.rglob("*")) if path.is_file()]


def build(source: Path, shared: Sequence[Path]) -> Path:
    """The library of a Hopper variant; `shared`: the headers of the kit that it includes.

    Raises KernelFault (COMPILE_ERROR), or KitError when g++ is missing.
    """
    text = source.read_text(encoding="utf-8", errors="replace")
    runtime = _runtime()
    parts = [path.read_bytes() for path in shared]
    key = digest("hopper", text, str(source), *_FLAGS, str(runtime), compiler_version("g++"), *parts)
    code = rewritten(source, text)

    def make(folder: Path) -> None:
        unit = folder / "unit.cpp"
        unit.write_text(code, encoding="utf-8")
        preamble = ["-include", str(MODEL / "include" / "model.hpp")]
        headers = [f"-I{MODEL / 'include'}", f"-I{source.parent}"]
        # One library never takes another's names: two kernels in one process have a machine each.
        link = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", str(unit), str(runtime), "-o", str(folder / "lib.so")]
        run_compiler(["g++", *_FLAGS, "-O1", *preamble, *headers, *link], source)

    return cached(f"hopper-{source.stem}-{key}", make) / "lib.so"


class Model:
    """A loaded library (see build) with its own machine."""

    def __init__(self, library: Path, source: Path) -> None:
        self._source = source
        self.library = ctypes.CDLL(str(library))
        self.library.hopper_fault_verdict.restype = ctypes.c_char_p
        self.library.hopper_fault_text.restype = ctypes.c_char_p
        self.runs = 0

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Start a run: the driver knows these pieces as allocations. Every second run does at once what may be late."""
        count = len(pieces)
        pointers = (ctypes.c_uint64 * count)(*(piece.pointer for piece in pieces))
        sizes = (ctypes.c_uint64 * count)(*(piece.bytes for piece in pieces))
        self.library.hopper_begin(count, pointers, sizes, ctypes.c_uint64(self.runs))
        self.runs += 1

    def end(self) -> None:
        """Finish a run; KernelFault when the model found something wrong in it."""
        verdict = self.library.hopper_fault_verdict().decode()
        if verdict:
            text = self.library.hopper_fault_text().decode(errors="replace")
            raise KernelFault(Verdict(verdict), f"{self._source.name}: {text}")
