// paged_prefill for NVIDIA Hopper alone (sm_90a): TMA, wgmma, warp specialisation. Not the file to paste.
//
// One block per multiprocessor takes tiles of 128 packed query rows (tokens of one sequence x heads of one GQA group),
// longest first. Warpgroup 0 loads: Q once per tile, K and V page by page through rings of two tiles, all by TMA.
// Warpgroups 1 and 2 compute 64 rows each, and take turns (named barriers): while one has the matrix units the other
// does its softmax. Within a warpgroup the scores of the next tile and the output of this one are multiplied together,
// and the softmax of the next tile runs while the output's product still does. P never leaves the registers.
//
// nvcc 13.0, -O3 -arch=sm_90a: no spills. Checked on the model without a GPU; not yet timed.

#include "../../common/hopper.cuh"

#include <math.h>

constexpr int kBlockM = 128, kStages = 2, kConsumers = 2, kThreads = 128 * (1 + kConsumers);
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // 128 * 56 + 256 * 224 <= 65536
constexpr int kL2Bytes = 20 << 20;                                // of 50 MiB: what K and V may take of it
constexpr float kLazy = 0.0f;         // log2 of how far a score may exceed the running maximum before that is raised
constexpr float kNoScore = -3.0e38f;  // finite: a row which has seen no key gives exp2(-inf) = 0, never NaN

// ---- Kernel --------------------------------------------------------------------------------------------------------

template <int kDim>
struct Config {
    static constexpr int kDimQk = kDim, kDimVo = kDim;
    static constexpr int kBlockN = kDimQk == 256 ? 64 : 128;
    static constexpr int kSlicesQk = kDimQk / 64, kSlicesVo = kDimVo / 64;
    static constexpr int kBytesQ = kBlockM * kDimQk * 2, kBytesK = kBlockN * kDimQk * 2, kBytesV = kBlockN * kDimVo * 2;
    static constexpr int kOffsetK = kBytesQ, kOffsetV = kOffsetK + kStages * kBytesK;
    static constexpr int kOffsetBarriers = kOffsetV + kStages * kBytesV;
    static constexpr int kBytesShared = kOffsetBarriers + 256 + 1024;  // 1024: to align the tiles
    static_assert(kBytesShared <= 227 << 10, "shared memory of a multiprocessor");
    // Columns of one wgmma of the output.
    static constexpr int kPartVo = kDimVo < 128 ? kDimVo : 128, kPartsVo = kDimVo / kPartVo;
};

struct Args {
    __nv_bfloat16* output;
    const int32_t *qo_indptr, *kv_indptr, *kv_indices, *last_page_len;
    int num_kv_heads, group;
    int page_size, unit;  // unit: tokens of a page that one load takes, the greatest that divides the tile of keys too
    int pack;             // heads of a group in one tile of rows, a power of two that divides the group
    int pairs;            // sequences x parts of pack heads
    int tiles;            // tiles of kBlockM / pack tokens in a sequence of seq_len
    int section;          // pairs that share the L2 cache at a time
    int items;            // tiles * pairs
    int causal;
    float scale_log2;  // log2(e) / sqrt(head_dim_qk)
};

// One tile of rows and the keys that it needs.
struct Work {
    int q_begin, q_len, page_begin, kv_len, first_token, first_head, kv_head;
    int visible_to_all, blocks;  // keys that every row sees; tiles of keys that some row sees, 0: nothing to do
};

__device__ __forceinline__ Work work_of(const Args& args, int item, int block_n) {
    const int tokens = kBlockM / args.pack, parts = args.group / args.pack * args.num_kv_heads;
    const int in_section = item % (args.tiles * args.section);
    const int first_pair = item / (args.tiles * args.section) * args.section;
    const int pairs = min(args.section, args.pairs - first_pair);
    const int pair = first_pair + in_section % pairs, tile = args.tiles - 1 - in_section / pairs;
    const int sequence = pair / parts, part = pair % parts;
    Work w;
    w.q_begin = args.qo_indptr[sequence];
    w.q_len = args.qo_indptr[sequence + 1] - w.q_begin;
    w.page_begin = args.kv_indptr[sequence];
    const int num_pages = args.kv_indptr[sequence + 1] - w.page_begin;
    w.kv_len = num_pages > 0 ? (num_pages - 1) * args.page_size + args.last_page_len[sequence] : 0;
    w.first_token = tile * tokens;
    w.first_head = part * args.pack;
    w.kv_head = w.first_head / args.group;
    const int unseen = args.causal ? w.kv_len - w.q_len + w.first_token : w.kv_len;  // of the first row, less 1
    w.visible_to_all = args.causal ? min(w.kv_len, unseen + 1) : w.kv_len;
    const int visible_to_any = args.causal ? min(w.kv_len, unseen + min(tokens, w.q_len - w.first_token)) : w.kv_len;
    w.blocks = w.first_token < w.q_len ? max(0, visible_to_any + block_n - 1) / block_n : -1;
    return w;
}

// Items go round the multiprocessors, there and back: neighbours in length meet on one.
__device__ __forceinline__ int item_of(int round) {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    paged_prefill(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap kv_map,
                  const Args args) {
    using C = Config<kDim>;
    constexpr int kBlockN = C::kBlockN, kDimQk = kDim, kDimVo = kDim;
    extern __shared__ char raw[];
    char* const shared = raw + (-hopper::shared_address(raw) & 1023);
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + C::kOffsetBarriers);
    uint64_t *const q_full = barriers, *const q_empty = barriers + 1, *const k_full = barriers + 2,
                    *const k_empty = k_full + kStages, *const v_full = k_empty + kStages,
                    *const v_empty = v_full + kStages;
    const auto k_tile = [&](int stage) { return shared + C::kOffsetK + stage * C::kBytesK; };
    const auto v_tile = [&](int stage) { return shared + C::kOffsetV + stage * C::kBytesV; };

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        hopper::barrier_init(q_full, 1);
        hopper::barrier_init(q_empty, 4 * kConsumers);
        for (int s = 0; s < kStages; ++s) {
            hopper::barrier_init(k_full + s, 1);
            hopper::barrier_init(v_full + s, 1);
            hopper::barrier_init(k_empty + s, 4 * kConsumers);
            hopper::barrier_init(v_empty + s, 4 * kConsumers);
        }
        hopper::barriers_ready();
    }
    __syncthreads();

    if (warpgroup == 0) {  // ---- load
        hopper::set_registers<kProducerRegisters, false>();
        // One warp: each lane loads some units of a tile of keys, whose page ids it reads one tile ahead.
        if (threadIdx.x < 32) {
            const int lane = threadIdx.x, units = kBlockN / args.unit, slice_bytes = kBlockN * 128;
            int loaded = 0, done = 0;  // tiles of keys, of values; tiles of rows
            for (int round = 0; item_of(round) < args.items; ++round) {
                const Work w = work_of(args, item_of(round), kBlockN);
                if (w.blocks <= 0) continue;
                const auto page_of = [&](int n) {  // of this lane's first unit
                    const int token = n * kBlockN + lane * args.unit;
                    return token < w.kv_len ? args.kv_indices[w.page_begin + token / args.page_size] : 0;
                };
                int page = page_of(w.blocks - 1);
                if (lane == 0) {
                    // The parity of a fresh barrier is 1 for whoever waits for it to be empty.
                    hopper::barrier_wait(q_empty, (done & 1) ^ 1);
                    hopper::barrier_expect(q_full, C::kBytesQ);
                    for (int slice = 0; slice < C::kSlicesQk; ++slice)
                        hopper::tma_load(shared + slice * kBlockM * 128, &q_map, q_full, 64 * slice, w.first_head,
                                         w.q_begin + w.first_token);
                }
                ++done;
                for (int n = w.blocks - 1; n >= 0; --n, ++loaded) {
                    const int stage = loaded % kStages, parity = (loaded / kStages & 1) ^ 1;
                    const int next_page = n > 0 ? page_of(n - 1) : 0;
                    // Units behind the last key are not loaded: what lies there is masked, and cleared before it
                    // counts.
                    const int wanted = min(units, (w.kv_len - n * kBlockN + args.unit - 1) / args.unit);
                    const auto load = [&](uint64_t* full, char* tile, int which) {
                        if (lane == 0) hopper::barrier_expect(full, wanted * args.unit * kDim * 2);
                        __syncwarp();
                        for (int unit = lane; unit < wanted; unit += 32) {
                            const int token = n * kBlockN + unit * args.unit, at = token / args.page_size;
                            const int id = unit < 32 ? page : args.kv_indices[w.page_begin + at];
                            for (int slice = 0; slice < C::kSlicesQk; ++slice)
                                hopper::tma_load(tile + slice * slice_bytes + unit * args.unit * 128, &kv_map, full,
                                                 64 * slice, w.kv_head, token - at * args.page_size, which, id);
                        }
                    };
                    hopper::barrier_wait(k_empty + stage, parity);
                    load(k_full + stage, k_tile(stage), 0);
                    hopper::barrier_wait(v_empty + stage, parity);
                    load(v_full + stage, v_tile(stage), 1);
                    page = next_page;
                }
            }
        }
        return;
    }

    // ---- compute
    hopper::set_registers<kConsumerRegisters, true>();
    const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32;
    const int row0 = 64 * consumer + thread / 32 * 16 + lane / 4;  // and row0 + 8
    const int own_turn = 1 + consumer, other_turn = 2 - consumer;  // named barriers; 3: both warpgroups
    if (consumer == 1) hopper::named_arrive(1, 256);               // the first warpgroup begins
    const int log_pack = __ffs(args.pack) - 1;
    const float slack = kLazy / args.scale_log2;
    const int num_qo_heads = args.num_kv_heads * args.group;

    int taken = 0, done = 0;
    for (int round = 0; item_of(round) < args.items; ++round) {
        const Work w = work_of(args, item_of(round), kBlockN);
        if (w.blocks < 0) continue;
        float o[C::kPartsVo][C::kPartVo / 2];
        float s[kBlockN / 2];
        uint32_t p[kBlockN / 4];
        float row_max[2] = {kNoScore, kNoScore}, row_sum[2] = {0.0f, 0.0f}, shrink[2];
        bool raised = false;
#pragma unroll
        for (int part = 0; part < C::kPartsVo; ++part)
#pragma unroll
            for (int i = 0; i < C::kPartVo / 2; ++i) o[part][i] = 0.0f;

        // s = Q K^T of the tile `at` of the ring, begun.
        const auto begin_scores = [&](int at) {
            hopper::barrier_wait(k_full + at % kStages, at / kStages & 1);
            const uint64_t q = hopper::descriptor(shared + consumer * 64 * 128),
                           k = hopper::descriptor(k_tile(at % kStages));
            hopper::pin(s);
            hopper::wgmma_fence();
#pragma unroll
            for (int i = 0; i < kDimQk / 16; ++i)
                hopper::wgmma<false>(s, q + ((i / 4 * kBlockM * 128 + i % 4 * 32) >> 4),
                                     k + ((i / 4 * kBlockN * 128 + i % 4 * 32) >> 4), i > 0);
            hopper::wgmma_commit();
        };
        // o += P V of the tile `at`, begun.
        const auto begin_output = [&](int at) {
            hopper::barrier_wait(v_full + at % kStages, at / kStages & 1);
#pragma unroll
            for (int part = 0; part < C::kPartsVo; ++part) hopper::pin(o[part]);
            hopper::wgmma_fence();
#pragma unroll
            for (int part = 0; part < C::kPartsVo; ++part) {
                const uint64_t v =
                    hopper::descriptor(v_tile(at % kStages) + part * (C::kPartVo / 64) * kBlockN * 128, kBlockN * 128);
#pragma unroll
                for (int i = 0; i < kBlockN / 16; ++i)
                    hopper::wgmma<true>(o[part], p + 4 * i, v + (i * 16 * 128 >> 4), 1);
            }
            hopper::wgmma_commit();
        };
        const auto pin_output = [&] {
#pragma unroll
            for (int part = 0; part < C::kPartsVo; ++part) hopper::pin(o[part]);
        };
        const auto release = [&](uint64_t* barrier) {
            if (lane == 0) hopper::barrier_arrive(barrier);
        };
        // Scores to weights, in place; row_max, row_sum, shrink follow.
        const auto softmax = [&](int n) {
            raised = false;
            if ((n + 1) * kBlockN > w.visible_to_all) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int token = w.first_token + ((row0 + 8 * half) >> log_pack);
                    const int end = (args.causal ? min(w.kv_len, w.kv_len - w.q_len + 1 + token) : w.kv_len) -
                                    n * kBlockN - 2 * (lane % 4);
#pragma unroll
                    for (int c = 0; c < kBlockN / 8; ++c)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            if (8 * c + i >= end) s[4 * c + 2 * half + i] = -INFINITY;
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float most = row_max[half];
#pragma unroll
                for (int c = 0; c < kBlockN / 8; ++c)
                    most = fmaxf(most, fmaxf(s[4 * c + 2 * half], s[4 * c + 2 * half + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                if constexpr (kLazy > 0) {
                    most = most > row_max[half] + slack ? most : row_max[half];
                    raised |= most != row_max[half];
                }
                shrink[half] = hopper::exp2((row_max[half] - most) * args.scale_log2);
                row_max[half] = most;
                const float shift = most * args.scale_log2;
                float sum = 0.0f;
#pragma unroll
                for (int c = 0; c < kBlockN / 8; ++c)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& x = s[4 * c + 2 * half + i];
                        x = hopper::exp2(fmaf(x, args.scale_log2, -shift));
                        sum += x;
                    }
                row_sum[half] = row_sum[half] * shrink[half] + sum;
            }
        };
        const auto keep_weights = [&] {
#pragma unroll
            for (int i = 0; i < kBlockN / 4; ++i) p[i] = hopper::pack(s[2 * i], s[2 * i + 1]);
        };

        if (w.blocks > 0) {
            hopper::barrier_wait(q_full, done & 1);
            hopper::named_sync(own_turn, 256);
            begin_scores(taken);
            hopper::named_arrive(other_turn, 256);
            hopper::wgmma_wait<0>();
            hopper::pin(s);
            release(k_empty + taken % kStages);
            softmax(w.blocks - 1);
            keep_weights();
            if (w.blocks * kBlockN > w.kv_len) {
                // Rows behind the last key belong to others, and 0 times their NaN would be NaN.
                hopper::barrier_wait(v_full + taken % kStages, taken / kStages & 1);
                const int valid = w.kv_len - (w.blocks - 1) * kBlockN;
                for (int i = valid * 8 + threadIdx.x - 128; i < kBlockN * 8; i += 256)
#pragma unroll
                    for (int slice = 0; slice < C::kSlicesVo; ++slice)
                        *reinterpret_cast<uint4*>(v_tile(taken % kStages) + slice * kBlockN * 128 + i * 16) =
                            uint4{0, 0, 0, 0};
                hopper::proxy_fence();
                hopper::named_sync(3, 256);
            }
            // The loops turn between the two halves of a step: at a back edge ptxas cannot move the wait for the output
            // in front of the softmax, which within one block it does.
            int n = w.blocks - 2;
            const auto begin_step = [&] {
                hopper::named_sync(own_turn, 256);
                begin_scores(taken + 1);
                begin_output(taken);
                hopper::named_arrive(other_turn, 256);
                hopper::wgmma_wait<1>();
                hopper::pin(s);
                release(k_empty + (taken + 1) % kStages);
                softmax(n);
                --n;
            };
            const auto end_step = [&] {
                hopper::wgmma_wait<0>();
                pin_output();
                release(v_empty + taken % kStages);
                keep_weights();
                ++taken;
                if (kLazy > 0 && !__any_sync(~0u, raised)) return;
#pragma unroll
                for (int part = 0; part < C::kPartsVo; ++part)
#pragma unroll
                    for (int i = 0; i < C::kPartVo / 2; ++i) o[part][i] *= shrink[i / 2 % 2];
            };
            if (n >= 0) {
                begin_step();
#pragma unroll 1
                while (n >= 0) {
                    end_step();
                    begin_step();
                }
                end_step();
            }
            release(q_empty);
            begin_output(taken);
            hopper::wgmma_wait<0>();
            pin_output();
            release(v_empty + taken % kStages);
            ++taken;
            ++done;
        }

        // Epilogue: divide by the sum; a row that saw no key has sum 0 and gives 0. Four lanes hold a row, 2 columns of
        // every 8 each; they swap so that each has 8 columns of every 32 in one piece, 16 bytes to store.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = row_sum[half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
            const int row = row0 + 8 * half, token = w.first_token + (row >> log_pack);
            const int64_t place =
                static_cast<int64_t>(w.q_begin + token) * num_qo_heads + w.first_head + (row & (args.pack - 1));
            __nv_bfloat16* const out = args.output + place * kDimVo + 8 * (lane % 4);
#pragma unroll
            for (int c = 0; c < kDimVo / 32; ++c) {
                uint32_t x[4];  // of column blocks 4c .. 4c + 3
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = 4 * (4 * c + j) + 2 * half, part = at / (C::kPartVo / 2);
                    x[j] = hopper::pack(o[part][at % (C::kPartVo / 2)] * factor,
                                        o[part][at % (C::kPartVo / 2) + 1] * factor);
                }
                hopper::gather_columns(x, lane);
                if (token < w.q_len) *reinterpret_cast<uint4*>(out + 32 * c) = uint4{x[0], x[1], x[2], x[3]};
            }
        }
    }
}

// ---- Host ----------------------------------------------------------------------------------------------------------

template <int kDim>
void launch(const __nv_bfloat16* q, const __nv_bfloat16* kv_data, int64_t seq_len, Args args) {
    using C = Config<kDim>;
    args.tiles = static_cast<int>((seq_len * args.pack + kBlockM - 1) / kBlockM);
    const int64_t heads = kL2Bytes / (seq_len * kDim * 4);  // KV heads whose keys and values fit at a time
    const int64_t section = (heads < 1 ? 1 : heads) * (args.group / args.pack);
    args.section = static_cast<int>(section < args.pairs ? section : args.pairs);
    args.items = args.tiles * args.pairs;
    args.unit = 1;
    while (args.unit < C::kBlockN && args.page_size % (2 * args.unit) == 0) args.unit *= 2;
    args.scale_log2 = 1.44269504f / sqrtf(static_cast<float>(kDim));
    const cuuint64_t kv_heads = args.num_kv_heads, qo_heads = kv_heads * args.group, page_size = args.page_size;
    const cuuint64_t q_rows = hopper::bytes_from(q) / (qo_heads * kDim * 2),
                     pages = hopper::bytes_from(kv_data) / (page_size * kv_heads * kDim * 4);
    const cuuint32_t pack = args.pack, unit = args.unit;
    CUtensorMap q_map, kv_map;
    if (!hopper::make_map<3>(&q_map, q, 2, {kDim, qo_heads, q_rows}, {64, pack, kBlockM / pack}) ||
        !hopper::make_map<5>(&kv_map, kv_data, 2, {kDim, kv_heads, page_size, 2, pages}, {64, 1, unit, 1, 1})) {
        fprintf(stderr, "run_kernel: no tensor map for %lld rows of Q, %lld pages\n", (long long)q_rows,
                (long long)pages);
        return;
    }
    cudaError_t error =
        cudaFuncSetAttribute(paged_prefill<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytesShared);
    if (error == cudaSuccess) {
        const int resident = hopper::multiprocessors(), blocks = args.items < resident ? args.items : resident;
        paged_prefill<kDim><<<blocks, kThreads, C::kBytesShared>>>(q_map, kv_map, args);
        error = cudaGetLastError();
    }
    if (error != cudaSuccess) fprintf(stderr, "run_kernel: launch failed: %s\n", cudaGetErrorString(error));
}

extern "C" void run_kernel(const __nv_bfloat16* q, const __nv_bfloat16* kv_data, __nv_bfloat16* output,
                           const int32_t* qo_indptr, const int32_t* kv_indptr, const int32_t* kv_indices,
                           const int32_t* last_page_len, int64_t batch_size, int64_t seq_len, int64_t num_qo_heads,
                           int64_t num_kv_heads, int64_t head_dim, int64_t page_block_size, int64_t causal) {
    if (batch_size == 0 || seq_len == 0) return;
    if (num_kv_heads < 1 || num_qo_heads < 1 || num_qo_heads % num_kv_heads != 0) {
        fprintf(stderr, "run_kernel: num_qo_heads = %lld is no positive multiple of num_kv_heads = %lld\n",
                (long long)num_qo_heads, (long long)num_kv_heads);
        return;
    }
    if (page_block_size < 1) {
        fprintf(stderr, "run_kernel: page_block_size = %lld is not positive\n", (long long)page_block_size);
        return;
    }
    Args args{output, qo_indptr, kv_indptr, kv_indices, last_page_len};
    args.num_kv_heads = static_cast<int>(num_kv_heads);
    args.group = static_cast<int>(num_qo_heads / num_kv_heads);
    args.page_size = static_cast<int>(page_block_size);
    args.pack = 1;
    while (args.pack < 16 && args.group % (2 * args.pack) == 0) args.pack *= 2;
    args.pairs = static_cast<int>(batch_size * num_qo_heads / args.pack);
    args.causal = causal != 0;
    if (head_dim == 64) return launch<64>(q, kv_data, seq_len, args);
    if (head_dim == 128) return launch<128>(q, kv_data, seq_len, args);
    if (head_dim == 256) return launch<256>(q, kv_data, seq_len, args);
    fprintf(stderr, "run_kernel: head_dim = %lld: only 64, 128 and 256 are there\n", (long long)head_dim);
}
