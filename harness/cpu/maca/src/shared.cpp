// Shared memory and its shadow. `__shared__` variables are the library's thread-local block (there is one host thread),
// dynamic shared memory is one buffer. Blocks run one after another, so both are simply reused.
//
// The shadow keeps, for every two bytes, the last writer and the last reader as a thread and the time of its access,
// and for every byte whether this block wrote it. Time is a counter that every barrier and every wave operation
// advances; an access older than the last barrier cannot race, an access of the same wave older than the wave's last
// operation neither.
#include <link.h>

#include <algorithm>
#include <cstring>

#include "runtime.h"

extern "C" {
__attribute__((aligned(1024))) unsigned char sim_dynamic_shared[sim::kSharedLimit];
extern const char __ehdr_start __attribute__((visibility("hidden")));
}

namespace sim {
namespace {
// Makes sure that the library has a thread-local block, and that the loader has placed it.
thread_local volatile char anchor;

constexpr uint32_t kManyLanes = 1024;  // + wave: several lanes of one wave
constexpr uint32_t kManyWaves = 2047;
constexpr uint32_t kByteAccess = 1u << 11;
constexpr uint32_t kMaxEpoch = (1u << 20) - 1;

uintptr_t static_low = 0;
size_t static_bytes = 0, dynamic_start = 0;  // the dynamic part's place in the shadow
std::vector<uint32_t> writers, readers;
std::vector<uint8_t> written;
/// A `__shared__` variable that some thread has declared; `open` is the block that declared it last.
struct SharedArray {
    std::string name;
    size_t offset, bytes;
    uint64_t open;
};
constexpr uint64_t kAlwaysOpen = ~uint64_t(0);  // declared outside every function
std::vector<SharedArray> arrays;
uint64_t block_serial = 0;
std::vector<uint16_t> array_of;  // for every byte of the static part: 1 + index into arrays, 0 for padding
size_t static_used = 0;
uint32_t now = 1, block_epoch = 1;
struct Span {
    size_t low = SIZE_MAX, high = 0;
    void add(size_t from, size_t to) {
        low = std::min(low, from);
        high = std::max(high, to);
    }
};
Span touched_static, touched_dynamic;

uint32_t id_of(uint32_t cell) { return cell & 0x7ff; }
uint32_t epoch_of(uint32_t cell) { return cell >> 12; }

int find_tls(dl_phdr_info* info, size_t, void*) {
    if (info->dlpi_addr != reinterpret_cast<uintptr_t>(&__ehdr_start)) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        if (info->dlpi_phdr[i].p_type == PT_TLS) {
            static_low = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
            static_bytes = info->dlpi_phdr[i].p_memsz;
        }
    }
    return 1;
}

void tick() {
    if (++now < kMaxEpoch) return;
    std::fill(writers.begin(), writers.end(), 0);
    std::fill(readers.begin(), readers.end(), 0);
    now = block_epoch = 1;
    for (Wave& wave : g.waves) wave.epoch = 1;
}

bool is_open(const SharedArray& array) { return array.open == block_serial || array.open == kAlwaysOpen; }

std::string place(uintptr_t address) {
    if (address - reinterpret_cast<uintptr_t>(sim_dynamic_shared) < kSharedLimit) {
        return "byte " + std::to_string(address - reinterpret_cast<uintptr_t>(sim_dynamic_shared)) +
               " of dynamic shared memory";
    }
    // The variable of this block that holds the byte, or else the last one before it.
    const size_t offset = address - static_low;
    const SharedArray* nearest = nullptr;
    for (const SharedArray& array : arrays) {
        if (!is_open(array) || array.offset > offset) continue;
        if (nearest == nullptr || array.offset > nearest->offset) nearest = &array;
    }
    if (nearest == nullptr) return "shared memory that the kernel has not declared";
    std::string text = "byte " + std::to_string(offset - nearest->offset) + " of shared " + nearest->name;
    if (offset - nearest->offset >= nearest->bytes) text += ", which has " + std::to_string(nearest->bytes) + " bytes";
    return text;
}

std::string who(uint32_t id) {
    if (id == kManyWaves) return "threads of several waves";
    if (id >= kManyLanes) return "lanes of wave " + std::to_string(id - kManyLanes);
    return "thread " + std::to_string(id) + " (wave " + std::to_string(wave_of(int(id))) + ")";
}

/// True when an earlier access, recorded in `cell`, is not ordered before one that thread `self` makes now.
inline bool unordered(uint32_t cell, const Thread& self) {
    if (epoch_of(cell) < block_epoch || id_of(cell) == self.id) return false;
    const uint32_t id = id_of(cell);
    if (id == kManyWaves) return true;
    const int wave = id >= kManyLanes ? int(id - kManyLanes) : wave_of(int(id));
    return wave != self.wave->id || epoch_of(cell) >= self.wave->epoch;
}

[[noreturn]] void report_race(uint32_t cell, const Thread& self, uintptr_t address, bool write, bool other_wrote,
                              void* frame, void* frame_pointer) {
    const uint32_t id = id_of(cell);
    const bool same_wave =
        id < kManyLanes ? wave_of(int(id)) == self.wave->id : id - kManyLanes == uint32_t(self.wave->id);
    fail_here("RACE",
              std::string(write ? "writes " : "reads ") + place(address) + ", which " + who(id) +
                  (other_wrote ? " wrote" : " read") + " with no " +
                  (same_wave && id != kManyWaves ? "__syncwarp or other wave operation" : "barrier") + " in between",
              frame, frame_pointer);
}

void check_declared(size_t offset, size_t bytes, uintptr_t address, bool write, void* frame, void* frame_pointer) {
    const uint16_t first = array_of[offset];
    if (first != 0 && array_of[offset + bytes - 1] == first && is_open(arrays[first - 1u])) return;
    fail_here("OUT_OF_BOUNDS",
              std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at " + place(address), frame,
              frame_pointer);
}
}  // namespace

void locate_shared() {
    anchor = 1;
    dl_iterate_phdr(find_tls, nullptr);
    if (!written.empty()) return;
    dynamic_start = (static_bytes + 15) / 16 * 16;
    const size_t bytes = dynamic_start + kSharedLimit;
    writers.assign(bytes / 2, 0);
    readers.assign(bytes / 2, 0);
    written.assign(bytes, 0);
    array_of.assign(dynamic_start + 16, 0);
}

void declare_shared(const char* name, const void* address, size_t bytes, const char* file, int line) {
    if (g.current == nullptr) locate_shared();
    const size_t offset = reinterpret_cast<uintptr_t>(address) - static_low;
    if (bytes == 0 || offset >= static_bytes) return;
    if (array_of[offset] == 0) {
        arrays.push_back({name, offset, bytes, 0});
        std::fill_n(array_of.begin() + std::ptrdiff_t(offset), bytes, uint16_t(arrays.size()));
    }
    SharedArray& array = arrays[array_of[offset] - 1u];
    if (is_open(array)) return;
    array.open = g.current == nullptr ? kAlwaysOpen : block_serial;
    static_used += array.bytes;
    if (g.current == nullptr || static_used + g.grid.shared_bytes <= kSharedLimit) return;
    fail("RESOURCE_LIMIT",
         "the block has " + std::to_string(static_used + g.grid.shared_bytes) +
             " bytes of shared memory; a " + kSharedOwner + " has " + std::to_string(kSharedLimit) + " per block",
         file, line);
}

void begin_block_shared() {
    ++block_serial;
    static_used = 0;
    advance_block_epoch();
}

// What a block leaves behind must not look like data to the next: NaN in every float format, -1 in integers.
void end_block_shared() {
    if (touched_static.high > 0) {
        const size_t bytes = touched_static.high - touched_static.low;
        std::memset(&written[touched_static.low], 0, bytes);
        std::memset(reinterpret_cast<void*>(static_low + touched_static.low), 0xff, bytes);
    }
    if (touched_dynamic.high > 0) {
        const size_t bytes = touched_dynamic.high - touched_dynamic.low;
        std::memset(&written[touched_dynamic.low], 0, bytes);
        std::memset(&sim_dynamic_shared[touched_dynamic.low - dynamic_start], 0xff, bytes);
    }
    touched_static = touched_dynamic = Span{};
}

void advance_block_epoch() {
    tick();
    block_epoch = now;
    for (Wave& wave : g.waves) wave.epoch = now;
}

void advance_wave_epoch(Wave& wave) {
    tick();
    wave.epoch = now;
}

size_t shared_gap(uintptr_t address) {
    return address >= static_low + static_bytes ? address - static_low - static_bytes : static_low - address;
}

std::string shared_name(uintptr_t address) { return place(address); }

bool is_shared(uintptr_t address) {
    return address - static_low < static_bytes ||
           address - reinterpret_cast<uintptr_t>(sim_dynamic_shared) < kSharedLimit;
}

bool check_shared(uintptr_t address, size_t bytes, bool write, bool atomic, void* frame, void* frame_pointer) {
    size_t offset = address - reinterpret_cast<uintptr_t>(sim_dynamic_shared);
    if (offset < kSharedLimit) {
        if (offset + bytes > g.grid.shared_bytes) {
            fail_here("OUT_OF_BOUNDS",
                      std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at " +
                          place(address) + ", of which the launch asked for " + std::to_string(g.grid.shared_bytes) +
                          " bytes",
                      frame, frame_pointer);
        }
        offset += dynamic_start;
        if (write) touched_dynamic.add(offset, offset + bytes);
    } else {
        offset = address - static_low;
        if (offset >= static_bytes) return false;
        if (offset + bytes > static_bytes) bytes = static_bytes - offset;
        check_declared(offset, bytes, address, write, frame, frame_pointer);
        if (write) touched_static.add(offset, offset + bytes);
    }
    const Thread& self = *g.current;
    if (!write || atomic) {
        for (size_t i = 0; i < bytes; ++i) {
            if (written[offset + i]) continue;
            postpone_here("UNINITIALISED_READ",
                          "reads " + place(address + i) + ", which no thread of the block has written", frame,
                          frame_pointer);
            break;
        }
    }
    const uint32_t byte = bytes == 1 ? kByteAccess : 0;
    const uint32_t mine = now << 12 | byte | self.id;
    if (write) std::memset(&written[offset], 1, bytes);
    for (size_t cell = offset / 2; cell <= (offset + bytes - 1) / 2; ++cell) {
        // Two single-byte accesses may have been to different bytes of the cell.
        const uint32_t writer = writers[cell];
        if (unordered(writer, self) && !(byte & writer)) {
            // Lanes of one wave may store to one place in one instruction: one of the values is kept.
            const bool one_store = write && id_of(writer) < kManyLanes && wave_of(int(id_of(writer))) == self.wave->id;
            if (!one_store && !atomic) report_race(writer, self, address, write, true, frame, frame_pointer);
        }
        uint32_t& reader = readers[cell];
        if (atomic) continue;
        if (write) {
            if (unordered(reader, self) && !(byte & reader)) {
                report_race(reader, self, address, true, false, frame, frame_pointer);
            }
            writers[cell] = mine;
        } else if (epoch_of(reader) < block_epoch || id_of(reader) == self.id) {
            reader = mine;
        } else {
            const uint32_t id = id_of(reader);
            const int wave = id < kManyLanes ? wave_of(int(id)) : id == kManyWaves ? -1 : int(id - kManyLanes);
            uint32_t joined = kManyWaves;
            if (wave == self.wave->id)
                joined = epoch_of(reader) >= self.wave->epoch ? kManyLanes + uint32_t(wave) : self.id;
            reader = now << 12 | (byte & reader) | joined;
        }
    }
    return true;
}
}  // namespace sim
