"""What `make tune` tries for mla_decode (harness/tune/space.py says what the entries mean).

All judge and live cases have 64 or 128 heads, so only the row of 64 heads is searched. The kernels cut the sequences so
that the chip is full, so there are no waves to count. Case 7 (64 heads, 4 sequences of 8192) is checked and timed
first: enough to read, and cut into many parts.
"""

from typing import Any

COMMON = {"suites": ("judge", "live"), "probe": {"judge": 7, "live": 7}}


def triton(row: Any, lanes: int) -> dict[str, int]:
    """(BLOCK_H, BLOCK_N, num_warps, num_stages, MIN_CHUNK, PROGRAMS): Q and every stage have 576 columns."""
    block_h, block_n, warps, stages, _, _ = row
    threads = warps * lanes
    kept = block_h * (512 + block_n + block_n // 2)
    return {"shared": (block_h + stages * block_n) * 576 * 2, "threads": threads, "registers": kept // threads}


def tilelang(row: Any, lanes: int) -> dict[str, int]:
    """(BLOCK_H, BLOCK_N, threads, num_stages, blocks): two tiles of keys where there are stages, and P."""
    block_h, block_n, threads, stages, _ = row
    shared = 1152 * (block_h + (2 if stages else 1) * block_n) + 2 * block_h * block_n + 1024  # to align them
    return {"shared": shared, "threads": threads, "registers": block_h * (512 + block_n) // threads}


def cuda(row: Any, lanes: int) -> dict[str, int]:
    """(row_groups, BLOCK_N, slots, lag, blocks): as struct Config of the file."""
    groups, block_n, slots, lag, _ = row
    rows, threads, buffers = 16 * groups, 2 * groups * lanes, 2 if lag else 1
    shared = slots * block_n * 1152 + rows * block_n * 4 + buffers * (rows * block_n * 2 + rows * 4 + 16) + rows * 4
    return {"shared": shared, "threads": threads, "registers": rows * (512 + block_n) // threads}


SPACES = [
    {
        "language": "triton",
        "row": "sm90",
        "place": ("TUNING", "sm90"),
        "needs": triton,
        **COMMON,
        "candidates": {
            (64, 32, 8, 4, 2, 132): "one more stage, 216 KiB: three tiles on their way",
            (64, 32, 8, 2, 2, 132): "two stages, 144 KiB: is the third one needed",
            (64, 64, 8, 2, 1, 132): "half as many reads of Q; the compiler then loads after computing",
            (64, 16, 8, 6, 4, 132): "short steps, five of them on their way",
            (64, 32, 8, 3, 2, 66): "half as many programs, each with twice the tokens: fewer parts to merge",
            (64, 32, 8, 3, 2, 264): "twice as many: two rounds, which even out",
            (64, 32, 8, 3, 1, 132): "parts of 32 tokens: short sequences spread further",
            (64, 32, 8, 3, 4, 132): "parts of 128 tokens at least: fewer to merge",
            (64, 32, 8, 3, 8, 132): "parts of 256 tokens at least",
            (64, 32, 4, 3, 2, 132): "one warpgroup: its accumulator alone takes 256 registers",
            (128, 32, 8, 2, 2, 132): "all 128 heads in a tile: 256 registers of accumulator",
            (32, 32, 4, 3, 2, 264): "tiles of 32 heads, two programs per multiprocessor, without wgmma",
        },
    },
    {
        "language": "triton",
        "row": "c500",
        "place": ("TUNING", "c500"),
        "needs": triton,
        **COMMON,
        "candidates": {
            (32, 16, 4, 1, 4, 104): "32 heads per tile: the cache is read half as often, one program per AP",
            (32, 16, 8, 1, 4, 104): "the same with eight waves",
            (16, 32, 4, 1, 2, 104): "half as many barriers, 54 KiB",
            (16, 16, 2, 1, 4, 208): "two waves: more registers each, half the barrier",
            (16, 16, 8, 1, 4, 208): "eight waves to hide latency",
            (16, 16, 4, 1, 4, 104): "half as many programs: fewer parts to merge",
            (16, 16, 4, 1, 4, 416): "twice as many: two rounds, which even out",
            (16, 16, 4, 1, 8, 208): "parts of 128 tokens at least",
            (16, 16, 4, 1, 2, 208): "parts of 32 tokens: short sequences spread further",
            (64, 16, 8, 1, 4, 104): "64 heads: 90 KiB with Q in shared memory",
        },
    },
    {
        "language": "tilelang",
        "row": "sm90",
        "place": ("TUNING", "sm90", "tiles", 64),
        "needs": tilelang,
        **COMMON,
        "candidates": {
            (64, 32, 256, 1, 1): "151 KiB: turns of 64 tokens instead of 128, less is wasted at the end of a part",
            (64, 32, 256, 1, 2): "twice as many parts: two rounds, which even out",
            (64, 64, 256, 1, 2): "the same with long turns",
            (64, 64, 256, 0, 1): "one tile, the next one in registers: no asynchronous copy",
            (32, 64, 256, 1, 1): "tiles of 32 heads without wgmma",
        },
        "others": [
            ({("MIN_KEYS",): 32}, "short sequences spread further"),
            ({("MIN_KEYS",): 128}, "fewer parts to join"),
            ({("MIN_KEYS",): 256}, "fewer still"),
        ],
    },
    {
        "language": "tilelang",
        "row": "c500",
        "place": ("TUNING", "c500", "tiles", 64),
        "needs": tilelang,
        **COMMON,
        "candidates": {
            (16, 32, 128, 0, 1): "half as many barriers per key",
            (16, 16, 128, 0, 1): "37 KiB: short steps",
            (32, 16, 256, 0, 1): "four waves to hide latency",
            (32, 16, 128, 0, 2): "twice as many parts: two rounds, which even out",
            (16, 16, 64, 0, 1): "one wave: no barrier has anything to wait for",
        },
        "others": [
            ({("MIN_KEYS",): 128}, "fewer parts to join"),
            ({("MIN_KEYS",): 256}, "fewer still"),
        ],
    },
    {
        "language": "cuda",
        "row": "sm90",
        "place": ("kSm80", (4,)),
        "needs": cuda,
        "shared_limit": 64 << 10,
        **COMMON,
        "candidates": {
            (4, 16, 2, False, 1): "the output in the same step: one slot and a barrier less, all waves load",
            (4, 16, 3, False, 1): "the same with one more tile on its way",
            (4, 16, 3, True, 2): "twice as many parts: two rounds, which even out",
            (4, 32, 2, False, 1): "half as many barriers: two slots of 36 KiB are more than the portable path may have",
        },
        "others": [
            ({("kMinKeys",): 32}, "short sequences spread further"),
            ({("kMinKeys",): 128}, "fewer parts to combine"),
            ({("kMinKeys",): 256}, "fewer still"),
            ({("kSm80", (4,)): (4, 16, 2, False, 1), ("kMinKeys",): 128}, "both"),
            ({("kLazy",): 0.0}, "rescale whenever a maximum rises: how much does the lazy branch save"),
        ],
    },
    {
        "language": "cuda",
        "row": "c500",
        "place": ("kC500", (4,)),
        "needs": cuda,
        "shared_limit": 64 << 10,
        **COMMON,
        "candidates": {
            (4, 16, 1, False, 1): "25 KiB: half the registers for the next tile",
            (4, 16, 1, False, 2): "the same with two blocks per AP",
            (4, 16, 2, False, 1): "two slots of 18 KiB: one barrier per step",
            (4, 32, 1, False, 2): "twice as many parts: two rounds, which even out",
        },
        "others": [
            ({("kMinKeys",): 128}, "fewer parts to combine"),
            ({("kMinKeys",): 256}, "fewer still"),
            ({("kLazy",): 0.0}, "rescale whenever a maximum rises: how much does the lazy branch save"),
        ],
    },
]
