"""Run the Hopper variants in Triton without a GPU: their own Python over stand-ins for Gluon, values as torch tensors.

Only what the variants use is here, on the machine of gluon_machine.py: it checks schedules and index arithmetic.
Memory accesses outside a tensor are faults too. Layouts say nothing. Integer division rounds down, where a GPU rounds
towards zero; none of the variants divides a negative number. The compiler, and so all it might refuse, has no part.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.cpu.gluon_machine import (
    Allocation,
    Barrier,
    Machine,
    Memory,
    Product,
    fence,
    here,
    named_barrier,
    step,
)
from harness.devices import Device
from harness.languages.python_source import describe, load_run_kernel
from harness.verdict import KernelFault, Verdict

PROGRAMS = 2  # so that each has several tiles of work, as each has on a GPU
_MISSING = "the model of Hopper does not know"
_runs = 0


def load(path: Path, arguments: Sequence[str], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """The run_kernel of a Hopper variant, its Gluon kernels run by the model. Raises as load_run_kernel does."""
    global _runs
    _runs = 0
    with _stand_ins():
        function = load_run_kernel(path, arguments, Device("cpu", "cpu", "CPU", "sm90"), settings)
    if "PROGRAMS" in function.__globals__:
        function.__globals__["PROGRAMS"] = PROGRAMS
    return function


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Gluon's modules are ours while a file is imported."""
    gluon = "triton.experimental.gluon"
    language = types.SimpleNamespace(**_LANGUAGE)
    ours: dict[str, Any] = {
        "triton.experimental": types.SimpleNamespace(gluon=types.SimpleNamespace(jit=jit, language=language)),
        gluon: types.SimpleNamespace(jit=jit, language=language),
        f"{gluon}.language": language,
        f"{gluon}.language.nvidia": types.SimpleNamespace(),
        f"{gluon}.language.nvidia.hopper": types.SimpleNamespace(**_HOPPER),
        f"{gluon}.nvidia": types.SimpleNamespace(),
        f"{gluon}.nvidia.hopper": types.SimpleNamespace(TensorDescriptor=TensorDescriptor),
    }
    before = {name: sys.modules.get(name) for name in ours}
    sys.modules.update(ours)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class Jitted:
    """A function under gluon.jit: called from a kernel it is itself, called with a grid it is a launch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Jitted]:
        def launch(*args: Any, num_warps: int = 4) -> Jitted:
            global _runs
            given = [Pointer(arg.view(-1), 0) if isinstance(arg, Tensor) else arg for arg in args]
            path = Path(self.function.__code__.co_filename)
            machine = Machine(str(path), grid[0], _runs)
            _runs += 1
            try:
                machine.run(lambda: self.function(*given), num_warps)
            except KernelFault as fault:
                raise KernelFault(fault.verdict, f"{path.name}: {self.function.__name__}: {fault.message}") from fault
            except Exception as error:
                raise KernelFault(Verdict.RUNTIME_ERROR, describe(error, path)) from error
            return self  # as Triton returns the compiled kernel

        return launch


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Jitted if function is None else Jitted(function)


def value(x: Any) -> Tensor:
    """A number as a tensor of the type that a kernel would give it."""
    if isinstance(x, Product):
        raise KernelFault(Verdict.RACE, "a product is used before it was waited for.")
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float32 if isinstance(x, float) else torch.int32)


class Pointer:
    """Elements of a tensor: one offset, or a tensor of them."""

    def __init__(self, tensor: Tensor, offset: Any) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + (more.long() if isinstance(more, Tensor) else more))

    def places(self, mask: Any, what: str) -> tuple[Tensor, Tensor]:
        """Offsets and mask in one shape; KernelFault for a place outside the tensor."""
        offset, live = value(self.offset).long(), value(True if mask is None else mask).bool()
        offset, live = (
            offset + torch.zeros_like(live, dtype=torch.long),
            live | torch.zeros_like(offset, dtype=torch.bool),
        )
        outside = live & ((offset < 0) | (offset >= self.tensor.numel()))
        if bool(outside.any()):
            first = int(offset[outside].reshape(-1)[0])
            message = f"{what} of element {first} of a tensor that has {self.tensor.numel()}."
            raise KernelFault(Verdict.OUT_OF_BOUNDS, message)
        return offset, live


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
    dtype = pointer.tensor.dtype
    if mask is None and (isinstance(pointer.offset, int) or pointer.offset.ndim == 0):
        place = int(pointer.offset)  # one element, without the arithmetic of many
        if 0 <= place < pointer.tensor.numel():
            return pointer.tensor[place].clone()
    offset, live = pointer.places(mask, "load")
    rest = float("nan") if dtype.is_floating_point else -77
    out = torch.full(offset.shape, rest if other is None else other, dtype=dtype)
    out[live] = pointer.tensor[offset[live]]
    return out


def _store(pointer: Pointer, values: Any, mask: Any = None) -> None:
    offset, live = pointer.places(mask, "store")
    pointer.tensor[offset[live]] = value(values).broadcast_to(offset.shape)[live].to(pointer.tensor.dtype)


def _atomic_add(pointer: Pointer, amount: Any, sem: str = "acq_rel") -> Tensor:
    step()
    before = _load(pointer)
    _store(pointer, before + amount)
    return before


def _inline_asm(text: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    named = re.match(r"bar\.(sync|arrive) (\d+), (\d+);", text)
    if named:
        step()
        named_barrier(named[2], int(named[3]), named[1] == "sync")
    elif not args:
        raise KernelFault(Verdict.RUNTIME_ERROR, f"{_MISSING} the instruction {text.split(';')[0]}.")
    return args[0] if args else value(0)  # with arguments it only keeps the compiler from moving something


def _warp_specialize(parts: Sequence[tuple[Jitted, tuple[Any, ...]]], warps: Sequence[int], registers: Any) -> None:
    mine, made = here(), []
    for place, (jitted, args) in enumerate(parts):
        number = mine.warps if place == 0 else warps[place - 1]
        name = f"partition {place} ({jitted.function.__name__.strip('_')})"

        def code(jitted: Jitted = jitted, args: tuple[Any, ...] = args) -> None:
            jitted.function(*args)
            if here().flight:
                raise KernelFault(Verdict.RACE, "a partition ended with a product that nobody waited for.")

        made.append(mine.machine.add(mine.program, name, number, code))
    mine.hand_over(lambda: all(partition.done for partition in made))


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Memory:
    count = 1
    for size in shape:
        count *= size
    return Memory(Allocation(dtype, count), 0, list(shape), layout == "swizzled")


def _barrier(memory: Memory) -> Barrier:
    barrier = memory.allocation.barriers.get(memory.begin)
    if barrier is None:
        raise KernelFault(Verdict.RACE, "a barrier is used before mbarrier.init.")
    return barrier


def _init(memory: Memory, count: int) -> None:
    memory.allocation.barriers[memory.begin] = Barrier(count)


def _wait(memory: Memory, phase: Any) -> None:
    _barrier(memory).wait(int(phase))


def _expect(memory: Memory, nbytes: int) -> None:
    step()
    _barrier(memory).arrive(announced=nbytes)


def _arrive(memory: Memory, count: int = 1, pred: Any = True) -> None:
    step()
    if bool(pred):
        _barrier(memory).arrive(count)
    step()


class TensorDescriptor:
    """A tensor in global memory and the box of it that TMA copies; what lies outside the tensor is 0."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape

    def views(self, corner: Sequence[int], box: Tensor) -> tuple[Tensor, Tensor]:
        """The part of the tensor that the box at `corner` covers, and that part of the box."""
        begin = [max(start, 0) for start in corner]
        end = [min(at + block, size) for at, block, size in zip(corner, self.block_shape, self.shape, strict=True)]
        end = [max(first, last) for first, last in zip(begin, end, strict=True)]
        there = tuple(slice(b - at, e - at) for at, b, e in zip(corner, begin, end, strict=True))
        return self.base.as_strided(self.shape, self.strides)[tuple(map(slice, begin, end))], box[there]

    def box(self, corner: Sequence[int]) -> Tensor:
        values = torch.zeros(self.block_shape, dtype=self.base.dtype)
        inside, there = self.views(corner, values)
        there.copy_(inside)
        return values


def _tma_load(descriptor: TensorDescriptor, corner: Sequence[Any], barrier: Memory, memory: Memory) -> None:
    step()
    if memory.shape != list(descriptor.block_shape):
        raise KernelFault(Verdict.RUNTIME_ERROR, f"a box of {descriptor.block_shape} copied to {memory.shape}.")
    corner, told = [int(start) for start in corner], _barrier(barrier)

    def copy() -> None:
        values = descriptor.box(corner)
        memory.write(values)
        told.complete(values.numel() * values.element_size())

    here().machine.copy(copy)


def _tma_store(descriptor: TensorDescriptor, corner: Sequence[Any], memory: Memory) -> None:
    step()
    if memory.shape != list(descriptor.block_shape):
        raise KernelFault(Verdict.RUNTIME_ERROR, f"{memory.shape} copied to a box of {descriptor.block_shape}.")
    memory.check_fenced("TMA")
    mine, corner = here(), [int(start) for start in corner]

    def copy() -> None:
        inside, values = descriptor.views(corner, memory.read())
        inside.copy_(values)
        mine.stores -= 1

    mine.stores += 1
    mine.machine.copy(copy)


def _store_wait(pendings: int) -> None:
    mine = here()
    mine.hand_over(lambda: mine.stores <= pendings)


def _copy_async(memory: Memory, pointer: Pointer, mask: Any = None) -> None:
    writer = here()
    values = _load(pointer, mask, 0)

    def copy() -> None:
        memory.write(values)
        memory.stored_by(writer)

    writer.copies.append(copy)


def _copy_arrive(memory: Memory, increment_count: bool = True) -> None:
    if increment_count:
        raise KernelFault(Verdict.RUNTIME_ERROR, f"{_MISSING} an arrival of cp.async that raises the count.")
    step()
    mine, told = here(), _barrier(memory)
    copies, mine.copies = mine.copies, []

    def arrive() -> None:
        for copy in copies:
            copy()
        told.arrive(mine.warps * 32)

    mine.machine.copy(arrive)


def _wgmma(a: Any, b: Memory, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
    step()
    for operand in (a, b):
        if isinstance(operand, Memory):
            operand.check_fenced()
    product = Product(a if isinstance(a, Memory) else value(a), b, acc if bool(use_acc) else None)
    mine = here()
    mine.flight.append(product)
    if not mine.machine.late_products:
        product.compute()
    return product if is_async else _wgmma_wait(0, [product])


def _wgmma_wait(still: int, deps: Sequence[Any]) -> Any:
    mine = here()
    for product in mine.flight[: len(mine.flight) - still]:
        product.compute()
    mine.flight = mine.flight[len(mine.flight) - still :]
    got = []
    for dep in deps:
        # One that is still under way may go into the next product; anything else that is done with it is a fault.
        got.append(dep.result if isinstance(dep, Product) and dep not in mine.flight else dep)
    return got[0] if len(got) == 1 else tuple(got)


def _both(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: function(value(a), value(b))


def _full(shape: Sequence[int], number: Any, dtype: torch.dtype, layout: Any = None) -> Tensor:
    return torch.full(tuple(shape), float(number) if dtype.is_floating_point else int(number), dtype=dtype)


def _arange(begin: int, end: int, layout: Any = None) -> Tensor:
    return torch.arange(begin, end, dtype=torch.int32)


def _scan(x: Tensor, axis: int, combine: Jitted) -> Tensor:
    parts = [x.select(axis, 0)]
    for place in range(1, x.shape[axis]):
        parts.append(combine(parts[-1], x.select(axis, place)))
    return torch.stack(parts, axis)


def _layout(*args: Any, **options: Any) -> str:
    return "plain"


def _swizzled(*args: Any, **options: Any) -> str:
    return "swizzled"


_LANGUAGE: dict[str, Any] = {
    **{
        name: getattr(torch, name)
        for name in ("int8", "int32", "int64", "float32", "bfloat16", "exp2", "log2", "zeros_like")
    },
    **{name: _layout for name in ("SwizzledSharedLayout", "NVMMADistributedLayout", "DotOperandLayout")},
    **{name: _layout for name in ("SliceLayout", "BlockedLayout")},
    "NVMMASharedLayout": _swizzled,
    "constexpr": object,
    "allocate_shared_memory": _allocate,
    "arange": _arange,
    "associative_scan": _scan,
    "atomic_add": _atomic_add,
    "cdiv": lambda a, b: (a + b - 1) // b,
    "convert_layout": lambda x, layout: x,
    "full": _full,
    "inline_asm_elementwise": _inline_asm,
    "load": _load,
    "max": lambda x, axis: torch.amax(value(x), axis),
    "maximum": _both(torch.maximum),
    "min": lambda x, axis: torch.amin(value(x), axis),
    "minimum": _both(torch.minimum),
    "num_programs": lambda axis: value(here().machine.programs),
    "num_warps": lambda: here().warps,
    "program_id": lambda axis: value(here().program.number),
    "static_range": range,
    "store": _store,
    "sum": lambda x, axis: torch.sum(value(x), axis, dtype=x.dtype),
    "thread_barrier": lambda: None,
    "warp_specialize": _warp_specialize,
    "where": lambda condition, a, b: torch.where(value(condition).bool(), value(a), value(b)),
    "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype),
}
_HOPPER: dict[str, Any] = {
    "async_copy": types.SimpleNamespace(async_copy_global_to_shared=_copy_async, mbarrier_arrive=_copy_arrive),
    "fence_async_shared": fence,
    "mbarrier": types.SimpleNamespace(init=_init, wait=_wait, expect=_expect, arrive=_arrive, MBarrierLayout=_layout),
    "tma": types.SimpleNamespace(
        async_copy_global_to_shared=_tma_load, async_copy_shared_to_global=_tma_store, store_wait=_store_wait
    ),
    "warpgroup_mma": _wgmma,
    "warpgroup_mma_wait": _wgmma_wait,
}
