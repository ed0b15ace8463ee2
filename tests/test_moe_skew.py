"""The MoE's package of more and less skew: its experts are drawn as it says, and its cases can be judged."""

from __future__ import annotations

import pytest
import torch

from tasks.fused_moe import reference, skew_config, testcase_config


def experts(exponent: float, order: str) -> torch.Tensor:
    return skew_config.tile_experts(256, 256, exponent, order, torch.Generator().manual_seed(7))


def test_a_larger_exponent_leaves_fewer_experts() -> None:
    used = [len(experts(exponent, "sorted").unique()) for exponent in (0.0, 1.2, 2.0)]
    assert 140 < used[0] < 185  # 256 (1 - 1/e) = 162
    assert used[0] > used[1] > used[2] > 4


@pytest.mark.parametrize("exponent", [0.0, 1.2, 2.0])
def test_both_orders_hold_the_same_tiles(exponent: float) -> None:
    in_order, shuffled = experts(exponent, "sorted"), experts(exponent, "unsorted")
    assert torch.equal(in_order, shuffled.sort().values)
    assert not torch.equal(in_order, shuffled)
    assert (in_order.diff() >= 0).all()


def test_a_case_is_what_its_label_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testcase_config, "E", 8)  # all 256 experts of N 4096, K 7168 are 7.5 GB
    shapes = lambda em, n, k: [(em, k), (8, n, k), (em,), (8, n), (em,), (em,), (em // 128,), (), (em, n)]  # noqa: E731
    monkeypatch.setattr(testcase_config, "argument_shapes", shapes)
    case = skew_config.Case(512, 128, 128, 1.2, "unsorted")
    args = skew_config._arguments(case, "cpu")
    assert args[6].shape == (4,)
    assert args[6].max() < 8
    assert args[0].float().std() > 5
    skew_config.baseline(*args)
    truth = [*args[:8], reference.honest(*args)["out"]]
    assert skew_config.check([], args, truth, args)
    truth[8] = truth[8].roll(128, 0)  # tiles in another order
    assert not skew_config.check([], args, truth, args)
    assert skew_config.CASE_LABELS[1] == "EM32768 Zipf 0 unsorted"
    assert skew_config.CASE_LABELS[9] == "EM4096 Zipf 1.2 unsorted"
    assert len(set(skew_config.CASE_LABELS)) == skew_config.getNumOfTestcases() == 12
