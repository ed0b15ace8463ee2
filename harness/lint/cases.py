"""The argument lists of a task's suites, without their data where only shapes matter.

tiny (and demo) cases are made as they are. judge and live cases are made of fake tensors, which have shape and dtype
but no storage: run_kernel decides by shapes, so its launches can be recorded for cases that fill a GPU's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness import catalog
from harness.package import PackageError, load_package
from harness.verdict import KitError

_REAL = ("tiny", "demo")
_BIG = ("judge", "live")
_MAKERS = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like")


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of the tensors that are made while it is in force."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in _MAKERS and isinstance(result, torch.Tensor):
            self.bytes += result.numel() * result.element_size()
        return result


@dataclasses.dataclass
class CaseArguments:
    """One case: `label` such as "judge 3", run_kernel's arguments, and after `calling` the bytes that it allocated."""

    label: str
    args: list[Any]
    _mode: contextlib.AbstractContextManager[Any]
    allocated: int = 0

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Within the block run_kernel may be called: fake arguments stay fake, and allocations are added up."""
        with self._mode, _Allocations() as counter:
            yield
        self.allocated += counter.bytes


def big(label: str) -> bool:
    """Whether a case is one that the judge times."""
    return label.split()[0] in _BIG


def each(task: str, notes: list[str]) -> Iterator[CaseArguments]:
    """Every case of every suite of the task. One that cannot be made without its data is left out, with a note."""
    for suite in (*_REAL, *_BIG):
        try:
            package = load_package(catalog.suite_path(task, suite))
        except KitError:
            continue  # not every task has a demo
        for number in range(1, package.count() + 1):
            label = f"{suite} {number}"
            mode: contextlib.AbstractContextManager[Any] = (
                FakeTensorMode(allow_non_fake_inputs=True) if suite in _BIG else contextlib.nullcontext()
            )
            try:
                with mode:
                    args = package.generate(package.case(number), "cpu")
            except PackageError as error:
                notes.append(f"{label} is left out: {error}")
                continue
            yield CaseArguments(label, args, mode)
