"""FlashInfer Paged Prefill (problem 20002): the judge's package, rebuilt from its published description.

Stands alone. 12 cases: batch {1, 4, 16} x seq_len {1024, 4096, 8192, 16384}, 32 query and 4 KV heads, head_dim 128,
pages of 16 tokens in order, not causal, all lengths equal.
"""

import sys

import torch

CASES = [(batch, seq) for batch in (1, 4, 16) for seq in (1024, 4096, 8192, 16384)]
CASE_LABELS = tuple(f"b{batch} s{seq}" for batch, seq in CASES)
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_BLOCK_SIZE, CAUSAL = 32, 4, 128, 16, 0
BASE_SEED = 20260620
WORKSPACE_BYTES = 128 * 1024 * 1024

_case_index = 0  # set by getTestCaseSize, read by genTestCase


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
    batch, seq = CASES[_case_index]
    pages = batch * (seq // PAGE_BLOCK_SIZE)
    sizes = [
        (batch * seq, NUM_QO_HEADS, HEAD_DIM),
        (pages, 2, PAGE_BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM),
        (batch * seq, NUM_QO_HEADS, HEAD_DIM),
        (batch + 1,),
        (batch + 1,),
        (pages,),
        (batch,),
        *[()] * 7,
    ]
    return sizes, _timing(batch * seq * HEAD_DIM)


def genTestCase(testcase_sizes, device="cuda"):
    q_shape, kv_shape, out_shape, indptr_shape = testcase_sizes[:4]
    batch = indptr_shape[0] - 1
    seq = q_shape[0] // batch
    pages, _, page_size, kv_heads, head_dim = kv_shape
    generator = torch.Generator(device).manual_seed(BASE_SEED + _case_index)
    q = torch.rand(q_shape, generator=generator, device=device, dtype=torch.bfloat16)
    kv_data = torch.randn(kv_shape, generator=generator, device=device, dtype=torch.bfloat16)
    output = torch.empty(out_shape, device=device, dtype=torch.bfloat16)
    steps = torch.arange(batch + 1, device=device, dtype=torch.int32)
    qo_indptr, kv_indptr = steps * seq, steps * (pages // batch)
    kv_indices = torch.arange(pages, device=device, dtype=torch.int32)
    last_page_len = torch.full((batch,), page_size, device=device, dtype=torch.int32)
    return [
        *(q, kv_data, output, qo_indptr, kv_indptr, kv_indices, last_page_len),
        *(batch, seq, q_shape[1], kv_heads, head_dim, page_size, CAUSAL),
    ]


def baseline(
    q,
    kv_data,
    output,
    qo_indptr,
    kv_indptr,
    kv_indices,
    last_page_len,
    batch_size,
    seq_len,
    num_qo_heads,
    num_kv_heads,
    head_dim,
    page_block_size,
    causal,
):
    import flashinfer

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD", backend="auto")
    wrapper.plan(
        qo_indptr,
        kv_indptr,
        kv_indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_block_size,
        causal=bool(causal),
        q_data_type=q.dtype,
        kv_data_type=kv_data.dtype,
    )
    wrapper.run(q, kv_data, out=output)


def check(testcase_sizes, original_inputs, target_args, baseline_args, rtol=1e-2, atol=1e-2) -> bool:
    got, want = target_args[2], baseline_args[2]
    if got.shape != want.shape or got.dtype != want.dtype:
        print(f"output is {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}", file=sys.stderr)
        return False
    if not torch.allclose(got.float(), want.float(), rtol=rtol, atol=atol):
        worst = (got.float() - want.float()).abs().max().item()
        print(f"output differs from the baseline by up to {worst} (rtol {rtol}, atol {atol})", file=sys.stderr)
        return False
    return True
