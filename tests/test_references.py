"""The ground truth of every task against an independent double loop in float64, and its yardstick against rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.common import attention
from tasks.fused_moe import reference as moe
from tasks.kvcache_decode import reference as kvcache
from tasks.mla_decode import reference as mla
from tasks.paged_prefill import reference as paged
from tasks.ragged_prefill import reference as ragged

BF16, I32 = torch.bfloat16, torch.int32
LENGTH = st.sampled_from((0, 1, 2, 5, 7, 8, 9, 13))
HEADS = st.sampled_from(((1, 1), (2, 2), (4, 2), (3, 1), (6, 2), (5, 1)))
SEED = st.integers(0, 2**31)
QUICK = settings(max_examples=20)


def rows_of(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention of one sequence, one row and head at a time, straight from the definition."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for i in range(q.shape[0]):
        seen = len(k) - len(q) + i + 1 if causal else len(k)
        if seen <= 0:
            continue
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            scores = [scale * float(torch.dot(q[i, h], k[j, kv])) for j in range(seen)]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            for j, weight in enumerate(weights):
                out[i, h] += weight / sum(weights) * v[j, kv]
    return out


def check_both(module: Any, args: list[Any], expected: Tensor) -> None:
    """reference() equals `expected`; honest() is off by no more than its roundings; neither touches the arguments."""
    before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    (truth,), (honest,) = module.reference(*args).values(), module.honest(*args).values()
    output = args[module.ARGUMENTS.index(module.OUTPUTS[0])]
    assert truth.shape == honest.shape == output.shape
    assert truth.dtype is torch.float64
    assert honest.dtype is output.dtype
    torch.testing.assert_close(truth, expected, rtol=1e-12, atol=1e-12)
    # bf16 keeps 8 bits: P and the output are each off by at most 2^-9 of their size; P weighs values of any size.
    largest = expected.abs().max() if expected.numel() else torch.tensor(0.0)
    values = max(
        (float(a.float().nan_to_num().abs().max()) for a in args if a is not output and _floating(a)), default=0.0
    )
    error = (honest.double() - expected).abs()
    assert bool((error <= 2**-9 * (largest + values) + 1e-6).all())
    for now, then in zip(args, before, strict=True):
        if isinstance(now, Tensor):
            assert torch.equal(now.nan_to_num(), then.nan_to_num())


def _floating(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.is_floating_point() and arg.numel() > 0


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(BF16)


def _indptr(lengths: list[int]) -> Tensor:
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=I32)


def _paged(generator: torch.Generator, rows: list[Tensor], page: int) -> tuple[Tensor, list[list[int]]]:
    """Sequences scattered over a pool of pages in random order; what no token owns is NaN."""
    counts = [-(-len(own) // page) for own in rows]
    pool = torch.full((sum(counts) + 2, page, *rows[0].shape[1:]), torch.nan, dtype=rows[0].dtype)
    free = torch.randperm(len(pool), generator=generator).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    for own, table in zip(rows, tables, strict=True):
        for position, value in enumerate(own):
            pool[table[position // page], position % page] = value
    return pool, tables


@QUICK
@given(
    lengths=st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=4),
    heads=HEADS,
    dims=st.sampled_from(((8, 8), (12, 8), (4, 16))),
    causal=st.booleans(),
    score_bytes=st.sampled_from((1, 700, attention.SCORE_BYTES)),  # one row at a time, a few, all
    seed=SEED,
)
def test_ragged_prefill_reference(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    causal: bool,
    score_bytes: int,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    q_lens, kv_lens = [n for n, _ in lengths], [n for _, n in lengths]
    q = _normal(draw, sum(q_lens), heads[0], dims[0])
    k, v = (_normal(draw, sum(kv_lens), heads[1], dim) for dim in dims)
    parts = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True)
    expected = torch.cat([rows_of(*part, causal, 1 / math.sqrt(dims[0])) for part in parts])
    output = torch.full((sum(q_lens), heads[0], dims[1]), torch.nan, dtype=BF16)
    sizes = [len(lengths), max(q_lens + kv_lens), *heads, *dims, int(causal)]
    args = [q, k, v, output, _indptr(q_lens), _indptr(kv_lens), *sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SCORE_BYTES", score_bytes)
        check_both(ragged, args, expected)


@QUICK
@given(
    lengths=st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=4),
    heads=HEADS,
    page=st.sampled_from((1, 3, 4, 8)),
    causal=st.booleans(),
    seed=SEED,
)
def test_paged_prefill_reference(
    lengths: list[tuple[int, int]], heads: tuple[int, int], page: int, causal: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    q_lens, kv_lens = [n for n, _ in lengths], [n for _, n in lengths]
    q = _normal(draw, sum(q_lens), heads[0], 8)
    kv = [_normal(draw, n, 2, heads[1], 8) for n in kv_lens]
    parts = zip(q.split(q_lens), kv, strict=True)
    expected = torch.cat([rows_of(rows, own[:, 0], own[:, 1], causal, 1 / math.sqrt(8)) for rows, own in parts])
    pool, tables = _paged(draw, kv, page)
    kv_data = pool.transpose(1, 2).contiguous()  # (pages, 2, page, kv_heads, 8)
    indices = torch.tensor([entry for table in tables for entry in table], dtype=I32)
    last = torch.tensor([(n - 1) % page + 1 if n else 3 for n in kv_lens], dtype=I32)
    tables_ = [_indptr(q_lens), _indptr([len(table) for table in tables]), indices, last]
    sizes = [len(lengths), max(q_lens + kv_lens), *heads, 8, page, int(causal)]
    check_both(paged, [q, kv_data, torch.full_like(q, torch.nan), *tables_, *sizes], expected)


@QUICK
@given(
    lengths=st.lists(LENGTH, min_size=1, max_size=4),
    heads=st.integers(1, 5),
    page=st.sampled_from((1, 4)),
    reserved=st.integers(0, 1),
    seed=SEED,
)
def test_mla_decode_reference(lengths: list[int], heads: int, page: int, reserved: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    latent, rope, batch = 16, 4, len(lengths)
    q_nope, q_pe = _normal(draw, batch, heads, latent), _normal(draw, batch, heads, rope)
    both = [_normal(draw, n, latent + rope) for n in lengths]
    q = torch.cat((q_nope, q_pe), -1)
    expected = torch.cat(
        [
            rows_of(q[b : b + 1], own[:, None], own[:, None, :latent], False, 1 / math.sqrt(latent + rope))
            for b, own in enumerate(both)
        ]
    )
    pool, tables = _paged(draw, both, page)
    tables = [table + [0] * reserved for table in tables]
    indices = torch.tensor([entry for table in tables for entry in table], dtype=I32)
    args = [
        *(q_nope, q_pe, pool[..., :latent].contiguous(), pool[..., latent:].contiguous()),
        *(torch.full_like(q_nope, torch.nan), torch.arange(batch + 1, dtype=I32)),
        *(_indptr([len(table) for table in tables]), indices, torch.tensor(lengths, dtype=I32)),
        *(batch, max(lengths), heads, latent, rope, page, 0),
    ]
    check_both(mla, args, expected)


@QUICK
@given(lengths=st.lists(LENGTH, min_size=1, max_size=4), heads=HEADS, page=st.sampled_from((1, 3, 4)), seed=SEED)
def test_kvcache_decode_reference(lengths: list[int], heads: tuple[int, int], page: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    q = _normal(draw, batch, 1, heads[0], 8)
    kv = [_normal(draw, n, 2, heads[1], 8) for n in lengths]
    scale = 1 / math.sqrt(8)
    expected = torch.stack([rows_of(q[b], own[:, 0], own[:, 1], False, scale) for b, own in enumerate(kv)])
    pool, tables = _paged(draw, kv, page)
    width = max(len(table) for table in tables) + 1
    block_table = torch.randint(len(pool), (batch, width), generator=draw, dtype=I32)
    for row, table in zip(block_table, tables, strict=True):
        row[: len(table)] = torch.tensor(table, dtype=I32)
    caches = [pool[:, :, part].contiguous() for part in (0, 1)]
    sizes = [batch, width * page, 1, *heads, 8, page, len(pool), 0]
    output = torch.full_like(q, torch.nan)
    check_both(kvcache, [q, *caches, output, torch.tensor(lengths, dtype=I32), block_table, *sizes], expected)


@settings(max_examples=6)
@given(tiles=st.lists(st.integers(0, 2), min_size=1, max_size=3), seed=SEED)
def test_fused_moe_reference(tiles: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows, n, k = 128 * len(tiles), 128, 128
    a = torch.randint(-128, 128, (rows, k), generator=draw).to(torch.int8)
    b = torch.randint(-128, 128, (3, n, k), generator=draw).to(torch.int8)
    scale_a, scale_b, weights = (torch.rand(shape, generator=draw) for shape in ((rows,), (3, n), (rows,)))
    experts = torch.tensor(tiles, dtype=I32)
    args = [a, b, scale_a, scale_b, weights, torch.randperm(rows, generator=draw).int(), experts, 8]
    out = torch.full((rows, n), torch.nan, dtype=BF16)
    truth, honest = moe.reference(*args, out)["out"], moe.honest(*args, out)["out"]
    for row in (0, 17, 127, rows - 1):
        expert = tiles[row // 128]
        for column in (0, 1, 126, 127):
            total = sum(x * y for x, y in zip(a[row].tolist(), b[expert, column].tolist(), strict=True))
            value = torch.tensor(total).float() * scale_a[row] * scale_b[expert, column] * weights[row]
            assert truth[row, column] == value
            assert honest[row, column] == value.to(BF16)
    assert torch.equal(honest, truth.to(BF16))


def _off_by(amount: float) -> Callable[..., dict[str, Tensor]]:
    return lambda *args: {"output": ragged.reference(*args)["output"] + amount}


def _writing(*args: Any) -> dict[str, Tensor]:
    args[0].zero_()
    return ragged.reference(*args)


@pytest.mark.parametrize(
    ("function", "fake"),
    [
        ("reference", _off_by(1e-9)),
        ("reference", lambda *args: ragged.honest(*args)),
        ("reference", lambda *args: {"output": ragged.reference(*args)["output"][:-1]}),
        ("reference", lambda *args: ragged.reference(*args[:-1], 1 - args[-1])),
        ("honest", _off_by(0.0)),
        ("honest", lambda *args: {"output": _off_by(0.1)(*args)["output"].to(BF16)}),
        ("honest", lambda *args: {"output": _writing(*args)["output"].to(BF16)}),
    ],
    ids=["off by 1e-9", "rounded", "short", "mask", "not rounded", "off by 0.1", "writes q"],
)
def test_the_checker_above_rejects(function: str, fake: Callable[..., dict[str, Tensor]]) -> None:
    draw = torch.Generator().manual_seed(9)
    q, k, v = (_normal(draw, 7, 2, 8) for _ in range(3))
    args = [q, k, v, torch.empty_like(q), _indptr([7]), _indptr([7]), 1, 7, 2, 2, 8, 8, 1]
    expected = rows_of(q, k, v, True, 1 / math.sqrt(8))
    check_both(ragged, args, expected)
    wrong = SimpleNamespace(**{**vars(ragged), function: fake})
    with pytest.raises(AssertionError):
        check_both(wrong, args, expected)


def test_honest_rounds_p_but_not_its_sum() -> None:
    # Scores 0 and -1, values 0 and 1: o = bf16(bf16(e^-1) / (1 + e^-1)) = 137 / 512; without rounding P, 138 / 512.
    q, k = torch.tensor([[[1.0]]]), torch.tensor([[[0.0]], [[-1.0]]])
    v = torch.tensor([[[0.0]], [[1.0]]])
    tensors = [tensor.to(BF16) for tensor in (q, k, v, torch.zeros(1, 1, 1))]
    args = [*tensors, _indptr([1]), _indptr([2]), 1, 2, 1, 1, 1, 1, 0]
    assert ragged.honest(*args)["output"].item() == 137 / 512
    assert ragged.reference(*args)["output"].to(BF16).item() == 138 / 512


def test_moe_chunks_rows_of_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-128, 128, shape, generator=draw).to(torch.int8) for shape in ((512, 128), (2, 128, 128)))
    args = [a, b, torch.rand(512), torch.rand(2, 128), torch.rand(512), None, torch.tensor([1, 0, 1, 1]), 8]
    out = torch.empty(512, 128, dtype=BF16)
    whole = moe.reference(*args, out)["out"]
    monkeypatch.setattr(moe, "ROWS_AT_ONCE", 100)  # not even a multiple of the tile
    assert torch.equal(moe.reference(*args, out)["out"], whole)


def test_visible_pairs_counts_what_the_mask_shows() -> None:
    for q_len in range(6):
        for kv_len in range(6):
            shown = sum(j <= kv_len - q_len + i for i in range(q_len) for j in range(kv_len))
            assert attention.visible_pairs(q_len, kv_len, True) == shown
            assert attention.visible_pairs(q_len, kv_len, False) == q_len * kv_len


def test_large_cases_fall_back_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (_normal(draw, 9, 2, 8) for _ in range(3))
    args = [q, k, v, torch.empty_like(q), _indptr([9]), _indptr([9]), 1, 9, 2, 2, 8, 8, 1]
    exact = ragged.reference(*args)["output"]
    monkeypatch.setattr(attention, "FLOAT64_SCORES", 90)  # the case has 2 heads x 45 pairs
    rough = ragged.reference(*args)["output"]
    assert (exact.dtype, rough.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(rough.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", ["legacy on", "legacy off", "newer on", "untouched"])
def test_tf32_is_off_inside_and_restored(before: str) -> None:
    matmul = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")
    if before == "newer on" and not newer:
        pytest.skip("this torch has no fp32_precision")

    def state() -> tuple[Any, ...]:
        return (matmul.fp32_precision,) if newer else (matmul.allow_tf32,)

    untouched = state()
    try:
        if before == "newer on":
            matmul.fp32_precision = "tf32"
        elif before != "untouched":
            matmul.allow_tf32 = before == "legacy on"
        then = state()
        with attention.full_float32():
            assert matmul.allow_tf32 is False
            assert not newer or matmul.fp32_precision == "ieee"
        assert state() == then
        with pytest.raises(ZeroDivisionError), attention.full_float32():
            _ = 1 // 0
        assert state() == then
    finally:
        matmul.allow_tf32 = False
        if newer:
            matmul.fp32_precision = untouched[0]


def test_an_empty_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sequences"):
        attention.honest(torch.Size((0, 1, 8)), [], False, 1.0)


def _moe_args() -> list[Any]:
    a, b = torch.zeros(256, 128, dtype=torch.int8), torch.zeros(4, 256, 128, dtype=torch.int8)
    rows, ids = torch.zeros(256), torch.zeros(256, dtype=I32)
    return [
        a,
        b,
        rows,
        torch.zeros(4, 256),
        rows,
        ids,
        torch.tensor([2, 2], dtype=I32),
        8,
        torch.zeros(256, 256).to(BF16),
    ]


def _ragged_args() -> list[Any]:
    q, k, v = torch.zeros(5, 4, 8), torch.zeros(8, 2, 8), torch.zeros(8, 2, 4)
    tensors = [tensor.to(BF16) for tensor in (q, k, v, torch.zeros(5, 4, 4))]
    return [*tensors, _indptr([2, 3]), _indptr([6, 2]), 2, 6, 4, 2, 8, 4, 1]


def _paged_args() -> list[Any]:
    q, pool = torch.zeros(5, 4, 8).to(BF16), torch.zeros(6, 2, 4, 2, 8).to(BF16)
    tables = [_indptr([2, 3]), _indptr([2, 1]), torch.arange(3, dtype=I32), torch.tensor([2, 2], dtype=I32)]
    return [q, pool, q.clone(), *tables, 2, 6, 4, 2, 8, 4, 1]


def _mla_args() -> list[Any]:
    q, pe, ckv, kpe = (torch.zeros(shape).to(BF16) for shape in ((2, 3, 16), (2, 3, 4), (9, 1, 16), (9, 1, 4)))
    tables = [torch.arange(3, dtype=I32), _indptr([6, 2]), torch.arange(8, dtype=I32), torch.tensor([6, 2], dtype=I32)]
    return [q, pe, ckv, kpe, q.clone(), *tables, 2, 6, 3, 16, 4, 1, 0]


def _kvcache_args() -> list[Any]:
    q, pool = torch.zeros(2, 1, 4, 8).to(BF16), torch.zeros(6, 4, 2, 8).to(BF16)
    tables = [torch.tensor([6, 2], dtype=I32), torch.zeros(2, 3, dtype=I32)]
    return [q, pool, pool.clone(), q.clone(), *tables, 2, 12, 1, 4, 2, 8, 4, 6, 0]


@pytest.mark.parametrize(
    ("module", "make", "flops", "moved"),
    [
        # Causal, lengths (2, 6) and (3, 2): rows see 5 + 6 and 0 + 1 + 2 keys, 14 pairs, 4 heads, dims 8 + 4.
        (ragged, _ragged_args, 2 * 14 * 4 * 12, 2 * (5 * 4 * 12 + 8 * 2 * 12) + 4 * 6),
        # The same lengths in pages of 4: 8 live tokens of 2 x 2 x 8 values, tables of 3 + 3 + 3 + 2 entries.
        (paged, _paged_args, 2 * 14 * 4 * 16, 2 * (2 * 5 * 4 * 8 + 8 * 32) + 4 * 11),
        # 8 tokens, 3 heads, scores over 16 + 4 and values over 16; tables of 3 + 3 + 8 + 2 entries.
        (mla, _mla_args, 2 * 8 * 3 * 36, 2 * (2 * 3 * 36 + 8 * 20) + 4 * 16),
        # 8 tokens, 4 heads, dim 8; 2 + 1 page ids and 2 lengths.
        (kvcache, _kvcache_args, 2 * 8 * 4 * 16, 2 * (2 * 2 * 4 * 8 + 8 * 2 * 2 * 8) + 4 * 5),
        # One expert of four is used.
        (moe, _moe_args, 2 * 256 * 256 * 128, 256 * 128 + 256 * (128 + 4) + 4 * (2 * 256 + 2) + 2 * 256 * 256),
    ],
    ids=["ragged", "paged", "mla", "kvcache", "moe"],
)
def test_workload_counts_true_lengths(module: Any, make: Callable[[], list[Any]], flops: int, moved: int) -> None:
    dtype = "int8" if module is moe else "bf16"
    counted = module.workload(*make())
    parts = counted.pop("parts", {})
    assert counted == {"flops": flops, "bytes": moved, "dtype": dtype}
    assert sum(parts.values()) < moved
