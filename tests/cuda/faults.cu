// One planted fault per kernel; `which` chooses. x: 1024 floats, y: 1024 floats that nobody has written.
#include <cassert>
#include <cuda_runtime.h>
#include <stdint.h>

constexpr int kN = 1024;

__global__ void copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }

__global__ void read_past_end(const float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x + kN - 63];  // planted 1
}
__global__ void write_before_start(float* y) { y[int(threadIdx.x) - 1] = 1.0f; }           // planted 2
__global__ void read_unwritten(float* y) { y[threadIdx.x] = y[threadIdx.x + 64] + 1.0f; }  // planted 3
__global__ void read_unwritten_workspace(const float* workspace, float* y) {
    y[threadIdx.x] = workspace[threadIdx.x];  // planted 4
}
__global__ void misaligned(const float* x, float* y) {
    const float4 v = *reinterpret_cast<const float4*>(x + 1);  // planted 5
    y[threadIdx.x] = v.x + v.w;
}
__global__ void missing_barrier(const float* x, float* y) {
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = tile[255 - threadIdx.x];
}
__global__ void missing_second_barrier(const float* x, float* y) {
    __shared__ float tile[256];
    float sum = 0.0f;
    for (int step = 0; step < 2; ++step) {
        tile[threadIdx.x] = x[256 * step + threadIdx.x];  // the other waves still read the last step's tile
        __syncthreads();
        sum += tile[255 - threadIdx.x];
    }
    y[threadIdx.x] = sum;
}
__global__ void missing_syncwarp(const float* x, float* y) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = tile[63 - threadIdx.x];  // one wave, but nothing orders its lanes
}
__global__ void unwritten_shared(float* y) {
    extern __shared__ float dynamic_tile[];
    if (threadIdx.x < 32) dynamic_tile[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = dynamic_tile[threadIdx.x];  // planted 9
}
__global__ void past_dynamic_shared(float* y) {
    extern __shared__ float dynamic_tile[];
    dynamic_tile[threadIdx.x] = 1.0f;  // planted 10
    y[threadIdx.x] = dynamic_tile[threadIdx.x];
}
__global__ void past_static_shared(float* y) {
    __shared__ float tile[64];
    tile[threadIdx.x + 1000] = 1.0f;  // planted 11
    y[threadIdx.x] = 0.0f;
}
__global__ void half_mask_shuffle(const float* x, float* y) {
    float v = x[threadIdx.x];
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);  // planted 12
    y[threadIdx.x] = v;
}
__global__ void divergent_shuffle(const float* x, float* y) {
    float v = x[threadIdx.x];
    if (threadIdx.x < 32) v += __shfl_xor_sync(~0ull, v, 1);  // planted 13
    __syncthreads();
    y[threadIdx.x] = v;
}
__global__ void absent_source(const float* x, float* y) {
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0xffffull, x[threadIdx.x], 20);  // planted 14
}
__global__ void early_exit(const float* x, float* y) {
    if (threadIdx.x >= 100) return;
    __syncthreads();  // planted 15
    y[threadIdx.x] = x[threadIdx.x];
}
__global__ void two_barriers(const float* x, float* y) {
    if (threadIdx.x < 64) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    y[threadIdx.x] = x[threadIdx.x];
}
__global__ void large_static_shared(float* y) {
    __shared__ float tile[66560 / 4];  // planted 17
    tile[threadIdx.x] = 1.0f;
    y[threadIdx.x] = tile[threadIdx.x];
}
__global__ void spin(volatile float* y) {
    if (threadIdx.x == 0) y[0] = 0.0f;
    while (y[0] == 0.0f) {  // planted 20
    }
}
__global__ void block_race(float* y) { y[threadIdx.x] = float(blockIdx.x); }  // planted 21
__global__ void same_value(float* y) { y[threadIdx.x] = 1.0f; }
__global__ void local_pointer(const float* x, float* y) { y[threadIdx.x] = *x; }    // planted 23
__global__ void divide(int* y, int by) { y[threadIdx.x] = 7 / by; }                 // planted 24
__global__ void __launch_bounds__(64) bounded(float* y) { y[threadIdx.x] = 0.0f; }  // planted 25
__global__ void asserts(float* y) {
    assert(threadIdx.x < 3);  // planted 26
    y[threadIdx.x] = 0.0f;
}
__device__ float recurse(const float* x, int depth) {
    volatile float pad[4096];
    pad[depth % 4096] = x[0];
    return depth == 0 ? pad[0] : recurse(x, depth - 1) + pad[depth % 4096];
}
__global__ void deep(const float* x, float* y) { y[threadIdx.x] = recurse(x, 1000); }
__global__ void past_allocation_by_memcpy(const float* x, float* y) { memcpy(y + kN - 4, x, 32); }  // planted 28
__global__ void byte_race(const float*, float* y) {
    __shared__ uint8_t bytes[256];
    bytes[threadIdx.x] = 1;  // neighbours share words: no race
    __syncthreads();
    y[threadIdx.x] = bytes[255 - threadIdx.x];
}

__device__ __noinline__ float element(const float* x, int i) {
    return x[i];  // planted 32
}
__global__ void through_helper(const float* x, float* y) { y[threadIdx.x] = element(x, 5000); }
__global__ void fill(float* y, float value) { y[blockIdx.x * 64 + threadIdx.x] = value; }

extern "C" void run_kernel(const float* x, float* y, int64_t which) {
    switch (which) {
        case 0:
            return copy<<<1, kN>>>(x, y);
        case 1:
            return read_past_end<<<1, 64>>>(x, y);
        case 2:
            return write_before_start<<<1, 64>>>(y);
        case 3:
            return read_unwritten<<<1, 64>>>(y);
        case 4: {
            float* workspace = nullptr;
            cudaMalloc(&workspace, 256);
            return read_unwritten_workspace<<<1, 64>>>(workspace, y);
        }
        case 5:
            return misaligned<<<1, 64>>>(x, y);
        case 6:
            return missing_barrier<<<1, 256>>>(x, y);
        case 7:
            return missing_second_barrier<<<1, 256>>>(x, y);
        case 8:
            return missing_syncwarp<<<1, 64>>>(x, y);
        case 9:
            return unwritten_shared<<<1, 64, 256>>>(y);
        case 10:
            return past_dynamic_shared<<<1, 65, 256>>>(y);
        case 11:
            return past_static_shared<<<1, 64>>>(y);
        case 12:
            return half_mask_shuffle<<<1, 64>>>(x, y);
        case 13:
            return divergent_shuffle<<<1, 64>>>(x, y);
        case 14:
            return absent_source<<<1, 64>>>(x, y);
        case 15:
            return early_exit<<<1, 128>>>(x, y);
        case 16:
            return two_barriers<<<1, 128>>>(x, y);
        case 17:
            return large_static_shared<<<1, 64>>>(y);
        case 18:
            return unwritten_shared<<<1, 64, 66560>>>(y);
        case 19:
            return copy<<<1, 1025>>>(x, y);
        case 20:
            return spin<<<1, 64>>>(y);
        case 21:
            return block_race<<<2, 64>>>(y);
        case 22:
            return same_value<<<2, 64>>>(y);
        case 23: {
            float host = 1.0f;
            return local_pointer<<<1, 64>>>(&host, y);
        }
        case 24:
            return divide<<<1, 64>>>(reinterpret_cast<int*>(y), 0);
        case 25:
            return bounded<<<1, 65>>>(y);
        case 26:
            return asserts<<<1, 64>>>(y);
        case 27:
            return deep<<<1, 64>>>(x, y);
        case 28:
            return past_allocation_by_memcpy<<<1, 1>>>(x, y);
        case 29:
            return byte_race<<<1, 256>>>(x, y);
        case 30:
            return copy<<<0, 64>>>(x, y);
        case 31:
            return local_pointer<<<1, 64>>>(nullptr, y);
        case 32:
            return through_helper<<<1, 64>>>(x, y);
        case 33:
            for (int launch = 0; launch < 5; ++launch) fill<<<16, 64>>>(y, float(launch));
            return;
    }
}
