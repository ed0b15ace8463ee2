"""FlashAttention KV Cache Decode (problem 20005): the judge's package, rebuilt from its published description.

Stands alone. 12 cases: seqlen_k {1024, 4096, 8192, 16384} x batch {1, 4, 16}, 8 query and 8 KV heads, headdim 128,
pages of 16 tokens in random order, not causal, all caches full.
"""

import sys

import torch

CASES = [(seq, batch) for seq in (1024, 4096, 8192, 16384) for batch in (1, 4, 16)]
CASE_LABELS = tuple(f"b{batch} s{seq}" for seq, batch in CASES)
NUM_HEADS, NUM_HEADS_K, HEADDIM, PAGE_BLOCK_SIZE, SEQLEN_Q, CAUSAL = 8, 8, 128, 16, 1, 0
BASE_SEED = 20260720

_case_index = 0  # set by getTestCaseSize, read by genTestCase: the shapes do not hold seqlen_k


def getNumOfTestcases() -> int:
    return len(CASES)


def _read_case_index() -> int:
    try:
        case_id = int(input().split()[0])
    except (EOFError, ValueError, IndexError):
        return 0
    return case_id - 1 if 1 <= case_id <= len(CASES) else 0


def _timing(work: int) -> tuple:
    for limit, iters in ((1e5, 100), (1e6, 50), (1e7, 25), (1e8, 12), (1e9, 6)):
        if work < limit:
            return 3, iters
    return 3, 3


def getTestCaseSize():
    global _case_index
    _case_index = _read_case_index()
    seq, batch = CASES[_case_index]
    num_blocks = max(1024, 3 * batch * -(-seq // PAGE_BLOCK_SIZE))
    sizes = [
        (batch, SEQLEN_Q, NUM_HEADS, HEADDIM),
        (num_blocks, PAGE_BLOCK_SIZE, NUM_HEADS_K, HEADDIM),
        (num_blocks, PAGE_BLOCK_SIZE, NUM_HEADS_K, HEADDIM),
        (batch, SEQLEN_Q, NUM_HEADS, HEADDIM),
        (batch,),
        (batch, num_blocks // batch),
        *[()] * 9,
    ]
    return sizes, _timing(batch * seq * HEADDIM)


def genTestCase(testcase_sizes, device="cuda"):
    q_shape, k_shape, v_shape, out_shape, _, table_shape = testcase_sizes[:6]
    seq = CASES[_case_index][0]
    batch, seqlen_q, heads, headdim = q_shape
    num_blocks, page_size, kv_heads, _ = k_shape
    generator = torch.Generator(device).manual_seed(BASE_SEED + _case_index)
    q, k_cache, v_cache = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in (q_shape, k_shape, v_shape)
    )
    output = torch.empty(out_shape, device=device, dtype=torch.bfloat16)
    cache_seqlens = torch.full((batch,), seq, device=device, dtype=torch.int32)
    block_table = torch.randperm(num_blocks, generator=generator, device=device, dtype=torch.int32)
    block_table = block_table.reshape(table_shape)
    return [
        *(q, k_cache, v_cache, output, cache_seqlens, block_table),
        *(batch, seq, seqlen_q, heads, kv_heads, headdim, page_size, num_blocks, CAUSAL),
    ]


def baseline(
    q,
    k_cache_paged,
    v_cache_paged,
    output,
    cache_seqlens,
    block_table,
    batch_size,
    seqlen_k,
    seqlen_q,
    num_heads,
    num_heads_k,
    headdim,
    page_block_size,
    num_blocks,
    causal,
):
    from flash_attn import flash_attn_with_kvcache

    result = flash_attn_with_kvcache(
        q,
        k_cache_paged,
        v_cache_paged,
        None,
        None,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        causal=bool(causal),
        window_size=(-1, -1),
        rotary_interleaved=False,
        alibi_slopes=None,
        num_splits=1,
    )
    output.copy_(result)


def check(testcase_sizes, original_inputs, target_args, baseline_args, rtol=1e-2, atol=1e-2) -> bool:
    got, want = target_args[3], baseline_args[3]
    if got.shape != want.shape or got.dtype != want.dtype:
        print(f"output is {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}", file=sys.stderr)
        return False
    if not torch.allclose(got.float(), want.float(), rtol=rtol, atol=atol):
        worst = (got.float() - want.float()).abs().max().item()
        print(f"output differs from the baseline by up to {worst} (rtol {rtol}, atol {atol})", file=sys.stderr)
        return False
    return True
