"""A Triton submission of ragged_prefill whose run_kernel fails before it launches anything."""


def run_kernel(
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
    print("in run_kernel")
    return num_qo_heads // (head_dim_qk - head_dim_qk)
