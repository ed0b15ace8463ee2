"""A small machine for Gluon kernels without a GPU: partitions that take turns, mbarriers, shared memory, late copies.

Each partition of a program is a thread, but one thread at a time runs: at every barrier, copy and product the machine
may hand over to another, by a random choice that a run's number fixes. So a deadlock is found for certain, and a run
can be had again. What a GPU may do late, copies (TMA, cp.async) and products (wgmma), is done at once or as late as
may be: four runs have the four ways to combine them. What is not modelled: banks, registers, the threads of a warp.
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from harness.verdict import KernelFault, Verdict

SHARED_BYTES = 227 << 10  # that a program may have
TOGETHER = 4  # programs that run at a time
_HAND_OVER = 0.25  # of the places where a partition may lose its turn

_local = threading.local()


class _Stop(BaseException):
    """Ends a partition whose launch has failed elsewhere."""


class Partition(threading.Thread):
    """One partition of a program, or the program's code before it has any."""

    def __init__(self, machine: Machine, program: Program, name: str, warps: int, code: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.machine, self.program, self.label, self.warps, self._code = machine, program, name, warps, code
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.place = ""  # the line where it waits
        self.flight: list[Product] = []  # wgmma that nobody has waited for
        self.copies: list[Callable[[], None]] = []  # cp.async that no barrier has been told of
        self.stores = 0  # by TMA, still to read shared memory
        self.done = False

    def run(self) -> None:
        _local.partition = self
        self.turn.acquire()
        try:
            if not self.machine.stopped:
                self._code()
        except _Stop:
            pass
        except BaseException as error:
            self.machine.fail(error)
        self.done = True
        self.machine.idle.release()

    def hand_over(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run, and come back once `ready` holds."""
        self.ready = ready
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename != self.machine.file:
            frame = frame.f_back
        self.place = f"line {frame.f_lineno}"
        self.machine.idle.release()
        self.turn.acquire()
        if self.machine.stopped:
            raise _Stop


@dataclasses.dataclass(eq=False)
class Program:
    """What the partitions of a program share."""

    number: int
    shared_bytes: int = 0
    named: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # threads arrived, times complete
    stores: list[Store] = dataclasses.field(default_factory=list)  # to shared memory, not fenced by their writer


@dataclasses.dataclass(eq=False)
class Store:
    """Tiles that were stored to, and which partitions have fenced since: wgmma and TMA of others may see older data."""

    writer: Partition
    memory: Memory
    seen: set[Partition] = dataclasses.field(default_factory=set)


class Machine:
    """One launch. `late_copies`, `late_products`: they are done as late as they may be, else at once."""

    def __init__(self, file: str, programs: int, seed: int) -> None:
        self.file, self.programs = file, programs
        self.late_copies, self.late_products = seed % 2 == 1, seed // 2 % 2 == 1
        self.random = random.Random(seed)
        self.idle = threading.Semaphore(0)
        self.stopped = False
        self._error: BaseException | None = None
        self._partitions: list[Partition] = []
        self._copies: list[Callable[[], None]] = []  # under way

    def add(self, program: Program, name: str, warps: int, code: Callable[[], None]) -> Partition:
        """Another thread of a program, from now on."""
        self._partitions.append(Partition(self, program, name, warps, code))
        self._partitions[-1].start()
        return self._partitions[-1]

    def fail(self, error: BaseException) -> None:
        """The first error ends the launch."""
        self._error = self._error or error

    def copy(self, code: Callable[[], None]) -> None:
        """Start a copy: done now, or whenever the machine comes to it."""
        if self.late_copies:
            self._copies.append(code)
        else:
            code()

    def run(self, code: Callable[[], None], warps: int) -> None:
        """Run `code` as every program, some at a time. Raises what a program raised, KernelFault for a deadlock."""
        for first in range(0, self.programs, TOGETHER):
            self._partitions = []
            for number in range(first, min(first + TOGETHER, self.programs)):
                self.add(Program(number), "its beginning", warps, code)
            self._schedule()
            if self._error is not None:
                raise self._error

    def _schedule(self) -> None:
        while self._error is None:
            live = [partition for partition in self._partitions if not partition.done]
            ready = [partition for partition in live if partition.ready()]
            if self._copies and live and (not ready or self.random.random() < 0.1):
                self._copies.pop(self.random.randrange(len(self._copies)))()
            elif ready:
                self.random.choice(ready).turn.release()
                self.idle.acquire()
            elif live:
                where = ", ".join(f"{partition.label} at {partition.place}" for partition in live)
                message = f"deadlock in program {live[0].program.number}: {where} wait for each other."
                self.fail(KernelFault(Verdict.TIMEOUT, message))
            elif self._copies:
                self.fail(KernelFault(Verdict.RACE, "a copy was still under way when its program ended."))
            else:
                return
        self.stopped = True
        for partition in self._partitions:
            if not partition.done:
                partition.turn.release()
                partition.join()


def here() -> Partition:
    """The partition that runs."""
    partition: Partition = _local.partition
    return partition


def step() -> None:
    """A place where another partition may come first."""
    if here().machine.random.random() < _HAND_OVER:
        here().hand_over()


class Barrier:
    """An mbarrier: `count` arrivals and all announced bytes end a phase; phases are told by their parity."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0

    def arrive(self, count: int = 1, announced: int = 0) -> None:
        if count > self.pending:
            raise KernelFault(Verdict.RACE, f"more than {self.count} arrivals in one phase of a barrier.")
        self.pending -= count
        self.bytes += announced
        self._check()

    def complete(self, nbytes: int) -> None:
        self.bytes -= nbytes
        self._check()

    def _check(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count

    def wait(self, parity: int) -> None:
        if self.phase == parity & 1 or here().machine.random.random() < _HAND_OVER:
            here().hand_over(lambda: self.phase != parity & 1)


def named_barrier(name: str, threads: int, waits: bool) -> None:
    """bar.sync, or bar.arrive where nobody `waits`, by all threads of this partition."""
    state = here().program.named.setdefault(name, [0, 0])
    state[0] += here().warps * 32
    if state[0] > threads:
        raise KernelFault(Verdict.RACE, f"more than {threads} threads at named barrier {name}.")
    completed = state[1]
    if state[0] == threads:
        state[:] = [0, completed + 1]
    if waits:
        here().hand_over(lambda: state[1] > completed)


class Allocation:
    """Shared memory; what was never written is NaN, or a number that is no tile's."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self.data = torch.full((count,), math.nan if dtype.is_floating_point else -77, dtype=dtype)
        self.barriers: dict[int, Barrier] = {}
        program = here().program
        program.shared_bytes += count * dtype.itemsize
        if program.shared_bytes > SHARED_BYTES:
            message = f"{program.shared_bytes} bytes of shared memory or more, and there are {SHARED_BYTES}."
            raise KernelFault(Verdict.RESOURCE_LIMIT, message)


@dataclasses.dataclass
class Memory:
    """A view of shared memory. A tile of a swizzled layout lies as blocks of 128-byte columns, row by row."""

    allocation: Allocation
    begin: int
    shape: list[int]
    swizzled: bool
    transposed: bool = False

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape)

    def index(self, place: Any) -> Memory:
        place, size = int(place), math.prod(self.shape[1:])
        if not 0 <= place < self.shape[0]:
            raise KernelFault(Verdict.OUT_OF_BOUNDS, f"part {place} of shared memory that has {self.shape[0]}.")
        return Memory(self.allocation, self.begin + place * size, self.shape[1:], self.swizzled)

    def permute(self, order: Sequence[int]) -> Memory:
        return dataclasses.replace(self, transposed=list(order) == [1, 0])

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Memory:
        if dtype != self.allocation.data.dtype or math.prod(shape) != math.prod(self.shape):
            raise KernelFault(Verdict.OUT_OF_BOUNDS, f"{self.shape} in shared memory taken for {list(shape)}.")
        return Memory(self.allocation, self.begin, list(shape), layout == "swizzled")

    def blocks(self) -> tuple[Tensor, int, int]:
        """Where it lies, rows, and columns of a block."""
        columns = self.shape[-1]
        data = self.allocation.data[self.begin : self.end]
        return data, data.numel() // columns, min(columns, 128 // data.element_size()) if self.swizzled else columns

    def read(self) -> Tensor:
        data, rows, block = self.blocks()
        tile = data.view(-1, rows, block).permute(1, 0, 2).reshape(rows, -1)
        return tile.T if self.transposed else tile.reshape(self.shape)

    def write(self, values: Tensor) -> None:
        data, rows, block = self.blocks()
        data.copy_(values.reshape(rows, -1, block).permute(1, 0, 2).reshape(-1))

    def overlaps(self, other: Memory) -> bool:
        return self.allocation is other.allocation and self.begin < other.end and other.begin < self.end

    def stored_by(self, writer: Partition) -> None:
        """wgmma and TMA must not read this before a fence, of the writer or of the reader."""
        stores = writer.program.stores
        stores[:] = [s for s in stores if s.writer is not writer or not s.memory.overlaps(self)]
        stores.append(Store(writer, self))

    def check_fenced(self, reader: str = "wgmma") -> None:
        """KernelFault when this partition's wgmma or TMA would read what nobody has fenced."""
        for store in here().program.stores:
            if store.memory.overlaps(self) and here() not in store.seen:
                raise KernelFault(Verdict.RACE, f"{reader} reads what was stored without fence_async_shared after it.")

    def load(self, layout: Any) -> Tensor:
        return self.read().clone()

    def store(self, values: Tensor) -> None:
        if list(values.shape) != self.shape:
            raise KernelFault(Verdict.RUNTIME_ERROR, f"{list(values.shape)} stored to shared memory of {self.shape}.")
        self.write(values)
        if self.swizzled:
            self.stored_by(here())


def fence() -> None:
    """fence_async_shared: what this partition stored, or knows to be stored, is there for wgmma and TMA."""
    stores = here().program.stores
    stores[:] = [store for store in stores if store.writer is not here()]
    for store in stores:
        store.seen.add(here())


@dataclasses.dataclass(eq=False)
class Product:
    """A wgmma under way, a (M, K) times b (K, N). Nothing can be done with it but to wait for it."""

    a: Tensor | Memory
    b: Memory
    acc: Tensor | Product | None
    result: Tensor | None = None

    def compute(self) -> None:
        if self.result is None:
            a = self.a.read() if isinstance(self.a, Memory) else self.a
            acc = self.acc.result if isinstance(self.acc, Product) else self.acc
            exact = a.dtype == torch.int8  # then float64 holds every sum, and int32 every result
            type_ = torch.float64 if exact else torch.float32
            product = a.to(type_) @ self.b.read().to(type_)
            product = product.to(torch.int32) if exact else product
            self.result = product if acc is None else product + acc

    def _early(self, *_: object) -> NoReturn:
        raise KernelFault(Verdict.RACE, "a product is used before it was waited for.")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = __getattr__ = _early
