"""A C++ submission as the lint reads it: solid tokens, where the brackets close, what the C500's compiler would see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import arch_section, ctokens
from harness.lint import Finding

# What the C500's toolchain defines. cu-bridge says CUDA 11.6 and capability 8.0 there, so code behind __CUDACC__ or
# __CUDA_ARCH__ is compiled for the C500 too.
_MACROS = {
    "__MACA__": 1,
    "__MACACC__": 1,
    "__MXCC__": 1,
    "__MACA_ARCH__": 1000,
    "__clang__": 1,
    "__CUDACC__": 1,
    "__NVCC__": 1,
    "__CUDA_ARCH__": 800,
    "__cplusplus": 201703,
}
_PAIRS = ("&&", "||", "==", "!=", "<=", ">=", "<<", ">>")
# Binary operators of #if, loosest first.
_LEVELS = (("||",), ("&&",), ("==", "!="), ("<", ">", "<=", ">="), ("+", "-"))
_CONDITIONS = ("if", "ifdef", "ifndef", "elif", "else", "endif")


class Reader:
    """The solid tokens of a file, each with its line. `live[i]`: the C500's compiler sees token i."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8", errors="replace")
        self.tokens = ctokens.solid(self.text)
        self.texts = [token.text for token in self.tokens]
        self.live = _live(self.tokens)
        self._partner = self._partners()

    def finding(self, at: int, rule: str, message: str, way_out: str, level: str = "error") -> Finding:
        """A finding at token `at`."""
        return Finding(self.path, self.tokens[at].line, rule, message, way_out, level)

    def named(self, at: int) -> bool:
        """Whether token `at` is a name that the C500's compiler sees."""
        return self.live[at] and self.tokens[at].kind == "name"

    def called(self, at: int) -> bool:
        """Whether an opening parenthesis follows token `at`."""
        return self.texts[at + 1 : at + 2] == ["("]

    def closing(self, at: int) -> int:
        """Index of the bracket that closes the one at `at`; the last token where none does."""
        return self._partner.get(at, len(self.texts) - 1)

    def enclosing(self, at: int) -> list[int]:
        """Indices of the brackets ( [ { around token `at`, innermost first."""
        return sorted((start for start, end in self._partner.items() if start < at < end), reverse=True)

    def arguments(self, at: int) -> list[list[str]]:
        """The comma-separated token lists between the bracket at `at` and its partner."""
        parts: list[list[str]] = [[]]
        depth = 0
        for text in self.texts[at + 1 : self.closing(at)]:
            depth += (text in ("(", "[", "{", "<")) - (text in (")", "]", "}", ">"))
            if text == "," and depth == 0:
                parts.append([])
            else:
                parts[-1].append(text)
        return parts if parts != [[]] else []

    def assigned(self, at: int) -> str:
        """The name that the statement of token `at` declares or assigns by `=`, or ""."""
        while at > 0 and self.texts[at - 1] not in (";", "{", "}", ","):
            at -= 1
            if self.texts[at] == "=" and self.texts[at + 1] != "=" and self.tokens[at - 1].kind == "name":
                return self.texts[at - 1]
        return ""

    def _partners(self) -> dict[int, int]:
        partner: dict[int, int] = {}
        opened: list[int] = []
        for index, text in enumerate(self.texts):
            if text in ("(", "[", "{"):
                opened.append(index)
            elif text in (")", "]", "}") and opened:
                partner[opened.pop()] = index
        return partner


def _live(tokens: Sequence[ctokens.Token]) -> list[bool]:
    """For every token whether it lies in a branch that is taken on the C500; directives of the branching itself not."""
    live, macros = [True] * len(tokens), dict(_MACROS)
    stack: list[tuple[bool, bool]] = []  # (a branch was taken before, the present one is taken)
    index = 0
    while index < len(tokens):
        name = ctokens.directive(list(tokens), index)
        end = index + 1
        while name and end < len(tokens) and not tokens[end].leads:
            end += 1
        rest = [token.text for token in tokens[index + 2 : end]]
        active = all(taken for _, taken in stack)
        if name in ("if", "ifdef", "ifndef"):
            value = _value(rest, macros) if name == "if" else (bool(rest) and rest[0] in macros) == (name == "ifdef")
            stack.append((value, value))
        elif name == "elif" and stack:
            value = not stack[-1][0] and _value(rest, macros)
            stack[-1] = (stack[-1][0] or value, value)
        elif name == "else" and stack:
            stack[-1] = (True, not stack[-1][0])
        elif name == "endif" and stack:
            stack.pop()
        elif name == "define" and active and rest:
            macros[rest[0]] = _integer(rest[1]) if len(rest) == 2 else 1
        for at in range(index, end):
            live[at] = active and name not in _CONDITIONS
        index = end
    return live


def _integer(text: str) -> int:
    try:
        return int(text.rstrip("uUlL").replace("'", ""), 0)
    except ValueError:
        return 1


def _value(texts: Sequence[str], macros: dict[str, int]) -> bool:
    """The truth of an `#if` expression. One that is not understood (__has_include) counts as taken."""
    parts: list[str] = []
    for text in texts:
        if parts and parts[-1] + text in _PAIRS:
            parts[-1] += text
        else:
            parts.append(text)
    try:
        value, end = _binary(parts, 0, 0, macros)
    except (IndexError, ValueError):
        return True
    return bool(value) if end == len(parts) else True


def _binary(parts: list[str], at: int, level: int, macros: dict[str, int]) -> tuple[int, int]:
    if level == len(_LEVELS):
        return _unary(parts, at, macros)
    left, at = _binary(parts, at, level + 1, macros)
    while at < len(parts) and parts[at] in _LEVELS[level]:
        sign = parts[at]
        right, at = _binary(parts, at + 1, level + 1, macros)
        results = {
            "||": left or right,
            "&&": left and right,
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            ">": left > right,
            "<=": left <= right,
            ">=": left >= right,
            "+": left + right,
            "-": left - right,
        }
        left = int(results[sign])
    return left, at


def _unary(parts: list[str], at: int, macros: dict[str, int]) -> tuple[int, int]:
    text = parts[at]
    if text == "!":
        value, at = _unary(parts, at + 1, macros)
        return int(not value), at
    if text == "(":
        value, at = _binary(parts, at + 1, 0, macros)
        if parts[at] != ")":
            raise ValueError(parts[at])
        return value, at + 1
    if text == "defined":
        bracket = parts[at + 1] == "("
        return int(parts[at + 1 + bracket] in macros), at + 2 + 2 * bracket
    if text[0].isdigit():
        return int(text.rstrip("uUlL").replace("'", ""), 0), at + 1
    if parts[at + 1 : at + 2] == ["("] or not (text[0].isalpha() or text[0] == "_"):
        raise ValueError(text)
    return macros.get(text, 0), at + 1


def section_lines(text: str, name: str) -> range:
    """The lines of the arch section; empty where the file has none. Raises arch_section.SectionError."""
    if arch_section.BEGIN not in text and arch_section.END not in text:
        return range(0)
    before, section, _ = arch_section.split(text, name)
    first = before.count("\n") + 1
    return range(first, first + section.count("\n"))
