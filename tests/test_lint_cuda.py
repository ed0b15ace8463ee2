"""Every C++ rule has an example that breaks it and near misses that do not; a clean file breaks none."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import arch_section
from harness.lint import cuda
from harness.lint.reader import Reader

NAMES, SCALARS = ("q", "output", "batch_size"), (False, False, True)
CLEAN = r"""#include <cuda_runtime.h>
#include <stdint.h>
#include "cuda_bf16.h"
#include <type_traits>
#include <cute/tensor.hpp>
// ---- arch section
#if defined(__MACA__)
constexpr int kWave = 64;
__device__ int any(bool p) { return __any_sync(~0ull, p) != 0; }
__device__ void fence() { asm volatile("" ::: "memory"); }
#else
constexpr int kWave = 32;
__device__ int any(bool p) { return __any_sync(0xffffffff, p) != 0; }
__device__ int lane() { int lane = threadIdx.x & 31; asm("mov.u32 %0, %laneid;" : "=r"(lane)); return lane; }
__device__ int dot(int a, int b) { return __dp4a(a, b, 0); }
#endif
// ---- end of arch section
/* #if asm __dp4a __launch_bounds__(256, 2) cudaDeviceSynchronize() */
constexpr int kThreads = 256, kRows = 32, kMaxTickets = 1024;
template <int N>
__global__ void __launch_bounds__(kThreads) kernel(const float* q, float* output) {  // threadIdx.x % 32
    const int tid = threadIdx.x, lane = tid % kWave;
    const char* text = "asm 0xffffffff cudaMalloc(x)";
    for (int i = 16; i > 0; i >>= 1) output[i] = q[i / 32];
    output[blockIdx.x * 32 + lane] = q[tid] + 0xffffffff;
}
static void* workspace(size_t bytes) {
    static void* memory = nullptr;
    static size_t held = 0;
    if (bytes <= held) return memory;
    if (memory) cudaFree(memory);
    cudaMalloc(&memory, bytes);
    held = bytes;
    return memory;
}
extern "C" void run_kernel(const float* q, float* output, int64_t batch_size) {
    static int* tickets = nullptr;
    static struct { float* data; int64_t size; } scratch;
    if (!tickets) cudaMalloc(&tickets, kMaxTickets * sizeof(int));
    if (batch_size > 0 && batch_size * 32 > scratch.size) {
        cudaMalloc(&scratch.data, batch_size * 32);
        cudaMemset(scratch.data, 0, batch_size * 32);
        scratch.size = batch_size * 32;
    }
    cudaMemsetAsync(tickets, 0, 4);
    kernel<32><<<batch_size, kThreads>>>(q, output);
}
"""


def findings(tmp_path: Path, text: str) -> list[tuple[str, int, str, str]]:
    path = tmp_path / "run_kernel.cu"
    path.write_text(text, encoding="utf-8")
    return [(f.rule, f.line, f.level, str(f)) for f in cuda.check(path, NAMES, SCALARS)]


def test_clean_file_has_no_finding(tmp_path: Path) -> None:
    assert findings(tmp_path, CLEAN) == []


HOST, DEVICE = "    cudaMemsetAsync", "    const char*"
MACA = "constexpr int kWave = 64;\n"  # inside the section, what the C500 sees
BREAKS = [
    ("signature", "run_kernel(const float* q, float* output, ", "run_kernel(const float* q, ", "2 parameters where"),
    ("signature", "void run_kernel(", "void run_kernels(", "no function run_kernel"),
    ("signature", 'extern "C" void run', "void run", 'not exported as extern "C"'),
    ("signature", 'extern "C" void run', 'extern "C" int run', 'not exported as extern "C" void'),
    ("signature", "int64_t batch_size) {", "int batch_size) {", "parameter 3 (batch_size) is int; the judge"),
    ("signature", "float* output, int64_t", "float output, int64_t", "parameter 2 (output) is float; the judge"),
    ("signature", "const float* q, float* output, int", "float* output, const float* q, int", "are (output, q, batch"),
    ("one-body", DEVICE, "#if 1\n#endif\n" + DEVICE, "#if outside the arch section"),
    ("one-body", DEVICE, '    asm("nop;");\n' + DEVICE, "asm outside the arch section"),
    ("one-body", DEVICE, "    __builtin_mxc_rcpf(1.0f);\n" + DEVICE, "__builtin_mxc_rcpf outside the arch section"),
    ("one-body", "// ---- end of arch section\n", "", "0 with '// ---- end of arch section'"),
    ("ptx", MACA, MACA + '__device__ void f() { asm("bar.sync 0;"); }\n', 'asm with "bar.sync 0;"'),
    ("lane-mask", DEVICE, "    __shfl_xor_sync(0xffffffffu, tid, 1);\n" + DEVICE, "with the mask 0xffffffffu"),
    ("lane-mask", DEVICE, "    __ballot_sync(0xFFFFFFFF, tid);\n" + DEVICE, "with the mask 0xFFFFFFFF"),
    ("lane-mask", MACA, MACA + "__device__ bool all(bool p) { return __all_sync(~0u, p); }\n", "with the mask ~0u"),
    ("lane-mask", DEVICE, "    unsigned m = 0xffffffff;\n    __any_sync(m, 1);\n" + DEVICE, "with the mask m,"),
    ("lane-mask", "constexpr int kT", "#define FULL 0xffffffff\nconstexpr int kT", None),
    ("lane-mask", DEVICE, "    unsigned b = __ballot_sync(~0ull, 1);\n" + DEVICE, "into unsigned b keeps 32"),
    ("lane-mask", DEVICE, "    int n = __popc(__ballot_sync(~0ull, 1));\n" + DEVICE, "use __popcll"),
    ("wave-width", "lane = tid % kWave", "lane = tid % 32", "lane = tid % 32 takes a wave"),
    ("wave-width", "lane = tid % kWave", "warp = threadIdx.x >> 5, lane = 0", "threadIdx.x >> 5 takes a wave"),
    ("wave-width", "lane = tid % kWave", "lane_id = (threadIdx.x & 31)", "threadIdx.x & 31 takes a wave"),
    ("wave-width", "kRows = 32", "kWarpSize = 32", "kWarpSize is 32"),
    ("wave-width", "constexpr int kT", "#define WARP_SIZE 32\nconstexpr int kT", "WARP_SIZE is 32"),
    ("dp4a", DEVICE, "    int n = __dp4a(1, 2, 3);\n" + DEVICE, "__dp4a does not exist"),
    ("bsm-copy", MACA, MACA + "#define COPY(a) __builtin_mxc_ldg_b128_bsm(a)\n", "__builtin_mxc_ldg_b128_bsm copies"),
    ("async-copy", DEVICE, "    __pipeline_memcpy_async(output, q, 16);\n" + DEVICE, "is an asynchronous copy"),
    ("async-copy", DEVICE, "    using A = cute::SM80_CP_ASYNC_CACHEALWAYS<int>;\n" + DEVICE, "asynchronous copy"),
    ("launch-bounds", "__launch_bounds__(kThreads)", "__launch_bounds__(kThreads, 2)", "with two arguments"),
    ("synchronisation", HOST, "    cudaDeviceSynchronize();\n" + HOST, "cudaDeviceSynchronize blocks"),
    ("synchronisation", HOST, "    mcStreamSynchronize(0);\n" + HOST, "mcStreamSynchronize blocks"),
    ("synchronisation", HOST, "    cudaMemcpy(a, b, 4, cudaMemcpyDeviceToHost);\n" + HOST, "cudaMemcpy blocks"),
    ("allocation", HOST, "    cudaMalloc(&tickets, batch_size);\n" + HOST, "cudaMalloc at every call"),
    ("allocation", HOST, "    if (batch_size > 0) cudaMalloc(&tickets, batch_size);\n" + HOST, "cudaMalloc at every"),
    ("allocation", "if (!tickets) cudaMalloc(&tickets, kMax", "if (!tickets) cudaMalloc(&tickets, n", "cudaMalloc"),
    ("allocation", "    held = bytes;\n", "", "cudaFree at every call"),
    ("allocation", HOST, "    cudaMemset(tickets, 0, 4);\n" + HOST, "cudaMemset at every call"),
    ("header", "<type_traits>", "<cutlass/cutlass.h>", "#include of cutlass/cutlass.h, which"),
    ("header", "<type_traits>", '"helper.h"', "#include of helper.h, which"),
    ("header", "<type_traits>", "<cuda/std/utility>", "#include of cuda/std/utility, which"),
    ("unlinked", HOST, "    cuMemGetAddressRange(0, 0, 0);\n" + HOST, "cuMemGetAddressRange is in a library"),
    ("unlinked", HOST, "    cublasCreate(0);\n" + HOST, "cublasCreate is in a library"),
]


@pytest.mark.parametrize(("rule", "old", "new", "says"), BREAKS)
def test_violation_is_found(tmp_path: Path, rule: str, old: str, new: str, says: str | None) -> None:
    assert CLEAN.count(old) == 1
    text = CLEAN.replace(old, new)
    if says is None:  # a macro that is used further down
        says = "with the mask FULL"
        text = text.replace(DEVICE, "    __any_sync(FULL, 1);\n" + DEVICE)
    found = findings(tmp_path, text)
    assert any(r == rule and level == "error" and says in sentence for r, _, level, sentence in found), found
    # Nothing else is blamed, except by the rule that the planted words break as well.
    assert {r for r, *_ in found} <= {rule, "one-body"}


NOTES = [
    ("wave-width", "lane = tid % kWave", "row = tid / 32", "is wrong if 32 stands"),
    ("wave-width", DEVICE, "    for (int i = 16; i > 0; i >>= 1) __shfl_xor_sync(~0ull, tid, i);\n" + DEVICE, "16"),
    ("wave-width", DEVICE, "    __shfl_xor_sync(~0ull, tid, 1, 32);\n" + DEVICE, "half a wave"),
    ("header", "<type_traits>", "<mma.h>", "wmma"),
    ("signature", "output, int64_t batch_size) {", "output, int64_t batch) {", "are (q, output, batch)"),
]


@pytest.mark.parametrize(("rule", "old", "new", "says"), NOTES)
def test_doubtful_place_is_a_note(tmp_path: Path, rule: str, old: str, new: str, says: str) -> None:
    found = findings(tmp_path, CLEAN.replace(old, new, 1))
    assert [(r, level) for r, _, level, _ in found if says in _] == [(rule, "note")], found


NEAR_MISSES = [
    ("float* output, int64_t batch_size) {", "float* output, int64_t /* batch_size */) {"),
    ("float* output, int64_t batch_size) {", "void* const __restrict__ output, const std::int64_t batch_size) {"),
    (HOST, "    auto cuMemGetAddressRange = find();\n    cuMemGetAddressRange(0);\n" + HOST),
    (HOST, '    auto names = {"cuMemGetAddressRange"};\n' + HOST),
    (DEVICE, "    int n = __popcll(__ballot_sync(~0ull, 1));\n    uint64_t m = __ballot_sync(~0ull, 1);\n" + DEVICE),
    (DEVICE, "    unsigned hash = 0xffffffff;\n    int kWarps = 32, wave_count = 32;\n" + DEVICE),
    ("#include <type_traits>", "#ifdef __NVCOMPILER\n#endif\n"),
    ("#if defined(__MACA__)", "#if defined(__MACA__) || (defined(__clang__) && __MACA_ARCH__ >= 1000)"),
]


@pytest.mark.parametrize(("old", "new"), NEAR_MISSES)
def test_near_miss_is_left_alone(tmp_path: Path, old: str, new: str) -> None:
    assert CLEAN.count(old) == 1
    found = findings(tmp_path, CLEAN.replace(old, new))
    assert [rule for rule, *_ in found if rule != "one-body"] == []


def test_a_block_of_extern_c_exports(tmp_path: Path) -> None:
    text = CLEAN.replace('extern "C" void run', 'extern "C" {\nint other(int x) { return x; }\nvoid run') + "}\n"
    assert findings(tmp_path, text) == []
    assert [rule for rule, *_ in findings(tmp_path, text.replace('"C"', '"C++"'))] == ["signature"]


@pytest.mark.parametrize(
    ("condition", "live"),
    [
        ("#if defined(__MACA__)", True),
        ("#if !defined __MACA__", False),
        ("#ifdef __CUDACC__", True),  # cu-bridge defines it
        ("#ifndef __CUDA_ARCH__", False),
        ("#if __CUDA_ARCH__ >= 900", False),
        ("#if __CUDA_ARCH__ == 800 && \\\n  (UNKNOWN || 1)", True),
        ("#if UNKNOWN", False),
        ("#define YES 0\n#if YES", False),
        ("#if __has_include(<x>)", True),  # not understood: seen
        ("#if 0\n#elif 1 + 1 == 2", True),
        ("#if 1\n#elif 1", False),
        ("#if 1\n#else", False),
        ("#if 0\n#if 1\n#endif\n#else", True),
        ("#if 0\n#else\n#if 0\n#else", True),
    ],
)
def test_branches_that_the_c500_takes(tmp_path: Path, condition: str, live: bool) -> None:
    path = tmp_path / "x.cu"
    path.write_text(f"{condition}\nint here;\n#endif\n", encoding="utf-8")
    reader = Reader(path)
    assert reader.live[reader.texts.index("here")] is live


def test_a_file_without_a_section_gets_one_note(tmp_path: Path) -> None:
    text = CLEAN.replace("// ---- arch section\n", "").replace("// ---- end of arch section\n", "")
    assert [(rule, level) for rule, _, level, _ in findings(tmp_path, text)] == [("one-body", "note")]
    with_ptx = text.replace(HOST, '    asm("nop;");\n' + HOST)
    assert ("ptx", "error") in [(rule, level) for rule, _, level, _ in findings(tmp_path, with_ptx)]


def test_a_finding_names_file_line_rule_and_way_out(tmp_path: Path) -> None:
    lines = CLEAN.splitlines()
    at = next(number for number, line in enumerate(lines, 1) if "__global__" in line)
    ((rule, line, _, text),) = findings(tmp_path, CLEAN.replace("(kThreads)", "(kThreads, 2)"))
    assert (rule, line) == ("launch-bounds", at)
    assert text.startswith(f"{tmp_path / 'run_kernel.cu'}:{at}: error [launch-bounds] __launch_bounds__ with two")
    assert text.endswith("; give the block size only")


def test_the_master_section_is_clean(tmp_path: Path) -> None:
    section = arch_section.MASTER.read_text(encoding="utf-8")
    text = f'{section}extern "C" void run_kernel(void* q, void* output, int64_t batch_size) {{}}\n'
    assert findings(tmp_path, text) == []
