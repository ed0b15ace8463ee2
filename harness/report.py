"""`make report`: the measured tables and plots of the task READMEs, made from results/*.json.

Two kinds of documents are read. What `make bench` keeps (harness/bench/record.py) counts first; where a device has none
for a task and suite, the records of `make check` that were kept count, which know no floor. Everything between the two
markers of a README is generated:

    <!-- report begin: FlashInfer -->     what the package's own baseline is, in words; "-" where it is no competitor
    <!-- report end -->

Imports no torch, and matplotlib only to draw.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import catalog, report_plot
from harness.bench.record import slug
from harness.bench.stats import geometric_mean
from harness.report_plot import Series
from harness.verdict import ExitCode, KitError

RESULTS = catalog.ROOT / "results"
BEGIN, END = "<!-- report begin:", "<!-- report end -->"
_OWN = "testcase_config.py baseline"  # what `make check` calls the package's own
_TITLES = {"cuda": "CUDA", "triton": "Triton", "tilelang": "TileLang"}


@dataclasses.dataclass(frozen=True)
class Source:
    """One run: when, on what, with what, and by which command. `bench`: kept by `make bench`, not by `make check`."""

    date: str
    command: str
    device: str
    versions: str
    bench: bool
    interrupted: bool


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one run says of one case of one kernel. Times in ms; None: not known.

    ratio: the peer's time over ours. clock: "kernels" or "events". state: "" or what is wrong.
    """

    source: Source
    task: str
    suite: str
    kernel: tuple[str, str]  # language and variant
    case: int
    label: str
    peer: str
    ours_ms: float | None
    peer_ms: float | None
    ratio: float | None
    floor_ms: float | None
    percent: float | None
    clock: str
    state: str


@dataclasses.dataclass
class Table:
    """All cells of one task, device and suite, the newest of each case and kernel."""

    task: str
    device: str
    suite: str
    cells: dict[tuple[int, tuple[str, str]], Cell]

    @property
    def cases(self) -> list[int]:
        return sorted({case for case, _ in self.cells})

    @property
    def kernels(self) -> list[tuple[str, str]]:
        """In the order of the languages, the file to paste before its variants."""
        return sorted({kernel for _, kernel in self.cells}, key=lambda k: (catalog.LANGUAGES.index(k[0]), k[1]))

    @property
    def timed(self) -> bool:
        return any(cell.ours_ms for cell in self.cells.values())

    def label(self, case: int) -> str:
        return next((c.label for (number, _), c in self.cells.items() if number == case and c.label), str(case))

    def column(self, kernel: tuple[str, str]) -> list[Cell | None]:
        return [self.cells.get((case, kernel)) for case in self.cases]

    def file(self) -> str:
        """The plot's name beside the README."""
        suite = "" if self.suite == "judge" else f"-{self.suite}"
        return f"results-{slug(self.device)}{suite}.svg"


# -- reading ----------------------------------------------------------------------------------------------------------


def documents(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Every JSON document of a folder. KitError names one that is none."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield path, json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise KitError(f"{path}: no JSON ({error}); mend or remove it.", ExitCode.MISSING_FILE) from None


def cells(folder: Path, peers: Mapping[str, str]) -> list[Cell]:
    """All measured cells in a folder of results. `peers`: by task what its package's own baseline is, "-" for none."""
    found = []
    for _, document in documents(folder):
        for run in document if isinstance(document, list) else [document]:
            if not isinstance(run, dict) or not isinstance(run.get("records"), list) or "device" not in run:
                continue  # another kind of document
            bench = "calibration" in run
            versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
            interrupted = bool(run.get("interrupted"))
            source = Source(run["date"], _words(run["command"]), run["device"]["name"], versions, bench, interrupted)
            if run["device"]["kind"] != "cpu":
                found += [_cell(source, record, peers) for record in run["records"] if record.get("case")]
    return found


def _words(command: Any) -> str:
    return command if isinstance(command, str) else " ".join(command)


def _cell(source: Source, record: Mapping[str, Any], peers: Mapping[str, str]) -> Cell:
    task = record["task"]
    ours_ms, peer_ms = record.get("ours_ms"), record.get("peer_ms" if source.bench else "baseline_ms")
    peer = record.get("peer") or record.get("baseline") or ""
    if peer == _OWN:
        peer = peers.get(task, "-")
        peer_ms = None if peer == "-" else peer_ms
    state = ""
    if source.bench:
        state = ", ".join(record["flags"]) if ours_ms is None else ""
    elif (record["judge"], record["strict"]) != ("PASS", "PASS"):
        state = record["strict"] if record["strict"] != "PASS" else record["judge"]
    if state:
        ours_ms = peer_ms = None
    ratio = peer_ms / ours_ms if ours_ms and peer_ms else None
    if source.bench and ratio is not None:
        ratio = record["ratio"]  # of pairs of calls, so that a clock that drifts is not in it
    kernel = (record["language"], record.get("variant") or "")
    return Cell(
        source,
        task,
        record["suite"],
        kernel,
        record["case"],
        record.get("label") or "",
        peer,
        ours_ms,
        peer_ms,
        ratio,
        record.get("floor_ms"),
        record.get("roofline_percent"),
        record.get("clock") or "kernels",
        state,
    )


def tables(found: Iterable[Cell], task: str) -> list[Table]:
    """One table per device and suite, from `make bench` alone where that has been there."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in found:
        if cell.task == task:
            groups.setdefault((cell.source.device, cell.suite), []).append(cell)
    result = []
    for (device, suite), group in sorted(groups.items()):
        benched = [cell for cell in group if cell.source.bench]
        newest = sorted(benched or group, key=lambda cell: cell.source.date)
        result.append(Table(task, device, suite, {(cell.case, cell.kernel): cell for cell in newest}))
    return result


# -- writing ----------------------------------------------------------------------------------------------------------


def section(task: str, folder: Path, peers: Mapping[str, str]) -> tuple[str, dict[str, list[Series]]]:
    """The generated part of a README, and the plots that it shows: by file name what is drawn."""
    lines: list[str] = []
    plots: dict[str, list[Series]] = {}
    for table in tables(cells(folder, peers), task):
        title = f"### {table.device}" + ("" if table.suite == "judge" else f", suite {table.suite}")
        lines += [title, ""]
        drawn = series(table)
        if drawn:
            plots[table.file()] = drawn
            lines += [f"![{task} on {table.device}: the peer's time over ours, case by case]({table.file()})", ""]
        lines += [*(markdown(table) if table.timed else _untimed(table)), ""]
    lines += tried(task, folder)
    if not lines:
        lines = ["Not measured yet.", ""]
    return "\n".join(lines), plots


def markdown(table: Table) -> list[str]:
    """The table and its caption. Columns of which nothing is known are left out, the floor's excepted."""
    peered = any(cell.peer_ms for cell in table.cells.values())
    percents = any(cell.percent is not None for cell in table.cells.values())
    head = ["case", "floor, ms", *(["peer, ms"] if peered else [])]
    for kernel in table.kernels:
        name = _title(*kernel)
        head += [f"{name}, ms", *(["ratio"] if peered else []), *(["% of roofline"] if percents else [])]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for at, case in enumerate(table.cases):
        here = [table.column(kernel)[at] for kernel in table.kernels]
        floors = [cell.floor_ms for cell in here if cell and cell.floor_ms]
        peers = [cell.peer_ms for cell in here if cell and cell.peer_ms]
        row = [table.label(case), _ms(min(floors, default=None))]
        row += [_ms(statistics.median(peers) if peers else None)] if peered else []
        for cell in here:
            row += [(cell.state or _ms(cell.ours_ms)) if cell else "-"]
            row += [_ratio(cell.ratio if cell else None)] if peered else []
            row += [_percent(cell.percent if cell and not cell.state else None)] if percents else []
        rows.append(row)
    if peered or percents:
        rows.append(["**geometric mean**", *[""] * (2 if peered else 1), *_means(table, peered, percents)])
    return ["| " + " | ".join(row) + " |" for row in rows] + ["", *caption(table, peered)]


def _means(table: Table, peered: bool, percents: bool) -> list[str]:
    row = []
    for kernel in table.kernels:
        column = [cell for cell in table.column(kernel) if cell is not None]
        row.append("")
        if peered:
            ratios = [cell.ratio for cell in column if cell.ratio is not None]
            some = f" ({len(ratios)} of {len(table.cases)})" if 0 < len(ratios) < len(table.cases) else ""
            row.append(_ratio(geometric_mean(ratios) if ratios else None) + some)
        if percents:
            known = [cell.percent for cell in column if cell.percent and not cell.state]
            row.append(_percent(geometric_mean(known) if known else None))
    return row


def caption(table: Table, peered: bool) -> list[str]:
    """What the numbers are, and of every run when, by which command and with which versions."""
    used = list(table.cells.values())
    by_events = ", by CUDA events where the profiler saw nothing" * any(cell.clock == "events" for cell in used)
    told = f"Kernel time by the profiler{by_events}, median, L2 flushed"
    if peered:
        peers = sorted({cell.peer for cell in used if cell.peer_ms})
        lines = [
            f"{told}, ours and the peer alternating in one process; ratio is the peer's time over ours, **bold** where "
            "ours is faster.",
            f"Peer: {'; '.join(peers)}; its column is the median of those measured beside each language.",
        ]
    else:
        lines = [f"{told}. The package's own baseline is no competitor, so there is no ratio."]
    if all(cell.floor_ms is None for cell in used):
        lines.append("Floor and percent of roofline come with `make bench`.")
    runs: dict[Source, set[str]] = {}
    for cell in used:
        runs.setdefault(cell.source, set()).add(_title(*cell.kernel))
    for source, names in sorted(runs.items(), key=lambda item: item[0].date):
        which = ", ".join(sorted(names))
        cut = " (ended early)" if source.interrupted else ""
        lines.append(f"{which}: {source.date[:10]}, `{source.command}`{cut}, {source.versions}.")
    return [f"* {line}" for line in lines]


def _untimed(table: Table) -> list[str]:
    """Where nothing was timed there is no table, but what was checked is said."""
    good = sum(not cell.state for cell in table.cells.values())
    names = ", ".join(_title(*kernel) for kernel in table.kernels)
    runs = sorted({(cell.source.date[:10], cell.source.command) for cell in table.cells.values()})
    told = ", ".join(f"{date} (`{command}`)" for date, command in runs)
    return [f"{good} of {len(table.cells)} cases PASS in {names}, {told}; not timed yet."]


def tried(task: str, folder: Path) -> list[str]:
    """What `make tune` has tried, wins and losses: one line per search, the fastest candidates first."""
    lines = []
    for path, document in documents(folder):
        for run in document["runs"] if path.name.startswith("tune-") else []:
            if run["task"] != task:
                continue
            timed = [each for each in run["candidates"] if each["ratio"]]
            timed.sort(key=lambda each: -each["ratio"][0])
            told = [f"`{e['row']}` {e['ratio'][0]:.3f} ({e['state']})" for e in timed]
            told += [f"`{e['row']}` {e['state']}" for e in run["candidates"] if e["state"].startswith("failed")]
            where = f"{_TITLES[run['language']]}, row {run['row']}, {run['device']['name']}, {run['date'][:10]}"
            lines.append(f"* {where}, {len(run['cases'])} {run['suite']} cases: {'; '.join(told) or 'none ran'}.")
    return ["### Tried by `make tune` (the time before over the time after)", "", *lines, ""] if lines else []


def _title(language: str, variant: str) -> str:
    return f"{_TITLES[language]} {variant}".strip()


def _ms(value: float | None) -> str:
    """Four digits, whatever the size."""
    return "-" if value is None else f"{value:.{max(0, 3 - math.floor(math.log10(value)))}f}"


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"**{value:.2f}**" if value > 1 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def series(table: Table) -> list[Series]:
    """What the plot shows: one series per kernel that has a ratio somewhere. Nothing without a peer."""
    labels = [table.label(case) for case in table.cases]
    found = []
    for kernel in table.kernels:
        ratios = [None if cell is None or cell.ratio is None else round(cell.ratio, 3) for cell in table.column(kernel)]
        if any(ratio is not None for ratio in ratios):
            found.append(Series(_title(*kernel), f"{table.task} on {table.device}", labels, ratios))
    return found


def fingerprint(drawn: Sequence[Series]) -> str:
    """Names what a plot shows and the code that draws it; kept in the file, so that a stale one is seen undrawn."""
    code = Path(report_plot.__file__).read_text(encoding="utf-8")
    text = json.dumps([code, *(dataclasses.astuple(each) for each in drawn)])
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


# -- the READMEs ------------------------------------------------------------------------------------------------------


def peer_of(readme: Path) -> str:
    """What the begin marker of a README says the package's own baseline is."""
    return _split(readme.read_text(encoding="utf-8"), readme)[1]


def _split(text: str, readme: Path) -> tuple[str, str, str]:
    """A README up to and with its begin marker, the peer that the marker names, and the README from its end marker."""
    first, _, rest = text.partition(BEGIN)
    peer, arrow, generated = rest.partition("-->\n")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or not arrow or END not in generated:
        raise KitError(
            f"{readme}: put one line `{BEGIN} NAME OF THE BASELINE -->` and below it one `{END}` where its table goes.",
            ExitCode.MISSING_FILE,
        )
    return f"{first}{BEGIN}{peer}{arrow}", peer.strip(), generated[generated.index(END) :]


def written(readme: Path, generated: str) -> str:
    """The README with that between its markers. KitError when it has no such markers."""
    before, _, after = _split(readme.read_text(encoding="utf-8"), readme)
    return f"{before}\n{generated}\n{after}" if generated.strip() else f"{before}{after}"


def stale(folder: Path = RESULTS, tasks: Path = catalog.TASKS) -> list[Path]:
    """The READMEs and plots that are not what `make report` would make now."""
    found = []
    readmes = {path.parent.name: path for path in sorted(tasks.glob("*/README.md"))}
    peers = {task: peer_of(path) for task, path in readmes.items()}
    for task, readme in readmes.items():
        generated, plots = section(task, folder, peers)
        if written(readme, generated) != readme.read_text(encoding="utf-8"):
            found.append(readme)
        for name, drawn in plots.items():
            path = readme.parent / name
            if not path.is_file() or fingerprint(drawn) not in path.read_text(encoding="utf-8"):
                found.append(path)
        found += [path for path in readme.parent.glob("results-*.svg") if path.name not in plots]
    return found


def make(folder: Path = RESULTS, tasks: Path = catalog.TASKS) -> list[Path]:
    """Write every README and plot that is stale; the paths that changed."""
    readmes = {path.parent.name: path for path in sorted(tasks.glob("*/README.md"))}
    peers = {task: peer_of(path) for task, path in readmes.items()}
    changed = stale(folder, tasks)
    for task, readme in readmes.items():
        generated, plots = section(task, folder, peers)
        if readme in changed:
            readme.write_text(written(readme, generated), encoding="utf-8")
        for path in changed:
            if path.parent == readme.parent and path.suffix == ".svg":
                if path.name in plots:
                    report_plot.draw(plots[path.name], path, fingerprint(plots[path.name]))
                else:
                    path.unlink()
    return changed


def add(commands: Any) -> None:
    """Add the subcommand to the command line's parser."""
    parser = commands.add_parser(
        "report", allow_abbrev=False, help="write the measured tables and plots into the task READMEs"
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace, words: list[str]) -> int:
    changed = make()
    for path in changed:
        print(f"{path.relative_to(catalog.ROOT)}: {'written' if path.exists() else 'removed'}")
    print(f"{len(changed)} files changed" if changed else "Everything is up to date.")
    return ExitCode.OK
