// half under CUDA's names.
#pragma once
#include "cuda_runtime.h"
#include "sim/half.h"

using __half = sim::Float16<sim::half_from_float, sim::half_to_float>;
using __half2 = sim::Pair16<__half>;
using half = __half;
using half2 = __half2;
using __half_raw = sim::Raw16;

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline unsigned short __half_as_ushort(__half x) { return x.__x; }
inline __half __ushort_as_half(unsigned short x) { return __half::from_bits(x); }
inline __half2 __halves2half2(__half low, __half high) { return {low, high}; }
inline __half2 make_half2(__half low, __half high) { return {low, high}; }
inline __half2 __floats2half2_rn(float low, float high) { return {low, high}; }
inline __half2 __float22half2_rn(float2 x) { return {x.x, x.y}; }
inline __half2 __float2half2_rn(float x) { return {x, x}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline float2 __half22float2(__half2 x) { return {float(x.x), float(x.y)}; }
inline float __low2float(__half2 x) { return x.x; }
inline float __high2float(__half2 x) { return x.y; }

inline __half __hadd(__half a, __half b) { return a + b; }
inline __half __hsub(__half a, __half b) { return a - b; }
inline __half __hmul(__half a, __half b) { return a * b; }
inline __half __hdiv(__half a, __half b) { return a / b; }
inline __half __hfma(__half a, __half b, __half c) { return fmaf(a, b, c); }
inline __half __hmax(__half a, __half b) { return fmaxf(a, b); }
inline __half __hmin(__half a, __half b) { return fminf(a, b); }
inline __half2 __hadd2(__half2 a, __half2 b) { return {a.x + b.x, a.y + b.y}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {a.x * b.x, a.y * b.y}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
