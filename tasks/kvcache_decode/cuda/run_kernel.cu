// KV cache decode attention: output = softmax(q k^T / sqrt(headdim)) v, one query token per sequence, bf16, any group.
// q and output (batch_size, seqlen_q = 1, num_heads, headdim), k_cache_paged and v_cache_paged (num_blocks,
// page_block_size, num_heads_k, headdim), cache_seqlens (batch_size,) from 0 to seqlen_k, block_table (batch_size,
// num_blocks / batch_size), of which entries past a sequence's last page are never read. Length 0 gives 0.
// Algorithm: split-KV without matrix instructions. A block takes one part of a sequence's keys for one KV head and the
// query heads that share it. A few lanes own a key, 16 bytes of it per load, and keep an online softmax in base 2 of
// their own; they merge once at the end. Parts go to a workspace, and the last block of a sequence and head to finish
// merges them, in their order, so that the result has the same bits every time.
// Bound: DRAM reads, 4 * headdim bytes per token and KV head. The cache is a CuTe tensor; its views are copied by CuTe.
// Workspace: 4 * (headdim + 32) bytes per query head and part, 4 per KV head: at most 4.3 MB with the tables below at
// headdim 128. It holds no results across calls.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cute/tensor.hpp>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <utility>

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
    int dim;      // headdim: this one, or with `exact` false all multiples of 8 up to it
    bool exact;   // known when compiled: no predicates
    int heads;    // query heads that a block computes at once
    int lanes;    // that share a key; a lane owns dim / lanes values of it
    int unroll;   // keys of a lane whose loads are on their way together
    int threads;  // of a block
    int blocks;   // wanted per multiprocessor
};
// Waves of 64 lanes. Blocks of 256 threads, and so many that their loads hide each other's latency.
constexpr Tiling kC500[] = {
    {128, true, 1, 8, 2, 256, 16},   // less than 128 registers: 4 waves on each of the 4 units of an AP
    {128, true, 4, 16, 2, 256, 8},   // the same
    {128, true, 8, 16, 2, 256, 8},   // 128 registers of sums and queries: 2 waves
    {128, false, 4, 16, 2, 256, 8},  // as above, with predicates
    {256, false, 4, 16, 1, 256, 8},  // 128 registers of sums and queries
    {512, false, 1, 16, 1, 256, 8},  // 64 of them
};
// Warps of 32. What blocks have on their way, K and V together: 4 blocks x 128 threads x 8 x 16 bytes = 64 KiB.
constexpr Tiling kSm80[] = {
    {128, true, 1, 8, 2, 128, 5},    // 96 registers: 5 blocks
    {128, true, 4, 16, 2, 128, 4},   // 16 lanes keep 4 heads in 64 registers of sums and queries
    {128, true, 8, 16, 2, 64, 4},    // 128 of them: 4 blocks of 64 threads
    {128, false, 4, 16, 2, 128, 4},  // as above, with predicates
    {256, false, 4, 16, 1, 128, 2},  // 128 of them
    {512, false, 1, 16, 1, 128, 4},  // 64 of them
};
constexpr int kTilings = sizeof(kSm80) / sizeof(kSm80[0]);
static_assert(sizeof(kC500) == sizeof(kSm80));
constexpr int kMultiprocessors = arch::kWave == 64 ? 104 : 132;
constexpr int kLeastKeys = arch::kWave == 64 ? 128 : 64;  // of a part, so that merging stays cheap beside reading
constexpr float kLazy = 8.0f;       // rescale only when a score passes the running maximum by a factor of 2^8
constexpr float kNoScore = -1e30f;  // finite, so that no key seen yet gives exp2(-inf) = 0, never NaN

template <int kRow>
struct Config {
    static constexpr Tiling kTiling = arch::kWave == 64 ? kC500[kRow] : kSm80[kRow];
    static constexpr int kHeads = kTiling.heads, kLanes = kTiling.lanes, kUnroll = kTiling.unroll;
    static constexpr int kThreads = kTiling.threads, kWaves = kThreads / arch::kWave;
    static constexpr int kGroups = kThreads / kLanes;          // of lanes, in a block
    static constexpr int kBlockN = kGroups * kUnroll;          // keys of a step
    static constexpr int kVectors = kTiling.dim / 8 / kLanes;  // of 16 bytes, of a lane
    // Heads whose waves meet in shared memory at a time: 8 KiB or a little more.
    static constexpr int kBytesOfHead = kWaves * (kTiling.dim + 4) * 4;
    static constexpr int kMergeHeads = kHeads * kBytesOfHead <= 9 << 10       ? kHeads
                                       : kHeads * kBytesOfHead / 2 <= 9 << 10 ? kHeads / 2
                                                                              : kHeads / 4;
    static_assert(kTiling.dim % (8 * kLanes) == 0 && arch::kWave % kLanes == 0 && kMergeHeads > 0);
};

// A part's result for one head: headdim sums, maximum, sum of weights, padded to lines of 128 bytes, so that no block
// reads a line that another one has yet to write.
constexpr __host__ __device__ int floats_of_row(int headdim) { return (headdim + 2 + 31) / 32 * 32; }

struct Args {
    const uint32_t *q, *k_cache, *v_cache;  // pairs of bf16
    uint32_t* output;
    const int32_t *cache_seqlens, *block_table;
    float* partial;     // (batch_size, num_heads_k, head_tiles, num_splits, heads of a tile, floats_of_row)
    uint32_t* tickets;  // (batch_size, num_heads_k, head_tiles), 0 between calls
    int num_heads_k, group, headdim;
    int page_block_size, page_shift, num_blocks, table_width;  // page_shift: -1 when the size is no power of two
    int num_splits, head_tiles;
    float scale_log2;  // log2(e) / sqrt(headdim)
};

// ---- Kernel --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float2 unpack(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// A lane's share of a vector of headdim bf16, as CuTe sees it: (pairs of a 16-byte unit, lanes, units).
template <int kLanes, int kVectors>
using LaneLayout = cute::Layout<cute::Shape<cute::_4, cute::Int<kLanes>, cute::Int<kVectors>>,
                                cute::Stride<cute::_1, cute::_4, cute::Int<4 * kLanes>>>;
using Copy16 = cute::Copy_Atom<cute::UniversalCopy<cute::uint128_t>, uint32_t>;

// The softmax so far of kHeads rows, over the keys that somebody has seen: what lanes, waves and blocks merge.
template <int kHeads, int kPairs>
struct State {
    float most[kHeads], sum[kHeads];  // running maximum of the scores in base 2, sum of weights
    float2 acc[kHeads][kPairs];       // weighted sums of V
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            most[h] = kNoScore;
            sum[h] = 0.0f;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) acc[h][i] = {0.0f, 0.0f};
        }
    }
    __device__ __forceinline__ void raise(int h, float to) {
        const float shrink = arch::exp2(most[h] - to);
        most[h] = to;
        sum[h] *= shrink;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) arch::mul2(&acc[h][i].x, shrink);
    }
};

template <int kRow>
__global__ void __launch_bounds__(Config<kRow>::kThreads) decode(const Args args) {
    using C = Config<kRow>;
    using cute::_;
    using cute::Int;
    constexpr int kHeads = C::kHeads, kLanes = C::kLanes, kUnroll = C::kUnroll, kVectors = C::kVectors;
    constexpr int kPairs = 4 * kVectors, kThreads = C::kThreads, kDim = C::kTiling.dim;
    const int tid = threadIdx.x, lane = tid % kLanes, lane_group = tid / kLanes, wave = tid / arch::kWave;
    const int headdim = C::kTiling.exact ? kDim : args.headdim, row_floats = floats_of_row(headdim);
    // Whether a vector of 16 bytes is part of headdim: the lane's, or that of any lane.
    const auto any_has = [&](int vector) { return C::kTiling.exact || vector * kLanes * 8 < headdim; };
    const auto has = [&](int vector) { return C::kTiling.exact || (vector * kLanes + lane) * 8 < headdim; };

    // Work: the heads of a part run side by side, since their keys lie side by side.
    const int tile = blockIdx.x % (args.num_heads_k * args.head_tiles);
    const int part = blockIdx.x / (args.num_heads_k * args.head_tiles);
    const int head_tile = tile % args.head_tiles, kv_head = tile / args.head_tiles;
    const int split = part % args.num_splits, sequence = part / args.num_splits;
    const int kv_len = args.cache_seqlens[sequence];
    const int first_head = kv_head * args.group + head_tile * kHeads;
    const int heads = min(kHeads, args.group - head_tile * kHeads);  // that exist

    // Tensors.
    const auto lanes = LaneLayout<kLanes, kVectors>{};
    const int64_t token = static_cast<int64_t>(args.num_heads_k) * (headdim / 2);
    const auto cache_layout = cute::make_layout(
        cute::make_shape(lanes.shape(), args.num_heads_k, args.page_block_size, args.num_blocks),
        cute::make_stride(lanes.stride(), headdim / 2, static_cast<int>(token), token * args.page_block_size));
    const auto k_cache = cute::make_tensor(cute::make_gmem_ptr(args.k_cache), cache_layout);
    const auto v_cache = cute::make_tensor(cute::make_gmem_ptr(args.v_cache), cache_layout);
    const auto load = [&](auto const& from, auto&& to) {  // (4, kVectors) each
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            if (has(v)) cute::copy(Copy16{}, from(_, v), to(_, v));
    };

    // The query, loaded while the length is on its way.
    float2 q[kHeads][kPairs];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        const int64_t row =
            static_cast<int64_t>(sequence) * args.num_heads_k * args.group + first_head + min(h, heads - 1);
        const auto from = cute::make_tensor(cute::make_gmem_ptr(args.q + row * (headdim / 2)), lanes);
        auto words = cute::make_tensor<uint32_t>(cute::Shape<cute::_4, Int<kVectors>>{});
        cute::clear(words);
        load(from(_, lane, _), words);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const float2 pair = unpack(words(i));
            q[h][i] = {pair.x * args.scale_log2, pair.y * args.scale_log2};
        }
    }

    // This part's keys. An empty sequence has one part too, of no keys.
    const int steps = (kv_len + C::kBlockN - 1) / C::kBlockN;
    const int split_steps = max(1, (steps + args.num_splits - 1) / args.num_splits);
    const int used_splits = max(1, (steps + split_steps - 1) / split_steps);
    const int begin = split * split_steps * C::kBlockN, end = min(kv_len, begin + split_steps * C::kBlockN);
    if (split >= used_splits) return;

    State<kHeads, kPairs> state;
    state.clear();
    auto k = cute::make_tensor<uint32_t>(cute::Shape<cute::_4, Int<kVectors>, Int<kUnroll>>{});
    auto v = cute::make_tensor<uint32_t>(cute::Shape<cute::_4, Int<kVectors>, Int<kUnroll>>{});
    cute::clear(k);
    cute::clear(v);
    // Past the end of the part its last key stands in: its loads are legal, its scores become -inf.
    const auto key_of = [&](int key0, int u) { return min(key0 + u * C::kGroups + lane_group, end - 1); };
    const auto page_of = [&](int key) {
        return args.page_shift >= 0 ? key >> args.page_shift : key / args.page_block_size;
    };
    const int32_t* const table = args.block_table + static_cast<int64_t>(sequence) * args.table_width;
    int ids[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) ids[u] = begin < end ? table[page_of(key_of(begin, u))] : 0;

    for (int key0 = begin; key0 < end; key0 += C::kBlockN) {
        // Loads: all of K, then all of V, then the page ids of the next step.
        int slots[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int key = key_of(key0, u);
            slots[u] = key - page_of(key) * args.page_block_size;
            load(k_cache(cute::make_coord(_, lane, _), kv_head, slots[u], ids[u]), k(_, _, u));
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
            load(v_cache(cute::make_coord(_, lane, _), kv_head, slots[u], ids[u]), v(_, _, u));
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) ids[u] = table[page_of(key_of(key0 + C::kBlockN, u))];

        // Scores, in base 2.
        float score[kUnroll][kHeads];
        bool raise = false;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            float2 dot[kHeads] = {};
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (!any_has(i / 4)) break;
                const float2 pair = unpack(k(i % 4, i / 4, u));
#pragma unroll
                for (int h = 0; h < kHeads; ++h) arch::fma2(dot[h], q[h][i], pair);
            }
            const bool valid = key0 + u * C::kGroups + lane_group < end;
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                float x = dot[h].x + dot[h].y;
#pragma unroll
                for (int lanes_apart = kLanes / 2; lanes_apart > 0; lanes_apart /= 2)
                    x += arch::shuffle_xor(x, lanes_apart);
                score[u][h] = valid ? x : -INFINITY;
                raise |= score[u][h] > state.most[h] + kLazy;
            }
        }
        if (key0 + C::kBlockN > end) {  // the last step: 0 times what stands in must be 0, whatever it holds
#pragma unroll
            for (int u = 0; u < kUnroll; ++u)
                if (key0 + u * C::kGroups + lane_group >= end) cute::clear(v(_, _, u));
        }

        // Online softmax.
        if (arch::any(raise)) {
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                float most = state.most[h];
#pragma unroll
                for (int u = 0; u < kUnroll; ++u) most = fmaxf(most, score[u][h]);
                state.raise(h, most);
            }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                score[u][h] = arch::exp2(score[u][h] - state.most[h]);
                state.sum[h] += score[u][h];
            }

        // Weighted sums of V.
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (!any_has(i / 4)) break;
                const float2 pair = unpack(v(i % 4, i / 4, u));
#pragma unroll
                for (int h = 0; h < kHeads; ++h) arch::fma2(state.acc[h][i], pair, float2{score[u][h], score[u][h]});
            }
    }

    // Merge: the groups of lanes of a wave, the waves of the block, then, in the last block to come here, the parts.
    __shared__ __align__(16) float shared[C::kWaves * C::kMergeHeads * (kDim + 4)];
    __shared__ bool last;
    const auto waves = cute::make_tensor(  // a row: sums, maximum, sum of weights
        cute::make_smem_ptr(shared),
        cute::make_layout(cute::Shape<Int<kDim + 4>, Int<C::kWaves>, Int<C::kMergeHeads>>{}));
    const int64_t first_part = static_cast<int64_t>(sequence) * args.num_heads_k * args.head_tiles + tile;
    const auto parts = cute::make_tensor(
        cute::make_gmem_ptr(args.partial + first_part * args.num_splits * kHeads * row_floats),
        cute::make_layout(cute::make_shape(row_floats, Int<kHeads>{}, args.num_splits), cute::GenColMajor{}));
    bool to_output = used_splits == 1;
    while (true) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            float most = state.most[h];
#pragma unroll
            for (int lanes_apart = kLanes; lanes_apart < arch::kWave; lanes_apart *= 2)
                most = fmaxf(most, arch::shuffle_xor(most, lanes_apart));
            state.raise(h, most);
#pragma unroll
            for (int lanes_apart = kLanes; lanes_apart < arch::kWave; lanes_apart *= 2) {
                state.sum[h] += arch::shuffle_xor(state.sum[h], lanes_apart);
#pragma unroll
                for (int i = 0; i < kPairs; ++i) {
                    state.acc[h][i].x += arch::shuffle_xor(state.acc[h][i].x, lanes_apart);
                    state.acc[h][i].y += arch::shuffle_xor(state.acc[h][i].y, lanes_apart);
                }
            }
        }
#pragma unroll
        for (int h0 = 0; h0 < kHeads; h0 += C::kMergeHeads) {
            if (h0 > 0) __syncthreads();
            if (tid % arch::kWave < kLanes) {
#pragma unroll
                for (int h = 0; h < C::kMergeHeads; ++h) {
#pragma unroll
                    for (int i = 0; i < kPairs; i += 2) {
                        const float2 x = state.acc[h0 + h][i], y = state.acc[h0 + h][i + 1];
                        const int dim = (i / 4 * kLanes + lane) * 8 + i % 4 * 2;
                        arch::at<float4>(&waves(dim, wave, h), 0) = {x.x, x.y, y.x, y.y};
                    }
                    if (lane == 0) arch::at<float2>(&waves(kDim, wave, h), 0) = {state.most[h0 + h], state.sum[h0 + h]};
                }
            }
            __syncthreads();
            // A thread takes four neighbouring sums of a head.
            for (int item = tid; item < C::kMergeHeads * (kDim / 4); item += kThreads) {
                const int h = item / (kDim / 4), dim = item % (kDim / 4) * 4;
                if (h0 + h >= heads || dim >= headdim) continue;
                float most = kNoScore, sum = 0.0f;
                float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int w = 0; w < C::kWaves; ++w) most = fmaxf(most, waves(kDim, w, h));
#pragma unroll
                for (int w = 0; w < C::kWaves; ++w) {
                    const float weight = arch::exp2(waves(kDim, w, h) - most);
                    const float4 x = arch::at<float4>(&waves(dim, w, h), 0);
                    sum += waves(kDim + 1, w, h) * weight;
                    total.x += x.x * weight, total.y += x.y * weight;
                    total.z += x.z * weight, total.w += x.w * weight;
                }
                if (to_output) {
                    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;  // no key: 0
                    const int64_t row =
                        static_cast<int64_t>(sequence) * args.num_heads_k * args.group + first_head + h0 + h;
                    arch::at<uint2>(args.output, row * headdim * 2 + dim * 2) = {
                        arch::pack(total.x * inverse, total.y * inverse),
                        arch::pack(total.z * inverse, total.w * inverse)};
                } else {
                    arch::at<float4>(&parts(dim, h0 + h, split), 0) = total;
                    if (dim == 0) arch::at<float2>(&parts(headdim, h0 + h, split), 0) = {most, sum};
                }
            }
        }
        if (to_output) return;

        __threadfence();
        __syncthreads();
        if (tid == 0) last = atomicInc(args.tickets + first_part, used_splits - 1) == used_splits - 1;  // back to 0
        __syncthreads();
        if (!last) return;
        __threadfence();
        to_output = true;
        state.clear();
#pragma unroll 4
        for (int s = lane_group; s < used_splits; s += C::kGroups) {
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                if (h >= heads) break;
                const float2 part = arch::at<float2>(&parts(headdim, h, s), 0);
                state.raise(h, fmaxf(state.most[h], part.x));
                const float weight = arch::exp2(part.x - state.most[h]);
                state.sum[h] += part.y * weight;
#pragma unroll
                for (int i = 0; i < kPairs; i += 2) {
                    if (!has(i / 4)) continue;
                    const float4 x = arch::at<float4>(&parts((i / 4 * kLanes + lane) * 8 + i % 4 * 2, h, s), 0);
                    arch::fma2(state.acc[h][i], float2{x.x, x.y}, float2{weight, weight});
                    arch::fma2(state.acc[h][i + 1], float2{x.z, x.w}, float2{weight, weight});
                }
            }
        }
    }
}

// ---- Host ----------------------------------------------------------------------------------------------------------

// Memory that stays between calls and grows with the largest.
struct Workspace {
    void* memory = nullptr;
    int64_t bytes = 0;
    void* get(int64_t wanted, bool zero) {  // zeroed once, when it is new
        if (wanted <= bytes) return memory;
        if (memory != nullptr) cudaFree(memory);
        memory = nullptr, bytes = 0;
        if (cudaMalloc(&memory, wanted) != cudaSuccess) return nullptr;
        if (zero) cudaMemsetAsync(memory, 0, wanted);
        bytes = wanted;
        return memory;
    }
};
Workspace partial_memory, ticket_memory;

template <int kRow>
void launch(Args args, int64_t batch_size, int64_t seqlen_k) {
    using C = Config<kRow>;
    args.head_tiles = (args.group + C::kHeads - 1) / C::kHeads;
    // As many parts as fill the chip, as long as each may have kLeastKeys keys.
    const int64_t tiles = batch_size * args.num_heads_k * args.head_tiles;
    const int64_t fill = kMultiprocessors * C::kTiling.blocks / tiles, most = (seqlen_k + kLeastKeys - 1) / kLeastKeys;
    args.num_splits = static_cast<int>(fill < 1 || most < 1 ? 1 : fill < most ? fill : most);
    const int64_t blocks = tiles * args.num_splits;
    if (blocks > INT32_MAX) {
        fprintf(stderr, "run_kernel: %lld blocks are more than one launch takes\n", (long long)blocks);
        return;
    }
    if (args.num_splits > 1) {
        const int64_t bytes = blocks * C::kHeads * floats_of_row(args.headdim) * static_cast<int64_t>(sizeof(float));
        args.partial = static_cast<float*>(partial_memory.get(bytes, false));
        args.tickets = static_cast<uint32_t*>(ticket_memory.get(tiles * 4, true));
        if (args.partial == nullptr || args.tickets == nullptr) {
            fprintf(stderr, "run_kernel: no memory for a workspace of %lld bytes\n", (long long)(bytes + tiles * 4));
            return;
        }
    }
    decode<kRow><<<static_cast<int>(blocks), C::kThreads>>>(args);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) fprintf(stderr, "run_kernel: launch failed: %s\n", cudaGetErrorString(error));
}

// The first row of the table for this headdim that takes the whole group at once, else the one that takes most of it.
int pick_tiling(int64_t headdim, int64_t group) {
    const Tiling* const table = arch::kWave == 64 ? kC500 : kSm80;
    int best = -1;
    for (int i = 0; i < kTilings; ++i) {
        if (table[i].exact ? table[i].dim != headdim : table[i].dim < headdim) continue;
        if (best >= 0 && table[i].heads <= table[best].heads) continue;
        best = i;
        if (table[i].heads >= group) break;
    }
    return best;
}

template <int... kRows>
void launch_row(int row, const Args& args, int64_t batch_size, int64_t seqlen_k, std::integer_sequence<int, kRows...>) {
    ((row == kRows ? launch<kRows>(args, batch_size, seqlen_k) : void()), ...);
}

extern "C" void run_kernel(const void* q, const void* k_cache_paged, const void* v_cache_paged, void* output,
                           const int32_t* cache_seqlens, const int32_t* block_table, int64_t batch_size,
                           int64_t seqlen_k, int64_t seqlen_q, int64_t num_heads, int64_t num_heads_k, int64_t headdim,
                           int64_t page_block_size, int64_t num_blocks, int64_t) {
    if (batch_size == 0) return;
    if (num_heads_k < 1 || num_heads < 1 || num_heads % num_heads_k != 0 || seqlen_q != 1 || page_block_size < 1) {
        fprintf(stderr,
                "run_kernel: num_heads = %lld, num_heads_k = %lld, seqlen_q = %lld, page_block_size = %lld: heads must "
                "be a multiple of KV heads, one query token, pages of one token or more\n",
                (long long)num_heads, (long long)num_heads_k, (long long)seqlen_q, (long long)page_block_size);
        return;
    }
    const int row = pick_tiling(headdim, num_heads / num_heads_k);
    if (row < 0 || headdim < 8 || headdim % 8 != 0) {
        fprintf(stderr, "run_kernel: headdim = %lld: only multiples of 8 up to 512 are there\n", (long long)headdim);
        return;
    }
    Args args{};
    args.q = static_cast<const uint32_t*>(q);
    args.k_cache = static_cast<const uint32_t*>(k_cache_paged);
    args.v_cache = static_cast<const uint32_t*>(v_cache_paged);
    args.output = static_cast<uint32_t*>(output);
    args.cache_seqlens = cache_seqlens;
    args.block_table = block_table;
    args.num_heads_k = static_cast<int>(num_heads_k);
    args.group = static_cast<int>(num_heads / num_heads_k);
    args.headdim = static_cast<int>(headdim);
    args.page_block_size = static_cast<int>(page_block_size);
    args.page_shift = -1;
    for (int shift = 0; shift < 31; ++shift)
        if (page_block_size == 1 << shift) args.page_shift = shift;
    args.num_blocks = static_cast<int>(num_blocks);
    args.table_width = static_cast<int>(num_blocks / batch_size);
    args.scale_log2 = 1.44269504f / sqrtf(static_cast<float>(headdim));
    launch_row(row, args, batch_size, seqlen_k, std::make_integer_sequence<int, kTilings>{});
}
