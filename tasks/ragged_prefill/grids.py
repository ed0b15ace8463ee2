"""The grid for ragged_prefill: FlashInfer's ragged prefill wrapper.

Conventions of the published package where the tutorial's columns leave a choice: bf16, 32 query and 4 KV heads, causal,
all lengths equal, backend "auto".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tasks.common.grid import FIGURES, SEED, Grid, Library, Point, axis, cross

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))  # (qk, vo) of the contract
CAUSAL = 1
WORKSPACE_BYTES = 128 << 20


def _build(point: Point, device: str) -> list[Any]:
    import torch

    batch, seq, heads, kv_heads = (point[name] for name in ("batch_size", "seq_len", "num_qo_heads", "num_kv_heads"))
    dim_qk, dim_vo, total = point["head_dim_qk"], point["head_dim_vo"], batch * seq
    generator = torch.Generator(device).manual_seed(SEED)
    q, k, v = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in ((total, heads, dim_qk), (total, kv_heads, dim_qk), (total, kv_heads, dim_vo))
    )
    output = torch.full((total, heads, dim_vo), torch.nan, device=device, dtype=torch.bfloat16)
    indptr = torch.arange(batch + 1, device=device, dtype=torch.int32) * seq
    return [q, k, v, output, indptr, indptr.clone(), batch, seq, heads, kv_heads, dim_qk, dim_vo, CAUSAL]


def _last(args: Sequence[Any]) -> list[Any]:
    q, k, v, output, qo_indptr, kv_indptr, _, *sizes = args
    rows, keys = (int(indptr[-1] - indptr[-2]) for indptr in (qo_indptr, kv_indptr))
    return [q[-rows:], k[-keys:], v[-keys:], output[-rows:], qo_indptr[:2], kv_indptr[:2], 1, *sizes]


def _flashinfer(args: Sequence[Any]) -> Callable[[], Tensor]:
    import flashinfer
    import torch

    q, k, v, output, qo_indptr, kv_indptr, _, _, heads, kv_heads, dim_qk, dim_vo, causal = args
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, kv_layout="NHD", backend="auto")
    types = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    wrapper.plan(qo_indptr, kv_indptr, heads, kv_heads, dim_qk, head_dim_vo=dim_vo, causal=bool(causal), **types)

    def call() -> Tensor:
        wrapper.run(q, k, v, out=output)
        return output

    return call


def _uncovered(point: Point) -> str:
    dims = point["head_dim_qk"], point["head_dim_vo"]
    return "" if dims in HEAD_DIMS else f"head dims {dims} are none of {', '.join(map(str, HEAD_DIMS))}"


GRIDS = {
    "tutorial": (
        Grid(
            api="BatchPrefillWithRaggedKVCacheWrapper",
            columns=(
                *("api", "batch_size", "seq_len", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"),
                *FIGURES,
            ),
            words=(("bs", "batch_size"), ("seq_len", "seq_len"), ("hd_qk", "head_dim_qk"), ("hd_vo", "head_dim_vo")),
            points=cross(
                [{"head_dim_qk": qk, "head_dim_vo": vo} for qk, vo in HEAD_DIMS[1:]],
                axis("batch_size", 1, 4, 16, 64),
                axis("seq_len", 1024, 4096, 8192, 16384),
                [{"num_qo_heads": 32, "num_kv_heads": 4}],
            ),
            build=_build,
            last=_last,
            libraries=(
                Library("flashinfer", "FlashInfer BatchPrefillWithRaggedKVCacheWrapper, backend auto", _flashinfer),
            ),
            uncovered=_uncovered,
        ),
    )
}
