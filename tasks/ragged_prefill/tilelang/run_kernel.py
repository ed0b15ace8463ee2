"""ragged_prefill in TileLang: paste this file.

    run_kernel(q, k, v, output, qo_indptr, kv_indptr,
               batch_size, seq_len, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal)

Flash attention over ragged sequences. The heads of a GQA group share their keys, so a row tile holds some tokens of
`pack` heads of one group: row r is token r // pack, head r % pack. Online softmax with exp2, the scale and log2(e)
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
# A wave there and a warp of sm_80 take at least 16 rows, so 64 rows get 128 threads; on sm_90 256 threads are two
# warpgroups of 64 rows.
TUNING = {
    "c500": {64: (128, 64, 256, 0), 128: (128, 32, 256, 0), 192: (64, 32, 128, 0), 256: (64, 16, 128, 0)},
    "sm90": {64: (128, 128, 256, 2), 128: (128, 128, 256, 2), 192: (128, 96, 256, 2), 256: (128, 64, 256, 2)},
}

_kernels = {}  # (heads, dims, causal) -> compiled kernel; lengths, totals and the batch stay dynamic


@tilelang.jit
def prefill(num_qo_heads, num_kv_heads, dim_qk, dim_vo, causal, BLOCK_M, BLOCK_N, threads, num_stages):
    group = num_qo_heads // num_kv_heads
    # Heads in one row tile: the largest power of two that divides the group and leaves 8 tokens.
    pack = math.gcd(group, BLOCK_M // 8)
    tokens = BLOCK_M // pack
    head_tiles = num_qo_heads // pack
    factor = math.log2(math.e) / math.sqrt(dim_qk)  # exp(s / sqrt(d)) = exp2(s * factor)
    registers = 240 if threads <= 256 else 160  # of a computing thread: 65536, less 24 for each of 128 that load
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
        # Sequence b owns the token tiles from qo_indptr[b] // tokens + b on: always enough of them, and none is shared.
        # The heads of one token tile come one after another.
        with T.Kernel((total_q // tokens + offsets - 1) * head_tiles, threads=threads) as block:
            Q_tile = T.alloc_shared((tokens, pack, dim_qk), "bfloat16")
            Q_shared = T.reshape(Q_tile, (BLOCK_M, dim_qk))
            K_shared = T.alloc_shared((BLOCK_N, dim_qk), "bfloat16")
            V_shared = T.alloc_shared((BLOCK_N, dim_vo), "bfloat16")
            S = T.alloc_fragment((BLOCK_M, BLOCK_N), "float32")
            P = T.alloc_fragment((BLOCK_M, BLOCK_N), "bfloat16")
            acc = T.alloc_fragment((BLOCK_M, dim_vo), "float32")
            row_max = T.alloc_fragment((BLOCK_M,), "float32")
            previous_max = T.alloc_fragment((BLOCK_M,), "float32")
            rescale = T.alloc_fragment((BLOCK_M,), "float32")
            row_sum = T.alloc_fragment((BLOCK_M,), "float32")
            tile_sum = T.alloc_fragment((BLOCK_M,), "float32")

            if num_stages > 0:  # the loading warpgroup leaves its registers to the two that compute: no spills
                T.annotate_producer_reg_dealloc(24)
                T.annotate_consumer_reg_alloc(registers)

            tile = block // head_tiles
            head_0 = block % head_tiles * pack
            kv_head = head_0 // group

            # b: the last sequence whose first tile is not behind this one.
            b = T.alloc_var("int32")
            end = T.alloc_var("int32")
            middle = T.alloc_var("int32")
            b = 0
            end = offsets - 1
            while b + 1 < end:
                middle = (b + end) // 2
                if QoIndptr[middle] // tokens + middle <= tile:
                    b = middle
                else:
                    end = middle

            q_start = QoIndptr[b]
            q_len = QoIndptr[b + 1] - q_start
            kv_start = KvIndptr[b]
            kv_len = KvIndptr[b + 1] - kv_start
            # Longest first: under a causal mask the last tokens see most keys. A tile to spare gets negative tokens.
            token_0 = (T.ceildiv(q_len, tokens) - 1 - (tile - q_start // tokens - b)) * tokens

            # Keys that some row of the tile sees, and keys that every row sees.
            reach = T.alloc_var("int32")
            unmasked = T.alloc_var("int32")
            reach = kv_len
            unmasked = kv_len
            if causal:
                reach = T.min(kv_len, kv_len - q_len + token_0 + tokens)
                unmasked = T.min(kv_len, kv_len - q_len + token_0 + 1)
            if token_0 < 0:
                reach = 0

            # Rows past the end of the sequence hold whatever comes next in memory; they are computed, not stored.
            T.copy(Q[q_start + token_0 : q_start + token_0 + tokens, head_0 : head_0 + pack, :], Q_tile)
            T.fill(acc, 0)
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
                                n * BLOCK_N + j <= kv_len - q_len + token_0 + i // pack,
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
                    acc[i, d] *= rescale[i]
                T.copy(S, P)
                T.copy(V[kv_start + n * BLOCK_N : kv_start + (n + 1) * BLOCK_N, kv_head, :], V_shared)
                if (n + 1) * BLOCK_N > kv_len:
                    # Rows behind the last key belong to others, and 0 times their NaN would be NaN. The product stands
                    # in both branches so that the wait for V comes before the clearing; the barrier is for the readers
                    # of the previous tile, and written here it costs only the last tile.
                    T.sync_threads()
                    for j, d in T.Parallel(BLOCK_N, dim_vo):
                        if n * BLOCK_N + j >= kv_len:
                            V_shared[j, d] = 0
                    T.gemm(P, V_shared, acc, policy=T.GemmWarpPolicy.FullRow)
                else:
                    T.gemm(P, V_shared, acc, policy=T.GemmWarpPolicy.FullRow)

            for i, d in T.Parallel(BLOCK_M, dim_vo):
                if token_0 >= 0 and token_0 + i // pack < q_len:
                    # A row that saw no key has an empty sum, and its output is 0.
                    Output[q_start + token_0 + i // pack, head_0 + i % pack, d] = T.if_then_else(
                        row_sum[i] > 0, acc[i, d] / row_sum[i], 0.0
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
    if (
        k.shape[0] == 0
    ):  # no key anywhere: one row that nobody reads, since a tensor map cannot describe an empty tensor
        k = torch.zeros((1, num_kv_heads, head_dim_qk), dtype=q.dtype, device=q.device)
        v = torch.zeros((1, num_kv_heads, head_dim_vo), dtype=q.dtype, device=q.device)
    key = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal)
    if key not in _kernels:
        BLOCK_M, BLOCK_N, threads, num_stages = TUNING[DEVICE][head_dim_qk]
        _kernels[key] = prefill(*key, BLOCK_M, BLOCK_N, threads, num_stages)
    _kernels[key](q, k, v, output, qo_indptr, kv_indptr)
