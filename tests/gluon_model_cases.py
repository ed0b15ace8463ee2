"""Cases of test_gluon_model.py, run with TRITON_INTERPRET=1: the Hopper variants in Triton, right and with faults."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import catalog, contract, languages
from harness.devices import Device
from harness.verdict import KernelFault

CPU = Device("cpu", "cpu", "CPU", "c500")
RUNS = 4  # copies early or late, products early or late


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def indptr(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def ragged(q_lens: list[int], kv_lens: list[int], causal: int, heads: tuple[int, int] = (8, 2)) -> list[Any]:
    total_q, total_kv = sum(q_lens), sum(kv_lens)
    q, k, v = normal(1, total_q, heads[0], 64), normal(2, total_kv, heads[1], 64), normal(3, total_kv, heads[1], 64)
    bound = max(*q_lens, *kv_lens)
    return [
        q,
        k,
        v,
        torch.full_like(q, torch.nan),
        indptr(q_lens),
        indptr(kv_lens),
        len(q_lens),
        bound,
        *heads,
        64,
        64,
        causal,
    ]


def paged(q_lens: list[int], kv_lens: list[int], page: int, causal: int) -> list[Any]:
    """Pages in a mixed order, dead slots and spare pages NaN."""
    counts = [-(-length // page) for length in kv_lens]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(4))[: sum(counts)]
    pool = torch.full((sum(counts) + 2, 2, page, 2, 64), torch.nan, dtype=torch.bfloat16)
    at = 0
    for length, count in zip(kv_lens, counts, strict=True):
        values = normal(length, count, 2, page, 2, 64)
        if length % page:
            values[-1, :, length % page :] = torch.nan
        pool[order[at : at + count]] = values
        at += count
    last = torch.tensor([(length - 1) % page + 1 for length in kv_lens], dtype=torch.int32)
    q = normal(1, sum(q_lens), 8, 64)
    tables = [indptr(q_lens), indptr(counts), order.to(torch.int32), last]
    return [
        q,
        pool,
        torch.full_like(q, torch.nan),
        *tables,
        len(q_lens),
        max(*q_lens, *kv_lens),
        8,
        2,
        64,
        page,
        causal,
    ]


def mla(kv_lens: list[int], page: int, heads: int) -> list[Any]:
    counts = [-(-length // page) for length in kv_lens]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(4))[: sum(counts)]
    ckv, kpe = (torch.full((sum(counts) + 1, page, dim), torch.nan, dtype=torch.bfloat16) for dim in (512, 64))
    at = 0
    for length, count in zip(kv_lens, counts, strict=True):
        for cache, dim in ((ckv, 512), (kpe, 64)):
            values = torch.full((count * page, dim), torch.nan, dtype=torch.bfloat16)
            values[:length] = normal(length, length, dim)
            cache[order[at : at + count]] = values.view(count, page, dim)
        at += count
    batch = len(kv_lens)
    q_nope, q_pe = normal(1, batch, heads, 512), normal(2, batch, heads, 64)
    tables = [indptr([1] * batch), indptr(counts), order.to(torch.int32), torch.tensor(kv_lens, dtype=torch.int32)]
    output = torch.full_like(q_nope, torch.nan)
    return [q_nope, q_pe, ckv, kpe, output, *tables, batch, max(kv_lens), heads, 512, 64, page, 0]


def moe(expert_ids: list[int], N: int, K: int) -> list[Any]:
    rows, experts = 128 * len(expert_ids), max(expert_ids) + 1
    generator = torch.Generator().manual_seed(1)
    a, b = (
        torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8) for shape in ((rows, K), (experts, N, K))
    )
    scale_a, scale_b, weights = (torch.rand(shape, generator=generator) * 0.01 for shape in (rows, (experts, N), rows))
    ids = torch.tensor(expert_ids, dtype=torch.int32)
    out = torch.full((rows, N), torch.nan, dtype=torch.bfloat16)
    return [a, b, scale_a, scale_b, weights, torch.arange(rows, dtype=torch.int32), ids, 1, out]


CASES = {
    "fused_moe": moe([2, 0, 2], 512, 768),
    "ragged_prefill": ragged([33, 0, 150, 5], [33, 40, 560, 5], 1),
    "paged_prefill": paged([33, 3, 150, 5], [33, 40, 300, 5], 16, 1),
    "mla_decode": mla([200, 0, 2, 130], 1, 16),
}
EQUAL = paged([150, 150], [150, 150], 32, 0)  # tiles are dealt out, not drawn


def load(task: str, path: Path | None = None) -> tuple[languages.Submission, contract.Contract, dict[str, Any]]:
    truth = contract.load_contract(catalog.reference_path(task))
    path = path or catalog.submission_path(task, "triton", "hopper")
    kernel = languages.load("triton", path, truth.arguments, CPU, "hopper", {})
    names = next(
        cell.cell_contents for cell in kernel.run.__closure__ or () if hasattr(cell.cell_contents, "__globals__")
    )
    return kernel, truth, names.__globals__


_honest: dict[int, Tensor] = {}  # by the identity of a case's arguments, which are kept
_kept: list[Any] = []


def outcome(kernel: languages.Submission, truth: contract.Contract, args: list[Any]) -> str:
    """ "right", "wrong", or the fault, of one run."""
    (name,) = truth.outputs
    if id(args) not in _honest:
        _honest[id(args)] = truth.honest(*args)[name].float()
        _kept.append(args)
    output = args[truth.arguments.index(name)].fill_(torch.nan)
    try:
        kernel.run(args)
    except KernelFault as fault:
        return f"{fault.verdict.value}: {fault.message}"
    return "right" if torch.allclose(output.float(), _honest[id(args)], rtol=0.02, atol=0.02) else "wrong"


@pytest.mark.parametrize("task", CASES)
def test_a_right_kernel_is_right_early_and_late(task: str) -> None:
    kernel, truth, names = load(task)
    assert [outcome(kernel, truth, CASES[task]) for _ in range(RUNS)] == ["right"] * RUNS
    assert len(names["PLANS"]) == 1  # the kernel at hand ran, and not the file to paste


@pytest.mark.parametrize("row_tiles", [127, 130])  # panels of 8 row tiles and of 16, the last one lower than the others
def test_the_moe_in_several_panels(row_tiles: int) -> None:
    experts = torch.randint(3, (row_tiles,), generator=torch.Generator().manual_seed(4)).tolist()
    kernel, truth, names = load("fused_moe")
    assert outcome(kernel, truth, moe(experts, 512, 128)) == "right"
    assert len(names["PLANS"]) == 1


def test_another_length_and_other_tensors_are_taken_by_the_same_plan() -> None:
    for task, other in (
        ("ragged_prefill", ragged([33, 200], [250, 200], 1)),
        ("paged_prefill", paged([33, 200], [250, 200], 16, 1)),
    ):
        kernel, truth, names = load(task)
        for args in (other, CASES[task]):
            assert outcome(kernel, truth, args) == "right"
        (plan,) = names["PLANS"].values()
        assert plan.q.base is None, "a tensor of the caller's is kept alive"


def test_equal_tiles_are_dealt_out() -> None:
    kernel, truth, names = load("paged_prefill")
    assert [outcome(kernel, truth, EQUAL) for _ in range(2)] == ["right"] * 2
    (plan,) = names["PLANS"].values()
    assert not plan.counters.any()
    assert plan.constants[5] is False  # DYNAMIC


def test_what_is_uneven() -> None:
    uneven = load("paged_prefill")[2]["_uneven"]
    full = {"total_q": 4 * 100, "listed": 4 * 7, "batch_size": 4, "seq_len": 100, "page": 16, "causal": 0}
    assert uneven(**full) is False
    assert uneven(**{**full, "causal": 1})
    assert uneven(**{**full, "total_q": 399})
    assert uneven(**{**full, "listed": 27})


def test_other_shapes_go_to_the_file_beside() -> None:
    for task, args in (
        ("ragged_prefill", ragged([9, 4], [20, 4], 1, (6, 2))),  # three heads share a KV head
        ("paged_prefill", paged([9], [20], 4, 1)),  # pages of four
    ):
        kernel, truth, names = load(task)
        assert outcome(kernel, truth, args) == "right"
        assert not names["PLANS"]


def test_without_the_file_beside_every_call_says_what_is_missing(tmp_path: Path) -> None:
    shutil.copy(catalog.submission_path("paged_prefill", "triton", "hopper"), tmp_path)
    kernel, *_ = load("paged_prefill", tmp_path / "hopper.py")
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"run_kernel\.py"):
            kernel.run(paged([9], [20], 4, 1))


def test_what_the_ragged_kernel_takes() -> None:
    names = load("ragged_prefill")[2]
    good = dict(batch_size=1, keys=9, group=8, dim_qk=128, dim_vo=128, addresses=1 << 20)
    assert names["_taken"](**good)
    for change in (
        *(dict(batch_size=257), dict(keys=0), dict(group=7), dict(addresses=(1 << 20) + 8)),
        *(dict(dim_qk=192), dict(dim_qk=192, dim_vo=192)),
    ):
        assert not names["_taken"](**{**good, **change}), change


FAULTS = [
    (
        *("fused_moe", "released before the product is done"),
        "warpgroup_mma_wait(2, deps=[left, right])",
        "warpgroup_mma_wait(4, deps=[left, right])",
        "wrong",
    ),
    (
        "fused_moe",
        "the last stage is not released",
        "        mbarrier.arrive(empty.index((fill + STAGES - 1) % STAGES))\n",
        "",
        "TIMEOUT",
    ),
    ("fused_moe", "no wait for the last product", "warpgroup_mma_wait(0, deps=[left, right])", "left, right", "RACE"),
    ("fused_moe", "the next tile's rows", "a_row = row_tile * 128", "a_row = 0", "wrong"),
    ("fused_moe", "another expert's weights", "b_row = expert * N", "b_row = 0 * N", "wrong"),
    ("fused_moe", "ties in the order", "(other[None, :] < mine", "(other[None, :] <= mine", "OUT_OF_BOUNDS wrong"),
    ("fused_moe", "the halves' factors", "factor_smem.index(SIDE * 2 + half)", "factor_smem.index(SIDE * 2)", "wrong"),
    ("fused_moe", "overwritten while it is stored", "            tma.store_wait(0)\n", "", "wrong"),
    ("fused_moe", "no fence before the store", "            fence_async_shared()\n", "", "RACE"),
    ("fused_moe", "left before it is stored", "    tma.store_wait(0)\n\n\n", "\n\n", "RACE"),
    (
        "fused_moe",
        "the last panel's height",
        "gl.minimum(row_tiles - first, GROUP_M)",
        "GROUP_M",
        "OUT_OF_BOUNDS wrong",
    ),
    (
        "fused_moe",
        "the second warpgroup is never let go",
        "                mbarrier.arrive(ahead, pred=fill == 0)\n",
        "                pass\n",
        "TIMEOUT",
    ),
    (
        "fused_moe",
        "let go by a step that waits for it",
        "mbarrier.arrive(ahead, pred=fill == 0)",
        "mbarrier.arrive(ahead, pred=fill == STAGES)",
        "TIMEOUT",
    ),
    ("fused_moe", "two must let go", "mbarrier.init(ahead, count=1)", "mbarrier.init(ahead, count=2)", "TIMEOUT"),
    ("ragged_prefill", "a stage is not released", "mbarrier.arrive(v_empty.index(before))\n", "pass\n", "TIMEOUT"),
    ("ragged_prefill", "parity", "(fill // STAGES) & 1)", "(fill // STAGES + 1) & 1)", "TIMEOUT wrong"),
    ("ragged_prefill", "no wait for V", "mbarrier.wait(v_full.index(before)", "(lambda *_: 0)(v_full", "wrong"),
    ("ragged_prefill", "no wait for a free stage", "    mbarrier.wait(empty.index(stage)", "    (stage", "wrong RACE"),
    ("ragged_prefill", "mask", "+ s_row // GROUP + 1)", "+ s_row // GROUP + 2)", "wrong"),
    (
        "ragged_prefill",
        "tiles without a mask",
        "(tile_row + MINE) // GROUP + 1",
        "(tile_row + MINE) // GROUP + 99",
        "wrong",
    ),
    ("ragged_prefill", "no rescaling", "acc = acc * gl.convert_layout(rescale, O_ROWS)[:, None]", "pass", "wrong"),
    ("paged_prefill", "no tail cleared", "if kv_len - n < BLOCK_N:", "if False:", "wrong"),
    ("ragged_prefill", "no fence", "    fence_async_shared()\n    THREAD", "    THREAD", "RACE"),
    (
        *("ragged_prefill", "released before the product is done"),
        "scores = warpgroup_mma_wait(1, deps=[scores])\n                mbarrier.arrive(k_empty.index(stage))",
        "mbarrier.arrive(k_empty.index(stage))\n                scores = warpgroup_mma_wait(1, deps=[scores])",
        "wrong",
    ),
    (
        "ragged_prefill",
        "too weak a wait",
        "warpgroup_mma_wait(1, deps=[scores])",
        "warpgroup_mma_wait(2, deps=[scores])",
        "RACE",
    ),
    (
        "ragged_prefill",
        "no wait for the product",
        "acc = warpgroup_mma_wait(0, deps=[acc_token])",
        "acc = acc_token",
        "RUNTIME_ERROR RACE",
    ),
    (
        "ragged_prefill",
        "two arrivals",
        "    mbarrier.arrive(q_empty)\n",
        "    mbarrier.arrive(q_empty)\n        mbarrier.arrive(q_empty)\n",
        "RACE",
    ),
    (
        "ragged_prefill",
        "bytes",
        "mbarrier.expect(q_full, 128 * DIM * 2)",
        "mbarrier.expect(q_full, 64 * DIM * 2)",
        "TIMEOUT wrong RACE",
    ),
    ("ragged_prefill", "the counter stays", "gl.store(counter, 0)", "pass", "wrong"),
    (
        "ragged_prefill",
        "rows past the end",
        "mask=(row < q_len * GROUP)[:, None]",
        "mask=(row >= 0)[:, None]",
        "OUT_OF_BOUNDS wrong",
    ),
    ("ragged_prefill", "shared memory", '"sm90": (128, 2, 240)', '"sm90": (128, 8, 240)', "RESOURCE_LIMIT"),
    ("paged_prefill", "nobody opens the turns", "_turn_end(1)  #", "pass  #", "TIMEOUT"),
    (
        "paged_prefill",
        "past the table",
        "gl.minimum((n + r * ROWS) // PAGE, last_page)",
        "(n + r * ROWS) // PAGE",
        "OUT_OF_BOUNDS wrong",
    ),
    ("paged_prefill", "K for V", "+ IS_V * PAGE,)", ",)", "wrong"),
    (
        "paged_prefill",
        "a box in another's place",
        "(stage * PARTS + part) * BOXES + r",
        "(stage * PARTS + part) * BOXES + BOXES - 1 - r",
        "wrong",
    ),
    ("mla_decode", "P is not released", "mbarrier.arrive(p_empty)\n", "pass\n", "TIMEOUT"),
    ("mla_decode", "no fence after the copies", "fence_async_shared()  # the copies", "pass  # the copies", "RACE"),
    ("mla_decode", "no wait for P", "        mbarrier.wait(p_full, j & 1)\n", "", "wrong RACE TIMEOUT"),
    ("mla_decode", "the token behind the last", "(key < end)[None, :]", "(key <= end)[None, :]", "wrong"),
    ("mla_decode", "the other half", "latent.index((j % 2) * 2 + 1), acc", "latent.index((j % 2) * 2), acc", "wrong"),
    (
        "mla_decode",
        "released too early",
        "warpgroup_mma_wait(3, deps=[acc_token])",
        "warpgroup_mma_wait(4, deps=[acc_token])",
        "RACE",
    ),
]


@pytest.mark.parametrize(("task", "name", "good", "bad", "expected"), FAULTS, ids=[f"{f[0]}: {f[1]}" for f in FAULTS])
def test_a_planted_fault_shows(task: str, name: str, good: str, bad: str, expected: str, tmp_path: Path) -> None:
    original = catalog.submission_path(task, "triton", "hopper")
    text = original.read_text(encoding="utf-8")
    assert good in text
    (tmp_path / "hopper.py").write_text(text.replace(good, bad), encoding="utf-8")
    shutil.copy(original.with_name("run_kernel.py"), tmp_path)
    kernel, truth, names = load(task, tmp_path / "hopper.py")
    names["RING"] = 1  # so that the second launch has the counters of the first
    outcomes: list[str] = []
    while len(outcomes) < 4 * RUNS and not (outcomes and outcomes[-1].startswith(tuple(expected.split()))):
        outcomes.append(outcome(kernel, truth, CASES[task]))
    assert outcomes[-1].startswith(tuple(expected.split())), outcomes
