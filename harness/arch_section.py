"""The arch section of the C++ submissions: one master copy, pasted into each file between two marker comments.

    python -m harness.arch_section            paste the master copy into every submission that has the markers
    python -m harness.arch_section --check    only say which copies differ, and what else breaks the one-body rule

Outside the section a submission is one body for all devices: no conditional compilation, no inline assembly, no vendor
builtins. `violations` reads tokens, so that the same words in comments and strings are nobody's business.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MASTER = ROOT / "tasks" / "common" / "arch.cuh"
BEGIN, END = "// ---- arch section", "// ---- end of arch section"
ALLOWED_DIRECTIVES = ("include", "pragma")
ASSEMBLY = ("asm", "__asm", "__asm__")


class Token(NamedTuple):
    """`kind` is "word" (identifier or keyword), "directive" (its name) or "other" (numbers, literals, punctuation)."""

    kind: str
    text: str
    line: int


class SectionError(Exception):
    """A submission whose markers are missing or out of order; str() is the sentence for the user."""


def tokens(text: str) -> Iterator[Token]:
    """The tokens of C++ source text, without comments; a literal is one token, whatever it contains."""
    i, line, fresh = 0, 1, True  # fresh: only white space so far on this line
    while i < len(text):
        start, here = i, line
        c = text[i]
        if c == "\\" and text[i + 1 : i + 2] == "\n":
            i += 2
        elif c.isspace():
            fresh = fresh or c == "\n"
            i += 1
        elif text.startswith("//", i):
            i = _line_end(text, i)
        elif text.startswith("/*", i):
            i = _after(text, "*/", i + 2)
        elif c == "#" and fresh:
            while i < len(text) and (text[i] == "#" or text[i] in " \t"):
                i += 1
            name = i
            i = _word_end(text, i)
            yield Token("directive", text[name:i], here)
            fresh = False
        elif c.isalpha() or c == "_":
            i = _word_end(text, i)
            fresh = False
            if text[i : i + 1] == '"' and text[start:i] in ("R", "u8R", "uR", "UR", "LR"):
                delimiter = text[i + 1 : text.index("(", i)]
                i = _after(text, f'){delimiter}"', i)
                yield Token("other", text[start:i], here)
            else:
                yield Token("word", text[start:i], here)
        elif c.isdigit():
            # Digit separators and exponents belong to the number: 1'000, 1e-5f.
            while i < len(text) and (
                text[i].isalnum() or text[i] in "._'" or (text[i] in "+-" and text[i - 1] in "eEpP")
            ):
                i += 1
            fresh = False
            yield Token("other", text[start:i], here)
        else:
            i = _literal_end(text, i) if c in "\"'" else i + 1
            fresh = False
            yield Token("other", text[start:i], here)
        line += text.count("\n", start, i)


def _line_end(text: str, i: int) -> int:
    while i < len(text) and text[i] != "\n":
        i += 2 if text[i] == "\\" else 1  # a backslash at the end continues the comment
    return min(i, len(text))


def _after(text: str, mark: str, i: int) -> int:
    found = text.find(mark, i)
    return len(text) if found < 0 else found + len(mark)


def _word_end(text: str, i: int) -> int:
    while i < len(text) and (text[i].isalnum() or text[i] == "_"):
        i += 1
    return i


def _literal_end(text: str, i: int) -> int:
    quote = text[i]
    i += 1
    while i < len(text) and text[i] not in (quote, "\n"):
        i += 2 if text[i] == "\\" else 1
    return min(i + 1, len(text))


def split(text: str, name: str) -> tuple[str, str, str]:
    """What comes before the section, the section with both marker lines, and what comes after it.

    `name` is the file's, for the SectionError that missing, repeated or reversed markers raise.
    """
    lines = text.splitlines(keepends=True)
    begins = [i for i, line in enumerate(lines) if line.startswith(BEGIN)]
    ends = [i for i, line in enumerate(lines) if line.startswith(END)]
    if len(begins) != 1 or len(ends) != 1 or ends[0] < begins[0]:
        raise SectionError(
            f"{name}: found {len(begins)} lines that start with '{BEGIN}' and {len(ends)} with '{END}'; "
            "put exactly one of each, in this order, around the arch section."
        )
    first, last = begins[0], ends[0] + 1
    return "".join(lines[:first]), "".join(lines[first:last]), "".join(lines[last:])


def violations(text: str, name: str) -> list[str]:
    """What breaks the one-body rule outside the arch section, one sentence each, with the line."""
    before, section, after = split(text, name)
    blank = "\n" * section.count("\n")  # keeps the line numbers
    found = []
    for token in tokens(before + blank + after):
        if token.kind == "directive" and token.text not in ALLOWED_DIRECTIVES:
            found.append(f"{name}:{token.line}: #{token.text} outside the arch section")
        elif token.kind == "word" and (token.text in ASSEMBLY or token.text.startswith("__builtin_mxc")):
            found.append(f"{name}:{token.line}: {token.text} outside the arch section")
    return found


def submissions(root: Path = ROOT) -> list[Path]:
    """The C++ submissions that carry the section, in order."""
    return [path for path in sorted(root.glob("tasks/*/cuda/*.cu")) if BEGIN in path.read_text(encoding="utf-8")]


def pasted(text: str, master: str, name: str) -> str:
    """`text` with its section replaced by the master copy."""
    before, _, after = split(text, name)
    return before + master + after


def main(arguments: list[str] | None = None) -> int:
    """Paste or check; the number of files that differ or break the rule decides the exit code of a check."""
    parser = argparse.ArgumentParser(prog="python -m harness.arch_section", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when something is wrong")
    options = parser.parse_args(arguments)
    master = MASTER.read_text(encoding="utf-8")
    wrong = 0
    for path in submissions():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        try:
            problems, new = violations(text, name), pasted(text, master, name)
        except SectionError as error:
            problems, new = [str(error)], text
        if new != text and options.check:
            problems.append(f"{name}: its arch section differs from {MASTER.relative_to(ROOT).as_posix()}")
        elif new != text:
            path.write_text(new, encoding="utf-8")
            print(f"{name}: pasted")
        wrong += len(problems)
        print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
