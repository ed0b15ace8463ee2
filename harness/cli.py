"""The command line: argument parsing and printing, nothing else. `make` calls it as `python -m harness`.

This process never imports a submission or a package, nor torch: workers do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from harness import (
    accept,
    bench_cli,
    cache,
    catalog,
    console,
    counts,
    faults,
    journal,
    lint_cli,
    mutants,
    plan,
    report,
    runner,
    traffic,
)
from harness.sanitize import cli as sanitize_cli
from harness.tune import cli as tune_cli
from harness.verdict import CaseResult, ExitCode, KitError, exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. A user's mistake is one sentence on stderr, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_streams()
    console.make_robust()
    # A closed terminal or `timeout` must end the workers as Ctrl-C does; what was to be ignored (nohup) still is.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        options = _parser().parse_args(words)
        empty = next((name for name, value in vars(options).items() if value == ""), None)
        if empty:
            raise KitError(f"--{empty}=: nothing is named; leave the option out, or give it a value.")
        return int(options.run(options, words))
    except KitError as error:
        return _refuse(str(error), error.code, words)
    except KeyboardInterrupt:
        return _refuse("Interrupted.", ExitCode.INTERRUPTED, words)
    except BrokenPipeError:
        # The reader (head, less) went away: nobody is left to tell, and closing stdout must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.REJECTED
    except OSError as error:
        sentence = faults.cannot_write(error)
        if not sentence:
            raise
        return _refuse(sentence, ExitCode.ENVIRONMENT, words)


def _open_standard_streams() -> None:
    """Where cron or `<&-` left descriptors 0 to 2 closed, a worker's pipe would get their numbers, and be lost."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _refuse(sentence: str, code: ExitCode, words: Sequence[str]) -> int:
    """Say why nothing ran, or why the rest did not: on stderr, and with --json as a document on stdout too."""
    if "--json" in words:
        print(json.dumps({"error": sentence, "exit_code": int(code)}))
    print(sentence, file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """Its refusals are sentences like all others."""

    def error(self, message: str) -> NoReturn:
        raise KitError(f"{message.replace(chr(10), ' ')}; `{self.prog} --help` lists the options.")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="harness", description="Replay an XPU-OJ problem package against a submission.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check", allow_abbrev=False, help="run submissions against a suite, both verdicts per case"
    )
    check.set_defaults(run=_check)
    check.add_argument("--task", help="one task; all of them without it")
    check.add_argument("--lang", help="cuda, triton or tilelang; all of them without it")
    check.add_argument("--suite", help="judge, live, tiny or demo; judge on a GPU and tiny without one by default")
    check.add_argument("--cases", help="which cases, as in 1,3-5")
    check.add_argument("--device", help="maca, cuda or cpu; what the machine has by default")
    check.add_argument("--config", help="a problem package of your own instead of a suite")
    check.add_argument("--file", help="a submission of your own instead of the kit's")
    check.add_argument("--variant", default="plain", help="plain: the file to paste; hopper: hopper.* beside it; all")
    check.add_argument("--jobs", help="worker processes at a time")
    check.add_argument("--repeat", help="judge each case that often, each time on other data")
    check.add_argument("--no-lint", dest="lint", action="store_false", help="run what the judge's sandbox would refuse")
    check.add_argument("--no-time", dest="time", action="store_false", help="on a GPU: only check, time nothing")
    check.add_argument("--deadline", metavar="SECONDS", help="after how long a case is taken to hang")
    check.add_argument("--counts", action="store_true", help="show the simulator's counters")
    check.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")
    bench_cli.add(commands)
    lint_cli.add(commands)
    tune_cli.add(commands)
    report.add(commands)
    counts.add(commands)
    sanitize_cli.add(commands)
    accept.add(commands)
    traffic.add(commands)
    wrong = commands.add_parser(
        "mutants", allow_abbrev=False, help="run submissions that are wrong on purpose: each must be rejected by name"
    )
    wrong.set_defaults(run=_mutants)
    wrong.add_argument("--task", help="those of one task")
    wrong.add_argument("--lang", help="those in one language")
    wrong.add_argument("--name", help="those of that name")
    wrong.add_argument("--device", help="maca, cuda or cpu; what the machine has by default")
    wrong.add_argument("--jobs", help="worker processes at a time")
    return parser


def _mutants(options: argparse.Namespace, words: list[str]) -> int:
    task = catalog.check_task(options.task) if options.task else None
    language = catalog.check_language(options.lang) if options.lang else None
    table = mutants.load()
    chosen = [
        mutant
        for mutant in table.mutants
        if task in (None, mutant.task) and language in (None, mutant.language) and options.name in (None, mutant.name)
    ]
    if not chosen:
        raise KitError("There is no such mutant; `make mutants` runs all of them.")
    device = plan.pick_device(options.device)
    # On a GPU eight workers of the largest published case hold about 100 GB.
    parallel = plan.parse_jobs(options.jobs) if options.jobs else min(8, os.cpu_count() or 1)

    outcomes: list[mutants.Outcome] = []

    def receive(outcome: mutants.Outcome) -> None:
        outcomes.append(outcome)
        print("\n".join(outcome.lines()))

    try:
        mutants.run(table, chosen, device, parallel, receive)
    finally:  # an interrupt after half an hour keeps what there is
        mutants.keep(outcomes, table, device)
        mutants.PAGE.write_text(mutants.page(table), encoding="utf-8")
    bad = [outcome for outcome in outcomes if outcome.trouble]
    left_out = f", {len(chosen) - len(outcomes)} more need a GPU" if len(outcomes) < len(chosen) else ""
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} rejected as they must be on {device.name}{left_out}")
    if not outcomes:
        return ExitCode.NOTHING_RAN
    return ExitCode.REJECTED if bad else ExitCode.OK


def _check(options: argparse.Namespace, words: list[str]) -> int:
    asked = plan.Request.of(options)
    started = time.monotonic()
    todo = plan.make(asked)
    versions = journal.versions()
    kernels = [(job.task, job.language, job.variant) for job in todo.jobs]
    table = console.Table([*kernels, *((r.task, r.language, r.variant) for r in todo.skipped)], asked.again)
    results: list[CaseResult] = []

    def receive(result: CaseResult) -> None:
        results.append(result)
        if not options.json:
            table.show(result)

    if cache.note():
        print(cache.note(), file=sys.stderr)
    if not options.json:
        print(f"{todo.device.name} ({todo.device.kind}), " + ", ".join(f"{name} {v}" for name, v in versions.items()))
        table.header()
    interrupted, refusal = False, None
    try:
        for result in todo.skipped:
            receive(result)
        if todo.jobs:
            runner.run_jobs(todo.jobs, receive, todo.parallel)
    except KeyboardInterrupt:
        interrupted = True
    except KitError as error:
        if len(results) == len(todo.skipped):
            raise
        refusal = error
    seconds = time.monotonic() - started
    code = ExitCode.INTERRUPTED if interrupted else refusal.code if refusal else exit_code(results)
    run: dict[str, Any] = {
        "command": ["harness", *words],
        "device": vars(todo.device),
        "versions": versions,
        "seconds": round(seconds, 1),
        "exit_code": int(code),
        "records": [result.to_json() for result in results],
    }
    trouble = journal.append(run)
    if trouble:
        print(trouble, file=sys.stderr)
    lines = console.summary(results, seconds, todo.device.kind)
    if options.json:
        refused = {"error": str(refusal)} if refusal else {}
        print(json.dumps(journal.plain({**run, **refused, "summary": lines[-1]}), allow_nan=False))
    else:
        print("\n".join(lines))
    if interrupted:
        print("Interrupted: the cases above are all that ran.", file=sys.stderr)
    elif refusal:
        print(refusal, file=sys.stderr)
    elif code is ExitCode.NOTHING_RAN:
        print("No case ran, which counts as a failure.", file=sys.stderr)
    return code
