"""Loading Python submissions: what is imported, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.devices import Device
from harness.languages import python_source
from harness.verdict import ExitCode, KernelFault, KitError, Verdict

ROOT = Path(__file__).resolve().parent.parent
CPU = Device("cpu", "cpu", "CPU", "c500")
HOPPER = Device("cuda", "cuda", "a Hopper", "sm90")
AMPERE = Device("cuda", "cuda", "an Ampere", "sm80")
GOOD = 'TUNING = {"c500": 1, "sm90": 2}\nDEVICE = "c500"\n\n\ndef run_kernel(q, k, output):\n    return DEVICE\n'


def write(folder: Path, text: str | bytes, name: str = "run_kernel.py") -> Path:
    path = folder / name
    path.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
    return path


def refused(path: Path, device: Device = CPU) -> str:
    """The sentence with which a file is refused as COMPILE_ERROR."""
    with pytest.raises(KernelFault) as caught:
        python_source.load_run_kernel(path, ("q", "k", "output"), device)
    assert caught.value.verdict is Verdict.COMPILE_ERROR
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(("device", "row"), [(CPU, "c500"), (HOPPER, "sm90"), (AMPERE, "c500")])
def test_device_is_set_to_the_tuning_row_where_there_is_one(tmp_path, device, row):
    assert python_source.load_run_kernel(write(tmp_path, GOOD), ("q", "k", "output"), device)(1, 2, 3) == row


def test_a_tuning_row_can_be_asked_for(tmp_path):
    path, arguments = write(tmp_path, GOOD), ("q", "k", "output")
    assert python_source.load_run_kernel(path, arguments, CPU, {"tuning": "sm90"})(1, 2, 3) == "sm90"
    with pytest.raises(KitError, match="TUNING has no row 'sm91'"):
        python_source.load_run_kernel(path, arguments, CPU, {"tuning": "sm91"})


def test_each_load_is_a_module_of_its_own_and_sees_an_edit_at_once(tmp_path):
    path = write(tmp_path, "calls = []\n\n\ndef run_kernel(q):\n    calls.append(q)\n    return len(calls)\n")
    first = python_source.load_run_kernel(path, ("q",), CPU)
    assert (first(1), first(1)) == (1, 2)
    assert python_source.load_run_kernel(path, ("q",), CPU)(1) == 1
    stat = path.stat()
    write(tmp_path, path.read_text(encoding="utf-8").replace("len(calls)", "-1 * (77)"))  # same size, same second
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert python_source.load_run_kernel(path, ("q",), CPU)(1) == -77
    assert not list(tmp_path.rglob("*.pyc"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\ndef run_kernel(:\n", "run_kernel.py:2: invalid syntax: def run_kernel(:"),
        ("x = 1\n\ny = x / 0\n", "run_kernel.py:3: ZeroDivisionError: division by zero"),
        ("import no_such_module\n", "run_kernel.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys\nsys.exit(3)\n", "run_kernel.py:2: SystemExit: 3"),
        ("def f():\n    raise ValueError('a\\nb')\n\n\nf()\n", "run_kernel.py:2: ValueError: a"),
        ("x = 1\n", "run_kernel.py: expected run_kernel(q, k, output), found no run_kernel."),
        (
            "run_kernel = print\n",
            "run_kernel.py: expected run_kernel(q, k, output) as a plain function, "
            "found run_kernel as a builtin_function_or_method.",
        ),
        (
            "def run_kernel(q, output): ...\n",
            "run_kernel.py:1: expected run_kernel(q, k, output), found run_kernel(q, output): missing k.",
        ),
        (
            "def run_kernel(q, k, output, scale): ...\n",
            "run_kernel.py:1: expected run_kernel(q, k, output), found run_kernel(q, k, output, scale): "
            "unexpected scale.",
        ),
        (
            "\ndef run_kernel(q, output, k): ...\n",
            "run_kernel.py:2: expected run_kernel(q, k, output), found run_kernel(q, output, k): "
            "wrong order, output stands where k belongs.",
        ),
        (
            "def run_kernel(q, *rest): ...\n",
            "run_kernel.py:1: expected run_kernel(q, k, output), found run_kernel(q, *rest): "
            "missing k, output; unexpected *rest.",
        ),
        (
            "def run_kernel(q, k, *, output): ...\n",
            "run_kernel.py:1: expected run_kernel(q, k, output), found run_kernel(q, k, output): "
            "keyword-only parameters cannot be passed by position.",
        ),
    ],
)
def test_a_file_that_does_not_load_is_refused_in_one_sentence(tmp_path, text, sentence):
    assert refused(write(tmp_path, text)) == sentence


@pytest.mark.parametrize("content", [b"\xff\xfe\x00x", b"x = 1\x00\n"])
def test_a_file_that_is_no_text_is_refused(tmp_path, content):
    assert refused(write(tmp_path, content)).startswith("run_kernel.py")


def test_a_missing_file_is_the_users_mistake(tmp_path):
    with pytest.raises(KitError, match="no such file") as caught:
        python_source.load_run_kernel(tmp_path / "run_kernel.py", ("q",), CPU)
    assert caught.value.code is ExitCode.MISSING_FILE


# -------------------------------------------------------------------------------------------------------- Triton

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x * 2)


def run_kernel(x, y):
    double[(triton.cdiv(x.shape[0], 32),)](x, y, x.shape[0], BLOCK=32, num_warps=4)
"""
IN_BOUNDS = KERNEL.replace("x * 2)", "x * 2, mask=i < n)")

CHILD = """
import json, sys
from pathlib import Path
import torch
from harness.devices import Device
from harness.languages import load
from harness.verdict import KernelFault, KitError
for kind, file in zip(sys.argv[1::2], sys.argv[2::2]):
    x, y = torch.arange(40.0), torch.zeros(40)
    try:
        submission = load("triton", Path(file), ("x", "y"), Device(kind, kind, "", "c500"))
        submission.run([x, y])
        print(json.dumps(["ok", bool((y == 2 * x).all())]))
    except KernelFault as fault:
        print(json.dumps([fault.verdict.value, fault.message]))
    except KitError as error:
        print(json.dumps(["KitError", str(error)]))
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def in_child(program: str, *arguments: str, interpret: bool) -> list[list[object]]:
    """Run a program in a process in which Triton interprets, or does not; its lines of JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_interpreted_submissions_and_their_faults(tmp_path):
    files = [
        write(tmp_path, IN_BOUNDS, "good.py"),
        write(tmp_path, KERNEL, "outside.py"),
        write(tmp_path, IN_BOUNDS.replace("x * 2", "x * two"), "undefined.py"),
        write(tmp_path, IN_BOUNDS.replace("x.shape[0], BLOCK", "x.height, BLOCK"), "host.py"),
        write(tmp_path, IN_BOUNDS.replace("(x, y):", "(y, x):"), "swapped.py"),
    ]
    arguments = [word for file in files for word in ("cpu", str(file))]
    *results, on_gpu = in_child(CHILD, *arguments, "cuda", str(files[0]), interpret=True)
    good, outside, undefined, host, swapped = results
    assert on_gpu == ["KitError", "TRITON_INTERPRET must not be set to run on cuda."]
    assert good == ["ok", True]
    assert outside == [
        "OUT_OF_BOUNDS",
        "outside.py:11: double, program (1, 0, 0): store outside every argument (and 23 more of this access); "
        "nearest is y_ptr (40) at element 40, which has elements 0 to 39.",
    ]
    assert undefined == ["RUNTIME_ERROR", "undefined.py:11: NameError: name 'two' is not defined"]
    assert host == ["AttributeError", "'Tensor' object has no attribute 'height'"]  # the submission's own
    assert swapped[0] == "COMPILE_ERROR"


COMPILER = """
import json, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources
from harness.devices import Device
from harness.languages import python_source, triton as language
from harness.verdict import KitError
path = Path(sys.argv[1])
names = vars(python_source.load_module(path, Device("cuda", "cuda", "", "c500")))
signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
try:
    triton.compile(ASTSource(names["double"], signature, {(3,): 32}), target=GPUTarget("cuda", 80, 32))
except Exception as error:
    fault = language._fault(error, path, names)
    print(json.dumps([fault.verdict.value, fault.message]))
fault = language._fault(OutOfResources(98304, 65536, "shared memory"), path, names)
print(json.dumps([fault.verdict.value, fault.message]))
print(json.dumps([language._fault(ValueError("ordinary"), path, names)]))
try:
    language.load(path, ("x", "y"), Device("cpu", "cpu", "CPU", "c500"), "", {})
except KitError as error:
    print(json.dumps([str(error)]))
"""


def test_what_the_compiler_refuses_gets_a_line_and_a_name(tmp_path):
    path = write(tmp_path, IN_BOUNDS.replace("x * 2", "x * two"))
    compile_error, resources, ordinary, on_cpu = in_child(COMPILER, str(path), interpret=False)
    assert compile_error[0] == "COMPILE_ERROR"
    assert str(compile_error[1]).startswith("run_kernel.py:11: ")
    assert "two is not defined" in str(compile_error[1])
    assert resources[0] == "RESOURCE_LIMIT"
    assert "98304" in str(resources[1])
    assert "65536" in str(resources[1])
    assert ordinary == [None]
    assert on_cpu == ["TRITON_INTERPRET must be set to 1 before Triton is imported to run on cpu."]
