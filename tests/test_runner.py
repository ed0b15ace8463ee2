"""The runner against submissions that hang, crash, flood, fork and lie. Every worker is a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import catalog, process
from harness.process import Capture, environment
from harness.runner import Job, run_jobs
from harness.verdict import CaseResult, ExitCode, KitError, Verdict

SUBMISSIONS = Path(__file__).parent / "submissions"
STUB = (sys.executable, str(SUBMISSIONS / "stub_worker.py"))
PASS = Verdict.PASS


def job(name: str, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "task": "ragged_prefill",
        "language": "triton",
        "variant": "",
        "suite": "tiny",
        "config": "testcase_config.py",
        "submission": str(SUBMISSIONS / f"{name}.py"),
        "cases": None,
        "device": "cpu",
        "deadline_s": 30.0,
        "settings": {},
        "required": False,
    }
    return Job(**{**fields, **changes})


def run(name: str, **changes: Any) -> list[CaseResult]:
    """All results of one submission, after checking that each case is there once and case 1 and 3 are untouched."""
    arrived: list[CaseResult] = []
    results = run_jobs([job(name, **changes)], arrived.append, command=STUB)
    assert sorted(arrived, key=lambda result: result.case) == results
    assert [result.case for result in results] == [1, 2, 3]
    assert [(results[i].judge, results[i].strict) for i in (0, 2)] == [(PASS, PASS)] * 2
    return results


def second(name: str, **changes: Any) -> tuple[Verdict, str]:
    """Verdict and sentence of case 2."""
    result = run(name, **changes)[1]
    assert result.judge is result.strict
    assert result.judge is PASS or result.label == "case 2"
    return result.strict, result.detail


def alive(pid: int) -> bool:
    """False for a process that is gone or a zombie (nobody may be there to reap an orphan)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def pid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(path))
    return path


# -- output --------------------------------------------------------------------------------------------------------


def test_what_each_case_prints_is_shown_with_it() -> None:
    for result in run("good"):
        lines = result.output.splitlines()
        i = result.case
        assert sorted(lines) == sorted([f"python {i} \u2713", f"error {i}", f"libc {i}", f"write {i}"])
        assert result.label == f"case {i}"


def test_a_flood_of_output_is_stopped_and_both_ends_are_kept() -> None:
    results = run("prints_10_mb")
    assert (results[1].judge, results[1].strict) == (Verdict.OUTPUT_LIMIT, Verdict.OUTPUT_LIMIT)
    assert results[1].detail == "printed more than 1048576 bytes in phase run"
    assert results[1].output.startswith("0" * 99 + "\n" + "0" * 98 + "1\n")
    assert "bytes left out" in results[1].output
    assert len(results[1].output) < process.KEPT + 100
    assert results[2].output == ""


def test_a_mebibyte_may_be_printed() -> None:
    result = run("prints_below_limit")[1]
    assert result.strict is PASS
    assert result.output.startswith("firstxxx")
    assert result.output.endswith("xxxlast\n")
    assert f"[{1_000_010 - process.KEPT} bytes left out]" in result.output


@pytest.mark.parametrize("chunk", [1, 7, process.KEPT // 2, process.KEPT, 3 * process.KEPT])
def test_a_capture_keeps_head_and_tail_whatever_the_chunks_are(chunk: int) -> None:
    data = bytes(97 + i % 26 for i in range(process.KEPT + 26)) if chunk > 1 else b"abc"
    capture = Capture()
    for start in range(0, len(data), chunk):
        capture.add(data[start : start + chunk])
    text = data.decode()
    half = process.KEPT // 2
    assert capture.text() == (f"{text[:half]}\n[26 bytes left out]\n{text[-half:]}" if chunk > 1 else "abc")
    assert capture.count == len(data)


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_case_that_never_ends() -> None:
    started = time.monotonic()
    assert second("never_ends", deadline_s=1.0) == (Verdict.TIMEOUT, "stopped in phase run after 1 s")
    assert time.monotonic() - started < 20


def test_the_deadline_is_for_all_phases_together() -> None:
    verdict, detail = second("many_phases", deadline_s=1.2)
    assert verdict is Verdict.TIMEOUT
    assert detail.endswith("after 1.2 s")


def test_a_case_that_ignores_term_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.2)
    assert second("ignores_term", deadline_s=1.0) == (Verdict.TIMEOUT, "stopped in phase run after 1 s")


def test_compiling_has_an_allowance_of_its_own() -> None:
    verdict, detail = second("compiles_slowly", deadline_s=1.0, settings={"startup_s": 3.0})
    assert (verdict, detail) == (Verdict.TIMEOUT, "stopped in phase compile after 3 s")


@pytest.mark.parametrize(
    ("name", "verdict", "detail"),
    [
        ("exits_at_once", Verdict.RUNTIME_ERROR, "the process ended with exit status 0 in phase run, before it gave"),
        ("segfaults", Verdict.RUNTIME_ERROR, "the process was killed by SIGSEGV in phase run, before it gave a result"),
        ("aborts", Verdict.RUNTIME_ERROR, "the process was killed by SIGABRT in phase run, before it gave a result"),
        ("calls_exit", Verdict.RUNTIME_ERROR, "calls_exit.py:8 (run_kernel): it called exit(0), in phase run"),
        (
            "raises",
            Verdict.RUNTIME_ERROR,
            "raises.py:10 (run_kernel), raises.py:5 (pick): KeyError: 'missing', in phase run",
        ),
        ("out_of_memory", Verdict.OUT_OF_MEMORY, "out of memory in phase run: MemoryError"),
        ("closes_descriptors", Verdict.RUNTIME_ERROR, "the process ended with exit status 1 in phase run, before"),
        ("closes_output", PASS, ""),
        ("writes_garbage", PASS, ""),
        ("forks_and_returns", PASS, ""),
    ],
)
def test_whatever_happens_in_a_case_is_named_and_the_others_still_run(name: str, verdict: Verdict, detail: str) -> None:
    found, said = second(name)
    assert (found, said[: len(detail)]) == (verdict, detail)


def test_what_was_printed_before_a_crash_is_kept() -> None:
    assert run("exits_at_once")[1].output == "goodbye\n"
    assert "run_kernel" in run("segfaults")[1].output  # the interpreter's own account of where it was


def test_a_worker_that_dies_between_cases_is_replaced() -> None:
    verdict, detail = run_jobs([job("dies_in_a_thread", cases=[2, 3])], lambda result: None, command=STUB)[0:2]
    assert verdict.strict is Verdict.RUNTIME_ERROR
    assert "exit status 9 in phase run" in verdict.detail
    assert detail.strict is PASS


def test_a_lost_device_means_a_fresh_worker() -> None:
    first, second_, third = (result.output for result in run("loses_the_device"))
    assert first == second_ != third


@pytest.mark.parametrize("cases", [None, [1, 3]])
def test_a_file_that_kills_its_loader_is_tried_once(cases: list[int] | None) -> None:
    results = run_jobs([job("dies_when_loaded", cases=cases)], lambda result: None, command=STUB)
    assert [result.case for result in results] == (cases or [1, 2, 3])
    assert {(result.strict, result.detail) for result in results} == {
        (Verdict.RUNTIME_ERROR, "the process ended with exit status 3 in phase load, before it gave a result")
    }
    assert [result.output for result in results] == ["loading\n", *[""] * (len(results) - 1)]


def test_a_worker_that_cannot_even_start(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise SystemExit('no module')")
    (result,) = run_jobs([job("good")], lambda result: None, command=command)
    assert (result.case, result.strict) == (0, Verdict.RUNTIME_ERROR)
    assert "exit status 1 in phase start" in result.detail
    assert result.output == "no module\n"


def test_a_file_that_is_missing_fails_every_case() -> None:
    results = run_jobs([job("nowhere")], lambda result: None, command=STUB)
    assert [result.strict for result in results] == [Verdict.RUNTIME_ERROR] * 3
    assert "FileNotFoundError" in results[0].detail


def test_cases_that_are_not_there_are_refused_before_any_runs() -> None:
    arrived: list[CaseResult] = []
    jobs = [job("good", cases=[3, 4, 5, 6, 9]), job("good", cases=[3, 4, 5, 6, 9], variant="other")]
    with pytest.raises(KitError) as caught:
        run_jobs(jobs, arrived.append, parallel=2, command=STUB)
    assert str(caught.value) == "CASES=4-6,9: no such case; testcase_config.py has cases 1 to 3."
    assert caught.value.code is ExitCode.MISSING_FILE
    assert arrived == []


def test_cases_that_one_suite_of_several_lacks_are_skipped_there() -> None:
    jobs = [job("good", cases=[3, 4], required=True), job("good", cases=[3, 4], config="four cases.py")]
    results = run_jobs(jobs, lambda result: None, command=STUB)
    assert [(result.case, result.strict, result.required) for result in results] == [
        (3, PASS, True),
        (4, Verdict.SKIPPED, True),
        (3, PASS, False),
        (4, PASS, False),
    ]
    assert results[1].detail == "there is no case 4: testcase_config.py has cases 1 to 3."


@pytest.mark.parametrize("cases", [[4, 5], [3, 4, 5], [5]])
def test_a_case_that_no_suite_has_is_refused_when_the_others_have_run(cases: list[int]) -> None:
    arrived: list[CaseResult] = []
    jobs = [job("good", cases=cases), job("good", cases=cases, config="four cases.py")]
    with pytest.raises(KitError, match="CASES=5: no such case; none of these suites has it") as caught:
        run_jobs(jobs, arrived.append, command=STUB)
    assert caught.value.code is ExitCode.MISSING_FILE
    assert sorted(result.case for result in arrived if result.ok) == {2: [4], 3: [3, 3, 4], 1: []}[len(cases)]
    assert sum(result.strict is Verdict.SKIPPED for result in arrived) == 2


# -- nothing is left behind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["leaves_a_daemon", "leaves_a_child"])
def test_what_a_submission_left_running_is_killed(pid_file: Path, name: str) -> None:
    run(name)
    assert eventually(lambda: not alive(int(pid_file.read_text(encoding="utf-8"))))


def test_an_error_of_the_caller_ends_the_workers(pid_file: Path) -> None:
    def fail(result: CaseResult) -> None:
        assert eventually(lambda: pid_file.exists() and pid_file.stat().st_size > 0)
        raise KeyError(result.case)

    jobs = [job("writes_its_pid", cases=[1]), job("good", cases=[1])]
    with pytest.raises(KeyError):
        run_jobs(jobs, fail, parallel=2, command=STUB)
    assert not alive(int(pid_file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupting_or_killing_the_run_leaves_no_process(pid_file: Path, number: signal.Signals) -> None:
    source = "import test_runner as t; t.run_jobs([t.job('writes_its_pid')], print, command=t.STUB)"
    path = os.pathsep.join([str(catalog.ROOT), str(Path(__file__).parent)])
    parent = subprocess.Popen(
        [sys.executable, "-c", source], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
    )
    assert eventually(lambda: pid_file.exists() and pid_file.stat().st_size > 0)
    worker = int(pid_file.read_text(encoding="utf-8"))
    assert alive(worker)
    parent.send_signal(number)
    _, said = parent.communicate(timeout=20)
    if number is signal.SIGINT:
        assert "KeyboardInterrupt" in said
        assert not alive(worker)
    assert parent.returncode != 0
    assert eventually(lambda: not alive(worker))


# -- several jobs --------------------------------------------------------------------------------------------------


def test_results_arrive_as_they_come_and_are_returned_in_order() -> None:
    arrived: list[tuple[str, int]] = []
    jobs = [job("compiles_slowly", cases=[3], variant="slow"), job("good", variant="quick")]
    results = run_jobs(jobs, lambda result: arrived.append((result.variant, result.case)), parallel=2, command=STUB)
    assert arrived[-1] == ("slow", 3)
    assert [(result.variant, result.case) for result in results] == [
        ("slow", 3),
        ("quick", 1),
        ("quick", 2),
        ("quick", 3),
    ]
    assert all(result.ok for result in results)


def test_the_side_that_runs_no_foreign_code_imports_no_torch() -> None:
    source = "import sys, harness.runner, harness.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], cwd=catalog.ROOT, check=False).returncode == 0


def test_the_environment_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANG", "TASK", "MAKEFLAGS", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "triton")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    names = environment(job("good"), 2, "mark")
    assert not {"LANG", "TASK", "MAKEFLAGS"} & names.keys()
    assert (names["PYTHONIOENCODING"], names["SOMETHING_ELSE"], names["KIT_RUN"]) == ("utf-8", "kept", "mark")
    assert names["TRITON_INTERPRET"] == "1"
    assert int(names["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    for changes in ({"language": "tilelang"}, {"device": "cuda"}):
        assert "TRITON_INTERPRET" not in environment(job("good", **changes), 1, "mark")


@pytest.mark.parametrize(
    ("declared", "language", "device", "expected"),
    [
        ("EXACT_ALLOCATIONS = True", "cuda", "cuda", True),
        ("EXACT_ALLOCATIONS: bool = True", "cuda", "maca", True),
        ("EXACT_ALLOCATIONS = True", "triton", "cuda", False),
        ("EXACT_ALLOCATIONS = True", "cuda", "cpu", False),
        ("EXACT_ALLOCATIONS = False", "cuda", "cuda", False),
        ("OTHER = True", "cuda", "cuda", False),
    ],
)
def test_exact_allocations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: str, language: str, device: str, expected: bool
) -> None:
    (tmp_path / "reference.py").write_text(f"import nowhere\n{declared}\n", encoding="utf-8")
    monkeypatch.setattr(catalog, "reference_path", lambda task: tmp_path / "reference.py")
    names = environment(job("good", language=language, device=device), 1, "mark")
    assert ("PYTORCH_NO_CUDA_MEMORY_CACHING" in names) is expected


# -- the real worker -----------------------------------------------------------------------------------------------


def test_a_real_worker_judges_and_names_the_line() -> None:
    config = str(catalog.suite_path("ragged_prefill", "tiny"))
    jobs = [job("raising_kernel", cases=[1], config=config, settings={"lint": False})]
    results = run_jobs(jobs, lambda result: None)
    assert [result.strict for result in results] == [Verdict.RUNTIME_ERROR]
    assert "ZeroDivisionError" in results[0].detail
    assert "raising_kernel.py:20" in results[0].detail
    assert "Traceback" not in results[0].detail + results[0].output
    assert results[0].output.strip() == "in run_kernel"
    assert results[0].label


def test_a_package_that_ends_its_process_is_at_fault_itself(tmp_path: Path) -> None:
    config = tmp_path / "testcase_config.py"
    config.write_text("import os\nos._exit(0)\n", encoding="utf-8")
    (result,) = run_jobs([job("raising_kernel", config=str(config), cases=[2])], lambda result: None)
    assert (result.case, result.judge, result.strict) == (2, Verdict.PACKAGE_ERROR, Verdict.PACKAGE_ERROR)
    assert result.detail.startswith(f"{config}: the process ended with exit status 0 in phase package")


def test_a_real_worker_refuses_a_broken_package(tmp_path: Path) -> None:
    config = tmp_path / "testcase_config.py"
    config.write_text("def getNumOfTestcases(): return 2\n", encoding="utf-8")
    (result,) = run_jobs([job("raising_kernel", config=str(config))], lambda result: None)
    assert (result.case, result.judge, result.strict) == (0, Verdict.PACKAGE_ERROR, Verdict.PACKAGE_ERROR)
    assert result.detail.endswith("getTestCaseSize, genTestCase, baseline, check are missing")
    assert result.output == ""
