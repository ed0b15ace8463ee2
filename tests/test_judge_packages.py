"""One case from end to end, with packages that are odd or wrong on purpose, known tasks and unknown ones."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged import (
    CPU,
    REFERENCE,
    Bench,
    Kernel,
    OnlyOnce,
    Replay,
    a_little_nan,
    adds_to_what_it_finds,
    good,
    input_zeroed,
    last_key_dropped,
    mean_of_v,
    past_the_end,
    unwritten_tail,
    zeros,
)
from torch import Tensor

from harness import judge
from harness.languages import Submission
from harness.package import load_package
from harness.runner import Job
from harness.verdict import CaseResult, Verdict

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
        (
            {"torch.zeros(testcase_sizes[3], device=device, dtype=torch.bfloat16)": "7"},
            "no tensor for output",
        ),
        ({"return [q, k, v,": "return [q, k.T, v,"}, "genTestCase: argument k is not contiguous"),
        ({"    generator =": "    raise KeyError('data')\n    generator ="}, "genTestCase raised KeyError"),
        ({"    output.copy_(p @": "    raise OSError('disk')\n    output.copy_(p @"}, "baseline raised OSError: disk"),
    ],
    ids=["arity", "output", "strides", "generator", "baseline"],
)
def test_a_faulty_package_is_named_for_both_verdicts(bench: Bench, changes: dict[str, str], said: str) -> None:
    result = bench.run(good, bench.package(prelude="", **changes))
    assert (result.judge, result.strict) == (Verdict.PACKAGE_ERROR, Verdict.PACKAGE_ERROR)
    assert said in result.detail


@pytest.mark.parametrize("kernel", [good, zeros])
@pytest.mark.parametrize(
    ("function", "changes"),
    [
        ("baseline", {"output.copy_(p @ v.float())": "output.copy_(p @ v.float())\n    k.mul_(2)"}),
        ("check", {"    close = torch": "    original_inputs[1].add_(1)\n    close = torch"}),
        ("check", {"    close = torch": "    target_args[1].zero_()\n    close = torch"}),
    ],
    ids=["baseline", "check", "check's target"],
)
def test_a_package_that_writes_into_an_input_is_at_fault_itself(
    bench: Bench, function: str, changes: dict[str, str], kernel: Kernel
) -> None:
    result = bench.run(kernel, bench.package(**changes))
    assert (result.judge, result.strict) == (Verdict.PACKAGE_ERROR, Verdict.PACKAGE_ERROR)
    assert result.detail == f"{bench.folder / 'testcase_config.py'}: {function} wrote into the input k"
    # The inputs were put back, so the strict rule still tells the kernels apart, on both sets of data.
    assert result.margin is not None
    assert (result.margin < 1) is (kernel is good)
    assert any(note.startswith("also WRONG_ANSWER") for note in result.notes) is (kernel is zeros)


def test_a_check_may_work_in_the_outputs_that_it_is_given(bench: Bench) -> None:
    changes = {"    return share >= 0.99": "    target_args[3].zero_()\n    return share >= 0.99"}
    assert bench.run(good, bench.package(**changes)).ok
    assert bench.run(last_key_dropped, bench.package(**changes)).strict is Verdict.WRONG_ANSWER


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


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        ("baseline", {"output.copy_(p @ v.float())": "output.copy_(p @ v.float())\n    k.mul_(2)"}),
        ("check", {"    close = torch": "    original_inputs[1].add_(1)\n    close = torch"}),
    ],
    ids=["baseline", "check"],
)
def test_without_a_reference_an_input_is_no_place_for_the_package_either(
    bench: Bench, function: str, changes: dict[str, str]
) -> None:
    result = bench.run(good, bench.package(**changes), contract=None)
    assert (result.judge, result.strict) == (Verdict.PACKAGE_ERROR, Verdict.PACKAGE_ERROR)
    assert result.detail.endswith(f"{function} wrote into the input argument 2")
