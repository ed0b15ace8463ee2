"""ragged_prefill gone wrong. The cases are those of tiny_config.py that show it."""

from harness.mutants import Mutant
from harness.verdict import Verdict as V

JUDGE_CASES = {"ragged_prefill": (1, 4)}  # b1 s1024, b1 s16384


def _triton(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "ragged_prefill", "triton", mistake, changes, **more)


def _tilelang(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "ragged_prefill", "tilelang", mistake, changes, **more)


def _cuda(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "ragged_prefill", "cuda", mistake, changes, **more)


_DIVIDE = "    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]\n"
_DOT = "            scores = tl.dot(q_a, k_a)\n"
_SOFTMAX = "            # ---- online softmax\n"

_TRITON = (
    _triton("zeros", "writes 0 everywhere", (_DIVIDE, "    acc = acc * 0.0\n"), cpu=(V.WRONG_ANSWER,)),
    _triton(
        "constant", "writes 0.5, what V averages to", (_DIVIDE, "    acc = acc * 0.0 + 0.5\n"), cpu=(V.WRONG_ANSWER,)
    ),
    _triton(
        "nan", "divides 0 by 0", (_DIVIDE, "    acc = acc * 0.0 / (total - total)[:, None]\n"), cpu=(V.NON_FINITE,)
    ),
    _triton(
        "prefix_mean",
        "ignores Q and K: every visible key weighs the same",
        (_DOT, _DOT + "            scores = scores * 0.0\n"),
        cpu=(V.WRONG_ANSWER,),
    ),
    _triton(
        "mean_after_128_keys",
        "ignores Q and K for rows that see more than 128 keys",
        (
            _SOFTMAX,
            "            scores = tl.where((visible[:, None] > 128) & (scores > -1e30), 0.0, scores)\n" + _SOFTMAX,
        ),
        cpu=(V.WRONG_ANSWER,),
        cases=(6,),
    ),
    _triton(
        "mean_after_1024_keys",
        "ignores Q and K for rows that see more than 1024 keys",
        (
            _SOFTMAX,
            "            scores = tl.where((visible[:, None] > 1024) & (scores > -1e30), 0.0, scores)\n" + _SOFTMAX,
        ),
        gpu=(V.WRONG_ANSWER,),
        gpu_suite="judge",
        gpu_cases=(2,),
        only="needs more keys than the tiny suite has",
    ),
    _triton(
        "last_key_dropped",
        "every sequence ends one key early",
        ("visible = tl.zeros([BLOCK_M], tl.int32) + kv_len ", "visible = tl.zeros([BLOCK_M], tl.int32) + kv_len - 1 "),
        cpu=(V.WRONG_ANSWER,),
    ),
    _triton(
        "twentieth_key_dropped",
        "5 % of the keys are masked out",
        (
            _SOFTMAX,
            '            scores = tl.where(((n + key) % 20 == 19)[None, :], float("-inf"), scores)\n' + _SOFTMAX,
        ),
        cpu=(V.WRONG_ANSWER,),
        cases=(2,),
    ),
    _triton(
        "wrong_q_head",
        "takes Q from the heads of another group",
        (
            "    q_base = q + first_head * DIM_QK\n",
            "    other_head = (q_start + tile_token).to(tl.int64) * HEADS_QO + (HEADS_KV - 1 - kv_head) * GROUP\n"
            "    q_base = q + other_head * DIM_QK\n",
        ),
        cpu=(V.WRONG_ANSWER,),
    ),
    _triton(
        "wrong_kv_head",
        "takes K and V from another head",
        (
            "kv_start.to(tl.int64) * HEADS_KV + kv_head\n",
            "kv_start.to(tl.int64) * HEADS_KV + (HEADS_KV - 1 - kv_head)\n",
        ),
        cpu=(V.WRONG_ANSWER,),
    ),
    _triton(
        "top_left_causal",
        "the causal diagonal starts at the first key instead of ending at the last",
        ("tl.maximum(0, kv_len - q_len + last_token // GROUP + 1)", "last_token // GROUP + 1"),
        ("tl.maximum(0, kv_len - q_len + tile_token + 1)", "tile_token + 1"),
        ("tl.minimum(visible, kv_len - q_len + token + 1)", "tl.minimum(visible, token + 1)"),
        cpu=(V.WRONG_ANSWER,),
        cases=(3,),
    ),
    _triton(
        "seq_len_for_indptr",
        "sequence b starts at row b * seq_len",
        ("    batch_size,\n    scale_log2,\n", "    batch_size,\n    seq_len,\n    scale_log2,\n"),
        ("        batch_size,\n        1.44", "        batch_size,\n        seq_len,\n        1.44"),
        ("    kv_first_head = kv_start.to", "    kv_start = sequence * seq_len\n    kv_first_head = kv_start.to"),
        cpu=(V.OUT_OF_BOUNDS, V.WRONG_ANSWER),
        gpu=(V.NON_FINITE, V.WRONG_ANSWER),
    ),
    _triton(
        "no_rescale",
        "keeps the accumulator as it is when the maximum rises",
        ("            acc = acc * rescale[:, None]\n", ""),
        cpu=(V.WRONG_ANSWER,),
        cases=(2,),
    ),
    _triton(
        "sum_not_rescaled",
        "keeps the sum as it is when the maximum rises",
        ("total = total * rescale + tl.sum(p, axis=1)", "total = total + tl.sum(p, axis=1)"),
        cpu=(V.WRONG_ANSWER,),
        cases=(2,),
    ),
    _triton(
        "scale_of_dim_vo",
        "scales by 1/sqrt(head_dim_vo)",
        ("/ math.sqrt(head_dim_qk),", "/ math.sqrt(head_dim_vo),"),
        cpu=(V.WRONG_ANSWER,),
        cases=(8,),
    ),
    _triton(
        "tail_row_unwritten",
        "leaves the last token of every sequence unwritten",
        ("    out_mask = row_valid[:, None]", "    out_mask = (row < (q_len - 1) * GROUP)[:, None]"),
        cpu=(V.UNWRITTEN_OUTPUT,),
        cases=(7,),
    ),
    _triton(
        "writes_past_the_end",
        "stores eight rows more than there are",
        ("    out_mask = row_valid[:, None]", "    out_mask = (row < q_len * GROUP + 8)[:, None]"),
        cpu=(V.OUT_OF_BOUNDS,),
        cases=(7,),
    ),
    _triton(
        "reads_past_the_end",
        "loads V without a mask, so that 0 * NaN comes in from behind the tensor",
        (
            "v_tile = tl.load(v_base + v_offset, mask=key_valid[:, None], other=0.0)",
            "v_tile = tl.load(v_base + v_offset)",
        ),
        cpu=(V.OUT_OF_BOUNDS,),
        gpu=(V.NON_FINITE,),
        cases=(7,),
    ),
    _triton(
        "float16_written",
        "writes the bits of float16 into bfloat16",
        ("acc.to(output.dtype.element_ty)", "acc.to(tl.float16).to(tl.bfloat16, bitcast=True)"),
        cpu=(V.WRONG_ANSWER,),
    ),
    _triton(
        "coarse_p",
        "rounds P to a sixteenth before it multiplies V",
        (
            "acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)",
            "acc = tl.dot((tl.floor(p * 16.0 + 0.5) / 16.0).to(v_tile.dtype), v_tile, acc)",
        ),
        cpu=(V.WRONG_ANSWER,),
    ),
)

_TILELANG = (
    _tilelang(
        "wrong_kv_head",
        "maps query head h to KV head h % num_kv_heads instead of h // group",
        ("kv_head = head_0 // group", "kv_head = head_0 % num_kv_heads"),
        cpu=(V.WRONG_ANSWER,),
    ),
    _tilelang(
        "top_left_causal",
        "the causal diagonal starts at the first key instead of ending at the last",
        ("reach = T.min(kv_len, kv_len - q_len + token_0 + tokens)", "reach = T.min(kv_len, token_0 + tokens)"),
        ("unmasked = T.min(kv_len, kv_len - q_len + token_0 + 1)", "unmasked = T.min(kv_len, token_0 + 1)"),
        ("n * BLOCK_N + j <= kv_len - q_len + token_0 + i // pack", "n * BLOCK_N + j <= token_0 + i // pack"),
        cpu=(V.WRONG_ANSWER,),
        cases=(3,),
    ),
    _tilelang(
        "last_key_visible_to_none",
        "masks the diagonal itself",
        ("n * BLOCK_N + j <= kv_len - q_len", "n * BLOCK_N + j < kv_len - q_len"),
        cpu=(V.WRONG_ANSWER,),
    ),
    _tilelang(
        "no_rescale",
        "keeps the accumulator as it is when the maximum rises",
        ("                    acc[i, d] *= rescale[i]\n", "                    acc[i, d] *= 1.0\n"),
        cpu=(V.WRONG_ANSWER,),
        cases=(6,),
    ),
    _tilelang(
        "prefix_mean",
        "ignores Q and K: every visible key weighs the same",
        (
            "S[i, j] = T.exp2(S[i, j] * factor - row_max[i] * factor)",
            "S[i, j] = T.if_then_else(S[i, j] > -1e30, 1.0, 0.0)",
        ),
        cpu=(V.WRONG_ANSWER,),
    ),
    _tilelang(
        "second_half_unwritten",
        "writes the first half of every row",
        (
            "for i, d in T.Parallel(BLOCK_M, dim_vo):\n                if token_0",
            "for i, d in T.Parallel(BLOCK_M, dim_vo // 2):\n                if token_0",
        ),
        cpu=(V.UNWRITTEN_OUTPUT,),
    ),
)

_CUDA = (
    # See paged_prefill's for how a GPU shows it.
    _cuda("missing_barrier", "no barrier between storing K and reading it, nor between reading V and fetching the next",
        ("        arch::sync_block();  // K is there, and no wave reads the last V any more\n", ""),
        cpu=(V.RACE,), gpu=(V.WRONG_ANSWER, V.NON_FINITE, V.NONDETERMINISTIC), cases=(2,),
        gpu_suite="live", gpu_cases=(1,)),
    _cuda("shuffles_over_32_lanes", "reduces a row within 32 lanes where 64 hold it",
        ("    x = op(x, __shfl_xor_sync(~0ull, x, 32));\n", ""),
        cpu=(V.WRONG_ANSWER,), gpu=(), only="that code is for waves of 64 lanes"),
    _cuda("shared_memory_96_kib", "asks for 32 KiB more shared memory than a block of the C500 has",
        ("C::kBytesShared>>>(args)", "(96 << 10)>>>(args)"),
        ("MaxDynamicSharedMemorySize, C::kBytesShared)", "MaxDynamicSharedMemorySize, 96 << 10)"),
        cpu=(V.RESOURCE_LIMIT,), gpu=(), only="an H200 has 227 KiB"),
    _cuda("v_never_stored", "multiplies with a V tile that nobody put into shared memory",
        ("            v_stage.wait(v_now, tid);\n", ""),
        cpu=(V.WRONG_ANSWER,), gpu=(), only="an NVIDIA GPU copies there asynchronously"),  # Q was there before
    _cuda("writes_past_the_end", "stores four rows more than there are",
        ("if (row >= tile_rows) continue;", "if (row >= tile_rows + 4) continue;"), cpu=(V.OUT_OF_BOUNDS,), cases=(7,)),
    _cuda("reads_past_the_end", "loads whole tiles of V, so that 0 * NaN comes in from behind the tensor",
        ("v_stage.begin(tile, tid, visible_to_any - key0, rows);", "v_stage.begin(tile, tid, kBlockN, rows);"),
        cpu=(V.OUT_OF_BOUNDS,), gpu=(V.NON_FINITE,), cases=(7,)),
    _cuda("no_rescale", "keeps the accumulator as it is when the maximum rises",
        ("arch::mul2(&o[f][d][c].v[i], shrink[Acc<float>::slot(i)]);", "arch::mul2(&o[f][d][c].v[i], 1.0f);"),
        cpu=(V.WRONG_ANSWER,), cases=(6,)),
    _cuda("top_left_causal", "the causal diagonal starts at the first key instead of ending at the last",
        ("kv_len - q_len + 1 + packed.token(row)", "1 + packed.token(row)"), cpu=(V.WRONG_ANSWER,), cases=(3,)),
    _cuda("kv_begin_of_the_queries", "finds K and V by the offsets of the queries",
        ("const int kv_begin = args.kv_indptr[sequence],", "const int kv_begin = args.qo_indptr[sequence],"),
        cpu=(V.WRONG_ANSWER, V.OUT_OF_BOUNDS), gpu=(V.WRONG_ANSWER, V.NON_FINITE), cases=(3,)),
    _cuda("swizzle_forgotten", "stores K in another order of chunks than it is read in",
        ("k_stage.wait(k_now, tid);", "k_stage.wait(k_now, tid ^ 1);"),
        cpu=(V.WRONG_ANSWER,), gpu=(), only="an NVIDIA GPU copies there asynchronously"),
)  # fmt: skip

MUTANTS = (*_TRITON, *_TILELANG, *_CUDA)
