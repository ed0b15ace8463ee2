"""The clock of `make bench` on a pretended device with known noise and drift. A GPU is needed for real times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness import timing
from harness.bench import measure
from harness.timing import KernelEvent
from harness.verdict import KernelFault, Verdict
from tests import bench_fakes
from tests.bench_fakes import FakeDevice, noisy


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return bench_fakes.install(monkeypatch)


def test_two_constant_calls(device: FakeDevice) -> None:
    pair = measure.time_pair(device.kernel("ours", 1.0), device.kernel("peer", 2.0), 5.0)
    assert pair.peer is not None
    assert (pair.ours.ms, pair.ours.low_ms, pair.ours.high_ms) == pytest.approx((1.0, 1.0, 1.0))
    assert (pair.peer.ms, pair.ratio, pair.ratio_low, pair.ratio_high) == pytest.approx((2.0, 2.0, 2.0, 2.0))
    assert (pair.ours.event_ms, pair.peer.event_ms) == pytest.approx((1.005, 2.005))
    assert (pair.ours.clock, pair.stopped, pair.wrong_calls, pair.notes) == ("kernels", "precise", [], [])
    assert device.sessions == 2  # one narrow interval is not enough
    assert pair.ours.host_ms == pytest.approx(1.0, rel=0.02)
    assert (pair.ours.host_calls, pair.peer.host_calls) == (996, 499)  # as many as fit into a fifth of 5 s


def test_calls_alternate_and_each_follows_a_flush(device: FakeDevice) -> None:
    measure.time_pair(device.kernel("ours", 1.0), device.kernel("peer", 2.0), 1.0)
    timed = device.log[: device.log.index("ours", 400)]
    rounds = timed[: len(timed) // 12 * 12]
    assert rounds[1::3] == ["ours", "peer", "peer", "ours"] * (len(rounds) // 12)
    assert set(rounds[::3]) == {"flush"}
    assert set(rounds[2::3]) == {"mark"}


def test_one_call(device: FakeDevice) -> None:
    found = measure.time_call(device.kernel("ours", noisy(0.5, 0.01, 1)), 5.0)
    assert found.low_ms <= 0.5 <= found.high_ms
    assert found.low_ms < found.ms < found.high_ms
    assert (found.high_ms - found.low_ms) / found.ms < 0.02
    assert found.stopped == "precise"


def test_noise_takes_more_samples_and_the_interval_holds_the_truth(device: FakeDevice) -> None:
    quiet = measure.time_pair(device.kernel("a", noisy(1.0, 0.01, 1)), device.kernel("b", noisy(1.5, 0.01, 2)), 60.0)
    loud = measure.time_pair(device.kernel("a", noisy(1.0, 0.1, 3)), device.kernel("b", noisy(1.5, 0.1, 4)), 60.0)
    assert loud.ours.samples > 3 * quiet.ours.samples
    for pair in (quiet, loud):
        assert pair.stopped == "precise"
        assert pair.ratio_low <= 1.5 <= pair.ratio_high
        assert pair.ratio_high / pair.ratio_low < 1.021


def test_a_budget_ends_what_would_never_be_precise(device: FakeDevice) -> None:
    ours, peer = device.kernel("a", noisy(5.0, 1.0, 1)), device.kernel("b", noisy(5.0, 1.0, 2))
    before = device.host_ms
    pair = measure.time_pair(ours, peer, 1.0)
    assert pair.stopped == "budget"
    assert pair.ratio_high / pair.ratio_low > 1.02
    # Warming up, the budget, and two times calls back to back.
    assert (device.host_ms - before) / 1e3 < measure.WARM_UP_S + 1.0 + 1.0 + 2 * measure.HOST_SHARE * 1.0


def test_a_few_rounds_are_made_whatever_they_cost(device: FakeDevice) -> None:
    pair = measure.time_pair(device.kernel("a", 900.0), device.kernel("b", 900.0), 0.0)
    assert pair.ours.samples == 2 * measure.LEAST_ROUNDS
    assert (pair.stopped, pair.ours.host_calls) == ("budget", 3)


def test_a_drift_that_both_share_is_not_in_the_ratio(device: FakeDevice) -> None:
    """The clock falls by 5 % a second. One side's median moves; the ratio's interval stays right and narrow."""
    ours = device.kernel("a", noisy(1.0, 0.005, 1, 0.05))
    peer = device.kernel("b", noisy(1.5, 0.005, 2, 0.05))
    pair = measure.time_pair(ours, peer, 10.0)
    assert pair.ratio_low <= 1.5 <= pair.ratio_high
    assert pair.ratio_high / pair.ratio_low < 1.02
    assert pair.ours.ms > 1.02


def test_warming_up_lasts_until_two_windows_agree(device: FakeDevice) -> None:
    """For the first second of its time the device is slower, the more the earlier."""
    ours = device.kernel("a", lambda now: 1.0 + max(0.0, 1.0 - now / 1e3))
    found = measure.time_call(ours, 1.0)
    assert (found.ms, found.high_ms) == pytest.approx((1.0, 1.0), abs=0.02)
    assert found.notes == []


def test_what_never_settles_is_measured_and_noted(device: FakeDevice) -> None:
    found = measure.time_call(device.kernel("a", lambda now: 1.0 + now / 1e3), 1.0)
    assert found.notes[0].startswith("two windows still differ by ")


@pytest.mark.parametrize("failure", [None, RuntimeError("no CUPTI")])
def test_a_blind_profiler_falls_back_to_events_and_says_so(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    def observe(run: Callable[[], object], calls: int) -> None:
        run()
        if failure:
            raise failure

    monkeypatch.setattr(timing, "observe", observe)
    pair = measure.time_pair(device.kernel("a", 1.0), device.kernel("b", 2.0), 1.0)
    assert (pair.ours.clock, pair.ours.ms, pair.ours.event_ms) == ("events", pytest.approx(1.005), pytest.approx(1.005))
    assert pair.notes[0].startswith("times are by CUDA events: the profiler")


@pytest.mark.parametrize(("empty", "clock"), [({1}, "kernels"), ({1, 3}, "kernels"), ({2, 3}, "events")])
def test_an_empty_session_of_the_profiler_is_repeated_once(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, empty: set[int], clock: str
) -> None:
    """After two in a row all is by events, what the profiler saw before that included."""

    def observe(run: Callable[[], object], calls: int) -> list[list[KernelEvent]] | None:
        found = device.observe(run, calls)
        return None if device.sessions in empty else found

    monkeypatch.setattr(timing, "observe", observe)
    found = measure.time_call(device.kernel("a", noisy(1.0, 0.0001, 1)), 1.0)
    gap = 0.005 if clock == "events" else 0.0
    assert found.clock == clock
    assert found.low_ms == pytest.approx(1.0 + gap, abs=0.001)
    assert bool(found.notes) == (clock == "events")


@pytest.mark.parametrize("when", [1, 60, 300])
def test_an_exception_of_the_kernel_passes_through(device: FakeDevice, when: int) -> None:
    """In the warm-up, under the profiler and in the calls back to back."""
    calls: list[int] = []

    def ours() -> None:
        calls.append(1)
        if len(calls) == when:
            raise KernelFault(Verdict.RUNTIME_ERROR, "broken")
        device.work("ours", 5.0)

    with pytest.raises(KernelFault):
        measure.time_call(ours, 10.0)


def test_a_call_without_kernels_has_no_ratio(device: FakeDevice) -> None:
    pair = measure.time_pair(lambda: None, device.kernel("b", 1.0), 1.0)
    assert (pair.ours.ms, pair.ratio, pair.ratio_low) == (0.0, None, None)


def test_without_a_peer_only_ours_is_timed(device: FakeDevice) -> None:
    pair = measure.time_pair(device.kernel("a", 1.0), None, 1.0)
    assert (pair.ours.ms, pair.peer, pair.ratio) == (pytest.approx(1.0), None, None)


def test_the_last_call_of_each_window_and_of_those_back_to_back_is_looked_at(device: FakeDevice) -> None:
    calls, looks = [0], []

    def ours() -> None:
        calls[0] += 1
        device.work("ours", 1.0)

    def look() -> bool:
        looks.append(calls[0])
        return True

    measure.time_call(ours, 0.5)
    total, calls[0] = calls[0], 0
    measure._random.seed(0)
    assert measure.time_pair(ours, None, 0.5, timing.Hooks(holds=look)).wrong_calls == []
    back_to_back = 3 + round(measure.HOST_SHARE * 0.5 / 1e-3)
    ends = {
        2,
        *range(4, total - back_to_back + 1, 2 * measure.WINDOW_ROUNDS),
        total,
    }  # the first two are one round each
    assert ends <= set(looks)
    assert set(looks) - ends  # and others, anywhere
    assert looks[-1] == calls[0] == total


@pytest.mark.parametrize("works", [30, 200, 10**6])
def test_a_kernel_that_stops_working_is_found_out(device: FakeDevice, works: int) -> None:
    state: dict[str, Any] = {"output": 0, "calls": 0}

    def ours() -> None:
        state["calls"] += 1
        if state["calls"] <= works:
            state["output"] = 1
        device.work("ours", 1.0)

    hooks = timing.Hooks(before=lambda: state.update(output=0), holds=lambda: state["output"] == 1)
    wrong = measure.time_pair(ours, device.kernel("b", 1.0), 1.0, hooks).wrong_calls
    assert all(call >= works for call in wrong)
    assert (wrong == []) == (works == 10**6)
