"""Which machine is this: a C500 (`maca`), an NVIDIA GPU (`cuda`) or neither (`cpu`). By looking, or by DEVICE=."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from harness.verdict import ExitCode, KitError

KINDS = ("maca", "cuda", "cpu")


@dataclasses.dataclass(frozen=True)
class Device:
    """`kind` as in KINDS; `torch_name`: what torch calls it; `tuning`: the row of a submission's TUNING table."""

    kind: str
    torch_name: str
    name: str
    tuning: str

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"


def has_maca() -> bool:
    """True where the MACA SDK or its management tool is present."""
    return Path("/opt/maca").is_dir() or shutil.which("mx-smi") is not None


def pick(requested: str | None = None) -> Device:
    """The device to run on. Raises KitError (NEEDS_DEVICE) when the requested one is not here."""
    if requested and requested not in KINDS:
        raise KitError(f"DEVICE={requested}: no such device; choose one of {', '.join(KINDS)}.", ExitCode.USAGE)
    if requested == "cpu":
        return _cpu()
    try:
        import torch
    except ImportError:
        torch = None  # type: ignore[assignment]
    found = "cpu"
    if torch is not None and torch.cuda.is_available():
        found = "maca" if has_maca() else "cuda"
    if requested and requested != found:
        raise KitError(
            f"DEVICE={requested}: this machine offers {found}; leave DEVICE out to use it.", ExitCode.NEEDS_DEVICE
        )
    if found == "cpu" or torch is None:
        return _cpu()
    name = torch.cuda.get_device_name(0)
    if found == "maca":
        return Device("maca", "cuda", name, "c500")
    major, minor = torch.cuda.get_device_capability(0)
    return Device("cuda", "cuda", name, f"sm{major}{minor}")


def _cpu() -> Device:
    # On the CPU a submission runs its c500 row: what is pasted is what is tried.
    return Device("cpu", "cpu", "CPU", "c500")
