"""`lint`: reads the submissions, says what the judge's sandbox or a C500 would refuse, and what their kernels need."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import catalog, plan
from harness.lint import Finding, compat, cuda, resources, sandbox
from harness.lint.resources import Submission, Usage
from harness.verdict import ExitCode


def add(commands: Any) -> None:
    """Add the subcommands to the command line's parser."""
    lint = commands.add_parser(
        "lint", allow_abbrev=False, help="what the judge's sandbox or a C500 would refuse, without running anything"
    )
    lint.set_defaults(run=_lint)
    _common(lint)
    lint.add_argument("--file", help="a submission of your own instead of the kit's")
    old = commands.add_parser(
        "lint-compat", allow_abbrev=False, help="compile under the judge's Triton, TileLang, CuTe"
    )
    old.set_defaults(run=_compat)
    _common(old)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", help="one task; all of them without it")
    parser.add_argument("--lang", help="cuda, triton or tilelang; all of them without it")
    parser.add_argument("--jobs", help="processes at a time")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")


def chosen(task: str | None, language: str | None, file: str | None = None) -> list[Submission]:
    """The submissions that exist among those asked for. KitError for a wrong name or file."""
    own = plan.own_file(plan.Request(task=task, language=language, file=file))
    tasks = [catalog.check_task(task)] if task else catalog.tasks()
    names = [catalog.check_language(language)] if language else list(catalog.LANGUAGES)
    every = [Submission(t, name, own or catalog.submission_path(t, name)) for t in tasks for name in names]
    return [submission for submission in every if submission.path.is_file()]


def jobs(text: str | None) -> int:
    """How many processes at a time; one per core by default."""
    return plan.parse_jobs(text) if text else os.cpu_count() or 1


def read(submissions: Sequence[Submission]) -> list[Finding]:
    """What the texts alone break, file by file."""
    kinds = resources.contracts(sorted({submission.task for submission in submissions})) if submissions else {}
    found: list[Finding] = []
    for submission in submissions:
        kind = kinds[submission.task]
        if submission.language == "cuda":
            found += cuda.check(submission.path, kind["arguments"], kind["scalars"])
        else:
            tensors = [n for n, scalar in zip(kind["arguments"], kind["scalars"], strict=True) if not scalar]
            found += sandbox.check(submission.path, submission.language, tensors)
    return found


def shown(path: Path) -> Path:
    """A path as the user would type it: relative to the kit where it lies in it."""
    return path.relative_to(catalog.ROOT) if path.is_relative_to(catalog.ROOT) else path


def _lint(options: argparse.Namespace, words: list[str]) -> int:
    started = time.monotonic()
    submissions = chosen(options.task, options.lang, options.file)
    found = read(submissions)
    # A file whose text is refused is not run, not even for its launches.
    refused = {finding.path for finding in found if finding.level == "error"}
    usages = resources.measure([s for s in submissions if s.path not in refused], jobs(options.jobs))
    for usage in usages:
        found += resources.findings(usage)
    found = [dataclasses.replace(finding, path=shown(finding.path)) for finding in found]
    errors = sum(finding.level == "error" for finding in found)
    code = ExitCode.LINT_ERROR if errors else ExitCode.OK if submissions else ExitCode.NOTHING_RAN
    if options.json:
        print(json.dumps(_document(submissions, found, usages, code)))
        return code
    for finding in found:
        print(finding)
    for usage in usages:
        for note in usage.notes:
            print(f"{shown(usage.submission.path)}: note: {note}")
    if any(usage.rows for usage in usages):
        print("\n".join(resources.table(usages)))
    for path in sorted({shown(path) for path in refused}):
        print(f"{path} was only read: what its kernels need is looked up once its text is free of errors.")
    seconds = time.monotonic() - started
    print(f"{len(submissions)} files, {errors} errors, {len(found) - errors} notes ({seconds:.0f} s)")
    return code


def _compat(options: argparse.Namespace, words: list[str]) -> int:
    started = time.monotonic()
    outcomes, many = [], jobs(options.jobs)
    for outcome in compat.check(resources.measure(chosen(options.task, options.lang), many), many):
        outcomes.append(outcome)
        if not options.json:
            print(f"{shown(outcome.submission.path)}: {outcome.line or 'not compiled'}", flush=True)
            for finding in outcome.findings:
                print(dataclasses.replace(finding, path=shown(finding.path)))
    found = [dataclasses.replace(f, path=shown(f.path)) for outcome in outcomes for f in outcome.findings]
    errors = sum(finding.level == "error" for finding in found)
    done = len(outcomes)
    code = ExitCode.LINT_ERROR if errors else ExitCode.OK if done else ExitCode.NOTHING_RAN
    if options.json:
        lines = {str(shown(outcome.submission.path)): outcome.line for outcome in outcomes}
        findings = [{**dataclasses.asdict(finding), "path": str(finding.path)} for finding in found]
        print(json.dumps({"files": lines, "findings": findings, "exit_code": int(code)}))
    else:
        seconds = time.monotonic() - started
        print(f"{done} files under old versions, {errors} errors, {len(found) - errors} notes ({seconds:.0f} s)")
    return code


def _document(
    submissions: Sequence[Submission], found: Sequence[Finding], usages: Sequence[Usage], code: ExitCode
) -> dict[str, Any]:
    return {
        "files": [str(shown(submission.path)) for submission in submissions],
        "findings": [{**dataclasses.asdict(finding), "path": str(finding.path)} for finding in found],
        "resources": [
            {"task": usage.submission.task, "language": usage.submission.language, **row}
            for usage in usages
            for row in usage.rows
        ],
        "notes": [note for usage in usages for note in usage.notes],
        "exit_code": int(code),
    }
