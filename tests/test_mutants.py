"""The wrong kernels of tests/mutants: every one can be made and is told what it must get, and a few really run.

All of them run by `make mutants`; its outcomes are in results/ and docs/mutants.md.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import catalog, gate, mutants, worker
from harness.devices import Device
from harness.mutants import Mutant, Outcome, Table
from harness.package import load_package
from harness.runner import Job
from harness.verdict import CaseResult, KernelFault, KitError, Verdict

CPU = Device("cpu", "cpu", "CPU", "c500")
H200 = Device("cuda", "cuda", "NVIDIA H200", "sm90")
TABLE = mutants.load()
BY_KEY = {mutant.key: mutant for mutant in TABLE.mutants}


# -- the tables ------------------------------------------------------------------------------------------------------


def test_there_are_many_of_all_kinds_and_no_two_have_one_name() -> None:
    assert len(BY_KEY) == len(TABLE.mutants) >= 45
    assert {mutant.task for mutant in TABLE.mutants} == set(catalog.tasks()) == set(TABLE.judge_cases)
    assert {mutant.language for mutant in TABLE.mutants} == set(catalog.LANGUAGES)
    assert all({m.language for m in TABLE.mutants if m.task == task} >= {"cuda", "triton"} for task in catalog.tasks())


def test_each_applies_to_its_kernel_as_it_stands_and_is_refused_by_the_rule_that_it_names() -> None:
    wrong = []
    for mutant in TABLE.mutants:
        try:
            path = mutant.write()
        except KitError as error:
            wrong.append(str(error))
            continue
        if mutant.changes:
            assert path.read_bytes() != catalog.submission_path(mutant.task, mutant.language).read_bytes(), mutant.key
        rules = [finding.rule for finding in gate.refusals(path, mutant.language)]
        if bool(rules) != bool(mutant.lint) or (mutant.lint and mutant.lint not in rules):
            wrong.append(f"mutant {mutant.key}: the sandbox says {rules}, the table {mutant.lint!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("mutant", TABLE.mutants, ids=lambda mutant: mutant.key)
def test_each_says_what_it_must_get_and_where(mutant: Mutant) -> None:
    assert mutant.cpu or mutant.on_gpu or mutant.lint
    assert Verdict.PASS not in (*mutant.cpu, *mutant.on_gpu)
    assert bool(mutant.only) == (bool(mutant.cpu) != bool(mutant.on_gpu)), "one place only wants a reason, both none"
    assert mutant.cases
    assert mutant.mistake
    assert "\n" not in mutant.mistake
    assert mutant.source or mutant.changes or mutant.append


def test_a_replacement_that_no_longer_applies_names_the_mutant_and_the_text() -> None:
    mutant = Mutant(
        "stale", "ragged_prefill", "triton", "", changes=(("no such text", ""),), cpu=(Verdict.WRONG_ANSWER,)
    )
    message = (
        r"mutant ragged_prefill/triton/stale: .*triton/run_kernel.py holds 0 times, not once, the text 'no such text'"
    )
    with pytest.raises(KitError, match=message):
        mutant.text()
    twice = dataclasses.replace(mutant, changes=(("tl.load(", "tl.store("),))
    with pytest.raises(KitError, match=r"holds [1-9]\d* times, not once, the text 'tl.load\('"):
        mutants.run(Table((twice,), {}), [twice], CPU, 1, lambda outcome: None)


def test_the_page_and_the_kept_outcomes_are_those_of_the_tables() -> None:
    assert mutants.PAGE.read_text(encoding="utf-8") == mutants.page(TABLE), "run `make mutants` again"
    records = json.loads(mutants.results_path(CPU).read_text(encoding="utf-8"))["mutants"]
    assert set(records) == {mutant.key for mutant in TABLE.mutants if mutant.runs_on_cpu}
    assert [key for key, record in records.items() if not record["rejected"]] == []


# -- what counts as a rejection --------------------------------------------------------------------------------------

ZEROS = Mutant("zeros", "alpha", "triton", "writes 0", append="#", cpu=(Verdict.WRONG_ANSWER, Verdict.NON_FINITE))


def result(case: int, strict: Verdict, judge: Verdict = Verdict.PASS) -> CaseResult:
    return CaseResult("alpha", "triton", "", "tiny", case, judge=judge, strict=strict, detail=f"detail {case}")


@pytest.mark.parametrize(
    ("lint", "rules", "strict", "expected"),
    [
        ("", [], [Verdict.PASS, Verdict.WRONG_ANSWER, Verdict.TIMEOUT], ""),
        ("", [], [Verdict.NON_FINITE], ""),
        ("", [], [Verdict.PASS, Verdict.PASS], "got PASS, not WRONG_ANSWER or NON_FINITE"),
        ("", [], [Verdict.PASS, Verdict.TIMEOUT], "got TIMEOUT, not WRONG_ANSWER or NON_FINITE: detail 2"),
        ("", [], [], "no case ran"),
        ("", ["a"], [Verdict.NON_FINITE], "the sandbox refuses it by the rule a, which the table does not say"),
        ("import", ["statement", "import"], [Verdict.NON_FINITE], ""),
        ("import", ["statement"], [Verdict.NON_FINITE], "the sandbox does not refuse it by the rule import"),
    ],
)  # fmt: skip
def test_only_the_named_rejection_counts(lint: str, rules: list[str], strict: list[Verdict], expected: str) -> None:
    mutant = dataclasses.replace(ZEROS, lint=lint)
    outcome = Outcome(mutant, "cpu", rules, mutant.cpu, [result(i + 1, verdict) for i, verdict in enumerate(strict)])
    assert outcome.trouble == expected
    assert outcome.lines()[0].startswith("WRONG" if expected else "ok ")
    assert outcome.record()["rejected"] is (not expected)


def test_what_only_the_sandbox_sees_must_be_a_lint_error() -> None:
    mutant = dataclasses.replace(ZEROS, cpu=(), lint="import")
    seen = Outcome(mutant, "cpu", ["import"], (), [result(1, Verdict.LINT_ERROR, Verdict.LINT_ERROR)])
    assert seen.trouble == ""
    seen.results = [result(1, Verdict.PASS)]
    assert seen.trouble == "got PASS, not LINT_ERROR"


def test_where_a_mutant_runs() -> None:
    def places(**changes: Any) -> tuple[bool, bool]:
        mutant = dataclasses.replace(ZEROS, **changes)
        return mutant.runs_on_cpu, mutant.runs_on(H200)

    assert places() == (True, True)
    assert places(gpu=()) == (True, False)  # on a GPU machine too it runs on the CPU
    assert places(cpu=(), gpu=(Verdict.WRONG_ANSWER,)) == (False, True)
    assert places(cpu=(), lint="import") == (True, True)
    assert not ZEROS.runs_on(CPU)


def test_how_much_the_plain_judge_lets_pass() -> None:
    outcome = Outcome(ZEROS, "cpu", [], ZEROS.cpu)
    assert outcome.let_pass() == "not tried"
    outcome.alone = [result(1, Verdict.PASS, Verdict.PASS)]
    assert outcome.let_pass() == "yes"
    outcome.alone.append(result(2, Verdict.PASS, Verdict.WRONG_ANSWER))
    assert outcome.let_pass() == "1 of 2 cases"
    del outcome.alone[0]
    assert outcome.let_pass() == "no"


def test_outcomes_are_merged_and_mutants_that_are_gone_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "RESULTS", tmp_path)
    monkeypatch.setattr(catalog, "tasks", lambda: ["alpha"])
    ones = dataclasses.replace(ZEROS, name="ones")
    bad, good = ([result(1, verdict)] for verdict in (Verdict.NON_FINITE, Verdict.PASS))
    mutants.keep([Outcome(ZEROS, "cpu", [], ZEROS.cpu, bad)], Table((ZEROS,), {}), CPU)
    mutants.keep([Outcome(ones, "cpu", [], ZEROS.cpu, good)], Table((ZEROS, ones), {}), CPU)
    page = mutants.page(Table((ZEROS, ones), {}))
    assert "On CPU (cpu): 1 of 2 rejected as they must be" in page
    assert "| zeros | triton | writes 0 | - | NON_FINITE | not tried |" in page
    assert "| ones | triton | writes 0 | - | PASS | not tried |" in page
    mutants.keep([], Table((ones,), {}), CPU)
    assert "zeros" not in mutants.page(Table((ZEROS, ones), {})).replace(
        "| zeros | triton | writes 0 | - | not run |", ""
    )


# -- the stand-ins for the published packages ------------------------------------------------------------------------


@pytest.mark.parametrize("task", catalog.tasks())
def test_a_small_published_package_accepts_its_baseline_and_nothing_else(task: str) -> None:
    package = load_package(mutants.published(task))
    assert package.count() == 1
    case = package.case(1)
    args = package.generate(case, "cpu")
    expected = package.run_baseline(case, args)
    assert package.check(case, args, expected, expected)[0]
    zeros = [torch.zeros_like(arg) if isinstance(arg, torch.Tensor) else arg for arg in expected]
    assert not package.check(case, args, zeros, expected)[0]


# -- the sandbox and repetitions in a worker -------------------------------------------------------------------------


def test_a_refusal_names_line_rule_and_way_out(tmp_path: Path) -> None:
    path = tmp_path / "run_kernel.py"
    path.write_text("import os\nimport sys\n", encoding="utf-8")
    with pytest.raises(KernelFault, match=r"run_kernel.py:1: \[import\] import of os; .*\(and \d more\)") as caught:
        gate.admit(path, "triton")
    assert caught.value.verdict is Verdict.LINT_ERROR
    gate.admit(path, "cuda")
    path.write_text("def run_kernel(:\n", encoding="utf-8")
    gate.admit(path, "triton")  # the loader says more about a syntax error
    gate.admit(tmp_path / "missing.py", "triton")
    gate.admit(catalog.submission_path("ragged_prefill", "triton"), "triton")


@pytest.mark.parametrize(
    ("verdicts", "repeat", "calls", "note"),
    [
        ([Verdict.PASS] * 3, 3, 3, "3 of 3 repetitions passed, each on other data"),
        ([Verdict.PASS, Verdict.WRONG_ANSWER], 3, 2, "1 of 3 repetitions passed, each on other data"),
        ([Verdict.PASS], 1, 1, ""),
    ],
)
def test_a_case_is_repeated_until_it_fails(verdicts: list[Verdict], repeat: int, calls: int, note: str) -> None:
    seen: list[int] = []

    class Judge:
        @staticmethod
        def run_case(*args: Any) -> CaseResult:
            seen.append(args[-2])
            verdict = verdicts[len(seen) - 1]
            times = {"ours_ms": 2.0, "baseline_ms": 1.0, "score": 30.0, "peer": "p"} if len(seen) == 1 else {}
            return dataclasses.replace(result(1, verdict, verdict), margin=1.0 / len(seen), **times)

    class Package:
        @staticmethod
        def case(case_id: int) -> Any:
            return dataclasses.make_dataclass("Case", ["label"])("label")

    session: Any = object.__new__(worker.JudgeSession)
    job = Job("alpha", "triton", "", "tiny", "", "", None, "cpu", 1.0, {"repeat": repeat}, True)
    vars(session).update(
        _job=job, _judge=Judge, _package=Package, _submission=None, _contract=None, _device=CPU, _timer=None
    )
    last = session.run(1, lambda phase: None)
    assert seen == list(range(calls))
    assert last.strict is verdicts[-1]
    assert last.margin == 1.0
    timed = (2.0, 1.0, 30.0, "p") if last.ok else (None, None, None, "")
    assert (last.ours_ms, last.baseline_ms, last.score, last.peer) == timed  # of the first, which alone is timed
    assert last.notes == ([note] if note else [])


# -- some really run -------------------------------------------------------------------------------------------------


def test_a_few_in_earnest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that only guards see, one that only the sandbox sees, and one that is not wrong at all."""
    monkeypatch.setattr(mutants, "BUILT", tmp_path)
    poisons = BY_KEY["ragged_prefill/triton/poisons_the_baseline"]
    borrows = BY_KEY["ragged_prefill/triton/the_reference_itself"]
    right = Mutant("right", "ragged_prefill", "triton", "none", append="# right\n", cpu=(Verdict.WRONG_ANSWER,))
    done: list[Outcome] = []
    outcomes = mutants.run(TABLE, [poisons, borrows, right], CPU, 2, done.append)
    assert sorted(outcome.mutant.name for outcome in done) == sorted(outcome.mutant.name for outcome in outcomes)
    found = {outcome.mutant.name: outcome for outcome in outcomes}
    assert [found[name].trouble for name in (poisons.name, borrows.name)] == ["", ""]
    assert [found[name].let_pass() for name in found] == ["yes"] * 3
    assert found["right"].trouble == "got PASS, not WRONG_ANSWER"
    assert [outcome.first.strict for outcome in outcomes[:2]] == [Verdict.INPUT_MUTATED, Verdict.LINT_ERROR]
