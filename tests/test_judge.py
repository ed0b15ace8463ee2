"""One case from end to end, with kernels that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged import (
    Bench,
    Kernel,
    Later,
    OnlyOnce,
    Replay,
    a_little_nan,
    adds_to_what_it_finds,
    attention,
    byte,
    good,
    input_zeroed,
    last_key_dropped,
    mean_of_v,
    past_the_end,
    unwritten_tail,
    zeros,
)
from torch import Tensor

from harness import ledger
from harness.guard import Finding
from harness.verdict import KernelFault, Verdict

# -- kernels that are wrong on purpose: each changes what good() does ------------------------------------------------


def copy_of_q(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.copy_(q)


def two_keys_dropped(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.copy_(attention(q, k[2:], v[2:]))


def all_nan(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    output.fill_(torch.nan)


def one_infinity(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    good(q, k, v, output, count)
    output[23, 63] = torch.inf


def nothing(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    pass


def before_an_input(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    good(q, k, v, output, count)
    byte(k, -1).fill_(0)


def input_and_output_zeroed(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    """Where inputs are shared, the baseline then agrees with the zeros."""
    v.zero_()
    output.zero_()


def noisy(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    """Every value good enough, the last bit by chance."""
    good(q, k, v, output, count)
    noisy.calls = getattr(noisy, "calls", 0) + 1  # type: ignore[attr-defined]
    output.view(torch.int16)[3, 4] += noisy.calls % 2  # type: ignore[attr-defined]


def left_on_a_thread(q: Tensor, k: Tensor, v: Tensor, output: Tensor, count: int) -> None:
    value = attention(q, k, v)
    Later(lambda: output.copy_(value))


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


def test_a_baseline_that_is_wrong_itself_is_named(bench: Bench) -> None:
    wrong = bench.package(**{"output.copy_(p @ v.float())": "output.copy_(p @ v.float()); output[3] += 1"})
    result = bench.run(good, wrong)
    assert (result.judge, result.strict) == (Verdict.WRONG_ANSWER, Verdict.PASS)
    assert "the package's check says no" in result.detail
    (note,) = [note for note in result.notes if "baseline" in note]
    assert note.startswith("the kernel agrees with reference.py; the baseline does not: output[3, ")
    strict_check = bench.package(**{"share >= 0.99": "False"})  # the baseline is right, and the check refuses all
    assert not [note for note in bench.run(good, strict_check).notes if "baseline" in note]


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
    findings = [Finding(verdict, verdict.value) for verdict in reversed(ledger._PRECEDENCE)]
    assert ledger.worst(findings) == findings[-1]
    assert ledger.worst([]) is None
    nan, other = Finding(Verdict.NON_FINITE, "first"), Finding(Verdict.NON_FINITE, "second")
    assert ledger.worst([Finding(Verdict.WRONG_ANSWER, ""), nan, other]) is nan
    named = {Verdict.PASS, Verdict.TIMEOUT, Verdict.OUTPUT_LIMIT}  # said by the runner, or by nobody
    assert set(ledger._PRECEDENCE) == set(Verdict) - named
