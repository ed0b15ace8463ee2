"""Rules for a `.cu` submission that a reader of tokens can check: the exported signature, and what a C500 has not got.

Only what the C500's compiler sees counts (harness/lint/reader.py follows `#if`), so the NVIDIA half of the arch section
may do as it likes. Words in comments and strings are nobody's business. Rule names are stable: users search for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import arch_section
from harness.lint import Finding
from harness.lint.reader import Reader, section_lines


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What the judge's image is known to offer beside the C++ standard library (which has neither dot nor slash).
_SDK_HEADERS = _words(
    """
    cuda_runtime.h cuda_bf16.h cuda_fp16.h cooperative_groups.h maca_bfloat16.h maca_fp16.h mc_runtime.h
    dlfcn.h unistd.h pthread.h
    """
)
_SDK_FOLDERS = ("cute/", "mctlass/")
_C_HEADERS = _words("assert ctype errno float inttypes limits math stdbool stddef stdint stdio stdlib string time")
_BLOCKING = _words(
    """
    cudaDeviceSynchronize cudaThreadSynchronize cudaStreamSynchronize cudaEventSynchronize cudaMemcpy cudaMemcpy2D
    cudaMemcpy3D cudaMemcpyToSymbol cudaMemcpyFromSymbol
    """
)
# Accepted where memory grows: that happens once per size.
_ALLOCATING = _words("cudaMalloc cudaMallocAsync cudaMallocManaged cudaHostAlloc cudaMallocHost cudaFree cudaMemset")
_ASYNC_COPIES = _words("memcpy_async __pipeline_memcpy_async cp_async_fence cp_async_wait")
_ASYNC_PREFIXES = ("SM80_CP_ASYNC", "SM90_TMA", "SM90_BULK")
_LIBRARIES = ("cublas", "cudnn", "curand", "cusparse", "cusolver", "cufft", "nvrtc", "nccl", "mcblas", "mcdnn")
_MASKED = ("__shfl_", "__ballot_sync", "__any_sync", "__all_sync", "__reduce_", "__match_")
_MASKS_OF_32 = _words("0xffffffff 4294967295 ~0u ~uint32_t(0) uint32_t(-1) unsigned(-1) uint_max uint32_max")
_INTEGERS = ("int64_t", "int", "long", "unsigned", "uint64_t", "int32_t")
_LANE_SETS = _words("__ballot_sync __activemask")  # give one bit per lane
_NARROW = _words("int unsigned uint32_t int32_t uint")
_NARROW_BIT_COUNTS = _words("__popc __ffs __clz __brev")
# Operators that split a thread's index by a width of 32.
_SPLITS = (("%", "32"), ("/", "32"), ("&", "31"), (">", ">", "5"), ("&", "0x1f"))


def check(path: Path, arguments: Sequence[str], scalars: Sequence[bool]) -> list[Finding]:
    """Every violation in a C++ submission, by line.

    arguments: run_kernel's parameter names in the judge's order; scalars: for each whether it is an integer there.
    """
    reader = Reader(path)
    found = list(_exports(reader, arguments, scalars))
    for rule in (_one_body, _headers, _calls, _device_code, _lane_masks, _wave_width):
        found += rule(reader)
    return sorted(set(found), key=lambda finding: (finding.line, finding.rule, finding.message))


def _exports(reader: Reader, names: Sequence[str], scalars: Sequence[bool]) -> Iterator[Finding]:
    wanted = ", ".join(("int64_t " if scalar else "T* ") + name for name, scalar in zip(names, scalars, strict=True))
    way_out = f'write extern "C" void run_kernel({wanted})'
    places = [
        at
        for at, text in enumerate(reader.texts[:-1])
        if text == "run_kernel" and reader.live[at] and reader.called(at)
        if reader.texts[reader.closing(at + 1) + 1 : reader.closing(at + 1) + 2] == ["{"]
    ]
    if not places:
        yield Finding(reader.path, 1, "signature", "no function run_kernel", way_out)
        return
    at = places[0]
    if not _is_extern_c(reader, at) or reader.texts[at - 1] != "void":
        yield reader.finding(at, "signature", 'run_kernel is not exported as extern "C" void', way_out)
    found = [part for part in reader.arguments(at + 1) if part]
    # A parameter without a name goes by its place.
    given = [name if part[-1] in ("*", *_INTEGERS) else part[-1] for part, name in zip(found, names, strict=False)]
    given += ["more"] * (len(found) - len(given))
    if len(given) != len(names):
        message = f"run_kernel has {len(given)} parameters where the judge passes {len(names)}"
        yield reader.finding(at, "signature", message, way_out)
        return
    if given != list(names):
        permuted = sorted(given) == sorted(names)
        message = f"run_kernel's parameters are ({', '.join(given)})"
        yield reader.finding(at, "signature", message, way_out, "error" if permuted else "note")
    for position, (part, name, scalar) in enumerate(zip(found, names, scalars, strict=True), 1):
        types = part if part[-1] in ("*", *_INTEGERS) else part[:-1]
        kind = " ".join(text for text in types if text not in ("const", "std", "::"))
        what = f"parameter {position} ({name}) is {kind or 'without a type'}"
        if scalar and kind not in ("int64_t", "long long", "long"):
            yield reader.finding(at, "signature", what, f"the judge passes {name} as int64_t")
        elif not scalar and "*" not in part:
            yield reader.finding(at, "signature", what, f"the judge passes {name} as a pointer")


def _is_extern_c(reader: Reader, at: int) -> bool:
    """Whether `extern "C"` stands before the declaration of token `at`, or before a brace around it."""
    start = at
    while start > 0 and reader.texts[start - 1] not in (";", "{", "}"):
        start -= 1
    if '"C"' in reader.texts[start:at]:
        return True
    return any(reader.texts[brace] == "{" and reader.texts[brace - 1] == '"C"' for brace in reader.enclosing(at))


def _one_body(reader: Reader) -> Iterator[Finding]:
    """Device words outside the arch section. A file without a section is no worse for the judge: that is a note."""
    try:
        breaches = arch_section.breaches(reader.text, reader.path.name)
    except arch_section.SectionError as error:
        lines = enumerate(reader.text.splitlines(), 1)
        marker = next(number for number, line in lines if arch_section.BEGIN in line or arch_section.END in line)
        yield Finding(reader.path, marker, "one-body", str(error).partition("; ")[0], "keep one section per file")
        return
    if arch_section.BEGIN in reader.text:
        for line, what in breaches:
            yield Finding(
                reader.path, line, "one-body", f"{what} outside the arch section", "move it into the arch section"
            )
    elif breaches:
        message = f"{breaches[0][1]} (the first of {len(breaches)} such words) in a file without an arch section"
        way_out = "the kit's own files keep the device's words in one section"
        yield Finding(reader.path, breaches[0][0], "one-body", message, way_out, "note")


def _headers(reader: Reader) -> Iterator[Finding]:
    for at, text in enumerate(reader.texts[:-2]):
        if text != "include" or reader.texts[at - 1] != "#" or not reader.live[at]:
            continue
        if reader.texts[at + 1] == "<":
            stop = reader.texts.index(">", at) if ">" in reader.texts[at:] else len(reader.texts)
            name = "".join(reader.texts[at + 2 : stop])
        else:
            name = reader.texts[at + 1].strip('"')
        stem = name.removesuffix(".h")
        standard = stem in _C_HEADERS if name.endswith(".h") else "/" not in name and "." not in name
        if name == "mma.h":
            message = "#include of mma.h: wmma on the C500 loads and stores wrongly in some releases"
            yield reader.finding(at, "header", message, "multiply by arch::mma or CuTe", "note")
        elif not (standard or name in _SDK_HEADERS or name.startswith(_SDK_FOLDERS)):
            message = f"#include of {name}, which the judge's image is not known to have"
            allowed = ", ".join([*sorted(_SDK_HEADERS), *(f"{folder}*" for folder in _SDK_FOLDERS)])
            yield reader.finding(at, "header", message, f"use the standard library, {allowed}")


def _calls(reader: Reader) -> Iterator[Finding]:
    """Host calls: what blocks, what allocates at every call, what the judge's command does not link."""
    own = {reader.texts[at] for at, text in enumerate(reader.texts[1:]) if text in ("=", "{")}
    for at, text in enumerate(reader.texts):
        if not reader.named(at) or not reader.called(at):
            continue
        cuda = "cuda" + text[2:] if text.startswith("mc") and text[2:3].isupper() else text
        if cuda in _BLOCKING:
            yield reader.finding(at, "synchronisation", f"{text} blocks the host", "run_kernel only enqueues work")
        elif cuda in _ALLOCATING and not _guarded(reader, at):
            way_out = "keep a static workspace and act only where it grows: if (bytes > held) { ...; held = bytes; }"
            yield reader.finding(at, "allocation", f"{text} at every call", way_out)
        elif text not in own and ((text.startswith("cu") and text[2:3].isupper()) or text.startswith(_LIBRARIES)):
            message = f"{text} is in a library that the judge's command does not link"
            yield reader.finding(
                at, "unlinked", message, "look it up with cudaGetDriverEntryPoint or dlsym, or do without"
            )


def _guarded(reader: Reader, at: int) -> bool:
    """Whether a guard on a grown size governs token `at`, so that it runs once per size and not at every call.

    Either `if (needed > held) { ...token...; held = needed; }`, or `if (needed <= held) return ...;` before it in a
    block around it with `held = ...` after; the comparison may be turned round. `if (pointer == nullptr)` will do where
    the size is a constant.
    """
    blocks = [start for start in reader.enclosing(at) if reader.texts[start] == "{"]
    if not blocks:
        return False
    for index in range(blocks[-1], at):
        if reader.texts[index] != "if" or not reader.called(index):
            continue
        condition, end = (index + 2, reader.closing(index + 1)), _statement_end(reader, index)
        inside = end >= at
        block_end = end if inside else reader.closing(max(b for b in blocks if b < index))
        leaves = "return" in reader.texts[condition[1] : end]
        if at > block_end or not (inside or leaves):
            continue
        if any(_is_assigned(reader, held, at, block_end) for held in _held(reader, *condition, smaller=inside)):
            return True
        if inside and _tests_null(reader.texts[condition[0] : condition[1]]) and _constant_size(reader, at):
            return True
    return False


def _statement_end(reader: Reader, at: int) -> int:
    """Index of the last token that the `if` at `at` governs (without its else)."""
    start = reader.closing(at + 1) + 1
    if start >= len(reader.texts):
        return len(reader.texts) - 1
    if reader.texts[start] == "{":
        return reader.closing(start)
    while start < len(reader.texts) - 1 and reader.texts[start] != ";":
        start = reader.closing(start) + 1 if reader.texts[start] in ("(", "[", "{") else start + 1
    return start


def _held(reader: Reader, start: int, end: int, smaller: bool) -> Iterator[str]:
    """The right side of `a > b` and the left of `a < b` in a condition (`smaller`), or the other sides."""
    for at in range(start, end):
        sign = reader.texts[at]
        if sign in ("<", ">") and reader.texts[at - 1] not in ("<", ">", "-"):
            after = at + 1 + (reader.texts[at + 1] == "=")
            while reader.texts[after + 1] in (".", "->"):
                after += 2
            left, right = reader.texts[at - 1], reader.texts[after]
            yield right if (sign == ">") == smaller else left


def _is_assigned(reader: Reader, name: str, start: int, end: int) -> bool:
    """Whether `name = ...` stands between two tokens. Members go by the member's name."""
    texts = reader.texts[start : end + 1]
    return any(a == name and b == "=" and c != "=" for a, b, c in zip(texts, texts[1:], texts[2:], strict=False))


def _tests_null(condition: Sequence[str]) -> bool:
    return "nullptr" in condition or (len(condition) == 2 and condition[0] == "!")


def _constant_size(reader: Reader, at: int) -> bool:
    """Whether the last argument of the call at `at` is made of numbers, sizeof and constants named kSomething."""
    last = (reader.arguments(at + 1) or [[]])[-1]
    names = [text for text in last if text[0].isalpha() or text[0] == "_"]
    types = _words("sizeof int float double char uint32_t int32_t uint64_t int64_t size_t static_cast")
    return all(name in types or (name[0] == "k" and name[1:2].isupper()) for name in names)


def _device_code(reader: Reader) -> Iterator[Finding]:
    """PTX, instructions that the C500 lacks, asynchronous copies, launch bounds with two arguments."""
    section = _section(reader)
    for at, text in enumerate(reader.texts):
        if not reader.named(at):
            continue
        if text in arch_section.ASSEMBLY and (not section or reader.tokens[at].line in section):
            code = next((t.text for t in reader.tokens[at:] if t.kind in ("string", "raw")), '""')
            if code.strip('"; \t'):
                way_out = "keep it behind #if !defined(__MACA__), and use a builtin there"
                yield reader.finding(at, "ptx", f"{text} with {code[:40]}: the C500 has no PTX", way_out)
        elif text in ("__dp4a", "__dp2a"):
            yield reader.finding(at, "dp4a", f"{text} does not exist on the C500", "multiply int8 by arch::mma")
        elif text.startswith("__builtin_mxc_") and "bsm" in text and ("ldg" in text or "load" in text):
            message = f"{text} copies asynchronously into shared memory"
            yield reader.finding(at, "bsm-copy", message, "load into registers, then store to shared memory")
        elif text in _ASYNC_COPIES or text.startswith(_ASYNC_PREFIXES):
            message = f"{text} is an asynchronous copy, which the C500 lacks"
            yield reader.finding(at, "async-copy", message, "load into registers, then store to shared memory")
        elif text == "__launch_bounds__" and reader.called(at) and len(reader.arguments(at + 1)) > 1:
            message = "__launch_bounds__ with two arguments; the C500's compiler ignores the second with a warning"
            yield reader.finding(at, "launch-bounds", message, "give the block size only")


def _section(reader: Reader) -> range:
    try:
        return section_lines(reader.text, reader.path.name)
    except arch_section.SectionError:
        return range(0)


def _lane_masks(reader: Reader) -> Iterator[Finding]:
    """Masks of 32 bits where a wave has 64 lanes."""
    way_out = "use ~0ull, or the reductions of the arch section"
    for at, text in enumerate(reader.texts):
        if not reader.named(at) or not reader.called(at):
            continue
        if text.startswith(_MASKED):
            mask = "".join((reader.arguments(at + 1) or [[]])[0])
            if _is_mask_of_32(reader, mask):
                message = f"{text} with the mask {mask}, which names 32 of the C500's 64 lanes"
                yield reader.finding(at, "lane-mask", message, way_out)
        if text in _LANE_SETS:
            before = reader.texts[max(0, at - 3) : at]
            if before[-2:] and before[-1] == "(" and before[-2] in _NARROW_BIT_COUNTS:
                message = f"{before[-2]} of {text} looks at 32 of the C500's 64 lanes"
                yield reader.finding(at, "lane-mask", message, f"use {before[-2]}ll")
            elif len(before) == 3 and before[2] == "=" and before[0] in _NARROW:
                message = f"{text} into {before[0]} {before[1]} keeps 32 of the C500's 64 lanes"
                yield reader.finding(at, "lane-mask", message, "keep it in uint64_t")


def _is_mask_of_32(reader: Reader, mask: str) -> bool:
    plain = mask.lower().rstrip("u") if not mask.startswith("~") else mask.lower()
    if plain in _MASKS_OF_32:
        return True
    if not mask.isidentifier():
        return False
    for at, text in enumerate(reader.texts[:-1]):
        if text == mask and reader.live[at]:
            defined = reader.texts[at - 2 : at] == ["#", "define"]
            if defined or reader.texts[at + 1] == "=":
                stop = at + 1
                while stop < len(reader.texts) and reader.texts[stop] not in (";", ","):
                    stop += 1
                    if defined and stop < len(reader.tokens) and reader.tokens[stop].leads:
                        break
                value = "".join(reader.texts[at + 1 + (not defined) : stop]).lower()
                if (value if value.startswith("~") else value.rstrip("u")) in _MASKS_OF_32:
                    return True
    return False


def _wave_width(reader: Reader) -> Iterator[Finding]:
    """A literal 32 that stands for the number of lanes."""
    texts, way_out = reader.texts, "use arch::kWave (warpSize is 64 there)"
    section = _section(reader)  # where a split by 32 that names no lane is known to be none
    aliases = {
        texts[at]
        for at in range(len(texts) - 5)
        if texts[at + 1 : at + 5] == ["=", "threadIdx", ".", "x"] and texts[at + 5] in (";", ",")
    }
    for at, text in enumerate(texts):
        if not reader.named(at):
            continue
        after = at + (3 if texts[at : at + 3] == ["threadIdx", ".", "x"] else 1 if text in aliases else 0)
        split = next((s for s in _SPLITS if after > at and tuple(texts[after : after + len(s)]) == s), None)
        if split is not None:
            target = reader.assigned(at)
            sure = any(word in target.lower() for word in ("lane", "warp", "wave"))
            if not sure and reader.tokens[at].line in section:
                continue
            message = f"{target + ' = ' if target else ''}{''.join(texts[at:after])} {' '.join(split)}"
            message += " takes a wave to have 32 lanes" if sure else " is wrong if 32 stands for a wave's lanes"
            yield reader.finding(at, "wave-width", message, way_out, "error" if sure else "note")
        if _names_width(text) and _is_32(texts, at):
            yield reader.finding(at, "wave-width", f"{text} is 32; a wave of the C500 has 64 lanes", way_out)
        if text.startswith("__shfl_") and reader.called(at):
            parts = reader.arguments(at + 1)
            if len(parts) == 4 and parts[3] == ["32"]:
                message = f"{text} within 32 lanes sees half a wave of the C500"
                yield reader.finding(at, "wave-width", message, "leave the width out to see all 64", "note")
        if text == "for" and reader.called(at) and _halves_from_16(reader, at):
            message = "shuffles from distance 16 down combine 32 of the C500's 64 lanes"
            yield reader.finding(at, "wave-width", message, "start at arch::kWave / 2", "note")


def _names_width(name: str) -> bool:
    plain = name.lower().replace("_", "")
    if plain in ("warp", "wave", "kwarp", "kwave", "lanes", "klanes"):
        return True
    return any(w in plain for w in ("warp", "wave")) and any(w in plain for w in ("size", "width", "lanes", "threads"))


def _is_32(texts: Sequence[str], at: int) -> bool:
    """Whether the name at `at` is defined as 32: `name = 32;` or `#define name 32`."""
    if list(texts[at - 2 : at]) == ["#", "define"]:
        return texts[at + 1] == "32"
    return list(texts[at + 1 : at + 3]) == ["=", "32"] and texts[at + 3] in (";", ",", "}")


def _halves_from_16(reader: Reader, at: int) -> bool:
    """Whether the loop at `at` starts at 16, halves, and shuffles."""
    head = reader.texts[at + 2 : reader.closing(at + 1)]
    starts = any(head[i : i + 3] == ["=", "16", ";"] for i in range(len(head)))
    halves = any(
        tuple(head[i : i + n]) in ((">", ">", "=", "1"), ("/", "=", "2")) for i in range(len(head)) for n in (3, 4)
    )
    body = reader.texts[at : _statement_end(reader, at) + 1]
    return starts and halves and any(text.startswith("__shfl_") for text in body)
