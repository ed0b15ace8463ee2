"""The grid for mla_decode: FlashInfer's MLA wrapper.

Conventions of the published package where the tutorial's columns leave a choice: bf16, one query per sequence, pages of
one token, full lengths, backend "auto". The pages are in random order and both rope parts hold data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tasks.common.grid import FIGURES, SEED, Grid, Library, Point, axis, cross

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIM_CKV, HEAD_DIM_KPE, PAGE_SIZE = 512, 64, 1
HEADS = (16, 32, 64, 128)  # of the contract
WORKSPACE_BYTES = 128 << 20


def _build(point: Point, device: str) -> list[Any]:
    import torch

    batch, seq, heads = (point[name] for name in ("batch_size", "seq_len", "num_heads"))
    latent, rope, total = point["head_dim_ckv"], point["head_dim_kpe"], batch * seq
    generator = torch.Generator(device).manual_seed(SEED)
    q_nope, q_pe, ckv, kpe = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in (
            (batch, heads, latent),
            (batch, heads, rope),
            (total, PAGE_SIZE, latent),
            (total, PAGE_SIZE, rope),
        )
    )
    q_indptr = torch.arange(batch + 1, device=device, dtype=torch.int32)
    kv_indices = torch.randperm(total, generator=generator, device=device, dtype=torch.int32)
    kv_lens = torch.full((batch,), seq, device=device, dtype=torch.int32)
    return [
        *(q_nope, q_pe, ckv, kpe, torch.full_like(q_nope, torch.nan), q_indptr, q_indptr * seq, kv_indices, kv_lens),
        *(batch, seq, heads, latent, rope, PAGE_SIZE, 0),
    ]


def _last(args: Sequence[Any]) -> list[Any]:
    q_nope, q_pe, ckv, kpe, output, q_indptr, kv_indptr, kv_indices, kv_lens, _, *sizes = args
    own = kv_indices[-int(kv_indptr[-1] - kv_indptr[-2]) :]
    tables = (q_indptr[:2], kv_indptr[:2], own, kv_lens[-1:])
    return [q_nope[-1:], q_pe[-1:], ckv, kpe, output[-1:], *tables, 1, *sizes]


def _flashinfer(args: Sequence[Any]) -> Callable[[], Tensor]:
    import flashinfer
    import torch

    q_nope, q_pe, ckv, kpe, output, q_indptr, kv_indptr, kv_indices, kv_lens = args[:9]
    _, _, heads, latent, rope, page, _ = args[9:]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q_nope.device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    tables, scale = (q_indptr, kv_indptr, kv_indices, kv_lens), 1 / math.sqrt(latent + rope)
    wrapper.plan(*tables, heads, latent, rope, page, False, scale, q_nope.dtype, ckv.dtype)

    def call() -> Tensor:
        wrapper.run(q_nope, q_pe, ckv, kpe, out=output, return_lse=False)
        return output

    return call


def _uncovered(point: Point) -> str:
    heads, dims = point["num_heads"], (point["head_dim_ckv"], point["head_dim_kpe"])
    if dims != (HEAD_DIM_CKV, HEAD_DIM_KPE):
        return f"head dims {dims} are not ({HEAD_DIM_CKV}, {HEAD_DIM_KPE})"
    return "" if heads in HEADS else f"{heads} heads are none of {', '.join(map(str, HEADS))}"


GRIDS = {
    "tutorial": (
        Grid(
            api="BatchMLAPagedAttentionWrapper",
            columns=("api", "batch_size", "seq_len", "num_heads", "head_dim_ckv", "head_dim_kpe", *FIGURES),
            words=(("bs", "batch_size"), ("seq_len", "seq_len"), ("heads", "num_heads")),
            points=cross(
                axis("num_heads", 64, 128),
                axis("batch_size", 1, 4, 16, 64),
                axis("seq_len", 1024, 4096, 8192, 16384),
                [{"head_dim_ckv": HEAD_DIM_CKV, "head_dim_kpe": HEAD_DIM_KPE}],
            ),
            build=_build,
            last=_last,
            libraries=(Library("flashinfer", "FlashInfer BatchMLAPagedAttentionWrapper, backend auto", _flashinfer),),
            uncovered=_uncovered,
        ),
    )
}
