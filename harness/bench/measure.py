"""How long a call takes on the device, alone or beside another, and how well that is known. Needs a GPU.

Calls run in rounds, ours, peer, peer, ours, each after a flush of the L2 cache. First rounds by CUDA events until two
windows of them agree, which also gives the times of whole calls; then rounds under the profiler, which sees the kernels
alone, until the 95 % interval is within 1 % at two looks in a row, or the budget is spent. One look is not enough: the
interval that happens to be narrow is the one that is looked for, and of those more than one in ten miss. Where the
profiler sees nothing, these rounds are by events as well, and `clock` says so. Last the host's clock, around calls back
to back. A window is short for short calls and never less than one round.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from harness import timing
from harness.bench import stats
from harness.faults import PackageError
from harness.timing import Hooks
from harness.verdict import KernelFault

PRECISION = 0.01  # how far an end of the interval may be from its middle
AGREEMENT = 0.02  # between the medians of two windows, for the device to count as warm
WARM_UP_S = 4.0  # after which rounds count though no two windows agreed
WINDOW_S, WINDOW_ROUNDS = 0.25, 25
LEAST_ROUNDS = 6  # whatever they cost
HOST_CALLS, HOST_SHARE = 1000, 0.2  # calls back to back, and the share of the budget that they may take

_clock = time.perf_counter
_random = random.SystemRandom()  # which calls are looked at is not to be foreseen
Call = Callable[[], object]
Round = tuple[float, ...]  # ms of the calls of one round, in their order


@dataclasses.dataclass
class Measured:
    """One call in ms: median device time with its 95 % interval; host-inclusive mean of `host_calls` back to back.

    event_ms: by events around the whole call, gaps between kernels included. clock: what `ms` is by, "kernels" (the sum
    of the kernels' own times) or "events". stopped: "precise" or "budget".
    """

    ms: float
    low_ms: float
    high_ms: float
    samples: int
    host_ms: float
    notes: list[str] = dataclasses.field(default_factory=list)
    host_calls: int = 0
    event_ms: float = 0.0
    clock: str = "kernels"
    stopped: str = "precise"


@dataclasses.dataclass
class Pair:
    """Two calls measured in turn; `ratio` is peer / ours (above 1: ours is faster) with its 95 % interval.

    The ratio is None without a peer, and when a call launched no kernel. wrong_calls: which
    calls of ours, from 0, left an output that did not hold.
    """

    ours: Measured
    peer: Measured | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    wrong_calls: list[int]
    stopped: str
    notes: list[str]


def time_call(call: Call, budget_s: float) -> Measured:
    """Measure one call for about `budget_s` seconds, warming up not counted. Whatever it raises passes through."""
    return _Series([call], Hooks()).measure(budget_s)[0]


def time_pair(ours: Call, peer: Call | None, budget_s: float, hooks: Hooks | None = None) -> Pair:
    """Measure two calls in turn, as `time_call` does one. Without a peer, ours alone."""
    series = _Series([ours] if peer is None else [ours, peer], hooks or Hooks())
    first, *others = series.measure(budget_s)
    ratio = series.ratio() if others and not series.empty() else None
    value, low, high = ratio or (None, None, None)
    second = others[0] if others else None
    return Pair(first, second, value, low, high, series.wrong, first.stopped, first.notes)


def host_time(call: Call, budget_s: float) -> tuple[float, int]:
    """Mean ms of calls back to back by the host's clock, all they enqueue included, and of how many calls."""
    seconds = _batch_s(call, 3) / 3
    number = max(3, min(HOST_CALLS, int(budget_s / max(seconds, 1e-9))))
    return _batch_s(call, number) / number * 1e3, number


def _batch_s(call: Call, number: int) -> float:
    timing.finish_device()
    begin = _clock()
    for _ in range(number):
        call()
    timing.finish_device()
    return _clock() - begin


def _log_ratio(times: Round) -> float:
    """ln(peer / ours) of one round; a drift that is linear over the round cancels."""
    ours, peer, again, last = map(math.log, times)
    return (peer + again - ours - last) / 2


class _Failed(NamedTuple):
    reason: str


class _Series:
    """Rounds of one or two calls. `rounds` are those that count."""

    def __init__(self, calls: Sequence[Call], hooks: Hooks) -> None:
        self.calls, self.hooks = calls, hooks
        self.order = (0, 1, 1, 0) if len(calls) == 2 else (0, 0)
        self.rounds: list[Round] = []
        self.made = 0  # calls of ours
        self.wrong: list[int] = []
        self.clock = "kernels"
        self.notes: list[str] = []

    def measure(self, budget_s: float) -> list[Measured]:
        """All that is known of each call."""
        size, warm = self._warm_up()
        stopped = self._repeat(budget_s, size)
        measured = []
        for kind, call in enumerate(self.calls):
            if kind == 0:
                self.hooks.before()
            host_ms, host_calls = host_time(call, HOST_SHARE * budget_s)
            if kind == 0:
                self.made += host_calls
                self._look()
            times = self._of(kind, self.rounds)
            median, low, high = stats.median_interval(times)
            event_ms = statistics.median(self._of(kind, warm if self.clock == "kernels" else self.rounds))
            measured.append(
                Measured(median, low, high, len(times), host_ms, self.notes, host_calls, event_ms, self.clock, stopped)
            )
        return measured

    def _of(self, kind: int, rounds: Sequence[Round]) -> list[float]:
        return [ms for times in rounds for which, ms in zip(self.order, times, strict=True) if which == kind]

    def empty(self) -> bool:
        """True when some call took no time: it launched nothing that the profiler could see."""
        return min(min(times) for times in self.rounds) <= 0

    def ratio(self) -> stats.Interval:
        """Peer over ours."""
        return stats.ratio_interval(list(map(_log_ratio, self.rounds)))

    def _look(self) -> None:
        timing.finish_device()
        if not self.hooks.holds():
            self.wrong.append(self.made - 1)

    # -- windows ---------------------------------------------------------------------------------------------------

    def _by_events(self, number: int) -> list[Round]:
        """A window of rounds, timed by events. The output of ours is looked at after two of its calls."""
        looked_at = {number * 2 - 1, _random.randrange(number * 2)}
        events, first = [], self.made
        for _ in range(number):
            for kind in self.order:
                if kind == 0:
                    self.hooks.before()
                timing.flush()
                events.append(timing.timed(self.calls[kind]))
                timing.mark()
                if kind == 0:
                    self.made += 1
                    if self.made - 1 - first in looked_at:
                        self._look()
        timing.finish_device()
        times, width = list(map(timing.elapsed_ms, events)), len(self.order)
        return [tuple(times[at : at + width]) for at in range(0, len(times), width)]

    def _by_kernels(self, number: int) -> list[Round] | _Failed:
        """A window of rounds, timed by the profiler."""
        width = len(self.order)
        try:
            sections = timing.observe(lambda: self._by_events(number), number * width)
        except (KernelFault, PackageError):
            raise
        except Exception as error:  # a profiler that cannot start is no fault of a kernel, whatever it raises
            return _Failed(f"the profiler failed ({type(error).__name__})")
        if sections is None:
            return _Failed("the profiler did not see every call")
        times = [sum(kernel.us for kernel in section) / 1e3 for section in sections]
        return [tuple(times[at : at + width]) for at in range(0, len(times), width)]

    # -- phases ----------------------------------------------------------------------------------------------------

    def _warm_up(self) -> tuple[int, list[Round]]:
        """Windows by events until two in a row agree. Gives the size of a window, and the rounds of the last two."""
        begin = _clock()
        self._by_events(1)  # the first call of a process is like no other
        started = _clock()
        self._by_events(1)
        size = max(1, min(WINDOW_ROUNDS, int(WINDOW_S / max(_clock() - started, 1e-9))))
        before = self._by_events(size)
        while True:
            now = self._by_events(size)
            apart = max(
                abs(statistics.median(self._of(kind, now)) / max(statistics.median(self._of(kind, before)), 1e-6) - 1)
                for kind in range(len(self.calls))
            )
            if apart <= AGREEMENT:
                return size, before + now
            if _clock() - begin > WARM_UP_S:
                self.notes.append(f"two windows still differ by {apart:.1%} after {WARM_UP_S:g} s of warming up")
                return size, before + now
            before = now

    def _repeat(self, budget_s: float, size: int) -> str:
        """Windows until the interval is narrow at two looks in a row ("precise") or the budget is spent ("budget")."""
        begin, failures, precise = _clock(), 0, False
        while True:
            started = _clock()
            window = self._by_kernels(size) if self.clock == "kernels" else self._by_events(size)
            if isinstance(window, _Failed):
                failures += 1  # the first session of a process may come back empty
                if failures == 2:
                    self.clock, self.rounds = "events", []
                    self.notes.append(f"times are by CUDA events: {window.reason}")
                continue
            failures = 0
            self.rounds += window
            if len(self.rounds) < LEAST_ROUNDS:
                continue
            if self.empty():
                return "budget"  # a call launches nothing that could be timed: more of it says no more
            before, precise = precise, self._is_precise()
            if before and precise:
                return "precise"
            ended = _clock()
            if ended + (ended - started) > begin + budget_s:  # another window would not fit
                return "budget"

    def _is_precise(self) -> bool:
        if len(self.calls) == 1:
            return stats.median_interval(self._of(0, self.rounds)).half_width() <= PRECISION
        return self.ratio().half_width() <= PRECISION
