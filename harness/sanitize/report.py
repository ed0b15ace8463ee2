"""What compute-sanitizer printed: how many errors, and the first of them in one line.

Its lines begin with `=========`. A finding is a line that is not indented and the indented ones below it, which say
where it happened:

    ========= Invalid __global__ read of size 16 bytes
    =========     at void decode<(int)3>(Args)+0x9a0 in /kit/run_kernel.cu:711
    =========     by thread (3,0,0) in block (1,0,0)
    ========= ERROR SUMMARY: 2 errors

    ========= Error: Race reported between Write access at sum(int *)+0x90 in /kit/run_kernel.cu:41
    =========     and Read access at sum(int *)+0x100 in /kit/run_kernel.cu:51 [508 hazards]
    ========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)

Older versions write `at 0x9a0 in /kit/run_kernel.cu:711:void decode<(int)3>(Args)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

_PREFIX = "========="
_LONGEST_NAME = 60  # characters of a kernel's name that are shown
_TOTAL = re.compile(r"(?:ERROR|[A-Z]+CHECK) SUMMARY: (\d+) (?:errors?|hazards? displayed)\b(?! were)(?: \((.*)\))?")
_PART = re.compile(r"(\d+) (?:error|warning)")
_PLACE = re.compile(r"\bat (?!0x)(?P<kernel>.+?)\+0x[0-9a-fA-F]+(?: in (?P<file>.+?):(?P<line>\d+))?(?=\s|$)")
_OLD_PLACE = re.compile(r"\bat 0x[0-9a-fA-F]+ in (?:(?P<file>.+?):(?P<line>\d+):)?(?P<kernel>.+?)(?= \[|$)")
# Not findings: the banner, and what it says of the program that it ran.
_REMARKS = ("COMPUTE-SANITIZER", "Target application", "Application ended", "Saved host backtrace")


class Report(NamedTuple):
    """`errors`: None without a summary, which means that the tool did not come to its end. Warnings count."""

    errors: int | None
    first: str


def parse(text: str) -> Report:
    """Read the output of one run of compute-sanitizer, whatever else was printed between its lines."""
    said = [line[len(_PREFIX) :].rstrip() for line in text.splitlines() if line.startswith(_PREFIX)]
    errors: int | None = None
    first = ""
    for at, line in enumerate(said):
        total = _TOTAL.search(line)
        if total is not None:
            parts = sum(map(int, _PART.findall(total[2] or "")))
            errors = (errors or 0) + max(int(total[1]), parts)
        elif not first and _is_finding(line):
            end = next((i for i in range(at + 1, len(said)) if not said[i].startswith("  ")), len(said))
            first = _sentence([line, *said[at + 1 : end]])
    return Report(errors, first)


def _is_finding(line: str) -> bool:
    indented = not line.startswith(" ") or line.startswith("  ")
    return not indented and " SUMMARY: " not in line and not line.strip().startswith(_REMARKS)


def _sentence(lines: Sequence[str]) -> str:
    """The headline of a finding without its place, and its places by kernel and line."""
    places: list[str] = []
    headline = lines[0].strip()
    for line in lines:
        found = _PLACE.search(line) or _OLD_PLACE.search(line)
        if found is None:
            continue
        if line == lines[0]:
            headline = line[: found.start()].strip()
        access = line[: found.start()].strip().removeprefix("and ") if places and " access" in line else ""
        places.append(" ".join(filter(None, [access, _place(found)])))
        if " access " not in line:
            break  # the frames below are its callers
    return headline + (f" {', and '.join(places)}" if places else "")


def _place(found: re.Match[str]) -> str:
    name = _without_parameters(found["kernel"].strip().removeprefix("void "))
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
    return f"in {name}" + (f" ({PurePath(found['file']).name}:{found['line']})" if found["file"] else "")


def _without_parameters(name: str) -> str:
    """ "decode<(int)3>(Args)" -> "decode<(int)3>"."""
    depth = 0
    for at in range(len(name) - 1, 0, -1):
        depth += {")": 1, "(": -1}.get(name[at], 0)
        if depth == 0:
            return name[:at] if name.endswith(")") else name
    return name
