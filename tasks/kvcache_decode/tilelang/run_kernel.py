"""kvcache_decode in TileLang: paste this file.

    run_kernel(q, k_cache_paged, v_cache_paged, output, cache_seqlens, block_table,
               batch_size, seqlen_k, seqlen_q, num_heads, num_heads_k, headdim, page_block_size, num_blocks, causal)

Split-KV attention of one query token per sequence. A block takes one KV head and an equal share of one sequence's true
length; a second kernel joins the shares. Keys and values come row by row through block_table, any page size; rows
behind the last token are selected away, never multiplied.

* One query head per KV head: no tensor cores. Slot j of BLOCK_N takes every BLOCK_N-th token and keeps its own running
  maximum, sum and accumulator, so that the loop needs no communication but the sum of a dot product over the lanes of
  a row; the slots meet once, at the end.
* Several: the heads of the group fill the rows of a 16- or 64-row tile, padded with zeros, and both products run on the
  matrix units.

Bound by memory: 4 * num_heads_k * headdim bytes per token. Workspace: num_splits * batch * num_heads * (headdim + 1)
float32 values where num_splits > 1, so at most multiprocessors * blocks * heads of a block * (headdim + 1): 1.7 MB on
the C500 for 8 heads over 8 KV heads of 128, 6.9 MB for 32 over 4. One per shape, kept between calls.
"""

import math

import tilelang
import tilelang.language as T
import torch

DEVICE = "c500"

# multiprocessors; slots: headdim -> (BLOCK_N, threads, blocks per multiprocessor), for one query head per KV head;
# tiles: headdim -> (BLOCK_H, BLOCK_N, threads, blocks per multiprocessor). 16 bytes a load: BLOCK_N * headdim / threads
# / 8 rows of K and of V are in flight per thread. Headdims between two rows take the larger one.
# Shared memory of tiles: (2 * BLOCK_N + BLOCK_H) * headdim + BLOCK_H * BLOCK_N bf16 values.
TUNING = {
    # Blocks of one or four waves, and many: the public kernels do best with some 3000 blocks in flight over 104
    # multiprocessors. One wave takes at least 16 rows of a product.
    "c500": {
        "multiprocessors": 104,
        "slots": {64: (64, 256, 32), 128: (32, 256, 32), 256: (16, 256, 32), 512: (16, 256, 16)},
        "tiles": {64: (16, 32, 64, 16), 128: (16, 32, 64, 16), 256: (16, 16, 64, 16), 512: (16, 16, 64, 8)},
    },
    # 4 blocks of 128 threads with 8 loads of 16 bytes each in flight are 64 KiB per multiprocessor, twice what 4 TB/s
    # at 0.8 us need. Registers allow 4 blocks (107 per thread; tiles of 128 take 168, so 3). 64 rows are a warpgroup's
    # product; from 160 on its accumulator leaves room for 2 blocks, and 16 rows of plain mma for 3 (156 registers).
    "sm90": {
        "multiprocessors": 132,
        "slots": {64: (64, 128, 4), 128: (32, 128, 4), 256: (16, 128, 4), 512: (16, 256, 2)},
        "tiles": {64: (64, 64, 128, 4), 128: (64, 64, 128, 3), 256: (16, 32, 128, 3), 512: (16, 32, 128, 2)},
    },
}
MIN_SPLIT = 64  # tokens: a shorter share costs more to join than it saves
MAX_SPLITS = 256

_kernels = {}  # (heads, headdim, page_block_size, direct) -> compiled kernel; lengths, batch and splits stay dynamic
_joins = {}  # (heads, headdim) -> compiled kernel
_workspace = {}  # (batch, heads, splits, headdim, device) -> partial results and their log-sum-exp, float32


@tilelang.jit(pass_configs={"tl.disable_safe_memory_legalize": True})  # every access below is guarded by hand
def attend_slots(num_heads, dim, page_size, direct, BLOCK_N, threads):
    factor = math.log2(math.e) / math.sqrt(dim)  # exp(s / sqrt(d)) = exp2(s * factor)
    width = 2 ** (dim - 1).bit_length()  # a power of two: other tiles have no layout on sm_90
    batch = T.dynamic("batch")
    num_blocks = T.dynamic("num_blocks")
    row = T.dynamic("row")
    num_splits = T.dynamic("num_splits")
    partials = T.dynamic("partials")  # batch, or 1 where a single share goes straight to Output

    @T.prim_func
    def main(
        Q: T.Tensor((batch, 1, num_heads, dim), "bfloat16"),
        K: T.Tensor((num_blocks, page_size, num_heads, dim), "bfloat16"),
        V: T.Tensor((num_blocks, page_size, num_heads, dim), "bfloat16"),
        Output: T.Tensor((batch, 1, num_heads, dim), "bfloat16"),
        CacheSeqlens: T.Tensor((batch,), "int32"),
        BlockTable: T.Tensor((batch, row), "int32"),
        Partial: T.Tensor((partials, num_heads, num_splits, dim), "float32"),
        Lse: T.Tensor((partials, num_heads, num_splits), "float32"),
    ):
        with T.Kernel(batch * num_splits * num_heads, threads=threads) as block:
            query = T.alloc_shared((width,), "bfloat16")
            k = T.alloc_fragment((BLOCK_N, width), "bfloat16")
            v = T.alloc_fragment((BLOCK_N, width), "bfloat16")
            product = T.alloc_fragment((BLOCK_N, width), "float32")
            acc = T.alloc_fragment((BLOCK_N, width), "float32")
            score = T.alloc_fragment((BLOCK_N,), "float32")
            slot_max = T.alloc_fragment((BLOCK_N,), "float32")
            slot_sum = T.alloc_fragment((BLOCK_N,), "float32")
            rescale = T.alloc_fragment((BLOCK_N,), "float32")
            result = T.alloc_fragment((width,), "float32")
            block_max = T.alloc_fragment((1,), "float32")
            block_sum = T.alloc_fragment((1,), "float32")

            head = block % num_heads  # the heads of one token lie side by side in memory
            b = T.alloc_var("int32")  # variables, or the divisions are written out wherever they are used
            split = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            b = block // num_heads // num_splits
            split = block // num_heads - b * num_splits
            share = T.ceildiv(T.ceildiv(CacheSeqlens[b], num_splits), BLOCK_N) * BLOCK_N
            start = split * share
            end = T.min(start + share, CacheSeqlens[b])

            for d in T.Parallel(width):
                query[d] = T.if_then_else(d < dim, Q[b, 0, head, d], T.cast(0, "bfloat16"))
            T.fill(acc, 0)
            T.fill(slot_sum, 0)
            # Finite, so that a slot without any key yet subtracts it from -inf without making a NaN.
            T.fill(slot_max, -3e38)

            for n in T.serial(T.ceildiv(T.max(end - start, 0), BLOCK_N)):
                for j, d in T.Parallel(BLOCK_N, width):
                    k[j, d] = T.if_then_else(
                        start + n * BLOCK_N + j < end and d < dim,
                        K[
                            BlockTable[b, (start + n * BLOCK_N + j) // page_size],
                            (start + n * BLOCK_N + j) % page_size,
                            head,
                            d,
                        ],
                        T.cast(0, "bfloat16"),
                    )
                for j, d in T.Parallel(BLOCK_N, width):
                    v[j, d] = T.if_then_else(
                        start + n * BLOCK_N + j < end and d < dim,
                        V[
                            BlockTable[b, (start + n * BLOCK_N + j) // page_size],
                            (start + n * BLOCK_N + j) % page_size,
                            head,
                            d,
                        ],
                        T.cast(0, "bfloat16"),
                    )
                for j, d in T.Parallel(BLOCK_N, width):
                    product[j, d] = T.cast(k[j, d], "float32") * T.cast(query[d], "float32")
                T.reduce_sum(product, score, dim=1)
                for j in T.Parallel(BLOCK_N):
                    score[j] = T.if_then_else(start + n * BLOCK_N + j < end, score[j] * factor, -T.infinity("float32"))
                for j in T.Parallel(BLOCK_N):
                    rescale[j] = T.exp2(slot_max[j] - T.max(slot_max[j], score[j]))
                    slot_max[j] = T.max(slot_max[j], score[j])
                    score[j] = T.exp2(score[j] - slot_max[j])
                    slot_sum[j] = slot_sum[j] * rescale[j] + score[j]
                for j, d in T.Parallel(BLOCK_N, width):
                    acc[j, d] = acc[j, d] * rescale[j] + score[j] * T.cast(v[j, d], "float32")

            T.reduce_max(slot_max, block_max, dim=0)
            for j in T.Parallel(BLOCK_N):
                rescale[j] = T.exp2(slot_max[j] - block_max[0])
            for j in T.Parallel(BLOCK_N):
                slot_sum[j] *= rescale[j]
            T.reduce_sum(slot_sum, block_sum, dim=0)
            for j, d in T.Parallel(BLOCK_N, width):
                acc[j, d] *= rescale[j]
            T.reduce_sum(acc, result, dim=0)
            # A share without any token has an empty sum: its result is 0 and its log-sum-exp -inf.
            for d in T.Parallel(width):
                result[d] = T.if_then_else(block_sum[0] > 0, result[d] / block_sum[0], 0.0)
            if direct:
                for d in T.Parallel(width):
                    if d < dim:
                        Output[b, 0, head, d] = result[d]
            else:
                for d in T.Parallel(width):
                    if d < dim:
                        Partial[b, head, split, d] = result[d]
                Lse[b, head, split] = T.if_then_else(
                    block_sum[0] > 0, block_max[0] + T.log2(block_sum[0]), -T.infinity("float32")
                )

    return main


@tilelang.jit(pass_configs={"tl.disable_safe_memory_legalize": True})  # every access below is guarded by hand
def attend_tiles(num_heads, num_heads_k, dim, page_size, direct, BLOCK_H, BLOCK_N, threads):
    group = num_heads // num_heads_k
    head_tiles = -(-group // BLOCK_H)  # of one KV head
    factor = math.log2(math.e) / math.sqrt(dim)  # exp(s / sqrt(d)) = exp2(s * factor)
    batch = T.dynamic("batch")
    num_blocks = T.dynamic("num_blocks")
    row = T.dynamic("row")
    num_splits = T.dynamic("num_splits")
    partials = T.dynamic("partials")  # batch, or 1 where a single share goes straight to Output

    @T.prim_func
    def main(
        Q: T.Tensor((batch, 1, num_heads, dim), "bfloat16"),
        K: T.Tensor((num_blocks, page_size, num_heads_k, dim), "bfloat16"),
        V: T.Tensor((num_blocks, page_size, num_heads_k, dim), "bfloat16"),
        Output: T.Tensor((batch, 1, num_heads, dim), "bfloat16"),
        CacheSeqlens: T.Tensor((batch,), "int32"),
        BlockTable: T.Tensor((batch, row), "int32"),
        Partial: T.Tensor((partials, num_heads, num_splits, dim), "float32"),
        Lse: T.Tensor((partials, num_heads, num_splits), "float32"),
    ):
        with T.Kernel(batch * num_splits * num_heads_k * head_tiles, threads=threads) as block:
            Q_shared = T.alloc_shared((BLOCK_H, dim), "bfloat16")
            K_shared = T.alloc_shared((BLOCK_N, dim), "bfloat16")
            V_shared = T.alloc_shared((BLOCK_N, dim), "bfloat16")
            P_shared = T.alloc_shared((BLOCK_H, BLOCK_N), "bfloat16")
            S = T.alloc_fragment((BLOCK_H, BLOCK_N), "float32")
            acc = T.alloc_fragment((BLOCK_H, dim), "float32")
            row_max = T.alloc_fragment((BLOCK_H,), "float32")
            previous_max = T.alloc_fragment((BLOCK_H,), "float32")
            rescale = T.alloc_fragment((BLOCK_H,), "float32")
            row_sum = T.alloc_fragment((BLOCK_H,), "float32")
            tile_sum = T.alloc_fragment((BLOCK_H,), "float32")

            head_tile = block % (num_heads_k * head_tiles)  # KV heads of one token lie side by side in memory
            kv_head = head_tile // head_tiles
            head_0 = kv_head * group + head_tile % head_tiles * BLOCK_H
            heads = T.min(BLOCK_H, (kv_head + 1) * group - head_0)  # rows behind them are padding
            b = T.alloc_var("int32")  # variables, or the divisions are written out wherever they are used
            split = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            b = block // (num_heads_k * head_tiles) // num_splits
            split = block // (num_heads_k * head_tiles) - b * num_splits
            share = T.ceildiv(T.ceildiv(CacheSeqlens[b], num_splits), BLOCK_N) * BLOCK_N
            start = split * share
            end = T.min(start + share, CacheSeqlens[b])

            for i, d in T.Parallel(BLOCK_H, dim):
                Q_shared[i, d] = T.if_then_else(i < heads, Q[b, 0, head_0 + i, d], T.cast(0, "bfloat16"))
            T.fill(acc, 0)
            T.fill(row_sum, 0)
            # Finite, so that a row without any key yet subtracts it from -inf without making a NaN.
            T.fill(row_max, -3e38)

            for n in T.serial(T.ceildiv(T.max(end - start, 0), BLOCK_N)):
                for j, d in T.Parallel(BLOCK_N, dim):
                    K_shared[j, d] = T.if_then_else(
                        start + n * BLOCK_N + j < end,
                        K[
                            BlockTable[b, (start + n * BLOCK_N + j) // page_size],
                            (start + n * BLOCK_N + j) % page_size,
                            kv_head,
                            d,
                        ],
                        T.cast(0, "bfloat16"),
                    )
                for j, d in T.Parallel(BLOCK_N, dim):
                    V_shared[j, d] = T.if_then_else(
                        start + n * BLOCK_N + j < end,
                        V[
                            BlockTable[b, (start + n * BLOCK_N + j) // page_size],
                            (start + n * BLOCK_N + j) % page_size,
                            kv_head,
                            d,
                        ],
                        T.cast(0, "bfloat16"),
                    )
                T.gemm(Q_shared, K_shared, S, transpose_B=True, clear_accum=True)
                if start + (n + 1) * BLOCK_N > end:
                    for i, j in T.Parallel(BLOCK_H, BLOCK_N):
                        S[i, j] = T.if_then_else(start + n * BLOCK_N + j < end, S[i, j], -T.infinity("float32"))
                T.copy(row_max, previous_max)
                T.reduce_max(S, row_max, dim=1, clear=False)
                for i in T.Parallel(BLOCK_H):
                    rescale[i] = T.exp2((previous_max[i] - row_max[i]) * factor)
                for i, j in T.Parallel(BLOCK_H, BLOCK_N):
                    S[i, j] = T.exp2(S[i, j] * factor - row_max[i] * factor)
                T.reduce_sum(S, tile_sum, dim=1)
                for i in T.Parallel(BLOCK_H):
                    row_sum[i] = row_sum[i] * rescale[i] + tile_sum[i]
                for i, d in T.Parallel(BLOCK_H, dim):
                    acc[i, d] *= rescale[i]
                T.copy(S, P_shared)
                T.gemm(P_shared, V_shared, acc)

            # A share without any token has empty sums: its results are 0 and their log-sum-exp -inf.
            for i, d in T.Parallel(BLOCK_H, dim):
                acc[i, d] = T.if_then_else(row_sum[i] > 0, acc[i, d] / row_sum[i], 0.0)
            if direct:
                for i, d in T.Parallel(BLOCK_H, dim):
                    if i < heads:
                        Output[b, 0, head_0 + i, d] = acc[i, d]
            else:
                for i, d in T.Parallel(BLOCK_H, dim):
                    if i < heads:
                        Partial[b, head_0 + i, split, d] = acc[i, d]
                for i in T.Parallel(BLOCK_H):
                    if i < heads:
                        Lse[b, head_0 + i, split] = T.if_then_else(
                            row_sum[i] > 0, row_max[i] * factor + T.log2(row_sum[i]), -T.infinity("float32")
                        )

    return main


@tilelang.jit(pass_configs={"tl.disable_safe_memory_legalize": True})
def join(num_heads, dim, max_splits):
    STEP = 16  # splits added up at a time, by 128 threads
    width = 2 ** (dim - 1).bit_length()  # a power of two: other tiles have no layout on sm_90
    batch = T.dynamic("batch")
    num_splits = T.dynamic("num_splits")

    @T.prim_func
    def main(
        Partial: T.Tensor((batch, num_heads, num_splits, dim), "float32"),
        Lse: T.Tensor((batch, num_heads, num_splits), "float32"),
        Output: T.Tensor((batch, 1, num_heads, dim), "bfloat16"),
    ):
        with T.Kernel(batch * num_heads, threads=128) as block:
            weight = T.alloc_fragment((max_splits,), "float32")
            weights = T.alloc_shared((max_splits,), "float32")
            top = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            acc = T.alloc_fragment((STEP, width), "float32")
            result = T.alloc_fragment((width,), "float32")

            head = block % num_heads
            b = block // num_heads
            for s in T.Parallel(max_splits):
                weight[s] = T.if_then_else(s < num_splits, Lse[b, head, s], -T.infinity("float32"))
            T.reduce_max(weight, top, dim=0)
            for s in T.Parallel(max_splits):
                weight[s] = T.exp2(weight[s] - T.max(top[0], -3e38))
            T.reduce_sum(weight, total, dim=0)
            for s in T.Parallel(max_splits):
                weights[s] = T.if_then_else(total[0] > 0, weight[s] / total[0], 0.0)
            T.fill(acc, 0)
            for n in T.serial(T.ceildiv(num_splits, STEP)):
                for s, d in T.Parallel(STEP, width):
                    if n * STEP + s < num_splits and d < dim:
                        acc[s, d] += Partial[b, head, n * STEP + s, d] * weights[n * STEP + s]
            T.reduce_sum(acc, result, dim=0)
            for d in T.Parallel(width):
                if d < dim:
                    Output[b, 0, head, d] = result[d]

    return main


def run_kernel(
    q,
    k_cache_paged,
    v_cache_paged,
    output,
    cache_seqlens,
    block_table,
    batch_size,
    seqlen_k,
    seqlen_q,
    num_heads,
    num_heads_k,
    headdim,
    page_block_size,
    num_blocks,
    causal,
):
    if batch_size == 0:
        return
    tuning = TUNING[DEVICE]
    size = 64
    while size < headdim:
        size *= 2
    # Slots need a power of two of lanes per row.
    by_slots = num_heads == num_heads_k and (headdim == size or headdim == 32)
    config = tuning["slots"][size] if by_slots else tuning["tiles"][size]
    heads = num_heads if by_slots else num_heads_k * -(-num_heads // num_heads_k // config[0])
    # As many blocks as run at one time; only an upper bound of the lengths is known here.
    fill = tuning["multiprocessors"] * config[-1] // (batch_size * heads)
    num_splits = max(1, min(fill, -(-seqlen_k // MIN_SPLIT), MAX_SPLITS))
    direct = num_splits == 1
    key = (num_heads, num_heads_k, headdim, page_block_size, direct)
    if key not in _kernels:
        if by_slots:
            _kernels[key] = attend_slots(num_heads, headdim, page_block_size, direct, *config[:-1])
        else:
            _kernels[key] = attend_tiles(*key, *config[:-1])
    shape = (1 if direct else batch_size, num_heads, num_splits)
    place = (*shape, headdim, q.device)
    if place not in _workspace:
        _workspace[place] = (
            torch.empty((*shape, headdim), dtype=torch.float32, device=q.device),
            torch.empty(shape, dtype=torch.float32, device=q.device),
        )
    partial, lse = _workspace[place]
    _kernels[key](q, k_cache_paged, v_cache_paged, output, cache_seqlens, block_table, partial, lse)
    if not direct:
        if (num_heads, headdim) not in _joins:
            _joins[num_heads, headdim] = join(num_heads, headdim, MAX_SPLITS)
        _joins[num_heads, headdim](partial, lse, output)
