"""paged_prefill in TileLang: paste this file.

    run_kernel(q, kv_data, output, qo_indptr, kv_indptr, kv_indices, last_page_len,
               batch_size, seq_len, num_qo_heads, num_kv_heads, head_dim, page_block_size, causal)

Two kernels. `unpack` gathers the pages, whatever their size and order, into one run of rows per sequence and KV head,
each run a whole number of BLOCK_N-row tiles with zeros behind the last token. `prefill` is flash attention over these
runs: whole tiles, no page table, no dead slot. The heads of a GQA group share their keys, so a row tile holds some
tokens of `pack` heads of one group: row r is token r // pack, head r % pack. Online softmax with exp2, the scale and
log2(e) folded into one factor; P stays in registers; only tiles on the diagonal and at the end of a run are masked.

Why unpack: a tile of 128 keys would take 16 copies of 16 rows instead of 2, in every one of the seq_len / 16 row tiles
that read it. Unpacking moves K and V once, 2 of the 1024 FLOP per byte that a sequence of 1024 queries needs; a tile of
whole rows then comes by one bulk copy on sm_90, and a NaN in a dead slot never meets the matrix units.

Work per visible (query, key, head): 4 * head_dim FLOP. Bound by the matrix units, and on the C500 by the softmax's
vector arithmetic. Workspace: K and V once more, num_kv_heads * head_dim * 4 bytes per token, every sequence rounded up
to BLOCK_N tokens; kept between calls, grown when a call needs more.
"""

import math

import tilelang
import tilelang.language as T
import torch

DEVICE = "c500"

# head_dim -> (BLOCK_M, BLOCK_N, threads, num_stages). Shared memory: (BLOCK_M + stages * 2 * BLOCK_N) * head_dim bf16
# values, at most 48 KiB on the C500 (64 KiB per block there), where 0 stages means no asynchronous copy. A wave there
# and a warp of sm_80 take at least 16 rows, so 64 rows get 128 threads; on sm_90 256 threads are two warpgroups of 64
# rows. Other head dimensions take the row of the next larger one.
TUNING = {
    "c500": {64: (128, 64, 256, 0), 128: (128, 32, 256, 0), 256: (64, 16, 128, 0)},
    "sm90": {64: (128, 128, 256, 2), 128: (128, 128, 256, 2), 256: (128, 64, 256, 2)},
}

_unpackers = {}  # (KV heads, head_dim, page_block_size) -> compiled kernel; lengths, totals and the batch stay dynamic
_kernels = {}  # (heads, head_dim, causal) -> compiled kernel, likewise
_runs = {}  # (KV heads, head_dim, device) -> (2 * KV heads, rows, head_dim) bf16
_sequences = {}  # device -> (batch, 2) int32: first row and number of keys of every sequence


@tilelang.jit
def unpack(num_kv_heads, dim, page_size, BLOCK_N):
    ROWS = 8  # per block: 8 rows of 4 heads of 128 are 16 KiB of K and V; 1024 tokens make 128 blocks
    num_pages = T.dynamic("num_pages")
    used_pages = T.dynamic("used_pages")
    offsets = T.dynamic("offsets")  # batch_size + 1
    batch = T.dynamic("batch")
    rows = T.dynamic("rows")
    capacity = T.dynamic("capacity")

    @T.prim_func
    def main(
        KV: T.Tensor((num_pages, 2, page_size, num_kv_heads, dim), "bfloat16"),
        Runs: T.Tensor((2 * num_kv_heads, rows, dim), "bfloat16"),
        Sequences: T.Tensor((capacity, 2), "int32"),
        KvIndptr: T.Tensor((offsets,), "int32"),
        KvIndices: T.Tensor((used_pages,), "int32"),
        LastPageLen: T.Tensor((batch,), "int32"),
    ):
        # Sequence b owns the BLOCK_N-row tiles from kv_indptr[b] * page_size // BLOCK_N + b on: always enough of them.
        with T.Kernel((used_pages * page_size // BLOCK_N + batch) * (BLOCK_N // ROWS), threads=256) as block:
            b = T.alloc_var("int32")
            end = T.alloc_var("int32")
            middle = T.alloc_var("int32")
            b = 0
            end = batch
            while b + 1 < end:
                middle = (b + end) // 2
                if KvIndptr[middle] * page_size // BLOCK_N + middle <= block // (BLOCK_N // ROWS):
                    b = middle
                else:
                    end = middle
            page_0 = KvIndptr[b]
            pages = KvIndptr[b + 1] - page_0
            kv_len = T.if_then_else(pages > 0, (pages - 1) * page_size + LastPageLen[b], 0)
            first_row = (page_0 * page_size // BLOCK_N + b) * BLOCK_N
            token_0 = block * ROWS - first_row
            if token_0 == 0:
                Sequences[b, 0] = first_row
                Sequences[b, 1] = kv_len

            for part in T.unroll(2):
                for r, h, d in T.Parallel(ROWS, num_kv_heads, dim):
                    Runs[part * num_kv_heads + h, block * ROWS + r, d] = T.if_then_else(
                        token_0 + r < kv_len,
                        KV[KvIndices[page_0 + (token_0 + r) // page_size], part, (token_0 + r) % page_size, h, d],
                        T.cast(0, "bfloat16"),
                    )

    return main


@tilelang.jit
def prefill(num_qo_heads, num_kv_heads, dim, causal, BLOCK_M, BLOCK_N, threads, num_stages):
    group = num_qo_heads // num_kv_heads
    # Heads in one row tile: the largest power of two that divides the group and leaves 8 tokens.
    pack = math.gcd(group, BLOCK_M // 8)
    tokens = BLOCK_M // pack
    head_tiles = num_qo_heads // pack
    factor = math.log2(math.e) / math.sqrt(dim)  # exp(s / sqrt(d)) = exp2(s * factor)
    registers = 240 if threads <= 256 else 160  # of a computing thread: 65536, less 24 for each of 128 that load
    total_q = T.dynamic("total_q")
    offsets = T.dynamic("offsets")  # batch_size + 1
    rows = T.dynamic("rows")
    capacity = T.dynamic("capacity")

    @T.prim_func
    def main(
        Q: T.Tensor((total_q, num_qo_heads, dim), "bfloat16"),
        Runs: T.Tensor((2 * num_kv_heads, rows, dim), "bfloat16"),
        Output: T.Tensor((total_q, num_qo_heads, dim), "bfloat16"),
        QoIndptr: T.Tensor((offsets,), "int32"),
        Sequences: T.Tensor((capacity, 2), "int32"),
    ):
        # Sequence b owns the token tiles from qo_indptr[b] // tokens + b on: always enough of them, and none is shared.
        # The heads of one token tile come one after another.
        with T.Kernel((total_q // tokens + offsets - 1) * head_tiles, threads=threads) as block:
            Q_tile = T.alloc_shared((tokens, pack, dim), "bfloat16")
            Q_shared = T.reshape(Q_tile, (BLOCK_M, dim))
            K_shared = T.alloc_shared((BLOCK_N, dim), "bfloat16")
            V_shared = T.alloc_shared((BLOCK_N, dim), "bfloat16")
            S = T.alloc_fragment((BLOCK_M, BLOCK_N), "float32")
            P = T.alloc_fragment((BLOCK_M, BLOCK_N), "bfloat16")
            acc = T.alloc_fragment((BLOCK_M, dim), "float32")
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
            first_row = Sequences[b, 0]
            kv_len = Sequences[b, 1]
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
                T.copy(Runs[kv_head, first_row + n * BLOCK_N : first_row + (n + 1) * BLOCK_N, :], K_shared)
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
                for i, d in T.Parallel(BLOCK_M, dim):
                    acc[i, d] *= rescale[i]
                T.copy(S, P)
                T.copy(
                    Runs[num_kv_heads + kv_head, first_row + n * BLOCK_N : first_row + (n + 1) * BLOCK_N, :], V_shared
                )
                T.gemm(P, V_shared, acc, policy=T.GemmWarpPolicy.FullRow)

            for i, d in T.Parallel(BLOCK_M, dim):
                if token_0 >= 0 and token_0 + i // pack < q_len:
                    # A row that saw no key has an empty sum, and its output is 0.
                    Output[q_start + token_0 + i // pack, head_0 + i % pack, d] = T.if_then_else(
                        row_sum[i] > 0, acc[i, d] / row_sum[i], 0.0
                    )

    return main


def run_kernel(
    q,
    kv_data,
    output,
    qo_indptr,
    kv_indptr,
    kv_indices,
    last_page_len,
    batch_size,
    seq_len,
    num_qo_heads,
    num_kv_heads,
    head_dim,
    page_block_size,
    causal,
):
    if batch_size == 0 or q.shape[0] == 0:
        return
    BLOCK_M, BLOCK_N, threads, num_stages = TUNING[DEVICE][64 if head_dim <= 64 else 128 if head_dim <= 128 else 256]
    unpacker = (num_kv_heads, head_dim, page_block_size)
    if unpacker not in _unpackers:
        _unpackers[unpacker] = unpack(*unpacker, BLOCK_N)
    key = (num_qo_heads, num_kv_heads, head_dim, causal)
    if key not in _kernels:
        _kernels[key] = prefill(*key, BLOCK_M, BLOCK_N, threads, num_stages)
    rows = (kv_indices.shape[0] * page_block_size // BLOCK_N + batch_size) * BLOCK_N
    place = (num_kv_heads, head_dim, q.device)
    if place not in _runs or _runs[place].shape[1] < rows:
        _runs[place] = torch.empty((2 * num_kv_heads, rows, head_dim), dtype=q.dtype, device=q.device)
    if q.device not in _sequences or _sequences[q.device].shape[0] < batch_size:
        _sequences[q.device] = torch.empty((batch_size, 2), dtype=qo_indptr.dtype, device=q.device)
    _unpackers[unpacker](kv_data, _runs[place], _sequences[q.device], kv_indptr, kv_indices, last_page_len)
    _kernels[key](q, _runs[place], output, qo_indptr, _sequences[q.device])
