// ragged_prefill for NVIDIA Hopper alone (sm_90a): TMA, wgmma, warp specialisation. Not the file to paste.
//
// One block per multiprocessor takes tiles of 128 packed query rows (tokens of one sequence x heads of one GQA group),
// longest first. Warpgroup 0 loads: Q once per tile, K and V through rings of two tiles, all by TMA. Warpgroups 1 and 2
// compute 64 rows each, and take turns (named barriers): while one has the matrix units the other does its softmax.
// Within a warpgroup the scores of the next tile and the output of this one are multiplied together, and the softmax
// of the next tile runs while the output's product still does. P never leaves the registers.
//
// nvcc 13.0, -O3, compute_90a: no spills. Times are in the README.

#include "../../common/hopper_prefill.cuh"

using namespace hopper::prefill;

constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // 128 * 24 + 256 * 240 <= 65536

template <int kDimQk, int kDimVo>
__global__ void __launch_bounds__(kThreads, 1)
    ragged_prefill(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const Args args) {
    using C = Config<kDimQk, kDimVo>;
    constexpr int kBlockN = C::kBlockN;
    extern __shared__ char shared[];
    const Ring<C> ring(shared);
    const auto work = [&](int item) {
        return work_of<C>(args, item, [](int, int first, int last) { return last - first; });
    };
    if (ring.warpgroup > 0) {
        hopper::set_registers<kConsumerRegisters, true>();
        return compute<C>(args, ring, work);
    }

    hopper::set_registers<kProducerRegisters, false>();
    if (threadIdx.x > 0) return;
    int loaded = 0, done = 0;  // tiles of keys, of values; tiles of rows
    for (int round = 0; item_of(round) < args.items; ++round) {
        const Work w = work(item_of(round));
        if (w.blocks <= 0) continue;
        ring.load_q(&q_map, w, done++);
        for (int n = w.blocks - 1; n >= 0; --n, ++loaded) {
            const int stage = loaded % kStages, parity = (loaded / kStages & 1) ^ 1, row = w.kv_begin + n * kBlockN;
            hopper::barrier_wait(ring.k_empty + stage, parity);
            hopper::barrier_expect(ring.k_full + stage, C::kBytesK);
            for (int slice = 0; slice < C::kSlicesQk; ++slice)
                hopper::tma_load(ring.k_tile(stage) + slice * kBlockN * 128, &k_map, ring.k_full + stage, 64 * slice,
                                 w.kv_head, row);
            hopper::barrier_wait(ring.v_empty + stage, parity);
            hopper::barrier_expect(ring.v_full + stage, C::kBytesV);
            for (int slice = 0; slice < C::kSlicesVo; ++slice)
                hopper::tma_load(ring.v_tile(stage) + slice * kBlockN * 128, &v_map, ring.v_full + stage, 64 * slice,
                                 w.kv_head, row);
        }
    }
}

// ---- Host ----------------------------------------------------------------------------------------------------------

template <int kDimQk, int kDimVo>
void run(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, int64_t seq_len, Args args) {
    using C = Config<kDimQk, kDimVo>;
    CUtensorMap q_map, k_map, v_map;
    const cuuint64_t heads = args.num_kv_heads, k_rows = hopper::bytes_from(k) / (heads * kDimQk * 2),
                     v_rows = hopper::bytes_from(v) / (heads * kDimVo * 2);
    if (!set_work<C>(args, &q_map, q, seq_len) ||
        !hopper::make_map<3>(&k_map, k, 2, {kDimQk, heads, k_rows}, {64, 1, C::kBlockN}) ||
        !hopper::make_map<3>(&v_map, v, 2, {kDimVo, heads, v_rows}, {64, 1, C::kBlockN})) {
        fprintf(stderr, "run_kernel: no tensor map for q, k, %lld rows, and v\n", (long long)k_rows);
        return;
    }
    launch<C>(ragged_prefill<kDimQk, kDimVo>, args.items, q_map, k_map, v_map, args);
}

extern "C" void run_kernel(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v,
                           __nv_bfloat16* output, const int32_t* qo_indptr, const int32_t* kv_indptr,
                           int64_t batch_size, int64_t seq_len, int64_t num_qo_heads, int64_t num_kv_heads,
                           int64_t head_dim_qk, int64_t head_dim_vo, int64_t causal) {
    if (batch_size == 0 || seq_len == 0) return;
    Args args{output, qo_indptr, kv_indptr};
    if (!set_heads(args, batch_size, num_qo_heads, num_kv_heads, causal)) return;
    if (head_dim_qk == 128 && head_dim_vo == 128) return run<128, 128>(q, k, v, seq_len, args);
    if (head_dim_qk == 192 && head_dim_vo == 128) return run<192, 128>(q, k, v, seq_len, args);
    if (head_dim_qk == 256 && head_dim_vo == 256) return run<256, 256>(q, k, v, seq_len, args);
    if (head_dim_qk == 64 && head_dim_vo == 64) return run<64, 64>(q, k, v, seq_len, args);
    fprintf(stderr, "run_kernel: head dims (%lld, %lld): only (64, 64), (128, 128), (192, 128), (256, 256) are there\n",
            (long long)head_dim_qk, (long long)head_dim_vo);
}
