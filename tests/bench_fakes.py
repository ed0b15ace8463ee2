"""A pretended GPU for the tests of `make bench`: two clocks, known noise, and a profiler that sees what was queued."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
import torch

from harness import timing
from harness.bench import measure
from harness.timing import KernelEvent

MARK = "void at::native::vectorized_elementwise_kernel<2, BitwiseXorFunctor<long>>"
FLUSH_MS, SESSION_MS, LAUNCH_MS = 0.2, 50.0, 0.01


class FakeDevice:
    """Two clocks in ms. Work is queued after what is there; the host's clock moves by launching, waiting, profiling."""

    def __init__(self) -> None:
        self.device_ms = self.host_ms = 0.0
        self.log: list[str] = []
        self.kernels: list[KernelEvent] = []
        self.sessions = 0

    def work(self, name: str, ms: float, kernel: str = "") -> None:
        """`name` for the log, `kernel` for the profiler."""
        self.host_ms += LAUNCH_MS
        self.device_ms = max(self.device_ms, self.host_ms)
        self.kernels.append(KernelEvent(kernel or name, self.device_ms * 1e3, ms * 1e3))
        self.device_ms += ms
        self.log.append(name)

    def wait(self) -> None:
        self.host_ms = max(self.host_ms, self.device_ms)

    def kernel(self, name: str, ms: Callable[[float], float] | float) -> Callable[[], None]:
        """A call that takes `ms`, a number or a function of the device's time so far."""
        return lambda: self.work(name, ms(self.device_ms) if callable(ms) else ms)

    def observe(self, run: Callable[[], object], calls: int) -> list[list[KernelEvent]] | None:
        self.sessions += 1
        self.host_ms += SESSION_MS
        first = len(self.kernels)
        run()
        return timing.kernel_sections(self.kernels[first:], calls)


@dataclasses.dataclass
class FakeEvent:
    """torch.cuda.Event, as far as timing.py uses it. Sees a gap of 0.005 ms that the profiler does not."""

    enable_timing: bool
    at: float = 0.0


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Let timing.py and measure.py work on a device that is only pretended."""
    fake = FakeDevice()
    buffer, small = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    names = {id(buffer): "flush", id(small): "mark"}
    monkeypatch.setattr(timing, "_Event", FakeEvent)
    monkeypatch.setattr(timing, "_record", lambda event: setattr(event, "at", fake.device_ms))
    monkeypatch.setattr(timing, "_elapsed", lambda start, end: end.at - start.at + 0.005)
    monkeypatch.setattr(timing, "_synchronize", fake.wait)
    monkeypatch.setattr(timing, "_stream_synchronize", lambda stream: fake.wait())
    monkeypatch.setattr(timing, "_current_stream", lambda: None)
    monkeypatch.setattr(timing, "_clock", lambda: fake.host_ms / 1e3)
    monkeypatch.setattr(timing, "_mark", lambda tensor, value: fake.work(names[id(tensor)], FLUSH_MS, MARK))
    monkeypatch.setattr(timing, "flush_buffer", lambda: buffer)
    monkeypatch.setattr(timing, "_small", lambda: small)
    monkeypatch.setattr(timing, "observe", fake.observe)
    monkeypatch.setattr(measure, "_clock", lambda: fake.host_ms / 1e3)
    monkeypatch.setattr(measure, "_random", random.Random(0))
    return fake


def noisy(ms: float, share: float, seed: int, drift_per_s: float = 0.0) -> Callable[[float], float]:
    """A time with lognormal noise, rising by a share per second of the device."""
    rng = random.Random(seed)
    return lambda now: ms * math.exp(rng.gauss(0, share) + drift_per_s * now / 1e3)
