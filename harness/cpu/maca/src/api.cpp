// The CUDA runtime subset, the launch itself, and the entry points that the Python side calls (sim_*).
#include <chrono>
#include <cstring>

#include "cuda_runtime.h"
#include "memory.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace sim {
Machine g;

namespace {
cudaError_t last_error = cudaSuccess;
size_t allocated = 0;

cudaError_t note(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

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
    const std::string shape = std::to_string(b.x) + "x" + std::to_string(b.y) + "x" + std::to_string(b.z);
    if (threads == 0 || threads > kMaxThreads || b.z > 64) {
        note(cudaErrorInvalidConfiguration);
        set_fault("RESOURCE_LIMIT",
                  "a block of " + shape + " threads cannot be launched; the limit is 1024 threads, at least 1", nullptr,
                  0);
        return;
    }
    if (blocks == 0 || n.x > 0x7fffffffu || n.y > 65535 || n.z > 65535) {
        note(cudaErrorInvalidConfiguration);
        set_fault("RESOURCE_LIMIT",
                  "a grid of " + std::to_string(n.x) + "x" + std::to_string(n.y) + "x" + std::to_string(n.z) +
                      " blocks cannot be launched; the limits are 2147483647, 65535 and 65535, at least 1",
                  nullptr, 0);
        return;
    }
    if (grid.shared_bytes > kSharedLimit) {
        note(cudaErrorInvalidValue);
        set_fault("RESOURCE_LIMIT",
                  "the launch asks for " + std::to_string(grid.shared_bytes) +
                      " bytes of dynamic shared memory; a C500 has 65536 per block",
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
    settle_last_store();
    g.current = nullptr;
    if (g.fault.set) note(cudaErrorLaunchFailure);
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

cudaError_t set_dynamic_shared_limit(const void*, int bytes) {
    if (bytes < 0 || size_t(bytes) > kSharedLimit) {
        set_fault("RESOURCE_LIMIT",
                  "cudaFuncSetAttribute asks for " + std::to_string(bytes) +
                      " bytes of dynamic shared memory; a C500 has 65536 per block",
                  nullptr, 0);
        return note(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t copy_symbol(void* symbol, const void* from, void* to, size_t bytes, size_t offset, size_t size) {
    if (offset > size || bytes > size - offset) return note(cudaErrorInvalidValue);
    unsigned char* place = static_cast<unsigned char*>(symbol) + offset;
    if (from != nullptr) std::memcpy(place, from, bytes);
    if (to != nullptr) std::memcpy(to, place, bytes);
    return cudaSuccess;
}
}  // namespace sim

long long clock64() {
    static long long ticks = 0;
    return ++ticks;
}

namespace {
using sim::note;

/// True when [address, address + bytes) is inside one piece of device memory, or wholly outside all of them (host
/// memory).
bool sound(const void* pointer, size_t bytes) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    const sim::Range* range = sim::find_range(address);
    return range == nullptr || bytes <= range->bytes - (address - range->low);
}

cudaError_t allocate(void** pointer, size_t bytes, sim::Kind kind) {
    if (pointer == nullptr) return note(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    void* memory = nullptr;
    // 256 bytes: cudaMalloc's alignment. The limit stands for what is free beside the judge's own tensors.
    if (bytes > (size_t(1) << 33) || posix_memalign(&memory, 256, bytes) != 0) return note(cudaErrorMemoryAllocation);
    std::memset(memory, 0xff, bytes);
    sim::allocated += bytes;
    const char* name = kind == sim::Kind::kHost ? "a cudaMallocHost block" : "a cudaMalloc block";
    sim::add_range(reinterpret_cast<uintptr_t>(memory), bytes, name, kind, true);
    *pointer = memory;
    return cudaSuccess;
}

cudaError_t release(void* pointer) {
    if (pointer == nullptr) return cudaSuccess;
    const sim::Range* range = sim::find_range(reinterpret_cast<uintptr_t>(pointer));
    if (range == nullptr || range->low != reinterpret_cast<uintptr_t>(pointer) || range->kind == sim::Kind::kArgument ||
        range->kind == sim::Kind::kModule) {
        return note(cudaErrorInvalidValue);
    }
    sim::allocated -= range->bytes;
    sim::remove_range(range->low);
    std::free(pointer);
    return cudaSuccess;
}

CUresult address_range(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
    const sim::Range* range = sim::find_range(uintptr_t(pointer));
    if (range == nullptr || range->kind == sim::Kind::kModule) return 1;
    if (base != nullptr) *base = range->low;
    if (bytes != nullptr) *bytes = range->bytes;
    return CUDA_SUCCESS;
}
}  // namespace

extern "C" {
cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes, sim::Kind::kAllocation); }
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes, sim::Kind::kHost); }
cudaError_t cudaFree(void* pointer) { return release(pointer); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
    if (sim::g.fault.set) return cudaErrorLaunchFailure;
    if (sim::find_range(reinterpret_cast<uintptr_t>(pointer)) == nullptr || !sound(pointer, bytes)) {
        sim::set_fault("OUT_OF_BOUNDS",
                       "cudaMemset of " + std::to_string(bytes) + " bytes leaves the memory it starts in", nullptr, 0);
        return note(cudaErrorInvalidValue);
    }
    std::memset(pointer, value, bytes);
    sim::mark_written(reinterpret_cast<uintptr_t>(pointer), bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
    return cudaMemset(pointer, value, bytes);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    if (sim::g.fault.set) return cudaErrorLaunchFailure;
    if (!sound(to, bytes) || !sound(from, bytes)) {
        sim::set_fault("OUT_OF_BOUNDS",
                       "cudaMemcpy of " + std::to_string(bytes) + " bytes leaves the memory it starts in", nullptr, 0);
        return note(cudaErrorInvalidValue);
    }
    std::memmove(to, from, bytes);
    sim::mark_written(reinterpret_cast<uintptr_t>(to), bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = size_t(64) << 30;
    *free = *total - sim::allocated;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    const cudaError_t error = sim::last_error;
    if (!sim::g.fault.set) sim::last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return sim::last_error; }
const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration:
            return "cudaErrorInvalidConfiguration";
        case cudaErrorLaunchFailure:
            return "cudaErrorLaunchFailure";
        case cudaErrorNotSupported:
            return "cudaErrorNotSupported";
        default:
            return "cudaError";
    }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : note(cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    if (device != 0) return note(cudaErrorInvalidDevice);
    *p = cudaDeviceProp{};
    std::strcpy(p->name, "MetaX C500 (simulated)");
    p->totalGlobalMem = size_t(64) << 30;
    p->sharedMemPerBlock = p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin = sim::kSharedLimit;
    p->regsPerBlock = p->regsPerMultiprocessor = 131072;
    p->warpSize = sim::kWaveLanes;
    p->maxThreadsPerBlock = sim::kMaxThreads;
    p->maxThreadsPerMultiProcessor = 2048;
    const int threads[3] = {1024, 1024, 64}, blocks[3] = {0x7fffffff, 65535, 65535};
    std::memcpy(p->maxThreadsDim, threads, sizeof threads);
    std::memcpy(p->maxGridSize, blocks, sizeof blocks);
    p->clockRate = 1600000;
    p->memoryClockRate = 1800000;
    p->memoryBusWidth = 4096;
    p->multiProcessorCount = 104;
    p->l2CacheSize = 8 << 20;
    p->major = 8;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, device) != cudaSuccess) return cudaErrorInvalidDevice;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock:
            *value = p.maxThreadsPerBlock;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = int(p.sharedMemPerBlock);
            break;
        case cudaDevAttrWarpSize:
            *value = p.warpSize;
            break;
        case cudaDevAttrClockRate:
            *value = p.clockRate;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = p.multiProcessorCount;
            break;
        case cudaDevAttrL2CacheSize:
            *value = p.l2CacheSize;
            break;
        case cudaDevAttrMaxThreadsPerMultiProcessor:
            *value = p.maxThreadsPerMultiProcessor;
            break;
        case cudaDevAttrMaxRegistersPerMultiprocessor:
            *value = p.regsPerMultiprocessor;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = p.major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
        case cudaDevAttrCooperativeLaunch:  // blocks run one after another: no grid-wide barrier
            *value = 0;
            break;
        default:
            return note(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return sim::last_error; }

// Streams and events: everything has completed, so handles only have to differ from null.
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = reinterpret_cast<cudaStream_t>(new char);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete reinterpret_cast<char*>(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return sim::last_error; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = reinterpret_cast<cudaEvent_t>(new std::chrono::steady_clock::time_point);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete reinterpret_cast<std::chrono::steady_clock::time_point*>(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    *reinterpret_cast<std::chrono::steady_clock::time_point*>(event) = std::chrono::steady_clock::now();
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
    const auto& a = *reinterpret_cast<std::chrono::steady_clock::time_point*>(start);
    const auto& b = *reinterpret_cast<std::chrono::steady_clock::time_point*>(stop);
    *milliseconds = std::chrono::duration<float, std::milli>(b - a).count();
    return cudaSuccess;
}

#if defined(SIM_WARP32)
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
    return address_range(base, bytes, pointer);
}
#else
CUresult wcuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
    return address_range(base, bytes, pointer);
}
#endif
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* found) {
    const bool known =
        std::strcmp(symbol, "cuMemGetAddressRange") == 0 || std::strcmp(symbol, "wcuMemGetAddressRange") == 0;
    *function = known ? reinterpret_cast<void*>(&address_range) : nullptr;
    if (found != nullptr) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return known ? cudaSuccess : note(cudaErrorSymbolNotFound);
}

/// Start a run: these pieces of memory are what run_kernel gets. `unwritten[i]`: nobody has written piece i yet.
void sim_begin(int count, void** pointers, const uint64_t* bytes, const char** names, const uint8_t* unwritten,
               uint64_t seed) {
    sim::g.fault = sim::Fault{};
    sim::last_error = cudaSuccess;
    sim::g.seed = seed;
    if (sim::g.counters == nullptr) sim::counters_json();
    sim::remove_arguments();
    for (int i = 0; i < count; ++i) {
        // One tensor given twice is one piece.
        const sim::Range* same = sim::find_range(reinterpret_cast<uintptr_t>(pointers[i]));
        if (bytes[i] == 0 || (same != nullptr && same->bytes >= bytes[i])) continue;
        sim::add_range(reinterpret_cast<uintptr_t>(pointers[i]), size_t(bytes[i]), names[i], sim::Kind::kArgument,
                       unwritten[i] != 0);
    }
}
/// What `assert` calls.
void sim_assert_fail(const char* condition, const char* file, unsigned line, const char*) {
    if (sim::g.current != nullptr)
        sim::fail("RUNTIME_ERROR", std::string("assertion failed: ") + condition, file, int(line));
    std::fprintf(stderr, "%s:%u: assertion failed: %s\n", file, line, condition);
    std::abort();
}
void sim_count_accesses(int on) { sim::g.counting = on != 0; }
int sim_faulted() { return sim::g.fault.set; }
const char* sim_fault_verdict() { return sim::g.fault.verdict.c_str(); }
const char* sim_fault_text() { return sim::g.fault.text.c_str(); }
/// The file and line that the faulty call named; an empty file when only the frames tell.
const char* sim_fault_file() { return sim::g.fault.file.c_str(); }
int sim_fault_line() { return sim::g.fault.line; }
/// Return addresses relative to the library, innermost first; returns how many there are.
int sim_fault_frames(uint64_t* out, int room) {
    const int count = int(sim::g.fault.frames.size());
    for (int i = 0; i < count && i < room; ++i) out[i] = sim::g.fault.frames[size_t(i)];
    return count < room ? count : room;
}
const char* sim_counters() {
    static std::string text;
    text = sim::counters_json();
    return text.c_str();
}
}
