"""KV cache decode attention in Triton: one query token per sequence against a paged cache.

Contract: q and output (batch_size, seqlen_q = 1, num_heads, headdim), k_cache_paged and v_cache_paged (num_blocks,
page_block_size, num_heads_k, headdim), all bf16 and contiguous; cache_seqlens (batch_size,) int32, 0 to seqlen_k;
block_table (batch_size, num_blocks // batch_size) int32, of which the entries past a sequence's last page are not read.
Scale 1/sqrt(headdim). A sequence of length 0 gives 0. causal changes nothing for one query token.

Algorithm: split-KV in one launch. Every sequence is cut into num_splits equal parts, so that the grid fills the chip
whatever the batch; each part is one block's online softmax in base 2. A block whose part is not all leaves its result
in a workspace and takes a ticket; the last one of a sequence and KV head merges the parts by their logarithms, always
in the same order, so that the result has the same bits every time.
Query heads that share a KV head form the row tile of two matrix products (GQA). Without sharing there is nothing to
multiply by tiles: each row of the K tile then runs an online softmax of its own, merged once at the end, so the loop
has no exchange between warps. Page ids of the next tile are loaded while this one is computed.

Bound: memory, batch_size * length * num_heads_k * headdim * 4 bytes. Workspace: 4 * (headdim + 1) bytes per query head
and split, so at most that times multiprocessors * blocks * heads of a row tile: 0.4 MB on a C500 for 8 heads over 8 KV
heads of 128, 1.7 MB for 32 over 4; and 4 bytes per sequence and row tile for the tickets, which are 0 between calls.
It is kept; no result is read that the same call has not written.
"""

import math

import torch
import triton
import triton.language as tl

# Per device: the number of multiprocessors, and for a group of one head ("single") and of several ("grouped"):
# (blocks wanted per multiprocessor, least keys of a split, elements of a K tile, num_warps, num_stages).
TUNING = {
    # C500: a warp is 64 lanes, so 4 warps are 256 threads. One stage, no asynchronous copy: other blocks of the same
    # multiprocessor cover a block's loads.
    "c500": {
        "multiprocessors": 104,
        "single": (8, 128, 4096, 4, 1),  # no shared memory: 8 blocks fill the 2048 threads of a multiprocessor
        "grouped": (4, 128, 4096, 4, 1),  # K 8 KiB + V 8 KiB, Q and P: 4 blocks in 64 KiB
    },
    # H200: about 32 KiB per multiprocessor must be on their way to reach the 4 TB/s of its memory.
    "sm90": {
        "multiprocessors": 132,
        # 3 * 16 KiB: 4 blocks in 228 KiB. Stretches of 128 keys leave half as many parts to merge as 64 would.
        "single": (4, 128, 4096, 4, 3),
        "grouped": (4, 64, 4096, 4, 3),
    },
}
DEVICE = "c500"
WORKSPACE = {}


@triton.jit
def decode_kernel(
    q,
    k_cache,
    v_cache,
    output,
    partial,
    tickets,
    cache_seqlens,
    block_table,
    batch_size,
    table_width,
    num_splits,
    scale_log2,
    HEADS_QO: tl.constexpr,
    HEADS_KV: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    # One program: one split of one sequence for one KV head and (at most) BLOCK_M of the query heads that share it.
    # DIM_TILE is DIM padded to a power of two. SPLIT = 0: num_splits is 1, and the result goes straight to output.
    GROUP: tl.constexpr = HEADS_QO // HEADS_KV
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    TOKEN: tl.constexpr = HEADS_KV * DIM  # elements from one token of a page to the next
    PAGES_IN_STEP: tl.constexpr = BLOCK_N % PAGE == 0  # each key tile starts on a page: no division inside the loop

    # ---- which part of which sequence; the heads run side by side, since their keys lie side by side
    work = tl.program_id(0)  # row tile of a sequence
    split = tl.program_id(1)
    kv_head = work // HEAD_TILES % HEADS_KV
    first_head = kv_head * GROUP + work % HEAD_TILES * BLOCK_M
    sequence = work // (HEAD_TILES * HEADS_KV)
    kv_len = tl.load(cache_seqlens + sequence)
    query = sequence.to(tl.int64) * HEADS_QO + first_head  # in units of one head's vector
    dim = tl.arange(0, DIM_TILE)
    dim_valid = dim < DIM
    head = tl.arange(0, BLOCK_M)  # (BLOCK_M,) query head within the tile
    head_valid = first_head + head < (kv_head + 1) * GROUP
    head_mask = head_valid[:, None] & dim_valid[None, :]
    # The query is loaded before anything needs the length, so that the two are on their way together.
    if GROUP == 1:
        q_row = tl.load(q + query * DIM + dim, mask=dim_valid, other=0.0).to(tl.float32) * scale_log2  # (DIM_TILE,)
    else:
        q_tile = tl.load(q + query * DIM + (head[:, None] * DIM + dim[None, :]), mask=head_mask, other=0.0)
    split_len = tl.cdiv(tl.cdiv(kv_len, num_splits), BLOCK_N) * BLOCK_N
    begin = split * split_len
    end = tl.minimum(begin + split_len, kv_len)
    if begin >= tl.maximum(kv_len, 1):
        return  # an empty split; of an empty sequence the first one, which begins at 0, writes the zeros

    # ---- addresses: a 64-bit row for every key (the cache may pass 2^31 elements)
    key = tl.arange(0, BLOCK_N)  # (BLOCK_N,) key within the tile
    k_base = k_cache + kv_head * DIM
    v_base = v_cache + kv_head * DIM
    page_ids = block_table + sequence * table_width
    first_key = begin + key
    pages = tl.load(page_ids + first_key // PAGE, mask=first_key < end, other=0)  # (BLOCK_N,) page of each key
    lse_base = partial + batch_size * HEADS_QO * num_splits * DIM  # behind the partial outputs

    # A running maximum starts finite: what has seen no key yet then has exp2(-inf - maximum) = 0, never NaN.
    if GROUP == 1:
        maximum = tl.full([BLOCK_N], -1.0e38, tl.float32)  # (BLOCK_N,) of scaled scores, base 2
        total = tl.zeros([BLOCK_N], tl.float32)  # (BLOCK_N,)
        acc = tl.zeros([BLOCK_N, DIM_TILE], tl.float32)  # (BLOCK_N, DIM_TILE)
        for n in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
            # ---- addresses of this tile's keys, page ids of the next tile's
            key_valid = n + key < end
            slot_in_page = key % PAGE if PAGES_IN_STEP else (n + key) % PAGE
            key_offset = pages.to(tl.int64) * (PAGE * TOKEN) + slot_in_page * TOKEN  # (BLOCK_N,)
            next_key = n + BLOCK_N + key
            next_page = (n + BLOCK_N) // PAGE + key // PAGE if PAGES_IN_STEP else next_key // PAGE
            pages = tl.load(page_ids + next_page, mask=next_key < end, other=0)
            tile_offset = key_offset[:, None] + dim[None, :]  # (BLOCK_N, DIM_TILE)
            tile_mask = key_valid[:, None] & dim_valid[None, :]
            k_tile = tl.load(k_base + tile_offset, mask=tile_mask, other=0.0)
            v_tile = tl.load(v_base + tile_offset, mask=tile_mask, other=0.0)

            # ---- one online softmax per row
            scores = tl.sum(k_tile.to(tl.float32) * q_row[None, :], axis=1)  # (BLOCK_N,)
            scores = tl.where(key_valid, scores, float("-inf"))
            new_maximum = tl.maximum(maximum, scores)
            p = tl.exp2(scores - new_maximum)
            rescale = tl.exp2(maximum - new_maximum)
            total = total * rescale + p
            acc = acc * rescale[:, None] + p[:, None] * v_tile.to(tl.float32)
            maximum = new_maximum

        # ---- merge the rows, epilogue: no key at all gives 0
        row_maximum = tl.max(maximum, axis=0)
        weight = tl.exp2(maximum - row_maximum)
        row_total = tl.sum(total * weight, axis=0)
        row_total = tl.where(row_total > 0.0, row_total, 1.0)
        result = tl.sum(acc * weight[:, None], axis=0) / row_total  # (DIM_TILE,)
        if SPLIT:
            part = query * num_splits + split
            tl.store(partial + part * DIM + dim, result, mask=dim_valid)
            tl.store(lse_base + part, row_maximum + tl.log2(row_total))
        else:
            tl.store(output + query * DIM + dim, result.to(output.dtype.element_ty), mask=dim_valid)
    else:
        maximum = tl.full([BLOCK_M], -1.0e38, tl.float32)  # (BLOCK_M,) of scaled scores, base 2
        total = tl.zeros([BLOCK_M], tl.float32)  # (BLOCK_M,)
        acc = tl.zeros([BLOCK_M, DIM_TILE], tl.float32)  # (BLOCK_M, DIM_TILE)
        for n in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
            # ---- addresses of this tile's keys, page ids of the next tile's
            key_valid = n + key < end
            slot_in_page = key % PAGE if PAGES_IN_STEP else (n + key) % PAGE
            key_offset = pages.to(tl.int64) * (PAGE * TOKEN) + slot_in_page * TOKEN  # (BLOCK_N,)
            next_key = n + BLOCK_N + key
            next_page = (n + BLOCK_N) // PAGE + key // PAGE if PAGES_IN_STEP else next_key // PAGE
            pages = tl.load(page_ids + next_page, mask=next_key < end, other=0)

            # ---- scores (BLOCK_M, BLOCK_N), K read transposed
            k_mask = key_valid[None, :] & dim_valid[:, None]
            k_tile = tl.load(k_base + (key_offset[None, :] + dim[:, None]), mask=k_mask, other=0.0)
            scores = tl.dot(q_tile, k_tile) * scale_log2
            scores = tl.where(key_valid[None, :], scores, float("-inf"))

            # ---- online softmax
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            p = tl.exp2(scores - new_maximum[:, None])  # (BLOCK_M, BLOCK_N)
            rescale = tl.exp2(maximum - new_maximum)
            total = total * rescale + tl.sum(p, axis=1)
            acc = acc * rescale[:, None]
            maximum = new_maximum

            # ---- accumulate P V
            v_mask = key_valid[:, None] & dim_valid[None, :]
            v_tile = tl.load(v_base + (key_offset[:, None] + dim[None, :]), mask=v_mask, other=0.0)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)

        # ---- epilogue: no key at all gives 0
        total = tl.where(total > 0.0, total, 1.0)
        acc = acc / total[:, None]
        if SPLIT:
            part = (query + head) * num_splits + split  # (BLOCK_M,)
            tl.store(partial + part[:, None] * DIM + dim[None, :], acc, mask=head_mask)
            tl.store(lse_base + part, maximum + tl.log2(total), mask=head_valid)
        else:
            out_offset = head[:, None] * DIM + dim[None, :]
            tl.store(output + query * DIM + out_offset, acc.to(output.dtype.element_ty), mask=head_mask)

    # ---- merge: the last block of this row tile to finish sees what all of them have stored
    if SPLIT:
        used_splits = tl.maximum(tl.cdiv(kv_len, tl.maximum(split_len, 1)), 1)  # the others have no keys
        tl.debug_barrier()  # the block has stored its part, so one thread may take the ticket for all
        if tl.atomic_add(tickets + work, 1, sem="acq_rel") == used_splits - 1:
            tl.store(tickets + work, 0)  # for the next call
            part_row = tl.arange(0, BLOCK_S)[:, None]  # (BLOCK_S, 1) split within the step
            row_head = tl.arange(0, MERGE_HEADS)  # (MERGE_HEADS,)
            row_valid = first_head + row_head < (kv_head + 1) * GROUP
            # Each row of the step has a running merge of its own. The parts are read past the first-level cache.
            most = tl.full([BLOCK_S, MERGE_HEADS], -1.0e38, tl.float32)
            sums = tl.zeros([BLOCK_S, MERGE_HEADS], tl.float32)
            merged = tl.zeros([BLOCK_S, MERGE_HEADS, DIM_TILE], tl.float32)
            for s in tl.range(0, used_splits, BLOCK_S, num_stages=1):
                part_valid = (s + part_row < used_splits) & row_valid[None, :]
                row = (query + row_head[None, :]) * num_splits + (s + part_row)  # (BLOCK_S, MERGE_HEADS)
                lse = tl.load(lse_base + row, mask=part_valid, other=float("-inf"), cache_modifier=".cg")
                part_mask = part_valid[:, :, None] & dim_valid[None, None, :]
                part_place = partial + row[:, :, None] * DIM + dim[None, None, :]
                part_out = tl.load(part_place, mask=part_mask, other=0.0, cache_modifier=".cg")
                new_most = tl.maximum(most, lse)
                share = tl.exp2(lse - new_most)
                shrink = tl.exp2(most - new_most)
                sums = sums * shrink + share
                merged = merged * shrink[:, :, None] + share[:, :, None] * part_out
                most = new_most
            share = tl.exp2(most - tl.max(most, axis=0)[None, :])
            row_sum = tl.sum(sums * share, axis=0)  # (MERGE_HEADS,)
            row_out = tl.sum(merged * share[:, :, None], axis=0) / row_sum[:, None]  # (MERGE_HEADS, DIM_TILE)
            row_mask = row_valid[:, None] & dim_valid[None, :]
            row_place = output + query * DIM + (row_head[:, None] * DIM + dim[None, :])
            tl.store(row_place, row_out.to(output.dtype.element_ty), mask=row_mask)


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
    group = num_heads // num_heads_k
    kind = "single" if group == 1 else "grouped"
    blocks, split_keys, tile_elements, num_warps, num_stages = TUNING[DEVICE][kind]
    dim_tile = triton.next_power_of_2(headdim) if headdim > 16 else 16
    # tl.dot wants at least 16 keys; beyond 64 the page ids would be moved through shared memory.
    block_n = tile_elements // dim_tile
    block_n = 64 if block_n > 64 else 16 if block_n < 16 else block_n
    block_m = 32 if group > 16 and dim_tile <= 256 else 16  # 32 x 512 would spill; more heads take several tiles

    # As many splits as fill the chip with `blocks` per multiprocessor, as long as each may have split_keys keys.
    grid = batch_size * num_heads_k * triton.cdiv(group, block_m)
    num_splits = TUNING[DEVICE]["multiprocessors"] * blocks // grid
    most_splits = triton.cdiv(seqlen_k, split_keys)
    num_splits = most_splits if num_splits > most_splits else num_splits
    num_splits = num_splits if num_splits > 1 else 1
    partial = output
    tickets = cache_seqlens
    if num_splits > 1:
        size = batch_size * num_heads * num_splits * (headdim + 1)
        partial = WORKSPACE.get("partial")
        if partial is None or partial.numel() < size or partial.device != q.device:
            partial = torch.empty(size, dtype=torch.float32, device=q.device)
            WORKSPACE["partial"] = partial
        tickets = WORKSPACE.get("tickets")
        if tickets is None or tickets.numel() < grid or tickets.device != q.device:
            tickets = torch.zeros(grid, dtype=torch.int32, device=q.device)
            WORKSPACE["tickets"] = tickets

    merge_heads = triton.next_power_of_2(group) if group < block_m else block_m
    block_s = 4096 // (merge_heads * dim_tile)  # 32 accumulators for each of 128 threads
    decode_kernel[(grid, num_splits)](
        q,
        k_cache_paged,
        v_cache_paged,
        output,
        partial,
        tickets,
        cache_seqlens,
        block_table,
        batch_size,
        block_table.shape[1],
        num_splits,
        1.4426950408889634 / math.sqrt(headdim),  # log2(e): exp(x) = exp2(x log2(e))
        HEADS_QO=num_heads,
        HEADS_KV=num_heads_k,
        DIM=headdim,
        DIM_TILE=dim_tile,
        PAGE=page_block_size,
        SPLIT=num_splits > 1,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_S=block_s if block_s > 1 else 1,
        MERGE_HEADS=merge_heads,
        NUM_STAGES=num_stages,
        num_warps=num_warps,
        num_stages=num_stages,
    )
