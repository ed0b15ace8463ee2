"""ragged_prefill: the contract, and its ground truth.

Attention over a batch of sequences of different lengths, rows of all sequences stacked:

    q       bf16  (total_q, num_qo_heads, head_dim_qk)
    k       bf16  (total_kv, num_kv_heads, head_dim_qk)
    v       bf16  (total_kv, num_kv_heads, head_dim_vo)
    output  bf16  (total_q, num_qo_heads, head_dim_vo)
    qo_indptr, kv_indptr  int32  (batch_size + 1,), row offsets of each sequence

Scale 1 / sqrt(head_dim_qk); query head h reads KV head h // (num_qo_heads / num_kv_heads). With causal, query i of
q_len sees keys 0 .. kv_len - q_len + i (aligned to the bottom right). A query that sees no key gives 0. q_len and
kv_len may be 0 and differ. seq_len is an upper bound of every q_len and kv_len, not their value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tasks.common import attention

# fmt: off
ARGUMENTS = (
    "q", "k", "v", "output", "qo_indptr", "kv_indptr",
    "batch_size", "seq_len", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "causal",
)
# fmt: on
OUTPUTS = ("output",)


def _sequences(q: Tensor, k: Tensor, v: Tensor, qo_indptr: Tensor, kv_indptr: Tensor) -> Iterator[attention.Sequence]:
    for (q0, q1), (k0, k1) in zip(attention.spans(qo_indptr), attention.spans(kv_indptr), strict=True):
        yield attention.Sequence(slice(q0, q1), q[q0:q1], k[k0:k1], v[k0:k1])


def _scores(q: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, causal: int) -> int:
    pairs = zip(attention.spans(qo_indptr), attention.spans(kv_indptr), strict=True)
    return q.shape[1] * sum(attention.visible_pairs(q1 - q0, k1 - k0, bool(causal)) for (q0, q1), (k0, k1) in pairs)


def reference(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, *sizes: int
) -> dict[str, Tensor]:
    """Ground truth, float64 (float32 from 2^31 scores on), shape of `output`, whose contents are not read.

    `sizes`: the integers from batch_size to causal; only causal is used, the shapes say the rest.
    """
    sequences, causal = _sequences(q, k, v, qo_indptr, kv_indptr), sizes[-1]
    scores = _scores(q, qo_indptr, kv_indptr, causal)
    return {"output": attention.exact(output.shape, sequences, bool(causal), 1 / math.sqrt(q.shape[2]), scores)}


def honest(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, *sizes: int
) -> dict[str, Tensor]:
    """The same by careful bf16 kernel arithmetic, in bf16."""
    sequences, causal = _sequences(q, k, v, qo_indptr, kv_indptr), sizes[-1]
    return {"output": attention.honest(output.shape, sequences, bool(causal), 1 / math.sqrt(q.shape[2]))}


def workload(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, *sizes: int
) -> dict[str, Any]:
    """Two flops per multiply-add of a visible pair; each input read once plus the output written once, in bytes."""
    flops = 2 * _scores(q, qo_indptr, kv_indptr, sizes[-1]) * (q.shape[2] + v.shape[2])
    moved = sum(t.numel() * t.element_size() for t in (q, k, v, output, qo_indptr, kv_indptr))
    return {"flops": flops, "bytes": moved, "dtype": "bf16"}
