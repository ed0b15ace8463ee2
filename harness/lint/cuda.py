"""Rules for a `.cu` submission that a reader of tokens can check: the exported signature, and what a C500 has not got.

Only what the C500's compiler sees counts (harness/lint/reader.py follows `#if`), so the NVIDIA half of the arch section
may do as it likes. Words in comments and strings are nobody's business. Rule names are stable: users search for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import arch_section
from harness.lint import Finding, cuda_guard, cuda_lanes
from harness.lint.reader import Reader, section_lines, words

# What the judge's image is known to offer beside the C++ standard library (which has neither dot nor slash).
_SDK_HEADERS = words(
    """
    cuda_runtime.h cuda_bf16.h cuda_fp16.h cooperative_groups.h maca_bfloat16.h maca_fp16.h mc_runtime.h
    dlfcn.h unistd.h pthread.h
    """
)
_SDK_FOLDERS = ("cute/", "mctlass/")
_C_HEADERS = words("assert ctype errno float inttypes limits math stdbool stddef stdint stdio stdlib string time")
_CPP_HEADERS = words(
    """
    algorithm any array atomic bitset cassert cctype cerrno cfenv cfloat charconv chrono cinttypes climits clocale cmath
    complex condition_variable cstdarg cstddef cstdint cstdio cstdlib cstring ctime cwchar deque exception fstream
    functional future initializer_list iomanip ios iosfwd iostream istream iterator limits list locale map memory
    memory_resource mutex new numeric optional ostream queue random ratio regex set shared_mutex sstream stack stdexcept
    streambuf string string_view system_error thread tuple type_traits typeindex typeinfo unordered_map unordered_set
    utility valarray variant vector
    """
)
_BLOCKING = words("cudaStreamQuery cudaEventQuery cudaDeviceReset cudaThreadExit cudaMemcpyDeviceToHost")
_ALLOCATING = ("cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaHostRegister", "cudaMemPoolCreate")
_ASYNC_COPIES = words("memcpy_async __pipeline_memcpy_async cp_async_fence cp_async_wait AutoCopyAsync")
_ASYNC_PREFIXES = ("SM80_CP_ASYNC", "SM90_TMA", "SM90_BULK")
_LIBRARIES = (
    *("cublas", "cudnn", "curand", "cusparse", "cusolver", "cufft", "cutensor", "nvrtc", "nccl", "nvml", "npp"),
    *("mcblas", "mcdnn", "mccl", "mcrand", "mcsparse", "mcsolver", "mcfft"),
)
_INTEGERS = ("int64_t", "int", "long", "unsigned", "uint64_t", "int32_t", "size_t", "signed")
_AS_INT64 = (
    "int64_t",
    "long long",
    "long",
    "long int",
    "long long int",
    "signed long",
    "signed long long",
    "ptrdiff_t",
)
# Unsigned, but as wide and passed alike.
_AS_UINT64 = ("uint64_t", "size_t", "unsigned long", "unsigned long long")
_HIDING = words("static inline hidden __global__ __device__ template constexpr consteval")
_WORDS = ("name", "number")
_BUILTINS = ("__builtin_mxc", "__builtin_amdgcn", "__nvvm_")  # vendors' own


def check(path: Path, arguments: Sequence[str], scalars: Sequence[bool]) -> list[Finding]:
    """Every violation in a C++ submission, by line.

    arguments: run_kernel's parameter names in the judge's order; scalars: for each whether it is an integer there.
    """
    reader = Reader(path)
    found = list(_exports(reader, arguments, scalars))
    for rule in (_readable, _one_body, _headers, _calls, _device_code):
        found += rule(reader)
    found += cuda_lanes.check(reader, _section(reader))
    return sorted(set(found), key=lambda finding: (finding.line, finding.rule, finding.message))


def asynchronous(path: Path) -> int:
    """How many asynchronous copies a file names where the C500's compiler sees it."""
    return sum(finding.rule in ("async-copy", "bsm-copy") for finding in _device_code(Reader(path)))


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
    hiding = sorted(_HIDING & {*reader.texts[_statement(reader, at) : at]})
    if hiding or any(reader.texts[brace - 1] == "namespace" for brace in reader.enclosing(at)):
        what = hiding[0] if hiding else "a namespace without a name"
        yield reader.finding(at, "signature", f"run_kernel in {what} is not exported", way_out)
    for index in range(len(reader.texts) - 2):
        if reader.texts[index : index + 3] == ["#", "define", "run_kernel"] and reader.live[index]:
            yield reader.finding(index, "signature", "run_kernel is a macro", way_out)
    found = [part for part in reader.arguments(at + 1) if part]
    for part in found:
        if "[" in part[1:]:  # float q[] is a pointer
            last = part.index("[") - 1
            part[last:] = ["*", part[last]]
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
        if scalar and kind not in _AS_INT64:
            level = "note" if kind in _AS_UINT64 else "error"
            yield reader.finding(at, "signature", what, f"the judge passes {name} as int64_t", level)
        elif not scalar and "*" not in part:
            yield reader.finding(at, "signature", what, f"the judge passes {name} as a pointer")


def _is_extern_c(reader: Reader, at: int) -> bool:
    """Whether `extern "C"` stands before the declaration of token `at`, or before a brace around it."""
    if '"C"' in reader.texts[_statement(reader, at) : at]:
        return True
    return any(reader.texts[brace] == "{" and reader.texts[brace - 1] == '"C"' for brace in reader.enclosing(at))


def _statement(reader: Reader, at: int) -> int:
    """Index of the first token of the statement of token `at`."""
    while at > 0 and reader.texts[at - 1] not in (";", "{", "}"):
        at -= 1
    return at


def _readable(reader: Reader) -> Iterator[Finding]:
    """Spellings behind which a reader of tokens finds other words than the compiler."""
    solid, every = -1, reader.every
    for at, token in enumerate(every):
        solid += token.solid
        if token.kind not in ("op", "space", "comment"):
            continue
        live = solid < 0 or reader.live[solid]
        after = every[at + 1] if at + 1 < len(every) else token
        pair = token.text + after.text if token.kind == after.kind == "op" and at + 1 < len(every) else ""
        if token.text == "\\\n" and 0 < at < len(every) - 1 and every[at - 1].kind in _WORDS and after.kind in _WORDS:
            message, way_out = "a name that goes on behind a backslash", "write it on one line"
        elif token.text == "\\":
            message, way_out = "a backslash outside of words", "write it on one line"
        elif token.text.startswith("//") and token.text.rstrip(" \t").endswith("\\"):
            message, way_out = "a comment that a backslash carries on", "write it on one line"
        elif pair in ("<%", "%>", "<:", ":>", "%:"):
            message, way_out = f"{pair} stands for another sign", "write the sign itself"
        elif pair == "##" and live:
            message, way_out = "## makes names that nobody can look up", "write the names out"
        else:
            continue
        yield Finding(reader.path, token.line, "spelling", message, way_out)


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
        section = _section(reader)
        others = [t for t in reader.tokens if t.text.startswith(_BUILTINS[1:]) and t.line not in section]
        for line, what in [*breaches, *((token.line, token.text) for token in others)]:
            message = f"{what} outside the arch section"
            yield Finding(reader.path, line, "one-body", message, "move it into the arch section")
    elif breaches:
        message = f"{breaches[0][1]} (the first of {len(breaches)} such words) in a file without an arch section"
        way_out = "the kit's own files keep the device's words in one section"
        yield Finding(reader.path, breaches[0][0], "one-body", message, way_out, "note")


def _headers(reader: Reader) -> Iterator[Finding]:
    for at, text in enumerate(reader.texts[:-2]):
        if text not in ("include", "include_next", "import") or reader.texts[at - 1] != "#" or not reader.live[at]:
            continue
        if text == "include" and reader.texts[at + 1] == "<":
            stop = reader.texts.index(">", at) if ">" in reader.texts[at:] else len(reader.texts)
            name = "".join(reader.texts[at + 2 : stop])
        elif reader.tokens[at + 1].kind == "string" and text == "include":
            name = reader.texts[at + 1].strip('"')
        else:
            message = f"#{text} {reader.texts[at + 1]}: which header that is cannot be read"
            yield reader.finding(at, "header", message, "write #include <name>")
            continue
        stem = name.removesuffix(".h")
        standard = stem in _C_HEADERS if name.endswith(".h") else name in _CPP_HEADERS
        own = name in _SDK_HEADERS or (name.startswith(_SDK_FOLDERS) and ".." not in name)
        if name == "mma.h":
            message = "#include of mma.h: wmma on the C500 loads and stores wrongly in some releases"
            yield reader.finding(at, "header", message, "multiply by arch::mma or CuTe", "note")
        elif not (standard or own):
            message = f"#include of {name}, which the judge's image is not known to have"
            allowed = ", ".join([*sorted(_SDK_HEADERS), *(f"{folder}*" for folder in _SDK_FOLDERS)])
            yield reader.finding(at, "header", message, f"use the standard library of C++17, {allowed}")


def _calls(reader: Reader) -> Iterator[Finding]:
    """Host calls: what blocks, what allocates at every call, what the judge's command does not link.

    A mention is as good as a call: a function may be called through a pointer, a macro or a string.
    """
    own = {reader.texts[at] for at, text in enumerate(reader.texts[1:]) if text in ("=", "{")}
    for at, text in enumerate(reader.texts):
        if reader.tokens[at].kind in ("string", "raw") and reader.live[at]:
            text, spelt = _joined(reader, at), True
        elif reader.named(at):
            spelt = False
        else:
            continue
        cuda = "cuda" + text[2:] if text.startswith("mc") and text[2:3].isupper() else text
        if _blocks(cuda):
            yield reader.finding(at, "synchronisation", f"{text} blocks the host", "run_kernel only enqueues work")
        elif cuda.startswith(_ALLOCATING) or cuda == "cudaMemset":
            called = reader.called(at) and not spelt
            if not (called and cuda_guard.guarded(reader, at)):
                message = f"{text} at every call" if called else f"{text} under another name"
                way_out = (
                    "keep a static workspace and act only where it grows: if (bytes > held) { ...; held = bytes; }"
                )
                yield reader.finding(at, "allocation", message, way_out)
        elif not spelt and text not in own and _unlinked(text):
            message = f"{text} is in a library that the judge's command does not link"
            yield reader.finding(
                at, "unlinked", message, "look it up with cudaGetDriverEntryPoint or dlsym, or do without"
            )


def _joined(reader: Reader, at: int) -> str:
    """The text of a string literal and of those right behind it; "" for one in the middle of them."""
    if at and reader.tokens[at - 1].kind == "string":
        return ""
    parts = []
    while at < len(reader.tokens) and reader.tokens[at].kind in ("string", "raw"):
        text = reader.texts[at]
        raw = reader.tokens[at].kind == "raw"
        parts.append(text[text.index("(") + 1 : text.rindex(")")] if raw else text[text.index('"') + 1 : -1])
        at += 1
    return "".join(parts)


def _blocks(name: str) -> bool:
    """Whether a function of the runtime or the driver waits for the device, or copies while the host waits."""
    if name in _BLOCKING:
        return True
    if name.startswith(("cuda", "cu")) and "Synchronize" in name:
        return True
    enumerators = ("HostToHost", "HostToDevice", "DeviceToDevice", "Default", "Kind")
    if name.startswith("cudaMemcpy") and not name.endswith(enumerators):
        return "Async" not in name
    return name.startswith("cuMemcpy") and "Async" not in name


def _unlinked(name: str) -> bool:
    return (name.startswith("cu") and name[2:3].isupper()) or name.startswith(_LIBRARIES)


def _device_code(reader: Reader) -> Iterator[Finding]:
    """PTX, instructions that the C500 lacks, asynchronous copies, launch bounds with two arguments."""
    section = _section(reader)
    for at, text in enumerate(reader.texts):
        if not reader.named(at):
            continue
        if text in arch_section.ASSEMBLY and (not section or reader.tokens[at].line in section):
            code = _assembly(reader, at)
            if code:
                way_out = "keep it behind #if !defined(__MACA__), and use a builtin there"
                yield reader.finding(at, "ptx", f"{text} with {code[:40]}: the C500 has no PTX", way_out)
        elif text.startswith(("__dp4a", "__dp2a")):
            yield reader.finding(at, "dp4a", f"{text} does not exist on the C500", "multiply int8 by arch::mma")
        elif text.startswith("__builtin_mxc_") and "bsm" in text and ("ldg" in text or "load" in text):
            message = f"{text} copies asynchronously into shared memory"
            yield reader.finding(at, "bsm-copy", message, "load into registers, then store to shared memory")
        elif text in _ASYNC_COPIES or text.startswith(_ASYNC_PREFIXES):
            message = f"{text} is an asynchronous copy, which the C500 lacks"
            yield reader.finding(at, "async-copy", message, "load into registers, then store to shared memory")
        elif text in ("__launch_bounds__", "launch_bounds"):
            count = len(reader.arguments(at + 1)) if reader.called(at) else 0
            if count != 1:
                what = "with two arguments" if count else "under another name"
                message = f"{text} {what}; the C500's compiler ignores the second with a warning"
                yield reader.finding(at, "launch-bounds", message, "give the block size only")


def _assembly(reader: Reader, at: int) -> str:
    """What an asm statement holds, up to its operands; "" for an empty one, which only orders memory."""
    start = next((i for i in range(at, len(reader.texts)) if reader.texts[i] == "("), at)
    code = []
    for token in reader.tokens[start + 1 : reader.closing(start)]:
        if token.text in (":", "::"):
            break
        code.append(token.text)
    return "" if all(text.strip('"; \t') == "" for text in code) else " ".join(code)


def _section(reader: Reader) -> range:
    try:
        return section_lines(reader.text, reader.path.name)
    except arch_section.SectionError:
        return range(0)
