"""What the judge makes of times: on a pretended GPU, with a pretended stopwatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from judged import (
    REFERENCE,
    Bench,
    good,
    last_key_dropped,
    past_the_end,
)

from harness import judge, timing
from harness.devices import Device
from harness.verdict import Verdict

# -- timing ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Stopwatch:
    """Stands in for timing.py on a pretended GPU (torch's CPU); calls both sides once and returns `times`."""

    times: timing.PairTime
    asked: list[Any] = dataclasses.field(default_factory=list)
    held: list[bool] = dataclasses.field(default_factory=list)

    def pair(
        self, ours: Any, baseline: Any, budget_s: float, workload: Any, hooks: timing.Hooks | None = None
    ) -> timing.PairTime:
        hooks = hooks or timing.Hooks()
        self.asked.append((baseline is not None, budget_s, workload))
        for _ in range(3):
            hooks.before()
            ours()
            self.held.append(hooks.holds())
        if baseline is not None:
            baseline()
        return self.times


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    watch = Stopwatch(timing.PairTime(1.0, 4.0, 1.5, 5.0, 10, "kernels", notes=["a note"]))
    monkeypatch.setattr(timing, "finish_stream", lambda: None)
    monkeypatch.setattr(timing, "finish_device", lambda: None)
    monkeypatch.setattr(timing, "pair", watch.pair)
    return watch


GPU = Device("cuda", "cpu", "a pretended GPU", "sm90")


def test_on_a_gpu_a_right_kernel_is_timed_and_scored(bench: Bench, stopwatch: Stopwatch) -> None:
    result = bench.run(good, device=GPU)
    assert result.ok
    assert (result.ours_ms, result.baseline_ms, result.score) == (1.0, 4.0, 80.0)
    assert "a note" in result.notes
    workload = {"flops": 4 * 24 * 40 * 64, "bytes": 0, "dtype": "bf16"}
    assert stopwatch.asked == [(True, judge.TIMING_BUDGET_S, workload)]
    assert stopwatch.held == [True] * 3


def test_a_wrong_kernel_is_not_timed(bench: Bench, stopwatch: Stopwatch) -> None:
    assert bench.run(last_key_dropped, device=GPU).score is None
    assert stopwatch.asked == []


def test_a_time_that_cannot_be_true_is_no_score(bench: Bench, stopwatch: Stopwatch) -> None:
    stopwatch.times.suspicion = "too good"
    result = bench.run(good, device=GPU)
    assert (result.judge, result.strict, result.detail) == (Verdict.PASS, Verdict.SUSPECT_TIME, "too good")
    assert (result.ours_ms, result.score) == (1.0, None)


def test_a_kernel_that_stops_working_while_it_is_timed_is_wrong(bench: Bench, stopwatch: Stopwatch) -> None:
    calls: list[int] = []

    def lazy(*args: Any) -> None:
        calls.append(1)
        if len(calls) <= 4:  # three checked calls, and one timed one
            good(*args)

    stopwatch.times.wrong_calls = [1, 2]
    result = bench.run(lazy, device=GPU)
    assert stopwatch.held == [True, False, False]
    assert (result.strict, result.score) == (Verdict.WRONG_ANSWER, None)
    assert "timed call 2 gave another output" in result.detail


def test_a_fault_while_timed_is_the_submissions(bench: Bench, stopwatch: Stopwatch) -> None:
    calls: list[int] = []

    def breaks(*args: Any) -> None:
        calls.append(1)
        if len(calls) > 3:
            raise ValueError("no more")
        good(*args)

    result = bench.run(breaks, device=GPU)
    assert (result.judge, result.strict) == (Verdict.PASS, Verdict.RUNTIME_ERROR)
    assert "ValueError: no more" in result.detail


def test_writing_outside_while_timed_is_seen(bench: Bench, stopwatch: Stopwatch) -> None:
    calls: list[int] = []

    def strays(*args: Any) -> None:
        calls.append(1)
        (good if len(calls) <= 3 else past_the_end)(*args)

    assert bench.run(strays, device=GPU).strict is Verdict.OUT_OF_BOUNDS


def test_the_substitute_baseline_is_not_timed(bench: Bench, stopwatch: Stopwatch) -> None:
    stopwatch.times.baseline_ms = None
    package = bench.package(**{"    p = torch.softmax": "    import no_such_library\n    p = torch.softmax"})
    result = bench.run(good, package, device=GPU)
    assert (result.ok, result.ours_ms, result.baseline_ms, result.score) == (True, 1.0, None, None)
    assert stopwatch.asked[0][0] is False


PEER = """
def peer(q, k, v, output, count):
    {body}
    return "a named library", lambda: CALLED.append("peer")
def yardsticks(q, k, v, output, count):
    return {"as fast as it goes": lambda: CALLED.append("yardstick"), "not here": lambda: 1 / 0}
CALLED = []
"""


@pytest.mark.parametrize("first", [True, False])
def test_a_contract_may_put_its_peer_first(bench: Bench, stopwatch: Stopwatch, first: bool) -> None:
    text = REFERENCE + f"PEER_FIRST = {first}\n" + PEER.replace("{body}", "pass")
    contract = bench.contract(text)
    result = bench.run(good, contract=contract, device=GPU)
    assert result.ok
    assert result.peer == ("a named library" if first else "")
    called = contract.peer.__globals__["CALLED"] if contract.peer else None
    assert called == (["peer"] + ["yardstick"] * 3 if first else [])
    rate = f"{4 * 24 * 40 * 64 / 1e9:.3g} T/s, 0 GB/s"
    assert (f"as fast as it goes: 1 ms, {rate}, 1 times ours" in result.notes) is first
    assert ("not here: division by zero" in result.notes) is first


def test_a_peer_that_is_not_installed_leaves_the_packages_own_baseline(bench: Bench, stopwatch: Stopwatch) -> None:
    contract = bench.contract(REFERENCE + "PEER_FIRST = True\n" + PEER.replace("{body}", "import no_such_library"))
    result = bench.run(good, contract=contract, device=GPU)
    assert (result.ok, result.peer, stopwatch.asked[0][0]) == (True, "", True)
    assert any("not timed against another library: No module named 'no_such_library'" in n for n in result.notes)
    assert len(stopwatch.asked) == 1
