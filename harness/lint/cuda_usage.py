"""What a C++ submission asks of a device: its launches by the simulator's plan, registers and spills by nvcc."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.cpu import maca_build
from harness.cpu.maca_runtime import Piece, Simulator
from harness.languages.cuda import cutlass_include, to_c
from harness.lint import cases, cuda, nvcc
from harness.verdict import KernelFault

ARCHITECTURES = ("sm_80", "sm_90")
_BASE = 1 << 44  # where arguments without memory begin: far from anything mapped
_GAP = 2 << 20  # cudaMalloc's own distance of large blocks


def rows(task: str, path: Path, arguments: Sequence[str], notes: list[str]) -> list[dict[str, Any]]:
    """One row per kernel and target, as harness/lint/resources.py describes them.

    KernelFault when the file compiles for the simulator in no way, or asks for what no C500 has.
    """
    planned = _planned(task, path, arguments, notes)
    compiled: dict[str, dict[str, dict[str, int]]] = {}
    failed: list[dict[str, Any]] = []
    if nvcc.find() is not None:
        options = [f"-I{folder}" for folder in cutlass_include()]
        for arch in ARCHITECTURES:
            try:
                compiled[arch] = nvcc.usage(path, arch, options)
            except KernelFault as fault:
                failed.append({"kernel": path.name, "target": arch, "error": fault.message})
    result = []
    copies = cuda.asynchronous(path)
    for name, launch in planned.items():
        static = compiled.get("sm_80", {}).get(name, {}).get("static", 0)
        own = {"kernel": name, "target": "c500", "shared": launch["shared"] + static, "async": copies}
        result.append({**launch, **own})
    for arch, kernels in compiled.items():
        for name, numbers in kernels.items():
            result.append({"kernel": name, "target": arch, **{k: numbers[k] for k in ("registers", "spills")}})
    return result + failed


def _planned(task: str, path: Path, arguments: Sequence[str], notes: list[str]) -> dict[str, dict[str, Any]]:
    """By kernel: "threads", "shared" (dynamic, most bytes of any launch), "cases", "workspace" of the whole file."""
    simulator = Simulator(maca_build.build(path.resolve(), "wave64", cutlass_include()), path.resolve())
    simulator.plan(True)
    function = simulator.library.run_kernel
    function.restype = None
    found: dict[str, dict[str, Any]] = {}
    workspace = 0
    for case in cases.each(task, notes):
        address, pieces, values = _BASE, [], []
        for name, value in zip(arguments, case.args, strict=True):
            if not isinstance(value, torch.Tensor):
                values.append(to_c(value))
                continue
            size = value.numel() * value.element_size()
            pieces.append(Piece(name, address, size, False))
            values.append(to_c(None) if size == 0 else type(to_c(None))(address))
            address += (size // _GAP + 2) * _GAP
        simulator.begin(pieces)
        function(*values)
        simulator.end()
        workspace = max(workspace, simulator.allocated())
        for launch in simulator.planned():
            name = launch["kernel"].partition("<")[0].rpartition("::")[2].strip()
            row = found.setdefault(name, {"threads": 0, "shared": 0, "cases": []})
            row["threads"] = max(row["threads"], launch["threads"])
            row["shared"] = max(row["shared"], launch["shared"])
            if case.label not in row["cases"]:
                row["cases"].append(case.label)
    for row in found.values():
        row["workspace"] = workspace
    return found
