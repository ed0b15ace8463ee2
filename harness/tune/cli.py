"""`tune`: lists or times the candidates of one submission's row, and prints the row to paste. Changes no submission."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness import cache, catalog, child, journal, plan, runner
from harness.bench import engine
from harness.bench.record import slug
from harness.console import printable
from harness.devices import Device
from harness.lint_cli import shown
from harness.runner import Job
from harness.tune import places, search, space
from harness.tune.search import Trial
from harness.tune.space import ROWS, Candidate, Case
from harness.verdict import CaseResult, ExitCode, KitError, Verdict

BUILT = cache.folder() / "tune"
RESULTS = catalog.ROOT / "results"
TIMER = (sys.executable, "-m", "harness.tune.worker")
CHECKERS = 4  # processes that check candidates side by side; nothing is timed then
BUDGET_S = 1.5  # of a pair on a case
_CHECK_DEADLINE_S, _CASE_DEADLINE_S = 300.0, 60.0


def add(commands: Any) -> None:
    """Add the subcommand to the command line's parser."""
    tune = commands.add_parser(
        "tune", allow_abbrev=False, help="time other values of a kernel's parameters against the current ones"
    )
    tune.set_defaults(run=_tune)
    tune.add_argument("--task", help="the task; must be named")
    tune.add_argument("--lang", help="cuda, triton or tilelang; must be named")
    tune.add_argument("--suite", help="judge or live; judge by default")
    tune.add_argument("--cases", help="which cases, as in 1,3-5")
    tune.add_argument("--device", help="maca or cuda; what the machine has by default")
    tune.add_argument("--row", help="c500 or sm90: which row of the tuning table; the device's own by default")
    tune.add_argument("--budget", metavar="SECONDS", help=f"of timing per candidate and case, {BUDGET_S:g} by default")
    tune.add_argument("--plan", action="store_true", help="list the candidates and run nothing; needs no GPU")


def _tune(options: argparse.Namespace, words: list[str]) -> int:
    if not (options.task and options.lang):
        raise KitError("Say what is to be tuned: TASK=name LANG=cuda|triton|tilelang.")
    task, language = catalog.check_task(options.task), catalog.check_language(options.lang)
    suite = options.suite or "judge"
    catalog.suite_path(task, suite)
    path = catalog.submission_path(task, language)
    if not path.is_file():
        raise KitError(f"{task} has no submission in {language} to tune.", ExitCode.MISSING_FILE)
    device = plan.pick_device(options.device)
    row = pick_row(options.row, language, device, options.plan)
    spaces = space.chosen(task, language, row, suite)
    if not (device.is_gpu or options.plan):
        raise KitError(
            f"Candidates are timed, and this machine has no GPU; `make tune TASK={task} LANG={language} PLAN=1` lists "
            "them without one.",
            ExitCode.NEEDS_DEVICE,
        )
    budget_s = engine.parse_budget(options.budget) if options.budget else BUDGET_S
    cases = chosen_cases(task, suite, options.cases)
    text = path.read_text(encoding="utf-8")
    found = space.candidates(spaces, text, path, cases)
    print(
        f"{path.relative_to(catalog.ROOT)}, row {row}, {len(cases)} case{'s' * (len(cases) > 1)} of the suite {suite}"
    )
    for each in spaces:
        print(f"current {places.show(each.place)} = {places.render(places.read(text, each.place, path), path)}")
    if options.plan:
        print("\n".join(listing(found, path)))
        return ExitCode.OK
    run = _Run(task, language, suite, row, device, path, text, cases, spaces[0].probe.get(suite, 0))
    run.budget_s = budget_s
    return run.go(found, words)


def pick_row(asked: str | None, language: str, device: Device, planned: bool) -> str:
    """The row of the tuning table: the one asked for, or that which the device runs. KitError when it cannot run it."""
    own = device.tuning if device.tuning in ROWS else "c500"
    if language == "cuda" and device.kind == "cuda":
        own = "sm90"  # the 32-lane table, whatever the architecture
    if asked is not None and asked not in ROWS:
        raise KitError(f"ROW={asked}: no such row; choose one of {', '.join(ROWS)}.")
    if asked and asked != own and language == "cuda" and device.is_gpu and not planned:
        raise KitError(
            f"ROW={asked}: {device.name} compiles the {own} table of a .cu file; leave ROW out, or use a machine whose "
            "waves are of the other width.",
            ExitCode.NEEDS_DEVICE,
        )
    return asked or own


def chosen_cases(task: str, suite: str, text: str | None) -> list[Case]:
    """The cases of a suite, all or those of CASES. A package needs torch, so a process of its own is asked."""
    try:
        every = [Case(*entry) for entry in child.ask([*TIMER, "cases", task, suite])]
    except child.NoAnswer as last:
        raise KitError(f"The cases of {task} could not be read ({last}).", ExitCode.PACKAGE_ERROR) from None
    wanted = plan.parse_cases(text) if text else [case.number for case in every]
    missing = [number for number in wanted if not any(case.number == number for case in every)]
    if missing:
        raise KitError(
            f"CASES={text}: there is no case {missing[0]}; the suite {suite} has cases 1 to {len(every)}.",
            ExitCode.MISSING_FILE,
        )
    return [case for case in every if case.number in wanted]


def listing(candidates: Sequence[Candidate], path: Path) -> list[str]:
    """The candidates of a plan: those that would run with their reasons, the others with what rules them out."""
    lines = []
    width = max(len(candidate.name(path)) for candidate in candidates)
    for candidate in candidates:
        mark = "-" if candidate.pruned else " "
        said = f"pruned: {candidate.pruned}" if candidate.pruned else candidate.why
        needs = ", ".join(f"{name} {value}" for name, value in candidate.needs.items())
        said += f" [{needs}]" if needs else ""
        lines.append(f"{mark}{candidate.number:3}  {candidate.name(path):{width}}  {said}")
    left = sum(not candidate.pruned for candidate in candidates)
    lines.append(f"{left} candidates to run, {len(candidates) - left} pruned")
    return lines


class _Run:
    """One search on a GPU."""

    def __init__(
        self,
        task: str,
        language: str,
        suite: str,
        row: str,
        device: Device,
        path: Path,
        text: str,
        cases: Sequence[Case],
        probe: int,
    ) -> None:
        self.task, self.language, self.suite, self.row = task, language, suite, row
        self.device, self.path, self.text = device, path, text
        self.cases = [case.number for case in cases]
        self.steps = search.rungs(self.cases, probe)
        self.budget_s = BUDGET_S
        self.folder = BUILT / task / language / row
        self.current = self._write("current", text)
        self.files: dict[int, Path] = {}

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name / self.path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def _job(self, submission: Path, cases: list[int], deadline_s: float, **settings: Any) -> Job:
        # Python submissions are told the row; a .cu file has chosen it when compiling.
        tuning = {} if self.language == "cuda" else {"tuning": self.row}
        return Job(
            task=self.task,
            language=self.language,
            variant="",
            suite=self.suite,
            config=str(catalog.suite_path(self.task, self.suite)),
            submission=str(submission),
            cases=cases,
            device=self.device.kind,
            deadline_s=deadline_s,
            settings={**tuning, **settings},
            required=True,
        )

    def go(self, candidates: Sequence[Candidate], words: list[str]) -> int:
        """Check, time, print, keep."""
        started = time.monotonic()
        trials = [Trial(candidate) for candidate in candidates]
        running = [trial for trial in trials if not trial.candidate.pruned]
        for trial in running:
            changed = places.replaced(self.text, trial.candidate.changes, self.path)
            self.files[trial.candidate.number] = self._write(str(trial.candidate.number), changed)
        code, finalists = ExitCode.OK, []
        try:
            self._check(running)
            ready = [trial for trial in running if not trial.failed]
            print(f"{len(ready)} of {len(running)} candidates are right on case {self.steps[0][0]}")
            finalists = search.search(ready, self.steps, self._time)
        except KeyboardInterrupt:  # what was timed is printed and kept
            code = ExitCode.INTERRUPTED
        rows = [trial.candidate.name(self.path) for trial in trials]
        outcomes = [search.outcome(trial, row, len(self.cases)) for trial, row in zip(trials, rows, strict=True)]
        print("\n".join(map(printable, search.table(outcomes))))
        advice = self._advice(search.winners(finalists)) if code is ExitCode.OK else ["Interrupted: no row is advised."]
        print("\n".join(advice))
        seconds = time.monotonic() - started
        kept = self._keep(trials, rows, words, advice, seconds)
        print(f"{len(running)} candidates in {seconds:.0f} s; all of it is in {shown(kept)}.")
        if code is ExitCode.OK and not any(trial.ratios for trial in trials):
            return ExitCode.NOTHING_RAN
        return code

    def _check(self, trials: Sequence[Trial]) -> None:
        """Both verdicts of every candidate on the first case. KitError when the current file itself is not right."""
        first = self.steps[0][0]
        by_path = {str(self.files[trial.candidate.number]): trial for trial in trials}
        jobs = [self._job(Path(path), [first], _CHECK_DEADLINE_S, time=False) for path in [str(self.current), *by_path]]
        checked = itertools.count(1)

        def receive(result: CaseResult) -> None:
            print(f"checked {next(checked)} of {len(jobs)} on case {first}: {result.worst}", flush=True)

        results = runner.run_jobs(jobs, receive, min(CHECKERS, os.cpu_count() or 1))
        for job, result in zip(jobs, results, strict=True):
            trial = by_path.get(job.submission)
            if trial is not None and not result.ok:
                trial.failed = f"{result.worst} on case {first}: {result.detail}"
            elif trial is None and not result.ok:
                raise KitError(
                    f"{self.path.relative_to(catalog.ROOT)} itself is {result.worst} on case {first} "
                    f"({result.detail}); mend it before it is tuned.",
                    ExitCode.REJECTED,
                )

    def _time(self, trials: Sequence[Trial], cases: Sequence[int]) -> None:
        """Time candidates on cases, one after another, each in turn with the current file."""
        by_number = {trial.candidate.number: trial for trial in trials}
        files = {str(number): str(self.files[number]) for number in by_number}
        job = self._job(
            self.current,
            list(by_number),
            (_CASE_DEADLINE_S + self.budget_s) * (1 + len(cases)),
            candidates=files,
            on=list(cases),
            budget_s=self.budget_s,
        )

        def receive(result: CaseResult) -> None:
            trial = by_number[result.case]
            trial.ratios |= {int(case): values for case, values in result.counts.get("ratios", {}).items()}
            trial.notes += [note for note in result.notes if note not in trial.notes]
            if result.worst is not Verdict.PASS:
                trial.failed = f"{result.worst}: {result.detail}"
            said = search.outcome(trial, trial.candidate.name(self.path), len(self.cases))
            ratio = f"{said.overall.value:.3f}" if said.overall else "-"
            print(printable(f"{said.number:3}  {said.row}  {ratio} on {said.cases} cases  {trial.failed}"), flush=True)

        runner.run_jobs([job], receive, 1, TIMER)

    def _advice(self, winners: Sequence[Trial]) -> list[str]:
        """The rows to paste with their reasons; or that there is none."""
        if not winners:
            return ["Keep the current row: no candidate is faster beyond doubt (interval above 1) on all cases."]
        lines = []
        where, date = self.path.relative_to(catalog.ROOT), datetime.now(timezone.utc).date().isoformat()
        for trial in winners:
            overall = trial.overall()
            assert overall is not None
            comment = "#" if self.path.suffix == ".py" else "//"
            why = (
                f"{overall.value:.3f} ({overall.low:.3f} to {overall.high:.3f}) times as fast as before over "
                f"{len(self.cases)} {self.suite} cases, {self.device.name}, {date}: {trial.candidate.why}"
            )
            for place, value in trial.candidate.changes.items():
                before = places.render(places.read(self.text, place, self.path), self.path)
                lines.append(f"To paste into {where} at {places.show(place)}, in place of {before}:")
                lines.append(f"    {places.render(value, self.path)},  {comment} {why}")
        return lines

    def _keep(
        self, trials: Sequence[Trial], rows: Sequence[str], words: list[str], advice: list[str], seconds: float
    ) -> Path:
        """Add this search to the file of its device, task and language; older ones stay."""
        path = RESULTS / f"tune-{slug(self.device.name)}-{self.task}-{self.language}.json"
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
        records = [search.record(trial, row, len(self.cases)) for trial, row in zip(trials, rows, strict=True)]
        run = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": " ".join(["harness", *words]),
            "device": vars(self.device),
            "versions": journal.versions(),
            "task": self.task,
            "language": self.language,
            "suite": self.suite,
            "row": self.row,
            "cases": self.cases,
            "seconds": round(seconds, 1),
            "candidates": records,
            "advice": advice,
        }
        document = journal.plain({"runs": [*runs, run]})
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        return path
