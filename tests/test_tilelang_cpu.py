"""TileLang on the CPU: every operator against float64, and faults that must be found. No `from __future__ import
annotations` here: TileLang reads the annotations of a kernel as values."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import languages
from harness.catalog import submission_path
from harness.cpu import tilelang_c
from harness.devices import pick
from harness.verdict import KernelFault, KitError, Verdict
from tasks.ragged_prefill import reference, tiny_config

tilelang = pytest.importorskip("tilelang")
T = pytest.importorskip("tilelang.language")
tilelang_c.install()

CPU = pick("cpu")
BF16 = torch.bfloat16


def fault_of(call: Callable[[], Any]) -> KernelFault:
    with pytest.raises(KernelFault) as caught:
        call()
    return caught.value


# ---- products ------------------------------------------------------------------------------------------------------


@tilelang.jit
def product(N, K, transpose_a, transpose_b, dtype, accumulator, start):
    """C (M, N) = start + A B with A (M, K) or (K, M), B (K, N) or (N, K); M is dynamic, row tiles of 16."""
    M = T.dynamic("M")

    @T.prim_func
    def main(
        A: T.Tensor((M, K), dtype),
        At: T.Tensor((K, M), dtype),
        B: T.Tensor((N, K), dtype),
        C: T.Tensor((M, N), accumulator),
    ):
        with T.Kernel(T.ceildiv(M, 16), threads=128) as block:
            a = T.alloc_shared((K, 16) if transpose_a else (16, K), dtype)
            b = T.alloc_shared((N, K), dtype)
            c = T.alloc_fragment((16, N), accumulator)
            T.copy(B, b)
            T.fill(c, start)
            if transpose_a:
                T.copy(At[:, block * 16 : block * 16 + 16], a)
            else:
                T.copy(A[block * 16, 0], a)
            T.gemm(a, b, c, transpose_A=transpose_a, transpose_B=transpose_b, policy=T.GemmWarpPolicy.FullRow)
            T.copy(c, C[block * 16 : block * 16 + 16, :])

    return main


def run_product(dtype: torch.dtype, transpose_a: bool, transpose_b: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-9, 9, (37, 32), generator=generator).to(dtype)
    b = torch.randint(-9, 9, (32, 32), generator=generator).to(dtype)
    accumulator = torch.int32 if dtype is torch.int8 else torch.float32
    c = torch.full((37, 32), 7, dtype=accumulator)
    names = [str(t).removeprefix("torch.") for t in (dtype, accumulator)]
    product(32, 32, transpose_a, transpose_b, *names, 3)(a, a.T.contiguous(), b, c)
    return c.double(), 3 + a.double() @ b.double().T


@pytest.mark.parametrize(("dtype", "transpose_a"), [(BF16, False), (torch.int8, True)])
def test_product_is_exact_and_a_missing_transposition_shows(dtype: torch.dtype, transpose_a: bool) -> None:
    found, expected = run_product(dtype, transpose_a, True)
    assert torch.equal(found, expected)
    found, expected = run_product(dtype, transpose_a, False)
    assert not torch.equal(found, expected)


# ---- rounding and uninitialised memory -----------------------------------------------------------------------------


@tilelang.jit
def narrow(skip):
    n = T.dynamic("n")

    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "bfloat16"), Z: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 64), threads=64) as block:
            wide = T.alloc_fragment((64,), "float32")
            half = T.alloc_fragment((64,), "bfloat16")
            if not skip:
                T.copy(X[block * 64 : block * 64 + 64], wide)
            T.copy(wide, half)
            T.copy(half, Y[block * 64])
            for i in T.Parallel(64):
                if block * 64 + i < n:
                    Z[block * 64 + i] = T.cast(half[i], "float32") * T.cast(half[i], "float32")

    return main


def test_bf16_rounds_to_nearest_even() -> None:
    bits = torch.arange(0x3F800000, 0x3F800000 + 4 * 0x8000, 0x4000, dtype=torch.int32)  # with every kind of tie
    edge = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-40, 2.0**-133, 1.00390625])
    x = torch.cat([bits.view(torch.float32), edge, torch.randn(100, generator=torch.Generator().manual_seed(2))])
    y, z = torch.zeros_like(x, dtype=BF16), torch.zeros_like(x)
    narrow(False)(x, y, z)
    assert torch.equal(y.nan_to_num(7.0), x.to(BF16).nan_to_num(7.0))
    assert y[torch.isnan(x)].isnan().all()
    assert torch.equal(z.nan_to_num(7.0), x.to(BF16).float().square().nan_to_num(7.0))


def test_a_tile_nobody_wrote_is_nan() -> None:
    x, y, z = torch.ones(64), torch.zeros(64, dtype=BF16), torch.zeros(64)
    narrow(True)(x, y, z)
    assert y.isnan().all()
    assert z.isnan().all()


# ---- softmax pieces, copies at the edge, loops ---------------------------------------------------------------------


@tilelang.jit
def softmax(COLUMNS):
    rows, columns = T.dynamic("rows"), T.dynamic("columns")

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "bfloat16"), Y: T.Tensor((rows, columns), "bfloat16"), scale: T.float32):
        with T.Kernel(T.ceildiv(rows, 8), 1, threads=128) as (block, _):
            tile = T.alloc_shared((8, COLUMNS), "bfloat16")
            x = T.alloc_fragment((8, COLUMNS), "float32")
            top = T.alloc_fragment((8,), "float32")
            old = T.alloc_fragment((8,), "float32")
            total = T.alloc_fragment((8,), "float32")
            part = T.alloc_fragment((8, 1), "float32")
            T.fill(top, -T.infinity("float32"))
            T.clear(total)
            for n in T.Pipelined(T.ceildiv(columns, COLUMNS), num_stages=2):
                T.copy(X[block * 8, n * COLUMNS], tile)
                for i, j in T.Parallel(8, COLUMNS):
                    x[i, j] = T.if_then_else(n * COLUMNS + j < columns, tile[i, j] * scale, -T.infinity("float32"))
                T.copy(top, old)
                T.reduce_max(x, top, dim=1, clear=False)
                for i, j in T.Parallel(8, COLUMNS):
                    x[i, j] = T.exp2(x[i, j] - top[i])
                T.reduce_sum(x, part, dim=1)
                for i in T.Parallel(8):
                    total[i] = total[i] * T.exp2(old[i] - top[i]) + part[i, 0]
            for n in T.serial(T.ceildiv(columns, COLUMNS)):
                T.copy(X[block * 8 : block * 8 + 8, n * COLUMNS : (n + 1) * COLUMNS], tile)
                for i, j in T.Parallel(8, COLUMNS):
                    tile[i, j] = T.exp2(tile[i, j] * scale - top[i]) / total[i]
                T.copy(tile, Y[block * 8, n * COLUMNS])

    return main


def test_softmax_of_partial_tiles_against_float64() -> None:
    x = torch.randn((13, 45), generator=torch.Generator().manual_seed(3)).to(BF16)
    y = torch.full_like(x, torch.nan)
    softmax(16)(x, y, 0.5)
    exact = torch.softmax(x.double() * 0.5 * torch.tensor(2.0).log().double(), 1)
    assert ((y.double() - exact) / exact).abs().max() <= 1.01 * 2.0**-8  # one rounding to bf16


# ---- threads, atomics ----------------------------------------------------------------------------------------------


@tilelang.jit
def tickets(guarded, through_shared):
    """Each block adds its index to Sum; the one with the last ticket writes the sum, a second kernel's work."""
    blocks = T.dynamic("blocks")

    @T.prim_func
    def main(Sum: T.Tensor((blocks,), "int32"), Count: T.Tensor((2,), "int32"), Out: T.Tensor((4,), "int32")):
        with T.Kernel(blocks, threads=64) as block:
            thread = T.get_thread_binding()
            ticket = T.alloc_shared((1,), "int32")
            mine = T.alloc_var("int32")
            for i in T.Parallel(64):
                T.atomic_add(Sum[block], i >> 1)
            if guarded:
                if thread == 0:
                    if through_shared:
                        ticket[0] = T.atomic_add(Count[0], 1, return_prev=True)
                    else:
                        mine = T.atomic_add(Count[0], 1, return_prev=True)
            else:
                T.atomic_add(Count[0], 1)
            T.sync_threads()
            if guarded and ticket[0] == blocks - 1:
                for i in T.Parallel(4):
                    Out[i] = Sum[i] + T.max(mine, 0) * 0

    return main


def test_the_last_block_sees_all_others_and_unguarded_atomics_count_threads() -> None:
    total, count, out = (
        torch.zeros(5, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
    )
    tickets(True, True)(total, count, out)
    assert count.tolist() == [5, 0]
    assert out.tolist() == [992] * 4
    count.zero_()
    tickets(False, True)(total, count, out)
    assert count.tolist() == [5 * 64, 0]  # what a GPU does: every thread of the block executes the statement


def test_a_value_of_one_thread_must_go_through_shared_memory() -> None:
    fault = fault_of(lambda: tickets(True, False))
    assert fault.verdict is Verdict.COMPILE_ERROR
    assert "mine" in fault.message
    assert "shared memory" in fault.message


# ---- accesses outside a tensor -------------------------------------------------------------------------------------


@tilelang.jit
def gather():
    n, m = T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def main(
        X: T.Tensor((n, 8), "float32"), Index: T.Tensor((m,), "int32"), Y: T.Tensor((m, 8), "float32"), shift: T.int32
    ):
        with T.Kernel(m, threads=32) as block:
            for j in T.Parallel(8):
                Y[block + shift, j] = X[Index[block], j]

    return main


def test_gather_and_its_faults_are_named() -> None:
    x, y = torch.arange(40.0).view(5, 8), torch.zeros(3, 8)
    gather()(x, torch.tensor([4, 0, 2], dtype=torch.int32), y, 0)
    assert torch.equal(y, x[[4, 0, 2]])
    read = fault_of(lambda: gather()(x, torch.tensor([4, 5, 2], dtype=torch.int32), y, 0))
    assert read.verdict is Verdict.OUT_OF_BOUNDS
    assert "read of X[5, 0] in block (1, 0, 0) is outside its shape (5, 8)" in read.message
    negative = fault_of(lambda: gather()(x, torch.tensor([4, -1, 2], dtype=torch.int32), y, 0))
    assert negative.verdict is Verdict.OUT_OF_BOUNDS
    assert "X[-1, 0]" in negative.message
    write = fault_of(lambda: gather()(x, torch.tensor([4, 0, 2], dtype=torch.int32), y, 1))
    assert write.verdict is Verdict.OUT_OF_BOUNDS
    assert "write of Y[3, 0] in block (2, 0, 0) is outside its shape (3, 8)" in write.message


def test_wrong_arguments_are_named() -> None:
    x, index, y = torch.zeros(5, 8), torch.zeros(3, dtype=torch.int32), torch.zeros(3, 8)
    kernel = gather()
    for arguments, text in [
        ((x, index, y), "expected 4 arguments (X, Index, Y, shift), found 3"),
        ((x, index.long(), y, 0), "argument Index must be int32 with 1 dimensions, got int64 with 1"),
        ((x, index, torch.zeros(4, 8), 0), "argument Y: dimension 0 must be 3, got 4"),
        ((torch.zeros(8, 5).T, index, y, 0), "argument X must be a contiguous CPU tensor"),
        ((x, index, y, 1.5), "argument shift must be an int"),
        ((x, index[:0], y[:0], 0), "a grid of 0 blocks along x"),
    ]:
        fault = fault_of(lambda given=arguments: kernel(*given))  # type: ignore[misc]
        assert fault.verdict is Verdict.RUNTIME_ERROR
        assert text in fault.message


# ---- limits, cache, loading ----------------------------------------------------------------------------------------


@tilelang.jit
def staged(together):
    @T.prim_func
    def main(X: T.Tensor((160, 128), "float32"), Y: T.Tensor((160, 128), "float32")):
        with T.Kernel(1, threads=128):
            first = T.alloc_shared((80, 128), "float32")
            second = T.alloc_shared((80, 128), "float32")
            T.copy(X[0:80, :], first)
            if together:
                T.copy(X[80:160, :], second)
            T.copy(first, Y[0:80, :])
            T.copy(X[80:160, :], second)
            T.copy(second, Y[80:160, :])

    return main


def test_shared_memory_is_limited_to_64_kib_at_one_time() -> None:
    fault = fault_of(lambda: staged(True))
    assert fault.verdict is Verdict.RESOURCE_LIMIT
    assert "81920 bytes" in fault.message
    x = torch.randn(160, 128)
    y = torch.zeros_like(x)
    staged(False)(x, y)
    assert torch.equal(x, y)


def test_compiled_code_is_cached_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    program = gather().program
    ran: list[Any] = []
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: ran.append(a))
    again = tilelang_c.CpuKernel(program, "again")
    assert not ran
    assert again.get_kernel_source() == program.text


def test_damaged_code_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'extern "C" int tile_run(void**, const int64_t*, const double*, char*) { return 7; }\n'
    monkeypatch.setattr(tilelang_c, "CACHE", tmp_path / "good")
    tilelang_c._compile(text)
    (good,) = (tmp_path / "good").iterdir()
    # In another folder: what this process has loaded, it would not read again.
    damaged = tmp_path / "damaged" / good.name
    damaged.parent.mkdir()
    damaged.write_bytes(good.read_bytes()[:100])
    monkeypatch.setattr(tilelang_c, "CACHE", damaged.parent)
    assert tilelang_c._compile(text).tile_run(None, None, None, None) == 7
    assert damaged.stat().st_size == good.stat().st_size


SUBMISSION = """
import tilelang
import tilelang.language as T

@tilelang.jit
def build(n):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            a = T.alloc_fragment((16,), "float32")
            b = T.alloc_fragment((8,), "float32")
            T.copy(X, a)
            T.copy(a, b)
    return main

def run_kernel(x):
    build(16)(x)
"""


def test_a_kernel_that_does_not_compile_gets_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run_kernel.py"
    path.write_text(SUBMISSION, encoding="utf-8")
    submission = languages.load("tilelang", path, ("x",), CPU)
    fault = fault_of(lambda: submission.run([torch.zeros(16)]))
    assert fault.verdict is Verdict.COMPILE_ERROR
    assert fault.message.startswith("run_kernel.py:13: ")
    path.write_text(SUBMISSION.replace("T.copy(a, b)", "T.call_extern('int32', 'rand')"), encoding="utf-8")
    submission = languages.load("tilelang", path, ("x",), CPU)
    fault = fault_of(lambda: submission.run([torch.zeros(16)]))
    assert fault.verdict is Verdict.COMPILE_ERROR
    assert "T.call_extern" in fault.message
    path.write_text(SUBMISSION.replace("build(16)(x)", "x.nothing"), encoding="utf-8")
    submission = languages.load("tilelang", path, ("x",), CPU)
    with pytest.raises(AttributeError):  # its own mistake, not the compiler's
        submission.run([torch.zeros(16)])


def test_without_tilelang_one_sentence_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run_kernel.py"
    path.write_text(SUBMISSION, encoding="utf-8")
    monkeypatch.setitem(__import__("sys").modules, "tilelang", None)
    with pytest.raises(KitError, match="TileLang cannot be imported"):
        languages.load("tilelang", path, ("x",), CPU)


# ---- the submission ------------------------------------------------------------------------------------------------


def ragged_error(path: Path, case: tiny_config.Case) -> float:
    """Largest error of the submission in units of the error that honest bf16 arithmetic makes."""
    arguments = tiny_config._arguments(case, "cpu")
    arguments[3].fill_(torch.nan)
    languages.load("tilelang", path, reference.ARGUMENTS, CPU).run(arguments)
    exact = reference.reference(*arguments)["output"]
    honest = (reference.honest(*arguments)["output"].double() - exact).abs().max()
    return float(((arguments[3].double() - exact).abs().max() / honest).nan_to_num(torch.inf))


@pytest.mark.parametrize("case", tiny_config.CASES, ids=lambda case: case.label.replace(" ", "-"))
def test_ragged_prefill_is_as_exact_as_honest_arithmetic(case: tiny_config.Case) -> None:
    assert ragged_error(submission_path("ragged_prefill", "tilelang"), case) < 2


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kv_head = head_0 // group", "kv_head = head_0 % num_kv_heads"),
        ("acc[i, d] *= rescale[i]", "acc[i, d] *= 1.0"),
        ("<= kv_len - q_len + token_0", "<= token_0"),
    ],
)
def test_a_broken_ragged_prefill_is_seen(tmp_path: Path, right: str, wrong: str) -> None:
    text = submission_path("ragged_prefill", "tilelang").read_text(encoding="utf-8")
    assert text.count(right) == 1
    path = tmp_path / "run_kernel.py"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    assert max(ragged_error(path, case) for case in tiny_config.CASES[1:3]) > 4
