// What the Hopper variants of ragged and paged prefill share: everything but where the keys come from. A kernel has its
// own work_of(item) and its own loading warpgroup, and calls `compute` from the two others.
#pragma once

#include <math.h>

#include "hopper.cuh"

namespace hopper::prefill {

constexpr int kBlockM = 128, kStages = 2, kConsumers = 2, kThreads = 128 * (1 + kConsumers);
constexpr int kL2Bytes = 20 << 20;    // of 50 MiB: what K and V may take of it
constexpr float kNoScore = -3.0e38f;  // finite: a row which has seen no key gives exp2(-inf) = 0, never NaN

template <int kQk, int kVo>
struct Config {
    static constexpr int kDimQk = kQk, kDimVo = kVo;
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
    const int32_t *qo_indptr, *kv_indptr;
    int num_kv_heads, group;
    int pack;     // heads of a group in one tile of rows, a power of two that divides the group
    int pairs;    // sequences x parts of pack heads
    int tiles;    // tiles of kBlockM / pack tokens in a sequence of seq_len
    int section;  // pairs that share the L2 cache at a time
    int items;    // tiles * pairs
    int causal;
    float scale_log2;  // log2(e) / sqrt(head_dim_qk)
};

// ---- Work ----------------------------------------------------------------------------------------------------------

// One tile of rows and the keys that it needs. kv_begin: the sequence's entry of kv_indptr, a row or a page.
struct Work {
    int q_begin, q_len, kv_begin, kv_len, first_token, first_head, kv_head;
    int visible_to_all, blocks;  // keys that every row sees; tiles of keys that some row sees; -1: no such rows
};

// kv_len(sequence, first, last): keys of a sequence whose entries in kv_indptr are these.
template <class C, class Length>
__device__ __forceinline__ Work work_of(const Args& args, int item, Length kv_len) {
    const int tokens = kBlockM / args.pack, parts = args.group / args.pack * args.num_kv_heads;
    const int in_section = item % (args.tiles * args.section);
    const int first_pair = item / (args.tiles * args.section) * args.section;
    const int pairs = min(args.section, args.pairs - first_pair);
    const int pair = first_pair + in_section % pairs, tile = args.tiles - 1 - in_section / pairs;
    const int sequence = pair / parts, part = pair % parts;
    Work w;
    w.q_begin = args.qo_indptr[sequence];
    w.q_len = args.qo_indptr[sequence + 1] - w.q_begin;
    w.kv_begin = args.kv_indptr[sequence];
    w.kv_len = kv_len(sequence, w.kv_begin, args.kv_indptr[sequence + 1]);
    w.first_token = tile * tokens;
    w.first_head = part * args.pack;
    w.kv_head = w.first_head / args.group;
    const int unseen = args.causal ? w.kv_len - w.q_len + w.first_token : w.kv_len;  // of the first row, less 1
    w.visible_to_all = args.causal ? min(w.kv_len, unseen + 1) : w.kv_len;
    const int visible_to_any = args.causal ? min(w.kv_len, unseen + min(tokens, w.q_len - w.first_token)) : w.kv_len;
    w.blocks = w.first_token < w.q_len ? max(0, visible_to_any + C::kBlockN - 1) / C::kBlockN : -1;
    return w;
}

// Items go round the multiprocessors, there and back: neighbours in length meet on one.
__device__ __forceinline__ int item_of(int round) {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// ---- Shared memory -------------------------------------------------------------------------------------------------

// Q, then rings of K and V, and the barriers that tell when a place is full and when it is empty.
template <class C>
struct Ring {
    char* q_tile;
    uint64_t *q_full, *q_empty, *k_full, *k_empty, *v_full, *v_empty;
    int warpgroup;  // that this thread is of
    __device__ __forceinline__ char* k_tile(int stage) const { return q_tile + C::kOffsetK + stage * C::kBytesK; }
    __device__ __forceinline__ char* v_tile(int stage) const { return q_tile + C::kOffsetV + stage * C::kBytesV; }

    // The whole block calls this, with all of its shared memory.
    __device__ __forceinline__ explicit Ring(char* memory) {
        q_tile = memory + (-shared_address(memory) & 1023);
        q_full = reinterpret_cast<uint64_t*>(q_tile + C::kOffsetBarriers), q_empty = q_full + 1;
        k_full = q_full + 2, k_empty = k_full + kStages, v_full = k_empty + kStages, v_empty = v_full + kStages;
        warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
        if (threadIdx.x == 0) {
            barrier_init(q_full, 1);
            barrier_init(q_empty, 4 * kConsumers);
            for (int s = 0; s < kStages; ++s) {
                barrier_init(k_full + s, 1);
                barrier_init(v_full + s, 1);
                barrier_init(k_empty + s, 4 * kConsumers);
                barrier_init(v_empty + s, 4 * kConsumers);
            }
            barriers_ready();
        }
        __syncthreads();
    }

    // One thread: the next tile of rows, once the last is read. `done`: tiles of rows before it.
    __device__ __forceinline__ void load_q(const CUtensorMap* map, const Work& w, int done) const {
        barrier_wait(q_empty, (done & 1) ^ 1);  // parity 1: a fresh barrier counts as empty
        barrier_expect(q_full, C::kBytesQ);
        for (int slice = 0; slice < C::kSlicesQk; ++slice)
            tma_load(q_tile + slice * kBlockM * 128, map, q_full, 64 * slice, w.first_head, w.q_begin + w.first_token);
    }
};

// ---- What the computing warpgroups do ------------------------------------------------------------------------------

// work_of(item) -> Work, the same as the loading warpgroup's.
template <class C, class WorkOf>
__device__ __forceinline__ void compute(const Args& args, const Ring<C>& ring, WorkOf work_of) {
    constexpr int kBlockN = C::kBlockN;
    const int consumer = ring.warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32;
    const int row0 = 64 * consumer + thread / 32 * 16 + lane / 4;  // and row0 + 8
    const int own_turn = 1 + consumer, other_turn = 2 - consumer;  // named barriers; 3: both warpgroups
    if (consumer == 1) named_arrive(1, 256);                       // the first warpgroup begins
    const int log_pack = __ffs(args.pack) - 1;
    const int num_qo_heads = args.num_kv_heads * args.group;

    int taken = 0, done = 0;
    for (int round = 0; item_of(round) < args.items; ++round) {
        const Work w = work_of(item_of(round));
        if (w.blocks < 0) continue;
        float o[C::kPartsVo][C::kPartVo / 2];
        float s[kBlockN / 2];
        uint32_t p[kBlockN / 4];
        float row_max[2] = {kNoScore, kNoScore}, row_sum[2] = {0.0f, 0.0f}, shrink[2];
#pragma unroll
        for (int part = 0; part < C::kPartsVo; ++part)
#pragma unroll
            for (int i = 0; i < C::kPartVo / 2; ++i) o[part][i] = 0.0f;

        // s = Q K^T of the tile `at` of the ring, begun.
        const auto begin_scores = [&](int at) {
            barrier_wait(ring.k_full + at % kStages, at / kStages & 1);
            const uint64_t q = descriptor(ring.q_tile + consumer * 64 * 128), k = descriptor(ring.k_tile(at % kStages));
            pin(s);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < C::kDimQk / 16; ++i)
                wgmma<false>(s, q + ((i / 4 * kBlockM * 128 + i % 4 * 32) >> 4),
                             k + ((i / 4 * kBlockN * 128 + i % 4 * 32) >> 4), i > 0);
            wgmma_commit();
        };
        // o += P V of the tile `at`, begun.
        const auto begin_output = [&](int at) {
            barrier_wait(ring.v_full + at % kStages, at / kStages & 1);
#pragma unroll
            for (int part = 0; part < C::kPartsVo; ++part) pin(o[part]);
            wgmma_fence();
#pragma unroll
            for (int part = 0; part < C::kPartsVo; ++part) {
                const uint64_t v =
                    descriptor(ring.v_tile(at % kStages) + part * (C::kPartVo / 64) * kBlockN * 128, kBlockN * 128);
#pragma unroll
                for (int i = 0; i < kBlockN / 16; ++i) wgmma<true>(o[part], p + 4 * i, v + (i * 16 * 128 >> 4), 1);
            }
            wgmma_commit();
        };
        const auto pin_output = [&] {
#pragma unroll
            for (int part = 0; part < C::kPartsVo; ++part) pin(o[part]);
        };
        const auto release = [&](uint64_t* barrier) {
            if (lane == 0) barrier_arrive(barrier);
        };
        // Scores to weights, in place; row_max, row_sum, shrink follow.
        const auto softmax = [&](int n) {
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
                shrink[half] = exp2((row_max[half] - most) * args.scale_log2);
                row_max[half] = most;
                const float shift = most * args.scale_log2;
                float sum = 0.0f;
#pragma unroll
                for (int c = 0; c < kBlockN / 8; ++c)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& x = s[4 * c + 2 * half + i];
                        x = exp2(fmaf(x, args.scale_log2, -shift));
                        sum += x;
                    }
                row_sum[half] = row_sum[half] * shrink[half] + sum;
            }
        };
        const auto keep_weights = [&] {
#pragma unroll
            for (int i = 0; i < kBlockN / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
        };

        if (w.blocks > 0) {
            barrier_wait(ring.q_full, done & 1);
            named_sync(own_turn, 256);
            begin_scores(taken);
            named_arrive(other_turn, 256);
            wgmma_wait<0>();
            pin(s);
            release(ring.k_empty + taken % kStages);
            softmax(w.blocks - 1);
            keep_weights();
            if (w.blocks * kBlockN > w.kv_len) {
                // Rows behind the last key belong to others, and 0 times their NaN would be NaN.
                barrier_wait(ring.v_full + taken % kStages, taken / kStages & 1);
                const int valid = w.kv_len - (w.blocks - 1) * kBlockN;
                for (int i = valid * 8 + threadIdx.x - 128; i < kBlockN * 8; i += 256)
#pragma unroll
                    for (int slice = 0; slice < C::kSlicesVo; ++slice)
                        *reinterpret_cast<uint4*>(ring.v_tile(taken % kStages) + slice * kBlockN * 128 + i * 16) =
                            uint4{0, 0, 0, 0};
                proxy_fence();
                named_sync(3, 256);
            }
            // The loops turn between the two halves of a step: at a back edge ptxas cannot move the wait for the output
            // in front of the softmax, which within one block it does.
            int n = w.blocks - 2;
            const auto begin_step = [&] {
                named_sync(own_turn, 256);
                begin_scores(taken + 1);
                begin_output(taken);
                named_arrive(other_turn, 256);
                wgmma_wait<1>();
                pin(s);
                release(ring.k_empty + (taken + 1) % kStages);
                softmax(n);
                --n;
            };
            const auto end_step = [&] {
                wgmma_wait<0>();
                pin_output();
                release(ring.v_empty + taken % kStages);
                keep_weights();
                ++taken;
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
            release(ring.q_empty);
            begin_output(taken);
            wgmma_wait<0>();
            pin_output();
            release(ring.v_empty + taken % kStages);
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
            __nv_bfloat16* const out = args.output + place * C::kDimVo + 8 * (lane % 4);
#pragma unroll
            for (int c = 0; c < C::kDimVo / 32; ++c) {
                uint32_t x[4];  // of column blocks 4c .. 4c + 3
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = 4 * (4 * c + j) + 2 * half, part = at / (C::kPartVo / 2);
                    x[j] = pack(o[part][at % (C::kPartVo / 2)] * factor, o[part][at % (C::kPartVo / 2) + 1] * factor);
                }
                gather_columns(x, lane);
                if (token < w.q_len) *reinterpret_cast<uint4*>(out + 32 * c) = uint4{x[0], x[1], x[2], x[3]};
            }
        }
    }
}

// ---- Host ----------------------------------------------------------------------------------------------------------

// What all head dims have in common; false, and a sentence, for heads that do not divide.
inline bool set_heads(Args& args, int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads, int64_t causal) {
    if (num_kv_heads < 1 || num_qo_heads < 1 || num_qo_heads % num_kv_heads != 0) {
        fprintf(stderr, "run_kernel: num_qo_heads = %lld is no positive multiple of num_kv_heads = %lld\n",
                (long long)num_qo_heads, (long long)num_kv_heads);
        return false;
    }
    args.num_kv_heads = static_cast<int>(num_kv_heads);
    args.group = static_cast<int>(num_qo_heads / num_kv_heads);
    args.pack = 1;
    while (args.pack < 16 && args.group % (2 * args.pack) == 0) args.pack *= 2;
    args.pairs = static_cast<int>(batch_size * num_qo_heads / args.pack);
    args.causal = causal != 0;
    return true;
}

// The order of work for sequences of at most seq_len, and the map of Q.
template <class C>
bool set_work(Args& args, CUtensorMap* q_map, const __nv_bfloat16* q, int64_t seq_len) {
    args.tiles = static_cast<int>((seq_len * args.pack + kBlockM - 1) / kBlockM);
    const int64_t heads = kL2Bytes / (seq_len * (C::kDimQk + C::kDimVo) * 2);  // KV heads whose keys and values fit
    const int64_t section = (heads < 1 ? 1 : heads) * (args.group / args.pack);
    args.section = static_cast<int>(section < args.pairs ? section : args.pairs);
    args.items = args.tiles * args.pairs;
    args.scale_log2 = 1.44269504f / sqrtf(static_cast<float>(C::kDimQk));
    const cuuint64_t qo_heads = args.num_kv_heads * args.group, rows = bytes_from(q) / (qo_heads * C::kDimQk * 2);
    const cuuint32_t pack = args.pack;
    return make_map<3>(q_map, q, 2, {C::kDimQk, qo_heads, rows}, {64, pack, kBlockM / pack});
}

// A block per multiprocessor, or fewer.
template <class C, class... Parameters>
void launch(void (*kernel)(Parameters...), int items, const Parameters&... parameters) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytesShared);
    if (error == cudaSuccess) {
        const int resident = multiprocessors(), blocks = items < resident ? items : resident;
        error = launch_in_clusters<1>(kernel, blocks, kThreads, C::kBytesShared, parameters...);
    }
    if (error != cudaSuccess) fprintf(stderr, "run_kernel: launch failed: %s\n", cudaGetErrorString(error));
}

}  // namespace hopper::prefill
