"""`make mutants`: submissions that are wrong on purpose, each with the verdict that it must get.

tests/mutants/*.py hold them as tables: text replacements in a real submission, each of which must apply exactly once,
or a whole small file. Each is judged through the runner like any submission, and once more by a plain judge
(harness/naive.py) on data as the published package draws them, to say whether that check alone would have let it pass.
Where the judge's sandbox refuses a file, that is held against the table too, and then the file is run all the same, so
that what stands behind the sandbox is tried as well. Imports no torch.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness import cache, catalog, gate, journal, runner
from harness.console import printable
from harness.devices import Device
from harness.runner import Job
from harness.source import load_module
from harness.verdict import CaseResult, KitError, Verdict

FOLDER = catalog.ROOT / "tests" / "mutants"
BUILT = cache.folder() / "mutants"
PAGE = catalog.ROOT / "docs" / "mutants.md"
RESULTS = catalog.ROOT / "results"
NAIVE = (sys.executable, "-m", "harness.naive")
DEADLINE_S = 300.0
_ALONE, _STRICT = "alone", "strict"
_SUFFIX = {"cuda": ".cu", "triton": ".py", "tilelang": ".py"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One wrong submission.

    changes: (old, new) texts for the real submission of `task` and `language`; each old text occurs exactly once there.
    append: text put behind it; source: the whole file instead of a changed one.
    lint: the rule by which the judge's sandbox refuses it; "" where it lets it in.
    cpu, gpu: verdicts of which a run must get one, the sandbox left out; () where a run cannot go wrong there, which
        `only` explains. gpu None: as on the CPU.
    cases: the cases of the suite tiny that are run; `gpu_suite` and `gpu_cases` replace both on a GPU.
    variant: the simulator's mode for C++ on the CPU.
    """

    name: str
    task: str
    language: str
    mistake: str
    changes: tuple[tuple[str, str], ...] = ()
    append: str = ""
    source: str = ""
    lint: str = ""
    cpu: tuple[Verdict, ...] = ()
    gpu: tuple[Verdict, ...] | None = None
    only: str = ""
    cases: tuple[int, ...] = (1,)
    gpu_suite: str = "tiny"
    gpu_cases: tuple[int, ...] = ()
    variant: str = "wave64"
    deadline_s: float = DEADLINE_S

    @property
    def key(self) -> str:
        """A name that no other mutant has."""
        return f"{self.task}/{self.language}/{self.name}"

    @property
    def runs_on_cpu(self) -> bool:
        """Whether there is a verdict to be had without a GPU: a run's, or the sandbox's."""
        return bool(self.cpu) or not self.on_gpu

    def runs_on(self, device: Device) -> bool:
        """Whether a run on that device itself can go wrong."""
        return device.is_gpu and (bool(self.on_gpu) or not self.cpu)

    @property
    def on_gpu(self) -> tuple[Verdict, ...]:
        """What a run on a GPU must say."""
        return self.cpu if self.gpu is None else self.gpu

    def text(self) -> str:
        """The wrong file. KitError names the mutant and the text when a replacement does not apply exactly once."""
        if self.source:
            return self.source
        path = catalog.submission_path(self.task, self.language)
        text = path.read_text(encoding="utf-8")
        for old, new in self.changes:
            if text.count(old) != 1:
                where = path.relative_to(catalog.ROOT)
                raise KitError(f"mutant {self.key}: {where} holds {text.count(old)} times, not once, the text {old!r}.")
            text = text.replace(old, new)
        return text + self.append

    def write(self) -> Path:
        """Put the file under .cache/mutants, and give its path."""
        path = BUILT / self.task / self.language / self.name / f"run_kernel{_SUFFIX[self.language]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text(), encoding="utf-8")
        return path


@dataclasses.dataclass
class Table:
    """What tests/mutants holds. `judge_cases`: on which cases of a task's published suite the plain judge is tried."""

    mutants: tuple[Mutant, ...]
    judge_cases: dict[str, tuple[int, ...]]


def load(folder: Path = FOLDER) -> Table:
    """All tables of a folder as one."""
    table = Table((), {})
    for path in sorted(folder.glob("*.py")):
        names = vars(load_module(path, "mutants"))
        table.mutants += tuple(names["MUTANTS"])
        table.judge_cases |= names.get("JUDGE_CASES", {})
    return table


def published(task: str) -> Path:
    """The package that stands for the published one without a GPU: the same data, smaller."""
    return FOLDER / "published" / f"{task}_config.py"


@dataclasses.dataclass
class Outcome:
    """What became of a mutant. `expected`: the verdicts allowed to the run, () where only the sandbox can refuse it."""

    mutant: Mutant
    place: str  # the kind of device that it ran on
    rules: list[str]  # by which the sandbox refuses it
    expected: tuple[Verdict, ...]
    results: list[CaseResult] = dataclasses.field(default_factory=list)
    alone: list[CaseResult] = dataclasses.field(default_factory=list)

    @property
    def first(self) -> CaseResult | None:
        """The first case that is not accepted."""
        bad = [result for result in self.results if result.strict is not Verdict.PASS]
        return min(bad, key=lambda result: result.case, default=None)

    @property
    def trouble(self) -> str:
        """Why this is not the rejection that the table names; "" when it is."""
        wanted = [self.mutant.lint] if self.mutant.lint else []
        if wanted and wanted[0] not in self.rules:
            return f"the sandbox does not refuse it by the rule {wanted[0]}"
        if not wanted and self.rules:
            return f"the sandbox refuses it by the rule {self.rules[0]}, which the table does not say"
        if not self.results:
            return "no case ran"
        got = self.first.strict if self.first else Verdict.PASS
        allowed = self.expected or (Verdict.LINT_ERROR,)
        if got not in allowed:
            return f"got {got}, not {' or '.join(allowed)}" + (f": {self.first.detail}" if self.first else "")
        return ""

    def let_pass(self) -> str:
        """Would the plain judge let it pass: "yes" (every case), "no", or in how many of the cases."""
        passed = sum(result.judge is Verdict.PASS for result in self.alone)
        if not self.alone:
            return "not tried"
        return {0: "no", len(self.alone): "yes"}.get(passed, f"{passed} of {len(self.alone)} cases")

    def lines(self) -> list[str]:
        """What is printed: who, what it must get, what it got, what the plain judge says; and what is not right."""
        wanted = " or ".join(self.expected or (Verdict.LINT_ERROR,))
        first, rule = self.first, self.mutant.lint
        got = f"judge {first.judge}, strict {first.strict}, case {first.case}" if first else "PASS"
        told = (
            f"must be {wanted}: {got}{f'; sandbox: {rule}' if rule else ''}; plain judge passes it: {self.let_pass()}"
        )
        line = f"{'WRONG' if self.trouble else 'ok':5}  {self.mutant.key:48}  {self.place:4}  {told}"
        return [line, *(f"       {printable(self.trouble)}" for _ in range(bool(self.trouble)))]

    def record(self) -> dict[str, Any]:
        """What is kept of it."""
        first = self.first
        return {
            "place": self.place,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "lint": self.rules[0] if self.rules else "",
            "strict": str(first.strict if first else Verdict.PASS),
            "judge": str(first.judge if first else Verdict.PASS),
            "case": first.case if first else 0,
            "detail": first.detail if first else "",
            "rejected": not self.trouble,
            "let_pass": self.let_pass(),
            "alone": {result.label or str(result.case): str(result.judge) for result in self.alone},
        }


def _jobs(outcome: Outcome, table: Table) -> tuple[Job, Job]:
    """A job for the kit's judge and one for the plain judge; their results are told apart by the suite's name."""
    mutant, on_gpu = outcome.mutant, outcome.place != "cpu"
    path = mutant.write()
    suite, cases = (mutant.gpu_suite, mutant.gpu_cases or mutant.cases) if on_gpu else ("tiny", mutant.cases)
    config = catalog.suite_path(mutant.task, "judge") if on_gpu else published(mutant.task)
    # Two lines of defence: where both must hold, the second is tried without the first, which was asked already.
    strictly: dict[str, Any] = {"lint": not outcome.expected, "time": False}

    def job(mark: str, config: Path, cases: Sequence[int], settings: dict[str, Any]) -> Job:
        return Job(
            task=mutant.task,
            language=mutant.language,
            variant=mutant.variant if mutant.language == "cuda" and not on_gpu else "",
            suite=f"{mark} {mutant.key}",
            config=str(config),
            submission=str(path),
            cases=list(cases),
            device=outcome.place,
            deadline_s=mutant.deadline_s,
            settings=settings,
            required=True,
        )

    plainly = {"lint": False, "naive": True}
    return (
        job(_STRICT, catalog.suite_path(mutant.task, suite), cases, strictly),
        job(_ALONE, config, table.judge_cases[mutant.task] if on_gpu else (1,), plainly),
    )


def run(
    table: Table, chosen: Sequence[Mutant], device: Device, parallel: int, on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    """Judge the chosen mutants on a device, or on the CPU those that can only go wrong there.

    `on_outcome` is called as each is done. Without a GPU those that need one are left out. Raises KitError for a mutant
    that cannot be made.
    """
    outcomes: dict[str, Outcome] = {}
    pairs: list[tuple[Job, Job]] = []
    for mutant in chosen:
        place = device.kind if mutant.runs_on(device) else "cpu"
        if place == "cpu" and not mutant.runs_on_cpu:
            continue
        expected = mutant.cpu if place == "cpu" else mutant.on_gpu
        rules = [finding.rule for finding in gate.refusals(mutant.write(), mutant.language)]
        outcome = outcomes[mutant.key] = Outcome(mutant, place, rules, expected)
        pairs.append(_jobs(outcome, table))
    # The second job of a mutant comes when its first has compiled it, not beside it.
    lagging: list[tuple[Job, ...]] = [()] * parallel + [(plain,) for _, plain in pairs]
    ahead: list[tuple[Job, ...]] = [(strict,) for strict, _ in pairs] + [()] * parallel
    jobs = [job for both in zip(ahead, lagging, strict=True) for group in both for job in group]
    left = collections.Counter(job.suite.partition(" ")[2] for job in jobs for _ in job.cases or ())

    def receive(result: CaseResult) -> None:
        mark, _, key = result.suite.partition(" ")
        outcome = outcomes[key]
        (outcome.alone if mark == _ALONE else outcome.results).append(result)
        left[key] -= 1
        if not left[key]:
            on_outcome(outcome)

    runner.run_jobs(jobs, receive, parallel, NAIVE)
    return list(outcomes.values())


# -- what is kept ----------------------------------------------------------------------------------------------------


def results_path(device: Device) -> Path:
    """The file of the outcomes on a kind of device."""
    return RESULTS / f"mutants-{device.kind}.json"


def keep(outcomes: Sequence[Outcome], table: Table, device: Device) -> None:
    """Put outcomes into the file of this kind of device, in place of older ones; forget mutants that are no more."""
    path = results_path(device)
    known = json.loads(path.read_text(encoding="utf-8"))["mutants"] if path.is_file() else {}
    known |= {outcome.mutant.key: outcome.record() for outcome in outcomes}
    ordered = {mutant.key: known[mutant.key] for mutant in table.mutants if mutant.key in known}
    document = {"device": device.name, "versions": journal.versions(), "mutants": ordered}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def page(table: Table) -> str:
    """docs/mutants.md, from the tables and the kept outcomes."""
    kept = {}
    for kind in ("cpu", "cuda", "maca"):
        path = RESULTS / f"mutants-{kind}.json"
        if path.is_file():
            kept[kind] = json.loads(path.read_text(encoding="utf-8"))
    lines = [_INTRODUCTION]
    for kind, document in kept.items():
        records = document["mutants"].values()
        rejected = sum(record["rejected"] for record in records)
        passed = sum(record["let_pass"] not in ("no", "not tried") for record in records)
        lines.append(
            f"On {document['device']} ({kind}): {rejected} of {len(records)} rejected as they must be; the plain judge "
            f"lets {passed} of them pass in at least one case.\n"
        )
    for task in catalog.tasks():
        lines.append(f"## {task}\n")
        titles = ["mutant", "language", "the mistake", "sandbox"]
        for kind in kept:
            titles += [kind, f"{kind}: would the judge's check let it pass"]
        lines += [_row(titles), _row(["---"] * len(titles))]
        for mutant in table.mutants:
            if mutant.task == task:
                cells = [mutant.name, mutant.language, mutant.mistake, mutant.lint or "-"]
                for kind, document in kept.items():
                    cells += _cells(mutant, kind, document["mutants"].get(mutant.key))
                lines.append(_row(cells))
        lines.append("")
    return "\n".join(lines)


def _cells(mutant: Mutant, kind: str, record: dict[str, Any] | None) -> list[str]:
    if record is None:
        return [mutant.only or "not run", "-"]
    elsewhere = f" (on the CPU: {mutant.only})" if record["place"] != kind else ""
    return [record["strict"] + elsewhere, record["let_pass"]]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_INTRODUCTION = """# Kernels that are wrong on purpose

Made by `make mutants`; do not edit. Each line is a small change to one of the kit's kernels, or an attack on whoever
judges it, and what became of it. `sandbox`: the rule by which the judge's sandbox for Python submissions refuses the
file; it was run all the same, and the column of a device says what the run gave. LINT_ERROR there: a run finds nothing
wrong, only the sandbox does. The last column is a judge that calls the kernel three times on the published package's
data, then its baseline (reference.py where that is not installed), then the package's `check`, and looks at nothing
else. On the CPU the data are drawn as the package does but smaller (tests/mutants/published), so that what averages out
over 16384 keys is caught more easily there; on a GPU they are cases of the published package itself.
"""
