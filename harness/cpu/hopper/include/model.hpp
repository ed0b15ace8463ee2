// A model of what the Hopper variants use of an NVIDIA GPU of compute capability 9.0, for g++: threads that take turns,
// mbarriers and named barriers, TMA, cp.async, wgmma, clusters. It checks the schedule of a kernel (does every wait
// end, is no tile overwritten while it is read) and its index arithmetic (swizzles, descriptors, fragments); it does
// not watch memory accesses, that is what the C500 simulator does for the file to paste.
//
// What the hardware does "some time later" is done as late as the program allows in one run (a copy when nothing else
// can go on, a product when it is waited for) and at once in the next: a kernel that waits for too little gives another
// result in one of the two.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <map>
#include <utility>
#include <vector>

// ---- The language --------------------------------------------------------------------------------------------------

#define __device__
#define __host__
#define __global__
#define __shared__ static  // blocks run one after another; those of a cluster must not have any
#define __forceinline__ inline
#define __restrict__
#define __grid_constant__
#define __align__(bytes)
#define __launch_bounds__(...)
#define SIM_UNHOOKED_CALL

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct int2 {
    int x, y;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x = 1) : x(x) {}
};
struct __nv_bfloat16 {
    uint16_t bits;
};
using std::max;
using std::min;

namespace model {

// ---- The machine ---------------------------------------------------------------------------------------------------

constexpr int kSharedBytes = 227 << 10;  // that a block may have
constexpr int kWindow = 1024;            // where shared memory begins, as its 32-bit addresses go

struct Barrier {  // an mbarrier
    int expected = 0, pending = 0;
    int64_t bytes = 0;  // announced and not yet there
    int parity = 0;
};
struct Meeting {  // of a fixed number of threads, over and over
    int arrived = 0, generation = 0;
};
struct Product {  // a wgmma of a warpgroup, as its 128 threads give it
    uint64_t a = 0, b = 0;
    int columns = 0, accumulate = 0, given = 0;
    bool int8 = false, a_in_registers = false, b_transposed = false;
    void* sums[128];
    const uint32_t* registers[128];
};
struct Block {
    dim3 index, threads;
    int rank = 0;  // in its cluster
    std::vector<Block*> cluster;
    std::vector<char> memory;
    char* shared = nullptr;
    std::map<uint32_t, Barrier> barriers;
    Meeting named[16], all, of_cluster;
    std::vector<Meeting> warps;
    std::vector<std::array<uint64_t, 64>> exchanged;         // two rounds of 32 lanes
    std::map<std::pair<int, int>, Product> products;         // by warpgroup and number; those not yet done
    std::vector<int> next_product;                           // by thread
    std::vector<std::vector<int>> open;                      // by thread: products since the last commit
    std::vector<std::vector<std::vector<int>>> groups;       // by thread: committed, not waited for
    std::vector<std::vector<std::function<void()>>> copies;  // by thread: cp.async since the last arrival
};

Block& block();
int thread();
dim3 grid();
bool eager();                                      // this run does at once what may be done later
void wait_until(const std::function<bool()>& go);  // lets other threads run until `go`
void later(std::function<void()> work);            // what the hardware finishes by itself
[[noreturn]] void fail(const char* verdict, const char* text);
void launch(const std::function<void()>& kernel, dim3 blocks, dim3 threads, size_t bytes, int cluster);

inline uint32_t address(const void* p) {
    const int64_t offset = static_cast<const char*>(p) - block().shared;
    if (offset < 0 || offset > kSharedBytes) fail("OUT_OF_BOUNDS", "a shared memory address outside of the block's");
    return static_cast<uint32_t>(offset) + kWindow;
}
inline char* pointer(Block& of, uint32_t address) {
    if (address < kWindow || address - kWindow >= of.memory.size() - 1024)
        fail("OUT_OF_BOUNDS", "a copy or product past the block's shared memory");
    return of.shared + (address - kWindow);
}
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }  // by 128 bytes

inline Barrier& barrier(Block& of, uint32_t address) {
    const auto found = of.barriers.find(address);
    if (found == of.barriers.end()) fail("RUNTIME_ERROR", "an mbarrier that nobody initialised");
    return found->second;
}
inline void settle(Barrier& b) {
    if (b.pending < 0) fail("RACE", "more arrivals at an mbarrier than it was initialised for");
    if (b.pending == 0 && b.bytes == 0) b.parity ^= 1, b.pending = b.expected;
}
inline void meet(Meeting& m, int count, bool wait) {
    const int generation = m.generation;
    if (++m.arrived == count)
        m.arrived = 0, ++m.generation;
    else if (wait)
        wait_until([&m, generation] { return m.generation != generation; });
}
// Every lane of a warp gives a value and reads those of all.
template <class Read>
uint64_t exchange(uint64_t value, Read read) {
    Block& b = block();
    Meeting& warp = b.warps[thread() / 32];
    uint64_t* const lanes = b.exchanged[thread() / 32].data() + 32 * (warp.generation & 1);
    lanes[thread() % 32] = value;
    meet(warp, 32, true);
    return read(lanes);
}
template <class T, class Read>
T exchange_as(T value, Read read) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = exchange(bits, read);
    memcpy(&value, &bits, sizeof(T));
    return value;
}

inline float to_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}
inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// ---- Matrix products -----------------------------------------------------------------------------------------------

void run(Block& of, const Product& product);

// One thread's part of a product. The 128 threads of a warpgroup give the same one in the same order.
inline void give(const Product& part, void* sums, const uint32_t* registers) {
    Block& b = block();
    const int warpgroup = thread() / 128, number = b.next_product[thread()]++;
    Product& p = b.products[{warpgroup, number}];
    if (p.given == 0)
        p = part;
    else if (p.a != part.a || p.b != part.b || p.accumulate != part.accumulate || p.columns != part.columns)
        fail("RUNTIME_ERROR", "the threads of a warpgroup give different products");
    p.sums[thread() % 128] = sums, p.registers[thread() % 128] = registers;
    b.open[thread()].push_back(number);
    if (++p.given < 128 || !eager()) return;
    for (auto at = b.products.lower_bound({warpgroup, 0});  // those before it first: they may add to the same sums
         at != b.products.end() && at->first.first == warpgroup && at->first.second <= number;
         at = b.products.erase(at))
        run(b, at->second);
}
inline void wait_for_groups(int pending) {
    Block& b = block();
    auto& groups = b.groups[thread()];
    const int warpgroup = thread() / 128;
    for (; static_cast<int>(groups.size()) > pending; groups.erase(groups.begin()))
        for (const int number : groups.front()) {
            const std::pair<int, int> key{warpgroup, number};
            wait_until([&b, key] {
                const auto found = b.products.find(key);
                return found == b.products.end() || found->second.given == 128;
            });
            const auto found = b.products.find(key);
            if (found == b.products.end()) continue;
            run(b, found->second);
            b.products.erase(found);
        }
}

// ---- Copies --------------------------------------------------------------------------------------------------------

struct Map {  // what a CUtensorMap says
    const char* base;
    int rank, element;
    int64_t sizes[5], strides[5];  // elements; bytes, from dimension 1 on
    int box[5];
};

inline void copy_box(Block& to, uint32_t at, const Map& map, const std::array<int, 5>& first, uint32_t barrier_at) {
    int64_t elements = 1;
    for (int d = 0; d < map.rank; ++d) elements *= map.box[d];
    for (int64_t i = 0; i < elements; ++i) {
        int64_t rest = i, offset = 0;
        bool inside = true;
        for (int d = 0; d < map.rank; rest /= map.box[d], ++d) {
            const int64_t x = first[d] + rest % map.box[d];
            inside &= x >= 0 && x < map.sizes[d];
            offset += x * (d == 0 ? map.element : map.strides[d]);
        }
        char* const there = pointer(to, swizzled(at + static_cast<uint32_t>(i * map.element)));
        if (inside)
            memcpy(there, map.base + offset, map.element);
        else
            memset(there, 0, map.element);
    }
    Barrier& b = barrier(to, barrier_at);
    b.bytes -= elements * map.element;
    settle(b);
}
inline void load_box(void* to, const Map& map, uint64_t* arrival, const std::array<int, 5>& first, bool to_cluster) {
    const uint32_t at = address(to), barrier_at = address(arrival);
    if (at % 128 != 0) fail("RUNTIME_ERROR", "TMA to an address that is no multiple of 128");
    for (Block* const target : block().cluster)
        if (to_cluster || target == &block())
            later([target, at, map, first, barrier_at] { copy_box(*target, at, map, first, barrier_at); });
}

}  // namespace model

// ---- CUDA ----------------------------------------------------------------------------------------------------------

#define threadIdx (dim3(static_cast<unsigned>(model::thread())))
#define blockIdx (model::block().index)
#define blockDim (model::block().threads)
#define gridDim (model::grid())

inline void __syncthreads() { model::meet(model::block().all, static_cast<int>(blockDim.x), true); }
inline void __syncwarp() {
    model::exchange(0, [](const uint64_t*) { return uint64_t{0}; });
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    const int lane = model::thread() % 32;
    return model::exchange_as(value, [lane, mask](const uint64_t* lanes) { return lanes[lane ^ mask]; });
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return model::exchange_as(value, [lane](const uint64_t* lanes) { return lanes[lane]; });
}
inline int __any_sync(unsigned, bool value) {
    return model::exchange(value, [](const uint64_t* lanes) {
               return static_cast<uint64_t>(std::count(lanes, lanes + 32, 0) < 32);
           }) != 0;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T>
T __ldg(const T* p) {
    return *p;
}
inline int atomicAdd(int* p, int value) {
    *p += value;
    return *p - value;
}

using cudaError_t = int;
using CUresult = int;
using CUdeviceptr = uint64_t;
using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
using CUtensorMap = model::Map;
using cudaDriverEntryPointQueryResult = int;
enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaDevAttrMultiProcessorCount = 16,
    cudaEnableDefault = 0,
    CUDA_SUCCESS = 0,
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 1,  // the number of bytes, in this model
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 2,
    CU_TENSOR_MAP_INTERLEAVE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_128B = 3,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3,
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0,
};

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int type, unsigned rank, void* base, const cuuint64_t* sizes,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                                int interleave, int swizzle, int promotion, int fill);
extern "C" CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer);
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned version, int flags,
                                             cudaDriverEntryPointQueryResult* result);
cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int device);
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid value"; }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
    return bytes <= model::kSharedBytes ? cudaSuccess : cudaErrorInvalidValue;
}

// What the rewritten source calls (harness/cpu/maca_source.py): a launch, dynamic and static shared memory.
namespace sim {

struct DynamicShared {
    template <class T>
    operator T*() const {
        return reinterpret_cast<T*>(model::block().shared);
    }
};
struct Shared {
    Shared(const char*, const void*, size_t) {}
};
inline void launch_bounds(int threads, int = 0) {
    if (static_cast<int>(blockDim.x) > threads)
        model::fail("RUNTIME_ERROR", "more threads than __launch_bounds__ says");
}
inline auto configure(const char*, dim3 blocks, dim3 threads, size_t bytes = 0) {
    return [=](auto call) {
        return [=](auto... args) {
            model::launch(
                [=] {
                    auto copies = std::make_tuple(args...);  // every thread has its own parameters
                    std::apply(call, copies);
                },
                blocks, threads, bytes, 1);
        };
    };
}

}  // namespace sim
