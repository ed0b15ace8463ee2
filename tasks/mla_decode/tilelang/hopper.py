"""mla_decode in TileLang, for NVIDIA Hopper alone: run_kernel.py beside this file is the one to paste.

    run_kernel(q_nope, q_pe, ckv, kpe, output, q_indptr, kv_indptr, kv_indices, kv_lens,
               batch_size, seq_len, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal)

Contract: that of run_kernel.py. Taken here: head dims 512 / 64, tensors aligned to 16 bytes. All else goes to
run_kernel.py.

Needs TileLang 0.1.15 (wgmma_gemm, manual barriers, cp.async into a barrier) and compute capability 9.x.

Algorithm: a block takes 64 heads and one part of a sequence, by run_kernel.py's formula, in tiles of 64 tokens. Its
third warpgroup gathers the tokens into two places, each in halves of 256 columns, the right one with the rope part.
Warpgroup x has the columns 256 x .. 256 x + 255 of the output, and the scores of the tiles t with t % 2 == x, which lie
in place x: the scores of a tile are computed once, and one warpgroup's softmax runs beside the other's products.

    warpgroup 0: scores 0, softmax 0, O += P0 V0 | scores 2, O += P1 V1, softmax 2, O += P2 V2 | ...
    warpgroup 1: scores 1, O += P0 V0, softmax 1, O += P1 V1 | scores 3, O += P2 V2, softmax 3, O += P3 V3 | ...

P goes to the other warpgroup through shared memory, to where the tile's rope part was, with the maxima that it is
relative to. Those follow the scores only where they are exceeded by SLACK, so that the output is seldom rescaled.

Where all blocks run at once the launch is a cooperative one: after a barrier of the grid the blocks of a sequence join
its parts, each a share of the heads and columns. Elsewhere run_kernel.py's second launch does.

Barriers; n counts the tiles in a place.
  left_full, right_full[place]  128 arrivals, by the copies of each loading thread: parity n % 2.
  left_free, right_free[place]  4 arrivals, one lane of each warp of warpgroup 0 (left) or 1 (right), after the last
                                product that reads the half: parity (n + 1) % 2, at once for n = 0. The scores of that
                                tile were done before, since P depends on them; the one half of the two that is not of
                                the warpgroup that made P also tells that P has been read.
  p_full[place]                 128 arrivals, after P, its maxima and factors are written: parity n % 2. They may be
                                overwritten when the other warpgroup's next P has come, which is made after the read.
  q_full                        256 arrivals, by the copies of Q.

Without a GPU the row "c500" of TUNING runs (it is no row for a C500: the file to paste is): the same parts, pages,
masks and softmax by T.gemm and plain copies, one tile after the other, and run_kernel.py's join. cp.async, wgmma, the
barriers and the join of the cooperative launch do not run there: it shows a wrong formula, not a race or a deadlock.
"""

import math
import pathlib
import sys
import types

import tilelang
import tilelang.language as T
import torch
from tilelang.cuda.language import wgmma_gemm

DEVICE = "c500"

# multiprocessors (a GPU is asked for its own); (BLOCK_H, BLOCK_N, hopper); for up to 64 heads and for more: whether
# scores are issued before the product with the other warpgroup's P. Before, the softmax runs beside that product, which
# pays where the matrix units are the bound; after, the tile before is given back without waiting for this one's data,
# which pays where memory is. Shared memory: 1152 * (BLOCK_H + 2 * BLOCK_N) bytes = 216 of 227 KiB. c500: see above.
TUNING = {
    "c500": {"multiprocessors": 16, "tile": (16, 32, False), "scores_first": (False, False)},
    "sm90": {"multiprocessors": 132, "tile": (64, 64, True), "scores_first": (False, True)},
}
MIN_KEYS = 64  # of a part: a shorter one costs more to join than it saves
DIM_CKV, DIM_KPE, HALF = 512, 64, 256
FACTOR = math.log2(math.e) / math.sqrt(DIM_CKV + DIM_KPE)  # exp(s / sqrt(d)) = exp2(s * FACTOR)
SLACK = 8 / FACTOR  # P is at most 2 ** 8

_multiprocessors = {}  # device -> how many
_kernels = {}  # (heads, page size, in one launch) -> compiled kernel; lengths, batch and parts stay dynamic
_joins = {}  # (heads, columns) -> run_kernel.py's compiled kernel
_workspace = {}  # (heads, parts, batch, device) -> partial outputs, their log-sum-exp (base 2), first part and parts


@tilelang.jit(
    pass_configs={
        "tl.enable_fast_math": True,
        "tl.disable_safe_memory_legalize": True,  # every access is in bounds
        "tl.disable_thread_storage_sync": True,  # all barriers between threads are written out
    }
)
def attend(num_heads, page_size, BLOCK_H, BLOCK_N, hopper, scores_first, one_launch):
    head_tiles = -(-num_heads // BLOCK_H)
    places = 2 if hopper else 1
    batch = T.dynamic("batch")
    offsets = T.dynamic("offsets")  # batch + 1
    num_pages = T.dynamic("num_pages")
    used_pages = T.dynamic("used_pages")
    parts = T.dynamic("parts")
    policy = T.GemmWarpPolicy.FullRow
    SEQUENCE, SPLIT, SPLITS, FIRST_PART, PAGE_0 = range(5)

    @T.macro
    def locate(part, lane, info, KvLens, KvIndptr):
        # A sequence gets ceil(tiles / chunk) parts and one at least; the chunk is so large that all fit.
        total = T.alloc_var("int32")
        chunk = T.alloc_var("int32")
        first = T.alloc_var("int32")
        splits = T.alloc_var("int32")
        total = 0
        if hopper:  # every warp for itself, a sequence to a lane
            i = T.alloc_var("int32")
            upto = T.alloc_var("int32")
            below = T.alloc_var("int32")
            source = T.alloc_var("int32")
            page = T.alloc_var("int32")
            for n in T.serial(T.ceildiv(batch, 32)):
                if n * 32 + lane < batch:
                    total += T.ceildiv(KvLens[n * 32 + lane], BLOCK_N)
            for k in T.unroll(5):
                total += T.shfl_xor(total, 1 << k)
        else:
            for i in T.serial(batch):
                total += T.ceildiv(KvLens[i], BLOCK_N)
        chunk = 0x7FFFFFFF
        if parts > batch:
            chunk = T.max(-(-MIN_KEYS // BLOCK_N), T.ceildiv(total, parts - batch))
        info[SEQUENCE] = 0
        info[SPLIT] = 0
        info[SPLITS] = 0  # stays 0 if there are fewer parts than blocks
        info[FIRST_PART] = 0
        info[PAGE_0] = 0
        first = 0
        if hopper:
            i = lane
            while i - lane < batch:
                splits = 0
                page = 0
                if i < batch:
                    splits = T.max(T.ceildiv(KvLens[i], BLOCK_N) - 1, 0) // chunk + 1
                    page = KvIndptr[i]
                upto = splits
                for k in T.unroll(5):
                    below = T.shfl_up(upto, 1 << k)
                    if lane >= 1 << k:
                        upto += below
                source = -1
                if part - first >= upto - splits and part - first < upto:
                    source = lane
                for k in T.unroll(5):
                    source = T.max(source, T.shfl_xor(source, 1 << k))
                if source >= 0:
                    info[SEQUENCE] = i - lane + source
                    info[SPLITS] = T.shfl_sync(splits, source)
                    info[FIRST_PART] = first + T.shfl_sync(upto - splits, source)
                    info[SPLIT] = part - info[FIRST_PART]
                    info[PAGE_0] = T.shfl_sync(page, source)
                first += T.shfl_sync(upto, 31)
                i += 32
        else:
            for i in T.serial(batch):
                splits = T.max(T.ceildiv(KvLens[i], BLOCK_N) - 1, 0) // chunk + 1
                if part >= first and part < first + splits:
                    info[SEQUENCE] = i
                    info[SPLIT] = part - first
                    info[SPLITS] = splits
                    info[FIRST_PART] = first
                    info[PAGE_0] = KvIndptr[i]
                first += splits

    @T.macro
    def softmax(S, fresh, row_max, previous, scale, sums, first_key, kv_len):
        """Scores to P, relative to the maxima fresh. previous: those that the output is relative to; scale: what makes
        it relative to fresh. row_max: those that sums is relative to, fresh from now on."""
        if first_key + BLOCK_N > kv_len:
            for i, j in T.Parallel(BLOCK_H, BLOCK_N):
                S[i, j] = T.if_then_else(first_key + j < kv_len, S[i, j], -T.infinity("float32"))
        T.reduce_max(S, fresh, dim=1)
        for i in T.Parallel(BLOCK_H):
            fresh[i] = T.if_then_else(fresh[i] > previous[i] + SLACK, fresh[i], previous[i])
        for i in T.Parallel(BLOCK_H):
            scale[i] = T.exp2((row_max[i] - fresh[i]) * FACTOR)
        for i, j in T.Parallel(BLOCK_H, BLOCK_N):
            S[i, j] = T.exp2(S[i, j] * FACTOR - fresh[i] * FACTOR)
        # A layout of partial sums would have to name threads, and TileLang leaves out, without a word, what a branch of
        # other threads does with them.
        for i in T.Parallel(BLOCK_H):
            sums[i] *= scale[i]
        T.reduce_sum(S, sums, dim=1, clear=False)
        for i in T.Parallel(BLOCK_H):
            scale[i] = T.exp2((previous[i] - fresh[i]) * FACTOR)
        T.copy(fresh, row_max)

    @T.macro
    def rescale(acc, scale):
        for i, d in T.Parallel(BLOCK_H, HALF):
            acc[i, d] *= scale[i]

    @T.macro
    def store(acc, inverse, x, info, part, head_0, Output, Partial):
        """Half x of the columns: of the output if the sequence is not cut, else of the part's."""
        if info[SPLITS] == 1:
            for i, d in T.Parallel(BLOCK_H, HALF):
                if head_0 + i < num_heads:
                    Output[info[SEQUENCE], head_0 + i, x * HALF + d] = acc[i, d] * inverse[i]
        if info[SPLITS] > 1:
            for i, d in T.Parallel(BLOCK_H, HALF):
                if head_0 + i < num_heads:
                    Partial[part, head_0 + i, x * HALF + d] = acc[i, d] * inverse[i]

    @T.macro
    def store_lse(row_max, row_sum, info, part, head_0, Lse):
        if info[SPLITS] > 1:
            for i in T.Parallel(BLOCK_H):
                if head_0 + i < num_heads:
                    Lse[part, head_0 + i] = row_max[i] * FACTOR + T.log2(row_sum[i])

    # ---- For Hopper: the loading warpgroup --------------------------------------------------------------------------

    @T.macro
    def copy_half(t, thread, pages, first, kv_len, Ckv, K_half, column_0):
        """Eight threads copy 128 bytes of a row at a time; this one 16 bytes of rows row, row + 16, row + 32, row + 48.
        Rows behind the last token become 0."""
        row = thread // 8
        column = thread % 8 * 8
        for r in T.unroll(4):
            token = first + t * BLOCK_N + r * 16 + row
            for c in T.unroll(K_half.shape[2] // 64):
                T.ptx_cp_async(
                    T.access_ptr(K_half[t % 2, r * 16 + row, c * 64 + column], "w", 8),
                    T.access_ptr(Ckv[pages[r], token % page_size, column_0 + c * 64 + column], "r", 8),
                    8,
                    token < kv_len,
                )

    @T.macro
    def look_up(t, thread, pages, first, kv_len, page_0, KvIndices):
        """Pages of this thread's rows of tile t; behind the last token, its page."""
        for r in T.unroll(4):
            pages[r] = KvIndices[page_0 + T.min(first + t * BLOCK_N + r * 16 + thread // 8, kv_len - 1) // page_size]

    @T.macro
    def gather(thread, first, tiles, kv_len, page_0, KvIndices, Ckv, Kpe, tile, full, free):
        K_left, K_right, K_rope = tile
        left_full, right_full = full
        left_free, right_free = free
        pages = T.alloc_local((4,), "int32")
        if tiles > 0:
            look_up(0, thread, pages, first, kv_len, page_0, KvIndices)
        for t in T.serial(tiles):
            T.barrier_wait(left_free[t % 2], t // 2 % 2 ^ 1)
            copy_half(t, thread, pages, first, kv_len, Ckv, K_left, 0)
            T.cp_async_barrier_noinc(left_full[t % 2])
            T.barrier_wait(right_free[t % 2], t // 2 % 2 ^ 1)
            copy_half(t, thread, pages, first, kv_len, Ckv, K_right, HALF)
            copy_half(t, thread, pages, first, kv_len, Kpe, K_rope, 0)
            T.cp_async_barrier_noinc(right_full[t % 2])
            look_up(t + 1, thread, pages, first, kv_len, page_0, KvIndices)  # a tile ahead

    # ---- For Hopper: the multiplying warpgroups ---------------------------------------------------------------------

    @T.macro
    def load_queries(thread, sequence, head_0, Q, Qr, queries, q_full):
        """By 256 threads. Rows past the last head become 0."""
        Q_left, Q_right, Q_rope = queries
        column = thread % 8 * 8
        for r in T.unroll(2):
            row = r * 32 + thread // 8
            head = T.min(head_0 + row, num_heads - 1)
            for c in T.unroll(HALF // 64):
                T.ptx_cp_async(
                    T.access_ptr(Q_left[row, c * 64 + column], "w", 8),
                    T.access_ptr(Q[sequence, head, c * 64 + column], "r", 8),
                    8,
                    head_0 + row < num_heads,
                )
                T.ptx_cp_async(
                    T.access_ptr(Q_right[row, c * 64 + column], "w", 8),
                    T.access_ptr(Q[sequence, head, HALF + c * 64 + column], "r", 8),
                    8,
                    head_0 + row < num_heads,
                )
            T.ptx_cp_async(
                T.access_ptr(Q_rope[row, column], "w", 8),
                T.access_ptr(Qr[sequence, head, column], "r", 8),
                8,
                head_0 + row < num_heads,
            )
        T.cp_async_barrier_noinc(q_full)

    @T.macro
    def scores(x, n, S, queries, tile, full):
        """Issued, not waited for: three groups of wgmma."""
        Q_left, Q_right, Q_rope = queries
        K_left, K_right, K_rope = tile
        left_full, right_full = full
        # cp.async writes by the generic proxy, wgmma reads by the other one.
        T.barrier_wait(left_full[x], n % 2)
        T.fence_proxy_async()
        wgmma_gemm(Q_left, K_left[x, :, :], S, transpose_B=True, clear_accum=True, policy=policy)
        T.barrier_wait(right_full[x], n % 2)
        T.fence_proxy_async()
        wgmma_gemm(Q_right, K_right[x, :, :], S, transpose_B=True, policy=policy)
        wgmma_gemm(Q_rope, K_rope[x, :, :], S, transpose_B=True, policy=policy)

    @T.macro
    def settle(pending, X, columns):
        """Until at most `pending` groups are on their way, X being done: then X is read, not before."""
        T.wait_wgmma(pending)
        T.warpgroup_fence_operand(X, num_regs=columns // 2)

    @T.macro
    def release(free, place):
        if T.shuffle_elect(32):
            T.barrier_arrive(free[place])

    @T.macro
    def publish(x, t, P, fresh, previous, scale, K_rope, exchange, p_full):
        maxima, factors, raised = exchange
        T.copy(P, K_rope[x, :, :])
        T.copy(fresh, maxima[x, :])
        T.copy(scale, factors[x, :])
        for i in T.Parallel(BLOCK_H):
            if fresh[i] != previous[i]:
                raised[x, i // 16] = t  # told by all rows of a warp alike; what it held before only costs time
        T.fence_proxy_async()
        T.barrier_arrive(p_full[x])
        T.sync_warp()  # `raised` is read by this warp

    @T.macro
    def product(x, t, warp, P, V, acc, scale, raised, in_flight):
        """Issued, not waited for: acc += P V of tile t, in place x. in_flight: scores are."""
        if raised[x, warp] == t:
            if in_flight:
                T.wait_wgmma(0)  # registers change only while no product is on its way; it happens seldom
            rescale(acc, scale)
        wgmma_gemm(P, V[x, :, :], acc, policy=policy)

    @T.macro
    def multiply(
        x, thread, first, tiles, kv_len, info, part, head_0, queries, tile, V, exchange, ends, full, free, p_full,
        Output, Partial, Lse,
    ):  # fmt: skip
        """All that warpgroup x does once Q is there. V, free: its half of the columns."""
        K_rope = tile[2]
        maxima, factors, raised = exchange
        last_maxima, totals = ends
        S = T.alloc_fragment((BLOCK_H, BLOCK_N), "float32")
        P = T.alloc_fragment((BLOCK_H, BLOCK_N), "bfloat16")
        acc = T.alloc_fragment((BLOCK_H, HALF), "float32")
        fresh = T.alloc_fragment((BLOCK_H,), "float32")
        row_max = T.alloc_fragment((BLOCK_H,), "float32")
        previous = T.alloc_fragment((BLOCK_H,), "float32")
        scale = T.alloc_fragment((BLOCK_H,), "float32")
        sums = T.alloc_fragment((BLOCK_H,), "float32")
        warp = thread // 32 % 4
        other = 1 - x
        T.fill(acc, 0)
        T.fill(sums, 0)
        # Finite, so that a row without any key yet subtracts it from -inf without making a NaN.
        T.fill(row_max, -3e38)

        if x == 0:  # noqa: SIM102 (one is TileLang's, one is Python's)
            if tiles > 0:  # the first tile has none before it
                scores(0, 0, S, queries, tile, full)
                settle(0, S, BLOCK_N)
                T.copy(row_max, previous)
                softmax(S, fresh, row_max, previous, scale, sums, first, kv_len)
                T.copy(S, P)
                publish(0, 0, P, fresh, previous, scale, K_rope, exchange, p_full)
                wgmma_gemm(P, V[0, :, :], acc, policy=policy)
                settle(0, acc, HALF)
                release(free, 0)
        for m in T.serial((tiles + x - 1) // 2):  # t - 1 and t: the m-th tile of the other's place, the n-th of ours
            n = m + 1 - x
            t = 2 * n + x
            if scores_first:
                scores(x, n, S, queries, tile, full)
            T.barrier_wait(p_full[other], m % 2)
            T.copy(factors[other, :], scale)
            product(other, t - 1, warp, K_rope[other, :, :], V, acc, scale, raised, scores_first)
            if scores_first:
                settle(1, S, BLOCK_N)
            else:
                settle(0, acc, HALF)
                release(free, other)
                scores(x, n, S, queries, tile, full)
                settle(0, S, BLOCK_N)
            T.copy(maxima[other, :], previous)
            softmax(S, fresh, row_max, previous, scale, sums, first + t * BLOCK_N, kv_len)
            T.copy(S, P)
            publish(x, t, P, fresh, previous, scale, K_rope, exchange, p_full)
            if scores_first:
                settle(0, acc, HALF)
                release(free, other)
            product(x, t, warp, P, V, acc, scale, raised, False)
            settle(0, acc, HALF)
            release(free, x)
        if tiles > 0 and (tiles - 1) % 2 == other:  # the last tile's P is the other's
            T.barrier_wait(p_full[other], (tiles - 1) // 2 % 2)
            T.copy(factors[other, :], scale)
            product(other, tiles - 1, warp, K_rope[other, :, :], V, acc, scale, raised, False)
            settle(0, acc, HALF)

        # The rows' sums over both warpgroups' tiles; the output is relative to the larger of the last maxima.
        T.copy(row_max, last_maxima[x, :])
        T.copy(sums, totals[x, :])
        T.sync_threads(8, 256)
        for i in T.Parallel(BLOCK_H):
            previous[i] = T.max(row_max[i], last_maxima[other, i])
        for i in T.Parallel(BLOCK_H):
            sums[i] = sums[i] * T.exp2((row_max[i] - previous[i]) * FACTOR) + totals[other, i] * T.exp2(
                (last_maxima[other, i] - previous[i]) * FACTOR
            )
        for i in T.Parallel(BLOCK_H):
            # A row that saw no key has an empty sum, and its output is 0.
            scale[i] = T.if_then_else(sums[i] > 0, 1.0 / sums[i], 0.0)
        if x == 0:
            store_lse(previous, sums, info, part, head_0, Lse)
        store(acc, scale, x, info, part, head_0, Output, Partial)

    # ---- For Hopper: joining the parts in the same launch -----------------------------------------------------------

    @T.macro
    def join_share(readers, warp, lane, info, head_0, Partial, Lse, Output):
        """This block's share of a sequence's output, one of SPLITS. Each of 12 warps takes 128 / readers columns of a
        head; `readers` groups of its lanes take every so many parts, eight at once, four columns to a lane."""
        columns = 128 // readers
        reader = lane // (32 // readers)
        split_0 = T.alloc_var("int32")
        most = T.alloc_var("float32")
        total = T.alloc_var("float32")
        weight = T.alloc_var("float32")
        higher = T.alloc_var("float32")
        lse = T.alloc_local((8,), "float32")
        values = T.alloc_local((8, 4), "float32")
        result = T.alloc_local((4,), "float32")
        shares = info[SPLITS] * 12
        mine = info[SPLIT] * 12 + warp
        for u in T.serial(T.ceildiv(BLOCK_H * DIM_CKV // columns - mine, shares)):
            unit = mine + u * shares
            head = head_0 + unit // (DIM_CKV // columns)
            column = unit % (DIM_CKV // columns) * columns + lane % (32 // readers) * 4
            if head < num_heads:
                most = -3e38
                total = 0
                for c in T.unroll(4):
                    result[c] = 0
                for s in T.serial(T.ceildiv(info[SPLITS], 8 * readers)):
                    split_0 = s * 8 * readers + reader
                    for i in T.unroll(8):  # one past the end is the last, without weight
                        row = info[FIRST_PART] + T.min(split_0 + i * readers, info[SPLITS] - 1)
                        lse[i] = Lse[row, head]
                        for c in T.vectorized(4):
                            values[i, c] = Partial[row, head, column + c]
                    higher = most
                    for i in T.unroll(8):
                        higher = T.max(higher, lse[i])
                    weight = T.exp2(most - higher)
                    most = higher
                    total = total * weight
                    for c in T.unroll(4):
                        result[c] = result[c] * weight
                    for i in T.unroll(8):
                        weight = T.if_then_else(split_0 + i * readers < info[SPLITS], T.exp2(lse[i] - most), 0.0)
                        total += weight
                        for c in T.unroll(4):
                            result[c] += values[i, c] * weight
                if readers > 1:
                    higher = T.max(most, T.shfl_xor(most, 8))
                    higher = T.max(higher, T.shfl_xor(higher, 16))
                    weight = T.exp2(most - higher)
                    total = total * weight
                    total += T.shfl_xor(total, 8)
                    total += T.shfl_xor(total, 16)
                    for c in T.unroll(4):
                        result[c] = result[c] * weight
                        result[c] += T.shfl_xor(result[c], 8)
                        result[c] += T.shfl_xor(result[c], 16)
                if reader == 0:
                    for c in T.vectorized(4):
                        Output[info[SEQUENCE], head, column + c] = result[c] / total

    # ---- The kernel -------------------------------------------------------------------------------------------------

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
        Plan: T.Tensor((batch, 2), "int32"),
    ):
        # The head tiles of a part are neighbours: all but the first find its keys in the L2 cache.
        with T.Kernel(parts * head_tiles, threads=384 if hopper else 128) as block:
            Q_left = T.alloc_shared((BLOCK_H, HALF), "bfloat16")
            Q_right = T.alloc_shared((BLOCK_H, HALF), "bfloat16")
            Q_rope = T.alloc_shared((BLOCK_H, DIM_KPE), "bfloat16")
            K_left = T.alloc_shared((places, BLOCK_N, HALF), "bfloat16")
            K_right = T.alloc_shared((places, BLOCK_N, HALF), "bfloat16")
            K_rope = T.alloc_shared((places, BLOCK_N, DIM_KPE), "bfloat16")
            info = T.alloc_local((5,), "int32")
            part = block // head_tiles
            head_0 = block % head_tiles * BLOCK_H
            locate(part, T.get_thread_binding() % 32 if hopper else 0, info, KvLens, KvIndptr)
            kv_len = KvLens[info[SEQUENCE]]
            page_0 = info[PAGE_0]
            # An even share of the sequence's tiles.
            first = T.ceildiv(kv_len, BLOCK_N) * info[SPLIT] // T.max(info[SPLITS], 1) * BLOCK_N
            tiles = T.alloc_var("int32")
            tiles = 0
            if info[SPLITS] > 0:
                tiles = T.ceildiv(kv_len, BLOCK_N) * (info[SPLIT] + 1) // T.max(info[SPLITS], 1) - first // BLOCK_N
                if not one_launch and info[SPLIT] == 0:
                    Plan[info[SEQUENCE], 0] = info[FIRST_PART]
                    Plan[info[SEQUENCE], 1] = info[SPLITS]

            if hopper:
                maxima = T.alloc_shared((2, BLOCK_H), "float32")
                factors = T.alloc_shared((2, BLOCK_H), "float32")
                raised = T.alloc_shared((2, 4), "int32")
                last_maxima = T.alloc_shared((2, BLOCK_H), "float32")
                totals = T.alloc_shared((2, BLOCK_H), "float32")
                left_full = T.alloc_barrier([128] * 2)
                right_full = T.alloc_barrier([128] * 2)
                left_free = T.alloc_barrier([4] * 2)
                right_free = T.alloc_barrier([4] * 2)
                p_full = T.alloc_barrier([128] * 2)
                q_full = T.alloc_barrier(256)
                queries = (Q_left, Q_right, Q_rope)
                tile = (K_left, K_right, K_rope)
                full = (left_full, right_full)
                exchange = (maxima, factors, raised)
                ends = (last_maxima, totals)
                tx = T.get_thread_binding()
                if tx >= 256:
                    T.dec_max_nreg(56)
                    gather(
                        *(tx - 256, first, tiles, kv_len, page_0, KvIndices, Ckv, Kpe, tile, full),
                        (left_free, right_free),
                    )
                    if one_launch:
                        T.inc_max_nreg(160)
                elif tx < 128:
                    T.inc_max_nreg(224)
                    load_queries(tx, info[SEQUENCE], head_0, Q, Qr, queries, q_full)
                    T.barrier_wait(q_full, 0)
                    multiply(
                        *(0, tx, first, tiles, kv_len, info, part, head_0, queries, tile, K_left, exchange, ends, full),
                        *(left_free, p_full, Output, Partial, Lse),
                    )
                    if one_launch:
                        T.dec_max_nreg(160)
                else:
                    T.inc_max_nreg(224)
                    load_queries(tx, info[SEQUENCE], head_0, Q, Qr, queries, q_full)
                    T.barrier_wait(q_full, 0)
                    multiply(
                        *(
                            1,
                            tx,
                            first,
                            tiles,
                            kv_len,
                            info,
                            part,
                            head_0,
                            queries,
                            tile,
                            K_right,
                            exchange,
                            ends,
                            full,
                        ),
                        *(right_free, p_full, Output, Partial, Lse),
                    )
                    if one_launch:
                        T.dec_max_nreg(160)
                if one_launch:
                    T.sync_grid()
                    if info[SPLITS] > 16:
                        join_share(4, tx // 32, tx % 32, info, head_0, Partial, Lse, Output)
                    elif info[SPLITS] > 1:
                        join_share(1, tx // 32, tx % 32, info, head_0, Partial, Lse, Output)
            else:
                S = T.alloc_fragment((BLOCK_H, BLOCK_N), "float32")
                P = T.alloc_fragment((BLOCK_H, BLOCK_N), "bfloat16")
                left = T.alloc_fragment((BLOCK_H, HALF), "float32")
                right = T.alloc_fragment((BLOCK_H, HALF), "float32")
                fresh = T.alloc_fragment((BLOCK_H,), "float32")
                row_max = T.alloc_fragment((BLOCK_H,), "float32")
                previous = T.alloc_fragment((BLOCK_H,), "float32")
                scale = T.alloc_fragment((BLOCK_H,), "float32")
                sums = T.alloc_fragment((BLOCK_H,), "float32")
                pages = T.alloc_fragment((BLOCK_N,), "int32")
                for i, d in T.Parallel(BLOCK_H, HALF):
                    Q_left[i, d] = T.if_then_else(
                        head_0 + i < num_heads, Q[info[SEQUENCE], head_0 + i, d], T.cast(0, "bfloat16")
                    )
                for i, d in T.Parallel(BLOCK_H, HALF):
                    Q_right[i, d] = T.if_then_else(
                        head_0 + i < num_heads, Q[info[SEQUENCE], head_0 + i, HALF + d], T.cast(0, "bfloat16")
                    )
                for i, d in T.Parallel(BLOCK_H, DIM_KPE):
                    Q_rope[i, d] = T.if_then_else(
                        head_0 + i < num_heads, Qr[info[SEQUENCE], head_0 + i, d], T.cast(0, "bfloat16")
                    )
                T.fill(left, 0)
                T.fill(right, 0)
                T.fill(sums, 0)
                T.fill(row_max, -3e38)
                for t in T.serial(tiles):
                    token_0 = first + t * BLOCK_N
                    for j in T.Parallel(BLOCK_N):
                        pages[j] = KvIndices[page_0 + T.min(token_0 + j, kv_len - 1) // page_size]
                    for j, d in T.Parallel(BLOCK_N, HALF):
                        K_left[0, j, d] = T.if_then_else(
                            token_0 + j < kv_len, Ckv[pages[j], (token_0 + j) % page_size, d], T.cast(0, "bfloat16")
                        )
                    for j, d in T.Parallel(BLOCK_N, HALF):
                        K_right[0, j, d] = T.if_then_else(
                            token_0 + j < kv_len,
                            Ckv[pages[j], (token_0 + j) % page_size, HALF + d],
                            T.cast(0, "bfloat16"),
                        )
                    for j, d in T.Parallel(BLOCK_N, DIM_KPE):
                        K_rope[0, j, d] = T.if_then_else(
                            token_0 + j < kv_len, Kpe[pages[j], (token_0 + j) % page_size, d], T.cast(0, "bfloat16")
                        )
                    T.gemm(Q_left, K_left[0, :, :], S, transpose_B=True, clear_accum=True, policy=policy)
                    T.gemm(Q_right, K_right[0, :, :], S, transpose_B=True, policy=policy)
                    T.gemm(Q_rope, K_rope[0, :, :], S, transpose_B=True, policy=policy)
                    T.copy(row_max, previous)
                    softmax(S, fresh, row_max, previous, scale, sums, token_0, kv_len)
                    T.copy(S, P)
                    rescale(left, scale)
                    rescale(right, scale)
                    T.gemm(P, K_left[0, :, :], left, policy=policy)
                    T.gemm(P, K_right[0, :, :], right, policy=policy)
                for i in T.Parallel(BLOCK_H):
                    scale[i] = T.if_then_else(sums[i] > 0, 1.0 / sums[i], 0.0)
                store_lse(row_max, sums, info, part, head_0, Lse)
                store(left, scale, 0, info, part, head_0, Output, Partial)
                store(right, scale, 1, info, part, head_0, Output, Partial)

    return main


def _portable():
    """The module of run_kernel.py beside this file, loaded once."""
    name = __name__ + "_portable"
    if name not in sys.modules:
        path = pathlib.Path(__file__).with_name("run_kernel.py")
        module = types.ModuleType(name)
        module.__file__ = str(path)
        exec(compile(path.read_bytes(), path, "exec"), vars(module))  # import could take a .pyc older than the file
        module.DEVICE = DEVICE
        sys.modules[name] = module
    return sys.modules[name]


def _taken(dim_ckv, dim_kpe, addresses):
    """Whether the fast path can take a call; addresses: of all that is copied 16 bytes at a time, or-ed."""
    return dim_ckv == DIM_CKV and dim_kpe == DIM_KPE and addresses % 16 == 0


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
    if not _taken(head_dim_ckv, head_dim_kpe, q_nope.data_ptr() | q_pe.data_ptr() | ckv.data_ptr() | kpe.data_ptr()):
        _portable().run_kernel(
            *(q_nope, q_pe, ckv, kpe, output, q_indptr, kv_indptr, kv_indices, kv_lens, batch_size, seq_len),
            *(num_heads, head_dim_ckv, head_dim_kpe, page_size, causal),
        )
        return
    tuning, device = TUNING[DEVICE], q_nope.device
    if device not in _multiprocessors:
        on_gpu = device.type == "cuda"
        properties = torch.cuda.get_device_properties(device) if on_gpu else None
        _multiprocessors[device] = properties.multi_processor_count if on_gpu else tuning["multiprocessors"]
    BLOCK_H, BLOCK_N, hopper = tuning["tile"]
    head_tiles = -(-num_heads // BLOCK_H)
    # The formula and its reasons: run_kernel.py.
    resident = max(1, _multiprocessors[device] // head_tiles)
    needed = batch_size if seq_len <= MIN_KEYS else batch_size * (-(-seq_len // MIN_KEYS) + 1)
    parts = min(max(resident, batch_size + -(-resident // 2)), needed)
    one_launch = hopper and batch_size < parts <= resident

    place = (num_heads, parts, batch_size, device)
    if place not in _workspace:
        _workspace[place] = (
            torch.empty((parts, num_heads, DIM_CKV), dtype=torch.float32, device=device),
            torch.empty((parts, num_heads), dtype=torch.float32, device=device),
            torch.empty((batch_size, 2), dtype=torch.int32, device=device),
        )
    partial, lse, plan = _workspace[place]
    key = (num_heads, page_size, one_launch)
    if key not in _kernels:
        scores_first = tuning["scores_first"][num_heads > 64]
        _kernels[key] = attend(num_heads, page_size, BLOCK_H, BLOCK_N, hopper, scores_first, one_launch)
    _kernels[key](q_nope, q_pe, ckv, kpe, output, kv_indptr, kv_indices, kv_lens, partial, lse, plan)
    if parts > batch_size and not one_launch:
        columns = 128 if parts >= 16 * batch_size else DIM_CKV  # more blocks where a sequence has many parts
        if (num_heads, columns) not in _joins:
            _joins[num_heads, columns] = _portable().join(num_heads, columns)
        _joins[num_heads, columns](partial, lse, plan, output)
