"""fused_moe in TileLang: paste this file.

    run_kernel(a, b_col_major, scale_a, scale_b, moe_weights, token_ids, expert_ids, topk, out)

An int8 GEMM over row tiles of 128 that each belong to one expert: out[r, n] = bf16(float(sum_k a[r, k] * b[e, n, k]) *
scale_a[r] * scale_b[e, n] * moe_weights[r]), e = expert_ids[r // 128], with exact int32 sums. EM, N and K are multiples
of 128, so every tile is full. `sort_tiles` orders the row tiles by expert; the blocks of `fused_moe` go through groups
of neighbouring tiles, column by column, so that those which share an expert's weights run side by side and the weights
come from DRAM once.

Work: 2 * EM * N * K operations. Bound by reading the weights when experts have few tiles, by the matrix units when they
have many. Workspace: 4 bytes per row tile, kept between calls; it holds the sorted order of the current call only.
"""

import tilelang
import tilelang.language as T
import torch

DEVICE = "c500"

BLOCK_M = 128  # an expert tile's rows
# columns of a block, widest first -> (BLOCK_K, threads, num_stages, GROUP_M): the widest that divides N is taken.
# Shared memory: stages * (BLOCK_M + BLOCK_N) * BLOCK_K bytes, reused for BLOCK_M * BLOCK_N bf16 outputs. GROUP_M row
# tiles run side by side before the next columns.
TUNING = {
    # 0 stages: one buffer and the registers behind it, 32 KiB, two blocks per AP; no asynchronous copy.
    "c500": {128: (128, 256, 0, 8)},
    # 256 threads are two warpgroups of 64 rows x 256 sums, 128 registers; 4 stages of 48 KiB or 6 of 32.
    "sm90": {256: (128, 256, 4, 16), 128: (128, 256, 6, 16)},
}

_sort = []  # the compiled kernel
_kernels = {}  # (N, K) -> compiled kernel; EM and the number of experts stay dynamic
_orders = {}  # device -> (tiles,) int32 at least


@tilelang.jit
def sort_tiles():
    LANES = 128
    tiles = T.dynamic("tiles")
    capacity = T.dynamic("capacity")

    @T.prim_func
    def main(ExpertIds: T.Tensor((tiles,), "int32"), Order: T.Tensor((capacity,), "int32")):
        # Order[i] = row tile at place i of the sorted order. One block per tile counts those that come before.
        with T.Kernel(tiles, threads=LANES) as tile:
            count = T.alloc_fragment((LANES,), "int32")
            before = T.alloc_fragment((1,), "int32")
            expert = ExpertIds[tile]
            T.fill(count, 0)
            for n in T.serial(T.ceildiv(tiles, LANES)):
                for i in T.Parallel(LANES):
                    if n * LANES + i < tiles:
                        if ExpertIds[n * LANES + i] < expert:
                            count[i] += 1
                        if ExpertIds[n * LANES + i] == expert and n * LANES + i < tile:
                            count[i] += 1
            T.reduce_sum(count, before, dim=0)
            Order[before[0]] = tile

    return main


# Every tile is full, so no access needs a check of its bounds.
@tilelang.jit(pass_configs={"tl.disable_safe_memory_legalize": True})
def fused_moe(N, K, BLOCK_N, BLOCK_K, threads, num_stages, GROUP_M):
    columns = N // BLOCK_N
    # wgmma reads the least of shared memory when a warpgroup's product is 64 rows by all columns.
    policy = T.GemmWarpPolicy.FullRow if num_stages > 0 else T.GemmWarpPolicy.Square
    EM = T.dynamic("EM")
    E = T.dynamic("E")
    tiles = T.dynamic("tiles")
    capacity = T.dynamic("capacity")

    @T.prim_func
    def main(
        A: T.Tensor((EM, K), "int8"),
        B: T.Tensor((E, N, K), "int8"),
        ScaleA: T.Tensor((EM,), "float32"),
        ScaleB: T.Tensor((E, N), "float32"),
        MoeWeights: T.Tensor((EM,), "float32"),
        ExpertIds: T.Tensor((tiles,), "int32"),
        Order: T.Tensor((capacity,), "int32"),
        Out: T.Tensor((EM, N), "bfloat16"),
    ):
        with T.Kernel(tiles * columns, threads=threads) as block:
            A_shared = T.alloc_shared((BLOCK_M, BLOCK_K), "int8")
            B_shared = T.alloc_shared((BLOCK_N, BLOCK_K), "int8")
            Out_shared = T.alloc_shared((BLOCK_M, BLOCK_N), "bfloat16")
            acc = T.alloc_fragment((BLOCK_M, BLOCK_N), "int32")
            result = T.alloc_fragment((BLOCK_M, BLOCK_N), "bfloat16")
            row_scale = T.alloc_fragment((BLOCK_M,), "float32")
            weight = T.alloc_fragment((BLOCK_M,), "float32")
            column_scale = T.alloc_fragment((BLOCK_N,), "float32")

            if num_stages > 0:
                # The loading warpgroup leaves its registers to the two that compute.
                T.annotate_producer_reg_dealloc(24)
                T.annotate_consumer_reg_alloc(240)

            # Groups of row tiles that are neighbours in the sorted order; in a group column by column.
            group = block // (GROUP_M * columns)
            in_group = block % (GROUP_M * columns)
            group_tiles = T.max(T.min(GROUP_M, tiles - group * GROUP_M), 1)  # never 0: this only tells the compiler so
            column_0 = T.alloc_var("int32")
            column_0 = in_group // group_tiles * BLOCK_N
            tile = Order[group * GROUP_M + in_group % group_tiles]
            expert = ExpertIds[tile]
            row_0 = tile * BLOCK_M

            T.fill(acc, 0)
            if num_stages > 0:
                for k in T.Pipelined(K // BLOCK_K, num_stages=num_stages):
                    T.copy(A[row_0 : row_0 + BLOCK_M, k * BLOCK_K : (k + 1) * BLOCK_K], A_shared)
                    T.copy(B[expert, column_0 : column_0 + BLOCK_N, k * BLOCK_K : (k + 1) * BLOCK_K], B_shared)
                    T.gemm(A_shared, B_shared, acc, transpose_B=True, policy=policy)
            else:
                # The next tiles wait in registers while the present ones are multiplied.
                A_next = T.alloc_fragment((BLOCK_M, BLOCK_K), "int8")
                B_next = T.alloc_fragment((BLOCK_N, BLOCK_K), "int8")
                for i, j in T.Parallel(BLOCK_M, BLOCK_K):
                    A_next[i, j] = A[row_0 + i, j]
                for i, j in T.Parallel(BLOCK_N, BLOCK_K):
                    B_next[i, j] = B[expert, column_0 + i, j]
                for k in T.serial(K // BLOCK_K):
                    T.copy(A_next, A_shared)
                    T.copy(B_next, B_shared)
                    if k + 1 < K // BLOCK_K:
                        for i, j in T.Parallel(BLOCK_M, BLOCK_K):
                            A_next[i, j] = A[row_0 + i, (k + 1) * BLOCK_K + j]
                        for i, j in T.Parallel(BLOCK_N, BLOCK_K):
                            B_next[i, j] = B[expert, column_0 + i, (k + 1) * BLOCK_K + j]
                    T.gemm(A_shared, B_shared, acc, transpose_B=True, policy=policy)

            # The factors in the contract's order, each product rounded to float32, then to bf16.
            for i in T.Parallel(BLOCK_M):
                row_scale[i] = ScaleA[row_0 + i]
                weight[i] = MoeWeights[row_0 + i]
            for j in T.Parallel(BLOCK_N):
                column_scale[j] = ScaleB[expert, column_0 + j]
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                result[i, j] = T.cast(acc[i, j], "float32") * row_scale[i] * column_scale[j] * weight[i]
            T.copy(result, Out_shared)
            T.copy(Out_shared, Out[row_0 : row_0 + BLOCK_M, column_0 : column_0 + BLOCK_N])

    return main


def run_kernel(a, b_col_major, scale_a, scale_b, moe_weights, token_ids, expert_ids, topk, out):
    if out.shape[0] == 0 or out.shape[1] == 0:
        return
    N, K = b_col_major.shape[1:]
    if (N, K) not in _kernels:
        BLOCK_N = next(width for width in TUNING[DEVICE] if N % width == 0)
        _kernels[N, K] = fused_moe(N, K, BLOCK_N, *TUNING[DEVICE][BLOCK_N])
    if not _sort:
        _sort.append(sort_tiles())
    if a.device not in _orders or _orders[a.device].shape[0] < expert_ids.shape[0]:
        _orders[a.device] = torch.empty_like(expert_ids)
    order = _orders[a.device]
    _sort[0](expert_ids, order)
    _kernels[N, K](a, b_col_major, scale_a, scale_b, moe_weights, expert_ids, order, out)
