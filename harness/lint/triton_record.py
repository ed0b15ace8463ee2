"""Which kernels a Triton submission launches, with which specialisation, and what those need.

run_kernel is called with every case's arguments while launches are only noted. A specialisation is what Triton compiles
anew for: types, divisibility by 16, integers that are 1, constexprs, options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from harness import devices
from harness.languages.python_source import load_run_kernel
from harness.lint import cases, store, triton_compile

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
# Options of the vendor's Triton that no other takes.
_VENDOR_OPTIONS = ("pipeline", "scenario")
# Lanes of a warp on the C500, whose num_warps a launch gives.
_LANES = 64


@dataclasses.dataclass
class Launches:
    """`specialisations` with the labels of their "cases"; `functions`: the kernels by name; `workspace` in bytes."""

    specialisations: list[dict[str, Any]]
    functions: dict[str, Any]
    workspace: int


def _argument(parameter: Any, value: Any) -> dict[str, Any]:
    """One argument as triton_compile takes it: a "type", a "value" (constant), or both for an integer that is 1."""
    name = parameter.name
    if parameter.is_constexpr or value is None:
        value = getattr(value, "value", value)  # tl.constexpr
        return {"name": name, "value": {"dtype": str(value)} if type(value).__name__ == "dtype" else value}
    if isinstance(value, torch.Tensor):
        aligned = value.storage_offset() * value.element_size() % 16 == 0
        return {"name": name, "type": "*" + _TYPES[value.dtype], "divisible": aligned}
    if isinstance(value, bool):
        return {"name": name, "type": "i1"}
    if isinstance(value, int):
        kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        if parameter.do_not_specialize:
            return {"name": name, "type": kind}
        return {"name": name, "type": kind, **({"value": 1} if value == 1 else {"divisible": value % 16 == 0})}
    return {"name": name, "type": "fp32"}


@contextlib.contextmanager
def _noted() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Within the block no kernel is launched: the list gets (kernel, specialisation) instead."""
    runtime: Any = importlib.import_module("triton.runtime")
    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    kernel_run, tuner_run = runtime.JITFunction.run, tuner.run
    launches: list[tuple[Any, dict[str, Any]]] = []

    def note(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(function.arg_names, args, strict=False)), **kwargs}
        options = {k: v for k, v in kwargs.items() if k not in function.arg_names and k not in _VENDOR_OPTIONS}
        specialisation = {
            "kernel": function.__name__,
            "line": function.fn.__code__.co_firstlineno,
            "arguments": [_argument(parameter, given[parameter.name]) for parameter in function.params],
            "options": options,
        }
        launches.append((function, specialisation))

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        note(self, args, kwargs)

    def run_each(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        for config in self.configs:
            note(self.fn, args, {**kwargs, **config.all_kwargs()})

    runtime.JITFunction.run, tuner.run = run, run_each
    try:
        yield launches
    finally:
        runtime.JITFunction.run, tuner.run = kernel_run, tuner_run


def record(task: str, path: Path, arguments: Sequence[str], notes: list[str]) -> Launches:
    """Every launch of the file's c500 row over all suites.

    KernelFault when the file does not load; an exception of run_kernel passes through.
    """
    found: dict[str, dict[str, Any]] = {}
    result = Launches([], {}, 0)
    with _noted() as launches:
        for case in cases.each(task, notes):
            launches.clear()
            # Loaded anew for each case, so that workspaces kept in globals are those of one case.
            run_kernel = load_run_kernel(path, arguments, devices.pick("cpu"))
            with case.calling():
                run_kernel(*case.args)
            result.workspace = max(result.workspace, case.allocated)
            for function, launch in launches:
                result.functions[launch["kernel"]] = function
                key = json.dumps(launch, sort_keys=True)
                found.setdefault(key, {**launch, "cases": []})["cases"].append(case.label)
    result.specialisations = list(found.values())
    return result


def rows(task: str, path: Path, arguments: Sequence[str], notes: list[str]) -> list[dict[str, Any]]:
    """One row per kernel text and target, as harness/lint/resources.py describes them.

    Specialisations of the same tiles (they differ in a number of heads, a page size, a mask) need about the same: one
    of them is compiled, the judge's before the others.
    """
    launches = record(task, path, arguments, notes)
    version = importlib.import_module("triton").__version__
    result: dict[tuple[str, str], dict[str, Any]] = {}
    ordered = sorted(launches.specialisations, key=lambda s: not any(map(cases.big, s["cases"])))
    for specialisation in ordered:
        function = launches.functions[specialisation["kernel"]]
        options = json.dumps(specialisation["options"], sort_keys=True)
        for target in triton_compile.TARGETS:
            text, error = _first_stage(function, specialisation, target)
            key = (target, f"{specialisation['kernel']} {options} {error or _tiles(text)}")
            if key not in result:
                needs = error or store.remembered(
                    (version, target, options, text, Path(triton_compile.__file__).read_bytes()),
                    functools.partial(triton_compile.compile_kernel, function, specialisation, target, assemble=False),
                )
                result[key] = {
                    "kernel": specialisation["kernel"],
                    "line": specialisation["line"],
                    "target": target,
                    "threads": specialisation["options"].get("num_warps", 4) * _LANES,
                    "cases": [],
                    "workspace": launches.workspace,
                    "specialisation": {name: specialisation[name] for name in ("kernel", "arguments", "options")},
                    **needs,
                }
            result[key]["cases"] = [*dict.fromkeys([*result[key]["cases"], *specialisation["cases"]])]
    return list(result.values())


def _first_stage(function: Any, specialisation: dict[str, Any], target: str) -> tuple[str, dict[str, Any]]:
    """(text after the first stage, nothing), or ("", {"error"}) when it does not get through that."""
    texts: list[str] = []

    def stop(text: str) -> None:
        texts.append(text)
        raise triton_compile.Known

    try:
        return "", triton_compile.compile_kernel(function, specialisation, target, False, stop)
    except triton_compile.Known:
        return texts[0], {}


def _tiles(text: str) -> str:
    """What decides the needs of a kernel, from its first stage: the tiles of two dimensions or more, and the loops."""
    tiles = sorted(set(re.findall(r"tensor<\d+x\d+x[^>]*>", text)))
    return f"{text.count('scf.for')} loops, {text.count('tt.dot')} products, {' '.join(tiles)}"
