"""The journal: every run, one JSON line each, under results/journal/ (not tracked)."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import math
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.catalog import ROOT

FOLDER = ROOT / "results" / "journal"
_PACKAGES = ("torch", "triton", "tilelang", "numpy", "flashinfer-python", "flash-attn")


def versions() -> dict[str, str]:
    """Installed versions that a result depends on. Reads package metadata only: nothing is imported."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def plain(value: Any) -> Any:
    """`value` with every number that JSON lacks (an infinite margin, a NaN) as None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(run: dict[str, Any], folder: Path | None = None) -> str:
    """Append one run to the file of the current month; "" or why it could not be written.

    A full disk or a read-only checkout must not spoil a run that took an hour, so nothing is raised for it.
    """
    now = datetime.now(timezone.utc)
    path = (folder or FOLDER) / f"{now:%Y-%m}.jsonl"
    line = json.dumps(plain({"date": now.isoformat(timespec="seconds"), **run}), allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)  # two runs at once: lines, never a mixture
            before = journal.seek(0, os.SEEK_END)
            try:
                data = line.encode()
                while data:
                    data = data[journal.write(data) :]
            except OSError:
                journal.truncate(before)  # half a line would spoil the next run's
                raise
    except OSError as error:
        return f"{path}: this run is not in the journal ({error.strerror or error})."
    return ""
