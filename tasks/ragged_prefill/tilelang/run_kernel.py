"""ragged_prefill in TileLang: paste this file.

    run_kernel(q, k, v, output, qo_indptr, kv_indptr,
               batch_size, seq_len, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal)

Flash attention over ragged sequences. The heads of a GQA group share their keys, so a row tile holds (token, head of the
group) pairs: row r of a sequence is token r // group, head r % group. Online softmax with exp2, the scale and log2(e)
folded into one factor; P stays in registers; only tiles on the diagonal and at the end of a sequence are masked.

Work per visible (query, key, head): 2 * (head_dim_qk + head_dim_vo) FLOP. Bound by the matrix units, and on the C500 by
the softmax's vector arithmetic.
"""

import math

import tilelang
import tilelang.language as T
import torch

DEVICE = "c500"

# head_dim_qk -> (BLOCK_M, BLOCK_N, threads, num_stages). Shared memory: BLOCK_M * dim_qk + stages * BLOCK_N * (dim_qk +
# dim_vo) bf16 values, at most 48 KiB on the C500 (64 KiB per block there), where 0 stages means no asynchronous copy.
# 256 threads are 4 waves there, and two warpgroups of 64 rows each on sm_90.
TUNING = {
    "c500": {64: (128, 64, 256, 0), 128: (128, 32, 256, 0), 192: (64, 32, 256, 0), 256: (64, 16, 256, 0)},
    "sm90": {64: (128, 128, 256, 2), 128: (128, 128, 256, 2), 192: (128, 96, 256, 2), 256: (128, 64, 256, 2)},
}

_kernels = {}  # (heads, dims, causal) -> compiled kernel; lengths, totals and the batch stay dynamic


@tilelang.jit
def prefill(num_qo_heads, num_kv_heads, dim_qk, dim_vo, causal, BLOCK_M, BLOCK_N, threads, num_stages):
    group = num_qo_heads // num_kv_heads
    factor = math.log2(math.e) / math.sqrt(dim_qk)  # exp(s / sqrt(d)) = exp2(s * factor)
    total_q = T.dynamic("total_q")
    total_kv = T.dynamic("total_kv")
    offsets = T.dynamic("offsets")  # batch_size + 1

    @T.prim_func
    def main(
        Q: T.Tensor((total_q, num_qo_heads, dim_qk), "bfloat16"),
        K: T.Tensor((total_kv, num_kv_heads, dim_qk), "bfloat16"),
        V: T.Tensor((total_kv, num_kv_heads, dim_vo), "bfloat16"),
        Output: T.Tensor((total_q, num_qo_heads, dim_vo), "bfloat16"),
        QoIndptr: T.Tensor((offsets,), "int32"),
        KvIndptr: T.Tensor((offsets,), "int32"),
    ):
        # Sequence b owns the row tiles from qo_indptr[b] * group // BLOCK_M + b on: always enough of them, and no tile is
        # shared. One head of every tile first, so that the blocks that run together differ in their head only.
        with T.Kernel((total_q * group // BLOCK_M + offsets - 1) * num_kv_heads, threads=threads) as block:
            Q_shared = T.alloc_shared((BLOCK_M, dim_qk), "bfloat16")
            K_shared = T.alloc_shared((BLOCK_N, dim_qk), "bfloat16")
            V_shared = T.alloc_shared((BLOCK_N, dim_vo), "bfloat16")
            S = T.alloc_fragment((BLOCK_M, BLOCK_N), "float32")
            P = T.alloc_fragment((BLOCK_M, BLOCK_N), "bfloat16")
            O = T.alloc_fragment((BLOCK_M, dim_vo), "float32")
            row_max = T.alloc_fragment((BLOCK_M,), "float32")
            previous_max = T.alloc_fragment((BLOCK_M,), "float32")
            rescale = T.alloc_fragment((BLOCK_M,), "float32")
            row_sum = T.alloc_fragment((BLOCK_M,), "float32")
            tile_sum = T.alloc_fragment((BLOCK_M,), "float32")

            # The last sequence whose first tile is not behind this one.
            tile = block // num_kv_heads
            kv_head = block % num_kv_heads
            b = T.alloc_var("int32")
            end = T.alloc_var("int32")
            middle = T.alloc_var("int32")
            b = 0
            end = offsets - 1
            while b + 1 < end:
                middle = (b + end) // 2
                if QoIndptr[middle] * group // BLOCK_M + middle <= tile:
                    b = middle
                else:
                    end = middle

            q_start = QoIndptr[b]
            q_len = QoIndptr[b + 1] - q_start
            kv_start = KvIndptr[b]
            kv_len = KvIndptr[b + 1] - kv_start
            rows = q_len * group
            tiles = T.ceildiv(rows, BLOCK_M)
            # Longest first: under a causal mask the last rows see most keys. Tiles past the sequence have negative rows.
            row_0 = (tiles - 1 - (tile - (q_start * group // BLOCK_M + b))) * BLOCK_M

            # Keys that some row of the tile sees, and keys that every row sees.
            reach = T.alloc_var("int32")
            unmasked = T.alloc_var("int32")
            reach = kv_len
            unmasked = kv_len
            if causal:
                reach = T.min(kv_len, kv_len - q_len + (row_0 + BLOCK_M - 1) // group + 1)
                unmasked = T.min(kv_len, kv_len - q_len + row_0 // group + 1)
            if row_0 < 0:
                reach = 0

            for i, d in T.Parallel(BLOCK_M, dim_qk):
                Q_shared[i, d] = T.if_then_else(
                    row_0 >= 0 and row_0 + i < rows,
                    Q[q_start + (row_0 + i) // group, kv_head * group + (row_0 + i) % group, d],
                    T.cast(0, "bfloat16"),
                )
            T.fill(O, 0)
            T.fill(row_sum, 0)
            # Finite, so that a row without any key yet subtracts it from -inf without making a NaN.
            T.fill(row_max, -3e38)

            for n in T.Pipelined(T.ceildiv(T.max(reach, 0), BLOCK_N), num_stages=num_stages):
                T.copy(K[kv_start + n * BLOCK_N : kv_start + (n + 1) * BLOCK_N, kv_head, :], K_shared)
                T.gemm(Q_shared, K_shared, S, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                if (n + 1) * BLOCK_N > unmasked:
                    for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                        if causal:
                            S[i, j] = T.if_then_else(
                                n * BLOCK_N + j <= kv_len - q_len + (row_0 + i) // group and n * BLOCK_N + j < kv_len,
                                S[i, j],
                                -T.infinity("float32"),
                            )
                        else:
                            S[i, j] = T.if_then_else(n * BLOCK_N + j < kv_len, S[i, j], -T.infinity("float32"))
                T.copy(row_max, previous_max)
                T.reduce_max(S, row_max, dim=1, clear=False)
                for i in T.Parallel(BLOCK_M):
                    rescale[i] = T.exp2((previous_max[i] - row_max[i]) * factor)
                for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                    S[i, j] = T.exp2(S[i, j] * factor - row_max[i] * factor)
                T.reduce_sum(S, tile_sum, dim=1)
                for i in T.Parallel(BLOCK_M):
                    row_sum[i] = row_sum[i] * rescale[i] + tile_sum[i]
                for i, d in T.Parallel(BLOCK_M, dim_vo):
                    O[i, d] *= rescale[i]
                T.copy(S, P)
                T.copy(V[kv_start + n * BLOCK_N : kv_start + (n + 1) * BLOCK_N, kv_head, :], V_shared)
                T.gemm(P, V_shared, O, policy=T.GemmWarpPolicy.FullRow)

            for i, d in T.Parallel(BLOCK_M, dim_vo):
                if row_0 >= 0 and row_0 + i < rows:
                    # A row that saw no key has an empty sum, and its output is 0.
                    Output[q_start + (row_0 + i) // group, kv_head * group + (row_0 + i) % group, d] = T.if_then_else(
                        row_sum[i] > 0, O[i, d] / row_sum[i], 0.0
                    )

    return main


def run_kernel(
    q,
    k,
    v,
    output,
    qo_indptr,
    kv_indptr,
    batch_size,
    seq_len,
    num_qo_heads,
    num_kv_heads,
    head_dim_qk,
    head_dim_vo,
    causal,
):
    if batch_size == 0 or q.shape[0] == 0:
        return
    if k.shape[0] == 0:  # no key anywhere: one row that nobody reads, since a tensor map cannot describe an empty tensor
        k = torch.zeros((1, num_kv_heads, head_dim_qk), dtype=q.dtype, device=q.device)
        v = torch.zeros((1, num_kv_heads, head_dim_vo), dtype=q.dtype, device=q.device)
    key = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal)
    if key not in _kernels:
        BLOCK_M, BLOCK_N, threads, num_stages = TUNING[DEVICE][head_dim_qk]
        _kernels[key] = prefill(*key, BLOCK_M, BLOCK_N, threads, num_stages)
    _kernels[key](q, k, v, output, qo_indptr, kv_indptr)
