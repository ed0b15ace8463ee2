"""What kernels need: found where it is planted, read rightly from the compilers' reports, and told in sentences."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import catalog, lint_cli
from harness.cli import main
from harness.contract import load_contract
from harness.lint import (
    cases,
    compat,
    cuda_usage,
    nvcc,
    resources,
    store,
    tilelang_lower,
    tilelang_record,
    triton_record,
    worker,
)
from harness.lint.resources import Submission, Usage
from harness.verdict import ExitCode, KernelFault, KitError

RAGGED = load_contract(catalog.reference_path("ragged_prefill")).arguments


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path / "store")


# -- rows become findings ------------------------------------------------------------------------------------------


def found(tmp_path: Path, language: str, **row: Any) -> list[str]:
    path = tmp_path / "run_kernel.cu"
    path.write_text("// kernel\nint x;\n__global__ void kernel() {}\n", encoding="utf-8")
    rows = [{"kernel": "kernel", "cases": ["judge 1", "judge 2"], **row}]
    usage = Usage(Submission("ragged_prefill", language, path), rows, [], "")
    return [str(finding).removeprefix(f"{path}:") for finding in resources.findings(usage)]


@pytest.mark.parametrize(
    ("language", "row", "says"),
    [
        (
            "cuda",
            {"target": "c500", "shared": 65537},
            "3: error [resource] kernel on c500 (judge 1, ...) needs 65537 bytes of shared memory; a block of the C500 "
            "has 65536; use smaller tiles or fewer stages in the c500 row",
        ),
        (
            "triton",
            {"target": "sm_80", "async": 3, "line": 9},
            "9: error [async-copy] kernel on sm_80 (judge 1, ...) has 3 asynchronous copies in its c500 row; use "
            "num_stages=1 there",
        ),
        (
            "triton",
            {"target": "gfx90a", "spills": 8},
            "3: note [spills] kernel on gfx90a (judge 1, ...) spills 8 bytes per thread; use smaller tiles or more "
            "warps",
        ),
        (
            "tilelang",
            {"target": "sm_80", "error": "LayoutError: no"},
            "3: error [compile] kernel on sm_80 (judge 1, ...): LayoutError: no; mend the kernel",
        ),
        (
            "tilelang",
            {"target": "gfx942", "error": "LayoutError: no"},
            "3: note [compile] kernel on gfx942 (judge 1, ...): LayoutError: no; mend the kernel",
        ),
    ],
)
def test_what_breaks_a_limit_is_told(tmp_path: Path, language: str, row: dict[str, Any], says: str) -> None:
    assert found(tmp_path, language, **row) == [says]


@pytest.mark.parametrize(
    ("language", "row"),
    [
        ("cuda", {"target": "c500", "shared": 65536, "threads": 1024}),
        ("triton", {"target": "sm_80", "spills": 800, "async": 0}),  # 128 threads where the C500 has 256
        ("tilelang", {"target": "sm_90", "async": 4, "spills": 8}),
    ],
)
def test_what_keeps_the_limits_is_not(tmp_path: Path, language: str, row: dict[str, Any]) -> None:
    assert found(tmp_path, language, **row) == []


def test_table_shows_the_most_of_all_cases_and_invents_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc, "find", lambda: None)
    rows = [{"kernel": "k", "target": "c500", "shared": shared, "threads": 64} for shared in (10, 30, 20)]
    lines = resources.table([Usage(Submission("t", "cuda", Path("x.cu")), rows, [], "")])
    assert lines[1].split() == ["t", "cuda", "k", "c500", "64", "30", "-", "-", "-", "-"]
    assert lines[-1] == "nvcc is not here: registers and spills of C++ and TileLang are unknown."


# -- reading what compilers say ------------------------------------------------------------------------------------

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN5inner6decodeILi64EEEv4Args' for 'sm_80'
ptxas info    : Function properties for _ZN5inner6decodeILi64EEEv4Args
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 1024 bytes smem, 432 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN5inner6decodeILi128EEEv4Args' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, 432 bytes cmem[0]
ptxas info    : Compiling entry function '_Z6decode4Args' for 'sm_80'
ptxas info    : Compiling entry function 'plain' for 'sm_80'
ptxas info    : Used 7 registers
"""


def test_ptxas_report_is_read_by_kernel() -> None:
    assert nvcc.parse(REPORT) == {
        "decode": {"registers": 96, "spills": 16, "static": 1024},
        "plain": {"registers": 7, "spills": 0, "static": 0},
    }


def test_static_shared_memory_of_a_lowered_source() -> None:
    text = """extern __shared__ __align__(1024) uchar dynamic[];
    __shared__ int flag[1]; // __shared__ int not[9];
    __shared__ __align__(16) bfloat16_t tile[4][32];"""
    assert tilelang_lower.static_shared(text) == 4 + 2 * 128


# -- recording launches --------------------------------------------------------------------------------------------

TRITON = """import torch
import triton
import triton.language as tl

TUNING = {"c500": (SIZE, STAGES), "sm90": (16, 9)}
DEVICE = "c500"


@triton.jit
def kernel(q, k, n, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    column = tl.arange(0, 64)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(n):
        a = tl.load(q + row[:, None] * 64 + column[None, :])
        b = tl.load(k + row[None, :] * 64 + column[:, None])
        total = tl.dot(a, b, total)
        q += 64 * SIZE
        k += 64 * SIZE
    tl.store(q + row[:, None] * SIZE + row[None, :], total.to(tl.bfloat16))


def run_kernel(ARGUMENTS):
    size, stages = TUNING[DEVICE]
    torch.empty((size, 2), dtype=torch.float32, device=q.device)
    kernel[(1,)](q, k, q.shape[0], SIZE=size, num_warps=4, num_stages=stages)
"""


@pytest.fixture(scope="module")
def every_case() -> dict[str, cases.CaseArguments]:
    return {case.label: case for case in cases.each("ragged_prefill", [])}


@pytest.fixture
def two_cases(every_case: dict[str, cases.CaseArguments], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording sees case 1 of tiny and of judge only."""
    few = [dataclasses.replace(every_case[label], allocated=0) for label in ("tiny 1", "judge 1")]
    monkeypatch.setattr(cases, "each", lambda task, notes: iter(few))


@pytest.mark.usefixtures("two_cases")
@pytest.mark.parametrize(("size", "stages", "copies"), [(32, 1, False), (64, 3, True)])
def test_triton_kernel_is_recorded_and_compiled(
    size: int, stages: int, copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    path = tmp_path / "run_kernel.py"
    text = TRITON.replace("(SIZE, STAGES)", f"({size}, {stages})").replace("ARGUMENTS", ", ".join(RAGGED))
    path.write_text(text, encoding="utf-8")
    rows = triton_record.rows("ragged_prefill", path, RAGGED, [])
    assert [(row["target"], row["threads"], row["workspace"]) for row in rows] == [
        ("sm_80", 256, size * 8),
        ("gfx90a", 256, size * 8),
    ]
    assert rows[0]["cases"] == ["judge 1", "tiny 1"]
    assert bool(rows[0]["async"]) is copies
    assert rows[0]["shared"] >= 2 * size * 64 * 2  # both operands
    assert "registers" not in rows[0]
    assert 0 < rows[1]["registers"] <= 512
    usage = Usage(Submission("ragged_prefill", "triton", path), rows, [], "")
    assert [finding.rule for finding in resources.findings(usage)] == (["async-copy"] if copies else [])


def test_judge_cases_are_recorded_without_their_data(every_case: dict[str, cases.CaseArguments]) -> None:
    assert len(every_case) == 10 + 12 + 15
    case = every_case["judge 12"]
    assert case.args[0].shape == (16 * 16384, 32, 128)
    with case.calling():
        torch.zeros(1000, dtype=torch.float32).view(10, 100)
    assert case.allocated == 4000
    assert set(map(cases.big, ("judge 1", "live 2"))) == {True}
    assert not cases.big("tiny 1")


TILELANG = """import tilelang
import tilelang.language as T

DEVICE = "c500"
TUNING = {"c500": (STAGES,)}
_kernels = {}


@tilelang.jit
def build(heads, num_stages):
    n = T.dynamic("n")

    @T.prim_func
    def main(Q: T.Tensor((n, heads, 128), "bfloat16"), O: T.Tensor((n, heads, 128), "bfloat16")):
        with T.Kernel(T.ceildiv(n, 64), threads=128) as block:
            tile = T.alloc_shared((ROWS, 128), "bfloat16")
            sums = T.alloc_fragment((64, 128), "float32")
            T.fill(sums, 0)
            for h in T.Pipelined(heads, num_stages=num_stages):
                T.copy(Q[block * 64 : block * 64 + ROWS, h, :], tile)
                for i, j in T.Parallel(64, 128):
                    sums[i, j] += tile[i, j]
            T.copy(sums, O[block * 64 : block * 64 + 64, 0, :])

    return main


def run_kernel(ARGUMENTS):
    if num_qo_heads not in _kernels:
        _kernels[num_qo_heads] = build(num_qo_heads, *TUNING[DEVICE])
    _kernels[num_qo_heads](q, output)
"""


@pytest.mark.usefixtures("two_cases")
@pytest.mark.parametrize(("rows", "stages", "rules"), [(64, 0, []), (320, 2, ["resource", "async-copy"])])
def test_tilelang_kernel_is_recorded_and_lowered(
    rows: int, stages: int, rules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvcc, "find", lambda: None)
    monkeypatch.setattr(tilelang_lower, "TARGETS", {"sm_80": tilelang_lower.TARGETS["sm_80"]})
    path = tmp_path / "run_kernel.py"
    text = TILELANG.replace("STAGES", str(stages)).replace("ROWS", str(rows)).replace("ARGUMENTS", ", ".join(RAGGED))
    path.write_text(text, encoding="utf-8")
    (row,) = tilelang_record.rows("ragged_prefill", path, RAGGED, [])
    assert (row["kernel"], row["line"], row["threads"]) == ("build", 9, 128)
    assert row["cases"] == ["judge 1", "tiny 1"]
    assert row["shared"] >= rows * 128 * 2
    usage = Usage(Submission("ragged_prefill", "tilelang", path), [row], [], "")
    assert [finding.rule for finding in resources.findings(usage)] == rules


CUDA = """#include <cuda_runtime.h>
#include <stdint.h>
__global__ void __launch_bounds__(192) kernel(const char* q) { extern __shared__ char tile[]; tile[0] = q[0]; }
extern "C" void run_kernel(const char* q, void*, void*, void*, void*, void*, int64_t, int64_t, int64_t, int64_t,
                           int64_t, int64_t dim_vo, int64_t) {
    static char* workspace = nullptr;
    static int64_t held = 0;
    if (dim_vo > held) {
        cudaMalloc(&workspace, dim_vo);
        cudaMemset(workspace, 0, dim_vo);
        held = dim_vo;
    }
    kernel<<<3, 192, BYTES>>>(q);
}
"""


@pytest.mark.usefixtures("two_cases")
def test_cuda_launch_is_planned_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc, "find", lambda: None)
    path = tmp_path / "run_kernel.cu"
    path.write_text(CUDA.replace("BYTES", "70000"), encoding="utf-8")
    (row,) = cuda_usage.rows("ragged_prefill", path, RAGGED, [])
    assert row == {
        "kernel": "kernel",
        "target": "c500",
        "threads": 192,
        "shared": 70000,
        "async": 0,
        "cases": ["tiny 1", "judge 1"],
        "workspace": 128,
    }
    usage = Usage(Submission("ragged_prefill", "cuda", path), [row], [], "")
    assert [(f.rule, f.line) for f in resources.findings(usage)] == [("resource", 3)]


# -- the store and the command -------------------------------------------------------------------------------------


def test_store_makes_once_per_content(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> list[int]:
        made.append(1)
        return made

    assert store.remembered(("a", b"b"), make) == store.remembered(("a", b"b"), make) == [1]
    assert store.remembered(("ab", b""), make) == [1, 1]
    with pytest.raises(ValueError, match="no"):
        store.remembered(("c",), lambda: (_ for _ in ()).throw(ValueError("no")))
    assert len(list(store.FOLDER.iterdir())) == 2


def test_contract_kinds_come_from_the_tiny_suite() -> None:
    kinds = worker.contracts(["fused_moe"])["fused_moe"]
    assert [name for name, scalar in zip(kinds["arguments"], kinds["scalars"], strict=True) if scalar] == ["topk"]


def stand_in(monkeypatch: pytest.MonkeyPatch, **row: Any) -> None:
    rows = [{"kernel": "k", "line": 1, "target": "sm_80", "cases": ["judge 1"], **row}]
    monkeypatch.setattr(
        resources,
        "measure",
        lambda submissions, jobs: [Usage(s, rows, ["judge 3 is left out"], "") for s in submissions],
    )


@pytest.mark.parametrize(("shared", "code"), [(65536, ExitCode.OK), (65540, ExitCode.LINT_ERROR)])
def test_lint_command_sums_up(
    shared: int, code: ExitCode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, shared=shared)
    words = ["lint", "--task", "ragged_prefill", "--lang", "triton"]
    assert main(words) == code
    text = capsys.readouterr().out
    assert "tasks/ragged_prefill/triton/run_kernel.py: note: judge 3 is left out" in text
    assert f"1 files, {int(shared > 65536)} errors, 0 notes" in text
    assert main([*words, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["resources"][0]["shared"] == shared
    assert [finding["rule"] for finding in document["findings"]] == ["resource"] * (shared > 65536)


def test_a_refused_file_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import os\nos._exit(9)\n", encoding="utf-8")
    words = ["lint", "--task", "ragged_prefill", "--lang", "triton", "--file", str(path)]
    assert main(words) == ExitCode.LINT_ERROR
    text = capsys.readouterr().out
    assert f"{path}:1: error [import] import of os" in text
    assert f"{path} was only read" in text


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run_kernel.py"
    path.write_text("import os, signal\n\nos.kill(os.getpid(), signal.SIGSEGV)\n", encoding="utf-8")
    with pytest.raises(KitError, match=r"ragged_prefill/triton ended with code -11: no message"):
        resources.measure([Submission("ragged_prefill", "triton", path)], 1)


def test_every_submission_is_chosen_once() -> None:
    every = lint_cli.chosen(None, None)
    assert len(every) == len({submission.path for submission in every}) >= 3
    assert [s.language for s in lint_cli.chosen("ragged_prefill", "cuda")] == ["cuda"]
    with pytest.raises(KitError, match=r"FILE=x\.cu: say what it is"):
        lint_cli.chosen(None, None, "x.cu")


# -- old versions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (
            "ERROR: Could not find a version that satisfies the requirement triton==3.0.0 (from versions: 3.1.0)\n"
            "ERROR: No matching distribution found for triton==3.0.0",
            "triton==3.0.0 has no wheel for Python 3",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement triton==3.0.0 (from versions: none)\n"
            "ERROR: No matching distribution found for triton==3.0.0",
            "pip could not get triton==3.0.0 (ERROR: No matching",
        ),
    ],
)
def test_a_missing_old_version_is_one_sentence(
    output: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "ROOT", tmp_path)

    def pip(command: list[str], **options: Any) -> Any:
        return type("Done", (), {"returncode": 1, "stdout": "", "stderr": output})

    monkeypatch.setattr(compat.subprocess, "run", pip)
    with pytest.raises(KitError) as caught:
        compat.ensure(compat.TRITON)
    assert str(caught.value).startswith(says)
    assert not list(tmp_path.iterdir()), "nothing half made stays behind"


def test_old_version_is_asked_for_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run_kernel.py"
    path.write_text("", encoding="utf-8")
    row = {"kernel": "k", "line": 4, "cases": ["judge 1"], "specialisation": {"kernel": "k", "arguments": [8]}}
    rows = [{**row, "target": target} for target in ("sm_80", "gfx942", "sm_80")]
    asked: list[Any] = []

    def ask(module: str, request: Any, folder: Path) -> Any:
        asked.append((module, request["targets"]))
        return {"version": "0.1.10", "results": [{"async": 2}, {"error": "no layout"}, {"async": 0}]}

    monkeypatch.setattr(compat, "ensure", lambda environment: tmp_path)
    monkeypatch.setattr(compat, "_ask", ask)
    (outcome,) = compat.check([Usage(Submission("ragged_prefill", "tilelang", path), rows, [], "")], 1)
    assert asked == [("harness.lint.tilelang_lower", ["sm_80", "gfx942", "sm_80"])]
    assert [(f.rule, f.level, f.line) for f in outcome.findings] == [("async-copy", "error", 4), ("compat", "note", 4)]
    assert outcome.line == "tilelang 0.1.10: kernels compiled: 2 for sm_80, 1 for gfx942"


def test_cute_is_recognised_by_its_headers() -> None:
    assert compat.includes_cute("#include <stdint.h>\n#include <cute/tensor.hpp>\n")
    assert compat.includes_cute('#include "cute/layout.hpp"\n')
    assert not compat.includes_cute("// #include <cute/tensor.hpp>\n#include <stdint.h>\n")


def test_nvcc_error_is_its_first_line(tmp_path: Path) -> None:
    if nvcc.find() is None:
        pytest.skip("nvcc is not here")
    path = tmp_path / "x.cu"
    path.write_text("int a;\nint f() { return b; }\n", encoding="utf-8")
    with pytest.raises(KernelFault, match=r"^x\.cu\(2\): error"):
        nvcc.usage(path, "sm_80")
