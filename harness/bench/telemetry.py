"""The device's clocks, temperature, power and what holds them back, from nvidia-smi or mx-smi. Imports no torch.

A missing tool, or one that says something else, leaves gaps and a note, never a failure. nvidia-smi renamed one field
in 2023, so it is asked by the new name and then by the old. mx-smi prints lines `name : value unit`; the names here are
those of its versions 2.1 to 2.3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

_NVIDIA_FIELDS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_{}_reasons.active"
# Bits of nvmlDeviceGetCurrentClocksEventReasons. An idle device, and clocks that somebody set, are no throttling.
_NVIDIA_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
_TIMEOUT_S = 10.0
_clock = time.monotonic


@dataclasses.dataclass
class Clocks:
    """One look at the device; None where it does not say. `throttle`: why its clocks are lower than they could be."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttle: list[str] = dataclasses.field(default_factory=list)
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return self.note
        values = (
            (self.sm_mhz, "MHz"),
            (self.memory_mhz, "MHz memory"),
            (self.temperature_c, "C"),
            (self.power_w, "W"),
        )
        words = [f"{value:.0f} {unit}" for value, unit in values if value is not None]
        return ", ".join([*words, *(f"held back by {reason}" for reason in self.throttle)])

    def to_json(self) -> dict[str, Any]:
        """The record's `clocks`."""
        record = dataclasses.asdict(self)
        return record if self.note else {key: value for key, value in record.items() if key != "note"}


def _number(text: str) -> float | None:
    """A number, or None for "[N/A]", "[Not Supported]", "[Unknown Error]" and the like."""
    try:
        return float(text.strip())
    except ValueError:
        return None


def parse_nvidia(text: str) -> Clocks:
    """The last line of nvidia-smi's CSV: four numbers and a hexadecimal mask."""
    lines = text.strip().splitlines() or [""]
    cells = lines[-1].split(",")
    if len(cells) != 5:
        return Clocks(note=f"nvidia-smi says: {lines[-1].strip()[:100] or 'nothing'}")
    sm, memory, temperature, power = map(_number, cells[:4])
    try:
        mask = int(cells[4].strip(), 16)
    except ValueError:  # [N/A]
        mask = 0
    reasons = [name for bit, name in _NVIDIA_REASONS.items() if mask & bit]
    return Clocks(sm, memory, temperature, power, reasons)


def parse_mx(text: str) -> Clocks:
    """mx-smi's lines `name : value unit`; of several sensors the first that is named here."""
    clocks = Clocks()
    for line in text.splitlines():
        name, colon, rest = line.strip().rpartition(":")
        name, words = name.strip(" :\t").lower(), rest.split()
        if not colon or not words:
            continue
        value = _number(words[0])
        # A power line is "Total : 12.0 V 5.2 A 62.4 W" or "Total : 62.4 W": the number before the unit.
        watts = _number(words[-2]) if len(words) > 1 and words[-1] == "W" else None
        if name == "xcore_clk" and clocks.sm_mhz is None:
            clocks.sm_mhz = value
        elif name in ("mc_clk", "mc0_clk") and clocks.memory_mhz is None:
            clocks.memory_mhz = value
        elif name.startswith("hotspot") and clocks.temperature_c is None:
            clocks.temperature_c = value
        elif name.startswith("total") and watts is not None and clocks.power_w is None:
            clocks.power_w = watts
        elif words == ["Active"] and name != "idle":
            clocks.throttle.append(name)
    if clocks == Clocks():
        return Clocks(note=f"mx-smi says: {(text.strip().splitlines() or ['nothing'])[-1].strip()[:100]}")
    return clocks


def _tool(kind: str) -> tuple[str, str, Callable[[str], Clocks]]:
    """The tool of a kind of device, the command that asks it, and who reads the answer."""
    visible = os.environ.get("MACA_VISIBLE_DEVICES" if kind == "maca" else "CUDA_VISIBLE_DEVICES", "")
    first = shlex.quote(visible.split(",")[0].strip() or "0")
    if kind == "maca":
        shown = " ".join(f"--show-{what}" for what in ("clock", "temperature", "board-power", "clk-tr"))
        return "mx-smi", f"exec mx-smi -i {first} {shown}", parse_mx
    ask = f"nvidia-smi --id={first} --format=csv,noheader,nounits --query-gpu="
    both = (ask + _NVIDIA_FIELDS.format(word) for word in ("event", "throttle"))
    return "nvidia-smi", " || ".join(both), parse_nvidia


def read(kind: str, meanwhile: Callable[[], object] = lambda: None) -> Clocks:
    """Look at the first visible device of a kind ("cuda", "maca"); `meanwhile` is called until the answer is there."""
    tool, command, parse = _tool(kind)
    if shutil.which(tool) is None:
        return Clocks(note=f"{tool} is not here: no clocks, no temperature, no power")
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    deadline = _clock() + _TIMEOUT_S
    try:
        while process.poll() is None and _clock() < deadline:
            meanwhile()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.001)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = process.communicate()[0]
    if process.returncode and process.returncode < 0:
        return Clocks(note=f"{tool} did not answer in {_TIMEOUT_S:g} s")
    return parse(text)
