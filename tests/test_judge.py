"""One case from end to end, with kernels that are wrong on purpose and packages that are odd on purpose."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import judge, tamper, timing
from harness.contract import Contract, load_contract
from harness.devices import Device
from harness.guard import Finding
from harness.languages import Submission
from harness.package import load_package
from harness.runner import Job
from harness.verdict import CaseResult, KernelFault, Verdict

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


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(tamper, "_taken", None)
    return Bench(tmp_path)


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


def copy_of_q(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.copy_(q)


def two_keys_dropped(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.copy_(attention(q, k[2:], v[2:]))


def last_key_dropped(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.copy_(attention(q, k[:-1], v[:-1]))


def all_nan(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.fill_(torch.nan)


def a_little_nan(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    good(q, k, v, output, count)
    output.view(-1)[5::200] = torch.nan


def one_infinity(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    good(q, k, v, output, count)
    output[23, 63] = torch.inf


def unwritten_tail(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.view(-1)[:-10] = attention(q, k, v).view(-1)[:-10]


def nothing(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    pass


def adds_to_what_it_finds(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.add_(attention(q, k, v))


def past_the_end(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    good(q, k, v, output, count)
    byte(output, 2 * output.numel() + 7).fill_(0)


def before_an_input(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    good(q, k, v, output, count)
    byte(k, -1).fill_(0)


def input_zeroed(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    good(q, k, v, output, count)
    v.zero_()


def input_and_output_zeroed(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    """Where inputs are shared, the baseline then agrees with the zeros."""
    v.zero_()
    output.zero_()


def noisy(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    """Every value good enough, the last bit by chance."""
    good(q, k, v, output, count)
    noisy.calls = getattr(noisy, "calls", 0) + 1  # type: ignore[attr-defined]
    output.view(torch.int16)[3, 4] += noisy.calls % 2  # type: ignore[attr-defined]


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


def left_on_a_thread(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    def later() -> None:
        time.sleep(0.005)
        output.copy_(value)

    value = attention(q, k, v)
    threading.Thread(target=later).start()


def rebound_data(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.data = attention(q, k, v)


class Lazy(torch.Tensor):
    """Would compute when somebody looks."""


def lazy_class(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.__class__ = Lazy  # type: ignore[assignment]


WRONG: list[tuple[Callable[[], Kernel], Verdict, Verdict, str]] = [
    (lambda: zeros, Verdict.WRONG_ANSWER, Verdict.WRONG_ANSWER, "= 0, expected"),
    (lambda: mean_of_v, Verdict.WRONG_ANSWER, Verdict.WRONG_ANSWER, "output["),
    (lambda: copy_of_q, Verdict.WRONG_ANSWER, Verdict.WRONG_ANSWER, "output["),
    (lambda: two_keys_dropped, Verdict.WRONG_ANSWER, Verdict.WRONG_ANSWER, "times what is allowed"),
    (lambda: last_key_dropped, Verdict.WRONG_ANSWER, Verdict.WRONG_ANSWER, "times what is allowed"),
    (lambda: all_nan, Verdict.NON_FINITE, Verdict.WRONG_ANSWER, "output[0, 0] = nan"),
    (lambda: a_little_nan, Verdict.NON_FINITE, Verdict.PASS, "output[0, 5] = nan"),
    (lambda: one_infinity, Verdict.NON_FINITE, Verdict.PASS, "output[23, 63] = inf"),
    (
        lambda: unwritten_tail,
        Verdict.UNWRITTEN_OUTPUT,
        Verdict.PASS,
        "10 of 1536 elements of output were never written",
    ),
    (lambda: nothing, Verdict.UNWRITTEN_OUTPUT, Verdict.WRONG_ANSWER, "1536 of 1536 elements of output"),
    (lambda: adds_to_what_it_finds, Verdict.NON_FINITE, Verdict.WRONG_ANSWER, "= nan"),
    (
        lambda: past_the_end,
        Verdict.OUT_OF_BOUNDS,
        Verdict.PASS,
        "output: memory after the tensor was written, at element",
    ),
    (lambda: before_an_input, Verdict.OUT_OF_BOUNDS, Verdict.PASS, "k: memory before the tensor was written"),
    (lambda: input_zeroed, Verdict.INPUT_MUTATED, Verdict.PASS, "v is an input and was overwritten"),
    (lambda: input_and_output_zeroed, Verdict.INPUT_MUTATED, Verdict.WRONG_ANSWER, "v is an input"),
    (lambda: noisy, Verdict.NONDETERMINISTIC, Verdict.PASS, "output[3, 4] = "),
    (Replay, Verdict.WRONG_ANSWER, Verdict.PASS, "with the second seed"),
    (lambda: OnlyOnce(good, zeros), Verdict.WRONG_ANSWER, Verdict.PASS, "with the second seed"),
    (lambda: OnlyOnce(good, nothing), Verdict.UNWRITTEN_OUTPUT, Verdict.PASS, "1536 of 1536 elements"),
    (lambda: OnlyOnce(zeros, good), Verdict.WRONG_ANSWER, Verdict.WRONG_ANSWER, "= 0, expected"),
    (lambda: left_on_a_thread, Verdict.UNWRITTEN_OUTPUT, Verdict.WRONG_ANSWER, "left on another stream or thread"),
    (lambda: rebound_data, Verdict.UNWRITTEN_OUTPUT, Verdict.WRONG_ANSWER, "1536 of 1536 elements"),
    (lambda: lazy_class, Verdict.UNWRITTEN_OUTPUT, Verdict.WRONG_ANSWER, "1536 of 1536 elements"),
]


def test_a_right_kernel_passes_both_ways(bench: Bench) -> None:
    phases: list[str] = []
    result = bench.run(good, phases=phases)
    assert (result.judge, result.strict, result.detail) == (Verdict.PASS, Verdict.PASS, "")
    assert result.margin is not None
    assert 0 < result.margin < 0.9
    assert result.ok
    assert (result.case, result.required, result.ours_ms, result.baseline) == (
        1,
        True,
        None,
        "testcase_config.py baseline",
    )
    assert phases == ["generate", "inputs", "run", "baseline", "check", "strict", "generate", "run", "strict"]


@pytest.mark.parametrize(
    ("make", "strict", "judged", "said"), WRONG, ids=[getattr(row[0](), "__name__", "stateful") for row in WRONG]
)
def test_wrong_kernels_are_told_apart(
    bench: Bench, make: Callable[[], Kernel], strict: Verdict, judged: Verdict, said: str
) -> None:
    result = bench.run(make())
    assert (result.strict, result.judge) == (strict, judged)
    assert said in result.detail
    assert not result.ok


@pytest.mark.parametrize(
    ("error", "verdict", "said"),
    [
        (
            ValueError("seq_len is odd"),
            Verdict.RUNTIME_ERROR,
            "run_kernel failed: run_kernel.py: ValueError: seq_len is odd",
        ),
        (SystemExit(3), Verdict.RUNTIME_ERROR, "run_kernel called exit(3)"),
        (MemoryError("16 GiB"), Verdict.OUT_OF_MEMORY, "out of memory in run_kernel (16 GiB)"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), Verdict.OUT_OF_MEMORY, "out of memory in run_kernel"),
        (RuntimeError("CUDA error: an illegal memory access"), Verdict.RUNTIME_ERROR, "illegal memory access"),
        (KernelFault(Verdict.RACE, "a race"), Verdict.RACE, "a race"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@pytest.mark.parametrize("at_call", [1, 2, 3])
def test_a_kernel_that_fails_has_a_name(
    bench: Bench, error: BaseException, verdict: Verdict, said: str, at_call: int
) -> None:
    calls = []

    def kernel(*args: Any) -> None:
        calls.append(1)
        if len(calls) == at_call:
            raise error
        good(*args)

    result = bench.run(kernel)
    assert result.strict is verdict
    assert said in result.detail
    # The third call is on the second seed, after the package's check has had its say.
    assert result.judge is (Verdict.PASS if at_call == 3 else verdict)


def test_a_keyboard_interrupt_is_no_verdict(bench: Bench) -> None:
    def kernel(*args: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(kernel)


@pytest.mark.parametrize("name", ["allclose", "isclose"])
def test_replacing_what_checks_rely_on_is_tampering(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
        monkeypatch.setattr(torch, name, lambda *args, **options: torch.ones(1, dtype=torch.bool))
        output.zero_()

    result = bench.run(kernel)
    assert (result.strict, result.detail) == (Verdict.TAMPERED, f"the submission replaced torch.{name}")
    assert result.judge is (Verdict.PASS if name == "isclose" else Verdict.WRONG_ANSWER)
    assert any(note.startswith("also WRONG_ANSWER") for note in result.notes)


def test_what_else_was_wrong_is_in_the_notes(bench: Bench) -> None:
    result = bench.run(OnlyOnce(good, zeros))
    assert any(note.startswith("also NONDETERMINISTIC: output[0, 0] = ") for note in result.notes)


def test_the_worst_finding_is_the_one_that_explains_most() -> None:
    findings = [Finding(verdict, verdict.value) for verdict in reversed(judge._PRECEDENCE)]
    assert judge.worst(findings) == findings[-1]
    assert judge.worst([]) is None
    nan, other = Finding(Verdict.NON_FINITE, "first"), Finding(Verdict.NON_FINITE, "second")
    assert judge.worst([Finding(Verdict.WRONG_ANSWER, ""), nan, other]) is nan
    named = {Verdict.PASS, Verdict.TIMEOUT, Verdict.OUTPUT_LIMIT}  # said by the runner, or by nobody
    assert set(judge._PRECEDENCE) == set(Verdict) - named


# -- packages --------------------------------------------------------------------------------------------------------


def test_without_input_class_inputs_are_still_inputs(bench: Bench) -> None:
    assert bench.run(good, bench.package(prelude="")).ok
    assert bench.run(input_zeroed, bench.package(prelude="")).strict is Verdict.INPUT_MUTATED


def test_a_missing_module_makes_the_reference_the_baseline(bench: Bench) -> None:
    package = bench.package(**{"    p = torch.softmax": "    import no_such_library\n    p = torch.softmax"})
    result = bench.run(good, package)
    assert result.ok
    assert result.baseline == "reference.py (no_such_library not importable)"
    assert bench.run(zeros, package).judge is Verdict.WRONG_ANSWER


def test_a_failing_check_is_the_packages_fault_and_the_strict_rule_still_applies(bench: Bench) -> None:
    package = bench.package(**{"    close = torch.isclose": "    raise ValueError('no')\n    close = torch.isclose"})
    result = bench.run(good, package)
    assert (result.judge, result.strict) == (Verdict.PACKAGE_ERROR, Verdict.PACKAGE_ERROR)
    assert "check raised ValueError: no" in result.detail
    assert result.margin is not None


def test_a_check_that_refuses_a_good_kernel_is_quoted(bench: Bench) -> None:
    result = bench.run(good, bench.package(**{"    return share >= 0.99": "    print('never')\n    return False"}))
    assert (result.judge, result.strict) == (Verdict.WRONG_ANSWER, Verdict.PASS)
    assert result.detail == "the package's check says no: never"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"dtype=torch.bfloat16), 40]": "dtype=torch.bfloat16)]"},
            "genTestCase returned 4 arguments, run_kernel takes 5 (q, k, v, output, count)",
        ),
        ({"return [q, k, v,": "return [q, k.T, v,"}, "genTestCase: argument k is not contiguous"),
        ({"    generator =": "    raise KeyError('data')\n    generator ="}, "genTestCase raised KeyError"),
        ({"    output.copy_(p @": "    raise OSError('disk')\n    output.copy_(p @"}, "baseline raised OSError: disk"),
    ],
    ids=["arity", "strides", "generator", "baseline"],
)
def test_a_faulty_package_is_named_for_both_verdicts(bench: Bench, changes: dict[str, str], said: str) -> None:
    result = bench.run(good, bench.package(prelude="", **changes))
    assert (result.judge, result.strict) == (Verdict.PACKAGE_ERROR, Verdict.PACKAGE_ERROR)
    assert said in result.detail


def test_a_repetition_has_data_of_its_own(bench: Bench) -> None:
    queries: list[Tensor] = []

    def remember(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
        queries.append(q.clone())
        good(q, k, v, output, count)

    for again in range(3):
        assert bench.run(remember, again=again).ok
    assert len(queries) == 9
    for first in range(0, 9, 3):
        assert torch.equal(queries[first], queries[first + 1]), "two runs on the same data"
    kept = queries[::3] + queries[2::3]
    assert not any(torch.equal(a, b) for i, a in enumerate(kept) for b in kept[:i])


def test_a_package_without_a_seed_is_noted(bench: Bench) -> None:
    fixed = {
        "torch.randn(shape, generator=generator, device=device)": "torch.arange(shape[0] * 64.0).view(shape).sin()"
    }
    result = bench.run(good, bench.package(**fixed))
    assert result.ok
    assert "no second seed: the package's data depends on none" in result.notes


def test_data_whose_shape_depends_on_the_seed_is_noted(bench: Bench) -> None:
    moved = {
        "for draw in draws)": "for draw in draws)\n    extra = int(torch.randint(9, (), generator=generator))\n"
        "    k, v = torch.cat([k] * (1 + extra)), torch.cat([v] * (1 + extra))"
    }
    result = bench.run(good, bench.package(**moved))
    assert result.ok
    assert any(note.startswith("no second seed: argument k was") for note in result.notes)


def test_out_of_memory_says_in_which_phase(bench: Bench) -> None:
    package = bench.package(**{"    output.copy_(p @": "    raise MemoryError('80 GiB')\n    output.copy_(p @"})
    result = bench.run(good, package)
    assert (result.judge, result.strict) == (Verdict.OUT_OF_MEMORY, Verdict.OUT_OF_MEMORY)
    assert result.detail == "out of memory in phase baseline (80 GiB)"
    contract = bench.contract(
        REFERENCE.replace("    s = q.float()", "    raise MemoryError('9 GiB')\n    s = q.float()")
    )
    result = bench.run(good, contract=contract)
    assert (result.judge, result.strict) == (Verdict.PASS, Verdict.OUT_OF_MEMORY)
    assert "phase strict" in result.detail


def test_a_reference_that_does_not_fit_is_no_pass(bench: Bench) -> None:
    contract = bench.contract(REFERENCE.replace("@ v.double()}", "@ v.double()[:, :1]}"))
    result = bench.run(good, contract=contract)
    assert (result.judge, result.strict) == (Verdict.PASS, Verdict.PACKAGE_ERROR)
    assert "reference.py cannot be held against" in result.detail


def test_a_bug_of_the_harness_is_not_dressed_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge.Buffers, "mutated", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.run(good)


def test_exact_allocations_are_for_cpp_only(bench: Bench) -> None:
    sizes = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
        sizes.append(output.untyped_storage().nbytes())
        good(q, k, v, output, count)

    contract = dataclasses.replace(bench.contract(), exact_allocations=True)
    assert bench.run(kernel, contract=contract, language="cuda").ok
    assert sizes.pop() == 2 * 24 * 64
    assert bench.run(kernel, contract=contract).ok
    assert sizes.pop() > 8192


def test_counters_are_those_of_one_call(bench: Bench) -> None:
    calls = []
    package = load_package(bench.package())
    submission = Submission("cuda", bench.folder / "run_kernel.cu", lambda args: (calls.append(1), good(*args))[1])

    def drain() -> dict[str, Any]:
        count = len(calls)
        calls.clear()
        return {"launches": count}

    submission.drain = drain
    job = Job("toy", "cuda", "wave64", "tiny", "", "", None, "cpu", 10.0, {}, False)
    result = judge.run_case(job, package, package.case(1), submission, bench.contract(), CPU, lambda name: None)
    assert (result.counts, result.variant) == ({"launches": 1}, "wave64")


# -- timing ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Stopwatch:
    """Stands in for timing.py on a pretended GPU (torch's CPU); calls both sides once and returns `times`."""

    times: timing.PairTime
    asked: list[Any] = dataclasses.field(default_factory=list)
    held: list[bool] = dataclasses.field(default_factory=list)

    def pair(self, ours: Any, baseline: Any, budget_s: float, workload: Any, hooks: timing.Hooks) -> timing.PairTime:
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


# -- tasks that the kit does not know ---------------------------------------------------------------------------------


def unknown(bench: Bench, kernel: Kernel, **changes: str) -> CaseResult:
    return bench.run(kernel, bench.package(prelude="", **changes), contract=None)


def test_without_a_reference_outputs_are_what_the_baseline_changes(bench: Bench) -> None:
    result = unknown(bench, good)
    assert result.ok
    assert result.margin is None
    assert "no reference for this task: strict means finite, written, in bounds and repeatable" in result.notes


@pytest.mark.parametrize(
    ("make", "strict", "judged"),
    [
        (lambda: zeros, Verdict.PASS, Verdict.WRONG_ANSWER),
        (lambda: a_little_nan, Verdict.NON_FINITE, Verdict.PASS),
        (lambda: unwritten_tail, Verdict.UNWRITTEN_OUTPUT, Verdict.PASS),
        (lambda: past_the_end, Verdict.OUT_OF_BOUNDS, Verdict.PASS),
        (lambda: input_zeroed, Verdict.INPUT_MUTATED, Verdict.PASS),
        (lambda: OnlyOnce(good, mean_of_v), Verdict.WRONG_ANSWER, Verdict.PASS),
        (Replay, Verdict.WRONG_ANSWER, Verdict.PASS),
    ],
)
def test_without_a_reference_much_is_still_seen(
    bench: Bench, make: Callable[[], Kernel], strict: Verdict, judged: Verdict
) -> None:
    result = unknown(bench, make())
    assert (result.strict, result.judge) == (strict, judged)


def test_an_output_whose_contents_matter_is_not_poisoned(bench: Bench) -> None:
    result = unknown(bench, adds_to_what_it_finds, **{"output.copy_(p @ v.float())": "output.add_(p @ v.float())"})
    assert result.ok
    assert "argument 4 keeps its contents: the baseline's result depends on them" in result.notes


def test_a_workspace_that_nobody_checks_may_hold_anything(bench: Bench) -> None:
    changes = {
        "(24, 64), ()]": "(24, 64), (), (7,)]",
        "dtype=torch.bfloat16), 40]": "dtype=torch.bfloat16), 40, torch.zeros(7)]",
        "output, count):": "output, count, work):\n    work.fill_(3)",
    }

    def kernel(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int, work: Tensor) -> None:
        assert (work == 0).all()
        work[2] = time.perf_counter()
        good(q, k, v, output, count)

    result = unknown(bench, kernel, **changes)
    assert result.ok
    assert "argument 6 is taken for a workspace: check accepts anything there" in result.notes


def test_integer_outputs_are_poisoned_too(bench: Bench) -> None:
    changes = {
        "dtype=torch.bfloat16), 40]": "dtype=torch.bool), 40]",
        "output.copy_(p @ v.float())": "output.copy_(p @ v.float() > 0)",
    }

    def signs(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
        output.copy_(torch.softmax(q.float() @ k.float().T / 8, -1) @ v.float() > 0)

    def tail(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
        output[:-1] = (torch.softmax(q.float() @ k.float().T / 8, -1) @ v.float() > 0)[:-1]

    assert unknown(bench, signs, **changes).ok
    result = unknown(bench, tail, **changes)
    assert result.strict is Verdict.UNWRITTEN_OUTPUT
    assert "64 of 1536 elements of argument 4 were never written" in result.detail


def test_a_baseline_that_changes_nothing_is_the_packages_fault(bench: Bench) -> None:
    result = unknown(bench, good, **{"    output.copy_(p @ v.float())": "    pass"})
    assert result.strict is Verdict.PACKAGE_ERROR
    assert "no argument is an output" in result.detail


def test_with_neither_reference_nor_baseline_there_is_nothing_to_judge(bench: Bench) -> None:
    result = unknown(bench, good, **{"    p = torch.softmax": "    import no_such_library\n    p = torch.softmax"})
    assert (result.judge, result.strict) == (Verdict.SKIPPED, Verdict.SKIPPED)
    assert "needs the Python module no_such_library" in result.detail
