"""What this device can do at best, measured once a day before any submission runs.

`obtain` gives the peaks of a device from .cache, or from a process of its own that measures them
(`python -m harness.bench.calibration`), so that the process of the command line needs no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import cache, child
from harness.verdict import ExitCode, KitError

if TYPE_CHECKING:
    from harness.devices import Device
    from harness.timing import Peaks

LIFETIME = timedelta(days=1)
_COMMAND = (sys.executable, "-m", "harness.bench.calibration")


def stored_at() -> Path:
    """Where the last calibration lies."""
    return cache.folder() / "calibration.json"


def obtain(device: Device, now: datetime | None = None) -> dict[str, Any]:
    """{"bytes_per_s", "ops_per_s": {dtype: rate}, "cold", "date", "device"} of this device, at most a day old.

    cold: flushing the L2 cache was seen to slow a read that would fit in it. KitError when the device cannot be
    measured.
    """
    now = now or datetime.now(timezone.utc)
    stored = _stored(device, now)
    if stored is not None:
        return stored
    measured = {**_measured(), "date": now.isoformat(timespec="seconds"), "device": device.name}
    path = stored_at()
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(measured), encoding="utf-8")
    except OSError:
        pass  # a read-only checkout measures again each time
    return measured


def peaks(calibration: Mapping[str, Any]) -> Peaks:
    """The same for timing.py."""
    from harness.timing import Peaks

    return Peaks(calibration["bytes_per_s"], calibration["ops_per_s"], calibration["cold"])


def _stored(device: Device, now: datetime) -> dict[str, Any] | None:
    """What .cache holds, if it is of this device, of the last day, and whole."""
    try:
        found = json.loads(stored_at().read_text(encoding="utf-8"))
        fresh = timedelta(0) <= now - datetime.fromisoformat(found["date"]) < LIFETIME
        rates = [found["bytes_per_s"], *found["ops_per_s"].values()]
        whole = {"bf16", "int8"} <= set(found["ops_per_s"]) and all(rate > 0 for rate in rates) and "cold" in found
        return found if fresh and whole and found["device"] == device.name else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _measured() -> dict[str, Any]:
    try:
        return dict(child.ask(_COMMAND))
    except child.NoAnswer as last:
        raise KitError(f"The device could not be calibrated ({last}).", ExitCode.ENVIRONMENT) from None


def main() -> None:
    """Measure, and print one line of JSON."""
    from harness import timing

    print(json.dumps(timing.calibrate()._asdict()))


if __name__ == "__main__":
    main()
