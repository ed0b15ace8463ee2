"""Libraries that only check how they are called, for the tests of grids: FlashInfer and flash-attn."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_published_suites import _Mla, _Paged, _Ragged
from torch import Tensor

from harness import catalog
from harness.bench import grids
from harness.contract import load_contract

DECODE, MLA = "BatchDecodeWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper"
PAGED, RAGGED = "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"
GRIDS = {grid.api: (task, grid) for task, grid in grids.choose("tutorial", None, None)}


class Decode:
    def __init__(self, workspace: Tensor, kv_layout: str, use_tensor_cores: bool) -> None:
        assert workspace.numel() == 128 << 20
        assert (kv_layout, use_tensor_cores) == ("NHD", False)

    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert (q_data_type, kv_data_type) == (torch.bfloat16, torch.bfloat16)
        self.tables = (indptr.tolist(), indices, last_page_len, page_size)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        indptr, indices, last, page = self.tables
        reference = load_contract(catalog.reference_path("kvcache_decode")).reference
        counts = [end - start for start, end in itertools.pairwise(indptr)]
        lengths = torch.tensor([(n - 1) * page for n in counts], dtype=torch.int32) + last
        table = indices.view(len(counts), counts[0])
        truth = reference(q[:, None], *paged_kv_cache, out[:, None], lengths, table, 0)["output"]
        return out.copy_(truth[:, 0])


def _flash(
    q: Any, k_cache: Any, v_cache: Any, k: None, v: None, *, cache_seqlens: Any, block_table: Any, causal: bool,
    window_size: tuple[int, int], rotary_interleaved: bool, alibi_slopes: None, num_splits: int,
) -> Tensor:  # fmt: skip
    assert (causal, window_size, rotary_interleaved, alibi_slopes, num_splits) == (False, (-1, -1), False, None, 1)
    assert k_cache.shape[1] % 256 == 0, "flash-attn takes no smaller pages"
    reference = load_contract(catalog.reference_path("kvcache_decode")).reference
    truth: Tensor = reference(q, k_cache, v_cache, q, cache_seqlens, block_table, 0)["output"]
    return truth.to(q.dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put FlashInfer and flash-attn, as far as the grids use them, in place; the list says which are installed."""
    there = ["flashinfer", "flash_attn"]
    flashinfer = SimpleNamespace(
        BatchPrefillWithRaggedKVCacheWrapper=_Ragged,
        BatchPrefillWithPagedKVCacheWrapper=_Paged,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=_Mla),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=_flash))
    real = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        if name in ("flashinfer", "flash_attn"):
            return name if name in there else None
        return real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return there
