"""Ask a process of our own for what only it can know: what needs torch, a device, or a package to be loaded."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from harness import catalog


class NoAnswer(Exception):
    """The process ended without one; str() is the last that it said on stderr, or its exit code."""


def ask(command: Sequence[str]) -> Any:
    """The JSON in the last line that a command prints, run in the kit's folder. NoAnswer where there is none."""
    done = subprocess.run(
        command,
        cwd=catalog.ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise NoAnswer(last) from None
