// fused_moe for NVIDIA Hopper alone (sm_90a): TMA with multicast, wgmma, warp specialisation. Not the file to paste.
//
// Two blocks of a cluster share a tile of 128 rows and take neighbouring columns: each loads half of the rows and sends
// it to both, since the L2 cache could not feed two full tiles at the rate of the matrix units. In a block warpgroup 0
// loads 128 bytes of K a step through a ring of four steps, warpgroups 1 and 2 multiply 64 rows each. Warpgroup 2 stays
// two steps behind, so that one's epilogue runs beside the other's products. Blocks stay and take tile after tile.
//
// nvcc 13.0, -O3, compute_90a: no spills. Times are in the README.

#include "../../common/hopper.cuh"

constexpr int kBlockM = 128, kBlockK = 128, kStages = 4, kCluster = 2, kThreads = 384;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // 128 * 40 + 256 * 232 <= 65536
constexpr int kGroupM = 16;  // row tiles that run side by side before the next columns
constexpr int kLag = 2;      // steps by which the second warpgroup follows the first

// ---- shared section: also in the files beside this one. Master copy: shared.cuh of the task -------------------------
// ---- Shapes --------------------------------------------------------------------------------------------------------
// Nothing here but host arithmetic: which EM, N, K and E the sizes of the allocations allow.

struct Shape {
    int64_t em, n, k, e;
};

// The published shapes. They are here only because the interface carries none, and because an allocator that keeps
// memory rounds sizes up, so that they alone no longer tell the shape.
constexpr Shape kPublished[] = {
    {4096, 4096, 7168, 256}, {32768, 4096, 7168, 256}, {4096, 7168, 2048, 256}, {32768, 7168, 2048, 256}};

enum Tensor { kA, kB, kScaleA, kScaleB, kWeights, kTokens, kExperts, kOut, kTensors };
constexpr const char* kNames[kTensors] = {"a",           "b_col_major", "scale_a",    "scale_b",
                                          "moe_weights", "token_ids",   "expert_ids", "out"};

struct Range {  // a pointer, and the allocation that it points into
    uint64_t pointer, base, bytes;
};

inline uint64_t bytes_of(const Shape& s, int tensor) {
    switch (tensor) {
        case kA:
            return s.em * s.k;
        case kB:
            return s.e * s.n * s.k;
        case kScaleB:
            return 4 * s.e * s.n;
        case kExperts:
            return 4 * (s.em / 128);
        case kOut:
            return 2 * s.em * s.n;
        default:
            return 4 * s.em;
    }
}

// Every tensor is an allocation of its own, to the byte: four of the sizes give the shape, all eight have to agree.
inline bool solve(const Range (&ranges)[kTensors], Shape& shape) {
    const int64_t em = ranges[kScaleA].bytes / 4;
    if (em == 0) return false;
    const int64_t k = ranges[kA].bytes / em, n = ranges[kOut].bytes / 2 / em;
    if (k == 0 || n == 0 || k > INT64_MAX / n) return false;
    shape = {em, n, k, static_cast<int64_t>(ranges[kB].bytes / (n * k))};
    if (em % 128 != 0 || n % 128 != 0 || k % 128 != 0 || shape.e == 0) return false;
    for (int i = 0; i < kTensors; ++i)
        if (ranges[i].pointer != ranges[i].base || ranges[i].bytes != bytes_of(shape, i)) return false;
    return true;
}

// Bytes from a tensor's pointer to the next of the other tensors, or to the end of the allocation.
inline uint64_t room(const Range (&ranges)[kTensors], int tensor) {
    uint64_t end = ranges[tensor].base + ranges[tensor].bytes;
    for (int i = 0; i < kTensors; ++i)
        if (ranges[i].pointer > ranges[tensor].pointer && ranges[i].pointer < end) end = ranges[i].pointer;
    return end - ranges[tensor].pointer;
}

// Whether the allocations are those that an allocator which keeps memory makes for the shape: all tensors have room,
// and the ranges of a, b and out are what it rounds them up to: PyTorch takes 20 MiB for 1 to 10, else whole 2 MiB.
inline bool fits(const Range (&ranges)[kTensors], const Shape& shape) {
    constexpr uint64_t kMiB = 1 << 20;
    for (int i = 0; i < kTensors; ++i) {
        const uint64_t need = bytes_of(shape, i), has = ranges[i].bytes;
        if (room(ranges, i) < need) return false;
        const bool rounded = has < need + 2 * kMiB || (need < 10 * kMiB && has == 20 * kMiB);
        if ((i == kA || i == kB || i == kOut) && !rounded) return false;
    }
    return true;
}

// The one shape that the allocations allow; false when there is none or more than one.
inline bool resolve(const Range (&ranges)[kTensors], Shape& shape) {
    if (solve(ranges, shape)) return true;
    int found = 0;
    for (const Shape& published : kPublished)
        if (fits(ranges, published)) shape = published, ++found;
    return found == 1;
}

// ---- Order of tiles -------------------------------------------------------------------------------------------------

// order[i] = row tile at place i when tiles are sorted by expert. One block per tile counts those that come before.
__global__ void __launch_bounds__(128) sort_tiles(const int32_t* expert_ids, int32_t* order) {
    __shared__ int before;
    const int tile = blockIdx.x, tiles = gridDim.x, expert = expert_ids[tile];
    if (threadIdx.x == 0) before = 0;
    __syncthreads();
    int count = 0;
    for (int other = threadIdx.x; other < tiles; other += 128) {
        const int its = expert_ids[other];
        count += its < expert || (its == expert && other < tile);
    }
    if (count > 0) atomicAdd(&before, count);
    __syncthreads();
    if (threadIdx.x == 0) order[before] = tile;
}
// ---- end of shared section ------------------------------------------------------------------------------------------

// ---- Kernels -------------------------------------------------------------------------------------------------------

template <int kBlockN>
struct Config {
    static constexpr int kBytesA = kBlockM * kBlockK, kBytesB = kBlockN * kBlockK, kBytesStage = kBytesA + kBytesB;
    static constexpr int kOffsetBarriers = kStages * kBytesStage;
    static constexpr int kBytesShared = kOffsetBarriers + 2 * kStages * 8 + 1024;  // 1024: to align the tiles
    static_assert(kBytesShared <= 227 << 10, "shared memory of a multiprocessor");
};

struct Args {
    const float *scale_a, *scale_b, *moe_weights;
    const int32_t *expert_ids, *order;
    __nv_bfloat16* out;
    int tiles, n, k;
};

// Which tile of rows and which columns: groups of neighbours in the sorted order; in a group column by column.
struct Work {
    int expert, row0, column0;
};
template <int kBlockN>
__device__ __forceinline__ Work work_of(const Args& args, int item, int rank) {
    const int group_items = kGroupM * (args.n / (kCluster * kBlockN)), group = item / group_items;
    const int in_group = item % group_items, group_tiles = min(kGroupM, args.tiles - group * kGroupM);
    const int tile = args.order[group * kGroupM + in_group % group_tiles];
    return {args.expert_ids[tile], tile * kBlockM, (in_group / group_tiles * kCluster + rank) * kBlockN};
}

template <int kBlockN>
__global__ void __launch_bounds__(kThreads, 1)
    fused_moe(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, const Args args) {
    using C = Config<kBlockN>;
    extern __shared__ char raw[];
    char* const shared = raw + (-hopper::shared_address(raw) & 1023);  // the same offset in every block
    uint64_t *const full = reinterpret_cast<uint64_t*>(shared + C::kOffsetBarriers), *const empty = full + kStages;
    const auto a_tile = [&](int step) { return shared + step % kStages * C::kBytesStage; };
    const auto b_tile = [&](int step) { return a_tile(step) + C::kBytesA; };
    const int rank = hopper::cluster_rank(), warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int steps = args.k / kBlockK, items = args.tiles * (args.n / (kCluster * kBlockN));
    const int first = blockIdx.x / kCluster, stride = gridDim.x / kCluster;

    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            hopper::barrier_init(full + s, 1);
            hopper::barrier_init(empty + s, kCluster * 8);
        }
        hopper::barriers_ready();
    }
    __syncthreads();
    hopper::cluster_sync();

    if (warpgroup == 0) {  // ---- load
        hopper::set_registers<kProducerRegisters, false>();
        if (threadIdx.x == 0) {
            int loaded = 0;
            for (int item = first; item < items; item += stride) {
                const Work w = work_of<kBlockN>(args, item, rank);
                const int b_row = w.expert * args.n + w.column0;
                for (int step = 0; step < steps; ++step, ++loaded) {
                    uint64_t* const barrier = full + loaded % kStages;
                    hopper::barrier_wait(empty + loaded % kStages, (loaded / kStages & 1) ^ 1);  // of both blocks
                    hopper::barrier_expect(barrier, C::kBytesStage);
                    hopper::tma_load_to_all<kCluster>(a_tile(loaded) + rank * (C::kBytesA / kCluster), &a_map, barrier,
                                                      step * kBlockK, w.row0 + rank * (kBlockM / kCluster));
                    hopper::tma_load(b_tile(loaded), &b_map, barrier, step * kBlockK, b_row);
                }
            }
        }
    } else {  // ---- compute
        hopper::set_registers<kConsumerRegisters, true>();
        const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32;
        const int row_in_tile = 64 * consumer + thread / 32 * 16 + lane / 4;  // and 8 more
        int taken = 0;
        if (consumer == 1) hopper::named_sync(1, 256);
        for (int item = first; item < items; item += stride) {
            const Work w = work_of<kBlockN>(args, item, rank);
            int sums[kBlockN / 2];
            for (int step = 0; step < steps; ++step, ++taken) {
                hopper::barrier_wait(full + taken % kStages, taken / kStages & 1);
                const uint64_t a = hopper::descriptor(a_tile(taken) + consumer * 64 * kBlockK);
                const uint64_t b = hopper::descriptor(b_tile(taken));
                hopper::pin(sums);
                hopper::wgmma_fence();
#pragma unroll
                for (int i = 0; i < kBlockK / 32; ++i) hopper::wgmma(sums, a + 2 * i, b + 2 * i, step > 0 || i > 0);
                hopper::wgmma_commit();
                // The products of the step before are done: its tiles may be overwritten.
                hopper::wgmma_wait<1>();
                if (step > 0 && lane < kCluster) hopper::barrier_arrive_at(empty + (taken - 1) % kStages, lane);
                if (consumer == 0 && taken == kLag - 1) hopper::named_arrive(1, 256);
            }
            hopper::wgmma_wait<0>();
            hopper::pin(sums);
            if (lane < kCluster) hopper::barrier_arrive_at(empty + (taken - 1) % kStages, lane);

            // Epilogue: the factors in the contract's order, each product rounded to float32, then to bf16. Four lanes
            // hold a row, 2 columns of every 8 each; they swap so that each has 8 columns of every 32, 16 bytes.
            const float* const scale_b =
                args.scale_b + static_cast<int64_t>(w.expert) * args.n + w.column0 + 2 * (lane % 4);
            const int row = w.row0 + row_in_tile;
            const float row_scale[2] = {args.scale_a[row], args.scale_a[row + 8]};
            const float weight[2] = {args.moe_weights[row], args.moe_weights[row + 8]};
            __nv_bfloat16* const out = args.out + static_cast<int64_t>(row) * args.n + w.column0 + 8 * (lane % 4);
#pragma unroll
            for (int c = 0; c < kBlockN / 32; ++c) {
                float2 column_scale[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    column_scale[j] = __ldg(reinterpret_cast<const float2*>(scale_b + 8 * (4 * c + j)));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t x[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int at = 4 * (4 * c + j) + 2 * half;
                        x[j] = hopper::pack(
                            static_cast<float>(sums[at]) * row_scale[half] * column_scale[j].x * weight[half],
                            static_cast<float>(sums[at + 1]) * row_scale[half] * column_scale[j].y * weight[half]);
                    }
                    hopper::gather_columns(x, lane);
                    *reinterpret_cast<uint4*>(out + static_cast<int64_t>(8 * half) * args.n + 32 * c) =
                        uint4{x[0], x[1], x[2], x[3]};
                }
            }
        }
        if (consumer == 0 && taken < kLag)
            hopper::named_arrive(1, 256);  // shorter than the lag: the other one must still start
    }
    hopper::cluster_sync();  // the other block may still send to this one's memory and barriers
}

// ---- Host ----------------------------------------------------------------------------------------------------------

// EM, N, K and E of this call. Asked anew each time: an address can come back with another shape behind it, and eight
// look-ups of the driver are cheaper than any check whether they are needed.
bool find_shape(const void* const (&pointers)[kTensors], Shape& shape) {
    using AddressRange = CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr);
    static const auto address_range = hopper::driver_function<AddressRange>("cuMemGetAddressRange");
    if (address_range == nullptr) {
        fprintf(stderr, "run_kernel: the driver has no cuMemGetAddressRange, and without it EM, N and K are unknown\n");
        return false;
    }
    Range ranges[kTensors];
    for (int i = 0; i < kTensors; ++i) {
        size_t bytes = 0;
        ranges[i].pointer = reinterpret_cast<uint64_t>(pointers[i]);
        CUdeviceptr base = 0;
        const int error = address_range(&base, &bytes, ranges[i].pointer);
        ranges[i].base = base, ranges[i].bytes = bytes;
        if (error != 0) {
            fprintf(stderr, "run_kernel: cuMemGetAddressRange of %s (%p) failed with error %d\n", kNames[i],
                    pointers[i], error);
            return false;
        }
    }
    if (resolve(ranges, shape)) return true;
    fprintf(stderr,
            "run_kernel: the sizes of the allocations do not tell EM, N and K; make every tensor an allocation of its "
            "own (PYTORCH_NO_CUDA_MEMORY_CACHING=1). Bytes of the range, from the pointer on:");
    for (int i = 0; i < kTensors; ++i)
        fprintf(stderr, " %s %llu, %llu%s", kNames[i], (unsigned long long)ranges[i].bytes,
                (unsigned long long)(ranges[i].base + ranges[i].bytes - ranges[i].pointer),
                i + 1 < kTensors ? ";" : "\n");
    return false;
}

template <int kBlockN>
cudaError_t launch(const int8_t* a, const int8_t* b, const Shape& shape, const Args& args) {
    using C = Config<kBlockN>;
    CUtensorMap a_map, b_map;
    const cuuint64_t k = shape.k, a_rows = shape.em, b_rows = shape.e * shape.n;
    if (!hopper::make_map<2>(&a_map, a, 1, {k, a_rows}, {kBlockK, kBlockM / kCluster}) ||
        !hopper::make_map<2>(&b_map, b, 1, {k, b_rows}, {kBlockK, kBlockN}))
        return cudaErrorInvalidValue;
    const cudaError_t error =
        cudaFuncSetAttribute(fused_moe<kBlockN>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytesShared);
    if (error != cudaSuccess) return error;
    const int64_t blocks = kCluster * (shape.em / kBlockM) * (shape.n / (kCluster * kBlockN));
    const int resident = hopper::multiprocessors() / kCluster * kCluster;
    return hopper::launch_in_clusters<kCluster>(fused_moe<kBlockN>,
                                                blocks < resident ? static_cast<int>(blocks) : resident, kThreads,
                                                C::kBytesShared, a_map, b_map, args);
}

extern "C" void run_kernel(const int8_t* a, const int8_t* b_col_major, const float* scale_a, const float* scale_b,
                           const float* moe_weights, const int32_t* token_ids, const int32_t* expert_ids, int64_t,
                           __nv_bfloat16* out) {
    Shape shape;
    if (!find_shape({a, b_col_major, scale_a, scale_b, moe_weights, token_ids, expert_ids, out}, shape)) return;
    const int64_t tiles = shape.em / kBlockM;
    if (shape.k > INT32_MAX || shape.e * shape.n > INT32_MAX || shape.em > INT32_MAX ||
        tiles * (shape.n / 64) > INT32_MAX) {
        fprintf(stderr, "run_kernel: EM = %lld, N = %lld, K = %lld are more than one launch takes\n",
                (long long)shape.em, (long long)shape.n, (long long)shape.k);
        return;
    }
    static int32_t* order = nullptr;  // (tiles,) grows with the largest call
    static int64_t order_tiles = 0;
    cudaError_t error = cudaSuccess;
    if (tiles > order_tiles) {
        if (order != nullptr) cudaFree(order);
        order = nullptr, order_tiles = 0;
        error = cudaMalloc(reinterpret_cast<void**>(&order), tiles * sizeof(int32_t));
        if (error == cudaSuccess) order_tiles = tiles;
    }
    if (error == cudaSuccess) {
        const Args args{scale_a,
                        scale_b,
                        moe_weights,
                        expert_ids,
                        order,
                        out,
                        static_cast<int>(tiles),
                        static_cast<int>(shape.n),
                        static_cast<int>(shape.k)};
        sort_tiles<<<static_cast<int>(tiles), 128>>>(expert_ids, order);
        error = shape.n % 512 == 0   ? launch<256>(a, b_col_major, shape, args)
                : shape.n % 256 == 0 ? launch<128>(a, b_col_major, shape, args)
                                     : launch<64>(a, b_col_major, shape, args);
    }
    if (error != cudaSuccess) fprintf(stderr, "run_kernel: launch failed: %s\n", cudaGetErrorString(error));
}
