"""What `make tune` tries for kvcache_decode (harness/tune/space.py says what the entries mean).

Judge cases have 8 query heads on 8 KV heads of 128, live cases 32 on 4 or 8: other rows, so other spaces. The kernels
cut the sequences so that the chip is full, so there are no waves to count. Case 8 of the judge (4 sequences of 8192)
and case 8 of live (16 of 4096) are checked and timed first.
"""

from typing import Any

JUDGE = {"suites": ("judge",), "probe": {"judge": 8}}
LIVE = {"suites": ("live",), "probe": {"live": 8}}


def triton(row: Any, lanes: int) -> dict[str, int]:
    """(blocks, split_keys, elements of a tile, num_warps, num_stages): tiles of K and V in every stage."""
    _, _, elements, warps, stages = row
    shared, threads = (2 * stages * elements * 2 if stages > 1 else 0), warps * lanes
    return {"shared": shared, "threads": threads, "registers": 2 * elements // threads}


def triton_grouped(row: Any, lanes: int) -> dict[str, int]:
    """As above; with one stage K and V pass through shared memory on their way to the products."""
    needs = triton(row, lanes)
    return {**needs, "shared": max(needs["shared"], 2 * row[2] * 2)}


def slots(row: Any, lanes: int) -> dict[str, int]:
    """(BLOCK_N, threads, blocks): a query, and in registers the sums as float32, K and V."""
    block_n, threads, _ = row
    return {"shared": 256, "threads": threads, "registers": 2 * block_n * 128 // threads}


def tiles(row: Any, lanes: int) -> dict[str, int]:
    """(BLOCK_H, BLOCK_N, threads, blocks): Q, K, V and P in shared memory, sums and scores in registers."""
    block_h, block_n, threads, _ = row
    shared = ((2 * block_n + block_h) * 128 + block_h * block_n) * 2
    return {"shared": shared, "threads": threads, "registers": block_h * (128 + block_n) // threads}


def cuda(row: Any, lanes: int) -> dict[str, int]:
    """(dim, exact, heads, lanes, unroll, threads, blocks): sums, queries as bf16, and `unroll` keys and values."""
    dim, _, heads, of_key, unroll, threads, _ = row
    of_head = threads // lanes * (dim + 4) * 4
    merged = heads
    while merged * of_head > 9 << 10 and merged > heads // 4:
        merged //= 2
    kept = dim // of_key * (heads + heads // 2 + unroll)
    return {"shared": merged * of_head, "threads": threads, "registers": kept}


SPACES = [
    {
        "language": "triton",
        "row": "sm90",
        "place": ("TUNING", "sm90", "single"),
        "needs": triton,
        **JUDGE,
        "candidates": {
            (4, 64, 4096, 4, 2): "two stages: is the third one needed",
            (4, 64, 4096, 4, 4): "64 KiB: three blocks, three tiles on their way",
            (3, 64, 4096, 4, 4): "the same, cut for three blocks",
            (8, 64, 4096, 4, 3): "twice as many splits: two rounds, which even out",
            (2, 64, 8192, 4, 3): "tiles of 64 keys, 96 KiB: two blocks",
            (4, 64, 8192, 8, 2): "tiles of 64 keys and eight warps, 64 KiB",
            (8, 64, 2048, 2, 4): "tiles of 16 keys and two warps, 32 KiB: seven blocks",
            (8, 64, 4096, 4, 1): "no stages: other blocks of the multiprocessor cover the loads, as on a C500",
            (4, 64, 4096, 4, 3): "splits of 64 keys at least: short sequences spread further",
            (4, 32, 4096, 4, 3): "splits of 32 keys: short sequences spread further",
            (4, 64, 4096, 8, 3): "eight warps: half the registers per thread",
            (4, 64, 4096, 2, 3): "two warps: 16 bytes per load and eight loads each",
        },
    },
    {
        "language": "triton",
        "row": "sm90",
        "place": ("TUNING", "sm90", "grouped"),
        "needs": triton_grouped,
        **LIVE,
        "candidates": {
            (4, 64, 8192, 4, 2): "tiles of 64 keys: half as many products, 64 KiB",
            (3, 64, 8192, 4, 2): "the same, cut for three blocks",
            (2, 64, 8192, 4, 3): "the same with three stages, 96 KiB",
            (8, 64, 4096, 4, 3): "twice as many splits: two rounds, which even out",
            (4, 64, 4096, 4, 2): "two stages: is the third one needed",
            (4, 64, 4096, 4, 4): "three tiles on their way",
            (4, 64, 4096, 2, 3): "two warps: fewer to wait for at the reductions",
            (8, 64, 2048, 2, 4): "tiles of 16 keys and two warps, 32 KiB: seven blocks",
            (4, 128, 4096, 4, 3): "splits of 128 keys at least: fewer to combine",
        },
    },
    {
        "language": "triton",
        "row": "c500",
        "place": ("TUNING", "c500", "single"),
        "needs": triton,
        **JUDGE,
        "candidates": {
            (4, 128, 4096, 4, 1): "half as many splits: fewer to combine",
            (16, 128, 4096, 4, 1): "twice as many: two rounds, which even out",
            (8, 128, 2048, 4, 1): "tiles of 16 keys: half the registers",
            (8, 128, 8192, 4, 1): "tiles of 64 keys: twice the loads on their way",
            (8, 256, 4096, 4, 1): "splits of 256 keys at least",
            (8, 64, 4096, 4, 1): "splits of 64 keys: short sequences spread further",
            (16, 128, 4096, 2, 1): "two waves",
            (32, 128, 4096, 1, 1): "one wave: no barrier has anything to wait for",
        },
    },
    {
        "language": "triton",
        "row": "c500",
        "place": ("TUNING", "c500", "grouped"),
        "needs": triton_grouped,
        **LIVE,
        "candidates": {
            (8, 128, 4096, 4, 1): "twice as many splits: two rounds, which even out",
            (4, 128, 8192, 4, 1): "tiles of 64 keys, 32 KiB",
            (8, 128, 2048, 4, 1): "tiles of 16 keys, 8 KiB: eight blocks",
            (8, 128, 2048, 1, 1): "one wave and tiles of 16 keys, as a public kernel does",
            (8, 128, 4096, 2, 1): "two waves: fewer to wait for at the reductions",
            (4, 256, 4096, 4, 1): "splits of 256 keys at least",
        },
    },
    {
        "language": "tilelang",
        "row": "sm90",
        "place": ("TUNING", "sm90", "slots", 128),
        "needs": slots,
        **JUDGE,
        "candidates": {
            (32, 256, 4): "twice the threads, half the loads of each",
            (32, 128, 8): "twice as many splits: two rounds, which even out",
            (64, 256, 2): "tiles of 64 keys: twice the loads on their way per block",
            (16, 128, 8): "tiles of 16 keys: half the registers, eight blocks",
            (16, 64, 8): "the same with two warps",
            (64, 256, 4): "tiles of 64 keys and twice the splits",
            (32, 128, 3): "fewer splits to join",
            (64, 128, 2): "128 registers of tiles alone",
        },
        "others": [
            ({("MIN_SPLIT",): 128}, "shares of 128 tokens at least: fewer to join"),
            ({("MIN_SPLIT",): 32}, "short sequences spread further"),
        ],
    },
    {
        "language": "tilelang",
        "row": "sm90",
        "place": ("TUNING", "sm90", "tiles", 128),
        "needs": tiles,
        **LIVE,
        "candidates": {
            (16, 64, 128, 3): "16 rows of plain mma instead of 64 of wgmma: an eighth of the padding",
            (16, 32, 128, 4): "the same with tiles of 32 keys",
            (16, 32, 64, 8): "two warps, many blocks",
            (64, 32, 128, 4): "tiles of 32 keys: more blocks",
            (64, 128, 128, 2): "tiles of 128 keys",
            (64, 64, 128, 6): "twice as many shares: two rounds, which even out",
        },
        "others": [({("MIN_SPLIT",): 128}, "shares of 128 tokens at least: fewer to join")],
    },
    {
        "language": "tilelang",
        "row": "c500",
        "place": ("TUNING", "c500", "slots", 128),
        "needs": slots,
        **JUDGE,
        "candidates": {
            (32, 256, 16): "half as many shares: fewer to join",
            (32, 256, 8): "as many as run at one time",
            (64, 256, 16): "tiles of 64 keys: twice the loads on their way",
            (16, 256, 32): "tiles of 16 keys: half the registers",
            (16, 128, 32): "two waves",
            (8, 64, 64): "one wave: no barrier has anything to wait for",
        },
        "others": [({("MIN_SPLIT",): 128}, "shares of 128 tokens at least: fewer to join")],
    },
    {
        "language": "tilelang",
        "row": "c500",
        "place": ("TUNING", "c500", "tiles", 128),
        "needs": tiles,
        **LIVE,
        "candidates": {
            (16, 16, 64, 16): "pages of 16 as tiles, 14 KiB",
            (16, 64, 64, 8): "tiles of 64 keys, 38 KiB",
            (16, 64, 128, 8): "the same with two waves",
            (16, 32, 64, 32): "twice as many shares: two rounds, which even out",
            (16, 32, 64, 8): "half as many shares: fewer to join",
        },
        "others": [({("MIN_SPLIT",): 128}, "shares of 128 tokens at least: fewer to join")],
    },
    {
        "language": "cuda",
        "row": "sm90",
        "place": ("kSm80", (128, True, 1)),
        "needs": cuda,
        **JUDGE,
        "candidates": {
            (128, True, 1, 8, 4, 128, 4): "four keys per lane on their way, four blocks",
            (128, True, 1, 16, 4, 128, 5): "16 lanes per key: half the registers of sums, four keys on their way",
            (128, True, 1, 8, 1, 128, 6): "one key per lane, six blocks",
            (128, True, 1, 4, 2, 128, 3): "four lanes per key: two steps of the reduction instead of three",
            (128, True, 1, 16, 2, 128, 8): "16 lanes per key, eight blocks",
            (128, True, 1, 8, 2, 256, 3): "eight warps",
            (128, True, 1, 8, 2, 64, 10): "two warps: fewer to merge at the end",
            (128, True, 1, 8, 2, 128, 10): "twice as many parts: two rounds, which even out",
            (128, True, 1, 8, 8, 128, 2): "eight keys per lane on their way, two blocks",
        },
        "others": [
            ({("kLeastKeys",): "arch::kWave == 64 ? 128 : 32"}, "short sequences spread further"),
            ({("kLeastKeys",): "arch::kWave == 64 ? 128 : 128"}, "fewer parts to merge"),
            ({("kLazy",): 0.0}, "rescale whenever a maximum rises: how much does the lazy branch save"),
        ],
    },
    {
        "language": "cuda",
        "row": "sm90",
        "place": ("kSm80", (128, True, 8)),
        "needs": cuda,
        **LIVE,
        "candidates": {
            (128, True, 8, 16, 1, 64, 4): "one key per lane: registers to spare",
            (128, True, 8, 16, 2, 128, 2): "four warps",
            (128, True, 8, 16, 4, 64, 3): "four keys per lane on their way",
            (128, True, 8, 16, 2, 64, 8): "twice as many parts: two rounds, which even out",
        },
        "others": [
            (
                {("kSm80", (128, True, 4)): (128, True, 4, 16, 4, 128, 3)},
                "groups of 4: four keys per lane on their way",
            ),
            ({("kSm80", (128, True, 4)): (128, True, 4, 16, 2, 64, 8)}, "groups of 4: two warps"),
            ({("kSm80", (128, True, 4)): (128, True, 4, 8, 1, 128, 4)}, "groups of 4: eight lanes per key"),
        ],
    },
    {
        "language": "cuda",
        "row": "c500",
        "place": ("kC500", (128, True, 1)),
        "needs": cuda,
        **JUDGE,
        "candidates": {
            (128, True, 1, 16, 2, 256, 16): "16 lanes per key: half the registers of sums",
            (128, True, 1, 16, 4, 256, 16): "the same with four keys per lane on their way",
            (128, True, 1, 8, 4, 256, 8): "four keys per lane on their way",
            (128, True, 1, 8, 1, 256, 16): "one key per lane: more waves",
            (128, True, 1, 8, 2, 256, 8): "half as many parts: as many as run at one time",
            (128, True, 1, 8, 2, 256, 32): "twice as many",
            (128, True, 1, 8, 2, 128, 32): "two waves",
            (128, True, 1, 8, 2, 64, 64): "one wave: no barrier has anything to wait for",
        },
        "others": [({("kLeastKeys",): "arch::kWave == 64 ? 64 : 64"}, "short sequences spread further")],
    },
    {
        "language": "cuda",
        "row": "c500",
        "place": ("kC500", (128, True, 8)),
        "needs": cuda,
        **LIVE,
        "candidates": {
            (128, True, 8, 16, 1, 256, 8): "one key per lane: registers to spare",
            (128, True, 8, 16, 2, 128, 16): "two waves",
            (128, True, 8, 16, 2, 64, 32): "one wave: no barrier has anything to wait for",
            (128, True, 8, 16, 2, 256, 16): "twice as many parts",
        },
        "others": [
            (
                {("kC500", (128, True, 4)): (128, True, 4, 16, 4, 256, 8)},
                "groups of 4: four keys per lane on their way",
            ),
            ({("kC500", (128, True, 4)): (128, True, 4, 16, 1, 256, 8)}, "groups of 4: one key per lane"),
        ],
    },
]
