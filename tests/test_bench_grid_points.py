"""The tutorial's grids: their rows, what is built for a point, how work is counted, how libraries are called."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from grid_fakes import DECODE, GRIDS, MLA, PAGED, RAGGED, Decode, install
from test_published_suites import _Mla, _Paged, _Ragged
from torch import Tensor

from harness import catalog, strict
from harness.contract import load_contract

BATCHES, LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128), (512, 1024, 2048, 4096, 8192, 16384)
FEW, LONG = (1, 4, 16, 64), (1024, 4096, 8192, 16384)
HEADDIMS = (32, 64, 96, 128, 160, 192, 224, 256, 512)


def rows(api: str) -> list[tuple[int, ...]]:
    """The points of a grid as rows of its CSV."""
    grid = GRIDS[api][1]
    return [tuple(point[c] for c in grid.columns if c in point) for point in grid.points]


# -- the tables ------------------------------------------------------------------------------------------------------


def test_the_grids_are_the_tutorials() -> None:
    flash = [f"flash_attn_with_kvcache_headdim{dim}" for dim in HEADDIMS]
    assert {api: len(grid.points) for api, (_, grid) in GRIDS.items()} == {
        **{DECODE: 144, MLA: 32, PAGED: 32, RAGGED: 48},
        **dict.fromkeys(flash, 48),
    }
    for _, grid in GRIDS.values():
        assert len(set(rows(grid.api))) == len(grid.points)
        assert all(grid.uncovered(point) == "" for point in grid.points)


def test_columns() -> None:
    figures = "time_ms,bandwidth_GB_s,tflops"
    expected = {
        DECODE: f"api,batch_size,seq_len_q,seq_len_kv,num_qo_heads,num_kv_heads,head_dim,{figures}",
        MLA: f"api,batch_size,seq_len,num_heads,head_dim_ckv,head_dim_kpe,{figures}",
        PAGED: f"api,batch_size,seq_len,num_qo_heads,num_kv_heads,head_dim,{figures}",
        RAGGED: f"api,batch_size,seq_len,num_qo_heads,num_kv_heads,head_dim_qk,head_dim_vo,{figures}",
    }
    for api, (_, grid) in GRIDS.items():
        assert ",".join(grid.columns) == expected.get(api, "batch_size,seq_len_kv,heads,headdim,time_ms,bandwidth_GB_s")
        assert {"api", *grid.points[0], *figures.split(",")} >= set(grid.columns)


def test_rows_and_their_order() -> None:
    heads = ((32, 8, 64), (32, 4, 128), (32, 4, 256))
    assert rows(DECODE) == [(b, 1, kv, *h) for b, kv, h in itertools.product(BATCHES, LENGTHS, heads)]
    assert rows(MLA) == [(b, s, h, 512, 64) for h, b, s in itertools.product((64, 128), FEW, LONG)]
    assert rows(PAGED) == [(b, s, 32, 4, d) for d, b, s in itertools.product((128, 256), FEW, LONG)]
    dims = ((128, 128), (192, 128), (256, 256))
    assert rows(RAGGED) == [(b, s, 32, 4, *d) for d, b, s in itertools.product(dims, FEW, LONG)]
    for dim in HEADDIMS:
        expected = [(b, kv, 8, dim) for b, kv in itertools.product(BATCHES, LENGTHS)]
        assert rows(f"flash_attn_with_kvcache_headdim{dim}") == expected


def test_what_a_contract_leaves_out_has_a_reason() -> None:
    wrong = {
        DECODE: ({"head_dim": 80}, "headdim 80 is none of 32, 64, 96"),
        MLA: ({"num_heads": 8}, "8 heads are none of 16, 32, 64, 128"),
        PAGED: ({"head_dim": 96}, "head_dim 96 is none of 64, 128, 256"),
        RAGGED: ({"head_dim_vo": 64}, "head dims (128, 64) are none of (64, 64), (128, 128)"),
    }
    for api, (change, reason) in wrong.items():
        grid = GRIDS[api][1]
        assert grid.uncovered({**grid.points[0], **change}).startswith(reason)
    mla = GRIDS[MLA][1]
    assert mla.uncovered({**mla.points[0], "head_dim_ckv": 256}) == "head dims (256, 64) are not (512, 64)"


# -- builders and formulas, on small points really computed ----------------------------------------------------------


def small(api: str) -> tuple[Any, Any, list[Any], dict[str, Any]]:
    """A small point of a grid: grid, contract, arguments, and arguments by name."""
    task, grid = GRIDS[api]
    contract = load_contract(catalog.reference_path(task))
    changes = {"batch_size": 3, "seq_len": 37, "seq_len_kv": 37, "num_qo_heads": 8, "heads": 2, "num_heads": 16}
    point = {name: changes.get(name, value) for name, value in grid.points[0].items()}
    args = grid.build(point, "cpu")
    return grid, contract, args, dict(zip(contract.arguments, args, strict=True))


APIS = (DECODE, MLA, PAGED, RAGGED, "flash_attn_with_kvcache_headdim32")


@pytest.mark.parametrize("api", APIS)
def test_built_arguments_satisfy_the_reference(api: str) -> None:
    grid, contract, args, arg = small(api)
    truth = contract.reference(*args)["output"]
    assert truth.isfinite().all()
    assert arg["output"].isnan().all()
    honest = contract.honest(*args)["output"]
    assert strict.compare("output", honest, truth, honest).finding is None
    whole = list(args)
    whole[contract.output_indices[0]] = honest
    last = grid.last(whole)
    rows = last[contract.output_indices[0]]
    assert len(rows) * 3 == len(honest)
    assert torch.equal(rows, honest[-len(rows) :])
    assert torch.equal(rows, contract.honest(*last)["output"]), "the last sequence is a case of its own"
    for tensor in (value for value in args if isinstance(value, Tensor)):
        assert tensor.is_contiguous()
        assert tensor.dtype in (torch.bfloat16, torch.int32)


def test_pages_are_dealt_out_whole_and_in_random_order() -> None:
    for api, table in ((DECODE, "block_table"), (MLA, "kv_indices"), (PAGED, "kv_indices")):
        _, _, _, arg = small(api)
        ids = arg[table].flatten().tolist()
        pool = next(arg[name] for name in ("k_cache_paged", "ckv", "kv_data") if name in arg)
        assert sorted(ids) == list(range(len(pool)))
        assert ids != sorted(ids)


@pytest.mark.parametrize("api", APIS)
def test_flops_and_bytes_by_counting(api: str) -> None:
    """Every multiply-add of a visible pair, and every element that an output depends on, counted one by one."""
    _, contract, args, arg = small(api)
    batch, length = 3, 37
    queries = 1 if "Prefill" not in api else length
    causal = api == RAGGED
    pairs = sum(
        1
        for _ in range(batch)
        for i in range(queries)
        for j in range(length)
        if not causal or j <= i + length - queries
    )
    heads = arg.get("num_qo_heads") or arg["num_heads"]
    if api == MLA:
        per_pair, per_token, per_query = (512 + 64) + 512, 512 + 64, (512 + 64) + 512
    elif api == RAGGED:
        per_pair, per_token, per_query = 128 + 128, 4 * (128 + 128), 128 + 128
    else:
        dim = arg.get("headdim") or arg["head_dim"]
        kv_heads = arg.get("num_heads_k") or arg["num_kv_heads"]
        per_pair, per_token, per_query = 2 * dim, 2 * kv_heads * dim, 2 * dim
    page = arg.get("page_block_size") or arg.get("page_size") or length
    offsets = {
        DECODE: batch,  # cache_seqlens
        MLA: 2 * (batch + 1) + batch,  # q_indptr, kv_indptr, kv_lens
        PAGED: 2 * (batch + 1) + batch,  # qo_indptr, kv_indptr, last_page_len
        RAGGED: 2 * (batch + 1),
    }.get(api, batch)
    ids = 0 if api == RAGGED else batch * -(-length // page)
    moved = 2 * (batch * length * per_token + batch * queries * heads * per_query) + 4 * (offsets + ids)
    assert contract.workload(*args) == {"flops": 2 * heads * pairs * per_pair, "bytes": moved, "dtype": "bf16"}


# -- libraries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
def test_libraries_are_planned_before_and_give_the_references_output(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    grid, contract, args, _ = small(api)
    truth = contract.reference(*args)["output"].to(torch.bfloat16)
    for library in grid.libraries:
        call = library.plan(args)
        with monkeypatch.context() as patch:
            for wrapper in (_Ragged, _Paged, Decode, _Mla):
                patch.setattr(wrapper, "__init__", None)
                patch.setattr(wrapper, "plan", None)
            assert torch.equal(call().view(truth.shape), truth)
            assert torch.equal(call().view(truth.shape), truth)
    assert [library.module for library in grid.libraries] == ["flash_attn"] * ("flash" in api) + ["flashinfer"]
