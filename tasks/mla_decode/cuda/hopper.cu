// mla_decode for NVIDIA Hopper alone (sm_90a): wgmma, warp specialisation. Not the file to paste.
//
// A block takes 64 heads and one part of a sequence, by the portable kernel's closed formula. Warpgroup 0 gathers tiles
// of 64 cache rows (512 + 64 columns, 72 KiB) into two places by cp.async, whatever the page size. Warpgroup 1
// multiplies Q with a tile, does the softmax and hands P over through shared memory; then warpgroups 1 and 2 each add
// P times one half of the same tile's 512 columns to their half of the output. A second launch joins the parts.
//
// nvcc 13.0, -O3, compute_90a: 4 bytes of spills. Times are in the README.

#include "../../common/hopper.cuh"

#include <math.h>

constexpr int kBlockM = 64, kBlockN = 64, kStages = 2, kThreads = 384;
constexpr int kDimCkv = 512, kDimKpe = 64, kSlices = (kDimCkv + kDimKpe) / 64, kSliceBytes = 64 * 128;
constexpr int kBytesTile = kSlices * kSliceBytes;                 // 72 KiB: 64 rows x 576 columns, also of Q
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // 128 * 56 + 256 * 224 <= 65536
constexpr int kMultiprocessors = 132;
constexpr int kMinKeys = 64;          // per part
constexpr float kLazy = 8.0f;         // log2 of how far a score may exceed the running maximum before it is raised
constexpr float kNoScore = -3.0e38f;  // finite: the first tile's rescaling is by exp2(-large) = 0, never by NaN

// Shared memory, from a multiple of 1024 on.
constexpr int kOffsetK = kBytesTile, kOffsetP = kOffsetK + kStages * kBytesTile, kOffsetFactors = kOffsetP + 8192;
constexpr int kOffsetFlags = kOffsetFactors + 64 * 4, kOffsetBarriers = kOffsetFlags + 16;
constexpr int kBytesShared = kOffsetBarriers + 2 * kStages * 8 + 1024;
static_assert(kBytesShared <= 227 << 10, "shared memory of a multiprocessor");

// As the portable kernel's arch section has them.
namespace arch {
using hopper::pack;
template <class T>
__device__ __forceinline__ T& at(const void* base, int64_t bytes) {
    return *reinterpret_cast<T*>(const_cast<char*>(static_cast<const char*>(base)) + bytes);
}
}  // namespace arch

// ---- shared section: also in the files beside this one. Master copy: shared.cuh of the task -------------------------
struct Args {
    const __nv_bfloat16 *q_nope, *q_pe, *ckv, *kpe;
    __nv_bfloat16* output;
    const int32_t *kv_indptr, *kv_indices, *kv_lens;
    int batch_size, num_heads, head_tiles;  // head_tiles: of BLOCK_M heads
    int max_parts;                          // blocks per head tile; more than batch_size unless nothing is cut
    int page_size, page_shift;              // page_shift: log2(page_size), or -1 if that is no whole number
    float scale_log2;                       // log2(e) / sqrt(576)
    float slack;                            // by which a score exceeds the running maximum before that is raised
    float *partial, *lse;                   // (rows, num_heads, 512) and (rows, num_heads), base 2
    int2* plan;                             // (batch_size,) first row of partial, NUM_SPLITS
};

// ---- Which part of which sequence ----------------------------------------------------------------------------------

struct Part {
    int sequence;  // -1: none, there are fewer parts than blocks
    int split, num_splits;
    int row;  // of partial, for the sequence's first part
};

// A sequence gets ceil(tiles / chunk) parts and one at least. The chunk is so large that all fit into max_parts. The
// whole block calls this with the same part; scratch: (threads + 1) ints of shared memory.
__device__ __forceinline__ Part find_part(const Args& args, int part, int block_n, int* scratch, int tid, int threads) {
    const auto tiles = [&](int sequence) { return (args.kv_lens[sequence] + block_n - 1) / block_n; };
    if (tid == 0) scratch[0] = 0;
    __syncthreads();
    int sum = 0;
    for (int b = tid; b < args.batch_size; b += threads) sum += tiles(b);
    atomicAdd(scratch, sum);
    __syncthreads();
    const int spare = args.max_parts - args.batch_size;
    const int chunk = spare > 0 ? max(kMinKeys / block_n, (scratch[0] + spare - 1) / spare) : INT32_MAX;
    int first = 0, row = 0;
    for (int b0 = 0; b0 < args.batch_size; b0 += threads) {
        __syncthreads();
        if (b0 + tid < args.batch_size) scratch[1 + tid] = max(tiles(b0 + tid) - 1, 0) / chunk + 1;
        __syncthreads();
        for (int i = 0; i < min(threads, args.batch_size - b0); ++i) {
            const int num_splits = scratch[1 + i];
            if (part < first + num_splits) return {b0 + i, part - first, num_splits, row};
            first += num_splits;
            row += num_splits > 1 ? num_splits : 0;
        }
    }
    return {-1};
}

// ---- Joining the parts ----------------------------------------------------------------------------------------------

// One block per (head, sequence): thread (x, y) has four columns and every kReaders-th part.
template <int kReaders>
__global__ void __launch_bounds__(kDimCkv / 4 * kReaders) combine(const Args args) {
    __shared__ float4 sums[kReaders][kDimCkv / 4];
    __shared__ float most_of[kReaders], total_of[kReaders];
    const int head = blockIdx.x % args.num_heads, sequence = blockIdx.x / args.num_heads;
    const int x = threadIdx.x % (kDimCkv / 4), y = threadIdx.x / (kDimCkv / 4);
    const int2 plan = args.plan[sequence];
    if (plan.y == 1) return;  // the first kernel wrote the output

    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    float most = kNoScore, total = 0.0f;
    for (int split = y; split < plan.y; split += 4 * kReaders) {
        float lse[4], largest = most;
        float4 value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // four parts in flight; one past the end is the first again, without weight
            const int part = split + i * kReaders < plan.y ? split + i * kReaders : split;
            const int64_t row = static_cast<int64_t>(plan.x + part) * args.num_heads + head;
            value[i] = arch::at<float4>(args.partial + row * kDimCkv, 16 * x);
            lse[i] = args.lse[row];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = fmaxf(largest, lse[i]);
        const float old = exp2f(most - largest);
        sum = {sum.x * old, sum.y * old, sum.z * old, sum.w * old}, total *= old, most = largest;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float weight = split + i * kReaders < plan.y ? exp2f(lse[i] - most) : 0.0f;
            sum = {sum.x + value[i].x * weight, sum.y + value[i].y * weight, sum.z + value[i].z * weight,
                   sum.w + value[i].w * weight};
            total += weight;
        }
    }
    sums[y][x] = sum;
    if (x == 0) most_of[y] = most, total_of[y] = total;
    __syncthreads();
    if (y != 0) return;
#pragma unroll
    for (int i = 0; i < kReaders; ++i) most = fmaxf(most, most_of[i]);
    sum = {0.0f, 0.0f, 0.0f, 0.0f}, total = 0.0f;
#pragma unroll
    for (int i = 0; i < kReaders; ++i) {  // always in this order: the same bits each time
        const float weight = exp2f(most_of[i] - most);
        const float4 value = sums[i][x];
        sum = {sum.x + value.x * weight, sum.y + value.y * weight, sum.z + value.z * weight, sum.w + value.w * weight};
        total += total_of[i] * weight;
    }
    const int64_t out = (static_cast<int64_t>(sequence) * args.num_heads + head) * kDimCkv;
    arch::at<uint2>(args.output + out, 8 * x) = {arch::pack(sum.x / total, sum.y / total),
                                                 arch::pack(sum.z / total, sum.w / total)};
}
// ---- end of shared section ------------------------------------------------------------------------------------------

// ---- Kernel --------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1) mla_decode(const Args args) {
    extern __shared__ char raw[];
    char* const shared = raw + (-hopper::shared_address(raw) & 1023);
    char *const q_tile = shared, *const p_tile = shared + kOffsetP;
    float* const factors = reinterpret_cast<float*>(shared + kOffsetFactors);  // (64,) of the rows of P
    int* const flags = reinterpret_cast<int*>(shared + kOffsetFlags);          // (4,) whether 16 rows are rescaled
    uint64_t *const full = reinterpret_cast<uint64_t*>(shared + kOffsetBarriers), *const empty = full + kStages;
    const auto k_tile = [&](int tile) { return shared + kOffsetK + tile % kStages * kBytesTile; };
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128, lane = thread % 32;

    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            hopper::barrier_init(full + s, 128);
            hopper::barrier_init(empty + s, 8);
        }
        hopper::barriers_ready();
    }
    // Work: the head tiles of a part are neighbours, so that all but the first find its keys in the L2 cache.
    const int head0 = static_cast<int>(blockIdx.x) % args.head_tiles * kBlockM;
    const Part part = find_part(args, static_cast<int>(blockIdx.x) / args.head_tiles, kBlockN,
                                reinterpret_cast<int*>(p_tile), threadIdx.x, kThreads);
    const int sequence = part.sequence;
    if (sequence < 0) return;
    if (part.split == 0 && head0 == 0 && threadIdx.x == 0) args.plan[sequence] = {part.row, part.num_splits};
    const int kv_len = args.kv_lens[sequence], page_begin = args.kv_indptr[sequence];
    const int64_t all_tiles = (kv_len + kBlockN - 1) / kBlockN;
    const int first_tile = static_cast<int>(all_tiles * part.split / part.num_splits);
    const int tiles = static_cast<int>(all_tiles * (part.split + 1) / part.num_splits) - first_tile;
    __syncthreads();  // the barriers are there, and nobody reads the scratch in P any more

    if (warpgroup == 0) {  // ---- load
        hopper::set_registers<kProducerRegisters, false>();
        // Eight threads copy 128 bytes of a row; this one 16 bytes of rows row0, row0 + 16, row0 + 32, row0 + 48.
        const int chunk = thread % 8, row0 = thread / 8;
        const uint32_t to0 = hopper::swizzled(row0, chunk);
        const auto place = [&](int key) -> int64_t {  // of a token, in rows of the cache
            if (key >= kv_len) return 0;
            const int page = args.page_shift >= 0 ? key >> args.page_shift : key / args.page_size;
            return static_cast<int64_t>(args.kv_indices[page_begin + page]) * args.page_size + key -
                   page * args.page_size;
        };
        int64_t places[4];
        const auto look_up = [&](int tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) places[i] = place((first_tile + tile) * kBlockN + row0 + 16 * i);
        };
        look_up(0);
        for (int tile = 0; tile < tiles; ++tile) {
            hopper::barrier_wait(empty + tile % kStages,
                                 (tile / kStages & 1) ^ 1);  // parity 1: a fresh barrier is empty
            const uint32_t to = hopper::shared_address(k_tile(tile)) + to0;
            const int left = kv_len - (first_tile + tile) * kBlockN - row0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool valid = 16 * i < left;
                const __nv_bfloat16* const ckv = args.ckv + places[i] * kDimCkv + 8 * chunk;
#pragma unroll
                for (int slice = 0; slice < kDimCkv / 64; ++slice)
                    hopper::copy16(to + slice * kSliceBytes + i * 16 * 128, ckv + 64 * slice, valid);
                hopper::copy16(to + kDimCkv / 64 * kSliceBytes + i * 16 * 128,
                               args.kpe + places[i] * kDimKpe + 8 * chunk, valid);
            }
            hopper::barrier_arrive_after_copies(full + tile % kStages);
            if (tile + 1 < tiles) look_up(tile + 1);
        }
        return;
    }

    // ---- compute
    hopper::set_registers<kConsumerRegisters, true>();
    const int consumer = warpgroup - 1, warp = thread / 32, row0 = 16 * warp + lane / 4;  // and row0 + 8
    constexpr int kReadyP = 1, kFreeP = 2, kBoth = 3;                                     // named barriers
    // Q, by both warpgroups. Rows past the last head are zeros.
    for (int i = threadIdx.x - 128; i < kBlockM * kSlices * 8; i += 256) {
        const int row = i / (kSlices * 8), slice = i / 8 % kSlices, chunk = i % 8, head = head0 + row;
        const int64_t at = static_cast<int64_t>(sequence) * args.num_heads + head;
        uint4 x = {0, 0, 0, 0};
        if (head < args.num_heads)
            x = *reinterpret_cast<const uint4*>(slice < kDimCkv / 64
                                                    ? args.q_nope + at * kDimCkv + 64 * slice + 8 * chunk
                                                    : args.q_pe + at * kDimKpe + 8 * chunk);
        *reinterpret_cast<uint4*>(q_tile + slice * kSliceBytes + hopper::swizzled(row, chunk)) = x;
    }
    hopper::proxy_fence();
    hopper::named_sync(kBoth, 256);

    float o[128];  // (64, 256): columns 256 * consumer ..
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    const auto release = [&](int tile) {
        if (lane == 0) hopper::barrier_arrive(empty + tile % kStages);
    };
    const auto rescale = [&](float upper, float lower) {
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] *= i / 2 % 2 ? lower : upper;
    };
    const auto values = [&](int tile) {
        return hopper::descriptor(k_tile(tile) + consumer * 4 * kSliceBytes, kSliceBytes);
    };

    float inverse[2] = {0.0f, 0.0f};
    if (consumer == 0) {
        float row_max[2] = {kNoScore, kNoScore}, row_sum[2] = {0.0f, 0.0f};
        const uint64_t q = hopper::descriptor(q_tile);
        for (int tile = 0; tile < tiles; ++tile) {
            float s[32];
            uint32_t p[16];
            hopper::barrier_wait(full + tile % kStages, tile / kStages & 1);
            hopper::proxy_fence();
            const uint64_t k = hopper::descriptor(k_tile(tile));
            hopper::pin(s);
            hopper::wgmma_fence();
#pragma unroll
            for (int i = 0; i < kSlices * 4; ++i) {
                const int step = (i / 4 * kSliceBytes + i % 4 * 32) >> 4;
                hopper::wgmma<false>(s, q + step, k + step, i > 0);
            }
            hopper::wgmma_commit();
            hopper::wgmma_wait<0>();
            hopper::pin(s);

            const int end = kv_len - (first_tile + tile) * kBlockN;
            if (end < kBlockN) {  // only in the last tile of the sequence
#pragma unroll
                for (int i = 0; i < 32; ++i)
                    if (i / 4 * 8 + 2 * (lane % 4) + i % 2 >= end) s[i] = -INFINITY;
            }
            float shrink[2];
            bool raise = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float most = -INFINITY;
#pragma unroll
                for (int c = 0; c < 8; ++c) most = fmaxf(most, fmaxf(s[4 * c + 2 * half], s[4 * c + 2 * half + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                most = most > row_max[half] + args.slack ? most : row_max[half];
                raise |= most != row_max[half];
                shrink[half] = hopper::exp2((row_max[half] - most) * args.scale_log2);
                row_max[half] = most;
                row_sum[half] *= shrink[half];
                const float shift = most * args.scale_log2;
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    float* const x = &s[4 * c + 2 * half];
                    x[0] = hopper::exp2(fmaf(x[0], args.scale_log2, -shift));
                    x[1] = hopper::exp2(fmaf(x[1], args.scale_log2, -shift));
                    row_sum[half] += x[0] + x[1];
                }
            }
            raise = __any_sync(~0u, raise);
#pragma unroll
            for (int i = 0; i < 16; ++i) p[i] = hopper::pack(s[2 * i], s[2 * i + 1]);

            if (tile > 0) hopper::named_sync(kFreeP, 256);  // the other warpgroup has taken the last P
#pragma unroll
            for (int i = 0; i < 16; ++i) {  // column block i / 2 of row row0 or row0 + 8
                const int row = row0 + 8 * (i % 2);
                *reinterpret_cast<uint32_t*>(p_tile + hopper::swizzled(row, i / 2) + 4 * (lane % 4)) = p[i];
            }
            if (lane % 4 == 0) factors[row0] = shrink[0], factors[row0 + 8] = shrink[1];
            if (lane == 0) flags[warp] = raise;
            hopper::proxy_fence();
            hopper::named_arrive(kReadyP, 256);

            if (raise) rescale(shrink[0], shrink[1]);
            const uint64_t v = values(tile);
            hopper::pin(o);
            hopper::wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) hopper::wgmma<true>(o, p + 4 * i, v + (i * 16 * 128 >> 4), 1);
            hopper::wgmma_commit();
            hopper::wgmma_wait<0>();
            hopper::pin(o);
            release(tile);
        }
        if (tiles > 0) hopper::named_sync(kFreeP, 256);  // factors may be overwritten
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = row_sum[half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            inverse[half] = sum > 0.0f ? 1.0f / sum : 0.0f;
            const int row = row0 + 8 * half;
            if (lane % 4 != 0) continue;
            factors[row] = inverse[half];
            if (part.num_splits > 1 && head0 + row < args.num_heads)
                args.lse[static_cast<int64_t>(part.row + part.split) * args.num_heads + head0 + row] =
                    row_max[half] * args.scale_log2 + log2f(sum);
        }
        hopper::named_sync(kBoth, 256);
    } else {
        for (int tile = 0; tile < tiles; ++tile) {
            hopper::named_sync(kReadyP, 256);
            hopper::barrier_wait(full + tile % kStages,
                                 tile / kStages & 1);  // passes: the other warpgroup has used the tile
            hopper::proxy_fence();
            if (flags[warp]) rescale(factors[row0], factors[row0 + 8]);
            const uint64_t p = hopper::descriptor(p_tile), v = values(tile);
            hopper::pin(o);
            hopper::wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) hopper::wgmma<true>(o, p + (i * 32 >> 4), v + (i * 16 * 128 >> 4), 1);
            hopper::wgmma_commit();
            hopper::wgmma_wait<0>();
            hopper::pin(o);
            hopper::named_arrive(kFreeP, 256);
            release(tile);
        }
        hopper::named_sync(kBoth, 256);
        inverse[0] = factors[row0], inverse[1] = factors[row0 + 8];
    }

    // Epilogue: divide by the sum. The whole sequence's result is the output, a part's goes to the workspace.
    const bool whole = part.num_splits == 1;
    const int64_t first_row = static_cast<int64_t>(whole ? sequence : part.row + part.split) * args.num_heads + head0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = row0 + 8 * half;
        const bool wanted = head0 + row < args.num_heads;
        const int64_t out = (first_row + row) * kDimCkv + 256 * consumer;
        if (!whole) {
            if (wanted)
#pragma unroll
                for (int c = 0; c < 32; ++c)
                    *reinterpret_cast<float2*>(args.partial + out + 8 * c + 2 * (lane % 4)) =
                        float2{o[4 * c + 2 * half] * inverse[half], o[4 * c + 2 * half + 1] * inverse[half]};
            continue;
        }
        // Four lanes hold a row, 2 columns of every 8 each; they swap so that each has 8 columns of every 32.
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = 4 * (4 * c + j) + 2 * half;
                x[j] = hopper::pack(o[at] * inverse[half], o[at + 1] * inverse[half]);
            }
            hopper::gather_columns(x, lane);
            if (wanted)
                *reinterpret_cast<uint4*>(args.output + out + 32 * c + 8 * (lane % 4)) = uint4{x[0], x[1], x[2], x[3]};
        }
    }
}

// ---- Host ----------------------------------------------------------------------------------------------------------

// Device memory of at least `bytes` bytes, kept for later calls. An outgrown piece stays: earlier launches may use it.
char* workspace(int64_t bytes) {
    static char* data = nullptr;
    static int64_t size = 0;
    if (bytes > size) {
        char* larger = nullptr;
        const cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&larger), bytes);
        if (error != cudaSuccess) {
            fprintf(stderr, "run_kernel: no workspace of %lld bytes: %s\n", (long long)bytes,
                    cudaGetErrorString(error));
            return nullptr;
        }
        data = larger, size = bytes;
    }
    return data;
}

void launch(Args args, int64_t seq_len) {
    args.head_tiles = (args.num_heads + kBlockM - 1) / kBlockM;
    // As many parts as run at once. Each sequence may round up to a part more than its share: with many sequences the
    // spare parts that this takes are half a chip's. No sequence needs more than seq_len / kMinKeys parts and one.
    const int64_t batch = args.batch_size, at_once = kMultiprocessors / args.head_tiles;
    const int64_t resident = at_once > 1 ? at_once : 1;
    const int64_t wanted = resident > batch + (resident + 1) / 2 ? resident : batch + (resident + 1) / 2;
    const int64_t needed = seq_len <= kMinKeys ? batch : batch * ((seq_len + kMinKeys - 1) / kMinKeys + 1);
    const int64_t parts = wanted < needed ? wanted : needed, blocks = parts * args.head_tiles;
    const int64_t combine_blocks = batch * args.num_heads;
    if (blocks > INT32_MAX || combine_blocks > INT32_MAX) {
        fprintf(stderr, "run_kernel: batch_size = %lld with num_heads = %d are more blocks than one launch takes\n",
                (long long)batch, args.num_heads);
        return;
    }
    args.max_parts = static_cast<int>(parts);
    // Cut sequences have at most resident + 1 parts together.
    const int64_t rows = (resident + 1) * args.num_heads, plans = batch < 1024 ? 1024 : batch;
    char* const memory = workspace(rows * (kDimCkv + 1) * 4 + plans * 8);
    if (memory == nullptr) return;
    args.partial = reinterpret_cast<float*>(memory);
    args.plan = reinterpret_cast<int2*>(memory + rows * kDimCkv * 4);
    args.lse = reinterpret_cast<float*>(memory + rows * kDimCkv * 4 + plans * 8);

    cudaError_t error = cudaFuncSetAttribute(mla_decode, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytesShared);
    if (error == cudaSuccess) {
        mla_decode<<<static_cast<int>(blocks), kThreads, kBytesShared>>>(args);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess && parts > batch) {
        const int grid = static_cast<int>(combine_blocks);
        if (parts >= 16 * batch)
            combine<8><<<grid, kDimCkv / 4 * 8>>>(args);
        else if (parts >= 8 * batch)
            combine<2><<<grid, kDimCkv / 4 * 2>>>(args);
        else
            combine<1><<<grid, kDimCkv / 4>>>(args);
        error = cudaGetLastError();
    }
    if (error != cudaSuccess) fprintf(stderr, "run_kernel: launch failed: %s\n", cudaGetErrorString(error));
}

extern "C" void run_kernel(const __nv_bfloat16* q_nope, const __nv_bfloat16* q_pe, const __nv_bfloat16* ckv,
                           const __nv_bfloat16* kpe, __nv_bfloat16* output, const int32_t*, const int32_t* kv_indptr,
                           const int32_t* kv_indices, const int32_t* kv_lens, int64_t batch_size, int64_t seq_len,
                           int64_t num_heads, int64_t head_dim_ckv, int64_t head_dim_kpe, int64_t page_size, int64_t) {
    if (batch_size == 0 || num_heads == 0) return;
    if (head_dim_ckv != kDimCkv || head_dim_kpe != kDimKpe) {
        fprintf(stderr, "run_kernel: head dims (%lld, %lld): only (512, 64) are there\n", (long long)head_dim_ckv,
                (long long)head_dim_kpe);
        return;
    }
    if (page_size < 1) {
        fprintf(stderr, "run_kernel: page_size = %lld is not positive\n", (long long)page_size);
        return;
    }
    Args args{q_nope, q_pe, ckv, kpe, output, kv_indptr, kv_indices, kv_lens};
    args.batch_size = static_cast<int>(batch_size);
    args.num_heads = static_cast<int>(num_heads);
    args.page_size = static_cast<int>(page_size);
    args.page_shift = -1;
    for (int shift = 0; shift < 31; ++shift)
        if (page_size == int64_t(1) << shift) args.page_shift = shift;
    args.scale_log2 = 1.44269504f / sqrtf(kDimCkv + kDimKpe);
    args.slack = kLazy / args.scale_log2;
    launch(args, seq_len);
}
