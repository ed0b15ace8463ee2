// Ragged prefill attention: output = softmax(q k^T / sqrt(head_dim_qk)) v for each sequence, bf16, any GQA ratio.
// q (total_q, num_qo_heads, head_dim_qk), k and v (total_kv, num_kv_heads, ...), output (total_q, num_qo_heads,
// head_dim_vo), row-major; sequence b owns rows qo_indptr[b] .. and kv_indptr[b] ..; causal is aligned to the bottom
// right: query i of q_len sees keys 0 .. kv_len - q_len + i; a query that sees no key writes 0.
// Algorithm: flash attention. A block owns one tile of rows, the query heads of a KV head packed with their tokens, so
// that K and V are read once for the whole group. It walks over the keys with an online softmax in base 2, P never
// leaves the registers, and the next K and V load while this step computes.
// Bound: matrix products; on the C500 the softmax's vector arithmetic first.

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
    int head_dim_qk, head_dim_vo;
    int frags;            // 16-row fragments per wave: BLOCK_M = kWaves * 16 * frags packed rows
    int block_n;          // keys per step
    bool q_in_registers;  // else Q stays in shared memory and is read again for every tile of keys
    int kv_tiles;         // of K, and of V, in shared memory: one, or two so that a whole step's loads are on their way
};
constexpr int kWaves = 4;

// 64 lanes. Two fragments per wave halve the reads of K and V per product; Q fits beside the accumulators, so that K
// and V alone fill the 32 KiB which let two blocks share a multiprocessor.
constexpr Tiling kC500[] = {
    {64, 64, 2, 128, true, 1},   //  32 KiB: fewer keys would leave threads without a share of V's transposition
    {128, 128, 2, 64, true, 1},  //  32 KiB
    {192, 128, 1, 32, true, 1},  //  24 KiB: Q sets the size; two fragments would need 48
    {256, 256, 1, 32, true, 1},  //  32 KiB: one fragment, as a row's accumulators are twice as many
};
// 32 lanes. Two fragments of 128 columns take 128 registers, their scores 64: Q no longer fits beside them. Two tiles
// need one barrier per step instead of two, and with none between softmax and PV the compiler mixes the exponentials of
// some keys with the products of others. Two blocks share a multiprocessor of Hopper, which has 227 KiB.
constexpr Tiling kSm80[] = {
    {64, 64, 2, 64, true, 2},     //  32 KiB
    {128, 128, 2, 64, false, 2},  //  96 KiB
    {192, 128, 1, 64, false, 2},  // 104 KiB
    {256, 256, 1, 32, false, 2},  //  96 KiB
};
constexpr int kL2BytesC500 = 4 << 20, kL2BytesSm80 = 20 << 20;  // of 8 and 40 to 50 MiB: what K and V may take of it

// A running maximum is raised only when a score exceeds it by 2^kLazy: P stays below 256, far from any limit of bf16 or
// float32, and after the first tiles nearly every rescaling of the accumulators is saved.
constexpr float kLazy = 8.0f;
constexpr float kNoScore = -3.0e38f;  // finite, so that a row which has seen no key gives exp2(-inf) = 0, never NaN

constexpr Tiling tiling(int head_dim_qk, int head_dim_vo) {
    constexpr int kRowsOfTable = sizeof(kC500) / sizeof(kC500[0]);
    for (int i = 0; i < kRowsOfTable; ++i) {
        const Tiling t = arch::kWave == 64 ? kC500[i] : kSm80[i];
        if (t.head_dim_qk == head_dim_qk && t.head_dim_vo == head_dim_vo) return t;
    }
    return {};
}

template <int kDimQk, int kDimVo>
struct Config {
    static constexpr Tiling kTiling = tiling(kDimQk, kDimVo);
    static constexpr int kFrags = kTiling.frags, kBlockM = kWaves * 16 * kFrags, kBlockN = kTiling.block_n;
    static constexpr int kThreads = kWaves * arch::kWave;
    static constexpr int kBytesQ = kBlockM * kDimQk * 2, kBytesK = kBlockN * kDimQk * 2, kBytesV = kBlockN * kDimVo * 2;
    static constexpr bool kQInRegisters = kTiling.q_in_registers;
    // Q passes through the memory of K and V on its way to the registers, or has its own.
    static constexpr int kKvTiles = kTiling.kv_tiles;
    static constexpr int kOffsetK = kQInRegisters ? 0 : kBytesQ, kOffsetV = kOffsetK + kKvTiles * kBytesK;
    static constexpr int kEndV = kOffsetV + kKvTiles * kBytesV, kBytesShared = kEndV > kBytesQ ? kEndV : kBytesQ;
    static constexpr int kMaxShared = (arch::kWave == 64 ? 64 : 112) << 10;
    static_assert(kBytesShared <= kMaxShared, "a block of the C500 has 64 KiB; two share the 227 KiB of Hopper");
};

struct Args {
    const __nv_bfloat16 *q, *k, *v;
    __nv_bfloat16* output;
    const int32_t *qo_indptr, *kv_indptr;
    int num_kv_heads, group;  // group: query heads per KV head
    uint32_t reciprocal;      // of group, for PackedRows
    int pairs;                // of a sequence and a KV head
    int tiles;                // of BLOCK_M packed rows, in a sequence of seq_len
    int section;              // pairs that share the L2 cache at a time
    int causal;
    float scale_log2;  // log2(e) / sqrt(head_dim_qk)
};

// ---- Kernel --------------------------------------------------------------------------------------------------------

// The query rows of one (sequence, KV head), packed: head by head within a token. `row` counts from the tile's first.
struct PackedRows {
    int q_begin, first_token, first_head, num_qo_heads, head_begin, group;
    uint32_t reciprocal;
    // (first_head + row) / group, exact as long as (group + BLOCK_M) * group < 2^31.
    __device__ __forceinline__ int step(int row) const {
        return static_cast<int>(static_cast<uint64_t>(first_head + row) * reciprocal >> 31);
    }
    __device__ __forceinline__ int token(int row) const { return first_token + step(row); }
    __device__ __forceinline__ int64_t offset(int row) const {  // in rows of q and output
        const int head = head_begin + first_head + row - step(row) * group;
        return static_cast<int64_t>(q_begin + token(row)) * num_qo_heads + head;
    }
};

template <int kDimQk, int kDimVo>
__global__ void __launch_bounds__(Config<kDimQk, kDimVo>::kThreads) ragged_prefill(const Args args) {
    using C = Config<kDimQk, kDimVo>;
    using arch::Acc;
    using arch::OperandA;
    using arch::OperandB;
    constexpr int kFrags = C::kFrags, kBlockM = C::kBlockM, kBlockN = C::kBlockN, kThreads = C::kThreads;
    extern __shared__ __align__(128) char shared[];
    char *const q_tile = shared, *const k_tile = shared + C::kOffsetK, *const v_tile = shared + C::kOffsetV;
    const int tid = threadIdx.x, lane = tid % arch::kWave, wave = tid / arch::kWave;

    // Work: section by section of pairs, in each the longest rows first.
    const int in_section = static_cast<int>(blockIdx.x) % (args.tiles * args.section);
    const int first_pair = static_cast<int>(blockIdx.x) / (args.tiles * args.section) * args.section;
    const int pairs = min(args.section, args.pairs - first_pair);
    const int pair = first_pair + in_section % pairs, row0 = (args.tiles - 1 - in_section / pairs) * kBlockM;
    const int sequence = pair / args.num_kv_heads, kv_head = pair % args.num_kv_heads;
    const int q_begin = args.qo_indptr[sequence], q_len = args.qo_indptr[sequence + 1] - q_begin;
    const int kv_begin = args.kv_indptr[sequence], kv_len = args.kv_indptr[sequence + 1] - kv_begin;
    const int tile_rows = q_len * args.group - row0;  // that are left for this tile and those after it
    if (tile_rows <= 0) return;
    const PackedRows packed{
        q_begin,    row0 / args.group, row0 % args.group, args.num_kv_heads * args.group, kv_head * args.group,
        args.group, args.reciprocal};
    // Keys that a row of the tile sees: 0 .. visible(row) - 1.
    const auto visible = [&](int row) {
        return args.causal ? max(0, min(kv_len, kv_len - q_len + 1 + packed.token(row))) : kv_len;
    };
    const int visible_to_all = visible(0), visible_to_any = visible(kBlockM - 1);

    // Loads: keys that no row of the tile sees come as zeros.
    const auto q_row = [&](int row) { return args.q + packed.offset(row) * kDimQk; };
    arch::Stage<kBlockN, kDimQk * 2, kThreads> k_stage;
    arch::ColumnStage<kBlockN, kDimVo * 2, kThreads> v_stage;
    const auto kv_row = [&](int key) { return static_cast<int64_t>(kv_begin + key) * args.num_kv_heads + kv_head; };
    const auto begin_k = [&](char* tile, int key0) {
        const arch::Strided rows{args.k + kv_row(key0) * kDimQk, args.num_kv_heads * kDimQk * 2};
        k_stage.begin(tile, tid, visible_to_any - key0, rows);
    };
    const auto begin_v = [&](char* tile, int key0) {
        const arch::Strided rows{args.v + kv_row(key0) * kDimVo, args.num_kv_heads * kDimVo * 2};
        v_stage.begin(tile, tid, visible_to_any - key0, rows);
    };

    OperandA q_held[C::kQInRegisters ? kDimQk / 32 : 1][kFrags];
    const int wave_row = wave * 16 * kFrags;
    {
        arch::Stage<kBlockM, kDimQk * 2, kThreads> q_stage;
        q_stage.begin(q_tile, tid, tile_rows, q_row);
        if constexpr (!C::kQInRegisters) begin_k(k_tile, 0);
        q_stage.wait(q_tile, tid);
        if constexpr (C::kQInRegisters) {
            arch::sync_block();
#pragma unroll
            for (int i = 0; i < kDimQk / 32; ++i)
#pragma unroll
                for (int f = 0; f < kFrags; ++f)
                    q_held[i][f] = arch::load_a<kDimQk * 2>(q_tile, wave_row + 16 * f, i, lane);
            arch::sync_block();
            begin_k(k_tile, 0);
        }
        if constexpr (C::kKvTiles == 2) begin_v(v_tile, 0);
    }

    Acc<float> o[kFrags][kDimVo / 64][4] = {};    // (16 * kFrags, kDimVo) per wave
    float row_max[kFrags][arch::kRowSlots];       // of the raw scores
    float row_sum[kFrags][arch::kRowSlots] = {};  // this lane's share of it
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
        for (int slot = 0; slot < arch::kRowSlots; ++slot) row_max[f][slot] = kNoScore;
    const float slack = kLazy / args.scale_log2;

    for (int key0 = 0; key0 < visible_to_any; key0 += kBlockN) {
        const int turn = key0 / kBlockN % C::kKvTiles;  // which of the tiles in shared memory is this step's
        char *const k_now = k_tile + turn * C::kBytesK, *const v_now = v_tile + turn * C::kBytesV;
        k_stage.wait(k_now, tid);
        if constexpr (C::kKvTiles == 2) v_stage.wait(v_now, tid);
        arch::sync_block();  // K is there, and no wave reads the last V any more
        if constexpr (C::kKvTiles == 1) {
            begin_v(v_now, key0);
        }

        // Scores: S = Q K^T.
        Acc<float> s[kFrags][kBlockN / 16] = {};  // (16 * kFrags, kBlockN) per wave
#pragma unroll
        for (int i = 0; i < kDimQk / 32; ++i) {
            if (C::kKvTiles == 2 && i == 1) {  // behind the first products, which hide the addresses' arithmetic
                begin_k(k_tile + (turn ^ 1) * C::kBytesK, key0 + kBlockN);
                begin_v(v_tile + (turn ^ 1) * C::kBytesV, key0 + kBlockN);
            }
            OperandA q[kFrags];
#pragma unroll
            for (int f = 0; f < kFrags; ++f)
                q[f] = C::kQInRegisters ? q_held[i][f] : arch::load_a<kDimQk * 2>(q_tile, wave_row + 16 * f, i, lane);
#pragma unroll
            for (int n = 0; n < kBlockN / 16; ++n) {
                const OperandB keys = arch::load_b<kDimQk * 2>(k_now, 16 * n, i, lane);
#pragma unroll
                for (int f = 0; f < kFrags; ++f) arch::mma(s[f][n], q[f], keys);
            }
        }
        float most[kFrags][arch::kRowSlots];  // of this lane's scores
        const auto find_most = [&] {
#pragma unroll
            for (int f = 0; f < kFrags; ++f)
#pragma unroll
                for (int slot = 0; slot < arch::kRowSlots; ++slot) {
                    most[f][slot] = -INFINITY;
#pragma unroll
                    for (int n = 0; n < kBlockN / 16; ++n)
#pragma unroll
                        for (int i = 0; i < arch::kAccValues; ++i)
                            if (Acc<float>::slot(i) == slot) most[f][slot] = fmaxf(most[f][slot], s[f][n].v[i]);
                }
        };
        find_most();
        if (key0 + kBlockN > visible_to_all) {  // only on the diagonal and at the tail
#pragma unroll
            for (int f = 0; f < kFrags; ++f)
#pragma unroll
                for (int slot = 0; slot < arch::kRowSlots; ++slot) {
                    const int end = visible(wave_row + 16 * f + Acc<float>::row(lane, 2 * slot)) - key0;
#pragma unroll
                    for (int n = 0; n < kBlockN / 16; ++n)
#pragma unroll
                        for (int i = 0; i < arch::kAccValues; ++i)
                            if (Acc<float>::slot(i) == slot && 16 * n + Acc<float>::col(lane, i) >= end)
                                s[f][n].v[i] = -INFINITY;
                }
            find_most();
        }

        // Online softmax: P replaces S, in registers, already in the form in which PV takes it. Lanes exchange their
        // maxima only where one is too high: most steps need no more than a vote.
        bool raise = false;
#pragma unroll
        for (int f = 0; f < kFrags; ++f)
#pragma unroll
            for (int slot = 0; slot < arch::kRowSlots; ++slot) raise |= most[f][slot] > row_max[f][slot] + slack;
        if (arch::any(raise)) {
#pragma unroll
            for (int f = 0; f < kFrags; ++f) {
                float shrink[arch::kRowSlots];
#pragma unroll
                for (int slot = 0; slot < arch::kRowSlots; ++slot) {
                    const auto greater = [](float a, float b) { return fmaxf(a, b); };
                    const float tile_max = arch::row_reduce(most[f][slot], greater);
                    const float raised = tile_max > row_max[f][slot] + slack ? tile_max : row_max[f][slot];
                    shrink[slot] = arch::exp2((row_max[f][slot] - raised) * args.scale_log2);
                    row_max[f][slot] = raised;
                    row_sum[f][slot] *= shrink[slot];
                }
#pragma unroll
                for (int d = 0; d < kDimVo / 64; ++d)
#pragma unroll
                    for (int c = 0; c < 4; ++c)
#pragma unroll
                        for (int i = 0; i < arch::kAccValues; i += 2)
                            arch::mul2(&o[f][d][c].v[i], shrink[Acc<float>::slot(i)]);
            }
        }
        OperandA p[kFrags][kBlockN / 32];
        const auto weigh = [&](int n) {  // 32 keys of all rows
#pragma unroll
            for (int f = 0; f < kFrags; ++f) {
                float shift[arch::kRowSlots];
#pragma unroll
                for (int slot = 0; slot < arch::kRowSlots; ++slot) shift[slot] = -row_max[f][slot] * args.scale_log2;
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int i = 0; i < arch::kAccValues; i += 2) {
                        const int slot = Acc<float>::slot(i);
                        float* const x = &s[f][2 * n + h].v[i];
                        arch::fma2(x, args.scale_log2, shift[slot]);
                        x[0] = arch::exp2(x[0]);
                        x[1] = arch::exp2(x[1]);
                        row_sum[f][slot] += x[0] + x[1];
                    }
                p[f][n] = arch::acc_to_operand(s[f][2 * n], s[f][2 * n + 1]);
            }
        };
        if constexpr (C::kKvTiles == 1) {
#pragma unroll
            for (int n = 0; n < kBlockN / 32; ++n) weigh(n);
            v_stage.wait(v_now, tid);
            arch::sync_block();  // V is there, and no wave reads this K any more
            if (key0 + kBlockN < visible_to_any) begin_k(k_now, key0 + kBlockN);
        }

        // O += P V.
#pragma unroll
        for (int n = 0; n < kBlockN / 32; ++n) {
            if constexpr (C::kKvTiles == 2) weigh(n);
#pragma unroll
            for (int d = 0; d < kDimVo / 64; ++d) {
                OperandB values[4];
                arch::load_columns<kDimVo * 2>(values, v_now, n, d, lane);
#pragma unroll
                for (int c = 0; c < 4; ++c)
#pragma unroll
                    for (int f = 0; f < kFrags; ++f) arch::mma(o[f][d][c], p[f][n], values[c]);
            }
        }
    }
    if constexpr (C::kKvTiles == 2) v_stage.wait(v_tile, tid);  // for the step that is none, all zeros

    // Epilogue: divide by the sum; a row that saw no key has sum 0 and gives 0.
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
        for (int slot = 0; slot < arch::kRowSlots; ++slot) {
            const float sum = arch::row_reduce(row_sum[f][slot], [](float a, float b) { return a + b; });
            const int row = wave_row + 16 * f + Acc<float>::row(lane, 2 * slot);
            if (row >= tile_rows) continue;
            __nv_bfloat16* const out = args.output + packed.offset(row) * kDimVo;
#pragma unroll
            for (int d = 0; d < kDimVo / 64; ++d)
                arch::store64(out + 64 * d, o[f][d], slot, sum > 0.0f ? 1.0f / sum : 0.0f, lane);
        }
}

// ---- Host ----------------------------------------------------------------------------------------------------------

template <int kDimQk, int kDimVo>
void launch(Args args, int64_t seq_len) {
    using C = Config<kDimQk, kDimVo>;
    args.tiles = static_cast<int>((seq_len * args.group + C::kBlockM - 1) / C::kBlockM);
    const int64_t l2_bytes = arch::kWave == 64 ? kL2BytesC500 : kL2BytesSm80;
    const int64_t section = l2_bytes / (seq_len * (kDimQk + kDimVo) * 2);
    args.section = static_cast<int>(section < 1 ? 1 : section < args.pairs ? section : args.pairs);
    args.scale_log2 = 1.44269504f / sqrtf(static_cast<float>(kDimQk));
    const int64_t blocks = static_cast<int64_t>(args.tiles) * args.pairs;
    if (blocks > INT32_MAX) {
        fprintf(stderr, "run_kernel: %lld blocks of %d rows are more than one launch takes\n", (long long)blocks,
                C::kBlockM);
        return;
    }
    cudaError_t error = cudaFuncSetAttribute(ragged_prefill<kDimQk, kDimVo>,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytesShared);
    if (error == cudaSuccess) {
        ragged_prefill<kDimQk, kDimVo><<<static_cast<int>(blocks), C::kThreads, C::kBytesShared>>>(args);
        error = cudaGetLastError();
    }
    if (error != cudaSuccess) fprintf(stderr, "run_kernel: launch failed: %s\n", cudaGetErrorString(error));
}

extern "C" void run_kernel(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v,
                           __nv_bfloat16* output, const int32_t* qo_indptr, const int32_t* kv_indptr,
                           int64_t batch_size, int64_t seq_len, int64_t num_qo_heads, int64_t num_kv_heads,
                           int64_t head_dim_qk, int64_t head_dim_vo, int64_t causal) {
    if (batch_size == 0 || seq_len == 0) return;
    if (num_kv_heads < 1 || num_qo_heads < 1 || num_qo_heads % num_kv_heads != 0) {
        fprintf(stderr, "run_kernel: num_qo_heads = %lld is no positive multiple of num_kv_heads = %lld\n",
                (long long)num_qo_heads, (long long)num_kv_heads);
        return;
    }
    Args args{q, k, v, output, qo_indptr, kv_indptr};
    args.num_kv_heads = static_cast<int>(num_kv_heads);
    args.group = static_cast<int>(num_qo_heads / num_kv_heads);
    args.pairs = static_cast<int>(batch_size * num_kv_heads);
    args.reciprocal = (1u << 31) / args.group + 1;
    args.causal = causal != 0;
    if (head_dim_qk == 128 && head_dim_vo == 128) return launch<128, 128>(args, seq_len);
    if (head_dim_qk == 192 && head_dim_vo == 128) return launch<192, 128>(args, seq_len);
    if (head_dim_qk == 256 && head_dim_vo == 256) return launch<256, 256>(args, seq_len);
    if (head_dim_qk == 64 && head_dim_vo == 64) return launch<64, 64>(args, seq_len);
    fprintf(stderr, "run_kernel: head dims (%lld, %lld): only (64, 64), (128, 128), (192, 128), (256, 256) are there\n",
            (long long)head_dim_qk, (long long)head_dim_vo);
}
