"""Whether memory is taken once per size: what stands around an allocation in a C++ submission."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.lint.reader import Reader, words

_DEPTH = 3  # of helpers that allocate for the one that calls them
_TYPES = words("sizeof int float double char uint32_t int32_t uint64_t int64_t size_t static_cast")


def guarded(reader: Reader, at: int, depth: int = _DEPTH) -> bool:
    """Whether a guard on a grown size governs token `at`, so that it runs once per size and not at every call.

    Either `if (needed > held) { ...token...; held = needed; }`, or `if (needed <= held) return ...;` before it in a
    block around it with `held = ...` after; the comparison may be turned round. `if (pointer == nullptr)` will do where
    the size is a constant, and so will the first value of a `static`. What is held must outlive the call. A helper
    without a guard of its own is guarded where every call of it is.
    """
    blocks = [start for start in reader.enclosing(at) if reader.texts[start] == "{"]
    if not blocks:
        return False
    if _runs_once(reader, at) and _constant_size(reader, at):
        return True
    # The outermost block that a function has: structs and namespaces may stand around it.
    function = next((b for b in reversed(blocks) if reader.texts[b - 1] in (")", "const", "noexcept")), blocks[-1])
    for index in range(function, at):
        if reader.texts[index] != "if" or not reader.called(index):
            continue
        condition, end = (index + 2, reader.closing(index + 1)), statement_end(reader, index)
        inside = end >= at
        block_end = end if inside else reader.closing(max(b for b in blocks if b < index))
        leaves = "return" in reader.texts[condition[1] : end]
        if at <= block_end and (inside or leaves) and _holds(reader, condition, inside, at, block_end, function):
            return True
    return depth > 0 and _callers_guarded(reader, blocks, depth)


def statement_end(reader: Reader, at: int) -> int:
    """Index of the last token that the `if` or `for` at `at` governs (without its else)."""
    start = reader.closing(at + 1) + 1
    if start >= len(reader.texts):
        return len(reader.texts) - 1
    if reader.texts[start] == "{":
        return reader.closing(start)
    while start < len(reader.texts) - 1 and reader.texts[start] != ";":
        start = reader.closing(start) + 1 if reader.texts[start] in ("(", "[", "{") else start + 1
    return start


def _holds(reader: Reader, condition: tuple[int, int], inside: bool, at: int, end: int, function: int) -> bool:
    """Whether a condition lets what stands from `at` to `end` run only where something grew.

    Inside the branch every alternative of an `||` must say so, and `>=` does not: it is true again at the same size.
    """
    found = []
    for start, stop in _alternatives(reader, *condition):
        texts = reader.texts[start:stop]
        sizes = [
            held
            for held, needed in _compared(reader, start, stop, smaller=inside)
            if _outlives(reader, held, function) and _grows(reader, held, needed, condition[0], at, end)
        ]
        null = _tested_null(texts) if inside else ""
        found.append((bool(sizes), bool(null) and _outlives(reader, null, function)))
    if any(size for size, _ in found):
        return all(size or null for size, null in found) if inside else True
    return inside and all(null for _, null in found) and _constant_size(reader, at)


def _alternatives(reader: Reader, start: int, end: int) -> list[tuple[int, int]]:
    """The parts of a condition between `||`."""
    cuts = [at for at in range(start, end - 1) if reader.texts[at] == "|" == reader.texts[at + 1]]
    begins = [start, *(cut + 2 for cut in cuts)]
    return list(zip(begins, [*cuts, end], strict=True))


def _compared(reader: Reader, start: int, end: int, smaller: bool) -> Iterator[tuple[str, set[str]]]:
    """(what is held, names of what is needed) of the comparisons in a condition.

    `smaller`: of those that say that what is held is too small, else of those that say that it is enough.
    """
    for at in range(start, end):
        sign = reader.texts[at]
        if sign not in ("<", ">") or reader.texts[at - 1] in ("<", ">", "-"):
            continue
        equal = reader.texts[at + 1] == "="
        if equal == smaller:
            continue
        after = at + 1 + equal
        last = after
        while reader.texts[last + 1] in (".", "->"):
            last += 2
        left = {t for t in reader.texts[start:at] if t[0].isalnum() or t[0] == "_"}
        right = {t for t in reader.texts[after:end] if t[0].isalnum() or t[0] == "_"}
        if (sign == ">") == smaller:
            yield ".".join(t for t in reader.texts[after : last + 1] if t not in (".", "->")), left
        else:
            first = at - 1
            while reader.texts[first - 1] in (".", "->"):
                first -= 2
            yield ".".join(t for t in reader.texts[first:at] if t not in (".", "->")), right


def _grows(reader: Reader, held: str, needed: set[str], condition: int, at: int, end: int) -> bool:
    """Whether `held = needed` stands behind `at` and before `end`, and what is held shrinks nowhere else.

    Between the condition and `end` it may: there it is on its way.
    """
    name = held.rpartition(".")[2]
    grown = False
    for index in range(len(reader.texts) - 2):
        if reader.texts[index] != name or reader.texts[index + 1] != "=" or reader.texts[index + 2] == "=":
            continue
        stop = index + 2
        while stop < len(reader.texts) and reader.texts[stop] not in (";", ","):
            stop += 1
        if at <= index <= end:
            grown = grown or bool(needed.intersection(reader.texts[index + 2 : stop]))
        elif "." in held or (reader.texts[index - 1] in (".", "->") and reader.texts[index - 2] != "this"):
            continue  # of another object, for all that is known
        elif not condition <= index <= end and not _declares(reader, index):
            return False
    return grown


def _declares(reader: Reader, at: int) -> bool:
    """Whether the statement of the name at `at` declares it: two names, or a name and a sign of a type, begin it."""
    start = at
    while start > 0 and reader.texts[start - 1] not in (";", "{", "}", "("):
        start -= 1
    first, second = reader.texts[start], reader.texts[start + 1]
    plain = second[0].isalpha() or second[0] == "_" or second in ("*", "&", "<", "::")
    return start < at and first != "return" and plain


def _outlives(reader: Reader, name: str, function: int) -> bool:
    """Whether a variable is none of those that a function makes anew at every call: plain locals, by value."""
    base = name.partition(".")[0]
    for at in range(function, reader.closing(function)):
        if reader.texts[at] == base and reader.texts[at + 1] in ("=", ";", "{", ",") and at > function:
            start = at
            while start > function + 1 and reader.texts[start - 1] not in (";", "{", "}", "("):
                start -= 1
            words = reader.texts[start:at]
            if words and words[0] not in ("return",) and _is_type(words):
                return "static" in words or "&" in words
    return True


def _is_type(words: Sequence[str]) -> bool:
    return (
        all(w[0].isalpha() or w[0] == "_" or w in ("::", "<", ">", "*", "&", ",") for w in words) and "=" not in words
    )


def _tested_null(condition: Sequence[str]) -> str:
    """The pointer that a condition finds null, or ""."""
    names = [text for text in condition if text[0].isalpha() and text not in ("nullptr", "NULL")]
    negated, compared = condition[:1] == ["!"], bool({"nullptr", "NULL"} & {*condition})
    if not names or {"&", ">", "<"} & {*condition} or (not negated and (not compared or "!" in condition)):
        return ""
    return ".".join(names)


def _constant_size(reader: Reader, at: int) -> bool:
    """Whether the last argument of the call at `at` is made of numbers, sizeof and constants named kSomething."""
    last = (reader.arguments(at + 1) or [[]])[-1]
    names = [text for text in last if text[0].isalpha() or text[0] == "_"]
    return all(name in _TYPES or (name[0] == "k" and name[1:2].isupper()) for name in names)


def _runs_once(reader: Reader, at: int) -> bool:
    """Whether `at` lies in the first value of a `static`, or in what std::call_once calls."""
    for start in reader.enclosing(at):
        if reader.texts[start] == "(" and reader.texts[start - 1] == "call_once":
            return True
    begin = max((b for b in reader.enclosing(at) if reader.texts[b] == "{"), default=0)
    for start in [b for b in reader.enclosing(at) if reader.texts[b] == "{"]:
        before = start
        while before > 0 and reader.texts[before - 1] not in (";", "{", "}"):
            before -= 1
        if reader.texts[before] == "static" and {"=", "["} <= {*reader.texts[before:start]}:
            return True
    while begin < at and at > 0 and reader.texts[at - 1] not in (";", "{", "}"):
        at -= 1
    return reader.texts[at] == "static"


def _callers_guarded(reader: Reader, blocks: Sequence[int], depth: int) -> bool:
    """Whether the function around, if it is a helper, is called and every call of it is guarded."""
    for start in reversed(blocks):  # from the outside
        if reader.texts[start - 1] != ")":
            continue
        opening = reader.opening(start - 1)
        name = reader.texts[opening - 1]
        if name in ("if", "for", "while", "switch", "run_kernel", "]") or not (name[0].isalpha() or name[0] == "_"):
            return False
        calls = [
            at
            for at in range(len(reader.texts) - 1)
            if reader.texts[at] == name and at != opening - 1 and reader.live[at]
        ]
        return bool(calls) and all(
            reader.called(at) and guarded(reader, at, depth - 1) for at in calls if not reader.declares_function(at)
        )
    return False
