"""Run a compiled submission on the simulator: tell it which memory the arguments are, and name what went wrong."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.verdict import KernelFault, Verdict


class Piece(NamedTuple):
    """One tensor argument: its memory, and whether nobody has written it yet (an output)."""

    name: str
    pointer: int
    bytes: int
    unwritten: bool


class Simulator:
    """A loaded library (see maca_build.build) with its own simulated device."""

    def __init__(self, library: Path, source: Path, counts: bool = False) -> None:
        self._path, self._source = library, source
        self.library = ctypes.CDLL(str(self._path))
        self.library.sim_fault_verdict.restype = ctypes.c_char_p
        self.library.sim_fault_text.restype = ctypes.c_char_p
        self.library.sim_fault_file.restype = ctypes.c_char_p
        self.library.sim_counters.restype = ctypes.c_char_p
        self.runs = 0
        self.library.sim_count_accesses(int(counts))

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Start a run: kernels may touch these pieces, their own allocations and nothing else."""
        count = len(pieces)
        pointers = (ctypes.c_void_p * count)(*(piece.pointer for piece in pieces))
        sizes = (ctypes.c_uint64 * count)(*(piece.bytes for piece in pieces))
        names = (ctypes.c_char_p * count)(*(piece.name.encode() for piece in pieces))
        unwritten = (ctypes.c_uint8 * count)(*(int(piece.unwritten) for piece in pieces))
        # Another seed per run: waves and blocks take other turns, so what depends on their order differs between runs.
        self.library.sim_begin(count, pointers, sizes, names, unwritten, ctypes.c_uint64(self.runs))
        self.runs += 1

    def end(self) -> None:
        """Finish a run; KernelFault when the simulator found something wrong in it."""
        if not self.library.sim_faulted():
            return
        verdict = Verdict(self.library.sim_fault_verdict().decode())
        text = self.library.sim_fault_text().decode(errors="replace")
        place = self._place()
        raise KernelFault(verdict, f"{place}: {text}" if place else f"{self._source.name}: {text}")

    def counters(self) -> dict[str, Any]:
        """Counters since the last call: sums over all launches, and by kernel under "kernels"."""
        kernels: dict[str, dict[str, int]] = json.loads(self.library.sim_counters().decode(errors="replace"))
        totals: dict[str, Any] = {}
        for fields in kernels.values():
            for name, value in fields.items():
                totals[name] = totals.get(name, 0) + value
        return {**totals, "kernels": kernels} if kernels else {}

    def plan(self, on: bool) -> None:
        """While on, launches are only listed: arguments may then be addresses without memory behind them."""
        self.library.sim_plan(int(on))

    def planned(self) -> list[dict[str, Any]]:
        """Launches since the last call: {"kernel", "blocks", "threads", "shared" (dynamic, bytes)} each."""
        self.library.sim_planned.restype = ctypes.c_char_p
        return json.loads(self.library.sim_planned().decode(errors="replace"))  # type: ignore[no-any-return]

    def allocated(self) -> int:
        """Bytes that the submission holds by cudaMalloc."""
        self.library.sim_allocated.restype = ctypes.c_uint64
        return int(self.library.sim_allocated())

    def _place(self) -> str:
        """ "file:line" of the fault: the innermost frame of the submission's own file, else ""."""
        if file := self.library.sim_fault_file().decode(errors="replace"):
            return f"{Path(file).name}:{self.library.sim_fault_line()}"
        frames = (ctypes.c_uint64 * 32)()
        count = self.library.sim_fault_frames(frames, 32)
        if count == 0:
            return ""
        # A return address belongs to the next instruction, one byte less to the call itself.
        addresses = [hex(frames[i] - 1) for i in range(count)]
        try:
            command = ["addr2line", "-f", "-C", "-i", "-e", str(self._path), *addresses]
            done = subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        lines = os.fsdecode(done.stdout).split("\n")
        own = []
        start = f"{self._source}:"
        for function, place in zip(lines[::2], lines[1::2], strict=False):
            number = place[len(start) :].partition(" ")[0]  # what may follow: " (discriminator 2)"
            if place.startswith(start) and number.isdecimal() and "{lambda((auto:1&)...)#" not in function:
                own.append(number)  # all but the launch itself
        if not own:
            return ""
        return f"{self._source.name}:{own[0]}" + (f" (in the kernel: line {own[-1]})" if own[-1] != own[0] else "")
