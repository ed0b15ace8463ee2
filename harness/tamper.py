"""Has foreign code replaced a function that the harness, or a package's check, relies on?

`snapshot` remembers, before a submission is loaded, which object every name of the watched modules and classes stands
for; `changed` compares. New names are fine (torch loads much of itself late), other objects under old names are not.
Only callables are compared: flags and counters change for good reasons.

This sees patches that stay. A submission that puts everything back before it returns is met by other means: the harness
uses references bound at import for its own measurements.
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Modules, and classes in them. Where a module is not loaded yet nobody relies on it yet.
_WATCHED: Mapping[str, tuple[str, ...]] = {
    "builtins": (),
    "time": (),
    "math": (),
    "os": (),
    "random": ("Random", "SystemRandom"),
    "statistics": (),
    "torch": ("Tensor", "Generator"),
    "torch.cuda": ("Event", "Stream"),
    "torch.profiler": ("profile",),
    "torch.linalg": (),
    "torch.testing": (),
    "torch.nn.functional": (),
    "torch._C": (),
    "torch._C._nn": (),
    "numpy": ("ndarray",),
    "numpy.testing": (),
}
_OURS = (
    "harness",
    "tasks",
    "package_",
    "reference_",
)  # prefixes of our modules, and of those loaded from disk to judge

# set_default_dtype moves this one, and nobody relies on it.
_MOVING = ("torch.Storage",)
# torch itself wraps this one, whenever torch._dynamo is first imported (tilelang, torch.compile, some launches do it).
_WRAPPED_BY_TORCH = ("torch.manual_seed",)
_TORCH_FOLDER = os.path.join(os.path.dirname(torch.__file__), "")


def _holders() -> Iterator[tuple[str, Any]]:
    """(name, module or class) of everything watched that is loaded now."""
    for module_name, classes in _WATCHED.items():
        if module := sys.modules.get(module_name):
            yield module_name, module
            yield from ((f"{module_name}.{name}", getattr(module, name)) for name in classes)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(_OURS) and module is not None:
            yield module_name, module
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == module_name:
                    yield f"{module_name}.{name}", value


def _names(holder: Any) -> Mapping[str, Any]:
    """What each name of a module or class stands for; a class's inherited names too, which a new name can hide."""
    if not isinstance(holder, type):
        return dict(vars(holder))
    return collections.ChainMap(*(dict(vars(base)) for base in holder.__mro__ if base is not object))


class Snapshot:
    """What every watched name stood for at one moment. Holds the objects themselves, so no id can be reused."""

    def __init__(self) -> None:
        self._seen = [
            (name, holder, {key: value for key, value in list(_names(holder).items()) if _is_function(value)})
            for name, holder in _holders()
        ]

    def changed(self) -> list[str]:
        """Full names that now stand for another object, or for none, in order of the watched modules."""
        found = []
        for name, holder, before in self._seen:
            now = _names(holder)
            for key, value in before.items():
                if now.get(key) is not value and not _is_torchs_own(f"{name}.{key}", now.get(key)):
                    found.append(f"{name}.{key}")
        return found


def _is_function(value: Any) -> bool:
    return callable(value) or isinstance(value, (staticmethod, classmethod, property))


def _is_torchs_own(name: str, value: Any) -> bool:
    if name in _MOVING:
        return True
    code = getattr(value, "__code__", None)
    return name in _WRAPPED_BY_TORCH and code is not None and code.co_filename.startswith(_TORCH_FOLDER)


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
