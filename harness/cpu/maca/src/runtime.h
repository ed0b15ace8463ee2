// The simulator's inner state. One host thread runs one launch at a time, block after block; within a block every
// thread is a fiber, and fibers change places only inside the functions of sim/core.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "sim/core.h"

namespace sim {
#if defined(SIM_WARP32)                  // the half for NVIDIA GPUs, whose tuning rows may use what a Hopper has
constexpr size_t kSharedLimit = 232448;  // bytes per block
constexpr char kSharedOwner[] = "Hopper";
#else
constexpr size_t kSharedLimit = 65536;
constexpr char kSharedOwner[] = "C500";
#endif
constexpr int kMaxThreads = 1024;  // per block
constexpr int kMaxWaves = kMaxThreads / kWaveLanes;
constexpr size_t kStackBytes = 256 * 1024;  // per thread; only touched pages cost memory

struct AsyncCopy {
    void* shared;
    const void* global;
    int bytes, valid, group;
    void* frame;  // where the copy was asked for
};

struct Wave;
struct Thread {
    void* stack_pointer = nullptr;
    uintptr_t stack_low = 0;
    Wave* wave = nullptr;
    uint3 index{};
    uint16_t id = 0;
    uint8_t lane = 0;
    Exchange* waiting = nullptr;
    // A thread that reads the same unchanged value over and over is spinning.
    const void* polled = nullptr;
    uint64_t polled_value = 0;
    int polls = 0;
    void* poll_frame = nullptr;
    // Pending cp.async copies, oldest first, and the number of groups committed so far.
    std::vector<AsyncCopy> copies;
    int groups = 0;
};

/// Lane sets are bit masks. A lane is in exactly one of runnable, at_wave, at_barrier, yielded, or has exited.
struct Wave {
    int id = 0;
    uint64_t exist = 0, exited = 0, runnable = 0, at_wave = 0, at_barrier = 0, yielded = 0;
    uint32_t epoch = 0;  // the sync counter at the wave's last rendezvous
    Thread* thread[64] = {};
};

struct Fault {
    bool set = false;
    std::string verdict, text, file;
    int line = 0;                   // in `file`, when the faulty call told it
    std::vector<uintptr_t> frames;  // return addresses relative to the library, innermost first
};

struct Counters {
    uint64_t launches = 0, blocks = 0, mma = 0, wave_ops = 0, barriers = 0, atomics = 0;
    uint64_t global_bytes_read = 0, global_bytes_written = 0, shared_bytes_read = 0, shared_bytes_written = 0;
    uint64_t global_transactions = 0, shared_accesses = 0, bank_conflicts = 0;
    uint64_t global_lines_read = 0, global_lines_written = 0;  // of 128 bytes, each once per block
};

struct Machine {
    Thread* current = nullptr;  // null while host code runs
    Grid grid{};
    uint3 block{};
    uint32_t block_serial = 0;  // of this launch, from 1
    std::vector<Thread> threads;
    std::vector<Wave> waves;
    std::vector<int> order;  // in which waves get their turn until the next barrier
    int thread_count = 0, exited = 0, at_barrier = 0;
    int idle_rounds = 0;
    void* host_stack_pointer = nullptr;
    void (*entry)(const void*) = nullptr;
    const void* closure = nullptr;
    uint64_t seed = 0, random = 0;
    bool counting = false;
    bool planning = false;  // launches are listed and not run
    Counters* counters = nullptr;
    int error = 0;  // the cudaError_t of the last call that failed
    Fault fault;
    Fault pending;  // a read of unwritten shared memory, until it is known whether a race explains it
};
extern Machine g;

/// A launch as it was asked for: blocks, threads per block and bytes of dynamic shared memory.
struct Planned {
    std::string kernel;
    uint64_t blocks, threads, shared_bytes;
};
extern std::vector<Planned> planned;

uint64_t next_random();
int wave_of(int thread_id);

// schedule.cpp
/// Run one block of the current grid to its end or to a fault.
void run_block();
/// Leave the launch for good: the fault is recorded and the host continues behind the launch.
[[noreturn]] void abandon();
void yield_turn();

// fault.cpp
/// Record a fault of the current thread, or of the launch: the first one counts. The line is `line` of `file`, else it
/// is found from `frame`, a return address, and the frame pointer of the function that has it.
void set_fault(const char* verdict, const std::string& text, const char* file, int line);
[[noreturn]] void fail(const char* verdict, const std::string& text, const char* file, int line);
void set_fault_here(const char* verdict, const std::string& text, void* frame, void* frame_pointer);
/// Keep a fault for the end of the barrier interval; a race found until then takes its place.
void postpone_here(const char* verdict, const std::string& text, void* frame, void* frame_pointer);
/// Make a postponed fault the launch's fault; true when there was one.
bool settle_pending();
[[noreturn]] void fail_here(const char* verdict, const std::string& text, void* frame, void* frame_pointer);
std::string where(const Thread& thread);
std::string hex(uint64_t value);
void guard_signals(bool on);

// fibers.cpp
void switch_stack(void** save, void* load);
void prepare_stacks(int count);
void* fresh_stack(Thread& thread, void (*main)());

// shared.cpp
std::string shared_name(uintptr_t address);
/// How far an address outside it is from the static shared memory.
size_t shared_gap(uintptr_t address);
/// Find the shared memory of this library: it belongs to the calling thread of the host.
void locate_shared();
void begin_block_shared();
void end_block_shared();
/// All waves have met: what was accessed before cannot race with what comes.
void advance_block_epoch();
void advance_wave_epoch(Wave& wave);
bool check_shared(uintptr_t address, size_t bytes, bool write, bool atomic, void* frame, void* frame_pointer);
bool is_shared(uintptr_t address);

// memory.cpp
std::string address_name(uintptr_t address, size_t bytes);
/// A store that looked like a race at the end of the launch, when no access follows it.
void settle_last_store();
void prepare_memory();
void check_access(uintptr_t address, size_t bytes, bool write, bool atomic, void* frame, void* frame_pointer);

// counters.cpp
void record_access(uintptr_t address, size_t bytes, bool write, bool shared, void* frame);
void flush_accesses(Wave& wave);
void begin_counting(const char* kernel);
/// All counters since the last call, by kernel.
std::string counters_json();
}  // namespace sim
