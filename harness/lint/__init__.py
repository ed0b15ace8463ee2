"""Checks that read a submission without running it: the judge's sandbox rules, and what a C500 cannot do."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Finding:
    """One violation: where it is, which rule, what is wrong (naming the value) and the way out.

    level "error" makes the lint fail; "note" is printed and counted, no more.
    """

    path: Path
    line: int
    rule: str
    message: str
    way_out: str
    level: str = "error"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.level} [{self.rule}] {self.message}; {self.way_out}"
