"""Turn a `.cu` file into C++ that g++ takes: kernel launches, dynamic shared memory, two spellings. Line by line the
same as the submission, so that every diagnostic carries its own line numbers.

    kernel<<<grid, block, bytes, stream>>>(a, b)   becomes   ::sim::configure("kernel", grid, block, bytes, stream)
                                                             ([&](auto&... a) { kernel(a...); })(a, b)
    extern __shared__ float tile[];                becomes   float * const tile = ::sim::DynamicShared();
    __shared__ float tile[64];                     is followed by a declaration to the simulator
"""

from __future__ import annotations

from harness.ctokens import Token, tokenize


class SourceError(Exception):
    """The file cannot be rewritten; `line` is 1-based."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def _previous(tokens: list[Token], index: int) -> int:
    index -= 1
    while index >= 0 and not tokens[index].solid:
        index -= 1
    return index


def _next(tokens: list[Token], index: int) -> int:
    index += 1
    while index < len(tokens) and not tokens[index].solid:
        index += 1
    return index


def _opening(tokens: list[Token], at: int) -> int:
    """Index of the "[" that the "]" at `at` closes, or 0."""
    depth = 0
    while at > 0:
        depth += (tokens[at].text == "]") - (tokens[at].text == "[")
        if depth == 0:
            break
        at -= 1
    return at


def _callee_start(tokens: list[Token], end: int) -> int:
    """Index of the first token of the id-expression that ends right before `end`: a::b<c, (d)>."""
    at = _previous(tokens, end)
    start = end
    while at >= 0:
        if tokens[at].text in (">", ">>>"):  # template arguments: back to the matching "<"
            depth, parens = 0, 0
            while at >= 0:
                text = tokens[at].text
                parens += (text in (")", "]", "}")) - (text in ("(", "[", "{"))
                if parens == 0:
                    depth += {">": 1, ">>>": 3, "<": -1, "<<<": -3}.get(text, 0)
                    if depth == 0:
                        break
                at -= 1
            at = _previous(tokens, at)
        while at >= 0 and tokens[at].text == "]":  # an element of a table of kernels
            at = _previous(tokens, _opening(tokens, at))
        if at < 0 or tokens[at].kind != "name":
            break
        start = at
        at = _previous(tokens, at)
        if at >= 0 and tokens[at].text == "template":
            start, at = at, _previous(tokens, at)
        if at < 0 or tokens[at].text not in ("::", ".", "->"):
            break
        start = at
        at = _previous(tokens, at)
    if start == end:
        raise SourceError("'<<<' without a kernel's name before it", tokens[end].line)
    return start


def _launches(tokens: list[Token]) -> None:
    """Rewrite every `kernel<<<configuration>>>` in place."""
    index = 0
    while index < len(tokens):
        if tokens[index].text != "<<<" or tokens[index].kind != "op":
            index += 1
            continue
        depth, close = 0, index + 1
        while close < len(tokens) and not (depth == 0 and tokens[close].text == ">>>"):
            depth += (tokens[close].text in ("(", "[", "{")) - (tokens[close].text in (")", "]", "}"))
            close += 1
        if close == len(tokens):
            raise SourceError("'<<<' without its '>>>'", tokens[index].line)
        start = _callee_start(tokens, index)
        kernel = tokens[start:index]
        name = "".join(token.text for token in kernel if token.kind != "comment")
        label = " ".join(name.split()).replace("\\", "").replace('"', "'")
        call = "".join(" " if token.kind == "comment" else token.text for token in kernel)
        # Line breaks inside the kernel's name move behind the call, so that the count of lines stays.
        breaks = "".join(
            token.text for token in kernel if not token.solid and "\n" in token.text and token.kind == "space"
        )
        head = Token("op", f'::sim::configure("{label}", ', tokens[start].line)
        body = f")([&](auto&... sim_a) SIM_UNHOOKED_CALL {{ {' '.join(call.split())}(sim_a...); }})"
        tail = Token("op", breaks + body, tokens[close].line)
        inner = tokens[index + 1 : close]
        tokens[start : close + 1] = [head, *inner, tail]
        index = start + 1


def _dynamic_shared(tokens: list[Token]) -> None:
    """Rewrite `extern __shared__ T name[];` and `extern __shared__ T name[][N];` in place."""
    for index, token in enumerate(tokens):
        if token.text != "extern":
            continue
        stop = index
        while stop < len(tokens) and tokens[stop].text not in (";", "{", "("):
            stop = _next(tokens, stop)
            if stop < len(tokens) and tokens[stop].text == "(" and tokens[_previous(tokens, stop)].text in _ATTRIBUTES:
                stop = _closing(tokens, stop)
        solid = [i for i in range(index, min(stop, len(tokens))) if tokens[i].solid]
        if stop >= len(tokens) or tokens[stop].text != ";" or not any(tokens[i].text == "__shared__" for i in solid):
            continue
        opening = [i for i in solid if tokens[i].text == "[" and tokens[_next(tokens, i)].text == "]"]
        if not opening:
            continue
        first = opening[0]
        name = _previous(tokens, first)
        rest = tokens[_next(tokens, first) + 1 : stop]
        more_dimensions = any(t.solid for t in rest)
        for i in solid:
            if tokens[i].text in ("extern", "__shared__", "static"):
                tokens[i] = Token("space", " ", tokens[i].line)
        if more_dimensions:
            tokens[name].text = f"(* const {tokens[name].text})"
        else:
            tokens[name].text = f"* const {tokens[name].text}"
        tokens[first].text = ""
        tokens[_next(tokens, first)].text = ""
        tokens[stop].text = " = ::sim::DynamicShared();"


_ATTRIBUTES = ("__align__", "alignas", "__attribute__", "sizeof")


def _closing(tokens: list[Token], index: int) -> int:
    depth = 0
    while index < len(tokens):
        depth += (tokens[index].text == "(") - (tokens[index].text == ")")
        if depth == 0:
            return index
        index = _next(tokens, index)
    return index


def _static_shared(tokens: list[Token]) -> None:
    """Follow each `__shared__ T a[N], b;` by a statement that tells the simulator of `a` and of `b`."""
    number = 0
    for index, token in enumerate(tokens):
        if token.text != "__shared__":
            continue
        names: list[str] = []
        depth, angles, named = 0, 0, False
        at = _next(tokens, index)
        while at < len(tokens):
            text, before = tokens[at].text, tokens[_previous(tokens, at)]
            if depth == 0 and angles == 0 and text in ("[", ",", ";", "=") and before.kind == "name" and not named:
                names.append(before.text)
                named = True
            if depth == 0 and angles == 0 and text == ",":
                named = False
            if depth == 0 and text == ";":
                break
            depth += (text in ("(", "[", "{")) - (text in (")", "]", "}"))
            if depth == 0 and text in ("<", ">", ">>>"):
                angles += {"<": 1, ">": -1, ">>>": -3}[text]
            at = _next(tokens, at)
        if at == len(tokens):
            continue
        for name in names:
            number += 1
            tokens[at].text += f' const ::sim::Shared sim_shared_{number}("{name}", &{name}, sizeof({name}));'


def _spellings(tokens: list[Token]) -> None:
    """`__noinline__` cannot be a macro (system headers use it in attributes); `static __shared__` is static once."""
    for index, token in enumerate(tokens):
        before = _previous(tokens, index)
        if token.text == "__noinline__" and (before < 0 or tokens[before].text not in ("(", ",")):
            token.text = "__attribute__((noinline))"
        elif token.text == "__shared__" and before >= 0 and tokens[before].text == "static":
            tokens[before].text = ""


def _launch_bounds(tokens: list[Token]) -> None:
    """A kernel's body starts with a check of its own `__launch_bounds__(...)`."""
    for index, token in enumerate(tokens):
        opening = _next(tokens, index)
        if token.text != "__launch_bounds__" or opening >= len(tokens) or tokens[opening].text != "(":
            continue
        closing = _closing(tokens, opening)
        bounds = "".join(t.text for t in tokens[opening + 1 : closing] if t.solid)
        at = closing
        while at < len(tokens) and tokens[at].text not in (";", "{"):
            at = _next(tokens, at)
            if at < len(tokens) and tokens[at].text == "(":
                at = _next(tokens, _closing(tokens, at))
        if at < len(tokens) and tokens[at].text == "{":
            tokens[at].text = "{ ::sim::launch_bounds(" + bounds + ");"


def rewrite(source: str, path: str) -> str:
    """The C++ text of a `.cu` file; `path` is the name that diagnostics will show. Raises SourceError."""
    tokens = tokenize(source)
    _dynamic_shared(tokens)
    _static_shared(tokens)
    _spellings(tokens)
    _launch_bounds(tokens)
    _launches(tokens)
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'#line 1 "{escaped}"\n' + "".join(token.text for token in tokens)
