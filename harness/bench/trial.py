"""The worker's side: time one case that both verdicts have passed, and say what can be said of it. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness import timing
from harness.bench import calibration, measure, telemetry
from harness.bench.measure import Pair
from harness.timing import Hooks, PairTime, Peaks

ABOVE_THE_PEAK = "above the peak"
_BURST_MS = 20.0  # of calls between two looks for the answer of nvidia-smi


def timer(settings: Mapping[str, Any], kind: str) -> Callable[..., PairTime]:
    """What judge.run_case calls in place of timing.pair. `settings`: {"calibration", "budget_s"}; `kind` of device."""
    peaks = calibration.peaks(settings["calibration"])

    def take(
        ours: Callable[[], object],
        peer: Callable[[], object] | None,
        budget_s: float,
        workload: Mapping[str, Any] | None,
        hooks: Hooks,
    ) -> PairTime:
        for call in (ours, peer) * 2:
            if call is not None:
                call()
        busy_ms, _ = timing.busy_ms(ours)
        pair = measure.time_pair(ours, peer, float(settings["budget_s"]), hooks)
        number = max(1, min(1000, int(_BURST_MS / max(pair.ours.host_ms, 1e-3))))

        def burst() -> None:
            for _ in range(number):
                ours()
            timing.finish_device()

        return summed_up(pair, workload, peaks, busy_ms, telemetry.read(kind, burst))

    return take


def summed_up(
    pair: Pair, workload: Mapping[str, Any] | None, peaks: Peaks, busy_ms: float, clocks: telemetry.Clocks
) -> PairTime:
    """A measured pair held against the peaks; its `figures` are the record's.

    A time below the floor is in no figure: ours makes the whole pair suspect, the peer's is left out with the ratio.
    """
    ours, peer = pair.ours, pair.peer
    result = PairTime(ours.ms, None, ours.event_ms, None, ours.samples, ours.clock)
    result.wrong_calls, result.notes = pair.wrong_calls, list(pair.notes)
    flags: list[str] = []
    figures: dict[str, Any] = {"flags": flags}
    floor_ms, floor_by = timing.roofline_ms(workload, peaks) if workload is not None else (0.0, "")
    least_ms = floor_ms / timing.ALLOWANCE
    if ours.ms <= 0:
        result.suspicion = "not one kernel ran in the timed calls"
    else:
        result.suspicion = timing.doubt(ours.ms, ours.event_ms, busy_ms, workload, peaks)
    if ours.ms < least_ms:
        flags.append(ABOVE_THE_PEAK)
    if not result.suspicion:
        figures |= {
            "ours_ms": ours.ms,
            "samples": ours.samples,
            "ours_event_ms": ours.event_ms,
            "ours_host_ms": ours.host_ms,
            "ours_host_calls": ours.host_calls,
            "clock": ours.clock,
            "stopped": pair.stopped,
        }
    if workload is not None:
        figures |= {"floor_ms": floor_ms, "floor_by": floor_by}
        if not result.suspicion:
            figures["roofline_percent"] = 100 * floor_ms / ours.ms
            figures["tflops"] = workload["flops"] / ours.ms / 1e9
            figures["gb_s"] = workload["bytes"] / ours.ms / 1e6
    if peer is not None and peer.ms < least_ms:
        flags.append(f"peer {ABOVE_THE_PEAK}")
        result.notes.append(f"the peer's time is left out: {peer.ms:.4g} ms is less than {least_ms:.4g} ms can do")
    elif peer is not None and peer.ms > 0:
        result.baseline_ms, result.baseline_call_ms = peer.ms, peer.event_ms
        figures |= {
            "peer_ms": peer.ms,
            "peer_event_ms": peer.event_ms,
            "peer_host_ms": peer.host_ms,
            "peer_host_calls": peer.host_calls,
        }
        if not result.suspicion:
            figures |= {"ratio": pair.ratio, "ratio_low": pair.ratio_low, "ratio_high": pair.ratio_high}
    if not peaks.cold:
        flags.append("warm cache")
        result.notes.append("flushing the L2 cache has no effect on this device: times are warm")
    if clocks.throttle:
        flags.append("throttled")
    result.notes.append(f"under load: {clocks}")
    result.figures = figures
    return result
