"""Triton's own interpreter, put right where it is wrong for bfloat16, and with every access checked.

With TRITON_INTERPRET=1 in the environment before Triton is imported, kernels run on CPU tensors through numpy. Three
things are missing there, and `install` adds them for the rest of the process (Triton 3.6.0 and 3.7.1):

* bfloat16. The interpreter keeps bf16 as uint16 and then multiplies, adds and compares the bit patterns; it narrows
  float32 to bf16 by cutting bits off, where every GPU rounds to nearest even. Here bf16 operands become float32 first
  and results are rounded once. A reduction of bf16 values is summed in float32 and rounded at the end.
* Bounds. A load, store or atomic of an address outside every tensor that this launch was given is a
  KernelFault(OUT_OF_BOUNDS) that names kernel, program, argument and element.
* The smallest dot. MMA instructions need M, N and K of at least 16; the interpreter would take any size.

Reading memory that is inside an argument but was never written is not noticed here.
"""

from __future__ import annotations

import bisect
import dataclasses
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harness.verdict import KernelFault, Verdict

Array = npt.NDArray[Any]

# Builder methods whose operands are floating-point values: computed in float32, and rounded back to bf16 ...
_ARITHMETIC = (
    *("create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_frem", "create_precise_divf", "create_fma"),
    *("create_minimumf", "create_minnumf", "create_maximumf", "create_maxnumf", "create_clampf"),
    *("create_exp", "create_exp2", "create_log", "create_log2", "create_sin", "create_cos", "create_sqrt"),
    *("create_precise_sqrt", "create_rsqrt", "create_erf", "create_floor", "create_ceil"),
)
# ... or giving a truth value, or (dot) an accumulator, which stays as it is.
_COMPARISONS = tuple(f"create_fcmp{order}{kind}" for order in "OU" for kind in ("LT", "GT", "LE", "GE", "EQ", "NE"))
_CASTS = (
    *("create_si_to_fp", "create_ui_to_fp", "create_fp_to_si", "create_fp_to_ui", "create_fp_ext", "create_fp_trunc"),
)

_replaced: list[tuple[Any, str, Any]] = []
_launches: list[_Launch] = []


def widen(bits: Array) -> npt.NDArray[np.float32]:
    """bf16 bit patterns (uint16) to the float32 values they stand for; exact."""
    wide: npt.NDArray[np.float32] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def narrow(values: Array) -> npt.NDArray[np.uint16]:
    """float32 values to bf16 bit patterns (uint16), rounded to nearest even; NaN stays NaN, overflow becomes inf."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    narrowed: npt.NDArray[np.uint16] = np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
    return narrowed


@dataclasses.dataclass(frozen=True)
class _Range:
    """The bytes [start, end) that one tensor argument covers."""

    name: str
    start: int
    end: int
    itemsize: int
    shape: tuple[int, ...]


@dataclasses.dataclass
class _Launch:
    """One kernel launch: its name, its source file, and what its tensor arguments cover, in order of address."""

    kernel: str
    filename: str
    ranges: list[_Range] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)

    def add(self, name: str, value: Any) -> None:
        """Take in one launch argument: a tensor, a wrapper or descriptor around one, or a tuple of such."""
        if isinstance(value, tuple):
            for index, part in enumerate(value):
                self.add(f"{name}[{index}]", part)
            return
        while not isinstance(value, torch.Tensor) and hasattr(value, "base"):
            value = value.base
        if not isinstance(value, torch.Tensor):
            return
        steps = ((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        extent = sum(steps) + 1 if value.numel() else 0
        start = value.data_ptr()
        entry = _Range(name, start, start + extent * value.element_size(), value.element_size(), tuple(value.shape))
        at = bisect.bisect(self.starts, start)
        self.starts.insert(at, start)
        self.ranges.insert(at, entry)


def _submission_line(filename: str) -> int | None:
    """The line of the kernel's file that is being interpreted now."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == filename:
            return frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _check(builder: Any, handle: Any, mask: Any, what: str) -> None:
    """Raise OUT_OF_BOUNDS unless each unmasked address of `handle` lies inside one tensor argument of this launch."""
    itemsize = max(1, handle.get_element_ty().primitive_bitwidth // 8)
    addresses = np.asarray(handle.data, dtype=np.uint64)
    if mask is not None:
        truth = np.asarray(getattr(mask, "data", mask), dtype=bool)
        if not truth.all():
            addresses = addresses[np.broadcast_to(truth, addresses.shape)]
    if addresses.size == 0:
        return
    launch = _launches[-1]
    low, high = int(addresses.min()), int(addresses.max()) + itemsize
    at = bisect.bisect(launch.starts, low) - 1
    if at >= 0 and high <= launch.ranges[at].end:
        return  # the usual case: all inside one argument
    addresses = addresses.reshape(-1)
    inside = np.zeros(addresses.shape, dtype=bool)
    for entry in launch.ranges:
        if entry.end - entry.start >= itemsize:
            inside |= (addresses >= np.uint64(entry.start)) & (addresses <= np.uint64(entry.end - itemsize))
    if inside.all():
        return
    outside = addresses[~inside]
    raise KernelFault(Verdict.OUT_OF_BOUNDS, _describe(builder, launch, int(outside[0]), len(outside), itemsize, what))


def _describe(builder: Any, launch: _Launch, address: int, count: int, itemsize: int, what: str) -> str:
    """One sentence about the first address outside every argument."""
    line = _submission_line(launch.filename)
    where = f"{os.path.basename(launch.filename)}:{line}: " if line else ""
    program = ", ".join(str(int(index)) for index in builder.grid_idx)
    others = f" (and {count - 1} more of this access)" if count > 1 else ""
    head = f"{where}{launch.kernel}, program ({program}): {what} outside every argument{others}"
    if not launch.ranges:
        return f"{head}; this launch was given no tensor."
    nearest = min(launch.ranges, key=lambda entry: max(entry.start - address, address + itemsize - entry.end))
    element = (address - nearest.start) // nearest.itemsize
    shape = "x".join(str(size) for size in nearest.shape)
    total = (nearest.end - nearest.start) // nearest.itemsize
    return f"{head}; nearest is {nearest.name} ({shape}) at element {element}, which has elements 0 to {total - 1}."


def kernel_fault(error: BaseException) -> KernelFault | None:
    """The KernelFault at the bottom of an exception that the interpreter wrapped, if there is one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KernelFault):
            return seen
        seen = seen.__cause__
    return None


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`, and remember how to undo it."""
    original = owner.__dict__[name]
    _replaced.append((owner, name, original))
    setattr(owner, name, make(original))


def install() -> None:
    """Patch the interpreter of this process; calling it again changes nothing. Undone by `uninstall`."""
    if _replaced:
        return
    tl: Any = importlib.import_module("triton.language")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle

    def is_bf16(value: Any) -> bool:
        return isinstance(value, handle) and value.dtype.scalar == tl.bfloat16

    def as_float32(value: Any) -> Any:
        return handle(widen(value.data), tl.float32) if is_bf16(value) else value

    def rounded(value: Any) -> Any:
        return handle(narrow(value.data), tl.bfloat16)

    def in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute(self: Any, *operands: Any) -> Any:
            return original(self, *(as_float32(value) for value in operands))

        return compute

    def in_float32_and_back(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute(self: Any, *operands: Any) -> Any:
            if not any(is_bf16(value) for value in operands):
                return original(self, *operands)
            return rounded(original(self, *(as_float32(value) for value in operands)))

        return compute

    def cast(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert(self: Any, source: Any, target: Any) -> Any:
            if target.scalar == tl.bfloat16:  # float64 and wide integers are rounded twice, through float32
                return source if is_bf16(source) else handle(narrow(source.data.astype(np.float32)), tl.bfloat16)
            return original(self, as_float32(source), target)

        return convert

    def cast_with_rounding(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert(self: Any, source: Any, target: Any, rounding: Any) -> Any:
            if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
                if rounding == interpreter._ir.ROUNDING_MODE.RTZ:
                    cut = np.ascontiguousarray(source.data).view(np.uint32) >> np.uint32(16)
                    return handle(cut.astype(np.uint16), tl.bfloat16)
                return rounded(source)
            return original(self, source, target, rounding)

        return convert

    def dot(original: Callable[..., Any]) -> Callable[..., Any]:
        def multiply(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
            return original(self, as_float32(a), as_float32(b), accumulator, *rest)

        return multiply

    def reduce(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, tensors: Any) -> Any:
            if not isinstance(tensors, tuple):
                return original(self, tensors)  # calls itself again with a tuple
            narrowed = [is_bf16(tensor.handle) for tensor in tensors]
            results = original(
                self,
                tuple(
                    self.to_tensor(widen(tensor.handle.data), tl.float32) if was else tensor
                    for tensor, was in zip(tensors, narrowed, strict=True)
                ),
            )

            def back(tensor: Any, was: bool) -> Any:
                if not was:
                    return tensor
                shape = list(tensor.handle.data.shape)
                kind = tl.block_type(tl.bfloat16, shape) if tensor.type.is_block() else tl.bfloat16
                return tl.core.tensor(rounded(tensor.handle), kind)

            return tuple(
                back(tensor, index < len(narrowed) and narrowed[index]) for index, tensor in enumerate(results)
            )

        return apply

    def load(original: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
            _check(self, pointers, mask, "load")
            return original(self, pointers, mask, *rest, **options)

        return checked

    def store(original: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            _check(self, pointers, mask, "store")
            return original(self, pointers, value, mask, *rest)

        return checked

    def compare_and_swap(original: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Any, pointers: Any, *rest: Any) -> Any:
            _check(self, pointers, None, "atomic")
            return original(self, pointers, *rest)

        return checked

    def read_modify_write(original: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            _check(self, pointers, mask, "atomic")
            return original(self, operation, pointers, value, mask, *rest)

        return checked

    def launch(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            _launches.append(_Launch(self.fn.__name__, self.fn.__code__.co_filename))
            try:
                # inf - inf and the like are legitimate in a kernel: a GPU does not print a warning either.
                with np.errstate(all="ignore"), warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    return original(self, *args, **options)
            finally:
                _launches.pop()

        return call

    def arguments(original: Callable[..., Any]) -> Callable[..., Any]:
        def take(self: Any, args: Any, options: Any) -> Any:
            on_host, options_on_host = original(self, args, options)
            for name, value in _named(self.arg_names, on_host, options_on_host):
                _launches[-1].add(name, value)
            return on_host, options_on_host

        return take

    def index(original: Callable[..., Any]) -> Callable[..., Any]:
        # Triton 3.6 takes int() of a one-element array, which numpy 2.4 refuses, so every `range` of it fails.
        def patch(tensor: Any, scope: Any) -> None:
            original(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        return patch

    for name in _ARITHMETIC:
        if hasattr(builder, name):
            _replace(builder, name, in_float32_and_back)
    for name in _COMPARISONS:
        _replace(builder, name, in_float32)
    for name in _CASTS:
        _replace(builder, name, cast)
    _replace(builder, "create_fp_to_fp", cast_with_rounding)
    _replace(builder, "create_dot", dot)
    _replace(builder, "create_masked_load", load)
    _replace(builder, "create_masked_store", store)
    _replace(builder, "create_atomic_cas", compare_and_swap)
    _replace(builder, "create_atomic_rmw", read_modify_write)
    _replace(interpreter.ReduceScanOpInterface, "apply", reduce)
    _replace(interpreter.GridExecutor, "__call__", launch)
    _replace(interpreter.GridExecutor, "_init_args_hst", arguments)
    _replace(interpreter, "_patch_lang_tensor", index)
    builder.get_bf16 = lambda self, value: handle(narrow(np.array([value], dtype=np.float32)), tl.bfloat16)
    codegen = interpreter.interpreter_builder.codegen_fns
    _replaced.append((codegen, "min_dot_size", codegen["min_dot_size"]))
    codegen["min_dot_size"] = lambda lhs, rhs: (16, 16, 16)


def uninstall() -> None:
    """Put everything that `install` replaced back."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    while _replaced:
        owner, name, original = _replaced.pop()
        if isinstance(owner, dict):
            owner[name] = original
        else:
            setattr(owner, name, original)
    if hasattr(interpreter.InterpreterBuilder, "get_bf16"):
        del interpreter.InterpreterBuilder.get_bf16


def _named(names: list[str], positional: list[Any], by_name: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every launch argument with its parameter's name."""
    yield from zip(names, positional, strict=False)  # the rest are keyword arguments
    yield from by_name.items()
