"""What `bench` prints: a line per case, what explains it below, a summary; and a progress bar on a terminal."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from harness.bench import stats
from harness.console import printable

if TYPE_CHECKING:
    from harness.process import Worker

_HEADS = ("ours ms", "peer ms", "ratio", "95 %", "roofline", "TFLOPS", "GB/s", "host ms", "peer", "score")
_WIDTHS = (9, 9, 7, 14, 8, 7, 6, 9, 9, 5)


def kernel(record: dict[str, Any]) -> str:
    """Language and variant: "triton:hopper"."""
    return ":".join(filter(None, [record["language"], record["variant"]]))


class Table:
    """One line per record, as wide as what may come."""

    def __init__(self, names: Iterable[tuple[str, str]]) -> None:
        """`names`: task and `kernel` of everything that may come."""
        pairs = [("task", "language"), *names]
        self._task, self._kernel = (max(len(pair[which]) for pair in pairs) for which in (0, 1))

    def header(self) -> str:
        """The names of the columns."""
        return self._line("task", "language", "case", "label", _HEADS, "")

    def lines(self, record: dict[str, Any], again: str = "") -> list[str]:
        """The line of a record and what explains it; `again` is the command that repeats a case that failed."""

        def cell(name: str, form: str) -> str:
            return "-" if record[name] is None else format(record[name], form)

        low, high = record["ratio_low"], record["ratio_high"]
        cells = (
            cell("ours_ms", ".4f"),
            cell("peer_ms", ".4f"),
            cell("ratio", ".3f") + ("x" if record["ratio"] else ""),
            "-" if low is None else f"[{low:.3f} {high:.3f}]",
            cell("roofline_percent", ".1f") + (" %" if record["roofline_percent"] else ""),
            cell("tflops", ".1f"),
            cell("gb_s", ".0f"),
            cell("ours_host_ms", ".4f"),
            cell("peer_host_ms", ".4f"),
            cell("score", ".1f"),
        )
        flags = list(record["flags"])
        if record["stopped"] == "budget":
            flags.append("budget spent")
        label = printable(record["label"]) or "-"
        lines = [
            self._line(record["task"], kernel(record), str(record["case"] or "-"), label, cells, ", ".join(flags)),
            *("    " + printable(line) for note in record["notes"] for line in note.splitlines()),
        ]
        return [*lines, f"    again: {again}"] if again else lines

    def _line(self, task: str, name: str, case: str, label: str, cells: Sequence[str], flags: str) -> str:
        columns = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
        return f"{task:{self._task}}  {name:{self._kernel}}  {case:>4}  {label:22} {columns}  {flags}".rstrip()


def summary(records: Sequence[dict[str, Any]], seconds: float, device: str) -> list[str]:
    """The geometric mean of the ratios per task, language and variant, then how much was timed."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["task"], kernel(record)), []).append(record)
    lines = []
    for (task, name), group in groups.items():
        timed = [record for record in group if record["ratio"]]
        if not timed:
            lines.append(f"{task} {name}: no ratio in {len(group)} cases")
            continue
        mean = stats.geometric_mean([record["ratio"] for record in timed])
        scores = [record["score"] for record in timed if record["score"] is not None]
        score = f", mean score {sum(scores) / len(scores):.1f}" if scores else ""
        peers = ", ".join(dict.fromkeys(record["peer"] for record in timed))
        lines.append(
            f"{task} {name}: {mean:.3f}x of {peers} (geometric mean of {len(timed)} of {len(group)} cases){score}"
        )
    timed_number = sum(record["ours_ms"] is not None for record in records)
    return [*lines, f"{timed_number} of {len(records)} cases timed; {seconds:.0f} s on {device}"]


class Progress:
    """A bar on stderr where that is a terminal and rich is installed; nothing elsewhere, where the lines are enough.

    `show` prints lines to stdout without disturbing it. To be used as a context.
    """

    def __init__(self, write: Callable[[str], None] = print) -> None:
        self._write, self._live = write, False
        self._counts: dict[str, int] = {}
        self.done = self._jobs = 0
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                self._bar = _rich_bar()
            except ImportError:
                return
            self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def expect(self, configs: Sequence[str], cases: int | None) -> None:
        """One job for each of `configs` (repeated), each with `cases` cases, or as many as its first worker counts."""
        self._expected = list(configs)
        self._cases = cases

    def notice(self, worker: Worker) -> None:
        """A worker has got to another phase. Called from its thread."""
        if worker.count is not None:
            self._counts[worker.job.config] = worker.count
        if self._bar is None:
            return
        name = ":".join(filter(None, [worker.job.language, worker.job.variant]))
        where = f" case {worker.case} {worker.label}".rstrip() if worker.case else ""
        self._bar.update(
            self._task, description=printable(f"{worker.job.task} {name}{where}: {worker.phase}"), total=self.total()
        )

    def total(self) -> int | None:
        """How many cases there are in all; None while some package has not been counted."""
        if self._cases is not None:
            return self._cases * len(self._expected)
        counts = [self._counts.get(config) for config in self._expected]
        return None if None in counts else sum(filter(None, counts))

    def show(self, lines: Iterable[str], advance: int = 1) -> None:
        """Print, and count a case."""
        self.done += advance
        if self._bar is None:
            self._write("\n".join(lines))
            return
        self._bar.stop()  # both streams are the same terminal
        self._write("\n".join(lines))
        self._bar.start()
        self._bar.update(self._task, completed=self.done, total=self.total())


def _rich_bar() -> Any:
    rich, terminal = importlib.import_module("rich.progress"), importlib.import_module("rich.console")
    return rich.Progress(
        rich.BarColumn(20),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.description}", markup=False),
        console=terminal.Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def seconds_since(start: float) -> float:
    """By the monotonic clock."""
    return time.monotonic() - start
