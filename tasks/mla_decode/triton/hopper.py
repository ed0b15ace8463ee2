"""Multi-head latent attention, decode, in Gluon, for NVIDIA Hopper alone: run_kernel.py beside this file is to paste.

Contract: that of run_kernel.py. Needs Triton 3.6 or 3.7 with Gluon and compute capability 9.x.

Taken here: head_dim_ckv 512, head_dim_kpe 64, at most 1024 sequences, tensors aligned to 16 bytes. All else goes to
run_kernel.py.

Algorithm: the plan (chunks of tiles, partial outputs, a second launch that merges them) is run_kernel.py's, with tiles
of 64 tokens. A program has 64 heads of one chunk and three partitions:
  0  one warpgroup: scores (64, 64) and softmax, and columns 0 .. 255 of the output;
  1  one warpgroup: columns 256 .. 511, with P and the rescaling factors through shared memory;
  2  four warps: gather the tokens by 16-byte asynchronous copies, one tile ahead.
Scores are computed once, the latent tile is read from memory once and used as key and as value.

Barriers, all phases start at 0; j counts the chunk's tiles, T of them:
  full[j % 2]   128 arrivals, by the copies of each loading thread: parity j // 2.
  empty[j % 2]  two arrivals, of warpgroups 0 and 1 after their products with tile j: the loader waits with parity
                j // 2 + 1, at once for the first two tiles.
  p_full        one arrival, after P and the factors of tile j are written; once more (j = T) for 1 / total.
  p_empty       one arrival, after warpgroup 1 has used them: warpgroup 0 waits with parity j + 1 before it writes.

Partial outputs lie in a workspace that is kept, so calls must come one after another, from one thread on one stream.
"""

import math
import pathlib
import sys
import types

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# MIN_CHUNK in tiles of 64 tokens. Shared memory: Q 72 KiB, two stages of 72 KiB, P 8 KiB: 224 of 227.
TUNING = {"sm90": 1}
DEVICE = "sm90"
PROGRAMS = 132  # that should fill the chip: one per multiprocessor of an H100 or H200
SCALE_LOG2 = 1.4426950408889634 / math.sqrt(512 + 64)  # log2(e): exp(x) = exp2(x log2(e))
PLANS = {}
THREAD_BARRIER = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed by Triton 3.7


@gluon.jit
def _add(a, b):
    return a + b


# fmt: off
@gluon.jit
def _store_columns(
    acc, inverse, output, partial, first_row, slot_row, splits, head_tile, HALF: gl.constexpr, HEADS: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):
    # fmt: on
    acc = acc * inverse[:, None]
    head = head_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
    column = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, O_LAYOUT))
    offset = head[:, None] * 512 + column[None, :]
    mask = (head < HEADS)[:, None] & (column >= 0)[None, :]
    if splits == 1:
        gl.store(output + first_row * 512 + offset, acc.to(gl.bfloat16), mask=mask)
    else:
        gl.store(partial + slot_row * 512 + offset, acc, mask=mask)


@gluon.jit
def _scores(q_smem, q_rope, latent, rope, full, j, none):
    stage = j % 2
    mbarrier.wait(full.index(stage), (j // 2) & 1)
    fence_async_shared()  # the copies wrote through the generic proxy
    scores = warpgroup_mma(q_smem.index(0), latent.index(stage * 2).permute([1, 0]), none, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_smem.index(1), latent.index(stage * 2 + 1).permute([1, 0]), scores, is_async=True)
    return warpgroup_mma(q_rope, rope.index(stage).permute([1, 0]), scores, is_async=True)


@gluon.jit
def _softmax(scores, maximum, total, first, end, scale_log2, S_LAYOUT: gl.constexpr):
    key = first + gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
    scores = gl.where((key < end)[None, :], scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=1) * scale_log2)
    rescale = gl.exp2(maximum - new_maximum)
    p = gl.exp2(scores * scale_log2 - new_maximum[:, None])
    return p.to(gl.bfloat16), new_maximum, total * rescale + gl.sum(p, axis=1), rescale


@gluon.jit
def _publish(p, rescale, p_smem, factor_smem, p_full, p_empty, j):
    mbarrier.wait(p_empty, (j & 1) ^ 1)
    p_smem.store(p)
    factor_smem.store(rescale)
    fence_async_shared()
    mbarrier.arrive(p_full)


# fmt: off
@gluon.jit
def _first_half(
    output, partial, lse, q_smem, q_rope, latent, rope, p_smem, factor_smem, full, empty, p_full, p_empty, begin, end,
    tiles, first_row, slot_row, splits, head_tile, scale_log2, HEADS: gl.constexpr,
):
    # fmt: on
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    none = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    acc = gl.zeros([64, 256], gl.float32, O_LAYOUT)
    maximum = gl.full([64], -1.0e38, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    scores = warpgroup_mma_wait(0, deps=[_scores(q_smem, q_rope, latent, rope, full, 0, none)])
    for j in range(0, tiles - 1):
        p, maximum, total, rescale = _softmax(scores, maximum, total, begin + j * 64, end, scale_log2, S_LAYOUT)
        _publish(p, rescale, p_smem, factor_smem, p_full, p_empty, j)
        acc = acc * gl.convert_layout(rescale, O_ROWS)[:, None]
        acc_token = warpgroup_mma(gl.convert_layout(p, P_LAYOUT), latent.index((j % 2) * 2), acc, is_async=True)
        next_scores = _scores(q_smem, q_rope, latent, rope, full, j + 1, none)
        acc = warpgroup_mma_wait(3, deps=[acc_token])
        mbarrier.arrive(empty.index(j % 2))
        scores = warpgroup_mma_wait(0, deps=[next_scores])
    last = tiles - 1
    p, maximum, total, rescale = _softmax(scores, maximum, total, begin + last * 64, end, scale_log2, S_LAYOUT)
    _publish(p, rescale, p_smem, factor_smem, p_full, p_empty, last)
    acc = acc * gl.convert_layout(rescale, O_ROWS)[:, None]
    acc_token = warpgroup_mma(gl.convert_layout(p, P_LAYOUT), latent.index((last % 2) * 2), acc, is_async=True)
    inverse = gl.where(total > 0.0, 1.0 / total, 1.0)
    mbarrier.wait(p_empty, (tiles & 1) ^ 1)
    factor_smem.store(inverse)
    mbarrier.arrive(p_full)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    if splits > 1:
        head = head_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        gl.store(lse + slot_row + head, maximum + gl.log2(total), mask=head < HEADS)
    _store_columns(
        acc,
        gl.convert_layout(inverse, O_ROWS),
        output,
        partial,
        first_row,
        slot_row,
        splits,
        head_tile,
        0,
        HEADS,
        O_LAYOUT,
    )


# fmt: off
@gluon.jit
def _second_half(
    output, partial, latent, p_smem, factor_smem, full, empty, p_full, p_empty, tiles, first_row, slot_row, splits,
    head_tile, HEADS: gl.constexpr,
):
    # fmt: on
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    acc = gl.zeros([64, 256], gl.float32, O_LAYOUT)
    for j in range(0, tiles):
        mbarrier.wait(full.index(j % 2), (j // 2) & 1)
        mbarrier.wait(p_full, j & 1)
        fence_async_shared()
        acc = acc * factor_smem.load(O_ROWS)[:, None]
        acc_token = warpgroup_mma(p_smem, latent.index((j % 2) * 2 + 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(p_empty)
        mbarrier.arrive(empty.index(j % 2))
    mbarrier.wait(p_full, tiles & 1)
    _store_columns(
        acc, factor_smem.load(O_ROWS), output, partial, first_row, slot_row, splits, head_tile, 1, HEADS, O_LAYOUT
    )


@gluon.jit
def _rows(table, first, end, PAGE_SIZE: gl.constexpr, layout: gl.constexpr):
    token = first + gl.arange(0, 64, layout)
    page = gl.load(table + token // PAGE_SIZE, mask=token < end, other=0)
    return page


@gluon.jit
def _loader(ckv, kpe, table, latent, rope, full, empty, begin, end, tiles, PAGE_SIZE: gl.constexpr):
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])  # a warp: one token's 256 columns
    SMALL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a warp: four tokens' 64 columns
    W_ROWS: gl.constexpr = gl.SliceLayout(1, WIDE)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, SMALL)
    wide = gl.arange(0, 256, gl.SliceLayout(0, WIDE))
    small = gl.arange(0, 64, gl.SliceLayout(0, SMALL))
    w_page = _rows(table, begin, end, PAGE_SIZE, W_ROWS)
    s_page = _rows(table, begin, end, PAGE_SIZE, S_ROWS)
    for j in range(0, tiles):
        first = begin + j * 64
        w_token = first + gl.arange(0, 64, W_ROWS)
        s_token = first + gl.arange(0, 64, S_ROWS)
        w_row = w_page.to(gl.int64) * PAGE_SIZE + w_token % PAGE_SIZE
        s_row = s_page.to(gl.int64) * PAGE_SIZE + s_token % PAGE_SIZE
        w_mask = (w_token < end)[:, None] & (wide >= 0)[None, :]
        s_mask = (s_token < end)[:, None] & (small >= 0)[None, :]
        w_page = _rows(table, first + 64, end, PAGE_SIZE, W_ROWS)
        s_page = _rows(table, first + 64, end, PAGE_SIZE, S_ROWS)
        stage = j % 2
        mbarrier.wait(empty.index(stage), ((j // 2) & 1) ^ 1)
        # rows past the end are filled with zeros
        pointers = ckv + (w_row * 512)[:, None] + wide[None, :]
        async_copy.async_copy_global_to_shared(latent.index(stage * 2), pointers, mask=w_mask)
        async_copy.async_copy_global_to_shared(latent.index(stage * 2 + 1), pointers + 256, mask=w_mask)
        async_copy.async_copy_global_to_shared(
            rope.index(stage), kpe + (s_row * 64)[:, None] + small[None, :], mask=s_mask
        )
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


# fmt: off
@gluon.jit(do_not_specialize=["batch_size"], do_not_specialize_on_alignment=["kv_indptr", "kv_indices", "kv_lens"])
def mla_gluon_kernel(
    q_nope, q_pe, ckv, kpe, output, kv_indptr, kv_indices, kv_lens, partial, lse, plan, batch_size, scale_log2,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, MIN_CHUNK: gl.constexpr, BLOCK_B: gl.constexpr,
):
    # fmt: on
    HEAD_TILES: gl.constexpr = (HEADS + 63) // 64
    GRID: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    ENTRY: gl.constexpr = gl.SliceLayout(0, GRID)
    slot = gl.program_id(0) // HEAD_TILES
    slots = gl.num_programs(0) // HEAD_TILES
    head_tile = gl.program_id(0) % HEAD_TILES

    # ---- which sequence, which tokens: see run_kernel.py
    entry = gl.arange(0, BLOCK_B, ENTRY)
    lengths = gl.load(kv_lens + entry, mask=entry < batch_size, other=0)
    tiles_of = (lengths + 63) // 64  # (BLOCK_B,)
    total_tiles = gl.sum(tiles_of, axis=0)
    fewest = gl.maximum((total_tiles + slots - 1) // slots, MIN_CHUNK)
    spare = gl.maximum(slots - batch_size, 1)
    most = gl.maximum((total_tiles + spare - 1) // spare, MIN_CHUNK)
    candidate = fewest + gl.arange(0, 16, gl.SliceLayout(1, GRID)) * ((most - fewest + 14) // 15)
    chunks = gl.maximum((tiles_of[None, :] + candidate[:, None] - 1) // candidate[:, None], 1)  # (16, BLOCK_B)
    needed = gl.sum(gl.where((entry < batch_size)[None, :], chunks, gl.zeros_like(chunks)), axis=1)
    chunk = gl.min(gl.where(needed <= slots, candidate, gl.zeros_like(candidate) + most), axis=0)
    zero = gl.zeros_like(entry)
    num_splits = gl.where(entry < batch_size, gl.maximum((tiles_of + chunk - 1) // chunk, 1), zero)
    in_line = gl.convert_layout(num_splits, gl.BlockedLayout([1], [32], [4], [0]))
    sequence = gl.sum((gl.associative_scan(in_line, 0, _add) <= slot).to(gl.int32), axis=0)
    if sequence >= batch_size:
        return
    first_slot = gl.sum(gl.where(entry < sequence, num_splits, zero), axis=0)
    splits = gl.sum(gl.where(entry == sequence, num_splits, zero), axis=0)
    if (slot == first_slot) & (head_tile == 0):
        gl.store(plan + 2 * sequence, first_slot)
        gl.store(plan + 2 * sequence + 1, splits)
    kv_len = gl.load(kv_lens + sequence)
    begin = (slot - first_slot) * chunk * 64
    end = gl.minimum(begin + chunk * 64, kv_len)
    tiles = gl.maximum((end - begin + 63) // 64, 1)
    first_row = sequence.to(gl.int64) * HEADS
    slot_row = slot.to(gl.int64) * HEADS
    table = kv_indices + gl.load(kv_indptr + sequence)

    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    latent = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 256], TILE)  # (stage, half)
    rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    factor_smem = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(full.index(s), count=128)
        mbarrier.init(empty.index(s), count=2)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)

    # ---- queries
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    SMALL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = head_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    column = gl.arange(0, 256, gl.SliceLayout(0, WIDE))
    for half in gl.static_range(2):
        pointers = q_nope + first_row * 512 + (head[:, None] * 512 + half * 256 + column[None, :])
        q_smem.index(half).store(gl.load(pointers, mask=(head < HEADS)[:, None], other=0.0))
    head_r = head_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, SMALL))
    column_r = gl.arange(0, 64, gl.SliceLayout(0, SMALL))
    pointers_r = q_pe + first_row * 64 + (head_r[:, None] * 64 + column_r[None, :])
    q_rope.store(gl.load(pointers_r, mask=(head_r < HEADS)[:, None], other=0.0))
    fence_async_shared()
    THREAD_BARRIER()

    # fmt: off
    gl.warp_specialize(
        [
            (_first_half, (
                output, partial, lse, q_smem, q_rope, latent, rope, p_smem, factor_smem, full, empty, p_full, p_empty,
                begin, end, tiles, first_row, slot_row, splits, head_tile, scale_log2, HEADS)),
            (_second_half, (
                output, partial, latent, p_smem, factor_smem, full, empty, p_full, p_empty, tiles, first_row, slot_row,
                splits, head_tile, HEADS)),
            (_loader, (ckv, kpe, table, latent, rope, full, empty, begin, end, tiles, PAGE_SIZE)),
        ],
        [4, 4],
        [168, 104],
    )
    # fmt: on


class Plan:
    """One specialisation, kept: workspace, constants, and the two kernels once they are compiled.

    A launch through a compiled kernel costs the host less than half of one through the jitted function, which looks at
    all arguments to find that kernel again. For that the plan's key must hold all that a specialisation depends on.
    """

    def __init__(self, capacity, batch_size, num_heads, page_size, combine_width, min_chunk, device):
        self.partial = torch.empty((capacity, num_heads, 512), dtype=torch.float32, device=device)
        self.lse = torch.empty((capacity, num_heads), dtype=torch.float32, device=device)
        self.splits = torch.empty((batch_size, 2), dtype=torch.int32, device=device)
        self.constants = (num_heads, page_size, min_chunk, max(32, triton.next_power_of_2(batch_size)))
        # About 64 KiB of partial outputs to a program of the merge, read in tiles of 32 KiB: see run_kernel.py.
        block_d = min(combine_width, 512)
        block_h = combine_width // block_d
        self.combine_programs = batch_size * triton.cdiv(num_heads, block_h) * (512 // block_d)
        self.combine_constants = (num_heads, 512, 8192 // combine_width, block_h, block_d)
        self.kernel = self.combine = None


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


def _launch(jitted, compiled, programs, args, **options):
    """Launch, through the compiled kernel where there is one; the compiled kernel for the next time.

    Without a GPU nothing is compiled, and it stays None.
    """
    if compiled is None:
        return jitted[(programs,)](*args, **options)
    compiled[(programs, 1, 1)](*args)
    return compiled


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
    addresses = q_nope.data_ptr() | q_pe.data_ptr() | ckv.data_ptr() | kpe.data_ptr() | output.data_ptr()
    if head_dim_ckv != 512 or head_dim_kpe != 64 or batch_size > 1024 or addresses % 16 != 0:
        _portable().run_kernel(
            *(q_nope, q_pe, ckv, kpe, output, q_indptr, kv_indptr, kv_indices, kv_lens, batch_size, seq_len),
            *(num_heads, head_dim_ckv, head_dim_kpe, page_size, causal),
        )
        return
    min_chunk = TUNING[DEVICE]
    head_tiles = (num_heads + 63) // 64
    # Enough slots to fill the chip, two per sequence at least; no more programs than chunks there can be.
    capacity = max(PROGRAMS // head_tiles, 2 * batch_size)
    slots = min(kv_indices.shape[0] * page_size // (min_chunk * 64) + batch_size, capacity)
    width = min(max(1 << ((16384 * batch_size - 1) // slots).bit_length(), 128), 2048)
    key = (capacity, batch_size, num_heads, page_size, width, min_chunk, q_nope.get_device())
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS[key] = Plan(*key[:-1], q_nope.device)
    plan.kernel = _launch(
        mla_gluon_kernel,
        plan.kernel,
        slots * head_tiles,
        (
            *(q_nope, q_pe, ckv, kpe, output, kv_indptr, kv_indices, kv_lens, plan.partial, plan.lse, plan.splits),
            *(batch_size, SCALE_LOG2, *plan.constants),
        ),
        num_warps=4,
    )
    if slots > batch_size:  # else a slot per sequence: nothing was split
        args = (plan.partial, plan.lse, plan.splits, output, *plan.combine_constants)
        options = {"num_warps": 4, "num_stages": 1}
        plan.combine = _launch(_portable().combine_kernel, plan.combine, plan.combine_programs, args, **options)
