"""Values for the tiny suites: small data in which every key and every head shows in the output.

The judge's own data hide mistakes: uniform values in [0, 1) make any subset of the keys average to the same. Here the
softmax is neither flat nor a single spike (scores have a standard deviation near 1), the last key of every sequence
carries large values, and some cases shift all scores so far from 0 that exp(s) alone under- or overflows, or let
them rise along the sequence so that an online softmax must rescale at nearly every tile.

All draws come from a CPU generator, so that every device computes on the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BF16 = torch.bfloat16


class Style(NamedTuple):
    """How q, k and v are drawn: normal with these means and deviations; keys grow by a factor `rise` to the last.

    `ends` is added to the scores of the first and last key, whose weight would vanish next to the largest otherwise.
    """

    q_mean: float = 0.0
    q_std: float = 1.2
    k_mean: float = 0.0
    k_std: float = 1.0
    v_mean: float = 0.0  # its sign alternates between KV heads
    rise: float = 1.0
    ends: float = 0.0


PLAIN = Style()
RISING = Style(q_std=1.5, k_std=0.7, rise=5.0, ends=8.0)
LOW = Style(-5.0, 1.0, k_mean=3.0, k_std=0.25, v_mean=1.0, ends=1.0)  # scores near -15 sqrt(dim): exp(s) is 0
HIGH = Style(5.0, 1.0, k_mean=3.0, k_std=0.25, ends=1.0)  # scores near 15 sqrt(dim): exp(s) is inf
_PROBE = 3.0  # dimension 0 of every query, where `ends` is not 0: what the end keys add there they add to every score


def draw_q(generator: torch.Generator, rows: int, heads: int, dim: int, style: Style) -> Tensor:
    """(rows, heads, dim) queries, bf16, on the CPU."""
    q = style.q_mean + style.q_std * torch.randn(rows, heads, dim, generator=generator)
    if style.ends:
        q[..., 0] = _PROBE
    return q.to(BF16)


def draw_kv(
    generator: torch.Generator, rows: int, heads: int, dim_qk: int, dim_v: int, style: Style
) -> tuple[Tensor, Tensor]:
    """(rows, heads, dim_qk) keys and (rows, heads, dim_v) values of one sequence, bf16, on the CPU."""
    growth = torch.linspace(1.0, style.rise, rows).view(rows, 1, 1)
    k = (style.k_mean + style.k_std * torch.randn(rows, heads, dim_qk, generator=generator)) * growth
    sign = (1.0 - 2.0 * (torch.arange(heads) % 2)).view(1, heads, 1)
    v = style.v_mean * sign + torch.randn(rows, heads, dim_v, generator=generator)
    if rows:
        v[-1] *= 3  # a dropped last key must not drown in the others
        k[[0, -1], :, 0] += style.ends * math.sqrt(dim_qk) / _PROBE
    return k.to(BF16), v.to(BF16)


class Pages(NamedTuple):
    """Where the pages of each sequence lie in a pool of `total` pages, and how many tokens each sequence has."""

    total: int
    size: int
    lengths: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]


def place(generator: torch.Generator, lengths: tuple[int, ...], size: int, spare: int) -> Pages:
    """Deal pages of `size` tokens to sequences in random order, `spare` pages of the pool going to nobody.

    With two spare pages or more the first and last page of the pool are among them, so that an id read from a zeroed or
    clamped table points at poison.
    """
    counts = [-(-length // size) for length in lengths]
    total = sum(counts) + spare
    order = torch.randperm(total, generator=generator).tolist()
    if spare >= 2:
        used = [page for page in order if page not in (0, total - 1)]
        order = used[: sum(counts)]
    tables, start = [], 0
    for count in counts:
        tables.append(tuple(order[start : start + count]))
        start += count
    return Pages(total, size, lengths, tuple(tables))


def fill(pages: Pages, rows: list[Tensor]) -> Tensor:
    """A pool (total, size, ...) that holds each sequence's rows (length, ...) in its pages, and NaN everywhere else."""
    pool = torch.full((pages.total, pages.size, *rows[0].shape[1:]), torch.nan, dtype=rows[0].dtype)
    for table, own in zip(pages.tables, rows, strict=True):
        for number, page in enumerate(table):
            part = own[number * pages.size : (number + 1) * pages.size]
            pool[page, : len(part)] = part
    return pool
