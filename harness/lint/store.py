"""Results of compilers, kept by content: what a kernel needs does not change until its text or a compiler does."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import cache
from harness.cpu.maca_build import digest

FOLDER = cache.folder() / "lint"


def remembered(parts: tuple[str | bytes, ...], make: Callable[[], Any]) -> Any:
    """The JSON value that belongs to `parts`: read, or made and kept. What `make` raises passes through."""
    path = FOLDER / f"{digest(*parts)}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    value = make()
    FOLDER.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=FOLDER)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(value, file)
    Path(beside).replace(path)  # another process sees all of it or nothing
    return value
