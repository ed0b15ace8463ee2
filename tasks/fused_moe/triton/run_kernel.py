"""fused_moe in Triton: paste this file.

    run_kernel(a, b_col_major, scale_a, scale_b, moe_weights, token_ids, expert_ids, topk, out)

Grouped int8 GEMM. a (EM, K) int8, its rows already routed; b_col_major (E, N, K) int8, K contiguous; scale_a and
moe_weights (EM,) f32; scale_b (E, N) f32; expert_ids (EM / 128,) int32, one expert for each tile of 128 rows; out
(EM, N) bf16. EM, N and K are multiples of 128. token_ids and topk only tell where the rows came from and are not used.

    out[r, n] = bf16(float(sum_k a[r, k] * b[e, n, k]) * scale_a[r] * scale_b[e, n] * moe_weights[r])
    e = expert_ids[r // 128]

One program: one expert tile of 128 rows by BLOCK_N columns, int32 accumulators, which are exact. Programs run in panels
of GROUP_M row tiles by all columns, so that those in flight share rows of a and, where neighbouring tiles have one
expert, columns of b in the L2 cache.

Bound: with few rows per expert the bytes of b (experts hit * N * K), with many the int8 products (2 * EM * N * K).
"""

import triton
import triton.language as tl

# Rows per device: (BLOCK_N, BLOCK_K, GROUP_M, num_warps, num_stages).
TUNING = {
    # C500: a warp is 64 lanes, 4 warps are 256 threads with 64 accumulators each. Tiles of a and b take 16 KiB each:
    # two blocks share a multiprocessor's 64 KiB, one computes while the other loads. One stage, nothing asynchronous.
    "c500": (128, 128, 8, 4, 1),
    # H200: two warpgroups with 64 rows each and 128 accumulators per thread; four stages of 16 + 32 KiB hide DRAM.
    # 16 row tiles of a (16 * 128 * 7168 bytes = 15 MB) stay in the 50 MB cache while a panel runs.
    "sm90": (256, 128, 16, 8, 4),
}
DEVICE = "c500"


@triton.jit
def fused_moe_kernel(
    a,
    b,
    scale_a,
    scale_b,
    moe_weights,
    expert_ids,
    out,
    row_tiles,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # ---- which tile: GROUP_M row tiles side by side, then the next columns, then the next panel
    program = tl.program_id(0)
    column_tiles = N // BLOCK_N
    panel = program // (GROUP_M * column_tiles)
    first = panel * GROUP_M
    height = tl.minimum(row_tiles - first, GROUP_M)
    within = program - panel * GROUP_M * column_tiles
    row_tile = first + within % height
    column = within // height * BLOCK_N
    expert = tl.load(expert_ids + row_tile).to(tl.int64)

    # ---- addresses: 64-bit bases (b has up to 7.5e9 elements), 32-bit offsets inside a tile
    row = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first_row = row_tile.to(tl.int64) * BLOCK_M
    a_tile = a + first_row * K + row[:, None] * K + k[None, :]  # (BLOCK_M, BLOCK_K)
    b_tile = b + (expert * N + column) * K + n[None, :] * K + k[:, None]  # (BLOCK_K, BLOCK_N): b is read transposed

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(a_tile), tl.load(b_tile), acc, out_dtype=tl.int32)
        a_tile += BLOCK_K
        b_tile += BLOCK_K

    # ---- epilogue, multiplied in the contract's order
    by_row = tl.load(scale_a + first_row + row)  # (BLOCK_M,)
    by_column = tl.load(scale_b + expert * N + column + n)  # (BLOCK_N,)
    weight = tl.load(moe_weights + first_row + row)  # (BLOCK_M,)
    result = acc.to(tl.float32) * by_row[:, None] * by_column[None, :] * weight[:, None]
    tl.store(out + first_row * N + column + row[:, None] * N + n[None, :], result.to(out.dtype.element_ty))


def run_kernel(a, b_col_major, scale_a, scale_b, moe_weights, token_ids, expert_ids, topk, out):
    rows, K = a.shape
    N = out.shape[1]
    if rows == 0:
        return
    block_n, block_k, group_m, num_warps, num_stages = TUNING[DEVICE]
    if N % block_n != 0:
        block_n = 128  # every N is a multiple of 128
    row_tiles = rows // 128
    fused_moe_kernel[(row_tiles * (N // block_n),)](
        a,
        b_col_major,
        scale_a,
        scale_b,
        moe_weights,
        expert_ids,
        out,
        row_tiles,
        N,
        K,
        BLOCK_M=128,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=group_m,
        num_warps=num_warps,
        num_stages=num_stages,
    )
