"""`sanitize`: the C++ submissions under compute-sanitizer, one line per task, case and tool. Needs an NVIDIA GPU.

One process per task and tool runs all cases, since starting the tool takes seconds. Where it is not clean each case
runs again alone, so that what was found has a case; a device fault would otherwise take the cases after it along. A
case is clean when the tool says so and both of its runs left the right output: a run in which nothing ran is none.

Unlike `check` this process makes the arguments itself: only the kit's own suites can be named. The submission is run
by the driver, never here.
"""

from __future__ import annotations

import argparse
import ctypes.util
import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import cache, catalog, plan
from harness.devices import Device
from harness.languages import cuda
from harness.runner import Job
from harness.sanitize import report
from harness.text import shown
from harness.verdict import ExitCode, KernelFault, KitError, Verdict

if TYPE_CHECKING:
    from harness.contract import Contract
    from harness.sanitize.cases import Written

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DEFAULT_TOOLS = ("memcheck", "racecheck")
FOUND = 99  # what compute-sanitizer is told to end with when it has found something
DEADLINE_S = 600.0  # for one process, all cases of a task under one tool
_NVCC = Path("/usr/local/cuda/bin")


class Target(NamedTuple):
    """What runs a submission: `build` compiles it, `memory` is the driver's, `tool` the sanitizer's path."""

    build: Callable[[Job], Path]
    memory: str
    tool: str
    deadline_s: float


@dataclasses.dataclass
class Line:
    """What is known of one case under one tool. `errors`: None when the tool did not come to its end."""

    job: Job
    tool: str
    case: int  # 0: of all cases together
    label: str
    errors: int | None = None
    margin: float | None = None
    verdict: Verdict = Verdict.PASS
    detail: str = ""

    def text(self) -> str:
        """One row of the table."""
        name = self.job.task + (f":{self.job.variant}" if self.job.variant else "")
        found = "-" if self.errors is None else "clean" if self.errors == 0 else f"{self.errors} errors"
        margin = "-" if self.margin is None else f"{self.margin:.2f}"
        row = f"{name:<16} {self.tool:<10} {self.case or 'all':>4}  {self.label:<24} {found:>10} {margin:>8}"
        return row + ("" if self.verdict is Verdict.PASS else f"  {self.verdict}: {self.detail}")


def add(commands: Any) -> None:
    """Add the subcommand to the command line's parser."""
    parser = commands.add_parser(
        "sanitize", allow_abbrev=False, help="on an NVIDIA GPU: the C++ submissions under compute-sanitizer"
    )
    parser.set_defaults(run=_run)
    parser.add_argument("--task", help="one task; all of them without it")
    parser.add_argument("--suite", default="tiny", help="tiny by default: a sanitizer slows kernels down a lot")
    parser.add_argument("--cases", help="which cases, as in 1,3-5")
    parser.add_argument("--variant", default="plain", help="plain: the file to paste; hopper: hopper.* beside it; all")
    parser.add_argument("--tool", help=f"one of {', '.join(TOOLS)}; {' and '.join(DEFAULT_TOOLS)} without it")
    parser.add_argument("--deadline", metavar="SECONDS", help=f"for one task and tool, {DEADLINE_S:g} by default")


def _run(options: argparse.Namespace, words: list[str]) -> int:
    if options.tool and options.tool not in TOOLS:
        raise KitError(f"TOOL={shown(options.tool)}: no such tool; choose one of {', '.join(TOOLS)}.")
    deadline_s = DEADLINE_S if options.deadline is None else plan.parse_deadline(options.deadline)
    if options.task:
        catalog.check_task(options.task)
    device = plan.pick_device(None)
    target = find_target(device, deadline_s)
    asked = plan.Request(
        task=options.task, language="cuda", suite=options.suite, cases=options.cases, variant=options.variant
    )
    todo = plan.make(asked, device)
    tools = (options.tool,) if options.tool else DEFAULT_TOOLS
    print(f"{device.name}, {target.tool}")
    print(f"{'task':<16} {'tool':<10} {'case':>4}  {'label':<24} {'found':>10} {'margin':>8}")
    started = time.monotonic()
    lines: list[Line] = []
    for job in todo.jobs:
        for line in judge(job, tools, target):
            lines.append(line)
            print(line.text(), flush=True)
    for skipped in todo.skipped:
        print(f"{skipped.task:<16} SKIPPED: {skipped.detail}")
    return conclude(lines, time.monotonic() - started)


def conclude(lines: Sequence[Line], seconds: float) -> ExitCode:
    """Print the sum and give the exit code."""
    good = sum(line.verdict is Verdict.PASS for line in lines)
    print(f"{good} of {len(lines)} clean and right; {seconds:.1f} s")
    if not lines:
        return ExitCode.NOTHING_RAN
    codes = {line.verdict for line in lines} - {Verdict.PASS}
    only = {Verdict.COMPILE_ERROR: ExitCode.COMPILE_ERROR, Verdict.TIMEOUT: ExitCode.TIMEOUT}
    return (
        ExitCode.OK if not codes else only.get(codes.pop(), ExitCode.REJECTED) if len(codes) == 1 else ExitCode.REJECTED
    )


# -- the machine ------------------------------------------------------------------------------------------------------


def find_target(device: Device, deadline_s: float) -> Target:
    """What runs submissions on this machine. KitError when it has no NVIDIA GPU (13), or lacks a tool (14)."""
    if device.kind != "cuda":
        message = f"compute-sanitizer needs an NVIDIA GPU and this is {device.name} ({device.kind}); without a GPU "
        raise KitError(message + "`make check LANG=cuda` finds such faults in the simulator.", ExitCode.NEEDS_DEVICE)
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=str(_NVCC))
    folders = [str(Path(nvcc).resolve().parent)] if nvcc else []
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=":".join([*folders, str(_NVCC)])
    )
    if found is None:
        message = "compute-sanitizer is missing; it comes with the CUDA toolkit: put its bin folder on PATH."
        raise KitError(message, ExitCode.ENVIRONMENT)
    return Target(lambda job: _compile(job, device), str(find_cudart(nvcc)), found, deadline_s)


def _compile(job: Job, device: Device) -> Path:
    return cuda.build_for_gpu(Path(job.submission).resolve(), device, job.variant)


def find_cudart(nvcc: str | None) -> Path | str:
    """A CUDA runtime for the driver: that of the nvcc that compiles, else the one that torch's wheels bring along.

    Which one matters little (see driver.py), as long as the machine's driver is new enough for it, and it is for the
    one that torch runs with and for the toolkit whose kernels are to run.
    """
    folders: list[Path] = []
    if nvcc is not None:
        toolkit = Path(nvcc).resolve().parent.parent
        folders += [toolkit / "lib64", *sorted((toolkit / "targets").glob("*/lib"))]
    wheels = importlib.util.find_spec("nvidia")
    for root in (wheels.submodule_search_locations or ()) if wheels is not None else ():
        folders += [Path(root) / "cuda_runtime" / "lib", *sorted(Path(root).glob("cu[0-9]*/lib"), reverse=True)]
    for folder in folders:
        for path in sorted(folder.glob("libcudart.so*"), key=lambda path: len(path.name)):
            return path
    found = ctypes.util.find_library("cudart")
    if found is None:
        message = "libcudart is missing: neither nvcc's toolkit nor torch's wheels have it; put nvcc on PATH."
        raise KitError(message, ExitCode.ENVIRONMENT)
    return found


# -- one task ---------------------------------------------------------------------------------------------------------


def judge(job: Job, tools: Sequence[str], target: Target) -> Iterator[Line]:
    """All lines of one submission, tool after tool. KitError when a case that was named does not exist."""
    from harness.contract import load_contract

    try:
        library = target.build(job)
    except KernelFault as fault:
        yield Line(job, "nvcc", 0, "", verdict=fault.verdict, detail=fault.message)
        return
    contract = load_contract(catalog.reference_path(job.task))
    scratch = cache.folder()
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="sanitize-") as folder:
        cases = list(_write(job, contract, Path(folder)))
        for tool in tools:
            yield from _under(tool, job, library, cases, contract, target)


def _write(job: Job, contract: Contract, folder: Path) -> Iterator[Written]:
    from harness.package import load_package
    from harness.sanitize.cases import write

    package = load_package(Path(job.config))
    count = package.count()
    for number in job.cases or range(1, count + 1):
        if number > count:
            message = f"CASES={number}: {job.task} has cases 1 to {count} in suite {job.suite}."
            raise KitError(message, ExitCode.MISSING_FILE)
        place = folder / f"case-{number}"
        place.mkdir()
        yield write(package, contract, number, place)


def _under(
    tool: str, job: Job, library: Path, cases: Sequence[Written], contract: Contract, target: Target
) -> Iterator[Line]:
    """The lines of all cases under one tool."""
    lines = _together(tool, job, library, cases, contract, target)
    verdicts = {line.verdict for line in lines}
    # After a time-out each alone would take as long again; a wrong output beside a clean report has its case already.
    if len(cases) == 1 or Verdict.TIMEOUT in verdicts or not any(line.errors != 0 for line in lines):
        yield from lines
        return
    alone = [_together(tool, job, library, [case], contract, target)[0] for case in cases]
    yield from alone
    if all(line.errors == 0 for line in alone):  # it takes several cases in one process
        yield dataclasses.replace(lines[0], case=0, label="in one process", margin=None)


def _together(
    tool: str, job: Job, library: Path, cases: Sequence[Written], contract: Contract, target: Target
) -> list[Line]:
    """Run cases in one process. What the tool found is in each of their lines, as it does not say of which it is."""
    from harness.sanitize.cases import compare, forget

    for case in cases:
        forget(case)
    code, text = _execute(tool, library, cases, target)
    found = report.parse(text)
    lines = []
    for case in cases:
        line = Line(job, tool, case.number, case.label, found.errors)
        line.margin, wrong = compare(case, contract)
        if code is None:
            line.verdict, line.detail = (
                Verdict.TIMEOUT,
                f"stopped after {target.deadline_s:g} s; CASES takes fewer at once",
            )
        elif found.errors:
            line.verdict = Verdict.RACE if tool == "racecheck" else Verdict.RUNTIME_ERROR
            line.detail = found.first or _last(text)
        elif found.errors is None or code != 0:
            line.errors = None
            line.verdict, line.detail = Verdict.RUNTIME_ERROR, f"{_ending(code)}: {_last(text)}"
        elif wrong:
            line.verdict, line.detail = Verdict.WRONG_ANSWER, wrong
        lines.append(line)
    return lines


def _execute(tool: str, library: Path, cases: Sequence[Written], target: Target) -> tuple[int | None, str]:
    """Run the driver under the tool: its exit code, None when it took too long, and all that was printed."""
    # Whatever initcheck is to find must not be written by us.
    fill = "0" if tool == "initcheck" else "1"
    driver = [sys.executable, "-m", "harness.sanitize.driver", str(library), target.memory, fill]
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "100"]
    process = subprocess.Popen(
        [target.tool, *options, *driver, *(str(case.folder) for case in cases)],
        cwd=catalog.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=target.deadline_s)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        return None, ""
    finally:  # an interrupt as well must leave nothing behind; what is not yet waited for keeps its number
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _ending(code: int) -> str:
    if code == 0:
        return "compute-sanitizer gave no summary"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"


def _last(text: str) -> str:
    """What was printed last by anyone but the tool, else the tool's own last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith("=========")]
    return shown((own or lines or ["it printed nothing"])[-1])
