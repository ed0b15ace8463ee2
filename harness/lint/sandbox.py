"""The judge's sandbox for Python submissions, rebuilt as checks on the syntax tree.

The judge parses a Triton or TileLang file, rejects it by its tree (imports, module-level assignments, kernel form),
then runs `run_kernel` behind a proxy of torch and RestrictedPython guards. Either kind of failure shows as 0 points
for a case, often as a wrong answer with time 0: both are looked for here. Rule names are stable: users search for them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from harness.lint import Finding

_IMPORT_ROOTS = {
    "triton": {"torch", "triton", "math"},
    "tilelang": {"torch", "tilelang", "tilelang.language", "tilelang.intrinsics", "math"},
}
_FORBIDDEN_NAMES = {"exec", "eval", "compile", "__import__", "getattr", "setattr", "delattr", "type"}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What the judge's torch proxy offers; anything else raises there. Groups in the order of the judge's guide.
_TORCH = _words(
    """
    zeros ones empty empty_like zeros_like ones_like rand randn randint rand_like randn_like full full_like arange
    linspace logspace eye diag
    add sub mul div true_divide floor_divide remainder pow neg abs sign sqrt rsqrt square exp exp2 expm1 log log2 log10
    log1p sin cos tan asin acos atan sinh cosh floor ceil round trunc frac clamp minimum maximum reciprocal lerp
    addcmul addcdiv
    eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_xor bitwise_not
    sum mean std var prod max min argmax argmin amax amin all any norm logsumexp
    cat stack split chunk reshape squeeze unsqueeze transpose permute flatten unflatten broadcast_to
    clone matmul mm bmm dot mv addmm baddbmm einsum outer
    relu sigmoid tanh softmax log_softmax erf
    where gather scatter masked_select nonzero sort topk unique flip roll cumsum cumprod
    float16 float32 float64 bfloat16 half float double int8 int16 int32 int64 uint8 short int long bool
    float8_e4m3fn float8_e5m2 Tensor Size device dtype
    """
)
_TENSOR = _words(
    """
    shape dtype device ndim numel size is_cuda T dim stride is_contiguous item
    contiguous clone to cpu cuda view reshape float half bfloat16 double int long bool expand repeat squeeze unsqueeze
    transpose permute flatten unflatten copy_ zero_ fill_ sum mean max min abs sqrt exp
    """
)
_CONTAINERS = _words(
    "get items keys values append extend pop setdefault update copy index count join format startswith"
)
# These read a value back to the host: allowed by the proxy, but a synchronisation inside run_kernel.
_SYNCHRONISING = _words("item tolist cpu nonzero masked_select unique")
# Offered by the proxy, but the contest forbids torch to do the task's computation.
_COMPUTING = _words("matmul mm bmm dot mv addmm baddbmm einsum softmax log_softmax logsumexp cumsum cumprod")


def check(path: Path, language: str) -> list[Finding]:
    """Every violation in a Triton or TileLang submission, by line. A syntax error is one finding (rule `syntax`)."""
    try:
        tree = ast.parse(path.read_bytes().decode("utf-8-sig"), filename=str(path))
    except UnicodeDecodeError as error:
        # A rule of its own: Python reads past such bytes in a comment, so the loader need not object.
        line = error.object[: error.start].count(b"\n") + 1
        what = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        return [Finding(path, line, "encoding", what, "save the file as UTF-8")]
    except SyntaxError as error:
        return [Finding(path, error.lineno or 1, "syntax", str(error.msg), "make the file valid Python 3.12")]
    except ValueError as error:  # null bytes, before Python 3.11.4
        return [Finding(path, 1, "syntax", str(error), "make the file valid Python 3.12")]
    findings = list(_Checker(path, language, tree).run())
    return sorted(findings, key=lambda finding: (finding.line, finding.rule))


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of plain attributes, the name for a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def _refused(node: ast.AST) -> str:
    """The statement or operator that RestrictedPython does not compile, or ""."""
    if isinstance(node, ast.AnnAssign):
        return "annotated assignment"
    if isinstance(node, ast.Nonlocal):
        return "Nonlocal statement"
    if isinstance(node, ast.Match):
        return "Match statement"
    if isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Name):
        return f"augmented assignment to {ast.unparse(node.target)[:40]}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return "operator @"
    return ""


class _Checker:
    def __init__(self, path: Path, language: str, tree: ast.Module) -> None:
        self.path, self.language, self.tree = path, language, tree
        self.modules: dict[str, str] = {}  # local name -> module that it stands for
        self.jit_functions: set[str] = set()

    def run(self) -> Iterator[Finding]:
        yield from self._imports()
        yield from self._module_level()
        yield from self._names_everywhere()
        functions = [node for node in self.tree.body if isinstance(node, ast.FunctionDef)]
        kernels = [f for f in functions if self._is_kernel(f)]
        if self.language == "triton":
            yield from self._triton_kernels(kernels)
        else:
            yield from self._tilelang_kernels(functions, kernels)
        run_kernel = [f for f in functions if f.name == "run_kernel"]
        if not run_kernel:
            yield self._finding(
                self.tree, "run-kernel", "no function run_kernel", "define run_kernel with the task's signature"
            )
        for function in functions:
            if function not in kernels:
                yield from self._plain_function(function)
            elif self.language == "tilelang":
                yield from self._restricted(function)  # all of it but the prim_func is transformed too

    def _finding(self, node: ast.AST, rule: str, message: str, way_out: str, level: str = "error") -> Finding:
        return Finding(self.path, getattr(node, "lineno", 1), rule, message, way_out, level)

    # -- imports (3.1) -------------------------------------------------------------------------------------------------
    def _imports(self) -> Iterator[Finding]:
        allowed = _IMPORT_ROOTS[self.language]
        way_out = f"import only {', '.join(sorted(allowed))}"
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if not self._allowed_import(alias.name):
                        yield self._finding(node, "import", f"import of {alias.name}", way_out)
                    self.modules[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level:
                    yield self._finding(node, "import", "relative import", way_out)
                elif not self._allowed_import(module):
                    yield self._finding(node, "import", f"import from {module}", way_out)
                for alias in node.names:
                    if alias.name == "*":
                        yield self._finding(node, "import", f"star import from {module}", "name what you import")
                    self.modules[alias.asname or alias.name] = f"{module}.{alias.name}"

    def _allowed_import(self, module: str) -> bool:
        allowed = _IMPORT_ROOTS[self.language]
        if self.language == "triton" and module.split(".")[0] == "triton":
            return True
        return module in allowed

    # -- module level (3.2) --------------------------------------------------------------------------------------------
    def _module_level(self) -> Iterator[Finding]:
        for position, node in enumerate(self.tree.body):
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef)):
                continue
            if position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # the docstring
            if not isinstance(node, ast.Assign):
                kind = type(node).__name__
                yield self._finding(
                    node,
                    "module-level",
                    f"{kind} at module level",
                    "keep imports, literal assignments and functions only",
                )
                continue
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                if not all(isinstance(name, ast.Name) for name in names):
                    yield self._finding(
                        node,
                        "literal-global",
                        "assignment to something else than plain names",
                        "assign to a name or a tuple of names",
                    )
            try:
                ast.literal_eval(node.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                yield self._finding(
                    node,
                    "literal-global",
                    f"{ast.unparse(node.value)[:60]} is not a literal",
                    "write the value out, or compute it inside a function",
                )

    # -- names (3.6) ---------------------------------------------------------------------------------------------------
    def _names_everywhere(self) -> Iterator[Finding]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id in _FORBIDDEN_NAMES:
                yield self._finding(node, "forbidden-name", f"use of {node.id}", "the sandbox refuses it; do without")
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                yield self._finding(
                    node,
                    "private-attribute",
                    f"attribute {node.attr}",
                    "attributes with a leading underscore are refused",
                )
            elif isinstance(node, (ast.Try, ast.ClassDef, ast.AsyncFunctionDef, ast.Await, ast.Yield, ast.YieldFrom)):
                kind = type(node).__name__
                yield self._finding(
                    node,
                    "statement",
                    f"{kind} statement",
                    "plain functions without exceptions or classes are what the sandbox runs",
                )

    # -- kernels (3.3, 3.4) --------------------------------------------------------------------------------------------
    def _resolve(self, node: ast.AST) -> str:
        name = dotted(node.func if isinstance(node, ast.Call) else node)
        head, _, rest = name.partition(".")
        module = self.modules.get(head, head)
        return f"{module}.{rest}" if rest else module

    def _is_kernel(self, function: ast.FunctionDef) -> bool:
        jit = {"triton": {"triton.jit"}, "tilelang": {"tilelang.jit"}}[self.language]
        is_kernel = any(self._resolve(decorator) in jit for decorator in function.decorator_list)
        if is_kernel:
            self.jit_functions.add(function.name)
        return is_kernel

    def _triton_kernels(self, kernels: list[ast.FunctionDef]) -> Iterator[Finding]:
        if not kernels:
            yield self._finding(
                self.tree, "kernel-form", "no @triton.jit kernel", "the file must hold the kernel it launches"
            )
        for kernel in kernels[1:2]:
            yield self._finding(
                kernel,
                "kernel-count",
                "second @triton.jit kernel",
                "one per file is safest; two (split and combine) are accepted",
                "note",
            )
        for kernel in kernels[2:]:
            yield self._finding(
                kernel,
                "kernel-count",
                f"{kernel.name} is kernel number three or more",
                "keep two at most, without helper functions",
            )
        for kernel in kernels:
            names = [self._resolve(decorator) for decorator in kernel.decorator_list]
            if (
                names.count("triton.jit") != 1
                or names.count("triton.autotune") > 1
                or set(names) - {"triton.jit", "triton.autotune"}
            ):
                yield self._finding(
                    kernel,
                    "kernel-form",
                    f"decorators {', '.join(names)} on {kernel.name}",
                    "use one @triton.jit and at most one @triton.autotune",
                )
            arguments = kernel.args
            if arguments.vararg or arguments.kwarg:
                yield self._finding(
                    kernel, "kernel-form", f"*args or **kwargs in {kernel.name}", "name every parameter"
                )
            if arguments.defaults or any(arguments.kw_defaults):
                yield self._finding(
                    kernel, "kernel-form", f"default value in {kernel.name}", "pass every parameter at the launch"
                )
            for parameter in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                annotation = parameter.annotation
                if annotation is not None and self._resolve(annotation) != "triton.language.constexpr":
                    yield self._finding(
                        parameter,
                        "kernel-form",
                        f"annotation {ast.unparse(annotation)} on {parameter.arg}",
                        "only tl.constexpr is allowed",
                    )

    def _tilelang_kernels(self, functions: list[ast.FunctionDef], kernels: list[ast.FunctionDef]) -> Iterator[Finding]:
        if not kernels:
            yield self._finding(
                self.tree,
                "kernel-form",
                "no @tilelang.jit function",
                "wrap the T.prim_func in a @tilelang.jit function",
            )
        for function in kernels:
            inner = [node for node in function.body if self._is_tile_code(node, "prim_func")]
            for node in ast.walk(function):
                if self._is_tile_code(node, "macro"):
                    yield self._finding(
                        node,
                        "macro",
                        "T.macro: the sandbox transforms the bodies of all functions but the T.prim_func",
                        "write it out in the T.prim_func to be safe",
                        "note",
                    )
            if not inner:
                yield self._finding(
                    function,
                    "kernel-form",
                    f"{function.name} holds no @T.prim_func",
                    "define the kernel inside the @tilelang.jit function",
                )
            for prim in inner:
                yield from self._prim_func(prim)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and node.attr in {"import_source", "call_extern"}:
                yield self._finding(
                    node, "foreign-code", f"T.{node.attr}", "the contest forbids foreign code in TileLang submissions"
                )

    def _prim_func(self, prim: ast.FunctionDef) -> Iterator[Finding]:
        for parameter in prim.args.args:
            annotation = parameter.annotation
            if annotation is None:
                yield self._finding(
                    parameter, "kernel-form", f"{parameter.arg} has no annotation", "annotate it T.Tensor(shape, dtype)"
                )
                continue
            head = (
                annotation.func
                if isinstance(annotation, ast.Call)
                else annotation.value
                if isinstance(annotation, ast.Subscript)
                else annotation
            )
            if not self._resolve(head).endswith("language.Tensor"):
                yield self._finding(
                    parameter,
                    "kernel-form",
                    f"annotation {ast.unparse(annotation)[:60]}",
                    "only T.Tensor(shape, dtype) is allowed",
                )
                continue
            for node in ast.walk(annotation):
                if isinstance(node, ast.Call) and node is not annotation:
                    yield self._finding(
                        node,
                        "kernel-form",
                        f"call {ast.unparse(node)[:40]} in an annotation",
                        "compute it before, use the name",
                    )
                elif not isinstance(
                    node,
                    (
                        ast.Call,
                        ast.Subscript,
                        ast.Attribute,
                        ast.Name,
                        ast.Constant,
                        ast.BinOp,
                        ast.operator,
                        ast.Tuple,
                        ast.List,
                        ast.expr_context,
                        ast.keyword,
                    ),
                ):
                    yield self._finding(
                        parameter,
                        "kernel-form",
                        f"{type(node).__name__} in an annotation",
                        "use names, constants and + - * / // % only",
                    )

    # -- run_kernel and other host functions (3.5) ---------------------------------------------------------------------
    def _plain_function(self, function: ast.FunctionDef) -> Iterator[Finding]:
        if function.decorator_list:
            yield self._finding(
                function, "run-kernel", f"decorator on {function.name}", "host functions stay undecorated"
            )
        yield from self._restricted(function)

    def _host_nodes(self, function: ast.FunctionDef) -> Iterator[ast.AST]:
        """Every node of a function's body, without the T.prim_func (and T.macro, see _tilelang_kernels) in it."""
        todo: list[ast.AST] = list(function.body)
        while todo:
            node = todo.pop()
            if self._is_tile_code(node, "prim_func", "macro"):
                continue
            yield node
            todo += ast.iter_child_nodes(node)

    def _is_tile_code(self, node: ast.AST, *decorators: str) -> TypeGuard[ast.FunctionDef]:
        """Whether a node is a function with one of these decorators of tilelang.language."""
        return isinstance(node, ast.FunctionDef) and any(
            self._resolve(decorator) == f"tilelang.language.{name}"
            for decorator in node.decorator_list
            for name in decorators
        )

    def _restricted(self, function: ast.FunctionDef) -> Iterator[Finding]:
        """What RestrictedPython and the guards refuse in code that they transform."""
        for node in self._host_nodes(function):
            what = _refused(node)
            if what:
                yield self._finding(node, "statement", what, "write it as a plain assignment or call")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id":
                message = "id() as a key: tensors are wrapped afresh for every call, so it never hits"
                yield self._finding(node, "cache-key", message, "key by shape and dtype")
            if not isinstance(node, ast.Attribute):
                continue
            name = dotted(node)
            head, _, rest = name.partition(".")
            module = self.modules.get(head)
            if module == "torch":
                if rest in _COMPUTING:
                    yield self._finding(
                        node, "torch-compute", f"torch.{rest} does the task's work", "compute it in the kernel"
                    )
                elif "." not in rest and rest not in _TORCH:
                    yield self._finding(
                        node, "torch-proxy", f"torch.{rest}", "the judge's torch lacks it; use an allow-listed function"
                    )
            elif (
                module is None
                and not node.attr.startswith("_")
                and node.attr not in _TENSOR | _CONTAINERS
                and not self._is_kernel(function)  # a builder has no tensors, its numbers have methods
            ):
                yield self._finding(
                    node,
                    "tensor-method",
                    f".{node.attr} on {ast.unparse(node.value)[:40]}",
                    "not among the attributes that the sandbox's tensors offer",
                )
            if node.attr in _SYNCHRONISING and (module in (None, "torch")):
                yield self._finding(
                    node,
                    "synchronisation",
                    f".{node.attr} reads a tensor back on the host",
                    "run_kernel must not synchronise; read it in the kernel",
                )
