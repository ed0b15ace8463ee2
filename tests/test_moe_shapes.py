"""fused_moe in C++ finds EM, N, K and E from the sizes of the allocations, or says that it cannot.

The section Shapes of the submission is host arithmetic: it is compiled alone here, on ranges that need no memory. The
whole submission then runs in the simulator, on exact and on oversized ranges.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.catalog import ROOT
from harness.cpu.maca_build import build
from harness.cpu.maca_runtime import Piece, Simulator
from tasks.fused_moe import demo_config, testcase_config
from tasks.fused_moe import reference as truth

SUBMISSION = ROOT / "tasks" / "fused_moe" / "cuda" / "run_kernel.cu"
TENSORS = ("a", "b_col_major", "scale_a", "scale_b", "moe_weights", "token_ids", "expert_ids", "out")
MIB = 1 << 20
PUBLISHED = [(em, n, k, testcase_config.E) for em, n, k, _ in testcase_config.CASES]
DEMO = [(case.tokens * case.topk, demo_config.N, demo_config.K, demo_config.E) for case in demo_config.CASES]

Shape = tuple[int, int, int, int]  # EM, N, K, E

HOOK = """
#include <stdint.h>
%s
extern "C" int hook(const uint64_t* numbers, int64_t* found) {
    Range ranges[kTensors];
    for (int i = 0; i < kTensors; ++i) ranges[i] = {numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2]};
    Shape shape;
    if (!resolve(ranges, shape)) return 0;
    found[0] = shape.em, found[1] = shape.n, found[2] = shape.k, found[3] = shape.e;
    return 1;
}
"""


class Range(NamedTuple):
    """A tensor's address and the allocation that it lies in."""

    pointer: int
    base: int
    bytes: int


def sizes(shape: Shape) -> list[int]:
    """Bytes of each of TENSORS."""
    em, n, k, e = shape
    return [em * k, e * n * k, 4 * em, 4 * e * n, 4 * em, 4 * em, em // 128 * 4, 2 * em * n]


def exact(shape: Shape) -> list[Range]:
    """Every tensor an allocation of its own."""
    base, ranges = 1 << 40, []
    for need in sizes(shape):
        ranges.append(Range(base, base, need))
        base += (need + 4 * MIB) // MIB * MIB
    return ranges


def packed(shape: Shape) -> list[Range]:
    """A fresh process of PyTorch with its caching allocator, measured to behave so: up to 1 MiB shares 2 MiB, below
    10 MiB shares 20 MiB, the rest is rounded up to whole 2 MiB; neighbours are 512 bytes or a multiple apart."""
    top = 1 << 40
    open_segments: dict[int, list[int]] = {}  # size of the segment -> base, used bytes
    ranges = []
    for need in sizes(shape):
        size = 2 * MIB if need <= MIB else 20 * MIB if need < 10 * MIB else -(-need // (2 * MIB)) * 2 * MIB
        own = need >= 10 * MIB
        rounded = -(-need // 512) * 512
        if own or size not in open_segments or open_segments[size][1] + rounded > size:
            open_segments[-1 if own else size] = [top, 0]
            top += size + 2 * MIB
        base, used = segment = open_segments[-1 if own else size]
        ranges.append(Range(base + used, base, size))
        segment[1] += rounded
    return ranges


Resolver = Callable[[Sequence[Range]], "Shape | None"]


@pytest.fixture(scope="module")
def resolve(tmp_path_factory: pytest.TempPathFactory) -> Resolver:
    """The submission's own resolver."""
    text = SUBMISSION.read_text(encoding="utf-8")
    section = text[text.index("// ---- Shapes") : text.index("// ---- Order of tiles")]
    folder: Path = tmp_path_factory.mktemp("shapes")
    (folder / "hook.cpp").write_text(HOOK % section, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run([*command, str(folder / "hook.cpp"), "-o", str(folder / "hook.so")], check=True)
    library = ctypes.CDLL(str(folder / "hook.so"))

    def call(ranges: Sequence[Range]) -> Shape | None:
        numbers = (ctypes.c_uint64 * 24)(*(number for one in ranges for number in one))
        found = (ctypes.c_int64 * 4)()
        return (found[0], found[1], found[2], found[3]) if library.hook(numbers, found) else None

    return call


@pytest.mark.parametrize("shape", PUBLISHED + DEMO, ids=str)
def test_known_shapes_by_exact_ranges(resolve: Resolver, shape: Shape) -> None:
    assert resolve(exact(shape)) == shape


MULTIPLES = st.integers(1, 300).map(lambda i: 128 * i)


@settings(max_examples=200)
@given(em=MULTIPLES, n=MULTIPLES, k=MULTIPLES, e=st.integers(1, 400))
def test_any_shape_by_exact_ranges(resolve: Resolver, em: int, n: int, k: int, e: int) -> None:
    assert resolve(exact((em, n, k, e))) == (em, n, k, e)


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_published_shapes_by_packed_ranges(resolve: Resolver, shape: Shape) -> None:
    assert resolve(packed(shape)) == shape


def test_packed_ranges_are_what_was_measured() -> None:
    third = dict(zip(TENSORS, packed(PUBLISHED[2]), strict=True))
    assert third["a"].bytes == 20 * MIB
    assert third["scale_b"].base == third["a"].base
    assert third["scale_b"].pointer == third["a"].pointer + 4096 * 2048
    assert third["b_col_major"].bytes == 256 * 7168 * 2048
    assert third["token_ids"].base == third["scale_a"].base


UNLISTED = [
    (3968, 4096, 7168, 256),  # a, b and out are rounded up to the first published case's very sizes
    (4096, 4096, 7168, 255),
    (8192, 4096, 7168, 256),
    (4096, 4096, 4096, 256),
    (6144, 4096, 7168, 256),
    (16384, 7168, 2048, 256),
    (32640, 7168, 2048, 256),
    (4096, 7168, 4096, 128),
    (1024, 512, 512, 8),
    *DEMO,
]


@pytest.mark.parametrize("shape", UNLISTED, ids=str)
def test_unlisted_shapes_are_never_guessed(resolve: Resolver, shape: Shape) -> None:
    assert resolve(exact(shape)) == shape
    assert resolve(packed(shape)) is None


@settings(max_examples=200)
@given(em=MULTIPLES, n=MULTIPLES, k=MULTIPLES, e=st.integers(1, 400))
def test_packed_ranges_never_give_a_wrong_shape(resolve: Resolver, em: int, n: int, k: int, e: int) -> None:
    shape = (em, n, k, e)
    assert resolve(packed(shape)) in ((shape,) if shape in PUBLISHED else (None, shape))


@pytest.mark.parametrize("shape", [PUBLISHED[0], DEMO[2]], ids=str)
@pytest.mark.parametrize("which", range(8), ids=TENSORS)
@pytest.mark.parametrize("change", [-4, 4, 512])
def test_one_range_that_disagrees_is_enough(resolve: Resolver, shape: Shape, which: int, change: int) -> None:
    ranges = exact(shape)
    ranges[which] = ranges[which]._replace(bytes=ranges[which].bytes + change)
    published = shape in PUBLISHED and change > 0  # the table stands in for sizes that are rounded up, never for less
    assert resolve(ranges) == (shape if published else None)


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_a_range_far_larger_than_its_tensor_tells_nothing(resolve: Resolver, shape: Shape) -> None:
    for which in (0, 1, 7):
        ranges = exact(shape)
        ranges[which] = ranges[which]._replace(bytes=ranges[which].bytes + 24 * MIB)
        assert resolve(ranges) is None


def test_an_argument_inside_its_range_is_not_exact(resolve: Resolver) -> None:
    ranges = exact(DEMO[0])
    ranges[0] = ranges[0]._replace(base=ranges[0].base - 512)
    assert resolve(ranges) is None


@pytest.mark.parametrize("which", range(8), ids=TENSORS)
def test_empty_ranges_are_no_division_by_zero(resolve: Resolver, which: int) -> None:
    ranges = exact(DEMO[0])
    ranges[which] = ranges[which]._replace(bytes=0)
    assert resolve(ranges) is None


# The whole submission -----------------------------------------------------------------------------------------------


def arguments(tiles: Sequence[int], n: int, k: int, e: int) -> list[Tensor]:
    """Tensors in the order of TENSORS, out full of ones; each one stays at its own address."""
    generator = torch.Generator().manual_seed(7)
    em = len(tiles) * 128
    return [
        torch.randint(-128, 128, (em, k), generator=generator).to(torch.int8),
        torch.randint(-128, 128, (e, n, k), generator=generator).to(torch.int8),
        torch.rand(em, generator=generator),
        torch.rand(e, n, generator=generator),
        torch.rand(em, generator=generator),
        torch.zeros(em, dtype=torch.int32),
        torch.tensor(tiles, dtype=torch.int32),
        torch.ones(em, n, dtype=torch.bfloat16),
    ]


class Machine:
    """The submission in the simulator; `extra`: bytes by which the range of a tensor is larger than the tensor."""

    def __init__(self, mode: str) -> None:
        self.simulator = Simulator(build(SUBMISSION, mode), SUBMISSION)

    def run(self, tensors: Sequence[Tensor], extra: dict[str, int] | None = None) -> None:
        extra = extra or {}
        pieces = [
            Piece(name, tensor.data_ptr(), tensor.numel() * tensor.element_size() + extra.get(name, 0), False)
            for name, tensor in zip(TENSORS, tensors, strict=True)
        ]
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        self.simulator.begin(pieces)
        self.simulator.library.run_kernel(*pointers[:7], ctypes.c_int64(8), pointers[7])
        self.simulator.end()


@pytest.fixture(scope="module", params=["wave64", "warp32"])
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(request.param)


def test_runs_on_exact_ranges_and_fails_loudly_on_others(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    tensors = arguments((1, 0, 1), n=128, k=128, e=2)
    machine.run(tensors, {"a": 512})
    assert torch.equal(tensors[7], torch.ones_like(tensors[7]))  # left alone
    said = capfd.readouterr().err
    assert "the sizes of the allocations do not tell EM, N and K" in said
    assert f"a {3 * 128 * 128 + 512}," in said
    machine.run(tensors)
    want = truth.honest(*tensors[:7], 8, tensors[7])["out"]
    assert torch.equal(tensors[7], want)
    assert capfd.readouterr().err == ""


def test_the_same_addresses_with_another_shape_are_noticed(machine: Machine) -> None:
    # (256, 128, 256, 2) and (128, 256, 256, 1) in the same memory, one after the other.
    memory = [tensor.contiguous() for tensor in arguments((1, 0), n=128, k=256, e=2)]
    machine.run(memory)
    assert torch.equal(memory[7], truth.honest(*memory[:7], 8, memory[7])["out"])
    a, b, scale_a, scale_b, weights, tokens, experts, out = memory
    second = [a[:128], b.view(1, 256, 256), scale_a[:128], scale_b.view(1, 256), weights[:128], tokens[:128]]
    second += [experts[1:], out.view(128, 256)]
    assert int(second[6]) == 0
    second[6] = experts[:1].zero_()  # at the first call's address
    assert [x.data_ptr() for x in second] == [x.data_ptr() for x in memory]
    machine.run(second)
    assert torch.equal(second[7], truth.honest(*second[:7], 8, second[7])["out"])
