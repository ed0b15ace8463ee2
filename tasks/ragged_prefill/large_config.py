"""ragged_prefill with offsets past 2^31 elements, into K and V and into q and output. See tasks/common/large.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tasks.common.large import rows_past
from tasks.common.suite import Suite, offsets
from tasks.ragged_prefill import tiny_config

HEADS, KV_HEADS, DIM = 32, 4, 128
DESIGNED_VRAM_SIZE = 60  # GiB: four tensors of up to 4 GiB, float64 copies of two of them in the reference
INPUT_CLASS = tiny_config.INPUT_CLASS


class Case(NamedTuple):
    """The first sequence is long in q or in K and V, so that the others lie behind 2^31 elements."""

    label: str
    seed: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


CASES = (
    Case("k, v past 2^31", 501, (1, 33), (rows_past(KV_HEADS * DIM, 0), 100)),
    Case("q, output past 2^31", 502, (rows_past(HEADS * DIM, 0), 33), (16, 100)),
)
CASE_LABELS = tuple(case.label for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    q_shape, kv_shape = (sum(case.q_lens), HEADS, DIM), (sum(case.kv_lens), KV_HEADS, DIM)
    indptr = (len(case.q_lens) + 1,)
    return [q_shape, kv_shape, kv_shape, q_shape, indptr, indptr, *[()] * 7]


def _arguments(case: Case, device: str) -> list[Any]:
    generator = torch.Generator(device).manual_seed(case.seed)
    q, k, v = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in _shapes(case)[:3]
    )
    indptrs = offsets(case.q_lens, device), offsets(case.kv_lens, device)
    longest = max(case.q_lens + case.kv_lens)
    return [q, k, v, torch.empty_like(q), *indptrs, len(case.q_lens), longest, HEADS, KV_HEADS, DIM, DIM, 0]


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: (1, 3))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
baseline, check = tiny_config.baseline, tiny_config.check
