"""Attention worked out plainly, one sequence at a time: the ground truth of the four attention tasks.

Every task's reference.py turns its own layout (rows, pages, page tables) into sequences of (q, k, v) and calls `exact`
or `honest`; nothing else here knows about layouts. All buffers of scores are bounded by SCORE_BYTES, so the judge's
largest case (16 sequences of 16384 tokens, 32 heads: 1.4e11 scores) fits next to its own tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SCORE_BYTES = 256 << 20  # one buffer of scores; at most two such buffers live at a time
FLOAT64_SCORES = 1 << 31  # below this many scores the ground truth is float64, above it float32 without TF32


class Sequence(NamedTuple):
    """One sequence: `rows` says which rows of the output are its own, flattened to (total_q, heads, dim_v)."""

    rows: slice
    q: Tensor  # (q_len, heads, dim_qk)
    k: Tensor  # (kv_len, kv_heads, dim_qk)
    v: Tensor  # (kv_len, kv_heads, dim_v)


def spans(indptr: Tensor) -> list[tuple[int, int]]:
    """(first, last + 1) of every sequence, from row offsets of shape (batch_size + 1,)."""
    offsets = indptr.tolist()
    return list(itertools.pairwise(offsets))


def visible_pairs(q_len: int, kv_len: int, causal: bool) -> int:
    """How many (query, key) pairs of a sequence are scored; causal is aligned to the bottom right."""
    if not causal:
        return q_len * kv_len
    rows = min(q_len, kv_len)  # rows that see a key at all; they see kv_len - rows + 1, ..., kv_len keys
    return rows * (2 * kv_len - rows + 1) // 2


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """float32 products without TF32, whatever a baseline left switched on; the setting is put back afterwards."""
    matmul = torch.backends.cuda.matmul
    newer = getattr(matmul, "fp32_precision", None)  # since torch 2.9; the older flag then raises after mixed use
    try:
        older = matmul.allow_tf32
    except RuntimeError:
        older = None
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        if older is not None:
            matmul.allow_tf32 = older
        if newer is not None:
            matmul.fp32_precision = newer


def exact(out_shape: torch.Size, sequences: Iterable[Sequence], causal: bool, scale: float, scores: int) -> Tensor:
    """Ground truth of shape `out_shape` = (..., heads, dim_v): float64, or float32 from FLOAT64_SCORES scores on.

    `scores` counts (query, key, head) triples over all sequences. Rows that see no key are 0.
    """
    dtype = torch.float64 if scores < FLOAT64_SCORES else torch.float32
    return _solve(out_shape, sequences, causal, scale, dtype, dtype)


def honest(out_shape: torch.Size, sequences: Iterable[Sequence], causal: bool, scale: float) -> Tensor:
    """What careful bf16 kernel arithmetic gives, in bf16: the yardstick of the strict check.

    bf16 operands, float32 accumulation, unnormalised P = exp(s - row maximum) rounded to bf16 before P V, the row sum
    in float32 of the unrounded P, the output rounded once.
    """
    return _solve(out_shape, sequences, causal, scale, torch.float32, torch.bfloat16)


def _solve(
    out_shape: torch.Size,
    sequences: Iterable[Sequence],
    causal: bool,
    scale: float,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    out = None
    with full_float32():
        for sequence in sequences:
            if out is None:
                out = torch.zeros(out_shape, dtype=out_dtype, device=sequence.q.device)
            rows = out.view(-1, *out_shape[-2:])[sequence.rows]  # (q_len, heads, dim_v)
            _attend(sequence, rows, causal, scale, dtype, round_p=out_dtype is torch.bfloat16)
    if out is None:
        raise ValueError("attention over a batch of no sequences")
    return out


def _attend(sequence: Sequence, out: Tensor, causal: bool, scale: float, dtype: torch.dtype, round_p: bool) -> None:
    _, q, k, v = sequence
    (q_len, heads, dim_qk), (kv_len, kv_heads, dim_v) = q.shape, v.shape
    if q_len == 0 or kv_len == 0:
        return
    group = heads // kv_heads
    keys = k.to(dtype).permute(1, 2, 0)  # (kv_heads, dim_qk, kv_len)
    values = v.to(dtype).transpose(0, 1)  # (kv_heads, kv_len, dim_v)
    chunk = max(1, SCORE_BYTES // (dtype.itemsize * heads * kv_len))
    first = max(0, q_len - kv_len) if causal else 0  # rows before it see no key
    for start in range(first, q_len, chunk):
        stop = min(start + chunk, q_len)
        n, seen = stop - start, kv_len - q_len + stop if causal else kv_len
        tile = q[start:stop].to(dtype).view(n, kv_heads, group, dim_qk).transpose(0, 1)
        p = (tile.reshape(kv_heads, n * group, dim_qk) @ keys[:, :, :seen]).mul_(scale)  # (kv_heads, n * group, seen)
        if causal and n > 1:
            # Row r of the chunk is blind to its last n - 1 - r keys: only the last n - 1 columns need a mask.
            hidden = torch.ones(n, n - 1, dtype=torch.bool, device=q.device).triu()
            p.view(kv_heads, n, group, seen)[..., seen - n + 1 :].masked_fill_(hidden[:, None, :], -torch.inf)
        p.sub_(p.amax(-1, keepdim=True)).exp_()
        total = p.sum(-1, keepdim=True)
        if round_p:
            p = p.to(torch.bfloat16).to(dtype)
        o = (p @ values[:, :seen]) / total
        out[start:stop] = o.view(kv_heads, n, group, dim_v).transpose(0, 1).reshape(n, heads, dim_v)
