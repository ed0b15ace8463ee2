"""What C++ files to paste share: master copies, pasted into each file between two marker comments.

    python -m harness.arch_section            paste the master copies into every file that has their markers
    python -m harness.arch_section --check    only say which copies differ, and what else breaks the one-body rule

The arch section (tasks/common/arch.cuh) is in all submissions, a task's shared section (tasks/<task>/shared.cuh) in its
Hopper variant too. Outside the arch section a submission is one body for all devices: no conditional compilation, no
inline assembly, no vendor builtins. `violations` reads tokens, so that the same words in comments and strings are
nobody's business.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness import ctokens

ROOT = Path(__file__).resolve().parent.parent
MASTER = ROOT / "tasks" / "common" / "arch.cuh"
BEGIN, END = "// ---- arch section", "// ---- end of arch section"
SHARED = "// ---- shared section", "// ---- end of shared section"
ALLOWED_DIRECTIVES = ("include", "pragma")
ASSEMBLY = ("asm", "__asm", "__asm__")


class SectionError(Exception):
    """A submission whose markers are missing or out of order; str() is the sentence for the user."""


def split(text: str, name: str, markers: tuple[str, str] = (BEGIN, END)) -> tuple[str, str, str]:
    """What comes before the section, the section with both marker lines, and what comes after it.

    `name` is the file's, for the SectionError that missing, repeated or reversed markers raise.
    """
    begin, end = markers
    lines = text.splitlines(keepends=True)
    begins = [i for i, line in enumerate(lines) if line.startswith(begin)]
    ends = [i for i, line in enumerate(lines) if line.startswith(end)]
    if len(begins) != 1 or len(ends) != 1 or ends[0] < begins[0]:
        raise SectionError(
            f"{name}: found {len(begins)} lines that start with '{begin}' and {len(ends)} with '{end}'; "
            f"put exactly one of each, in this order, around the {begin.removeprefix('// ---- ')}."
        )
    first, last = begins[0], ends[0] + 1
    return "".join(lines[:first]), "".join(lines[first:last]), "".join(lines[last:])


def breaches(text: str, name: str) -> list[tuple[int, str]]:
    """What breaks the one-body rule outside the arch section: the line and the directive or the word.

    Without any marker the whole text is outside.
    """
    if BEGIN in text or END in text:
        before, section, after = split(text, name)
        text = before + "\n" * section.count("\n") + after  # keeps the line numbers
    tokens = ctokens.solid(text)
    found = []
    for at, token in enumerate(tokens):
        directive = ctokens.directive(tokens, at)
        if directive and directive not in ALLOWED_DIRECTIVES:
            found.append((token.line, f"#{directive}"))
        elif token.kind == "name" and (token.text in ASSEMBLY or token.text.startswith("__builtin_mxc")):
            found.append((token.line, token.text))
    return found


def violations(text: str, name: str) -> list[str]:
    """`breaches` of a file that must have its section, one sentence each."""
    split(text, name)
    return [f"{name}:{line}: {what} outside the arch section" for line, what in breaches(text, name)]


def submissions(root: Path = ROOT) -> list[Path]:
    """The C++ submissions that carry the section, in order."""
    return [path for path in sorted(root.glob("tasks/*/cuda/*.cu")) if BEGIN in path.read_text(encoding="utf-8")]


def sharers(root: Path = ROOT) -> list[tuple[Path, Path]]:
    """The C++ files that carry their task's shared section, each with its master copy, in order."""
    pairs = [(path, path.parent.parent / "shared.cuh") for path in sorted(root.glob("tasks/*/cuda/*.cu"))]
    return [(path, master) for path, master in pairs if SHARED[0] in path.read_text(encoding="utf-8")]


def pasted(text: str, master: str, name: str, markers: tuple[str, str] = (BEGIN, END)) -> str:
    """`text` with its section replaced by the master copy."""
    before, _, after = split(text, name, markers)
    return before + master + after


def main(arguments: list[str] | None = None) -> int:
    """Paste or check; the number of files that differ or break the rule decides the exit code of a check."""
    parser = argparse.ArgumentParser(prog="python -m harness.arch_section", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when something is wrong")
    options = parser.parse_args(arguments)
    wrong = 0
    every = [(path, MASTER, (BEGIN, END)) for path in submissions()]
    for path, master, markers in [*every, *((path, master, SHARED) for path, master in sharers(ROOT))]:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        try:
            problems = violations(text, name) if master == MASTER else []
            new = pasted(text, master.read_text(encoding="utf-8"), name, markers)
        except SectionError as error:
            problems, new = [str(error)], text
        if new != text and options.check:
            section = markers[0].removeprefix("// ---- ")
            problems.append(f"{name}: its {section} differs from {master.relative_to(ROOT).as_posix()}")
        elif new != text:
            path.write_text(new, encoding="utf-8")
            print(f"{name}: pasted")
        wrong += len(problems)
        print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
