"""What fused_moe is timed against on a GPU: a plain Triton kernel, the best of a small sweep.

No library has this operator, and the package's own baseline runs expert by expert. The kernel has tiles of 128 rows in
the order they come in, int8 products into int32, and nothing else that ours have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128


@triton.jit
def grouped_gemm(
    a, b, scale_a, scale_b, weights, experts, out, rows, N, K, GROUP_M,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program: a row tile by BLOCK_N columns. GROUP_M row tiles side by side, then the next columns.
    columns = N // BLOCK_N
    panel = tl.program_id(0) // (GROUP_M * columns)
    height = tl.minimum(rows // BLOCK_M - panel * GROUP_M, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * columns)
    tile = panel * GROUP_M + within % height
    expert = tl.load(experts + tile).to(tl.int64)
    row = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    column = within // height * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    k = tl.arange(0, BLOCK_K)
    a_tile = a + row[:, None] * K + k[None, :]  # (BLOCK_M, BLOCK_K)
    b_tile = b + expert * N * K + column[None, :] * K + k[:, None]  # (BLOCK_K, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(a_tile), tl.load(b_tile), acc, out_dtype=tl.int32)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    result = acc.to(tl.float32) * tl.load(scale_a + row)[:, None]
    result = result * tl.load(scale_b + expert * N + column)[None, :] * tl.load(weights + row)[:, None]
    tl.store(out + row[:, None] * N + column[None, :], result.to(out.dtype.element_ty))


class Config(NamedTuple):
    """One point of the sweep."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int


SWEEP = tuple(itertools.starmap(Config, itertools.product((128, 256), (64, 128), (4, 8), (3, 4), (8, 32))))
_best: dict[tuple[Any, ...], Config] = {}  # by (EM, N, K, experts in use, device)


def call_of(config: Config, args: tuple[Any, ...], out: Tensor) -> Callable[[], object]:
    """The launch of one configuration on the arguments of run_kernel, into `out` (EM, N)."""
    a, b, scale_a, scale_b, weights, _, experts, *_ = args
    rows, n, k = a.shape[0], b.shape[1], a.shape[1]
    blocks = {"BLOCK_M": TILE, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    warps = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    grid = (rows // TILE * (n // config.block_n),)
    sizes = (rows, n, k, config.group_m)
    return lambda: grouped_gemm[grid](a, b, scale_a, scale_b, weights, experts, out, *sizes, **blocks, **warps)


def best_call(*args: Any, sweep: tuple[Config, ...] = SWEEP) -> Callable[[], object]:
    """A call on the arguments of run_kernel, by the fastest configuration for this shape, into an output of its own.

    The sweep happens once per shape. Without a GPU the first that fits is taken. Raises ValueError when none fits.
    """
    a, b, expert_ids, out = args[0], args[1], args[6], torch.empty_like(args[-1])
    key = (*a.shape, b.shape[1], len(expert_ids.unique()), a.device)
    if key not in _best:
        fitting = [config for config in sweep if b.shape[1] % config.block_n == 0 and a.shape[1] % config.block_k == 0]
        times = {config: _time(call_of(config, args, out)) if a.is_cuda else 0.0 for config in fitting}
        times = {config: ms for config, ms in times.items() if ms is not None}
        if not times:
            raise ValueError(f"no configuration of the plain kernel takes N = {b.shape[1]}, K = {a.shape[1]}")
        _best[key] = min(times, key=lambda config: times[config])
    return call_of(_best[key], args, out)


def _time(call: Callable[[], object]) -> float | None:
    """Milliseconds by events, the least of five; None when the device has too little of something.

    No flush: the published shapes read hundreds of megabytes, far more than an L2 cache holds.
    """
    try:
        call()
    except triton.OutOfResources:
        return None
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def dense_call(*args: Any) -> Callable[[], object]:
    """cuBLAS's int8 product of the same operations, all rows with one expert's weights: (EM, K) x (K, N) into int32."""
    a, weights = args[0], args[1][0].t()
    return lambda: torch._int_mm(a, weights)
