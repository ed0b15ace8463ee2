"""Multi-head latent attention, decode, in Triton.

Contract: q_nope, output (batch_size, num_heads, head_dim_ckv), q_pe (batch_size, num_heads, head_dim_kpe), ckv
(num_pages, page_size, head_dim_ckv), kpe (num_pages, page_size, head_dim_kpe), all bf16 and contiguous; kv_indptr
(batch_size + 1,) int32 offsets into kv_indices, in pages; kv_indices int32 physical pages; kv_lens (batch_size,) int32
tokens. Scale 1/sqrt(head_dim_ckv + head_dim_kpe). A sequence of length 0 gives 0. One query per sequence, so q_indptr
and causal say nothing new; seq_len is only an upper bound and is not used.

Algorithm: the heads of a sequence are the rows of the tile. A tile of latent vectors is loaded once: transposed it is
the key of the scores, as it lies it is the value of the output. The sequences are cut into chunks of BLOCK_N-token
tiles, as many tiles to every program as fit the true lengths, so that one grid fills the chip for any batch; a second
launch merges the partial outputs of a sequence, weighted by exp2(lse - largest lse).

Bound: 121 flops per byte at 64 heads (memory), 242 at 128 (the tensor units, for 2 * (2 * 512 + 64) flops per score).
Workspace, kept between calls: capacity * num_heads * (head_dim_ckv + 1) * 4 + batch_size * 8 bytes, where capacity is
PROGRAMS / head tiles, or 2 * batch_size if that is more: 17.3 MB for 132 programs of 64 heads, 6.8 MB on the C500.
"""

import math

import torch
import triton
import triton.language as tl

# Row per device: (BLOCK_H, BLOCK_N, num_warps, num_stages, MIN_CHUNK, PROGRAMS).
# MIN_CHUNK: the fewest tiles of a chunk, 64 tokens here: a partial output of 64 heads is the bytes of 114 tokens.
# PROGRAMS: how many should fill the chip.
TUNING = {
    # C500: tiles and warps are the vendor's own for this kernel; a warp is 64 lanes, so 4 warps are 256 threads. Shared
    # memory: 18 KiB of Q (where the compiler keeps it there) and 18 KiB of cache. One stage: no asynchronous copy. Two
    # programs per multiprocessor, so that one computes while the other loads.
    "c500": (16, 16, 4, 1, 4, 208),
    # H200: a warpgroup multiplies 64 rows, so fewer heads are padded to 64: the cache's bytes are the bound there. The
    # two warpgroups have 256 columns of the accumulator each, 128 registers per thread, which leaves room for one
    # program per multiprocessor. Shared memory: Q 72 KiB, three stages of 36 KiB, so that a tile is loaded during the
    # whole computation of the one before. 64 tokens would halve the reads of Q from shared memory, but only two stages
    # of them fit, and the compiler then issues the next load after the computation.
    "sm90": (64, 32, 8, 3, 2, 132),
}
DEVICE = "c500"
WORKSPACE = {}


@triton.jit
def mla_decode_kernel(
    q_nope,
    q_pe,
    ckv,
    kpe,
    output,
    kv_indptr,
    kv_indices,
    kv_lens,
    partial,
    lse,
    plan,
    batch_size,
    scale_log2,
    HEADS: tl.constexpr,
    DIM_CKV: tl.constexpr,
    DIM_KPE: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    # One program: BLOCK_H heads of one sequence over one chunk of its tokens. DIM_V and DIM_R are DIM_CKV and DIM_KPE
    # padded to powers of two. The head tiles of a chunk are neighbours: the second one finds its tokens in the L2.
    HEAD_TILES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    slot = tl.program_id(0) // HEAD_TILES
    slots = tl.num_programs(0) // HEAD_TILES
    head_tile = tl.program_id(0) % HEAD_TILES

    # ---- which sequence, which tokens. A chunk is the smallest number of tiles, from MIN_CHUNK on, with which all
    # sequences, each rounded up to whole chunks and to one at least, fit into the slots: no less than total / slots, no
    # more than total / (slots - batch_size), and 16 candidates between the two are fine enough.
    entry = tl.arange(0, BLOCK_B)
    tiles = (tl.load(kv_lens + entry, mask=entry < batch_size, other=0) + BLOCK_N - 1) // BLOCK_N  # (BLOCK_B,)
    total_tiles = tl.sum(tiles, axis=0)
    fewest = tl.maximum((total_tiles + slots - 1) // slots, MIN_CHUNK)
    spare = tl.maximum(slots - batch_size, 1)
    most = tl.maximum((total_tiles + spare - 1) // spare, MIN_CHUNK)
    candidate = fewest + tl.arange(0, 16) * ((most - fewest + 14) // 15)  # (16,), the last one at or above `most`
    chunks = tl.maximum((tiles[None, :] + candidate[:, None] - 1) // candidate[:, None], 1)  # (16, BLOCK_B)
    needed = tl.sum(tl.where(entry[None, :] < batch_size, chunks, 0), axis=1)  # (16,) slots
    chunk = tl.min(tl.where(needed <= slots, candidate, most), axis=0)
    num_splits = tl.where(entry < batch_size, tl.maximum((tiles + chunk - 1) // chunk, 1), 0)  # (BLOCK_B,)
    sequence = tl.sum((tl.cumsum(num_splits, axis=0) <= slot).to(tl.int32), axis=0)
    if sequence >= batch_size:
        return  # more slots than chunks
    first_slot = tl.sum(tl.where(entry < sequence, num_splits, 0), axis=0)
    splits = tl.sum(tl.where(entry == sequence, num_splits, 0), axis=0)
    if (slot == first_slot) & (head_tile == 0):
        tl.store(plan + 2 * sequence, first_slot)
        tl.store(plan + 2 * sequence + 1, splits)
    kv_len = tl.load(kv_lens + sequence)
    begin = (slot - first_slot) * chunk * BLOCK_N
    end = tl.minimum(begin + chunk * BLOCK_N, kv_len)

    # ---- queries
    head = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)  # (BLOCK_H,)
    head_valid = head < HEADS
    dim_v = tl.arange(0, DIM_V)
    dim_r = tl.arange(0, DIM_R)
    first_row = sequence.to(tl.int64) * HEADS
    row_offset = head[:, None] * DIM_CKV + dim_v[None, :]  # (BLOCK_H, DIM_V), in q_nope, output and one partial
    row_mask = head_valid[:, None] & (dim_v[None, :] < DIM_CKV)
    q_v = tl.load(q_nope + first_row * DIM_CKV + row_offset, mask=row_mask, other=0.0)  # (BLOCK_H, DIM_V)
    q_r_mask = head_valid[:, None] & (dim_r[None, :] < DIM_KPE)
    q_r = tl.load(q_pe + first_row * DIM_KPE + head[:, None] * DIM_KPE + dim_r[None, :], mask=q_r_mask, other=0.0)

    # ---- tokens. The pages of a tile are looked up one tile ahead. Past the end the last token is loaded again instead
    # of masking: the scores of the copies are -inf, and what is loaded is a live number, so that 0 * it is 0.
    key = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    table = kv_indices + tl.load(kv_indptr + sequence)
    page = tl.zeros([BLOCK_N], tl.int32)
    if begin < end:
        page = tl.load(table + tl.minimum(begin + key, end - 1) // PAGE_SIZE)
    maximum = tl.full([BLOCK_H], -1.0e38, tl.float32)  # (BLOCK_H,) of scaled scores, base 2
    total = tl.zeros([BLOCK_H], tl.float32)  # (BLOCK_H,)
    acc = tl.zeros([BLOCK_H, DIM_V], tl.float32)  # (BLOCK_H, DIM_V)
    for n in range(begin, end, BLOCK_N):
        # ---- scores (BLOCK_H, BLOCK_N)
        token = tl.minimum(n + key, end - 1)
        token_row = page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE
        page = tl.load(table + tl.minimum(n + BLOCK_N + key, end - 1) // PAGE_SIZE)
        latent_ptr = ckv + token_row[:, None] * DIM_CKV + dim_v[None, :]  # (BLOCK_N, DIM_V)
        rope_ptr = kpe + token_row[:, None] * DIM_KPE + dim_r[None, :]  # (BLOCK_N, DIM_R)
        latent_mask = dim_v[None, :] < DIM_CKV
        latent = tl.load(latent_ptr, mask=latent_mask, other=0.0) if DIM_V > DIM_CKV else tl.load(latent_ptr)
        rope = tl.load(rope_ptr, mask=dim_r[None, :] < DIM_KPE, other=0.0) if DIM_R > DIM_KPE else tl.load(rope_ptr)
        scores_r = tl.dot(q_r, tl.trans(rope))
        scores_v = tl.dot(q_v, tl.trans(latent))
        scores = scores_v * scale_log2 + scores_r * scale_log2  # (BLOCK_H, BLOCK_N), base 2
        scores = tl.where(n + key[None, :] < end, scores, float("-inf"))

        # ---- online softmax. The branch is always taken. It keeps the compiler from seeing that one product feeds the
        # other: it would lay all warps along the rows then, and with 64 rows both warpgroups would compute all scores.
        p = scores
        rescale = maximum
        if (n < end) if BLOCK_H >= 64 else True:
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            p = tl.exp2(scores - new_maximum[:, None])  # (BLOCK_H, BLOCK_N)
            rescale = tl.exp2(maximum - new_maximum)
            total = total * rescale + tl.sum(p, axis=1)
            maximum = new_maximum
        acc = acc * rescale[:, None]

        # ---- accumulate P V: the values are the latent part of the keys
        acc = tl.dot(p.to(latent.dtype), latent, acc)

    # ---- epilogue: the output itself if this is the whole sequence, else a partial output. Without a token total and
    # acc are 0.
    acc = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    if splits == 1:
        tl.store(output + first_row * DIM_CKV + row_offset, acc.to(output.dtype.element_ty), mask=row_mask)
    else:
        slot_row = slot.to(tl.int64) * HEADS
        tl.store(partial + slot_row * DIM_CKV + row_offset, acc, mask=row_mask)
        tl.store(lse + slot_row + head, maximum + tl.log2(total), mask=head_valid)


@triton.jit
def combine_kernel(
    partial,
    lse,
    plan,
    output,
    HEADS: tl.constexpr,
    DIM_CKV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # One program: BLOCK_D columns of BLOCK_H heads of one sequence, BLOCK_S of its splits at a time. Each place of the
    # tile keeps a maximum and a sum of its own; they meet after the loop, so that nothing in it waits for a reduction.
    HEAD_TILES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    DIM_TILES: tl.constexpr = (DIM_CKV + BLOCK_D - 1) // BLOCK_D
    sequence = tl.program_id(0) // (HEAD_TILES * DIM_TILES)
    first_slot = tl.load(plan + 2 * sequence)
    splits = tl.load(plan + 2 * sequence + 1)
    if splits == 1:
        return  # the first kernel has written it
    tile = tl.program_id(0) % (HEAD_TILES * DIM_TILES)
    head = tile // DIM_TILES * BLOCK_H + tl.arange(0, BLOCK_H)  # (BLOCK_H,)
    dim = tile % DIM_TILES * BLOCK_D + tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    part = tl.arange(0, BLOCK_S)
    out_mask = (head < HEADS)[:, None] & (dim < DIM_CKV)[None, :]  # (BLOCK_H, BLOCK_D)
    lse_base = lse + first_slot.to(tl.int64) * HEADS
    partial_base = partial + first_slot.to(tl.int64) * HEADS * DIM_CKV

    maximum = tl.full([BLOCK_S, BLOCK_H], -1.0e38, tl.float32)
    total = tl.zeros([BLOCK_S, BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_S, BLOCK_H, BLOCK_D], tl.float32)
    for s in range(0, splits, BLOCK_S):
        row = (s + part)[:, None] * HEADS + head[None, :]  # (BLOCK_S, BLOCK_H)
        valid = (s + part < splits)[:, None] & (head < HEADS)[None, :]
        weight = tl.load(lse_base + row, mask=valid, other=float("-inf"))
        offset = row.to(tl.int64)[:, :, None] * DIM_CKV + dim[None, None, :]
        values = tl.load(partial_base + offset, mask=valid[:, :, None] & (dim < DIM_CKV)[None, None, :], other=0.0)
        new_maximum = tl.maximum(maximum, weight)
        weight = tl.exp2(weight - new_maximum)
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + weight
        acc = acc * rescale[:, :, None] + values * weight[:, :, None]
        maximum = new_maximum
    rescale = tl.exp2(maximum - tl.max(maximum, axis=0)[None, :])
    result = tl.sum(acc * rescale[:, :, None], axis=0)  # (BLOCK_H, BLOCK_D)
    whole = tl.sum(total * rescale, axis=0)  # (BLOCK_H,)
    result = result / tl.where(whole > 0.0, whole, 1.0)[:, None]
    out_offset = head[:, None] * DIM_CKV + dim[None, :]
    out_base = output + sequence.to(tl.int64) * HEADS * DIM_CKV
    tl.store(out_base + out_offset, result.to(output.dtype.element_ty), mask=out_mask)


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
    block_h, block_n, num_warps, num_stages, min_chunk, programs = TUNING[DEVICE]
    head_tiles = triton.cdiv(num_heads, block_h)
    # Enough slots to fill the chip, two per sequence at least; no more programs than chunks there can be.
    capacity = programs // head_tiles
    capacity = capacity if capacity > 2 * batch_size else 2 * batch_size
    slots = kv_indices.shape[0] * page_size // (min_chunk * block_n) + batch_size
    slots = slots if slots < capacity else capacity

    key = (capacity, batch_size, num_heads, head_dim_ckv, q_nope.device)
    if key not in WORKSPACE:
        WORKSPACE[key] = (
            torch.empty((capacity, num_heads, head_dim_ckv), dtype=torch.float32, device=q_nope.device),
            torch.empty((capacity, num_heads), dtype=torch.float32, device=q_nope.device),
            torch.empty((batch_size, 2), dtype=torch.int32, device=q_nope.device),
        )
    partial, lse, plan = WORKSPACE[key]
    mla_decode_kernel[(slots * head_tiles,)](
        q_nope,
        q_pe,
        ckv,
        kpe,
        output,
        kv_indptr,
        kv_indices,
        kv_lens,
        partial,
        lse,
        plan,
        batch_size,
        1.4426950408889634 / math.sqrt(head_dim_ckv + head_dim_kpe),  # log2(e): exp(x) = exp2(x log2(e))
        HEADS=num_heads,
        DIM_CKV=head_dim_ckv,
        DIM_KPE=head_dim_kpe,
        DIM_V=triton.next_power_of_2(head_dim_ckv) if head_dim_ckv > 16 else 16,
        DIM_R=triton.next_power_of_2(head_dim_kpe) if head_dim_kpe > 16 else 16,  # tl.dot wants 16
        PAGE_SIZE=page_size,
        BLOCK_H=block_h,
        BLOCK_N=block_n,
        MIN_CHUNK=min_chunk,
        BLOCK_B=triton.next_power_of_2(batch_size + 15),  # 16 at least: one compiler is known to fail on 1
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if slots == batch_size:
        return  # a slot per sequence: nothing was split
    # About 64 KiB of partial outputs to a program, if they were spread evenly: all columns of several heads where the
    # sequences have few splits, some columns of one head where they have many. Read in tiles of 32 KiB.
    width = triton.next_power_of_2(triton.cdiv(16384 * batch_size, slots))
    width = 128 if width < 128 else (2048 if width > 2048 else width)
    block_d = triton.next_power_of_2(head_dim_ckv)
    block_d = width if width < block_d else block_d
    combine_h = width // block_d
    combine_kernel[(batch_size * triton.cdiv(num_heads, combine_h) * triton.cdiv(head_dim_ckv, block_d),)](
        partial,
        lse,
        plan,
        output,
        HEADS=num_heads,
        DIM_CKV=head_dim_ckv,
        BLOCK_S=8192 // width,
        BLOCK_H=combine_h,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=1,
    )
