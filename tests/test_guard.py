"""Guarded buffers: every kind of damage is seen and placed, and nothing else is."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness import guard
from harness.guard import Buffers, Role
from harness.verdict import Verdict

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS]


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).remainder(2).reshape(shape).to(dtype)


def buffers(*args: Any, roles: str = "", **options: Any) -> Buffers:
    """Arguments a, b, c, ...; roles by letter: i input, o output, x inout, w workspace."""
    kinds = {"i": Role.INPUT, "o": Role.OUTPUT, "x": Role.INOUT, "w": Role.WORKSPACE}
    chosen = [kinds[letter] for letter in roles or "i" * len(args)]
    return Buffers(list(args), "abcdefgh"[: len(args)], chosen, **options)


def byte(view: torch.Tensor, at: int) -> torch.Tensor:
    """The byte at an offset from the start of a tensor, inside it or not, as a writable 1-element tensor."""
    flat = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    return flat[view.data_ptr() - flat.data_ptr() + at :][:1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (3, 5), (4100,)], ids=str)
def test_arguments_keep_their_values_at_aligned_addresses(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    original = tensor(dtype, *shape)
    held = buffers(original.clone(), 7, None, roles="iii")
    held.arm(0)
    view, seven, none = held.arguments()
    assert (view.dtype, view.shape, seven, none) == (dtype, original.shape, 7, None)
    assert guard.differences(view, original) is None
    assert view.data_ptr() % guard.ALIGNMENT == 0
    assert held.damage() == held.mutated() == []


@pytest.mark.parametrize("round_", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_red_zones_read_as_nan(dtype: torch.dtype, round_: int) -> None:
    held = buffers(tensor(dtype, 33), tensor(dtype, 32), roles="io")
    held.arm(round_)
    size = dtype.itemsize
    for view, count in zip(held.arguments(), (33, 32), strict=True):
        around = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
        start = view.data_ptr() - around.data_ptr()
        before = around[start - 4096 : start].view(dtype)
        assert before.float().isnan().all()
        end = (start + count * size + 15) // 16 * 16
        assert around[end : end + 4000].view(dtype).float().isnan().all()


@pytest.mark.parametrize(("role", "round_"), [("i", 0), ("o", 1), ("w", 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float64], ids=str)
@pytest.mark.parametrize("elements", [0, 1, 500, -1, -300], ids=str)
def test_a_write_outside_is_placed(dtype: torch.dtype, role: str, round_: int, elements: int) -> None:
    count = 15  # odd: the back zone of one-byte elements begins at an odd address
    held = buffers(tensor(dtype, count), tensor(dtype, 3), roles=role + "i")
    held.arm(round_)
    side, offset = ("before", elements) if elements < 0 else ("after", count + elements)
    byte(held.arguments()[0], offset * dtype.itemsize).fill_(0x11)
    (finding,) = held.damage()
    assert finding.verdict is Verdict.OUT_OF_BOUNDS
    assert finding.detail == f"a: memory {side} the tensor was written, at element offset {offset} of {count} elements"
    held.arm(round_ + 1)
    assert held.damage() == []


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("value", [-1, 0, 127, 0x7FFF, 0x7FFF7FFF])
@pytest.mark.parametrize("offset", [3, 4, 5, 6])
def test_no_value_can_be_written_outside_unseen_in_two_runs(dtype: torch.dtype, value: int, offset: int) -> None:
    held, seen = buffers(tensor(dtype, 3), roles="o"), []
    pattern = (value % (1 << 8 * dtype.itemsize)).to_bytes(dtype.itemsize, "little")
    for round_ in (0, 1):
        held.arm(round_)
        for at, part in enumerate(pattern):
            byte(held.arguments()[0], offset * dtype.itemsize + at).fill_(part)
        seen += held.damage()
    assert seen
    assert all(f"element offset {offset} of 3" in finding.detail for finding in seen)


def test_copying_one_red_zone_over_another_is_seen() -> None:
    held = buffers(tensor(torch.bfloat16, 8), tensor(torch.bfloat16, 8), roles="io")
    held.arm(0)
    source, target = held.arguments()
    for at in range(16, 20):
        byte(target, at).copy_(byte(source, at))
    assert [finding.verdict for finding in held.damage()] == [Verdict.OUT_OF_BOUNDS]


def test_big_tensors_have_bigger_zones() -> None:
    assert guard.zone_bytes(0) == guard.zone_bytes(60_000) == 4096
    assert guard.zone_bytes(1 << 20) == 65536
    assert guard.zone_bytes(7_500_000_000) == 4 << 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unwritten_elements_are_counted(dtype: torch.dtype) -> None:
    held = buffers(tensor(dtype, 4, 5), roles="o")
    runs = []
    for round_ in (0, 1):
        held.arm(round_)
        out = held.arguments()[0].view(-1)
        out[:7] = tensor(dtype, 7)
        out[9:] = tensor(dtype, 11)
        runs.append(held.snapshot()[0])
    assert guard.unwritten(*runs) == guard.Difference(2, 7)
    assert (guard.unwritten(runs[0], None) is None) == (dtype not in guard.WIDE_FLOATS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_written_elements_are_not_taken_for_unwritten(dtype: torch.dtype) -> None:
    numbers = [0.0, 1.0, -1.0, math.nan, math.inf, 90.0, -1000.0] if dtype.is_floating_point else [0, 1, 91]
    values = torch.tensor(numbers).to(dtype)
    assert guard.unwritten(values, values) is None
    poison = torch.empty_like(values)
    guard.poison_(poison, 0)
    # An integer that is poison by chance in one run only was written; a float cannot be.
    assert (guard.unwritten(poison, values) is None) == (dtype not in guard.WIDE_FLOATS)


@pytest.mark.parametrize("dtype", guard.WIDE_FLOATS, ids=str)
def test_arithmetic_on_poison_is_not_poison(dtype: torch.dtype) -> None:
    runs = [torch.empty(64, dtype=dtype) for _ in range(2)]
    for round_, out in enumerate(runs):
        guard.poison_(out, round_)
        assert out.isnan().all()
        out.add_(torch.linspace(-1, 1, 64).to(dtype))
    assert guard.unwritten(*runs) is None


def test_contents_of_inout_and_workspace_are_put_back() -> None:
    held = buffers(torch.ones(4), torch.full((4,), 2.0), roles="xw")
    for round_ in (0, 1):
        held.arm(round_)
        for view, value in zip(held.arguments(), (1.0, 2.0), strict=True):
            assert (view == value).all()
            view.fill_(9)
    assert set(held.outputs()) == {0}
    assert held.poisoned() == set()
    assert [view.tolist() for view in held.originals()] == [[1.0] * 4, [2.0] * 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_input_byte_is_named(dtype: torch.dtype) -> None:
    held = buffers(tensor(dtype, 11), tensor(dtype, 5), roles="ii")
    held.arm(0)
    last = 11 * dtype.itemsize - 1
    target = byte(held.arguments()[0], last)
    target.bitwise_xor_(1)
    (finding,) = held.mutated()
    assert (finding.verdict, finding.detail) == (Verdict.INPUT_MUTATED, "a is an input and was overwritten")
    target.bitwise_xor_(1)
    assert held.mutated() == []


@given(st.binary(min_size=1, max_size=200), st.data())
def test_the_fingerprint_sees_any_byte_and_its_place(data: bytes, draw: st.DataObject) -> None:
    def hashed(content: bytes) -> int:
        return guard.fingerprint(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    at = draw.draw(st.integers(0, len(data) - 1))
    flipped = bytearray(data)
    flipped[at] ^= draw.draw(st.integers(1, 255))
    assert hashed(data) == hashed(bytes(data))
    assert hashed(bytes(flipped)) != hashed(data)
    assert hashed(data + b"\0") != hashed(data)
    if data[::-1] != data:
        assert hashed(data[::-1]) != hashed(data)


def test_chunks_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    left = torch.randint(0, 255, (1003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    right = left.clone()
    right[[500, 1002]] += 1
    first, second = left[:1000].view(torch.int16).clone(), left[:1000].view(torch.int16).clone()
    for round_, out in enumerate((first, second)):
        guard.poison_(out[321:], round_)
    answers = []
    for chunk in (1 << 20, 64):
        monkeypatch.setattr(guard, "CHUNK", chunk)
        answers.append((guard.fingerprint(left), guard.differences(left, right), guard.unwritten(first, second)))
    assert answers[0] == answers[1]
    assert answers[0][1:] == (guard.Difference(2, 500), guard.Difference(179, 321))


def test_refill_keeps_the_pointers() -> None:
    held = buffers(torch.ones(4), torch.zeros(3), 5, roles="ioi")
    pointers = [view.data_ptr() for view in held.arguments()[:2]]
    assert held.refill([torch.full((4,), 2.0), torch.full((3,), 8.0), 6])
    assert held.arguments()[0].tolist() == [2.0] * 4
    assert held.arguments()[2] == 6
    assert [view.data_ptr() for view in held.arguments()[:2]] == pointers
    assert held.originals()[1].tolist() == [8.0] * 3
    assert held.mutated() == []
    assert not held.refill([torch.full((4,), 2.0), torch.zeros(3), 6])


@pytest.mark.parametrize("other", [torch.ones(5), torch.ones(4, dtype=torch.float64), 3])
def test_refill_refuses_another_shape_and_touches_nothing(other: Any) -> None:
    held = buffers(torch.ones(2), torch.ones(4), roles="ii")
    with pytest.raises(ValueError, match="argument b was"):
        held.refill([torch.zeros(2), other])
    assert held.arguments()[0].tolist() == [1.0, 1.0]


def test_arguments_are_wrapped_afresh() -> None:
    held = buffers(torch.zeros(4), roles="o")
    held.arm(0)
    held.arguments()[0].data = torch.ones(4)
    assert guard.unwritten(held.snapshot()[0], None) == guard.Difference(4, 0)
    assert held.arguments()[0] is not held.arguments()[0]


def test_originals_are_dropped_one_by_one() -> None:
    args: list[Any] = [torch.ones(8), torch.ones(8)]
    alive = [weakref.ref(arg) for arg in args]
    held = Buffers(args, ["a", "b"], [Role.INPUT, Role.OUTPUT])
    gc.collect()
    assert args == [None, None]
    assert alive[0]() is None  # an input's only copy is the guarded one
    assert held.originals()[1] is alive[1]()


def test_exact_tensors_own_their_allocation_to_the_byte() -> None:
    whole, part = torch.ones(5, dtype=torch.int8), torch.ones(8)[2:5]
    pointer = whole.data_ptr()
    held = buffers(whole, part, torch.zeros(3), roles="iio", exact=True)
    held.arm(0)
    views = held.arguments()
    assert views[0].data_ptr() == pointer  # no second copy of what may be 7.5 GB
    assert [view.untyped_storage().nbytes() for view in views] == [5, 12, 12]
    assert held.damage() == held.mutated() == []
    views[1][0] = 4
    assert [finding.detail for finding in held.mutated()] == ["b is an input and was overwritten"]
    assert guard.unwritten(held.snapshot()[2], None) == guard.Difference(3, 0)


def test_a_strided_argument_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"argument a is not contiguous \(shape \(3, 2\), strides \(1, 3\)\)"):
        buffers(torch.ones(2, 3).T)
