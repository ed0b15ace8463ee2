"""paged_prefill: the contract, and its ground truth.

Attention over a batch of sequences whose keys and values lie in pages of one pool:

    q, output     bf16   (total_q, num_qo_heads, head_dim)
    kv_data       bf16   (num_pages, 2, page_block_size, num_kv_heads, head_dim), [:, 0] keys, [:, 1] values
    qo_indptr     int32  (batch_size + 1,), query rows of each sequence
    kv_indptr     int32  (batch_size + 1,), offsets into kv_indices, in pages
    kv_indices    int32  (kv_indptr[-1],), physical page of each logical page
    last_page_len int32  (batch_size,), valid tokens in a sequence's last page

Scale 1 / sqrt(head_dim); query head h reads KV head h // (num_qo_heads / num_kv_heads). With causal, query i of q_len
sees keys 0 .. kv_len - q_len + i. A query that sees no key gives 0. A sequence without pages has no keys, whatever its
last_page_len. Slots past the last token and pages that no sequence owns may hold anything, NaN included. seq_len is an
upper bound of every q_len and kv_len.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tasks.common import attention

# fmt: off
ARGUMENTS = (
    "q", "kv_data", "output", "qo_indptr", "kv_indptr", "kv_indices", "last_page_len",
    "batch_size", "seq_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_block_size", "causal",
)
# fmt: on
OUTPUTS = ("output",)


def kv_lengths(kv_indptr: Tensor, last_page_len: Tensor, page_size: int) -> list[int]:
    """Tokens of each sequence."""
    pages = [end - start for start, end in attention.spans(kv_indptr)]
    return [(n - 1) * page_size + last if n else 0 for n, last in zip(pages, last_page_len.tolist(), strict=True)]


def _sequences(
    q: Tensor, kv_data: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, last_page_len: Tensor
) -> Iterator[attention.Sequence]:
    lengths = kv_lengths(kv_indptr, last_page_len, kv_data.shape[2])
    for (q0, q1), (p0, p1), length in zip(attention.spans(qo_indptr), attention.spans(kv_indptr), lengths, strict=True):
        pages = kv_indices[p0:p1].long()
        k, v = (kv_data[pages, part].flatten(0, 1)[:length] for part in (0, 1))  # (kv_len, kv_heads, dim)
        yield attention.Sequence(slice(q0, q1), q[q0:q1], k, v)


def _scores(
    q: Tensor, kv_data: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, last_page_len: Tensor, causal: int
) -> int:
    lengths = kv_lengths(kv_indptr, last_page_len, kv_data.shape[2])
    pairs = zip(attention.spans(qo_indptr), lengths, strict=True)
    return q.shape[1] * sum(attention.visible_pairs(q1 - q0, n, bool(causal)) for (q0, q1), n in pairs)


def reference(
    q: Tensor,
    kv_data: Tensor,
    output: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    *sizes: int,
) -> dict[str, Tensor]:
    """Ground truth, float64 (float32 from 2^31 scores on), shape of `output`, whose contents are not read.

    `sizes`: the integers from batch_size to causal; only causal is used, the shapes say the rest.
    """
    sequences, causal = _sequences(q, kv_data, qo_indptr, kv_indptr, kv_indices, last_page_len), sizes[-1]
    scores = _scores(q, kv_data, qo_indptr, kv_indptr, last_page_len, causal)
    return {"output": attention.exact(output.shape, sequences, bool(causal), 1 / math.sqrt(q.shape[2]), scores)}


def honest(
    q: Tensor,
    kv_data: Tensor,
    output: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    *sizes: int,
) -> dict[str, Tensor]:
    """The same by careful bf16 kernel arithmetic, in bf16."""
    sequences, causal = _sequences(q, kv_data, qo_indptr, kv_indptr, kv_indices, last_page_len), sizes[-1]
    return {"output": attention.honest(output.shape, sequences, bool(causal), 1 / math.sqrt(q.shape[2]))}


def workload(
    q: Tensor,
    kv_data: Tensor,
    output: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    *sizes: int,
) -> dict[str, Any]:
    """Two flops per multiply-add of a visible pair; q, live tokens and tables read once, output written once."""
    scores = _scores(q, kv_data, qo_indptr, kv_indptr, last_page_len, sizes[-1])
    _, _, page_size, kv_heads, dim = kv_data.shape
    live = sum(kv_lengths(kv_indptr, last_page_len, page_size)) * 2 * kv_heads * dim * kv_data.element_size()
    whole = (q, output, qo_indptr, kv_indptr, kv_indices, last_page_len)
    moved = live + sum(t.numel() * t.element_size() for t in whole)
    return {"flops": 4 * scores * dim, "bytes": moved, "dtype": "bf16"}
