// A tiled copy through swizzled shared memory, written with CuTe: 32 rows of 64 values per block of 64 threads.
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cute/tensor.hpp>
#include <stdint.h>
using namespace cute;
__global__ void copy_kernel(const __nv_bfloat16* x, __nv_bfloat16* y, int rows) {
    extern __shared__ __align__(16) uint8_t raw[];
    auto layout_s = composition(Swizzle<3, 3, 3>{}, Layout<Shape<_32, _64>, Stride<_64, _1>>{});
    Tensor gx = make_tensor(make_gmem_ptr(reinterpret_cast<const uint16_t*>(x)), make_shape(rows, Int<64>{}),
                            make_stride(Int<64>{}, Int<1>{}));
    Tensor gy = make_tensor(make_gmem_ptr(reinterpret_cast<uint16_t*>(y)), make_shape(rows, Int<64>{}),
                            make_stride(Int<64>{}, Int<1>{}));
    Tensor sx = make_tensor(make_smem_ptr(reinterpret_cast<uint16_t*>(raw)), layout_s);
    auto tiled = make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, uint16_t>{},
                                 Layout<Shape<_8, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{});
    auto thr = tiled.get_thread_slice(threadIdx.x);
    Tensor tile_x = local_tile(gx, make_shape(Int<32>{}, Int<64>{}), make_coord(blockIdx.x, 0));
    Tensor tile_y = local_tile(gy, make_shape(Int<32>{}, Int<64>{}), make_coord(blockIdx.x, 0));
    copy(tiled, thr.partition_S(tile_x), thr.partition_D(sx));
    __syncthreads();
    copy(tiled, thr.partition_S(sx), thr.partition_D(tile_y));
}
extern "C" void run_kernel(const __nv_bfloat16* x, __nv_bfloat16* y, int64_t rows) {
    copy_kernel<<<rows / 32, 64, 4096>>>(x, y, int(rows));
}
