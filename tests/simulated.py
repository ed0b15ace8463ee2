"""What the tests of the simulator share: load a .cu of tests/cuda in a mode and run it on tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import devices, languages
from harness.languages import Submission

FOLDER = Path(__file__).resolve().parent / "cuda"


@functools.cache
def load(
    name: str, mode: str, arguments: tuple[str, ...], outputs: tuple[str, ...] = (), counts: bool = False
) -> Submission:
    """A submission of tests/cuda, compiled once per test session and cached between them."""
    settings = {"outputs": outputs, "counts": counts}
    return languages.load("cuda", FOLDER / f"{name}.cu", arguments, devices.pick("cpu"), mode, settings)


def runner(name: str, mode: str, arguments: tuple[str, ...], outputs: tuple[str, ...] = ()) -> Callable[..., None]:
    """Call the submission with positional arguments."""

    def run(*args: Any) -> None:
        load(name, mode, arguments, outputs).run(args)

    return run
