// Device mathematics and bit intrinsics under CUDA's names. The fast forms (__expf, ..) are computed exactly: a card's
// error is smaller than what bf16 keeps.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <type_traits>

#include "sim/core.h"

namespace sim {
template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}
}  // namespace sim

template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

inline int __float_as_int(float x) { return sim::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return sim::bits<unsigned>(x); }
inline float __int_as_float(int x) { return sim::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return sim::bits<float>(x); }
inline long long __double_as_longlong(double x) { return sim::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return sim::bits<double>(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline int __float2int_ru(float x) { return int(ceilf(x)); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline unsigned __float2uint_rn(float x) { return unsigned(rintf(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= ((x >> bit) & 1u) << (31 - bit);
    return reversed;
}
inline int __mulhi(int a, int b) { return int((int64_t(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
inline int __mul24(int a, int b) { return int(uint32_t(a << 8 >> 8) * uint32_t(b << 8 >> 8)); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned((((uint64_t(high) << 32) | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((uint64_t(high) << 32) | low) >> (shift & 31));
}
/// CUDA's rule: one selector nibble per output byte; bytes 0-3 are `x`, 4-7 are `y`; bit 3 replicates the sign.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t both = (uint64_t(y) << 32) | x;
    unsigned result = 0;
    for (int byte = 0; byte < 4; ++byte) {
        const unsigned pick = (selector >> (4 * byte)) & 0xf;
        unsigned value = unsigned(both >> (8 * (pick & 7))) & 0xff;
        if (pick & 8) value = value & 0x80 ? 0xff : 0;
        result |= value << (8 * byte);
    }
    return result;
}

template <class T>
T __ldg(const T* address) {
    return *address;
}
template <class T>
T __ldcg(const T* address) {
    return *address;
}
template <class T>
T __ldcs(const T* address) {
    return *address;
}
template <class T>
void __stcs(T* address, std::common_type_t<T> value) {
    *address = value;
}
template <class T>
void __stcg(T* address, std::common_type_t<T> value) {
    *address = value;
}
template <class T>
size_t __cvta_generic_to_shared(const T* address) {
    return reinterpret_cast<size_t>(address);
}
template <class T>
size_t __cvta_generic_to_global(const T* address) {
    return reinterpret_cast<size_t>(address);
}

/// A clock that only moves forward: the simulator has no cycles.
long long clock64();
