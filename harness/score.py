"""The judge's score of one case, previewed."""

from __future__ import annotations

import math


def preview(ours_ms: float, baseline_ms: float, limit_ms: float = 0.0) -> float:
    """S = 100 / (1 + (T_k - T_h) / (T_b - T_h)); above 100 it grows by 10 per doubling and stops at 150.

    Every recent report that could be checked used T_h = 0, which is the default: 50 points at baseline speed.
    Raises ValueError for times that are not positive, or a limit that the baseline already beats.
    """
    if ours_ms <= 0 or baseline_ms <= 0 or not 0 <= limit_ms < baseline_ms:
        raise ValueError(f"no score for {ours_ms=}, {baseline_ms=}, {limit_ms=}")
    denominator = 1 + (ours_ms - limit_ms) / (baseline_ms - limit_ms)
    if denominator <= 0:
        return 150.0
    score = 100 / denominator
    return score if score <= 100 else min(150.0, 100 + 10 * math.log2(score / 100))
