"""The model that runs Hopper variants without a GPU: right kernels pass, and each planted fault of a schedule shows."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from harness import catalog, contract, languages
from harness.devices import Device
from harness.package import load_package
from harness.verdict import KernelFault, Verdict

CPU = Device("cpu", "cpu", "CPU", "c500")
PRODUCT = Path(__file__).parent / "cuda" / "hopper_product.cu"
STEPS = 6


@functools.cache
def product() -> languages.Submission:
    return languages.load("cuda", PRODUCT, ("a", "b", "c", "k", "fault"), CPU, "hopper", {})


def run_product(fault: int) -> list[str]:
    """What became of two runs of a product; of any two one does at once what may be done late."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-4, 5, (64, 64 * STEPS), generator=generator).to(torch.bfloat16) for _ in range(2))
    outcomes = []
    for _ in range(2):
        c = torch.full((64, 64), torch.nan)
        try:
            product().run([a, b, c, 64 * STEPS, fault])
            outcomes.append("right" if torch.equal(c, a.float() @ b.float().T) else "wrong")
        except KernelFault as error:
            outcomes.append(f"{error.verdict.value}: {error}")
    return outcomes


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(1, {"RACE: hopper_product.cu: block 0", "wrong"}, id="no wait for a tile"),
        pytest.param(2, {"wrong", "RACE"}, id="released before the product is done"),
        pytest.param(3, {"TIMEOUT: hopper_product.cu: deadlock: 129 threads of block 0"}, id="parity"),
        pytest.param(4, {"TIMEOUT"}, id="an arrival is missing"),
        pytest.param(5, {"RACE", "TIMEOUT", "wrong"}, id="fewer bytes announced than come"),
        pytest.param(6, {"TIMEOUT"}, id="more bytes announced than come"),
        pytest.param(7, {"RUNTIME_ERROR: hopper_product.cu: block 0, thread 0: TMA to an address"}, id="alignment"),
        pytest.param(8, {"wrong"}, id="the step of a descriptor"),
        pytest.param(9, {"OUT_OF_BOUNDS"}, id="shared memory is too small"),
        pytest.param(10, {"RESOURCE_LIMIT: hopper_product.cu: 245760 bytes"}, id="more shared memory than there is"),
    ],
)
def test_a_planted_fault_shows(fault: int, expected: set[str]) -> None:
    outcomes = run_product(fault)
    assert any(outcome.startswith(text) for outcome in outcomes for text in expected), outcomes


def test_a_right_kernel_is_right_early_and_late_and_after_the_faults_of_others() -> None:
    assert run_product(0) == ["right", "right"]


def test_a_file_that_does_not_compile_is_shown_by_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "hopper.cu"
    path.write_text('\nextern "C" void run_kernel(int* a) { a }\n', encoding="utf-8")
    with pytest.raises(KernelFault, match=r"hopper\.cu:2") as caught:
        languages.load("cuda", path, ("a",), CPU, "hopper", {})
    assert caught.value.verdict is Verdict.COMPILE_ERROR


@pytest.mark.parametrize("task", [t for t in catalog.tasks() if catalog.submission_path(t, "cuda", "hopper").is_file()])
def test_a_variant_gives_what_the_reference_gives(task: str) -> None:
    """One small case each; `make check VARIANT=hopper` runs the whole suite."""
    package = load_package(catalog.suite_path(task, "tiny"))
    truth = contract.load_contract(catalog.reference_path(task))
    kernel = languages.load(
        "cuda", catalog.submission_path(task, "cuda", "hopper"), truth.arguments, CPU, "hopper", {"outputs": ()}
    )
    case = package.case(1)
    args = package.generate(case, "cpu")
    kernel.run(args)
    given = dict(zip(truth.arguments, args, strict=True))
    for name, expected in truth.honest(*args).items():
        torch.testing.assert_close(given[name].float(), expected.float(), rtol=0.02, atol=0.02)
