// What each wave operation computes, from the values of all lanes of its group.
#include <cmath>
#include <cstring>

#include "runtime.h"
#include "sim/half.h"

namespace sim {
namespace {
template <class Visit>
void for_each(uint64_t group, Visit visit) {
    for (uint64_t rest = group; rest != 0; rest &= rest - 1) visit(__builtin_ctzll(rest));
}

/// The result of lane `to` is the value of lane `from`, which must take part.
void take_from(Exchange* const* lanes, uint64_t group, int to, int from) {
    if (from < 0 || from >= kWaveLanes || (group >> from & 1) == 0) {
        g.current = g.current->wave->thread[to];
        fail("RUNTIME_ERROR",
             std::string(lanes[to]->name) + ": lane " + std::to_string(to) + " reads lane " + std::to_string(from) +
                 ", which does not take part",
             lanes[to]->file, lanes[to]->line);
    }
    lanes[to]->result = lanes[from]->value;
}

template <class Operation>
void fold(Exchange* const* lanes, uint64_t group, uint64_t start, Operation next) {
    uint64_t total = start;
    for_each(group, [&](int lane) { total = next(total, lanes[lane]->value); });
    for_each(group, [&](int lane) { lanes[lane]->result = total; });
}

/// CUDA's segments: `width` lanes, a power of two; `last` is the highest lane of the segment.
struct Segment {
    int first, last;
};
Segment segment(const Exchange& e, int lane) {
    const int width = e.width > 0 && e.width <= kWaveLanes ? e.width : kWaveLanes;
    const int first = lane & ~(width - 1);
    return {first, first + width - 1};
}

template <class T>
T read(const void* pointer, int index) {
    T value;
    std::memcpy(&value, static_cast<const char*>(pointer) + sizeof(T) * size_t(index), sizeof(T));
    return value;
}

/// D[i][j] = C[i][j] + sum over k of X[i][k] Y[j][k]; K values per lane and operand: lane (r, g) holds row r,
/// k = K g .. K g + K - 1, and of D the four i = 4g .. 4g + 3 at j = r.
template <class Sum, int K, class Decode>
void mma_16x16(Exchange* const* lanes, Decode decode) {
    constexpr int kDepth = 4 * K;
    Sum x[kDepth][16], y[kDepth][16];
    for (int lane = 0; lane < 64; ++lane) {
        const int r = lane & 15, group = lane >> 4;
        for (int v = 0; v < K; ++v) {
            x[K * group + v][r] = decode(lanes[lane]->x, v);
            y[K * group + v][r] = decode(lanes[lane]->y, v);
        }
    }
    Sum d[16][16];
    for (int lane = 0; lane < 64; ++lane) {
        for (int v = 0; v < 4; ++v) d[4 * (lane >> 4) + v][lane & 15] = read<Sum>(lanes[lane]->z, v);
    }
    for (int k = 0; k < kDepth; ++k) {
        for (int i = 0; i < 16; ++i) {
            const Sum left = x[k][i];
            for (int j = 0; j < 16; ++j) d[i][j] += left * y[k][j];
        }
    }
    for (int lane = 0; lane < 64; ++lane) {
        Sum out[4];
        for (int v = 0; v < 4; ++v) out[v] = d[4 * (lane >> 4) + v][lane & 15];
        std::memcpy(lanes[lane]->z, out, sizeof out);
    }
    ++g.counters->mma;
}

/// PTX's m16n8: A has four registers per lane, B two, each of 4 / sizeof(T) values; g = lane / 4, t = lane % 4.
template <class T, class Sum, class Decode>
void mma_m16n8(Exchange* const* lanes, Decode decode) {
    constexpr int kPack = 4 / int(sizeof(T)), kDepth = 8 * kPack;
    Sum a[kDepth][16], b[kDepth][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int row = lane >> 2, t = lane & 3;
        for (int half = 0; half < 2; ++half) {
            for (int v = 0; v < kPack; ++v) {
                const int k = kPack * t + v + half * kDepth / 2;
                a[k][row] = decode(read<T>(lanes[lane]->x, (2 * half) * kPack + v));
                a[k][row + 8] = decode(read<T>(lanes[lane]->x, (2 * half + 1) * kPack + v));
                b[k][row] = decode(read<T>(lanes[lane]->y, half * kPack + v));
            }
            for (int v = 0; v < 2; ++v) d[row + 8 * half][2 * t + v] = read<Sum>(lanes[lane]->z, 2 * half + v);
        }
    }
    for (int k = 0; k < kDepth; ++k) {
        for (int i = 0; i < 16; ++i) {
            for (int j = 0; j < 8; ++j) d[i][j] += a[k][i] * b[k][j];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const int row = lane >> 2, t = lane & 3;
        const Sum out[4] = {d[row][2 * t], d[row][2 * t + 1], d[row + 8][2 * t], d[row + 8][2 * t + 1]};
        std::memcpy(lanes[lane]->z, out, sizeof out);
    }
    ++g.counters->mma;
}
}  // namespace

void combine_nothing(Exchange* const*, uint64_t) {}
void combine_count(Exchange* const*, uint64_t) {}

void combine_shuffle_idx(Exchange* const* lanes, uint64_t group) {
    for_each(group, [&](int lane) {
        const Segment s = segment(*lanes[lane], lane);
        take_from(lanes, group, lane, s.first + (lanes[lane]->arg & (s.last - s.first)));
    });
}
void combine_shuffle_up(Exchange* const* lanes, uint64_t group) {
    for_each(group, [&](int lane) {
        const int from = lane - lanes[lane]->arg;
        take_from(lanes, group, lane, from < segment(*lanes[lane], lane).first ? lane : from);
    });
}
void combine_shuffle_down(Exchange* const* lanes, uint64_t group) {
    for_each(group, [&](int lane) {
        const int from = lane + lanes[lane]->arg;
        take_from(lanes, group, lane, from > segment(*lanes[lane], lane).last ? lane : from);
    });
}
void combine_shuffle_xor(Exchange* const* lanes, uint64_t group) {
    for_each(group, [&](int lane) {
        const int from = lane ^ lanes[lane]->arg;
        take_from(lanes, group, lane, from > segment(*lanes[lane], lane).last ? lane : from);
    });
}
void combine_first_lane(Exchange* const* lanes, uint64_t group) {
    for_each(group, [&](int lane) { take_from(lanes, group, lane, __builtin_ctzll(group)); });
}
void combine_pull(Exchange* const* lanes, uint64_t group) {
    for_each(group, [&](int lane) { take_from(lanes, group, lane, lanes[lane]->arg / 4 & (kWaveLanes - 1)); });
}
void combine_push(Exchange* const* lanes, uint64_t group) {
    for_each(group, [&](int lane) { lanes[lane]->result = 0; });
    for_each(group, [&](int lane) {
        const int to = lanes[lane]->arg / 4 & (kWaveLanes - 1);
        if (group >> to & 1) lanes[to]->result = lanes[lane]->value;
    });
}

void combine_row_move(Exchange* const* lanes, uint64_t group) {
    for_each(group, [&](int lane) {
        Exchange& e = *lanes[lane];
        const int row = lane & ~15, at = lane & 15, mode = e.arg, n = mode & 15;
        int from = -1;  // outside the row
        if (mode < 0x100) {
            from = (at & ~3) | (mode >> (2 * (at & 3)) & 3);
        } else if (mode > 0x100 && mode < 0x110) {
            from = at + n < 16 ? at + n : -1;
        } else if (mode > 0x110 && mode < 0x120) {
            from = at - n;
        } else if (mode > 0x120 && mode < 0x130) {
            from = (at - n) & 15;
        } else if (mode == 0x140) {
            from = 15 - at;
        } else if (mode >= 0x150 && mode < 0x160) {
            from = n;
        } else {
            fail("RUNTIME_ERROR", std::string(e.name) + ": mode " + hex(uint64_t(mode)) + " is not a known row move",
                 e.file, e.line);
        }
        const bool enabled = (e.width >> (lane >> 4) & 1) != 0 && (e.width >> (4 + (at >> 2)) & 1) != 0;
        uint64_t old = uint64_t(uint32_t(read<int>(e.x, 0)));
        if (from < 0 && (e.width >> 8 & 1) != 0) old = 0;
        e.result = enabled && from >= 0 ? lanes[row + from]->value : old;
    });
}

void combine_ballot(Exchange* const* lanes, uint64_t group) {
    uint64_t votes = 0;
    for_each(group, [&](int lane) { votes |= uint64_t(lanes[lane]->value != 0) << lane; });
    for_each(group, [&](int lane) { lanes[lane]->result = votes; });
}
void combine_active(Exchange* const* lanes, uint64_t group) { combine_ballot(lanes, group); }
void combine_any(Exchange* const* lanes, uint64_t group) {
    fold(lanes, group, 0, [](uint64_t a, uint64_t b) { return uint64_t(a != 0 || b != 0); });
}
void combine_all(Exchange* const* lanes, uint64_t group) {
    fold(lanes, group, 1, [](uint64_t a, uint64_t b) { return uint64_t(a != 0 && b != 0); });
}
void combine_match_any(Exchange* const* lanes, uint64_t group) {
    for_each(group, [&](int lane) {
        uint64_t equal = 0;
        for_each(group, [&](int other) { equal |= uint64_t(lanes[other]->value == lanes[lane]->value) << other; });
        lanes[lane]->result = equal;
    });
}
void combine_add(Exchange* const* lanes, uint64_t group) {
    fold(lanes, group, 0, [](uint64_t a, uint64_t b) { return a + b; });
}
void combine_min_signed(Exchange* const* lanes, uint64_t group) {
    fold(lanes, group, INT64_MAX, [](uint64_t a, uint64_t b) { return int64_t(a) < int64_t(b) ? a : b; });
}
void combine_max_signed(Exchange* const* lanes, uint64_t group) {
    fold(lanes, group, uint64_t(INT64_MIN), [](uint64_t a, uint64_t b) { return int64_t(a) > int64_t(b) ? a : b; });
}
void combine_min_unsigned(Exchange* const* lanes, uint64_t group) {
    fold(lanes, group, UINT64_MAX, [](uint64_t a, uint64_t b) { return a < b ? a : b; });
}
void combine_max_unsigned(Exchange* const* lanes, uint64_t group) {
    fold(lanes, group, 0, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}
void combine_and(Exchange* const* lanes, uint64_t group) {
    fold(lanes, group, ~0ull, [](uint64_t a, uint64_t b) { return a & b; });
}
void combine_or(Exchange* const* lanes, uint64_t group) {
    fold(lanes, group, 0, [](uint64_t a, uint64_t b) { return a | b; });
}
void combine_xor(Exchange* const* lanes, uint64_t group) {
    fold(lanes, group, 0, [](uint64_t a, uint64_t b) { return a ^ b; });
}

void combine_mma_bf16(Exchange* const* lanes, uint64_t) {
    mma_16x16<float, 4>(lanes, [](const void* p, int v) { return bf16_to_float(read<uint16_t>(p, v)); });
}
void combine_mma_f16(Exchange* const* lanes, uint64_t) {
    mma_16x16<float, 4>(lanes, [](const void* p, int v) { return half_to_float(read<uint16_t>(p, v)); });
}
void combine_mma_i8(Exchange* const* lanes, uint64_t) {
    mma_16x16<int, 4>(lanes, [](const void* p, int v) { return int(read<int8_t>(p, v)); });
}
void combine_mma_f32(Exchange* const* lanes, uint64_t) {
    mma_16x16<float, 1>(lanes, [](const void* p, int v) { return read<float>(p, v); });
}
void combine_mma_tf32(Exchange* const* lanes, uint64_t) {
    // tf32 keeps 10 bits of the fraction; the rest is rounded to nearest, ties away.
    mma_16x16<float, 2>(
        lanes, [](const void* p, int v) { return bits<float>((read<uint32_t>(p, v) + 0x1000u) & 0xffffe000u); });
}
void combine_mma_f64(Exchange* const* lanes, uint64_t) {
    mma_16x16<double, 1>(lanes, [](const void* p, int v) { return read<double>(p, v); });
}

void combine_m16n8k16_bf16(Exchange* const* lanes, uint64_t) { mma_m16n8<uint16_t, float>(lanes, bf16_to_float); }
void combine_m16n8k16_f16(Exchange* const* lanes, uint64_t) { mma_m16n8<uint16_t, float>(lanes, half_to_float); }
void combine_m16n8k32_s8(Exchange* const* lanes, uint64_t) {
    mma_m16n8<int8_t, int>(lanes, [](int8_t value) { return int(value); });
}

void combine_ldmatrix(Exchange* const* lanes, uint64_t) {
    for (int tile = 0; tile < lanes[0]->width; ++tile) {
        uint16_t m[8][8];
        for (int row = 0; row < 8; ++row) std::memcpy(m[row], lanes[8 * tile + row]->x, 16);
        for (int lane = 0; lane < 32; ++lane) {
            const int row = lane >> 2, t = 2 * (lane & 3);
            const uint16_t pair[2] = {lanes[lane]->arg ? m[t][row] : m[row][t],
                                      lanes[lane]->arg ? m[t + 1][row] : m[row][t + 1]};
            std::memcpy(static_cast<char*>(lanes[lane]->z) + 4 * tile, pair, 4);
        }
    }
}
}  // namespace sim
