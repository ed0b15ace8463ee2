"""What `make tune` tries for fused_moe (harness/tune/space.py says what the entries mean).

Registers: the int32 accumulators. Case 1 is checked and timed first: 32 row tiles, weights from memory.
"""

from typing import Any

COMMON = {"suites": ("judge", "live"), "probe": {"judge": 1, "live": 1}}


def tiles(block_n: int, shapes: Any) -> int:
    em, n = shapes["out"]
    return em // 128 * (n // block_n)


def triton(row: Any, lanes: int) -> dict[str, int]:
    """(BLOCK_N, BLOCK_K, GROUP_M, BY_EXPERT, num_warps, num_stages)"""
    block_n, block_k, _, _, warps, stages = row
    shared, threads = stages * (128 + block_n) * block_k, warps * lanes
    return {"shared": shared, "threads": threads, "registers": 128 * block_n // threads}


def tilelang(block_n: int) -> Any:
    """(BLOCK_K, threads, num_stages, GROUP_M) of a width; the outputs pass through the same memory."""

    def needs(row: Any, lanes: int) -> dict[str, int]:
        block_k, threads, stages, _ = row
        shared = max(max(1, stages) * (128 + block_n) * block_k, 128 * block_n * 2)
        staged = 0 if stages else (128 + block_n) * block_k // 4  # the next tiles wait in registers
        registers = (128 * block_n + staged) // threads
        return {"shared": shared, "threads": threads, "registers": registers}

    return needs


def cuda(row: Any, lanes: int) -> dict[str, int]:
    """(BLOCK_N, BLOCK_K, waves_m, waves_n, buffers, GROUP_M); the file takes a BLOCK_K of 128 only."""
    block_n, block_k, waves_m, waves_n, buffers, _ = row
    threads, bytes_of_step = waves_m * waves_n * lanes, (128 + block_n) * block_k
    staged = bytes_of_step // 4 if lanes == 64 else 0  # register staging
    return {
        "shared": buffers * bytes_of_step,
        "threads": threads,
        "registers": (128 * block_n + staged) // threads,
    }


SPACES = [
    {
        "language": "triton",
        "row": "sm90",
        "place": ("TUNING", "sm90"),
        "needs": triton,
        "blocks": lambda row, shapes: tiles(row[0], shapes),
        **COMMON,
        "candidates": {
            (256, 128, 16, False, 8, 4): "row tiles as they come: no comparison of neighbours, other L2 order",
            (256, 128, 8, True, 8, 4): "narrower panels: fewer rows of a, more of b in the L2 cache at a time",
            (256, 128, 32, True, 8, 4): "wider panels: every column of b is fetched half as often",
            (256, 128, 64, True, 8, 4): "panels of 64: for many tiles per expert",
            (256, 64, 16, True, 8, 6): "144 KiB: shorter steps, more of them on their way",
            (256, 64, 16, True, 8, 4): "96 KiB: two blocks, one starts while the other stores",
            (256, 128, 16, True, 8, 3): "144 KiB: less to wait for at the ends",
            (256, 128, 16, True, 8, 4): "192 KiB: one block with twice the columns",
            (128, 128, 8, True, 8, 3): "narrower panels of the row at hand",
            (128, 128, 32, True, 8, 3): "wider panels of the row at hand",
            (128, 128, 16, True, 4, 3): "the same with one warpgroup of 128 accumulators",
            (128, 128, 16, True, 8, 6): "192 KiB: half the tile, twice the stages",
            (128, 256, 16, True, 8, 3): "half as many steps of 256",
            (256, 128, 16, True, 4, 4): "one warpgroup with 256 accumulators per thread: more than there are",
        },
    },
    {
        "language": "triton",
        "row": "c500",
        "place": ("TUNING", "c500"),
        "needs": triton,
        "blocks": lambda row, shapes: tiles(row[0], shapes),
        **COMMON,
        "candidates": {
            (128, 128, 8, False, 4, 1): "row tiles as they come",
            (128, 128, 4, True, 4, 1): "narrower panels: the L2 cache of 8 MB holds fewer rows of a",
            (128, 128, 16, True, 4, 1): "wider panels: every column of b is fetched half as often",
            (128, 128, 32, True, 4, 1): "a panel of 32 tiles: the whole of the small cases",
            (128, 256, 8, True, 4, 1): "64 KiB: half as many barriers, one block (the vendor's library does this)",
            (
                128,
                64,
                8,
                True,
                4,
                1,
            ): "16 KiB: more blocks, shorter steps; 58 points instead of 69 in a public trial at 32",
            (128, 128, 8, True, 8, 1): "eight waves of 32 accumulators",
            (64, 128, 8, True, 4, 1): "24 KiB and 32 accumulators: twice as many blocks",
            (256, 128, 8, True, 8, 1): "48 KiB, one block of eight waves: a is read half as often",
        },
    },
    {
        "language": "tilelang",
        "row": "sm90",
        "place": ("TUNING", "sm90", 256),
        "needs": tilelang(256),
        "blocks": lambda row, shapes: tiles(256, shapes),
        **COMMON,
        "candidates": {
            (256, 256, 2, 16): "half as many barriers, the same 192 KiB",
            (64, 256, 8, 16): "short steps, seven of them on their way",
            (64, 256, 4, 16): "96 KiB: no more than three steps on their way",
            (128, 256, 3, 16): "144 KiB: less to wait for at the ends",
            (128, 256, 4, 8): "narrower panels: fewer rows of a, more of b in the L2 cache at a time",
            (128, 256, 4, 32): "wider panels: every column of b is fetched half as often",
            (128, 256, 4, 64): "panels of 64: for many tiles per expert",
            (128, 128, 4, 16): "one warpgroup with 256 accumulators per thread: more than there are",
        },
        "others": [
            ({("TUNING", "sm90"): {128: (128, 256, 6, 16)}}, "blocks of 128 columns only"),
            ({("TUNING", "sm90"): {128: (128, 256, 3, 16)}}, "the same in 96 KiB, so that two blocks fit"),
        ],
    },
    {
        "language": "tilelang",
        "row": "c500",
        "place": ("TUNING", "c500", 128),
        "needs": tilelang(128),
        "blocks": lambda row, shapes: tiles(128, shapes),
        **COMMON,
        "candidates": {
            (128, 256, 0, 4): "narrower panels: the L2 cache of 8 MB holds fewer rows of a",
            (128, 256, 0, 16): "wider panels: every column of b is fetched half as often",
            (128, 256, 0, 32): "a panel of 32 tiles: the whole of the small cases",
            (64, 256, 0, 8): "16 KiB of tiles: shorter steps, fewer registers for the next ones",
            (256, 256, 0, 8): "64 KiB: half as many barriers, one block",
        },
    },
    {
        "language": "cuda",
        "row": "sm90",
        "place": ("kSm80",),
        "needs": cuda,
        "blocks": lambda row, shapes: tiles(row[0], shapes),
        "shared_limit": 64 << 10,
        **COMMON,
        "candidates": {
            (128, 128, 2, 2, 2, 16): "four warps of 64 x 64: half the reads of shared memory per product",
            (128, 128, 4, 2, 2, 16): "eight warps of 32 x 64 instead of 64 x 32: the other way round",
            (64, 128, 4, 2, 2, 16): "48 KiB, 32 accumulators: four blocks",
            (64, 128, 2, 2, 2, 16): "the same with four warps of 64 x 32",
            (128, 128, 4, 4, 2, 16): "sixteen warps of 32 accumulators",
            (128, 128, 1, 8, 2, 16): "warps of 128 x 16",
            (128, 128, 2, 4, 2, 8): "narrower panels: fewer rows of a, more of b in the L2 cache at a time",
            (128, 128, 2, 4, 2, 32): "wider panels: every column of b is fetched half as often",
            (128, 128, 2, 4, 3, 16): "three buffers of 32 KiB: more than the portable path may have",
        },
    },
    {
        "language": "cuda",
        "row": "c500",
        "place": ("kC500",),
        "needs": cuda,
        "blocks": lambda row, shapes: tiles(row[0], shapes),
        "shared_limit": 64 << 10,
        **COMMON,
        "candidates": {
            (128, 128, 4, 1, 1, 8): "four waves along M: what the best public kernel does",
            (128, 128, 1, 4, 1, 8): "four waves along N",
            (128, 128, 2, 4, 1, 8): "eight waves of 32 accumulators; a loss in public trials",
            (128, 128, 2, 2, 2, 8): "two buffers, 64 KiB, one block",
            (64, 128, 2, 2, 1, 8): "24 KiB, twice as many blocks",
            (64, 128, 4, 1, 1, 8): "the same with four waves along M",
            (128, 128, 2, 2, 1, 4): "narrower panels: the L2 cache of 8 MB holds fewer rows of a",
            (128, 128, 2, 2, 1, 16): "wider panels: every column of b is fetched half as often",
            (128, 128, 2, 2, 1, 32): "a panel of 32 tiles: the whole of the small cases",
        },
    },
]
