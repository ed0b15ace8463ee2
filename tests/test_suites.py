"""The suites: the data they draw, their checks, and that the tiny ones can tell wrong kernels from right ones."""

from __future__ import annotations

import functools
import io
import math
import sys

import pytest
import torch
from torch import Tensor

from harness import catalog, strict
from harness.contract import load_contract
from tasks.common import values
from tasks.common.suite import Suite, compare, offsets
from tests import suite_fakes
from tests.suite_tools import ATTENTION, TASKS, choose, config, contract, named, package, same, shapes

SUITES = [(task, suite) for task in TASKS for suite in ("judge", "live", "tiny")] + [("fused_moe", "demo")]
TINY = [(task, number) for task in TASKS for number in range(1, 1 + {"fused_moe": 6, "mla_decode": 9}.get(task, 10))]
DRAWN = {
    *("q", "k", "v", "kv_data", "q_nope", "q_pe", "ckv", "kpe", "k_cache_paged", "v_cache_paged"),
    *("a", "b_col_major", "scale_a", "scale_b", "moe_weights", "token_ids"),
}


# -- every suite ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "suite"), SUITES)
def test_the_harness_reads_every_suite(task: str, suite: str) -> None:
    loaded = package(task, suite)
    names = load_contract(catalog.reference_path(task))
    cases = [loaded.case(number) for number in range(1, loaded.count() + 1)]
    assert len({case.label for case in cases}) == len(cases), "labels tell cases apart"
    for case in cases:
        assert len(case.sizes) == len(names.arguments)
        assert case.label
        assert case.warmup >= 1
        assert case.iters >= 3
    if (task, suite) not in {(name, "judge") for name in ("paged_prefill", "mla_decode", "kvcache_decode")}:
        assert loaded.outputs == names.output_indices
        assert loaded.inout == ()
    else:
        assert loaded.outputs is None, "the published package declares no INPUT_CLASS"


@pytest.mark.parametrize(("task", "number"), TINY)
def test_tiny_data_is_repeatable_and_follows_the_seed(task: str, number: int) -> None:
    loaded = package(task, "tiny")
    case = loaded.case(number)
    first, second, other = (loaded.generate(case, "cpu", shift) for shift in (0, 0, 11))
    assert shapes(first) == list(case.sizes)
    assert not loaded.notes
    for name, one, two, three in zip(contract(task).ARGUMENTS, first, second, other, strict=True):
        if name in contract(task).OUTPUTS:
            assert one.dtype is torch.bfloat16
            continue
        if isinstance(one, Tensor):
            assert one.is_contiguous()
        assert same(one, two), name
        if name in DRAWN:
            assert not same(one, three), name
        elif not isinstance(one, Tensor):
            assert same(one, three), name


@pytest.mark.parametrize("task", TASKS)
def test_tiny_is_tiny(task: str) -> None:
    """The interpreter needs 15 ms per (row tile of 128 x key tile of 64 x head x sequence); 50 are allowed."""
    module, total = config(task, "tiny"), 0
    for case in module.CASES:
        if task == "fused_moe":
            cost = len(case.tiles) * (case.n // 128) * (case.k // 64)
        elif task == "mla_decode":
            cost = sum(math.ceil(n / 64) for n in case.kv_lens)
        else:
            kv_lens = case.lengths if task == "kvcache_decode" else case.kv_lens
            q_lens = [1] * len(kv_lens) if task == "kvcache_decode" else case.q_lens
            cost = case.heads[0] * sum(
                math.ceil(q / 128) * math.ceil(kv / 64) for q, kv in zip(q_lens, kv_lens, strict=True)
            )
        assert 1 <= cost <= 50, f"{case.label}: {cost}"
        total += cost
    assert total <= 230


@pytest.mark.parametrize(
    ("task", "limit", "fields"),
    [
        ("ragged_prefill", 6, ("heads", "dims", "causal")),
        ("paged_prefill", 6, ("heads", "dim", "causal")),
        ("mla_decode", 4, ("heads",)),
        ("kvcache_decode", 9, ("heads", "dim")),
    ],
)
def test_tiny_needs_few_kernels(task: str, limit: int, fields: tuple[str, ...]) -> None:
    assert len({tuple(getattr(case, name) for name in fields) for case in config(task, "tiny").CASES}) == limit


def test_tiny_covers_what_the_contracts_allow() -> None:
    by_task = {task: config(task, "tiny").CASES for task in TASKS}
    assert {case.dims for case in by_task["ragged_prefill"]} == {(128, 128), (192, 128), (256, 256), (64, 64)}
    assert {case.dim for case in by_task["paged_prefill"]} == {64, 128, 256}
    assert {case.page for case in by_task["paged_prefill"]} == {1, 8, 16, 32, 64}
    assert {case.heads for case in by_task["mla_decode"]} == {16, 32, 64, 128}
    assert {case.page for case in by_task["mla_decode"]} == {1, 16, 64}
    assert {case.dim for case in by_task["kvcache_decode"]} == {32, 64, 96, 128, 160, 192, 224, 256, 512}
    assert {case.page for case in by_task["kvcache_decode"]} == {16, 64, 256}
    for task in ("ragged_prefill", "paged_prefill"):
        assert {case.heads[0] // case.heads[1] for case in by_task[task]} == {1, 2, 3, 5, 7, 8}
        assert {case.causal for case in by_task[task]} == {0, 1}
        pairs = {(q > kv) - (q < kv) for case in by_task[task] for q, kv in zip(case.q_lens, case.kv_lens, strict=True)}
        assert pairs == {-1, 0, 1}
    for task in ATTENTION:
        lengths = {n for case in by_task[task] for n in getattr(case, "kv_lens", getattr(case, "lengths", ()))}
        assert {0, 1} <= lengths
        styles = {(case.style.q_mean > 0) - (case.style.q_mean < 0) for case in by_task[task]}
        assert styles == {-1, 0, 1}, "scores near 0, far below and far above"
        assert any(case.style.rise > 1 for case in by_task[task])


@pytest.mark.parametrize(("task", "number"), [(task, number) for task, number in TINY if task != "fused_moe"])
def test_tiny_arguments_keep_the_contract(task: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = config(task, "tiny")
    sizes, _ = choose(module, number, monkeypatch)
    arg = named(task, module.genTestCase(sizes, "cpu"))
    for name, value in arg.items():
        if isinstance(value, Tensor) and value.dtype is torch.int32 and value.numel():
            assert int(value.min()) >= 0, name
    if task == "kvcache_decode":
        assert arg["block_table"].shape == (arg["batch_size"], arg["num_blocks"] // arg["batch_size"])
        assert int(arg["block_table"].max()) < arg["num_blocks"]
        assert int(arg["cache_seqlens"].max()) <= arg["seqlen_k"] <= sizes[5][1] * arg["page_block_size"]
        pool = arg["k_cache_paged"]
    elif task == "mla_decode":
        assert int(arg["kv_lens"].max()) <= arg["seq_len"]
        assert float(arg["q_pe"].float().abs().min(0).values.max()) > 0
        pool = arg["ckv"]
    elif task == "paged_prefill":
        assert int(arg["last_page_len"].max()) <= arg["page_block_size"]
        pool = arg["kv_data"]
    else:
        lengths = torch.cat((arg["qo_indptr"].diff(), arg["kv_indptr"].diff()))
        assert int(lengths.max()) <= arg["seq_len"]
        assert arg["k"].shape[0] == arg["kv_indptr"][-1]
        return
    # Pages that nobody owns lie at both ends of the pool, and are NaN like every slot past a sequence's end.
    assert bool(pool[0].isnan().all())
    assert bool(pool[-1].isnan().all())
    if task != "kvcache_decode":
        assert len(arg["kv_indices"].unique()) == len(arg["kv_indices"]) < len(pool)
    args = list(arg.values())
    assert bool(contract(task).reference(*args)["output"].isfinite().all())


# -- the tiny suites have teeth ------------------------------------------------------------------------------------


def problem_of(task: str, number: int) -> suite_fakes.Problem:
    """A tiny case, as the fakes see it."""
    loaded = package(task, "tiny")
    return suite_fakes.Problem(contract(task), loaded.generate(loaded.case(number), "cpu"))


@functools.cache
def margins(task: str, number: int) -> dict[str, float]:
    """The strict margin of each fake whose mistake this case has an occasion for; above 1 it is rejected."""
    problem = problem_of(task, number)
    truth, honest = problem.truth(), problem.honest()
    found = {"honest": strict.compare("output", honest, truth, honest).margin}
    for name, fake in suite_fakes.FAKES[task].items():
        output = fake(problem)
        if not (output - truth).abs().max() <= 1e-5 * truth.abs().max():
            found[name] = strict.compare("output", output.to(honest.dtype), truth, honest).margin
    return found


@pytest.mark.parametrize(("task", "number"), TINY)
def test_every_tiny_case_rejects_wrong_kernels(task: str, number: int) -> None:
    found = dict(margins(task, number))
    assert found.pop("honest") <= 0.3
    assert len(found) >= 10
    assert {name: margin for name, margin in found.items() if margin < 2} == {}


@pytest.mark.parametrize("task", TASKS)
def test_every_fake_has_an_occasion(task: str) -> None:
    occasions = {name for number in range(1, package(task, "tiny").count() + 1) for name in margins(task, number)}
    assert set(suite_fakes.FAKES[task]) <= occasions


@pytest.mark.parametrize(("task", "number"), [(task, number) for task, number in TINY if task != "fused_moe"])
def test_right_kernels_of_other_shapes_pass(task: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = config(task, "tiny")
    sizes, _ = choose(module, number, monkeypatch)
    args = module.genTestCase(sizes, "cpu")
    problem = suite_fakes.Problem(contract(task), args)
    truth, honest = problem.truth(), problem.honest()
    index = contract(task).ARGUMENTS.index("output")
    expected = [arg.clone() if i == index else arg for i, arg in enumerate(args)]
    module.baseline(*expected)
    for block, splits in ((16, 1), (64, 1), (16, 3)):
        output = problem.tiled(block, splits)
        assert strict.compare("output", output, truth, honest).margin <= 0.7
        target = [output if i == index else arg for i, arg in enumerate(args)]
        assert module.check(sizes, args, target, expected)
    target[index] = torch.zeros_like(output)
    assert not module.check(sizes, args, target, expected)


# -- the shared pieces -----------------------------------------------------------------------------------------------


def test_moe_demo_prints_its_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = config("fused_moe", "demo")
    for number, rows, first, last in (
        (1, 256, 0.69531, -0.44531),
        (2, 512, -0.57812, -0.49805),
        (3, 384, -1.08594, -0.33594),
    ):
        sizes, _ = choose(module, number, monkeypatch)
        args = module.genTestCase(sizes, "cpu")
        module.baseline(*args)
        assert module.check(sizes, args, args, args)
        line = (
            f"fused_moe_i8_tn_topk{number} passed: rows={rows}, cols=128, sample C[0]={first:.5f}, C[last]={last:.5f}"
        )
        assert capsys.readouterr().out.strip() == line
        wrong = [*args[:8], args[8].clone()]
        wrong[8][-1, -1] += 0.01  # within the tolerance of the comparison, but not what the tutorial prints
        assert not module.check(sizes, args, wrong, args)
        assert "FAILED" in capsys.readouterr().out


def test_compare_rules(capsys: pytest.CaptureFixture[str]) -> None:
    want = torch.ones(1000)
    ok = {"rtol": 1e-2, "atol": 1e-2}  # 0.02 allowed at 1

    def off(number: int, error: float) -> Tensor:
        got = want.clone()
        got[:number] += error
        return got

    assert compare(off(1000, 0.0199), want, **ok)
    assert not compare(off(1, 0.0201), want, **ok)
    assert "999 of 1000" in capsys.readouterr().err
    assert compare(off(10, 0.159), want, **ok, share=0.99, cap=8)
    assert not compare(off(11, 0.159), want, **ok, share=0.99, cap=8)
    assert not compare(off(1, 0.161), want, **ok, share=0.99, cap=8)
    assert "the limit is 8" in capsys.readouterr().err
    assert not compare(off(1, math.nan), want, **ok, share=0.99)
    assert not compare(off(1, math.inf), want, **ok, share=0.99)
    assert not compare(want.double(), want, **ok)
    assert not compare(want[:-1], want, **ok)
    assert not compare(want.view(1, -1), want, **ok)


def test_compare_looks_at_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.common.suite.CHUNK", 64)
    want = torch.zeros(1000)
    assert compare(want, want, 1e-2, 1e-2)
    for place in (0, 500, 999):
        got = want.clone()
        got[place] = 1
        assert not compare(got, want, 1e-2, 1e-2)


def test_suite_refuses_other_ids_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = Suite((1, 2), lambda case: [(case,)], lambda case, device: [case], lambda case: (1, case))
    for text in ("0", "3"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        with pytest.raises(ValueError, match=r"not in 1\.\.2"):
            suite.read_case()
    monkeypatch.setattr(sys, "stdin", io.StringIO("2"))
    assert suite.read_case() == ([(2,)], (1, 2))
    assert suite.generate([(2,)], "cpu") == [2]
    with pytest.raises(ValueError, match="not those of the chosen case"):
        suite.generate([(1,)], "cpu")


def test_pages_are_dealt_once_and_dead_slots_are_nan() -> None:
    pages = values.place(torch.Generator().manual_seed(5), (5, 0, 4, 1), 4, spare=3)
    owned = [page for table in pages.tables for page in table]
    assert [len(table) for table in pages.tables] == [2, 0, 1, 1]
    assert len(set(owned)) == 4
    assert not {0, pages.total - 1} & set(owned)
    assert pages.total == 7
    rows = [torch.arange(n).float().view(n, 1) for n in pages.lengths]
    pool = values.fill(pages, rows)
    assert int(pool.isfinite().sum()) == sum(pages.lengths)
    assert pool[list(pages.tables[0])].flatten()[:5].tolist() == [0, 1, 2, 3, 4]


def test_offsets() -> None:
    assert offsets((3, 0, 2), "cpu").tolist() == [0, 3, 3, 5]
    assert offsets([], "cpu").dtype is torch.int32
