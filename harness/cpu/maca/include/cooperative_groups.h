// Cooperative groups: the block, and tiles of a wave whose size is a power of two. No grid group: blocks run one after
// another here.
#pragma once
#include "cuda_runtime.h"

namespace cooperative_groups {
class thread_block {
  public:
    static void sync(SIM_SITE) { sim::block_vote("thread_block::sync", sim::combine_nothing, true, file, line); }
    static unsigned thread_rank() { return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static dim3 group_index() { return blockIdx; }
    static dim3 thread_index() { return threadIdx; }
    static dim3 group_dim() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

template <unsigned Size>
class thread_block_tile {
    static_assert(Size != 0 && (Size & (Size - 1)) == 0 && Size <= unsigned(warpSize), "a tile lies inside one wave");
    static uint64_t mask() {
        const uint64_t lanes = Size == 64 ? ~0ull : (1ull << (Size % 64)) - 1;
        return lanes << (sim::lane_id() & ~(Size - 1));
    }
    static uint64_t own(uint64_t votes) { return (votes & mask()) >> (sim::lane_id() & ~(Size - 1)); }

  public:
    static constexpr unsigned size() { return Size; }
    static constexpr unsigned num_threads() { return Size; }
    static unsigned thread_rank() { return sim::lane_id() & (Size - 1); }
    static unsigned meta_group_rank() { return thread_block::thread_rank() / Size; }
    static unsigned meta_group_size() { return (thread_block::size() + Size - 1) / Size; }
    static void sync(SIM_SITE) { __syncwarp(mask(), file, line); }
    template <class T>
    T shfl(T value, int lane, SIM_SITE) const {
        return __shfl_sync(mask(), value, lane, Size, file, line);
    }
    template <class T>
    T shfl_up(T value, unsigned delta, SIM_SITE) const {
        return __shfl_up_sync(mask(), value, delta, Size, file, line);
    }
    template <class T>
    T shfl_down(T value, unsigned delta, SIM_SITE) const {
        return __shfl_down_sync(mask(), value, delta, Size, file, line);
    }
    template <class T>
    T shfl_xor(T value, int lanes, SIM_SITE) const {
        return __shfl_xor_sync(mask(), value, lanes, Size, file, line);
    }
    int any(bool predicate, SIM_SITE) const { return __any_sync(mask(), predicate, file, line); }
    int all(bool predicate, SIM_SITE) const { return __all_sync(mask(), predicate, file, line); }
    uint64_t ballot(bool predicate, SIM_SITE) const { return own(__ballot_sync(mask(), predicate, file, line)); }
};
template <unsigned Size>
thread_block_tile<Size> tiled_partition(const thread_block&) {
    return {};
}
}  // namespace cooperative_groups
