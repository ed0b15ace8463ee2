"""How long a kernel takes on the device, beside its baseline; and whether that can be true.

Two clocks. The one that counts is the sum of the kernels' own times as the profiler (CUPTI) saw them, because that is
what the judge measures: launch gaps and host work are not in it. Where the profiler gives nothing it is CUDA events
around each call, and the name of the clock says so. Calls alternate ours, baseline, baseline, ours, each after a flush
of the L2 cache; medians. Everything of torch that is used here is bound when this module is imported, before any
submission is loaded. Needs a GPU (torch.cuda, also on MACA); nothing here is ever called without one.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from harness.faults import PackageError
from harness.verdict import KernelFault

FLUSH_BYTES = 256 << 20
ALLOWANCE = 1.1  # how far a kernel may be above the peaks that calibration found before its time is not believed
_MARK = "BitwiseXor"  # in the name of the kernel that flushes and marks; a submission has no reason to launch it
_PROFILED_CALLS = 10  # of each kind; a session of the profiler costs more than its calls

_clock = time.perf_counter
_Event: Any = torch.cuda.Event
_record, _elapsed = torch.cuda.Event.record, torch.cuda.Event.elapsed_time
_current_stream, _synchronize, _stream_synchronize = (
    torch.cuda.current_stream,
    torch.cuda.synchronize,
    torch.cuda.Stream.synchronize,
)
_mark = torch.Tensor.bitwise_xor_
_matmul, _sum_into, _copy = torch.matmul, torch.sum, torch.Tensor.copy_


def finish_stream() -> None:
    """Wait for the current stream: what a submission may rely on the judge to do."""
    _stream_synchronize(_current_stream())


def finish_device() -> None:
    """Wait for everything that the device was given, on any stream. Raises what torch raises for a device fault."""
    _synchronize()


class Hooks(NamedTuple):
    """`before` runs before each timed call of ours, outside its time; `holds` looks at the output of some of them."""

    before: Callable[[], None] = lambda: None
    holds: Callable[[], bool] = lambda: True


@dataclasses.dataclass
class PairTime:
    """Times of one call in ms. `clock` names the one that `ours_ms` and `baseline_ms` are by.

    ours_call_ms, baseline_call_ms: by events around the whole call, gaps between kernels included.
    suspicion: why the time cannot be true; "" when it can. wrong_calls: timed calls whose output did not hold.
    """

    ours_ms: float
    baseline_ms: float | None
    ours_call_ms: float
    baseline_call_ms: float | None
    samples: int
    clock: str
    suspicion: str = ""
    wrong_calls: list[int] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)  # whatever else a timer found, plain JSON


class Peaks(NamedTuple):
    """What this device was seen to do: bytes and operations per second. `cold`: flushing the L2 cache has an effect."""

    bytes_per_s: float
    ops_per_s: Mapping[str, float]  # by workload dtype
    cold: bool


def cache_bytes() -> int:
    """Size of the L2 cache as the driver tells it, 0 where it does not."""
    return int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0))


def memory_gib() -> float:
    """Size of the device's memory in GiB."""
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory) / 2**30


@functools.cache
def flush_buffer() -> Tensor:
    """Memory to sweep: 256 MB or four times the L2 cache, whichever is larger."""
    return torch.zeros(max(FLUSH_BYTES, 4 * cache_bytes()) // 8, dtype=torch.int64, device="cuda")


def flush() -> None:
    """Enqueue a sweep of the L2 cache; its kernel marks the place for `observe` as `mark` does."""
    _mark(flush_buffer(), 1)


@functools.cache
def _small() -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device="cuda")


def mark() -> None:
    """Enqueue a tiny kernel that marks a place for `observe`."""
    _mark(_small(), 1)


def timed(call: Callable[[], object]) -> tuple[Any, Any]:
    """Enqueue a call between two events; `elapsed_ms` reads them once the device is done."""
    start, end = _Event(enable_timing=True), _Event(enable_timing=True)
    _record(start)
    call()
    _record(end)
    return start, end


def elapsed_ms(events: tuple[Any, Any]) -> float:
    """Time between the two events of `timed` in ms."""
    return float(_elapsed(*events))


def _fastest_s(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Shortest of ten calls after three for warming up, in seconds."""
    pairs = []
    for _ in range(13):
        before()
        pairs.append(timed(call))
    finish_device()
    return min(map(elapsed_ms, pairs[3:])) / 1e3


def _read(source: Tensor) -> Callable[[], object]:
    """A call that reads a tensor once. Its result has a place already: an allocation would wait for the device."""
    result = torch.empty((), dtype=source.dtype, device=source.device)
    return lambda: _sum_into(source, (0,), out=result)


def _bandwidth() -> float:
    """Bytes per second of the better of a copy and a read of 512 MB."""
    source = torch.zeros(512 << 18, dtype=torch.float32, device="cuda")
    target, nbytes = torch.empty_like(source), source.numel() * 4
    return max(2 * nbytes / _fastest_s(lambda: _copy(target, source)), nbytes / _fastest_s(_read(source)))


def _product_rate(dtype: torch.dtype, multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Operations per second of an 8192-cubed product of zeros."""
    square = torch.zeros((8192, 8192), dtype=dtype, device="cuda")
    return float(2 * 8192**3 / _fastest_s(lambda: multiply(square, square.t())))


@functools.cache
def calibrate() -> Peaks:
    """Measure this device's peaks. Once per process, well under a second, before any submission is loaded.

    On zeros, because they cost the least power and so give the highest clock: the peaks are to be generous.
    """
    # A part that fits in the cache. Both sides begin with the flush, so that both find the queue filled and the host's
    # launch time hidden behind it; only the hot side then reads the part once before its clock starts.
    part = torch.zeros((cache_bytes() or 8 << 20) // 8, dtype=torch.float32, device="cuda")
    read = _read(part)
    cold, hot = _fastest_s(read, flush), _fastest_s(read, lambda: [call() for call in (flush, read)])
    bf16 = _product_rate(torch.bfloat16, _matmul)
    try:
        int8 = _product_rate(torch.int8, torch._int_mm)
    except RuntimeError:  # not every back end has it
        int8 = 0.0
    # Twice bf16 is what the hardware offers; a library's int8 product can be much worse than a good kernel.
    peaks = Peaks(_bandwidth(), {"bf16": bf16, "int8": max(int8, 2 * bf16)}, cold > 1.05 * hot)
    torch.cuda.empty_cache()
    return peaks


def roofline_ms(workload: Mapping[str, Any], peaks: Peaks) -> tuple[float, str]:
    """The ms that a workload {"flops", "bytes", "dtype"} takes at the peaks, and by which: "bytes" or "operations"."""
    compute, memory = workload["flops"] / peaks.ops_per_s[workload["dtype"]], workload["bytes"] / peaks.bytes_per_s
    return float(max(compute, memory)) * 1e3, "operations" if compute > memory else "bytes"


def floor_ms(workload: Mapping[str, Any], peaks: Peaks) -> float:
    """The least time in ms that is believed of a workload on a device with these peaks."""
    return roofline_ms(workload, peaks)[0] / ALLOWANCE


def doubt(ours_ms: float, call_ms: float, busy_ms: float, workload: Mapping[str, Any] | None, peaks: Peaks) -> str:
    """Why a measured time cannot be true, "" when it can.

    ours_ms: by the clock that counts. call_ms: by events. busy_ms: how long, by the host's clock, the device still
    worked after the call had returned, which no honest event time undercuts; half of it and 0.05 ms are allowed for
    the host's own jitter.
    """
    if call_ms < busy_ms / 2 - 0.05:
        return f"the events say {call_ms:.4g} ms, but the device was busy for {busy_ms:.4g} ms after the call returned"
    least = floor_ms(workload, peaks) if workload is not None else 0.0
    if ours_ms < least:
        return f"{ours_ms:.4g} ms is less than the {least:.4g} ms that this device needs for the case's bytes and flops"
    return ""


class KernelEvent(NamedTuple):
    """One kernel as the profiler saw it: name, start and duration in microseconds."""

    name: str
    start_us: float
    us: float


def kernel_sections(events: Iterable[KernelEvent], calls: int) -> list[list[KernelEvent]] | None:
    """The kernels of each call. Around every call lies a marking kernel; None unless exactly two per call were seen."""
    ordered = sorted(events, key=lambda event: event.start_us)
    marks = [at for at, event in enumerate(ordered) if _MARK in event.name]
    if len(marks) != 2 * calls:
        return None
    return [ordered[first + 1 : last] for first, last in zip(marks[::2], marks[1::2], strict=True)]


def observe(run: Callable[[], object], calls: int) -> list[list[KernelEvent]] | None:
    """Run something under the profiler that makes `calls` calls, each between `flush` and `mark`.

    The kernels of each call, None when the profiler failed to see all. Whatever `run` raises passes through.
    """
    finish_device()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of cycles, of which there is one; users would see it as theirs
        with profile(activities=[ProfilerActivity.CUDA]) as session:
            run()
            finish_device()
    events = [
        KernelEvent(event.name, float(event.time_range.start), float(event.time_range.elapsed_us()))
        for event in session.events() or ()
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return kernel_sections(events, calls)


def _profiled(calls: Sequence[Callable[[], object]]) -> list[list[KernelEvent]] | None:
    """Run calls under the profiler, each after a flush; the kernels of each, None when the profiler failed to see."""

    def run() -> None:
        for call in calls:
            flush()
            call()
            mark()

    mark()  # so that no allocation falls into the session
    return observe(run, len(calls))


def _kernel_ms(
    ours: Callable[[], object], baseline: Callable[[], object] | None, rounds: int
) -> tuple[float, ...] | str:
    """Median sum of kernel times per call: (ours,) or (ours, baseline) in ms; a reason in words when there is none."""
    kinds = [ours] if baseline is None else [ours, baseline]
    order = [kind for _ in range(rounds) for kind in (*range(len(kinds)), *reversed(range(len(kinds))))]
    calls = [kinds[kind] for kind in order]
    try:
        sections = _profiled(calls) or _profiled(calls)  # the first session of a process may come back empty
    except (KernelFault, PackageError):
        raise
    except Exception as error:  # a profiler that cannot start is no fault of the kernel, whatever it raises
        return f"the profiler failed ({type(error).__name__})"
    if sections is None:
        return "the profiler did not see every call"
    times: list[list[float]] = [[] for _ in kinds]
    for kind, section in zip(order, sections, strict=True):
        times[kind].append(sum(kernel.us for kernel in section) / 1e3)
    return tuple(statistics.median(series) for series in times)


def busy_ms(call: Callable[[], object]) -> tuple[float, float]:
    """Medians of five waited-for calls in ms: from the return to the end of all device work, and in all."""
    after, whole = [], []
    for _ in range(5):
        finish_device()
        begin = _clock()
        call()
        returned = _clock()
        finish_device()
        end = _clock()
        after.append((end - returned) * 1e3)
        whole.append((end - begin) * 1e3)
    return statistics.median(after), statistics.median(whole)


def pair(
    ours: Callable[[], object],
    baseline: Callable[[], object] | None,
    budget_s: float,
    workload: Mapping[str, Any] | None = None,
    hooks: Hooks | None = None,
) -> PairTime:
    """Time two calls on the current GPU, alternating; `baseline` None times ours alone.

    budget_s: about how long the timed calls may take in all; at least three rounds are made whatever they cost.
    workload: {"flops", "bytes", "dtype"} for the floor below which a time is not believed.
    Whatever `ours` or `baseline` raises passes through.
    """
    hooks, peaks = hooks or Hooks(), calibrate()
    for call in (ours, baseline) * 2 if baseline is not None else (ours,) * 2:
        call()
    busy, ours_wall = busy_ms(ours)
    cost = ours_wall + (busy_ms(baseline)[1] if baseline is not None else 0.0) + 0.5  # a flush is about 0.2 ms
    rounds = max(3, min(50, int(budget_s * 1e3 / (2 * cost))))
    order = [0, 1, 1, 0] if baseline is not None else [0, 0]
    looked_at = {2 * rounds - 1, *random.SystemRandom().sample(range(2 * rounds), 3)}  # not to be foreseen
    events: tuple[list[Any], list[Any]] = ([], [])
    wrong = []
    for _ in range(rounds):
        for kind in order:
            if kind == 0:
                hooks.before()
            flush()
            events[kind].append(timed(ours if kind == 0 or baseline is None else baseline))
            if kind == 0 and len(events[0]) - 1 in looked_at:
                finish_device()
                if not hooks.holds():
                    wrong.append(len(events[0]) - 1)
        finish_device()
    calls = [statistics.median(map(elapsed_ms, series)) if series else None for series in events]
    assert calls[0] is not None
    kernels = _kernel_ms(ours, baseline, min(rounds, _PROFILED_CALLS // 2))
    notes = [] if peaks.cold else ["flushing the L2 cache has no effect on this device: times are warm"]
    if isinstance(kernels, str):
        notes.append(f"times are by CUDA events: {kernels}")
        result = PairTime(calls[0], calls[1], calls[0], calls[1], 2 * rounds, "events", "", wrong, notes)
    else:
        theirs = kernels[1] if baseline is not None else None
        result = PairTime(kernels[0], theirs, calls[0], calls[1], 2 * rounds, "kernels", "", wrong, notes)
        both = ", ".join(f"{who} {ms:.4g} ms" for who, ms in zip(("ours", "baseline"), calls, strict=True) if ms)
        notes.append(f"whole calls by CUDA events, gaps between kernels included: {both}")
    if result.ours_ms <= 0:
        result.suspicion = "not one kernel ran in the timed calls"
    else:
        result.suspicion = doubt(result.ours_ms, result.ours_call_ms, busy, workload, peaks)
    return result
