"""Where compiled kernels are kept: .cache in the kit, or elsewhere where that cannot be written. Imports no torch."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from harness.catalog import ROOT

VARIABLE = "KIT_CACHE"  # tells the workers which folder their parent chose


@functools.cache
def folder() -> Path:
    """The folder that caches go to, one subfolder for each user of it; it need not exist yet.

    The kit's own, else ~/.cache/xpuoj-kit, else a folder for this run alone. Never a fixed name in a folder that others
    may write to: what lies in a cache is loaded and run.
    """
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for candidate in (ROOT / ".cache", Path(home) / "xpuoj-kit"):
        if candidate.is_absolute() and _is_writable(candidate):
            return candidate
    alone = tempfile.mkdtemp(prefix="xpuoj-kit-")
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    return Path(alone)


def _is_writable(path: Path) -> bool:
    """Whether files can be made in a folder and in what is in it already (or in the nearest that there is above it)."""
    try:
        if not path.exists():
            above = next(parent for parent in path.parents if parent.exists())
            return above.is_dir() and os.access(above, os.W_OK | os.X_OK)
        folders = [path, *(entry for entry in path.iterdir() if entry.is_dir())]
    except (OSError, StopIteration):
        return False
    return all(os.access(entry, os.W_OK | os.X_OK) for entry in folders)


def note() -> str:
    """A sentence where caches do not go to the kit, else ""."""
    if os.environ.get(VARIABLE) or folder() == ROOT / ".cache":
        return ""
    return f"{ROOT / '.cache'} cannot be written: compiled kernels are kept in {folder()}."
