"""Figures from times: what is held against the peaks, what is left out; and a case from end to end in a worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import devices, languages, tamper, timing, worker
from harness.bench import telemetry, trial
from harness.bench.measure import Measured, Pair
from harness.bench.telemetry import Clocks
from harness.devices import Device
from harness.faults import BaselineUnavailable
from harness.languages import Submission
from harness.runner import Job
from harness.timing import PairTime, Peaks
from harness.verdict import CaseResult, Verdict
from tests import bench_fakes
from tests.bench_fakes import FakeDevice

ROOT = Path(__file__).resolve().parent.parent
PEAKS = Peaks(1e12, {"bf16": 1e14, "int8": 2e14}, True)
WORK = {"flops": 5e10, "bytes": 1e9, "dtype": "bf16"}  # 0.5 ms of operations, 1 ms of bytes


def pair(ours_ms: float = 2.0, peer_ms: float | None = 3.0) -> Pair:
    def measured(ms: float) -> Measured:
        return Measured(ms, ms, ms, 40, ms + 0.02, [], 500, ms + 0.01)

    peer = None if peer_ms is None else measured(peer_ms)
    ratio = peer_ms / ours_ms if peer_ms and ours_ms else None
    return Pair(measured(ours_ms), peer, ratio, ratio, ratio, [], "precise", ["a note"])


def summed_up(found: Pair, peaks: Peaks = PEAKS, busy_ms: float = 0.0, clocks: Clocks | None = None) -> PairTime:
    return trial.summed_up(found, WORK, peaks, busy_ms, clocks or Clocks(1980.0))


def test_figures_of_an_honest_pair() -> None:
    result = summed_up(pair())
    assert (result.ours_ms, result.baseline_ms, result.suspicion) == (2.0, 3.0, "")
    assert result.figures == {
        **{"ours_ms": 2.0, "samples": 40, "ours_event_ms": 2.01, "ours_host_ms": 2.02, "ours_host_calls": 500},
        **{"peer_ms": 3.0, "peer_event_ms": 3.01, "peer_host_ms": 3.02, "peer_host_calls": 500},
        **{"ratio": 1.5, "ratio_low": 1.5, "ratio_high": 1.5, "clock": "kernels", "stopped": "precise"},
        **{"floor_ms": 1.0, "floor_by": "bytes", "roofline_percent": 50.0},
        **{"tflops": pytest.approx(25.0), "gb_s": pytest.approx(500.0), "flags": []},
    }
    assert result.notes == ["a note", "under load: 1980 MHz"]


@pytest.mark.parametrize("ours_ms", [0.92, 0.90])
def test_a_time_above_the_peak_is_in_no_figure(ours_ms: float) -> None:
    """A tenth above the calibrated peak is believed, more is not."""
    result = summed_up(pair(ours_ms))
    if ours_ms > 1 / timing.ALLOWANCE:
        assert (result.suspicion, result.figures["flags"]) == ("", [])
        assert result.figures["roofline_percent"] == pytest.approx(100 / ours_ms)
        return
    assert "less than the" in result.suspicion
    assert result.figures["flags"] == ["above the peak"]
    shown = {"ours_ms", "ratio", "ratio_low", "roofline_percent", "tflops", "gb_s", "ours_host_ms"}
    assert not shown & set(result.figures)
    assert result.figures["peer_ms"] == 3.0


def test_a_peer_above_the_peak_is_left_out_with_the_ratio() -> None:
    result = summed_up(pair(2.0, 0.5))
    assert (result.suspicion, result.baseline_ms, result.figures["ours_ms"]) == ("", None, 2.0)
    assert result.figures["flags"] == ["peer above the peak"]
    assert not {"peer_ms", "ratio", "ratio_high", "peer_host_ms"} & set(result.figures)
    assert any("0.5 ms is less than 0.9091 ms" in note for note in result.notes)


def test_no_kernels_and_work_that_events_do_not_see_are_suspect() -> None:
    assert summed_up(pair(0.0)).suspicion == "not one kernel ran in the timed calls"
    hidden = summed_up(pair(), busy_ms=9.0)
    assert "busy for 9 ms" in hidden.suspicion
    assert not {"ours_ms", "ratio"} & set(hidden.figures)


def test_what_spoils_a_time_is_flagged() -> None:
    assert summed_up(pair(), PEAKS._replace(cold=False)).figures["flags"] == ["warm cache"]
    throttled = summed_up(pair(), clocks=Clocks(1200.0, throttle=["power cap"]))
    assert throttled.figures["flags"] == ["throttled"]
    assert throttled.notes[-1] == "under load: 1200 MHz, held back by power cap"


def test_without_a_peer_there_is_no_ratio() -> None:
    result = summed_up(pair(2.0, None))
    assert (result.baseline_ms, result.figures["tflops"]) == (None, pytest.approx(25.0))
    assert "ratio" not in result.figures


# -- a case in a worker ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Workplace:
    """A JudgeSession on a pretended GPU; `kernel` is what the submission does with the right output at hand."""

    device: FakeDevice
    session: worker.JudgeSession
    kernel: Callable[[Callable[[], None]], None]

    def run(self) -> CaseResult:
        return self.session.run(1, lambda phase: None)


@pytest.fixture
def workplace(monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """kvcache_decode's first tiny case; its baseline takes 3 ms, the submission's kernel what the test says."""
    fake = bench_fakes.install(monkeypatch)
    gpu = Device("cuda", "cpu", "a pretended GPU", "sm90")
    monkeypatch.setattr(devices, "pick", lambda kind: gpu)
    monkeypatch.setattr(tamper, "_taken", None)
    monkeypatch.setattr(telemetry, "read", lambda kind, meanwhile: meanwhile() or Clocks(1980.0))
    monkeypatch.setattr(timing, "calibrate", lambda: pytest.fail("calibrated though peaks were given"))
    config = ROOT / "tasks/kvcache_decode/tiny_config.py"
    peaks = {"bytes_per_s": 1e12, "ops_per_s": {"bf16": 1e14, "int8": 2e14}, "cold": True}
    bench = {"calibration": peaks, "budget_s": 0.2}
    path = ROOT / "tasks/kvcache_decode/triton/run_kernel.py"
    job = Job(
        *("kvcache_decode", "triton", "", "tiny", str(config), str(path)), None, "cuda", 60.0, {"bench": bench}, False
    )
    session = worker.JudgeSession(job)
    known: dict[int, Any] = {}

    def run(args: Sequence[Any]) -> None:
        output = args[session._contract.output_indices[0]]

        def write() -> None:
            key = hash(args[0].view(-1)[:64].float().numpy().tobytes())  # which of the two seeds' data this is
            if key not in known:
                known[key] = session._contract.honest(*args)["output"]
            output.copy_(known[key])

        place.kernel(write)

    def peer(*args: Any) -> tuple[str, Callable[[], object]]:
        return "a library", fake.kernel("peer", 3.0)

    monkeypatch.setattr(languages, "load", lambda *args: Submission("triton", path, run))

    def no_baseline(*args: Any) -> None:
        raise BaselineUnavailable(config, "a library")

    monkeypatch.setattr(session._package, "run_baseline", no_baseline)
    session._contract = dataclasses.replace(session._contract, peer=peer)
    session.load()

    def honest(write: Callable[[], None]) -> None:
        write()
        fake.work("ours", 2.0)

    place = Workplace(fake, session, honest)
    return place


def test_a_right_kernel_is_checked_and_then_timed(workplace: Workplace) -> None:
    result = workplace.run()
    assert result.ok, result.detail
    assert (result.figures["ratio"], result.figures["ours_ms"]) == (pytest.approx(1.5), pytest.approx(2.0))
    assert (result.peer, result.score) == ("a library", pytest.approx(60.0))
    assert result.figures["floor_ms"] > 0
    assert "under load: 1980 MHz" in result.notes


def test_a_wrong_kernel_is_not_timed(workplace: Workplace) -> None:
    workplace.kernel = lambda write: workplace.device.work("ours", 2.0)
    result = workplace.run()
    assert (result.strict, result.figures) == (Verdict.UNWRITTEN_OUTPUT, {})
    assert "peer" not in workplace.device.log


def test_what_the_package_itself_refuses_is_not_timed(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workplace.session._package, "check", lambda *args: (False, "no"))
    result = workplace.run()
    assert (result.judge, result.strict, result.figures) == (Verdict.WRONG_ANSWER, Verdict.PASS, {})
    assert "peer" not in workplace.device.log


def test_a_kernel_that_stops_working_while_it_is_timed_is_wrong(workplace: Workplace) -> None:
    calls: list[int] = []

    def lazy(write: Callable[[], None]) -> None:
        calls.append(1)
        if len(calls) <= 20:
            write()
        workplace.device.work("ours", 2.0)

    workplace.kernel = lazy
    result = workplace.run()
    assert (result.strict, result.score) == (Verdict.WRONG_ANSWER, None)
    assert "gave another output" in result.detail


def test_a_time_that_cannot_be_true_is_no_figure(workplace: Workplace) -> None:
    def impossible(write: Callable[[], None]) -> None:
        write()
        workplace.device.work("ours", 1e-9)

    workplace.kernel = impossible
    result = workplace.run()
    assert (result.judge, result.strict) == (Verdict.PASS, Verdict.SUSPECT_TIME)
    assert result.figures["flags"][0] == "above the peak"
    assert "ours_ms" not in result.figures


def test_a_kernel_that_patches_the_clock_is_caught(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is timed, that is; the clock of measure.py is bound before."""
    import time

    calls: list[int] = []
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # to be put back

    def patches(write: Callable[[], None]) -> None:
        calls.append(1)
        if len(calls) == 10:
            time.perf_counter = lambda: 0.0
        write()
        workplace.device.work("ours", 2.0)

    workplace.kernel = patches
    assert workplace.run().strict is Verdict.TAMPERED
