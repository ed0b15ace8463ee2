"""The judge's sandbox for Python submissions, rebuilt as checks on the syntax tree.

The judge parses a Triton or TileLang file, rejects it by its tree (imports, module-level assignments, kernel form),
then runs `run_kernel` behind a proxy of torch and RestrictedPython guards. Either kind of failure shows as 0 points
for a case, often as a wrong answer with time 0: both are looked for here. Rule names are stable: users search for them.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path

from harness.lint import Finding
from harness.lint.names import Names
from harness.lint.reader import words
from harness.lint.sandbox_host import Host

_IMPORT_ROOTS = {
    "triton": {"torch", "triton", "math"},
    "tilelang": {"torch", "tilelang", "tilelang.language", "tilelang.intrinsics", "math"},
}
_FORBIDDEN_NAMES = {"exec", "eval", "compile", "__import__", "getattr", "setattr", "delattr", "type"}
# Builtins that the sandbox offers.
_BUILTINS = words(
    """
    abs all any bool bytes callable chr complex dict divmod enumerate filter float frozenset hash hex id int isinstance
    issubclass iter len list map max min next oct ord pow print range repr reversed round set slice sorted str sum
    tuple zip True False None Ellipsis NotImplemented
    """
)
# What of triton and tilelang a submission needs: the rest asks for devices, compiles, or leads to modules behind them.
_LIBRARY = {
    "triton": words("language jit autotune heuristics Config cdiv next_power_of_2"),
    "tilelang": words("language intrinsics jit autotune PassConfigKey cdiv next_power_of_2 layout transform"),
}
# Modules that lie about in those: on the way to something else, and by themselves.
_MODULES_BEHIND = (sys.stdlib_module_names | {"torch", "tvm", "tilelang", "triton"}) - {"math", "random"}
_NEVER = words("os sys subprocess importlib builtins inspect ctypes torch tvm tilelang triton")
_DECORATORS_ONLY = words("triton.jit triton.autotune triton.Config tilelang.jit tilelang.autotune")
_MAKERS = words("builtins.range builtins.len builtins.list builtins.dict builtins.tuple") | _DECORATORS_ONLY
# Code that is not of the language: by attribute, by name, or in a string that a builder takes.
_FOREIGN_CODE = words("import_source call_extern call_pure_extern call_packed call_cpacked inline_asm_elementwise")
_FOREIGN_WORDS = ("pragma_import_c", "pragma_import_llvm", "call_extern", "call_pure_extern", "call_packed")
_BY_STRINGS = words("attr block_attr sblock_attr func_attr call_intrin call_llvm_intrin call_llvm_pure_intrin")
_STATEMENTS = (ast.Try, getattr(ast, "TryStar", ast.Try), ast.ClassDef, ast.AsyncFunctionDef)
_ANNOTATION_NODES = (
    *(ast.Call, ast.Subscript, ast.Attribute, ast.Name, ast.Constant, ast.Tuple, ast.List, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.expr_context, ast.keyword),
)


def check(path: Path, language: str, tensors: Collection[str] = ()) -> list[Finding]:
    """Every violation in a Triton or TileLang submission, by line. A syntax error is one finding (rule `syntax`).

    tensors: run_kernel's parameters that are known to be tensors; what the file does with the others tells of them.
    """
    way_out = "make the file valid Python from 3.10 to 3.12"
    data = path.read_bytes()
    try:
        declared, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if declared not in ("utf-8", "utf-8-sig"):  # Python would read another text than the one here
            return [Finding(path, 1, "encoding", f"the file declares {declared}", "save the file as UTF-8")]
        tree = ast.parse(data.decode("utf-8-sig"), filename=str(path))
    except UnicodeDecodeError as error:
        # A rule of its own: Python reads past such bytes in a comment, so the loader need not object.
        line = error.object[: error.start].count(b"\n") + 1
        what = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        return [Finding(path, line, "encoding", what, "save the file as UTF-8")]
    except SyntaxError as error:
        if "encoding" in str(error.msg) or "utf-8" in str(error.msg):  # of detect_encoding, which names no line
            return _bad_bytes(path, data, str(error.msg))
        return [Finding(path, error.lineno or 1, "syntax", str(error.msg), way_out)]
    except ValueError as error:  # null bytes, before Python 3.11.4
        return [Finding(path, 1, "syntax", str(error), way_out)]
    except (RecursionError, MemoryError):
        return [Finding(path, 1, "nesting", "nested too deeply to be parsed", "write it in several statements")]
    try:
        findings = set(_Checker(path, language, tree, tensors).run())
    except RecursionError:
        return [Finding(path, 1, "nesting", "nested too deeply to be read", "write it in several statements")]
    return sorted(findings, key=lambda finding: (finding.line, finding.rule, finding.message))


def _bad_bytes(path: Path, data: bytes, why: str) -> list[Finding]:
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        why = f"byte 0x{data[error.start]:02x} is not UTF-8"
        return [Finding(path, line, "encoding", why, "save the file as UTF-8")]
    return [Finding(path, 1, "encoding", why, "save the file as UTF-8")]


class _Checker:
    def __init__(self, path: Path, language: str, tree: ast.Module, tensors: Collection[str]) -> None:
        self.path, self.language, self.tree, self.tensors = path, language, tree, tensors
        self.names = Names(tree)
        self.functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.kernels = [f for f in self.functions if f"{language}.jit" in self._decorators(f)]

    def run(self) -> Iterator[Finding]:
        yield from self._imports()
        yield from self._module_level()
        yield from self._import_time()
        yield from self._names_everywhere()
        yield from self._chains()
        yield from self._foreign_code()
        yield from self._triton_kernels() if self.language == "triton" else self._tilelang_kernels()
        if not any(function.name == "run_kernel" for function in self.functions):
            yield self._finding(
                self.tree, "run-kernel", "no function run_kernel", "define run_kernel with the task's signature"
            )
        hosts = [function for function in self.functions if function not in self.kernels]
        for function in hosts:
            if function.decorator_list:
                yield self._finding(
                    function, "run-kernel", f"decorator on {function.name}", "host functions stay undecorated"
                )
        builders = self.kernels if self.language == "tilelang" else []  # their bodies are transformed too
        yield from Host(self.path, self.names, hosts, builders, self.tensors).run()

    def _finding(self, node: ast.AST, rule: str, message: str, way_out: str, level: str = "error") -> Finding:
        return Finding(self.path, getattr(node, "lineno", 1), rule, message, way_out, level)

    def _decorators(self, function: ast.FunctionDef) -> list[str]:
        return [self.names.path(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list]

    # -- imports (3.1) -------------------------------------------------------------------------------------------------
    def _imports(self) -> Iterator[Finding]:
        way_out = f"import only {', '.join(sorted(_IMPORT_ROOTS[self.language]))}"
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if not self._allowed_import(alias.name):
                        yield self._finding(node, "import", f"import of {alias.name}", way_out)
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level:
                    yield self._finding(node, "import", "relative import", way_out)
                elif not self._allowed_import(module):
                    yield self._finding(node, "import", f"import from {module}", way_out)
                for alias in node.names:
                    if alias.name == "*":
                        yield self._finding(node, "import", f"star import from {module}", "name what you import")
                    elif alias.name.startswith("_"):
                        yield self._finding(
                            node, "private-attribute", f"import of {alias.name}", "leading underscores are refused"
                        )
        for node, name in self.names.rebound:
            message = f"{name} is bound a second time, to something else"
            yield self._finding(node, "import", message, "give it another name")

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
                message = f"{type(node).__name__} at module level"
                yield self._finding(
                    node, "module-level", message, "keep imports, literal assignments and functions only"
                )
                continue
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                if not all(isinstance(name, ast.Name) for name in names):
                    message = "assignment to something else than plain names"
                    yield self._finding(node, "literal-global", message, "assign to a name or a tuple of names")
            try:
                ast.literal_eval(node.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                message = f"{ast.unparse(node.value)[:60]} is not a literal"
                way_out = "write the value out, or compute it inside a function"
                yield self._finding(node, "literal-global", message, way_out)

    def _import_time(self) -> Iterator[Finding]:
        """Code in a def line runs when the file is imported, as an assignment does."""
        for function in self.functions:
            arguments = function.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            here = [*arguments.defaults, *arguments.kw_defaults, function.returns, *(a and a.annotation for a in every)]
            places = [(part, "a default or annotation", frozenset[str]()) for part in here if part is not None]
            places += [(part, "a decorator", _MAKERS) for part in function.decorator_list]
            for part, where, allowed in places:
                for node in ast.walk(part):
                    if isinstance(node, ast.Call) and self.names.path(node.func) not in allowed:
                        message = f"call {ast.unparse(node)[:40]} in {where} of {function.name} runs at import"
                        yield self._finding(node, "module-level", message, "call it inside a function")
                    elif isinstance(node, ast.NamedExpr):
                        message = f"assignment in {where} of {function.name} runs at import"
                        yield self._finding(node, "module-level", message, "assign inside a function")

    # -- names (3.6) ---------------------------------------------------------------------------------------------------
    def _names_everywhere(self) -> Iterator[Finding]:
        way_out = "the sandbox refuses it; do without"
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                builtin = self.names.path(node).partition("builtins.")[2]
                if node.id in _FORBIDDEN_NAMES or node.id.startswith("__") or (builtin and not self._offered(builtin)):
                    yield self._finding(node, "forbidden-name", f"use of {node.id}", way_out)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                way_out_here = "attributes with a leading underscore are refused"
                yield self._finding(node, "private-attribute", f"attribute {node.attr}", way_out_here)
            elif isinstance(node, ast.Attribute) and node.attr in ("format", "format_map"):
                message = f".{node.attr}() reaches attributes by name, so the sandbox refuses it"
                yield self._finding(node, "forbidden-name", message, "write an f-string")
            elif isinstance(node, (*_STATEMENTS, ast.Await, ast.Yield, ast.YieldFrom)):
                kind = type(node).__name__
                way_out_here = "plain functions without exceptions or classes are what the sandbox runs"
                yield self._finding(node, "statement", f"{kind} statement", way_out_here)

    @staticmethod
    def _offered(builtin: str) -> bool:
        return builtin in _BUILTINS or builtin.endswith(("Error", "Exception", "Exit", "Iteration", "Interrupt"))

    # -- chains of names (3.5, and what the rules are about beside the letter) -----------------------------------------
    def _chains(self) -> Iterator[Finding]:
        for node, path in self.names.whole():
            if isinstance(node, ast.Name) and path in self.names.modules:
                message = f"{node.id} as a value: what becomes of the module cannot be read"
                yield self._finding(node, "module-value", message, f"write {node.id}.NAME where you use it")
                continue
            root, _, rest = path.partition(".")
            if root not in _LIBRARY or not rest:
                continue
            parts = rest.split(".")
            if parts[0] not in _LIBRARY[root] or _MODULES_BEHIND & {*parts[:-1]} or _NEVER & {*parts}:
                allowed = ", ".join(sorted(_LIBRARY[root]))
                yield self._finding(node, "library", path, f"use only {allowed} of {root}")
            elif path in _DECORATORS_ONLY and not self._decorates(node):
                message = f"{path} outside a decorator"
                yield self._finding(node, "kernel-form", message, "decorate a function of the module with it")

    def _decorates(self, node: ast.AST) -> bool:
        """Whether a node is part of a decorator of a function at module level."""
        while node in self.names.parent:
            above = self.names.parent[node]
            if isinstance(above, ast.FunctionDef):
                return node in above.decorator_list and above in self.functions
            node = above
        return False

    def _foreign_code(self) -> Iterator[Finding]:
        for node in ast.walk(self.tree):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            path = self.names.path(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
            last = path.rpartition(".")[2]
            if name in _FOREIGN_CODE or (path and last in _FOREIGN_CODE):
                what = "PTX" if last == "inline_asm_elementwise" else f"foreign code in {self.language} submissions"
                message = path.replace("tilelang.language", "T").replace("triton.language", "tl") or name
                yield self._finding(node, "foreign-code", message, f"the contest forbids {what}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not self._is_docstring(node):
                if any(word in node.value for word in _FOREIGN_WORDS):
                    message = repr(node.value[:60])
                    yield self._finding(node, "foreign-code", message, "the contest forbids foreign code")
            elif isinstance(node, ast.Call) and self._put_together(node):
                message = f"{ast.unparse(node.func)} with a name that is put together"
                yield self._finding(node, "foreign-code", message, "write the name as one string")

    def _is_docstring(self, node: ast.AST) -> bool:
        return isinstance(self.names.parent.get(node), ast.Expr)

    def _put_together(self, call: ast.Call) -> bool:
        """Whether a call of T that takes names as strings gets something else than constants for them."""
        module, _, name = self.names.path(call.func).rpartition(".")
        if module != "tilelang.language" or name not in _BY_STRINGS:
            return False
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        keys = [key for value in given for node in ast.walk(value) if isinstance(node, ast.Dict) for key in node.keys]
        if any(isinstance(value, ast.DictComp) for value in given) or not all(
            isinstance(k, ast.Constant) for k in keys
        ):
            return True
        # call_intrin(dtype, name, ...), attr(node, key, value)
        return any(
            isinstance(value, (ast.BinOp, ast.JoinedStr, ast.Call)) and _has_text(value) for value in call.args[:2]
        )

    # -- kernels (3.3, 3.4) --------------------------------------------------------------------------------------------
    def _triton_kernels(self) -> Iterator[Finding]:
        if not self.kernels:
            way_out = "the file must hold the kernel it launches"
            yield self._finding(self.tree, "kernel-form", "no @triton.jit kernel", way_out)
        for kernel in self.kernels[1:2]:
            way_out = "one per file is safest; two (split and combine) are accepted"
            yield self._finding(kernel, "kernel-count", "second @triton.jit kernel", way_out, "note")
        for kernel in self.kernels[2:]:
            message = f"{kernel.name} is kernel number three or more"
            yield self._finding(kernel, "kernel-count", message, "keep two at most, without helper functions")
        for kernel in self.kernels:
            given = self._decorators(kernel)
            jits, tuners = given.count("triton.jit"), given.count("triton.autotune")
            if jits != 1 or tuners > 1 or jits + tuners != len(given):
                message = f"decorators {', '.join(map(ast.unparse, kernel.decorator_list))[:80]} on {kernel.name}"
                way_out = "use one @triton.jit and at most one @triton.autotune"
                yield self._finding(kernel, "kernel-form", message, way_out)
            arguments = kernel.args
            if arguments.vararg or arguments.kwarg:
                message = f"*args or **kwargs in {kernel.name}"
                yield self._finding(kernel, "kernel-form", message, "name every parameter")
            if arguments.defaults or any(arguments.kw_defaults):
                message = f"default value in {kernel.name}"
                yield self._finding(kernel, "kernel-form", message, "pass every parameter at the launch")
            for parameter in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                annotation = parameter.annotation
                if annotation is not None and self.names.path(annotation) != "triton.language.constexpr":
                    message = f"annotation {ast.unparse(annotation)} on {parameter.arg}"
                    yield self._finding(parameter, "kernel-form", message, "only tl.constexpr is allowed")

    def _tilelang_kernels(self) -> Iterator[Finding]:
        if not self.kernels:
            way_out = "wrap the T.prim_func in a @tilelang.jit function"
            yield self._finding(self.tree, "kernel-form", "no @tilelang.jit function", way_out)
        inside: set[ast.FunctionDef] = set()
        for function in self.kernels:
            given = self._decorators(function)
            if given != ["tilelang.jit"]:
                message = f"decorators {', '.join(map(ast.unparse, function.decorator_list))[:80]} on {function.name}"
                yield self._finding(function, "kernel-form", message, "use one @tilelang.jit and nothing else")
            tiled = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n is not function]
            inside.update(tiled)
            prims = [node for node in tiled if "tilelang.language.prim_func" in self._decorators(node)]
            for inner in tiled:
                if "tilelang.language.macro" in self._decorators(inner):
                    message = "T.macro: the sandbox transforms the bodies of all functions but the T.prim_func"
                    way_out = "write it out in the T.prim_func to be safe"
                    yield self._finding(inner, "macro", message, way_out, "note")
            if not prims:
                message = f"{function.name} holds no @T.prim_func"
                way_out = "define the kernel inside the @tilelang.jit function"
                yield self._finding(function, "kernel-form", message, way_out)
            for prim in prims:
                yield from self._prim_func(prim)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef) and node not in inside:
                for name in self._decorators(node):
                    if name in ("tilelang.language.prim_func", "tilelang.language.macro"):
                        message = f"@T.{name.rpartition('.')[2]} on {node.name} outside a @tilelang.jit function"
                        yield self._finding(node, "kernel-form", message, "move it into one")

    def _prim_func(self, prim: ast.FunctionDef) -> Iterator[Finding]:
        if len(prim.decorator_list) != 1:
            yield self._finding(prim, "kernel-form", f"several decorators on {prim.name}", "use @T.prim_func alone")
        arguments = prim.args
        if arguments.vararg or arguments.kwarg or arguments.defaults or any(arguments.kw_defaults):
            message = f"*args, **kwargs or a default value in {prim.name}"
            yield self._finding(prim, "kernel-form", message, "give T.Tensor parameters only")
        for parameter in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            annotation = parameter.annotation
            if annotation is None:
                message = f"{parameter.arg} has no annotation"
                yield self._finding(parameter, "kernel-form", message, "annotate it T.Tensor(shape, dtype)")
                continue
            head: ast.AST = annotation
            if isinstance(annotation, (ast.Call, ast.Subscript)):
                head = annotation.func if isinstance(annotation, ast.Call) else annotation.value
            if head is annotation or self.names.path(head) != "tilelang.language.Tensor":
                message = f"annotation {ast.unparse(annotation)[:60]}"
                yield self._finding(parameter, "kernel-form", message, "only T.Tensor(shape, dtype) is allowed")
                continue
            yield from self._annotation(annotation)

    def _annotation(self, annotation: ast.expr) -> Iterator[Finding]:
        for node in ast.walk(annotation):
            if isinstance(node, ast.Call) and node is not annotation:
                message = f"call {ast.unparse(node)[:40]} in an annotation"
                yield self._finding(node, "kernel-form", message, "compute it before, use the name")
            elif isinstance(node, ast.Name) and node.id.startswith("_"):
                message = f"private name {node.id} in an annotation"
                yield self._finding(node, "kernel-form", message, "use a name without a leading underscore")
            elif isinstance(node, ast.Attribute) and not self.names.path(node).startswith("tilelang.language."):
                message = f"attribute {ast.unparse(node)[:40]} in an annotation"
                yield self._finding(node, "kernel-form", message, "only those of T are allowed; use a name")
            elif not isinstance(node, _ANNOTATION_NODES):
                message = f"{type(node).__name__} in an annotation"
                yield self._finding(annotation, "kernel-form", message, "use names, constants and + - * / // % only")


def _has_text(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(node))
