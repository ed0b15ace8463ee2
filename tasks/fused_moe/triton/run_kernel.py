"""fused_moe in Triton: paste this file.

    run_kernel(a, b_col_major, scale_a, scale_b, moe_weights, token_ids, expert_ids, topk, out)

Grouped int8 GEMM. a (EM, K) int8, its rows already routed; b_col_major (E, N, K) int8, K contiguous; scale_a and
moe_weights (EM,) f32; scale_b (E, N) f32; expert_ids (EM / 128,) int32, one expert for each tile of 128 rows; out
(EM, N) bf16. EM, N and K are multiples of 128. token_ids and topk only tell where the rows came from and are not used.

    out[r, n] = bf16(float(sum_k a[r, k] * b[e, n, k]) * scale_a[r] * scale_b[e, n] * moe_weights[r])
    e = expert_ids[r // 128]

One program: one expert tile of 128 rows by BLOCK_N columns, int32 accumulators, which are exact. Row tiles are taken in
the order of their experts, whatever order expert_ids is in: every program finds its own by counting. Programs run in
panels of GROUP_M row tiles by all columns, so that those in flight share rows of a and, where neighbours in that order
have one expert, columns of b in the L2 cache.

Bound: with few rows per expert the bytes of b (experts hit * N * K), with many the int8 products (2 * EM * N * K).
"""

import triton
import triton.language as tl

# Row per device: (BLOCK_N, BLOCK_K, GROUP_M, BY_EXPERT, num_warps, num_stages).
# BY_EXPERT: take row tiles in the order of their experts. For sorted expert_ids that costs a program one comparison of
# neighbours; for unsorted ones some ten sums over them, where each tile would fetch its expert's weights anew.
TUNING = {
    # C500: a warp is 64 lanes, 4 warps are 256 threads with 64 accumulators each. Tiles of a and b take 16 KiB each:
    # two blocks share a multiprocessor's 64 KiB, one computes while the other loads. One stage, nothing asynchronous.
    # Loading the next tiles into registers before the product is not for Triton 3.0: on sm_80 it spills everything.
    "c500": (128, 128, 8, True, 4, 1),
    # H200: two warpgroups with 64 rows each and 64 accumulators per thread, 120 registers; three stages of 32 KiB. Two
    # blocks per multiprocessor, one of which loads while the other multiplies: Triton waits for every int8 product.
    # 16 row tiles of a (16 * 128 * 7168 bytes = 15 MB) stay in the 50 MB cache while a panel runs.
    "sm90": (128, 128, 16, True, 8, 3),
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
    EXPERT_BITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # ---- which tile: GROUP_M row tiles side by side, then the next columns, then the next panel
    program = tl.program_id(0)
    column_tiles = N // BLOCK_N
    panel = program // (GROUP_M * column_tiles)
    first = panel * GROUP_M
    height = tl.minimum(row_tiles - first, GROUP_M)
    within = program - panel * GROUP_M * column_tiles
    position = first + within % height  # in the order of the experts
    column = within // height * BLOCK_N
    row_tile = position
    if BLOCK_T > 0:
        tile = tl.arange(0, BLOCK_T)
        ids = tl.load(expert_ids + tile, mask=tile < row_tiles, other=2147483647)  # (BLOCK_T,)
        following = tl.load(expert_ids + tile + 1, mask=tile + 1 < row_tiles, other=2147483647)
        if tl.sum((ids > following).to(tl.int32), axis=0) > 0:
            # The expert at this position is the largest one that at most `position` tiles come before: found bit by
            # bit from the highest. Among its tiles, ours is number position - before.
            found = position * 0
            before = position * 0
            for bit in tl.static_range(EXPERT_BITS):
                candidate = found + (1 << (EXPERT_BITS - 1 - bit))
                smaller = tl.sum((ids < candidate).to(tl.int32), axis=0)
                found = tl.where(smaller <= position, candidate, found)
                before = tl.where(smaller <= position, smaller, before)
            same = (ids == found).to(tl.int32)
            ours = (tl.cumsum(same, axis=0) == position - before + 1) & (ids == found)
            row_tile = tl.sum(tl.where(ours, tile, 0), axis=0)
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
    block_n, block_k, group_m, by_expert, num_warps, num_stages = TUNING[DEVICE]
    if N % block_n != 0:
        block_n = 128  # every N is a multiple of 128
    row_tiles = rows // 128
    experts = b_col_major.shape[0]
    by_expert = by_expert and row_tiles <= 4096  # every program looks at all of them
    expert_bits = 0
    while 1 << expert_bits < experts:
        expert_bits += 1
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
        EXPERT_BITS=expert_bits,
        BLOCK_T=triton.next_power_of_2(row_tiles + 15) if by_expert else 0,
        num_warps=num_warps,
        num_stages=num_stages,
    )
