"""`make accept`: what is demanded, what counts as seen; an edit, a failure or an interrupt is never forgotten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import accept, catalog, cli, mutants, plan, runner
from harness.devices import Device
from harness.runner import Job
from harness.sanitize import cli as sanitizer
from harness.verdict import CaseResult, ExitCode, Verdict
from tests.fake_runner import H200, passed

CASES = 3  # of every suite, as the pretended workers count them


class Pretended:
    """A GPU whose runs end as `verdict` says; `ran` lists the cases in their order."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.verdict: Callable[[Job, int], Verdict] = lambda job, case: Verdict.PASS
        self.trouble = ""
        self.clean = Verdict.PASS

    def run_jobs(
        self, jobs: Sequence[Job], on_result: Callable[[CaseResult], None], parallel: int = 1, notice: Any = None
    ) -> None:
        for job in jobs:
            notice(SimpleNamespace(job=job, count=CASES))
            for case in job.cases or range(1, CASES + 1):
                self.ran.append(f"{accept._named(job)} {job.suite} {case}")
                result = passed(job, case)
                result.judge = result.strict = self.verdict(job, case)
                on_result(result)

    def mutants(self, table: Any, chosen: Any, device: Any, parallel: int, on_outcome: Callable[[Any], None]) -> None:
        for mutant in chosen:
            self.ran.append(mutant.key)
            on_outcome(SimpleNamespace(mutant=mutant, trouble=self.trouble, lines=lambda: ["a mutant"]))

    def sanitize(self, job: Job, tools: Sequence[str], target: object) -> list[sanitizer.Line]:
        self.ran.append(f"{job.task} sanitizer")
        return [sanitizer.Line(job, tool, 1, "", 0, 0.1, self.clean) for tool in tools]


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    pretended = Pretended()
    monkeypatch.setattr(plan, "pick_device", lambda requested: H200)
    monkeypatch.setattr(accept, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "run_jobs", pretended.run_jobs)
    monkeypatch.setattr(mutants, "run", pretended.mutants)
    monkeypatch.setattr(mutants, "keep", lambda *_: None)
    monkeypatch.setattr(mutants, "PAGE", tmp_path / "mutants.md")
    monkeypatch.setattr(sanitizer, "judge", pretended.sanitize)
    monkeypatch.setattr(sanitizer, "find_target", lambda *_: None)
    return pretended


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kit's tasks where they may be edited."""
    tasks = tmp_path / "kit" / "tasks"
    shutil.copytree(catalog.TASKS, tasks, ignore=shutil.ignore_patterns("__pycache__", "*.svg"))
    monkeypatch.setattr(catalog, "TASKS", tasks)
    monkeypatch.setattr(catalog, "ROOT", tmp_path / "kit")
    return tasks


def test_what_is_demanded_of_one_file(gpu: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["accept", "--plan", "--task=kvcache_decode", "--lang=cuda"]) == ExitCode.REJECTED
    *lines, last = capsys.readouterr().out.splitlines()
    name = "kvcache_decode/cuda"
    suites = ("judge", "live", "large", "tiny x20")
    assert lines[:5] == [*(f"{name} {suite}: all cases" for suite in suites), f"{name} judge case 1 x20: case 1"]
    assert lines[-1] == f"{name} sanitizer"
    assert {line.split()[0] for line in lines[5:-1]} == {"mutant"}
    assert last == f"0 of {len(lines)} demands are met on NVIDIA H200"
    assert gpu.ran == []


def test_what_passed_is_not_run_again(gpu: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["accept", "--task=kvcache_decode", "--lang=cuda"]
    assert cli.main(words) == ExitCode.OK
    assert f"kvcache_decode/cuda tiny x20 {CASES}" in gpu.ran
    assert "kvcache_decode sanitizer" in gpu.ran
    ran = len(gpu.ran)
    assert cli.main(words) == ExitCode.OK
    assert len(gpu.ran) == ran
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{ran - 4 * (CASES - 1)} of ")


def test_a_hopper_variant_owes_three_suites_and_no_mutant(gpu: Pretended) -> None:
    assert cli.main(["accept", "--task=mla_decode", "--lang=triton", "--variant=hopper"]) == ExitCode.OK
    kinds = {line.rsplit(" ", 1)[0] for line in gpu.ran}
    assert kinds == {f"mla_decode/triton/hopper {suite}" for suite in ("judge", "live", "tiny")}


@pytest.mark.parametrize("edited", ["triton/run_kernel.py", "live_config.py"])
def test_an_edit_makes_it_missing_again(gpu: Pretended, checkout: Path, edited: str) -> None:
    words = ["accept", "--task=fused_moe", "--lang=triton", "--variant=plain"]
    assert cli.main(words) == ExitCode.OK
    gpu.ran.clear()
    path = checkout / "fused_moe" / edited
    path.write_text(path.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    assert cli.main([*words, "--plan"]) == ExitCode.REJECTED
    assert cli.main(words) == ExitCode.OK
    suites = {line.split()[1] for line in gpu.ran if line.startswith("fused_moe/triton ")}
    assert suites == ({"live"} if edited == "live_config.py" else {"judge", "live", "tiny"})


def test_a_variant_depends_on_the_file_beside_it(gpu: Pretended, checkout: Path) -> None:
    words = ["accept", "--task=fused_moe", "--lang=triton", "--variant=hopper"]
    assert cli.main(words) == ExitCode.OK
    path = checkout / "fused_moe" / "triton" / "run_kernel.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    assert cli.main([*words, "--plan"]) == ExitCode.REJECTED


def test_a_case_that_fails_is_missing_whatever_it_was(gpu: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["accept", "--task=mla_decode", "--lang=tilelang", "--variant=hopper"]
    gpu.verdict = lambda job, case: Verdict.WRONG_ANSWER if job.suite == "live" and case == 2 else Verdict.PASS
    assert cli.main(words) == ExitCode.REJECTED
    assert "mla_decode/tilelang/hopper live: case 2" in capsys.readouterr().out.splitlines()
    gpu.ran.clear()
    gpu.verdict = lambda job, case: Verdict.PASS
    assert cli.main(words) == ExitCode.OK
    assert gpu.ran == ["mla_decode/tilelang/hopper live 2"]
    ledger = accept.Ledger(accept.ledger_path(H200.name), H200.name)
    digest = ledger.seen["mla_decode/tilelang/hopper live"]["digest"]
    ledger.add("mla_decode/tilelang/hopper live", digest, 2, passed=False)
    assert cli.main([*words, "--plan"]) == ExitCode.REJECTED


def test_an_interrupt_keeps_what_passed(gpu: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(job: Job, case: int) -> Verdict:
        if case == 3:
            raise KeyboardInterrupt
        return Verdict.PASS

    words = ["accept", "--task=ragged_prefill", "--lang=triton", "--variant=hopper"]
    gpu.verdict = stop
    assert cli.main(words) == ExitCode.REJECTED
    assert "what passed until now is kept" in capsys.readouterr().err
    gpu.ran.clear()
    gpu.verdict = lambda job, case: Verdict.PASS
    assert cli.main(words) == ExitCode.OK
    assert gpu.ran[0] == "ragged_prefill/triton/hopper judge 3"


def test_a_mutant_that_passes_and_a_race_are_missing(gpu: Pretended) -> None:
    words = ["accept", "--task=mla_decode", "--lang=cuda", "--variant=plain"]
    gpu.trouble, gpu.clean = "got PASS", Verdict.RACE
    assert cli.main(words) == ExitCode.REJECTED
    gpu.ran.clear()
    gpu.trouble, gpu.clean = "", Verdict.PASS
    assert cli.main(words) == ExitCode.OK
    assert "mla_decode sanitizer" in gpu.ran
    assert any(key.startswith("mla_decode/cuda/") for key in gpu.ran)


def test_what_this_machine_cannot_run_is_not_taken_as_met(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "_lacking", lambda language, device: "no TileLang" if language == "tilelang" else "")
    assert cli.main(["accept", "--plan", "--task=mla_decode"]) == ExitCode.ENVIRONMENT
    assert "LANG=tilelang: no TileLang" in capsys.readouterr().err


def test_a_record_that_is_none_is_one_sentence(gpu: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    path = accept.ledger_path(H200.name)
    for text in ("{", "[1]", json.dumps({"seen": 3})):
        path.write_text(text, encoding="utf-8")
        assert cli.main(["accept", "--plan", "--task=mla_decode"]) == ExitCode.USAGE
        assert "accepted-h200.json: no record of `make accept`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--budget=soon"], ExitCode.USAGE, "BUDGET=soon: write after how many seconds to stop"),
        (["--jobs=0"], ExitCode.USAGE, "JOBS=0"),
        (["--variant=fast"], ExitCode.USAGE, "VARIANT=fast"),
        (["--task=kvcache_decode", "--variant=hopper"], ExitCode.NOTHING_RAN, "nothing is demanded"),
    ],
)
def test_a_mistake_is_one_sentence(
    gpu: Pretended, capsys: pytest.CaptureFixture[str], words: list[str], code: ExitCode, said: str
) -> None:
    assert cli.main(["accept", *words]) == code
    assert said in capsys.readouterr().err
    assert gpu.ran == []


def test_a_variant_for_another_gpu_is_no_empty_success(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "pick_device", lambda requested: Device("maca", "cuda", "MetaX C500", "c500"))
    assert cli.main(["accept", "--variant=hopper"]) == ExitCode.NEEDS_DEVICE
    assert "compute capability 9.x; this is MetaX C500" in capsys.readouterr().err
    assert cli.main(["accept", "--task=fused_moe", "--lang=cuda"]) == ExitCode.OK
    assert not any("hopper" in line or "sanitizer" in line for line in gpu.ran)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["accept"]) == ExitCode.NEEDS_DEVICE
    assert "`make accept` is for a GPU" in capsys.readouterr().err
