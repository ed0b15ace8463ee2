// The built-in vector types of CUDA: dim3, uint3, char1 .. double4, with CUDA's alignments.
#pragma once
#include <cstddef>
#include <cstdint>

namespace sim {
template <class T>
struct Vec1 {
    T x;
};
template <class T>
struct alignas(2 * sizeof(T)) Vec2 {
    T x, y;
};
template <class T>
struct Vec3 {
    T x, y, z;
};
// CUDA 12's double4 and longlong4 are aligned to 16 bytes, not to 32.
template <class T>
struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) Vec4 {
    T x, y, z, w;
};

/// A vector of N lanes of T that lives in registers, as the device compiler's __NATIVE_VECTOR__.
template <int N, class T>
struct NativeVector {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};
}  // namespace sim

#define SIM_VECTOR(name, T)                                                      \
    using name##1 = ::sim::Vec1<T>;                                              \
    using name##2 = ::sim::Vec2<T>;                                              \
    using name##3 = ::sim::Vec3<T>;                                              \
    using name##4 = ::sim::Vec4<T>;                                              \
    inline constexpr name##1 make_##name##1(T x) { return {x}; }                 \
    inline constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }         \
    inline constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    inline constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIM_VECTOR(char, signed char)
SIM_VECTOR(uchar, unsigned char)
SIM_VECTOR(short, short)
SIM_VECTOR(ushort, unsigned short)
SIM_VECTOR(int, int)
SIM_VECTOR(uint, unsigned int)
SIM_VECTOR(long, long)
SIM_VECTOR(ulong, unsigned long)
SIM_VECTOR(longlong, long long)
SIM_VECTOR(ulonglong, unsigned long long)
SIM_VECTOR(float, float)
SIM_VECTOR(double, double)
#undef SIM_VECTOR

struct dim3 {
    unsigned int x = 1, y = 1, z = 1;
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};
