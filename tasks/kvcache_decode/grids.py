"""Grids for kvcache_decode: FlashInfer's paged decode, and flash-attention's KV cache for each headdim.

Conventions of the published package where the tutorial's columns leave a choice: bf16, one query per sequence, full
caches, pages of 16 tokens in random order, num_splits=1. The headdim grids have pages of 256, since flash-attn outside
MACA takes no smaller ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tasks.common.grid import FIGURES, SEED, Grid, Library, Point, axis, cross

if TYPE_CHECKING:
    from torch import Tensor

HEADDIMS = (32, 64, 96, 128, 160, 192, 224, 256, 512)
PAGE, FLASH_PAGE = 16, 256
HEADS = 8  # query and KV heads of the headdim grids

_BATCHES = axis("batch_size", 1, 2, 4, 8, 16, 32, 64, 128)
_LENGTHS = axis("seq_len_kv", 512, 1024, 2048, 4096, 8192, 16384)
_HEADS = tuple(
    {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    for heads, kv_heads, dim in ((32, 8, 64), (32, 4, 128), (32, 4, 256))
)


def _arguments(batch: int, seqlen_k: int, heads: int, kv_heads: int, headdim: int, page: int, device: str) -> list[Any]:
    """A pool without spare pages, dealt to the sequences in random order."""
    import torch

    generator = torch.Generator(device).manual_seed(SEED)
    row = -(-seqlen_k // page)
    pool = (batch * row, page, kv_heads, headdim)
    q, k_cache, v_cache = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in ((batch, 1, heads, headdim), pool, pool)
    )
    table = torch.randperm(batch * row, generator=generator, device=device, dtype=torch.int32).view(batch, row)
    lengths = torch.full((batch,), seqlen_k, device=device, dtype=torch.int32)
    output = torch.full_like(q, torch.nan)
    return [
        *(q, k_cache, v_cache, output, lengths, table),
        *(batch, seqlen_k, 1, heads, kv_heads, headdim, page, batch * row, 0),
    ]


def _build_decode(point: Point, device: str) -> list[Any]:
    heads, kv_heads, dim = (point[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim"))
    return _arguments(point["batch_size"], point["seq_len_kv"], heads, kv_heads, dim, PAGE, device)


def _build_flash(point: Point, device: str) -> list[Any]:
    heads, dim = point["heads"], point["headdim"]
    return _arguments(point["batch_size"], point["seq_len_kv"], heads, heads, dim, FLASH_PAGE, device)


def _last(args: Sequence[Any]) -> list[Any]:
    q, k_cache, v_cache, output, lengths, table, _, *sizes = args
    # The table's row width is num_blocks // batch_size: with one sequence, num_blocks itself.
    sizes[-2] = table.shape[1]
    return [q[-1:], k_cache, v_cache, output[-1:], lengths[-1:], table[-1:], 1, *sizes]


def _flashinfer(args: Sequence[Any]) -> Callable[[], Tensor]:
    from tasks.kvcache_decode.reference import peer

    return peer(*args)[1]


def _flash_attention(args: Sequence[Any]) -> Callable[[], Tensor]:
    from flash_attn import flash_attn_with_kvcache

    q, k_cache, v_cache, _, lengths, table = args[:6]
    return functools.partial(
        flash_attn_with_kvcache,
        *(q, k_cache, v_cache, None, None),
        cache_seqlens=lengths,
        block_table=table,
        causal=False,
        window_size=(-1, -1),
        rotary_interleaved=False,
        alibi_slopes=None,
        num_splits=1,
    )


def _uncovered(column: str, point: Point) -> str:
    dim = point[column]
    return "" if dim in HEADDIMS else f"headdim {dim} is none of {', '.join(map(str, HEADDIMS))}"


_DECODE = "FlashInfer BatchDecodeWithPagedKVCacheWrapper, CUDA cores"


def _headdim(dim: int) -> Grid:
    return Grid(
        api=f"flash_attn_with_kvcache_headdim{dim}",
        columns=("batch_size", "seq_len_kv", "heads", "headdim", *FIGURES[:2]),
        words=(("bs", "batch_size"), ("kv_len", "seq_len_kv"), ("hd", "headdim")),
        points=cross(_BATCHES, _LENGTHS, [{"heads": HEADS, "headdim": dim}]),
        build=_build_flash,
        last=_last,
        libraries=(
            Library("flash_attn", "flash_attn_with_kvcache, num_splits=1", _flash_attention),
            Library("flashinfer", _DECODE, _flashinfer, "by_flashinfer_decode"),
        ),
        uncovered=functools.partial(_uncovered, "headdim"),
    )


GRIDS = {
    "tutorial": (
        Grid(
            api="BatchDecodeWithPagedKVCacheWrapper",
            columns=(
                *("api", "batch_size", "seq_len_q", "seq_len_kv", "num_qo_heads", "num_kv_heads", "head_dim"),
                *FIGURES,
            ),
            words=(("bs", "batch_size"), ("kv_len", "seq_len_kv"), ("hd", "head_dim")),
            points=cross(_BATCHES, axis("seq_len_q", 1), _LENGTHS, _HEADS),
            build=_build_decode,
            last=_last,
            libraries=(Library("flashinfer", _DECODE, _flashinfer),),
            uncovered=functools.partial(_uncovered, "head_dim"),
        ),
        *map(_headdim, HEADDIMS),
    )
}
