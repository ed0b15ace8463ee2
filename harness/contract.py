"""A task's reference.py: the names of run_kernel's arguments, which of them are outputs, and the ground truth."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.source import load_module
from harness.verdict import ExitCode, KitError

if TYPE_CHECKING:
    from torch import Tensor

_FUNCTIONS = ("reference", "honest", "workload")
_LABEL_PARTS = 3


@dataclasses.dataclass(frozen=True)
class Contract:
    """What a task asks for. `outputs` are names out of `arguments`, `output_indices` their positions.

    `reference(*args)` gives the truth per output name, `honest(*args)` what honest kernel arithmetic gives, and
    `workload(*args)` {"flops": int, "bytes": int, "dtype": str}, where it helps with "parts", by name some of
    the bytes that are read. None of them modifies its arguments.
    `peer(*args)`, where a task has one: another library's name and a call of its kernel on this case, ready to be timed
    where the package's own baseline cannot be imported, or, with `peer_first`, in its place in any case. It raises
    ImportError where that library is missing too. `yardsticks(*args)`, where a task has them: other calls by name that
    are timed alone where the peer is timed, since they show what the device can do.
    """

    path: Path
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    output_indices: tuple[int, ...]
    exact_allocations: bool  # C++ finds sizes by the allocations behind its pointers: each tensor must be its own
    reference: Callable[..., dict[str, Tensor]]
    honest: Callable[..., dict[str, Tensor]]
    workload: Callable[..., dict[str, Any]]
    peer: Callable[..., tuple[str, Callable[[], object]]] | None = None
    peer_first: bool = False
    yardsticks: Callable[..., dict[str, Callable[[], object]]] | None = None

    def label(self, args: Sequence[Any]) -> str:
        """A short name for a case from its first integers, such as "b4 s1024 q32".

        With fewer than two integers the first tensor's shape comes first: "4096x7168 t8".
        """
        letters: dict[str, int] = {}
        integers = [(name, arg) for name, arg in zip(self.arguments, args, strict=False) if type(arg) is int]
        for name, value in integers:
            words = [word for word in name.split("_") if word != "num"]
            letter = next((word[0] for word in (words[0], words[-1]) if word[0] not in letters), None)
            if letter is not None and len(letters) < _LABEL_PARTS:
                letters[letter] = value
        parts = [f"{letter}{value}" for letter, value in letters.items()]
        if len(integers) < 2:
            shapes = [tuple(arg.shape) for arg in args if hasattr(arg, "shape")]
            parts[:0] = ["x".join(map(str, shape)) for shape in shapes[:1]]
        return " ".join(parts)


def wants_exact_allocations(path: Path) -> bool:
    """EXACT_ALLOCATIONS as written in a reference.py, read without running it (its imports cost seconds)."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "EXACT_ALLOCATIONS" for target in targets):
                return bool(ast.literal_eval(node.value))
    return False


def load_contract(path: Path) -> Contract:
    """Load a task's reference.py. KitError names what it lacks."""
    try:
        names = vars(load_module(path, "reference"))
    except Exception as error:
        raise KitError(
            f"{path}: importing it raised {type(error).__name__}: {error}", ExitCode.PACKAGE_ERROR
        ) from error
    for name in ("ARGUMENTS", "OUTPUTS", *_FUNCTIONS):
        if name not in names:
            raise KitError(f"{path}: {name} is missing; a task's reference.py must define it.", ExitCode.PACKAGE_ERROR)
    arguments, outputs = tuple(names["ARGUMENTS"]), tuple(names["OUTPUTS"])
    for name in outputs:
        if name not in arguments:
            message = f"{path}: OUTPUTS names {name}, which is none of ARGUMENTS ({', '.join(arguments)})."
            raise KitError(message, ExitCode.PACKAGE_ERROR)
    if not outputs:
        raise KitError(f"{path}: OUTPUTS is empty; name at least one argument.", ExitCode.PACKAGE_ERROR)
    return Contract(
        path=path,
        arguments=arguments,
        outputs=outputs,
        output_indices=tuple(arguments.index(name) for name in outputs),
        exact_allocations=bool(names.get("EXACT_ALLOCATIONS", False)),
        reference=names["reference"],
        honest=names["honest"],
        workload=names["workload"],
        peer=names.get("peer"),
        peer_first=bool(names.get("PEER_FIRST", False)),
        yardsticks=names.get("yardsticks"),
    )
