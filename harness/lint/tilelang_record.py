"""Which kernels a TileLang submission builds, and what those need: run_kernel is called while builds are only noted."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import devices
from harness.languages.python_source import load_run_kernel
from harness.lint import cases, nvcc, store, tilelang_lower
from harness.verdict import KernelFault


@contextlib.contextmanager
def _noted() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Within the block a @tilelang.jit function compiles nothing: the list gets (function, {"kernel", "arguments"})."""
    implementation: Any = importlib.import_module("tilelang.jit").JITImpl
    original = implementation.__call__
    builds: list[tuple[Any, dict[str, Any]]] = []

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        code = self.func.orig_func.__code__
        kernel = {"kernel": code.co_name, "line": code.co_firstlineno, "arguments": list(bound.args)}
        builds.append((self, kernel))
        return lambda *tensors: None

    implementation.__call__ = build
    try:
        yield builds
    finally:
        implementation.__call__ = original


def record(
    task: str, path: Path, arguments: Sequence[str], notes: list[str]
) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """(kernels with their "cases", builders by name, most bytes that a case allocates) of the file's c500 row.

    KernelFault when the file does not load; an exception of run_kernel passes through.
    """
    found: dict[str, dict[str, Any]] = {}
    builders: dict[str, Any] = {}
    workspace = 0
    with _noted() as builds:
        for case in cases.each(task, notes):
            builds.clear()
            # Loaded anew for each case, so that its caches are empty and every build shows.
            run_kernel = load_run_kernel(path, arguments, devices.pick("cpu"))
            with case.calling():
                run_kernel(*case.args)
            workspace = max(workspace, case.allocated)
            for builder, kernel in builds:
                builders[kernel["kernel"]] = builder
                found.setdefault(json.dumps(kernel), {**kernel, "cases": []})["cases"].append(case.label)
    return list(found.values()), builders, workspace


def rows(task: str, path: Path, arguments: Sequence[str], notes: list[str]) -> list[dict[str, Any]]:
    """One row per kernel and target, as harness/lint/resources.py describes them.

    Kernels whose tiles are of one size need about the same: one of them is lowered, the judge's before the others. What
    only small cases build is lowered for sm_80 alone.
    """
    kernels, builders, workspace = record(task, path, arguments, notes)
    result: dict[tuple[str, str], dict[str, Any]] = {}
    for kernel in sorted(kernels, key=lambda k: not any(map(cases.big, k["cases"]))):
        builder = builders[kernel["kernel"]]
        try:
            text = str(tilelang_lower.program(builder, kernel["arguments"], "sm_80").script())
        except Exception as error:
            text = f"error: {error}"
        judged = any(map(cases.big, kernel["cases"]))
        for target in tilelang_lower.TARGETS if judged else ("sm_80",):
            key = (target, f"{kernel['kernel']} {_tiles(text)}")
            if key not in result:
                needs = _needs(builder, kernel, target, text, judged)
                row = {name: kernel[name] for name in ("kernel", "line")}
                specialisation = {name: kernel[name] for name in ("kernel", "arguments")}
                known = {"target": target, "cases": [], "workspace": workspace, "specialisation": specialisation}
                result[key] = {**row, **known, **needs}
            result[key]["cases"] = [*dict.fromkeys([*result[key]["cases"], *kernel["cases"]])]
    return list(result.values())


def _needs(builder: Any, kernel: dict[str, Any], target: str, text: str, judged: bool) -> dict[str, Any]:
    """tilelang_lower.lower's result, with registers and spills where nvcc is there and the judge times the kernel."""
    version = str(importlib.import_module("tilelang").__version__)
    configs = repr(getattr(builder, "pass_configs", None))
    assembled = judged and target == "sm_80" and nvcc.find() is not None

    def make() -> dict[str, Any]:
        needs = tilelang_lower.lower(builder, kernel["arguments"], target)
        code = needs.pop("source", None)
        return {**needs, **_assembled(code)} if code and assembled else needs

    own = Path(tilelang_lower.__file__).read_bytes()
    needs: dict[str, Any] = store.remembered((version, target, configs, text, str(assembled), own), make)
    return needs


def _assembled(code: str) -> dict[str, Any]:
    """Registers and spills of a source lowered for sm_80; the static shared memory is counted already."""
    root = Path(str(importlib.import_module("tilelang").__file__)).parent
    options = [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cu"
        path.write_text(code, encoding="utf-8")
        try:
            kernels = nvcc.usage(path, "sm_80", options)
        except KernelFault as fault:
            return {"error": fault.message}
    return {name: max(k[name] for k in kernels.values()) for name in ("registers", "spills")}


def _tiles(text: str) -> str:
    """What decides the needs of a program: its tiles by scope, type and number of elements, its threads, its loops."""
    tiles = []
    for shape, kind, scope in re.findall(r'alloc_buffer\(\(([\d, ]+)\), "(\w+)"(?:, scope="([\w.]+)")?', text):
        elements = 1
        for extent in shape.split(","):
            elements *= int(extent) if extent.strip() else 1
        tiles.append(f"{scope}:{kind}:{elements}")
    marks = re.findall(r'"(?:tl\.launch_threads|num_stages)": [^,}]*', text)
    return " ".join([*sorted(tiles), *marks, str(text.count("gemm"))])
