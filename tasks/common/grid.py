"""A grid of points to time a library's kernel on, and ours: what each task's grids.py is made of. Imports no torch.

A point holds the sizes of one row by the names of its CSV columns; everything else about a case is the grid's. FLOPs
and bytes of a row are those of the task's reference.py, `workload`, on the arguments that `build` made:

* FLOPs: two per multiply-add of Q K^T and of P V, 2 * (dim_qk + dim_vo) for each (query, key, query head) that the mask
  lets through, softmax not counted. This is the count of the published packages (getWorkload of ragged_prefill:
  B * S * S * Hq * (d_qk + d_vo), the causal half) and of the FlashAttention papers' tables (4 * S * S * d * H, halved
  for causal), except that the causal pairs are counted one by one: S * (S + 1) / 2, not S * S / 2.
* Bytes: each live key, value, query, page id, offset and length read once and the output written once, whatever a
  kernel reads again; pages that no sequence owns do not count.

GB/s are 1e9 bytes, TFLOPS 1e12 FLOPs per second.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Point = Mapping[str, int]
FIGURES = ("time_ms", "bandwidth_GB_s", "tflops")
SEED = 20261201


class Library(NamedTuple):
    """One way to compute a point with a library. `module` must be importable for it.

    plan(args): does everything that a serving engine does once per batch (workspace, plan), and gives the call to be
        timed, which enqueues the kernel and returns its output with the elements of the argument `output`.
    tag: what the CSV's name says of it beside the grid's api; "" for the library that the grid is named after.
    """

    module: str
    name: str
    plan: Callable[[Sequence[Any]], Callable[[], Tensor]]
    tag: str = ""


@dataclasses.dataclass(frozen=True)
class Grid:
    """One CSV. `columns` in its order; those of FIGURES come last. `libraries`: the first that is installed is taken.

    words: (word, column) of what a progress line says of a point.
    build(point, device): run_kernel's arguments, drawn from a seeded generator on that device; the output holds NaN.
    last(args): the case that consists of the last sequence alone, its tensors views of those of `args`.
    uncovered(point): why the task's contract leaves the point out, "" where our kernels must compute it.
    """

    api: str
    columns: tuple[str, ...]
    words: tuple[tuple[str, str], ...]
    points: tuple[Point, ...]
    build: Callable[[Point, str], list[Any]]
    last: Callable[[Sequence[Any]], list[Any]]
    libraries: tuple[Library, ...]
    uncovered: Callable[[Point], str]

    def label(self, point: Point) -> str:
        """A point in the words of a progress line: "bs=1, kv_len=512, hd=64"."""
        return ", ".join(f"{word}={point[column]}" for word, column in self.words)


def axis(name: str, *values: int) -> tuple[Point, ...]:
    """The values that one column takes."""
    return tuple({name: value} for value in values)


def cross(*axes: Sequence[Point]) -> tuple[Point, ...]:
    """Every combination, the first axis outermost."""
    return tuple(functools.reduce(operator.or_, map(dict, parts)) for parts in product(*axes))
