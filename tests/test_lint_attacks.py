"""Submissions that break a rule of the sandbox in a roundabout way, each caught; and innocent ones, each left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from harness import catalog, gate
from harness.lint import sandbox
from tests.test_lint_sandbox import TILELANG, TRITON

HOST = "    BLOCK, num_warps"  # a line of run_kernel
KERNEL = "    i = tl.program_id(0)"  # a line of the Triton kernel
IMPORT = "import torch\n"
END = "num_warps=num_warps)\n"
BUILDER = '    n = T.dynamic("n")\n'


def rules(tmp_path: Path, text: str, language: str) -> list[str]:
    path = tmp_path / "run_kernel.py"
    path.write_text(text, encoding="utf-8")
    return [f"{f.rule}: {f.message}" for f in sandbox.check(path, language) if f.level == "error"]


def host(*lines: str) -> tuple[str, str]:
    """Lines of run_kernel before its first."""
    return HOST, "".join(f"    {line}\n" for line in lines) + HOST


DEVIOUS_TRITON = {
    "alias of a module": ("module-value: torch as", *host("t = torch", "t.load('x')")),
    "module in a list": ("module-value: torch as", *host("[torch][0].load('x')")),
    "module as a default": ("module-value: torch as", "def run_kernel(x, y):", "def run_kernel(x, y, t=torch):"),
    "module by walrus": ("module-value: torch as", *host("(t := torch).load('x')")),
    "import under another name": (
        "torch-proxy: torch.load",
        IMPORT,
        "import torch as t\nimport torch\n",
        "t.load('x')",
    ),
    "import from torch": ("torch-proxy: torch.cuda", IMPORT, "from torch import cuda\nimport torch\n"),
    "computing by a name from torch": (
        "torch-compute: torch.mm",
        IMPORT,
        "from torch import mm as f\nimport torch\n",
        "f(x, y)",
    ),
    "import inside a function": ("import: import of os", *host("import os as math")),
    "two meanings of a name": ("import: torch is bound", *host("global torch", "import math as torch")),
    "method of the class": ("torch-proxy: torch.Tensor.data_ptr", *host("torch.Tensor.data_ptr(x)")),
    "function as a value": ("torch-compute: torch.softmax", *host("f = {'a': torch.softmax}['a']")),
    "keyword that the proxy lacks": ("torch-proxy: keyword pin_memory", *host("torch.empty(4, pin_memory=True)")),
    "keywords unpacked": ("torch-proxy: keyword **", *host("torch.empty(4, **TUNING)")),
    "open": ("forbidden-name: use of open", *host("open('x')")),
    "open hidden in another function": (
        "forbidden-name: use of open",
        "def run_kernel",
        "def other(open):\n    return open\n\n\ndef run_kernel",
        "open('x')",
    ),
    "open hidden in a comprehension": ("forbidden-name: use of open", *host("[open for open in (1,)]", "open('x')")),
    "open uncovered by del": ("forbidden-name: use of open", *host("global open", "open = 1", "del open", "open('x')")),
    "globals": ("forbidden-name: use of globals", *host("globals()['torch']")),
    "builtins": ("forbidden-name: use of __builtins__", *host("__builtins__['eval']('1')")),
    "getattr as a value": ("forbidden-name: use of getattr", *host("f = (lambda g=getattr: g)()")),
    "str.format": ("forbidden-name: .format()", *host("'{0.__class__}'.format(x)")),
    "attribute in an f-string": ("private-attribute: attribute __dict__", *host("f'{x.__dict__}'")),
    "full-width letters": ("tensor-method: .data_ptr", *host("x.\uff44ata_ptr()")),
    "call in a default": (
        "module-level: call torch.zeros(9)",
        "def run_kernel(x, y):",
        "def run_kernel(x, y, z=torch.zeros(9)):",
    ),
    "call in an annotation": (
        "module-level: call print(1)",
        "def run_kernel(x, y):",
        "def run_kernel(x, y: print(1)):",
    ),
    "call in a return annotation": (
        "module-level: call print(1)",
        "def run_kernel(x, y):",
        "def run_kernel(x, y) -> print(1):",
    ),
    "call in a decorator": (
        "module-level: call torch.zeros(1)",
        "@triton.jit\n",
        "@triton.autotune(configs=[torch.zeros(1)], key=[])\n@triton.jit\n",
    ),
    "walrus in a decorator": (
        "module-level: assignment in a decorator",
        "@triton.jit\n",
        "@triton.autotune(configs=(Z := []), key=[])\n@triton.jit\n",
    ),
    "decorator on an inner function": (
        "run-kernel: decorator on f",
        *host("@torch.Tensor", "def f():", "    return 1"),
    ),
    "jit without a decorator": ("kernel-form: triton.jit outside", *host("k = triton.jit(run_kernel)")),
    "jit on an inner function": ("kernel-form: triton.jit outside", *host("@triton.jit", "def k(x):", "    return")),
    "class in a function": ("statement: ClassDef", *host("class A:", "    torch.zeros(1)")),
    "except group": ("statement: TryStar", *host("try:", "    pass", "except* ValueError:", "    pass")),
    "operator in place": ("statement: operator @", *host("x @= y")),
    "device by the driver": ("library: triton.runtime.driver", *host("triton.runtime.driver.active")),
    "device by an import": (
        "library: triton.runtime.driver",
        IMPORT,
        "from triton.runtime import driver as d\nimport torch\n",
        "d.active",
    ),
    "module behind the language": ("library: triton.language.core.os.system", *host("tl.core.os.system('x')")),
    "PTX in a kernel": (
        "foreign-code: tl.inline_asm_elementwise",
        KERNEL,
        "    tl.inline_asm_elementwise('', '', [], tl.int32, True, 1)\n" + KERNEL,
    ),
    "PTX by a name": (
        "foreign-code: tl.inline_asm_elementwise",
        IMPORT,
        "from triton.language import inline_asm_elementwise as f\nimport torch\n",
        "f('')",
    ),
    "int of a tensor": ("synchronisation: int(x[0])", *host("int(x[0])")),
    "int of a tensor through a helper": (
        "synchronisation: int(t)",
        "def run_kernel",
        "def peek(t):\n    return int(t)\n\n\ndef run_kernel",
        "peek(x[0])",
    ),
    "tensor as a condition": ("synchronisation: the truth of x[0] > 1", *host("if x[0] > 1:", "    return")),
    "tensor in a loop": ("synchronisation: going through x", *host("for row in x:", "    pass")),
    "tensor as a range": ("synchronisation: range(x[-1])", *host("[0 for _ in range(x[-1])]")),
    "tensor in a string": ("synchronisation: printing z", *host("z = x", "f'{z}'")),
    "tensor in a grid": ("synchronisation: [(x[-1],)] reads", *host("kernel[(x[-1],)](x, y, 1, BLOCK=1)")),
    "tensor in a grid by name": (
        "synchronisation: [grid] reads",
        *host("grid = (x[-1],)", "kernel[grid](x, y, 1, BLOCK=1)"),
    ),
    "tensor in a store": ("synchronisation: int(_cache['x'][0])", *host("_cache['x'] = x", "int(_cache['x'][0])")),
    "tensor in a lambda": ("synchronisation: int(t)", *host("(lambda t: int(t))(x[0])")),
    "tensor in a map": ("synchronisation: map((x[0],))", *host("list(map(int, (x[0],)))")),
    "tensor as a size": ("synchronisation: torch.empty with (x[-1],)", *host("torch.empty((x[-1],))")),
    "tensor in a slice": ("synchronisation: y[:x[0]]", *host("y[: x[0]]")),
    "gather by an index": ("torch-compute: y[x]", *host("x.shape", "y[x]")),
    "to the host": ("synchronisation: x.to('cpu') goes", *host("x.to('cpu')")),
    "to a host that is put together": ("synchronisation: device 'c' + 'pu'", *host("x.to(device='c' + 'pu')")),
    "multiplied by an operator": ("torch-compute: z * 2", *host("z = x if BLOCK else x.T", "z * 2")),
    "multiplied in place": ("torch-compute: y *= 2", *host("y.shape", "y *= 2")),
    "output written by torch": ("torch-compute: y[:] is written", *host("y[:] = 0")),
    "sum by a method": ("torch-compute: .sum of x", *host("x.sum()")),
    "tensor as a key": ("cache-key: x as a key", *host("_cache[x] = 1")),
    "tensor inside a key": ("cache-key: (x, 1) as a key", *host("if (x, 1) in _cache:", "    return")),
    "id as a value": ("cache-key: id() as a key", *host("key = id", "_cache[key(x)] = 1")),
    "attribute of a function": ("statement: assignment to kernel.seen", *host("kernel.seen = 1")),
}
DEVIOUS_TILELANG = {
    "extern by a name": (
        "foreign-code: T.call_extern",
        "import tilelang\n",
        "import tilelang\nfrom tilelang.language import call_extern as f\n",
        "f('int')",
    ),
    "extern by an intrinsic": (
        "foreign-code: 'tir.call_extern'",
        "y[i, 0] = x[i, 0]",
        'T.call_intrin("int32", "tir.call_extern", "f")',
    ),
    "extern put together": (
        "foreign-code: T.call_intrin with a name",
        "y[i, 0] = x[i, 0]",
        'T.call_intrin("int32", "tir." + "call" + "_extern")',
    ),
    "source by a pragma": (
        "foreign-code: 'pragma_import_c'",
        "y[i, 0] = x[i, 0]",
        'T.block_attr({"pragma_import_c": "int f();"})',
    ),
    "source by a pragma put together": (
        "foreign-code: T.block_attr with",
        "y[i, 0] = x[i, 0]",
        'T.block_attr({"pragma_" + "import_c": "int f();"})',
    ),
    "second decorator": (
        "kernel-form: decorators run_kernel, tilelang.jit",
        "@tilelang.jit(",
        "@run_kernel\n@tilelang.jit(",
    ),
    "second decorator inside": (
        "kernel-form: several decorators on main",
        "    @T.prim_func\n",
        "    @T.macro\n    @T.prim_func\n",
    ),
    "prim_func to hide in": (
        "kernel-form: @T.prim_func on f outside",
        "    heads = y.shape[1]\n",
        "    heads = y.shape[1]\n\n    @T.prim_func\n    def f():\n        heads.cuda_only\n\n",
    ),
    "torch in a prim_func": (
        "torch-compute: torch.mm",
        "import tilelang\n",
        "import tilelang\nimport torch\n",
        None,
        "y[i, 0] = x[i, 0]",
        "torch.mm(x, y)",
    ),
    "attribute in an annotation": ("kernel-form: attribute n.value", "(n, heads * 2)", "(n.value, heads)"),
    "private name in an annotation": ("kernel-form: private name _kernels", "(n, heads * 2)", "(n, _kernels)"),
    "power in an annotation": ("kernel-form: Pow in an annotation", "(n, heads * 2)", "(n, heads ** 2)"),
    "comprehension in an annotation": (
        "kernel-form: ListComp in an annotation",
        "(n, heads * 2)",
        "[h for h in (n, heads)]",
    ),
    "another Tensor": (
        "kernel-form: annotation n.language.Tensor",
        'x: T.Tensor((n, heads * 2), "bfloat16")',
        'x: n.language.Tensor((n,), "x")',
    ),
    "Tensor by itself": ("kernel-form: annotation T.Tensor", 'x: T.Tensor((n, heads * 2), "bfloat16")', "x: T.Tensor"),
    "parameter behind a star": (
        "kernel-form: z has no annotation",
        'y: T.Tensor([n, heads], "bfloat16")',
        'y: T.Tensor([n, heads], "bfloat16"), *, z',
    ),
    "assignment in a builder": ("statement: augmented assignment to n[0]", BUILDER, BUILDER + "    n[0] += 1\n"),
    "compiler of the library": (
        "library: tilelang.contrib.nvcc",
        "    heads = y.shape[1]\n",
        "    heads = y.shape[1]\n    tilelang.contrib.nvcc.compile_cuda('')\n",
    ),
    "macro outside": (
        "kernel-form: @T.macro on f outside",
        "def run_kernel",
        "@T.macro\ndef f():\n    pass\n\n\ndef run_kernel",
    ),
}


def changed(text: str, entry: tuple[str | None, ...], line: str) -> str:
    """`entry`: the finding, then old and new text, then a line of run_kernel or None, then old and new text again."""
    _, old, new, *rest = entry
    changes = [(old, new)]
    if rest and rest[0]:
        changes.append((line, f"    {rest[0]}\n{line}"))
    if len(rest) == 3:
        changes.append((rest[1], rest[2]))
    for before, after in changes:
        assert before is not None
        assert after is not None
        assert before in text, before
        text = text.replace(before, after, 1)
    return text


@pytest.mark.parametrize("entry", DEVIOUS_TRITON.values(), ids=DEVIOUS_TRITON.keys())
def test_devious_triton_is_caught(tmp_path: Path, entry: tuple[str | None, ...]) -> None:
    text = changed(TRITON, entry, HOST)
    found = rules(tmp_path, text, "triton")
    assert any(finding.startswith(str(entry[0])) for finding in found), found


@pytest.mark.parametrize("entry", DEVIOUS_TILELANG.values(), ids=DEVIOUS_TILELANG.keys())
def test_devious_tilelang_is_caught(tmp_path: Path, entry: tuple[str | None, ...]) -> None:
    text = changed(TILELANG, entry, "    heads = y.shape[1]\n")
    found = rules(tmp_path, text, "tilelang")
    assert any(finding.startswith(str(entry[0])) for finding in found), found


def test_every_rule_has_an_example() -> None:
    rules = set()
    for path in sorted((catalog.ROOT / "harness" / "lint").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.func if isinstance(node, ast.Call) else None
            name = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
            if isinstance(node, ast.Call) and name in ("finding", "_finding", "Finding"):
                words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                rules.update(words[:1])
    tested = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_lint_*.py"))
    assert {"import", "cache-key", "lane-mask", "spelling", "spills", "compat"} <= rules
    spellings = ('"{}"', '"{}: ', "[{}]")
    assert {rule for rule in rules if not any(s.format(rule) in tested for s in spellings)} == set()


def test_parameters_that_are_known_to_be_tensors(tmp_path: Path) -> None:
    path = tmp_path / "run_kernel.py"
    path.write_text(TRITON.replace(HOST, "    y * 2\n" + HOST), encoding="utf-8")
    assert sandbox.check(path, "triton") == []  # for all that the file says, y is a number
    (finding,) = sandbox.check(path, "triton", ("x", "y"))
    assert finding.rule == "torch-compute"


def test_torch_beside_the_kernel_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "run_kernel.py"
    path.write_text(TRITON.replace(HOST, "    torch.where(x, y, 0)\n" + HOST), encoding="utf-8")
    (finding,) = sandbox.check(path, "triton")
    assert str(finding).partition("note ")[2].startswith("[torch-compute] torch.where runs on the device beside the")


def test_another_encoding_cannot_hide_code(tmp_path: Path) -> None:
    path = tmp_path / "run_kernel.py"
    path.write_bytes(b"# -*- coding: utf-7 -*-\n# +AAo-import os\n" + TRITON.encode())
    assert [str(f.rule) for f in sandbox.check(path, "triton")] == ["encoding"]
    path.write_bytes(b"# coding: no-such-code\n" + TRITON.encode())
    assert [str(f.rule) for f in sandbox.check(path, "triton")] == ["encoding"]


@pytest.mark.parametrize("deep", ["-" * 20000 + "1", "1" + " + 1" * 20000, "1" + " + 1" * 900])
def test_a_tree_too_deep_to_read_is_refused(tmp_path: Path, deep: str) -> None:
    text = TRITON.replace(HOST, f"    sum = {deep}\n    torch.load('x')\n{HOST}")
    found = rules(tmp_path, text, "triton")
    assert found[0].startswith("nesting: ") or "torch-proxy: torch.load" in found
    assert gate.refusals(tmp_path / "run_kernel.py", "triton")


INNOCENT_TRITON = {
    "helper with typed parameters": (
        "def run_kernel",
        "def blocks(n: int, size: int = 4) -> int:\n    return (n + size - 1) // size\n\n\ndef run_kernel",
    ),
    "annotations of run_kernel": (
        "def run_kernel(x, y):",
        "def run_kernel(x: torch.Tensor, y: 'torch.Tensor') -> None:",
    ),
    "a local that shares its name with a builtin": host("input = x.shape[0]", "vars = input * 2"),
    "a local that shares its name with a module": host("math = 3", "BLOCK = math + 1"),
    "sizes are numbers": host("n = int(x.shape[0]) if x.numel() > 4 else max(x.stride(0), 1)", "half = n / 2"),
    "a tensor compared with None": host("z = _cache.get('z')", "if z is None or x is y:", "    return"),
    "bit_length of a number": host("width = 1 << (x.shape[0] - 1).bit_length()"),
    "a slice of a workspace": host(
        "z = torch.empty((4, 4), dtype=torch.float32, device=x.device)[:2]", "kernel[(1,)](z, y, 4, BLOCK=4)"
    ),
    "a grid by a lambda": host(
        "grid = lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)", "kernel[grid](x, y, 4, BLOCK=4)"
    ),
    "an f-string in an error": host("if x.dtype != y.dtype:", "    raise ValueError(f'{x.dtype} and {y.shape}')"),
    "a dictionary of launches": host("options = {'num_stages': 1}", "kernel[(1,)](x, y, 4, BLOCK=4, **options)"),
    "autotune": (
        "@triton.jit\n",
        "@triton.autotune(configs=[triton.Config({}, num_warps=w) for w in (4, 8)], key=['n'])\n@triton.jit\n",
    ),
    "jit with arguments": ("@triton.jit\n", "@triton.jit(do_not_specialize=['n'])\n"),
    "names from triton": (
        IMPORT,
        "from triton import cdiv, next_power_of_2\nfrom math import sqrt as root\nimport torch\n",
    ),
    "types of the language": host("kernel[(1,)](x, y, tl.bfloat16, BLOCK=torch.float32.itemsize)"),
    "views of a tensor": host("z = x.view(-1, 4).transpose(0, 1).contiguous()", "key = (*x.shape, x.dtype, x.device)"),
    "an index in a list": host("sizes = [64, 128]", "BLOCK = sizes[x.shape[0] % 2]"),
    "a comprehension over shapes": host(
        "total = sum(size for size in x.shape)", "big = [t.shape for t in (x, y) if t.numel() > 3]"
    ),
    "a copy of another type": host("z = x.to(torch.float32)", "w = y.to(device=x.device, dtype=x.dtype)"),
    "id as the name of a loop": host("for id in range(3):", "    BLOCK = id"),
}
INNOCENT_TILELANG = {
    "copy, math and random of T": ("y[i, 0] = x[i, 0]", "T.copy(x[i, 0:1], y[i, 0:1])"),
    "policy of a product": ("y[i, 0] = x[i, 0]", "T.gemm(x, x, y, policy=T.GemmWarpPolicy.FullRow)"),
    "matrix product and in-place work on tiles": ("y[i, 0] = x[i, 0]", "y[i, 0] += x[i, 0] * 2"),
    "an annotation by subscript": ('y: T.Tensor([n, heads], "bfloat16")', 'y: T.Tensor[(n, heads), "bfloat16"]'),
    "a type by T": ('[n, heads], "bfloat16"', "[n, heads], T.bfloat16"),
    "keys of pass_configs": ('{"tl.disable_tma_lower": True}', "{tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True}"),
    "jit without arguments": ('@tilelang.jit(pass_configs={"tl.disable_tma_lower": True})', "@tilelang.jit"),
    "language by import from": ("import tilelang.language as T", "from tilelang import language as T"),
    "numbers in a builder": (BUILDER, BUILDER + "    width = 1 << heads.bit_length()\n    half = heads / 2\n"),
    "an ordinary intrinsic": ("y[i, 0] = x[i, 0]", 'y[i, 0] = T.call_intrin("float32", "tir.exp2", x[i, 0])'),
    "a prim_func in a branch": ("    @T.prim_func\n", "    if heads < 0:\n        return None\n\n    @T.prim_func\n"),
}


@pytest.mark.parametrize("entry", INNOCENT_TRITON.values(), ids=INNOCENT_TRITON.keys())
def test_innocent_triton_is_left_alone(tmp_path: Path, entry: tuple[str, str]) -> None:
    assert rules(tmp_path, changed(TRITON, ("", *entry), HOST), "triton") == []


@pytest.mark.parametrize("entry", INNOCENT_TILELANG.values(), ids=INNOCENT_TILELANG.keys())
def test_innocent_tilelang_is_left_alone(tmp_path: Path, entry: tuple[str, str]) -> None:
    assert rules(tmp_path, changed(TILELANG, ("", *entry), HOST), "tilelang") == []
