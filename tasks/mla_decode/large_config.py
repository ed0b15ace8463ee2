"""mla_decode with offsets past 2^31 elements into the latent cache. See tasks/common/large.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tasks.common.large import far_pages, poisoned_pool, rows_past
from tasks.common.suite import Suite, offsets
from tasks.mla_decode import tiny_config

CKV, KPE, PAGE = 512, 64, 1
DESIGNED_VRAM_SIZE = 20  # GiB: the latent cache twice while it is moved between its red zones
INPUT_CLASS = tiny_config.INPUT_CLASS


class Case(NamedTuple):
    """Lengths of every sequence; their rows lie at both ends of the cache."""

    label: str
    seed: int
    heads: int
    kv_lens: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows in the cache."""
        return rows_past(CKV, sum(self.kv_lens))


CASES = (Case("ckv past 2^31", 531, 64, (1000, 0, 1, 77)),)
CASE_LABELS = tuple(case.label for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    batch = len(case.kv_lens)
    q_shape, pools = (batch, case.heads, CKV), [(case.rows, PAGE, CKV), (case.rows, PAGE, KPE)]
    tables = [(batch + 1,), (batch + 1,), (sum(case.kv_lens),), (batch,)]
    return [q_shape, (batch, case.heads, KPE), *pools, q_shape, *tables, *[()] * 7]


def _arguments(case: Case, device: str) -> list[Any]:
    generator = torch.Generator("cpu").manual_seed(case.seed)
    _, _, ckv_shape, kpe_shape, *_ = _shapes(case)
    q_nope, q_pe = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in _shapes(case)[:2])
    ckv, kpe = poisoned_pool(ckv_shape, device), poisoned_pool(kpe_shape, device)
    indices = far_pages(sum(case.kv_lens), case.rows, generator).to(device)
    for pool, width in ((ckv, CKV), (kpe, KPE)):
        pool[indices.long(), 0] = torch.randn((len(indices), width), generator=generator).to(device, torch.bfloat16)
    tables = (
        torch.arange(len(case.kv_lens) + 1, dtype=torch.int32, device=device),
        offsets(case.kv_lens, device),
        indices,
        torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
    )
    sizes = (len(case.kv_lens), max(case.kv_lens), case.heads, CKV, KPE, PAGE, 0)
    return [q_nope, q_pe, ckv, kpe, torch.empty_like(q_nope), *tables, *sizes]


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: (1, 3))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate
baseline, check = tiny_config.baseline, tiny_config.check
