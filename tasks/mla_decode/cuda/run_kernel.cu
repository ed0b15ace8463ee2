// Multi-head latent attention, decode: one query per sequence against a paged latent cache, bf16; the latent part of a
// cache row is key and value at once: output = softmax((q_nope ckv^T + q_pe kpe^T) / sqrt(512 + 64)) ckv.
// q_nope, output (batch_size, num_heads, 512), q_pe (batch_size, num_heads, 64), ckv (num_pages, page_size, 512), kpe
// (num_pages, page_size, 64); sequence b has kv_lens[b] tokens (0 gives 0) in pages kv_indices[kv_indptr[b]] .., any
// page size. q_indptr and causal say nothing new for one query each. What lies behind the last token is never read.
// Algorithm: the heads are the rows. Sequences are cut into NUM_SPLITS parts by their true lengths, so that one grid
// fills the chip. A block walks over the keys of a part; a tile of keys in shared memory serves the scores and, by
// columns, the output. Two waves share 16 rows of scores, each with half of the 576 columns of Q in registers; for the
// output every wave has all rows and its own columns. A second launch weighs the parts by exp2(lse - largest lse).
// Bound: memory with 64 heads, matrix products with 128.
// Workspace, kept between calls: (kMultiprocessors * blocks / head tiles + 1) * num_heads * 2052 + batch_size * 8
// bytes, 17.8 MB for 132 multiprocessors and 64 heads.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>

// ---- arch section: the only part that knows the device. Master copy: tasks/common/arch.cuh --------------------------
// Acc: 16 x 16 accumulators. Operands: 16 rows x 64 bytes of k (32 bf16 or 64 int8). All are spread over one wave.
// A product c[i][j] += sum_k a[i][k] b[j][k] takes two operands of one origin, as each has its own order of k:
// load_a (or load_a_direct) x load_b, load_direct x load_direct, or acc_to_operand x (load_columns or
// transpose_columns). Half operands are 16 rows x 16 bf16 of k: acc_to_half x transpose_half. Tiles in shared memory
// start at a multiple of 128 bytes; a row is a multiple of 128 bytes too.
namespace arch {
template <class T>
__device__ __forceinline__ T& at(const void* base, int64_t byte) {
    return *reinterpret_cast<T*>(const_cast<char*>(static_cast<const char*>(base)) + byte);
}
// Where 16-byte unit `unit` of row `row` lies: permuted within 128 bytes, so that 8 rows hit 8 groups of banks.
template <int kRowBytes>
__device__ __forceinline__ int swizzle(int row, int unit) {
    return row * kRowBytes + ((unit & ~7) << 4) + (((unit ^ row) & 7) << 4);
}
template <int kRows, int kRowBytes, int kThreads>
struct Chunks {  // A tile as 16-byte chunks dealt to threads: thread t takes chunks t, t + kThreads, ...
    static constexpr int kUnits = kRowBytes / 16, kTotal = kRows * kUnits, kEach = (kTotal + kThreads - 1) / kThreads;
    // Where a step of all threads is whole rows, a thread keeps its unit and moves by kStep rows.
    static constexpr bool kWhole = kThreads % kUnits == 0;
    static constexpr int kStep = kThreads / kUnits;
    __device__ __forceinline__ static int row(unsigned tid, int i) {
        return kWhole ? tid / kUnits + i * kStep : (tid + i * kThreads) / kUnits;
    }
    __device__ __forceinline__ static int unit(unsigned tid, int i) {
        return kWhole ? tid % kUnits : (tid + i * kThreads) % kUnits;
    }
    __device__ __forceinline__ static int byte(unsigned tid, int i) {
        if (kWhole && kStep % 8 == 0) return swizzle<kRowBytes>(row(tid, 0), unit(tid, 0)) + i * kStep * kRowBytes;
        return swizzle<kRowBytes>(row(tid, i), unit(tid, i));
    }
    __device__ __forceinline__ static bool has(int tid, int i) {
        return kTotal % kThreads == 0 || tid + i * kThreads < kTotal;
    }
};

struct Strided {  // Rows at equal distances, as Stage::begin's row_ptr.
    const void* base;
    int row_bytes;
    __device__ __forceinline__ const void* operator()(int row) const {
        return &at<char>(base, int64_t(row) * row_bytes);
    }
};

#if defined(__MACA__)  // C500: waves of 64 lanes, lane = 16 g + r; a lane owns row r and four columns 4 g + v
constexpr int kWave = 64, kAccValues = 4, kRowSlots = 1;
struct alignas(16) OperandA {
    uint32_t r[4];
};
using OperandB = OperandA;
struct alignas(8) HalfA {
    uint32_t r[2];
};
using HalfB = HalfA;
template <class T>
struct Acc {
    T v[kAccValues];
    __device__ static int row(int lane, int) { return lane & 15; }
    __device__ static int col(int lane, int v) { return 4 * (lane >> 4) + v; }
    __device__ static constexpr int slot(int) { return 0; }
};
__device__ __forceinline__ int column64(int lane, int tile, int v) { return 16 * (lane >> 4) + 4 * v + tile; }
__device__ __forceinline__ void sync_block() { __syncthreadshared(); }
__device__ __forceinline__ bool any(bool p) { return __any_sync(~0ull, p) != 0; }
__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(~0ull, x, lanes); }
__device__ __forceinline__ float exp2(float x) { return __builtin_exp2f(x); }
// Two values of one row at once: v[i] and v[i + 1], i even.
__device__ __forceinline__ void fma2(float* x, float factor, float term) {
    using Pair = __NATIVE_VECTOR__(2, float);
    const Pair y = __builtin_mxc_pk_fma_f32(Pair{x[0], x[1]}, Pair{factor, factor}, Pair{term, term});
    x[0] = y[0], x[1] = y[1];
}
__device__ __forceinline__ void fma2(float2& sum, float2 x, float2 y) {
    using Pair = __NATIVE_VECTOR__(2, float);
    const Pair z = __builtin_mxc_pk_fma_f32(Pair{x.x, x.y}, Pair{y.x, y.y}, Pair{sum.x, sum.y});
    sum = {z[0], z[1]};
}
__device__ __forceinline__ void mul2(float* x, float factor) {
    using Pair = __NATIVE_VECTOR__(2, float);
    const Pair y = __builtin_mxc_pk_mul_f32(Pair{x[0], x[1]}, Pair{factor, factor});
    x[0] = y[0], x[1] = y[1];
}
template <class F>
__device__ __forceinline__ float row_reduce(float x, F op) {
    x = op(x, __shfl_xor_sync(~0ull, x, 32));
    return op(x, __shfl_xor_sync(~0ull, x, 16));
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    using Pair = __NATIVE_VECTOR__(2, float);
    const auto pair = __builtin_mxc_cvt_pk_f32tobf16(Pair{lo, hi});
    uint32_t bits;
    __builtin_memcpy(&bits, &pair, 4);
    return bits;
}
// The rows of the builtin's first argument run along v: b goes first, so that lane r holds row r of a.
__device__ __forceinline__ void mma(Acc<float>& c, const HalfA& a, const HalfB& b) {
    using Half = __NATIVE_VECTOR__(2, uint32_t);
    __NATIVE_VECTOR__(4, float) d = {c.v[0], c.v[1], c.v[2], c.v[3]};
    d = __builtin_mxc_mma_16x16x16bf16(Half{b.r[0], b.r[1]}, Half{a.r[0], a.r[1]}, d);
    c = {{d[0], d[1], d[2], d[3]}};
}
__device__ __forceinline__ void mma(Acc<float>& c, const OperandA& a, const OperandB& b) {
    mma(c, HalfA{{a.r[0], a.r[1]}}, HalfB{{b.r[0], b.r[1]}});
    mma(c, HalfA{{a.r[2], a.r[3]}}, HalfB{{b.r[2], b.r[3]}});
}
__device__ __forceinline__ void mma(Acc<int>& c, const OperandA& a, const OperandB& b) {
    __NATIVE_VECTOR__(4, int32_t) d = {c.v[0], c.v[1], c.v[2], c.v[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) d = __builtin_mxc_mma_16x16x16i8((int)b.r[i], (int)a.r[i], d);
    c = {{d[0], d[1], d[2], d[3]}};
}
__device__ __forceinline__ OperandA acc_to_operand(const Acc<float>& a, const Acc<float>& b) {
    return {{pack(a.v[0], a.v[1]), pack(a.v[2], a.v[3]), pack(b.v[0], b.v[1]), pack(b.v[2], b.v[3])}};
}
__device__ __forceinline__ HalfA acc_to_half(const Acc<float>& a) {
    return {{pack(a.v[0], a.v[1]), pack(a.v[2], a.v[3])}};
}
template <class Operand, class F>
__device__ __forceinline__ Operand load_direct(int k64, int lane, F row_ptr) {
    return at<Operand>(row_ptr(lane & 15), 64 * k64 + 16 * (lane >> 4));
}
template <class F>  // load_a's operand, straight from global memory
__device__ __forceinline__ OperandA load_a_direct(int k64, int lane, F row_ptr) {
    return load_direct<OperandA>(k64, lane, row_ptr);
}
template <int kRowBytes>
__device__ __forceinline__ OperandA load_a(const char* tile, int row0, int k64, int lane) {
    const int lane_byte = swizzle<kRowBytes>(lane & 15, lane >> 4);
    return at<OperandA>(tile, row0 * kRowBytes + (k64 >> 1) * 128 + (lane_byte ^ ((k64 & 1) << 6)));
}
template <int kRowBytes>
__device__ __forceinline__ OperandB load_b(const char* tile, int row0, int k64, int lane) {
    return load_a<kRowBytes>(tile, row0, k64, lane);
}
// out[c]: column c of a 4 x 4 block of 16-bit values given by rows.
__device__ __forceinline__ void transpose4(uint2 (&out)[4], uint2 r0, uint2 r1, uint2 r2, uint2 r3) {
    constexpr uint32_t kLow = 0x05040100, kHigh = 0x07060302;
    out[0] = {__builtin_mxc_byte_perm(r1.x, r0.x, kLow), __builtin_mxc_byte_perm(r3.x, r2.x, kLow)};
    out[1] = {__builtin_mxc_byte_perm(r1.x, r0.x, kHigh), __builtin_mxc_byte_perm(r3.x, r2.x, kHigh)};
    out[2] = {__builtin_mxc_byte_perm(r1.y, r0.y, kLow), __builtin_mxc_byte_perm(r3.y, r2.y, kLow)};
    out[3] = {__builtin_mxc_byte_perm(r1.y, r0.y, kHigh), __builtin_mxc_byte_perm(r3.y, r2.y, kHigh)};
}
template <int kRowBytes>  // from a tile that ColumnStage wrote: operand after operand, 1 KiB each
__device__ __forceinline__ void load_columns(OperandB (&out)[4], const char* tile, int key32, int d64, int lane) {
#pragma unroll
    for (int c = 0; c < 4; ++c)
        out[c] = at<OperandB>(tile, ((key32 * (kRowBytes / 128) + d64) * 4 + c) * 1024 + (lane ^ (lane >> 3 & 1)) * 16);
}
template <int kRowBytes>  // from a tile that Stage wrote
__device__ __forceinline__ void transpose_half(HalfB (&out)[4], const char* tile, int key16, int d64, int lane) {
    uint2 row[4], column[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        row[i] = at<uint2>(
            tile, swizzle<kRowBytes>(16 * key16 + (lane >> 4) * 4 + i, 8 * d64 + (lane & 15) / 2) + 8 * (lane & 1));
    transpose4(column, row[0], row[1], row[2], row[3]);
#pragma unroll
    for (int c = 0; c < 4; ++c) out[c] = {{column[c].x, column[c].y}};
}
template <int kRowBytes>
__device__ __forceinline__ void transpose_columns(OperandB (&out)[4], const char* tile, int key32, int d64, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        HalfB half[4];
        transpose_half<kRowBytes>(half, tile, 2 * key32 + h, d64, lane);
#pragma unroll
        for (int c = 0; c < 4; ++c) out[c].r[2 * h] = half[c].r[0], out[c].r[2 * h + 1] = half[c].r[1];
    }
}
// The lane's 16 of 64 columns of a row: contiguous here.
__device__ __forceinline__ void store64(__nv_bfloat16* row, const Acc<float> (&o)[4], int, float f, int lane) {
#pragma unroll
    for (int v = 0; v < 4; v += 2)
        at<uint4>(row, 32 * (lane >> 4) + 8 * v) = {
            pack(o[0].v[v] * f, o[1].v[v] * f), pack(o[2].v[v] * f, o[3].v[v] * f),
            pack(o[0].v[v + 1] * f, o[1].v[v + 1] * f), pack(o[2].v[v + 1] * f, o[3].v[v + 1] * f)};
}
__device__ __forceinline__ void store64(float* row, const Acc<float> (&o)[4], int, float f, int lane) {
#pragma unroll
    for (int v = 0; v < 4; ++v)
        at<float4>(row, 64 * (lane >> 4) + 16 * v) = {o[0].v[v] * f, o[1].v[v] * f, o[2].v[v] * f, o[3].v[v] * f};
}
// The lane's columns of a row of 16, of a product of load_b: four in a row here.
__device__ __forceinline__ void store16(__nv_bfloat16* row, const Acc<float>& o, int, int lane) {
    at<uint2>(row, 8 * (lane >> 4)) = {pack(o.v[0], o.v[1]), pack(o.v[2], o.v[3])};
}
template <int kRows, int kRowBytes, int kThreads>
struct Stage {  // global -> registers at begin, registers -> shared memory at wait
    using C = Chunks<kRows, kRowBytes, kThreads>;
    uint4 held[C::kEach];
    template <class F>
    __device__ __forceinline__ void begin(char*, int tid, int valid, F row_ptr) {
#pragma unroll
        for (int i = 0; i < C::kEach; ++i) {
            const int row = C::row(tid, i);
            held[i] = row < valid ? at<uint4>(row_ptr(row), 16 * C::unit(tid, i)) : uint4{0, 0, 0, 0};
        }
    }
    // Rows anywhere: row r is at base + kRowBytes * its place. Each lane holds the place of held_row; lanes swap them.
    static constexpr int kLanes = C::kUnits < kWave ? C::kUnits : kWave;
    __device__ __forceinline__ static int held_row(int tid) {
        static_assert(C::kWhole && C::kEach <= kLanes, "the lanes that share rows hold the places of all of them");
        return C::row(tid, tid % kLanes % C::kEach);
    }
    __device__ __forceinline__ void begin(char*, int tid, int valid, const void* base, uint32_t place) {
#pragma unroll
        for (int i = 0; i < C::kEach; ++i) {
            const int64_t from = int64_t(__shfl_sync(~0ull, place, i, kLanes)) * kRowBytes + 16 * C::unit(tid, i);
            held[i] = C::row(tid, i) < min(valid, kRows) ? at<uint4>(base, from) : uint4{0, 0, 0, 0};
        }
    }
    template <int kPending = 0>
    __device__ __forceinline__ void wait(char* tile, int tid) {
#pragma unroll
        for (int i = 0; i < C::kEach; ++i) {
            if (C::has(tid, i)) at<uint4>(tile, C::byte(tid, i)) = held[i];
        }
    }
};
template <int kRows, int kRowBytes, int kThreads>
struct ColumnStage {  // the same for load_columns: transposed on the way, once per block instead of once per wave
    // A chunk is 4 keys x 16 bytes. Its number: block of 32 keys and 64 columns, g, h (keys 16 h + 4 g ..), unit
    // (columns 8 unit ..): 16 lanes then store to 128 different bytes of the banks.
    static constexpr int kBlocks = kRowBytes / 128, kTotal = kRows * kRowBytes / 64;
    static constexpr int kEach = (kTotal + kThreads - 1) / kThreads;
    uint4 held[kEach][4];
    template <class F>
    __device__ __forceinline__ void begin(char*, int tid, int valid, F row_ptr) {
#pragma unroll
        for (int i = 0; i < 4 * kEach; ++i) {
            const int chunk = tid + i / 4 * kThreads, block = chunk >> 6;
            const int row = block / kBlocks * 32 + (chunk >> 3 & 1) * 16 + (chunk >> 4 & 3) * 4 + i % 4;
            const int byte = block % kBlocks * 128 + (chunk & 7) * 16;
            held[i / 4][i % 4] = row < valid ? at<uint4>(row_ptr(row), byte) : uint4{0, 0, 0, 0};
        }
    }
    // Rows anywhere, as for Stage: a wave's chunks of one turn are of the same 32 keys.
    __device__ __forceinline__ static int held_row(int tid) {
        static_assert(kEach <= 2 && kTotal % kThreads == 0, "64 lanes hold the places of 32 keys for each turn");
        return ((tid >> 6) + (kEach == 1 ? 0 : tid >> 5 & 1) * (kThreads >> 6)) / kBlocks * 32 + (tid & 31);
    }
    __device__ __forceinline__ void begin(char*, int tid, int valid, const void* base, uint32_t place) {
#pragma unroll
        for (int i = 0; i < 4 * kEach; ++i) {
            const int chunk = tid + i / 4 * kThreads, block = chunk >> 6;
            const int row = (chunk >> 3 & 1) * 16 + (chunk >> 4 & 3) * 4 + i % 4;
            const int64_t from = int64_t(__shfl_sync(~0ull, place, i / 4 * 32 + row)) * kRowBytes +
                                 block % kBlocks * 128 + (chunk & 7) * 16;
            held[i / 4][i % 4] = block / kBlocks * 32 + row < valid ? at<uint4>(base, from) : uint4{0, 0, 0, 0};
        }
    }
    template <int kPending = 0>
    __device__ __forceinline__ void wait(char* tile, int tid) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int chunk = tid + i * kThreads, r = 2 * (chunk & 7);  // columns 4 r + c, then 4 (r + 1) + c
            const int byte = (chunk >> 6) * 4096 + (chunk >> 4 & 3) * 256 + (chunk >> 3 & 1) * 8;
            const uint4(&key)[4] = held[i];
            uint2 even[4], odd[4];
            transpose4(even, {key[0].x, key[0].y}, {key[1].x, key[1].y}, {key[2].x, key[2].y}, {key[3].x, key[3].y});
            transpose4(odd, {key[0].z, key[0].w}, {key[1].z, key[1].w}, {key[2].z, key[2].w}, {key[3].z, key[3].w});
            if (kTotal % kThreads != 0 && chunk >= kTotal) continue;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                at<uint2>(tile, byte + c * 1024 + (r ^ r >> 3) * 16) = even[c];
                at<uint2>(tile, byte + c * 1024 + (r + 1 ^ r >> 3) * 16) = odd[c];
            }
        }
    }
};

#else  // 32 lanes, lane = 4 g + q: rows g and g + 8, columns 2 q, 2 q + 1 and the same + 8, as in PTX m16n8k16
#if defined(SIM_WARP32)  // the simulator's functions for these instructions
template <bool kTranspose>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const char* tile, int byte) {
    if constexpr (kTranspose)
        sim::ldmatrix_trans(r, tile + byte);
    else
        sim::ldmatrix(r, tile + byte);
}
__device__ __forceinline__ void mma_m16n8(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    auto& d = *reinterpret_cast<float (*)[4]>(c);
    sim::mma_m16n8k16_bf16(d, a, {b0, b1}, d);
}
__device__ __forceinline__ void mma_m16n8(int* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    auto& d = *reinterpret_cast<int (*)[4]>(c);
    sim::mma_m16n8k32_s8(d, a, {b0, b1}, d);
}
inline void cp_async16(char* tile, int byte, const void* from, bool valid) {
    sim::cp_async<16>(tile + byte, from, valid ? 16 : 0);
}
inline void cp_async_commit() { sim::cp_async_commit(); }
template <int kPending>
void cp_async_wait() {
    sim::cp_async_wait_group<kPending>();
}
inline void keep_in_loop(int&) {}
inline float exp2(float x) { return exp2f(x); }
inline uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return at<uint32_t>(&pair, 0);
}
#else                    // PTX
template <bool kTranspose>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const char* tile, int byte) {
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(tile) + byte;
    if constexpr (kTranspose)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
}
__device__ __forceinline__ void mma_m16n8(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8(int* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void cp_async16(char* tile, int byte, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(tile) + byte),
                 "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Hides a value's origin: addresses derived from it are computed in the loop, not kept in registers before it.
__device__ __forceinline__ void keep_in_loop(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ float exp2(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(hi), "f"(lo));
    return bits;
}
#endif
constexpr int kWave = 32, kAccValues = 8, kRowSlots = 2;
struct alignas(16) OperandA {
    uint32_t r[2][4];  // two steps of 32 bytes of k, each as mma.sync takes it
};
struct alignas(16) OperandB {
    uint32_t r[2][4];  // the same; r[.][0], r[.][1] are rows 0-7, r[.][2], r[.][3] rows 8-15
};
struct alignas(16) HalfA {
    uint32_t r[4];
};
struct alignas(16) HalfB {
    uint32_t r[4];
};
template <class T>
struct Acc {
    T v[kAccValues];
    __device__ static int row(int lane, int v) { return (lane >> 2) + 8 * slot(v); }
    __device__ static int col(int lane, int v) { return 2 * (lane & 3) + (v & 1) + (v & 4) * 2; }
    __device__ static constexpr int slot(int v) { return v >> 1 & 1; }
};
__device__ __forceinline__ int column64(int lane, int tile, int v) { return 16 * tile + Acc<float>::col(lane, v); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ bool any(bool p) { return __any_sync(~0u, p) != 0; }
__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
__device__ __forceinline__ void fma2(float* x, float factor, float term) {
    x[0] = fmaf(x[0], factor, term), x[1] = fmaf(x[1], factor, term);
}
__device__ __forceinline__ void fma2(float2& sum, float2 x, float2 y) {
    sum = {fmaf(x.x, y.x, sum.x), fmaf(x.y, y.y, sum.y)};
}
__device__ __forceinline__ void mul2(float* x, float factor) { x[0] *= factor, x[1] *= factor; }
template <class F>
__device__ __forceinline__ float row_reduce(float x, F op) {
    x = op(x, __shfl_xor_sync(~0u, x, 1));
    return op(x, __shfl_xor_sync(~0u, x, 2));
}
template <class T>
__device__ __forceinline__ void mma(Acc<T>& c, const OperandA& a, const OperandB& b) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < 2; ++n) mma_m16n8(c.v + 4 * n, a.r[h], b.r[h][2 * n], b.r[h][2 * n + 1]);
}
__device__ __forceinline__ void mma(Acc<float>& c, const HalfA& a, const HalfB& b) {
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_m16n8(c.v + 4 * n, a.r, b.r[2 * n], b.r[2 * n + 1]);
}
__device__ __forceinline__ OperandA acc_to_operand(const Acc<float>& a, const Acc<float>& b) {
    return {{{pack(a.v[0], a.v[1]), pack(a.v[2], a.v[3]), pack(a.v[4], a.v[5]), pack(a.v[6], a.v[7])},
             {pack(b.v[0], b.v[1]), pack(b.v[2], b.v[3]), pack(b.v[4], b.v[5]), pack(b.v[6], b.v[7])}}};
}
__device__ __forceinline__ HalfA acc_to_half(const Acc<float>& a) {
    return {{pack(a.v[0], a.v[1]), pack(a.v[2], a.v[3]), pack(a.v[4], a.v[5]), pack(a.v[6], a.v[7])}};
}
__device__ __forceinline__ OperandA put_direct(OperandA, uint4 x, uint4 y) {
    return {{{x.x, y.x, x.y, y.y}, {x.z, y.z, x.w, y.w}}};
}
__device__ __forceinline__ OperandB put_direct(OperandB, uint4 x, uint4 y) {
    return {{{x.x, x.y, y.x, y.y}, {x.z, x.w, y.z, y.w}}};
}
template <class Operand, class F>
__device__ __forceinline__ Operand load_direct(int k64, int lane, F row_ptr) {
    const uint4 x = at<uint4>(row_ptr(lane >> 2), 64 * k64 + 16 * (lane & 3));
    const uint4 y = at<uint4>(row_ptr((lane >> 2) + 8), 64 * k64 + 16 * (lane & 3));
    return put_direct(Operand{}, x, y);
}
template <class F>  // load_a's operand, straight from global memory
__device__ __forceinline__ OperandA load_a_direct(int k64, int lane, F row_ptr) {
    OperandA a;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        a.r[i / 4][i % 4] =
            at<uint32_t>(row_ptr((lane >> 2) + i % 2 * 8), 64 * k64 + 32 * (i / 4) + 8 * (i % 4 & 2) + 4 * (lane & 3));
    return a;
}
template <class Operand, int kRowBytes>
__device__ __forceinline__ Operand load_rows(const char* tile, int row0, int k64, int row, int unit) {
    const int lane_byte = swizzle<kRowBytes>(row, unit);
    Operand f;
#pragma unroll
    for (int h = 0; h < 2; ++h)
        ldmatrix_x4<false>(f.r[h], tile, row0 * kRowBytes + (k64 >> 1) * 128 + (lane_byte ^ ((k64 & 1) << 6 | h << 5)));
    return f;
}
template <int kRowBytes>
__device__ __forceinline__ OperandA load_a(const char* tile, int row0, int k64, int lane) {
    return load_rows<OperandA, kRowBytes>(tile, row0, k64, lane & 15, lane >> 4);
}
template <int kRowBytes>
__device__ __forceinline__ OperandB load_b(const char* tile, int row0, int k64, int lane) {
    return load_rows<OperandB, kRowBytes>(tile, row0, k64, (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}
template <int kRowBytes>
__device__ __forceinline__ void load_columns(OperandB (&out)[4], const char* tile, int key32, int d64, int lane) {
    const int lane_byte = swizzle<kRowBytes>(lane & 15, lane >> 4);
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            ldmatrix_x4<true>(out[c].r[h], tile,
                              (32 * key32 + 16 * h) * kRowBytes + d64 * 128 + (lane_byte ^ (c << 5)));
}
template <int kRowBytes>
__device__ __forceinline__ void transpose_columns(OperandB (&out)[4], const char* tile, int key32, int d64, int lane) {
    load_columns<kRowBytes>(out, tile, key32, d64, lane);
}
template <int kRowBytes>
__device__ __forceinline__ void transpose_half(HalfB (&out)[4], const char* tile, int key16, int d64, int lane) {
    const int lane_byte = swizzle<kRowBytes>(lane & 15, lane >> 4);
#pragma unroll
    for (int c = 0; c < 4; ++c)
        ldmatrix_x4<true>(out[c].r, tile, 16 * key16 * kRowBytes + d64 * 128 + (lane_byte ^ (c << 5)));
}
// The lane's 16 of 64 columns of the row in `slot`: eight pairs here.
__device__ __forceinline__ void store64(__nv_bfloat16* row, const Acc<float> (&o)[4], int slot, float f, int lane) {
#pragma unroll
    for (int p = 0; p < 8; ++p)
        at<uint32_t>(row, 16 * p + 4 * (lane & 3)) =
            pack(o[p / 2].v[p % 2 * 4 + 2 * slot] * f, o[p / 2].v[p % 2 * 4 + 2 * slot + 1] * f);
}
__device__ __forceinline__ void store64(float* row, const Acc<float> (&o)[4], int slot, float f, int lane) {
#pragma unroll
    for (int p = 0; p < 8; ++p)
        at<float2>(row, 32 * p + 8 * (lane & 3)) = {o[p / 2].v[p % 2 * 4 + 2 * slot] * f,
                                                    o[p / 2].v[p % 2 * 4 + 2 * slot + 1] * f};
}
// The lane's columns of a row of 16, of a product of load_b: two pairs here.
__device__ __forceinline__ void store16(__nv_bfloat16* row, const Acc<float>& o, int slot, int lane) {
#pragma unroll
    for (int p = 0; p < 2; ++p)
        at<uint32_t>(row, 16 * p + 4 * (lane & 3)) = pack(o.v[4 * p + 2 * slot], o.v[4 * p + 2 * slot + 1]);
}
template <int kRows, int kRowBytes, int kThreads>
struct Stage {  // cp.async: global -> shared memory; one group per begin
    using C = Chunks<kRows, kRowBytes, kThreads>;
    template <class F>
    __device__ __forceinline__ void begin(char* tile, int tid, int valid, F row_ptr) {
        int first = C::row(tid, 0);
        keep_in_loop(first);
#pragma unroll
        for (int i = 0; i < C::kEach; ++i) {
            const int row = C::kWhole ? first + i * C::kStep : C::row(tid, i);
            const void* from = row < valid ? &at<char>(row_ptr(row), 16 * C::unit(tid, i)) : nullptr;
            if (C::has(tid, i)) cp_async16(tile, C::byte(tid, i), from, row < valid);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void begin(char* tile, int tid, int valid, Strided rows) {
        if constexpr (!C::kWhole) return begin<Strided>(tile, tid, valid, rows);
        const char* from = &at<char>(rows(C::row(tid, 0)), 16 * C::unit(tid, 0));
        int left = valid - C::row(tid, 0);
        keep_in_loop(left);
#pragma unroll
        for (int i = 0; i < C::kEach; ++i) {
            if (C::has(tid, i)) cp_async16(tile, C::byte(tid, i), from, i * C::kStep < left);
            from += C::kStep * int64_t(rows.row_bytes);
        }
        cp_async_commit();
    }
    // Rows anywhere: row r is at base + kRowBytes * its place. Each lane holds the place of held_row; lanes swap them.
    static constexpr int kLanes = C::kUnits < kWave ? C::kUnits : kWave;
    __device__ __forceinline__ static int held_row(int tid) {
        static_assert(C::kWhole && C::kEach <= kLanes, "the lanes that share rows hold the places of all of them");
        return C::row(tid, tid % kLanes % C::kEach);
    }
    __device__ __forceinline__ void begin(char* tile, int tid, int valid, const void* base, uint32_t place) {
        const char* const column = &at<char>(base, 16 * C::unit(tid, 0));
        int left = valid - C::row(tid, 0);
        keep_in_loop(left);
#pragma unroll
        for (int i = 0; i < C::kEach; ++i) {
            const char* from = &at<char>(column, int64_t(__shfl_sync(~0u, place, i, kLanes)) * kRowBytes);
            if (C::has(tid, i)) cp_async16(tile, C::byte(tid, i), from, i * C::kStep < left);
        }
        cp_async_commit();
    }
    template <int kPending = 0>
    __device__ __forceinline__ void wait(char*, int) {
        cp_async_wait<kPending>();
    }
};
template <int kRows, int kRowBytes, int kThreads>
using ColumnStage = Stage<kRows, kRowBytes, kThreads>;
#endif
}  // namespace arch
// ---- end of arch section --------------------------------------------------------------------------------------------

// ---- Tuning --------------------------------------------------------------------------------------------------------

struct Tiling {
    int row_groups;  // of 16 heads: BLOCK_M; two waves each
    int block_n;     // keys per step
    int slots;       // tiles of keys in shared memory
    bool lag;        // the output takes a tile one step after the scores: fewer waits, but one slot more
    int blocks;      // that one multiprocessor holds at a time
};
// 64 lanes. The next tile waits in registers, so one slot is enough: 49 KiB for 64 heads. 32 keys halve the barriers.
constexpr Tiling kC500[] = {
    {1, 16, 1, false, 3},
    {2, 16, 1, false, 2},
    {4, 32, 1, false, 1},
};
// 32 lanes. A step of 16 keys, so that three slots fit: one for the output, one for the scores, one loading. 64 heads x
// 512 columns of output fill half of the registers of a multiprocessor, which therefore holds one block.
constexpr Tiling kSm80[] = {
    {1, 16, 2, false, 4},  // four blocks of two waves overlap by themselves
    {2, 16, 3, true, 2},
    {4, 16, 3, true, 1},
};
constexpr int kMultiprocessors = arch::kWave == 64 ? 104 : 132;
constexpr int kMinKeys = 64;  // per part: a part costs a launch's share of set-up and 2 KiB of workspace per head

// A running maximum is raised only when a score exceeds it by 2^kLazy: P stays below 256, far from any limit of bf16 or
// float32, and after the first tiles nearly every rescaling of the accumulators is saved.
constexpr float kLazy = 8.0f;
constexpr float kNoScore = -3.0e38f;  // finite: the first tile's rescaling is by exp2(-large) = 0, never by NaN
constexpr int kDimCkv = 512, kDimKpe = 64;

template <int kRowGroups>
struct Config {
    static constexpr Tiling kTiling = (arch::kWave == 64 ? kC500 : kSm80)[kRowGroups / 2];
    static_assert(kTiling.row_groups == kRowGroups, "rows of the tables are for 1, 2 and 4 groups");
    static constexpr int kRows = 16 * kRowGroups, kThreads = 2 * kRowGroups * arch::kWave;
    static constexpr int kBlockN = kTiling.block_n, kSlots = kTiling.slots;
    static constexpr bool kLag = kTiling.lag;
    // With lag the waves of half 1 load, while the others multiply: tensor units never wait for addresses.
    static constexpr int kLoaders = kLag ? kThreads / 2 : kThreads;
    static_assert(kLag ? kSlots >= 3 : kSlots >= (arch::kWave == 64 ? 1 : 2), "a tile is loaded while others are read");
    // Shared memory: tiles of keys, (kBlockN, 512) and (kBlockN, 64) each; half scores, (kRows, kBlockN) f32; P,
    // (kRows, kBlockN) bf16, the factors (kRows,) by which a tile rescales and whether it does, (kRowGroups,), twice if
    // the output lags; 1 / sum, (kRows,).
    static constexpr int kBuffers = kLag ? 2 : 1;
    static constexpr int kBytesCkv = kBlockN * kDimCkv * 2, kBytesTile = kBytesCkv + kBlockN * kDimKpe * 2;
    static constexpr int kBytesP = kRows * kBlockN * 2, kBytesFactors = kRows * 4 + 16;
    static constexpr int kOffsetScores = kSlots * kBytesTile;
    static constexpr int kOffsetP = kOffsetScores + kRows * kBlockN * 4;
    static constexpr int kOffsetFactors = kOffsetP + kBuffers * kBytesP;
    static constexpr int kOffsetInverse = kOffsetFactors + kBuffers * kBytesFactors;
    static constexpr int kBytesShared = kOffsetInverse + kRows * 4;
    static_assert(kBytesShared <= 64 << 10, "a block of the C500 has 64 KiB of shared memory");
};

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

template <int kRowGroups>
__global__ void __launch_bounds__(Config<kRowGroups>::kThreads) mla_decode(const Args args) {
    using C = Config<kRowGroups>;
    using arch::Acc;
    using arch::at;
    constexpr int kBlockN = C::kBlockN, kThreads = C::kThreads, kHalfSteps = kDimCkv / 64;
    constexpr int kGroups64 = 4 / kRowGroups;  // of 64 columns of the output, per wave
    extern __shared__ __align__(128) char shared[];
    const int tid = threadIdx.x, lane = tid % arch::kWave, wave = tid / arch::kWave;
    const int row_group = wave % kRowGroups, half = wave / kRowGroups;  // of the scores: rows, and half of the 576

    // Work: the head tiles of a part are neighbours, so that all but the first find its keys in the L2 cache.
    const int head0 = static_cast<int>(blockIdx.x) % args.head_tiles * C::kRows;
    const Part part = find_part(args, static_cast<int>(blockIdx.x) / args.head_tiles, kBlockN,
                                &at<int>(shared, C::kOffsetScores), tid, kThreads);
    const int sequence = part.sequence;
    if (sequence < 0) return;
    if (part.split == 0 && head0 == 0 && tid == 0) args.plan[sequence] = {part.row, part.num_splits};
    const int kv_len = args.kv_lens[sequence], page_begin = args.kv_indptr[sequence];
    const int64_t all_tiles = (kv_len + kBlockN - 1) / kBlockN;
    const int first_tile = static_cast<int>(all_tiles * part.split / part.num_splits);
    const int tiles = static_cast<int>(all_tiles * (part.split + 1) / part.num_splits) - first_tile;

    // Loads: where a token lies, in rows of the cache; rows past the last come as zeros.
    using CkvStage = arch::Stage<kBlockN, kDimCkv * 2, C::kLoaders>;
    using KpeStage = arch::Stage<kBlockN, kDimKpe * 2, C::kLoaders>;
    const int loader = tid - (kThreads - C::kLoaders);
    CkvStage ckv_stage;
    KpeStage kpe_stage;
    const auto place = [&](int key) -> uint32_t {
        if (key >= kv_len) return 0;
        const int page = args.page_shift >= 0 ? key >> args.page_shift : key / args.page_size;
        return static_cast<uint32_t>(args.kv_indices[page_begin + page]) * args.page_size + key - page * args.page_size;
    };
    uint32_t ckv_place = 0, kpe_place = 0;  // of the tile that is loaded next
    const auto look_up = [&](int tile) {
        ckv_place = place((first_tile + tile) * kBlockN + CkvStage::held_row(loader));
        kpe_place = place((first_tile + tile) * kBlockN + KpeStage::held_row(loader));
    };
    const auto ckv_tile = [&](int tile) { return shared + tile % C::kSlots * C::kBytesTile; };
    const auto begin = [&](int tile) {
        const int valid = kv_len - (first_tile + tile) * kBlockN;
        ckv_stage.begin(ckv_tile(tile), loader, valid, args.ckv, ckv_place);
        kpe_stage.begin(ckv_tile(tile) + C::kBytesCkv, loader, valid, args.kpe, kpe_place);
        look_up(tile + 1);
    };
    if (loader >= 0 && tiles > 0) {
        look_up(0);
        begin(0);
    }

    // Q: 16 rows x (256 + 32) columns per wave, kept. Rows past the last head repeat it.
    const auto head = [&](int row) {
        return static_cast<int64_t>(sequence) * args.num_heads + min(head0 + 16 * row_group + row, args.num_heads - 1);
    };
    arch::OperandA q[kHalfSteps + 1];
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i)
        q[i] = arch::load_a_direct(kHalfSteps * half + i, lane,
                                   [&](int row) { return args.q_nope + head(row) * kDimCkv; });
    q[kHalfSteps] = arch::load_a_direct(half, lane, [&](int row) { return args.q_pe + head(row) * kDimKpe; });

    Acc<float> s[kBlockN / 16];                   // (16, kBlockN) per wave
    Acc<float> o[kRowGroups][kGroups64][4] = {};  // (kRows, 64 * kGroups64) per wave
    float row_max[arch::kRowSlots];               // of the raw scores, in the waves of half 0
    float row_sum[arch::kRowSlots] = {};          // this lane's share of it
#pragma unroll
    for (int slot = 0; slot < arch::kRowSlots; ++slot) row_max[slot] = kNoScore;
    constexpr int kQuads = arch::kAccValues / 4;
    const auto half_score = [&](int n, int quad) -> float4& {  // of this lane, in shared memory
        const int index = (row_group * (kBlockN / 16) + n) * kQuads + quad;
        return at<float4>(shared, C::kOffsetScores + (index * arch::kWave + lane) * 16);
    };
    const auto p_operand = [&](int tile, int group, int n) -> arch::HalfA& {
        const int index = (group * (kBlockN / 16) + n) * arch::kWave + lane;
        const int bytes = static_cast<int>(sizeof(arch::HalfA));
        return at<arch::HalfA>(shared, C::kOffsetP + tile % C::kBuffers * C::kBytesP + index * bytes);
    };
    const auto factor = [&](int tile, int row) -> float& {
        return at<float>(shared, C::kOffsetFactors + tile % C::kBuffers * C::kBytesFactors + row * 4);
    };
    const auto rescales = [&](int tile, int group) -> int& {
        return at<int>(shared, C::kOffsetFactors + tile % C::kBuffers * C::kBytesFactors + (C::kRows + group) * 4);
    };

    // Half of the scores: S = Q K^T over this wave's columns. Two chains of products are in flight per 16 keys.
    const auto scores = [&](int tile) {
        const char* const ckv = ckv_tile(tile);
#pragma unroll
        for (int n = 0; n < kBlockN / 16; ++n) {
            Acc<float> odd = {};
            s[n] = {};
#pragma unroll
            for (int i = 0; i <= kHalfSteps; ++i) {
                const arch::OperandB keys = i < kHalfSteps
                                                ? arch::load_b<kDimCkv * 2>(ckv, 16 * n, kHalfSteps * half + i, lane)
                                                : arch::load_b<kDimKpe * 2>(ckv + C::kBytesCkv, 16 * n, half, lane);
                arch::mma(i % 2 == 0 ? s[n] : odd, q[i], keys);
            }
#pragma unroll
            for (int i = 0; i < arch::kAccValues; ++i) s[n].v[i] += odd.v[i];
        }
        if (half == 0) return;
#pragma unroll
        for (int n = 0; n < kBlockN / 16; ++n)
#pragma unroll
            for (int i = 0; i < kQuads; ++i)
                half_score(n, i) = {s[n].v[4 * i], s[n].v[4 * i + 1], s[n].v[4 * i + 2], s[n].v[4 * i + 3]};
    };

    // Online softmax, by the waves of half 0: P and the factors for the output go to shared memory.
    const auto softmax = [&](int tile) {
        const int end = kv_len - (first_tile + tile) * kBlockN;
#pragma unroll
        for (int n = 0; n < kBlockN / 16; ++n)
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                const float4 other = half_score(n, i);
                s[n].v[4 * i] += other.x, s[n].v[4 * i + 1] += other.y;
                s[n].v[4 * i + 2] += other.z, s[n].v[4 * i + 3] += other.w;
            }
        if (end < kBlockN) {  // only in the last tile of the sequence
#pragma unroll
            for (int n = 0; n < kBlockN / 16; ++n)
#pragma unroll
                for (int i = 0; i < arch::kAccValues; ++i)
                    if (16 * n + Acc<float>::col(lane, i) >= end) s[n].v[i] = -INFINITY;
        }
        float shift[arch::kRowSlots];
        bool raise = false;
#pragma unroll
        for (int slot = 0; slot < arch::kRowSlots; ++slot) {
            float most = -INFINITY;
#pragma unroll
            for (int n = 0; n < kBlockN / 16; ++n)
#pragma unroll
                for (int i = 0; i < arch::kAccValues; ++i)
                    if (Acc<float>::slot(i) == slot) most = fmaxf(most, s[n].v[i]);
            most = arch::row_reduce(most, [](float a, float b) { return fmaxf(a, b); });
            most = most > row_max[slot] + args.slack ? most : row_max[slot];
            raise |= most != row_max[slot];
            const float shrink = arch::exp2((row_max[slot] - most) * args.scale_log2);
            row_max[slot] = most;
            row_sum[slot] *= shrink;
            if (Acc<float>::col(lane, 0) == 0) factor(tile, 16 * row_group + Acc<float>::row(lane, 2 * slot)) = shrink;
            shift[slot] = -most * args.scale_log2;
        }
        raise = arch::any(raise);
        if (lane == 0) rescales(tile, row_group) = raise;
#pragma unroll
        for (int n = 0; n < kBlockN / 16; ++n) {
#pragma unroll
            for (int i = 0; i < arch::kAccValues; i += 2) {
                const int slot = Acc<float>::slot(i);
                float* const x = &s[n].v[i];
                arch::fma2(x, args.scale_log2, shift[slot]);
                x[0] = arch::exp2(x[0]);
                x[1] = arch::exp2(x[1]);
                row_sum[slot] += x[0] + x[1];
            }
            p_operand(tile, row_group, n) = arch::acc_to_half(s[n]);
        }
    };

    // O += P V: the values are the latent part of the keys.
    const auto accumulate = [&](int tile) {
#pragma unroll
        for (int f = 0; f < kRowGroups; ++f) {
            if (rescales(tile, f) == 0) continue;
            float shrink[arch::kRowSlots];
#pragma unroll
            for (int slot = 0; slot < arch::kRowSlots; ++slot)
                shrink[slot] = factor(tile, 16 * f + Acc<float>::row(lane, 2 * slot));
#pragma unroll
            for (int d = 0; d < kGroups64; ++d)
#pragma unroll
                for (int c = 0; c < 4; ++c)
#pragma unroll
                    for (int i = 0; i < arch::kAccValues; i += 2)
                        arch::mul2(&o[f][d][c].v[i], shrink[Acc<float>::slot(i)]);
        }
#pragma unroll
        for (int n = 0; n < kBlockN / 16; ++n) {
            arch::HalfA p[kRowGroups];
#pragma unroll
            for (int f = 0; f < kRowGroups; ++f) p[f] = p_operand(tile, f, n);
#pragma unroll
            for (int d = 0; d < kGroups64; ++d) {
                arch::HalfB values[4];
                arch::transpose_half<kDimCkv * 2>(values, ckv_tile(tile), n, wave * kGroups64 + d, lane);
#pragma unroll
                for (int f = 0; f < kRowGroups; ++f)
#pragma unroll
                    for (int c = 0; c < 4; ++c) arch::mma(o[f][d][c], p[f], values[c]);
            }
        }
    };

    for (int tile = 0; tile < tiles; ++tile) {
        if (loader >= 0) {
            ckv_stage.wait(ckv_tile(tile), loader);
            kpe_stage.wait(ckv_tile(tile) + C::kBytesCkv, loader);
        }
        arch::sync_block();  // the tile is there, so is the last P if the output lags, and one more slot is free
        if (loader >= 0 && tile + 1 < tiles) begin(tile + 1);
        if (C::kLag && tile > 0 && half == 0) accumulate(tile - 1);
        scores(tile);
        arch::sync_block();  // both halves of the scores are there
        if (half == 0) softmax(tile);
        if (C::kLag) {
            if (tile > 0 && half == 1) accumulate(tile - 1);  // products beside the others' softmax
        } else {
            arch::sync_block();  // P is there
            accumulate(tile);
            if (C::kSlots == 1) arch::sync_block();  // no wave reads the tile any more
        }
    }
    if (C::kLag && tiles > 0) {
        arch::sync_block();
        accumulate(tiles - 1);
    }

    // Epilogue: divide by the sum. The whole sequence's result is the output, a part's goes to the workspace.
    const bool whole = part.num_splits == 1;
    const int64_t row0 = static_cast<int64_t>(whole ? sequence : part.row + part.split) * args.num_heads + head0;
    const int rows = args.num_heads - head0;  // that are left for this tile and those after it
    if (half == 0) {
#pragma unroll
        for (int slot = 0; slot < arch::kRowSlots; ++slot) {
            const float sum = arch::row_reduce(row_sum[slot], [](float a, float b) { return a + b; });
            const int row = 16 * row_group + Acc<float>::row(lane, 2 * slot);
            if (Acc<float>::col(lane, 0) != 0) continue;
            at<float>(shared, C::kOffsetInverse + row * 4) = sum > 0.0f ? 1.0f / sum : 0.0f;
            if (!whole && row < rows) args.lse[row0 + row] = row_max[slot] * args.scale_log2 + log2f(sum);
        }
    }
    arch::sync_block();
#pragma unroll
    for (int f = 0; f < kRowGroups; ++f)
#pragma unroll
        for (int slot = 0; slot < arch::kRowSlots; ++slot) {
            const int row = 16 * f + Acc<float>::row(lane, 2 * slot);
            const float inverse = at<float>(shared, C::kOffsetInverse + row * 4);
            if (row >= rows) continue;
            const int64_t out = (row0 + row) * kDimCkv + wave * kGroups64 * 64;
#pragma unroll
            for (int d = 0; d < kGroups64; ++d)
                if (whole)
                    arch::store64(args.output + out + 64 * d, o[f][d], slot, inverse, lane);
                else
                    arch::store64(args.partial + out + 64 * d, o[f][d], slot, inverse, lane);
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

template <int kRowGroups>
void launch(Args args, int64_t seq_len) {
    using C = Config<kRowGroups>;
    args.head_tiles = (args.num_heads + C::kRows - 1) / C::kRows;
    // As many parts as run at once. Each sequence may round up to a part more than its share: with many sequences the
    // spare parts that this takes are half a chip's. No sequence needs more than seq_len / kMinKeys parts and one.
    const int64_t batch = args.batch_size, at_once = kMultiprocessors * C::kTiling.blocks / args.head_tiles;
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

    cudaError_t error =
        cudaFuncSetAttribute(mla_decode<kRowGroups>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytesShared);
    if (error == cudaSuccess) {
        mla_decode<kRowGroups><<<static_cast<int>(blocks), C::kThreads, C::kBytesShared>>>(args);
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
    if (num_heads <= 16) return launch<1>(args, seq_len);
    if (num_heads <= 32) return launch<2>(args, seq_len);
    launch<4>(args, seq_len);
}
