"""The preview of the judge's score."""

from __future__ import annotations

import pytest

from harness.score import preview


@pytest.mark.parametrize(
    ("ours", "baseline", "limit", "score"),
    [
        (1.0, 1.0, 0.0, 50.0),
        (1.0, 2.0, 0.0, 200 / 3),
        (1.0, 4.0, 0.0, 80.0),
        (3.0, 1.0, 0.0, 25.0),
        (2.0, 3.0, 1.0, 200 / 3),  # T_h = 1: half of the baseline's distance to it
        (1.0, 3.0, 1.0, 100.0),  # at the limit
        (0.5, 1.5, 1.0, 150.0),  # the denominator is 0: as fast as the formula can say
        (0.1, 1.5, 1.0, 150.0),
    ],
)
def test_preview(ours: float, baseline: float, limit: float, score: float) -> None:
    assert preview(ours, baseline, limit) == pytest.approx(score)


def test_above_100_each_doubling_adds_10() -> None:
    # T_h = 1, T_b = 2: the formula gives 100 / T_k below the limit
    assert preview(0.5, 2.0, 1.0) == pytest.approx(110.0)
    assert preview(0.25, 2.0, 1.0) == pytest.approx(120.0)
    assert preview(0.01, 2.0, 1.0) == 150.0


@pytest.mark.parametrize(
    ("ours", "baseline", "limit"), [(0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1.0, 1.0), (1.0, 1.0, -0.1)]
)
def test_impossible_times_give_no_score(ours: float, baseline: float, limit: float) -> None:
    with pytest.raises(ValueError, match="no score"):
        preview(ours, baseline, limit)
