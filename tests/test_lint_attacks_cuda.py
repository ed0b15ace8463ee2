"""C++ submissions that break a rule in a roundabout way, each caught; and innocent ones, each left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_lint_cuda import CLEAN, DEVICE, HOST, MACA, findings

SYNC = "cudaDeviceSynchronize"
GUARD = "if (batch_size > 0 && batch_size * 32 > scratch.size) {"
STATIC = "        static size_t"


def host(*lines: str) -> tuple[str, str]:
    return HOST, "".join(f"    {line}\n" for line in lines) + HOST


def device(*lines: str) -> tuple[str, str]:
    return DEVICE, "".join(f"    {line}\n" for line in lines) + DEVICE


def section(*lines: str) -> tuple[str, str]:
    """Lines of the arch section that the C500 compiles."""
    return MACA, MACA + "".join(f"{line}\n" for line in lines)


DEVIOUS = {
    "name over two lines": ("spelling", "backslash", *host("cudaDevice\\\nSynchronize();")),
    "backslash and blank": ("spelling", "backslash", *host("cudaDevice\\ \nSynchronize();")),
    "comment carried on": ("spelling", "comment", *host("// held = bytes \\ ", "return;")),
    "digraph of a directive": ("spelling", "%: stands", *device("%:if 1", "%:endif")),
    "digraph of a brace": ("spelling", "<% stands", *host("if (batch_size) <% return; %>")),
    "pasted name": ("spelling", "##", *section("#define CALL(x) cudaDevice##x()")),
    "macro for a call": ("synchronisation", SYNC, *section(f"#define WAIT {SYNC}")),
    "pointer to a function": ("synchronisation", SYNC, *host(f"auto f = &{SYNC};", "f();")),
    "parentheses around a call": ("synchronisation", SYNC, *host(f"({SYNC})();")),
    "type of a function": ("synchronisation", SYNC, *host(f"decltype({SYNC})* f = nullptr;")),
    "name in a string": ("synchronisation", SYNC, *host('auto f = find("cudaDevice" "Synchronize");')),
    "name in a raw string": ("synchronisation", SYNC, *host(f'auto f = find(R"({SYNC})");')),
    "per-thread stream": ("synchronisation", "_ptsz", *host("cudaStreamSynchronize_ptsz(0);")),
    "waiting by polling": ("synchronisation", "cudaStreamQuery", *host("while (cudaStreamQuery(0)) {}")),
    "copy to the host": ("synchronisation", "DeviceToHost", *host("cudaMemcpyAsync(a, b, 4, cudaMemcpyDeviceToHost);")),
    "copy of another shape": ("synchronisation", "cudaMemcpy2DToArray", *host("cudaMemcpy2DToArray(a, 0);")),
    "driver's copy": ("synchronisation", "cuMemcpyDtoH_v2", *host('auto f = find("cuMemcpyDtoH_v2");')),
    "comment in a call": ("synchronisation", SYNC, *host(f"{SYNC}/* */\n();")),
    "behind __GNUC__": (
        "synchronisation",
        SYNC,
        *section("#ifdef __GNUC__", f"inline void f() {{ {SYNC}(); }}", "#endif"),
    ),
    "behind an else of the unknown": (
        "synchronisation",
        SYNC,
        *section("#if __has_include(<no_such>)", "#else", f"inline void f() {{ {SYNC}(); }}", "#endif"),
    ),
    "behind #undef": (
        "synchronisation",
        SYNC,
        *section("#undef __MACA__", "#ifndef __MACA__", f"inline void f() {{ {SYNC}(); }}", "#endif"),
    ),
    "behind #elifdef": (
        "synchronisation",
        SYNC,
        *section("#if 0", "#elifdef __MACA__", f"inline void f() {{ {SYNC}(); }}", "#endif"),
    ),
    "guard that forgets": ("allocation", "cudaFree", "    static size_t held = 0;", "    size_t held = 0;"),
    "pointer that forgets": ("allocation", "cudaMalloc", "static int* tickets = nullptr;", "int* tickets = nullptr;"),
    "guard that is true again": ("allocation", "cudaMalloc", GUARD, GUARD.replace("32 >", "32 >=")),
    "guard with a way round": ("allocation", "cudaMalloc", GUARD, GUARD.replace(" &&", " ||")),
    "guard that is set back": (
        "allocation",
        "cudaFree",
        "    if (bytes <= held)",
        "    held = 0;\n    if (bytes <= held)",
    ),
    "guard on another size": ("allocation", "cudaFree", "    held = bytes;", "    held = 1;"),
    "guard that returns too late": ("allocation", "cudaFree", "if (bytes <= held)", "if (bytes < held)"),
    "allocation in a helper": (
        "allocation",
        "cudaMalloc at every call",
        'extern "C" void run',
        "static void* take(size_t n) { void* p; cudaMalloc(&p, n); return p; }\nvoid* w = take(4);\n"
        'extern "C" void run',
    ),
    "allocation by a pointer": ("allocation", "under another name", *host("auto f = cudaMalloc<void>;")),
    "array of pitches": ("allocation", "cudaMallocPitch", *host("cudaMallocPitch(&tickets, 0, 1, 1);")),
    "header by a macro": ("header", "cannot be read", *section("#define WHICH <cutlass/x.h>", "#include WHICH")),
    "header by a path": ("header", "cute/../cutlass/x.h", "<cute/tensor.hpp>", "<cute/../cutlass/x.h>"),
    "next header": ("header", "#include_next", *section("#include_next <cutlass/x.h>")),
    "header of another C++": ("header", "#include of format", "<type_traits>", "<format>"),
    "PTX behind an empty string": ("ptx", "bar.sync", *section('__device__ void f() { asm("" "bar.sync 0;"); }')),
    "PTX by a macro": ("ptx", "asm with CODE", *section("__device__ void f() { asm(CODE); }")),
    "PTX in a raw string": ("ptx", "bar.sync", *section('__device__ void f() { __asm__ volatile(R"(bar.sync 0;)"); }')),
    "builtin of another vendor": ("one-body", "__builtin_amdgcn_ds", *device("__builtin_amdgcn_ds_bpermute(0, 1);")),
    "mask as a long": ("lane-mask", "0xffffffffull", *device("__any_sync(0xffffffffull, 1);")),
    "mask with separators": ("lane-mask", "0xFFFF'FFFFu", *device("__any_sync(0xFFFF'FFFFu, 1);")),
    "mask by a shift": ("lane-mask", "(1ull<<32)-1", *device("__any_sync((1ull << 32) - 1, 1);")),
    "mask by a cast": ("lane-mask", "(unsigned)-1", *device("__any_sync((unsigned)-1, 1);")),
    "mask by a limit": ("lane-mask", "numeric_limits", *device("__any_sync(std::numeric_limits<unsigned>::max(), 1);")),
    "mask by compl": ("lane-mask", "compl0u", *device("__any_sync(compl 0u, 1);")),
    "mask of another name": (
        "lane-mask",
        "with the mask kAll",
        *device("constexpr auto kHalf = 0xffff;", "const auto kAll = kHalf << 16 | kHalf;", "__any_sync(kAll, 1);"),
    ),
    "mask cut by its type": ("lane-mask", "with the mask m", *device("const unsigned m{~0ull};", "__any_sync(m, 1);")),
    "lanes cut by a cast": ("lane-mask", "cut to unsigned", *device("auto b = (unsigned)__ballot_sync(~0ull, 1);")),
    "lanes cut by static_cast": (
        "lane-mask",
        "cut to uint32_t",
        *device("auto b = static_cast<uint32_t>(__ballot_sync(~0ull, 1));"),
    ),
    "lanes cut later": (
        "lane-mask",
        "__popc of m",
        *device("uint64_t m = __ballot_sync(~0ull, 1);", "int n = __popc(m);"),
    ),
    "width in hexadecimal": ("wave-width", "tid % 0x20", "lane = tid % kWave", "lane = tid % 0x20"),
    "width in octal": ("wave-width", "tid & 037", "lane = tid % kWave", "lane = tid & 037"),
    "width as a product": ("wave-width", "tid % (16*2)", "lane = tid % kWave", "lane = tid % (16 * 2)"),
    "width less one": ("wave-width", "tid & (32-1)", "lane = tid % kWave", "lane = tid & (32 - 1)"),
    "width by a constant": ("wave-width", "tid % kRows", "lane = tid % kWave", "lane = tid % kRows"),
    "index in parentheses": (
        "wave-width",
        "(threadIdx.x+1) % 32",
        "lane = tid % kWave",
        "lane = (threadIdx.x + 1) % 32",
    ),
    "index by a cast": (
        "wave-width",
        "t % 32",
        *device("const int t = static_cast<int>(threadIdx.x);", "const int lane_id = t % 32;"),
    ),
    "width in braces": ("wave-width", "kWarpSize is 32", "kRows = 32", "kWarpSize{32}"),
    "width in an enum": ("wave-width", "WAVE_SIZE is 32", *device("enum { WAVE_SIZE = 1 << 5 };")),
    "width as a parameter": (
        "wave-width",
        "kWaveLanes is 32",
        "template <int N>",
        "template <int N, int kWaveLanes = 32>",
    ),
    "bounds behind a comparison": ("launch-bounds", "two arguments", "(kThreads)", "(kThreads < 256 ? 1 : 256, 2)"),
    "bounds by a macro": ("launch-bounds", "another name", *section("#define BOUNDS __launch_bounds__")),
    "bounds by an attribute": ("launch-bounds", "two", *device("__attribute__((launch_bounds(256, 2))) int x;")),
    "dp2a": ("dp4a", "__dp2a_lo", *device("int n = __dp2a_lo(1, 2, 3);")),
    "copy by default": ("async-copy", "AutoCopyAsync", *device("cute::copy(cute::AutoCopyAsync{}, q, output);")),
    "export without a linkage": (
        "signature",
        "in a namespace",
        'extern "C" void run',
        'namespace {\nextern "C" void run',
    ),
    "export that is static": ("signature", "static", 'extern "C" void run', 'extern "C" static void run'),
    "export under another name": ("signature", "a macro", *section("#define run_kernel run_kernel_2")),
}


@pytest.mark.parametrize("entry", DEVIOUS.values(), ids=DEVIOUS.keys())
def test_devious_submission_is_caught(tmp_path: Path, entry: tuple[str, str, str, str]) -> None:
    rule, says, old, new = entry
    assert CLEAN.count(old) >= 1
    text = CLEAN.replace(old, new, 1) + ("}\n" if new.startswith("namespace {") else "")
    found = findings(tmp_path, text)
    assert any(r == rule and level == "error" and says in sentence for r, _, level, sentence in found), found


INNOCENT = {
    "a debugging branch": section("#ifdef DEBUG", f"inline void f() {{ {SYNC}(); }}", "#endif"),
    "words in strings": host('const char* help = "never call cudaDeviceSynchronize here";'),
    "words in comments": host("// cudaMalloc(&x, n); \\ not carried on: threadIdx.x % 32", "/* ## <% */"),
    "text that goes on": host('const char* text = "one \\', 'two";'),
    "error of a launch": host("if (cudaGetLastError() != cudaSuccess) return;"),
    "copy on the device": host("cudaMemcpyAsync(tickets, q, 4, cudaMemcpyDeviceToDevice);"),
    "clearing in a stream": host("cudaMemsetAsync(tickets, 1, 8, 0);"),
    "workspace by a helper": (
        "        cudaMalloc(&scratch.data, batch_size * 32);\n        cudaMemset(scratch.data, 0, batch_size * 32);\n",
        "        scratch.data = take(batch_size * 32);\n",
    ),
    "workspace or nothing yet": (GUARD, "if (scratch.data == nullptr || batch_size * 32 > scratch.size) {"),
    "workspace turned round": (GUARD, "if (scratch.size < batch_size * 32) {"),
    "workspace of the first call": host(
        "static float* once = [] { float* p = nullptr; cudaMalloc(&p, 1024); return p; }();"
    ),
    "workspace by call_once": host("std::call_once(flag, [] { cudaMalloc(&memory, 4096); });"),
    "workspace of a struct": (
        'extern "C" void run',
        "struct Memory {\n    float* data = nullptr;\n    int64_t size = 0;\n    void grow(int64_t n) {\n"
        "        if (n <= size) return;\n        data = nullptr, size = 0;\n"
        "        if (cudaMalloc(&data, n) != cudaSuccess) return;\n        size = n;\n    }\n};\n"
        'static Memory held_memory;\nextern "C" void run',
    ),
    "pointers as arrays": ("const float* q, float* output,", "const float q[], float output[],"),
    "long long numbers": ("int64_t batch_size) {", "long long batch_size) {"),
    "64 by another name": ("lane = tid % kWave", "lane = tid % (kRows * 2)"),
    "rows of 32": ("lane = tid % kWave", "row = tid / kRows"),
    "all lanes": device("__any_sync(~uint64_t(0), 1);", "__any_sync(0xffffffffffffffffull, 1);", "__any_sync(-1, 1);"),
    "all lanes by name": device("const uint64_t everyone = ~0ull;", "__any_sync(everyone, 1);"),
    "lanes kept whole": device("const auto set = __ballot_sync(~0ull, 1);", "int n = __popcll(set);"),
    "a comparison in a template": device("std::enable_if_t<(kRows < 33)>* p = nullptr;"),
    "bounds of two constants": ("__launch_bounds__(kThreads)", "__launch_bounds__((kThreads > 64) ? kThreads : 64)"),
    "bounds of a template": ("__launch_bounds__(kThreads)", "__launch_bounds__(Config<1, 2>::kThreads)"),
    "remainder and colon": device("int r = tid ? tid %3 : 1;"),
    "headers of C and C++": ("#include <type_traits>", "#include <algorithm>\n#include <math.h>\n#include <cstdio>"),
}


@pytest.mark.parametrize("entry", INNOCENT.values(), ids=INNOCENT.keys())
def test_innocent_submission_is_left_alone(tmp_path: Path, entry: tuple[str, str]) -> None:
    old, new = entry
    assert CLEAN.count(old) >= 1
    text = CLEAN.replace(old, new, 1)
    if "take(" in new:
        helper = "static float* take(int64_t n) { float* p = nullptr; cudaMalloc(&p, n); return p; }\n"
        text = text.replace('extern "C" void run', helper + 'extern "C" void run', 1)
    assert [sentence for _, _, level, sentence in findings(tmp_path, text) if level == "error"] == []
