"""Judge packages of every kind seen: what must work works, and what is the package's fault is named as such."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import foreign
from harness.package import BaselineUnavailable, Case, Package, PackageError, load_package

PACKAGES = Path(__file__).parent / "packages"


def load(name: str) -> Package:
    return load_package(PACKAGES / f"{name}.py")


def written(tmp_path: Path, source: str) -> Path:
    """`plain` with some of its functions replaced by `source`."""
    path = tmp_path / "testcase_config.py"
    names = "SHAPES, baseline, check, genTestCase, getNumOfTestcases, getTestCaseSize"
    path.write_text(f"from packages.plain import {names}\n{source}\n", encoding="utf-8")
    return path


def bits(args: list[Any]) -> list[Any]:
    """An argument list in a form that compares by bits: NaN, -0.0 and fp8 included."""
    return [
        (arg.dtype, tuple(arg.shape), arg.reshape(-1).view(torch.uint8).tolist())
        if isinstance(arg, torch.Tensor)
        else (type(arg), arg)
        for arg in args
    ]


def fault(name_or_path: str | Path) -> str:
    """The sentence with which a package that cannot be used is refused, at the first step that fails."""

    def use() -> None:
        package = load(name_or_path) if isinstance(name_or_path, str) else load_package(name_or_path)
        package.count()
        case = package.case(1)
        args = package.generate(case, "cpu")
        good = package.run_baseline(case, args)
        package.check(case, args, good, good)
        package.limit(case, args)
        package.designed_vram_gib()

    with pytest.raises(PackageError) as caught:
        use()
    message = str(caught.value)
    assert "Traceback" not in message
    assert "\n" not in message
    return f"{caught.value.function}: {message}"


def run(package: Package, case_id: int = 1) -> tuple[bool, str]:
    """The package's check on its own baseline: everything from loading to the verdict works."""
    case = package.case(case_id)
    args = package.generate(case, "cpu")
    baseline = package.run_baseline(case, args)
    return package.check(case, args, baseline, baseline)


# -- ids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["plain", "ids_strict", "ids_fallback", "ids_zero", "ids_zero_fallback", "id_raw", "id_early_stdin"]
)
def test_every_case_is_reached_whatever_the_ids_are(name: str) -> None:
    package = load(name)
    assert package.count() == 3
    assert [package.case(i).sizes[0] for i in (3, 1, 2)] == [(6, 2), (4,), (8,)]
    assert package.case(2) == Case(2, [(8,), (8,), ()], 3, 100, "")


def test_the_id_is_one_line_on_descriptor_0_and_then_the_end_of_the_file() -> None:
    package = load("id_raw")
    package.case(2)
    assert package._module.RECEIVED[-1] == b"2\n"


def test_stdin_is_put_back_and_leaks_no_descriptor() -> None:
    package, before = load("plain"), (sys.stdin, os.fstat(0).st_ino, len(os.listdir("/proc/self/fd")))
    for _ in range(3):
        package.case(1)
    assert (sys.stdin, os.fstat(0).st_ino, len(os.listdir("/proc/self/fd"))) == before


def test_stdin_may_have_been_closed() -> None:
    saved = os.dup(0)
    os.close(0)
    try:
        assert load("plain").case(2).id == 2
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
    finally:
        os.dup2(saved, 0)
        os.close(saved)


def test_a_case_that_is_not_there_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match=r"cases 1 to 3"):
        load("plain").case(4)


def test_labels(tmp_path: Path) -> None:
    package = load_package(written(tmp_path, 'CASE_LABELS = ("small", "wide")'))
    assert [package.case(i).label for i in (1, 2, 3)] == ["small", "wide", ""]


# -- arguments -----------------------------------------------------------------------------------------------------


def test_one_positional_argument() -> None:
    package = load("one_positional")
    assert run(package) == (True, "")
    assert package.generate(package.case(1), "meta")[0].device.type == "meta"  # brought to the device afterwards


def test_a_scalar_may_be_a_0_dim_tensor() -> None:
    package = load("scalar_tensor")
    args = package.generate(package.case(1), "cpu")
    assert args[2].shape == ()
    assert run(package) == (True, "")
    assert package.notes == []


def test_float_bool_none_and_numpy_arguments_with_warm_up_0_and_one_timed_call() -> None:
    package = load("odd_scalars")
    case = package.case(1)
    args = package.generate(case, "cpu")
    assert (case.warmup, case.iters) == (0, 1)
    assert args[1:] == [0.5, True, None, 3]
    assert [type(arg) for arg in args[1:]] == [float, bool, type(None), int]
    assert package.run_baseline(case, args)[0].tolist() == [0.5] * 4  # None: the clones are the result
    assert args[0].tolist() == [1.0] * 4


def test_odd_dtypes() -> None:
    package = load("odd_dtypes")
    assert run(package) == (True, "")
    case = package.case(1)
    args = package.generate(case, "cpu")
    assert [arg.dtype for arg in args] == list(package._module.DTYPES)
    assert bits(args) == bits(package.generate(case, "cpu"))


def test_several_outputs_and_input_class() -> None:
    package = load("several_outputs")
    assert (package.outputs, package.inout) == ((1, 2, 3), (3,))
    case = package.case(1)
    args = package.generate(case, "cpu")
    baseline = package.run_baseline(case, args)
    assert baseline[0] is args[0]  # INPUT is shared
    assert baseline[1] is not args[1]
    assert baseline[2].item() == 8
    assert args[2].item() == 1


def test_an_output_keeps_its_generated_contents_for_the_baseline() -> None:
    package = load("accumulates")
    assert run(package) == (True, "")
    assert (package.outputs, package.inout) == ((1,), ())
    assert (load("plain").outputs, load("plain").inout) == (None, ())


def test_a_shape_other_than_announced_is_noted_for_that_case_only() -> None:
    package = load("other_shapes")
    case = package.case(1)
    package.generate(case, "cpu")
    assert package.notes[0] == "argument 1 is announced as (4,) and generated as (5,)"
    package.case(2)
    assert package.notes == []


# -- seeds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "no_seed",
        "seed_at_import",
        "seed_global",
        "seed_imported_generator",
        "seed_module_generator",
        "seed_python_numpy",
    ],
)
def test_a_shift_gives_other_data_of_the_same_shapes(name: str) -> None:
    package = load(name)
    case = package.case(2)
    args, again, other, third = (package.generate(case, "cpu", shift) for shift in (0, 0, 7919, 7920))
    tensors = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    assert [args[i].shape for i in tensors] == [other[i].shape for i in tensors]
    assert bits(args) == bits(again)
    assert len({repr(bits(each)) for each in (args, other, third)}) == 3


def test_every_source_of_random_numbers_is_shifted() -> None:
    package = load("seed_python_numpy")
    args, other = (package.generate(package.case(1), "cpu", shift) for shift in (0, 1))
    assert [torch.equal(a, b) for a, b in zip(args, other, strict=True)] == [False, False, False]


def test_a_shift_of_s_is_the_seed_plus_s() -> None:
    package = load("plain")
    shifted = package.generate(package.case(1), "cpu", 5)[0]
    generator = torch.Generator().manual_seed(20260610 + 1 + 5)
    assert torch.equal(shifted, torch.rand(4, generator=generator))


def test_one_shift_does_not_become_two(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.manual_seed seeds the GPUs by calling torch.cuda.manual_seed_all, which is replaced as well.
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seen.append)
    with foreign.seeds(3):
        torch.manual_seed(10)
        torch.cuda.manual_seed_all(20)
    assert seen == [13, 23]
    assert torch.initial_seed() == 13


def test_a_shift_that_reaches_nothing_changes_nothing() -> None:
    package = load("seed_unreachable")
    case = package.case(1)
    assert bits(package.generate(case, "cpu")) == bits(package.generate(case, "cpu", 7919))


def test_the_global_generators_are_put_back() -> None:
    torch.manual_seed(1)
    random.seed(1)
    before = (torch.get_rng_state(), random.getstate())
    package = load("seed_python_numpy")
    package.generate(package.case(1), "cpu", 7)
    package = load("seed_at_import")
    package.generate(package.case(1), "cpu", 7)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_the_seeding_functions_are_put_back() -> None:
    names = [(torch, "Generator"), (torch, "manual_seed"), (torch.cuda, "manual_seed"), (random, "seed")]
    before = [getattr(holder, name) for holder, name in names]
    package = load("exits")
    case = package.case(1)
    with pytest.raises(PackageError):
        package.generate(case, "cpu", 1)
    assert [getattr(holder, name) for holder, name in names] == before
    with foreign.seeds(1):
        assert torch.Generator is not before[0]


@pytest.mark.parametrize(
    ("seed", "bits", "moved"),
    [(5, 64, 7), (None, 64, None), (2**64 - 1, 64, 1), (2**32 - 1, 32, 1), ([1], 64, [1, 2]), ("a", 64, "'a'+2")],
)
def test_moved_seeds_stay_what_the_function_takes(seed: Any, bits: int, moved: Any) -> None:
    with foreign.seeds(2):
        assert foreign._seeds.seed(seed, bits) == moved
    assert foreign._seeds.seed(seed, bits) == seed


# -- baseline and check --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["check_plain", "check_demands", "check_prints", "plain"])
def test_checks_accept_what_is_right_and_reject_what_is_not(name: str) -> None:
    package = load(name)
    assert run(package)[0] is True
    case = package.case(1)
    args = package.generate(case, "cpu")
    assert package.check(case, args, args, package.run_baseline(case, args))[0] is False


def test_what_check_prints_is_returned_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    package = load("check_prints")
    case = package.case(1)
    args = package.generate(case, "cpu")
    good, printed = package.check(case, args, args, package.run_baseline(case, args))
    assert (good, printed) == (False, "compared\nmax error too large")
    assert capsys.readouterr() == ("", "")


def test_torch_flags_and_folder_belong_to_either_side() -> None:
    def flags() -> tuple[Any, ...]:
        return torch.backends.cudnn.benchmark, torch.get_default_dtype(), torch.is_grad_enabled(), os.getcwd()

    before = flags()
    package = load("toggles_flags")
    for _ in range(2):
        assert run(package) == (True, "")
        assert not torch.backends.cuda.matmul.allow_tf32
        assert flags() == before
    # The second call of the baseline finds what the first one, and the import, had set.
    assert package._module.SEEN == [(True, False), (True, True)]


def test_the_newer_tf32_switch_is_put_back_too() -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has only allow_tf32")
    before = foreign.TorchFlags()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    before.apply()
    assert torch.backends.cuda.matmul.allow_tf32 is False
    assert foreign.TorchFlags()._flags == before._flags


def test_a_baseline_finds_the_files_beside_it() -> None:
    assert run(load("baseline_side_file")) == (True, "")


@pytest.mark.parametrize("name", ["baseline_import", "baseline_swallowed"])
def test_a_baseline_whose_library_is_missing_is_unavailable(name: str) -> None:
    package = load(name)
    case = package.case(1)
    with pytest.raises(BaselineUnavailable) as caught:
        package.run_baseline(case, package.generate(case, "cpu"))
    assert caught.value.module == "a_module_that_is_nowhere"
    assert "needs the Python module a_module_that_is_nowhere, which is not installed here" in str(caught.value)


def test_a_timed_baseline_has_its_own_arguments_and_its_faults_are_named() -> None:
    package = load("plain")
    case = package.case(1)
    args = package.generate(case, "cpu")
    with package.baseline_call(case, args) as call:
        call()
    assert args[1].count_nonzero() == 0
    broken = load("baseline_fails")
    with pytest.raises(PackageError, match="KeyError: 'missing'"), broken.baseline_call(case, args) as call:
        call()


@pytest.mark.parametrize(
    ("name", "expected", "gib"),
    [
        ("plain", None, None),
        ("workload_sizes", {"flops": 8, "memory_bytes": 32, "dtype": None}, 48.0),
        ("workload_timing", {"flops": 107, "memory_bytes": 32, "dtype": "bf16"}, 16.5),
        ("workload_state", {"flops": 1000, "memory_bytes": 1, "dtype": "int8"}, 24.0),
    ],
)
def test_workload_and_memory(name: str, expected: dict[str, Any] | None, gib: float | None) -> None:
    package = load(name)
    case = package.case(1)
    args = package.generate(case, "cpu")
    package.case(2)  # another case is read in between: the package's state must follow
    assert package.limit(case, args) == expected
    assert package.designed_vram_gib() == gib


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "function", "text"),
    [
        (
            "inside_try",
            "getNumOfTestcases",
            "the file swallowed ModuleNotFoundError: No module named 'a_module_that_is_nowh",
        ),
        ("torch_none", "genTestCase", "the file set torch = None after a failed import, which needs a_module_that_is"),
        (
            "wrong_unpack",
            "genTestCase",
            "raised ValueError: too many values to unpack (expected 2), line 8",
        ),
        ("exits", "genTestCase", "genTestCase raised SystemExit: no such device, line 9"),
        ("reads_id_twice", "genTestCase", "genTestCase raised EOFError"),
        ("baseline_fails", "baseline", "baseline raised KeyError: 'missing', line 7"),
        ("check_none", "check", "check returned None, not True or False"),
    ],
)
def test_faults_name_function_exception_and_file(name: str, function: str, text: str) -> None:
    message = fault(name)
    assert message.startswith(f"{function}: tests/packages/{name}.py: ")
    assert text in message


@pytest.mark.parametrize(
    ("source", "function", "text"),
    [
        ("def (:", "import", "SyntaxError"),
        ("raise SystemExit(3)", "import", "importing it raised SystemExit: 3, line 2"),
        ("import nowhere_at_all", "import", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("CASE = int(input())", "import", "EOFError"),
        ("del check", "check", "check is missing"),
        ("check = baseline = None", "baseline", "baseline, check are missing"),
        ("def getNumOfTestcases(): return 0", "getNumOfTestcases", "returned 0, not a count of cases"),
        ("def getNumOfTestcases(): return 10**9", "getNumOfTestcases", "returned 1000000000 cases"),
        ("def getNumOfTestcases(): return 10**5000", "getNumOfTestcases", "returned a int cases"),
        ("def getNumOfTestcases(): return 'three'", "getNumOfTestcases", "returned 'three'"),
        ("def getTestCaseSize(): return [(4,)]", "getTestCaseSize", "not ([shapes], (warm-up, iterations))"),
        ("def getTestCaseSize(): return [(4,)], (3, 0)", "getTestCaseSize", "3 warm-up and 0 timed calls for id 1"),
        ("def getTestCaseSize(): raise OSError('gone')", "getTestCaseSize", "getTestCaseSize raised OSError: gone"),
        ("def genTestCase(sizes, device): return None", "genTestCase", "returned None, not a list of arguments"),
        ("def genTestCase(sizes, device): return [{}]", "genTestCase", "returned a dict as argument 1"),
        ("def genTestCase(sizes, device): 1 / 0", "genTestCase", "ZeroDivisionError"),
        ("INPUT_CLASS = ['INPUT']", "INPUT_CLASS", "INPUT_CLASS has 1 entries for 3 arguments"),
        ("INPUT_CLASS = ['IN', 'OUT', 'IN']", "INPUT_CLASS", "'IN', which is none of INPUT, OUTPUT, INOUT"),
        ("INPUT_CLASS = 7", "INPUT_CLASS", "INPUT_CLASS is 7, not a list"),
        ("def getWorkload(sizes): return 5", "getWorkload", "getWorkload returned 5"),
        ("def getWorkload(sizes): return {'flops': 1}", "getWorkload", "not flops and memory_bytes"),
        ("DESIGNED_VRAM_SIZE = 'large'", "DESIGNED_VRAM_SIZE", "'large', not a number of GiB"),
    ],
)
def test_broken_packages_are_refused_in_one_sentence(tmp_path: Path, source: str, function: str, text: str) -> None:
    message = fault(written(tmp_path, source))
    assert message.startswith(f"{function}: {tmp_path}")
    assert text in message


def test_files_that_are_no_package(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "nowhere.py")
    binary = tmp_path / "binary.py"
    binary.write_bytes(b"\x00\xff\xfe" * 100)
    assert "importing it raised SyntaxError" in fault(binary)
    empty = tmp_path / "empty.py"
    empty.write_bytes(b"")
    assert "getNumOfTestcases, getTestCaseSize, genTestCase, baseline, check are missing" in fault(empty)


def test_out_of_memory_and_device_faults_are_not_the_packages(tmp_path: Path) -> None:
    for error in ("MemoryError()", "RuntimeError('CUDA error: an illegal memory access was encountered')"):
        package = load_package(written(tmp_path, f"def genTestCase(sizes, device): raise {error}"))
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            package.generate(package.case(1), "cpu")
        assert not isinstance(caught.value, PackageError)


def test_an_edited_file_is_read_again_and_leaves_no_bytecode(tmp_path: Path) -> None:
    path = written(tmp_path, 'CASE_LABELS = ("one",)')
    assert load_package(path).case(1).label == "one"
    written(tmp_path, 'CASE_LABELS = ("two",)')  # the same size, within the same second
    assert load_package(path).case(1).label == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["testcase_config.py"]
