// Shuffles, votes, reductions, barriers, fences and atomics: CUDA's names over the wave's rendezvous.
#pragma once
#include <cstring>

#include "sim/core.h"

namespace sim {
template <class T>
SIM_UNHOOKED T exchange(Exchange e, T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "a wave operation moves at most 8 bytes per lane");
    e.bytes = sizeof(T);
    __builtin_memcpy(&e.value, &value, sizeof(T));
    rendezvous(e);
    T result;
    __builtin_memcpy(&result, &e.result, sizeof(T));
    return result;
}

template <class T>
T shuffle(const char* name, Combine* combine, uint64_t mask, T value, int arg, int width, const char* file, int line) {
    Exchange e{name, combine, Take::kMask, mask, file, line};
    e.arg = arg;
    e.width = width;
    return exchange(e, value);
}

inline uint64_t vote(const char* name, Combine* combine, Take take, uint64_t mask, bool value, const char* file,
                     int line) {
    return exchange(Exchange{name, combine, take, mask, file, line}, uint64_t(value));
}

template <class T>
T reduce(const char* name, Combine* combine, uint64_t mask, T value, const char* file, int line) {
    static_assert(std::is_integral_v<T> && sizeof(T) == 4, "__reduce_*_sync works on 32-bit integers");
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return T(exchange(Exchange{name, combine, Take::kMask, mask, file, line}, Wide(value)));
}

SIM_UNHOOKED inline unsigned block_vote(const char* name, Combine* combine, bool value, const char* file, int line) {
    Exchange e{name, combine, Take::kWhole, ~0ull, file, line};
    e.value = value;
    block_barrier(e);
    return unsigned(e.result);
}

template <class T, class Operation>
SIM_UNHOOKED T atomic(T* address, Operation next) {
    touch_atomic(address, sizeof(T));
    const T old = *address;
    *address = next(old);
    return old;
}
}  // namespace sim

constexpr int warpSize = sim::kWaveLanes;

template <class T>
T __shfl_sync(uint64_t mask, T value, int lane, int width = warpSize, SIM_SITE) {
    return sim::shuffle("__shfl_sync", sim::combine_shuffle_idx, mask, value, lane, width, file, line);
}
template <class T>
T __shfl_up_sync(uint64_t mask, T value, unsigned delta, int width = warpSize, SIM_SITE) {
    return sim::shuffle("__shfl_up_sync", sim::combine_shuffle_up, mask, value, int(delta), width, file, line);
}
template <class T>
T __shfl_down_sync(uint64_t mask, T value, unsigned delta, int width = warpSize, SIM_SITE) {
    return sim::shuffle("__shfl_down_sync", sim::combine_shuffle_down, mask, value, int(delta), width, file, line);
}
template <class T>
T __shfl_xor_sync(uint64_t mask, T value, int lane_mask, int width = warpSize, SIM_SITE) {
    return sim::shuffle("__shfl_xor_sync", sim::combine_shuffle_xor, mask, value, lane_mask, width, file, line);
}

#if defined(SIM_WARP32)
using WaveMask = unsigned int;
#else
using WaveMask = unsigned long long;
#endif
inline WaveMask __ballot_sync(uint64_t mask, bool predicate, SIM_SITE) {
    return WaveMask(sim::vote("__ballot_sync", sim::combine_ballot, sim::Take::kMask, mask, predicate, file, line));
}
inline int __any_sync(uint64_t mask, bool predicate, SIM_SITE) {
    return int(sim::vote("__any_sync", sim::combine_any, sim::Take::kMask, mask, predicate, file, line));
}
inline int __all_sync(uint64_t mask, bool predicate, SIM_SITE) {
    return int(sim::vote("__all_sync", sim::combine_all, sim::Take::kMask, mask, predicate, file, line));
}
inline WaveMask __activemask(SIM_SITE) {
    return WaveMask(sim::vote("__activemask", sim::combine_active, sim::Take::kActive, 0, true, file, line));
}
template <class T>
WaveMask __match_any_sync(uint64_t mask, T value, SIM_SITE) {
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    sim::Exchange e{"__match_any_sync", sim::combine_match_any, sim::Take::kMask, mask, file, line};
    return WaveMask(sim::exchange(e, bits));
}

template <class T>
T __reduce_add_sync(uint64_t mask, T value, SIM_SITE) {
    return sim::reduce("__reduce_add_sync", sim::combine_add, mask, value, file, line);
}
template <class T>
T __reduce_min_sync(uint64_t mask, T value, SIM_SITE) {
    auto* combine = std::is_signed_v<T> ? sim::combine_min_signed : sim::combine_min_unsigned;
    return sim::reduce("__reduce_min_sync", combine, mask, value, file, line);
}
template <class T>
T __reduce_max_sync(uint64_t mask, T value, SIM_SITE) {
    auto* combine = std::is_signed_v<T> ? sim::combine_max_signed : sim::combine_max_unsigned;
    return sim::reduce("__reduce_max_sync", combine, mask, value, file, line);
}
template <class T>
T __reduce_and_sync(uint64_t mask, T value, SIM_SITE) {
    return sim::reduce("__reduce_and_sync", sim::combine_and, mask, value, file, line);
}
template <class T>
T __reduce_or_sync(uint64_t mask, T value, SIM_SITE) {
    return sim::reduce("__reduce_or_sync", sim::combine_or, mask, value, file, line);
}
template <class T>
T __reduce_xor_sync(uint64_t mask, T value, SIM_SITE) {
    return sim::reduce("__reduce_xor_sync", sim::combine_xor, mask, value, file, line);
}

inline void __syncwarp(uint64_t mask = ~0ull, SIM_SITE) {
    sim::vote("__syncwarp", sim::combine_nothing, sim::Take::kMask, mask, true, file, line);
}
inline void __syncthreads(SIM_SITE) { sim::block_vote("__syncthreads", sim::combine_nothing, true, file, line); }
inline int __syncthreads_count(bool predicate, SIM_SITE) {
    return int(sim::block_vote("__syncthreads_count", sim::combine_count, predicate, file, line));
}
inline int __syncthreads_or(bool predicate, SIM_SITE) {
    return sim::block_vote("__syncthreads_or", sim::combine_count, predicate, file, line) != 0;
}
inline int __syncthreads_and(bool predicate, SIM_SITE) {
    return sim::block_vote("__syncthreads_and", sim::combine_count, !predicate, file, line) == 0;
}
// Lanes run one at a time and memory is coherent, so a fence only has to keep the compiler from moving accesses.
inline void __threadfence() { __asm__ volatile("" ::: "memory"); }
inline void __threadfence_block() { __asm__ volatile("" ::: "memory"); }
inline void __threadfence_system() { __asm__ volatile("" ::: "memory"); }
inline void __nanosleep(unsigned) { sim::spin_hint(); }
inline void __trap(SIM_SITE) { sim::trap("__trap", file, line); }

template <class T>
T atomicAdd(T* address, std::common_type_t<T> value) {
    return sim::atomic(address, [value](T old) { return T(old + value); });
}
template <class T>
T atomicSub(T* address, std::common_type_t<T> value) {
    return sim::atomic(address, [value](T old) { return T(old - value); });
}
template <class T>
T atomicMin(T* address, std::common_type_t<T> value) {
    return sim::atomic(address, [value](T old) { return value < old ? value : old; });
}
template <class T>
T atomicMax(T* address, std::common_type_t<T> value) {
    return sim::atomic(address, [value](T old) { return old < value ? value : old; });
}
template <class T>
T atomicExch(T* address, std::common_type_t<T> value) {
    return sim::atomic(address, [value](T) { return value; });
}
template <class T>
T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> value) {
    return sim::atomic(address, [compare, value](T old) { return old == compare ? value : old; });
}
template <class T>
T atomicAnd(T* address, std::common_type_t<T> value) {
    return sim::atomic(address, [value](T old) { return T(old & value); });
}
template <class T>
T atomicOr(T* address, std::common_type_t<T> value) {
    return sim::atomic(address, [value](T old) { return T(old | value); });
}
template <class T>
T atomicXor(T* address, std::common_type_t<T> value) {
    return sim::atomic(address, [value](T old) { return T(old ^ value); });
}
/// CUDA's wrapping counters: 0, 1, .., limit, 0, .. and back.
inline unsigned atomicInc(unsigned* address, unsigned limit) {
    return sim::atomic(address, [limit](unsigned old) { return old >= limit ? 0u : old + 1u; });
}
inline unsigned atomicDec(unsigned* address, unsigned limit) {
    return sim::atomic(address, [limit](unsigned old) { return old == 0 || old > limit ? limit : old - 1u; });
}
