"""`make accept`: what the kit's files must pass on a GPU, and which of it no record shows of the files as they are.

Demanded of a file to paste: the suites judge, live and large once, tiny and the first judge case twenty times on other
data, its mutants rejected, C++ clean under compute-sanitizer (NVIDIA). Of a Hopper variant: judge, live and tiny once.
Nothing is timed, so several run at a time.

results/accepted-<device>.json keeps, for each demand, the cases that passed and a digest of what they depend on: the
submission, what lies beside it and the suite's package. An edit makes them missing again (one of the harness or of a
reference does not: remove the file then), an interrupt loses the cases under way, and the next run does what is left.
Imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness import catalog, journal, mutants, plan, runner
from harness.bench.record import slug
from harness.devices import Device
from harness.process import Worker
from harness.runner import Job
from harness.sanitize import cli as sanitizer
from harness.text import ranges, shown
from harness.verdict import CaseResult, ExitCode, KitError, Verdict

RESULTS = catalog.ROOT / "results"
REPEAT = 20
PARALLEL = 8  # as for the mutants: more of the largest cases do not fit beside each other
# suite, its cases (None: all), repetitions, which files.
_WANTED = (
    ("judge", None, 1, "all"),
    ("live", None, 1, "all"),
    ("tiny", None, 1, "hopper"),
    ("large", None, 1, "plain"),
    ("tiny", None, REPEAT, "plain"),
    ("judge", "1", REPEAT, "plain"),
)


@dataclasses.dataclass(frozen=True)
class Demand:
    """Cases that a submission must pass. `cases`: those that are asked for, None for all of the suite."""

    key: str
    digest: str
    cases: tuple[int, ...] | None
    job: Job


class Ledger:
    """What has passed on a device, on disk after each case."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device
        try:
            known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            self.seen: dict[str, dict[str, Any]] = dict(known.get("seen", {}))
        except (ValueError, AttributeError, TypeError) as error:
            raise KitError(f"{path}: no record of `make accept` ({error}); mend or remove it.") from None

    def _entry(self, key: str, digest: str) -> dict[str, Any]:
        """What is known of these very files: nothing, where the kept digest is another."""
        entry = self.seen.get(key, {})
        return entry if entry.get("digest") == digest else {"digest": digest, "count": None, "passed": []}

    def missing(self, demand: Demand) -> list[int] | None:
        """The cases that have not passed yet, None where nobody knows how many there are. [] when the demand is met."""
        entry = self._entry(demand.key, demand.digest)
        if demand.cases is not None:
            wanted: Iterable[int] = demand.cases
        elif entry["count"] is None:
            return None
        else:
            wanted = range(1, entry["count"] + 1)
        return [case for case in wanted if case not in entry["passed"]]

    def count(self, demand: Demand, count: int) -> None:
        """How many cases the demand's suite has."""
        self.seen[demand.key] = {**self._entry(demand.key, demand.digest), "count": count}

    def add(self, key: str, digest: str, case: int, passed: bool) -> None:
        """Keep how a case came out. What failed is missing, whatever it was before."""
        entry = self._entry(key, digest)
        others = [number for number in entry["passed"] if number != case]
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        new = {"passed": sorted([*others, case] if passed else others), "date": date, "versions": journal.versions()}
        self.seen[key] = {**entry, **new}
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        text = json.dumps({"device": self.device, "seen": dict(sorted(self.seen.items()))}, indent=1) + "\n"
        part = self.path.with_name(self.path.name + ".part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, self.path)


def ledger_path(device_name: str) -> Path:
    """The file of a device."""
    return RESULTS / f"accepted-{slug(device_name)}.json"


def add(commands: Any) -> None:
    """Add the subcommand to the command line's parser."""
    parser = commands.add_parser(
        "accept", allow_abbrev=False, help="on a GPU: whatever the files as they are have not been seen to pass"
    )
    parser.set_defaults(run=_run)
    parser.add_argument("--task", help="one task; all of them without it")
    parser.add_argument("--lang", help="cuda, triton or tilelang; all of them without it")
    parser.add_argument("--variant", default="all", help="plain: the file to paste; hopper: hopper.* beside it; all")
    parser.add_argument("--device", help="maca or cuda; what the machine has by default")
    parser.add_argument("--jobs", help=f"worker processes at a time, {PARALLEL} by default")
    parser.add_argument("--budget", metavar="SECONDS", help="stop after so long; what passed until then is kept")
    parser.add_argument("--plan", action="store_true", help="list what is missing, run nothing")


def demands(device: Device, task: str | None, language: str | None, variant: str) -> list[Demand]:
    """All demands on the files asked for, those of suites that a task has. Raises KitError."""
    found: list[Demand] = []
    files = {"plain", "hopper"} if variant == "all" else {catalog.check_variant(variant)}
    if not device.tuning.startswith("sm9"):
        files -= {"hopper"}
        if not files:
            message = (
                f"VARIANT=hopper: its kernels need an NVIDIA GPU of compute capability 9.x; this is {device.name}."
            )
            raise KitError(message, ExitCode.NEEDS_DEVICE)
    for suite, cases, repeat, which in _WANTED:
        for name in sorted(files & ({"plain", "hopper"} if which == "all" else {which})):
            times = str(repeat) if repeat > 1 else None
            asked = plan.Request(
                *(task, language, suite, cases), repeat=times, time=False, variant=name, jobs=str(PARALLEL)
            )
            found += [_demand(job, asked) for job in _jobs(asked, device)]
    return found


def _jobs(asked: plan.Request, device: Device) -> list[Job]:
    """The jobs of a request, none for files that do not exist. KitError where this machine cannot run one that does."""
    suite = catalog.suite_file(asked.suite or "")
    if asked.task and not (catalog.TASKS / asked.task / suite).is_file():
        return []
    todo = plan.make(asked, device)
    for result in todo.skipped:
        submission = catalog.submission_path(result.task, result.language, result.variant)
        if submission.is_file() and (catalog.TASKS / result.task / suite).is_file():
            raise KitError(f"{result.task}, LANG={result.language}: {result.detail}", ExitCode.ENVIRONMENT)
    return todo.jobs


def _demand(job: Job, asked: plan.Request) -> Demand:
    often = f" x{asked.repeat}" if asked.repeat else ""
    first = f" case {asked.cases}" if asked.cases else ""
    name = f"{job.suite}{first}{often}"
    digest = _digest(_sources(Path(job.submission)), Path(job.config).read_bytes())
    cases = tuple(job.cases) if job.cases is not None else None
    return Demand(f"{_named(job)} {name}", digest, cases, dataclasses.replace(job, suite=name))


def _named(job: Job) -> str:
    return "/".join(filter(None, [job.task, job.language, job.variant]))


def _sources(submission: Path) -> bytes:
    """The submission, and for a variant the file to paste beside it, which takes what the variant does not."""
    plain = submission.with_name(f"run_kernel{submission.suffix}")
    files = [submission] if submission == plain else [submission, plain]
    return b"\0".join(path.read_bytes() for path in files if path.is_file())


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _run(options: argparse.Namespace, words: list[str]) -> int:
    task = catalog.check_task(options.task) if options.task else None
    language = catalog.check_language(options.lang) if options.lang else None
    parallel = plan.parse_jobs(options.jobs) if options.jobs else PARALLEL
    seconds = _parse_budget(options.budget) if options.budget else None
    device = plan.pick_device(options.device)
    if not device.is_gpu:
        message = f"`make accept` is for a GPU and this is {device.name}; `make check` and `make mutants` run here."
        raise KitError(message, ExitCode.NEEDS_DEVICE)
    ledger = Ledger(ledger_path(device.name), device.name)
    wanted = demands(device, task, language, options.variant)
    if not wanted:
        raise KitError("There is no such file, so nothing is demanded of it.", ExitCode.NOTHING_RAN)
    table, wrong = _wrong(device, task, language, options.variant)
    clean = _to_sanitize(device, wanted, language)
    everything = Everything(ledger, wanted, wrong, clean)
    print(everything.said(device.name))
    if not options.plan and not everything.met():
        try:
            _limit(seconds)
            everything.run(device, table, parallel)
        except KeyboardInterrupt:
            print("Stopped: what passed until now is kept.", file=sys.stderr)
        finally:
            _limit(None)
        print(everything.said(device.name))
    return ExitCode.OK if everything.met() else ExitCode.REJECTED


def _parse_budget(text: str) -> float:
    """Seconds, more than 0 and finite. Raises KitError."""
    try:
        return plan.parse_deadline(text)
    except KitError:
        raise KitError(f"BUDGET={shown(text)}: write after how many seconds to stop, as in BUDGET=600.") from None


def _limit(seconds: float | None) -> None:
    """Interrupt after so many seconds; None takes that back."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.setitimer(signal.ITIMER_REAL, 0)
    if seconds is not None:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _wrong(
    device: Device, task: str | None, language: str | None, variant: str
) -> tuple[mutants.Table, list[tuple[mutants.Mutant, str]]]:
    """The table of mutants, and those asked for with their digests."""
    table = mutants.load()
    chosen = [m for m in table.mutants if task in (None, m.task) and language in (None, m.language)]
    chosen = [] if variant == "hopper" else chosen
    return table, [(m, _digest(m.text().encode(), repr((m.cases, m.gpu_suite, m.gpu_cases)).encode())) for m in chosen]


def _to_sanitize(device: Device, wanted: Sequence[Demand], language: str | None) -> list[tuple[Job, str]]:
    """The C++ files for compute-sanitizer on tiny, with their digests."""
    if device.kind != "cuda":
        return []
    tiny = [demand for demand in wanted if demand.job.suite == f"tiny x{REPEAT}" and demand.job.language == "cuda"]
    return [(dataclasses.replace(demand.job, suite="tiny"), demand.digest) for demand in tiny]


@dataclasses.dataclass
class Everything:
    """All that is demanded, and the record of it."""

    ledger: Ledger
    wanted: Sequence[Demand]
    wrong: Sequence[tuple[mutants.Mutant, str]]
    clean: Sequence[tuple[Job, str]]

    def missing(self) -> list[str]:
        """A line for each demand that is not met."""
        lines = []
        for demand in self.wanted:
            left = self.ledger.missing(demand)
            if left != []:
                lines.append(f"{demand.key}: {'all cases' if left is None else f'case {ranges(left)}'}")
        lines += [f"mutant {mutant.key}" for mutant, digest in self.wrong if not self._has(_mutant_key(mutant), digest)]
        return lines + [key for job, digest in self.clean if not self._has(key := _clean_key(job), digest)]

    def met(self) -> bool:
        return not self.missing()

    def said(self, device: str) -> str:
        """What is missing, and the sum."""
        lines, total = self.missing(), len(self.wanted) + len(self.wrong) + len(self.clean)
        return "\n".join([*lines, f"{total - len(lines)} of {total} demands are met on {device}"])

    def _has(self, key: str, digest: str) -> bool:
        entry = self.ledger.seen.get(key, {})
        return bool(entry.get("digest") == digest and entry.get("passed"))

    def run(self, device: Device, table: mutants.Table, parallel: int) -> None:
        """Run what is missing: cases, then mutants, then the sanitizer. KeyboardInterrupt leaves what there is."""
        self._cases(parallel)
        self._mutants(device, table, parallel)
        left = [(job, digest) for job, digest in self.clean if not self._has(_clean_key(job), digest)]
        if left:
            target = sanitizer.find_target(device, sanitizer.DEADLINE_S)
        for job, digest in left:
            lines = list(sanitizer.judge(job, sanitizer.DEFAULT_TOOLS, target))
            for line in lines:
                print(line.text(), flush=True)
            good = bool(lines) and all(line.verdict is Verdict.PASS for line in lines)
            self.ledger.add(_clean_key(job), digest, 1, good)

    def _cases(self, parallel: int) -> None:
        jobs, by_name = [], {}
        for demand in self.wanted:
            left = self.ledger.missing(demand)
            if left != []:
                jobs.append(dataclasses.replace(demand.job, cases=left))
                by_name[_named(demand.job), demand.job.suite] = demand
        jobs.sort(key=lambda job: job.language != "tilelang")  # the slowest to compile go first
        lock = threading.Lock()

        def notice(worker: Worker) -> None:
            demand = by_name[_named(worker.job), worker.job.suite]
            if worker.count is not None and demand.cases is None:
                with lock:
                    self.ledger.count(demand, worker.count)

        def receive(result: CaseResult) -> None:
            name = "/".join(filter(None, [result.task, result.language, result.variant]))
            demand = by_name[name, result.suite]
            with lock:
                self.ledger.add(demand.key, demand.digest, result.case, result.ok)
            told = "" if result.ok else f" {result.detail}"
            print(f"{result.worst:12} {demand.key} case {result.case} {result.label}{told}", flush=True)

        if jobs:
            runner.run_jobs(jobs, receive, parallel, notice=notice)

    def _mutants(self, device: Device, table: mutants.Table, parallel: int) -> None:
        digests = {mutant.key: digest for mutant, digest in self.wrong}
        left = [mutant for mutant, digest in self.wrong if not self._has(_mutant_key(mutant), digest)]
        outcomes: list[mutants.Outcome] = []

        def receive(outcome: mutants.Outcome) -> None:
            outcomes.append(outcome)
            print("\n".join(outcome.lines()), flush=True)
            self.ledger.add(_mutant_key(outcome.mutant), digests[outcome.mutant.key], 1, not outcome.trouble)

        try:
            if left:
                mutants.run(table, left, device, parallel, receive)
        finally:
            if outcomes:
                mutants.keep(outcomes, table, device)
                mutants.PAGE.write_text(mutants.page(table), encoding="utf-8")


def _mutant_key(mutant: mutants.Mutant) -> str:
    return f"mutant {mutant.key}"


def _clean_key(job: Job) -> str:
    return f"{_named(job)} sanitizer"
