// What a submission's code calls in the simulator's runtime: the thread's coordinates, the wave's rendezvous, the
// block's barrier, and the launch. The runtime is compiled apart and without instrumentation.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "sim/types.h"

// Helpers of these headers that take the address of their own locals stay out of the memory hook.
#define SIM_UNHOOKED __attribute__((no_sanitize("thread"), noinline))
// Where the call stands in the submission: two parameters that the caller never gives.
#define SIM_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace sim {
#if defined(SIM_WARP32)
constexpr int kWaveLanes = 32;
#else
constexpr int kWaveLanes = 64;
#endif

/// Who must take part in a wave operation.
enum class Take : uint8_t {
    kMask,    // the lanes named in `mask`, all of them, at this very call
    kWhole,   // every lane of the wave
    kActive,  // whichever lanes are here when no lane of the wave can go on
};

/// One lane's part in a wave operation, or its arrival at a block barrier. `combine` computes every `result` of a
/// group.
struct Exchange {
    const char* name;
    void (*combine)(Exchange* const* lanes, uint64_t group);
    Take take;
    uint64_t mask;
    const char* file;
    int line;
    uint64_t value = 0, result = 0;
    int arg = 0, width = kWaveLanes, bytes = 8;
    const void *x = nullptr, *y = nullptr;
    void* z = nullptr;
};

void rendezvous(Exchange& exchange);
void block_barrier(Exchange& exchange);

using Combine = void(Exchange* const* lanes, uint64_t group);
Combine combine_nothing, combine_ballot, combine_any, combine_all, combine_active, combine_match_any;
Combine combine_shuffle_idx, combine_shuffle_up, combine_shuffle_down, combine_shuffle_xor, combine_row_move;
Combine combine_add, combine_min_signed, combine_min_unsigned, combine_max_signed, combine_max_unsigned;
Combine combine_and, combine_or, combine_xor, combine_first_lane, combine_pull, combine_push;
Combine combine_count;
Combine combine_mma_bf16, combine_mma_f16, combine_mma_i8, combine_mma_f32, combine_mma_tf32, combine_mma_f64;
Combine combine_m16n8k16_bf16, combine_m16n8k16_f16, combine_m16n8k32_s8, combine_ldmatrix;

// Constant for a thread's whole life, so the compiler may keep them in registers.
uint3 thread_idx() __attribute__((const));
uint3 block_idx() __attribute__((const));
dim3 block_dim() __attribute__((const));
dim3 grid_dim() __attribute__((const));
unsigned lane_id() __attribute__((const));

/// Check an access of `bytes` bytes at `address` as if the thread's own code had made it.
void touch_read(const void* address, size_t bytes);
void touch_write(void* address, size_t bytes);
/// Check an atomic access; also the place where a thread that spins gives way to the others.
void touch_atomic(void* address, size_t bytes);
void spin_hint();

/// At the start of every kernel that has __launch_bounds__; the blocks per processor after it are a hint.
void check_launch_bounds(unsigned threads, const char* file, int line);
inline void launch_bounds(unsigned threads, int = 0, int = 0, SIM_SITE) { check_launch_bounds(threads, file, line); }

[[noreturn]] void trap(const char* what, const char* file, int line);

void cp_async(void* shared, const void* global, int bytes, int valid_bytes);
void cp_async_commit();
void cp_async_wait(int newest_groups_left);

/// Where `extern __shared__ T name[];` points: the block's dynamic shared memory.
extern "C" unsigned char sim_dynamic_shared[];
struct DynamicShared {
    template <class T>
    constexpr operator T*() const {
        return reinterpret_cast<T*>(sim_dynamic_shared);
    }
};

/// Follows every declaration of a `__shared__` variable: the block has it from here on.
void declare_shared(const char* name, const void* address, size_t bytes, const char* file, int line);
struct Shared {
    Shared(const char* name, const void* address, size_t bytes, SIM_SITE) {
        declare_shared(name, address, bytes, file, line);
    }
};

struct Grid {
    const char* name;
    dim3 grid, block;
    size_t shared_bytes;
};
void launch(const Grid& grid, void (*entry)(const void*), const void* closure);
}  // namespace sim

extern "C" void* sim_memcpy(void* to, const void* from, size_t bytes);
extern "C" void* sim_memmove(void* to, const void* from, size_t bytes);
extern "C" void* sim_memset(void* to, int value, size_t bytes);
