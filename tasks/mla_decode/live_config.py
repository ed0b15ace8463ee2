"""mla_decode as we assume the judge to run it today: the published shapes with non-zero rope parts, rows in random
order, ragged kv_lens (0 and 1 among them), and the live rule of the ragged task (1.6e-2, 99 %, 8x). Lengths and seeds
are ours.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tasks.common.suite import Suite, calls_for, compare, offsets

CKV, KPE, PAGE = 512, 64, 1
BASE_SEED = 20260830
WORKSPACE_BYTES = 128 << 20
INPUT_CLASS = ["INPUT"] * 4 + ["OUTPUT"] + ["INPUT"] * 11


class Case(NamedTuple):
    """The pool has batch * seq_len rows, as published; the sequences use fewer of them."""

    heads: int
    batch: int
    seq_len: int

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """One sequence: a little short of seq_len. More: seq_len, 0, 1 and random lengths, shuffled."""
        draw = random.Random(self.batch * self.seq_len)
        if self.batch == 1:
            return (self.seq_len - draw.randrange(1, 64),)
        lengths = [self.seq_len, 0, 1, *(draw.randrange(2, self.seq_len) for _ in range(self.batch - 3))]
        draw.shuffle(lengths)
        return tuple(lengths)


CASES = tuple(
    Case(heads, batch, seq) for heads in (64, 128) for batch in (1, 4, 16) for seq in (1024, 4096, 8192, 16384)
)
CASE_LABELS = tuple(f"h{case.heads} b{case.batch} s<={case.seq_len}" for case in CASES)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    rows, batch = case.batch * case.seq_len, case.batch
    q_shapes = [(batch, case.heads, CKV), (batch, case.heads, KPE)]
    pools = [(rows, PAGE, CKV), (rows, PAGE, KPE)]
    tables = [(batch + 1,), (batch + 1,), (sum(case.kv_lens),), (batch,)]
    return [*q_shapes, *pools, q_shapes[0], *tables, *[()] * 7]


def _arguments(case: Case, device: str) -> list[Any]:
    generator = torch.Generator(device).manual_seed(BASE_SEED + CASES.index(case))
    shapes = _shapes(case)
    q_nope, q_pe, ckv, kpe = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes[:4]
    )
    output = torch.empty(shapes[4], device=device, dtype=torch.bfloat16)
    order = torch.randperm(ckv.shape[0], generator=generator, device=device, dtype=torch.int32)
    tables = (
        torch.arange(case.batch + 1, dtype=torch.int32, device=device),
        offsets(case.kv_lens, device),
        order[: sum(case.kv_lens)].clone(),
        torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
    )
    return [q_nope, q_pe, ckv, kpe, output, *tables, case.batch, case.seq_len, case.heads, CKV, KPE, PAGE, 0]


def _timing(case: Case) -> tuple[int, int]:
    return calls_for(case.batch * case.seq_len * (CKV + KPE))


SUITE = Suite(CASES, _shapes, _arguments, _timing)
getNumOfTestcases, getTestCaseSize, genTestCase = SUITE.count, SUITE.read_case, SUITE.generate


def baseline(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    output: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_lens: Tensor,
    *sizes: int,
) -> None:
    """FlashInfer, as in the published package; sequences without a token are set to 0, which it does not promise."""
    import flashinfer

    _, _, heads, dim_ckv, dim_kpe, page, _ = sizes
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q_nope.device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    scale = 1 / math.sqrt(dim_ckv + dim_kpe)
    lengths = kv_lens.cpu()
    tables = (q_indptr.cpu(), kv_indptr.cpu(), kv_indices, lengths)
    wrapper.plan(*tables, heads, dim_ckv, dim_kpe, page, False, scale, q_nope.dtype, ckv.dtype)
    wrapper.run(q_nope, q_pe, ckv, kpe, out=output, return_lse=False)
    for b in (lengths == 0).nonzero().flatten().tolist():
        output[b].zero_()


def check(
    testcase_sizes: list[Any],
    original_inputs: list[Any],
    target_args: list[Any],
    baseline_args: list[Any],
    rtol: float = 1.6e-2,
    atol: float = 1.6e-2,
) -> bool:
    """At least 99 % of the elements within tolerance, none off by more than 8x."""
    return compare(target_args[4], baseline_args[4], rtol, atol, share=0.99, cap=8.0)
