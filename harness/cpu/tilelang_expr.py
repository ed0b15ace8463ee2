"""Expressions of a TileLang program as C++: types, names, operators, intrinsics (statements: tilelang_emit.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

C_TYPES = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "bf16",
    "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_BINARY = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Mod": "%"}
_COMPARE = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "And": "&&", "Or": "||"}
_HELPERS = {"Max": "maximum", "Min": "minimum", "FloorDiv": "floor_div", "FloorMod": "floor_mod"}
_OPERATORS = {"shift_left": "<<", "shift_right": ">>", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
# Called as std::NAME on the argument in its own precision, the result rounded to the expression's type.
_FUNCTIONS = {
    name: name
    for name in ("exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "sqrt", "pow", "floor", "ceil", "trunc")
} | {"fabs": "fabs", "round": "nearbyint", "nearbyint": "nearbyint", "tanh": "tanh", "erf": "erf", "fma": "fma"}
_FUNCTIONS |= {"__exp": "exp", "__log": "log", "__log2": "log2", "sin": "sin", "cos": "cos", "fmod": "fmod"}
_ATOMICS = {"add": "{x} + {v}", "max": "tile::maximum({x}, {v})", "min": "tile::minimum({x}, {v})"}


class Unsupported(Exception):
    """The program uses something that cannot run here, or that no GPU would run as meant. str() is one sentence."""


def kind_of(node: Any) -> str:
    return type(node).__name__


def op_of(node: Any) -> str:
    """The name of a call's operator without its dialect: "tirx.exp2" -> "exp2", "tl.tileop.copy" -> "tileop.copy"."""
    name = str(getattr(node.op, "name", node.op))
    return name.partition(".")[2] or name


def children(node: Any) -> Iterator[Any]:
    """The direct sub-expressions and sub-statements of a node."""
    for field in (
        "a",
        "b",
        "value",
        "condition",
        "true_value",
        "false_value",
        "body",
        "then_case",
        "else_case",
        "block",
    ):
        child = getattr(node, field, None)
        if child is not None and not isinstance(child, (int, float, str, bool)):
            yield child
    for field in ("args", "indices", "seq"):
        yield from getattr(node, field, None) or ()
    if kind_of(node) == "For":
        yield from (node.min, node.extent)


def walk(node: Any) -> Iterator[Any]:
    yield node
    for child in children(node):
        yield from walk(child)


def bits_of(dtype: str) -> int:
    return 8 if dtype == "bool" else int("".join(c for c in dtype if c.isdigit()))


class Expressions:
    """Turns expressions into C++ text, and keeps the names of variables and buffers."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}
        self.taken: set[str] = set()
        self.buffers: dict[Any, str] = {}
        self.thread_axes: dict[Any, int] = {}  # variable of a thread index -> axis
        self.threaded = False  # inside a statement that runs for each thread in turn
        self.counter = 0

    def unique(self, base: str) -> str:
        clean = "".join(c if c.isalnum() else "_" for c in base)
        name = f"{clean}_"
        while name in self.taken:
            self.counter += 1
            name = f"{clean}_{self.counter}"
        self.taken.add(name)
        return name

    def declare(self, var: Any) -> str:
        self.names[var] = self.unique(str(var.name))
        return self.names[var]

    def ctype(self, dtype: Any) -> str:
        try:
            return C_TYPES[str(dtype)]
        except KeyError:
            raise Unsupported(f"dtype {dtype} has no CPU counterpart here") from None

    def _buffer(self, buffer: Any) -> str:
        """The C++ name of a buffer; T.reshape and T.view give buffers that share the memory of another one."""
        if buffer not in self.buffers:
            base = next((known for known in self.buffers if known.data.same_as(buffer.data)), None)
            if base is None:
                raise Unsupported(f"{buffer.name} is used but not allocated in this kernel")
            ctype, sizes = self.ctype(buffer.dtype), ", ".join(self.expr(extent) for extent in buffer.shape)
            self.buffers[buffer] = (
                f"Buffer<{ctype}, {len(buffer.shape)}>{{reinterpret_cast<{ctype}*>({self.buffers[base]}.data), "
                f'"{buffer.name}", {"true" if str(buffer.scope()) == "global" else "false"}, {{{sizes}}}}}'
            )
        return self.buffers[buffer]

    def _access(self, node: Any, how: str) -> str:
        return f"{self._buffer(node.buffer)}.{how}({', '.join(self.expr(i) for i in node.indices)})"

    def expr(self, node: Any) -> str:
        kind = kind_of(node)
        if kind in _BINARY or kind in _HELPERS:
            ctype, a, b = self.ctype(node.dtype), self.expr(node.a), self.expr(node.b)
            if kind in _HELPERS:
                return f"{_HELPERS[kind]}<{ctype}>({a}, {b})"
            return f"{ctype}({a} {_BINARY[kind]} {b})"
        if kind in _COMPARE:
            return f"({self.expr(node.a)} {_COMPARE[kind]} {self.expr(node.b)})"
        if kind == "Not":
            return f"(!{self.expr(node.a)})"
        if kind == "Var":
            if node in self.thread_axes and not self.threaded:
                raise Unsupported("the thread index is used outside a branch or store that single threads execute")
            if node not in self.names:
                raise Unsupported(f"{node.name} has no value on the CPU")
            return self.names[node]
        if kind == "IntImm":
            ctype, value = self.ctype(node.dtype), int(node.value)
            if ctype == "bool":
                return "true" if value else "false"
            return f"{ctype}({value}LL)" if value > -(2**63) else "INT64_MIN"
        if kind == "FloatImm":
            return self._float(float(node.value), str(node.dtype))
        if kind == "Cast":
            return f"{self.ctype(node.dtype)}({self.expr(node.value)})"
        if kind == "BufferLoad":
            return self._access(node, "get")
        if kind == "Select":
            return self._choose(node, node.condition, node.true_value, node.false_value)
        if kind == "Call":
            return self._call(node)
        raise Unsupported(f"a {kind} expression is not supported on the CPU")

    def _float(self, value: float, dtype: str) -> str:
        ctype = self.ctype(dtype)
        if value != value:
            return f"{ctype}(NAN)"
        if value in (float("inf"), float("-inf")):
            return f"{ctype}({'-' if value < 0 else ''}INFINITY)"
        return f"{ctype}({value.hex()})"

    def _choose(self, node: Any, condition: Any, true: Any, false: Any) -> str:
        ctype = self.ctype(node.dtype)
        return f"({self.expr(condition)} ? {ctype}({self.expr(true)}) : {ctype}({self.expr(false)}))"

    def _call(self, node: Any) -> str:
        op = op_of(node)
        if op == "if_then_else":
            return self._choose(node, *node.args)
        if op.startswith("atomic_") and op.endswith("_elem_op"):
            return self._atomic(node, op)
        if op in ("infinity", "likely", "isnan", "isinf", "isfinite", "reinterpret", "rsqrt", "abs", "bitwise_not"):
            ctype = self.ctype(node.dtype)
            if op == "infinity":
                return f"{ctype}(INFINITY)"
            value = self.expr(node.args[0])
            return {
                "likely": value,
                "reinterpret": f"reinterpret<{ctype}>({value})",
                "rsqrt": f"{ctype}(1 / std::sqrt({value}))",
                "bitwise_not": f"{ctype}(~{value})",
            }.get(op, f"{ctype}(std::{op}({value}))")
        if op in _OPERATORS:
            a, b = (self.expr(argument) for argument in node.args)
            return f"{self.ctype(node.dtype)}({a} {_OPERATORS[op]} {b})"
        if op in _FUNCTIONS:
            arguments = ", ".join(f"wide<{self.ctype(a.dtype)}>({self.expr(a)})" for a in node.args)
            name = _FUNCTIONS[op]
            if name == "exp10":
                return f"{self.ctype(node.dtype)}(std::pow(10.0, {arguments}))"
            return f"{self.ctype(node.dtype)}(std::{name}({arguments}))"
        raise Unsupported(f"T.{op.removeprefix('tl_')} is not supported on the CPU")

    def _atomic(self, node: Any, op: str) -> str:
        """atomic_{add,max,min}[_ret]_elem_op(access_ptr(load, ..), value, ..) and atomic_{load,store}_elem_op."""
        action = op.removeprefix("atomic_").removesuffix("_elem_op")
        target = self._access(node.args[0].args[0], "put")
        ctype = self.ctype(node.args[0].args[0].buffer.dtype)
        if action == "load":
            return target
        value = f"{ctype}({self.expr(node.args[1])})"
        if action == "store":
            return f"({target} = {value})"
        returns = action.endswith("_ret")
        action = action.removesuffix("_ret")
        if action not in _ATOMICS:
            raise Unsupported(f"T.atomic_{action} is not supported on the CPU")
        new = _ATOMICS[action].format(x="x", v="v")
        body = f"auto& x = {target}; const {ctype} v = {value}; const {ctype} old = x; x = {ctype}({new}); "
        return f"[&] {{ {body}{'return old;' if returns else ''} }}()"
