"""kvcache_decode: the contract, and its ground truth.

One query token per sequence attends to a paged KV cache:

    q, output                     bf16   (batch_size, seqlen_q = 1, num_heads, headdim)
    k_cache_paged, v_cache_paged  bf16   (num_blocks, page_block_size, num_heads_k, headdim)
    cache_seqlens                 int32  (batch_size,), tokens of each sequence, 0 to seqlen_k
    block_table                   int32  (batch_size, num_blocks // batch_size), page of each logical page

Scale 1 / sqrt(headdim); query head h reads KV head h // (num_heads / num_heads_k). A sequence of length 0 gives 0.
Entries of block_table past a sequence's last page are legal page ids that must not be read into the result; slots past
the last token and pages that no sequence owns may hold anything, NaN included. seqlen_k is an upper bound of
cache_seqlens. causal changes nothing for a single query.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tasks.common import attention

# fmt: off
ARGUMENTS = (
    "q", "k_cache_paged", "v_cache_paged", "output", "cache_seqlens", "block_table",
    "batch_size", "seqlen_k", "seqlen_q", "num_heads", "num_heads_k", "headdim", "page_block_size", "num_blocks",
    "causal",
)
# fmt: on
OUTPUTS = ("output",)


def _sequences(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor
) -> Iterator[attention.Sequence]:
    page = k_cache.shape[1]
    for b, length in enumerate(cache_seqlens.tolist()):
        ids = block_table[b, : -(-length // page)].long()
        k, v = (cache[ids].flatten(0, 1)[:length] for cache in (k_cache, v_cache))  # (length, kv_heads, headdim)
        yield attention.Sequence(slice(b, b + 1), q[b], k, v)


def reference(
    q: Tensor,
    k_cache_paged: Tensor,
    v_cache_paged: Tensor,
    output: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    *sizes: int,
) -> dict[str, Tensor]:
    """Ground truth, float64 (float32 from 2^31 scores on), shape of `output`, whose contents are not read.

    `sizes`: the integers from batch_size to causal; none is used, the shapes say it all.
    """
    sequences = _sequences(q, k_cache_paged, v_cache_paged, cache_seqlens, block_table)
    scores = q.shape[2] * int(cache_seqlens.sum())
    return {"output": attention.exact(output.shape, sequences, False, 1 / math.sqrt(q.shape[3]), scores)}


def honest(
    q: Tensor,
    k_cache_paged: Tensor,
    v_cache_paged: Tensor,
    output: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    *sizes: int,
) -> dict[str, Tensor]:
    """The same by careful bf16 kernel arithmetic, in bf16."""
    sequences = _sequences(q, k_cache_paged, v_cache_paged, cache_seqlens, block_table)
    return {"output": attention.honest(output.shape, sequences, False, 1 / math.sqrt(q.shape[3]))}


def workload(
    q: Tensor,
    k_cache_paged: Tensor,
    v_cache_paged: Tensor,
    output: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    *sizes: int,
) -> dict[str, Any]:
    """Two flops per multiply-add; q, live tokens, their page ids and lengths read once, output written once."""
    _, page, kv_heads, dim = k_cache_paged.shape
    lengths = cache_seqlens.tolist()
    live = sum(lengths) * 2 * kv_heads * dim * k_cache_paged.element_size()
    ids = sum(-(-length // page) for length in lengths) * block_table.element_size()
    moved = live + ids + sum(t.numel() * t.element_size() for t in (q, output, cache_seqlens))
    return {"flops": 4 * q.shape[2] * sum(lengths) * dim, "bytes": moved, "dtype": "bf16"}


def peer(*args: Any) -> tuple[str, Callable[[], object]]:
    """FlashInfer's decode kernel on this case, planned beforehand: what is timed where flash-attn is not installed.

    The call writes to a tensor of its own.
    """
    return "FlashInfer decode", _flashinfer(*args)


def yardsticks(*args: Any) -> dict[str, Callable[[], object]]:
    """What is timed alone beside the peer: the class of the published baseline, which asks for num_splits=1."""
    if importlib.util.find_spec("flashinfer") is None:
        return {}
    name = "FlashInfer decode, one block per sequence and KV head (num_splits=1)"
    return {name: _flashinfer(*args, disable_split_kv=True)}


def _flashinfer(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    *sizes: int,
    disable_split_kv: bool = False,
) -> Callable[[], object]:
    """`sizes`: the integers from batch_size to causal."""
    import flashinfer

    _, _, _, heads, kv_heads, headdim, page, *_ = sizes
    lengths = cache_seqlens.cpu()
    counts = (lengths + page - 1) // page
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    used = torch.arange(block_table.shape[1]) < counts[:, None]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout="NHD", use_tensor_cores=False)
    options = {"q_data_type": q.dtype, "kv_data_type": k_cache.dtype}
    options |= {"disable_split_kv": True} if disable_split_kv else {}  # an option that older versions lack
    last = (lengths - 1) % page + 1
    wrapper.plan(indptr, block_table[used.to(block_table.device)], last, heads, kv_heads, headdim, page, **options)
    rows, result = q[:, 0], torch.empty_like(q[:, 0])
    return lambda: wrapper.run(rows, (k_cache, v_cache), out=result)
