"""What the tests of the judge share: a package and its contract as text, a bench to run kernels on, some kernels."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness import judge
from harness.contract import Contract, load_contract
from harness.devices import Device
from harness.languages import Submission
from harness.package import load_package
from harness.runner import Job
from harness.verdict import CaseResult

CPU = Device("cpu", "cpu", "CPU", "c500")
Kernel = Callable[..., None]

# Attention of 24 queries over 40 keys, D = 64. Its check is as weak as some in the wild: one element in a hundred may
# be anything, even NaN.
PACKAGE = """
import torch
{prelude}
SHAPES = [(24, 64), (40, 64), (40, 64), (24, 64), ()]

def getNumOfTestcases():
    return 1

def getTestCaseSize():
    input()
    return SHAPES, (1, 2)

def genTestCase(testcase_sizes, device="cuda"):
    generator = torch.Generator(device).manual_seed(5)
    draws = [torch.randn(shape, generator=generator, device=device) for shape in testcase_sizes[:3]]
    q, k, v = (draw.to(torch.bfloat16) for draw in draws)
    return [q, k, v, torch.zeros(testcase_sizes[3], device=device, dtype=torch.bfloat16), 40]

def baseline(q, k, v, output, count):
    p = torch.softmax(q.float() @ k.float().T / 8, -1)
    output.copy_(p @ v.float())

def check(testcase_sizes, original_inputs, target_args, baseline_args, rtol=1e-2, atol=1e-2):
    close = torch.isclose(target_args[3].float(), baseline_args[3].float(), rtol=rtol, atol=atol)
    share = close.float().mean().item()
    if share < 0.99:
        print("only", round(100 * share), "% match")
    return share >= 0.99
"""
DECLARED = 'INPUT_CLASS = ["INPUT"] * 3 + ["OUTPUT", "INPUT"]'

REFERENCE = """
import torch
ARGUMENTS = ("q", "k", "v", "output", "count")
OUTPUTS = ("output",)

def reference(q, k, v, output, count):
    return {"output": torch.softmax(q.double() @ k.double().T / 8, -1) @ v.double()}

def honest(q, k, v, output, count):
    s = q.float() @ k.float().T / 8
    p = (s - s.amax(-1, keepdim=True)).exp()
    return {"output": (p.to(torch.bfloat16).float() @ v.float() / p.sum(-1, keepdim=True)).to(torch.bfloat16)}

def workload(q, k, v, output, count):
    return {"flops": 4 * 24 * 40 * 64, "bytes": 0, "dtype": "bf16"}
"""


@dataclasses.dataclass
class Bench:
    """Runs kernels against a package text in a folder."""

    folder: Path

    def package(self, prelude: str = DECLARED, text: str = PACKAGE, **changes: str) -> Path:
        """A package file; each change replaces a piece of text that must be there."""
        path = self.folder / "testcase_config.py"
        content = text.replace("{prelude}", prelude)
        for old, new in changes.items():
            assert old in content
            content = content.replace(old, new)
        path.write_text(content, encoding="utf-8")
        return path

    def contract(self, text: str = REFERENCE) -> Contract:
        path = self.folder / "reference.py"
        path.write_text(text, encoding="utf-8")
        return load_contract(path)

    def run(
        self,
        kernel: Kernel,
        package: Path | None = None,
        contract: Contract | str | None = "",
        language: str = "triton",
        phases: list[str] | None = None,
        device: Device = CPU,
        again: int = 0,
    ) -> CaseResult:
        """One case of a kernel; `contract` None for a task unknown to the kit."""
        loaded = load_package(package or self.package())
        agreed = self.contract() if isinstance(contract, str) else contract

        def run(args: Sequence[Any]) -> None:
            kernel(*args)

        submission = Submission(language, self.folder / "run_kernel.py", run)
        job = Job("toy", language, "", "tiny", "", "", None, "cpu", 10.0, {}, True)
        enter = (lambda name: None) if phases is None else phases.append
        return judge.run_case(job, loaded, loaded.case(1), submission, agreed, device, enter, again)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.float() @ k.float().T / 8
    p = (s - s.amax(-1, keepdim=True)).exp()
    return ((p * 0.7).to(torch.bfloat16).float() @ v.float() / (p.sum(-1, keepdim=True) * 0.7)).to(torch.bfloat16)


def good(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.copy_(attention(q, k, v))


def byte(tensor: Tensor, at: int) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return flat[tensor.data_ptr() - flat.data_ptr() + at :][:1]


# -- kernels that are wrong on purpose: each changes what good() does ------------------------------------------------


def zeros(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.zero_()


def mean_of_v(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.copy_(v.float().mean(0).expand_as(output))


def last_key_dropped(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.copy_(attention(q, k[:-1], v[:-1]))


def a_little_nan(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    good(q, k, v, output, count)
    output.view(-1)[5::200] = torch.nan


def unwritten_tail(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.view(-1)[:-10] = attention(q, k, v).view(-1)[:-10]


def adds_to_what_it_finds(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.add_(attention(q, k, v))


def past_the_end(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    good(q, k, v, output, count)
    byte(output, 2 * output.numel() + 7).fill_(0)


def input_zeroed(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    good(q, k, v, output, count)
    v.zero_()


class Replay:
    """Computes once per pointer and shape, and afterwards returns what it had."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
        key = (q.data_ptr(), *q.shape)
        if key not in self.seen:
            self.seen[key] = attention(q, k, v)
        output.copy_(self.seen[key])


class OnlyOnce:
    """Right on the first call, wrong (or right again never) after it."""

    def __init__(self, first: Kernel, then: Kernel) -> None:
        self.calls, self.first, self.then = 0, first, then

    def __call__(self, *args: Any) -> None:
        self.calls += 1
        (self.first if self.calls == 1 else self.then)(*args)


class Later:
    """Work that a kernel leaves on a thread. It goes on when the judge has read the outputs and waits for latecomers,
    and is done when the judge has waited, however busy the machine is."""

    waiting: ClassVar[list[Later]] = []

    def __init__(self, work: Callable[[], object]) -> None:
        self._go = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()
        self.waiting.append(self)

    def _run(self, work: Callable[[], object]) -> None:
        self._go.wait()
        work()

    @classmethod
    def finish(cls, seconds: float) -> None:
        """Stands for judge._sleep."""
        assert seconds == judge.LATE_S
        while cls.waiting:
            later = cls.waiting.pop()
            later._go.set()
            later._thread.join()
