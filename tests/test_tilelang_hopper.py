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


def test_a_wrong_mask_shows(tmp_path: Path) -> None:
    original = submission_path("paged_prefill", "tilelang", "hopper")
    text, good = original.read_text(encoding="utf-8"), "first_key + j <= limit +"
    assert text.count(good) == 1
    (tmp_path / "hopper.py").write_text(text.replace(good, "first_key + j < limit +"), encoding="utf-8")
    shutil.copy(original.with_name("run_kernel.py"), tmp_path)
    kernel, truth, _ = load("paged_prefill", tmp_path / "hopper.py")
    assert not right(kernel, truth, paged(8))


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
