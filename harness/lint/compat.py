"""Do the submissions compile under the judge's versions: Triton 3.0.0, TileLang 0.1.10, CUTLASS 3.3 and 4.1?

Each old package lies in a folder of its own, .venv-compat-*, which is put before this environment's packages.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import catalog, ctokens, source
from harness.cpu import maca_build
from harness.lint import Finding, nvcc, resources, store
from harness.lint.resources import Submission, Usage
from harness.verdict import ExitCode, KernelFault, KitError

_STAMP = "kit-stamp.json"
_INSTALLING = threading.Lock()  # two submissions need the same folder


@dataclasses.dataclass(frozen=True)
class Environment:
    """Packages of one folder; `wheels`: the Pythons that they have wheels for."""

    name: str
    packages: tuple[str, ...]
    wheels: str

    @property
    def folder(self) -> Path:
        return catalog.ROOT / f".venv-compat-{self.name}"


TRITON = Environment("triton", ("triton==3.0.0",), "Python 3.8 to 3.12")
# Its library links to libz3.so.4.15 in a folder beside it.
TILELANG = Environment(
    "tilelang", ("tilelang==0.1.10", "apache-tvm-ffi==0.1.10", "z3-solver==4.15.4.0"), "Python 3.8 or newer"
)
CUTLASS = Environment("cutlass", ("nvidia-cutlass==3.3.0.0",), "any Python 3")


@dataclasses.dataclass
class Outcome:
    """One submission under one old version: what was compiled, or why nothing was, and what went wrong."""

    submission: Submission
    line: str
    findings: list[Finding]


def ensure(environment: Environment) -> Path:
    """The environment's folder, filled by pip the first time. KitError in one sentence when pip cannot."""
    with _INSTALLING:
        return _ensure(environment)


def _ensure(environment: Environment) -> Path:
    stamp = {"packages": list(environment.packages), "python": list(sys.version_info[:2])}
    folder = environment.folder
    try:
        if json.loads((folder / _STAMP).read_text(encoding="utf-8")) == stamp:
            return folder
    except (OSError, ValueError):
        pass
    names = ", ".join(environment.packages)
    print(f"Installing {names} into {folder.name}, once", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=catalog.ROOT, prefix=".venv-compat-making-") as beside:
        target = Path(beside) / "packages"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--progress-bar", "off", "--no-deps"]
        command += ["--only-binary", ":all:", "--target", str(target), *environment.packages]
        # "pip install" into the user's home, a common setting, does not go with --target.
        settings = {**os.environ, "PIP_USER": "0"}
        done = subprocess.run(
            command, env=settings, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        if done.returncode:
            raise KitError(_why(environment, done.stderr + done.stdout), ExitCode.ENVIRONMENT)
        (target / _STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        target.rename(folder)
    return folder


def _why(environment: Environment, output: str) -> str:
    names = ", ".join(environment.packages)
    if "No matching distribution" in output and "(from versions: none)" not in output:
        have = ".".join(map(str, sys.version_info[:2]))
        return f"{names} has no wheel for Python {have}, only for {environment.wheels}; make .venv with one of those."
    lines = [line.strip() for line in output.splitlines() if line.strip().startswith("ERROR")] or ["no reason given"]
    way_out = "run it again with a network or with PIP_FIND_LINKS=folder-of-wheels"
    return f"pip could not get {names} ({lines[-1]}); {way_out}."


def check(usages: Sequence[Usage], jobs: int) -> Iterator[Outcome]:
    """Every submission under its old version, `jobs` at a time, in order as they are done."""
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for outcomes in pool.map(_outcomes, usages):
            yield from outcomes


def _outcomes(usage: Usage) -> list[Outcome]:
    """One, or none for C++ without CuTe."""
    language = usage.submission.language
    if usage.fault:
        return [Outcome(usage.submission, "", resources.findings(usage))]
    if language == "cuda":
        return list(_cute(usage.submission))
    return [_kernels(usage, TRITON if language == "triton" else TILELANG)]


def _kernels(usage: Usage, environment: Environment) -> Outcome:
    """A Triton or TileLang submission: the kernels that the lint compiled, compiled by the old version."""
    path, language = usage.submission.path, usage.submission.language
    targets = ("sm_80",) if language == "triton" else ("sm_80", "sm_90", "gfx942")
    wanted = [row for row in usage.rows if row["target"] in targets]
    module = "harness.lint." + ("triton_compile" if language == "triton" else "tilelang_lower")
    request = {
        "file": str(path),
        "targets": [row["target"] for row in wanted],
        "specialisations": [row["specialisation"] for row in wanted],
    }
    folder = ensure(environment)
    code = [Path(str(part.__file__)).read_bytes() for part in (importlib.import_module(module), source, ctokens)]
    answer = store.remembered(
        ("compat", *environment.packages, sys.version, json.dumps(request), path.read_bytes(), *code),
        lambda: _ask(module, request, folder),
    )
    found = []
    for row, result in zip(wanted, answer["results"], strict=True):
        where = f"{row['kernel']} ({row['cases'][0]}) for {row['target']} under {language} {answer['version']}"
        if "error" in result:
            level = "error" if row["target"] == "sm_80" else "note"
            message, way_out = f"{where}: {result['error']}", "use what that version has"
            found.append(Finding(path, row["line"], "compat", message, way_out, level))
        elif row["target"] == "sm_80" and result.get("async"):
            message = f"{where} has {result['async']} asynchronous copies"
            found.append(Finding(path, row["line"], "async-copy", message, "use no stages in the c500 row"))
    by_target = {target: request["targets"].count(target) for target in dict.fromkeys(request["targets"])}
    counts = ", ".join(f"{count} for {target}" for target, count in by_target.items())
    return Outcome(usage.submission, f"{language} {answer['version']}: kernels compiled: {counts}", found)


def _ask(module: str, request: dict[str, Any], folder: Path) -> Any:
    with tempfile.TemporaryDirectory() as scratch:
        question, answer = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        question.write_text(json.dumps(request), encoding="utf-8")
        places = [str(folder), str(catalog.ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(place for place in places if place),
            "TRITON_CACHE_DIR": scratch,
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [sys.executable, "-m", module, str(question), str(answer)],
            cwd=catalog.ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
            raise KitError(f"{module} with {folder.name} failed: {lines[-1]}", ExitCode.RUNTIME_ERROR)
        return json.loads(answer.read_text(encoding="utf-8"))


def _cute(submission: Submission) -> Iterator[Outcome]:
    """A C++ submission that includes CuTe, against CUTLASS 3.3 and against the copy in TileLang's wheel.

    By nvcc for sm_80; where that is not here by g++, as the simulator compiles.
    """
    path = submission.path
    text = path.read_text(encoding="utf-8", errors="replace")
    if not includes_cute(text):
        return
    tool = nvcc.find()
    found, versions = [], []
    for version, include in _cutlass_folders():
        versions.append(version)
        if tool is None:
            result = _simulated(path, include)  # keeps its own results
        else:
            compiler = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
            parts = ("cute", version, path.read_bytes(), compiler)
            result = store.remembered(parts, functools.partial(_compile, path, include))
        if result:
            found.append(
                Finding(path, 1, "compat", f"against CUTLASS {version}: {result}", "use what that version has")
            )
    how = "by g++ for the simulator (nvcc is not here)" if tool is None else "by nvcc for sm_80"
    missing = "" if len(versions) > 1 else "; TileLang, whose wheel carries the newer one, is not here"
    yield Outcome(submission, f"CUTLASS {' and '.join(versions)}: compiled {how}{missing}", found)


def includes_cute(text: str) -> bool:
    """Whether a C++ text includes a header of CuTe's."""
    tokens = ctokens.solid(text)
    names = [
        "".join(token.text for token in tokens[at + 2 : at + 5])
        for at in range(len(tokens))
        if ctokens.directive(tokens, at) == "include"
    ]
    return any(name.startswith(("<cute/", '"cute/')) for name in names)


def _cutlass_folders() -> Iterator[tuple[str, Path]]:
    """(version, folder of headers) of CUTLASS 3.3, from its package, and of the newer copy that TileLang carries."""
    # This package leaves out cutlass/version.h.
    yield CUTLASS.packages[0].partition("==")[2], ensure(CUTLASS) / "cutlass_library" / "source" / "include"
    spec = importlib.util.find_spec("tilelang")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root) / "3rdparty" / "cutlass" / "include"
        if (folder / "cute").is_dir():
            yield cutlass_version(folder), folder


def cutlass_version(include: Path) -> str:
    """ "4.1.0": what cutlass/version.h says."""
    text = (include / "cutlass" / "version.h").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH) (\d+)", text))
    return ".".join(numbers[name] for name in ("MAJOR", "MINOR", "PATCH"))


def _compile(path: Path, include: Path) -> str:
    """nvcc's first error, or ""."""
    try:
        nvcc.usage(path, "sm_80", [f"-I{include}"])
    except KernelFault as fault:
        return fault.message
    return ""


def _simulated(path: Path, include: Path) -> str:
    """The first error of the simulator's compiler, or ""."""
    try:
        maca_build.build(path, "wave64", [str(include)])
    except KernelFault as fault:
        return fault.message.splitlines()[0]
    return ""
