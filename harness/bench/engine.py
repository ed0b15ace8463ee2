"""`make bench`: plan, time in workers, keep every record as it comes. The process that never runs foreign code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness import journal, plan, runner
from harness.bench import calibration, console, record, telemetry
from harness.bench.record import Document
from harness.devices import Device
from harness.runner import Job
from harness.verdict import CaseResult, ExitCode, KitError, Verdict, exit_code

BUDGET_S = 10.0  # of repetition per case, warming up and the calls back to back not counted


def run(options: argparse.Namespace, words: list[str]) -> int:
    """Run the command; the exit code is that of `check`."""
    budget_s = parse_budget(options.budget)
    request = plan.Request.of(options)
    folders = [folder(options.out)] if options.out else []
    device = gpu(options.device)
    started = time.monotonic()
    todo = plan.make(request, device)
    peaks = calibration.obtain(device) if todo.jobs else {}
    head = record.head(
        device, record.make_command(words), datetime.now(timezone.utc), _clocks(device), calibration=peaks
    )
    names = [(job.task, _name(job)) for job in todo.jobs] + [(r.task, _name(r)) for r in todo.skipped]
    table = console.Table(names)
    libraries = {job.task: record.libraries(Path(job.config)) for job in todo.jobs}
    documents: dict[str, Document] = {}
    results: list[CaseResult] = []
    said: set[str] = set()

    def receive(result: CaseResult) -> None:
        results.append(result)
        entry = record.record(result, libraries.get(result.task, ""))
        if result.case or result.worst is not Verdict.SKIPPED:  # what does not exist is shown and not kept
            if result.task not in documents:
                own = {**head, "clocks": dict(head["clocks"])}
                documents[result.task] = Document(result.task, own, folders, journal.FOLDER)
            trouble = documents[result.task].add(entry, _clocks(device))
            if trouble and trouble not in said:
                said.add(trouble)
                print(trouble, file=sys.stderr)
        failed = not result.ok and result.worst is not Verdict.SKIPPED
        lines = table.lines(entry, request.again(result) if failed else "")
        progress.show([] if options.json else lines)

    if not options.json:
        print(_title(device, head))
        print(table.header())
    interrupted = False
    progress = console.Progress()
    known = [(result.task, 1) for result in todo.skipped]
    progress.expect([*known, *((job.config, len(job.cases) if job.cases else None) for job in todo.jobs)])
    try:
        with progress:
            for result in todo.skipped:
                receive(result)
            runner.run_jobs([_for_bench(job, budget_s, peaks) for job in todo.jobs], receive, 1, notice=progress.notice)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.monotonic() - started
    code = ExitCode.INTERRUPTED if interrupted else exit_code(results)
    entries = [entry for document in documents.values() for entry in document.records]
    lines = console.summary(entries, seconds, device.name)
    if options.json:
        last = {"clocks": {"before": head["clocks"]["before"], "after": _clocks(device)}}
        print(json.dumps({**journal.plain({**head, **last}), "records": entries, "exit_code": int(code)}))
    else:
        print("\n".join(lines))
        for path in (stem for document in documents.values() for stem in document.stems):
            print(f"kept as {path}.json and .csv")
    if interrupted:
        print("Interrupted: the cases above are all that ran.", file=sys.stderr)
    elif code is ExitCode.NOTHING_RAN:
        print("No case ran, which counts as a failure.", file=sys.stderr)
    return code


def gpu(requested: str | None) -> Device:
    """The GPU to time on; KitError (NEEDS_DEVICE) where there is none."""
    device = plan.pick_device(requested)
    if not device.is_gpu:
        raise KitError(
            "`make bench` times kernels on a GPU, and a CPU says nothing of their speed; run it on a machine with one, "
            "or `make check` here.",
            ExitCode.NEEDS_DEVICE,
        )
    return device


def parse_budget(text: str | None) -> float:
    """Seconds per case, above 0 and below an hour; BUDGET_S for None. KitError for anything else."""
    try:
        seconds = BUDGET_S if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise KitError(f"BUDGET={text}: write for how many seconds a case may be repeated, as in BUDGET=10.")
    return seconds


def folder(text: str) -> Path:
    """A folder of the user's, made if it is missing. KitError when that cannot be."""
    try:
        path = Path(text).expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise KitError(f"OUT={text}: no folder to write to ({error}).", ExitCode.MISSING_FILE) from None
    return path


def _for_bench(job: Job, budget_s: float, peaks: dict[str, Any]) -> Job:
    settings = {**job.settings, "bench": {"budget_s": budget_s, "calibration": peaks}}
    return dataclasses.replace(job, settings=settings, deadline_s=job.deadline_s + budget_s)


def _clocks(device: Device) -> dict[str, Any]:
    return telemetry.read(device.kind).to_json()


def _name(named: Job | CaseResult) -> str:
    return console.kernel({"language": named.language, "variant": named.variant})


def _title(device: Device, head: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    lines = [f"{device.name} ({device.kind}), {versions}"]
    peaks = head["calibration"]
    if peaks:
        rates = ", ".join(f"{rate / 1e12:.0f} {dtype} TOPS" for dtype, rate in peaks["ops_per_s"].items())
        lines.append(f"peaks of {peaks['date']}: {peaks['bytes_per_s'] / 1e9:.0f} GB/s, {rates}")
    return "\n".join(lines)
