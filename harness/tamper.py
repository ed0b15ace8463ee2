"""Has foreign code replaced a function that the harness, or a package's check, relies on?

`snapshot` remembers, before a submission is loaded, which object every name of the watched modules and classes stands
for; `changed` compares. New names are fine (torch loads much of itself late), other objects under old names are not.
Only callables are compared: flags and counters change for good reasons.

This sees patches that stay. A submission that puts everything back before it returns is met by other means: the harness
uses references bound at import for its own measurements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

# Modules, and classes in them. Where a module is not loaded yet nobody relies on it yet.
_WATCHED = (
    ("builtins", ("",)),
    ("time", ("",)),
    ("math", ("",)),
    ("os", ("",)),
    ("random", ("", "Random", "SystemRandom")),
    ("statistics", ("",)),
    ("torch", ("", "Tensor", "Tensor.__mro__.1", "Generator")),
    ("torch.cuda", ("", "Event", "Stream", "Event.__mro__.1", "Stream.__mro__.1")),
    ("torch.profiler", ("", "profile")),
    ("torch.linalg", ("",)),
    ("torch.testing", ("",)),
    ("torch.nn.functional", ("",)),
    ("torch._C", ("",)),
    ("torch._C._nn", ("",)),
    ("numpy", ("", "ndarray")),
    ("numpy.testing", ("",)),
)
_OURS = (
    "harness",
    "tasks",
    "package_",
    "reference_",
)  # prefixes of the modules that judge: ours, and those loaded from disk


def _holders() -> Iterator[tuple[str, Any]]:
    """(name, module or class) of everything watched that is loaded now."""
    for module_name, parts in _WATCHED:
        module = sys.modules.get(module_name)
        for part in parts if module is not None else ():
            holder, name = module, module_name
            for step in part.split(".") if part else ():
                holder = holder[int(step)] if isinstance(holder, tuple) else getattr(holder, step)
                name = f"{module_name}.{getattr(holder, '__name__', step)}"
            yield name, holder
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS) and module is not None:
            yield name, module


def _entries(holder: Any) -> Mapping[str, Any]:
    return {
        key: value
        for key, value in list(vars(holder).items())
        if callable(value) or isinstance(value, (staticmethod, classmethod, property))
    }


class Snapshot:
    """What every watched name stood for at one moment. Holds the objects themselves, so no id can be reused."""

    def __init__(self) -> None:
        self._seen = [(name, holder, _entries(holder)) for name, holder in _holders()]

    def changed(self) -> list[str]:
        """Full names that now stand for another object, or for none, in order of the watched modules."""
        return [
            f"{name}.{key}"
            for name, holder, before in self._seen
            for key, value in before.items()
            if vars(holder).get(key) is not value
        ]


_taken: Snapshot | None = None


def snapshot() -> None:
    """Remember this moment. To be called after the package is loaded and before the submission is."""
    global _taken
    _taken = Snapshot()


def ensure() -> None:
    """Take a snapshot if none was taken: late, but patches made by a run are seen."""
    if _taken is None:
        snapshot()


def changed() -> list[str]:
    """Full names of what was replaced since the snapshot, such as "torch.allclose"; empty when nothing was."""
    return _taken.changed() if _taken is not None else []
