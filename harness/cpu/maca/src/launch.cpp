// A launch: the grid's blocks one after another, each block's threads as fibers; and what a thread asks about itself.
#include <cstring>

#include "cuda_runtime.h"
#include "memory.h"

namespace sim {
Machine g;
std::vector<Planned> planned;

namespace {
void arrange_threads(int count) {
    g.threads.resize(kMaxThreads);
    g.thread_count = count;
    const int wave_count = (count + kWaveLanes - 1) / kWaveLanes;
    g.waves.assign(size_t(wave_count), Wave{});
    g.order.resize(size_t(wave_count));
    for (int id = 0; id < wave_count; ++id) {
        g.waves[size_t(id)].id = id;
        g.order[size_t(id)] = id;
    }
    for (int id = 0; id < count; ++id) {
        Wave& wave = g.waves[size_t(id / kWaveLanes)];
        Thread& thread = g.threads[size_t(id)];
        thread.id = uint16_t(id);
        thread.lane = uint8_t(id % kWaveLanes);
        thread.wave = &wave;
        wave.thread[thread.lane] = &thread;
        wave.exist |= uint64_t(1) << thread.lane;
    }
    prepare_stacks(count);
}

/// The turns of the blocks: ascending in the first run, drawn from the seed in later ones. Empty means ascending.
std::vector<uint32_t> block_order(uint64_t blocks) {
    std::vector<uint32_t> order;
    if (g.seed == 0 || blocks > (1u << 20)) return order;
    for (uint32_t i = 0; i < blocks; ++i) order.push_back(i);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
    return order;
}
}  // namespace

// xorshift64*: small, and the same everywhere.
uint64_t next_random() {
    g.random ^= g.random >> 12;
    g.random ^= g.random << 25;
    g.random ^= g.random >> 27;
    return (g.random * 0x2545f4914f6cdd1dull) >> 16;
}

int wave_of(int thread_id) { return thread_id / kWaveLanes; }

uint3 thread_idx() { return g.current->index; }
uint3 block_idx() { return g.block; }
dim3 block_dim() { return g.grid.block; }
dim3 grid_dim() { return g.grid.grid; }
unsigned lane_id() { return g.current->lane; }

void launch(const Grid& grid, void (*entry)(const void*), const void* closure) {
    if (g.fault.set) return;  // the device is lost until the run ends
    if (g.current != nullptr)
        fail("RUNTIME_ERROR", std::string("launches ") + grid.name + " from inside a kernel", nullptr, 0);
    g.grid = grid;
    const dim3 b = grid.block, n = grid.grid;
    const uint64_t threads = uint64_t(b.x) * b.y * b.z, blocks = uint64_t(n.x) * n.y * n.z;
    if (g.planning) {
        planned.push_back({grid.name, blocks, threads, grid.shared_bytes});
        return;
    }
    const std::string shape = std::to_string(b.x) + "x" + std::to_string(b.y) + "x" + std::to_string(b.z);
    if (threads == 0 || threads > kMaxThreads || b.z > 64) {
        g.error = cudaErrorInvalidConfiguration;
        set_fault("RESOURCE_LIMIT",
                  "a block of " + shape + " threads cannot be launched; the limit is 1024 threads, at least 1", nullptr,
                  0);
        return;
    }
    if (blocks == 0 || n.x > 0x7fffffffu || n.y > 65535 || n.z > 65535) {
        g.error = cudaErrorInvalidConfiguration;
        set_fault("RESOURCE_LIMIT",
                  "a grid of " + std::to_string(n.x) + "x" + std::to_string(n.y) + "x" + std::to_string(n.z) +
                      " blocks cannot be launched; the limits are 2147483647, 65535 and 65535, at least 1",
                  nullptr, 0);
        return;
    }
    if (grid.shared_bytes > kSharedLimit) {
        g.error = cudaErrorInvalidValue;
        set_fault("RESOURCE_LIMIT",
                  "the launch asks for " + std::to_string(grid.shared_bytes) +
                      " bytes of dynamic shared memory; a " + kSharedOwner + " has " +
                      std::to_string(kSharedLimit) + " per block",
                  nullptr, 0);
        return;
    }
    begin_counting(grid.name);
    ++g.counters->launches;
    g.random = (g.seed + 1) * 0x9e3779b97f4a7c15ull + g.counters->launches;
    g.entry = entry;
    g.closure = closure;
    arrange_threads(int(threads));
    g.pending = Fault{};
    prepare_memory();
    locate_shared();
    const std::vector<uint32_t> order = block_order(blocks);
    guard_signals(true);
    for (uint64_t turn = 0; turn < blocks && !g.fault.set; ++turn) {
        const uint64_t i = order.empty() ? turn : order[size_t(turn)];
        g.block = {unsigned(i % n.x), unsigned(i / n.x % n.y), unsigned(i / n.x / n.y)};
        g.block_serial = uint32_t(i + 1);
        ++g.counters->blocks;
        begin_block_shared();
        run_block();
        end_block_shared();
    }
    guard_signals(false);
    g.block_serial = uint32_t(blocks);  // not the last one's, which need not be the highest: the next launch counts on
    settle_last_store();
    g.current = nullptr;
    if (g.fault.set) g.error = cudaErrorLaunchFailure;
}

void check_launch_bounds(unsigned threads, const char* file, int line) {
    const dim3 b = g.grid.block;
    if (b.x * b.y * b.z <= threads) return;
    fail("RESOURCE_LIMIT",
         "launched with " + std::to_string(b.x * b.y * b.z) +
             " threads per block, but __launch_bounds__ promises at most " + std::to_string(threads),
         file, line);
}

void cp_async(void* shared, const void* global, int bytes, int valid) {
    Thread& self = *g.current;
    const uintptr_t to = reinterpret_cast<uintptr_t>(shared), from = reinterpret_cast<uintptr_t>(global);
    if (to % unsigned(bytes) != 0 || (valid > 0 && from % unsigned(bytes) != 0)) {
        fail_here("OUT_OF_BOUNDS", "cp.async of " + std::to_string(bytes) + " bytes with a misaligned address",
                  __builtin_return_address(0), __builtin_frame_address(0));
    }
    self.copies.push_back({shared, global, bytes, valid, self.groups, __builtin_return_address(0)});
}

void cp_async_commit() { ++g.current->groups; }

void cp_async_wait(int left) {
    Thread& self = *g.current;
    size_t done = 0;
    for (; done < self.copies.size() && self.copies[done].group < self.groups - left; ++done) {
        const AsyncCopy& copy = self.copies[done];
        check_access(reinterpret_cast<uintptr_t>(copy.global), size_t(copy.valid), false, false, copy.frame, nullptr);
        check_access(reinterpret_cast<uintptr_t>(copy.shared), size_t(copy.bytes), true, false, copy.frame, nullptr);
        std::memset(copy.shared, 0, size_t(copy.bytes));
        std::memcpy(copy.shared, copy.global, size_t(copy.valid));
    }
    self.copies.erase(self.copies.begin(), self.copies.begin() + std::ptrdiff_t(done));
}
}  // namespace sim
