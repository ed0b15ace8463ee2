"""What `check` prints: one aligned line per case, what explains it below, a summary last. ASCII marks only."""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Callable, Iterable, Sequence

from harness.text import printable as printable  # others print foreign text too
from harness.verdict import CaseResult, Verdict

# Of what a submission printed (--json and the journal have all that was kept): lines from the head and as many from the
# tail, and of each line as many characters from both ends.
_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 100


def make_robust() -> None:
    """Let stdout and stderr keep their encoding (the terminal's) but never fail on a character that it lacks."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a test's StringIO has none and needs none
        if reconfigure:
            reconfigure(errors="backslashreplace", line_buffering=True)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class Table:
    """Prints results as they come. `again` gives the command that repeats a case."""

    def __init__(self, names: Iterable[tuple[str, str, str]], again: Callable[[CaseResult], str]) -> None:
        """`names`: task, language and variant of everything that may come, for the widths of the columns."""
        self._again = again
        keys = [(task, _kernel(language, variant)) for task, language, variant in names]
        self._task = max([len("task"), *(len(task) for task, _ in keys)])
        self._kernel = max([len("language"), *(len(kernel) for _, kernel in keys)])

    def header(self) -> None:
        self._line(
            "task", "language", "case", "label", "judge", "strict", "margin", "ours ms", "base ms", "speed", "score", ""
        )

    def show(self, result: CaseResult) -> None:
        """The line of a case and, under it, what explains it."""
        speed = result.baseline_ms / result.ours_ms if result.ours_ms and result.baseline_ms else None
        self._line(
            result.task,
            _kernel(result.language, result.variant),
            str(result.case or "-"),
            printable(result.label) or "-",
            result.judge.value,
            result.strict.value,
            _number(result.margin, ".2f"),
            _number(result.ours_ms, ".4f"),
            _number(result.baseline_ms, ".4f"),
            "-" if speed is None else f"{speed:.2f}x",
            _number(result.score, ".1f"),
            f"against {result.peer}" if result.peer else "",
        )
        if not result.ok:
            for line in result.detail.splitlines():
                _below(line)
        for note in result.notes:
            _below(f"note: {note}")
        for line in result.said.splitlines():
            _below(f"{result.language}:{line}")  # the tutorial's own form: triton:fused_moe_i8_tn_topk1 passed: ...
        if result.counts:
            _below("counts: " + ", ".join(f"{name} {value}" for name, value in result.counts.items()))
        for line in _ends(result.output):
            _below(f"| {line}")
        if not result.ok and not _skipped(result):
            _below(f"again: {self._again(result)}")

    def _line(self, task: str, kernel: str, case: str, label: str, judge: str, strict: str, *numbers: str) -> None:
        # The longest verdict has 18 letters (UNINITIALISED_READ).
        text = f"{task:{self._task}}  {kernel:{self._kernel}}  {case:>4}  {label:22}  {judge:18}  {strict:18}"
        widths = (6, 9, 9, 7, 5, 0)
        columns = (f"{number:>{width}}" for number, width in zip(numbers, widths, strict=True))
        print(" ".join([text, *columns]).rstrip())


def _ends(text: str) -> list[str]:
    """The lines of `text`, with what is too much in the middle of it, or of a line, replaced by a count."""
    lines = text.splitlines()
    if len(lines) > 2 * _SHOWN_LINES:
        left_out = f"[{len(lines) - 2 * _SHOWN_LINES} lines left out]"
        lines = [*lines[:_SHOWN_LINES], left_out, *lines[-_SHOWN_LINES:]]
    ends = _SHOWN_CHARACTERS
    return [
        line if len(line) <= 2 * ends else f"{line[:ends]}[{len(line) - 2 * ends} characters left out]{line[-ends:]}"
        for line in lines
    ]


def _kernel(language: str, variant: str) -> str:
    return f"{language}:{variant}" if variant else language


def _below(text: str) -> None:
    print("    " + printable(text))


def _skipped(result: CaseResult) -> bool:
    return result.judge is Verdict.SKIPPED and result.strict is Verdict.SKIPPED


def summary(results: Sequence[CaseResult], seconds: float, device: str) -> list[str]:
    """One line per kernel that was timed, then "N of M PASS, 1 WRONG_ANSWER, 2 SKIPPED; 34.2 s on cpu".

    M counts the cases that ran; SKIPPED ones are counted beside it.
    """
    groups: dict[str, list[CaseResult]] = collections.defaultdict(list)
    for result in results:
        groups[f"{result.task} {_kernel(result.language, result.variant)}"].append(result)
    lines = []
    for name, group in groups.items():
        timed = [(r.baseline_ms / r.ours_ms, r.score) for r in group if r.ok and r.ours_ms and r.baseline_ms]
        if timed:
            mean = math.exp(sum(math.log(ratio) for ratio, _ in timed) / len(timed))
            scores = [score for _, score in timed if score is not None]
            score = f", mean score {sum(scores) / len(scores):.1f}" if scores else ""
            lines.append(
                f"{name}: speed-up {mean:.3f}x (geometric mean of the {len(timed)} timed of {len(group)} cases){score}"
            )
    ran = [result for result in results if not _skipped(result)]
    # Where only the judge's own check is wrong, that verdict is the one to count: CaseResult.worst.
    others = collections.Counter(result.worst.value for result in results if not result.ok)
    parts = [f"{sum(result.ok for result in ran)} of {len(ran)} PASS"]
    parts += [f"{count} {verdict}" for verdict, count in sorted(others.items())]
    lines.append(f"{', '.join(parts)}; {seconds:.1f} s on {device}")
    return lines
