"""Execute a Python file of a user as a module. Imports no torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import sys
from pathlib import Path
from types import CodeType, ModuleType

_numbers = itertools.count(1)


class _FreshLoader(importlib.machinery.SourceFileLoader):
    """Compiles the file every time, and writes no .pyc beside it.

    A cached .pyc goes by size and whole seconds, so a quick edit could be missed.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def load_module(path: Path, prefix: str) -> ModuleType:
    """Execute a Python file as a module with a unique name that starts with `prefix`.

    Whatever the file raises passes through; the module is then forgotten. It stays in sys.modules otherwise, because
    inspect, pickle and Triton look it up there. Code objects carry the resolved path.
    """
    name = f"{prefix}_{path.stem}_{next(_numbers)}"
    loader = _FreshLoader(name, str(path.resolve()))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None  # a loader was given
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
