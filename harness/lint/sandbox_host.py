"""What the judge's torch proxy and guards refuse in host code: run_kernel, its helpers, and TileLang's builders.

The kinds of values are not declared, so tensors are inferred: what has a shape, what torch makes, and what is handed on
from those. Only what is surely a tensor counts as one.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from harness.lint import Finding
from harness.lint.names import Names
from harness.lint.reader import words

# What the judge's torch proxy offers; anything else raises there. In the order of the judge's guide.
_MAKING = words(
    """
    zeros ones empty empty_like zeros_like ones_like rand randn randint rand_like randn_like full full_like arange
    linspace logspace eye diag
    """
)
_ELEMENTWISE = words(
    """
    add sub mul div true_divide floor_divide remainder pow neg abs sign sqrt rsqrt square exp exp2 expm1 log log2 log10
    log1p sin cos tan asin acos atan sinh cosh floor ceil round trunc frac clamp minimum maximum reciprocal lerp
    eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_xor bitwise_not relu sigmoid tanh erf
    """
)
_REDUCING = words("sum mean std var prod max min argmax argmin amax amin all any norm")
_MOVING = words("where gather scatter index_select masked_select nonzero sort topk unique flip roll cat stack")
_SHAPING = words("split chunk reshape squeeze unsqueeze transpose permute flatten unflatten broadcast_to clone")
_TYPES = words(
    """
    float16 float32 float64 bfloat16 half float double int8 int16 int32 int64 uint8 short int long bool
    float8_e4m3fn float8_e5m2
    """
)
# Offered by the proxy, but the contest forbids torch to do the task's computation.
_COMPUTING = words(
    "matmul mm bmm dot mv addmm baddbmm einsum outer softmax log_softmax logsumexp cumsum cumprod addcmul addcdiv"
)
_TORCH = (
    _MAKING | _ELEMENTWISE | _REDUCING | _MOVING | _SHAPING | _TYPES | _COMPUTING | words("Tensor Size device dtype")
)
_KEYWORDS = words(
    """
    dtype device size fill_value low high start end step steps base n m input other dim dims dim0 dim1 keepdim
    sizes shape repeats split_size split_size_or_sections chunks tensors index src value min max
    descending stable largest sorted k return_inverse return_counts shifts rounding_mode alpha correction unbiased
    equation operands mat1 mat2 mat vec beta p weight condition as_tuple diagonal exponent nan type
    """
)
_TENSOR = words(
    """
    shape dtype device ndim numel size is_cuda T dim stride is_contiguous item element_size
    contiguous clone to cpu cuda view reshape float half bfloat16 double int long bool expand repeat squeeze unsqueeze
    transpose permute flatten unflatten copy_ zero_ fill_ sum mean max min abs sqrt exp
    """
)
_PLAIN = words("shape dtype device ndim numel size is_cuda dim stride is_contiguous element_size")  # give no tensor
_OTHERS = words(  # of numbers, strings and containers
    """
    get items keys values append extend pop setdefault update copy index count join startswith endswith split upper
    lower strip replace add discard remove insert clear sort reverse bit_length bit_count is_integer
    """
)
# These read a value back to the host: allowed by the proxy, but a synchronisation inside run_kernel.
_SYNCHRONISING = words("item tolist cpu nonzero masked_select unique numpy")
_METHODS_THAT_COMPUTE = words("sum mean max min abs sqrt exp")
# Builtins that want a number, and read a tensor back to get it.
_READING = words(
    """
    int float bool complex range min max sum any all round sorted list tuple set str repr print divmod chr hex oct
    map filter zip enumerate iter reversed
    """
)


class Host:
    """The host functions of one file; `builders` are TileLang's @tilelang.jit functions, which handle no tensors."""

    def __init__(
        self,
        path: Path,
        names: Names,
        functions: Sequence[ast.FunctionDef],
        builders: Sequence[ast.FunctionDef],
        tensors: Collection[str],
    ) -> None:
        self.path, self.names, self.functions, self.builders = path, names, functions, builders
        self.by_name = {function.name: function for function in functions}
        self.tensors: dict[ast.FunctionDef, set[str]] = {function: set() for function in functions}
        self.returning: set[str] = set()  # functions that return a tensor
        self.tuples: dict[ast.FunctionDef, set[str]] = {function: set() for function in functions}  # with a tensor in
        self.stores: set[str] = set()  # containers into which nothing but tensors is put
        for function in functions:
            self.tensors[function].update(tensors if function.name == "run_kernel" else ())
        self._infer()

    def run(self) -> Iterator[Finding]:
        """Every violation."""
        for node, path in self.names.whole():
            yield from self._torch(node, path)
        yield from self._imported_from_torch()
        for function in [*self.functions, *self.builders]:
            for part in self._nodes(function):
                yield from self._guarded(part)
                if function in self.tensors:
                    yield from self._host(function, part)

    def _finding(self, node: ast.AST, rule: str, message: str, way_out: str, level: str = "error") -> Finding:
        return Finding(self.path, getattr(node, "lineno", 1), rule, message, way_out, level)

    def _nodes(self, function: ast.FunctionDef) -> Iterator[ast.AST]:
        """Every node of a function, without the T.prim_func (and T.macro) in it and without its decorators."""
        todo: list[ast.AST] = [function.args, *([function.returns] if function.returns else []), *function.body]
        while todo:
            node = todo.pop()
            if not self._is_tile_code(node):
                yield node
                todo += ast.iter_child_nodes(node)

    def _is_tile_code(self, node: ast.AST) -> TypeGuard[ast.FunctionDef]:
        return isinstance(node, ast.FunctionDef) and any(
            self.names.path(decorator) in ("tilelang.language.prim_func", "tilelang.language.macro")
            for decorator in node.decorator_list
        )

    # -- torch's names, wherever they stand ----------------------------------------------------------------------------
    def _torch(self, node: ast.expr, path: str) -> Iterator[Finding]:
        root, _, rest = path.partition(".")
        if root != "torch" or not rest:
            return
        head, _, more = rest.partition(".")
        if head not in _TORCH or (more and not (head in _TYPES and more == "itemsize")):
            yield self._finding(node, "torch-proxy", path, "the judge's torch lacks it; use an allow-listed function")
            return
        if head in _COMPUTING:
            yield self._finding(node, "torch-compute", f"{path} does the task's work", "compute it in the kernel")
        elif head in _ELEMENTWISE | _REDUCING | _MOVING - _SYNCHRONISING:
            message = f"{path} runs on the device beside the kernel"
            yield self._finding(node, "torch-compute", message, "no part of the task may be computed so", "note")
        if head in _SYNCHRONISING:
            yield self._synchronisation(node, f".{head} reads a tensor back on the host")
        call = self.names.parent.get(node)
        if isinstance(call, ast.Call) and call.func is node:
            yield from self._keywords(call, path)

    def _imported_from_torch(self) -> Iterator[Finding]:
        for node in self.names.parent:
            if isinstance(node, ast.ImportFrom) and node.module == "torch" and not node.level:
                for alias in node.names:
                    if alias.name not in _TORCH and alias.name != "*":
                        way_out = "the judge's torch lacks it; use an allow-listed function"
                        yield self._finding(node, "torch-proxy", f"torch.{alias.name}", way_out)

    def _keywords(self, call: ast.Call, name: str) -> Iterator[Finding]:
        for keyword in call.keywords:
            if keyword.arg not in _KEYWORDS:
                message = f"keyword {keyword.arg or '**'} of {name}"
                yield self._finding(call, "torch-proxy", message, "the judge's torch raises for keywords it lacks")

    def _synchronisation(self, node: ast.AST, message: str) -> Finding:
        return self._finding(node, "synchronisation", message, "run_kernel must not synchronise; read it in the kernel")

    # -- what the guards refuse ----------------------------------------------------------------------------------------
    def _guarded(self, node: ast.AST) -> Iterator[Finding]:
        what = _refused(node)
        if what:
            yield self._finding(node, "statement", what, "write it as a plain assignment or call")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.decorator_list:
            yield self._finding(node, "run-kernel", f"decorator on {node.name}", "host functions stay undecorated")

    # -- host functions ------------------------------------------------------------------------------------------------
    def _host(self, function: ast.FunctionDef, node: ast.AST) -> Iterator[Finding]:
        if self.names.path(node) in ("builtins.id", "builtins.hash"):
            message = f"{ast.unparse(node)}() as a key: tensors are wrapped afresh for every call, so it never hits"
            yield self._finding(node, "cache-key", message, "key by shape and dtype")
        if isinstance(node, ast.Attribute) and not self.names.path(node):
            yield from self._attribute(function, node)
        elif isinstance(node, ast.Call):
            yield from self._call(function, node)
        elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            yield from self._truth(function, node.test)
        elif isinstance(node, ast.comprehension):
            yield from self._iterated(function, node.iter)
            for test in node.ifs:
                yield from self._truth(function, test)
        elif isinstance(node, (ast.For, ast.Starred)):
            yield from self._iterated(function, node.iter if isinstance(node, ast.For) else node.value)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self._truth(function, value)
        elif isinstance(node, ast.FormattedValue) and self.is_tensor(function, node.value):
            yield self._synchronisation(
                node, f"printing {ast.unparse(node.value)[:40]} reads a tensor back on the host"
            )
        elif isinstance(node, ast.Subscript):
            yield from self._item(function, node)
        yield from self._operator(function, node)

    def _attribute(self, function: ast.FunctionDef, node: ast.Attribute) -> Iterator[Finding]:
        tensor, where = self.is_tensor(function, node.value), ast.unparse(node.value)[:40]
        if node.attr in _SYNCHRONISING:
            yield self._synchronisation(node, f".{node.attr} reads a tensor back on the host")
        if node.attr.startswith("_") or node.attr in ("format", "format_map"):
            return  # rules of their own
        if not isinstance(node.ctx, ast.Load):
            message = f"assignment to {where}.{node.attr}"
            yield self._finding(node, "statement", message, "the guards refuse it; return or pass the value")
        if node.attr not in _TENSOR and (tensor or node.attr not in _OTHERS):
            way_out = "not among the attributes that the sandbox's tensors offer"
            yield self._finding(node, "tensor-method", f".{node.attr} on {where}", way_out)
        elif tensor and node.attr in _METHODS_THAT_COMPUTE:
            message = f".{node.attr} of {where} runs on the device beside the kernel"
            yield self._finding(node, "torch-compute", message, "compute it in the kernel")

    def _call(self, function: ast.FunctionDef, call: ast.Call) -> Iterator[Finding]:
        path = self.names.path(call.func)
        name, given = path.removeprefix("builtins."), [*call.args, *(keyword.value for keyword in call.keywords)]
        if path.startswith("math.") or (path.startswith("builtins.") and name in _READING):
            for argument in given:
                if self.is_tensor(function, argument) or (name == "map" and self._holds_tensor(function, argument)):
                    message = f"{name}({ast.unparse(argument)[:40]}) reads a tensor back on the host"
                    yield self._synchronisation(call, message)
        elif name in ("abs", "pow") and any(self.is_tensor(function, argument) for argument in given):
            message = f"{name} of a tensor runs on the device beside the kernel"
            yield self._finding(call, "torch-compute", message, "compute it in the kernel")
        elif path.removeprefix("torch.") in _MAKING and not path.endswith("_like"):
            for argument in given:
                if self._holds_tensor(function, argument):
                    message = f"{path} with {ast.unparse(argument)[:40]} reads a tensor back on the host"
                    yield self._synchronisation(call, message)
        method = call.func.attr if isinstance(call.func, ast.Attribute) and not path else ""
        if method in ("get", "setdefault", "pop") and call.args and self._holds_tensor(function, call.args[0]):
            yield self._by_tensor(call, call.args[0])
        if method and method not in _OTHERS and self.is_tensor(function, call.func.value):  # type: ignore[attr-defined]
            yield from self._keywords(call, f".{method}")
        if method == "to" or path == "torch.device" or path.removeprefix("torch.") in _MAKING:
            places = [keyword.value for keyword in call.keywords if keyword.arg == "device"]
            places += call.args if method == "to" or path == "torch.device" else []
            for place in places:
                if isinstance(place, ast.Constant) and str(place.value).startswith("cpu"):
                    yield self._synchronisation(call, f"{ast.unparse(call)[:40]} goes to the host")
                elif isinstance(place, (ast.BinOp, ast.JoinedStr)):
                    message = f"device {ast.unparse(place)[:40]} is put together"
                    yield self._finding(call, "synchronisation", message, "take the device of an argument")

    def _truth(self, function: ast.FunctionDef, test: ast.expr) -> Iterator[Finding]:
        if self.is_tensor(function, test):
            yield self._synchronisation(test, f"the truth of {ast.unparse(test)[:40]} is read back on the host")

    def _iterated(self, function: ast.FunctionDef, value: ast.expr) -> Iterator[Finding]:
        if self.is_tensor(function, value):
            message = f"going through {ast.unparse(value)[:40]} makes a tensor of every row"
            yield self._synchronisation(value, message)

    def _item(self, function: ast.FunctionDef, node: ast.Subscript) -> Iterator[Finding]:
        of_tensor = self.is_tensor(function, node.value)
        if of_tensor and not isinstance(node.ctx, ast.Load):
            message = f"{ast.unparse(node)[:40]} is written by torch"
            yield self._finding(node, "torch-compute", message, "the kernel writes the output")
        elif of_tensor:
            for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
                ends = [part.lower, part.upper, part.step] if isinstance(part, ast.Slice) else []
                if any(end is not None and self.is_tensor(function, end) for end in ends):
                    yield self._synchronisation(node, f"{ast.unparse(node)[:40]} reads a tensor back on the host")
                elif self.is_tensor(function, part):
                    message = f"{ast.unparse(node)[:40]} gathers on the device beside the kernel"
                    yield self._finding(node, "torch-compute", message, "gather in the kernel")
        elif not of_tensor and self._holds_tensor(function, node.slice):
            if isinstance(node.value, ast.Name) and node.value.id not in self.by_name and not self._launches(node):
                yield self._by_tensor(node, node.slice)
            else:
                yield self._synchronisation(node, f"[{ast.unparse(node.slice)[:40]}] reads a tensor back on the host")

    def _launches(self, node: ast.Subscript) -> bool:
        """Whether a subscript is the grid of a launch: `kernel[grid](...)`."""
        parent = self.names.parent.get(node)
        return isinstance(parent, ast.Call) and parent.func is node

    def _by_tensor(self, node: ast.AST, key: ast.expr) -> Finding:
        message = f"{ast.unparse(key)[:40]} as a key: tensors are wrapped afresh for every call, so it never hits"
        return self._finding(node, "cache-key", message, "key by shape and dtype")

    def _operator(self, function: ast.FunctionDef, node: ast.AST) -> Iterator[Finding]:
        if isinstance(node, ast.Compare):
            if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
                return
            if isinstance(node.ops[0], (ast.In, ast.NotIn)):
                if self._holds_tensor(function, node.left):
                    yield self._by_tensor(node, node.left)
                return
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.BinOp):
            operands = [node.left, node.right]
        elif isinstance(node, ast.AugAssign):
            operands = [node.target, node.value]
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            operands = [node.operand]
        else:
            return
        if any(self.is_tensor(function, operand) for operand in operands):
            message = f"{ast.unparse(node)[:60]} runs on the device beside the kernel"
            yield self._finding(node, "torch-compute", message, "compute it in the kernel")

    # -- which values are tensors --------------------------------------------------------------------------------------
    def _infer(self) -> None:
        for function in self.functions:
            arguments = function.args
            parameters = {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
            for node in self._nodes(function):
                of = node.value if isinstance(node, (ast.Attribute, ast.Subscript)) else None
                if isinstance(of, ast.Name) and of.id in parameters and isinstance(of.ctx, ast.Load):
                    # The judge passes tensors and numbers, so in run_kernel an index is enough.
                    typical = isinstance(node, ast.Attribute) and node.attr in _TENSOR - {"T"} - _OTHERS
                    if typical or function.name == "run_kernel":
                        self.tensors[function].add(of.id)
        size = -1
        while size != (size := sum(map(len, [*self.tensors.values(), *self.tuples.values(), self.returning]))):
            stores: dict[str, list[bool]] = {}
            for function in self.functions:
                for node in self._nodes(function):
                    self._flow(function, node)
                    if isinstance(node, ast.Assign):
                        for target in node.targets:
                            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                                kinds = stores.setdefault(target.value.id, [])
                                kinds.append(self.is_tensor(function, node.value))
            self.stores = {name for name, kinds in stores.items() if all(kinds)}

    def _flow(self, function: ast.FunctionDef, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._pair(function, target, node.value)
        elif isinstance(node, ast.NamedExpr):
            self._pair(function, node.target, node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            every = node.iter.elts if isinstance(node.iter, (ast.Tuple, ast.List)) else []
            if self.is_tensor(function, node.iter):
                self._mark(function, node.target)
            for value in every:
                self._pair(function, node.target, value)
        elif isinstance(node, ast.Return) and node.value is not None and self.is_tensor(function, node.value):
            self.returning.add(function.name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Lambda):
            for parameter, value in zip(node.func.args.args, node.args, strict=False):
                if self.is_tensor(function, value):
                    self.tensors[function].add(parameter.arg)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.by_name:
            called = self.by_name[node.func.id]
            parameters = [a.arg for a in [*called.args.posonlyargs, *called.args.args]]
            given = dict(zip(parameters, node.args, strict=False))
            given.update({keyword.arg: keyword.value for keyword in node.keywords if keyword.arg})
            for name, value in given.items():
                if self.is_tensor(function, value):
                    self.tensors[called].add(name)

    def _pair(self, function: ast.FunctionDef, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._pair(function, one, other)
        elif self.is_tensor(function, value):
            self._mark(function, target)
        elif isinstance(target, ast.Name) and isinstance(value, (ast.Tuple, ast.List)):
            self.tuples[function] |= {target.id} if self._holds_tensor(function, value) else set()

    def _mark(self, function: ast.FunctionDef, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.tensors[function].add(target.id)

    def is_tensor(self, function: ast.FunctionDef, node: ast.expr) -> bool:
        """Whether an expression surely is a tensor."""
        if isinstance(node, ast.Name):
            return node.id in self.tensors[function] and not self.names.path(node)
        if isinstance(node, ast.Attribute):
            return node.attr == "T" and self.is_tensor(function, node.value)
        if isinstance(node, ast.Subscript):
            stored = isinstance(node.value, ast.Name) and node.value.id in self.stores
            return stored or self.is_tensor(function, node.value)
        if isinstance(node, ast.Call):
            path = self.names.path(node.func)
            if path.startswith("torch."):
                return path.removeprefix("torch.") in _TORCH - _TYPES - words("Size device dtype split chunk")
            if isinstance(node.func, ast.Attribute) and not path:
                return node.func.attr not in _PLAIN | _SYNCHRONISING and self.is_tensor(function, node.func.value)
            return isinstance(node.func, ast.Name) and node.func.id in self.returning
        if isinstance(node, ast.NamedExpr):
            return self.is_tensor(function, node.value)
        if isinstance(node, ast.IfExp):
            return self.is_tensor(function, node.body) and self.is_tensor(function, node.orelse)
        if isinstance(node, ast.BinOp):
            return self.is_tensor(function, node.left) or self.is_tensor(function, node.right)
        if isinstance(node, ast.UnaryOp):
            return not isinstance(node.op, ast.Not) and self.is_tensor(function, node.operand)
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)):
            return any(self.is_tensor(function, value) for value in [node.left, *node.comparators])
        return False

    def _holds_tensor(self, function: ast.FunctionDef, node: ast.expr) -> bool:
        if isinstance(node, ast.Name) and node.id in self.tuples[function]:
            return True
        if isinstance(node, (ast.Tuple, ast.List)):
            return any(self._holds_tensor(function, element) for element in node.elts)
        return self.is_tensor(function, node)


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
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.MatMult):
        return "operator @"
    return ""
