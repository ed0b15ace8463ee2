// Global memory: what a kernel may touch, and the shadow of each piece.
#pragma once
#include "runtime.h"

namespace sim {
enum class Kind : uint8_t { kArgument, kAllocation, kHost, kModule };

/// One piece of memory that a kernel may touch. `written` has one byte per byte where unwritten memory is possible;
/// `writer` has, per two bytes, the launch's block that wrote there last.
struct Range {
    uintptr_t low;
    size_t bytes;
    std::string name;
    Kind kind;
    std::vector<uint8_t> written;
    std::vector<uint32_t> writer;
    bool writable = true;
};

Range* find_range(uintptr_t address);
Range& add_range(uintptr_t low, size_t bytes, const std::string& name, Kind kind, bool unwritten);
void remove_range(uintptr_t low);
void remove_arguments();
/// Mark bytes as written by the host (memset, memcpy, an atomic).
void mark_written(uintptr_t address, size_t bytes);
}  // namespace sim
