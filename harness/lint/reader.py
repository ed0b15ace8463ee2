"""A C++ submission as the lint reads it: solid tokens, where the brackets close, what the C500's compiler would see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import arch_section, ctokens
from harness.lint import Finding


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


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
# What other compilers define. Of further names that compilers or headers may define nothing is known.
_ABSENT = words(
    """
    __NVCOMPILER __HIP__ __HIPCC__ __HIP_PLATFORM_AMD__ __HIP_DEVICE_COMPILE__ __AMDGCN__ _MSC_VER _WIN32 _WIN64
    __APPLE__ __INTEL_COMPILER __CUDACC_RTC__ __CUDACC_DEBUG__
    """
)
_ELSEWHERE = ("__", "CUDA_", "CUDART_", "CUTE_", "CUTLASS_", "MCTLASS_", "MACA_", "INT_", "UINT_", "LONG_", "CHAR_")
_ELSEWHERE_WHOLE = ("unix", "linux", "NULL", "EOF", "SIZE_MAX", "M_PI", "assert", "errno", "stdin", "stdout", "stderr")
_PAIRS = ("&&", "||", "==", "!=", "<=", ">=", "<<", ">>")
# Binary operators of #if, loosest first.
_LEVELS = (("||",), ("&&",), ("==", "!="), ("<", ">", "<=", ">="), ("+", "-"))
_CONDITIONS = ("if", "ifdef", "ifndef", "elif", "elifdef", "elifndef", "else", "endif")


class Reader:
    """The solid tokens of a file, each with its line. `live[i]`: the C500's compiler sees token i.

    `every`: the tokens with white space and comments.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8", errors="replace")
        self.every = ctokens.tokenize(self.text)
        self.tokens = [token for token in self.every if token.solid]
        self.texts = [token.text for token in self.tokens]
        self.live = _live(self.tokens)
        self._partner = self._partners()
        self._opening = {end: start for start, end in self._partner.items()}

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

    def opening(self, at: int) -> int:
        """Index of the bracket that the one at `at` closes; 0 where none does."""
        return self._opening.get(at, 0)

    def declares_function(self, at: int) -> bool:
        """Whether the name at `at` with its parentheses declares or defines a function: a type stands before it."""
        before = self.texts[at - 1] if at else ";"
        return before in ("*", "&", ">") or (before[0].isalpha() and before not in ("return", "else", "case", "do"))

    def enclosing(self, at: int) -> list[int]:
        """Indices of the brackets ( [ { around token `at`, innermost first."""
        return sorted((start for start, end in self._partner.items() if start < at < end), reverse=True)

    def arguments(self, at: int) -> list[list[str]]:
        """The comma-separated token lists between the bracket at `at` and its partner."""
        inside = self.texts[at + 1 : self.closing(at)]
        # A "<" is a bracket only where all of them close; it is a comparison otherwise.
        angles = inside.count("<") == inside.count(">")
        opening, closing = ("(", "[", "{", *("<" * angles)), (")", "]", "}", *(">" * angles))
        parts: list[list[str]] = [[]]
        depth = 0
        for text in inside:
            depth += (text in opening) - (text in closing)
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
    """For every token whether it lies in a branch that may be taken on the C500; directives of the branching not."""
    live, macros = [True] * len(tokens), dict(_MACROS)
    undefined: set[str] = set()
    stack: list[tuple[bool, bool]] = []  # (a branch was surely taken before, the present one may be taken)
    index = 0
    while index < len(tokens):
        name = ctokens.directive(tokens, index)
        end = index + 1
        while name and end < len(tokens) and not tokens[end].leads:
            end += 1
        rest = [token.text for token in tokens[index + 2 : end]]
        active = all(taken for _, taken in stack)
        if name in ("if", "ifdef", "ifndef"):
            value = _condition(name, rest, macros, undefined)
            stack.append((value is True, value is not False))
        elif name in ("elif", "elifdef", "elifndef") and stack:
            value = _condition(name[2:], rest, macros, undefined)
            before = stack[-1][0]
            stack[-1] = (before or value is True, not before and value is not False)
        elif name == "else" and stack:
            stack[-1] = (True, not stack[-1][0])
        elif name == "endif" and stack:
            stack.pop()
        elif name == "define" and active and rest:
            macros[rest[0]] = _integer(rest[1]) if len(rest) == 2 else 1
            undefined.discard(rest[0])
        elif name == "undef" and active and rest:
            macros.pop(rest[0], None)
            undefined.add(rest[0])
        for at in range(index, end):
            live[at] = active and name not in _CONDITIONS
        index = end
    return live


def _integer(text: str) -> int:
    try:
        return int(text.rstrip("uUlL").replace("'", ""), 0)
    except ValueError:
        return 1


def _unknown(name: str) -> bool:
    """Whether a compiler or a header may define a name that the file does not."""
    reserved = name.startswith(_ELSEWHERE) or (name[:1] == "_" and name[1:2].isupper()) or name in _ELSEWHERE_WHOLE
    return reserved and name not in _ABSENT


def _condition(kind: str, texts: Sequence[str], macros: dict[str, int], undefined: set[str]) -> bool | None:
    """The truth of an `#if`, `#ifdef` or `#ifndef`; None where it is not known (__has_include, __GNUC__)."""
    values = set()
    for guess in (0, 1):
        known = _Known(macros, undefined, guess)
        try:
            if kind != "if":
                values.add(known.defined(texts[0]) == (kind == "ifdef"))
                continue
            parts: list[str] = []
            for text in texts:
                if parts and parts[-1] + text in _PAIRS:
                    parts[-1] += text
                else:
                    parts.append(text)
            value, end = _binary(parts, 0, 0, known)
        except (IndexError, ValueError, RecursionError):
            return None
        if end != len(parts):
            return None
        values.add(bool(value))
    return values.pop() if len(values) == 1 else None


class _Known:
    """Macros by name, with a guess for those of which nothing is known."""

    def __init__(self, macros: dict[str, int], undefined: set[str], guess: int) -> None:
        self.macros, self.undefined, self.guess = macros, undefined, guess

    def defined(self, name: str) -> bool:
        if name not in self.macros and name not in self.undefined and _unknown(name):
            return bool(self.guess)
        return name in self.macros

    def value(self, name: str) -> int:
        return self.macros.get(name, int(self.defined(name)))


def _binary(parts: list[str], at: int, level: int, macros: _Known) -> tuple[int, int]:
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


def _unary(parts: list[str], at: int, macros: _Known) -> tuple[int, int]:
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
        return int(macros.defined(parts[at + 1 + bracket])), at + 2 + 2 * bracket
    if text[0].isdigit():
        return int(text.rstrip("uUlL").replace("'", ""), 0), at + 1
    if parts[at + 1 : at + 2] == ["("] or not (text[0].isalpha() or text[0] == "_"):
        raise ValueError(text)
    return macros.value(text), at + 1


def section_lines(text: str, name: str) -> range:
    """The lines of the arch section; empty where the file has none. Raises arch_section.SectionError."""
    if arch_section.BEGIN not in text and arch_section.END not in text:
        return range(0)
    before, section, _ = arch_section.split(text, name)
    first = before.count("\n") + 1
    return range(first, first + section.count("\n"))
