"""The Hopper variants in TileLang without a GPU: which calls they take, and their plain rows on small shapes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import contract, languages
from harness.catalog import reference_path, submission_path
from harness.devices import pick
from harness.languages import tilelang as language
from harness.lint import tilelang_lower
from harness.verdict import ExitCode, KitError

pytest.importorskip("tilelang")
CPU = pick("cpu")


def load(task: str, path: Path | None = None) -> tuple[languages.Submission, contract.Contract, dict[str, Any]]:
    truth = contract.load_contract(reference_path(task))
    path = path or submission_path(task, "tilelang", "hopper")
    kernel = languages.load("tilelang", path, truth.arguments, CPU, "hopper", {})
    names = next(c.cell_contents for c in kernel.run.__closure__ or () if hasattr(c.cell_contents, "__globals__"))
    return kernel, truth, names.__globals__


def paged(page: int, length: int = 20, dim: int = 64) -> list[Any]:
    """One sequence of nine queries, two heads of one group, pages back to front, NaN in every dead slot."""
    generator = torch.Generator().manual_seed(page)
    pages = -(-length // page)
    q, pool = (torch.randn(shape, generator=generator).bfloat16() for shape in ((9, 2, dim), (pages, 2, page, 1, dim)))
    last = length - (pages - 1) * page if pages else 1
    if pages:
        pool[0, :, last:] = torch.nan  # the last page lies first
    order = torch.arange(pages - 1, -1, -1, dtype=torch.int32)
    indptr, ends = (torch.tensor([0, n], dtype=torch.int32) for n in (9, pages))
    lasts = torch.tensor([last], dtype=torch.int32)
    return [q, pool, torch.full_like(q, torch.nan), indptr, ends, order, lasts, 1, 20, 2, 1, dim, page, 1]


def right(kernel: languages.Submission, truth: contract.Contract, args: list[Any]) -> bool:
    output = args[truth.arguments.index("output")]
    kernel.run(args)
    return torch.allclose(output.float(), truth.honest(*args)["output"].float(), rtol=0.02, atol=0.02)


def latent(lengths: list[int], page: int, spread: float = 1.0) -> list[Any]:
    """20 heads, pages back to front and one to spare, NaN in every dead slot. spread: of the scores."""
    heads, dim = 20, 512
    generator = torch.Generator().manual_seed(page)
    counts = [-(-length // page) for length in lengths]
    q, q_pe = (torch.randn((len(lengths), heads, d), generator=generator).bfloat16() for d in (dim, 64))
    q *= spread
    ckv, kpe = (torch.randn((sum(counts) + 1, page, d), generator=generator).bfloat16() for d in (dim, 64))
    order = torch.arange(sum(counts), 0, -1, dtype=torch.int32)
    ends = torch.tensor([0, *counts]).cumsum(0).int()
    ckv[0], kpe[0] = torch.nan, torch.nan
    for end, count, length in zip(ends[1:].tolist(), counts, lengths, strict=True):
        if count:
            ckv[order[end - 1], length - (count - 1) * page :] = torch.nan
            kpe[order[end - 1], length - (count - 1) * page :] = torch.nan
    indptr, lens = torch.arange(len(lengths) + 1, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    output = torch.full_like(q, torch.nan)
    return [q, q_pe, ckv, kpe, output, indptr, ends, order, lens, len(lengths), max(lengths), heads, dim, 64, page, 0]


def test_which_page_sizes_go_where() -> None:
    taken = load("paged_prefill")[2]["_taken"]
    for dim, sizes in ((64, [8, 16, 32, 64, 128]), (128, [8, 16, 32, 64, 128]), (256, [8, 16, 32, 64]), (96, [])):
        assert [page for page in range(1, 300) if taken(1, dim, page)] == sizes
    assert not taken(0, 128, 16)


def test_what_the_ragged_kernel_takes() -> None:
    taken = load("ragged_prefill")[2]["_taken"]
    assert all(taken(1, *dims) for dims in ((64, 64), (128, 128), (192, 128), (256, 256)))
    assert not any(taken(*call) for call in ((0, 128, 128), (1, 96, 64), (1, 128, 96), (1, 128, 192), (1, 192, 192)))


def test_pages_that_fit_run_here_and_others_in_the_file_beside() -> None:
    kernel, truth, names = load("paged_prefill")
    assert right(kernel, truth, paged(4))
    assert not names["_kernels"]
    assert names["DEVICE"] == names["_portable"]().DEVICE
    assert right(kernel, truth, paged(8))
    assert len(names["_kernels"]) == 1


@pytest.mark.parametrize("page", [1, 3, 64])
def test_latent_pages_of_any_size(page: int) -> None:
    kernel, truth, names = load("mla_decode")
    assert right(kernel, truth, latent([0, 1, 31, 200, 64], page))
    assert right(kernel, truth, latent([300], page, 30.0))
    assert len(names["_kernels"]) == 1
    assert names["_joins"]  # something was cut into parts


def test_latent_rows_that_cannot_be_copied_16_bytes_at_a_time_go_to_the_file_beside() -> None:
    kernel, truth, names = load("mla_decode")
    args = latent([40, 3], 1)
    ckv = torch.empty(args[2].numel() + 1, dtype=torch.bfloat16)[1:].view(args[2].shape)
    args[2] = ckv.copy_(args[2])
    assert right(kernel, truth, args)
    assert not names["_kernels"]
    assert not names["_taken"](256, 64, 0)
    assert not names["_taken"](512, 32, 0)


MUTATIONS = [
    ("paged_prefill", "first_key + j <= limit +", "first_key + j < limit +", lambda: paged(8)),
    ("mla_decode", "first_key + j < kv_len, S", "first_key + j <= kv_len, S", lambda: latent([33, 5], 1)),
    ("mla_decode", "sums[i] *= scale[i]", "sums[i] *= 1", lambda: latent([300] * 8, 1, 30.0)),
    ("mla_decode", "acc[i, d] *= scale[i]", "acc[i, d] *= 1", lambda: latent([300] * 8, 1, 30.0)),
]


@pytest.mark.parametrize(("task", "good", "bad", "arguments"), MUTATIONS)
def test_a_wrong_formula_shows(task: str, good: str, bad: str, arguments: Any, tmp_path: Path) -> None:
    original = submission_path(task, "tilelang", "hopper")
    text = original.read_text(encoding="utf-8")
    assert text.count(good) == 1
    (tmp_path / "hopper.py").write_text(text.replace(good, bad), encoding="utf-8")
    shutil.copy(original.with_name("run_kernel.py"), tmp_path)
    kernel, truth, _ = load(task, tmp_path / "hopper.py")
    assert not right(kernel, truth, arguments())


def adds_up_what_it_finds(source: str) -> bool:
    """Whether every tile of which a lowered kernel finds the rows' maxima has their sums as well."""
    return source.count("AllReduce<tl::SumOp") == source.count("AllReduce<tl::MaxOp") > 0


def test_both_warpgroups_of_the_latent_kernel_add_up_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # TileLang once left out the sums of the second one, since they had a layout that named the first one's threads; the
    # plain row that runs here has one warpgroup, and the device was wrong wherever a part had two tiles.
    monkeypatch.setitem(tilelang_lower.TARGETS, "sm_90a", {"kind": "cuda", "arch": "sm_90a"})
    attend = load("mla_decode")[2]["attend"]
    lowered = tilelang_lower.lower(attend, (64, 1, 64, 64, True, False, True), "sm_90a")
    assert adds_up_what_it_finds(lowered["source"]), lowered.get("error")
    assert lowered["shared"] <= 232448
    assert not adds_up_what_it_finds(lowered["source"].replace("AllReduce<tl::SumOp", "", 1))


def test_without_the_file_beside_every_call_says_what_is_missing(tmp_path: Path) -> None:
    shutil.copy(submission_path("paged_prefill", "tilelang", "hopper"), tmp_path)
    kernel, *_ = load("paged_prefill", tmp_path / "hopper.py")
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"run_kernel\.py"):
            kernel.run(paged(4))


def test_a_tilelang_without_wgmma_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tilelang.cuda.language", None)
    with pytest.raises(KitError, match=r"need wgmma_gemm, as in TileLang 0\.1\.15, and this is \d") as caught:
        language._needs_wgmma()
    assert caught.value.code == ExitCode.ENVIRONMENT
