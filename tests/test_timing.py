"""The logic of timing, on a pretended device: order, medians, what is not believed. A GPU is needed for real times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import timing
from harness.timing import KernelEvent, Peaks
from harness.verdict import KernelFault, Verdict

PEAKS = Peaks(bytes_per_s=1e12, ops_per_s={"bf16": 1e14, "int8": 2e14}, cold=True)
MARK = "void at::native::vectorized_elementwise_kernel<2, BitwiseXorFunctor<long>>"


class FakeDevice:
    """A device that has only a clock, in ms. Work is queued; the host's clock moves when it waits."""

    def __init__(self) -> None:
        self.device_ms = self.host_ms = 0.0
        self.log: list[str] = []
        self.kernels: list[KernelEvent] = []

    def work(self, name: str, ms: float) -> None:
        self.device_ms = max(self.device_ms, self.host_ms)
        self.kernels.append(KernelEvent(name, self.device_ms * 1e3, ms * 1e3))
        self.device_ms += ms
        self.log.append(name)

    def wait(self) -> None:
        self.host_ms = max(self.host_ms, self.device_ms)

    def kernel(self, name: str, *times_ms: float) -> Callable[[], None]:
        """A call that takes the given times in turn."""
        turn = iter(range(10**6))
        return lambda: self.work(name, times_ms[next(turn) % len(times_ms)])


@dataclasses.dataclass
class FakeEvent:
    """torch.cuda.Event, as far as timing.py uses it."""

    enable_timing: bool
    at: float = 0.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    buffer = torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(timing, "_Event", FakeEvent)
    monkeypatch.setattr(timing, "_record", lambda event: setattr(event, "at", fake.device_ms))
    monkeypatch.setattr(timing, "_elapsed", lambda start, end: end.at - start.at)
    monkeypatch.setattr(timing, "_synchronize", fake.wait)
    monkeypatch.setattr(timing, "_clock", lambda: fake.host_ms / 1e3)
    monkeypatch.setattr(timing, "_mark", lambda tensor, value: fake.work(MARK, 0.2))
    monkeypatch.setattr(timing, "flush_buffer", lambda: buffer)
    monkeypatch.setattr(timing, "calibrate", lambda: PEAKS)

    def profiled(calls: Any) -> list[list[KernelEvent]] | None:
        first = len(fake.kernels)
        for call in calls:
            fake.work(MARK, 0.2)
            call()
            fake.work(MARK, 0.2)
        return timing.kernel_sections(fake.kernels[first:], len(calls))

    monkeypatch.setattr(timing, "_profiled", profiled)
    return fake


def test_calls_alternate_and_each_follows_a_flush(device: FakeDevice) -> None:
    result = timing.pair(device.kernel("ours", 1.0), device.kernel("theirs", 2.0), 0.05)
    timed = device.log[device.log.index(MARK) :]
    timed = timed[: 8 * (result.samples // 2)]
    assert timed[::2] == [MARK] * (len(timed) // 2)
    assert timed[1::2] == ["ours", "theirs", "theirs", "ours"] * (result.samples // 2)


def test_medians_and_the_clock(device: FakeDevice) -> None:
    result = timing.pair(device.kernel("ours", 1.0, 1.0, 9.0), device.kernel("theirs", 3.0), 0.5)
    assert (result.ours_ms, result.baseline_ms) == pytest.approx((1.0, 3.0))
    assert (result.ours_call_ms, result.baseline_call_ms) == pytest.approx((1.0, 3.0))
    assert (result.clock, result.suspicion, result.wrong_calls) == ("kernels", "", [])
    assert result.notes == ["whole calls by CUDA events, gaps between kernels included: ours 1 ms, baseline 3 ms"]


def test_the_budget_bounds_the_samples(device: FakeDevice) -> None:
    assert timing.pair(device.kernel("ours", 100.0), None, 0.1).samples == 6  # three rounds at least
    assert timing.pair(device.kernel("ours", 0.001), None, 100.0).samples == 100  # fifty at most


def test_without_a_baseline_only_ours_is_timed(device: FakeDevice) -> None:
    result = timing.pair(device.kernel("ours", 1.0), None, 0.05)
    assert (result.ours_ms, result.baseline_ms, result.baseline_call_ms) == (pytest.approx(1.0), None, None)


@pytest.mark.parametrize("failure", [None, RuntimeError("no CUPTI")])
def test_a_blind_profiler_falls_back_to_events_and_says_so(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    def profiled(calls: Any) -> None:
        if failure:
            raise failure

    monkeypatch.setattr(timing, "_profiled", profiled)
    result = timing.pair(device.kernel("ours", 1.0), device.kernel("theirs", 2.0), 0.05)
    assert (result.clock, result.ours_ms, result.baseline_ms) == ("events", pytest.approx(1.0), pytest.approx(2.0))
    assert result.notes[0].startswith("times are by CUDA events: the profiler")


def test_an_empty_first_session_of_the_profiler_is_repeated(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sessions = timing._profiled, []

    def profiled(calls: Any) -> list[list[KernelEvent]] | None:
        sessions.append(1)
        return None if len(sessions) == 1 else real(calls)

    monkeypatch.setattr(timing, "_profiled", profiled)
    assert timing.pair(device.kernel("ours", 1.0), None, 0.05).clock == "kernels"
    assert len(sessions) == 2


def test_an_exception_of_the_kernel_is_not_taken_for_the_profilers(device: FakeDevice) -> None:
    def broken() -> None:
        raise KernelFault(Verdict.RUNTIME_ERROR, "broken")

    with pytest.raises(KernelFault):
        timing._kernel_ms(broken, None, 3)


def test_outputs_of_some_timed_calls_are_looked_at(device: FakeDevice) -> None:
    """A kernel that stops working after its 20th call is found out, whichever calls are looked at: the last one is."""
    state = {"output": 0, "calls": 0}

    def ours() -> None:
        state["calls"] += 1
        if state["calls"] <= 20:
            state["output"] = 1
        device.work("ours", 1.0)

    hooks = timing.Hooks(before=lambda: state.update(output=0), holds=lambda: state["output"] == 1)
    result = timing.pair(ours, None, 0.5, None, hooks)
    assert result.wrong_calls
    assert result.wrong_calls[-1] == result.samples - 1
    state["calls"] = -(10**6)
    assert timing.pair(ours, None, 0.5, None, hooks).wrong_calls == []


def test_work_that_the_events_do_not_see_is_suspect(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is busy for 5 ms after the call returned, but by the events the call took 0.1 ms."""

    def elsewhere() -> None:
        device.work("ours", 0.1)
        device.host_ms = device.device_ms  # the real work runs on a stream of its own, and only a device sync waits

    def wait() -> None:
        device.wait()
        device.host_ms += 5.0

    monkeypatch.setattr(timing, "_synchronize", wait)
    result = timing.pair(elsewhere, None, 0.05)
    assert result.suspicion.startswith("the events say 0.1 ms, but the device was busy for 5 ms")


def test_a_call_without_kernels_is_suspect(device: FakeDevice) -> None:
    assert timing.pair(lambda: None, None, 0.05).suspicion == "not one kernel ran in the timed calls"


@pytest.mark.parametrize(
    ("workload", "floor"),
    [
        ({"flops": 1.1e11, "bytes": 0, "dtype": "bf16"}, 1.0),
        ({"flops": 2.2e11, "bytes": 0, "dtype": "int8"}, 1.0),
        ({"flops": 1.1e11, "bytes": 2.2e9, "dtype": "bf16"}, 2.0),
    ],
)
def test_the_floor_is_the_slower_of_bytes_and_flops(workload: dict[str, Any], floor: float) -> None:
    assert timing.floor_ms(workload, PEAKS) == pytest.approx(floor)
    assert timing.doubt(floor * 1.01, floor * 1.01, floor, workload, PEAKS) == ""
    doubt = timing.doubt(floor * 0.99, floor * 1.01, floor, workload, PEAKS)
    assert "less than the" in doubt


def test_events_just_inside_and_just_outside_of_the_hosts_clock() -> None:
    assert timing.doubt(1.0, 0.451, 1.0, None, PEAKS) == ""
    assert timing.doubt(1.0, 0.449, 1.0, None, PEAKS) != ""


def test_a_warm_cache_is_noted(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "calibrate", lambda: PEAKS._replace(cold=False))
    assert "has no effect" in timing.pair(device.kernel("ours", 1.0), None, 0.05).notes[0]


def test_kernels_are_attributed_by_the_marks_around_them() -> None:
    names = ["prefill", MARK, "a", "b", MARK, "poison", MARK, MARK]
    events = [KernelEvent(name, float(start), 1.0) for start, name in enumerate(names)]
    sections = timing.kernel_sections(reversed(events), 2)
    assert sections is not None
    assert [[kernel.name for kernel in section] for section in sections] == [["a", "b"], []]
    assert timing.kernel_sections(events, 1) is None
    assert timing.kernel_sections(events[:-1], 2) is None
