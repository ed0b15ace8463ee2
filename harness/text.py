"""Foreign text in our sentences: control characters written as escapes, long values cut in the middle."""

from __future__ import annotations

from collections.abc import Sequence

_VALUE_CHARACTERS = 200


def printable(text: str) -> str:
    """One line of foreign output with control characters (colours, carriage returns) written as escapes."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: str) -> str:
    """A value that a user gave, as a sentence shows it: on one line, and a count in place of what is too much."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in value)
    ends = _VALUE_CHARACTERS // 2
    if len(text) <= _VALUE_CHARACTERS:
        return text
    return f"{text[:ends]}[{len(text) - 2 * ends} characters left out]{text[-ends:]}"


def whole_number(text: str) -> int | None:
    """The value of plain decimal digits; None for anything else, and for more digits than any number here has.

    int() takes digits of every script, signs and underscores, and raises for more than 4300 digits.
    """
    text = text.strip()
    if not (text.isascii() and text.isdecimal()) or len(text.lstrip("0")) > 9:
        return None
    return int(text)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as CASES= takes them: [1, 3, 4, 5] -> "1,3-5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
