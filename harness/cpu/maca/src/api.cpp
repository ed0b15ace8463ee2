// The CUDA runtime subset, and the entry points that the Python side calls (sim_*).
#include <chrono>
#include <cstring>

#include "cuda_runtime.h"
#include "memory.h"

namespace sim {
namespace {
size_t allocated = 0;

cudaError_t note(cudaError_t error) {
    if (error != cudaSuccess) g.error = error;
    return error;
}
}  // namespace

cudaError_t set_dynamic_shared_limit(const void*, int bytes) {
    if (bytes < 0 || size_t(bytes) > kSharedLimit) {
        set_fault("RESOURCE_LIMIT",
                  "cudaFuncSetAttribute asks for " + std::to_string(bytes) +
                      " bytes of dynamic shared memory; a " + kSharedOwner + " has " +
                      std::to_string(kSharedLimit) + " per block",
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
    if (sim::g.planning) return cudaSuccess;  // the arguments are addresses without memory
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
    if (sim::g.planning) return cudaSuccess;  // the arguments are addresses without memory
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
    const auto error = cudaError_t(sim::g.error);
    if (!sim::g.fault.set) sim::g.error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return cudaError_t(sim::g.error); }
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
cudaError_t cudaDeviceSynchronize() { return cudaError_t(sim::g.error); }

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
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaError_t(sim::g.error); }
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
    sim::g.error = cudaSuccess;
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
/// While on, launches are listed for sim_planned and not run, and nothing is copied or set.
void sim_plan(int on) { sim::g.planning = on != 0; }
/// The launches since the last call, as JSON.
const char* sim_planned() {
    static std::string text;
    text = "[";
    for (const sim::Planned& launch : sim::planned) {
        std::string name = launch.kernel;
        for (char& c : name) c = c == '"' || c == '\\' ? '\'' : c;
        text += std::string(text.size() > 1 ? "," : "") + "{\"kernel\":\"" + name +
                "\",\"blocks\":" + std::to_string(launch.blocks) + ",\"threads\":" + std::to_string(launch.threads) +
                ",\"shared\":" + std::to_string(launch.shared_bytes) + "}";
    }
    sim::planned.clear();
    text += "]";
    return text.c_str();
}
/// Bytes that the submission has allocated and not freed.
uint64_t sim_allocated() { return sim::allocated; }
const char* sim_counters() {
    static std::string text;
    text = sim::counters_json();
    return text.c_str();
}
}
