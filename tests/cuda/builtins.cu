// Every builtin of the C500 that the simulator offers, one kernel per group; `which` chooses. One wave unless said.
// x: 4096 floats; i: 4096 int32; y: 4096 words, each kernel writes what its test reads.
#include <cuda_runtime.h>
#include <maca_bfloat16.h>
#include <cuda_fp16.h>
#include <stdint.h>

using V2u = __NATIVE_VECTOR__(2, uint32_t);
using V4f = __NATIVE_VECTOR__(4, float);
using V4i = __NATIVE_VECTOR__(4, int);
using V2f = __NATIVE_VECTOR__(2, float);
using V4d = __NATIVE_VECTOR__(4, double);

// Operand tiles X (16 x K) and Y (16 x K) and C (16 x 16) are row-major: X at x, Y at x + 1024, C at x + 2048.
// X[row = l % 16][k = 4 (l / 16) + v]; D[i = 4 (l / 16) + v][j = l % 16].
template <class Word, class Pack>
__device__ V2u pack4(const float* row, Pack pack) {
    Word v[4];
    for (int k = 0; k < 4; ++k) v[k] = pack(row[k]);
    V2u out;
    memcpy(&out, v, 8);
    return out;
}
__global__ void mma_16bit(const float* x, float* y, bool half) {
    const int l = threadIdx.x, r = l & 15, g = l >> 4;
    V4f c;
    for (int v = 0; v < 4; ++v) c[v] = x[2048 + (4 * g + v) * 16 + r];
    if (half) {
        auto pack = [](float f) { return __half_as_ushort(__float2half(f)); };
        c = __builtin_mxc_mma_16x16x16f16(pack4<uint16_t>(x + r * 16 + 4 * g, pack),
                                          pack4<uint16_t>(x + 1024 + r * 16 + 4 * g, pack), c);
    } else {
        auto pack = [](float f) { return __bfloat16_as_ushort(__float2bfloat16(f)); };
        c = __builtin_mxc_mma_16x16x16bf16(pack4<uint16_t>(x + r * 16 + 4 * g, pack),
                                           pack4<uint16_t>(x + 1024 + r * 16 + 4 * g, pack), {c[0], c[1], c[2], c[3]});
    }
    for (int v = 0; v < 4; ++v) y[(4 * g + v) * 16 + r] = c[v];
}
__global__ void mma_i8(const int* i, int* y) {  // one int8 per int32 of i
    const int l = threadIdx.x, r = l & 15, g = l >> 4;
    uint32_t a = 0, b = 0;
    V4i c;
    for (int v = 0; v < 4; ++v) {
        a |= uint32_t(i[r * 16 + 4 * g + v] & 0xff) << (8 * v);
        b |= uint32_t(i[1024 + r * 16 + 4 * g + v] & 0xff) << (8 * v);
        c[v] = i[2048 + (4 * g + v) * 16 + r];
    }
    c = __builtin_mxc_mma_16x16x16i8(int(a), int(b), c);
    for (int v = 0; v < 4; ++v) y[(4 * g + v) * 16 + r] = c[v];
}
__global__ void mma_f32(const float* x, float* y, int kind) {  // 0: k = 4 f32; 1: k = 8 tf32; 2: k = 4 f64
    const int l = threadIdx.x, r = l & 15, g = l >> 4;
    V4f c;
    for (int v = 0; v < 4; ++v) c[v] = x[2048 + (4 * g + v) * 16 + r];
    if (kind == 0) {
        c = __builtin_mxc_mma_16x16x4f32(x[r * 4 + g], x[1024 + r * 4 + g], c);
    } else if (kind == 1) {
        const V2f a = {x[r * 8 + 2 * g], x[r * 8 + 2 * g + 1]},
                  b = {x[1024 + r * 8 + 2 * g], x[1024 + r * 8 + 2 * g + 1]};
        c = __builtin_mxc_mma_16x16x8tf32(a, b, c);
    } else {
        const V4d d = __builtin_mxc_mma_16x16x4f64(x[r * 4 + g], x[1024 + r * 4 + g], V4d{c[0], c[1], c[2], c[3]});
        c = V4f{float(d[0]), float(d[1]), float(d[2]), float(d[3])};
    }
    for (int v = 0; v < 4; ++v) y[(4 * g + v) * 16 + r] = c[v];
}

// y[64 n + lane] = the n-th shuffle of i[lane].
__global__ void shuffles(const int* i, int* y) {
    const int l = threadIdx.x, a = i[l];
    int n = 0;
    auto put = [&](int value) { y[64 * n++ + l] = value; };
    for (int offset = 32; offset > 0; offset /= 2) put(__shfl_xor_sync(~0ull, a, offset));
    put(__shfl_sync(~0ull, a, (l * 7 + 3) & 63));
    put(__shfl_sync(~0ull, a, 5, 16));
    put(__shfl_up_sync(~0ull, a, 3));
    put(__shfl_down_sync(~0ull, a, 40));
    put(__shfl_up_sync(~0ull, a, 2, 8));
    put(__shfl_down_sync(~0ull, a, 2, 8));
    put(int(__shfl_xor_sync(~0ull, double(a), 48)));
    put(__builtin_mxc_bsm_bpermute(((l * 5) & 63) << 2, a));
    put(__builtin_mxc_bsm_permute(((l + 1) & 63) << 2, a));
    put(__builtin_mxc_readlane(a, 42));
    put(__builtin_mxc_readfirstlane(a));
    put(__builtin_mxc_writelane(-1, 9, a));
    put(l >= 10 ? __builtin_mxc_readfirstlane(a) : 0);
}
// Row moves: 16 lanes each.
__global__ void row_moves(const int* i, int* y) {
    const int l = threadIdx.x, a = i[l];
    int n = 0;
    auto put = [&](int value) { y[64 * n++ + l] = value; };
    put(__builtin_mxc_mov_shfl(a, 0x1b, 15, 15, false));         // quads reversed
    put(__builtin_mxc_mov_shfl(a, 0x103, 15, 15, false));        // from lane + 3, else its own
    put(__builtin_mxc_mov_shfl(a, 0x103, 15, 15, true));         // from lane + 3, else 0
    put(__builtin_mxc_mov_shfl(a, 0x112, 15, 15, true));         // from lane - 2
    put(__builtin_mxc_mov_shfl(a, 0x128, 15, 15, false));        // rotated by 8
    put(__builtin_mxc_mov_shfl(a, 0x140, 15, 15, false));        // mirrored
    put(__builtin_mxc_mov_shfl(a, 0x155, 15, 15, false));        // lane 5 to all
    put(__builtin_mxc_update_shfl(-7, a, 0x150, 5, 15, false));  // rows 0 and 2 only
}
__global__ void votes(const int* i, unsigned long long* y) {
    const int l = threadIdx.x, a = i[l];
    unsigned long long out[12] = {
        __ballot_sync(~0ull, a & 1),
        (unsigned long long)__any_sync(~0ull, a == i[63]),
        (unsigned long long)__all_sync(~0ull, a != 1 << 30),
        (unsigned long long)__reduce_add_sync(~0ull, a),
        (unsigned long long)(long long)__reduce_min_sync(~0ull, a),
        (unsigned long long)__reduce_max_sync(~0ull, unsigned(a)),
        (unsigned long long)__reduce_or_sync(~0ull, a),
        __match_any_sync(~0ull, a & 3),
        __builtin_mxc_uicmp(unsigned(a), 100u, MACA_ICMP_UGT),
        __builtin_mxc_sicmp(a, 0, MACA_ICMP_SLT),
        l < 40 ? __ballot_sync(0xffffffffffull, true) : 0ull,
        0ull,
    };
    if (l >= 48) out[11] = __activemask();
    for (int n = 0; n < 12; ++n) y[12 * l + n] = out[n];
}

__global__ void arithmetic(const float* x, const int* i, float* y) {
    const int l = threadIdx.x;
    const float a = x[l], b = x[64 + l], c = x[128 + l];
    const unsigned u = unsigned(i[l]), w = unsigned(i[64 + l]);
    int n = 0;
    auto put = [&](float value) { y[64 * n++ + l] = value; };
    auto bits = [&](unsigned value) { put(__uint_as_float(value)); };
    const V2f fma = __builtin_mxc_pk_fma_f32({a, b}, {b, c}, {c, a});
    put(fma[0]);
    put(fma[1]);
    put(__builtin_mxc_pk_mul_f32({a, b}, {c, c})[1]);
    put(__builtin_mxc_pk_add_f32({a, b}, {c, c})[0]);
    put(__builtin_exp2f(a));
    put(__builtin_mxc_rcpf(a));
    put(__builtin_mxc_rsqf(fabsf(a)));
    put(__expf(a));
    put(__fdividef(a, b));
    put(rsqrtf(fabsf(b)));
    bits(__builtin_mxc_byte_perm(u, w, 0x05040100));
    bits(__builtin_mxc_byte_perm(u, w, 0x07060302));
    bits(__builtin_mxc_byte_perm(u, w, 0x0c0d0700));
    bits(__byte_perm(u, w, 0x7531));
    bits(__builtin_mxc_ubfe(u, 5, 9));
    put(__builtin_mxc_b2_cast_to_f32(u));
    const auto pair = __builtin_mxc_cvt_pk_f32tobf16({a, b});
    bits(uint32_t(pair[0]) | uint32_t(pair[1]) << 16);
    bits(unsigned(__builtin_mxc_mad_wide_u32(u, w, 7) >> 32));
    bits(unsigned(__popc(u) + 100 * __clz(int(u)) + 10000 * __ffs(int(w))));
    bits(__brev(u));
    bits(__umulhi(u, w));
    bits(__half_as_ushort(__float2half(a * 1000.0f)));
    bits(__half_as_ushort(__float2half(b * 1e-6f)));
    const maca_bfloat16 product = __float2bfloat16(a) * __float2bfloat16(b);
    put(__bfloat162float(product));
}

// Loads and stores of every width, plain and predicated; lane l uses 16 bytes at 4 l of i.
__global__ void memory(const int* i, int* y) {
    const int l = threadIdx.x;
    int* from = const_cast<int*>(i) + 4 * l;
    int* to = y + 32 * l;
    to[0] = __builtin_mxc_ldg_b8(from, 1, -1, true, true, false, false);
    to[1] = __builtin_mxc_ldg_b16(from, 2, -1, true, true, false, false);
    to[2] = int(__builtin_mxc_ldg_b32(from, 4, -1, true, true, false, false)[0]);
    const auto two = __builtin_mxc_ldg_b64(from, 8, -1, true, true, false, false);
    const auto four = __builtin_mxc_ldg_b128(from, 0, -1, true, true, false, false);
    to[3] = int(two[1]);
    to[4] = int(four[3]);
    const auto even = __builtin_mxc_ldg_b128_predicator(from, 0, true, true, false, false, l & 1, 0, MACA_ICMP_EQ);
    const auto odd = __builtin_mxc_ldg_b32_predicator_ret(from, 0, {77}, true, false, false, l & 1, 0, MACA_ICMP_EQ);
    to[5] = int(even[2]);
    to[6] = int(odd[0]);
    to[7] = -1;
    to[8] = -1;
    __builtin_mxc_stg_b32_predicator(to + 7, 0, {unsigned(l)}, true, false, false, unsigned(l), 20, MACA_ICMP_ULT);
    __builtin_mxc_stg_b32_predicator(to, 32, {unsigned(l)}, true, false, false, unsigned(-l), unsigned(-20),
                                     MACA_ICMP_SGE);
    __builtin_mxc_stg_b128_predicator(to + 12, 0, four, true, false, false, 1, 1, MACA_ICMP_EQ);
    __builtin_mxc_stg_b64_predicator(to + 16, 0, two, true, false, false, 1, 1, MACA_ICMP_EQ);
    // Past the end of everything: a load that is switched off must not touch memory.
    const auto none =
        __builtin_mxc_ldg_b64_predicator(from + (1 << 20), 0, true, true, false, false, 1, 0, MACA_ICMP_EQ);
    to[18] = int(none[0]);
}

// Barriers of all kinds between two waves, 128 threads.
__global__ void barriers(const int* i, int* y) {
    __shared__ int tile[128];
    int sum = 0;
    for (int kind = 0; kind < 4; ++kind) {
        tile[threadIdx.x] = i[threadIdx.x] + kind;
        if (kind == 0) __syncthreads();
        if (kind == 1) __syncthreadshared();
        if (kind == 2) {
            __builtin_mxc_arrive_bsmcnt(0);
            __builtin_mxc_barrier_ex(2);
        }
        if (kind == 3) __builtin_mxc_barrier_ex(0);
        __builtin_mxc_barrier_ex(3);
        sum += tile[127 - threadIdx.x];
        __builtin_mxc_arrive_gvmcnt(0);
        __syncthreads();
    }
    y[threadIdx.x] = sum + 1000 * __syncthreads_count(threadIdx.x % 3 == 0);
}
__global__ void partial_wave_mma(float* y) {
    V4f c = {0, 0, 0, 0};
    c = __builtin_mxc_mma_16x16x4f32(1.0f, 1.0f, c);
    y[threadIdx.x] = c[0];
}

extern "C" void run_kernel(const float* x, const int* i, void* y, int64_t which) {
    float* yf = static_cast<float*>(y);
    int* yi = static_cast<int*>(y);
    switch (which) {
        case 0:
            return mma_16bit<<<1, 64>>>(x, yf, false);
        case 1:
            return mma_16bit<<<1, 64>>>(x, yf, true);
        case 2:
            return mma_i8<<<1, 64>>>(i, yi);
        case 3:
            return mma_f32<<<1, 64>>>(x, yf, 0);
        case 4:
            return mma_f32<<<1, 64>>>(x, yf, 1);
        case 5:
            return mma_f32<<<1, 64>>>(x, yf, 2);
        case 6:
            return shuffles<<<1, 64>>>(i, yi);
        case 7:
            return row_moves<<<1, 64>>>(i, yi);
        case 8:
            return votes<<<1, 64>>>(i, static_cast<unsigned long long*>(y));
        case 9:
            return arithmetic<<<1, 64>>>(x, i, yf);
        case 10:
            return memory<<<1, 64>>>(i, yi);
        case 11:
            return barriers<<<1, 128>>>(i, yi);
        case 12:
            return partial_wave_mma<<<1, 32>>>(yf);
    }
}
