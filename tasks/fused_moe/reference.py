"""fused_moe: the contract, and its ground truth.

An int8 grouped GEMM over rows that are already routed: every tile of 128 rows belongs to one expert.

    a            int8   (EM, K), rows already expanded and sorted into tiles: do not gather again
    b_col_major  int8   (E, N, K), K contiguous
    scale_a      float  (EM,)
    scale_b      float  (E, N)
    moe_weights  float  (EM,)
    token_ids    int32  (EM,), where a row came from; not needed
    expert_ids   int32  (EM / 128,), expert of each 128-row tile, in any order
    topk         int    not needed
    out          bf16   (EM, N)

out[r, n] = bf16(float(sum_k a[r, k] * b[e, n, k]) * scale_a[r] * scale_b[e, n] * moe_weights[r]), with
e = expert_ids[r // 128]. EM, N and K are multiples of 128. The sum is an exact int32. E * N * K can pass 2^31.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TILE = 128
ROWS_AT_ONCE = 2048  # rows of one expert multiplied together: an int32 product of at most 2048 x N

# fmt: off
ARGUMENTS = (
    "a", "b_col_major", "scale_a", "scale_b", "moe_weights", "token_ids", "expert_ids", "topk", "out",
)
# fmt: on
OUTPUTS = ("out",)
PEER_FIRST = True  # the package's own baseline runs expert by expert: no competitor, though it can always run
EXACT_ALLOCATIONS = True  # the C ABI carries no shapes: run_kernel finds them from the sizes of the allocations


def _integer_product(rows: Tensor, weights: Tensor) -> Tensor:
    """rows (M, K) int8 times weights (N, K) int8, transposed, exactly: (M, N) as float32 of the int32 sum."""
    if rows.is_cuda:
        try:
            return torch._int_mm(rows, weights.t()).float()
        except (AttributeError, RuntimeError):
            pass  # not offered by this build, or not for these shapes: float64 is as exact, only slower
    return (rows.double() @ weights.double().t()).float()  # |sum| < 2^53: no rounding


def _compute(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, weights: Tensor, experts: Tensor, out: Tensor
) -> None:
    lanes = torch.arange(TILE, device=a.device)
    for expert in experts.unique().tolist():
        tiles = (experts == expert).nonzero()  # (tiles of this expert, 1)
        for part in (tiles * TILE + lanes).flatten().split(ROWS_AT_ONCE):
            product = _integer_product(a[part], b[expert])
            product.mul_(scale_a[part, None]).mul_(scale_b[expert]).mul_(weights[part, None])
            out[part] = product.to(out.dtype)


def reference(
    a: Tensor,
    b_col_major: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    moe_weights: Tensor,
    token_ids: Tensor,
    expert_ids: Tensor,
    topk: int,
    out: Tensor,
) -> dict[str, Tensor]:
    """Ground truth, float32: the exact sum, then the scales in the order of the formula. `out` is not read."""
    result = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    _compute(a, b_col_major, scale_a, scale_b, moe_weights, expert_ids, result)
    return {"out": result}


def honest(
    a: Tensor,
    b_col_major: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    moe_weights: Tensor,
    token_ids: Tensor,
    expert_ids: Tensor,
    topk: int,
    out: Tensor,
) -> dict[str, Tensor]:
    """The same rounded to bf16: nothing before the last step of this task rounds to less than float32."""
    result = torch.empty_like(out)
    _compute(a, b_col_major, scale_a, scale_b, moe_weights, expert_ids, result)
    return {"out": result}


def workload(
    a: Tensor,
    b_col_major: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    moe_weights: Tensor,
    token_ids: Tensor,
    expert_ids: Tensor,
    topk: int,
    out: Tensor,
) -> dict[str, Any]:
    """Two operations per multiply-add; the weights and scales of the experts in use read once, everything else once."""
    used, (experts, n, k) = len(expert_ids.unique()), b_col_major.shape
    parts = {f"weights ({used} of {experts} experts)": used * n * k, "a": a.numel()}
    whole = (a, scale_a, moe_weights, expert_ids, out)
    moved = used * n * (k + scale_b.element_size()) + sum(t.numel() * t.element_size() for t in whole)
    return {"flops": 2 * a.shape[0] * n * k, "bytes": moved, "dtype": "int8", "parts": parts}


def peer(*args: Any) -> tuple[str, Callable[[], object]]:
    """The plain Triton kernel of peer.py, its configuration chosen beforehand; into a tensor of its own."""
    from tasks.fused_moe.peer import best_call

    return "plain Triton kernel", best_call(*args)


def yardsticks(*args: Any) -> dict[str, Callable[[], object]]:
    """What is timed alone beside the peer."""
    from tasks.fused_moe.peer import dense_call

    return {"cuBLAS int8 dense, the same operations": dense_call(*args)}
