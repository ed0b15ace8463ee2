// The memory hook. The compiler calls __tsan_readN / __tsan_writeN before every access of the submission's code; these
// functions are ours, and the thread sanitizer's own library is not linked.
#include "memory.h"

#include <link.h>

#include <algorithm>
#include <cstring>
#include <map>

extern "C" const char __ehdr_start __attribute__((visibility("hidden")));

namespace sim {
namespace {
std::map<uintptr_t, Range> ranges;  // by first address; they never overlap
Range* last = nullptr;
uint32_t launch_base = 0;  // block serials of earlier launches lie below

// A store to where another block of the launch has stored: harmless only if it stores what is there already, which can
// be seen only after it. Looked at on the next access.
struct Doubtful {
    uintptr_t address = 0;
    size_t bytes = 0;
    unsigned char before[16];
    uint32_t other = 0;
    void* frame = nullptr;
    void* frame_pointer = nullptr;
    Thread* thread = nullptr;
} doubtful;

int add_module(dl_phdr_info* info, size_t, void*) {
    if (info->dlpi_addr != reinterpret_cast<uintptr_t>(&__ehdr_start)) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type != PT_LOAD || header.p_memsz == 0) continue;
        Range& range = add_range(info->dlpi_addr + header.p_vaddr, header.p_memsz, "the submission's own variables",
                                 Kind::kModule, false);
        range.writable = (header.p_flags & PF_W) != 0;
    }
    return 1;
}

std::string describe(uintptr_t address, size_t bytes) {
    for (const Thread& thread : g.threads) {
        if (thread.stack_low != 0 && address - thread.stack_low < kStackBytes)
            return "a local variable of thread " + std::to_string(thread.id);
    }
    // The nearest piece at most 1 MiB away names the access better than a bare address.
    const Range* nearest = nullptr;
    size_t distance = 1 << 20;
    for (const auto& [low, range] : ranges) {
        if (range.kind == Kind::kModule) continue;
        const size_t gap =
            address >= low
                ? (address + bytes > low + range.bytes ? address - std::min<uintptr_t>(address, low + range.bytes) : 0)
                : low - address;
        if (gap < distance) {
            distance = gap;
            nearest = &range;
        }
    }
    if (shared_gap(address) < distance) return shared_name(address);
    if (nearest == nullptr) return "address " + hex(address) + ", outside every tensor and allocation";
    const int64_t offset = int64_t(address) - int64_t(nearest->low);
    return "byte " + std::to_string(offset) + " of " + nearest->name + ", which has " + std::to_string(nearest->bytes) +
           " bytes";
}

std::string block_name(uint32_t serial) {
    const uint32_t i = serial - launch_base - 1;
    const dim3 grid = g.grid.grid;
    return "block (" + std::to_string(i % grid.x) + "," + std::to_string(i / grid.x % grid.y) + "," +
           std::to_string(i / (grid.x * grid.y)) + ")";
}

/// True when the store has changed what another block wrote: then the fault is recorded.
bool settle_doubtful() {
    const Doubtful was = doubtful;
    doubtful.bytes = 0;
    if (std::memcmp(reinterpret_cast<const void*>(was.address), was.before, was.bytes) == 0) return false;
    g.current = was.thread;
    set_fault_here("RACE",
                   "writes " + describe(was.address, was.bytes) + ", where " + block_name(was.other) +
                       " of the same launch wrote another value",
                   was.frame, was.frame_pointer);
    return true;
}

void write_global(Range& range, uintptr_t address, size_t bytes, void* frame, void* frame_pointer) {
    const size_t offset = address - range.low;
    std::memset(&range.written[offset], 1, bytes);
    const uint32_t me = launch_base + g.block_serial;
    for (size_t cell = offset / 2; cell <= (offset + bytes - 1) / 2; ++cell) {
        uint32_t& writer = range.writer[cell];
        if (writer > launch_base && writer != me && bytes != 1 && bytes <= sizeof(doubtful.before) &&
            doubtful.bytes == 0) {
            doubtful.address = address;
            doubtful.bytes = bytes;
            std::memcpy(doubtful.before, reinterpret_cast<const void*>(address), bytes);
            doubtful.other = writer;
            doubtful.frame = frame;
            doubtful.frame_pointer = frame_pointer;
            doubtful.thread = g.current;
        }
        writer = me;
    }
}

void check_global(uintptr_t address, size_t bytes, bool write, bool atomic, void* frame, void* frame_pointer) {
    Range* range = last;
    if (range == nullptr || address - range->low >= range->bytes) range = find_range(address);
    if (range == nullptr || address - range->low + bytes > range->bytes || (write && !range->writable)) {
        fail_here(
            "OUT_OF_BOUNDS",
            std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at " + describe(address, bytes),
            frame, frame_pointer);
    }
    last = range;
    if (range->written.empty()) return;
    if (!write || atomic) {
        for (size_t i = 0; i < bytes; ++i) {
            if (range->written[address - range->low + i]) continue;
            fail_here("UNINITIALISED_READ", "reads " + describe(address + i, 1) + ": nobody has written it", frame,
                      frame_pointer);
        }
    }
    if (write && !atomic) write_global(*range, address, bytes, frame, frame_pointer);
}
}  // namespace

Range* find_range(uintptr_t address) {
    auto next = ranges.upper_bound(address);
    if (next == ranges.begin()) return nullptr;
    Range& range = std::prev(next)->second;
    return address - range.low < range.bytes ? &range : nullptr;
}

Range& add_range(uintptr_t low, size_t bytes, const std::string& name, Kind kind, bool unwritten) {
    last = nullptr;
    Range& range = ranges[low];
    range = Range{low, bytes, name, kind, {}, {}, true};
    if (unwritten) {
        range.written.assign(bytes, 0);
        range.writer.assign(bytes / 2 + 1, 0);
    }
    return range;
}

void remove_range(uintptr_t low) {
    last = nullptr;
    ranges.erase(low);
}

void remove_arguments() {
    last = nullptr;
    for (auto it = ranges.begin(); it != ranges.end();)
        it = it->second.kind == Kind::kArgument ? ranges.erase(it) : std::next(it);
}

void mark_written(uintptr_t address, size_t bytes) {
    Range* range = find_range(address);
    if (range == nullptr || range->written.empty()) return;
    const size_t offset = address - range->low;
    std::memset(&range->written[offset], 1, std::min(bytes, range->bytes - offset));
}

std::string address_name(uintptr_t address, size_t bytes) {
    return is_shared(address) ? shared_name(address) : describe(address, bytes);
}

void settle_last_store() {
    if (doubtful.bytes != 0 && !g.fault.set) settle_doubtful();
}

void prepare_memory() {
    static bool once = false;
    if (!once) dl_iterate_phdr(add_module, nullptr);
    once = true;
    doubtful.bytes = 0;
    launch_base += g.block_serial;
    g.block_serial = 0;
}

void check_access(uintptr_t address, size_t bytes, bool write, bool atomic, void* frame, void* frame_pointer) {
    if (doubtful.bytes != 0 && settle_doubtful()) abandon();
    if (bytes == 0) return;
    const bool shared = check_shared(address, bytes, write, atomic, frame, frame_pointer);
    if (!shared) check_global(address, bytes, write, atomic, frame, frame_pointer);
    if (g.counting) record_access(address, bytes, write, shared, frame);
}

namespace {
// The whole hook for a thread's own stack, which is where most instrumented accesses go.
template <bool kWrite>
inline __attribute__((always_inline)) void hook(void* pointer, size_t bytes, void* frame, void* frame_pointer) {
    const Thread* self = g.current;
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (self == nullptr || address - self->stack_low < kStackBytes) return;
    check_access(address, bytes, kWrite, false, frame, frame_pointer);
}

/// Volatile reads are how threads wait for each other: after many that see one unchanged value, the thread gives way.
void note_poll(const void* pointer, size_t bytes, void* frame) {
    constexpr int kPatience = 64;
    Thread& self = *g.current;
    self.poll_frame = frame;
    uint64_t value = 0;
    std::memcpy(&value, pointer, std::min<size_t>(bytes, 8));
    const bool same = self.polled == pointer && self.polled_value == value;
    self.polled = pointer;
    self.polled_value = value;
    self.polls = same ? self.polls + 1 : 0;
    if (self.polls >= kPatience) yield_turn();
}
}  // namespace

void touch_read(const void* address, size_t bytes) {
    if (g.current == nullptr) return;
    hook<false>(const_cast<void*>(address), bytes, __builtin_return_address(0), __builtin_frame_address(0));
}
void touch_write(void* address, size_t bytes) {
    hook<true>(address, bytes, __builtin_return_address(0), __builtin_frame_address(0));
}
void touch_atomic(void* address, size_t bytes) {
    if (g.current == nullptr) return;
    ++g.counters->atomics;
    void* frame = __builtin_return_address(0);
    if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
        fail_here("OUT_OF_BOUNDS",
                  "a misaligned atomic of " + std::to_string(bytes) + " bytes at " +
                      hex(reinterpret_cast<uintptr_t>(address)),
                  frame, __builtin_frame_address(0));
    }
    check_access(reinterpret_cast<uintptr_t>(address), bytes, true, true, frame, __builtin_frame_address(0));
    note_poll(address, bytes, frame);
}
}  // namespace sim

#define SIM_HOOK(name, is_write, bytes)                                                               \
    extern "C" void name(void* address) {                                                             \
        sim::hook<is_write>(address, bytes, __builtin_return_address(0), __builtin_frame_address(0)); \
    }
#define SIM_HOOKS(bytes)                                                                            \
    SIM_HOOK(__tsan_read##bytes, false, bytes)                                                      \
    SIM_HOOK(__tsan_write##bytes, true, bytes)                                                      \
    SIM_HOOK(__tsan_unaligned_read##bytes, false, bytes)                                            \
    SIM_HOOK(__tsan_unaligned_write##bytes, true, bytes)                                            \
    SIM_HOOK(__tsan_volatile_write##bytes, true, bytes)                                             \
    SIM_HOOK(__tsan_unaligned_volatile_write##bytes, true, bytes)                                   \
    extern "C" void __tsan_volatile_read##bytes(void* address) {                                    \
        sim::hook<false>(address, bytes, __builtin_return_address(0), __builtin_frame_address(0));  \
        if (sim::g.current != nullptr) sim::note_poll(address, bytes, __builtin_return_address(0)); \
    }                                                                                               \
    extern "C" void __tsan_unaligned_volatile_read##bytes(void* address) { __tsan_volatile_read##bytes(address); }
SIM_HOOKS(1)
SIM_HOOKS(2)
SIM_HOOKS(4)
SIM_HOOKS(8)
SIM_HOOKS(16)
#undef SIM_HOOKS
#undef SIM_HOOK

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* address, size_t bytes) {
    sim::hook<false>(address, bytes, __builtin_return_address(0), __builtin_frame_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
    sim::hook<true>(address, bytes, __builtin_return_address(0), __builtin_frame_address(0));
}
// A function's static variable with a run-time initialiser is guarded by such a load; host code only.
unsigned char __tsan_atomic8_load(const volatile unsigned char* address, int) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

void* sim_memcpy(void* to, const void* from, size_t bytes) {
    sim::hook<false>(const_cast<void*>(from), bytes, __builtin_return_address(0), __builtin_frame_address(0));
    sim::hook<true>(to, bytes, __builtin_return_address(0), __builtin_frame_address(0));
    return std::memcpy(to, from, bytes);
}
void* sim_memmove(void* to, const void* from, size_t bytes) {
    sim::hook<false>(const_cast<void*>(from), bytes, __builtin_return_address(0), __builtin_frame_address(0));
    sim::hook<true>(to, bytes, __builtin_return_address(0), __builtin_frame_address(0));
    return std::memmove(to, from, bytes);
}
void* sim_memset(void* to, int value, size_t bytes) {
    sim::hook<true>(to, bytes, __builtin_return_address(0), __builtin_frame_address(0));
    return std::memset(to, value, bytes);
}

/// The compiler's alignment check (-fsanitize=alignment) found a misaligned access; its record starts with the place.
struct SimTypeName {
    uint16_t kind, info;
    char name[1];
};
struct SimTypeMismatch {
    const char* file;
    uint32_t line, column;
    const SimTypeName* type;
    unsigned char log_alignment;
};
void __ubsan_handle_type_mismatch_v1(SimTypeMismatch* found, uintptr_t address) {
    if (sim::g.current == nullptr) return;
    const std::string needed = std::to_string(1u << found->log_alignment);
    sim::fail("OUT_OF_BOUNDS",
              "misaligned access to " + sim::address_name(address, 1u << found->log_alignment) +
                  ": its address must be a multiple of " + needed,
              found->file, int(found->line));
}
}
