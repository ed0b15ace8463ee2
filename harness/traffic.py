"""`make traffic`: the bytes that a call moves to and from DRAM, by ncu, beside those that it must move. NVIDIA only.

One process per case, which calls the submission twice: ncu counts the second call's kernels alone, each with caches
flushed before it, so that what one kernel leaves in the L2 for the next is not seen. The floors are those of the
contract's `workload`: every live input read once, the output written once. Only reads have a ratio: what is still in
the L2 when a kernel ends has not been counted as written. Imports no torch.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import catalog, child, plan
from harness.console import printable
from harness.runner import Job
from harness.text import shown
from harness.verdict import ExitCode, KitError

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
DEADLINE_S = 600.0
_DRIVER = (sys.executable, "-m", "harness.traffic_driver")
_NCU = Path("/usr/local/cuda/bin")
_OPTIONS = ("--profile-from-start", "off", "--target-processes", "all", "--csv", "--print-units", "base")


class Kernel(NamedTuple):
    """One launch, as ncu tells it."""

    name: str
    read: int
    written: int


def add(commands: Any) -> None:
    """Add the subcommand to the command line's parser."""
    parser = commands.add_parser("traffic", allow_abbrev=False, help="on an NVIDIA GPU: bytes to and from DRAM, by ncu")
    parser.set_defaults(run=_run)
    parser.add_argument("--task", help="one task; all of them without it")
    parser.add_argument("--lang", help="cuda, triton or tilelang; all of them without it")
    parser.add_argument("--suite", help="judge by default")
    parser.add_argument("--cases", help="which cases, as in 1,3-5")
    parser.add_argument("--config", help="a problem package of your own instead of a suite")
    parser.add_argument("--variant", default="plain", help="plain: the file to paste; hopper: hopper.* beside it; all")


def parse(text: str) -> list[Kernel]:
    """The launches in what ncu printed, in their order; lines of others are skipped. [] where it counted nothing.

    ValueError when a launch lacks one of the two counters.
    """
    lines = text.splitlines()
    head = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        return []
    names: dict[str, str] = {}
    counters: dict[str, dict[str, int]] = {}
    for row in csv.DictReader(line for line in lines[head:] if line.startswith('"')):
        if row.get("Metric Name") in (READ, WRITTEN):
            names[row["ID"]] = row["Kernel Name"]
            value = float(row["Metric Value"].replace(",", ""))
            counters.setdefault(row["ID"], {})[row["Metric Name"]] = round(value)
    lacking = [names[number] for number, found in counters.items() if len(found) < 2]
    if lacking:
        raise ValueError(f"ncu gave no {READ} or no {WRITTEN} for {lacking[0]}")
    return [Kernel(names[number], found[READ], found[WRITTEN]) for number, found in counters.items()]


def find_ncu() -> str:
    """ncu's path. KitError where it is missing."""
    found = shutil.which("ncu") or shutil.which("ncu", path=str(_NCU))
    if found is None:
        message = "ncu is missing; it comes with the CUDA toolkit: put its bin folder on PATH."
        raise KitError(message, ExitCode.ENVIRONMENT)
    return found


def _run(options: argparse.Namespace, words: list[str]) -> int:
    device = plan.pick_device(None)
    if device.kind != "cuda":
        message = f"ncu needs an NVIDIA GPU and this is {device.name} ({device.kind}); without one "
        raise KitError(message + "`make counts` counts the simulator's bytes.", ExitCode.NEEDS_DEVICE)
    ncu = find_ncu()
    todo = plan.make(plan.Request.of(options), device)
    print(f"{device.name}, {ncu}")
    heads = f"{'floor MB':>9} {'read MB':>9}  ratio {'floor MB':>9} {'written':>9}"
    print(f"{'task':<15} {'kernel':<16} {'case':>4}  {'label':<28} {heads}")
    counted, failed = 0, 0
    for job in todo.jobs:
        cases = job.cases or _every(job)
        for case in cases:
            text, good = _line(job, case, ncu)
            print(text, flush=True)
            counted, failed = counted + good, failed + (not good)
    for skipped in todo.skipped:
        print(f"{skipped.task:<15} SKIPPED: {skipped.detail}")
    print(f"{counted} of {counted + failed} cases counted")
    if not counted and not failed:
        return ExitCode.NOTHING_RAN
    return ExitCode.RUNTIME_ERROR if failed else ExitCode.OK


def _every(job: Job) -> Sequence[int]:
    """All cases of a job's package; a process of its own reads it, since that takes torch."""
    try:
        return range(1, int(child.ask([*_DRIVER, "cases", job.config])) + 1)
    except child.NoAnswer as last:
        raise KitError(f"{job.config}: its cases could not be counted ({last}).", ExitCode.PACKAGE_ERROR) from None


def _line(job: Job, case: int, ncu: str) -> tuple[str, bool]:
    """A row of the table, and whether it has figures."""
    name = ":".join(filter(None, [job.language, job.variant]))
    start = f"{job.task:<15} {name:<16} {case:>4}  "
    with tempfile.TemporaryDirectory(prefix="traffic-") as folder:
        answer, request = Path(folder, "answer.json"), Path(folder, "request.json")
        fields = {"task", "language", "variant", "config", "submission", "device", "settings"}
        asked = {field: value for field, value in vars(job).items() if field in fields}
        request.write_text(json.dumps({**asked, "case": case, "answer": str(answer)}), encoding="utf-8")
        text = _execute([ncu, *_OPTIONS, "--metrics", f"{READ},{WRITTEN}", *_driver(request)])
        try:
            kernels = parse(text)
        except ValueError as error:
            return f"{start}{error}", False
        if not answer.is_file() or not kernels:
            last = next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
            return f"{start}nothing was counted: {printable(shown(last))}", False
        told = json.loads(answer.read_text(encoding="utf-8"))
    read, written = sum(kernel.read for kernel in kernels), sum(kernel.written for kernel in kernels)
    figures = f"{told['read'] / 1e6:>9.1f} {read / 1e6:>9.1f} {read / max(told['read'], 1):>6.3f}"
    figures += f" {told['written'] / 1e6:>9.1f} {written / 1e6:>9.1f}"
    rows = [f"{start}{printable(told['label']):<28} {figures}"]
    parts = ", ".join(f"{printable(name)} {size / 1e6:.1f} MB" for name, size in told["parts"].items())
    if parts:
        rows.append(f"    to be read: {parts}")
    for kernel in kernels if len(kernels) > 1 else ():
        moved = f"read {kernel.read / 1e6:.1f} MB, written {kernel.written / 1e6:.1f} MB"
        rows.append(f"    {printable(kernel.name)[:60]}: {moved}")
    return "\n".join(rows), True


def _driver(request: Path) -> list[str]:
    return [*_DRIVER, "run", str(request)]


def _execute(command: Sequence[str]) -> str:
    """What the command printed on both streams; nothing of it outlives this call."""
    process = subprocess.Popen(
        command,
        cwd=catalog.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=DEADLINE_S)[0]
    except subprocess.TimeoutExpired:
        return f"stopped after {DEADLINE_S:g} s"
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
