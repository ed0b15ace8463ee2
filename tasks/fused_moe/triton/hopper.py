"""The MoE's grouped int8 product in Gluon, for NVIDIA Hopper alone: run_kernel.py beside this file is the one to paste.

Contract: that of run_kernel.py. Needs Triton 3.6 with Gluon and compute capability 9.x.

Taken here: N a multiple of 256, fewer than 2^31 rows of weights, a and b aligned to 16 bytes. All else goes to
run_kernel.py.

Algorithm: programs stay. Each takes tiles of 128 x 256 of the output, as many apart as there are programs: panels of
GROUP_M row tiles by all columns, row tiles in the order of their experts (a small launch before finds it), so that the
programs that run at one time share weights and rows in the L2 cache. Two warpgroups of 64 rows each multiply
(partitions 0 and 1), one warp loads by TMA (partition 2), STAGES tiles of K ahead and across the tiles' borders, so
that neither a tile's first loads nor its epilogue leave the memory idle.

Barriers, all phases start at 0; f counts tiles of K over the life of a program:
  full[f % STAGES]   one arrival (the loader's expect) and the bytes. Waited for with parity f // STAGES.
  empty[f % STAGES]  two arrivals, one per warpgroup, after its product with tile f has been waited for. The loader
                     waits with parity f // STAGES + 1: at once for the first STAGES.
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

# (GROUP_M, STAGES, REGISTERS of a multiplying thread). Four stages of 16 + 32 KiB are 192 KiB, one program per
# multiprocessor. 240 registers are the most that two warpgroups can have beside a warp with 24; sums take 128 of them.
TUNING = {"sm90": (16, 4, 240)}
DEVICE = "sm90"
PROGRAMS = 132  # one per multiprocessor of an H100 or H200
PLANS = {}


@gluon.jit
def order_kernel(expert_ids, order, row_tiles, BLOCK: gl.constexpr):
    # One program per row tile: its place in the order of the experts, tiles of one expert as they are.
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mine = gl.program_id(0)
    expert = gl.load(expert_ids + mine)
    place = mine * 0
    for first in range(0, row_tiles, BLOCK):
        tile = first + gl.arange(0, BLOCK, LINE)
        other = gl.load(expert_ids + tile, mask=tile < row_tiles, other=2147483647)
        before = (tile < row_tiles) & ((other < expert) | ((other == expert) & (tile < mine)))
        place += gl.sum(before.to(gl.int32), axis=0)
    gl.store(order + place, mine)


@gluon.jit
def _tile(item, order, row_tiles, column_tiles, GROUP_M: gl.constexpr):
    # Row tile and column tile of an item.
    panel = item // (GROUP_M * column_tiles)
    first = panel * GROUP_M
    height = gl.minimum(row_tiles - first, GROUP_M)
    within = item - first * column_tiles
    return gl.load(order + first + within % height), within // height


@gluon.jit
def _loader(
    a_desc, b_desc, expert_ids, order, memory, row_tiles, N, k_tiles, GROUP_M: gl.constexpr, STAGES: gl.constexpr
):
    a_smem, b_smem, full, empty = memory
    column_tiles = N // 256
    fill = 0
    for item in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _tile(item, order, row_tiles, column_tiles, GROUP_M)
        b_row = gl.load(expert_ids + row_tile) * N + column_tile * 256
        for k in range(0, k_tiles):
            stage = fill % STAGES
            mbarrier.wait(empty.index(stage), ((fill // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (128 + 256) * 128)
            tma.async_copy_global_to_shared(b_desc, [b_row, k * 128], full.index(stage), b_smem.index(stage))
            tma.async_copy_global_to_shared(
                a_desc, [row_tile * 128, k * 128], full.index(stage), a_smem.index(stage * 2)
            )
            tma.async_copy_global_to_shared(
                a_desc, [row_tile * 128 + 64, k * 128], full.index(stage), a_smem.index(stage * 2 + 1)
            )
            fill += 1


@gluon.jit
def _consumer(
    factors, expert_ids, order, out, memory, row_tiles, N, k_tiles, SIDE: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    scale_a, scale_b, moe_weights = factors
    a_smem, b_smem, full, empty = memory
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    column_tiles = N // 256
    fill = 0
    for item in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _tile(item, order, row_tiles, column_tiles, GROUP_M)
        acc = gl.zeros([64, 256], gl.int32, ACC)
        for k in range(0, k_tiles):
            stage = fill % STAGES
            mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
            token = warpgroup_mma(
                a_smem.index(stage * 2 + SIDE), b_smem.index(stage).permute([1, 0]), acc, use_acc=k > 0, is_async=True
            )
            acc = warpgroup_mma_wait(1, deps=[token])
            mbarrier.arrive(empty.index((fill + STAGES - 1) % STAGES), pred=k > 0)
            fill += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((fill + STAGES - 1) % STAGES))

        # ---- epilogue, multiplied in the contract's order
        row = row_tile * 128 + SIDE * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
        column = column_tile * 256 + gl.arange(0, 256, gl.SliceLayout(0, ACC))
        expert = gl.load(expert_ids + row_tile).to(gl.int64)
        by_row = gl.load(scale_a + row)
        weight = gl.load(moe_weights + row)
        by_column = gl.load(scale_b + expert * N + column)
        result = acc.to(gl.float32) * by_row[:, None] * by_column[None, :] * weight[:, None]
        gl.store(out + (row.to(gl.int64) * N)[:, None] + column[None, :], result.to(gl.bfloat16))


@gluon.jit
def moe_kernel(
    a_desc, b_desc, scale_a, scale_b, moe_weights, expert_ids, order, out, row_tiles, N, k_tiles,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a_smem = gl.allocate_shared_memory(gl.int8, [2 * STAGES, 64, 128], BYTES)
    b_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 256, 128], BYTES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    factors = (scale_a, scale_b, moe_weights)
    memory = (a_smem, b_smem, full, empty)
    # fmt: off
    gl.warp_specialize(
        [
            (_consumer, (factors, expert_ids, order, out, memory, row_tiles, N, k_tiles, 0, GROUP_M, STAGES)),
            (_consumer, (factors, expert_ids, order, out, memory, row_tiles, N, k_tiles, 1, GROUP_M, STAGES)),
            (_loader, (a_desc, b_desc, expert_ids, order, memory, row_tiles, N, k_tiles, GROUP_M, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on


class Plan:
    """One specialisation of the kernel, kept: descriptors (their base and length change), constants, compiled kernels.

    A launch through a compiled kernel costs the host half of one through the function, which looks at every argument to
    find that kernel again. For that the plan's key must hold all that a specialisation depends on.
    """

    def __init__(self, a, b):
        rows, K = a.shape
        experts, N, _ = b.shape
        tile = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        self.a = TensorDescriptor(a, [rows, K], [K, 1], [64, 128], tile)
        self.b = TensorDescriptor(b, [experts * N, K], [K, 1], [256, 128], tile)
        self.order = torch.empty(rows // 128, dtype=torch.int32, device=a.device)
        self.block = 128 if rows <= 128 * 128 else 1024
        self.order_kernel = self.kernel = None


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
        plan = PLANS[key] = Plan(a, b_col_major)
    plan.a.base, plan.b.base = a, b_col_major
    row_tiles = rows // 128
    order_args = (expert_ids, plan.order, row_tiles, plan.block)
    args = (
        *(plan.a, plan.b, scale_a, scale_b, moe_weights, expert_ids, plan.order, out, row_tiles, N, K // 128),
        *TUNING[DEVICE],
    )
    programs = min(PROGRAMS, row_tiles * (N // 256))
    if plan.kernel is None:
        plan.order_kernel = order_kernel[(row_tiles,)](*order_args, num_warps=4)
        plan.kernel = moe_kernel[(programs,)](*args, num_warps=4)
    else:
        plan.order_kernel[(row_tiles, 1, 1)](*order_args)
        plan.kernel[(programs, 1, 1)](*args)
    plan.a.base = plan.b.base = None  # keeps no tensor of the caller's alive
