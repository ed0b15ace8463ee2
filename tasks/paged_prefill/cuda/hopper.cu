// paged_prefill for NVIDIA Hopper alone (sm_90a): TMA, wgmma, warp specialisation. Not the file to paste.
//
// One block per multiprocessor takes tiles of 128 packed query rows (tokens of one sequence x heads of one GQA group),
// longest first. Warpgroup 0 loads: Q once per tile, K and V page by page through rings of two tiles, all by TMA.
// Warpgroups 1 and 2 compute 64 rows each, and take turns (named barriers): while one has the matrix units the other
// does its softmax. Within a warpgroup the scores of the next tile and the output of this one are multiplied together,
// and the softmax of the next tile runs while the output's product still does. P never leaves the registers.
//
// nvcc 13.0, -O3, compute_90a: no spills. Times are in the README.

#include "../../common/hopper_prefill.cuh"

using namespace hopper::prefill;

constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // 128 * 56 + 256 * 224 <= 65536

constexpr int kAtOnce = 8;  // loads of a page's part begun one after another

struct Pages {
    const int32_t *indices, *last_len;
    int size, unit;  // unit: tokens of a page that one load takes, the greatest that divides the tile of keys too
};

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    paged_prefill(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap kv_map,
                  const Args args, const Pages pages) {
    using C = Config<kDim, kDim>;
    constexpr int kBlockN = C::kBlockN;
    extern __shared__ char shared[];
    const Ring<C> ring(shared);
    const auto work = [&](int item) {
        return work_of<C>(args, item, [&](int sequence, int first, int last) {
            return last > first ? (last - first - 1) * pages.size + pages.last_len[sequence] : 0;
        });
    };
    if (ring.warpgroup > 0) {
        hopper::set_registers<kConsumerRegisters, true>();
        return compute<C>(args, ring, work);
    }

    // One warp: its lanes look up where the units of a tile of keys lie, a tile ahead, and the first lane loads them,
    // eight at a time: the loads of 2 KiB that pages of 16 make must be begun faster than the products take them.
    hopper::set_registers<kProducerRegisters, false>();
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x, units = kBlockN / pages.unit, slice_bytes = kBlockN * 128;
    int loaded = 0, done = 0;  // tiles of keys, of values; tiles of rows
    for (int round = 0; item_of(round) < args.items; ++round) {
        const Work w = work(item_of(round));
        if (w.blocks <= 0) continue;
        // The row of K, among all rows of the pool, that a unit begins at; V's is pages.size rows on.
        const auto row_of = [&](int n, int unit) {
            const int token = n * kBlockN + unit * pages.unit, at = token / pages.size;
            if (token >= w.kv_len) return 0;
            return pages.indices[w.kv_begin + at] * 2 * pages.size + token - at * pages.size;
        };
        int row = row_of(w.blocks - 1, lane);
        if (lane == 0) ring.load_q(&q_map, w, done);
        ++done;
        for (int n = w.blocks - 1; n >= 0; --n, ++loaded) {
            const int stage = loaded % kStages, parity = (loaded / kStages & 1) ^ 1;
            const int next_row = n > 0 ? row_of(n - 1, lane) : 0;
            // Units behind the last key are not loaded: what lies there is masked, and cleared before it counts.
            const int wanted = min(units, (w.kv_len - n * kBlockN + pages.unit - 1) / pages.unit);
            const auto load = [&](uint64_t* full, char* tile, int offset) {
                if (lane == 0) hopper::barrier_expect(full, wanted * pages.unit * kDim * 2);
                for (int first = 0; first < wanted; first += 32) {  // more than 32: pages of 1 or 2 tokens
                    const int own = first == 0 ? row : row_of(n, first + lane);
                    for (int unit = first; unit < min(first + 32, wanted); unit += kAtOnce) {
                        int from[kAtOnce];
#pragma unroll
                        for (int i = 0; i < kAtOnce; ++i) from[i] = __shfl_sync(~0u, own, unit - first + i) + offset;
                        if (lane == 0)
#pragma unroll
                            for (int i = 0; i < kAtOnce; ++i)
                                if (unit + i < wanted)
#pragma unroll
                                    for (int slice = 0; slice < C::kSlicesQk; ++slice)
                                        hopper::tma_load(tile + slice * slice_bytes + (unit + i) * pages.unit * 128,
                                                         &kv_map, full, w.kv_head * kDim + 64 * slice, from[i]);
                        __syncwarp();
                    }
                }
            };
            hopper::barrier_wait(ring.k_empty + stage, parity);
            load(ring.k_full + stage, ring.k_tile(stage), 0);
            hopper::barrier_wait(ring.v_empty + stage, parity);
            load(ring.v_full + stage, ring.v_tile(stage), pages.size);
            row = next_row;
        }
    }
}

// ---- Host ----------------------------------------------------------------------------------------------------------

template <int kDim>
void run(const __nv_bfloat16* q, const __nv_bfloat16* kv_data, int64_t seq_len, Args args, Pages pages) {
    using C = Config<kDim, kDim>;
    while (pages.unit < C::kBlockN && pages.size % (2 * pages.unit) == 0) pages.unit *= 2;
    CUtensorMap q_map, kv_map;
    // The pool as rows of all heads: K of page 0, V of page 0, K of page 1, ...
    const cuuint64_t columns = args.num_kv_heads * kDim, rows = hopper::bytes_from(kv_data) / (columns * 2);
    const cuuint32_t unit = pages.unit;
    if (!set_work<C>(args, &q_map, q, seq_len) ||
        !hopper::make_map<2>(&kv_map, kv_data, 2, {columns, rows}, {64, unit})) {
        fprintf(stderr, "run_kernel: no tensor map for q and %lld rows of pages\n", (long long)rows);
        return;
    }
    launch<C>(paged_prefill<kDim>, args.items, q_map, kv_map, args, pages);
}

extern "C" void run_kernel(const __nv_bfloat16* q, const __nv_bfloat16* kv_data, __nv_bfloat16* output,
                           const int32_t* qo_indptr, const int32_t* kv_indptr, const int32_t* kv_indices,
                           const int32_t* last_page_len, int64_t batch_size, int64_t seq_len, int64_t num_qo_heads,
                           int64_t num_kv_heads, int64_t head_dim, int64_t page_block_size, int64_t causal) {
    if (batch_size == 0 || seq_len == 0) return;
    if (page_block_size < 1) {
        fprintf(stderr, "run_kernel: page_block_size = %lld is not positive\n", (long long)page_block_size);
        return;
    }
    Args args{output, qo_indptr, kv_indptr};
    if (!set_heads(args, batch_size, num_qo_heads, num_kv_heads, causal)) return;
    const Pages pages{kv_indices, last_page_len, static_cast<int>(page_block_size), 1};
    if (head_dim == 64) return run<64>(q, kv_data, seq_len, args, pages);
    if (head_dim == 128) return run<128>(q, kv_data, seq_len, args, pages);
    if (head_dim == 256) return run<256>(q, kv_data, seq_len, args, pages);
    fprintf(stderr, "run_kernel: head_dim = %lld: only 64, 128 and 256 are there\n", (long long)head_dim);
}
