"""Requirement lists: what pyproject.toml asks for, and whether a version will do. Standard library alone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, NamedTuple


class Requirement(NamedTuple):
    """One line of a requirement list: `name`, and `bound` such as "==3.7.1", ">=1.26" or ""."""

    name: str
    bound: str

    @classmethod
    def parse(cls, text: str) -> Requirement:
        for operator in ("==", ">="):
            name, found, version = text.partition(operator)
            if found:
                return cls(name.strip(), operator + version.strip())
        return cls(text.strip(), "")

    def accepts(self, version: str | None) -> bool:
        """True when an installed version will do. A local part ("2.13.0+cpu") does not count."""
        if not self.bound:
            return True
        if version is None:
            return False
        have, want = _release(version), _release(self.bound[2:])
        return have == want if self.bound.startswith("==") else have >= want

    def __str__(self) -> str:
        return self.name + self.bound


def _release(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def read_lists(pyproject: Path) -> dict[str, list[str]]:
    """Every list of strings in a pyproject.toml, as "table.key" -> list. (tomllib comes with Python 3.11 only.)"""
    lists: dict[str, list[str]] = {}
    table, pending = "", ""
    for line in pyproject.read_text(encoding="utf-8").splitlines():
        if not pending and line.startswith(("[", "#")):
            table = table if line.startswith("#") else line.strip().strip("[]")
            continue
        pending += line + "\n"
        key, equals, value = pending.partition("=")
        if not equals or not value.lstrip().startswith("["):
            pending = ""
            continue
        try:
            # A TOML list of plain strings is a Python list as well; it is complete when it parses.
            parsed = ast.literal_eval(value.strip())
        except SyntaxError:
            continue
        pending = ""
        lists[f"{table}.{key.strip()}"] = parsed
    return lists


def satisfied(need: Requirement, found: dict[str, dict[str, Any]]) -> bool:
    return need.name in found and need.accepts(found[need.name]["version"])
