"""ragged_prefill in TileLang, for NVIDIA Hopper alone: run_kernel.py beside this file is the one to paste.

    run_kernel(q, k, v, output, qo_indptr, kv_indptr,
               batch_size, seq_len, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal)

Contract: that of run_kernel.py. Taken here: head dims 64 / 64, 128 / 128, 192 / 128 and 256 / 256, and at least one
key in the batch. All else goes to run_kernel.py.

Needs TileLang 0.1.15 (wgmma_gemm, manual barriers, T.tma_copy) and compute capability 9.x.

Algorithm: one block per multiprocessor stays and draws row tiles of 128 packed rows (row r is token r // pack, head
r % pack of a GQA group) from a counter until none is left, longest first. Its third warpgroup gives its registers away,
and one warp of it loads by TMA, ahead of the others and into the next row tile: that tile's Q, K and V arrive during
the epilogue. The first two multiply 64 rows each. Keys are taken from the last tile to the first, so that the masked
tiles come first and only the first one can hold rows behind the last key.

Inside a warpgroup the scores of a tile and the product P V of the tile before it are issued together: the softmax runs
while the second of them does. Between the two, named barriers 8 and 9 let one issue while the other is in its softmax.

Barriers. count is the row tiles that a block has done, base its tiles of keys; both start at 0.
  k_full, v_full[slot]  one arrival of the loader and the bytes; waited for with parity (base + n) // stages % 2.
  k_free, v_free[slot]  8 arrivals, one lane of each multiplying warp, after its own wait for the wgmma that read the
                        slot. With one stage the loader would wait for ever: stages >= 2.
  q_full, q_free        the same for Q, and for `told` (what a row tile is; TILES -1: there is none left).
  v_clean               the loading warp has cleared the rows of V behind a sequence's last key (32 lanes).

Counter: 0 between calls; the block that draws the last ticket puts it back, so that no launch has to clear it. A kernel
that is killed leaves it wrong, but CUDA lets no process go on after that. Two calls under way at once on two streams of
a device would share it and leave rows out: call from one stream per process.

Without a GPU the row "c500" of TUNING runs (it is no row for a C500: the file to paste is): the same tiles, packing,
order of keys, masks and sums by T.gemm and plain copies, one block per row tile. TMA, wgmma, the barriers and the
counter do not run there, so it shows a wrong formula and not a race or a deadlock.
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

# head_dim_qk -> (BLOCK_M, BLOCK_N, stages, hopper, staged). staged: the output goes through shared memory, for stores
# of 16 bytes. Shared memory, of 227 KiB: BLOCK_M * dim_qk + stages * BLOCK_N * (dim_qk + dim_vo) bf16 values, and
# BLOCK_M * dim_vo more if staged, so 192 KiB at 128 / 128. There a multiplying thread uses 191 of the 240 registers
# that it is given: 64 scores, 32 of P, 64 of the accumulator, and the rest. c500: see above.
TUNING = {
    "c500": {
        64: (64, 32, 2, False, True),
        128: (64, 32, 2, False, False),
        192: (64, 16, 2, False, False),
        256: (64, 16, 1, False, False),
    },
    "sm90": {
        64: (128, 128, 2, True, True),
        128: (128, 128, 2, True, True),
        192: (128, 96, 2, True, True),
        256: (128, 64, 2, True, False),
    },
}

_kernels = {}  # (heads, dims, causal, device) -> compiled kernel; lengths, totals and the batch stay dynamic
_counters = {}  # device -> the counter of row tiles, 0 between calls


@tilelang.jit(pass_configs={"tl.enable_fast_math": True})
def prefill(num_qo_heads, num_kv_heads, dim_qk, dim_vo, causal, BLOCK_M, BLOCK_N, stages, hopper, staged, blocks):
    group = num_qo_heads // num_kv_heads
    # Heads in one row tile: the largest power of two that divides the group and leaves 8 tokens.
    pack = math.gcd(group, BLOCK_M // 8)
    tokens = BLOCK_M // pack
    head_tiles = num_qo_heads // pack
    factor = math.log2(math.e) / math.sqrt(dim_qk)  # exp(s / sqrt(d)) = exp2(s * factor)
    total_q = T.dynamic("total_q")
    total_kv = T.dynamic("total_kv")
    offsets = T.dynamic("offsets")  # batch_size + 1
    policy = T.GemmWarpPolicy.FullRow
    # Partial maxima and sums of a row: column j of 8 is one lane's, as in the scores' own layout.
    by_lane = T.Fragment(
        (BLOCK_M, 8),
        forward_thread_fn=lambda i, j: i // 16 * 32 + i % 8 * 4 + j // 2,
        forward_index_fn=lambda i, j: i % 16 // 8 * 2 + j % 2,
    )
    # What the loading warp knows about a row tile: tiles of keys (-1: no row tile is left), the last key that its first
    # row sees, keys that every row sees, keys of the sequence, first key's row, first query's row, rows of queries
    # left in the sequence, first head.
    TILES, LIMIT, UNMASKED, KV_LEN, KV_ROW, Q_ROW, Q_LEFT, HEAD = range(8)

    @T.macro
    def locate(item, info, QoIndptr, KvIndptr):
        # Sequence b owns the token tiles from qo_indptr[b] // tokens + b on: always enough of them, and none is shared.
        # The heads of one token tile come one after another.
        tile = item // head_tiles
        b = T.alloc_var("int32")
        end = T.alloc_var("int32")
        middle = T.alloc_var("int32")
        b = 0
        end = offsets - 1
        while b + 1 < end:  # b: the last sequence whose first tile is not behind this one
            middle = (b + end) // 2
            if QoIndptr[middle] // tokens + middle <= tile:
                b = middle
            else:
                end = middle
        q_start = QoIndptr[b]
        q_len = QoIndptr[b + 1] - q_start
        kv_len = KvIndptr[b + 1] - KvIndptr[b]
        # Longest first: under a causal mask the last tokens see most keys. A tile to spare gets negative tokens.
        token_0 = (T.ceildiv(q_len, tokens) - 1 - (tile - q_start // tokens - b)) * tokens
        if causal:
            info[LIMIT] = kv_len - q_len + token_0
            info[UNMASKED] = T.min(kv_len, kv_len - q_len + token_0 + 1)
            info[TILES] = T.ceildiv(T.max(T.min(kv_len, kv_len - q_len + token_0 + tokens), 0), BLOCK_N)
        else:
            info[LIMIT] = kv_len - 1
            info[UNMASKED] = kv_len
            info[TILES] = T.ceildiv(kv_len, BLOCK_N)
        info[KV_LEN] = kv_len
        info[KV_ROW] = KvIndptr[b]
        info[Q_ROW] = q_start + token_0
        info[Q_LEFT] = q_len - token_0
        info[HEAD] = item % head_tiles * pack
        if token_0 < 0:
            info[TILES] = 0
            info[Q_LEFT] = 0

    @T.macro
    def load(X, X_shared, full, info, n, slot):
        """Tile n from the last, BLOCK_N rows of K or V; rows behind the tensor's end become 0."""
        if hopper:
            T.tma_copy(
                X[
                    info[KV_ROW] + (info[TILES] - 1 - n) * BLOCK_N : info[KV_ROW] + (info[TILES] - n) * BLOCK_N,
                    info[HEAD] // group,
                    :,
                ],
                X_shared[slot, :, :],
                barrier=full[slot],
                annotations={"emit_arrive": 1},
            )
        else:
            T.copy(
                X[
                    info[KV_ROW] + (info[TILES] - 1 - n) * BLOCK_N : info[KV_ROW] + (info[TILES] - n) * BLOCK_N,
                    info[HEAD] // group,
                    :,
                ],
                X_shared[slot, :, :],
            )

    @T.macro
    def scores(Q_shared, K_tile, S):
        if hopper:
            wgmma_gemm(Q_shared, K_tile, S, transpose_B=True, clear_accum=True, policy=policy)
        else:
            T.gemm(Q_shared, K_tile, S, transpose_B=True, clear_accum=True, policy=policy)

    @T.macro
    def output(P, V_tile, acc):
        if hopper:
            wgmma_gemm(P, V_tile, acc, policy=policy)
        else:
            T.gemm(P, V_tile, acc, policy=policy)

    @T.macro
    def settle(pending, X, columns):
        """Until at most `pending` products are on their way, X being done: then X is read, not before."""
        if hopper:
            T.wait_wgmma(pending)
            T.warpgroup_fence_operand(X, num_regs=BLOCK_M * columns // 256)

    @T.macro
    def release(barriers, slot):
        if hopper and T.shuffle_elect(32):
            T.barrier_arrive(barriers[slot])

    @T.macro
    def await_full(barriers, count):
        if hopper:
            T.barrier_wait(barriers[count % stages], count // stages % 2)

    @T.macro
    def mask(S, first_key, limit):
        for i, j in T.Parallel(BLOCK_M, BLOCK_N):
            S[i, j] = T.if_then_else(
                first_key + j <= limit + (i // pack if causal else 0), S[i, j], -T.infinity("float32")
            )

    @T.macro
    def softmax(S, row_max, part):
        for i, j in T.Parallel(BLOCK_M, 8):
            part[i, j] = S[i, j]
        for c in T.unroll(1, BLOCK_N // 8):
            for i, j in T.Parallel(BLOCK_M, 8):
                part[i, j] = T.max(part[i, j], S[i, c * 8 + j])
        T.reduce_max(part, row_max, dim=1, clear=False)
        for i, j in T.Parallel(BLOCK_M, BLOCK_N):
            S[i, j] = T.exp2(S[i, j] * factor - row_max[i] * factor)

    @T.prim_func
    def main(
        Q: T.Tensor((total_q, num_qo_heads, dim_qk), "bfloat16"),
        K: T.Tensor((total_kv, num_kv_heads, dim_qk), "bfloat16"),
        V: T.Tensor((total_kv, num_kv_heads, dim_vo), "bfloat16"),
        Output: T.Tensor((total_q, num_qo_heads, dim_vo), "bfloat16"),
        QoIndptr: T.Tensor((offsets,), "int32"),
        KvIndptr: T.Tensor((offsets,), "int32"),
        Counter: T.Tensor((1,), "int32"),
    ):
        items = (total_q // tokens + offsets - 1) * head_tiles
        with T.Kernel(blocks if hopper else items, threads=384 if hopper else 128) as block:
            Q_tile = T.alloc_shared((tokens, pack, dim_qk), "bfloat16")
            Q_shared = T.reshape(Q_tile, (BLOCK_M, dim_qk))
            K_shared = T.alloc_shared((stages, BLOCK_N, dim_qk), "bfloat16")
            V_shared = T.alloc_shared((stages, BLOCK_N, dim_vo), "bfloat16")
            S = T.alloc_fragment((BLOCK_M, BLOCK_N), "float32")
            P = T.alloc_fragment((BLOCK_M, BLOCK_N), "bfloat16")
            acc = T.alloc_fragment((BLOCK_M, dim_vo), "float32")
            row_max = T.alloc_fragment((BLOCK_M,), "float32")
            previous_max = T.alloc_fragment((BLOCK_M,), "float32")
            rescale = T.alloc_fragment((BLOCK_M,), "float32")
            row_sum = T.alloc_fragment((BLOCK_M,), "float32")
            part = T.alloc_fragment((BLOCK_M, 8), "float32")
            sums = T.alloc_fragment((BLOCK_M, 8), "float32")
            info = T.alloc_local((8,), "int32")
            if staged:
                O_shared = T.alloc_shared((BLOCK_M, dim_vo), "bfloat16")
                T.annotate_layout({O_shared: tilelang.layout.make_swizzled_layout(O_shared)})
            if hopper:
                T.annotate_layout({part: by_lane, sums: by_lane})
                told = T.alloc_shared((8,), "int32")
                q_full = T.alloc_barrier(1)
                q_free = T.alloc_barrier(8)  # one lane of each multiplying warp
                k_full = T.alloc_barrier([1] * stages)
                v_full = T.alloc_barrier([1] * stages)
                k_free = T.alloc_barrier([8] * stages)
                v_free = T.alloc_barrier([8] * stages)
                v_clean = T.alloc_barrier(32)
            else:
                q_free, k_free, v_free, k_full, v_full = None, None, None, None, None

            tx = T.get_thread_binding()
            # Row tiles before this one, tiles of keys before it, and how many of them had rows behind the last key.
            count = T.alloc_var("int32")
            base = T.alloc_var("int32")
            cleaned = T.alloc_var("int32")
            item = T.alloc_var("int32")
            count = 0
            base = 0
            cleaned = 0
            item = block
            if hopper and tx >= 256:
                T.dec_max_nreg(24)
                if tx < 288:
                    ticket = T.alloc_var("int32")
                    ticket = 0
                    while item < items:
                        locate(item, info, QoIndptr, KvIndptr)
                        T.barrier_wait(q_free, count % 2 ^ 1)
                        if tx == 256:
                            for i in T.serial(8):
                                told[i] = info[i]
                        T.sync_warp()
                        T.tma_copy(
                            Q[info[Q_ROW] : info[Q_ROW] + tokens, info[HEAD] : info[HEAD] + pack, :],
                            Q_tile,
                            barrier=q_full,
                            annotations={"emit_arrive": 1},
                        )
                        for n in T.serial(info[TILES]):
                            slot = (base + n) % stages
                            T.barrier_wait(k_free[slot], (base + n) // stages % 2 ^ 1)
                            load(K, K_shared, k_full, info, n, slot)
                            T.barrier_wait(v_free[slot], (base + n) // stages % 2 ^ 1)
                            load(V, V_shared, v_full, info, n, slot)
                            if (info[TILES] - n) * BLOCK_N > info[KV_LEN]:
                                # Rows behind the last key belong to others, and 0 times their NaN would be NaN.
                                T.barrier_wait(v_full[slot], (base + n) // stages % 2)
                                for j in T.serial(info[TILES] * BLOCK_N - info[KV_LEN]):
                                    for d in T.Parallel(dim_vo):
                                        V_shared[slot, BLOCK_N - 1 - j, d] = 0
                                T.fence_proxy_async()
                                T.barrier_arrive(v_clean)
                        base += info[TILES]
                        count += 1
                        if tx == 256:
                            ticket = T.atomic_add(Counter[0], 1, return_prev=True)
                        item = blocks + T.shfl_sync(ticket, 0)
                    T.barrier_wait(q_free, count % 2 ^ 1)
                    if tx == 256:
                        told[TILES] = -1
                        T.barrier_arrive(q_full)
                        # The last of all blocks to ask leaves the counter as it was.
                        if count > 0:  # noqa: SIM102 (as one condition it is other code)
                            if ticket == T.max(items - blocks, 0) + T.min(items, blocks) - 1:
                                Counter[0] = 0
            else:
                if hopper:
                    T.inc_max_nreg(240)
                    if tx >= 128:
                        T.named_barrier_arrive(8, 256)
                    T.barrier_wait(q_full, 0)
                    for i in T.serial(8):
                        info[i] = told[i]
                else:
                    locate(item, info, QoIndptr, KvIndptr)
                    T.copy(
                        Q[info[Q_ROW] : info[Q_ROW] + tokens, info[HEAD] : info[HEAD] + pack, :],
                        Q_tile,
                    )

                while info[TILES] >= 0:
                    tiles = info[TILES]
                    T.fill(acc, 0)
                    T.fill(sums, 0)
                    # Finite, so that a row without any key yet subtracts it from -inf without making a NaN.
                    T.fill(row_max, -3e38)
                    if tiles > 0:
                        await_full(k_full, base)
                        if not hopper:
                            load(K, K_shared, None, info, 0, 0)
                            load(V, V_shared, None, info, 0, 0)
                        scores(Q_shared, K_shared[base % stages, :, :], S)
                        settle(0, S, BLOCK_N)
                        release(k_free, base % stages)
                        mask(S, (tiles - 1) * BLOCK_N, info[LIMIT])
                        softmax(S, row_max, part)
                        for c in T.unroll(BLOCK_N // 8):
                            for i, j in T.Parallel(BLOCK_M, 8):
                                sums[i, j] += S[i, c * 8 + j]
                        T.copy(S, P)
                        if tiles * BLOCK_N > info[KV_LEN]:
                            if hopper:
                                T.barrier_wait(v_clean, cleaned % 2)
                                cleaned += 1
                            else:
                                for j, d in T.Parallel(BLOCK_N, dim_vo):
                                    if (tiles - 1) * BLOCK_N + j >= info[KV_LEN]:
                                        V_shared[0, j, d] = 0
                        if hopper and tiles > 1:
                            await_full(k_full, base + 1)

                        for n in T.serial(tiles - 1):
                            if hopper:
                                T.sync_threads(8 + tx // 128, 256)
                            else:
                                load(K, K_shared, None, info, n + 1, (n + 1) % stages)
                            scores(Q_shared, K_shared[(base + n + 1) % stages, :, :], S)
                            await_full(v_full, base + n)
                            output(P, V_shared[(base + n) % stages, :, :], acc)
                            if hopper:
                                T.named_barrier_arrive(9 - tx // 128, 256)
                            settle(1, S, BLOCK_N)
                            release(k_free, (base + n + 1) % stages)
                            if causal and (tiles - 1 - n) * BLOCK_N > info[UNMASKED]:
                                mask(S, (tiles - 2 - n) * BLOCK_N, info[LIMIT])
                            T.copy(row_max, previous_max)
                            softmax(S, row_max, part)
                            for i in T.Parallel(BLOCK_M):
                                rescale[i] = T.exp2((previous_max[i] - row_max[i]) * factor)
                            for i, j in T.Parallel(BLOCK_M, 8):
                                sums[i, j] = sums[i, j] * rescale[i] + S[i, j]
                            for c in T.unroll(1, BLOCK_N // 8):
                                for i, j in T.Parallel(BLOCK_M, 8):
                                    sums[i, j] += S[i, c * 8 + j]
                            if hopper:
                                # The softmax ends here: without a fence and a branch the wait would move before it.
                                T.warpgroup_fence_operand(S, num_regs=BLOCK_M * BLOCK_N // 256)
                                if n + 2 < tiles:
                                    await_full(k_full, base + n + 2)
                            settle(0, acc, dim_vo)
                            release(v_free, (base + n) % stages)
                            T.copy(S, P)
                            for i, d in T.Parallel(BLOCK_M, dim_vo):
                                acc[i, d] *= rescale[i]
                            if not hopper:
                                load(V, V_shared, None, info, n + 1, (n + 1) % stages)

                        release(q_free, 0)
                        await_full(v_full, base + tiles - 1)
                        output(P, V_shared[(base + tiles - 1) % stages, :, :], acc)
                        settle(0, acc, dim_vo)
                        release(v_free, (base + tiles - 1) % stages)
                    else:
                        release(q_free, 0)

                    T.reduce_sum(sums, row_sum, dim=1)
                    for i in T.Parallel(BLOCK_M):
                        # A row that saw no key has an empty sum, and its output is 0.
                        rescale[i] = T.if_then_else(row_sum[i] > 0, 1.0 / row_sum[i], 0.0)
                    if staged:
                        for i, d in T.Parallel(BLOCK_M, dim_vo):
                            O_shared[i, d] = acc[i, d] * rescale[i]
                        for i, d in T.Parallel(BLOCK_M, dim_vo):
                            if i // pack < info[Q_LEFT]:
                                Output[info[Q_ROW] + i // pack, info[HEAD] + i % pack, d] = O_shared[i, d]
                    else:
                        for i, d in T.Parallel(BLOCK_M, dim_vo):
                            if i // pack < info[Q_LEFT]:
                                Output[info[Q_ROW] + i // pack, info[HEAD] + i % pack, d] = acc[i, d] * rescale[i]

                    if hopper:
                        base += tiles
                        count += 1
                        T.barrier_wait(q_full, count % 2)
                        for i in T.serial(8):
                            info[i] = told[i]
                    else:
                        info[TILES] = -1

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


def _taken(keys, dim_qk, dim_vo):
    """Whether the fast path can take a call; keys: in the whole batch, since a tensor map cannot describe no rows.

    The rows' shared memory is for these pairs: 192 / 192 would need 245,792 of the 232,448 bytes that there are.
    """
    return keys > 0 and (dim_qk, dim_vo) in ((64, 64), (128, 128), (192, 128), (256, 256))


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
    if not _taken(k.shape[0], head_dim_qk, head_dim_vo):
        _portable().run_kernel(
            *(q, k, v, output, qo_indptr, kv_indptr, batch_size, seq_len, num_qo_heads, num_kv_heads),
            *(head_dim_qk, head_dim_vo, causal),
        )
        return
    shape = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal)
    key = (*shape, q.get_device())
    if key not in _kernels:
        blocks = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        _kernels[key] = prefill(*shape, *TUNING[DEVICE][head_dim_qk], blocks)
    if q.device not in _counters:
        _counters[q.device] = torch.zeros(1, dtype=qo_indptr.dtype, device=q.device)
    _kernels[key](q, k, v, output, qo_indptr, kv_indptr, _counters[q.device])
