"""What `make tune` tries for ragged_prefill (harness/tune/space.py says what the entries mean).

Judge and live cases all have head dims 128 / 128, so only that row is searched. Cases 6 and 6 of 12 and 15 are checked
and timed first: 4 sequences of 4096, neither launch nor tail decides there.
"""

from tasks.common import tuning as prefill

TRITON, TILELANG = prefill.triton(128, 128), prefill.tilelang(128, 128)
CUDA = prefill.cuda(128, 128, keys=2)
BY_ROWS = prefill.row_tiles(lambda row: row[0], "k", 1)
BY_FRAGS = prefill.row_tiles(lambda row: 64 * row[2], "k", 1)
COMMON = {"suites": ("judge", "live"), "probe": {"judge": 6, "live": 6}}
WAVES = ("kWaves",)

SPACES = [
    {
        "language": "triton",
        "row": "sm90",
        "place": ("TUNING", "sm90", 128),
        "needs": TRITON,
        "blocks": BY_ROWS,
        **COMMON,
        "candidates": {
            (64, 64, 4, 2): "two stages, 80 KiB: the same two blocks, less to wait for at the ends",
            (64, 64, 4, 4): "four stages hide more latency, but only one block fits",
            (64, 32, 4, 3): "64 KiB: three blocks of one warpgroup, each with a shorter step",
            (64, 32, 4, 4): "80 KiB: two blocks, the next three tiles on their way",
            (64, 32, 4, 5): "96 KiB: two blocks, the next four tiles on their way",
            (64, 128, 4, 2): "half as many rescales and barriers per key; one block",
            (64, 128, 4, 3): "the same with the whole shared memory",
            (128, 64, 8, 3): "two warpgroups share K and V: half the loads per row",
            (128, 64, 8, 2): "the same in 96 KiB, so that two blocks fit",
            (128, 64, 8, 4): "one block of two warpgroups, with more loads on their way",
            (128, 128, 8, 2): "the tile of FlashAttention-3; one block, long steps",
            (128, 128, 8, 3): "the same with the next two tiles on their way",
            (128, 32, 8, 4): "short steps, registers to spare",
            (128, 64, 4, 3): "one warpgroup with 128 rows: it should spill",
        },
    },
    {
        "language": "triton",
        "row": "c500",
        "place": ("TUNING", "c500", 128),
        "needs": TRITON,
        "blocks": BY_ROWS,
        **COMMON,
        "candidates": {
            (64, 64, 4, 1): "the vendor's tile for causal attention of 128: half the accumulator, twice the waves",
            (64, 32, 4, 1): "16 KiB: four blocks share an AP",
            (128, 32, 4, 1): "16 KiB and fewer scores: three blocks where registers allow",
            (128, 128, 4, 1): "64 KiB, one block: half as many rescales, which is what the vector units wait for",
            (128, 64, 8, 1): "eight waves of 16 rows: half the registers, more waves to hide latency",
            (256, 64, 8, 1): "eight waves of 32 rows share K and V",
            (64, 64, 2, 1): "two waves of 32 rows, as the current row's, with smaller barriers",
            (64, 32, 2, 1): "the same with 16 KiB: four blocks",
            (32, 64, 2, 1): "two waves of 16 rows: short sequences fill the chip",
        },
    },
    {
        "language": "tilelang",
        "row": "sm90",
        "place": ("TUNING", "sm90", 128),
        "needs": TILELANG,
        "blocks": BY_ROWS,
        **COMMON,
        "candidates": {
            (128, 176, 256, 2): "208 KiB: a third fewer rescales",
            (192, 128, 384, 2): "three warpgroups share K and V, 176 KiB",
            (128, 128, 256, 1): "one stage: more of the shared memory stays free",
            (128, 160, 256, 2): "between the current tile and 176",
            (128, 96, 256, 2): "128 KiB, registers to spare",
            (128, 96, 256, 3): "the same with one more tile on its way",
            (128, 64, 256, 3): "short steps: less wasted on the diagonal",
            (192, 96, 384, 2): "three warpgroups, registers to spare",
            (192, 80, 384, 3): "the same with one more tile on its way",
            (64, 128, 128, 2): "one warpgroup: short sequences fill the chip",
            (64, 64, 128, 2): "one warpgroup and short steps",
        },
    },
    {
        "language": "tilelang",
        "row": "c500",
        "place": ("TUNING", "c500", 128),
        "needs": TILELANG,
        "blocks": BY_ROWS,
        **COMMON,
        "candidates": {
            (64, 32, 128, 0): "32 KiB: two blocks share an AP, two waves of 32 rows each",
            (64, 32, 256, 0): "32 KiB: two blocks, four waves of 16 rows each",
            (64, 64, 256, 0): "48 KiB: half as many rescales per key",
            (64, 64, 128, 0): "the same with two waves of 32 rows",
            (64, 16, 128, 0): "24 KiB, short steps: less wasted on the diagonal",
            (128, 64, 256, 0): "64 KiB: half as many rescales per key, one block as now",
            (128, 16, 256, 0): "40 KiB: shorter steps; one block as now",
            (32, 32, 128, 0): "24 KiB: two blocks, short sequences fill the chip",
        },
    },
    {
        "language": "cuda",
        "row": "sm90",
        "place": ("kSm80", (128, 128)),
        "needs": CUDA,
        "blocks": BY_FRAGS,
        "shared_limit": 112 << 10,
        **COMMON,
        "candidates": {
            (128, 128, 2, 64, False, 1): "64 KiB: two barriers per step, and the exponentials apart from the products",
            (128, 128, 1, 64, True, 1): "Q in registers, 32 KiB: half the accumulator, so that four blocks fit",
            (128, 128, 1, 64, True, 2): "the same with a whole step's loads on their way: three blocks",
            (128, 128, 1, 64, False, 2): "Q in shared memory, 80 KiB: registers to spare",
            (128, 128, 1, 128, True, 1): "Q in registers, 64 KiB: half as many barriers and rescales",
            (128, 128, 2, 32, False, 2): "64 KiB, scores in 32 registers instead of 64",
            (128, 128, 2, 32, True, 2): "Q in registers instead of half of the scores, 32 KiB",
        },
        "others": [
            ({WAVES: 2}, "64 rows and 64 threads: short sequences fill the chip"),
            ({("kLazy",): 0.0}, "rescale whenever a maximum rises: how much does the lazy branch save"),
            ({("kLazy",): 4.0}, "rescale a little earlier"),
            ({("kL2BytesSm80",): "10 << 20"}, "fewer sequences side by side in the L2 cache"),
            ({("kL2BytesSm80",): "32 << 20"}, "more of them"),
        ],
    },
    {
        "language": "cuda",
        "row": "c500",
        "place": ("kC500", (128, 128)),
        "needs": CUDA,
        "blocks": BY_FRAGS,
        "shared_limit": 64 << 10,
        **COMMON,
        "candidates": {
            (128, 128, 2, 128, True, 1): "64 KiB, one block: half as many rescales, where the vector units wait",
            (128, 128, 1, 64, True, 1): "16 rows per wave: half the registers, more waves to hide latency",
            (128, 128, 1, 128, True, 1): "the same with half as many barriers, one block",
            (128, 128, 3, 64, True, 1): "48 rows per wave share each read of K and V; 48 KiB, one block",
            (128, 128, 2, 64, False, 1): "Q read from shared memory again and again, 64 KiB: registers for more waves",
        },
        "others": [
            ({WAVES: 2}, "two waves: short sequences fill the chip, more blocks per AP"),
            ({("kLazy",): 0.0}, "rescale whenever a maximum rises: how much does the lazy branch save"),
            ({("kL2BytesC500",): "2 << 20"}, "fewer sequences side by side in the L2 cache"),
            ({("kL2BytesC500",): "6 << 20"}, "more of them"),
        ],
    },
]
