"""A task's reference.py: what is read from it, and what is said when it lacks something."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.contract import Contract, load_contract, wants_exact_allocations
from harness.verdict import KitError

GOOD = """
ARGUMENTS = ("a", "b", "out", "batch_size", "seq_len", "num_heads", "seqlen_q", "scale", "flag")
OUTPUTS = ("out", "b")
def reference(*args): return {"out": args[0]}
def honest(*args): return {"out": args[0]}
def workload(*args): return {"flops": 1, "bytes": 2, "dtype": "bf16"}
"""


def load(tmp_path: Path, source: str) -> Contract:
    path = tmp_path / "reference.py"
    path.write_text(source, encoding="utf-8")
    return load_contract(path)


def test_names_and_positions(tmp_path: Path) -> None:
    contract = load(tmp_path, GOOD)
    assert (contract.outputs, contract.output_indices) == (("out", "b"), (2, 1))
    assert contract.exact_allocations is False
    assert contract.workload()["bytes"] == 2
    assert load(tmp_path, GOOD + "EXACT_ALLOCATIONS = True").exact_allocations is True


def test_a_label_comes_from_the_first_integers(tmp_path: Path) -> None:
    contract = load(tmp_path, GOOD)
    tensors = [torch.zeros(2, 3)] * 3
    assert contract.label([*tensors, 4, 1024, 32, 1, 0.5, True]) == "b4 s1024 h32"
    assert load(tmp_path, GOOD.replace("num_heads", "seqlen_k")).label([*tensors, 4, 9, 8, 7, 0.5, True]) == "b4 s9 k8"
    one = load(tmp_path, 'ARGUMENTS = ("a", "topk")\nOUTPUTS = ("a",)\n' + GOOD.split("\n", 3)[3])
    assert one.label([torch.zeros(4096, 7168), 8]) == "4096x7168 t8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def honest", "def dishonest"), "honest is missing"),
        (("OUTPUTS =", "OTHERS ="), "OUTPUTS is missing"),
        (('("out", "b")', '("out", "c")'), "OUTPUTS names c, which is none of ARGUMENTS"),
        (('OUTPUTS = ("out", "b")', "OUTPUTS = ()"), "OUTPUTS is empty"),
        (
            ("ARGUMENTS =", "import nowhere_at_all\nARGUMENTS ="),
            "ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(KitError, match=r"reference\.py") as caught:
        load(tmp_path, GOOD.replace(*change))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("EXACT_ALLOCATIONS = True", True), ("EXACT_ALLOCATIONS = False", False), ("# EXACT_ALLOCATIONS = True", False)],
)
def test_exact_allocations_are_read_without_running_the_file(tmp_path: Path, source: str, expected: bool) -> None:
    path = tmp_path / "reference.py"
    path.write_text(f"import nowhere_at_all\n{source}\n", encoding="utf-8")
    assert wants_exact_allocations(path) is expected
