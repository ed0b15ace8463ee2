"""Ragged prefill attention in Gluon, for NVIDIA Hopper alone: run_kernel.py beside this file is the one to paste.

Contract: that of run_kernel.py. Needs Triton 3.6 or 3.7 with Gluon and compute capability 9.x.

Taken here: head_dim_qk = head_dim_vo = 64 or 128, a power of two of at most 64 query heads per KV head, at most 256
sequences, q, k, v and output aligned to 16 bytes. All else goes to run_kernel.py.

Algorithm: programs stay. Each draws tiles of 128 packed rows (token * group + head in group) of one sequence and one KV
head from a counter until none are left, longest first. Two warpgroups of 64 rows each multiply (partitions 0 and 1),
one warp draws the work and loads by TMA (partition 2), ahead of them and across the tiles' borders. Keys run from the
last tile to the first, so that the masked tiles come first and the long loop has no mask. A warpgroup issues the scores
of key tile i and right behind them the product P V of tile i - 1; while the latter runs it does the softmax of tile i.

Barriers. f counts key tiles over the whole life of a program, t its tiles of rows; both start at 0, as do all phases.
  k_full, v_full[f % STAGES]   one arrival (the producer's expect) and the bytes. Waited for with parity f // STAGES.
  k_empty, v_empty[f % STAGES] two arrivals, one per warpgroup, after the wgmma that read the stage has been waited for.
                               The producer waits with parity f // STAGES + 1: at once for the first STAGES tiles.
  q_full, q_empty              the same with one stage and t; q_empty after the last scores of a tile of rows.
  work_full, work_empty[t % 2] the same with two stages and t, by ordinary arrivals.
Everybody counts every f and t exactly once, and a stage is filled again only after both warpgroups have released it, so
that nobody is ever more than one phase away from a barrier it waits for. The last entry of the work ring (tile_row -1)
is read but not released; nobody waits for it.

Counters: a launch uses one of RING pairs, (tiles drawn, programs done), and its last program sets the pair back to 0.
So up to RING launches may be under way at once, on whatever streams. A kernel that is killed leaves its pair wrong, but
CUDA lets no process go on after that. Calls must come from one host thread at a time.
"""

import itertools
import math
import pathlib
import sys
import types

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# (BLOCK_N, STAGES, REGISTERS of a multiplying thread). Shared memory at head dimension 128: Q 32 KiB, the output's tile
# 32, K and V 2 * 64: 192 KiB, one program per multiprocessor. 240 registers are the most that two warpgroups can have
# beside a warp with 24, and the loop needs them: 64 for scores, 64 for P, 64 for the accumulator.
TUNING = {"sm90": (128, 2, 240)}
DEVICE = "sm90"
PROGRAMS = 132  # one per multiprocessor of an H100 or H200; where there are fewer, the last ones find nothing to do
RING = 64
TURNS = itertools.count()
PLANS = {}
THREAD_BARRIER = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed by Triton 3.7


@gluon.jit
def _pin(total):
    # ptxas moves a wait for wgmma up to the products, and the softmax would then run after them instead of beside. It
    # does not move it across another barrier, and this one, which is never met (sums are not negative), needs the sums.
    return gl.inline_asm_elementwise(
        "{ .reg .pred negative; .reg .f32 least; min.f32 least, $2, $3; setp.lt.f32 negative, least, 0f00000000;"
        " @negative bar.arrive 15, 128; mov.f32 $0, $2; mov.f32 $1, $3; }",
        "=f,=f,f,f",
        [total],
        gl.float32,
        False,
        2,
    )


@gluon.jit
def _softmax(scores, maximum, total, scale_log2):
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=1) * scale_log2)
    rescale = gl.exp2(maximum - new_maximum)
    p = gl.exp2(scores * scale_log2 - new_maximum[:, None])
    total = total * rescale + gl.sum(p, axis=1)
    return p, new_maximum, total, rescale


@gluon.jit
def _clear_tail(v_smem, stage, valid, DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    # Rows of a V tile from `valid` on are no keys of this sequence and may hold anything: 0 * NaN would be NaN. Each
    # computing warpgroup writes the same zeros for itself; live rows get back what they hold.
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    CHUNKS: gl.constexpr = BLOCK_N // 8  # of 8 rows by 64 columns: one swizzle pattern, 1024 bytes
    chunks = v_smem._reinterpret(gl.bfloat16, [STAGES * (DIM // 64) * CHUNKS, 8, 64], TILE)
    row = gl.arange(0, 8, gl.SliceLayout(1, BLOCKED))
    for chunk in range(valid // 8, CHUNKS):
        for part in gl.static_range(DIM // 64):
            piece = chunks.index((stage * (DIM // 64) + part) * CHUNKS + chunk)
            values = piece.load(BLOCKED)
            piece.store(gl.where((chunk * 8 + row < valid)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    THREAD_BARRIER()


@gluon.jit
def _field(work, place):
    value = work.index(place).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.max(value, axis=0)


# fmt: off
@gluon.jit
def _consumer(
    output, o_smem, memory, barriers, scale_log2, SIDE: gl.constexpr, HEADS_QO: gl.constexpr, HEADS_KV: gl.constexpr,
    DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    # fmt: on
    # One warpgroup: rows 64 * SIDE .. 64 * SIDE + 63 of every tile of rows.
    GROUP: gl.constexpr = HEADS_QO // HEADS_KV
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    MINE: gl.constexpr = SIDE * 64
    q_smem, k_smem, v_smem, work = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = barriers
    q_tile = q_smem.index(SIDE)._reinterpret(gl.bfloat16, [64, DIM], TILE)
    o_tile = o_smem.index(SIDE)
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    none = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)

    count = 0  # tiles of rows done
    base = 0  # tiles of keys done
    mbarrier.wait(work_full.index(0), 0)
    tile_row = _field(work, 0)
    while tile_row >= 0:
        place = (count % 2) * 8
        q_start = _field(work, place + 1)
        q_len = _field(work, place + 2)
        kv_len = _field(work, place + 3)
        kv_head = _field(work, place + 4)
        num_tiles = _field(work, place + 5)
        mbarrier.arrive(work_empty.index(count % 2))

        # ---- keys 0 .. visible - 1 of a row; tiles below `unmasked` are seen by all rows of this warpgroup
        s_row = tile_row + MINE + gl.arange(0, 64, S_ROWS)
        visible = gl.full([64], kv_len, gl.int32, S_ROWS)
        unmasked = kv_len // BLOCK_N
        if CAUSAL:
            visible = gl.minimum(visible, kv_len - q_len + s_row // GROUP + 1)
            first = kv_len - q_len + (tile_row + MINE) // GROUP + 1
            unmasked = gl.minimum(unmasked, gl.maximum(0, first) // BLOCK_N)
        masked = gl.minimum(num_tiles, gl.maximum(num_tiles - unmasked, 1))  # tiles i < masked: the first one always

        # ---- scores (64, BLOCK_N) and softmax of the last keys. The maximum starts finite: a row that has seen no key
        # yet then has exp2(-inf - maximum) = 0, never NaN.
        maximum = gl.full([64], -1.0e38, gl.float32, S_ROWS)
        total = gl.zeros([64], gl.float32, S_ROWS)
        acc = gl.zeros([64, DIM], gl.float32, O_LAYOUT)
        mbarrier.wait(q_full, count & 1)
        mbarrier.wait(k_full.index(base % STAGES), (base // STAGES) & 1)
        k_tile = k_smem.index(base % STAGES).permute([1, 0])
        scores = warpgroup_mma(q_tile, k_tile, none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(base % STAGES))
        n = (num_tiles - 1) * BLOCK_N
        scores = gl.where(key[None, :] < (visible - n)[:, None], scores, float("-inf"))
        p, maximum, total, rescale = _softmax(scores, maximum, total, scale_log2)
        if kv_len - n < BLOCK_N:
            mbarrier.wait(v_full.index(base % STAGES), (base // STAGES) & 1)
            _clear_tail(v_smem, base % STAGES, gl.maximum(kv_len - n, 0), DIM, BLOCK_N, STAGES)

        # ---- scores of tile i beside P V of tile i - 1
        for with_mask in gl.static_range(1, -1, -1):
            if with_mask:
                begin = 1
                end = masked
            else:
                begin = masked
                end = num_tiles
            for i in range(begin, end):
                fill = base + i
                stage = fill % STAGES
                mbarrier.wait(k_full.index(stage), (fill // STAGES) & 1)
                k_tile = k_smem.index(stage).permute([1, 0])
                scores = warpgroup_mma(q_tile, k_tile, none, use_acc=False, is_async=True)
                before = (fill - 1) % STAGES
                # P came over the loop as float32: as bf16 it would be packed and unpacked once more
                p_operand = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
                mbarrier.wait(v_full.index(before), ((fill - 1) // STAGES) & 1)
                acc_token = warpgroup_mma(p_operand, v_smem.index(before), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(k_empty.index(stage))
                if with_mask:
                    n = (num_tiles - 1 - i) * BLOCK_N
                    scores = gl.where(key[None, :] < (visible - n)[:, None], scores, float("-inf"))
                p, maximum, total, rescale = _softmax(scores, maximum, total, scale_log2)
                acc, p, total = warpgroup_mma_wait(0, deps=[acc_token, p, _pin(total)])
                mbarrier.arrive(v_empty.index(before))
                acc = acc * gl.convert_layout(rescale, O_ROWS)[:, None]

        # ---- P V of the first keys
        mbarrier.arrive(q_empty)
        base += num_tiles
        last = (base - 1) % STAGES
        p_operand = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
        mbarrier.wait(v_full.index(last), ((base - 1) // STAGES) & 1)
        acc_token = warpgroup_mma(p_operand, v_smem.index(last), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(v_empty.index(last))

        # ---- epilogue; a row without any key has total 0 and acc 0
        total = gl.where(total > 0.0, 1.0 / total, 1.0)
        acc = acc * gl.convert_layout(total, O_ROWS)[:, None]
        o_tile.store(acc.to(gl.bfloat16))  # (64, DIM), so that a warp stores whole rows
        row = tile_row + MINE + gl.arange(0, 64, gl.SliceLayout(1, BLOCKED))
        token = row // GROUP
        row_head = (token - tile_row // GROUP) * HEADS_QO + (row - token * GROUP)
        dim = gl.arange(0, DIM, gl.SliceLayout(0, BLOCKED))
        first_head = (q_start + tile_row // GROUP).to(gl.int64) * HEADS_QO + kv_head * GROUP
        out_pointer = output + first_head * DIM + (row_head[:, None] * DIM + dim[None, :])
        gl.store(out_pointer, o_tile.load(BLOCKED), mask=(row < q_len * GROUP)[:, None])

        count += 1
        mbarrier.wait(work_full.index(count % 2), (count // 2) & 1)
        tile_row = _field(work, (count % 2) * 8)


@gluon.jit
def _announce(work, work_full, work_empty, count, tile_row, q_start, q_len, kv_len, kv_head, num_tiles):
    # What the computing warpgroups have to know of a tile of rows; tile_row -1: there is no more.
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(work_empty.index(count % 2), ((count // 2) & 1) ^ 1)
    place = (count % 2) * 8
    work.index(place).store(gl.full([1], tile_row, gl.int32, LINE))
    work.index(place + 1).store(gl.full([1], q_start, gl.int32, LINE))
    work.index(place + 2).store(gl.full([1], q_len, gl.int32, LINE))
    work.index(place + 3).store(gl.full([1], kv_len, gl.int32, LINE))
    work.index(place + 4).store(gl.full([1], kv_head, gl.int32, LINE))
    work.index(place + 5).store(gl.full([1], num_tiles, gl.int32, LINE))
    mbarrier.arrive(work_full.index(count % 2))


@gluon.jit
def _load_tile(desc, row, column, smem, full, empty, f, BYTES: gl.constexpr, STAGES: gl.constexpr):
    # Key tile f of this program's life: BLOCK_N rows of K or V by one box; rows past the tensor's end become 0.
    stage = f % STAGES
    mbarrier.wait(empty.index(stage), ((f // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    tma.async_copy_global_to_shared(desc, [row, column], full.index(stage), smem.index(stage))


# fmt: off
@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, qo_indptr, kv_indptr, counter, memory, barriers, batch_size, num_items,
    HEADS_QO: gl.constexpr, HEADS_KV: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_B: gl.constexpr, STAGES: gl.constexpr,
):
    # fmt: on
    GROUP: gl.constexpr = HEADS_QO // HEADS_KV
    BYTES: gl.constexpr = BLOCK_N * DIM * 2
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    q_smem, k_smem, v_smem, work = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = barriers
    later = gl.arange(0, BLOCK_B, LINE) + 1  # every sequence but the first
    first_row = gl.load(qo_indptr + later, mask=later < batch_size, other=0) * GROUP
    first_slot = gl.where(later < batch_size, first_row // 128 + later, 2147483647)
    count = 0
    base = 0
    item = gl.atomic_add(counter, 1, sem="relaxed")
    following = item
    while item < num_items:
        # ---- slots as in run_kernel.py: sequence b owns those from qo_indptr[b] * GROUP // 128 + b on
        kv_head = item % HEADS_KV
        slot = num_items // HEADS_KV - 1 - item // HEADS_KV
        sequence = gl.sum((first_slot <= slot).to(gl.int32), axis=0)
        q_start = gl.load(qo_indptr + sequence)
        q_len = gl.load(qo_indptr + sequence + 1) - q_start
        kv_start = gl.load(kv_indptr + sequence)
        kv_len = gl.load(kv_indptr + sequence + 1) - kv_start
        tile_row = (slot - q_start * GROUP // 128 - sequence) * 128
        if (tile_row >= 0) & (tile_row < q_len * GROUP):
            kv_end = kv_len
            if CAUSAL:
                last_token = (gl.minimum(tile_row + 128, q_len * GROUP) - 1) // GROUP
                kv_end = gl.minimum(kv_len, gl.maximum(0, kv_len - q_len + last_token + 1))
            num_tiles = gl.maximum(gl.cdiv(kv_end, BLOCK_N), 1)
            _announce(work, work_full, work_empty, count, tile_row, q_start, q_len, kv_len, kv_head, num_tiles)
            mbarrier.wait(q_empty, (count & 1) ^ 1)
            mbarrier.expect(q_full, 128 * DIM * 2)
            for side in gl.static_range(2):
                q_token = q_start + (tile_row + side * 64) // GROUP
                tma.async_copy_global_to_shared(q_desc, [q_token, kv_head * GROUP, 0], q_full, q_smem.index(side))
            # ---- K of tile i goes out before V of tile i - 1: the order in which they are read
            last_row = kv_start + (num_tiles - 1) * BLOCK_N
            column = kv_head * DIM
            for i in range(0, num_tiles + 1):
                if i < num_tiles:
                    row = last_row - i * BLOCK_N
                    _load_tile(k_desc, row, column, k_smem, k_full, k_empty, base + i, BYTES, STAGES)
                    if i == num_tiles - 1:  # late enough to be fair, early enough to be here in time
                        following = gl.atomic_add(counter, 1, sem="relaxed")
                if i > 0:
                    row = last_row - (i - 1) * BLOCK_N
                    _load_tile(v_desc, row, column, v_smem, v_full, v_empty, base + i - 1, BYTES, STAGES)
            base += num_tiles
            count += 1
        else:
            following = gl.atomic_add(counter, 1, sem="relaxed")
        item = following
    _announce(work, work_full, work_empty, count, -1, 0, 0, 0, 0, 0)
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(place), count=ARRIVALS)
    return barriers


# fmt: off
@gluon.jit(
    do_not_specialize=["turn", "batch_size", "num_items"], do_not_specialize_on_alignment=["qo_indptr", "kv_indptr"]
)
def prefill_kernel(
    q_desc, k_desc, v_desc, output, qo_indptr, kv_indptr, counters, turn, batch_size, num_items, scale_log2,
    HEADS_QO: gl.constexpr, HEADS_KV: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_B: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):
    # fmt: on
    GROUP: gl.constexpr = HEADS_QO // HEADS_KV
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BOX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64 // GROUP, GROUP, DIM], BOX)
    o_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], TILE)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, DIM], TILE)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, DIM], TILE)
    work = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    q_full = _barriers(1, 1).index(0)
    q_empty = _barriers(1, 2).index(0)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, 2)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, 2)
    work_full = _barriers(2, 1)
    work_empty = _barriers(2, 2)
    fence_async_shared()
    memory = (q_smem, k_smem, v_smem, work)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty)
    # fmt: off
    gl.warp_specialize(
        [
            (_consumer, (
                output, o_smem, memory, barriers, scale_log2, 0, HEADS_QO, HEADS_KV, DIM, CAUSAL, BLOCK_N, STAGES)),
            (_consumer, (
                output, o_smem, memory, barriers, scale_log2, 1, HEADS_QO, HEADS_KV, DIM, CAUSAL, BLOCK_N, STAGES)),
            (_producer, (
                q_desc, k_desc, v_desc, qo_indptr, kv_indptr, counters + 2 * turn, memory, barriers, batch_size,
                num_items, HEADS_QO, HEADS_KV, DIM, CAUSAL, BLOCK_N, BLOCK_B, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on


class Plan:
    """One specialisation of the kernel, kept: descriptors (their base and length change), constants, compiled kernel.

    A launch through a compiled kernel costs the host less than half of one through the jitted function, which looks at
    all arguments to find that kernel again. For that the plan's key must hold all that a specialisation depends on.
    """

    def __init__(self, q, k, v, num_qo_heads, num_kv_heads, dim, causal, block_b):
        block_n, stages, registers = TUNING[DEVICE]
        group = num_qo_heads // num_kv_heads
        tile = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        box = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
        q_strides = [num_qo_heads * dim, dim, 1]
        self.q = TensorDescriptor(q, list(q.shape), q_strides, [64 // group, group, dim], box)
        row = num_kv_heads * dim
        self.k = TensorDescriptor(k, [k.shape[0], row], [row, 1], [block_n, dim], tile)
        self.v = TensorDescriptor(v, [v.shape[0], row], [row, 1], [block_n, dim], tile)
        self.counters = torch.zeros(2 * RING, dtype=torch.int32, device=q.device)
        self.scale_log2 = 1.4426950408889634 / math.sqrt(dim)  # log2(e): exp(x) = exp2(x log2(e))
        self.constants = (num_qo_heads, num_kv_heads, dim, causal, block_n, block_b, stages, registers)
        self.kernel = None


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


def _taken(batch_size, keys, group, dim_qk, dim_vo, addresses):
    """Whether the fast path can take a call."""
    able = dim_qk == dim_vo and dim_qk in (64, 128) and group in (1, 2, 4, 8, 16, 32, 64)
    return able and addresses % 16 == 0 and keys > 0 and batch_size <= 256


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
    total_q, total_kv = q.shape[0], k.shape[0]
    if total_q == 0:
        return
    group = num_qo_heads // num_kv_heads
    num_items = (total_q * group // 128 + batch_size) * num_kv_heads
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | output.data_ptr()
    if not _taken(batch_size, total_kv, group, head_dim_qk, head_dim_vo, addresses):
        _portable().run_kernel(
            *(q, k, v, output, qo_indptr, kv_indptr, batch_size, seq_len, num_qo_heads, num_kv_heads),
            *(head_dim_qk, head_dim_vo, causal),
        )
        return
    block_b = 32 if batch_size <= 32 else 256
    key = (num_qo_heads, num_kv_heads, head_dim_qk, causal, block_b, q.get_device())
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS[key] = Plan(q, k, v, *key[:-1])
    plan.q.base, plan.k.base, plan.v.base = q, k, v
    plan.q.shape[0], plan.k.shape[0], plan.v.shape[0] = total_q, total_kv, total_kv
    args = (
        *(plan.q, plan.k, plan.v, output, qo_indptr, kv_indptr, plan.counters, next(TURNS) % RING),
        *(batch_size, num_items, plan.scale_log2, *plan.constants),
    )
    programs = min(PROGRAMS, num_items)
    if plan.kernel is None:
        plan.kernel = prefill_kernel[(programs,)](*args, num_warps=4)
    else:
        plan.kernel[(programs, 1, 1)](*args)
    plan.q.base = plan.k.base = plan.v.base = None  # keeps no tensor of the caller's alive
