"""mla_decode in TileLang: paste this file.

    run_kernel(q_nope, q_pe, ckv, kpe, output, q_indptr, kv_indptr, kv_indices, kv_lens,
               batch_size, seq_len, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal)

One query per sequence against a paged latent cache. The heads are the rows of a tile; a tile of cache rows, gathered
token by token through kv_indices, lies in shared memory once and serves transposed as keys and as it is as values.
Sequences are cut into NUM_SPLITS parts by their true lengths, so that one grid fills the chip; `join` weighs the parts
by exp2(lse - largest lse). q_indptr and causal say nothing new for one query each. Behind the last token the last token
is read again under a score of -inf: what the cache holds there is never touched.

Bound by memory with 64 heads (121 FLOP per byte), by the matrix units with 128. Workspace, kept between calls: parts *
(num_heads * 2052 + 8) bytes, 17.3 MB for 132 parts of 64 heads.
"""

import math

import tilelang
import tilelang.language as T
import torch

DEVICE = "c500"

# multiprocessors; heads, rounded up to 16, 32 or 64 -> (BLOCK_H, BLOCK_N, threads, num_stages, blocks per
# multiprocessor). Shared memory: 1152 * (BLOCK_H + tiles of keys * BLOCK_N) + 2 * BLOCK_H * BLOCK_N bytes; the
# accumulator takes BLOCK_H * 512 / threads registers.
TUNING = {
    # 0 stages: one tile of keys, and the next one waits in registers. 55 KiB and 128 threads, two waves: 32 x 16 and
    # 16 x 32 scores are two 16 x 16 products.
    "c500": {
        "multiprocessors": 104,
        "tiles": {16: (16, 32, 128, 0, 1), 32: (32, 16, 128, 0, 1), 64: (32, 16, 128, 0, 1)},
    },
    # 1 stage: two tiles of keys, one loading while the other is multiplied. 225 KiB. A warpgroup multiplies 64 rows,
    # fewer heads are padded; 256 threads are two warpgroups with half of the keys, then half of the columns each.
    "sm90": {
        "multiprocessors": 132,
        "tiles": {16: (64, 64, 256, 1, 1), 32: (64, 64, 256, 1, 1), 64: (64, 64, 256, 1, 1)},
    },
}
MIN_KEYS = 64  # of a part: a shorter one costs more to join than it saves
DIM_CKV, DIM_KPE = 512, 64

_kernels = {}  # (heads, page_size) -> compiled kernel; lengths, batch and parts stay dynamic
_joins = {}  # (heads, columns) -> compiled kernel
_workspace = {}  # (heads, device) -> partial outputs, their log-sum-exp (base 2), first part and parts of a sequence


# Every access is in bounds or under a condition that says so: no check need be added.
@tilelang.jit(pass_configs={"tl.disable_safe_memory_legalize": True, "tl.enable_aggressive_shared_memory_merge": True})
def attend(num_heads, page_size, BLOCK_H, BLOCK_N, threads, num_stages):
    head_tiles = -(-num_heads // BLOCK_H)
    # Tokens of one turn of the loop: two tiles where one is loaded while the other is multiplied.
    TURN = 2 * BLOCK_N if num_stages > 0 else BLOCK_N
    # wgmma takes 64 rows, all there are: its warpgroups divide the columns.
    policy = T.GemmWarpPolicy.FullCol if num_stages > 0 else T.GemmWarpPolicy.FullRow
    factor = math.log2(math.e) / math.sqrt(DIM_CKV + DIM_KPE)  # exp(s / sqrt(d)) = exp2(s * factor)
    batch = T.dynamic("batch")
    offsets = T.dynamic("offsets")  # batch + 1
    num_pages = T.dynamic("num_pages")
    used_pages = T.dynamic("used_pages")
    parts = T.dynamic("parts")
    sequences = T.dynamic("sequences")

    @T.prim_func
    def main(
        Q: T.Tensor((batch, num_heads, DIM_CKV), "bfloat16"),
        Qr: T.Tensor((batch, num_heads, DIM_KPE), "bfloat16"),
        Ckv: T.Tensor((num_pages, page_size, DIM_CKV), "bfloat16"),
        Kpe: T.Tensor((num_pages, page_size, DIM_KPE), "bfloat16"),
        Output: T.Tensor((batch, num_heads, DIM_CKV), "bfloat16"),
        KvIndptr: T.Tensor((offsets,), "int32"),
        KvIndices: T.Tensor((used_pages,), "int32"),
        KvLens: T.Tensor((batch,), "int32"),
        Partial: T.Tensor((parts, num_heads, DIM_CKV), "float32"),
        Lse: T.Tensor((parts, num_heads), "float32"),
        Plan: T.Tensor((sequences, 2), "int32"),
    ):
        # The head tiles of a part are neighbours: all but the first find its keys in the L2 cache.
        with T.Kernel(parts * head_tiles, threads=threads) as block:
            Q_shared = T.alloc_shared((BLOCK_H, DIM_CKV), "bfloat16")
            R_shared = T.alloc_shared((BLOCK_H, DIM_KPE), "bfloat16")
            K_shared = T.alloc_shared((BLOCK_N, DIM_CKV), "bfloat16")
            Kr_shared = T.alloc_shared((BLOCK_N, DIM_KPE), "bfloat16")
            P_shared = T.alloc_shared((BLOCK_H, BLOCK_N), "bfloat16")
            splits = T.alloc_shared((threads,), "int32")
            count = T.alloc_fragment((threads,), "int32")
            total = T.alloc_fragment((1,), "int32")
            S = T.alloc_fragment((BLOCK_H, BLOCK_N), "float32")
            acc = T.alloc_fragment((BLOCK_H, DIM_CKV), "float32")
            row_max = T.alloc_fragment((BLOCK_H,), "float32")
            previous_max = T.alloc_fragment((BLOCK_H,), "float32")
            rescale = T.alloc_fragment((BLOCK_H,), "float32")
            row_sum = T.alloc_fragment((BLOCK_H,), "float32")
            tile_sum = T.alloc_fragment((BLOCK_H,), "float32")

            # Row j of a tile is loaded by 64 threads, 16 bytes each, row j of its rope part by 8.
            by_row = T.Fragment(
                (BLOCK_N,),
                forward_thread_fn=lambda j, lane: j % (threads // 64) * 64 + lane,
                forward_index_fn=lambda j: j // (threads // 64),
                replicate=64,
            )
            by_r_row = T.Fragment(
                (BLOCK_N,),
                forward_thread_fn=lambda j, lane: j % (threads // 8) * 8 + lane,
                forward_index_fn=lambda j: j // (threads // 8),
                replicate=8,
            )
            pages = T.alloc_fragment((BLOCK_N,), "int32")
            r_pages = T.alloc_fragment((BLOCK_N,), "int32")
            T.annotate_layout({pages: by_row, r_pages: by_r_row})

            part = block // head_tiles
            head_0 = block % head_tiles * BLOCK_H

            # A sequence gets ceil(turns / chunk) parts and one at least; the chunk is so large that all fit.
            T.fill(count, 0)
            for n in T.serial(T.ceildiv(batch, threads)):
                for i in T.Parallel(threads):
                    if n * threads + i < batch:
                        count[i] += T.ceildiv(KvLens[n * threads + i], TURN)
            T.reduce_sum(count, total, dim=0)
            chunk = T.alloc_var("int32")
            chunk = 0x7FFFFFFF
            if parts > batch:
                chunk = T.max(-(-MIN_KEYS // TURN), T.ceildiv(total[0], parts - batch))

            # b: the sequence of this part; num_splits stays 0 if there are fewer parts than blocks.
            b = T.alloc_var("int32")
            first_part = T.alloc_var("int32")
            num_splits = T.alloc_var("int32")
            b = 0
            first_part = 0
            num_splits = 0
            for n in T.serial(T.ceildiv(batch, threads)):
                for i in T.Parallel(threads):
                    if n * threads + i < batch:
                        splits[i] = T.max(T.ceildiv(KvLens[n * threads + i], TURN) - 1, 0) // chunk + 1
                for i in T.serial(T.min(threads, batch - n * threads)):
                    if num_splits == 0:
                        if part < first_part + splits[i]:
                            b = n * threads + i
                            num_splits = splits[i]
                        else:
                            first_part += splits[i]

            kv_len = KvLens[b]
            page_0 = KvIndptr[b]
            token_0 = T.alloc_var("int32")
            turns = T.alloc_var("int32")
            token_0 = 0
            turns = 0
            if num_splits > 0:
                # An even share of the sequence's turns.
                token_0 = T.ceildiv(kv_len, TURN) * (part - first_part) // T.max(num_splits, 1) * TURN
                turns = T.ceildiv(kv_len, TURN) * (part - first_part + 1) // T.max(num_splits, 1) - token_0 // TURN
                if part == first_part:
                    Plan[b, 0] = first_part
                    Plan[b, 1] = num_splits

            # Rows past the last head are 0.
            for i, d in T.Parallel(BLOCK_H, DIM_CKV):
                Q_shared[i, d] = T.if_then_else(head_0 + i < num_heads, Q[b, head_0 + i, d], T.cast(0, "bfloat16"))
            for i, d in T.Parallel(BLOCK_H, DIM_KPE):
                R_shared[i, d] = T.if_then_else(head_0 + i < num_heads, Qr[b, head_0 + i, d], T.cast(0, "bfloat16"))
            T.fill(acc, 0)
            T.fill(row_sum, 0)
            # Finite, so that a row without any key yet subtracts it from -inf without making a NaN.
            T.fill(row_max, -3e38)

            # Page ids are read a turn ahead of the rows, so that no row waits for one; behind the last token, its page.
            if turns > 0:
                for j in T.Parallel(BLOCK_N):
                    r_pages[j] = KvIndices[page_0 + T.min(token_0 + j, kv_len - 1) // page_size]
                for j in T.Parallel(BLOCK_N):
                    pages[j] = KvIndices[page_0 + T.min(token_0 + j, kv_len - 1) // page_size]
            if num_stages > 0:
                K_other = T.alloc_shared((BLOCK_N, DIM_CKV), "bfloat16")
                Kr_other = T.alloc_shared((BLOCK_N, DIM_KPE), "bfloat16")
                pages_other = T.alloc_fragment((BLOCK_N,), "int32")
                r_pages_other = T.alloc_fragment((BLOCK_N,), "int32")
                T.annotate_layout({pages_other: by_row, r_pages_other: by_r_row})
                if turns > 0:
                    for j in T.Parallel(BLOCK_N):
                        r_pages_other[j] = KvIndices[page_0 + T.min(token_0 + BLOCK_N + j, kv_len - 1) // page_size]
                    for j in T.Parallel(BLOCK_N):
                        pages_other[j] = KvIndices[page_0 + T.min(token_0 + BLOCK_N + j, kv_len - 1) // page_size]
            else:
                K_next = T.alloc_fragment((BLOCK_N, DIM_CKV), "bfloat16")
                Kr_next = T.alloc_fragment((BLOCK_N, DIM_KPE), "bfloat16")
                if turns > 0:
                    for j, d in T.Parallel(BLOCK_N, DIM_KPE):
                        Kr_next[j, d] = Kpe[r_pages[j], T.min(token_0 + j, kv_len - 1) % page_size, d]
                    for j, d in T.Parallel(BLOCK_N, DIM_CKV):
                        K_next[j, d] = Ckv[pages[j], T.min(token_0 + j, kv_len - 1) % page_size, d]
                    for j in T.Parallel(BLOCK_N):
                        r_pages[j] = KvIndices[page_0 + T.min(token_0 + TURN + j, kv_len - 1) // page_size]
                    for j in T.Parallel(BLOCK_N):
                        pages[j] = KvIndices[page_0 + T.min(token_0 + TURN + j, kv_len - 1) // page_size]

            for n in T.Pipelined(turns, num_stages=num_stages):
                if num_stages > 0:
                    for j, d in T.Parallel(BLOCK_N, DIM_KPE):
                        Kr_shared[j, d] = Kpe[r_pages[j], T.min(token_0 + n * TURN + j, kv_len - 1) % page_size, d]
                    for j, d in T.Parallel(BLOCK_N, DIM_CKV):
                        K_shared[j, d] = Ckv[pages[j], T.min(token_0 + n * TURN + j, kv_len - 1) % page_size, d]
                    for j in T.Parallel(BLOCK_N):
                        r_pages[j] = KvIndices[page_0 + T.min(token_0 + (n + 1) * TURN + j, kv_len - 1) // page_size]
                    for j in T.Parallel(BLOCK_N):
                        pages[j] = KvIndices[page_0 + T.min(token_0 + (n + 1) * TURN + j, kv_len - 1) // page_size]
                else:
                    T.copy(K_next, K_shared)
                    T.copy(Kr_next, Kr_shared)
                    if n + 1 < turns:
                        for j, d in T.Parallel(BLOCK_N, DIM_KPE):
                            Kr_next[j, d] = Kpe[
                                r_pages[j], T.min(token_0 + (n + 1) * TURN + j, kv_len - 1) % page_size, d
                            ]
                        for j, d in T.Parallel(BLOCK_N, DIM_CKV):
                            K_next[j, d] = Ckv[pages[j], T.min(token_0 + (n + 1) * TURN + j, kv_len - 1) % page_size, d]
                        for j in T.Parallel(BLOCK_N):
                            r_pages[j] = KvIndices[
                                page_0 + T.min(token_0 + (n + 2) * TURN + j, kv_len - 1) // page_size
                            ]
                        for j in T.Parallel(BLOCK_N):
                            pages[j] = KvIndices[page_0 + T.min(token_0 + (n + 2) * TURN + j, kv_len - 1) // page_size]
                # Scores against the keys of a tile, online softmax, output from the same tile.
                T.gemm(R_shared, Kr_shared, S, transpose_B=True, clear_accum=True, policy=policy)
                T.gemm(Q_shared, K_shared, S, transpose_B=True, policy=policy)
                if token_0 + n * TURN + BLOCK_N > kv_len:
                    for i, j in T.Parallel(BLOCK_H, BLOCK_N):
                        S[i, j] = T.if_then_else(token_0 + n * TURN + j < kv_len, S[i, j], -T.infinity("float32"))
                T.copy(row_max, previous_max)
                T.reduce_max(S, row_max, dim=1, clear=False)
                for i in T.Parallel(BLOCK_H):
                    rescale[i] = T.exp2((previous_max[i] - row_max[i]) * factor)
                for i, j in T.Parallel(BLOCK_H, BLOCK_N):
                    S[i, j] = T.exp2(S[i, j] * factor - row_max[i] * factor)
                T.reduce_sum(S, tile_sum, dim=1)
                for i in T.Parallel(BLOCK_H):
                    row_sum[i] = row_sum[i] * rescale[i] + tile_sum[i]
                T.copy(S, P_shared)
                for i, d in T.Parallel(BLOCK_H, DIM_CKV):
                    acc[i, d] *= rescale[i]
                T.gemm(P_shared, K_shared, acc, policy=policy)
                if num_stages > 0:  # the same for the other tile
                    for j, d in T.Parallel(BLOCK_N, DIM_KPE):
                        Kr_other[j, d] = Kpe[
                            r_pages_other[j], T.min(token_0 + n * TURN + BLOCK_N + j, kv_len - 1) % page_size, d
                        ]
                    for j, d in T.Parallel(BLOCK_N, DIM_CKV):
                        K_other[j, d] = Ckv[
                            pages_other[j], T.min(token_0 + n * TURN + BLOCK_N + j, kv_len - 1) % page_size, d
                        ]
                    for j in T.Parallel(BLOCK_N):
                        r_pages_other[j] = KvIndices[
                            page_0 + T.min(token_0 + (n + 1) * TURN + BLOCK_N + j, kv_len - 1) // page_size
                        ]
                    for j in T.Parallel(BLOCK_N):
                        pages_other[j] = KvIndices[
                            page_0 + T.min(token_0 + (n + 1) * TURN + BLOCK_N + j, kv_len - 1) // page_size
                        ]
                    T.gemm(R_shared, Kr_other, S, transpose_B=True, clear_accum=True, policy=policy)
                    T.gemm(Q_shared, K_other, S, transpose_B=True, policy=policy)
                    if token_0 + n * TURN + BLOCK_N + BLOCK_N > kv_len:
                        for i, j in T.Parallel(BLOCK_H, BLOCK_N):
                            S[i, j] = T.if_then_else(
                                token_0 + n * TURN + BLOCK_N + j < kv_len, S[i, j], -T.infinity("float32")
                            )
                    T.copy(row_max, previous_max)
                    T.reduce_max(S, row_max, dim=1, clear=False)
                    for i in T.Parallel(BLOCK_H):
                        rescale[i] = T.exp2((previous_max[i] - row_max[i]) * factor)
                    for i, j in T.Parallel(BLOCK_H, BLOCK_N):
                        S[i, j] = T.exp2(S[i, j] * factor - row_max[i] * factor)
                    T.reduce_sum(S, tile_sum, dim=1)
                    for i in T.Parallel(BLOCK_H):
                        row_sum[i] = row_sum[i] * rescale[i] + tile_sum[i]
                    T.copy(S, P_shared)
                    for i, d in T.Parallel(BLOCK_H, DIM_CKV):
                        acc[i, d] *= rescale[i]
                    T.gemm(P_shared, K_other, acc, policy=policy)

            # The whole sequence: its output; without any token the sums are empty and the output is 0. Else a part.
            for i in T.Parallel(BLOCK_H):
                rescale[i] = T.if_then_else(row_sum[i] > 0, 1.0 / row_sum[i], 0.0)
            if num_splits == 1:
                for i, d in T.Parallel(BLOCK_H, DIM_CKV):
                    if head_0 + i < num_heads:
                        Output[b, head_0 + i, d] = acc[i, d] * rescale[i]
            if num_splits > 1:
                for i, d in T.Parallel(BLOCK_H, DIM_CKV):
                    if head_0 + i < num_heads:
                        Partial[part, head_0 + i, d] = acc[i, d] * rescale[i]
                for i in T.Parallel(BLOCK_H):
                    if head_0 + i < num_heads:
                        Lse[part, head_0 + i] = row_max[i] * factor + T.log2(row_sum[i])

    return main


@tilelang.jit
def join(num_heads, COLUMNS):
    STEP = 4096 // COLUMNS  # parts added up at a time: eight loads of 16 bytes per thread in flight
    column_tiles = DIM_CKV // COLUMNS
    batch = T.dynamic("batch")
    capacity = T.dynamic("capacity")
    sequences = T.dynamic("sequences")

    @T.prim_func
    def main(
        Partial: T.Tensor((capacity, num_heads, DIM_CKV), "float32"),
        Lse: T.Tensor((capacity, num_heads), "float32"),
        Plan: T.Tensor((sequences, 2), "int32"),
        Output: T.Tensor((batch, num_heads, DIM_CKV), "bfloat16"),
    ):
        with T.Kernel(num_heads * column_tiles, batch, threads=128) as (tile, b):
            lse = T.alloc_fragment((128,), "float32")
            top = T.alloc_fragment((1,), "float32")
            weight = T.alloc_fragment((STEP,), "float32")
            weights = T.alloc_fragment((STEP,), "float32")
            total = T.alloc_fragment((1,), "float32")
            acc = T.alloc_fragment((STEP, COLUMNS), "float32")
            result = T.alloc_fragment((COLUMNS,), "float32")

            head = tile // column_tiles
            column_0 = tile % column_tiles * COLUMNS
            first_part = Plan[b, 0]
            num_splits = Plan[b, 1]
            if num_splits > 1:  # else the output is there already
                T.fill(top, -3e38)
                for n in T.serial(T.ceildiv(num_splits, 128)):
                    for s in T.Parallel(128):
                        lse[s] = Lse[first_part + T.min(n * 128 + s, num_splits - 1), head]
                    T.reduce_max(lse, top, dim=0, clear=False)
                T.fill(weights, 0)
                T.fill(acc, 0)
                for n in T.serial(T.ceildiv(num_splits, STEP)):
                    for s in T.Parallel(STEP):
                        weight[s] = T.if_then_else(
                            n * STEP + s < num_splits,
                            T.exp2(Lse[first_part + T.min(n * STEP + s, num_splits - 1), head] - top[0]),
                            0.0,
                        )
                        weights[s] += weight[s]
                    for s, d in T.Parallel(STEP, COLUMNS):
                        acc[s, d] += (
                            Partial[first_part + T.min(n * STEP + s, num_splits - 1), head, column_0 + d] * weight[s]
                        )
                T.reduce_sum(weights, total, dim=0)
                T.reduce_sum(acc, result, dim=0)
                for d in T.Parallel(COLUMNS):
                    Output[b, head, column_0 + d] = result[d] / total[0]

    return main


def run_kernel(
    q_nope,
    q_pe,
    ckv,
    kpe,
    output,
    q_indptr,
    kv_indptr,
    kv_indices,
    kv_lens,
    batch_size,
    seq_len,
    num_heads,
    head_dim_ckv,
    head_dim_kpe,
    page_size,
    causal,
):
    if batch_size == 0:
        return
    tuning = TUNING[DEVICE]
    rows = 16 if num_heads <= 16 else 32 if num_heads <= 32 else 64
    BLOCK_H, BLOCK_N, threads, num_stages, blocks = tuning["tiles"][rows]
    # As many parts as run at once. Each sequence may round up to a part more than its share: with many sequences the
    # spare parts that this takes are half a chip's. No sequence needs more than seq_len / MIN_KEYS parts and one.
    resident = max(1, tuning["multiprocessors"] * blocks // -(-num_heads // BLOCK_H))
    needed = batch_size if seq_len <= MIN_KEYS else batch_size * (-(-seq_len // MIN_KEYS) + 1)
    parts = min(max(resident, batch_size + -(-resident // 2)), needed)

    place = (num_heads, q_nope.device)
    if place not in _workspace or _workspace[place][0].shape[0] < parts:
        _workspace[place] = (
            torch.empty((parts, num_heads, DIM_CKV), dtype=torch.float32, device=q_nope.device),
            torch.empty((parts, num_heads), dtype=torch.float32, device=q_nope.device),
            torch.empty((parts, 2), dtype=torch.int32, device=q_nope.device),
        )
    partial, lse, plan = _workspace[place]
    partial, lse = partial[:parts], lse[:parts]
    if (num_heads, page_size) not in _kernels:
        _kernels[num_heads, page_size] = attend(num_heads, page_size, BLOCK_H, BLOCK_N, threads, num_stages)
    _kernels[num_heads, page_size](q_nope, q_pe, ckv, kpe, output, kv_indptr, kv_indices, kv_lens, partial, lse, plan)
    if parts > batch_size:
        columns = 128 if parts >= 16 * batch_size else DIM_CKV  # more blocks where a sequence has many parts
        if (num_heads, columns) not in _joins:
            _joins[num_heads, columns] = join(num_heads, columns)
        _joins[num_heads, columns](partial, lse, plan, output)
