"""Guarded arguments: every tensor lies between two red zones, outputs start poisoned, inputs are fingerprinted.

One tensor's memory, in bytes, its start aligned to 256:

    [ red zone >= 4 KiB | tensor, nbytes | red zone >= 4 KiB ]

A red zone holds 16-bit words, 0xFFFF in one run and 0x7FFF in the next: NaN as bfloat16, float16, float32 and float64;
beside one-byte elements 0xFFFF and 0x7F7F, NaN as float8. So whoever reads it gets NaN, and whoever writes it, whatever
the value, is seen in at least one of two runs. All work is done in chunks: a 7.5 GB argument needs no second 7.5 GB.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.verdict import Verdict

ALIGNMENT = 256
CHUNK = 32 << 20  # bytes looked at in one step; a step needs at most about three times as much scratch
WIDE_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_ZONE_WORDS = (0xFFFF, 0x7FFF)
_ZONE_WORDS_OF_BYTES = (0xFFFF, 0x7F7F)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# Poison by element size (float16 has its own), for the first and the second run. For floats of two bytes and more both
# are signalling NaNs, which no arithmetic returns: even adding to one gives another NaN.
_POISON = {
    1: (0xA5, 0x5A),
    2: (0x7FA5, 0xFF9B),
    4: (0x7FA5A5A5, 0xFF9B9B9B),
    8: (0x7FF4A5A5A5A5A5A5, 0xFFF39B9B9B9B9B9B),
    torch.float16: (0x7DA5, 0xFD9B),
}


class Finding(NamedTuple):
    """Something wrong with a case: the verdict it calls for, and one sentence with names and numbers."""

    verdict: Verdict
    detail: str


class Role(enum.Enum):
    """What a kernel does with an argument: read it; write all of it; change contents that it finds there; or use it as
    scratch that nobody looks at afterwards (its first contents are put back before each run)."""

    INPUT = "INPUT"
    OUTPUT = "OUTPUT"
    INOUT = "INOUT"
    WORKSPACE = "WORKSPACE"


class Difference(NamedTuple):
    """`number` elements are meant, the first of them at flat index `first`."""

    number: int
    first: int


def zone_bytes(nbytes: int) -> int:
    """Length of one red zone: a sixteenth of the tensor, at least 4 KiB, at most 4 MiB, a multiple of 256."""
    return min(max(4096, nbytes // 16 // ALIGNMENT * ALIGNMENT), 4 << 20)


def bits(tensor: Tensor) -> Tensor:
    """The elements' bits as a flat integer tensor that shares memory; 16-byte elements give two words each."""
    return tensor.reshape(-1).view(_BITS[tensor.element_size()])


def copy(tensor: Tensor) -> Tensor:
    """A copy of a contiguous tensor, bit by bit: clone() turns the poison in a bool tensor into True."""
    return bits(tensor).clone().view(tensor.dtype).view(tensor.shape)


def _signed(value: int, dtype: torch.dtype) -> int:
    width = 8 * dtype.itemsize
    return value if dtype is torch.uint8 or value < 1 << (width - 1) else value - (1 << width)


def _poison(dtype: torch.dtype, round_: int) -> int:
    """The poison of a run as a value of `bits`."""
    words = _BITS[dtype.itemsize]
    return _signed(_POISON[dtype if dtype in _POISON else words.itemsize][round_ % 2], words)


def poison_(tensor: Tensor, round_: int) -> None:
    """Fill a contiguous tensor with the poison of run `round_` (even and odd runs differ)."""
    bits(tensor).fill_(_poison(tensor.dtype, round_))


def _chunks(*tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Equal slices of flat tensors of one length, each with the index it begins at."""
    step = max(1, CHUNK // max(tensor.element_size() for tensor in tensors))
    for begin in range(0, tensors[0].numel(), step):
        yield begin, tuple(tensor[begin : begin + step] for tensor in tensors)


def _count(masks: Iterator[tuple[int, Tensor]], words_per_element: int) -> Difference | None:
    count, first = 0, -1
    for begin, mask in masks:
        here = int(mask.sum())
        if here and first < 0:
            first = (begin + int(mask.to(torch.uint8).argmax())) // words_per_element
        count += here
    return Difference(-(-count // words_per_element), first) if count else None


def differences(left: Tensor, right: Tensor) -> Difference | None:
    """Elements whose bits differ between two contiguous tensors of one shape and dtype; None when there are none."""
    pairs = _chunks(bits(left), bits(right))
    return _count(((begin, a.ne(b)) for begin, (a, b) in pairs), max(1, left.element_size() // 8))


def unwritten(first: Tensor, second: Tensor | None) -> Difference | None:
    """Elements that still hold poison after a run that began with poison 0 (`first`) and poison 1 (`second`).

    Wide floats: the poison of either run is proof enough. Integers, bool and 8-bit floats could be that value rightly,
    so both runs must have left their own poison; with `second` None nothing can be said of them.
    """
    wide = first.dtype in WIDE_FLOATS
    if second is None:
        if not wide:
            return None
        second = first
    words = (bits(first), bits(second))
    marks = (_poison(first.dtype, 0), _poison(first.dtype, 1))

    def masks() -> Iterator[tuple[int, Tensor]]:
        for begin, (a, b) in _chunks(*words):
            yield begin, a.eq(marks[0]) | b.eq(marks[1]) if wide else a.eq(marks[0]) & b.eq(marks[1])

    return _count(masks(), max(1, first.element_size() // 8))


def fingerprint(data: Tensor) -> int:
    """A 64-bit hash of a flat uint8 tensor that depends on every byte and its place, in bounded memory.

    Each 8-byte word is added to a multiple of its index and mixed by a bijection, so one changed word always changes
    the sum; the arithmetic is int64 with wrap-around, the same on every device.
    """
    whole = data.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for begin, (words,) in _chunks(data[:whole].view(torch.int64)):
        mixed = torch.arange(begin + 1, begin + 1 + words.numel(), dtype=torch.int64, device=data.device)
        mixed.mul_(0x1E3779B97F4A7C15).add_(words)
        for shift, factor in ((32, 0x3F58476D1CE4E5B9), (29, 0x14D049BB133111EB)):
            mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
        total += mixed.sum()
    tail = int.from_bytes(bytes(data[whole:].tolist()), "little")
    return (int(total) + 0x2545F4914F6CDD1D * tail + data.numel()) % (1 << 64)


@dataclasses.dataclass
class _Slot:
    """One tensor argument: bytes [start, start + nbytes) of `raw` are the tensor, the rest of `raw` is red zone."""

    name: str
    role: Role
    raw: Tensor
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    contents: Tensor | None  # what was generated there; kept for outputs only
    hash: int = 0

    @property
    def is_output(self) -> bool:
        return self.role in (Role.OUTPUT, Role.INOUT)

    @property
    def data(self) -> Tensor:
        return self.raw[self.start : self.start + self.nbytes]

    def view(self) -> Tensor:
        return self.data.view(self.dtype).view(self.shape)

    def zones(self) -> Iterator[tuple[str, int, int]]:
        ends = ("before", 0, self.start), ("after", self.start + self.nbytes, self.raw.numel())
        return ((side, begin, end) for side, begin, end in ends if begin < end)


class Buffers:
    """The guarded arguments of one case. All pointers stay the same from construction on.

    args: what genTestCase returned. Taken over: each tensor is dropped from the list as soon as its guarded copy
        exists, so the list is of no use afterwards.
    names, roles: one per argument; a scalar's role means nothing.
    exact: every tensor is an allocation of its own, to the byte, without red zones (C++ that reads its sizes off the
        allocation needs it); out-of-bounds writes are then not seen here.
    Raises ValueError for a tensor that is not contiguous: the judge passes none, and C++ sees pointers only.
    """

    def __init__(self, args: list[Any], names: Sequence[str], roles: Sequence[Role], exact: bool = False) -> None:
        if not len(args) == len(names) == len(roles):
            raise ValueError(f"{len(args)} arguments, but {len(names)} names and {len(roles)} roles")
        self._values: list[Any] = []  # a _Slot for a tensor, the value itself otherwise
        self._round = 0
        for index, (name, role) in enumerate(zip(names, roles, strict=True)):
            value, args[index] = args[index], None
            self._values.append(_take(value, name, role, exact) if isinstance(value, Tensor) else value)
        self._rehash()

    def _slots(self) -> Iterator[tuple[int, _Slot]]:
        return ((index, value) for index, value in enumerate(self._values) if isinstance(value, _Slot))

    def _rehash(self) -> None:
        for _, slot in self._slots():
            if slot.role is Role.INPUT:
                slot.hash = fingerprint(slot.data)

    def arguments(self) -> list[Any]:
        """The argument list, its tensors wrapped afresh: whatever a run did to the last wrappers is void."""
        return [value.view() if isinstance(value, _Slot) else value for value in self._values]

    def originals(self) -> list[Any]:
        """The argument list as it was generated: inputs as in the buffers, all else with its first contents."""
        return [
            (slot.view() if slot.contents is None else slot.contents) if isinstance(slot, _Slot) else slot
            for slot in self._values
        ]

    def outputs(self) -> dict[int, Tensor]:
        """Fresh views of the OUTPUT and INOUT tensors, by argument index."""
        return {index: slot.view() for index, slot in self._slots() if slot.is_output}

    def poisoned(self) -> set[int]:
        """Indices of the outputs that `arm` poisons."""
        return {index for index, slot in self._slots() if slot.role is Role.OUTPUT}

    def snapshot(self) -> dict[int, Tensor]:
        """Copies of the outputs, by argument index."""
        return {index: copy(slot.view()) for index, slot in self._slots() if slot.is_output}

    def arm(self, round_: int) -> None:
        """Before run `round_`: fill the red zones, poison the outputs, restore the contents of INOUT arguments."""
        self._round = round_
        for _, slot in self._slots():
            word = self._word(slot)
            for _, begin, end in slot.zones():
                even = begin + begin % 2
                slot.raw[begin:even].fill_(word >> 8)
                slot.raw.view(torch.int16)[even // 2 : end // 2].fill_(_signed(word, torch.int16))
            self._reset_output(slot, round_)

    def repoison(self, round_: int) -> None:
        """Only the outputs' part of `arm`: what a timing loop can afford between two calls."""
        for _, slot in self._slots():
            self._reset_output(slot, round_)

    @staticmethod
    def _reset_output(slot: _Slot, round_: int) -> None:
        if slot.role is Role.OUTPUT:
            poison_(slot.data.view(slot.dtype), round_)
        elif slot.contents is not None:
            slot.view().copy_(slot.contents)

    def _word(self, slot: _Slot) -> int:
        # Outputs and inputs hold different words in the same run, or copying one red zone to another would go unseen.
        words = _ZONE_WORDS_OF_BYTES if slot.dtype.itemsize == 1 else _ZONE_WORDS
        return words[(self._round + (slot.role is Role.INPUT)) % 2]

    def damage(self) -> list[Finding]:
        """OUT_OF_BOUNDS for every red zone that no longer is as `arm` left it, with the nearest damaged element."""
        return [
            finding
            for _, slot in self._slots()
            for side, begin, end in slot.zones()
            if (finding := self._zone_damage(slot, side, begin, end)) is not None
        ]

    def _zone_damage(self, slot: _Slot, side: str, begin: int, end: int) -> Finding | None:
        word, even = self._word(slot), begin + begin % 2
        bad = slot.raw.view(torch.int16)[even // 2 : end // 2].ne(_signed(word, torch.int16)).nonzero().flatten()
        touched = [begin] if even > begin and int(slot.raw[begin]) != word >> 8 else []
        for at in (0, -1) if bad.numel() else ():
            low = even + 2 * int(bad[at])
            expected = word.to_bytes(2, "little")
            touched += [low + i for i in (0, 1) if int(slot.raw[low + i]) != expected[i]]
        if not touched:
            return None
        nearest = min(touched) if side == "after" else max(touched)
        index, count = (nearest - slot.start) // slot.dtype.itemsize, slot.nbytes // slot.dtype.itemsize
        where = f"memory {side} the tensor was written, at element offset {index} of {count} elements"
        return Finding(Verdict.OUT_OF_BOUNDS, f"{slot.name}: {where}")

    def overwritten(self) -> list[str]:
        """Names of the inputs whose fingerprint is not the one taken when they were filled."""
        return [
            slot.name for _, slot in self._slots() if slot.role is Role.INPUT and fingerprint(slot.data) != slot.hash
        ]

    def mutated(self) -> list[Finding]:
        """INPUT_MUTATED for every input that was overwritten."""
        return [
            Finding(Verdict.INPUT_MUTATED, f"{name} is an input and was overwritten") for name in self.overwritten()
        ]

    def refill(self, args: list[Any]) -> bool:
        """Put other contents behind the same pointers; takes `args` over like the constructor does.

        Returns whether any input changed. Raises ValueError, before anything is touched, when an argument does not
        have the shape and dtype of its predecessor.
        """
        for value, old in zip(args, self._values, strict=True):
            now = (value.dtype, value.shape) if isinstance(value, Tensor) else None
            was = (old.dtype, old.shape) if isinstance(old, _Slot) else None
            if now != was:
                name = old.name if isinstance(old, _Slot) else "a scalar"
                raise ValueError(f"argument {name} was {was} and is now {now}")
        before = [slot.hash for _, slot in self._slots()]
        for index, old in enumerate(self._values):
            value, args[index] = args[index], None
            if isinstance(old, _Slot):
                old.view().copy_(value)
                old.contents = None if old.contents is None else value
            else:
                self._values[index] = value
        self._rehash()
        return before != [slot.hash for _, slot in self._slots()]


def _take(tensor: Tensor, name: str, role: Role, exact: bool) -> _Slot:
    if not tensor.is_contiguous():
        raise ValueError(
            f"argument {name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}); "
            "the judge's arguments are, and a pointer carries no strides"
        )
    nbytes = tensor.numel() * tensor.element_size()
    contents = None if role is Role.INPUT else tensor
    if exact:
        mine = contents is None and tensor.untyped_storage().nbytes() == nbytes
        own = tensor if mine else tensor.clone()
        return _Slot(name, role, own.reshape(-1).view(torch.uint8), 0, nbytes, tensor.dtype, tensor.shape, contents)
    zone = zone_bytes(nbytes)
    raw = torch.empty((2 * zone + ALIGNMENT + nbytes) // 2 * 2, dtype=torch.uint8, device=tensor.device)
    start = zone + -(raw.data_ptr() + zone) % ALIGNMENT
    slot = _Slot(name, role, raw, start, nbytes, tensor.dtype, tensor.shape, contents)
    slot.view().copy_(tensor)
    return slot
