"""How well a measured time or ratio is known: two 95 % intervals, in plain Python.

A ratio comes from paired measurements: each round times ours, peer, peer, ours, and gives one log-ratio, from which
what both sides share (a clock that falls, a linear drift) is gone. The interval is Student's t on the 20 % trimmed
mean of those, with the winsorised variance (J. W. Tukey and D. H. McLaughlin, Sankhya A 25, 1963; R. R. Wilcox,
Introduction to Robust Estimation and Hypothesis Testing, section 4.3): an interrupt that hits one call in ten does not
move it, where it ruins a mean. Differences of pairs are symmetric, so this centre is the median's as well.

A time alone is a median, and its interval lies between two order statistics, whatever the distribution (W. J. Conover,
Practical Nonparametric Statistics, section 3.2, with the exact binomial).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_Z = 1.959963984540054  # the standard normal's 97.5 % quantile
_TRIMMED = 0.2  # of each end


class Interval(NamedTuple):
    """A value and the 95 % interval around it."""

    value: float
    low: float
    high: float

    def half_width(self) -> float:
        """The larger distance from the value to an end, as a share of the value."""
        return max(self.high - self.value, self.value - self.low) / self.value


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t. Exact for one and two degrees of freedom, else within 0.2 %.

    From three on by the expansion in Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if freedom < 3:
        return {1: 12.706204736432095, 2: 4.302652729911275}[freedom]
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def ratio_interval(log_ratios: Sequence[float]) -> Interval:
    """The ratio and its 95 % interval from at least two natural logarithms of paired ratios."""
    ordered, number = sorted(log_ratios), len(log_ratios)
    cut = int(_TRIMMED * number)
    kept = ordered[cut : number - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    mean = statistics.fmean(winsorised)
    variance = math.fsum((value - mean) ** 2 for value in winsorised) / (number - 1)
    error = math.sqrt(variance / number) / (1 - 2 * cut / number)
    centre, reach = statistics.fmean(kept), t_quantile(len(kept) - 1) * error
    return Interval(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach))


def median_interval(values: Sequence[float]) -> Interval:
    """The median and its 95 % interval; of fewer than six values, the whole range."""
    ordered, number = sorted(values), len(values)
    # How many values to leave out at each end: as many as in at most 2.5 % of all samples lie beyond the true median.
    left_out, tail = 0, 1
    while 40 * tail <= 2**number:
        left_out += 1
        tail += math.comb(number, left_out)
    left_out = max(0, left_out - 1)
    return Interval(statistics.median(ordered), ordered[left_out], ordered[number - 1 - left_out])


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one positive number."""
    return math.exp(statistics.fmean(map(math.log, values)))
