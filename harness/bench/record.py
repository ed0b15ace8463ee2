"""What `make bench` keeps: one record per case, one document per task, as JSON and CSV. Imports no torch.

A document is {"date", "command", "device": {"kind", "name", "tuning"}, "versions", "clocks": {"before", "after"},
"calibration", "records"}. A record has the fields of FIELDS. None means not known: a case without both verdicts, or
with a time that cannot be true, has no figures, and its flags say why.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from harness import journal
from harness.devices import Device
from harness.verdict import CaseResult

FIELDS = (
    *("task", "language", "variant", "suite", "case", "label"),
    "peer",  # what the baseline is, in words
    *("ours_ms", "peer_ms"),  # median device time, L2 flushed
    *("ratio", "ratio_low", "ratio_high"),  # peer / ours and its 95 % interval
    "samples",  # timed calls of ours
    *("ours_host_ms", "peer_host_ms"),  # the mean of calls back to back by the host's clock,
    *("ours_host_calls", "peer_host_calls"),  # and of how many
    *("ours_event_ms", "peer_event_ms"),  # by CUDA events around the call, gaps between kernels included
    "clock",  # what ours_ms and peer_ms are by: "kernels" (the profiler) or "events"
    "stopped",  # why it was repeated no longer: "precise" (the interval is within 1 %) or "budget"
    *("floor_ms", "floor_by"),  # the workload at the calibrated peaks; "bytes" or "operations"
    *("roofline_percent", "tflops", "gb_s", "score"),
    *("flags", "notes"),
)


def libraries(config: Path) -> str:
    """The modules, torch aside, that a package's baseline imports: "flashinfer". Read from its text, "" for none."""
    found: list[str] = []
    try:
        functions = [node for node in ast.parse(config.read_bytes()).body if isinstance(node, ast.FunctionDef)]
    except (OSError, SyntaxError, ValueError):
        return ""
    for function in functions:
        for node in ast.walk(function) if function.name == "baseline" else ():
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.append(node.module)
    return ", ".join(dict.fromkeys(name.partition(".")[0] for name in found if not name.startswith("torch")))


def record(result: CaseResult, library: str = "") -> dict[str, Any]:
    """The record of one case. `library`: whose kernel the package's baseline calls, where that is known."""
    figures = dict(result.figures)
    flags, notes = list(figures.pop("flags", [])), list(result.notes)
    if not result.ok:
        figures = {name: figures[name] for name in ("floor_ms", "floor_by") if name in figures}
        flags.insert(0, result.worst.value)
        notes.insert(0, result.detail)
    named = {name: getattr(result, name) for name in FIELDS[:6]}
    # The baseline's name is also that of what was compared against; as a peer it counts where it was timed.
    own = f"{library} ({result.baseline})" if library else result.baseline
    peer = (result.peer or own) if figures.get("peer_ms") else ""
    score = result.score if result.ok else None
    given = {**named, "peer": peer, "score": score, **figures, "flags": flags, "notes": notes}
    return {name: journal.plain(given.get(name)) for name in FIELDS}


def to_csv(records: Iterable[dict[str, Any]]) -> str:
    """One line per record under a line of names. Empty for None; several flags or notes are joined by "; "."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    for entry in records:
        joined = {name: "; ".join(entry[name]) for name in ("flags", "notes")}
        writer.writerow({name: "" if value is None else value for name, value in {**entry, **joined}.items()})
    return text.getvalue()


def slug(device_name: str) -> str:
    """A device's name in a file's name: "NVIDIA H200" -> "h200"."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    return "-".join(word for word in words if word not in ("nvidia", "metax")) or "device"


def make_command(words: Sequence[str]) -> str:
    """The make command behind `harness COMMAND --name=value ...`; in harness's own words where there is none."""
    command, *options = words
    if not all(word.startswith("--") for word in options):
        return shlex.join(["harness", *words])
    parts = [word[2:].partition("=") for word in options]
    return shlex.join(["make", command, *(f"{name.upper()}={value or '1'}" for name, _, value in parts)])


class Document:
    """The document of one task, kept on disk after each record so that nothing measured is ever lost."""

    def __init__(self, task: str, head: dict[str, Any], folders: Sequence[Path], journal_folder: Path) -> None:
        """`head`: all but the records. In the journal the name carries the date, in the other `folders` it does not."""
        self.head, self.records = head, list[dict[str, Any]]()
        stem = f"bench-{slug(head['device']['name'])}-{task}"
        date = f"{datetime.fromisoformat(head['date']):%Y%m%d-%H%M%S}"
        self.stems = [journal_folder / f"{stem}-{date}", *(folder / stem for folder in folders)]

    def add(self, entry: dict[str, Any], clocks: dict[str, Any]) -> str:
        """Take a record, and what the device says after it. Returns why it is not on disk, "" when it is."""
        self.records.append(entry)
        self.head["clocks"]["after"] = clocks
        texts = {
            ".json": json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n",
            ".csv": to_csv(self.records),
        }
        try:
            for stem in self.stems:
                stem.parent.mkdir(parents=True, exist_ok=True)
                for suffix, text in texts.items():
                    part = stem.with_name(stem.name + suffix + ".part")
                    part.write_text(text, encoding="utf-8")
                    os.replace(part, stem.with_name(stem.name + suffix))
        except OSError as error:
            return f"{stem}: the record is not kept there ({error.strerror or error})."
        return ""

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return {**journal.plain(self.head), "records": self.records}


def head(
    device: Device, command: str, now: datetime, clocks: dict[str, Any], calibration: dict[str, Any]
) -> dict[str, Any]:
    """All of a document but its records."""
    return {
        "date": now.isoformat(timespec="seconds"),
        "command": command,
        "device": {"kind": device.kind, "name": device.name, "tuning": device.tuning},
        "versions": journal.versions(),
        "clocks": {"before": clocks, "after": clocks},
        "calibration": calibration,
    }
