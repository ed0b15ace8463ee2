"""mla_decode gone wrong. The cases are those of tiny_config.py that show it."""

from harness.mutants import Mutant
from harness.verdict import Verdict as V

JUDGE_CASES = {"mla_decode": (1, 4)}  # h64 b1 s1024, h64 b1 s16384


def _triton(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "mla_decode", "triton", mistake, changes, **more)


def _tilelang(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "mla_decode", "tilelang", mistake, changes, **more)


def _cuda(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "mla_decode", "cuda", mistake, changes, **more)


MUTANTS = (
    _triton("scale_of_512", "scales by 1/sqrt(512) instead of 1/sqrt(576)",
        ("math.sqrt(head_dim_ckv + head_dim_kpe)", "math.sqrt(head_dim_ckv)"), cpu=(V.WRONG_ANSWER,)),
    _triton("rope_ignored", "leaves the positional part out of the scores",
        ("scores_v * scale_log2 + scores_r * scale_log2", "scores_v * scale_log2"), cpu=(V.WRONG_ANSWER,)),
    _triton("last_token_dropped", "every sequence ends one token early",
        ("    kv_len = tl.load(kv_lens + sequence)\n", "    kv_len = tl.load(kv_lens + sequence) - 1\n"),
        cpu=(V.WRONG_ANSWER,)),
    _triton("row_table_ignored", "takes logical page i for physical page i",
        ("token_row = page.to(tl.int64) * PAGE_SIZE",
         "token_row = (tl.load(kv_indptr + sequence) + token // PAGE_SIZE).to(tl.int64) * PAGE_SIZE"),
        cpu=(V.NON_FINITE, V.WRONG_ANSWER)),
    _triton("kv_lens_ignored", "reads all rows that a sequence has in the table, reserved ones too",
        ("    kv_len = tl.load(kv_lens + sequence)\n",
         "    kv_len = (tl.load(kv_indptr + sequence + 1) - tl.load(kv_indptr + sequence)) * PAGE_SIZE\n"),
        cpu=(V.NON_FINITE,), cases=(6,)),
    _triton("splits_averaged", "joins the parts of a sequence without their weights",
        ("        weight = tl.exp2(weight - new_maximum)\n",
         "        weight = tl.where(valid, 1.0, 0.0)\n        new_maximum = maximum\n"),
        cpu=(V.WRONG_ANSWER,), cases=(3,), gpu_suite="judge", gpu_cases=(1,)),
    _tilelang("scale_of_512", "scales by 1/sqrt(512) instead of 1/sqrt(576)",
        ("math.sqrt(DIM_CKV + DIM_KPE)", "math.sqrt(DIM_CKV)"), cpu=(V.WRONG_ANSWER,)),
    _tilelang("rope_ignored", "leaves the positional part out of the scores",
        ("T.gemm(R_shared, Kr_shared, S, transpose_B=True, clear_accum=True, policy=policy)", "T.fill(S, 0)"),
        ("T.gemm(R_shared, Kr_other, S, transpose_B=True, clear_accum=True, policy=policy)", "T.fill(S, 0)"),
        cpu=(V.WRONG_ANSWER,)),
    _tilelang("last_token_dropped", "every sequence ends one token early",
        ("                S[i, j] = T.if_then_else(token_0 + n * TURN + j < kv_len, S[i, j]",
         "                S[i, j] = T.if_then_else(token_0 + n * TURN + j < kv_len - 1, S[i, j]"),
        ("TURN + BLOCK_N + j < kv_len, S[i, j]", "TURN + BLOCK_N + j < kv_len - 1, S[i, j]"),
        cpu=(V.WRONG_ANSWER,)),
    _cuda("scale_of_512", "scales by 1/sqrt(512) instead of 1/sqrt(576)",
        ("sqrtf(kDimCkv + kDimKpe)", "sqrtf(kDimCkv)"), cpu=(V.WRONG_ANSWER,)),
)  # fmt: skip
