"""mla_decode, small and nasty: lengths around pages and tiles, non-zero rope parts, NaN in every dead slot.

Runs on any device, on the same data (see tasks/common/values.py). The expected output is reference.py's, rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tasks.common import values
from tasks.common.suite import Suite, compare, offsets
from tasks.mla_decode import reference as truth

CKV, KPE = 512, 64
SPARE_PAGES = 3
INPUT_CLASS = ["INPUT"] * 4 + ["OUTPUT"] + ["INPUT"] * 11

# The latent part serves as key and value, so its mean stays moderate; 512 dimensions carry the scores far enough.
_LOW = values.Style(q_mean=-3.5, q_std=1.0, k_mean=1.5, k_std=0.3, ends=1.0)
_HIGH = _LOW._replace(q_mean=3.5)
_RISING = values.Style(q_std=1.5, k_std=0.5, rise=5.0, ends=8.0)
# 64 rope dimensions under 1 / sqrt(576): deviations that give them as large a share of the score as the latent part.
_ROPE = values.Style(q_std=3.0, k_std=1.0)


class Case(NamedTuple):
    """Lengths of every sequence; `reserved`: pages of the table beyond those that the tokens fill, per sequence."""

    label: str
    seed: int
    heads: int
    page: int
    kv_lens: tuple[int, ...]
    style: values.Style = values.PLAIN
    reserved: int = 0
    causal: int = 0

    @property
    def page_counts(self) -> list[int]:
        """Entries of each sequence in kv_indices."""
        return [-(-length // self.page) + self.reserved for length in self.kv_lens]


CASES = (
    Case("h16 around 16", 301, 16, 1, (1, 0, 15, 16, 17)),
    Case("h16 around 64", 302, 16, 1, (65, 63), _RISING),
    Case("h16 long", 303, 16, 1, (300,), _RISING, causal=1),
    Case("h32 page 16", 304, 32, 16, (33, 16, 1, 0)),
    Case("h32 page 64", 305, 32, 64, (63, 64, 65), _HIGH),
    Case("h64 reserved rows", 306, 64, 1, (129, 2), reserved=2),
    Case("h64 reserved pages", 307, 64, 16, (127, 0, 32), _LOW, reserved=1),
    Case("h128 page 64", 308, 128, 64, (128, 31)),
    Case("h128 page 1", 309, 128, 1, (97,), _LOW),
)
CASE_LABELS = tuple(case.label for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    batch, listed = len(case.kv_lens), sum(case.page_counts)
    q_shapes = [(batch, case.heads, CKV), (batch, case.heads, KPE)]
    pools = [(listed + SPARE_PAGES, case.page, CKV), (listed + SPARE_PAGES, case.page, KPE)]
    return [*q_shapes, *pools, q_shapes[0], (batch + 1,), (batch + 1,), (listed,), (batch,), *[()] * 7]


def _arguments(case: Case, device: str) -> list[Any]:
    generator = torch.Generator("cpu").manual_seed(case.seed)
    batch = len(case.kv_lens)
    q_nope = values.draw_q(generator, batch, case.heads, CKV, case.style).to(device)
    q_pe = values.draw_q(generator, batch, case.heads, KPE, _ROPE).to(device)
    capacity = tuple(count * case.page for count in case.page_counts)  # reserved pages are dealt, and left as NaN
    pages = values.place(generator, capacity, case.page, SPARE_PAGES)
    pools = []
    for dim, style in ((CKV, case.style), (KPE, _ROPE)):
        rows = [values.draw_kv(generator, n, 1, dim, 1, style)[0].squeeze(1) for n in case.kv_lens]
        pools.append(values.fill(pages, rows).to(device))
    tables = (
        torch.arange(batch + 1, dtype=torch.int32, device=device),
        offsets(case.page_counts, device),
        torch.tensor([page for table in pages.tables for page in table], dtype=torch.int32, device=device),
        torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
    )
    sizes = (batch, max(case.kv_lens), case.heads, CKV, KPE, case.page, case.causal)
    return [q_nope, q_pe, *pools, torch.empty_like(q_nope), *tables, *sizes]


SUITE = Suite(CASES, _shapes, _arguments, timing=lambda case: (1, 10))
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate


def baseline(q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, output: Tensor, *rest: Any) -> None:
    """The ground truth, rounded to bf16."""
    output.copy_(truth.reference(q_nope, q_pe, ckv, kpe, output, *rest)["output"])


def check(
    testcase_sizes: list[Any],
    original_inputs: list[Any],
    target_args: list[Any],
    baseline_args: list[Any],
    rtol: float = 1e-2,
    atol: float = 1e-2,
) -> bool:
    """Every element within the judge's tolerance."""
    return compare(target_args[4], baseline_args[4], rtol, atol)
