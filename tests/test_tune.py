"""`make tune` without a GPU: places in files, spaces and what prunes them, the search, the worker, what is printed."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import catalog, cli, languages, plan, runner, timing
from harness.bench import measure
from harness.devices import Device
from harness.languages import Submission
from harness.runner import Job
from harness.tune import cli as tune_cli
from harness.tune import places, search, space, worker
from harness.tune.search import Trial
from harness.tune.space import Candidate, Case, Space
from harness.verdict import CaseResult, ExitCode, KitError, Verdict

PY, CU = Path("run_kernel.py"), Path("run_kernel.cu")
PYTHON = '''"""内核"""
TUNING = {
    "c500": {128: (64, True), 256: (32, False)},  # 理由
    "sm90": {128: (128, True)}, "其他": {128: (1, True)}, "flat": (7, 8, 9),
}
MIN_KEYS = 64  # of a part
BUILT = max(1, 2)
'''
CPP = """// constexpr int kMin = 1; in words only
constexpr Tiling kTable[] = {
    {64, 64, 2, true},   // 64 KiB: {64, 64, 9, true} was slower
    {128, 128, 2, false}, {128, 64, 1, false},
};
constexpr int kLow = 4 << 20, kHigh = 20 << 20;
constexpr int kMin = 64;
constexpr float kLazy = 8.0f;
constexpr Tiling kOne = {128, 2, {1, 2}};
template <int kN> struct Config { static constexpr int kMin = kN, kOne = 3; };
const char* kText = "constexpr int kLazy = 3;";
"""


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text", "place", "value", "old", "new"),
    [
        (PY, PYTHON, ("TUNING", "c500", 256), (16, True), "(32, False)", "(16, True)"),
        (PY, PYTHON, ("TUNING", "其他", 128), (2, False), "(1, True)", "(2, False)"),
        (PY, PYTHON, ("TUNING", "flat"), (1, 2, 3), "(7, 8, 9)", "(1, 2, 3)"),
        (PY, PYTHON, ("TUNING", "sm90"), {256: (1, False)}, "{128: (128, True)}", "{256: (1, False)}"),
        (PY, PYTHON, ("MIN_KEYS",), 128, "MIN_KEYS = 64", "MIN_KEYS = 128"),
        (CU, CPP, ("kTable", (128, 64)), (128, 64, 4, True), "{128, 64, 1, false}", "{128, 64, 4, true}"),
        (CU, CPP, ("kTable", (128,)), (128, 128, 1, True), "{128, 128, 2, false}", "{128, 128, 1, true}"),
        (CU, CPP, ("kHigh",), "10 << 20", "kHigh = 20 << 20", "kHigh = 10 << 20"),
        (CU, CPP, ("kLow",), 1024, "kLow = 4 << 20", "kLow = 1024"),
        (CU, CPP, ("kMin",), 32, "kMin = 64", "kMin = 32"),
        (CU, CPP, ("kLazy",), 0.0, "kLazy = 8.0f", "kLazy = 0.0f"),
        (CU, CPP, ("kOne",), (64, 4, (3, 4)), "{128, 2, {1, 2}}", "{64, 4, {3, 4}}"),
    ],
)
def test_one_literal_is_replaced_and_nothing_else(
    path: Path, text: str, place: Any, value: Any, old: str, new: str
) -> None:
    assert text.count(old) == 1
    changed = places.replaced(text, {place: value}, path)
    assert changed == text.replace(old, new)
    assert places.read(changed, place, path) == value


@pytest.mark.parametrize(
    ("path", "text", "changes", "said"),
    [
        (PY, PYTHON, {("TUNING", "c500", 64): (1, True)}, r'no TUNING\["c500"\]\[64\]'),
        (PY, PYTHON, {("TUNING", "c500", True): (1, True)}, "no TUNING"),
        (PY, PYTHON, {("BUILT",): 3}, "no BUILT"),
        (PY, PYTHON, {("TUNING", "c500", 128): (1, True, 2)}, "another form"),
        (PY, PYTHON, {("TUNING", "c500", 128): (1, 1)}, "another form"),
        (PY, PYTHON, {("TUNING", "c500"): {128: (1, True)}, ("TUNING", "c500", 256): (1, True)}, "overlap"),
        (PY, "TUNING = {", {("TUNING",): 1}, "must be Python"),
        (CU, CPP, {("kTable", (192,)): (192, 1, 1, True)}, r"no kTable\[192\]"),
        (CU, CPP, {("kText",): 1}, "no kText"),
        (CU, CPP, {("kN",): 1}, "no kN"),
        (CU, CPP + "constexpr int kMin = 2;\n", {("kMin",): 1}, "no kMin"),
        (CU, CPP, {("kTable", (64,)): (64, 64, True, True)}, "another form"),
    ],
)
def test_a_place_that_is_not_there_or_takes_no_such_value_is_named(
    path: Path, text: str, changes: Any, said: str
) -> None:
    with pytest.raises(KitError, match=said):
        places.replaced(text, changes, path)


# -- the spaces of the tasks -------------------------------------------------------------------------------------------


def every_space() -> list[tuple[str, Space]]:
    return [(task, each) for task in catalog.tasks() for each in space.spaces(task)]


def test_every_submission_has_a_space_for_both_rows_and_what_the_judge_runs() -> None:
    have = {(task, s.language, s.row, suite) for task, s in every_space() for suite in s.suites}
    assert {
        (t, la, r, s)
        for t in catalog.tasks()
        for la in catalog.LANGUAGES
        for r in space.ROWS
        for s in ("judge", "live")
    } == have


@pytest.mark.parametrize(
    ("task", "each"), every_space(), ids=lambda v: v if isinstance(v, str) else f"{v.language}-{v.row}"
)
def test_every_candidate_applies_to_the_file_and_says_why(task: str, each: Space) -> None:
    path = catalog.submission_path(task, each.language)
    text = path.read_text(encoding="utf-8")
    found = space.candidates([each], text, path, [])
    assert 3 <= len(found) <= 24
    assert sum(not candidate.pruned for candidate in found) >= 3
    assert all(candidate.why for candidate in found)
    assert set(each.suites) == set(each.probe)
    for candidate in found:
        changed = places.replaced(text, candidate.changes, path)
        assert (changed == text) == (candidate.pruned == "is the current one")
    # What the file runs now must itself pass: arithmetic that prunes it is wrong.
    current = places.read(text, each.place, path)
    same = space.candidates([dataclasses.replace(each, candidates={current: "now"}, others=())], text, path, [])
    assert [candidate.pruned for candidate in same] == ["is the current one"]
    assert each.needs is not None
    chip, needs = space.CHIPS[each.row], each.needs(current, space.CHIPS[each.row].lanes)
    assert needs["shared"] <= min(chip.shared_of_block, each.shared_limit)
    assert needs["registers"] <= chip.registers_of_thread
    assert needs["registers"] * needs["threads"] <= chip.registers


@pytest.mark.parametrize(
    ("task", "language", "suite", "name"),
    [
        ("mla_decode", "cuda", "judge", "{4, 16, 2, false, 1}"),
        ("mla_decode", "cuda", "judge", "kMinKeys = 32"),
        ("paged_prefill", "cuda", "judge", "{128, 1, 128, true, 1}"),
        ("fused_moe", "cuda", "judge", "{64, 128, 4, 2, 2, 16}"),
        ("kvcache_decode", "cuda", "judge", "{128, true, 1, 16, 4, 128, 5}"),
        ("mla_decode", "triton", "judge", "(64, 32, 8, 4, 2, 132)"),
        ("fused_moe", "triton", "judge", "(256, 64, 16, True, 8, 6)"),
        ("paged_prefill", "tilelang", "judge", "(192, 128, 384, 2)"),
        ("kvcache_decode", "tilelang", "judge", "(64, 256, 2)"),
        ("fused_moe", "tilelang", "judge", "(64, 256, 8, 16)"),
        ("ragged_prefill", "triton", "live", "(128, 64, 8, 3)"),
    ],
)
def test_candidates_that_earlier_measurements_name_are_run(task: str, language: str, suite: str, name: str) -> None:
    path = catalog.submission_path(task, language)
    chosen = space.chosen(task, language, "sm90", suite)
    found = space.candidates(chosen, path.read_text(encoding="utf-8"), path, [])
    assert [c.pruned in ("", "is the current one") for c in found if c.name(path) == name] == [True]


def toy(**changes: Any) -> Space:
    fields: dict[str, Any] = {
        "language": "triton",
        "row": "c500",
        "place": ("TUNING", "flat"),
        "suites": ("judge",),
        "probe": {"judge": 2},
        "candidates": {},
        "needs": lambda row, lanes: {"shared": row[0] << 10, "threads": row[1] * lanes, "registers": row[2]},
    }
    return Space(**{**fields, **changes})


@pytest.mark.parametrize(
    ("row", "changes", "why"),
    [
        ((64, 4, 216), {}, ""),
        ((65, 4, 100), {}, "66560 bytes of shared memory; a block of c500 has 65536"),
        ((49, 4, 100), {"shared_limit": 48 << 10}, "50176 bytes of shared memory; the file allows 49152"),
        ((65, 4, 100), {"row": "sm90"}, ""),
        ((16, 17, 16), {}, "1088 threads; a block has at most 1024"),
        ((16, 4, 217), {}, "217 registers per thread for its tiles alone; 216 are left beside addresses"),
        ((16, 16, 200), {}, "1024 threads of 200 registers; there are 131072"),
        ((7, 8, 9), {}, "is the current one"),
    ],
)
def test_arithmetic_prunes_what_cannot_run_and_says_why(row: Any, changes: dict[str, Any], why: str) -> None:
    (found,) = space.candidates([toy(candidates={row: "a try"}, **changes)], PYTHON, PY, [])
    assert found.pruned == why


def test_wave_quantisation_prunes_what_leaves_multiprocessors_idle() -> None:
    def blocks(row: Any, shapes: Any) -> int:
        return int(shapes["q"][0]) // int(row[0])

    text = PYTHON.replace("(7, 8, 9)", "(8, 8, 9)")
    each = toy(candidates={(4, 8, 9): "even", (7, 8, 9): "118 blocks on 104, and 237"}, blocks=blocks)
    cases = [Case(1, "", {"q": [8 * 104]}), Case(2, "", {"q": [8 * 208]})]
    even, uneven = space.candidates([each], text, PY, cases)
    assert (even.pruned, even.fill) == ("", pytest.approx(1.0))
    assert uneven.fill == pytest.approx(math.sqrt(118 / 208 * 237 / 312))
    assert uneven.pruned == "its blocks keep 66% of the multiprocessors busy, those of the current row 100%"
    # No cases, or a kernel that cuts its work itself: no such arithmetic.
    assert [c.pruned for c in space.candidates([each], text, PY, [])] == ["", ""]
    assert [c.pruned for c in space.candidates([dataclasses.replace(each, blocks=None)], text, PY, cases)] == ["", ""]


def test_a_task_without_spaces_and_a_file_that_is_none_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "TASKS", tmp_path)
    with pytest.raises(KitError, match="toy has no search space yet") as caught:
        space.spaces("toy")
    assert caught.value.code is ExitCode.MISSING_FILE
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "tuning.py").write_text("SPACES = [{'language': 'cuda'}]", encoding="utf-8")
    with pytest.raises(KitError, match="cannot be read"):
        space.spaces("toy")


# -- the search --------------------------------------------------------------------------------------------------------


def trial(number: int, each: Space | None = None) -> Trial:
    return Trial(Candidate(number, each or toy(), {("TUNING", "flat"): (number, 1, 1)}, "a try"))


class FakeClock:
    """Times trials by a table: number -> ratio, or ratio by case; a text fails."""

    def __init__(self, speeds: dict[int, Any], width: float = 0.01) -> None:
        self.speeds, self.width = speeds, width
        self.asked: list[tuple[list[int], list[int]]] = []

    def __call__(self, trials: Sequence[Trial], cases: Sequence[int]) -> None:
        self.asked.append(([t.candidate.number for t in trials], list(cases)))
        for each in trials:
            speed = self.speeds[each.candidate.number]
            if isinstance(speed, str):
                each.failed = speed
                continue
            for case in cases:
                ratio = speed[case] if isinstance(speed, dict) else speed
                each.ratios[case] = [ratio, ratio * (1 - self.width), ratio * (1 + self.width)]


@pytest.mark.parametrize(
    ("cases", "probe", "expected"),
    [
        ([1], 6, [[1]]),
        ([1, 2, 3], 2, [[2], [2, 1, 3]]),
        (list(range(1, 13)), 6, [[6], [6, 3, 8, 12], [6, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]]),
        ([2, 5, 9], 6, [[5], [5, 2, 9]]),
    ],
)
def test_rungs_begin_with_the_probe_and_end_with_all_cases(cases: list[int], probe: int, expected: Any) -> None:
    assert search.rungs(cases, probe) == expected


def test_the_better_half_goes_on_and_nobody_is_timed_twice_on_a_case() -> None:
    trials = [trial(number) for number in range(1, 11)]
    clock = FakeClock({number: 0.8 + 0.05 * number for number in range(1, 11)} | {3: "RACE"})
    finalists = search.search(trials, search.rungs(list(range(1, 13)), 6), clock)
    assert [numbers for numbers, _ in clock.asked] == [list(range(1, 11)), [10, 9, 8, 7, 6], [10, 9, 8]]
    assert [cases for _, cases in clock.asked] == [[6], [3, 8, 12], [1, 2, 4, 5, 7, 9, 10, 11]]
    assert [t.candidate.number for t in finalists] == [10, 9, 8]
    states = {t.candidate.number: search.outcome(t, "row", 12).state for t in trials}
    assert states[3] == "failed: RACE"
    assert (states[1], states[6], states[10]) == ("left behind", "left behind", "faster")


def test_a_candidate_that_wins_on_one_case_only_is_not_advised() -> None:
    lucky = {case: 1.3 if case == 6 else 0.97 for case in range(1, 13)}
    finalists = search.search([trial(1), trial(2)], search.rungs(list(range(1, 13)), 6), FakeClock({1: lucky, 2: 0.99}))
    assert search.winners(finalists) == []
    assert [t.candidate.number for t in finalists] == [1, 2]


def test_a_difference_within_the_interval_is_none_and_each_space_has_its_winner() -> None:
    first, second = toy(), toy()
    trials = [trial(1, first), trial(2, first), trial(3, second), trial(4, second)]
    finalists = search.search(trials, [[1]], FakeClock({1: 1.2, 2: 1.1, 3: 1.005, 4: 0.9}, width=0.02))
    assert [t.candidate.number for t in search.winners(finalists)] == [1]
    assert [search.outcome(t, "row", 1).state for t in trials] == ["faster", "faster", "no different", "slower"]


def test_the_interval_of_several_cases_is_narrower_than_that_of_one() -> None:
    one, four = trial(1), trial(2)
    FakeClock({1: 1.1, 2: {1: 1.0, 2: 1.21, 3: 1.0, 4: 1.21}})([one], [1])
    FakeClock({2: {1: 1.0, 2: 1.21, 3: 1.0, 4: 1.21}})([four], [1, 2, 3, 4])
    narrow, wide = four.overall(), one.overall()
    assert narrow is not None
    assert wide is not None
    assert narrow.value == pytest.approx(wide.value) == pytest.approx(1.1)
    assert math.log(wide.high / wide.low) == pytest.approx(2 * math.log(narrow.high / narrow.low))


# -- the worker --------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., worker.TuneSession]:
    """A session on the CPU whose submissions are plain functions by file name, and whose clock is `paired`."""
    monkeypatch.setattr(timing, "finish_device", lambda: None)

    def open_session(kernels: dict[str, Callable[[Sequence[Any]], None]], on: list[int]) -> worker.TuneSession:
        def load(language: str, path: Path, *rest: Any) -> Submission:
            return Submission(language, path, kernels[path.stem])

        monkeypatch.setattr(languages, "load", load)
        files = {str(number): str(tmp_path / f"{name}.py") for number, name in enumerate(kernels) if number}
        job = Job(
            task="kvcache_decode",
            language="triton",
            variant="",
            suite="tiny",
            config=str(catalog.suite_path("kvcache_decode", "tiny")),
            submission=str(tmp_path / f"{next(iter(kernels))}.py"),
            cases=None,
            device="cpu",
            deadline_s=60.0,
            settings={"candidates": files, "on": on, "budget_s": 0.1, "lint": False},
            required=True,
        )
        opened = worker.TuneSession(job)
        opened.load()
        return opened

    return open_session


def fill_output(value: float) -> Callable[[Sequence[Any]], None]:
    return lambda args: args[3].fill_(value)


def measured(ours: Any, ratio: float | None, wrong: int = 0) -> measure.Pair:
    alone = measure.Measured(2.0, 1.9, 2.1, 10, 2.0)
    return measure.Pair(
        alone, alone, ratio, ratio and ratio * 0.99, ratio and ratio * 1.01, wrong, "precise", ["a note"]
    )


def test_the_worker_times_each_candidate_in_turn_with_the_current_file(
    session: Callable[..., worker.TuneSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def pair(ours: Any, peer: Any, budget_s: float, hooks: Any) -> measure.Pair:
        outputs: list[float] = []
        for call in (ours, peer, peer, ours):
            hooks.before()
            call()
            outputs.append(hooks.holds())
        called.append(f"{outputs} {budget_s}")
        return measured(ours, 1.25)

    monkeypatch.setattr(measure, "time_pair", pair)
    opened = session({"current": fill_output(1.0), "same": fill_output(1.0), "other": fill_output(2.0)}, [1, 2])
    assert opened.count() == 2
    phases: list[str] = []
    first, second = opened.run(1, phases.append), opened.run(2, phases.append)
    assert first.strict is second.strict is Verdict.PASS
    assert first.counts == {"ratios": {"1": [1.25, 1.2375, 1.2625, 2.0, 2.0], "2": [1.25, 1.2375, 1.2625, 2.0, 2.0]}}
    assert first.notes == ["a note"]
    # The same output holds whoever wrote it; another output is noticed, so a candidate that changes its mind is too.
    assert called == ["[True, True, True, True] 0.1"] * 2 + ["[True, False, False, True] 0.1"] * 2
    assert phases == ["compile", "generate", "compile", "time", "generate", "compile", "time"] * 2


@pytest.mark.parametrize(
    ("kernel", "pair", "verdict", "said"),
    [
        (lambda args: 1 // 0, measured(None, 1.0), Verdict.RUNTIME_ERROR, "case 1: .*ZeroDivisionError"),
        (fill_output(1.0), measured(None, 1.0, wrong=2), Verdict.NONDETERMINISTIC, "2 timed calls gave another output"),
        (fill_output(1.0), measured(None, None), Verdict.RUNTIME_ERROR, "not one kernel ran"),
    ],
)
def test_a_candidate_that_cannot_be_timed_says_why(
    session: Callable[..., worker.TuneSession],
    monkeypatch: pytest.MonkeyPatch,
    kernel: Any,
    pair: measure.Pair,
    verdict: Verdict,
    said: str,
) -> None:
    monkeypatch.setattr(measure, "time_pair", lambda *args: pair)
    result = session({"current": fill_output(1.0), "candidate": kernel}, [1]).run(1, lambda phase: None)
    assert result.strict is verdict
    assert re.search(said, result.detail)


def test_the_cases_of_a_suite_have_the_shapes_of_their_tensors() -> None:
    found = {number: (label, shapes) for number, label, shapes in worker.cases("ragged_prefill", "judge")}
    assert len(found) == 12
    label, shapes = found[6]
    assert label == "b4 s4096"
    assert shapes["q"] == [16384, 32, 128]
    assert shapes["qo_indptr"] == [5]
    assert "causal" not in shapes


# -- the command -------------------------------------------------------------------------------------------------------

H200 = Device("cuda", "cuda", "NVIDIA H200", "sm90")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A pretended H200: candidates are right unless `wrong` names their row, and as fast as `speeds` says."""
    world: dict[str, Any] = {"wrong": {}, "speeds": {}, "jobs": []}
    monkeypatch.setattr(plan, "pick_device", lambda requested: H200)
    monkeypatch.setattr(tune_cli, "BUILT", tmp_path / "built")
    monkeypatch.setattr(tune_cli, "RESULTS", tmp_path)
    # The printed places are relative to the kit.
    monkeypatch.setattr(tune_cli, "chosen_cases", lambda *args: [Case(number, "", {}) for number in range(1, 7)])

    def row(path: str) -> str:
        text = Path(path).read_text(encoding="utf-8")
        return places.render(places.read(text, ("TUNING", "sm90"), Path(path)), Path(path))

    def run_jobs(jobs: Any, on_result: Any, parallel: int, command: Any = runner.WORKER) -> list[CaseResult]:
        results = []
        for job in jobs:
            world["jobs"].append(job)
            for number in job.cases:
                where = job.settings["candidates"][str(number)] if "candidates" in job.settings else job.submission
                verdict = world["wrong"].get(row(where), Verdict.PASS) if "time" in job.settings else Verdict.PASS
                result = job.result(number, verdict, "" if verdict is Verdict.PASS else "told so")
                if "candidates" in job.settings:
                    speed = world["speeds"].get(row(where), 0.9)
                    values = [speed, speed * 0.99, speed * 1.01, 1.0, speed]
                    result.counts = {"ratios": {str(case): values for case in job.settings["on"]}}
                results.append(result)
                on_result(result)
        return results

    monkeypatch.setattr(runner, "run_jobs", run_jobs)
    return world


WORDS = ["tune", "--task", "mla_decode", "--lang", "triton"]


def kept(folder: Path) -> Any:
    return json.loads((folder / "tune-h200-mla_decode-triton.json").read_text(encoding="utf-8"))["runs"]


def test_a_search_prints_the_row_to_paste_keeps_the_losses_and_leaves_the_file_alone(
    gpu: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = catalog.submission_path("mla_decode", "triton")
    before = path.read_bytes()
    gpu["speeds"] = {"(64, 32, 8, 4, 2, 132)": 1.1, "(64, 32, 8, 3, 1, 132)": 1.05}
    gpu["wrong"] = {"(64, 16, 8, 6, 4, 132)": Verdict.WRONG_ANSWER}
    assert cli.main([*WORDS, "--budget", "0.5"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert path.read_bytes() == before
    assert 'at TUNING["sm90"], in place of (64, 32, 8, 3, 2, 132):' in out
    assert "    (64, 32, 8, 4, 2, 132),  # 1.100 (" in out
    assert "over 6 judge cases, NVIDIA H200" in out
    assert "pruned: 280 registers per thread" in out
    assert "failed: WRONG_ANSWER on case 4: told so" in out
    states = {each["row"]: each["state"] for each in kept(tmp_path)[0]["candidates"]}
    assert states["(64, 32, 8, 4, 2, 132)"] == "faster"
    assert states["(64, 32, 8, 2, 2, 132)"] in ("left behind", "slower")
    assert states["(64, 16, 8, 6, 4, 132)"].startswith("failed: WRONG_ANSWER")
    # Every job runs the row that is tuned, and checks come before times.
    assert all(job.settings["tuning"] == "sm90" for job in gpu["jobs"])
    assert {job.settings["budget_s"] for job in gpu["jobs"] if "candidates" in job.settings} == {0.5}
    kinds = ["candidates" in job.settings for job in gpu["jobs"]]
    assert kinds == sorted(kinds)
    cli.main(WORDS)
    assert len(kept(tmp_path)) == 2, "an older search stays"


def test_where_nothing_is_faster_the_current_row_stays(gpu: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    gpu["speeds"] = {"(64, 32, 8, 4, 2, 132)": 1.003}  # within its interval
    assert cli.main(WORDS) == ExitCode.OK
    out = capsys.readouterr().out
    assert "Keep the current row" in out
    assert "To paste" not in out


def test_a_current_file_that_is_wrong_is_not_tuned(gpu: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    gpu["wrong"] = {"(64, 32, 8, 3, 2, 132)": Verdict.RACE}
    assert cli.main(WORDS) == ExitCode.REJECTED
    assert "run_kernel.py itself is RACE on case 4 (told so); mend it" in capsys.readouterr().err
    assert all("candidates" not in job.settings for job in gpu["jobs"])


def test_an_interrupted_search_keeps_what_was_timed(
    gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = runner.run_jobs
    calls = iter(range(10))

    def run_jobs(*args: Any) -> list[CaseResult]:
        if next(calls) == 2:  # checks, the first rung, then Ctrl-C
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(runner, "run_jobs", run_jobs)
    assert cli.main(WORDS) == ExitCode.INTERRUPTED
    assert "no row is advised" in capsys.readouterr().out
    assert sum(each["ratio"] is not None for each in kept(tmp_path)[0]["candidates"]) > 5


def test_all_candidates_wrong_is_no_success(gpu: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = catalog.submission_path("mla_decode", "triton")
    spaces = space.chosen("mla_decode", "triton", "sm90", "judge")
    found = space.candidates(spaces, path.read_text(encoding="utf-8"), path, [])
    gpu["wrong"] = {each.name(path): Verdict.TIMEOUT for each in found if each.pruned != "is the current one"}
    assert cli.main(WORDS) == ExitCode.NOTHING_RAN


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--task", "mla_decode"], ExitCode.USAGE, "LANG=cuda|triton|tilelang"),
        (["--task", "mla", "--lang", "cuda"], ExitCode.UNKNOWN_TASK, "TASK=mla"),
        (["--task", "mla_decode", "--lang", "c"], ExitCode.UNKNOWN_LANGUAGE, "LANG=c"),
        (["--task", "mla_decode", "--lang", "cuda", "--row", "sm75"], ExitCode.USAGE, "ROW=sm75: no such row"),
        (["--task", "mla_decode", "--lang", "cuda", "--row", "c500"], ExitCode.NEEDS_DEVICE, "compiles the sm90 table"),
        (["--task", "mla_decode", "--lang", "triton", "--budget", "x"], ExitCode.USAGE, "BUDGET=x"),
        (["--task", "mla_decode", "--lang", "cuda", "--suite", "tiny"], ExitCode.MISSING_FILE, "there is ROW=c500"),
    ],
)
def test_what_cannot_be_tuned_is_said_in_one_sentence(
    gpu: dict[str, Any], capsys: pytest.CaptureFixture[str], words: list[str], code: ExitCode, said: str
) -> None:
    assert cli.main(["tune", *words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_without_a_gpu_candidates_are_listed_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, "--device", "cpu"]) == ExitCode.NEEDS_DEVICE
    assert "PLAN=1" in capsys.readouterr().err
    assert cli.main([*WORDS, "--device", "cpu", "--row", "sm90", "--plan", "--cases", "1,2"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "row sm90, 2 cases of the suite judge" in out
    assert "three tiles on their way [shared 221184, threads 256, registers 140]" in out
    assert "pruned: 280 registers per thread" in out
    assert out.splitlines()[-1] == "10 candidates to run, 2 pruned"


@pytest.mark.parametrize(
    ("said", "code", "error"),
    [
        (
            "[[1, 'b1', {}], [2, 'b2', {}]]",
            ExitCode.MISSING_FILE,
            "CASES=3: there is no case 3; the suite judge has cases 1 to 2",
        ),
        ("", ExitCode.PACKAGE_ERROR, "The cases of mla_decode could not be read"),
    ],
)
def test_cases_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, code: ExitCode, error: str
) -> None:
    words = (sys.executable, "-S", "-c", f"print({said!r}.replace(chr(39), chr(34)))")
    monkeypatch.setattr(tune_cli, "TIMER", words)
    assert cli.main([*WORDS, "--device", "cpu", "--plan", "--cases", "3"]) == code
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "language", "device", "row"),
    [
        (None, "triton", H200, "sm90"),
        ("c500", "triton", H200, "c500"),
        (None, "triton", Device("cuda", "cuda", "A100", "sm80"), "c500"),  # a Python file without that row runs c500
        (None, "cuda", Device("cuda", "cuda", "A100", "sm80"), "sm90"),  # the 32-lane table
        (None, "cuda", Device("maca", "cuda", "C500", "c500"), "c500"),
        (None, "tilelang", Device("cpu", "cpu", "CPU", "c500"), "c500"),
    ],
)
def test_the_row_is_the_one_that_the_device_runs(asked: str | None, language: str, device: Device, row: str) -> None:
    assert tune_cli.pick_row(asked, language, device, planned=False) == row
