"""FlashInfer Ragged Prefill (problem 20001): the judge's package, rebuilt from its published description.

Stands alone. 12 cases: batch {1, 4, 16} x seq_len {1024, 4096, 8192, 16384}, 32 query and 4 KV heads, dims 128 / 128,
causal, all lengths equal.
"""

import sys

import torch

CASES = [(batch, seq) for batch in (1, 4, 16) for seq in (1024, 4096, 8192, 16384)]
CASE_LABELS = tuple(f"b{batch} s{seq}" for batch, seq in CASES)
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM_QK, HEAD_DIM_VO, CAUSAL = 32, 4, 128, 128, 1
BASE_SEED = 20260610
WORKSPACE_BYTES = 128 * 1024 * 1024

DESIGNED_VRAM_SIZE = 48  # GiB
# q, k, v, output, qo_indptr, kv_indptr, then seven integers
INPUT_CLASS = ["INPUT"] * 3 + ["OUTPUT"] + ["INPUT"] * 9

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
    total = batch * seq
    sizes = [
        (total, NUM_QO_HEADS, HEAD_DIM_QK),
        (total, NUM_KV_HEADS, HEAD_DIM_QK),
        (total, NUM_KV_HEADS, HEAD_DIM_VO),
        (total, NUM_QO_HEADS, HEAD_DIM_VO),
        (batch + 1,),
        (batch + 1,),
        *[()] * 7,
    ]
    return sizes, _timing(batch * seq * (HEAD_DIM_QK + HEAD_DIM_VO))


def genTestCase(testcase_sizes, device="cuda"):
    q_shape, k_shape, v_shape, out_shape, indptr_shape = testcase_sizes[:5]
    batch = indptr_shape[0] - 1
    seq = q_shape[0] // batch
    generator = torch.Generator(device).manual_seed(BASE_SEED + _case_index)
    q, k, v = (
        torch.rand(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in (q_shape, k_shape, v_shape)
    )
    output = torch.empty(out_shape, device=device, dtype=torch.bfloat16)
    qo_indptr = torch.arange(batch + 1, device=device, dtype=torch.int32) * seq
    kv_indptr = qo_indptr.clone()
    return [
        *(q, k, v, output, qo_indptr, kv_indptr),
        *(batch, seq, q_shape[1], k_shape[1], q_shape[2], v_shape[2], CAUSAL),
    ]


def baseline(
    q,
    k,
    v,
    output,
    qo_indptr,
    kv_indptr,
    batch_size,
    seq_len,
    num_qo_heads,
    num_kv_heads,
    head_dim_qk,
    head_dim_vo,
    causal,
):
    import flashinfer

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, kv_layout="NHD", backend="auto")
    wrapper.plan(
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo=head_dim_vo,
        causal=bool(causal),
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    wrapper.run(q, k, v, out=output)


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


def getWorkload(testcase_sizes, timing=None) -> dict:
    q_shape, k_shape, v_shape, out_shape, indptr_shape = testcase_sizes[:5]
    batch = indptr_shape[0] - 1
    seq = q_shape[0] // batch
    bf16 = sum(rows * heads * dim for rows, heads, dim in (q_shape, k_shape, v_shape, out_shape))
    return {
        "flops": batch * seq * seq * q_shape[1] * (q_shape[2] + v_shape[2]),
        "memory_bytes": 2 * bf16 + 4 * 2 * indptr_shape[0],
        "dtype": "bf16",
    }
