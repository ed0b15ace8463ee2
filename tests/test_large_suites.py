"""The large suites: their shapes pass 2^31 elements, and what they draw is a valid case (tried on pools made small)."""

from __future__ import annotations

import importlib
import io
import math
from types import ModuleType

import pytest
import torch

from tasks.common import large

TASKS = ("ragged_prefill", "paged_prefill", "mla_decode", "kvcache_decode")


def load(task: str) -> ModuleType:
    return importlib.reload(importlib.import_module(f"tasks.{task}.large_config"))


def sizes_of(config: ModuleType, case: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{case}\n"))
    return config.getTestCaseSize()[0]


@pytest.mark.parametrize("task", TASKS)
def test_every_case_has_a_tensor_past_2_31(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(task)
    for case in range(1, config.getNumOfTestcases() + 1):
        biggest = max(math.prod(shape) for shape in sizes_of(config, case, monkeypatch))
        assert 2**31 < biggest < 2**31 * 1.05


@pytest.mark.parametrize("task", TASKS)
def test_small_pools_of_the_same_build_are_valid_cases(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = importlib.import_module(f"tasks.{task}.reference")
    output = reference.ARGUMENTS.index("output")
    monkeypatch.setattr(large, "PAST", 1 << 18)
    config = load(task)
    for case in range(1, config.getNumOfTestcases() + 1):
        sizes = sizes_of(config, case, monkeypatch)
        arguments = config.genTestCase(sizes, "cpu")
        assert [tuple(getattr(value, "shape", ())) for value in arguments] == [tuple(shape) for shape in sizes]
        config.baseline(*arguments)
        assert bool(torch.isfinite(arguments[output]).all())
        # Somebody must read the far end: poison there shows in the output.
        for value in arguments[:output]:
            if value.numel() >= 1 << 18:
                value[-max(1, len(value) // 8) :] = torch.nan
        assert not bool(torch.isfinite(reference.reference(*arguments)["output"]).all())
    monkeypatch.undo()
    load(task)
