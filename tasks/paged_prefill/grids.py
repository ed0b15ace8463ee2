"""The grid for paged_prefill: FlashInfer's paged prefill wrapper.

Conventions of the published package where the tutorial's columns leave a choice: bf16, 32 query and 4 KV heads, pages
of 16 tokens, not causal, all lengths equal, backend "auto". The pages are in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tasks.common.grid import FIGURES, SEED, Grid, Library, Point, axis, cross

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIMS = (64, 128, 256)  # of the contract
PAGE_BLOCK_SIZE, CAUSAL = 16, 0
WORKSPACE_BYTES = 128 << 20


def _build(point: Point, device: str) -> list[Any]:
    import torch

    batch, seq, dim = (point[name] for name in ("batch_size", "seq_len", "head_dim"))
    heads, kv_heads, each = point["num_qo_heads"], point["num_kv_heads"], -(-seq // PAGE_BLOCK_SIZE)
    generator = torch.Generator(device).manual_seed(SEED)
    q, kv_data = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in ((batch * seq, heads, dim), (batch * each, 2, PAGE_BLOCK_SIZE, kv_heads, dim))
    )
    steps = torch.arange(batch + 1, device=device, dtype=torch.int32)
    kv_indices = torch.randperm(batch * each, generator=generator, device=device, dtype=torch.int32)
    last_page_len = torch.full((batch,), seq - (each - 1) * PAGE_BLOCK_SIZE, device=device, dtype=torch.int32)
    return [
        *(q, kv_data, torch.full_like(q, torch.nan), steps * seq, steps * each, kv_indices, last_page_len),
        *(batch, seq, heads, kv_heads, dim, PAGE_BLOCK_SIZE, CAUSAL),
    ]


def _last(args: Sequence[Any]) -> list[Any]:
    q, kv_data, output, qo_indptr, kv_indptr, kv_indices, last_page_len, _, *sizes = args
    rows, pages = (int(indptr[-1] - indptr[-2]) for indptr in (qo_indptr, kv_indptr))
    tables = (qo_indptr[:2], kv_indptr[:2], kv_indices[-pages:], last_page_len[-1:])
    return [q[-rows:], kv_data, output[-rows:], *tables, 1, *sizes]


def _flashinfer(args: Sequence[Any]) -> Callable[[], Tensor]:
    import flashinfer
    import torch

    q, kv_data, output, qo_indptr, kv_indptr, kv_indices, last_page_len = args[:7]
    _, _, heads, kv_heads, dim, page, causal = args[7:]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD", backend="auto")
    tables = (qo_indptr, kv_indptr, kv_indices, last_page_len)
    types = {"q_data_type": q.dtype, "kv_data_type": kv_data.dtype}
    wrapper.plan(*tables, heads, kv_heads, dim, page, causal=bool(causal), **types)

    def call() -> Tensor:
        wrapper.run(q, kv_data, out=output)
        return output

    return call


def _uncovered(point: Point) -> str:
    dim = point["head_dim"]
    return "" if dim in HEAD_DIMS else f"head_dim {dim} is none of {', '.join(map(str, HEAD_DIMS))}"


GRIDS = {
    "tutorial": (
        Grid(
            api="BatchPrefillWithPagedKVCacheWrapper",
            columns=("api", "batch_size", "seq_len", "num_qo_heads", "num_kv_heads", "head_dim", *FIGURES),
            words=(("bs", "batch_size"), ("seq_len", "seq_len"), ("hd", "head_dim")),
            points=cross(
                axis("head_dim", 128, 256),
                axis("batch_size", 1, 4, 16, 64),
                axis("seq_len", 1024, 4096, 8192, 16384),
                [{"num_qo_heads": 32, "num_kv_heads": 4}],
            ),
            build=_build,
            last=_last,
            libraries=(
                Library("flashinfer", "FlashInfer BatchPrefillWithPagedKVCacheWrapper, backend auto", _flashinfer),
            ),
            uncovered=_uncovered,
        ),
    )
}
