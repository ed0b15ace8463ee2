"""kvcache_decode gone wrong. The cases are those of tiny_config.py that show it."""

from harness.mutants import Mutant
from harness.verdict import Verdict as V

JUDGE_CASES = {"kvcache_decode": (1, 10)}  # b1 s1024, b1 s16384


def _triton(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "kvcache_decode", "triton", mistake, changes, **more)


def _tilelang(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "kvcache_decode", "tilelang", mistake, changes, **more)


def _cuda(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "kvcache_decode", "cuda", mistake, changes, **more)


_BY_TABLE = " " * 28 + "BlockTable[b, (start + n * BLOCK_N + j) // page_size],\n"
_ROW = f"\n{_BY_TABLE}{' ' * 28}(start + n * BLOCK_N + j) % page_size,\n{' ' * 28}"
_END = "    end = tl.minimum(begin + split_len, kv_len)\n"

MUTANTS = (
    _triton("last_block_dropped", "leaves out the last block of every sequence",
        (_END, "    end = tl.minimum(begin + split_len, (kv_len - 1) // PAGE * PAGE)\n"), cpu=(V.WRONG_ANSWER,)),
    _triton("last_block_taken_as_full", "reads the slots behind the last token of the last block",
        (_END, "    end = tl.minimum(begin + split_len, tl.cdiv(kv_len, PAGE) * PAGE)\n"), cpu=(V.NON_FINITE,)),
    _triton("gqa_map_missing", "takes query head h for KV head h % num_heads_k",
        ("k_base = k_cache + kv_head * DIM", "k_base = k_cache + first_head % HEADS_KV * DIM"),
        ("v_base = v_cache + kv_head * DIM", "v_base = v_cache + first_head % HEADS_KV * DIM"),
        cpu=(V.WRONG_ANSWER,), cases=(3,)),
    _triton("table_row_too_short", "takes a row of the block table to be as wide as the sequence needs",
        ("page_ids = block_table + sequence * table_width",
         "page_ids = block_table + sequence * tl.cdiv(kv_len, PAGE)"),
        cpu=(V.NON_FINITE, V.WRONG_ANSWER), cases=(3,)),
    _triton("splits_averaged", "joins the parts of a sequence without their weights",
        ("                share = tl.exp2(lse - new_most)\n",
         "                share = tl.where(part_valid, 1.0, 0.0)\n                new_most = most\n"),
        cpu=(V.WRONG_ANSWER,), cases=(2,), gpu_suite="judge", gpu_cases=(1,)),
    # On a GPU all blocks finish close together: the last but one would find nearly all parts there.
    _triton("merged_too_early", "merges in the first block to finish",
        ("== used_splits - 1:", "== 0:"), ("            tl.store(tickets + work, 0)  # for the next call\n", ""),
        cpu=(V.NON_FINITE, V.WRONG_ANSWER, V.UNWRITTEN_OUTPUT), cases=(2,), gpu_suite="judge", gpu_cases=(1,)),
    _triton("ticket_not_put_back", "leaves the tickets as they are, so that a second call never merges",
        ("            tl.store(tickets + work, 0)  # for the next call\n", ""),
        cpu=(V.UNWRITTEN_OUTPUT,), cases=(2,), gpu_suite="judge", gpu_cases=(1,)),
    _tilelang("first_kv_head_for_all", "every query head reads K and V of KV head 0",
        (f"                        K[{_ROW}kv_head,\n", f"                        K[{_ROW}0,\n"),
        (f"                        V[{_ROW}kv_head,\n", f"                        V[{_ROW}0,\n"),
        cpu=(V.WRONG_ANSWER,), cases=(3,)),
    _tilelang("half_of_the_splits", "joins only the first half of the parts of a sequence",
        ("weight[s] = T.if_then_else(s < num_splits, Lse", "weight[s] = T.if_then_else(s < num_splits // 2, Lse"),
        cpu=(V.WRONG_ANSWER,), cases=(2,), gpu_suite="judge", gpu_cases=(1,)),
    _cuda("tail_not_masked", "gives the slots behind the last token a weight",
        ("score[u][h] = valid ? x : -INFINITY;", "score[u][h] = x;"), cpu=(V.WRONG_ANSWER, V.NON_FINITE)),
)  # fmt: skip
