"""Resources of the c500 row: what a submission's kernels need where they can be compiled without a C500.

A row is a dict of "kernel" and "target", and of what is known: "line", "threads" per block, "shared" bytes per block,
"registers" and "spills" (bytes) per thread, "async" copies, "workspace" bytes, "cases" (labels), or "error".
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import catalog, ctokens
from harness.lint import Finding, nvcc, store
from harness.verdict import ExitCode, KitError

SHARED_LIMIT = 64 * 1024  # bytes per block on the C500
_TIMEOUT_S = 1800.0
# Where a compiler's refusal is the submission's fault. The other targets stand in for the C500 in one respect each.
_DECISIVE = ("c500", "sm_80")
# Where spills say something about the C500: AMD's waves have its 64 lanes; TileLang gives sm_80 its number of threads.
_SPILLS_COUNT = {"triton": ("gfx90a",), "tilelang": ("sm_80",), "cuda": ("sm_80", "sm_90")}
# The kit's code that decides what is found; the rules are none of it.
_CODE = (
    "harness/contract.py",
    "harness/ctokens.py",
    "harness/package.py",
    "harness/source.py",
    "harness/languages/python_source.py",
    "harness/lint/cases.py",
    "harness/lint/nvcc.py",
    "harness/lint/worker.py",
)
_CODE_OF = {
    "cuda": ("harness/cpu/**/*", "harness/languages/cuda.py", "harness/lint/cuda*.py", "harness/lint/reader.py"),
    "triton": ("harness/lint/triton_*.py",),
    "tilelang": ("harness/lint/tilelang_*.py",),
}


@dataclasses.dataclass(frozen=True)
class Submission:
    """A file to look at."""

    task: str
    language: str
    path: Path


@dataclasses.dataclass
class Usage:
    """Rows of one submission. `fault`: why there are none, or ""."""

    submission: Submission
    rows: list[dict[str, Any]]
    notes: list[str]
    fault: str


def contracts(tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By task: {"arguments": names, "scalars": whether each is an integer}."""
    parts = [part for task in tasks for part in _files(f"tasks/{task}/*.py")]
    answer: dict[str, dict[str, Any]] = store.remembered(
        ("contracts", *tasks, *parts, *_files("tasks/common/*.py", "harness/lint/worker.py")),
        lambda: _ask(["contracts", *tasks], "the tasks' contracts"),
    )
    return answer


def measure(submissions: Sequence[Submission], jobs: int) -> list[Usage]:
    """What each submission needs, `jobs` at a time; compiled results are kept by content."""
    versions = _versions()
    # The longest first, so that none of them is left to run alone: TileLang lowers a kernel in 5 s.
    order = sorted(range(len(submissions)), key=lambda at: submissions[at].language != "tilelang")
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        done = dict(zip(order, pool.map(lambda at: _usage(submissions[at], versions), order), strict=True))
    return [done[at] for at in range(len(submissions))]


def _usage(submission: Submission, versions: str) -> Usage:
    task, language, path = submission.task, submission.language, submission.path
    parts = _files(f"tasks/{task}/*.py", "tasks/common/*.py", *_CODE, *_CODE_OF[language])
    answer = store.remembered(
        ("usage", task, language, str(path), path.read_bytes(), versions, *parts),
        lambda: _ask(["usage", task, language, str(path)], f"{task}/{language}"),
    )
    return Usage(submission, answer["rows"], answer["notes"], answer["fault"])


def _files(*patterns: str) -> list[str | bytes]:
    """What the files of these patterns hold, seen from the kit's root."""
    paths = [path for pattern in patterns for path in sorted(catalog.ROOT.glob(pattern)) if path.is_file()]
    return [path.read_bytes() for path in paths if path.suffix != ".pyc"]


def _versions() -> str:
    """Of everything that compiles."""
    found = []
    for name in ("torch", "triton", "tilelang", "nvidia-cutlass"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    tool = nvcc.find()
    if tool is not None:
        found.append(subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout)
    return "\n".join(found)


def _ask(words: list[str], what: str) -> dict[str, Any]:
    """The answer of a worker. KitError when it ends without one."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        # Triton's own cache must not learn what is compiled here: it is not always compiled to the end.
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "harness.lint.worker", words[0], str(answer), *words[1:]]
        try:
            done = subprocess.run(
                command,
                cwd=catalog.ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise KitError(f"Looking at {what} took more than {_TIMEOUT_S:.0f} s.", ExitCode.TIMEOUT) from None
        try:
            result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            raise KitError(
                f"The process that looks at {what} ended with code {done.returncode}: {lines[-1]}",
                ExitCode.RUNTIME_ERROR,
            ) from None
    if "error" in result:
        raise KitError(result["error"], ExitCode(result["code"]))
    return result


def findings(usage: Usage) -> list[Finding]:
    """What the rows of a submission break."""
    path, language = usage.submission.path, usage.submission.language
    if usage.fault:
        return [Finding(path, 1, "compile", usage.fault, "make it run with `make check` first")]
    found = []
    for row in usage.rows:
        line, where = row.get("line") or _line_of(path, row["kernel"]), f"{row['kernel']} on {row['target']}"
        cases = row.get("cases", [])
        of_cases = f" ({cases[0]}{', ...' if len(cases) > 1 else ''})" if cases else ""
        if "error" in row:
            level = "error" if row["target"] in _DECISIVE else "note"
            found.append(Finding(path, line, "compile", f"{where}{of_cases}: {row['error']}", "mend the kernel", level))
        if row.get("shared", 0) > SHARED_LIMIT:
            message = f"{where}{of_cases} needs {row['shared']} bytes of shared memory; a block of the C500 has 65536"
            found.append(Finding(path, line, "resource", message, "use smaller tiles or fewer stages in the c500 row"))
        if row.get("async", 0) and row["target"] == "sm_80":
            message = f"{where}{of_cases} has {row['async']} asynchronous copies in its c500 row"
            stages = {"triton": "num_stages=1", "tilelang": "num_stages=0"}.get(language, "register staging")
            found.append(Finding(path, line, "async-copy", message, f"use {stages} there"))
        if row.get("spills", 0) and row["target"] in _SPILLS_COUNT[language]:
            message = f"{where}{of_cases} spills {row['spills']} bytes per thread"
            found.append(Finding(path, line, "spills", message, "use smaller tiles or more warps", "note"))
    return found


def _line_of(path: Path, kernel: str) -> int:
    """The line where a name first stands as a word; 1 where it does not."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return next((token.line for token in ctokens.solid(text) if token.text == kernel), 1)


def table(usages: Sequence[Usage]) -> list[str]:
    """One line per kernel and target, each number the most of all cases, and what the columns mean."""
    head = ("task", "language", "kernel", "target", "threads", "shared", "registers", "spills", "async", "workspace")
    lines: list[tuple[str, ...]] = [head]
    for usage in usages:
        merged: dict[tuple[str, str], dict[str, int]] = {}
        for row in usage.rows:
            most = merged.setdefault((row["kernel"], row["target"]), {})
            for name in head[4:]:
                if name in row:
                    most[name] = max(most.get(name, 0), row[name])
        for (kernel, target), most in merged.items():
            names = (usage.submission.task, usage.submission.language, kernel, target)
            lines.append((*names, *(str(most.get(name, "-")) for name in head[4:])))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(
            cell.ljust(w) if i < 4 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return [*(line.rstrip() for line in text), *_legend(usages)]


def _legend(usages: Sequence[Usage]) -> list[str]:
    languages = {usage.submission.language for usage in usages if usage.rows}
    lines = [
        "shared: bytes per block, of 65536; spills: bytes per thread; workspace: bytes, most of any case; -: not known."
    ]
    if "cuda" in languages:
        lines.append(
            "C++ on c500: launches as run_kernel plans them, over all suites; async: those that the C500's half names."
        )
        lines.append(
            "On sm_80 and sm_90 the 32-lane half is compiled: whether the common body spills, not what a C500 takes."
        )
    if "triton" in languages:
        lines.append(
            "Triton on sm_80: 4 warps are 128 threads there and 256 lanes on the C500, so only shared memory and"
        )
        lines.append("copies compare; registers and spills are those of gfx90a, whose waves have 64 lanes too.")
    if "tilelang" in languages:
        lines.append(
            "TileLang: lowered for sm_90 and gfx942 (64 lanes) and assembled for sm_80 where a judge case uses it."
        )
    if nvcc.find() is None and languages & {"cuda", "tilelang"}:
        lines.append("nvcc is not here: registers and spills of C++ and TileLang are unknown.")
    return lines
