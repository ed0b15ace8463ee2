"""From a .cu file to a library: rewritten launches, diagnostics, the cache, the judge's ABI, GPU command lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import runner

from harness.cpu import maca_build
from harness.cpu.maca_source import SourceError, rewrite, tokenize
from harness.devices import Device, pick
from harness.languages import cuda
from harness.verdict import ExitCode, KernelFault, KitError, Verdict

CPU = pick("cpu")
KERNEL = '#include <cuda_runtime.h>\n__global__ void k(float* y) {\n    y[threadIdx.x] = 1.0f;\n}\nextern "C" void '


def body(text: str) -> str:
    """The rewritten text without its #line directive."""
    return rewrite(text, "a.cu").split("\n", 1)[1]


@given(
    st.lists(
        st.sampled_from(
            ["a<<<", ">>>(", "x", '"<<<"', "'>'", "/* >>> */", "// <<<\n", "\n", 'R"(\n)"', "1'000", "<", "=", "\\\n"]
        )
    )
)
def test_tokens_joined_give_the_file_back(parts: list[str]) -> None:
    text = "".join(parts)
    assert "".join(token.text for token in tokenize(text)) == text


@pytest.mark.parametrize(
    ("launch", "name", "call"),
    [
        ("k<<<1, 2>>>(x)", "k", "k(sim_a...)"),
        ("ns::k<4, (a > b)><<<dim3(n, 1), 64, bytes, stream>>>(x)", "ns::k<4, (a > b)>", "ns::k<4, (a > b)>(sim_a...)"),
        ("k<T, f<U>::value><<<g, b>>>(x, y)", "k<T, f<U>::value>", "k<T, f<U>::value>(sim_a...)"),
        ("table[i + 1].kernel<<<1, 2>>>(x)", "table[i + 1].kernel", "table[i + 1].kernel(sim_a...)"),
        ("this->kernel<<<1, 2>>>()", "this->kernel", "this->kernel(sim_a...)"),
    ],
)
def test_launch_becomes_a_call(launch: str, name: str, call: str) -> None:
    text = body(f"{{ {launch}; }}")
    assert "<<<" not in text
    assert f'::sim::configure("{name}", ' in text
    assert f"{{ {call}; }}" in text


def test_rewriting_keeps_every_line() -> None:
    text = 'void f() {\n  k\n   <2>\n  <<<1,\n 2>>>\n (x,\n y); // <<< not one\n  auto s = "k<<<1>>>()"; g();\n}\n'
    out = body(text)
    assert out.count("\n") == text.count("\n")
    assert out.split("\n").index(next(line for line in out.split("\n") if "g();" in line)) == 7
    assert '"k<<<1>>>()"' in out
    assert "// <<< not one" in out


def test_a_path_is_one_line_of_the_rewritten_file() -> None:
    assert rewrite("int x;\n", 'a\n"b"\\c.cu') == '#line 1 "a\\n\\"b\\"\\\\c.cu"\nint x;\n'


def test_closing_template_brackets_are_no_launch() -> None:
    text = "std::vector<std::vector<std::vector<int>>> v; int a = b << 2 >> 1;"
    assert body(text) == text


@pytest.mark.parametrize("text", ["{ <<<1, 2>>>(x); }", "{ k<<<1, 2(x); }"])
def test_unfinished_launch_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(SourceError) as caught:
        rewrite("\n\n" + text, "a.cu")
    assert caught.value.line == 3


def test_shared_memory_declarations() -> None:
    out = body("{ extern __shared__ __align__(16) unsigned char raw[]; extern __shared__ float t[][8]; extern int z; }")
    assert "unsigned char * const raw = ::sim::DynamicShared();" in " ".join(out.split())
    assert "float (* const t)[8] = ::sim::DynamicShared();" in " ".join(out.split())
    assert "extern int z;" in out
    out = body("{ static __shared__ pair<int, 2> a[N], b; __shared__ __align__(16) char c[sizeof(x<1, 2>)]; }")
    assert [n for n in "abc" if f'("{n}", &{n}, sizeof({n}))' in out] == ["a", "b", "c"]
    assert "static" not in out


def write(tmp_path: Path, text: str, name: str = "submission.cu") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_compile_error_has_the_files_own_line(tmp_path: Path) -> None:
    path = write(tmp_path, KERNEL + "run_kernel(float* y) {\n    k<<<1, 64>>>(\n        y);\n    undeclared(y);\n}\n")
    with pytest.raises(KernelFault) as caught:
        cuda.load(path, ("y",), CPU, "wave64", {})
    assert caught.value.verdict is Verdict.COMPILE_ERROR
    assert caught.value.message.splitlines()[0].startswith("submission.cu:8:")
    assert "'undeclared' was not declared" in caught.value.message


def test_what_the_c500_lacks_does_not_compile_as_wave64(tmp_path: Path) -> None:
    text = (
        KERNEL
        + "run_kernel(float* y) { k<<<1, 64>>>(y); }\n__global__ void d(int* y) { y[0] = __dp4a(y[0], y[1], 0); }\n"
    )
    with pytest.raises(KernelFault, match=r"submission\.cu:6:\d+: error: .*__dp4a"):
        cuda.load(write(tmp_path, text), ("y",), CPU, "wave64", {})


def test_a_damaged_library_is_built_again(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_text('extern "C" void run_kernel(float* y) { y[0] = 3; }\n', encoding="utf-8")
    library = maca_build.build(path, "wave64", cuda.cutlass_include())
    library.write_bytes(library.read_bytes()[:100])
    submission = cuda.load(path, ("y",), CPU, "wave64", {})
    y = torch.zeros(1)
    submission.run([y])
    assert y.item() == 3


def test_missing_export_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, KERNEL.replace('extern "C" ', "") + "run_kernel(float* y) { k<<<1, 64>>>(y); }\n")
    with pytest.raises(KernelFault, match=r'submission\.cu: exports no run_kernel; declare it extern "C"') as caught:
        cuda.load(path, ("y",), CPU, "wave64", {})
    assert caught.value.verdict is Verdict.COMPILE_ERROR


def test_cache_is_keyed_by_content_and_leaves_nothing_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maca_build, "CACHE", tmp_path / "cache")
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "lib.so").write_text("x", encoding="utf-8")

    first = maca_build.cached(maca_build.digest("a", "bc"), make)
    assert maca_build.cached(maca_build.digest("a", "bc"), make) == first
    assert len(made) == 1
    assert maca_build.cached(maca_build.digest("ab", "c"), make) != first

    def fail(folder: Path) -> None:
        make(folder)
        raise KernelFault(Verdict.COMPILE_ERROR, "no")

    with pytest.raises(KernelFault):
        maca_build.cached("failing", fail)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(
        [maca_build.digest("a", "bc"), maca_build.digest("ab", "c")]
    )


def test_two_makers_of_one_key_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maca_build, "CACHE", tmp_path)

    def slower(folder: Path) -> None:
        (tmp_path / "key").mkdir()  # another process has finished in the meantime
        (tmp_path / "key" / "lib.so").write_text("theirs", encoding="utf-8")
        (folder / "lib.so").write_text("ours", encoding="utf-8")

    assert (maca_build.cached("key", slower) / "lib.so").read_text(encoding="utf-8") == "theirs"


def test_a_full_disk_is_no_fault_of_the_file(tmp_path: Path) -> None:
    said = "echo 'ld: final link failed: No space left on device' >&2; echo 'error: ld returned 1' >&2; exit 1"
    with pytest.raises(OSError, match="No space left on device"):
        maca_build.run_compiler(["sh", "-c", said], tmp_path / "a.cu")
    with pytest.raises(KernelFault, match="ld returned 1"):
        maca_build.run_compiler(["sh", "-c", said.replace("No space left on device", "bad value")], tmp_path / "a.cu")


def test_missing_compiler_is_the_machines_fault() -> None:
    with pytest.raises(KitError, match="no-such-compiler is missing") as caught:
        maca_build.compiler_version("no-such-compiler")
    assert caught.value.code is ExitCode.ENVIRONMENT


@pytest.mark.parametrize(("mode", "lanes"), [("wave64", 64.0), ("warp32", 32.0)])
def test_abi_is_the_judges(mode: str, lanes: float) -> None:
    y = torch.zeros(6, dtype=torch.float64)
    run = runner("abi", mode, ("scalar", "n", "scale", "flag", "none", "y"))
    run(torch.tensor(2.5), (1 << 40) + 1, 0.1, True, None, y)
    # The float arrives with 32 bits, the integer with 64, a 0-dim tensor as a pointer.
    assert y.tolist() == [float((1 << 40) + 1), torch.tensor(0.1).item(), 1.0, 2.5, 1.0, lanes]


def test_argument_without_a_form_is_named() -> None:
    with pytest.raises(KitError, match="an argument of type str has no form"):
        runner("abi", "wave64", ("scalar", "n", "scale", "flag", "none", "y"))(
            "text", 1, 1.0, True, None, torch.zeros(6)
        )


def test_variants() -> None:
    assert cuda.variants(CPU) == ("wave64", "warp32")
    assert cuda.variants(Device("maca", "cuda", "C500", "c500")) == ("",)


def test_gpu_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "cutlass_include", lambda: ("/headers",))
    found = {"nvcc": "/bin/nvcc", "mxcc": "/bin/mxcc"}
    monkeypatch.setattr(cuda, "_find", lambda tool, *folders: found.get(tool))
    nvidia, maca = Device("cuda", "cuda", "H200", "sm90"), Device("maca", "cuda", "C500", "c500")
    command = cuda.gpu_command(Path("a.cu"), Path("a.so"), nvidia, "")
    assert " ".join(command) == (
        "/bin/nvcc -O3 -std=c++17 -arch=sm_90 -lineinfo -I/headers -shared -Xcompiler -fPIC a.cu -o a.so"
    )
    assert "-gencode=arch=compute_90a,code=sm_90a" in cuda.gpu_command(Path("a.cu"), Path("a.so"), nvidia, "hopper")
    mxcc = cuda.gpu_command(Path("a.cu"), Path("a.so"), maca, "")
    assert mxcc[:4] == ["/bin/mxcc", "-O3", "-std=c++17", "--offload-arch=xcore1000"]
    assert "/headers" not in " ".join(mxcc)  # the SDK has its own
    assert {"-lruntime_cu", "-lmcruntime", "-shared", "-fPIC"} <= set(mxcc)
    found["cucc"] = "/bin/cucc"
    assert cuda.gpu_command(Path("a.cu"), Path("a.so"), maca, "")[0] == "/bin/cucc"


@pytest.mark.skipif(cuda._find("nvcc", Path("/usr/local/cuda/bin")) is None, reason="nvcc is missing")
def test_nvcc_takes_wgmma_by_the_command_line_of_the_variant(tmp_path: Path) -> None:
    source = tmp_path / "hopper.cu"
    source.write_text('extern "C" __global__ void fence() { asm volatile("wgmma.fence.sync.aligned;"); }\n')
    nvidia, library = Device("cuda", "cuda", "H200", "sm90"), tmp_path / "lib.so"
    maca_build.run_compiler(cuda.gpu_command(source, library, nvidia, "hopper"), source)
    assert library.is_file()
    with pytest.raises(KernelFault, match="wgmma"):
        maca_build.run_compiler(cuda.gpu_command(source, library, nvidia, ""), source)


def test_cute_compiles_and_runs() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.zeros_like(x)
    runner("cute", "wave64", ("x", "y", "rows"), ("y",))(x, y, 64)
    assert torch.equal(x, y)


def test_missing_cute_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "cutlass_include", tuple)
    path = write(tmp_path, "#include <cute/tensor.hpp>\n" + KERNEL + "run_kernel(float* y) {}\n")
    with pytest.raises(KitError, match=r"submission\.cu includes cute/tensor\.hpp, which is not here") as caught:
        cuda.load(path, ("y",), CPU, "wave64", {})
    assert caught.value.code is ExitCode.ENVIRONMENT
