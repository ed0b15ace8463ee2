"""A task's search spaces, their candidates, and what arithmetic alone rules out.

tasks/<task>/tuning.py holds SPACES, a list of dicts, one per language, row of the tuning table and place in the file:

    language, row   which submission, and which row of its table ("c500", "sm90")
    place           where the row stands (harness/tune/places.py)
    suites          whose cases run that row
    probe           per suite the case that a candidate is checked and first timed on
    candidates      value -> why it is worth a try
    others          optional: (changes by place, why), for what stands elsewhere in the file
    needs           optional: function of the row's value and the lanes of a wave -> {"shared", "threads", "registers"},
                    bytes and threads of a block, and registers that a thread must have at the very least
    blocks          optional: function of the row's value and a case's shapes by argument -> blocks of equal work; left
                    out where the kernel itself cuts its work to fill the chip
    shared_limit    optional: bytes of shared memory that the file itself allows
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import catalog, source
from harness.tune import places
from harness.tune.places import Place
from harness.verdict import ExitCode, KitError

ROWS = ("c500", "sm90")
_LEAST_FILL = 0.8  # of the current row's: a tile shape may win that much by itself, hardly more
_THREADS_OF_BLOCK = 1024


class Chip(NamedTuple):
    """A wave's lanes, the multiprocessors (C500: APs), and what a block, a thread and a multiprocessor have.

    Of a thread's registers some 40 are left for addresses and statistics.
    """

    lanes: int
    multiprocessors: int
    shared_of_block: int
    registers_of_thread: int
    registers: int


CHIPS = {
    "c500": Chip(64, 104, 64 << 10, 216, 131072),
    "sm90": Chip(32, 132, 227 << 10, 216, 65536),
}


@dataclasses.dataclass
class Space:
    """One entry of SPACES (see above)."""

    language: str
    row: str
    place: Place
    suites: Sequence[str]
    probe: Mapping[str, int]
    candidates: Mapping[Any, str]
    others: Sequence[tuple[Mapping[Place, Any], str]] = ()
    needs: Callable[[Any, int], Mapping[str, int]] | None = None
    blocks: Callable[[Any, Mapping[str, Sequence[int]]], int] | None = None
    shared_limit: int = 1 << 30


@dataclasses.dataclass
class Candidate:
    """The file with other values at some places. `pruned`: why it is not run; "" when it is."""

    number: int
    space: Space
    changes: dict[Place, Any]
    why: str
    pruned: str = ""
    needs: dict[str, int] = dataclasses.field(default_factory=dict)
    fill: float | None = None  # see _fill

    def name(self, path: Path) -> str:
        """The change as it is written in the file."""
        parts = []
        for place, value in self.changes.items():
            text = places.render(value, path)
            parts.append(text if place == self.space.place else f"{places.show(place)} = {text}")
        return ", ".join(parts)


class Case(NamedTuple):
    """A case of the suite: its number, label, and the shapes of run_kernel's tensors by name."""

    number: int
    label: str
    shapes: Mapping[str, Sequence[int]]


def spaces(task: str) -> list[Space]:
    """The spaces of a task. KitError where it has none, or tuning.py is not what it should be."""
    path = catalog.TASKS / task / "tuning.py"
    where = path.relative_to(catalog.ROOT) if path.is_relative_to(catalog.ROOT) else path
    if not path.is_file():
        raise KitError(f"{task} has no search space yet ({where}).", ExitCode.MISSING_FILE)
    if str(catalog.ROOT) not in sys.path:
        sys.path.insert(0, str(catalog.ROOT))  # for tasks.common, wherever the command was started
    try:
        return [Space(**entry) for entry in vars(source.load_module(path, "tuning"))["SPACES"]]
    except Exception as error:
        raise KitError(f"{where} cannot be read ({type(error).__name__}: {error}).", ExitCode.MISSING_FILE) from error


def chosen(task: str, language: str, row: str, suite: str) -> list[Space]:
    """The spaces for one run. KitError says what there is when there are none."""
    every = [space for space in spaces(task) if space.language == language]
    rows = sorted({space.row for space in every})
    found = [space for space in every if space.row == row and suite in space.suites]
    if not found:
        known = "; ".join(
            f"ROW={name} SUITE={'|'.join(sorted({suite for s in every if s.row == name for suite in s.suites}))}"
            for name in rows
        )
        raise KitError(
            f"ROW={row} SUITE={suite}: no search space for {task} in {language}; there is {known or 'none at all'}.",
            ExitCode.MISSING_FILE,
        )
    return found


def candidates(found: Sequence[Space], text: str, path: Path, cases: Sequence[Case]) -> list[Candidate]:
    """Every candidate of the spaces, numbered from 1, those that arithmetic rules out marked. KitError as by places."""
    result: list[Candidate] = []
    seen: list[dict[Place, Any]] = []
    for space in found:
        current = places.read(text, space.place, path)
        listed = [({space.place: value}, why) for value, why in space.candidates.items()]
        for changes, why in [*listed, *((dict(changes), why) for changes, why in space.others)]:
            if changes in seen:
                continue
            seen.append(changes)
            candidate = Candidate(len(result) + 1, space, changes, why)
            places.replaced(text, changes, path)  # a mistake in tuning.py is told before anything runs
            if all(places.read(text, place, path) == value for place, value in changes.items()):
                candidate.pruned = "is the current one"
            else:
                _prune(candidate, current, cases)
            result.append(candidate)
    return result


def _prune(candidate: Candidate, current: Any, cases: Sequence[Case]) -> None:
    """Say why a candidate cannot run, or cannot be fast; nothing where the space says nothing about its needs."""
    space, chip = candidate.space, CHIPS[candidate.space.row]
    if space.needs is None or space.place not in candidate.changes:
        return
    value = candidate.changes[space.place]
    candidate.needs = needs = dict(space.needs(value, chip.lanes))
    limit = min(chip.shared_of_block, space.shared_limit)
    if needs["shared"] > limit:
        whose = "the file allows" if limit < chip.shared_of_block else f"a block of {space.row} has"
        candidate.pruned = f"{needs['shared']} bytes of shared memory; {whose} {limit}"
    elif needs["threads"] > _THREADS_OF_BLOCK:
        candidate.pruned = f"{needs['threads']} threads; a block has at most {_THREADS_OF_BLOCK}"
    elif needs["registers"] > chip.registers_of_thread:
        candidate.pruned = (
            f"{needs['registers']} registers per thread for its tiles alone; "
            f"{chip.registers_of_thread} are left beside addresses"
        )
    elif needs["registers"] * needs["threads"] > chip.registers:
        candidate.pruned = f"{needs['threads']} threads of {needs['registers']} registers; there are {chip.registers}"
    if candidate.pruned or space.blocks is None or not cases:
        return
    before, candidate.fill = _fill(space, current, cases), _fill(space, value, cases)
    if candidate.fill < _LEAST_FILL * before:
        candidate.pruned = (
            f"its blocks keep {candidate.fill:.0%} of the multiprocessors busy, those of the current row {before:.0%}"
        )


def _fill(space: Space, value: Any, cases: Sequence[Case]) -> float:
    """Wave quantisation: what share of the busiest multiprocessor's blocks an average one has; geometric mean.

    Blocks that share a multiprocessor share its speed too, so how many fit at a time plays no part.
    """
    assert space.blocks is not None
    chip = CHIPS[space.row]
    logs = []
    for case in cases:
        blocks = max(1, space.blocks(value, case.shapes))
        logs.append(math.log(blocks / chip.multiprocessors / math.ceil(blocks / chip.multiprocessors)))
    return math.exp(sum(logs) / len(logs))
