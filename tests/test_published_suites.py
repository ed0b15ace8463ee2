"""The judge suites against the published description, the live tables, and how the baselines call their libraries."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.common.suite import calls_for
from tests.suite_tools import ATTENTION, TASKS, choose, config, contract, named, shapes

# -- the judge's packages ------------------------------------------------------------------------------------------

SMALL = {
    "ragged_prefill": [(2, 32), (3, 16)],
    "paged_prefill": [(2, 32), (3, 16)],
    "mla_decode": [(4, 2, 32), (8, 3, 16)],
    "kvcache_decode": [(40, 2), (16, 4)],
    "fused_moe": [(256, 256, 128, "uniform"), (1280, 128, 256, "skewed")],
}
JUDGE_COUNTS = {"ragged_prefill": 12, "paged_prefill": 12, "mla_decode": 24, "kvcache_decode": 12, "fused_moe": 4}


@pytest.mark.parametrize("task", TASKS)
def test_judge_ids_follow_the_published_rule(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = config(task, "judge")
    count = module.getNumOfTestcases()
    assert count == JUDGE_COUNTS[task]
    for text, index in ((1, 0), (2, 1), (count, count - 1), ("3 rubbish", 2), (0, 0), ("", 0), ("x", 0), (-1, 0)):
        choose(module, text, monkeypatch)
        assert module._case_index == index, text
    choose(module, count + 1, monkeypatch)
    assert module._case_index == 0


@pytest.mark.parametrize(
    ("task", "case_id", "first", "timing"),
    [
        ("ragged_prefill", 1, (1024, 32, 128), (3, 50)),
        ("ragged_prefill", 12, (16 * 16384, 32, 128), (3, 12)),
        ("paged_prefill", 6, (4 * 4096, 32, 128), (3, 25)),
        ("mla_decode", 13, (1, 128, 512), (3, 50)),
        ("mla_decode", 24, (16, 128, 512), (3, 6)),
        ("kvcache_decode", 4, (1, 1, 8, 128), (3, 50)),
        ("kvcache_decode", 12, (16, 1, 8, 128), (3, 12)),
        ("fused_moe", 2, (32768, 7168), (3, 12)),
    ],
)
def test_judge_order_of_cases_and_timing(
    task: str, case_id: int, first: tuple[int, ...], timing: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, given = choose(config(task, "judge"), case_id, monkeypatch)
    assert (sizes[0], given) == (first, timing)


def test_kvcache_pool_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = config("kvcache_decode", "judge")
    pools = [choose(module, number, monkeypatch)[0][1][0] for number in range(1, 13)]
    assert pools == [1024, 1024, 3072, 1024, 3072, 12288, 1536, 6144, 24576, 3072, 12288, 49152]


def test_iterations_by_work() -> None:
    for work, calls in ((99_999, 100), (10**5, 50), (10**6, 25), (10**7, 12), (10**8, 6), (10**9, 3)):
        assert calls_for(work) == (3, calls)
        for task in ATTENTION:
            assert config(task, "judge")._timing(work) == (3, calls)


def _small(task: str, monkeypatch: pytest.MonkeyPatch, number: int) -> tuple[list[Any], dict[str, Any]]:
    module = config(task, "judge")
    monkeypatch.setattr(module, "CASES", SMALL[task])
    if task == "fused_moe":
        monkeypatch.setattr(module, "E", 5)
    sizes, _ = choose(module, number, monkeypatch)
    args = module.genTestCase(sizes, "cpu")
    assert shapes(args) == sizes
    return sizes, named(task, args)


def _drawn(seed: int, *draws: tuple[Callable[..., Tensor], tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [draw(shape, generator=generator, dtype=torch.bfloat16) for draw, shape in draws]


def test_ragged_judge_data(monkeypatch: pytest.MonkeyPatch) -> None:
    _, arg = _small("ragged_prefill", monkeypatch, 2)
    drawn = _drawn(20260611, (torch.rand, (48, 32, 128)), (torch.rand, (48, 4, 128)), (torch.rand, (48, 4, 128)))
    assert all(torch.equal(arg[name], tensor) for name, tensor in zip("qkv", drawn, strict=True))
    assert arg["qo_indptr"].tolist() == arg["kv_indptr"].tolist() == [0, 16, 32, 48]
    assert list(arg.values())[6:] == [3, 16, 32, 4, 128, 128, 1]


def test_ragged_judge_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    module = config("ragged_prefill", "judge")
    sizes, timing = choose(module, 5, monkeypatch)  # batch 4, seq_len 1024
    moved = 2 * 4 * 1024 * (32 * 128 * 2 + 4 * 128 * 2) + 2 * 4 * 5
    expected = {"flops": 4 * 1024 * 1024 * 32 * 256, "memory_bytes": moved, "dtype": "bf16"}
    assert module.getWorkload(sizes) == module.getWorkload(sizes, timing) == expected
    assert module.DESIGNED_VRAM_SIZE == 48


def test_paged_judge_data(monkeypatch: pytest.MonkeyPatch) -> None:
    _, arg = _small("paged_prefill", monkeypatch, 1)
    drawn = _drawn(20260620, (torch.rand, (64, 32, 128)), (torch.randn, (4, 2, 16, 4, 128)))
    assert torch.equal(arg["q"], drawn[0])
    assert torch.equal(arg["kv_data"], drawn[1])
    tables = [arg[name].tolist() for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")]
    assert tables == [[0, 32, 64], [0, 2, 4], [0, 1, 2, 3], [16, 16]]
    assert list(arg.values())[7:] == [2, 32, 32, 4, 128, 16, 0]


def test_mla_judge_data(monkeypatch: pytest.MonkeyPatch) -> None:
    _, arg = _small("mla_decode", monkeypatch, 2)
    drawn = _drawn(20260631, (torch.randn, (3, 8, 512)), (torch.randn, (48, 1, 512)))
    assert torch.equal(arg["q_nope"], drawn[0])
    assert torch.equal(arg["ckv"], drawn[1])
    assert not arg["q_pe"].any()
    assert not arg["kpe"].any()
    tables = [arg[name].tolist() for name in ("q_indptr", "kv_indptr", "kv_indices", "kv_lens")]
    assert tables == [[0, 1, 2, 3], [0, 16, 32, 48], list(range(48)), [16, 16, 16]]
    assert list(arg.values())[9:] == [3, 16, 8, 512, 64, 1, 0]


def test_kvcache_judge_data(monkeypatch: pytest.MonkeyPatch) -> None:
    _, arg = _small("kvcache_decode", monkeypatch, 1)
    pool = (1024, 16, 8, 128)
    generator = torch.Generator().manual_seed(20260720)
    for name, shape in (("q", (2, 1, 8, 128)), ("k_cache_paged", pool), ("v_cache_paged", pool)):
        assert torch.equal(arg[name], torch.randn(shape, generator=generator, dtype=torch.bfloat16))
    assert torch.equal(arg["block_table"].flatten(), torch.randperm(1024, generator=generator, dtype=torch.int32))
    assert arg["cache_seqlens"].tolist() == [40, 40]
    assert list(arg.values())[6:] == [2, 40, 1, 8, 8, 128, 16, 1024, 0]


def test_moe_judge_data_and_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    module, draws = config("fused_moe", "judge"), []
    for number in (1, 2):
        sizes, arg = _small("fused_moe", monkeypatch, number)
        for name in ("a", "b_col_major"):
            assert arg[name].dtype is torch.int8
            assert (int(arg[name].min()), int(arg[name].max())) == (-20, 20)
        assert arg["expert_ids"].tolist() == sorted(arg["expert_ids"].tolist())
        assert arg["scale_a"][9].item() == 0.125 + 0.015625 * ((9 // 8 + 8) % 7)
        assert arg["scale_b"][3, 5].item() == 0.25 + 0.03125 * ((9 + 5 + 8) % 9)
        assert arg["moe_weights"][11].item() == 0.5 + 0.03125 * ((11 + 8) % 5)
        draws.append(arg["expert_ids"])
        expected, args = contract("fused_moe").honest(*arg.values())["out"], list(arg.values())
        args[8] = torch.full_like(args[8], torch.nan)
        module.baseline(*args)
        assert torch.equal(args[8], expected)
        wrong = [*args[:8], expected.clone()]
        assert module.check(sizes, args, wrong, args)
        wrong[8].view(-1)[: wrong[8].numel() // 101] = torch.nan
        assert module.check(sizes, args, wrong, args), "one per cent of the elements may be anything"
        wrong[8].view(-1)[: wrong[8].numel() // 50] = torch.nan
        assert not module.check(sizes, args, wrong, args)


def test_moe_skew_prefers_few_experts() -> None:
    module = config("fused_moe", "judge")
    uniform, skewed = (
        module.tile_experts(2560, 256, law, torch.Generator().manual_seed(1)).bincount(minlength=256)
        for law in (False, True)
    )
    # 1 / rank^1.2 over 256 experts gives the first about 24 % of the tiles; equal shares would be 0.4 %.
    assert 0.20 < skewed.max() / 2560 < 0.29
    assert uniform.max() / 2560 < 0.02


# -- baselines, against libraries that only check how they are called ------------------------------------------------


class _Wrapper:
    """Stands for a FlashInfer wrapper: plan() and run() bind their arguments as FlashInfer 0.6 names them."""

    def __init__(self, workspace: Tensor, **kwargs: Any) -> None:
        assert workspace.numel() * workspace.element_size() == 128 << 20
        assert kwargs.pop("backend") == "auto"
        assert kwargs in ({"kv_layout": "NHD"}, {})


class _Ragged(_Wrapper):
    def plan(
        self, qo_indptr: Any, kv_indptr: Any, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        head_dim_vo: Any = None, causal: bool = False, q_data_type: Any = None, kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert (q_data_type, kv_data_type) == (torch.bfloat16, torch.bfloat16)
        self.rest = (qo_indptr, kv_indptr, 0, 0, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, int(causal))

    def run(self, q: Any, k: Any, v: Any, *, out: Any) -> None:
        out.copy_(contract("ragged_prefill").reference(q, k, v, out, *self.rest)["output"])


class _Paged(_Wrapper):
    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, causal: bool = False,
        q_data_type: Any = None, kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert (q_data_type, kv_data_type) == (torch.bfloat16, torch.bfloat16)
        self.rest = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, int(causal))

    def run(self, q: Any, paged_kv_cache: Any, *, out: Any) -> None:
        out.copy_(contract("paged_prefill").reference(q, paged_kv_cache, out, *self.rest)["output"])


class _Mla(_Wrapper):
    def plan(
        self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int, head_dim_ckv: int,
        head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert (q_data_type, kv_data_type) == (torch.bfloat16, torch.bfloat16)
        assert sm_scale == pytest.approx(1 / 24)
        self.rest = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, int(causal))

    def run(self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, out: Any, return_lse: bool) -> None:
        assert return_lse is False
        truth = contract("mla_decode").reference(q_nope, q_pe, ckv_cache, kpe_cache, out, *self.rest)["output"]
        out.copy_(truth)
        for b, length in enumerate(self.rest[3].tolist()):
            if length == 0:
                out[b] = torch.nan  # what a library leaves there is its own affair


def _flash(
    q: Any, k_cache: Any, v_cache: Any, k: None, v: None, *, cache_seqlens: Any, block_table: Any, causal: bool,
    window_size: tuple[int, int], rotary_interleaved: bool, alibi_slopes: None, num_splits: int,
) -> Tensor:  # fmt: skip
    assert (window_size, rotary_interleaved, alibi_slopes) == ((-1, -1), False, None)
    _flash.splits = num_splits  # type: ignore[attr-defined]
    args = (q, k_cache, v_cache, torch.empty_like(q), cache_seqlens, block_table, int(causal))
    result: Tensor = contract("kvcache_decode").reference(*args)["output"]
    return result.to(q.dtype)


@pytest.mark.parametrize("suite", ["judge", "live"])
@pytest.mark.parametrize("task", ATTENTION)
def test_baselines_call_the_libraries_as_published(task: str, suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer = SimpleNamespace(
        BatchPrefillWithRaggedKVCacheWrapper=_Ragged,
        BatchPrefillWithPagedKVCacheWrapper=_Paged,
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=_Mla),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=_flash))
    module = config(task, suite)
    if suite == "judge":
        sizes, arg = _small(task, monkeypatch, 1)
        args = list(arg.values())
    else:
        cases = {
            "ragged_prefill": module.CASES[-1],
            "kvcache_decode": module.CASES[1],
            "paged_prefill": config("paged_prefill", "live").Case(2, 32) if task == "paged_prefill" else None,
            "mla_decode": config("mla_decode", "live").Case(4, 4, 32) if task == "mla_decode" else None,
        }
        case = cases[task]
        monkeypatch.setattr(module, "CASES", (case,))
        monkeypatch.setattr(module.SUITE, "case", case)
        sizes = module._shapes(case)
        args = module.genTestCase(sizes, "cpu")
        assert shapes(args) == sizes
    index = contract(task).ARGUMENTS.index("output")
    args[index].fill_(torch.nan)
    honest = contract(task).honest(*args)["output"]
    module.baseline(*args)
    target = [honest if i == index else arg for i, arg in enumerate(args)]
    assert module.check(sizes, args, target, args)
    target[index] = honest + 1
    assert not module.check(sizes, args, target, args)
    target[index] = honest.float()
    assert not module.check(sizes, args, target, args)
    if task == "kvcache_decode":
        assert _flash.splits == {"judge": 1, "live": 0}[suite]  # type: ignore[attr-defined]


# -- the live tables -------------------------------------------------------------------------------------------------


def test_ragged_live_totals_and_maxima() -> None:
    same = [
        (33, 16294, 987), (1, 1024, 1024), (1, 4096, 4096), (1, 16384, 16384), (4, 4096, 1024), (4, 16384, 4096),
        (16, 16384, 1024), (16, 32768, 2048), None, None, None, (27, 12251, 873), (15, 969, 123), (1, 1, 1),
        (2, 98, 65),
    ]  # fmt: skip
    other = {9: (4, 2048, 4096, 512, 1024), 10: (4, 1536, 3584, 640, 1280), 11: (2, 1024, 3072, 512, 2048)}
    cases = config("ragged_prefill", "live").CASES
    for number, (case, row) in enumerate(zip(cases, same, strict=True), start=1):
        batch, q_total, kv_total, q_max, kv_max = other[number] if row is None else (*row[:2], row[1], row[2], row[2])
        found = (len(case.q_lens), sum(case.q_lens), sum(case.kv_lens), max(case.q_lens), max(case.kv_lens))
        assert found == (batch, q_total, kv_total, q_max, kv_max)
        assert len(case.kv_lens) == batch
        assert min(case.q_lens) >= 1
        assert all(q <= kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
        assert (case.q_lens == case.kv_lens) == (row is not None)
        assert case.exact == (number >= 14)


def test_kvcache_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    module = config("kvcache_decode", "live")
    table = [(case.batch, case.capacity, case.kv_heads) for case in module.CASES]
    assert table == [
        (1, 1, 4), (4, 2, 8), (16, 17, 4), (64, 64, 4), (16, 141, 4), (16, 362, 8), (64, 2048, 8), (16, 4096, 4),
        (32, 4096, 8), (1, 8192, 4), (16, 12251, 4), (8, 32768, 8), (1, 58966, 8), (1, 61519, 4),
    ]  # fmt: skip
    for number, case in enumerate(module.CASES, start=1):
        assert len(case.lengths) == case.batch
        assert min(case.lengths) >= 1
        assert max(case.lengths) == case.capacity
        assert case.batch == 1 or len(set(case.lengths)) > 1, "lengths differ"
        sizes, _ = choose(module, number, monkeypatch)
        assert sizes[5] == (case.batch, math.ceil(case.capacity / 16))
        assert sizes[1][0] == case.batch * sizes[5][1], "no spare page"


def test_mla_live_lengths() -> None:
    for case in config("mla_decode", "live").CASES:
        assert len(case.kv_lens) == case.batch
        assert case.batch == 1 or {0, 1, case.seq_len} <= set(case.kv_lens)
        assert max(case.kv_lens) <= case.seq_len


def test_moe_live_routings(monkeypatch: pytest.MonkeyPatch) -> None:
    live, judge = config("fused_moe", "live"), config("fused_moe", "judge")
    assert sorted(case[:3] for case in live.CASES) == sorted(case[:3] for case in judge.CASES)
    monkeypatch.setattr(judge, "E", 12)
    routed = {}
    for routing in ("distinct", "unsorted", "single"):
        case = live.Case(1280, 128, 128, routing)
        monkeypatch.setattr(live, "CASES", (case,))
        monkeypatch.setattr(live.SUITE, "case", case)
        routed[routing] = live.genTestCase(live._shapes(case), "cpu")[6].tolist()
    assert len(set(routed["distinct"])) == 10
    assert len(set(routed["single"])) == 1
    assert routed["unsorted"] != sorted(routed["unsorted"])
