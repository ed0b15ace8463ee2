"""What was found wrong with a case, and which of it becomes its verdict.

The strict verdict is the one that explains the most: TAMPERED (nothing measured afterwards can be trusted), then damage
(OUT_OF_BOUNDS, INPUT_MUTATED), which makes any value meaningless, then whatever ended the case, then UNWRITTEN_OUTPUT
before NON_FINITE before WRONG_ANSWER, since poison left behind is itself not finite and a value that is not finite is
wrong, then NONDETERMINISTIC, which matters alone only where every value was right.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.guard import Finding
from harness.verdict import CaseResult, Verdict

_PRECEDENCE = (
    Verdict.TAMPERED,
    Verdict.OUT_OF_BOUNDS,
    Verdict.INPUT_MUTATED,
    Verdict.RESOURCE_LIMIT,
    Verdict.COMPILE_ERROR,
    Verdict.LINT_ERROR,
    Verdict.RUNTIME_ERROR,
    Verdict.RACE,
    Verdict.UNINITIALISED_READ,
    Verdict.OUT_OF_MEMORY,
    Verdict.PACKAGE_ERROR,
    Verdict.UNWRITTEN_OUTPUT,
    Verdict.NON_FINITE,
    Verdict.WRONG_ANSWER,
    Verdict.NONDETERMINISTIC,
    Verdict.SUSPECT_TIME,
    Verdict.SKIPPED,
)


def worst(findings: Sequence[Finding]) -> Finding | None:
    """The finding that explains most (see above), the earliest of its kind; None of none."""
    return min(findings, key=lambda finding: _PRECEDENCE.index(finding.verdict), default=None)


class Ledger:
    """Collects findings for the record of one case, and writes the verdicts into it."""

    def __init__(self, result: CaseResult) -> None:
        self.findings: list[Finding] = []
        self.refusal = ""  # why the package's check said no
        self._result = result
        self._judged = False

    def found(self, verdict: Verdict, detail: str) -> None:
        """Something is wrong."""
        self.findings.append(Finding(verdict, detail))

    def note(self, text: str) -> None:
        """Something worth knowing that changes no verdict."""
        if text not in self._result.notes:
            self._result.notes.append(text)

    def judge(self, verdict: Verdict) -> None:
        """The judge verdict, unless there is one."""
        if not self._judged:
            self._result.judge, self._judged = verdict, True

    def conclude(self, notes: Sequence[str]) -> None:
        """Write the strict verdict, the detail and more notes into the record."""
        for text in notes:
            self.note(text)
        finding = worst(self.findings)
        self._result.strict = Verdict.PASS if finding is None else finding.verdict
        self._result.detail = self.refusal if finding is None else finding.detail
        if finding is not None and self.refusal:
            self.note(self.refusal)
        for verdict, detail in {other.verdict: other for other in reversed(self.findings)}.values():
            if finding is not None and verdict is not finding.verdict:
                self.note(f"also {verdict}: {detail}")
