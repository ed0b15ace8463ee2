"""`make bench` from the command line to the files, with workers that are only pretended; records, lines, progress."""

from __future__ import annotations

import builtins
import csv
import io
import json
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import catalog, cli, devices, journal, languages, plan, runner
from harness.bench import calibration, console, engine, record, telemetry
from harness.bench.telemetry import Clocks
from harness.devices import Device
from harness.runner import Job
from harness.verdict import CaseResult, ExitCode, Verdict

H200 = Device("cuda", "cuda", "NVIDIA H200", "sm90")
PEAKS = {
    **{"bytes_per_s": 4e12, "ops_per_s": {"bf16": 8e14, "int8": 1.6e15}, "cold": True},
    **{"date": "2026-12-01T12:00:00+00:00", "device": "NVIDIA H200"},
}
FIGURES = {
    **{"ours_ms": 1.0, "peer_ms": 1.5, "ratio": 1.5, "ratio_low": 1.49, "ratio_high": 1.51, "samples": 40},
    **{"ours_host_ms": 1.1, "peer_host_ms": 1.9, "ours_host_calls": 1000, "peer_host_calls": 900},
    **{"ours_event_ms": 1.05, "peer_event_ms": 1.7, "clock": "kernels", "stopped": "precise"},
    **{"floor_ms": 0.5, "floor_by": "bytes", "roofline_percent": 50.0, "tflops": 123.4, "gb_s": 2000.0, "flags": []},
}


def timed(job: Job, case: int, **figures: Any) -> CaseResult:
    """A case that passed and was timed."""
    result = CaseResult(job.task, job.language, job.variant, job.suite, case, f"b{case} s1024")
    result.judge = result.strict = Verdict.PASS
    result.baseline, result.score = "testcase_config.py baseline", 60.0
    result.figures, result.notes = {**FIGURES, **figures}, ["under load: 1980 MHz"]
    return result


class FakeRunner:
    """Stands for runner.run_jobs. `answer` gives the results of a job; an interrupt among them is raised."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.answer: Callable[[Job], list[CaseResult | BaseException]] = lambda job: [timed(job, 1), timed(job, 2)]

    def __call__(
        self, jobs: Sequence[Job], on_result: Callable[[CaseResult], None], parallel: int = 1, *, notice: Any
    ) -> list[CaseResult]:
        self.jobs = list(jobs)
        assert parallel == 1
        for job in jobs:
            for case, result in enumerate(self.answer(job), 1):
                notice(types.SimpleNamespace(job=job, count=2, case=case, label="b1", phase="time"))
                if isinstance(result, BaseException):
                    raise result
                on_result(result)
        return []


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRunner:
    """A kit with two tasks on a pretended H200: alpha in C++ and Triton, and a Hopper variant; beta in Triton."""
    files = [
        *("alpha/reference.py", "alpha/testcase_config.py", "alpha/triton/run_kernel.py", "alpha/triton/hopper.py"),
        *("alpha/cuda/run_kernel.cu", "beta/reference.py", "beta/testcase_config.py", "beta/triton/run_kernel.py"),
    ]
    for name in files:
        path = tmp_path / "tasks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    monkeypatch.setattr(catalog, "TASKS", tmp_path / "tasks")
    monkeypatch.setattr(journal, "FOLDER", tmp_path / "journal")
    monkeypatch.setattr(plan, "pick_device", lambda requested: devices.pick("cpu") if requested == "cpu" else H200)
    monkeypatch.setattr(languages, "module", lambda language: types.SimpleNamespace(variants=lambda device: ("",)))
    monkeypatch.setattr(calibration, "obtain", lambda device: PEAKS)
    monkeypatch.setattr(telemetry, "read", lambda kind: Clocks(1980.0, 3201.0, 40.0, 300.0))
    monkeypatch.chdir(tmp_path)
    fake = FakeRunner()
    monkeypatch.setattr(runner, "run_jobs", fake)
    return fake


def kept(folder: Path, pattern: str = "bench-h200-*.json") -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))]


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_cpu_is_refused_with_one_sentence(fake: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--device=cpu"]) == ExitCode.NEEDS_DEVICE == 13
    captured = capsys.readouterr()
    assert captured.err.startswith("`make bench` times kernels on a GPU")
    assert len(captured.err.splitlines()) == 1
    assert (captured.out, fake.jobs) == ("", [])


@pytest.mark.parametrize("budget", ["0", "-1", "ten", "nan", "inf", "1e9"])
def test_a_budget_that_is_none_is_refused(fake: FakeRunner, capsys: pytest.CaptureFixture[str], budget: str) -> None:
    assert cli.main(["bench", f"--budget={budget}"]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith(f"BUDGET={budget}: ")


def test_jobs_of_every_variant(fake: FakeRunner, tmp_path: Path) -> None:
    assert cli.main(["bench", "--budget=2.5"]) == 0
    ran = [(job.task, job.language, job.variant, job.suite) for job in fake.jobs]
    assert ran == [
        *(("alpha", "cuda", "", "judge"), ("alpha", "triton", "", "judge"), ("alpha", "triton", "hopper", "judge")),
        ("beta", "triton", "", "judge"),
    ]
    assert [Path(job.submission).name for job in fake.jobs[:3]] == ["run_kernel.cu", "run_kernel.py", "hopper.py"]
    assert fake.jobs[0].settings["bench"] == {"budget_s": 2.5, "calibration": PEAKS}
    assert fake.jobs[0].deadline_s == 602.5
    assert cli.main(["bench", "--variant=hopper", "--task=alpha", "--lang=triton", "--cases=2"]) == 0
    assert [(job.variant, job.cases) for job in fake.jobs] == [("hopper", [2])]
    assert cli.main(["bench", "--variant=plain"]) == 0
    assert {job.variant for job in fake.jobs} == {""}


def test_the_hopper_variant_needs_its_device_and_its_file(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["bench", "--task=alpha", "--lang=cuda", "--variant=hopper"]
    assert cli.main(command) == ExitCode.NOTHING_RAN
    assert "alpha has no C++ submission yet (tasks/alpha/cuda/hopper.cu)" in capsys.readouterr().out
    assert cli.main(["bench", "--variant=hoper"]) == ExitCode.USAGE
    assert "did you mean hopper?" in capsys.readouterr().err
    monkeypatch.setattr(plan, "pick_device", lambda requested: Device("maca", "cuda", "MetaX C500", "c500"))
    assert cli.main(command) == ExitCode.NEEDS_DEVICE
    assert "compute capability 9.x, and this is MetaX C500 (c500)" in capsys.readouterr().err
    assert cli.main(["bench"]) == 0
    assert {job.variant for job in fake.jobs} == {""}


def test_check_runs_the_hopper_variant_on_demand(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(jobs: Sequence[Job], on_result: Callable[[CaseResult], None], parallel: int) -> None:
        fake.jobs = list(jobs)
        on_result(jobs[0].result(1, Verdict.WRONG_ANSWER, "off by one"))

    monkeypatch.setattr(runner, "run_jobs", wrong)
    words = ["check", "--task=alpha", "--lang=triton"]
    cli.main(words)
    assert [job.variant for job in fake.jobs] == [""]
    cli.main([*words, "--variant=hopper"])
    assert [job.variant for job in fake.jobs] == ["hopper"]
    assert "again: make check TASK=alpha LANG=triton CASES=1 VARIANT=hopper" in capsys.readouterr().out
    cli.main([*words, "--variant=all"])
    assert [job.variant for job in fake.jobs] == ["", "hopper"]


def test_records_are_kept_per_task_in_the_journal_and_in_a_folder(
    fake: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--out=内核 out", "--lang=triton"]) == 0
    out = tmp_path / "内核 out"
    names = {path.name for path in out.iterdir()}
    assert names == {f"bench-h200-{task}.{kind}" for task in ("alpha", "beta") for kind in ("json", "csv")}
    alpha, beta = kept(out)
    assert kept(tmp_path / "journal") == [alpha, beta]
    assert [(r["language"], r["variant"], r["case"]) for r in alpha["records"]] == [
        *(("triton", "", 1), ("triton", "", 2), ("triton", "hopper", 1), ("triton", "hopper", 2))
    ]
    assert alpha["command"] == "make bench 'OUT=内核 out' LANG=triton"
    assert alpha["device"] == {"kind": "cuda", "name": "NVIDIA H200", "tuning": "sm90"}
    assert alpha["calibration"] == PEAKS
    assert alpha["clocks"]["before"]["temperature_c"] == alpha["clocks"]["after"]["temperature_c"] == 40.0
    assert {"date", "versions"} <= set(alpha)
    assert alpha["records"][0] == {
        **{"task": "alpha", "language": "triton", "variant": "", "suite": "judge", "case": 1, "label": "b1 s1024"},
        **FIGURES,
        **{"peer": "testcase_config.py baseline", "score": 60.0, "flags": [], "notes": ["under load: 1980 MHz"]},
    }
    shown = capsys.readouterr().out
    assert f"kept as {out}/bench-h200-alpha.json and .csv" in shown
    assert "alpha triton:hopper: 1.500x of testcase_config.py baseline (geometric mean of 2 of 2 cases)" in shown
    assert "peaks of 2026-12-01T12:00:00+00:00: 4000 GB/s, 800 bf16 TOPS, 1600 int8 TOPS" in shown


def test_a_case_that_fails_costs_no_other_and_gives_its_verdict(
    fake: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answer = lambda job: [
        timed(job, 1),
        job.result(2, Verdict.TIMEOUT, "stopped in phase time after 600 s", "b2"),
        timed(job, 3),
    ]
    assert cli.main(["bench", "--task=beta", "--lang=triton"]) == ExitCode.TIMEOUT
    (document,) = kept(tmp_path / "journal")
    first, second, third = document["records"]
    assert (first["ratio"], third["ratio"]) == (1.5, 1.5)
    assert (second["flags"], second["notes"]) == (["TIMEOUT"], ["stopped in phase time after 600 s"])
    assert {second[name] for name in ("ours_ms", "ratio", "tflops", "score", "samples", "stopped")} == {None}
    out = capsys.readouterr().out
    assert "TIMEOUT\n    stopped in phase time after 600 s\n    again: make check TASK=beta LANG=triton CASES=2" in out
    assert "1.500x of testcase_config.py baseline (geometric mean of 2 of 3 cases)" in out
    assert "2 of 3 cases timed; " in out


def test_an_interrupt_keeps_what_was_finished(
    fake: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answer = lambda job: [timed(job, 1), KeyboardInterrupt()]
    assert cli.main(["bench", "--out=out"]) == ExitCode.INTERRUPTED == 130
    for folder in ("journal", "out"):
        (document,) = kept(tmp_path / folder)
        assert [entry["case"] for entry in document["records"]] == [1]
    captured = capsys.readouterr()
    assert "1 of 1 cases timed" in captured.out
    assert captured.err.endswith("Interrupted: the cases above are all that ran.\n")


def test_records_are_on_disk_before_the_run_ends(fake: FakeRunner, tmp_path: Path) -> None:
    """As after a KILL, which nothing can catch: what the second case's arrival finds of the first."""
    seen = []

    def answer(job: Job) -> list[CaseResult | BaseException]:
        seen.append([len(document["records"]) for document in kept(tmp_path / "journal")])
        return [timed(job, 1)]

    fake.answer = answer
    assert cli.main(["bench", "--lang=triton", "--variant=plain"]) == 0
    assert seen == [[], [1]]
    assert not list((tmp_path / "journal").glob("*.part"))


def test_json_is_one_document_and_nothing_else(fake: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answer = lambda job: [timed(job, 1, ratio=float("nan"))]
    assert cli.main(["bench", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["task"] for entry in document["records"]] == ["alpha"] * 3 + ["beta"]
    assert document["records"][0]["ratio"] is None  # JSON has no NaN
    assert (document["exit_code"], document["device"]["name"]) == (0, "NVIDIA H200")
    assert cli.main(["bench", "--json", "--device=cpu"]) == 13
    assert json.loads(capsys.readouterr().out)["exit_code"] == 13


def test_a_folder_that_cannot_be_written_to(
    fake: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["bench", "--out=file/below"]) == ExitCode.MISSING_FILE
    assert capsys.readouterr().err.startswith("OUT=file/below: no folder to write to")
    (tmp_path / "journal").touch()  # a full disk must not spoil the run; it is said once
    assert cli.main(["bench", "--task=alpha"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("the record is not kept there") == 1
    assert "1.500x" in captured.out


def test_the_runner_tells_of_counts_cases_and_phases(tmp_path: Path) -> None:
    """A real worker, but no package and no kernel."""
    submissions = Path(__file__).parent / "submissions"
    job = Job(
        "ragged_prefill", "triton", "", "tiny", "c.py", str(submissions / "good.py"), None, "cpu", 30.0, {}, False
    )
    told: list[tuple[int | None, int, str, str]] = []
    runner.run_jobs(
        [job],
        lambda result: None,
        command=(sys.executable, str(submissions / "stub_worker.py")),
        notice=lambda worker: told.append((worker.count, worker.case, worker.phase, worker.label)),
    )
    assert told[0] == (None, 0, "package", "")
    assert (3, 2, "run", "case 2") in told
    assert [case for _, case, phase, _ in told if phase == "run"] == [1, 2, 3]


# -- records and lines -------------------------------------------------------------------------------------------------

JOB = Job("alpha", "triton", "", "judge", "c.py", "s.py", None, "cuda", 60.0, {}, False)


def test_an_impossible_time_is_in_no_record_and_no_line() -> None:
    result = timed(JOB, 1, flags=["above the peak"])
    result.strict, result.ours_ms, result.score = Verdict.SUSPECT_TIME, 1e-6, 99.0
    result.detail = "1e-06 ms is less than the 0.5 ms that this device needs"
    entry = record.record(result)
    unknown = {name for name in record.FIELDS if entry[name] is None}
    assert {"ours_ms", "ratio", "roofline_percent", "tflops", "gb_s", "score", "ours_host_ms"} <= unknown
    assert (entry["flags"], entry["floor_ms"]) == (["SUSPECT_TIME", "above the peak"], 0.5)
    line = console.Table([]).lines(entry)[0]
    assert line.endswith("SUSPECT_TIME, above the peak")
    assert line.split("b1 s1024")[1].split()[:10] == ["-"] * 10


def test_a_line_of_figures() -> None:
    table = console.Table([("alpha", "triton:hopper")])
    entry = record.record(timed(JOB, 1, stopped="budget", flags=["throttled"]))
    line, note = table.lines(entry)
    assert line.split() == [
        *("alpha", "triton", "1", "b1", "s1024", "1.0000", "1.5000", "1.500x", "[1.490", "1.510]", "50.0", "%"),
        *("123.4", "2000", "1.1000", "1.9000", "60.0", "throttled,", "budget", "spent"),
    ]
    assert note == "    under load: 1980 MHz"
    heads = table.header()
    assert heads.index("ours ms") + len("ours ms") == line.index("1.0000") + len("1.0000")


def test_csv_says_what_json_says() -> None:
    awkward = timed(JOB, 2)
    awkward.label, awkward.notes = 'b"2", s\n1', ["one, two", "内核"]
    failed = record.record(JOB.result(3, Verdict.WRONG_ANSWER, "off"))
    entries = [record.record(timed(JOB, 1)), record.record(awkward), failed]
    rows = list(csv.DictReader(io.StringIO(record.to_csv(entries), newline="")))
    for row, entry in zip(rows, entries, strict=True):
        assert list(row) == list(record.FIELDS)
        for name, value in entry.items():
            text = "; ".join(value) if isinstance(value, list) else "" if value is None else str(value)
            assert row[name] == text, name
    assert float(rows[0]["ratio_low"]) == 1.49
    assert rows[2]["ratio"] == ""


def test_a_result_of_the_peer_alone_has_no_ratio_in_the_summary() -> None:
    entry = record.record(timed(JOB, 1, ratio=None, peer_ms=None))
    assert entry["peer"] == ""
    assert console.summary([entry], 5.0, "NVIDIA H200") == [
        "alpha triton: no ratio in 1 cases",
        "1 of 1 cases timed; 5 s on NVIDIA H200",
    ]


def test_the_summary_is_a_geometric_mean() -> None:
    entries = [record.record(timed(JOB, case, ratio=ratio)) for case, ratio in ((1, 0.5), (2, 2.0), (3, 8.0))]
    (line, _) = console.summary(entries, 5.0, "a device")
    assert (
        line == "alpha triton: 2.000x of testcase_config.py baseline (geometric mean of 3 of 3 cases), mean score 60.0"
    )


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("def baseline(q):\n    import torch, flashinfer.mla\n    import torch.nn\n", "flashinfer"),
        ("def baseline(q):\n    from flash_attn import f\n    from . import x\n    import flash_attn\n", "flash_attn"),
        ("import flashinfer\ndef check():\n    import numpy\ndef baseline(q):\n    q += 1\n", ""),
        *(("def baseline(:", ""), ("\0", "")),
    ],
)
def test_the_library_behind_a_baseline_is_read_from_its_text(tmp_path: Path, text: str, library: str) -> None:
    path = tmp_path / "testcase_config.py"
    path.write_text(text, encoding="utf-8")
    assert record.libraries(path) == library
    path.unlink()
    assert record.libraries(path) == ""


def test_a_peer_in_words() -> None:
    result = timed(JOB, 1)
    assert record.record(result)["peer"] == "testcase_config.py baseline"
    assert record.record(result, "flashinfer")["peer"] == "flashinfer (testcase_config.py baseline)"
    result.peer = "FlashInfer's decode kernel"
    assert record.record(result, "flash_attn")["peer"] == "FlashInfer's decode kernel"


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        *(("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("MetaX C500", "c500")),
        *(("曦云/../C500", "c500"), ("", "device")),
    ],
)
def test_a_devices_name_in_a_files_name(name: str, slug: str) -> None:
    assert record.slug(name) == slug


def test_the_command_as_make_has_it() -> None:
    assert (
        record.make_command(["bench", "--task=a b", "--json", "--lang=cuda"])
        == "make bench 'TASK=a b' JSON=1 LANG=cuda"
    )
    assert record.make_command(["bench", "--task", "a"]) == "harness bench --task a"


def test_budgets() -> None:
    assert (engine.parse_budget(None), engine.parse_budget("0.5")) == (engine.BUDGET_S, 0.5)


# -- progress ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step(progress: console.Progress, phase: str) -> None:
    job = types.SimpleNamespace(task="alpha", language="triton", variant="hopper", config="c.py")
    progress.notice(types.SimpleNamespace(job=job, count=3, case=2, label="b1\x1b[31m", phase=phase))


def run_through(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> console.Progress:
    monkeypatch.setattr(sys, "stderr", stderr)
    progress = console.Progress()
    progress.expect([("c.py", None), ("d.py", 2)])
    with progress:
        assert progress.total() is None  # c.py was not counted yet
        step(progress, "compile")
        progress.show(["a line"])
        step(progress, "time")
    return progress


def test_off_a_terminal_there_is_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stderr = io.StringIO()
    progress = run_through(monkeypatch, stderr)
    assert (stderr.getvalue(), capsys.readouterr().out) == ("", "a line\n")
    assert (progress.done, progress.total()) == (1, 5)


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stderr = Terminal()
    run_through(monkeypatch, stderr)
    assert capsys.readouterr().out == "a line\n"  # stdout has the lines and nothing of the bar
    assert "alpha triton:hopper case 2 b1\\x1b[31m: compile" in stderr.getvalue()
    assert "1/5" in stderr.getvalue()


def test_without_rich_one_line_is_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def no_rich(name: str, *rest: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(console.importlib, "import_module", no_rich)
    monkeypatch.setenv("COLUMNS", "60")
    stderr = Terminal()
    run_through(monkeypatch, stderr)
    shown = stderr.getvalue().split("\r\x1b[K")
    assert "[0/?] starting" in shown
    assert "[1/5] alpha triton:hopper case 2 b1\\x1b[31m: time" in shown
    assert shown[-1] == ""  # nothing of it is left on the screen
    assert all(len(text) < 60 for text in shown)
    assert capsys.readouterr().out == "a line\n"
