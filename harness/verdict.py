"""What can be said of one case: the verdict names, the record of a case, and the exit code that sums up a run.

This module imports nothing heavy (no torch), so that the command line can use it in the process that never runs
foreign code.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any


class Verdict(str, enum.Enum):
    """A verdict's value is its printed name."""

    PASS = "PASS"
    WRONG_ANSWER = "WRONG_ANSWER"
    UNWRITTEN_OUTPUT = "UNWRITTEN_OUTPUT"
    NON_FINITE = "NON_FINITE"
    OUT_OF_BOUNDS = "OUT_OF_BOUNDS"
    INPUT_MUTATED = "INPUT_MUTATED"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    TAMPERED = "TAMPERED"  # the submission replaced a function that the harness or a package's check relies on
    RACE = "RACE"
    UNINITIALISED_READ = "UNINITIALISED_READ"
    RESOURCE_LIMIT = "RESOURCE_LIMIT"
    LINT_ERROR = "LINT_ERROR"
    COMPILE_ERROR = "COMPILE_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    TIMEOUT = "TIMEOUT"
    OUTPUT_LIMIT = "OUTPUT_LIMIT"  # printed more than the runner keeps
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    SUSPECT_TIME = "SUSPECT_TIME"
    PACKAGE_ERROR = "PACKAGE_ERROR"
    SKIPPED = "SKIPPED"

    def __str__(self) -> str:
        return self.value


class ExitCode(enum.IntEnum):
    """One code per kind of outcome, so that a script can tell them apart (`make` itself turns any failure into 2)."""

    OK = 0
    REJECTED = 1  # a kernel is wrong, or a run failed in more than one way
    USAGE = 2  # argparse's own code: a malformed command line
    UNKNOWN_TASK = 10
    UNKNOWN_LANGUAGE = 11
    MISSING_FILE = 12  # or a suite, or a case
    NEEDS_DEVICE = 13  # asked for a device, or a suite, that this machine cannot run
    ENVIRONMENT = 14  # a Python package or a compiler is missing
    COMPILE_ERROR = 20
    RUNTIME_ERROR = 21
    TIMEOUT = 22
    OUTPUT_LIMIT = 23
    LINT_ERROR = 24
    OUT_OF_MEMORY = 25
    PACKAGE_ERROR = 30
    NOTHING_RAN = 40
    INTERRUPTED = 130


_EXIT_OF_VERDICT = {
    Verdict.COMPILE_ERROR: ExitCode.COMPILE_ERROR,
    Verdict.RUNTIME_ERROR: ExitCode.RUNTIME_ERROR,
    Verdict.TIMEOUT: ExitCode.TIMEOUT,
    Verdict.OUTPUT_LIMIT: ExitCode.OUTPUT_LIMIT,
    Verdict.LINT_ERROR: ExitCode.LINT_ERROR,
    Verdict.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    Verdict.PACKAGE_ERROR: ExitCode.PACKAGE_ERROR,
}


class KitError(Exception):
    """A user's mistake or a missing piece: one sentence for the user, and the exit code it ends the command with."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code


class KernelFault(Exception):
    """A submission failed in a way that has a name. `message` is one sentence that says what, where and the value."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.message = message


@dataclasses.dataclass
class CaseResult:
    """Everything known about one case of one submission. Times are milliseconds; None means not measured."""

    task: str
    language: str
    variant: str  # "" for the plain file; "wave64"/"warp32" under the simulator; "hopper" for the file beside it
    suite: str
    case: int  # 1-based, as the judge counts
    label: str = ""
    judge: Verdict = Verdict.SKIPPED  # what the package's own check says
    strict: Verdict = Verdict.SKIPPED  # what this harness says
    detail: str = ""  # why it is not PASS, one sentence
    margin: float | None = None  # largest error / allowed error under the strict rule; above 1 it failed
    ours_ms: float | None = None
    baseline_ms: float | None = None
    baseline: str = ""  # what was timed and compared against: the package's own, or the named substitute
    peer: str = ""  # the library that baseline_ms is of, where it is not the package's own baseline
    score: float | None = None  # 100 T_b / (T_b + T_k), a preview
    said: str = ""  # what the package's check printed
    output: str = ""  # what the submission printed, head and tail
    notes: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)  # what `bench` measured beyond the times
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)  # the simulator's counters, summed over launches
    required: bool = False  # task and language were both named by the user: a skip is then a failure

    @property
    def ok(self) -> bool:
        """True when both verdicts are PASS."""
        return self.judge is Verdict.PASS and self.strict is Verdict.PASS

    @property
    def worst(self) -> Verdict:
        """The verdict to show first: the strict one unless only the judge's is bad."""
        return self.strict if self.strict is not Verdict.PASS else self.judge

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON types; `from_json` reverses it."""
        record = dataclasses.asdict(self)
        record["judge"], record["strict"] = self.judge.value, self.strict.value
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> CaseResult:
        return cls(**{**record, "judge": Verdict(record["judge"]), "strict": Verdict(record["strict"])})


def exit_code(results: Iterable[CaseResult]) -> ExitCode:
    """The code for a whole run: OK, the code of the one kind of failure there was, or REJECTED for several kinds."""
    ran, codes = 0, set()
    for result in results:
        if result.strict is Verdict.SKIPPED and result.judge is Verdict.SKIPPED:
            if result.required:
                codes.add(ExitCode.NOTHING_RAN)
            continue
        ran += 1
        if not result.ok:
            codes.add(_EXIT_OF_VERDICT.get(result.worst, ExitCode.REJECTED))
    if len(codes) == 1:
        return codes.pop()
    if codes:
        return ExitCode.REJECTED
    return ExitCode.OK if ran else ExitCode.NOTHING_RAN
