"""Compile a `.cu` file for the simulator with g++: the rewritten source against our headers, linked with the runtime.

Everything that g++ makes is kept under .cache/cuda, keyed by content, flags and compiler version, written beside its
final place and renamed, so that processes that build the same file at the same time do no harm.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import cache
from harness.cpu.compiler import UNHARDENED
from harness.cpu.maca_source import SourceError, rewrite
from harness.verdict import ExitCode, KernelFault, KitError, Verdict

CACHE = cache.folder() / "cuda"
SIMULATOR = Path(__file__).resolve().parent / "maca"
MODES = ("wave64", "warp32")
# Frames of the hooks stay where they are: a fault's callers are read from them.
_RUNTIME_FLAGS = (
    *UNHARDENED,
    *("-std=c++17", "-O2", "-fPIC", "-fno-gnu-unique", "-Wno-psabi"),
    *("-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"),
)
# The sanitizers only instrument: their libraries are not linked, the hooks are the runtime's. The passes that are
# switched off would merge, widen, move or invent accesses, and so show the hook others than the source makes.
# DWARF 4: in a table of version 5, addr2line takes file 1 for file 0, and so a submission for our rewritten unit.
_SUBMISSION_FLAGS = (
    *UNHARDENED,
    *("-std=c++17", "-O1", "-g1", "-gdwarf-4", "-fPIC", "-w", "-fdiagnostics-color=never", "-fmax-errors=20"),
    *("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "--param=tsan-distinguish-volatile=1"),
    *("-fsanitize=alignment", "-fno-omit-frame-pointer", "-fno-threadsafe-statics", "-fno-strict-aliasing"),
    *("-fno-gnu-unique", "-fno-store-merging", "-fno-tree-vectorize", "-fno-tree-slp-vectorize"),
    *("-fno-tree-loop-distribute-patterns", "-finline-small-functions", "-fno-builtin-memcpy", "-fno-builtin-memset"),
    *("-fno-builtin-memmove", "-fno-tree-loop-im", "-fno-tree-cselim", "-fno-tree-phiprop"),
)
# Scalar replacement splits one 16-byte access into four: harmless for checks, wrong for counts of transactions.
_COUNTING_FLAGS = ("-fno-tree-sra",)
_MODE_FLAGS: dict[str, tuple[str, ...]] = {
    "wave64": ("-D__MACA__=1", "-D__MACACC__=1", "-D__MACA_ARCH__=1000"),
    "warp32": ("-DSIM_WARP32=1",),
}
# Only the interface leaves the library, so that two of them in one process never share a variable.
_EXPORTS = "{ global: run_kernel; sim_*; cuMemGetAddressRange*; wcuMemGetAddressRange*; local: *; };\n"


_ERROR = re.compile(r"(?:^|[\s:])error\s*:|undefined reference")


def digest(*parts: str | bytes) -> str:
    """A short key of all parts."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:24]


@functools.cache
def compiler_version(compiler: str) -> str:
    """First lines of `compiler --version`; KitError when there is no such compiler."""
    if shutil.which(compiler) is None:
        raise KitError(
            f"{compiler} is missing: a .cu file cannot be compiled without it; install it and put it on PATH.",
            ExitCode.ENVIRONMENT,
        )
    done = subprocess.run([compiler, "--version"], capture_output=True, encoding="utf-8", errors="replace", check=True)
    return done.stdout


def cached(key: str, make: Callable[[Path], None]) -> Path:
    """The folder of `key`: made by `make(folder)` the first time. An exception leaves nothing behind."""
    final = CACHE / key
    if final.is_dir():
        return final
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="making-") as made:
        folder = Path(made) / "out"
        folder.mkdir()
        make(folder)
        try:
            folder.rename(final)
        except OSError:
            if not final.is_dir():  # otherwise another process was faster, with the same content
                raise
    return final


def _refuse_full_disk(said: str) -> None:
    """OSError where a compiler failed for want of room: that is no fault of what it compiled."""
    for number in (errno.ENOSPC, errno.EDQUOT):
        if os.strerror(number) in said:
            raise OSError(number, os.strerror(number), str(CACHE))


def loadable(build: Callable[[], Path]) -> Path:
    """The library that `build` gives, once it can be loaded: a full disk or a power cut may have left half of one."""
    library = build()
    try:
        ctypes.CDLL(str(library))
    except OSError:
        shutil.rmtree(library.parent)
        library = build()
    return library


def rewritten(source: Path, text: str) -> str:
    """The text of a `.cu` file as g++ takes it; KernelFault (COMPILE_ERROR) where it cannot be rewritten."""
    try:
        return rewrite(text, str(source))
    except SourceError as error:
        raise KernelFault(Verdict.COMPILE_ERROR, f"{source.name}:{error.line}: error: {error}") from None


def run_compiler(command: Sequence[str], source: Path) -> None:
    """Run one compiler command; KernelFault (COMPILE_ERROR) that starts at the first error line when it fails.

    OSError when the disk is full.
    """
    # In English, so that the first error can be told from what the compiler says around it.
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", env=environment)
    if done.returncode == 0:
        return
    _refuse_full_disk(done.stderr)
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), None)
    if first is None:
        lines, first = [f"{source.name}: {command[0]} ended with code {done.returncode}", *lines[-20:]], 0
    text = "\n".join(lines[first : first + 20])
    raise KernelFault(Verdict.COMPILE_ERROR, text.replace(str(source), source.name))


def _texts(folder: Path) -> list[str | bytes]:
    parts: list[str | bytes] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".h", ".cpp", ".hpp", ""):
            parts += [str(path.relative_to(folder)), path.read_bytes()]
    return parts


def _runtime(mode: str) -> Path:
    """The runtime's object file for a mode."""
    flags = (*_RUNTIME_FLAGS, *_MODE_FLAGS[mode])
    sources = [path.name for path in sorted((SIMULATOR / "src").glob("*.cpp"))]
    key = digest("runtime", mode, *flags, compiler_version("g++"), *_texts(SIMULATOR))

    def make(folder: Path) -> None:
        # One unit of all files: the headers are most of the work, so this takes half the time.
        unit = folder / "runtime.cpp"
        unit.write_text("".join(f'#include "{name}"\n' for name in sources), encoding="utf-8")
        headers = [f"-I{SIMULATOR / 'include'}", f"-I{SIMULATOR / 'src'}"]
        command = ["g++", *flags, *headers, "-c", str(unit), "-o", str(folder / "runtime.o")]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode != 0:
            _refuse_full_disk(done.stderr)
            raise KitError(f"g++ cannot compile the simulator: {done.stderr[:2000]}", ExitCode.ENVIRONMENT)

    return cached(f"runtime-{mode}-{key}", make) / "runtime.o"


def build(source: Path, mode: str, include: Sequence[str] = (), counts: bool = False) -> Path:
    """The library of a submission in a mode (one of MODES).

    `include`: more folders for headers. `counts`: compile so that one source access is one access of the hook.
    Raises KernelFault (COMPILE_ERROR), or KitError when a tool is missing.
    """
    text = source.read_text(encoding="utf-8", errors="replace")
    flags = (*_SUBMISSION_FLAGS, *(_COUNTING_FLAGS if counts else ()), *_MODE_FLAGS[mode])
    runtime = _runtime(mode)
    key = digest("submission", text, str(source), *flags, *include, str(runtime), compiler_version("g++"))
    code = rewritten(source, text)

    def make(folder: Path) -> None:
        unit, exports, library = folder / "unit.cpp", folder / "exports.map", folder / "lib.so"
        unit.write_text(code, encoding="utf-8")
        exports.write_text(_EXPORTS, encoding="utf-8")
        headers = [f"-I{SIMULATOR / 'include'}", f"-I{source.parent}", *(f"-I{path}" for path in include)]
        preamble = ["-include", str(SIMULATOR / "include" / "sim" / "preamble.h")]
        compile_unit = ["g++", *flags, *preamble, *headers, "-c", str(unit), "-o", str(folder / "unit.o")]
        run_compiler(compile_unit, source)
        link = ["g++", "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", f"-Wl,--version-script={exports}"]
        run_compiler([*link, str(folder / "unit.o"), str(runtime), "-o", str(library), "-ldl"], source)
        (folder / "unit.o").unlink()

    return cached(f"{mode}-{source.stem}-{key}", make) / "lib.so"
