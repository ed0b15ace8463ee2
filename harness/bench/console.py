"""What `bench` prints: a line per case, what explains it below, a summary; and a progress bar on a terminal."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterable, Sequence
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
    """Where the run is, on stderr where that is a terminal: a bar of rich's, or one line that is written over again
    where rich is not installed. Elsewhere nothing: there the lines of the cases are enough.

    `show` prints lines to stdout without disturbing it. To be used as a context.
    """

    def __init__(self) -> None:
        self.done = 0
        self._now = "starting"
        self._counts: dict[str, int] = {}
        self._expected: list[tuple[str, int | None]] = []
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        if self._terminal:
            self._bar, self._task = _rich_bar()

    def __enter__(self) -> Progress:
        self._resume()
        return self

    def __exit__(self, *error: object) -> None:
        self._pause()

    def expect(self, jobs: Sequence[tuple[str, int | None]]) -> None:
        """The config of each job, and how many of its cases; None: as many as its first worker counts."""
        self._expected = list(jobs)

    def total(self) -> int | None:
        """How many cases there are in all; None while some package has not been counted."""
        counts = [number or self._counts.get(config) for config, number in self._expected]
        return None if None in counts else sum(filter(None, counts))

    def notice(self, worker: Worker) -> None:
        """A worker has got to another phase. Called from its thread."""
        if worker.count is not None:
            self._counts[worker.job.config] = worker.count
        name = ":".join(filter(None, [worker.job.language, worker.job.variant]))
        where = f" case {worker.case} {worker.label}".rstrip() if worker.case else ""
        self._now = printable(f"{worker.job.task} {name}{where}: {worker.phase}")
        self._draw()

    def show(self, lines: Iterable[str], advance: int = 1) -> None:
        """Print, and count a case."""
        self.done += advance
        self._pause()  # both streams may be the same terminal
        for line in lines:
            print(line)
        self._resume()

    def _draw(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=self._now, completed=self.done, total=self.total())
        elif self._terminal:
            text = f"[{self.done}/{self.total() or '?'}] {self._now}"
            sys.stderr.write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()

    def _pause(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _resume(self) -> None:
        if self._bar is not None:
            self._bar.start()
        self._draw()


def _rich_bar() -> tuple[Any, Any]:
    """A bar and its task, or (None, 0) without rich."""
    try:
        rich, terminal = importlib.import_module("rich.progress"), importlib.import_module("rich.console")
    except ImportError:
        return None, 0
    columns = (rich.BarColumn(20), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    text = rich.TextColumn("{task.description}", markup=False)
    bar = rich.Progress(
        *columns,
        text,
        console=terminal.Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    return bar, bar.add_task("starting", total=None)
