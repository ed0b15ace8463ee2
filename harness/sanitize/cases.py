"""The cases of a task as files for the driver, and what it left of their outputs held against reference.py.

A case's folder holds `call.json`, the arguments in the judge's order, each {"value": number} or {"name", "file",
"dtype", "shape", "bytes", "output"} with the tensor's bytes in that file; the driver adds `run-<number>-<name>.bin`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from harness import strict
from harness.contract import Contract
from harness.package import Package
from harness.sanitize.driver import RUNS
from harness.verdict import ExitCode, KitError


class Written(NamedTuple):
    """A case whose arguments are in `folder`."""

    number: int
    label: str
    folder: Path


def write(package: Package, contract: Contract, number: int, folder: Path) -> Written:
    """Make a case's arguments on the CPU and write them to `folder`, which must be empty. KitError, PackageError."""
    case = package.case(number)
    args = package.generate(case, "cpu")
    entries: list[dict[str, Any]] = []
    for index, arg in enumerate(args):
        if not isinstance(arg, Tensor):
            entries.append({"value": arg})
            continue
        name = contract.arguments[index]
        if not arg.is_contiguous():
            raise KitError(f"{package.path}: {name} of case {number} has gaps.", ExitCode.PACKAGE_ERROR)
        output = index in contract.output_indices
        file = f"{index}-{name}.bin"
        if not output:
            (folder / file).write_bytes(_bytes(arg))
        dtype = str(arg.dtype).removeprefix("torch.")
        size = arg.numel() * arg.element_size()
        entry = {"name": name, "file": file, "dtype": dtype, "shape": list(arg.shape), "bytes": size, "output": output}
        entries.append(entry)
    (folder / "call.json").write_text(json.dumps(entries), encoding="utf-8")
    return Written(number, case.label or contract.label(args), folder)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _tensor(data: bytes, entry: dict[str, Any]) -> Tensor:
    flat = torch.from_numpy(numpy.frombuffer(bytearray(data), dtype=numpy.uint8))
    return flat.view(getattr(torch, entry["dtype"])).reshape(entry["shape"])


class Outcome(NamedTuple):
    """`margin`: the largest error of both runs as a share of what is allowed; None when a run left no output at all."""

    margin: float | None
    wrong: str


def compare(case: Written, contract: Contract) -> Outcome:
    """Hold both runs' outputs against the reference, by the strict rule."""
    entries = json.loads((case.folder / "call.json").read_text(encoding="utf-8"))
    args: list[Any] = []
    for entry in entries:
        if "file" not in entry:
            args.append(entry["value"])
        elif entry["output"]:
            args.append(torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])))
        else:
            args.append(_tensor((case.folder / entry["file"]).read_bytes(), entry))
    left = [_left(case, number, [entry for entry in entries if entry.get("output")]) for number in RUNS]
    if any(outputs is None for outputs in left):
        return Outcome(None, "run_kernel did not come to its end")
    truth, honest = contract.reference(*args), contract.honest(*args)
    margin, wrong = 0.0, ""
    for number, outputs in zip(RUNS, left, strict=True):
        for name, value in (outputs or {}).items():
            agreement = strict.compare(name, value, truth[name], honest[name])
            margin = max(margin, agreement.margin)
            if agreement.finding is not None and not wrong:
                wrong = f"{agreement.finding.verdict} in run {number}: {agreement.finding.detail}"
    return Outcome(margin, wrong)


def _left(case: Written, number: int, outputs: Sequence[dict[str, Any]]) -> dict[str, Tensor] | None:
    """What one run left in the outputs; None unless there is something of each."""
    found = {}
    for entry in outputs:
        path = case.folder / f"run-{number}-{entry['name']}.bin"
        if not entry["bytes"]:
            continue
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return None
        found[entry["name"]] = _tensor(path.read_bytes(), entry)
    return found


def forget(case: Written) -> None:
    """Remove what the driver left, so that the next run cannot live on it."""
    for path in case.folder.glob("run-*.bin"):
        path.unlink()
