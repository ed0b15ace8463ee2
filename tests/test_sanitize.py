"""make sanitize without a GPU: real reports read, the driver on the simulator and on a stand-in for libcudart, and what
must not count as clean. compute-sanitizer is a script that prints what the real one would."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from harness import catalog, devices
from harness.cpu import maca_build
from harness.languages import cuda
from harness.runner import Job
from harness.sanitize import cli, report
from harness.sanitize.cli import Line, Target
from harness.verdict import ExitCode, KernelFault, KitError, Verdict

NVIDIA = devices.Device("cuda", "cuda", "H200", "sm90")
SOURCE = Path(__file__).resolve().parent / "cuda" / "sanitized.cu"
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
CLEAN_RACE = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at void decode<(int)3, Tile<float>>(Args, float *)+0x380 in /home/kit/tasks/run_kernel.cu:61
=========     by thread (65,0,0) in block (0,0,0)
=========     Access to 0x7bd889c03041 is misaligned
=========     and is inside the nearest allocation at 0x7bd889c03000 of size 1,024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: run_kernel at +0x1234 in lib.so
=========
what run_kernel itself prints
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call.
=========
========= ERROR SUMMARY: 769 errors
========= ERROR SUMMARY: 669 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sumKernel(int *, int *)+0x90 in /home/kit/block_error.cu:41
=========     and Read access at sumKernel(int *, int *)+0x100 in /home/kit/block_error.cu:51 [508 hazards]
=========
========= Warning: Race reported between Read access at other()+0x10 in /home/kit/block_error.cu:60
=========     and Write access at other()+0x20 in /home/kit/block_error.cu:61 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
WARNING = """========= COMPUTE-SANITIZER
========= Warning: Race reported between Read access at k+0x100
=========     and Write access at k+0x200 [2 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""
OLD = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x250 in /home/kit/run_kernel.cu:41:vectorAdd(int *)
=========     by thread (16,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize(
    ("text", "errors", "first"),
    [
        (CLEAN, 0, ""),
        (CLEAN_RACE, 0, ""),
        (MEMCHECK, 769, "Invalid __global__ write of size 4 bytes in decode<(int)3, Tile<float>> (run_kernel.cu:61)"),
        (
            RACE,
            2,
            "Error: Race reported between Write access in sumKernel (block_error.cu:41), "
            "and Read access in sumKernel (block_error.cu:51)",
        ),
        (WARNING, 1, "Warning: Race reported between Read access in k, and Write access in k"),
        (OLD, 1, "Uninitialized __global__ memory read of size 4 bytes in vectorAdd (run_kernel.cu:41)"),
        ("========= COMPUTE-SANITIZER\nran\n", None, ""),
        ("ERROR SUMMARY: 0 errors\n", None, ""),  # printed by anyone but the tool
        (CLEAN + "========= ERROR SUMMARY: 3 errors\n", 3, ""),  # a summary per process
        ("========= RACECHECK SUMMARY: 20 hazards displayed (256 errors, 0 warnings)\n", 256, ""),
    ],
)
def test_a_report_is_read(text: str, errors: int | None, first: str) -> None:
    assert report.parse(text) == (errors, first)


# -- a task to run ----------------------------------------------------------------------------------------------------

CONFIG = """
import torch
N = {sizes}
at = 0
def getNumOfTestcases():
    return len(N)
def getTestCaseSize():
    global at
    at = int(input()) - 1
    return [(N[at],), (N[at],), (0,), (), ()], (1, 1)
def genTestCase(sizes, device="cuda"):
    x = torch.randn(N[at], generator=torch.Generator(device).manual_seed(at))
    return [x, torch.empty(N[at]), torch.empty(0), N[at], 0.1]
def baseline(x, y, none, n, factor):
    y.copy_(x * factor)
def check(sizes, original, target, expected, rtol=0, atol=0):
    return True
"""
REFERENCE = """
import torch
ARGUMENTS = ("x", "y", "none", "n", "factor")
OUTPUTS = ("y",)
def reference(x, y, none, n, factor):
    assert none.numel() == 0
    return {"y": x.double() * factor}
def honest(x, y, none, n, factor):
    return {"y": x * torch.tensor(factor)}
def workload(*args):
    return {"flops": 0, "bytes": 0, "dtype": "bf16"}
"""
# Prints the reports of report.json for the cases that it is to run, a clean one otherwise.
TOOL = """import json, os, sys
here = os.path.dirname(__file__)
plan = json.loads(open(here + "/report.json", encoding="utf-8").read())
name, command = sys.argv[2], sys.argv[7:]
assert sys.argv[1:7] == ["--tool", name, "--error-exitcode", "99", "--print-limit", "100"], sys.argv
with open(here + "/calls.jsonl", "a", encoding="utf-8") as log:
    log.write(json.dumps([name, [os.path.basename(word) for word in command[5:]]]) + "\\n")
code = os.spawnv(os.P_WAIT, command[0], command) if plan.get("run", True) else 0
found = [text for case, text in plan.get("found", {{}}).items() if any(word.endswith(case) for word in command)]
print("".join(found or []) or plan.get("clean", {clean!r}))
sys.exit(99 if found else code)
"""


class Kit:
    """A task of one kernel; `sizes` are its cases."""

    def __init__(self, root: Path, library: Path, memory: str) -> None:
        self.root, self.library, self.memory = root, library, memory
        (root / "toy").mkdir()
        (root / "toy" / "reference.py").write_text(REFERENCE, encoding="utf-8")
        self.tool = root / "compute-sanitizer"
        script = self.tool.with_suffix(".py")
        script.write_text(TOOL.format(clean=CLEAN), encoding="utf-8")
        # A shell starts it, since the path in a #! line must have no spaces.
        start = shlex.join([sys.executable, "-SE", str(script)])
        self.tool.write_text(f'#!/bin/sh\nexec {start} "$@"\n', encoding="utf-8")
        self.tool.chmod(self.tool.stat().st_mode | stat.S_IXUSR)

    def run(self, sizes: list[int], tools: tuple[str, ...] = ("memcheck",), **plan: object) -> list[Line]:
        """What `make sanitize` finds. plan: what the tool does: "run", "found" by the case, "clean"."""
        (self.root / "report.json").write_text(json.dumps(plan), encoding="utf-8")
        config = self.root / "config.py"
        config.write_text(CONFIG.replace("{sizes}", str(sizes)), encoding="utf-8")
        job = Job("toy", "cuda", "", "tiny", str(config), str(SOURCE), None, "cuda", 60.0, {}, True)
        target = Target(lambda job: self.library, self.memory, str(self.tool), self.deadline_s)
        return list(cli.judge(job, tools, target))

    deadline_s = 30.0

    def calls(self) -> list[object]:
        return [json.loads(line) for line in (self.root / "calls.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    """On the simulator."""
    monkeypatch.setattr(catalog, "TASKS", tmp_path)
    return Kit(tmp_path, maca_build.build(SOURCE, "wave64"), "host")


def test_a_clean_and_right_kernel_passes_in_one_process_per_tool(kit: Kit) -> None:
    lines = kit.run([4, 5], ("memcheck", "racecheck"))
    assert [(line.tool, line.case, line.errors, line.verdict) for line in lines] == [
        (tool, case, 0, Verdict.PASS) for tool in ("memcheck", "racecheck") for case in (1, 2)
    ]
    assert all(line.margin is not None and line.margin < 0.5 for line in lines)
    assert kit.calls() == [[tool, ["1", "case-1", "case-2"]] for tool in ("memcheck", "racecheck")]
    assert cli.conclude(lines, 1.0) is ExitCode.OK


def test_what_initcheck_looks_for_is_not_written_by_the_driver(kit: Kit) -> None:
    assert kit.run([4], ("initcheck",))[0].verdict is Verdict.PASS
    assert kit.calls() == [["initcheck", ["0", "case-1"]]]


def test_a_finding_belongs_to_its_case(kit: Kit) -> None:
    good, bad = kit.run([4, 5], found={"case-2": MEMCHECK})
    assert (good.errors, good.verdict) == (0, Verdict.PASS)
    assert (bad.errors, bad.verdict) == (769, Verdict.RUNTIME_ERROR)
    assert "769 errors" in bad.text()
    assert "in decode<(int)3, Tile<float>> (run_kernel.cu:61)" in bad.text()
    assert [folders for _, folders in kit.calls()] == [["1", "case-1", "case-2"], ["1", "case-1"], ["1", "case-2"]]  # type: ignore[misc]
    assert cli.conclude([good, bad], 1.0) is ExitCode.REJECTED


def test_a_race_of_warnings_alone_is_one(kit: Kit) -> None:
    (line,) = kit.run([4], ("racecheck",), found={"case-1": WARNING})
    assert (line.errors, line.verdict) == (1, Verdict.RACE)


def test_what_only_several_cases_show_is_not_lost(kit: Kit) -> None:
    script = kit.tool.with_suffix(".py")
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("found = [", "found = len(command) > 7 and ["), encoding="utf-8")
    *alone, together = kit.run([4, 5], found={"case-2": MEMCHECK})
    assert [line.verdict for line in alone] == [Verdict.PASS] * 2
    assert (together.case, together.errors, together.verdict) == (0, 769, Verdict.RUNTIME_ERROR)


def test_a_clean_report_of_a_run_in_which_nothing_ran_is_refused(kit: Kit) -> None:
    assert kit.run([4])[0].verdict is Verdict.PASS  # nor does what an earlier run left help
    (line,) = kit.run([4], run=False)
    assert (line.verdict, line.margin) == (Verdict.WRONG_ANSWER, None)
    assert "did not come to its end" in line.detail


def test_a_wrong_output_is_refused_though_the_tool_is_content(kit: Kit) -> None:
    good, bad = kit.run([4, 6])
    assert good.verdict is Verdict.PASS
    assert bad.verdict is Verdict.WRONG_ANSWER
    assert "NON_FINITE in run 1: y[5] = nan" in bad.detail
    assert len(kit.calls()) == 1


def test_a_run_that_has_no_summary_is_not_clean(kit: Kit) -> None:
    (line,) = kit.run([4], clean="========= COMPUTE-SANITIZER\n")
    assert (line.errors, line.verdict) == (None, Verdict.RUNTIME_ERROR)
    assert "no summary" in line.detail


def test_a_driver_that_dies_is_reported_with_its_case(kit: Kit) -> None:
    good, bad = kit.run([4, 7])
    assert good.verdict is Verdict.PASS
    assert (bad.errors, bad.verdict, bad.margin) == (None, Verdict.RUNTIME_ERROR, None)
    assert "it ended with code 9" in bad.detail


def test_an_allocation_is_of_just_its_size(kit: Kit) -> None:
    (line,) = kit.run([8])
    assert line.verdict is Verdict.RUNTIME_ERROR
    assert "driver: " in line.detail
    assert "y" in line.detail


def test_a_hang_ends_with_all_that_it_started(kit: Kit) -> None:
    kit.deadline_s = 0.5
    kit.tool.write_text("#!/bin/sh\nsleep 60 & echo $! > $(dirname $0)/pid; wait\n", encoding="utf-8")
    lines = kit.run([4, 5])
    assert [line.verdict for line in lines] == [Verdict.TIMEOUT] * 2
    pid = (kit.root / "pid").read_text(encoding="utf-8").strip()
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z"
    assert cli.conclude(lines, 1.0) is ExitCode.TIMEOUT


def test_a_file_that_does_not_compile_is_one_line(kit: Kit) -> None:
    def build(job: Job) -> Path:
        raise KernelFault(Verdict.COMPILE_ERROR, "run_kernel.cu(3): error: no")

    job = Job("toy", "cuda", "", "tiny", "", str(SOURCE), None, "cuda", 60.0, {}, True)
    lines = list(cli.judge(job, ("memcheck",), Target(build, "host", "", 1.0)))
    assert cli.conclude(lines, 1.0) is ExitCode.COMPILE_ERROR


# -- device memory ----------------------------------------------------------------------------------------------------

# Device memory that the host cannot touch by accident: an address is the real one plus 2^44. FAULT makes a fault.
RUNTIME = """
#include <cstdint>
#include <cstdlib>
#include <cstring>
static const uint64_t kFar = 1ull << 44;
static char* near(const void* p) { return (char*)((uint64_t)p - kFar); }
extern "C" {
int cudaMalloc(void** p, size_t n) { *p = (void*)((uint64_t)malloc(n) + kFar); return n > (1ull << 32) ? 2 : 0; }
int cudaFree(void* p) { free(near(p)); return 0; }
int cudaMemset(void* p, int byte, size_t n) { memset(near(p), byte, n); return 0; }
int cudaMemcpy(void* to, const void* from, size_t n, int kind) {
    if (kind == 1) memcpy(near(to), from, n);
    else if (kind == 2) memcpy(to, near(from), n);
    else return 21;
    return 0;
}
int cudaDeviceSynchronize() { return getenv("FAULT") ? 719 : 0; }
const char* cudaGetErrorString(int) { return "unspecified launch failure"; }
void run_kernel(const float* x, float* y, const void* none, int64_t n, float factor) {
    for (int64_t i = 0; i < n; ++i) ((float*)near(y))[i] = ((float*)near(x))[i] * factor + (none != nullptr);
}
}
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.cpp").write_text(RUNTIME, encoding="utf-8")
    library = folder / "libcudart.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(folder / "runtime.cpp"), "-o", str(library)], check=True)
    return library


def test_device_memory_by_libcudart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    monkeypatch.setattr(catalog, "TASKS", tmp_path)
    kit = Kit(tmp_path, runtime, str(runtime))
    (line,) = kit.run([1000])
    assert line.verdict is Verdict.PASS, line.text()
    monkeypatch.setenv("FAULT", "1")
    (line,) = kit.run([1000])
    assert line.verdict is Verdict.RUNTIME_ERROR
    assert "cudaDeviceSynchronize failed with error 719: unspecified launch failure" in line.detail


def test_the_driver_imports_no_torch() -> None:
    code = "import sys, harness.sanitize.driver; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=catalog.ROOT, capture_output=True, encoding="utf-8")
    assert done.stdout == "[]\n", done.stderr


# -- the machine ------------------------------------------------------------------------------------------------------


def test_without_a_gpu_or_the_tool_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KitError, match="needs an NVIDIA GPU and this is CPU") as caught:
        cli.find_target(devices.pick("cpu"), 1.0)
    assert caught.value.code is ExitCode.NEEDS_DEVICE
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cli, "_NVCC", tmp_path)
    with pytest.raises(KitError, match="compute-sanitizer is missing") as caught:
        cli.find_target(NVIDIA, 1.0)
    assert caught.value.code is ExitCode.ENVIRONMENT


def test_the_tools_of_the_machine_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = tmp_path / "cuda-13.0"
    for name in ("bin/nvcc", "bin/compute-sanitizer"):
        (toolkit / name).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / name).touch()
        (toolkit / name).chmod(0o755)
    (toolkit / "targets" / "x86_64-linux" / "lib").mkdir(parents=True)
    cudart = toolkit / "targets" / "x86_64-linux" / "lib" / "libcudart.so.13"
    cudart.touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    target = cli.find_target(NVIDIA, 7.0)
    assert (target.memory, target.tool) == (str(cudart), str(toolkit / "bin" / "compute-sanitizer"))
    compiled = []
    monkeypatch.setattr(cuda, "build_for_gpu", lambda *args: compiled.append(args) or tmp_path / "lib.so")
    job = Job("toy", "cuda", "hopper", "tiny", "", str(SOURCE), None, "cuda", 60.0, {}, True)
    assert target.build(job) == tmp_path / "lib.so"
    assert compiled == [(SOURCE, NVIDIA, "hopper")]


def test_torchs_own_runtime_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12"
    place.parent.mkdir(parents=True)
    place.touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia")]})
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None)
    assert cli.find_cudart(None) == place
    place.unlink()
    monkeypatch.setattr(cli.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(KitError, match="libcudart is missing"):
        cli.find_cudart(None)
