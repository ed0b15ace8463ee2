"""The command line: what it refuses and how, what it prints, its exit codes; then real workers with real faults."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import catalog, cli, console, devices, journal, languages, plan, runner
from harness.devices import Device
from harness.runner import Job
from harness.verdict import CaseResult, ExitCode, KitError, Verdict

ROOT = Path(__file__).resolve().parent.parent
H200 = Device("cuda", "cuda", "NVIDIA H200", "sm90")


def passed(job: Job, case: int) -> CaseResult:
    return CaseResult(
        job.task, job.language, job.variant, job.suite, case, f"label {case}", Verdict.PASS, Verdict.PASS, margin=0.25
    )


class FakeRunner:
    """Stands for runner.run_jobs: answers each job with `answer`, remembers what it was given."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.parallel = 0
        self.answer: Callable[[Job], list[CaseResult]] = lambda job: [passed(job, case) for case in job.cases or [1, 2]]

    def __call__(
        self, jobs: Sequence[Job], on_result: Callable[[CaseResult], None], parallel: int = 1
    ) -> list[CaseResult]:
        self.jobs, self.parallel = list(jobs), parallel
        results = [result for job in jobs for result in self.answer(job)]
        for result in results:
            on_result(result)
        return results


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRunner:
    """Two tasks: alpha has Triton and C++ submissions, beta Triton alone and a demo suite."""
    tasks = tmp_path / "tasks"
    files = [
        *("alpha/reference.py", "alpha/testcase_config.py", "alpha/live_config.py", "alpha/tiny_config.py"),
        *("alpha/triton/run_kernel.py", "alpha/cuda/run_kernel.cu"),
        *("beta/reference.py", "beta/testcase_config.py", "beta/tiny_config.py", "beta/demo_config.py"),
        "beta/triton/run_kernel.py",
    ]
    for name in files:
        (tasks / name).parent.mkdir(parents=True, exist_ok=True)
        (tasks / name).touch()
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    monkeypatch.setattr(catalog, "TASKS", tasks)
    monkeypatch.setattr(journal, "FOLDER", tmp_path / "journal")
    monkeypatch.setattr(plan, "_may_have_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)

    def module(language: str) -> types.SimpleNamespace:
        both = ("wave64", "warp32")
        return types.SimpleNamespace(
            variants=lambda device: both if language == "cuda" and not device.is_gpu else ("",)
        )

    monkeypatch.setattr(languages, "module", module)
    fake = FakeRunner()
    monkeypatch.setattr(runner, "run_jobs", fake)
    return fake


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, fake: FakeRunner) -> FakeRunner:
    monkeypatch.setattr(plan, "pick_device", lambda requested: devices.pick("cpu") if requested == "cpu" else H200)
    return fake


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


# -- what is refused


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--task=nope"], ExitCode.UNKNOWN_TASK, "TASK=nope: no such task"),
        (["--task=alhpa"], ExitCode.UNKNOWN_TASK, "did you mean alpha?"),
        (["--lang=rust"], ExitCode.UNKNOWN_LANGUAGE, "LANG=rust: no such language"),
        (["--suite=jugde"], ExitCode.USAGE, "did you mean judge?"),
        (["--device=tpu"], ExitCode.USAGE, "DEVICE=tpu: no such device"),
        (["--suite=judge"], ExitCode.NEEDS_DEVICE, "run `make check SUITE=tiny` here"),
        (["--suite=live", "--task=alpha"], ExitCode.NEEDS_DEVICE, "run `make check TASK=alpha SUITE=tiny` here"),
        (["--jobs=0"], ExitCode.USAGE, "JOBS=0:"),
        (["--jobs=two"], ExitCode.USAGE, "JOBS=two:"),
        (["--task=alpha", "--lang=triton", "--file=no.py"], ExitCode.MISSING_FILE, "FILE=no.py: no such file"),
        (["--task=alpha", "--lang=triton", "--file=tasks"], ExitCode.MISSING_FILE, "FILE=tasks: that is a folder"),
        (
            ["--task=alpha", "--lang=triton", "--file=~nobody-here/k.py"],
            ExitCode.MISSING_FILE,
            "FILE=~nobody-here/k.py",
        ),
        (["--task=alpha", "--config=" + 300 * "k"], ExitCode.MISSING_FILE, "kkk: no such file"),
        (["--task=alpha", "--file=tasks"], ExitCode.USAGE, "LANG=cuda|triton|tilelang"),
        (["--config=no.py"], ExitCode.USAGE, "TASK=alpha|beta"),
        (["--task=alpha", "--config=no.py"], ExitCode.MISSING_FILE, "CONFIG=no.py: no such file"),
        (["--task=alpha", "--config=no.py", "--suite=tiny"], ExitCode.USAGE, "the first replaces the second"),
        (["--cases=1,,2"], ExitCode.USAGE, "CASES=1,,2: an empty part is no case"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], words: list[str], code: ExitCode, sentence: str
) -> None:
    assert cli.main(["check", *words]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert fake.jobs == []


def test_a_mistake_under_json_is_one_document(fake: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--json", "--task=nope"]) == ExitCode.UNKNOWN_TASK
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == ExitCode.UNKNOWN_TASK
    assert document["error"].startswith("TASK=nope: no such task")


def test_several_workers_on_a_gpu_are_refused(gpu: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--jobs=2"]) == ExitCode.USAGE
    assert "JOBS=2: on a GPU the cases are timed" in capsys.readouterr().err


def test_an_unknown_option_is_argparse_s_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", "--tas=alpha"])  # no abbreviations: they would break when an option is added
    assert caught.value.code == ExitCode.USAGE
    assert "--tas=alpha" in capsys.readouterr().err


# -- cases


@given(st.sets(st.integers(min_value=1, max_value=40), min_size=1), st.randoms(use_true_random=False))
def test_any_way_to_write_a_set_of_cases_gives_that_set(chosen: set[int], random: object) -> None:
    shuffle, coin = random.shuffle, random.random  # type: ignore[attr-defined]
    parts = [f"{case}-{case}" if coin() < 0.3 else f"{case}" for case in chosen]
    parts += [f"{case} - {case + 1}" for case in chosen if case + 1 in chosen and coin() < 0.5]
    shuffle(parts)
    assert plan.parse_cases(",".join(parts)) == sorted(chosen)


@pytest.mark.parametrize(
    "text", ["0", "1-0", "3-1", "-1", "1-", "a", "1,x", "1;2", "1.5", "", ",", "1--2", "1-2-3", "²"]
)
def test_what_is_no_list_of_cases_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(KitError, match="CASES=") as caught:
        plan.parse_cases(text)
    assert f"CASES={text}:" in str(caught.value)


# -- devices


def test_no_device_node_means_no_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_may_have_gpu", lambda: False)
    monkeypatch.setattr(plan.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert plan.pick_device(None).kind == "cpu"


def test_the_look_up_gives_devices_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def answer(probe: str) -> None:
        monkeypatch.setattr(
            plan.subprocess, "run", lambda command, **options: real([command[0], "-c", probe, command[3]], **options)
        )

    monkeypatch.setattr(plan, "_may_have_gpu", lambda: True)
    answer(f"import json; print(json.dumps({{'device': {dataclasses.asdict(H200)!r}}}))")
    assert plan.pick_device(None) == H200
    answer("import json, sys; print(json.dumps({'error': sys.argv[1] + ' is not here', 'code': 13}))")
    with pytest.raises(KitError, match="maca is not here") as caught:
        plan.pick_device("maca")
    assert caught.value.code is ExitCode.NEEDS_DEVICE
    answer("raise SystemExit('driver too old')")
    with pytest.raises(KitError, match=r"driver too old.*DEVICE=cpu"):
        plan.pick_device(None)


def test_the_command_line_imports_neither_torch_nor_a_language() -> None:
    code = "import sys, harness.cli; print([m for m in ('torch', 'triton', 'tilelang', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"


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


def test_the_command_to_run_again_carries_what_was_given(tmp_path: Path) -> None:
    request = plan.Request(task="alpha", language="cuda", file="my file.cu", device="cpu", suite="tiny")
    result = CaseResult("alpha", "cuda", "wave64", "tiny", 3)
    assert request.again(result) == "make check TASK=alpha LANG=cuda CASES=3 SUITE=tiny DEVICE=cpu 'FILE=my file.cu'"


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
    assert "    again: make check TASK=ragged_prefill LANG=triton CASES=1 DEVICE=cpu FILE=" in done.stdout
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
