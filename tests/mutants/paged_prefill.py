"""paged_prefill gone wrong. The cases are those of tiny_config.py that show it."""

from harness.mutants import Mutant
from harness.verdict import Verdict as V

JUDGE_CASES = {"paged_prefill": (1, 4)}  # b1 s1024, b1 s16384


def _triton(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "paged_prefill", "triton", mistake, changes, **more)


def _tilelang(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "paged_prefill", "tilelang", mistake, changes, **more)


def _cuda(name: str, mistake: str, *changes: tuple[str, str], **more: object) -> Mutant:
    return Mutant(name, "paged_prefill", "cuda", mistake, changes, **more)


_DEAD = (V.NON_FINITE, V.WRONG_ANSWER)  # dead slots hold NaN, and so do spare pages; some pages are merely others'

MUTANTS = (
    _triton("last_page_dropped", "leaves out the last page of every sequence",
        ("(num_pages - 1) * PAGE + tl.load(last_page_len + sequence), 0)", "(num_pages - 1) * PAGE, 0)"),
        cpu=(V.WRONG_ANSWER,)),
    _triton("last_page_taken_as_full", "reads the slots behind the last token of the last page",
        ("(num_pages - 1) * PAGE + tl.load(last_page_len + sequence), 0)", "num_pages * PAGE, 0)"),
        cpu=(V.NON_FINITE,)),
    _triton("page_table_ignored", "takes logical page i for physical page i",
        ("pages = tl.load(page_ids + first_key // PAGE, mask=first_key < kv_len, other=0)",
         "pages = page_start + first_key // PAGE"),
        ("pages = tl.load(page_ids + next_page, mask=next_key < kv_len, other=0)", "pages = page_start + next_page"),
        cpu=_DEAD),
    _triton("wrong_kv_head", "takes K and V from another head",
        ("kv_base = kv_data + kv_head * DIM", "kv_base = kv_data + (HEADS_KV - 1 - kv_head) * DIM"),
        cpu=(V.WRONG_ANSWER,)),
    _triton("twentieth_key_dropped", "5 % of the keys are masked out",
        ("            # ---- online softmax\n",
         '            scores = tl.where(((n + key) % 20 == 19)[None, :], float("-inf"), scores)\n'
         "            # ---- online softmax\n"),
        cpu=(V.WRONG_ANSWER,), cases=(2,)),
    _tilelang("last_page_taken_as_full", "reads the slots behind the last token of the last page",
        ("(pages - 1) * page_size + LastPageLen[b], 0)", "pages * page_size, 0)"), cpu=(V.NON_FINITE,)),
    _tilelang("page_table_ignored", "takes logical page i for physical page i",
        ("KV[KvIndices[page_0 + (token_0 + r) // page_size], part,", "KV[page_0 + (token_0 + r) // page_size, part,"),
        cpu=_DEAD),
    _tilelang("unpacked_once", "keeps the keys and values that the first call unpacked",
        ("_unpackers = {}  #", "_unpacked = []\n_unpackers = {}  #"),
        ("    _unpackers[unpacker](kv_data,",
         "    _unpacked.append(unpacker)\n    if len(_unpacked) == 1:\n        _unpackers[unpacker](kv_data,"),
        cpu=(V.WRONG_ANSWER,)),
    _tilelang("k_for_v", "multiplies P with K",
        ("Runs[num_kv_heads + kv_head, first_row", "Runs[kv_head, first_row"), cpu=(V.WRONG_ANSWER,)),
    _cuda("last_page_taken_as_full", "reads the slots behind the last token of the last page",
        ("(num_pages - 1) * args.page_size + args.last_page_len[sequence] : 0;", "num_pages * args.page_size : 0;"),
        cpu=(V.NON_FINITE,)),
    _cuda("page_table_ignored", "takes logical page i for physical page i",
        ("args.kv_indices[page_begin + page] : 0;", "page_begin + page : 0;"),
        cpu=_DEAD),
    # On a GPU the first step shows it: Q too is read there when a wave's own share of it has come.
    _cuda("missing_barrier", "no barrier between storing K and reading it, nor between reading V and fetching the next",
        ("        arch::sync_block();  // K is there, and no wave reads the last V any more\n", ""),
        cpu=(V.RACE,), gpu=(V.WRONG_ANSWER, V.NON_FINITE, V.NONDETERMINISTIC), cases=(2,),
        gpu_suite="live", gpu_cases=(1,)),
)  # fmt: skip
