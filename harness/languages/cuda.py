"""CUDA/MACA C++ submissions: nvcc on an NVIDIA GPU, cucc or mxcc on a C500, g++ and the simulator without either."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import catalog
from harness.cpu import maca_build
from harness.cpu.hopper_model import Model
from harness.cpu.hopper_model import build as build_for_model
from harness.cpu.maca_build import cached, compiler_version, digest, loadable, run_compiler
from harness.cpu.maca_runtime import Piece, Simulator
from harness.devices import Device
from harness.languages import Submission
from harness.verdict import ExitCode, KernelFault, KitError, Verdict

_MACA = Path("/opt/maca")


def variants(device: Device) -> tuple[str, ...]:
    """Without a GPU a file runs twice: with the C500's waves of 64 lanes, and with warps of 32 in NVIDIA's layout."""
    return maca_build.MODES if device.kind == "cpu" else ("",)


def load(path: Path, arguments: Sequence[str], device: Device, variant: str, settings: Mapping[str, Any]) -> Submission:
    """Compile a `.cu` file and find its run_kernel.

    `settings["outputs"]`: names of the arguments whose former contents nobody may read (simulator only);
    `settings["counts"]`: true to count memory accesses as well (simulator only, slower). Raises
    KernelFault(COMPILE_ERROR) for a file that does not compile or exports no run_kernel, KitError (ENVIRONMENT) when
    the compiler is missing.
    """
    path = path.resolve()
    if device.kind != "maca":  # the SDK has its own
        _needs_cutlass(path)
    if device.kind != "cpu":
        library = loadable(lambda: build_for_gpu(path, device, variant))
        function = _run_kernel(ctypes.CDLL(str(library)), path)
        return Submission("cuda", path, lambda args: function(*map(to_c, args)))
    if variant == "hopper":
        return _load_on_model(path, arguments)
    mode = variant or maca_build.MODES[0]
    counts = bool(settings.get("counts"))
    library = loadable(lambda: maca_build.build(path, mode, cutlass_include(), counts))
    simulator = Simulator(library, path, counts)
    function = _run_kernel(simulator.library, path)
    outputs = frozenset(settings.get("outputs", ()))

    def run(args: Sequence[Any]) -> None:
        simulator.begin(_pieces(args, arguments, outputs))
        function(*map(to_c, args))
        simulator.end()

    return Submission("cuda", path, run, drain=simulator.counters if counts else dict)


def _load_on_model(path: Path, arguments: Sequence[str]) -> Submission:
    model = Model(loadable(lambda: build_for_model(path, _kit_headers())), path)
    function = _run_kernel(model.library, path)

    def run(args: Sequence[Any]) -> None:
        model.begin(_pieces(args, arguments, frozenset()))
        function(*map(to_c, args))
        model.end()

    return Submission("cuda", path, run)


def _kit_headers() -> list[Path]:
    """What the Hopper variants include; the files to paste include nothing of ours."""
    return sorted((catalog.TASKS / "common").glob("*.cuh"))


@functools.cache
def cutlass_include() -> tuple[str, ...]:
    """CUTLASS's headers (CuTe among them): nvidia-cutlass's, else the copy inside TileLang; empty without either."""
    for package, place in (("cutlass_library", "source/include"), ("tilelang", "3rdparty/cutlass/include")):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            folder = Path(root) / place
            if (folder / "cute" / "tensor.hpp").is_file():
                return (str(folder),)
    return ()


def _needs_cutlass(path: Path) -> None:
    """KitError when a file includes CuTe or CUTLASS and this machine has neither."""
    text = path.read_text(encoding="utf-8", errors="replace")
    wanted = re.search(r"^[ \t]*#[ \t]*include[ \t]*[<\"]((?:cute|cutlass)/[^>\"]*)", text, re.MULTILINE)
    if wanted is not None and not cutlass_include():
        message = f"{path.name} includes {wanted[1]}, which is not here; pip install --no-deps nvidia-cutlass==3.3.0.0."
        raise KitError(message, ExitCode.ENVIRONMENT)


def gpu_command(path: Path, library: Path, device: Device, variant: str) -> list[str]:
    """The compiler's command line on a GPU machine: the judge's, plus line information on NVIDIA."""
    if device.kind == "maca":
        bridge = _MACA / "tools" / "cu-bridge"
        includes = [f"-I{bridge / 'include'}", f"-I{_MACA / 'include'}"]
        found = _find("cucc", bridge / "bin", bridge / "tools")
        if found is not None:
            return [found, "-O3", "-std=c++17", *includes, "-shared", "-fPIC", str(path), "-o", str(library)]
        mxcc = _find("mxcc", _MACA / "mxgpu_llvm" / "bin") or "mxcc"
        dialect = ["-Xclang", "-imacros", "-Xclang", str(bridge / "include" / "__macro_mxcc.h")]
        target = ["-O3", "-std=c++17", "--offload-arch=xcore1000", *dialect, *includes]
        return [mxcc, *target, "-shared", "-fPIC", str(path), "-o", str(library), "-lruntime_cu", "-lmcruntime"]
    nvcc = _find("nvcc", Path("/usr/local/cuda/bin")) or "nvcc"
    target = [f"-arch={device.tuning.replace('sm', 'sm_')}"]
    if variant == "hopper":
        # wgmma and TMA need the architecture's own feature set. Not -arch=sm_90a: nvcc 13.0 makes code for compute_90
        # as well then, which has neither.
        target = ["-gencode=arch=compute_90a,code=sm_90a"]
    includes = [f"-I{folder}" for folder in cutlass_include()]
    options = ["-O3", "-std=c++17", *target, "-lineinfo", *includes]
    return [nvcc, *options, "-shared", "-Xcompiler", "-fPIC", str(path), "-o", str(library)]


def _find(tool: str, *folders: Path) -> str | None:
    """A compiler on PATH, else in the folders where its vendor installs it."""
    return shutil.which(tool) or shutil.which(tool, path=":".join(map(str, folders)))


def build_for_gpu(path: Path, device: Device, variant: str) -> Path:
    """The library of a submission on a GPU machine. Raises as `load` does."""
    command = gpu_command(path, Path("lib.so"), device, variant)
    version = compiler_version(command[0])
    headers = [header.read_bytes() for header in _kit_headers()] if variant == "hopper" else []
    key = digest(path.read_bytes(), str(path.parent), version, *command, *headers)

    def make(folder: Path) -> None:
        run_compiler(gpu_command(path, folder / "lib.so", device, variant), path)

    return cached(f"{device.kind}-{path.stem}-{key}", make) / "lib.so"


def _run_kernel(library: ctypes.CDLL, path: Path) -> Callable[..., Any]:
    function = getattr(library, "run_kernel", None)
    if function is None:
        message = f'{path.name}: exports no run_kernel; declare it extern "C" void run_kernel(...).'
        raise KernelFault(Verdict.COMPILE_ERROR, message)
    function.restype = None
    return function  # type: ignore[no-any-return]


def to_c(arg: Any) -> Any:
    """The judge's ABI: tensor -> pointer, bool -> bool, int -> int64, float -> 32-bit float, None -> null."""
    if arg is None:
        return ctypes.c_void_p(None)
    if isinstance(arg, bool):
        return ctypes.c_bool(arg)
    if isinstance(arg, int):
        return ctypes.c_int64(arg)
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    if hasattr(arg, "data_ptr"):
        return ctypes.c_void_p(arg.data_ptr())
    raise KitError(f"an argument of type {type(arg).__name__} has no form in C++.", ExitCode.PACKAGE_ERROR)


def _pieces(args: Sequence[Any], names: Sequence[str], outputs: frozenset[str]) -> list[Piece]:
    pieces = []
    for index, arg in enumerate(args):
        if hasattr(arg, "data_ptr") and arg.numel() > 0:
            name = names[index] if index < len(names) else f"argument {index + 1}"
            pieces.append(Piece(name, arg.data_ptr(), arg.numel() * arg.element_size(), name in outputs))
    return pieces
