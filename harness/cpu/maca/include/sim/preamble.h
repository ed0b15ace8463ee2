// Included before a submission's first line. memcpy and its like become accesses that the hook sees: small ones of
// fixed size a load and a store, others a call to a hooked function. The runtime's headers, as nvcc does, come by
// themselves.
#pragma once
#undef _FORTIFY_SOURCE  // however the compiler came by it: the C library's headers would define the three below as well
#include <cstddef>

extern "C" void* sim_memcpy(void* to, const void* from, size_t bytes);
extern "C" void* sim_memmove(void* to, const void* from, size_t bytes);
extern "C" void* sim_memset(void* to, int value, size_t bytes);

extern "C" {
extern inline __attribute__((gnu_inline, always_inline, artificial)) void* memcpy(void* __restrict to,
                                                                                  const void* __restrict from,
                                                                                  size_t bytes) noexcept {
    if (__builtin_constant_p(bytes) && (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16)) {
        return __builtin_memcpy(to, from, bytes);
    }
    return sim_memcpy(to, from, bytes);
}
extern inline __attribute__((gnu_inline, always_inline, artificial)) void* memmove(void* to, const void* from,
                                                                                   size_t bytes) noexcept {
    return sim_memmove(to, from, bytes);
}
extern inline __attribute__((gnu_inline, always_inline, artificial)) void* memset(void* to, int value,
                                                                                  size_t bytes) noexcept {
    return sim_memset(to, value, bytes);
}
}

// A failed assertion in a kernel is a fault of that thread, not the end of the process.
extern "C" [[noreturn]] void __assert_fail(const char* condition, const char* file, unsigned int line,
                                           const char* function) noexcept __asm__("sim_assert_fail");

#include "cuda_runtime.h"

#define __builtin_memcpy(to, from, bytes) memcpy(to, from, bytes)
#define __builtin_memmove(to, from, bytes) memmove(to, from, bytes)
#define __builtin_memset(to, value, bytes) memset(to, value, bytes)
