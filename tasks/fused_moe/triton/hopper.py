"""The MoE's grouped int8 product in Gluon, for NVIDIA Hopper alone: run_kernel.py beside this file is the one to paste.

Contract: that of run_kernel.py. Needs Triton 3.6 with Gluon and compute capability 9.x.

Taken here: N a multiple of 256, fewer than 2^31 rows of weights, a, b and out aligned to 16 bytes. All else goes to
run_kernel.py.

Algorithm: programs stay. Each takes tiles of 128 x 256 of the output, as many apart as there are programs: panels of
GROUP_M row tiles by all columns, row tiles in the order of their experts, so that the programs that run at one time
share weights and rows in the L2 cache. Where expert_ids are not sorted, every program finds that order for itself
before anything else: one more launch would cost more. Two warpgroups of 64 rows each multiply (partitions 0 and 1), one
warp loads by TMA (partition 2), STAGES tiles of K ahead and across the tiles' borders, so that neither a tile's first
loads nor its epilogue leave the memory idle. A warpgroup has its sums in two halves of 128 columns, the widest int8
product that Triton knows; each half leaves through 16 KiB of shared memory, by TMA while the next half is scaled.

Barriers, all phases start at 0; f counts tiles of K over the life of a program:
  full[f % STAGES]   one arrival (the loader's expect) and the bytes. Waited for with parity f // STAGES.
  empty[f % STAGES]  two arrivals, one per warpgroup, after its product with tile f has been waited for. The loader
                     waits with parity f // STAGES + 1: at once for the first STAGES.
  ahead              one arrival, by warpgroup 0 after its first step; warpgroup 1 does not begin before. Half a step
                     behind for good, it multiplies while the other is in its epilogue.
"""

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

# (GROUP_M, GROUP_M from 128 row tiles on, STAGES, REGISTERS of a multiplying thread). The 132 programs of a wave take
# GROUP_M row tiles by 132 / GROUP_M column tiles: where many row tiles share an expert, nearly square is least to load;
# where each has its own, weights are read once whatever the panel. Four stages of 16 + 32 KiB are 192 KiB and the
# outputs' halves 32: one program per multiprocessor. 240 registers are the most that two warpgroups can have beside a
# warp with 24; sums take 128 of them.
TUNING = {"sm90": (8, 16, 4, 240)}
DEVICE = "sm90"
PROGRAMS = 132  # one per multiprocessor of an H100 or H200
PLANS = {}
THREAD_BARRIER = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed by Triton 3.7


@gluon.jit
def _is_sorted(expert_ids, row_tiles):
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    descents = gl.zeros([256], gl.int32, LINE)
    for first in range(0, row_tiles, 256):
        tile = first + gl.arange(0, 256, LINE)
        last = row_tiles - 1
        mine = gl.load(expert_ids + gl.minimum(tile, last))
        descents += (mine > gl.load(expert_ids + gl.minimum(tile + 1, last))).to(gl.int32)
    return gl.sum(descents, axis=0) == 0


@gluon.jit
def _sort(expert_ids, order, row_tiles):
    # order[i] = row tile at place i in the order of the experts, tiles of one expert as they are. A thread counts the
    # tiles before its own.
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    for first in range(0, row_tiles, 128):
        mine = first + gl.arange(0, 128, gl.SliceLayout(1, PAIRS))
        expert = gl.load(expert_ids + mine, mask=mine < row_tiles, other=0)
        place = gl.zeros([128], gl.int32, gl.SliceLayout(1, PAIRS))
        for begin in range(0, row_tiles, 16):
            other = begin + gl.arange(0, 16, gl.SliceLayout(0, PAIRS))
            its = gl.load(expert_ids + other, mask=other < row_tiles, other=2147483647)[None, :]
            tie = (its == expert[:, None]) & (other[None, :] < mine[:, None])
            before = ((its < expert[:, None]) | tie) & (other < row_tiles)[None, :]
            place += gl.sum(before.to(gl.int32), axis=1)
        gl.store(order + place, mine, mask=mine < row_tiles)


@gluon.jit
def _work(item, tiles, column_tiles, GROUP_M: gl.constexpr):
    # Row tile, column tile and expert of an item.
    expert_ids, order, ordered, row_tiles = tiles
    panel = item // (GROUP_M * column_tiles)
    first = panel * GROUP_M
    height = gl.minimum(row_tiles - first, GROUP_M)
    within = item - first * column_tiles
    row_tile = first + within % height
    if not ordered:
        row_tile = gl.load(order + row_tile)
    return row_tile, within // height, gl.load(expert_ids + row_tile)


@gluon.jit
def _loader(a_desc, b_desc, tiles, memory, barriers, N, k_tiles, GROUP_M: gl.constexpr, STAGES: gl.constexpr):
    a_smem, b_smem, _, _ = memory
    full, empty, _ = barriers
    column_tiles = N // 256
    items = tiles[3] * column_tiles
    fill = 0
    row_tile, column_tile, expert = _work(gl.program_id(0), tiles, column_tiles, GROUP_M)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        a_row = row_tile * 128
        b_row = expert * N + column_tile * 256
        # The next item, now: between two items its loads would hold up those of the tiles.
        row_tile, column_tile, expert = _work(
            gl.minimum(item + gl.num_programs(0), items - 1), tiles, column_tiles, GROUP_M
        )
        for k in range(0, k_tiles):
            stage = fill % STAGES
            mbarrier.wait(empty.index(stage), ((fill // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (128 + 256) * 128)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    a_desc, [a_row + half * 64, k * 128], bar, a_smem.index(stage * 2 + half)
                )
                tma.async_copy_global_to_shared(
                    b_desc, [b_row + half * 128, k * 128], bar, b_smem.index(stage * 2 + half)
                )
            fill += 1


@gluon.jit
def _consumer(
    out_desc, factors, tiles, memory, barriers, N, k_tiles, SIDE: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    scale_a, scale_b, moe_weights = factors
    a_smem, b_smem, out_smem, factor_smem = memory
    full, empty, ahead = barriers
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column_tiles = N // 256
    fill = 0
    for item in range(gl.program_id(0), tiles[3] * column_tiles, gl.num_programs(0)):
        row_tile, column_tile, expert = _work(item, tiles, column_tiles, GROUP_M)
        # ---- factors, before the products: 2 rows and 2 columns per thread
        first_row = row_tile * 128 + SIDE * 64
        row = first_row + gl.arange(0, 64, gl.SliceLayout(1, ACC))
        by_row = gl.load(scale_a + row)
        weight = gl.load(moe_weights + row)
        columns = scale_b + expert.to(gl.int64) * N + column_tile * 256
        left_factor = gl.load(columns + gl.arange(0, 128, LINE))
        right_factor = gl.load(columns + 128 + gl.arange(0, 128, LINE))

        left = gl.zeros([64, 128], gl.int32, ACC)
        right = gl.zeros([64, 128], gl.int32, ACC)
        for k in range(0, k_tiles):
            stage = fill % STAGES
            if SIDE == 1:  # noqa: SIM102 (decided when compiling)
                if fill == 0:
                    mbarrier.wait(ahead, 0)
            mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
            a_tile = a_smem.index(stage * 2 + SIDE)
            left_b = b_smem.index(stage * 2).permute([1, 0])
            right_b = b_smem.index(stage * 2 + 1).permute([1, 0])
            left = warpgroup_mma(a_tile, left_b, left, use_acc=k > 0, is_async=True)
            right = warpgroup_mma(a_tile, right_b, right, use_acc=k > 0, is_async=True)
            left, right = warpgroup_mma_wait(2, deps=[left, right])
            mbarrier.arrive(empty.index((fill + STAGES - 1) % STAGES), pred=k > 0)
            if SIDE == 0:
                mbarrier.arrive(ahead, pred=fill == 0)
            fill += 1
        left, right = warpgroup_mma_wait(0, deps=[left, right])
        mbarrier.arrive(empty.index((fill + STAGES - 1) % STAGES))

        # ---- epilogue, multiplied in the contract's order
        factor_smem.index(SIDE * 2).store(left_factor)
        factor_smem.index(SIDE * 2 + 1).store(right_factor)
        for half in gl.static_range(2):
            sums = left if half == 0 else right
            by_column = factor_smem.index(SIDE * 2 + half).load(gl.SliceLayout(0, ACC))
            result = sums.to(gl.float32) * by_row[:, None] * by_column[None, :] * weight[:, None]
            tma.store_wait(0)
            out_smem.index(SIDE).store(result.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [first_row, column_tile * 256 + half * 128], out_smem.index(SIDE))
    tma.store_wait(0)


@gluon.jit
def moe_kernel(
    a_desc, b_desc, out_desc, scale_a, scale_b, moe_weights, expert_ids, orders, row_tiles, N, k_tiles,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    HALF: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FACTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    a_smem = gl.allocate_shared_memory(gl.int8, [2 * STAGES, 64, 128], BYTES)
    b_smem = gl.allocate_shared_memory(gl.int8, [2 * STAGES, 128, 128], BYTES)
    out_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], HALF)
    factor_smem = gl.allocate_shared_memory(gl.float32, [4, 128], FACTORS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ahead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ahead, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    order = orders + gl.program_id(0) * row_tiles
    ordered = _is_sorted(expert_ids, row_tiles)
    if not ordered:
        _sort(expert_ids, order, row_tiles)
        THREAD_BARRIER()
    tiles = (expert_ids, order, ordered, row_tiles)
    factors = (scale_a, scale_b, moe_weights)
    memory = (a_smem, b_smem, out_smem, factor_smem)
    barriers = (full, empty, ahead)
    # fmt: off
    gl.warp_specialize(
        [
            (_consumer, (out_desc, factors, tiles, memory, barriers, N, k_tiles, 0, GROUP_M, STAGES)),
            (_consumer, (out_desc, factors, tiles, memory, barriers, N, k_tiles, 1, GROUP_M, STAGES)),
            (_loader, (a_desc, b_desc, tiles, memory, barriers, N, k_tiles, GROUP_M, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on


class Plan:
    """One specialisation of the kernel, kept: descriptors (their base and length change), constants, compiled kernel.

    A launch through a compiled kernel costs the host half of one through the function, which looks at every argument to
    find that kernel again. For that the plan's key must hold all that a specialisation depends on.
    """

    def __init__(self, a, b, out):
        rows, K = a.shape
        experts, N, _ = b.shape
        int8 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        bf16 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        self.a = TensorDescriptor(a, [rows, K], [K, 1], [64, 128], int8)
        self.b = TensorDescriptor(b, [experts * N, K], [K, 1], [128, 128], int8)
        self.out = TensorDescriptor(out, [rows, N], [N, 1], [64, 128], bf16)
        self.programs = min(PROGRAMS, rows // 128 * (N // 256))
        self.orders = torch.empty(self.programs * (rows // 128), dtype=torch.int32, device=a.device)
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


def _taken(N, weight_rows, addresses):
    """Whether the fast path can take a call."""
    return N % 256 == 0 and weight_rows < 2**31 and addresses % 16 == 0


def run_kernel(a, b_col_major, scale_a, scale_b, moe_weights, token_ids, expert_ids, topk, out):
    rows, K = a.shape
    experts, N, _ = b_col_major.shape
    if rows == 0:
        return
    addresses = a.data_ptr() | b_col_major.data_ptr() | scale_a.data_ptr() | scale_b.data_ptr()
    addresses |= moe_weights.data_ptr() | expert_ids.data_ptr() | out.data_ptr()
    if not _taken(N, experts * N, addresses):
        _portable().run_kernel(a, b_col_major, scale_a, scale_b, moe_weights, token_ids, expert_ids, topk, out)
        return
    key = (rows, experts, N, K, a.get_device())
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS[key] = Plan(a, b_col_major, out)
    plan.a.base, plan.b.base, plan.out.base = a, b_col_major, out
    group_m, group_m_of_many, stages, registers = TUNING[DEVICE]
    row_tiles = rows // 128
    args = (
        *(plan.a, plan.b, plan.out, scale_a, scale_b, moe_weights, expert_ids, plan.orders, row_tiles, N, K // 128),
        *(group_m if row_tiles < 128 else group_m_of_many, stages, registers),
    )
    if plan.kernel is None:
        plan.kernel = moe_kernel[(plan.programs,)](*args, num_warps=4)
    else:
        plan.kernel[(plan.programs, 1, 1)](*args)
    plan.a.base = plan.b.base = plan.out.base = None  # keeps no tensor of the caller's alive
