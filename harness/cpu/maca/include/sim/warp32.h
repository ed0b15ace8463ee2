// The 32-lane mode: what PTX's mma.sync, ldmatrix and cp.async do, as functions with the fragment layouts of the PTX
// manual, for code whose NVIDIA half is inline PTX. g = lane / 4, t = lane % 4 below.
#pragma once
#include <cstring>

#include "sim/half.h"
#include "sim/wave.h"

namespace sim {
namespace detail {
template <class T>
SIM_UNHOOKED void mma(const char* name, Combine* combine, T (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                      const T (&c)[4], const char* file, int line) {
    T sum[4] = {c[0], c[1], c[2], c[3]};
    Exchange e{name, combine, Take::kWhole, ~0ull, file, line};
    uint32_t x[4] = {a[0], a[1], a[2], a[3]}, y[2] = {b[0], b[1]};
    e.x = x;
    e.y = y;
    e.z = sum;
    rendezvous(e);
    for (int i = 0; i < 4; ++i) d[i] = sum[i];
}

template <int Count>
SIM_UNHOOKED void ldmatrix(uint32_t (&r)[Count], const void* row, bool transposed, const char* file, int line) {
    if (int(lane_id()) < 8 * Count) touch_read(row, 16);
    uint32_t tiles[Count];
    Exchange e{transposed ? "ldmatrix.trans" : "ldmatrix", combine_ldmatrix, Take::kWhole, ~0ull, file, line};
    e.arg = transposed;
    e.width = Count;
    e.x = row;
    e.z = tiles;
    rendezvous(e);
    for (int i = 0; i < Count; ++i) r[i] = tiles[i];
}
}  // namespace detail

/// D (16 x 8, f32) = A (16 x 16, row-major) B (16 x 8, column-major) + C. Register i of a lane holds
/// a[0] = A[g][2t, 2t+1], a[1] = A[g+8][2t..], a[2] = A[g][2t+8..], a[3] = A[g+8][2t+8..]; b[0] = B[2t, 2t+1][g],
/// b[1] = B[2t+8..][g]; d[0..1] = D[g][2t, 2t+1], d[2..3] = D[g+8][2t, 2t+1].
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4],
                              SIM_SITE) {
    detail::mma("mma.m16n8k16.bf16", combine_m16n8k16_bf16, d, a, b, c, file, line);
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4],
                             SIM_SITE) {
    detail::mma("mma.m16n8k16.f16", combine_m16n8k16_f16, d, a, b, c, file, line);
}
/// D (16 x 8, s32) = A (16 x 32) B (32 x 8) + C: a[0] = A[g][4t..4t+3], a[1] = A[g+8][4t..], a[2] = A[g][4t+16..],
/// a[3] = A[g+8][4t+16..]; b[0] = B[4t..4t+3][g], b[1] = B[4t+16..][g]; D as above.
inline void mma_m16n8k32_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int (&c)[4], SIM_SITE) {
    detail::mma("mma.m16n8k32.s8", combine_m16n8k32_s8, d, a, b, c, file, line);
}

/// Count (1, 2 or 4) 8 x 8 tiles of 16-bit values: lane 8i + j gives the address of row j of tile i (16 bytes, in
/// shared memory); register i of a lane gets elements 2t, 2t+1 of row g of tile i, transposed: elements g of rows 2t,
/// 2t+1.
template <int Count>
void ldmatrix(uint32_t (&r)[Count], const void* row, SIM_SITE) {
    static_assert(Count == 1 || Count == 2 || Count == 4, "ldmatrix loads 1, 2 or 4 tiles");
    detail::ldmatrix(r, row, false, file, line);
}
template <int Count>
void ldmatrix_trans(uint32_t (&r)[Count], const void* row, SIM_SITE) {
    static_assert(Count == 1 || Count == 2 || Count == 4, "ldmatrix loads 1, 2 or 4 tiles");
    detail::ldmatrix(r, row, true, file, line);
}

/// cp.async of Bytes (4, 8 or 16) bytes, of which the first `valid` come from `global` and the rest are zero. The data
/// arrives when the thread waits for it, not before, so a missing wait shows.
template <int Bytes>
inline void cp_async(void* shared, const void* global, int valid = Bytes) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
    cp_async(shared, global, Bytes, valid);
}
/// Wait until at most Left of the newest committed groups are still under way.
template <int Left>
inline void cp_async_wait_group() {
    cp_async_wait(Left);
}
}  // namespace sim

/// Four products of signed bytes added to `c`.
inline int __dp4a(int a, int b, int c) {
    for (int byte = 0; byte < 4; ++byte) c += int(int8_t(a >> (8 * byte))) * int(int8_t(b >> (8 * byte)));
    return c;
}
