"""Does the judge's sandbox let a submission in? Asked before anything of it runs: what it refuses is LINT_ERROR."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.lint import Finding, sandbox
from harness.verdict import KernelFault, Verdict

# C++ passes no sandbox at the judge: what does not compile or load there says so itself.
_RULES: dict[str, Callable[[Path, str], list[Finding]]] = {"triton": sandbox.check, "tilelang": sandbox.check}


def refusals(path: Path, language: str) -> list[Finding]:
    """The errors that the judge's sandbox would find in a file, by line; empty where it would run.

    A file that is not there or is not Python has none: whoever loads it says more about that.
    """
    rules = _RULES.get(language)
    if rules is None or not path.is_file():
        return []
    findings = [finding for finding in rules(path, language) if finding.level == "error"]
    return [] if any(finding.rule == "syntax" for finding in findings) else findings


def admit(path: Path, language: str) -> None:
    """Raises KernelFault(LINT_ERROR) with the first refusal of a file, and how many more there are."""
    findings = refusals(path, language)
    if findings:
        first, more = findings[0], f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        detail = f"{path.name}:{first.line}: [{first.rule}] {first.message}; {first.way_out}{more}"
        raise KernelFault(Verdict.LINT_ERROR, detail)
