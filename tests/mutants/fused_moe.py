"""fused_moe gone wrong. The cases are those of tiny_config.py that show it."""

from harness.mutants import Mutant
from harness.verdict import Verdict as V

JUDGE_CASES = {"fused_moe": (1, 2)}  # 32 and 256 row tiles


def _triton(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "fused_moe", "triton", mistake, changes, **more)


def _tilelang(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "fused_moe", "tilelang", mistake, changes, **more)


def _cuda(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "fused_moe", "cuda", mistake, changes, **more)


_STORE = "    tl.store(out + first_row * N"

MUTANTS = (
    _triton("gathered_again", "takes row r of A from row token_ids[r], though A is routed already",
        ("    expert_ids,\n    out,\n    row_tiles,", "    expert_ids,\n    token_ids,\n    out,\n    row_tiles,"),
        ("        expert_ids,\n        out,\n        row_tiles,",
         "        expert_ids,\n        token_ids,\n        out,\n        row_tiles,"),
        ("a_tile = a + first_row * K + row[:, None] * K + k[None, :]",
         "a_tile = a + tl.load(token_ids + first_row + row).to(tl.int64)[:, None] * K + k[None, :]"),
        cpu=(V.WRONG_ANSWER,), cases=(2,)),
    _triton("wrong_expert_for_the_last_tile", "multiplies the last row tile with the first one's expert",
        ("expert = tl.load(expert_ids + row_tile)",
         "expert = tl.load(expert_ids + tl.where(row_tile == row_tiles - 1, 0, row_tile))"),
        cpu=(V.WRONG_ANSWER,), cases=(2,)),
    _triton("nan_in_half_a_percent", "one element of 200 is NaN",
        (_STORE,
         '    result = tl.where((row[:, None] * 7 + n[None, :]) % 200 == 0, float("nan"), result)\n' + _STORE),
        cpu=(V.NON_FINITE,)),
    _triton("scale_rows_swapped", "row r is scaled by the scale of the row eight further",
        ("by_row = tl.load(scale_a + first_row + row)", "by_row = tl.load(scale_a + first_row + (row + 8) % BLOCK_M)"),
        cpu=(V.WRONG_ANSWER,)),
    _triton("offset_overflows", "addresses B with 32 bits",
        ("expert = tl.load(expert_ids + row_tile).to(tl.int64)", "expert = tl.load(expert_ids + row_tile)"),
        gpu=(V.WRONG_ANSWER, V.RUNTIME_ERROR), gpu_suite="judge", only="needs a B of more than 2^31 elements"),
    _triton("sum_in_float16", "rounds the sum to float16 before it is scaled",
        ("result = acc.to(tl.float32) * by_row", "result = acc.to(tl.float16).to(tl.float32) * by_row"),
        cpu=(V.NON_FINITE,)),
    _tilelang("weights_ignored", "leaves the routing weights out",
        ("* row_scale[i] * column_scale[j] * weight[i]", "* row_scale[i] * column_scale[j]"), cpu=(V.WRONG_ANSWER,)),
    _tilelang("rows_left_sorted", "writes the tiles in the order of their experts",
        ("            row_0 = tile * BLOCK_M\n",
         "            row_0 = (group * GROUP_M + in_group % group_tiles) * BLOCK_M\n"),
        cpu=(V.WRONG_ANSWER,), cases=(2,)),
    _tilelang("column_scales_reversed", "scales column n by the scale of another column of the tile",
        ("ScaleB[expert, column_0 + j]", "ScaleB[expert, column_0 + BLOCK_N - 1 - j]"), cpu=(V.WRONG_ANSWER,)),
    # A wave waits for its own copies alone: those of the first tile, with nothing to do meanwhile, come to the others
    # hundreds of cycles apart, and from then on nothing holds the waves of a block together.
    _cuda("missing_barrier", "no barrier between storing the tiles and multiplying them",
        ("        arch::sync_block();  // the tiles are there, and no wave reads those before them any more\n", ""),
        cpu=(V.RACE,), gpu=(V.WRONG_ANSWER, V.NONDETERMINISTIC), cases=(3,), gpu_suite="judge", gpu_cases=(1,)),
    _cuda("b_never_stored", "multiplies with a tile of B that nobody put into shared memory",
        ("        b_stage.wait(b_tile, tid);\n", ""),
        cpu=(V.UNINITIALISED_READ,), gpu=(), only="an NVIDIA GPU copies there asynchronously"),
    _cuda("count_not_atomic", "counts the tiles before one without an atomic addition",
        ("if (count > 0) atomicAdd(&before, count);", "if (count > 0) before += count;"),
        cpu=(V.RACE,), gpu=(V.UNWRITTEN_OUTPUT, V.WRONG_ANSWER, V.RUNTIME_ERROR), cases=(4,)),
    _cuda("expert_of_the_place", "takes the expert at the sorted place instead of the tile's own",
        ("expert = args.expert_ids[tile]",
         "expert = args.expert_ids[group * kTiling.group_m + in_group % group_tiles]"),
        cpu=(V.WRONG_ANSWER,), cases=(2,)),
)  # fmt: skip
