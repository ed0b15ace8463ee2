"""The command line: what it runs, what it prints, its exit codes; then real workers with real faults."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fake_runner import FakeRunner, passed

from harness import cli, console, plan, runner
from harness.runner import Job
from harness.verdict import CaseResult, ExitCode, KitError, Verdict

ROOT = Path(__file__).resolve().parent.parent


# -- what is run


def test_without_options_everything_there_is_runs_on_the_tiny_suite(fake: FakeRunner, tmp_path: Path) -> None:
    assert cli.main(["check"]) == 0
    ran = [(job.task, job.language, job.variant) for job in fake.jobs]
    assert ran == [
        *(("alpha", "cuda", "wave64"), ("alpha", "cuda", "warp32"), ("alpha", "triton", "")),
        ("beta", "triton", ""),
    ]
    job = fake.jobs[2]
    assert (job.suite, job.config) == ("tiny", str(tmp_path / "tasks/alpha/tiny_config.py"))
    assert job.submission == str(tmp_path / "tasks/alpha/triton/run_kernel.py")
    assert (job.cases, job.device, job.required) == (None, "cpu", False)
    assert fake.parallel == os.cpu_count()


def test_missing_submissions_are_counted_and_shown(fake: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check"]) == 0
    out = capsys.readouterr().out
    assert "beta has no C++ submission yet (tasks/beta/cuda/run_kernel.cu)." in out
    assert out.splitlines()[-1].startswith("8 of 8 PASS, 3 SKIPPED; ")


def test_a_named_submission_that_is_missing_is_a_failure(fake: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--task=beta", "--lang=cuda"]) == ExitCode.NOTHING_RAN
    captured = capsys.readouterr()
    assert "beta has no C++ submission yet (tasks/beta/cuda/run_kernel.cu)." in captured.out
    assert "No case ran, which counts as a failure." in captured.err
    assert fake.jobs == []


def test_options_reach_the_jobs(fake: FakeRunner) -> None:
    words = ["--task=alpha", "--lang=triton", "--cases=2,1", "--jobs=3", "--deadline=7", "--counts"]
    assert cli.main(["check", *words]) == 0
    (job,) = fake.jobs
    assert (job.cases, job.deadline_s, job.required) == ([1, 2], 7.0, True)
    assert job.settings == {"counts": True, "repeat": 1, "lint": True, "time": True}
    assert fake.parallel == 3


def test_on_a_gpu_the_judge_suite_runs_one_at_a_time(gpu: FakeRunner) -> None:
    assert cli.main(["check", "--task=alpha"]) == 0
    assert {(job.suite, job.device) for job in gpu.jobs} == {("judge", "cuda")}
    assert gpu.parallel == 1
    assert cli.main(["check", "--task=alpha", "--device=cpu"]) == 0
    assert {(job.suite, job.device) for job in gpu.jobs} == {("tiny", "cpu")}


def test_a_suite_that_only_one_task_has(fake: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--suite=demo"]) == 0
    assert [(job.task, job.suite) for job in fake.jobs] == [("beta", "demo")]
    assert "alpha has no suite demo." in capsys.readouterr().out
    assert cli.main(["check", "--suite=demo", "--task=alpha"]) == ExitCode.MISSING_FILE


def test_files_of_the_users_own(fake: FakeRunner, tmp_path: Path) -> None:
    mine, package = tmp_path / "我的 kernel.py", tmp_path / "my package.py"
    mine.touch()
    package.touch()
    assert cli.main(["check", "--task=beta", "--lang=tilelang", f"--file={mine.name}", f"--config={package}"]) == 0
    (job,) = fake.jobs
    assert (job.submission, job.config, job.suite) == (str(mine), str(package), "config")


def test_a_language_whose_package_is_missing(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["check", "--task=alpha"]) == 0
    assert {job.language for job in fake.jobs} == {"cuda"}
    assert "triton is not installed in this environment; `make env` tries again" in capsys.readouterr().out
    assert cli.main(["check", "--lang=triton"]) == ExitCode.ENVIRONMENT


def test_a_language_whose_compiler_is_missing(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    assert cli.main(["check", "--task=alpha"]) == 0
    assert {job.language for job in fake.jobs} == {"triton"}
    assert "g++ is missing, which C++ needs without a GPU; install it" in capsys.readouterr().out
    for language in ("cuda", "tilelang"):
        (plan.catalog.TASKS / "alpha" / language).mkdir(exist_ok=True)
        plan.catalog.submission_path("alpha", language).touch()
        assert cli.main(["check", "--task=alpha", f"--lang={language}"]) == ExitCode.ENVIRONMENT
        assert capsys.readouterr().err.startswith(f"LANG={language}: g++ is missing, which ")


def test_standard_streams_that_are_closed_cost_no_case() -> None:
    """As under cron: the numbers 0 to 2 would go to the first pipes that are opened."""
    words = " ".join(map(shlex.quote, command("--json")))
    script = f"exec 9>&1; ({words} <&- >&- 2>&- 9>&-); echo $? >&9"
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert done.stdout == b"0\n"


# -- what is printed


def test_one_aligned_line_per_case(fake: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(job: Job) -> list[CaseResult]:
        timed = dataclasses.replace(passed(job, 1), ours_ms=0.5, baseline_ms=0.4, score=44.4)
        wrong = dataclasses.replace(
            passed(job, 12), strict=Verdict.NONDETERMINISTIC, detail="two runs differ at 3 of 4"
        )
        return [timed, wrong]

    fake.answer = answer
    assert cli.main(["check", "--lang=triton", "--task=alpha"]) == ExitCode.REJECTED
    lines = capsys.readouterr().out.splitlines()
    header, first, second = lines[1], lines[2], lines[3]
    assert " ".join(first.split()) == "alpha triton 1 label 1 PASS PASS 0.25 0.5000 0.4000 0.80x 44.4"
    assert " ".join(second.split()) == "alpha triton 12 label 12 PASS NONDETERMINISTIC 0.25 - - - -"
    assert len(header) == len(first) == len(second)
    assert header.index("judge") == first.index("PASS") == second.index("PASS")
    assert header.index("strict") == second.index("NONDETERMINISTIC")
    assert lines[4] == "    two runs differ at 3 of 4"
    assert lines[5] == "    again: make check TASK=alpha LANG=triton CASES=12"
    assert lines[6] == "alpha triton: speed-up 0.800x (geometric mean of the 1 timed of 2 cases), mean score 44.4"
    assert lines[7].startswith("1 of 2 PASS, 1 NONDETERMINISTIC; ")


def test_what_a_submission_printed_is_shown_below_its_case(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = "x" * 1000 + "\n" + "\n".join(f"line {number}" for number in range(100)) + "\nred \x1b[31m\rover\n"
    fake.answer = lambda job: [dataclasses.replace(passed(job, 1), output=printed)]
    assert cli.main(["check", "--task=beta"]) == 0
    out = capsys.readouterr().out
    assert "    | line 0\n" in out
    assert f"    | {'x' * 100}[800 characters left out]{'x' * 100}\n" in out
    assert "    | [63 lines left out]\n" in out
    assert "    | red \\x1b[31m\n    | over\n" in out
    assert "line 50" not in out
    assert "\x1b" not in out


def test_the_summary_counts_the_verdict_that_is_bad() -> None:
    def case(judge: Verdict, strict: Verdict) -> CaseResult:
        return CaseResult("alpha", "triton", "", "tiny", 1, judge=judge, strict=strict)

    results = [
        case(Verdict.PASS, Verdict.PASS),
        case(Verdict.WRONG_ANSWER, Verdict.PASS),
        case(Verdict.PASS, Verdict.RACE),
        case(Verdict.SKIPPED, Verdict.SKIPPED),
    ]
    (line,) = console.summary(results, 1.25, "cpu")
    assert line == "1 of 3 PASS, 1 RACE, 1 SKIPPED, 1 WRONG_ANSWER; 1.2 s on cpu"


def test_json_is_one_document_and_nothing_else(fake: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answer = lambda job: [dataclasses.replace(passed(job, 1), margin=float("inf"), output="héllo ✓")]
    assert cli.main(["check", "--task=beta", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    document = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert document["exit_code"] == 0
    assert document["device"]["kind"] == "cpu"
    assert document["summary"].startswith("1 of 1 PASS, 2 SKIPPED; ")
    records = {(record["language"], record["strict"]): record for record in document["records"]}
    assert records["triton", "PASS"]["margin"] is None
    assert records["triton", "PASS"]["output"] == "héllo ✓"


def test_a_case_that_no_suite_has_is_named_and_no_success(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_jobs(jobs: Sequence[Job], on_result: Callable[[CaseResult], None], parallel: int) -> list[CaseResult]:
        on_result(passed(jobs[0], 1))
        raise KitError("CASES=99: no such case; none of these suites has it.", ExitCode.MISSING_FILE)

    monkeypatch.setattr(runner, "run_jobs", run_jobs)
    assert cli.main(["check", "--cases=1,99", "--json"]) == ExitCode.MISSING_FILE
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["exit_code"], len(document["records"])) == (ExitCode.MISSING_FILE, 4)  # three are SKIPPED
    assert document["error"] == captured.err.strip() == "CASES=99: no such case; none of these suites has it."


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(fake: FakeRunner, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        fake.answer = lambda job: [signal.raise_signal(number) or passed(job, 1)]
        assert cli.main(["check"]) == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_what_ran(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    def answer(job: Job) -> list[CaseResult]:
        signal.raise_signal(number)
        return []

    fake.answer = answer
    assert cli.main(["check", "--json"]) == ExitCode.INTERRUPTED
    captured = capsys.readouterr()
    assert json.loads(captured.out)["exit_code"] == ExitCode.INTERRUPTED
    assert "Interrupted" in captured.err


# -- the journal


def test_every_run_is_one_line_of_the_journal(fake: FakeRunner, tmp_path: Path) -> None:
    assert cli.main(["check", "--task=beta", "--lang=triton"]) == 0
    fake.answer = lambda job: [dataclasses.replace(passed(job, 1), margin=float("nan"))]
    assert cli.main(["check", "--task=beta", "--lang=triton"]) == 0
    (path,) = (tmp_path / "journal").iterdir()
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first["command"] == ["harness", "check", "--task=beta", "--lang=triton"]
    assert set(first) == {"date", "command", "device", "versions", "seconds", "exit_code", "records"}
    assert [CaseResult.from_json(record).case for record in first["records"]] == [1, 2]
    assert "python" in first["versions"]
    assert second["records"][0]["margin"] is None


def test_a_journal_that_cannot_be_written_fails_no_run(
    fake: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal").write_text("a file where the folder should be", encoding="utf-8")
    assert cli.main(["check", "--task=beta", "--lang=triton"]) == 0
    captured = capsys.readouterr()
    assert "this run is not in the journal" in captured.err
    assert captured.out.splitlines()[-1].startswith("2 of 2 PASS; ")


# -- real workers

_SIGNATURE = (
    "def run_kernel(q, k, v, output, qo_indptr, kv_indptr, batch_size, seq_len,"
    " num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal):\n"
)
_FAULTS = {
    "syntax error": ("def run_kernel(:\n", ExitCode.COMPILE_ERROR, "COMPILE_ERROR"),
    "endless": (_SIGNATURE + "    while True:\n        pass\n", ExitCode.TIMEOUT, "TIMEOUT"),
    "chatty": (_SIGNATURE + "    print('x' * 10_000_000)\n", ExitCode.OUTPUT_LIMIT, "OUTPUT_LIMIT"),
    "exits": ("import os\n" + _SIGNATURE + "    os._exit(0)\n", ExitCode.RUNTIME_ERROR, "RUNTIME_ERROR"),
}


def command(*words: str) -> list[str]:
    fixed = ["--task=ragged_prefill", "--lang=triton", "--device=cpu", "--cases=1"]
    return [sys.executable, "-m", "harness", "check", *fixed, *words]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_faulty_submission_has_its_own_verdict_and_exit_code(tmp_path: Path, fault: str) -> None:
    text, code, verdict = _FAULTS[fault]
    file = tmp_path / "run_kernel.py"
    file.write_text(text, encoding="utf-8")
    done = run(f"--file={file}", "--deadline=3", "--no-lint")
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.splitlines()[2].split()[-7:-5] == [verdict, verdict]
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stdout) < 10_000
    again = "again: .venv/bin/python -m harness check --task=ragged_prefill --lang=triton --cases=1 --device=cpu"
    assert f"    {again} --file=" in done.stdout
    assert " --deadline=3 --no-lint\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"0 of 1 PASS, 1 {verdict}; ")


def test_a_corrupt_package_is_the_packages_fault(tmp_path: Path) -> None:
    package = tmp_path / "testcase_config.py"
    package.write_text("def getNumOfTestcases():\n    return 3\n\ndef oops(:\n", encoding="utf-8")
    done = run(f"--config={package}")
    assert done.returncode == ExitCode.PACKAGE_ERROR, done.stdout + done.stderr
    assert "testcase_config.py" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_exit_codes_are_distinct() -> None:
    codes = [code for _, code, _ in _FAULTS.values()]
    codes += [ExitCode.UNKNOWN_TASK, ExitCode.UNKNOWN_LANGUAGE, ExitCode.MISSING_FILE, ExitCode.PACKAGE_ERROR]
    codes += [ExitCode.NEEDS_DEVICE, ExitCode.NOTHING_RAN, ExitCode.REJECTED, ExitCode.USAGE, ExitCode.OK]
    assert len(set(codes)) == len(codes)


def _marked(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    mark = f"KIT_TEST_MARK={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    file, started = tmp_path / "run_kernel.py", tmp_path / "started"
    text = f"import pathlib\n{_SIGNATURE}    pathlib.Path({str(started)!r}).touch()\n    while True:\n        pass\n"
    file.write_text(text, encoding="utf-8")
    process = subprocess.Popen(
        command(f"--file={file}", "--no-lint"),
        cwd=ROOT,
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    deadline = time.monotonic() + 120
    while not started.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(_marked(mark)) >= 2, "the command line and its worker"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Interrupted" in err
    assert "Traceback" not in out + err
    assert _marked(mark) == []
