"""Where in a submission a parameter stands, its value there, and the file with another value in its place.

A place is a tuple: the name of a constant, then how to go on inside it.

    ("TUNING", "sm90", 128)   Python: a module-level literal, then keys of dicts
    ("kSm80", (128, 128))     C++: a constexpr table, then the row that begins with these values
    ("kMinKeys",)             either: the constant itself

C++ initialisers are read by the harness's tokenizer: braces become tuples, numbers and true/false become Python's. What
is neither (`4 << 20`) stays text, and text is written as it is.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import ctokens
from harness.ctokens import Token
from harness.verdict import KitError

Place = tuple[Any, ...]


class Found(NamedTuple):
    """A literal in a text: characters start to end, and its value."""

    start: int
    end: int
    value: Any


def read(text: str, place: Place, path: Path) -> Any:
    """The value at a place. KitError names the file and what is missing in it."""
    return _find(text, place, path).value


def replaced(text: str, changes: Mapping[Place, Any], path: Path) -> str:
    """`text` with the literals at all places replaced; `path` tells the language and is named in errors.

    Raises KitError for a place that is not there, a value of another form than the one there, or places that overlap.
    """
    edits = []
    for place, value in changes.items():
        found = _find(text, place, path)
        if _form(found.value) != _form(value):
            raise KitError(f"{path.name}: {show(place)} is {found.value!r}, and {value!r} has another form.")
        edits.append((found.start, found.end, render(value, path)))
    edits.sort()
    for (_, end, _), (start, _, _) in itertools.pairwise(edits):
        if start < end:
            raise KitError(f"{path.name}: {', '.join(map(show, changes))} overlap; change one of them at a time.")
    for start, end, new in reversed(edits):
        text = text[:start] + new + text[end:]
    return text


def show(place: Place) -> str:
    """A place as one writes it: TUNING["sm90"][128], kSm80[128, 128], kMinKeys."""
    inner = []
    for key in place[1:]:
        inner.append(", ".join(map(_c_literal, key)) if isinstance(key, tuple) else repr(key).replace("'", '"'))
    return "".join([place[0], *(f"[{key}]" for key in inner)])


def render(value: Any, path: Path) -> str:
    """A value as the file's language writes it."""
    return _c_literal(value) if path.suffix == ".cu" else repr(value).replace("'", '"')


def _c_literal(value: Any) -> str:
    if isinstance(value, tuple):
        return "{" + ", ".join(map(_c_literal, value)) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value!r}f"
    return str(value)


def _form(value: Any) -> Any:
    """What two values must share to stand in the same place: nesting, lengths of tuples, and kinds of leaves."""
    if isinstance(value, tuple):
        return tuple(_form(item) for item in value)
    if isinstance(value, dict):  # a row by another key is the same table
        return frozenset(_form(item) for item in value.values())
    # An integer may become an expression: `4 << 20` stands where 4194304 could.
    return "integer" if isinstance(value, (int, str)) and not isinstance(value, bool) else type(value).__name__


def _find(text: str, place: Place, path: Path) -> Found:
    found = _find_in_cpp(text, place) if path.suffix == ".cu" else _find_in_python(text, place, path)
    if found is None:
        raise KitError(f"{path.name} has no {show(place)}, which the task's tuning.py names; mend one of the two.")
    return found


# -- Python ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def _parsed(text: str) -> ast.Module:
    """One file is looked at many times."""
    return ast.parse(text)


def _find_in_python(text: str, place: Place, path: Path) -> Found | None:
    try:
        tree = _parsed(text)
    except SyntaxError as error:
        raise KitError(f"{path.name}:{error.lineno}: {error.msg}; the file must be Python to be tuned.") from None
    node: ast.expr | None = None
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == place[0] for target in targets):
            assert isinstance(statement, ast.Assign)
            node = statement.value
    for key in place[1:]:
        node = _entry(node, key)
    if node is None:
        return None
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None  # not a literal: nothing that can be replaced by one
    # ast counts columns in bytes of UTF-8.
    starts = [0]
    for line in text.encode("utf-8").splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    offsets = (starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)
    start, end = (len(text.encode("utf-8")[:offset].decode("utf-8")) for offset in offsets)
    return Found(start, end, value)


def _entry(node: ast.expr | None, key: Any) -> ast.expr | None:
    if not isinstance(node, ast.Dict):
        return None
    for name, value in zip(node.keys, node.values, strict=True):
        if isinstance(name, ast.Constant) and name.value == key and type(name.value) is type(key):
            return value
    return None


# -- C++ -------------------------------------------------------------------------------------------------------------


class _Text:
    """The solid tokens of a C++ text and where each begins."""

    def __init__(self, text: str) -> None:
        self.tokens: list[Token] = []
        self.starts: list[int] = []
        at = 0
        for token in ctokens.tokenize(text):
            if token.solid:
                self.tokens.append(token)
                self.starts.append(at)
            at += len(token.text)
        self.source = text

    def found(self, first: int, last: int) -> Found:
        """Tokens first to last, the last one included."""
        end = self.starts[last] + len(self.tokens[last].text)
        return Found(
            self.starts[first], end, _value(self.tokens[first : last + 1], self.source[self.starts[first] : end])
        )


@functools.lru_cache(maxsize=2)
def _tokens(text: str) -> _Text:
    """As `_parsed`."""
    return _Text(text)


def _find_in_cpp(text: str, place: Place) -> Found | None:
    source = _tokens(text)
    spans = list(_initialisers(source.tokens, place[0]))
    if len(spans) != 1:
        return None
    first, last = spans[0]
    for key in place[1:]:
        for start, end in _parts(source.tokens, first, last):
            value = source.found(start, end).value
            if isinstance(value, tuple) and value[: len(key)] == key:
                first, last = start, end
                break
        else:
            return None
    return source.found(first, last)


def _initialisers(tokens: Sequence[Token], name: str) -> list[tuple[int, int]]:
    """First and last token of what every `constexpr ... name[] = ...` at statement level is initialised with."""
    spans = []
    for at, token in enumerate(tokens):
        if token.text != name or token.kind != "name":
            continue
        begin = at
        while begin and tokens[begin - 1].text not in (";", "{", "}") and tokens[begin].text != "constexpr":
            begin -= 1
        equals = at + 1
        if tokens[equals].text == "[":
            while tokens[equals].text != "]":
                equals += 1
            equals += 1
        if tokens[begin].text != "constexpr" or tokens[begin - 1].text == "static" or tokens[equals].text != "=":
            continue
        depth, end = 0, equals + 1
        while depth or tokens[end].text not in (",", ";"):
            depth += (tokens[end].text in "([{") - (tokens[end].text in ")]}")
            end += 1
        spans.append((equals + 1, end - 1))
    return spans


def _parts(tokens: Sequence[Token], first: int, last: int) -> list[tuple[int, int]]:
    """First and last token of each comma-separated part between the braces `first` and `last`."""
    parts, depth, begin = [], 0, first + 1
    for at in range(first + 1, last + 1):
        text = tokens[at].text
        if depth == 0 and (text == "," or at == last):
            if at > begin:
                parts.append((begin, at - 1))
            begin = at + 1
        depth += (text in "([{") - (text in ")]}")
    return parts


def _value(tokens: Sequence[Token], text: str) -> Any:
    if tokens[0].text == "{":
        parts = _parts(tokens, 0, len(tokens) - 1)
        return tuple(_value(tokens[a : b + 1], " ".join(t.text for t in tokens[a : b + 1])) for a, b in parts)
    if len(tokens) > 1:
        return text
    token = tokens[0].text.replace("'", "")
    if token in ("true", "false"):
        return token == "true"
    try:
        return int(token.rstrip("uUlL"), 0)
    except ValueError:
        pass
    try:
        return float(token.rstrip("fF"))
    except ValueError:
        return text
