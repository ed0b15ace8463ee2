// bfloat16 and half: storage types with CUDA's conversions (round to nearest even) and arithmetic through float.
#pragma once
#include "sim/math.h"

namespace sim {
inline uint16_t bf16_from_float(float value) {
    const uint32_t u = bits<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // CUDA's canonical NaN
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline float bf16_to_float(uint16_t value) { return bits<float>(uint32_t(value) << 16); }

inline uint16_t half_from_float(float value) {
    const uint32_t u = bits<uint32_t>(value), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to 65536 or more
    if (magnitude < 0x38800000u) {                                  // below 2^-14: subnormal, in steps of 2^-24
        return uint16_t(sign | uint32_t(rintf(bits<float>(magnitude) * 16777216.0f)));
    }
    return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}
inline float half_to_float(uint16_t value) {
    const uint32_t sign = uint32_t(value & 0x8000u) << 16, exponent = (value >> 10) & 31u, fraction = value & 0x3ffu;
    if (exponent == 31) return bits<float>(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0) return bits<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
    const float tiny = float(fraction) * 5.9604644775390625e-8f;
    return sign ? -tiny : tiny;
}

/// The bits of a 16-bit floating-point value, as CUDA's raw types show them.
struct Raw16 {
    unsigned short x;
};

/// A 16-bit floating-point type; `Encode` and `Decode` say which.
template <uint16_t (*Encode)(float), float (*Decode)(uint16_t)>
struct Float16 {
    uint16_t __x;

    Float16() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    Float16(T value) : __x(Encode(float(value))) {}
    Float16(Raw16 raw) : __x(raw.x) {}
    operator float() const { return Decode(__x); }
    operator Raw16() const { return {__x}; }
    static Float16 from_bits(uint16_t raw) {
        Float16 result;
        result.__x = raw;
        return result;
    }

    friend Float16 operator+(Float16 a, Float16 b) { return float(a) + float(b); }
    friend Float16 operator-(Float16 a, Float16 b) { return float(a) - float(b); }
    friend Float16 operator*(Float16 a, Float16 b) { return float(a) * float(b); }
    friend Float16 operator/(Float16 a, Float16 b) { return float(a) / float(b); }
    friend Float16 operator-(Float16 a) { return from_bits(uint16_t(a.__x ^ 0x8000u)); }
    friend bool operator<(Float16 a, Float16 b) { return float(a) < float(b); }
    friend bool operator>(Float16 a, Float16 b) { return float(a) > float(b); }
    friend bool operator<=(Float16 a, Float16 b) { return float(a) <= float(b); }
    friend bool operator>=(Float16 a, Float16 b) { return float(a) >= float(b); }
    friend bool operator==(Float16 a, Float16 b) { return float(a) == float(b); }
    friend bool operator!=(Float16 a, Float16 b) { return float(a) != float(b); }
    Float16& operator+=(Float16 b) { return *this = *this + b; }
    Float16& operator-=(Float16 b) { return *this = *this - b; }
    Float16& operator*=(Float16 b) { return *this = *this * b; }
    Float16& operator/=(Float16 b) { return *this = *this / b; }
};

template <class T>
struct alignas(4) Pair16 {
    T x, y;

    Pair16() = default;
    Pair16(T low, T high) : x(low), y(high) {}
};
}  // namespace sim
