"""The one tokenizer of C++ text: for the simulator's rewriting, for the arch section's rule and for the lint.

It knows what a reader needs to tell code from words: comments, literals (raw ones too), numbers with separators, names,
and the preprocessor's lines. It is lossless: the texts of all tokens, joined, are the source.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

_TOKEN = re.compile(
    r"""
    (?P<space>(?:[ \t\r\f\v\n]|\\\n)+)
  | (?P<comment>//(?:\\\n|[^\n])*|/\*.*?(?:\*/|\Z))
  | (?P<raw>(?:u8|[uUL])?R"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)")
  | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
  | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')
  | (?P<number>\.?[0-9](?:[eEpP][+-]|'[0-9A-Za-z]|[0-9A-Za-z_.])*)
  | (?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
  | (?P<op><<<|>>>|::|->|.)
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclasses.dataclass
class Token:
    """`kind`: space, comment, raw, string, char, number, name or op. `line` is 1-based.

    `leads`: nothing but white space and comments stands before it on its line, so that a `#` there starts a directive.
    """

    kind: str
    text: str
    line: int
    leads: bool = False

    @property
    def solid(self) -> bool:
        """Neither white space nor a comment."""
        return self.kind not in ("space", "comment")


def tokenize(source: str) -> list[Token]:
    """All tokens of a C++ file in order, white space and comments included."""
    tokens: list[Token] = []
    line, leads = 1, True
    for match in _TOKEN.finditer(source):
        kind, text = match.lastgroup or "op", match.group()
        token = Token("raw" if kind == "tag" else kind, text, line, leads)
        tokens.append(token)
        breaks = text.count("\n")
        line += breaks
        # A line break in a comment or behind a backslash does not end the line.
        leads = (leads and not token.solid) or (kind == "space" and breaks > text.count("\\\n"))
    return tokens


def solid(source: str) -> list[Token]:
    """The tokens that are neither white space nor comments."""
    return [token for token in tokenize(source) if token.solid]


def directive(tokens: Sequence[Token], at: int) -> str:
    """The name of the preprocessor directive whose `#` is the solid token `at`, or ""."""
    if tokens[at].text != "#" or not tokens[at].leads or at + 1 == len(tokens):
        return ""
    return tokens[at + 1].text
