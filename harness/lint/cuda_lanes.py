"""Where a C++ submission takes a wave to have 32 lanes: masks, results with a bit per lane, widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.lint import Finding
from harness.lint.cuda_guard import statement_end
from harness.lint.reader import Reader, words

_MASKED = ("__shfl_", "__ballot_sync", "__any_sync", "__all_sync", "__reduce_", "__match_")
_LANE_SETS = words("__ballot_sync __activemask __match_any_sync")  # give one bit per lane
_UNSIGNED = words("unsigned uint32_t uint")
_NARROW = _UNSIGNED | {"int", "int32_t"}
_NARROW_BIT_COUNTS = words("__popc __ffs __clz __brev")
_FULL = 0xFFFFFFFF
_LIMITS = {"UINT_MAX": _FULL, "UINT32_MAX": _FULL, "INT_MAX": 2**31 - 1, "INT32_MAX": 2**31 - 1}
_LEVELS = (("|",), ("^",), ("&",), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))
# An operator that splits a thread's index, and what it takes for 32 lanes.
_SPLITS = {"%": 32, "/": 32, "&": 31, ">>": 5}
_CASTS = ("static_cast", "const_cast", "reinterpret_cast")


class _NotConstant(Exception):
    """An expression whose value does not stand in the file."""


class Constants:
    """The values of constant expressions in a file: numbers, operators, casts, and names that are given one."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._defined: dict[str, list[tuple[list[str], bool]]] = {}  # name -> (value, whether it is 32 bits unsigned)
        texts = reader.texts
        for at in range(1, len(texts) - 1):
            if not reader.named(at):
                continue
            macro = texts[at - 2 : at] == ["#", "define"]
            if not macro and texts[at + 1] not in ("=", "{"):
                continue
            start, stop = at + 1 + (not macro), at + 1 + (not macro)
            depth = 0
            while stop < len(texts) and not (macro and reader.tokens[stop].leads):
                depth += (texts[stop] in ("(", "{")) - (texts[stop] in (")", "}"))
                if depth < 0 or (depth == 0 and texts[stop] in (";", ",")):
                    break
                stop += 1
            self._defined.setdefault(texts[at], []).append((texts[start:stop], texts[at - 1] in _UNSIGNED))

    def of(self, texts: Sequence[str]) -> int | None:
        """The value of an expression; None where it is not constant. What is 32 bits wide and unsigned wraps."""
        try:
            parts = _merged(texts)
            value, end, _ = self._binary(parts, 0, 0, 4)
        except (_NotConstant, IndexError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
            return None
        # A template parameter's default ends at the angle bracket.
        return value if end == len(parts) or parts[end] == ">" else None

    def defined(self, name: str) -> list[int]:
        """The values that a name is given in the file."""
        values = [self.of(texts) for texts, _ in self._defined.get(name, [])]
        return [value for value in values if value is not None]

    def narrow(self, name: str) -> bool:
        """Whether a name is declared as 32 bits, unsigned."""
        return any(narrow for _, narrow in self._defined.get(name, []))

    def _binary(self, parts: list[str], at: int, level: int, depth: int) -> tuple[int, int, bool]:
        """(value, next place, whether it is 32 bits unsigned)."""
        if level == len(_LEVELS):
            return self._unary(parts, at, depth)
        left, at, narrow = self._binary(parts, at, level + 1, depth)
        while at < len(parts) and parts[at] in _LEVELS[level]:
            sign = parts[at]
            right, at, also = self._binary(parts, at + 1, level + 1, depth)
            if sign in ("<<", ">>") and not 0 <= right < 128:
                raise _NotConstant
            narrow = narrow if sign in ("<<", ">>") else narrow and (also or 0 <= right <= _FULL)
            left = {
                "|": lambda a, b: a | b,
                "^": lambda a, b: a ^ b,
                "&": lambda a, b: a & b,
                "<<": lambda a, b: a << b,
                ">>": lambda a, b: a >> b,
                "+": lambda a, b: a + b,
                "-": lambda a, b: a - b,
                "*": lambda a, b: a * b,
                "/": lambda a, b: a // b,
                "%": lambda a, b: a % b,
            }[sign](left, right)
            left = left & _FULL if narrow else left
        return left, at, narrow

    def _unary(self, parts: list[str], at: int, depth: int) -> tuple[int, int, bool]:
        text = parts[at]
        if text in ("~", "-", "+", "compl"):
            value, at, narrow = self._unary(parts, at + 1, depth)
            value = ~value if text in ("~", "compl") else -value if text == "-" else value
            return (value & _FULL if narrow else value), at, narrow
        if text in ("(", "{"):
            if parts[at + 2 : at + 3] == [")"] and parts[at + 1] in _NARROW | {"uint64_t", "int64_t"}:  # a cast
                return self._cast(parts[at + 1], *self._unary(parts, at + 3, depth))
            value, at, narrow = self._binary(parts, at + 1, 0, depth)
            if parts[at] not in (")", "}"):
                raise _NotConstant
            return value, at + 1, narrow
        if text in _CASTS and parts[at + 1] == "<" and parts[at + 3] == ">":
            return self._cast(parts[at + 2], *self._unary(parts, at + 4, depth))
        if text in _NARROW | {"uint64_t", "int64_t"} and parts[at + 1] in ("(", "{"):
            return self._cast(text, *self._unary(parts, at + 1, depth))
        if text[0].isdigit():
            plain = text.replace("'", "")
            suffix = plain[len(plain.rstrip("uUlLzZ")) :].lower()
            digits = plain.rstrip("uUlLzZ")
            octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
            value = int(digits, 8) if octal else int(digits, 0)
            hexadecimal_unsigned = digits.lower().startswith("0x") and 2**31 <= value <= _FULL
            return value, at + 1, "l" not in suffix and value <= _FULL and ("u" in suffix or hexadecimal_unsigned)
        if "numeric_limits" in parts[at:] and {"max"} & {*parts[at:]} and _UNSIGNED & {*parts[at:]}:
            return _FULL, len(parts), True
        while parts[at + 1 : at + 2] == ["::"]:  # a name in a namespace goes by its last part
            at += 2
        if parts[at] in _LIMITS:
            return _LIMITS[parts[at]], at + 1, parts[at][0] == "U"
        values = self._defined.get(parts[at], [])
        if depth == 0 or not values or parts[at + 1 : at + 2] == ["("]:
            raise _NotConstant
        found = set()
        for texts, narrow in values:
            inner = _merged(texts)
            value, end, also = self._binary(inner, 0, 0, depth - 1)
            if end != len(inner) and inner[end] != ">":
                raise _NotConstant
            found.add((value & _FULL if narrow else value, narrow or also))
        if len(found) != 1:
            raise _NotConstant
        value, narrow = found.pop()
        return value, at + 1, narrow

    @staticmethod
    def _cast(kind: str, value: int, at: int, narrow: bool) -> tuple[int, int, bool]:
        if kind in _UNSIGNED:
            return value & _FULL, at, True
        return value, at, narrow and kind in _NARROW


def _merged(texts: Sequence[str]) -> list[str]:
    """Tokens with the two halves of << and >> put together again."""
    parts: list[str] = []
    for text in texts:
        if text in ("<", ">") and parts and parts[-1] == text:
            parts[-1] += text
        else:
            parts.append(text)
    return parts


def check(reader: Reader, section: range) -> Iterator[Finding]:
    """Every place of a file. `section`: lines where a split by 32 without a lane's name is none."""
    constants = Constants(reader)
    yield from _masks(reader, constants)
    yield from _widths(reader, constants, section)


def _masks(reader: Reader, constants: Constants) -> Iterator[Finding]:
    """Masks of 32 bits where a wave has 64 lanes, and results with a bit per lane that are cut to 32."""
    way_out = "use ~0ull, or the reductions of the arch section"
    sets: set[str] = set()
    for at, text in enumerate(reader.texts):
        if not reader.named(at) or not reader.called(at):
            continue
        if text.startswith(_MASKED):
            mask = (reader.arguments(at + 1) or [[]])[0]
            spelt = "".join(mask)
            values = constants.defined(spelt) if len(mask) == 1 and mask[0].isidentifier() else [constants.of(mask)]
            if _FULL in values or constants.narrow(spelt):
                message = f"{text} with the mask {spelt}, which names 32 of the C500's 64 lanes"
                yield reader.finding(at, "lane-mask", message, way_out)
        if text in _LANE_SETS:
            yield from _cut(reader, at, sets)
    for at, text in enumerate(reader.texts[:-2]):
        if reader.named(at) and text in _NARROW_BIT_COUNTS and reader.texts[at + 2] in sets:
            message = f"{text} of {reader.texts[at + 2]} looks at 32 of the C500's 64 lanes"
            yield reader.finding(at, "lane-mask", message, f"use {text}ll")


def _cut(reader: Reader, at: int, sets: set[str]) -> Iterator[Finding]:
    """What becomes of the lane set that is made at `at`; names that hold one whole go into `sets`."""
    texts, text = reader.texts, reader.texts[at]
    before = texts[max(0, at - 3) : at]
    if before[-1:] == ["("] and before[-2:-1] and before[-2] in _NARROW_BIT_COUNTS:
        message = f"{before[-2]} of {text} looks at 32 of the C500's 64 lanes"
        yield reader.finding(at, "lane-mask", message, f"use {before[-2]}ll")
        return
    cast = before[-2] if before[-1:] == ["("] or before[-1:] == [")"] else ""
    cast = texts[at - 3] if cast == ">" else cast
    if cast in _NARROW:
        message = f"{text} cut to {cast} keeps 32 of the C500's 64 lanes"
        yield reader.finding(at, "lane-mask", message, "keep it in uint64_t")
    elif before[-1:] and before[-1] in ("=", "{") and len(before) == 3:
        name = before[1]
        kinds = {texts[i - 1] for i in range(1, at) if texts[i] == name and texts[i + 1] in ("=", ";", "{", ",")}
        narrow = sorted(kinds & _NARROW)
        if narrow and not kinds & {"auto", "uint64_t"}:
            message = f"{text} into {narrow[0]} {name} keeps 32 of the C500's 64 lanes"
            yield reader.finding(at, "lane-mask", message, "keep it in uint64_t")
        else:
            sets.add(name)


def _widths(reader: Reader, constants: Constants, section: range) -> Iterator[Finding]:
    """A 32 that stands for the number of lanes."""
    texts, way_out = reader.texts, "use arch::kWave (warpSize is 64 there)"
    indices = _indices(reader)
    for at, text in enumerate(texts):
        if not reader.live[at]:
            continue
        yield from _split(reader, at, constants, indices, section)
        if reader.tokens[at].kind != "name":
            continue
        if _names_width(text) and 32 in constants.defined(text) and _is_definition(reader, at):
            yield reader.finding(at, "wave-width", f"{text} is 32; a wave of the C500 has 64 lanes", way_out)
        if text.startswith("__shfl_") and reader.called(at):
            parts = reader.arguments(at + 1)
            if len(parts) == 4 and constants.of(parts[3]) == 32:
                message = f"{text} within 32 lanes sees half a wave of the C500"
                yield reader.finding(at, "wave-width", message, "leave the width out to see all 64", "note")
        if text == "for" and reader.called(at) and _halves_from_16(reader, at):
            message = "shuffles from distance 16 down combine 32 of the C500's 64 lanes"
            yield reader.finding(at, "wave-width", message, "start at arch::kWave / 2", "note")


def _indices(reader: Reader) -> set[str]:
    """Names of a thread's index in its block: given threadIdx.x without a split of it."""
    texts, found = reader.texts, set()
    for at in range(1, len(texts) - 2):
        if texts[at + 1] in ("=", "{") and reader.named(at):
            stop = at + 2
            while stop < len(texts) and texts[stop] not in (";", ",", "}"):
                stop += 1
            value = texts[at + 2 : stop]
            if "threadIdx" in value and "x" in value and not {"%", "/", "&", ">", "?"} & {*value} - _angles(value):
                found.add(texts[at])
    return found


def _angles(value: Sequence[str]) -> set[str]:
    """The angle bracket that a cast closes is no shift."""
    return {">"} if "static_cast" in value and value.count(">") == value.count("static_cast") else set()


def _split(reader: Reader, at: int, constants: Constants, indices: set[str], section: range) -> Iterator[Finding]:
    """The finding of an operator at `at` that splits a thread's index by 32."""
    texts = reader.texts
    sign = ">>" if texts[at : at + 2] == [">", ">"] else texts[at]
    if sign not in _SPLITS or at == 0 or texts[at - 1] == ">" or texts[at + len(sign)] in ("&", "="):
        return
    start = at + len(sign)
    stop = reader.closing(start) + 1 if texts[start] == "(" else start + 1
    while texts[stop : stop + 1] == ["::"]:
        stop += 2
    if constants.of(texts[start:stop]) != _SPLITS[sign]:
        return
    left = texts[at - 1]
    begin = at - 1
    if left == ")":
        begin = reader.opening(at - 1)
        inside = texts[begin:at]
        index = "threadIdx" in inside or any(name in indices for name in inside)
    elif texts[max(0, at - 3) : at] == ["threadIdx", ".", "x"]:
        begin, index = at - 3, True
    else:
        index = left in indices
    if not index:
        return
    target = reader.assigned(begin)
    sure = any(word in target.lower() for word in ("lane", "warp", "wave"))
    literal = not any(text[0].isalpha() for text in texts[start:stop])
    if not sure and (reader.tokens[at].line in section or not literal):
        return
    message = f"{target + ' = ' if target else ''}{''.join(texts[begin:at])} {sign} {''.join(texts[start:stop])}"
    message += " takes a wave to have 32 lanes" if sure else " is wrong if 32 stands for a wave's lanes"
    level = "error" if sure else "note"
    yield reader.finding(at, "wave-width", message, "use arch::kWave (warpSize is 64 there)", level)


def _names_width(name: str) -> bool:
    plain = name.lower().replace("_", "")
    if plain in ("warp", "wave", "kwarp", "kwave", "lanes", "klanes"):
        return True
    return any(w in plain for w in ("warp", "wave")) and any(w in plain for w in ("size", "width", "lanes", "threads"))


def _is_definition(reader: Reader, at: int) -> bool:
    return reader.texts[at - 2 : at] == ["#", "define"] or reader.texts[at + 1] in ("=", "{")


def _halves_from_16(reader: Reader, at: int) -> bool:
    """Whether the loop at `at` starts at 16, halves, and shuffles."""
    head = reader.texts[at + 2 : reader.closing(at + 1)]
    starts = any(head[i : i + 3] == ["=", "16", ";"] for i in range(len(head)))
    halves = any(
        tuple(head[i : i + n]) in ((">", ">", "=", "1"), ("/", "=", "2")) for i in range(len(head)) for n in (3, 4)
    )
    body = reader.texts[at : statement_end(reader, at) + 1]
    return starts and halves and any(text.startswith("__shfl_") for text in body)
