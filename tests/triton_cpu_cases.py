"""What test_triton_cpu.py runs in a process of its own, with TRITON_INTERPRET set before Triton is imported."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from harness import catalog
from harness.cpu import triton_interpreter
from harness.devices import Device
from harness.languages import python_source
from harness.package import load_package
from harness.verdict import KernelFault, Verdict


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    triton_interpreter.install()
    yield
    triton_interpreter.uninstall()


def fault_of(launch, *args, **options) -> KernelFault:
    """The fault that a launch must end in."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (Triton wraps what is raised inside a kernel)
        launch(*args, **options)
    fault = triton_interpreter.kernel_fault(caught.value)
    assert fault is not None, caught.value
    return fault


# ---------------------------------------------------------------------------------------------------- bfloat16


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, cols, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + inner[None, :])
    b = tl.load(b_ptr + inner[:, None] * N + cols[None, :])
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], tl.dot(a, b))


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32 if a.is_floating_point() else torch.int32)
    dot_kernel[(1,)](a, b, c, a.shape[0], b.shape[1], a.shape[1])
    return c


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_matches_float64(dtype):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(32, 64, generator=generator).to(dtype)
    b = torch.randn(64, 16, generator=generator).to(dtype)
    torch.testing.assert_close(dot(a, b).double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_dot_of_bf16_is_wrong_without_the_patch():
    a = torch.full((16, 16), 1.0, dtype=torch.bfloat16)
    triton_interpreter.uninstall()
    assert dot(a, a).max() > 1e6  # 16 * 0x3f80 * 0x3f80: the bit patterns were multiplied
    triton_interpreter.install()
    assert torch.equal(dot(a, a), torch.full((16, 16), 16.0))


def test_dot_of_int8_is_exact():
    generator = torch.Generator().manual_seed(2)
    a = torch.randint(-128, 128, (16, 512), generator=generator, dtype=torch.int8)
    b = torch.randint(-128, 128, (512, 16), generator=generator, dtype=torch.int8)
    assert torch.equal(dot(a, b), (a.long() @ b.long()).int())


def test_a_dot_below_16_is_refused():
    a = torch.ones(8, 16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="should have M >= 16"):
        dot(a, torch.ones(16, 16, dtype=torch.bfloat16))


@triton.jit
def cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, y, x.numel())
    return y


def awkward_floats() -> torch.Tensor:
    """1024 float32 values: random bits of every exponent, ties both ways, carries, subnormals, inf, NaN, zeros."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (1024,), generator=generator).int()
    special = [0x3F808000, 0x3F818000, 0x3F7FFFFF, 0x3FFFFFFF, 0x7F7FFFFF, 0x00008000, 0x00000001, 0x7F800000]
    special += [0x7F800001, 0x7FC00000, 0x3F808001, 0x3F807FFF, 0]
    bits[: len(special)] = torch.tensor(special).int()
    bits[len(special) : 2 * len(special)] = torch.tensor([value - 2**31 for value in special]).int()
    return bits.view(torch.float32)


def test_float32_to_bf16_rounds_to_nearest_even():
    x = awkward_floats()
    ours, theirs = cast(x, torch.bfloat16), x.to(torch.bfloat16)
    nan = theirs.isnan()
    assert nan.any()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours[~nan].view(torch.int16), theirs[~nan].view(torch.int16))
    triton_interpreter.uninstall()
    assert not torch.equal(cast(x, torch.bfloat16)[~nan].view(torch.int16), theirs[~nan].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64, torch.float16])
def test_casts_to_and_from_bf16(dtype):
    x = torch.arange(-64, 64).to(dtype)
    assert torch.equal(cast(x, torch.bfloat16), x.to(torch.bfloat16))
    assert torch.equal(cast(x.to(torch.bfloat16), dtype), x)


def test_rounding_towards_zero_is_kept():
    x = awkward_floats()

    @triton.jit
    def kernel(x_ptr, y_ptr, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16, fp_downcast_rounding="rtz"))

    y = torch.empty(x.shape, dtype=torch.bfloat16)
    kernel[(1,)](x, y, x.numel())
    assert torch.equal(y.view(torch.int16), (x.view(torch.int32) >> 16).to(torch.int16))


@triton.jit
def elementwise_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x * y - 0.5)
    tl.store(out_ptr + 2 * N + i, -x)
    tl.store(out_ptr + 3 * N + i, tl.maximum(x, y))
    tl.store(out_ptr + 4 * N + i, tl.where(x < y, x, y))
    tl.store(out_ptr + 5 * N + i, tl.abs(x))
    tl.store(out_ptr + 6 * N + i, tl.full((N,), -1.375, tl.bfloat16))


def test_elementwise_arithmetic_on_bf16():
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(2, 256, generator=generator).to(torch.bfloat16)
    out = torch.empty(7, 256, dtype=torch.bfloat16)
    elementwise_kernel[(1,)](x, y, out, 256)
    expected = [x + y, x * y - 0.5, -x, torch.maximum(x, y), torch.minimum(x, y), x.abs(), torch.full_like(x, -1.375)]
    for name, ours, theirs in zip(["add", "fma", "neg", "max", "where", "abs", "full"], out, expected, strict=True):
        assert torch.equal(ours, theirs), name


@triton.jit
def reduce_kernel(x_ptr, sum_ptr, max_ptr, scan_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    tl.store(sum_ptr + rows, tl.sum(x, axis=1).to(sum_ptr.dtype.element_ty))
    tl.store(max_ptr + rows, tl.max(x, axis=1).to(max_ptr.dtype.element_ty))
    tl.store(scan_ptr + rows[:, None] * N + cols[None, :], tl.cumsum(x, axis=1).to(scan_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reductions(dtype):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    total, largest, scan = torch.empty(16, dtype=dtype), torch.empty(16, dtype=dtype), torch.empty(16, 64, dtype=dtype)
    reduce_kernel[(1,)](x, total, largest, scan, 16, 64)
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(total.double(), x.double().sum(1), **tolerance)
    assert torch.equal(largest, x.amax(1))
    torch.testing.assert_close(scan.double(), x.double().cumsum(1), **tolerance)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, steps, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    for _ in range(0, steps):  # a bound that is a run-time value
        x = x - tl.max(x, axis=1)[:, None]
    p = tl.exp2(x)
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], p / tl.sum(p, axis=1)[:, None])


def test_exp2_of_minus_infinity_and_a_row_of_it(recwarn):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(6))
    x[:, 5] = -torch.inf
    x[3] = -torch.inf
    y = torch.empty_like(x)
    softmax_kernel[(1,)](x, y, 2, 16, 32)
    kept = torch.arange(16) != 3
    expected = torch.softmax(x.double() * 0.6931471805599453, dim=1)
    torch.testing.assert_close(y[kept].double(), expected[kept], rtol=1e-5, atol=1e-6)
    assert y[kept, 5].eq(0).all()
    assert y[3].isnan().all()  # as on a GPU, and without a warning
    assert not recwarn.list


# ------------------------------------------------------------------------------------------------------ bounds


@triton.jit
def copy_kernel(source, target, load_limit, store_limit, shift, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(source + i + shift, mask=i < load_limit, other=0.0)
    tl.store(target + i, x, mask=i < store_limit)


def windows(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of 100 elements inside one allocation, so that an access beside them still hits live memory."""
    memory = torch.zeros(4096, dtype=dtype)
    return memory[1000:1100], memory[2000:2100]


def test_accesses_inside_pass_and_masked_ones_are_free():
    source, target = windows()
    source.copy_(torch.arange(100))
    copy_kernel[(4,)](source, target, 100, 100, 0, 32)
    assert torch.equal(source, target)


def test_load_outside_is_named():
    source, target = windows()
    fault = fault_of(copy_kernel[(4,)], source, target, 103, 100, 0, 32)
    assert fault.verdict is Verdict.OUT_OF_BOUNDS
    assert "copy_kernel, program (3, 0, 0): load outside every argument (and 2 more of this access)" in fault.message
    assert "nearest is source (100) at element 100, which has elements 0 to 99" in fault.message
    line = copy_kernel.fn.__code__.co_firstlineno + 3  # decorator, def, i = ..., x = ...
    assert f"triton_cpu_cases.py:{line}: " in fault.message


def test_store_outside_is_named():
    source, target = windows()
    fault = fault_of(copy_kernel[(4,)], source, target, 100, 101, 0, 32)
    assert fault.verdict is Verdict.OUT_OF_BOUNDS
    assert "program (3, 0, 0): store outside every argument; nearest is target (100) at element 100" in fault.message


def test_load_before_the_start_is_named():
    source, target = windows()
    fault = fault_of(copy_kernel[(1,)], source, target, 100, 100, -1, 32)
    assert "nearest is source (100) at element -1" in fault.message


def test_live_memory_that_was_not_passed_is_outside():
    source, target = windows()
    other = source.as_strided((100,), (1,), source.storage_offset() + 500)
    shift = (other.data_ptr() - source.data_ptr()) // 2
    assert fault_of(copy_kernel[(1,)], source, target, 100, 100, shift, 32).verdict is Verdict.OUT_OF_BOUNDS


def test_a_strided_argument_covers_its_span_and_an_empty_one_nothing():
    memory = torch.zeros(4096, dtype=torch.float32)
    strided = memory[0:1000:10]  # elements 0, 10, ..., 990
    target = torch.zeros(991)
    copy_kernel[(31,)](strided, target, 991, 991, 0, 32)
    assert "store" in fault_of(copy_kernel[(31,)], strided, target, 991, 992, 0, 32).message
    assert "load" in fault_of(copy_kernel[(31,)], strided, target, 992, 991, 0, 32).message
    empty = memory[:0]
    copy_kernel[(1,)](empty, target, 0, 32, 0, 32)
    assert "has elements 0 to -1" in fault_of(copy_kernel[(1,)], empty, empty, 1, 0, 0, 32).message


@triton.jit
def atomic_kernel(counter, offset):
    tl.atomic_add(counter + offset, 1)


@triton.jit
def cas_kernel(counter, offset):
    tl.atomic_cas(counter + offset, 0, 7)


@pytest.mark.parametrize("kernel", [atomic_kernel, cas_kernel])
def test_atomics_are_checked(kernel):
    memory = torch.zeros(16, dtype=torch.int32)
    kernel[(1,)](memory[4:8], 3)
    assert memory[7] != 0
    fault = fault_of(kernel[(1,)], memory[4:8], 4)
    assert "atomic outside every argument; nearest is counter (4) at element 4" in fault.message


@triton.jit
def block_pointer_kernel(x_ptr, y_ptr, rows, CHECK: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (rows, 16), (16, 1), (0, 0), (32, 16), (1, 0))
    y = tl.make_block_ptr(y_ptr, (rows, 16), (16, 1), (0, 0), (32, 16), (1, 0))
    if CHECK:
        tl.store(y, tl.load(x, boundary_check=(0, 1)), boundary_check=(0, 1))
    else:
        tl.store(y, tl.load(x), boundary_check=(0, 1))


def test_block_pointers_are_checked():
    memory = torch.arange(2 * 64 * 16, dtype=torch.float32).to(torch.bfloat16).view(2, 64, 16)
    x, y = memory[0, :20], memory[1, :20]
    block_pointer_kernel[(1,)](x, y, 20, True)
    assert torch.equal(x, y)
    assert "nearest is x_ptr (20x16) at element 320" in fault_of(block_pointer_kernel[(1,)], x, y, 20, False).message


def test_the_next_launch_has_its_own_ranges():
    source, target = windows()
    fault_of(copy_kernel[(4,)], source, target, 103, 100, 0, 32)
    copy_kernel[(1,)](target, target, 32, 32, 0, 32)
    fault = fault_of(copy_kernel[(1,)], source, source, 32, 101, (target.data_ptr() - source.data_ptr()) // 2, 32)
    assert "source" in fault.message


def test_a_plain_exception_is_no_kernel_fault():
    @triton.jit
    def kernel(x_ptr):
        tl.store(x_ptr + 0, not_defined)  # noqa: F821

    with pytest.raises(Exception, match="not_defined") as caught:
        kernel[(1,)](torch.zeros(1))
    assert triton_interpreter.kernel_fault(caught.value) is None


# ---------------------------------------------------------------------------------------------- ragged prefill

RAGGED = Path(__file__).resolve().parent.parent / "tasks" / "ragged_prefill" / "triton" / "run_kernel.py"
RAGGED_ARGUMENTS = (
    "q k v output qo_indptr kv_indptr batch_size seq_len num_qo_heads num_kv_heads head_dim_qk head_dim_vo"
)


def ragged_case(q_lens, kv_lens, heads, dims, causal):
    """The judge's argument list with random data; the output is full of NaN."""
    generator = torch.Generator().manual_seed(sum(q_lens) + 7 * sum(kv_lens))
    indptrs = [torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32) for lens in (q_lens, kv_lens)]
    q = torch.randn(sum(q_lens), heads[0], dims[0], generator=generator).to(torch.bfloat16)
    k = torch.randn(sum(kv_lens), heads[1], dims[0], generator=generator).to(torch.bfloat16)
    v = torch.randn(sum(kv_lens), heads[1], dims[1], generator=generator).to(torch.bfloat16)
    output = torch.full((sum(q_lens), heads[0], dims[1]), torch.nan, dtype=torch.bfloat16)
    return [q, k, v, output, *indptrs, len(q_lens), max(q_lens + kv_lens), *heads, *dims, causal]


def ragged_reference(args, shift=0):
    """Attention in float64, row by row; `shift` moves the causal diagonal, 0 being the bottom right."""
    q, k, v, output, qo_indptr, kv_indptr = args[:6]
    causal, group = args[-1], q.shape[1] // k.shape[1]
    expected = torch.zeros(output.shape, dtype=torch.float64)
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(qo_indptr.tolist()), itertools.pairwise(kv_indptr.tolist()), strict=True
    ):
        for i in range(q1 - q0):
            seen = max(0, min(k1 - k0, (k1 - k0) - (q1 - q0) + i + 1 + shift)) if causal else k1 - k0
            keys = k[k0 : k0 + seen].double().repeat_interleave(group, dim=1)  # (seen, heads, dim)
            values = v[k0 : k0 + seen].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[q0 + i].double(), keys) / math.sqrt(q.shape[2])
            expected[q0 + i] = torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=1), values)
    return expected


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "dims", "causal"),
    [
        ((17, 0, 1, 40), (17, 3, 1, 90), (8, 1), (128, 128), 1),  # packed group, several tiles, a query-less sequence
        ((1,) * 18, tuple(range(18)), (2, 2), (64, 64), 1),  # more sequences than tiles; lengths from 0
        ((5, 70), (130, 2), (6, 2), (192, 128), 1),  # group of 3; rows without any key; the diagonal crosses two tiles
        ((9, 24), (65, 64), (5, 1), (256, 256), 0),
        ((33,), (70,), (2, 1), (96, 48), 1),  # dimensions that are no powers of two
        ((150,), (40,), (1, 1), (80, 112), 0),
    ],
)
def test_ragged_prefill_matches_float64(q_lens, kv_lens, heads, dims, causal):
    args = ragged_case(q_lens, kv_lens, heads, dims, causal)
    arguments = [*RAGGED_ARGUMENTS.split(), "causal"]
    run_kernel = python_source.load_run_kernel(RAGGED, arguments, Device("cpu", "cpu", "CPU", "c500"))
    run_kernel(*args)
    torch.testing.assert_close(args[3].double(), ragged_reference(args), rtol=2**-6, atol=2**-6)
    if causal:  # the comparison tells a diagonal that is off by one
        with pytest.raises(AssertionError):
            torch.testing.assert_close(args[3].double(), ragged_reference(args, -1), rtol=2**-6, atol=2**-6)


# ---------------------------------------------------------------------------------------------------- fused_moe's peer


@pytest.mark.parametrize("config", [(128, 64, 4, 3, 8), (128, 128, 4, 3, 2), (256, 64, 4, 3, 32)])
def test_the_peer_of_fused_moe_is_exact(monkeypatch, config):
    from tasks.fused_moe import peer, reference

    monkeypatch.setattr(peer, "_best", {})
    package = load_package(catalog.suite_path("fused_moe", "tiny"))
    args = package.generate(package.case(2), "cpu")  # experts in no order, one twice, one never
    call = peer.call_of
    written = []
    monkeypatch.setattr(peer, "call_of", lambda *rest: written.append(rest[2]) or call(*rest))
    run = peer.best_call(*args, sweep=(peer.Config(512, 64, 4, 3, 8), peer.Config(*config)))
    written[-1].fill_(math.nan)
    run()
    assert torch.equal(written[-1], reference.honest(*args)["out"])
    args[0][-1, -1] += 1  # the last row alone, by the last k
    assert not torch.equal(written[-1], reference.honest(*args)["out"])


def test_the_peer_says_when_no_configuration_fits():
    from tasks.fused_moe import peer

    package = load_package(catalog.suite_path("fused_moe", "tiny"))
    args = package.generate(package.case(1), "cpu")
    with pytest.raises(ValueError, match="N = 128, K = 128"):
        peer.best_call(*args, sweep=(peer.Config(256, 64, 4, 3, 8),))
