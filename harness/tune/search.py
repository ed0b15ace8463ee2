"""Successive halving: every candidate is checked and timed on one case, the better half on some more, and so on.

A ratio is the current file's time over the candidate's, measured alternately in one process: above 1 the candidate is
faster. Over several cases it is the geometric mean, and the interval is that of the mean of the logarithms, the cases
being independent measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from harness.bench.stats import Interval
from harness.tune.space import Candidate

_SOME = 4  # cases of the second rung
_LEAST = 3  # candidates that go on, whatever half of them is


class Trial:
    """A candidate and what is known of it. `ratios`: [ratio, low, high, ...] by case. `failed`: why it is out."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.ratios: dict[int, Sequence[float]] = {}
        self.failed = ""
        self.notes: list[str] = []
        self.left = False  # behind at the end of a rung

    def overall(self) -> Interval | None:
        """The geometric mean over the cases timed so far; None before the first."""
        if not self.ratios:
            return None
        rows = [[math.log(value) for value in ratio[:3]] for ratio in self.ratios.values()]
        centre = sum(row[0] for row in rows) / len(rows)
        reach = math.sqrt(sum(((row[2] - row[1]) / 2) ** 2 for row in rows)) / len(rows)
        return Interval(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach))


Time = Callable[[Sequence[Trial], Sequence[int]], None]  # fills in `ratios` or `failed`


def rungs(cases: Sequence[int], probe: int) -> list[list[int]]:
    """The cases of each rung, each rung with those of the one before: one, some spread over the suite, all.

    The first is `probe`, or the middle one where that was not chosen.
    """
    first = probe if probe in cases else cases[len(cases) // 2]
    others = [case for case in cases if case != first]
    step = max(1, math.ceil(len(others) / (_SOME - 1)))
    steps = [[first], [first, *others[step // 2 :: step]], [first, *others]]
    return [rung for at, rung in enumerate(steps) if at == 0 or len(rung) > len(steps[at - 1])]


def search(trials: Sequence[Trial], steps: Sequence[Sequence[int]], time: Time) -> list[Trial]:
    """Time the trials on one rung after another, without those left behind; those timed on all, best first."""
    alive = list(trials)
    for at, rung in enumerate(steps):
        done = set(steps[at - 1]) if at else set()
        if alive:
            time(alive, [case for case in rung if case not in done])
        alive = [trial for trial in alive if not trial.failed and len(trial.ratios) == len(rung)]
        alive.sort(key=_speed, reverse=True)
        if at + 1 < len(steps):
            staying = max(_LEAST, math.ceil(len(alive) / 2))
            for trial in alive[staying:]:
                trial.left = True
            alive = alive[:staying]
    return alive


def _speed(trial: Trial) -> float:
    overall = trial.overall()
    return overall.value if overall else 0.0


def winners(finalists: Sequence[Trial]) -> list[Trial]:
    """Of each space, the fastest of those that are faster than the current row beyond doubt: interval above 1."""
    best: dict[int, Trial] = {}
    for trial in finalists:
        overall = trial.overall()
        if overall is not None and overall.low > 1:
            best.setdefault(id(trial.candidate.space), trial)
    return list(best.values())


class Outcome(NamedTuple):
    """What is printed and kept of a candidate."""

    number: int
    row: str
    state: str
    cases: int
    overall: Interval | None


def outcome(trial: Trial, row: str, cases: int) -> Outcome:
    """Where a candidate's way ended, in words. `cases`: how many there were in all."""
    candidate, overall, timed = trial.candidate, trial.overall(), len(trial.ratios)
    if candidate.pruned:
        state = f"pruned: {candidate.pruned}"
    elif trial.failed:
        state = f"failed: {trial.failed}"
    elif overall is None:
        state = "not run"
    elif trial.left:
        state = "left behind"
    elif timed < cases:
        state = "not timed to the end"
    elif overall.low > 1:
        state = "faster"
    elif overall.high < 1:
        state = "slower"
    else:
        state = "no different"
    return Outcome(candidate.number, row, state, timed, overall)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """One line per candidate, the fastest first, then those that did not run."""
    order = sorted(outcomes, key=lambda each: (each.overall is None, -each.cases, -(each.overall or (0,))[0]))
    lines = [("#", "candidate", "cases", "ratio", "95 % interval", "what came of it")]
    for each in order:
        ratio = f"{each.overall.value:.3f}" if each.overall else "-"
        span = f"{each.overall.low:.3f} to {each.overall.high:.3f}" if each.overall else "-"
        lines.append((str(each.number), each.row, str(each.cases or "-"), ratio, span, each.state))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def record(trial: Trial, row: str, cases: int) -> dict[str, Any]:
    """What is kept of a candidate, losses included."""
    what = outcome(trial, row, cases)
    overall = trial.overall()
    return {
        "number": what.number,
        "row": row,
        "why": trial.candidate.why,
        "state": what.state,
        "needs": trial.candidate.needs,
        "fill": trial.candidate.fill,
        "ratio": list(overall) if overall else None,
        "ratios": {str(case): list(values) for case, values in sorted(trial.ratios.items())},
        "notes": trial.notes,
    }
