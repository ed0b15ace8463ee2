"""mla_decode: the contract, and its ground truth.

One query token per sequence attends to a paged latent cache; the latent part serves as key and as value:

    q_nope, output  bf16   (batch_size, num_heads, head_dim_ckv = 512)
    q_pe            bf16   (batch_size, num_heads, head_dim_kpe = 64)
    ckv             bf16   (num_pages, page_size, 512)
    kpe             bf16   (num_pages, page_size, 64)
    q_indptr        int32  (batch_size + 1,) = 0, 1, 2, ...
    kv_indptr       int32  (batch_size + 1,), offsets into kv_indices, in pages
    kv_indices      int32  (kv_indptr[-1],), physical page of each logical page
    kv_lens         int32  (batch_size,), tokens of each sequence

score = (q_nope . ckv + q_pe . kpe) / sqrt(512 + 64), softmax over the kv_lens[b] tokens, output = p . ckv. A sequence
of length 0 gives 0. kv_lens decides: kv_indptr may reserve more pages than the tokens fill. Slots past the last token
and pages that no sequence owns may hold anything, NaN included. seq_len is an upper bound of kv_lens. causal changes
nothing for a single query.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tasks.common import attention

# fmt: off
ARGUMENTS = (
    "q_nope", "q_pe", "ckv", "kpe", "output", "q_indptr", "kv_indptr", "kv_indices", "kv_lens",
    "batch_size", "seq_len", "num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal",
)
# fmt: on
OUTPUTS = ("output",)


def _sequences(
    q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_lens: Tensor
) -> Iterator[attention.Sequence]:
    for b, ((p0, _), length) in enumerate(zip(attention.spans(kv_indptr), kv_lens.tolist(), strict=True)):
        pages = kv_indices[p0 : p0 - (-length // ckv.shape[1])].long()
        latent, rope = (pool[pages].flatten(0, 1)[:length].unsqueeze(1) for pool in (ckv, kpe))  # (length, 1, dim)
        q = torch.cat((q_nope[b : b + 1], q_pe[b : b + 1]), dim=2)  # (1, heads, 576)
        yield attention.Sequence(slice(b, b + 1), q, torch.cat((latent, rope), dim=2), latent)


def _scale(q_nope: Tensor, q_pe: Tensor) -> float:
    return 1 / math.sqrt(q_nope.shape[2] + q_pe.shape[2])


def reference(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    output: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_lens: Tensor,
    *sizes: int,
) -> dict[str, Tensor]:
    """Ground truth, float64 (float32 from 2^31 scores on), shape of `output`, whose contents are not read.

    `sizes`: the integers from batch_size to causal; none is used, the shapes say it all.
    """
    sequences = _sequences(q_nope, q_pe, ckv, kpe, kv_indptr, kv_indices, kv_lens)
    scores = q_nope.shape[1] * int(kv_lens.sum())
    return {"output": attention.exact(output.shape, sequences, False, _scale(q_nope, q_pe), scores)}


def honest(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    output: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_lens: Tensor,
    *sizes: int,
) -> dict[str, Tensor]:
    """The same by careful bf16 kernel arithmetic, in bf16."""
    sequences = _sequences(q_nope, q_pe, ckv, kpe, kv_indptr, kv_indices, kv_lens)
    return {"output": attention.honest(output.shape, sequences, False, _scale(q_nope, q_pe))}


def workload(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    output: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_lens: Tensor,
    *sizes: int,
) -> dict[str, Any]:
    """Two flops per multiply-add; queries, live tokens and tables read once, output written once."""
    tokens, heads, latent, rope = int(kv_lens.sum()), q_nope.shape[1], ckv.shape[2], kpe.shape[2]
    whole = (q_nope, q_pe, output, q_indptr, kv_indptr, kv_indices, kv_lens)
    moved = tokens * (latent + rope) * ckv.element_size() + sum(t.numel() * t.element_size() for t in whole)
    return {"flops": 2 * heads * tokens * (2 * latent + rope), "bytes": moved, "dtype": "bf16"}
