// The model's machine: blocks as fibers that take turns, what is to happen later, the driver, and faults.

#include <setjmp.h>
#include <ucontext.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "model.hpp"

namespace model {
namespace {

struct Fiber {
    ucontext_t start;  // only to begin with: from then on it is left and entered by long jumps, which ask no kernel
    jmp_buf place;
    bool begun = false;
    std::unique_ptr<char[]> stack;
    Block* block;
    int thread;
    bool done = false;
    const std::function<bool()>* waits_for = nullptr;
};
constexpr size_t kStack = 256 << 10;

Fiber* current = nullptr;
jmp_buf scheduler;
const std::function<void()>* body = nullptr;
std::vector<std::function<void()>> unfinished;
dim3 launched;
uint64_t state = 1;
bool at_once = false;
std::string fault_verdict, fault_text;
std::map<uint64_t, uint64_t> ranges;  // memory that is known: base, bytes

unsigned random_number() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<unsigned>(state >> 33);
}

void record(const char* verdict, const std::string& text) {
    if (fault_verdict.empty()) fault_verdict = verdict, fault_text = text;
}

void enter() {
    (*body)();
    current->done = true;
    _longjmp(scheduler, 1);
}
void resume(Fiber* fiber) {
    current = fiber;
    if (_setjmp(scheduler) != 0) return;
    if (std::exchange(fiber->begun, true)) _longjmp(fiber->place, 1);
    setcontext(&fiber->start);
}

// One launch's blocks of one cluster. Nothing of it outlives the call, so a fault just leaves.
void run_cluster(unsigned first, dim3 threads, size_t bytes, int cluster) {
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (int rank = 0; rank < cluster; ++rank) {
        auto b = std::make_unique<Block>();
        b->index = dim3(first + rank), b->threads = threads, b->rank = rank;
        b->memory.resize(bytes + 1024, static_cast<char>(0xff));  // NaN, for who reads what nobody wrote
        b->shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(b->memory.data()) + 1023) & ~uintptr_t{1023});
        b->warps.resize((threads.x + 31) / 32), b->exchanged.resize(b->warps.size());
        b->next_product.resize(threads.x), b->open.resize(threads.x);
        b->groups.resize(threads.x), b->copies.resize(threads.x);
        for (int t = 0; t < static_cast<int>(threads.x); ++t) {
            auto f = std::make_unique<Fiber>();
            f->stack.reset(new char[kStack]), f->block = b.get(), f->thread = t;
            getcontext(&f->start);
            f->start.uc_stack.ss_sp = f->stack.get(), f->start.uc_stack.ss_size = kStack;
            f->start.uc_link = nullptr;
            makecontext(&f->start, enter, 0);
            fibers.push_back(std::move(f));
        }
        blocks.push_back(std::move(b));
    }
    for (const auto& b : blocks)
        for (const auto& other : blocks) b->cluster.push_back(other.get());

    size_t left = fibers.size();
    while (left > 0 && fault_verdict.empty()) {
        bool moved = false;
        const size_t turn = random_number() % fibers.size();
        for (size_t i = 0; i < fibers.size() && fault_verdict.empty(); ++i) {
            Fiber* const f = fibers[(i + turn) % fibers.size()].get();
            if (f->done || (f->waits_for != nullptr && !(*f->waits_for)())) continue;
            moved = true;
            resume(f);
            left -= f->done;
        }
        if (!unfinished.empty() && (!moved || at_once)) {  // in any order
            const size_t i = random_number() % unfinished.size();
            const auto work = std::move(unfinished[i]);
            unfinished.erase(unfinished.begin() + static_cast<std::ptrdiff_t>(i));
            if (_setjmp(scheduler) == 0) work();  // a fault in it comes back here
        } else if (!moved && left > 0) {
            record("TIMEOUT", "deadlock: " + std::to_string(left) + " threads of block " + std::to_string(first) +
                                  " wait for each other");
        }
    }
    if (fault_verdict.empty() && !unfinished.empty())
        record("RACE", "a block ended while copies into its shared memory were under way");
    unfinished.clear();
}

// Element (row, k) of an operand in shared memory, `size` bytes. Its descriptor: address, leading and stride offsets in
// units of 16 bytes. k runs along 128-byte rows of which eight make `stride`; transposed, rows run along them in slices
// of 64, `leading` apart, and eight k make `stride`.
const char* element(Block& of, uint64_t descriptor, int row, int k, int size, bool transposed) {
    const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) fail("RUNTIME_ERROR", "a wgmma descriptor without the 128-byte swizzle");
    const uint32_t offset = transposed ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * size
                                       : row / 8 * stride + row % 8 * 128 + k * size;
    return pointer(of, swizzled(start + offset));
}

template <class Value, class Sum>
void multiply(Block& of, const Product& p, Value (*read)(const char*), int depth, int size) {
    std::vector<Value> a(64 * depth), b(static_cast<size_t>(p.columns) * depth);
    for (int row = 0; row < 64; ++row)
        for (int k = 0; k < depth; ++k) {
            if (p.a_in_registers) {  // of bf16: two to a register, (row, k), (row + 8, k), (row, k + 8), (row + 8, k +
                                     // 8)
                const int owner = row / 16 * 32 + row % 8 * 4 + k % 8 / 2, index = row % 16 / 8 + k / 8 * 2;
                const uint16_t bits = static_cast<uint16_t>(p.registers[owner][index] >> 16 * (k % 2));
                a[row * depth + k] = read(reinterpret_cast<const char*>(&bits));
            } else {
                a[row * depth + k] = read(element(of, p.a, row, k, size, false));
            }
        }
    for (int column = 0; column < p.columns; ++column)
        for (int k = 0; k < depth; ++k) b[column * depth + k] = read(element(of, p.b, column, k, size, p.b_transposed));
    for (int t = 0; t < 128; ++t)
        for (int i = 0; i < p.columns / 2; ++i) {
            const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
            Sum& sum = static_cast<Sum*>(p.sums[t])[i];
            Sum total = p.accumulate ? sum : 0;
            for (int k = 0; k < depth; ++k)
                total += static_cast<Sum>(a[row * depth + k]) * static_cast<Sum>(b[column * depth + k]);
            sum = total;
        }
}

}  // namespace

void run(Block& of, const Product& p) {
    if (p.int8)
        multiply<int8_t, int>(of, p, [](const char* x) { return static_cast<int8_t>(*x); }, 32, 1);
    else
        multiply<float, float>(
            of, p,
            [](const char* x) {
                uint16_t bits;
                memcpy(&bits, x, 2);
                return to_float(bits);
            },
            16, 2);
}

Block& block() { return *current->block; }
int thread() { return current->thread; }
dim3 grid() { return launched; }
bool eager() { return at_once; }
void wait_until(const std::function<bool()>& go) {
    while (!go()) {
        current->waits_for = &go;
        if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
    }
    current->waits_for = nullptr;
}
void later(std::function<void()> work) { unfinished.push_back(std::move(work)); }
void fail(const char* verdict, const char* text) {
    const std::string where = current == nullptr ? ""
                                                 : "block " + std::to_string(current->block->index.x) + ", thread " +
                                                       std::to_string(current->thread) + ": ";
    record(verdict, where + text);
    _longjmp(scheduler, 1);
}
void launch(const std::function<void()>& kernel, dim3 blocks, dim3 threads, size_t bytes, int cluster) {
    if (bytes > kSharedBytes) record("RESOURCE_LIMIT", std::to_string(bytes) + " bytes of shared memory are too many");
    body = &kernel, launched = blocks;
    for (unsigned first = 0; first < blocks.x && fault_verdict.empty(); first += cluster)
        run_cluster(first, threads, bytes, cluster);
    current = nullptr;
}

}  // namespace model

// ---- The driver ----------------------------------------------------------------------------------------------------

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int type, unsigned rank, void* base, const cuuint64_t* sizes,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, int,
                                int swizzle, int, int) {
    *map = {static_cast<const char*>(base), static_cast<int>(rank), type, {}, {}, {}};
    bool valid = rank >= 1 && rank <= 5 && swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] * type <= 128 &&
                 reinterpret_cast<uintptr_t>(base) % 16 == 0;
    for (unsigned d = 0; d < rank && valid; ++d) {
        map->sizes[d] = static_cast<int64_t>(sizes[d]), map->box[d] = static_cast<int>(box[d]);
        map->strides[d] = d > 0 ? static_cast<int64_t>(strides[d - 1]) : type;
        valid = sizes[d] > 0 && sizes[d] <= 1ull << 32 && box[d] >= 1 && box[d] <= 256 && steps[d] == 1 &&
                (d == 0 || (strides[d - 1] % 16 == 0 && strides[d - 1] < 1ull << 40));
    }
    return valid ? CUDA_SUCCESS : cudaErrorInvalidValue;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
    auto found = model::ranges.upper_bound(pointer);
    if (found == model::ranges.begin() || pointer >= (--found)->first + found->second) return cudaErrorInvalidValue;
    *base = found->first, *bytes = found->second;
    return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, int,
                                             cudaDriverEntryPointQueryResult* result) {
    *found = strcmp(name, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled)
             : strcmp(name, "cuMemGetAddressRange") == 0 ? reinterpret_cast<void*>(&cuMemGetAddressRange_v2)
                                                         : nullptr;
    *result = *found == nullptr;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    *pointer = malloc(bytes);
    if (*pointer == nullptr) return cudaErrorInvalidValue;
    memset(*pointer, 0xff, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
    free(pointer);
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
// Few, so that a small case already gives a block several tiles; even, for clusters of two.
cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 4, cudaSuccess; }

// ---- What Python calls ---------------------------------------------------------------------------------------------

extern "C" void hopper_begin(int count, const uint64_t* pointers, const uint64_t* bytes, uint64_t run) {
    model::ranges.clear();
    for (int i = 0; i < count; ++i) model::ranges[pointers[i]] = bytes[i];
    model::fault_verdict.clear(), model::fault_text.clear();
    model::state = run * 7919 + 1, model::at_once = run % 2 == 1;
}
extern "C" const char* hopper_fault_verdict() { return model::fault_verdict.c_str(); }
extern "C" const char* hopper_fault_text() { return model::fault_text.c_str(); }
