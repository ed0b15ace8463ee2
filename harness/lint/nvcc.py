"""Registers, spills and static shared memory of a CUDA source, as nvcc reports them. Needs nvcc, but no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.verdict import KernelFault, Verdict


def find() -> str | None:
    """nvcc on PATH or where its installer puts it."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def usage(source: Path, arch: str, options: Sequence[str] = ()) -> dict[str, dict[str, int]]:
    """By kernel: {"registers" per thread, "spills" bytes per thread, "static" bytes of shared memory}.

    Kernels go by their plain name; of the instances of a template the largest number counts. `arch` is sm_80 or sm_90.
    Raises KernelFault (COMPILE_ERROR) with the first error line. nvcc must be there (`find`).
    """
    tool = find()
    assert tool is not None
    exact = f"{arch}a" if arch == "sm_90" else arch  # wgmma, which TileLang emits for sm_90, is in sm_90a only
    with tempfile.TemporaryDirectory() as folder:
        command = [tool, "-O3", "-std=c++17", f"-arch={exact}", "-Xptxas", "-v", "-cubin", *options]
        command += ["-o", str(Path(folder) / "out.cubin"), str(source)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line.lower()), f"exit code {done.returncode}")
        raise KernelFault(Verdict.COMPILE_ERROR, first.replace(str(source), source.name)[:300])
    return parse(done.stderr + done.stdout)


def parse(report: str) -> dict[str, dict[str, int]]:
    """What `ptxas -v` says, by kernel (see `usage`)."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in report.splitlines():
        if entry := re.search(r"Compiling entry function '([^']+)'", line):
            name = plain_name(entry[1])
            found.setdefault(name, {"registers": 0, "spills": 0, "static": 0})
        elif name:
            most = found[name]
            for key, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("spills", r"(\d+) bytes spill stores"),
                ("spills", r"(\d+) bytes spill loads"),
                ("static", r"(\d+) bytes smem"),
            ):
                if number := re.search(pattern, line):
                    most[key] = max(most[key], int(number[1]))
    return found


def plain_name(mangled: str) -> str:
    """The innermost identifier of a mangled name without its template arguments: _ZN1a3fooILi1EEEvv gives foo."""
    if not mangled.startswith("_Z"):
        return mangled
    nested = mangled.startswith("_ZN")
    at, name = 2 + nested, mangled
    while number := re.match(r"\d+", mangled[at:]):
        start = at + len(number[0])
        at = start + int(number[0])
        name = mangled[start:at]
        if not nested:  # what follows are the parameters' types
            break
    return name
