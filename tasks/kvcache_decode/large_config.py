"""kvcache_decode with offsets past 2^31 elements into both caches. See tasks/common/large.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tasks.common.large import far_pages, poisoned_pool, rows_past
from tasks.common.suite import Suite
from tasks.kvcache_decode import tiny_config

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
DESIGNED_VRAM_SIZE = 30  # GiB: two caches of 4 GiB, one of them twice while it is moved between its red zones
INPUT_CLASS = tiny_config.INPUT_CLASS


class Case(NamedTuple):
    """Lengths of every sequence; their pages lie at both ends of the caches."""

    label: str
    seed: int
    lengths: tuple[int, ...]

    @property
    def pages(self) -> int:
        """Pages in use by the longest sequence."""
        return -(-max(self.lengths) // PAGE)

    @property
    def blocks(self) -> int:
        """Pages in each cache, a multiple of the batch."""
        blocks = rows_past(PAGE * KV_HEADS * DIM, len(self.lengths) * self.pages)
        return -(-blocks // len(self.lengths)) * len(self.lengths)


CASES = (Case("caches past 2^31", 521, (1000, 1, 17, 4097)),)
CASE_LABELS = tuple(case.label for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    batch = len(case.lengths)
    q_shape, pool = (batch, 1, HEADS, DIM), (case.blocks, PAGE, KV_HEADS, DIM)
    return [q_shape, pool, pool, q_shape, (batch,), (batch, case.blocks // batch), *[()] * 9]


def _arguments(case: Case, device: str) -> list[Any]:
    generator = torch.Generator("cpu").manual_seed(case.seed)
    q_shape, pool_shape, _, _, _, table_shape, *_ = _shapes(case)
    batch, row = table_shape
    q = torch.randn(q_shape, generator=generator).to(device, torch.bfloat16)
    k_cache, v_cache = poisoned_pool(pool_shape, device), poisoned_pool(pool_shape, device)
    used = far_pages(batch * case.pages, case.blocks, generator).view(batch, case.pages)
    # Behind the pages in use lie ids of the pool's middle, which is NaN.
    table = torch.full((batch, row), case.blocks // 2, dtype=torch.int32)
    table[:, : case.pages] = used
    for pages, length in zip(used.tolist(), case.lengths, strict=True):
        for number, page in enumerate(pages[: -(-length // PAGE)]):
            valid = min(PAGE, length - number * PAGE)
            for cache in (k_cache, v_cache):
                rows = torch.randn((valid, KV_HEADS, DIM), generator=generator)
                cache[page, :valid] = rows.to(device, torch.bfloat16)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    sizes = (batch, max(case.lengths), 1, HEADS, KV_HEADS, DIM, PAGE, case.blocks, 0)
    return [q, k_cache, v_cache, torch.empty_like(q), lengths, table.to(device), *sizes]


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: (1, 3))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
baseline, check = tiny_config.baseline, tiny_config.check
