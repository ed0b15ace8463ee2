"""`make bench BASELINE=1` and `OURS=1`: a tutorial's grids, timed with the library or with our kernels. One CSV each.

A row is written as soon as it is measured, so that an interrupted run keeps what it has; another run starts a new file.
Where there is no time, its columns hold a word: OOM, SUSPECT (a rate above the device's peak, or no kernel ran), WRONG
(the output is not what the reference gives), ERROR, NOT_COVERED (our contract leaves the point out). Beside each CSV a
JSON document says why, with the device, its clocks and the versions. Imports no torch.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import difflib
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from harness import catalog, journal, plan, runner
from harness.bench import calibration, engine, record, telemetry
from harness.console import printable
from harness.devices import Device
from harness.runner import Job
from harness.source import load_module
from harness.verdict import CaseResult, ExitCode, KitError, Verdict

if TYPE_CHECKING:
    from tasks.common.grid import Grid

DEFAULT_GRID = "tutorial"
BUDGET_S = 0.5  # of timed calls per point: 432 points of flash-attention alone are to end within half an hour
DEADLINE_S = 600.0  # after which a point is taken to hang, building and repetition not counted
BUILD_S = 1800.0  # a library may build its kernels at the first call: 200 s on 16 cores for FlashInfer's
WORKER = (sys.executable, "-m", "harness.bench.grids_worker")
_WORDS = {
    Verdict.OUT_OF_MEMORY: "OOM",
    Verdict.SUSPECT_TIME: "SUSPECT",
    Verdict.WRONG_ANSWER: "WRONG",
    Verdict.NON_FINITE: "WRONG",
}
# A column of figures: the record's name for it, its form in the CSV, its form in a progress line.
_FIGURES = {
    "time_ms": (("ours_ms", "peer_ms"), ".6f", "{:.3f}ms"),
    "bandwidth_GB_s": (("gb_s",), ".3f", "{:.2f} GB/s"),
    "tflops": (("tflops",), ".3f", "{:.2f} TFLOPs"),
}


def _now() -> datetime:
    return datetime.now(timezone.utc)


def folder(grid: str) -> Path:
    """Where the CSVs of a grid go."""
    return catalog.ROOT / "results" / grid


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench` that are about grids."""
    parser.add_argument("--baseline", action="store_true", help="time the libraries on a tutorial's grids, into CSVs")
    parser.add_argument("--ours", action="store_true", help="time our kernels on the same grids")
    parser.add_argument("--grid", help=f"which grids; {DEFAULT_GRID} by default")
    parser.add_argument("--api", help="one CSV of them, as its file's name begins")
    parser.add_argument("--points", help="which rows, as in 1-5")


def wanted(options: argparse.Namespace) -> bool:
    """True when the command is about grids. KitError for an option that means nothing without them."""
    if options.baseline and options.ours:
        raise KitError("BASELINE=1 and OURS=1: give one of them; each writes CSVs of its own.")
    if not (options.baseline or options.ours):
        for name in ("grid", "api", "points"):
            if getattr(options, name):
                raise KitError(
                    f"{name.upper()}={getattr(options, name)}: say whose kernels to time, BASELINE=1 or OURS=1."
                )
    return bool(options.baseline or options.ours)


def of_task(task: str) -> dict[str, tuple[Grid, ...]]:
    """A task's grids by name; none for a task without a grids.py."""
    path = catalog.grids_path(task)
    return dict(vars(load_module(path, "grids"))["GRIDS"]) if path.is_file() else {}


def find(task: str, name: str, api: str) -> Grid:
    """One grid."""
    return next(grid for grid in of_task(task)[name] if grid.api == api)


def choose(name: str, task: str | None, api: str | None) -> list[tuple[str, Grid]]:
    """(task, grid) of those asked for, in the order of tasks. KitError says what there is instead."""
    every = {each: of_task(each) for each in catalog.tasks()}
    there = sorted({each for grids in every.values() for each in grids})
    if name not in there:
        raise KitError(f"GRID={name}: no such grid; choose one of {', '.join(there)}.")
    if task and name not in every[catalog.check_task(task)]:
        others = ", ".join(each for each, grids in every.items() if name in grids)
        raise KitError(f"TASK={task}: it has no grid {name}; those that have are {others}.", ExitCode.MISSING_FILE)
    found = [(each, grid) for each, grids in every.items() if task in (None, each) for grid in grids.get(name, ())]
    chosen = [(each, grid) for each, grid in found if api is None or f"{grid.api}_".startswith(f"{api}_")]
    if not chosen:
        near = difflib.get_close_matches(str(api), [grid.api for _, grid in found], n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(grid.api for _, grid in found)}."
        raise KitError(f"API={api}: no such CSV; {hint}")
    return chosen


def parse_points(text: str | None, chosen: Sequence[tuple[str, Grid]]) -> list[int] | None:
    """Numbers of rows, None for all. KitError where a grid has no such row."""
    if text is None:
        return None
    numbers = plan.parse_cases(text, "POINTS")
    for _, grid in chosen:
        if numbers[-1] > len(grid.points):
            last = len(grid.points)
            raise KitError(f"POINTS={text}: {grid.api} has points 1 to {last}.", ExitCode.MISSING_FILE)
    return numbers


def library_of(grid: Grid) -> int:
    """The number of the first library that is installed. KitError (ENVIRONMENT) names what is missing."""
    for number, library in enumerate(grid.libraries):
        if importlib.util.find_spec(library.module) is not None:
            return number
    names = " nor ".join(library.module for library in grid.libraries)
    extra = grid.libraries[-1].module.replace("_", "-")
    neither = "neither " if len(grid.libraries) > 1 else ""
    verb = "is" if neither else "is not"
    raise KitError(
        f"{grid.api} is timed with a library, and {neither}{names} {verb} installed; make env EXTRA={extra}.",
        ExitCode.ENVIRONMENT,
    )


class Output:
    """One CSV and the JSON document beside it. The CSV appears with its first row."""

    def __init__(self, grid: Grid, name: str, where: Path, head: dict[str, Any], language_column: bool) -> None:
        """`name`: what the files are called up to the date."""
        self.grid, self.rows = grid, 0
        self.words: collections.Counter[str] = collections.Counter()
        self._stem = where / f"{name}_{datetime.fromisoformat(head['date']):%Y%m%d_%H%M%S}"
        self._columns = [*grid.columns, *(["language"] if language_column else [])]
        self._head, self._records = head, list[dict[str, Any]]()
        self._file: IO[str] | None = None

    @property
    def path(self) -> Path:
        """The CSV."""
        return self._stem.with_name(self._stem.name + ".csv")

    def add(self, result: CaseResult) -> str:
        """Write the row of a point; gives what a progress line says of it after the point."""
        entry = record.record(result)
        point = self.grid.points[result.case - 1]
        row: dict[str, Any] = {"api": self.grid.api, **point, "language": _kernel(result)}
        word = "" if result.ok else _WORDS.get(result.worst, "ERROR")
        if result.worst is Verdict.SKIPPED and self.grid.uncovered(point):
            word = "NOT_COVERED"
        said = []
        for column in (column for column in self.grid.columns if column in _FIGURES):
            names, form, words = _FIGURES[column]
            value = next((entry[name] for name in names if entry[name] is not None), None)
            row[column] = word or format(value, form)
            said.append(words.format(value) if not word else "")
        self._write({column: row[column] for column in self._columns})
        self._records.append(entry)
        self.rows += 1
        self.words[word] += 1
        if not word:
            return ", ".join(said)
        return word if word == "OOM" else f"{word} ({' '.join(result.detail.split())})"

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("x", encoding="utf-8", newline="")
                csv.writer(self._file, lineterminator="\n").writerow(self._columns)
            csv.DictWriter(self._file, self._columns, lineterminator="\n").writerow(row)
            self._file.flush()
        except OSError as error:
            raise KitError(f"{self.path}: the row cannot be written there ({error.strerror or error}).") from None

    def close(self, clocks: Mapping[str, Any]) -> None:
        """End the CSV, and write the JSON document of its rows."""
        if self._file is None:
            return
        self._file.close()
        self._head["clocks"] = {**self._head["clocks"], "after": clocks}
        beside = {**self.document(), "csv": self.path.name}  # a kept file says nothing of this machine's folders
        text = json.dumps(beside, indent=1, allow_nan=False) + "\n"
        self.path.with_suffix(".json").write_text(text, encoding="utf-8")

    def document(self) -> dict[str, Any]:
        """All that is known of the rows, as plain JSON."""
        return {**journal.plain(self._head), "csv": str(self.path), "records": self._records}

    def summary(self) -> str:
        """The file and how its rows came out."""
        path = self.path.relative_to(catalog.ROOT) if self.path.is_relative_to(catalog.ROOT) else self.path
        others = "".join(f", {number} {word}" for word, number in sorted(self.words.items()) if word)
        return f"{path}: {self.rows} rows, {self.words['']} timed{others}"


def _kernel(result: CaseResult) -> str:
    return ":".join(filter(None, [result.language, result.variant]))


@dataclasses.dataclass
class Run:
    """What a command does: `jobs` for each grid, and what to print of jobs that cannot be."""

    grids: list[tuple[Grid, str, list[Job]]]  # with the name of its files
    left_out: list[str]


def lay_out(options: argparse.Namespace, device: Device) -> Run:
    """The jobs behind a command on this device, all but the calibration in their settings. Raises KitError."""
    name = options.grid or DEFAULT_GRID
    chosen = choose(name, options.task, options.api)
    numbers = parse_points(options.points, chosen)
    budget_s = engine.parse_budget(options.budget) if options.budget else BUDGET_S

    def on_grid(job: Job, grid: Grid, **settings: Any) -> Job:
        return dataclasses.replace(
            job,
            suite=grid.api,
            config=str(catalog.grids_path(job.task)),
            cases=numbers or list(range(1, len(grid.points) + 1)),
            deadline_s=DEADLINE_S + budget_s,
            settings={**job.settings, "grid": name, "time_budget_s": budget_s, **settings},
        )

    grids = []
    if options.baseline:
        for task, grid in chosen:
            number = library_of(grid)
            bare = Job(task, "", "", "", "", str(catalog.grids_path(task)), None, device.kind, 0.0, {}, False)
            files = "_".join(filter(None, [grid.api, grid.libraries[number].tag]))
            grids.append((grid, files, [on_grid(bare, grid, library=number, startup_s=BUILD_S)]))
        return Run(grids, [])
    request = plan.Request(task=options.task, language=options.lang, suite="judge", variant=options.variant)
    todo = plan.make(request, device)
    for task, grid in chosen:
        jobs = [on_grid(job, grid, library=None) for job in todo.jobs if job.task == task]
        if jobs:
            grids.append((grid, f"{grid.api}_ours", jobs))
    tasks = {task for task, _ in chosen}
    return Run(grids, [f"{_kernel(r)}: {r.detail}" for r in todo.skipped if r.task in tasks])


def check(options: argparse.Namespace) -> None:
    """Raise KitError for what is wrong with the options on any machine."""
    parse_points(options.points, choose(options.grid or DEFAULT_GRID, options.task, options.api))
    for name in ("suite", "cases", "config", "file"):
        if getattr(options, name):
            raise KitError(f"{name.upper()}={getattr(options, name)}: it means nothing on a grid; leave it out.")
    if options.baseline and options.lang:
        raise KitError(f"LANG={options.lang}: BASELINE=1 times libraries, not our kernels; leave it out, or OURS=1.")


def run(options: argparse.Namespace, words: Sequence[str], now: Callable[[], datetime] = _now) -> ExitCode:
    """The command: a line per point, at the end of each CSV where it lies; with --json, both on stderr."""
    check(options)
    where = engine.folder(options.out) if options.out else folder(options.grid or DEFAULT_GRID)
    device = engine.gpu(options.device)
    todo = lay_out(options, device)
    peaks = calibration.obtain(device)
    stream = sys.stderr if options.json else sys.stdout
    for line in todo.left_out:
        print(line, file=stream)
    outputs: list[Output] = []
    for grid, name, jobs in todo.grids:
        clocks = telemetry.read(device.kind).to_json()
        head = record.head(device, record.make_command(words), now(), clocks, dict(peaks))
        output = Output(grid, name, where, head, options.ours)
        outputs.append(output)
        try:
            calibrated = [dataclasses.replace(job, settings={**job.settings, "calibration": peaks}) for job in jobs]
            runner.run_jobs(calibrated, functools.partial(_receive, output, stream), 1, WORKER)
        finally:
            output.close(telemetry.read(device.kind).to_json())
            if output.rows:
                print(output.summary(), file=stream)
    code = _code(outputs, options.ours)
    if options.json:
        documents = [output.document() for output in outputs if output.rows]
        print(json.dumps({"tables": documents, "exit_code": int(code)}, allow_nan=False))
    return code


def _receive(output: Output, stream: IO[str], result: CaseResult) -> None:
    """Write and show a point."""
    grid = output.grid
    if not result.language and result.worst is Verdict.SKIPPED:  # the machine lacks something, whatever the point
        raise KitError(f"{grid.api}: {result.detail}", ExitCode.ENVIRONMENT)
    said = output.add(result)
    whose = f"{_kernel(result)} " if result.language else ""
    line = f"{whose}[{result.case}/{len(grid.points)}] {grid.label(grid.points[result.case - 1])}: {said}"
    print(printable(line), file=stream, flush=True)


def _code(outputs: Sequence[Output], ours: bool) -> ExitCode:
    """A library that cannot do a point is a finding; one of our kernels that cannot is a failure."""
    words = {word for output in outputs for word in output.words}
    if ours and words - {"", "OOM", "NOT_COVERED"}:
        return ExitCode.REJECTED
    return ExitCode.OK if "" in words else ExitCode.NOTHING_RAN
