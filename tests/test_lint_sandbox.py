"""Every sandbox rule has one example that breaks it, and a clean file breaks none."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.lint import sandbox

TRITON = '''"""A clean Triton submission."""
import torch
import triton
import triton.language as tl

TUNING = {"c500": (128, 4), "sm90": (256, 8)}
DEVICE = "c500"
_cache = {}


@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


def run_kernel(x, y):
    BLOCK, num_warps = TUNING[DEVICE]
    if x.shape not in _cache:
        _cache[x.shape] = torch.empty_like(y)
    kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK, num_warps=num_warps)
'''
TILELANG = '''"""A clean TileLang submission."""
import tilelang
import tilelang.language as T

BLOCK = 128
_kernels = {}


@tilelang.jit(pass_configs={"tl.disable_tma_lower": True})
def build(heads):
    n = T.dynamic("n")

    @T.prim_func
    def main(x: T.Tensor((n, heads * 2), "bfloat16"), y: T.Tensor([n, heads], "bfloat16")):
        with T.Kernel(T.ceildiv(n, BLOCK), threads=256) as i:
            y[i, 0] = x[i, 0]

    return main


def run_kernel(x, y):
    heads = y.shape[1]
    if heads not in _kernels:
        _kernels[heads] = build(heads)
    _kernels[heads](x, y)
'''


def findings(tmp_path: Path, text: str, language: str) -> list[tuple[str, int, str]]:
    path = tmp_path / "run_kernel.py"
    path.write_text(text, encoding="utf-8")
    return [(f.rule, f.line, str(f)) for f in sandbox.check(path, language)]


@pytest.mark.parametrize(("text", "language"), [(TRITON, "triton"), (TILELANG, "tilelang")])
def test_clean_file_has_no_finding(tmp_path: Path, text: str, language: str) -> None:
    assert findings(tmp_path, text, language) == []


BREAK_TRITON = [
    ("import", "import torch\n", "import os\nimport torch\n", "import of os"),
    ("import", "import torch\n", "import torch\nfrom . import other\n", "relative import"),
    ("import", "import torch\n", "import torch\nfrom math import *\n", "star import from math"),
    ("import", "import torch\n", "import torch\nfrom torch.utils import cpp_extension\n", "import from torch.utils"),
    ("module-level", "_cache = {}", "_cache = {}\nprint('hello')", "Expr at module level"),
    ("module-level", "_cache = {}", "_cache = {}\nN: int = 3", "AnnAssign at module level"),
    ("literal-global", "_cache = {}", "_cache = {}\nZ = torch.zeros(10)", "torch.zeros(10) is not a literal"),
    ("literal-global", "_cache = {}", "_cache = {}\nY = BLOCK * 2", "BLOCK * 2 is not a literal"),
    ("literal-global", "_cache = {}", "_cache = {}\n_cache['a'] = 1", "something else than plain names"),
    ("forbidden-name", "BLOCK, num", "exec('pass')\n    BLOCK, num", "use of exec"),
    ("forbidden-name", "BLOCK, num", "getattr(x, 'y')\n    BLOCK, num", "use of getattr"),
    ("private-attribute", "BLOCK, num", "x.__class__\n    BLOCK, num", "attribute __class__"),
    ("private-attribute", "BLOCK, num", "x._base\n    BLOCK, num", "attribute _base"),
    ("statement", "BLOCK, num", "try:\n        pass\n    except ValueError:\n        pass\n    BLOCK, num", "Try"),
    ("statement", "BLOCK, num", "size: int = 4\n    BLOCK, num", "annotated assignment"),
    ("statement", "BLOCK, num", "_cache[0] += 1\n    BLOCK, num", "augmented assignment to _cache[0]"),
    ("statement", "BLOCK, num", "x @ y\n    BLOCK, num", "operator @"),
    ("statement", "BLOCK, num", "match x:\n        case 1:\n            pass\n    BLOCK, num", "Match statement"),
    ("cache-key", "x.shape not in", "id(x) not in", "id() as a key"),
    ("kernel-form", "@triton.jit", "@triton.heuristics({})\n@triton.jit", "decorators triton.heuristics"),
    ("kernel-form", "n, BLOCK", "n: int, BLOCK", "annotation int on n"),
    ("kernel-form", "BLOCK: tl.constexpr)", "BLOCK: tl.constexpr = 4)", "default value in kernel"),
    ("kernel-form", "BLOCK: tl.constexpr)", "BLOCK: tl.constexpr, *rest)", "*args or **kwargs"),
    ("run-kernel", "def run_kernel", "def run_kernels", "no function run_kernel"),
    ("run-kernel", "def run_kernel", "@torch.no_grad\ndef run_kernel", "decorator on run_kernel"),
    ("torch-proxy", "BLOCK, num", "torch.cuda.synchronize()\n    BLOCK, num", "torch.cuda"),
    ("torch-proxy", "BLOCK, num", "torch.load('x')\n    BLOCK, num", "torch.load"),
    ("torch-compute", "BLOCK, num", "torch.matmul(x, x)\n    BLOCK, num", "torch.matmul"),
    ("tensor-method", "BLOCK, num", "x.data_ptr()\n    BLOCK, num", ".data_ptr on x"),
    ("synchronisation", "BLOCK, num", "x.item()\n    BLOCK, num", ".item reads"),
    ("syntax", "def run_kernel(x, y):", "def run_kernel(x, y)", "expected ':'"),
]
BREAK_TILELANG = [
    ("import", "import tilelang\n", "import tilelang\nimport numpy\n", "import of numpy"),
    ("kernel-form", "@T.prim_func\n", "@T.macro\n", "holds no @T.prim_func"),
    ("kernel-form", 'y: T.Tensor([n, heads], "bfloat16")', "y: T.int32", "only T.Tensor"),
    ("kernel-form", 'y: T.Tensor([n, heads], "bfloat16")', "y", "y has no annotation"),
    ("kernel-form", "(n, heads * 2)", "(T.ceildiv(n, 2), heads)", "call T.ceildiv(n, 2) in an annotation"),
    ("statement", '    n = T.dynamic("n")', '    n: int = T.dynamic("n")', "annotated assignment"),
    ("foreign-code", "y[i, 0] = x[i, 0]", 'T.call_extern("handle", "f")', "T.call_extern"),
    ("foreign-code", "y[i, 0] = x[i, 0]", 'T.import_source("int f();")', "T.import_source"),
]


def test_a_macro_is_a_note(tmp_path: Path) -> None:
    macro = "    @T.macro\n    def helper(x):\n        x[0] += 1\n\n    @T.prim_func\n"
    found = findings(tmp_path, TILELANG.replace("    @T.prim_func\n", macro, 1), "tilelang")
    assert [(rule, "note [macro] T.macro: the sandbox" in text) for rule, _, text in found] == [("macro", True)]


def test_a_builder_may_compute_with_numbers(tmp_path: Path) -> None:
    assert (
        findings(tmp_path, TILELANG.replace("    n = T.dyn", "    heads.bit_length()\n    n = T.dyn", 1), "tilelang")
        == []
    )


def test_the_prim_func_itself_is_not_transformed(tmp_path: Path) -> None:
    assert findings(tmp_path, TILELANG.replace("y[i, 0] = x", "y[i, 0] += x", 1), "tilelang") == []


@pytest.mark.parametrize(("rule", "old", "new", "says"), BREAK_TRITON)
def test_triton_violation_is_found(tmp_path: Path, rule: str, old: str, new: str, says: str) -> None:
    assert old in TRITON
    found = findings(tmp_path, TRITON.replace(old, new, 1), "triton")
    assert any(r == rule and says in text for r, _, text in found), found


@pytest.mark.parametrize(("rule", "old", "new", "says"), BREAK_TILELANG)
def test_tilelang_violation_is_found(tmp_path: Path, rule: str, old: str, new: str, says: str) -> None:
    assert old in TILELANG
    found = findings(tmp_path, TILELANG.replace(old, new, 1), "tilelang")
    assert any(r == rule and says in text for r, _, text in found), found


def test_text_that_is_not_utf_8_is_one_finding(tmp_path: Path) -> None:
    path = tmp_path / "run_kernel.py"
    path.write_bytes(TRITON.encode() + b"# \xc4\xe3\n")
    (found,) = sandbox.check(path, "triton")
    assert (found.rule, found.line, found.level) == ("encoding", TRITON.count("\n") + 1, "error")
    assert "byte 0xc4 is not UTF-8" in str(found)
    path.write_bytes(b"\xef\xbb\xbf" + TRITON.replace("\n", "\r\n").encode())
    assert sandbox.check(path, "triton") == []  # a byte order mark and CRLF are fine


def test_second_kernel_is_a_note_and_a_third_an_error(tmp_path: Path) -> None:
    def kernel(name: str) -> str:
        return f"@triton.jit\ndef {name}(x):\n    pass\n\n\n"

    two = TRITON.replace("def run_kernel", kernel("b") + "def run_kernel", 1)
    assert [(rule, "note [" in text) for rule, _, text in findings(tmp_path, two, "triton")] == [("kernel-count", True)]
    three = two.replace("def run_kernel", kernel("c") + "def run_kernel", 1)
    assert [f"{'error' in text}" for _, _, text in findings(tmp_path, three, "triton")] == ["False", "True"]


def test_a_finding_names_file_line_rule_and_way_out(tmp_path: Path) -> None:
    ((rule, line, text),) = findings(
        tmp_path, TRITON.replace("import torch\n", "import torch\nimport os\n", 1), "triton"
    )
    assert (rule, line) == ("import", 3)
    assert text.startswith(f"{tmp_path / 'run_kernel.py'}:3: error [import] import of os; import only ")
