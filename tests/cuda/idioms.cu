// Idioms of public CUDA code, written once for waves of 32 and of 64 lanes, and the runtime calls around them. `which`
// chooses; x: 4096 floats (16 x 16 tiles: A at 0, B at 4096 / 2), y: 4096 floats.
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <math_constants.h>
#include <stdint.h>

#include <cstdio>

namespace cg = cooperative_groups;

constexpr int kTile = 16;

template <class T>
__device__ __forceinline__ T wave_sum(T value) {
#pragma unroll
    for (int offset = warpSize / 2; offset > 0; offset >>= 1) value += __shfl_down_sync(~0ull, value, offset);
    return value;
}

// Sum of n floats: wave reductions, then one over the waves' results, then one atomic per block.
__global__ void block_sum(const float* x, float* y, int n) {
    __shared__ float partial[32];
    const int lane = threadIdx.x % warpSize, wave = threadIdx.x / warpSize;
    float sum = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
    sum = wave_sum(sum);
    if (lane == 0) partial[wave] = sum;
    __syncthreads();
    if (wave == 0) {
        sum = wave_sum(lane < int(blockDim.x) / warpSize ? partial[lane] : 0.0f);
        if (lane == 0) atomicAdd(y, sum);
    }
}

// C = A B for n x n row-major matrices, tiles of 16 x 16 in shared memory.
__global__ void __launch_bounds__(kTile* kTile) tiled_gemm(const float* a, const float* b, float* c, int n) {
    __shared__ float tile_a[kTile][kTile + 1], tile_b[kTile][kTile];
    const int row = blockIdx.y * kTile + threadIdx.y, col = blockIdx.x * kTile + threadIdx.x;
    float sum = 0.0f;
    for (int k = 0; k < n; k += kTile) {
        tile_a[threadIdx.y][threadIdx.x] = __ldg(a + row * n + k + threadIdx.x);
        tile_b[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + col];
        __syncthreads();
        for (int i = 0; i < kTile; ++i) sum = fmaf(tile_a[threadIdx.y][i], tile_b[i][threadIdx.x], sum);
        __syncthreads();
    }
    c[row * n + col] = sum;
}

// Inclusive scan of one block, Hillis and Steele, double-buffered in dynamic shared memory.
__global__ void scan(const float* x, float* y) {
    extern __shared__ float buffer[];
    const int n = blockDim.x, i = threadIdx.x;
    int in = 0;
    buffer[i] = x[i];
    __syncthreads();
    for (int offset = 1; offset < n; offset *= 2) {
        const int out = 1 - in;
        buffer[out * n + i] = buffer[in * n + i] + (i >= offset ? buffer[in * n + i - offset] : 0.0f);
        in = out;
        __syncthreads();
    }
    y[i] = buffer[in * n + i];
}

// Histogram of 16 bins with shared atomics; x holds small whole numbers.
__global__ void histogram(const float* x, int* y, int n) {
    __shared__ int bins[16];
    if (threadIdx.x < 16) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&bins[int(x[i]) & 15], 1);
    __syncthreads();
    if (threadIdx.x < 16) y[threadIdx.x] = bins[threadIdx.x];
}

// Split and combine in one launch: the block that takes the last ticket adds up what all have left.
__device__ unsigned tickets = 0;
__global__ void last_block(const float* x, float* workspace, float* y) {
    __shared__ bool last;
    const float sum = wave_sum(x[blockIdx.x * warpSize + threadIdx.x]);
    if (threadIdx.x == 0) {
        workspace[blockIdx.x] = sum;
        __threadfence();
        last = atomicInc(&tickets, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    const float total = wave_sum(threadIdx.x < gridDim.x ? workspace[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) y[0] = total;
}

// Cooperative groups, tiles of 16.
__global__ void tiles(const float* x, float* y) {
    const auto block = cg::this_thread_block();
    const auto tile = cg::tiled_partition<16>(block);
    float best = -CUDART_INF_F;
    best = fmaxf(best, x[block.thread_rank()]);
    for (int offset = 8; offset > 0; offset /= 2) best = fmaxf(best, tile.shfl_xor(best, offset));
    block.sync();
    if (tile.thread_rank() == 0) y[tile.meta_group_rank()] = best;
}

__constant__ float coefficients[4];
template <int kDegree>
__global__ void polynomial(const float* x, float* y, const float4 shift) {
    const float v = x[threadIdx.x] + shift.y;
    float sum = 0.0f;
#pragma unroll
    for (int k = kDegree; k >= 0; --k) sum = sum * v + coefficients[k];
    y[threadIdx.x] = sum;
}

// How much memory lies behind a pointer, as a submission asks without linking the driver.
using AddressRange = int (*)(unsigned long long*, size_t*, unsigned long long);
static size_t bytes_behind(const void* pointer, bool through_runtime) {
    void* symbol = nullptr;
    if (through_runtime) {
        cudaGetDriverEntryPoint("cuMemGetAddressRange", &symbol, cudaEnableDefault);
    } else {
        for (const char* name : {"cuMemGetAddressRange_v2", "wcuMemGetAddressRange"})
            if (symbol == nullptr) symbol = dlsym(RTLD_DEFAULT, name);
    }
    unsigned long long base = 0;
    size_t bytes = 0;
    if (symbol == nullptr) return 0;
    if (reinterpret_cast<AddressRange>(symbol)(&base, &bytes, reinterpret_cast<unsigned long long>(pointer)) != 0)
        return 0;
    return base == reinterpret_cast<unsigned long long>(pointer) ? bytes : 0;
}

static void describe(const float* x, float* y) {
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, 0);
    int processors = 0;
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
    const float values[] = {float(p.warpSize),
                            float(processors),
                            float(p.sharedMemPerBlock),
                            float(p.maxThreadsPerBlock),
                            float(bytes_behind(x, false)),
                            float(bytes_behind(x, true)),
                            float(bytes_behind(x + 1, true)),
                            float(cudaGetLastError())};
    cudaMemcpyAsync(y, values, sizeof values, cudaMemcpyHostToDevice);
}

extern "C" void run_kernel(const float* x, float* y, int64_t which) {
    static float* workspace = nullptr;
    if (workspace == nullptr && cudaMalloc(&workspace, 4096) != cudaSuccess) return;
    switch (which) {
        case 0:
            cudaMemsetAsync(y, 0, sizeof(float));
            return block_sum<<<3, 256>>>(x, y, 4000);
        case 1:
            return tiled_gemm<<<dim3(2, 2), dim3(kTile, kTile)>>>(x, x + 2048, y, 32);
        case 2:
            return scan<<<1, 256, 2 * 256 * sizeof(float)>>>(x, y);
        case 3:
            return histogram<<<1, 128>>>(x, reinterpret_cast<int*>(y), 4096);
        case 4:
            return last_block<<<20, warpSize>>>(x, workspace, y);
        case 5:
            return tiles<<<1, 128>>>(x, y);
        case 6: {
            const float c[4] = {1.0f, 2.0f, 3.0f, 4.0f};
            cudaMemcpyToSymbol(coefficients, c, sizeof c);
            float4 shift = make_float4(0.0f, 0.5f, 0.0f, 0.0f);
            void* args[] = {&x, &y, &shift};
            cudaLaunchKernel(polynomial<3>, dim3(1), dim3(64), args, 0, nullptr);
            return;
        }
        case 7:
            return describe(x, y);
    }
}
