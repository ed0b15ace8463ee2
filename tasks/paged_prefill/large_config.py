"""paged_prefill with offsets past 2^31 elements into the page pool. See tasks/common/large.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tasks.common.large import far_pages, poisoned_pool, rows_past
from tasks.common.suite import Suite, offsets
from tasks.paged_prefill import tiny_config

HEADS, KV_HEADS, DIM, PAGE = 32, 4, 128, 16
DESIGNED_VRAM_SIZE = 20  # GiB: the pool twice while it is moved between its red zones
INPUT_CLASS = tiny_config.INPUT_CLASS


class Case(NamedTuple):
    """Lengths of every sequence; their pages lie at both ends of the pool."""

    label: str
    seed: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def counts(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-length // PAGE) for length in self.kv_lens]

    @property
    def pool(self) -> int:
        """Pages in the pool."""
        return rows_past(2 * PAGE * KV_HEADS * DIM, sum(self.counts))


CASES = (Case("kv_data past 2^31", 511, (65, 1, 130), (130, 17, 1001)),)
CASE_LABELS = tuple(case.label for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    q_shape, batch = (sum(case.q_lens), HEADS, DIM), len(case.q_lens)
    pool = (case.pool, 2, PAGE, KV_HEADS, DIM)
    return [q_shape, pool, q_shape, (batch + 1,), (batch + 1,), (sum(case.counts),), (batch,), *[()] * 7]


def _arguments(case: Case, device: str) -> list[Any]:
    generator = torch.Generator("cpu").manual_seed(case.seed)
    q = torch.randn(_shapes(case)[0], generator=generator).to(device, torch.bfloat16)
    kv_data = poisoned_pool(_shapes(case)[1], device)
    indices = far_pages(sum(case.counts), case.pool, generator)
    first = 0
    for length, count in zip(case.kv_lens, case.counts, strict=True):
        for number, page in enumerate(indices[first : first + count].tolist()):
            valid = min(PAGE, length - number * PAGE)
            rows = torch.randn((2, valid, KV_HEADS, DIM), generator=generator)
            kv_data[page, :, :valid] = rows.to(device, torch.bfloat16)
        first += count
    last = torch.tensor([(length - 1) % PAGE + 1 for length in case.kv_lens], dtype=torch.int32, device=device)
    tables = offsets(case.q_lens, device), offsets(case.counts, device), indices.to(device), last
    sizes = (len(case.q_lens), max(case.q_lens + case.kv_lens), HEADS, KV_HEADS, DIM, PAGE, 0)
    return [q, kv_data, torch.empty_like(q), *tables, *sizes]


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: (1, 3))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
baseline, check = tiny_config.baseline, tiny_config.check
