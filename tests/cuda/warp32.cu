// The 32-lane mode: fragments of mma.sync and ldmatrix, and cp.async; `which` chooses. One warp.
// x: 2048 bf16 or int8 bits as given by the test; y: 1024 words.
#include <cuda_bf16.h>
#include <stdint.h>

// Fragments by hand from row-major A (16 x K bytes) at x and B^T (8 x K bytes) at x + 1024, K bytes a row.
__device__ void fragments(const unsigned char* x, uint32_t (&a)[4], uint32_t (&b)[2]) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    auto word = [&](int row, int byte) { return *reinterpret_cast<const uint32_t*>(x + row * 32 + byte); };
    a[0] = word(g, 4 * t);
    a[1] = word(g + 8, 4 * t);
    a[2] = word(g, 16 + 4 * t);
    a[3] = word(g + 8, 16 + 4 * t);
    b[0] = word(32 + g, 4 * t);
    b[1] = word(32 + g, 16 + 4 * t);
}
template <class T>
__device__ void store(T* y, const T (&d)[4]) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    y[g * 8 + 2 * t] = d[0];
    y[g * 8 + 2 * t + 1] = d[1];
    y[(g + 8) * 8 + 2 * t] = d[2];
    y[(g + 8) * 8 + 2 * t + 1] = d[3];
}
__global__ void mma_bf16(const unsigned char* x, float* y, bool swap_rows) {
    uint32_t a[4], b[2];
    fragments(x, a, b);
    if (swap_rows) {  // a wrong layout on purpose: registers 1 and 2 exchanged
        const uint32_t other = a[1];
        a[1] = a[2];
        a[2] = other;
    }
    float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    sim::mma_m16n8k16_bf16(d, a, b, d);
    store(y, d);
}
__global__ void mma_s8(const unsigned char* x, int* y) {
    uint32_t a[4], b[2];
    fragments(x, a, b);
    int d[4] = {1, 1, 1, 1};
    sim::mma_m16n8k32_s8(d, a, b, d);
    store(y, d);
}
// A through ldmatrix.x4, B through ldmatrix.x2 (trans: B itself, 16 x 8, is what lies in memory at x + 1024).
__global__ void through_ldmatrix(const unsigned char* x, float* y, bool trans) {
    __shared__ __align__(16) unsigned char tile[2048];
    for (int i = threadIdx.x; i < 2048; i += 32) tile[i] = x[i];
    __syncwarp();
    const int l = threadIdx.x;
    uint32_t a[4], b[2];
    sim::ldmatrix(a, tile + (l % 16) * 32 + l / 16 * 16);
    if (trans)
        sim::ldmatrix_trans(b, tile + 1024 + (l % 16) * 16);
    else
        sim::ldmatrix(b, tile + 1024 + (l % 8) * 32 + (l / 8 % 2) * 16);
    float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    sim::mma_m16n8k16_bf16(d, a, b, d);
    store(y, d);
}
__global__ void async_copy(const unsigned char* x, int* y, bool wait) {
    __shared__ __align__(16) int tile[2][128];
    for (int stage = 0; stage < 2; ++stage) {
        sim::cp_async<16>(&tile[stage][4 * threadIdx.x], x + 512 * stage + 16 * threadIdx.x, stage == 0 ? 16 : 4);
        sim::cp_async_commit();
    }
    if (wait) sim::cp_async_wait_group<1>();
    __syncwarp();
    y[threadIdx.x] = tile[0][4 * (31 - threadIdx.x) + 1];
    sim::cp_async_wait_group<0>();
    __syncwarp();
    y[32 + threadIdx.x] = tile[1][4 * (31 - threadIdx.x)];
    y[64 + threadIdx.x] = tile[1][4 * (31 - threadIdx.x) + 1];
    y[96 + threadIdx.x] = __dp4a(0x01ff7f80, 0x02030405, int(threadIdx.x));
}

extern "C" void run_kernel(const void* x, void* y, int64_t which) {
    const auto* bytes = static_cast<const unsigned char*>(x);
    switch (which) {
        case 0:
            return mma_bf16<<<1, 32>>>(bytes, static_cast<float*>(y), false);
        case 1:
            return mma_bf16<<<1, 32>>>(bytes, static_cast<float*>(y), true);
        case 2:
            return mma_s8<<<1, 32>>>(bytes, static_cast<int*>(y));
        case 3:
            return through_ldmatrix<<<1, 32>>>(bytes, static_cast<float*>(y), false);
        case 4:
            return through_ldmatrix<<<1, 32>>>(bytes, static_cast<float*>(y), true);
        case 5:
            return async_copy<<<1, 32>>>(bytes, static_cast<int*>(y), true);
        case 6:
            return async_copy<<<1, 32>>>(bytes, static_cast<int*>(y), false);
    }
}
