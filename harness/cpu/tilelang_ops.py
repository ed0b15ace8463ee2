"""The tile operators of TileLang as C++: T.copy, T.fill, T.atomic_add, T.gemm and T.reduce, each as plain loops.

See tilelang_emit.py for what the C++ means; tilelang_tile.h has the buffers and gemm().
"""

from __future__ import annotations

from typing import Any

from harness.cpu.tilelang_expr import Expressions, Unsupported, kind_of, op_of

_TILE_SCOPES = ("shared", "shared.dyn", "local.fragment")


class TileOperators(Expressions):
    """Writes statements line by line. `guarded`: a region that reaches outside a tensor reads 0 and writes nothing."""

    def __init__(self, guarded: bool) -> None:
        super().__init__()
        self.guarded = guarded
        self.lines: list[str] = []
        self.depth = 1

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(text + " {")
        self.depth += 1

    def close(self, count: int = 1) -> None:
        for _ in range(count):
            self.depth -= 1
            self.line("}")

    def _region(self, call: Any) -> tuple[Any, list[str], list[Any]]:
        """(buffer, first index of each dimension, extent of each dimension) of a T.region(...) argument."""
        load = call.args[0]
        starts = [f"int64_t({self.expr(index)})" for index in load.indices]
        return load.buffer, starts, list(call.args[2:])

    @staticmethod
    def _constant(extent: Any) -> int | None:
        return int(extent.value) if kind_of(extent) == "IntImm" else None

    def _hoist(self, starts: list[str]) -> list[str]:
        """Bind the first indices of a region to names, so that they are computed once."""
        names = [self.unique("at") for _ in starts]
        for name, start in zip(names, starts, strict=True):
            self.line(f"const int64_t {name} = {start};")
        return names

    def _element_loops(self, extents: list[Any]) -> tuple[int, list[str]]:
        """Open one loop per extent; returns how many, and the loop variables ("0" where the extent is 1)."""
        count, names = 0, []
        for extent in extents:
            if self._constant(extent) == 1:
                names.append("0")
                continue
            name = self.unique("c")
            self.open(f"for (int64_t {name} = 0; {name} < int64_t({self.expr(extent)}); ++{name})")
            names.append(name)
            count += 1
        return count, names

    def _pair(self, what: str, source: list[Any], target: list[Any]) -> list[int | None]:
        """For each dimension of `source` the dimension of `target` that runs along with it (None: extent 1)."""
        free = [d for d, extent in enumerate(target) if self._constant(extent) != 1]
        mine = [d for d, extent in enumerate(source) if self._constant(extent) != 1]
        sizes = [self._constant(target[d]) for d in free], [self._constant(source[d]) for d in mine]
        different = any(a != b for a, b in zip(*sizes, strict=False) if a is not None and b is not None)
        if len(free) != len(mine) or different:
            raise Unsupported(f"T.{what} between regions of different extents {sizes[1]} and {sizes[0]}")
        partner: list[int | None] = [None] * len(source)
        for d, other in zip(mine, free, strict=True):
            partner[d] = other
        return partner

    def _tile_copy(self, call: Any) -> None:
        self._elementwise("copy", call, "{target} = {type}({source});")

    def _tile_atomicadd(self, call: Any) -> None:
        self._elementwise("atomic_add", call, "{target} = {type}({target} + {source});")

    def _elementwise(self, what: str, call: Any, store: str) -> None:
        if kind_of(call.args[0]) != "Call" or op_of(call.args[0]) != "region":
            raise Unsupported(f"T.{what} of a single value into a region is not supported on the CPU; use T.fill")
        source, s_start, s_extent = self._region(call.args[0])
        target, t_start, t_extent = self._region(call.args[1])
        partner = self._pair(what, t_extent, s_extent)
        self.open("")
        s_start, t_start = self._hoist(s_start), self._hoist(t_start)
        count, loop = self._element_loops(s_extent)
        s_at = ", ".join(f"{a} + {b}" for a, b in zip(s_start, loop, strict=True))
        t_at = ", ".join(a if d is None else f"{a} + {loop[d]}" for a, d in zip(t_start, partner, strict=True))
        source_type, target_type = self.ctype(source.dtype), self.ctype(target.dtype)
        s_name, t_name = self._buffer(source), self._buffer(target)
        value = f"{s_name}.get({s_at})"
        if self.guarded and str(source.scope()) == "global":
            value = f"({s_name}.has({s_at}) ? {value} : {source_type}(0))"
        guard = f"if ({t_name}.has({t_at})) " if self.guarded and str(target.scope()) == "global" else ""
        self.line(guard + store.format(target=f"{t_name}.put({t_at})", type=target_type, source=value))
        self.close(count + 1)

    def _tile_fill(self, call: Any) -> None:
        target, start, extent = self._region(call.args[0])
        ctype, name = self.ctype(target.dtype), self._buffer(target)
        self.open("")
        start = self._hoist(start)
        self.line(f"const {ctype} value = {ctype}({self.expr(call.args[1])});")
        count, loop = self._element_loops(extent)
        at = ", ".join(f"{a} + {b}" for a, b in zip(start, loop, strict=True))
        guard = f"if ({name}.has({at})) " if self.guarded and str(target.scope()) == "global" else ""
        self.line(f"{guard}{name}.put({at}) = value;")
        self.close(count + 1)

    def _tile_gemm(self, call: Any) -> None:
        operands = []
        for argument in call.args[:3]:
            buffer, start, extent = self._region(argument)
            if str(buffer.scope()) not in _TILE_SCOPES:
                raise Unsupported(
                    f"T.gemm operand {buffer.name} lives in {buffer.scope()}; copy it into shared memory first"
                )
            name = self._buffer(buffer)
            extents = ", ".join(self.expr(e) for e in extent)
            operands.append(f"{name}.corner({{{extents}}}, {', '.join(start)}), {name}.row()")
        a, b = call.args[0].args[0].buffer, call.args[1].args[0].buffer
        if str(a.dtype) != str(b.dtype):
            raise Unsupported(f"T.gemm multiplies {a.name} ({a.dtype}) by {b.name} ({b.dtype}): dtypes must be equal")
        flags = ", ".join(self.expr(call.args[i]) for i in (5, 6, 7, 3, 4, 9))
        self.line(f"gemm({', '.join(operands)}, {flags});")

    def _tile_reduce(self, call: Any) -> None:
        source, s_start, s_extent = self._region(call.args[0])
        target, t_start, t_extent = self._region(call.args[1])
        kind, axis, clear = str(call.args[2].value), int(call.args[3]), self.expr(call.args[4])
        ctype, s_name, t_name = self.ctype(target.dtype), self._buffer(source), self._buffer(target)
        wide = f"wide<{ctype}>"
        combine = {
            "sum": ("0", "total + x"),
            "abssum": ("0", "total + std::abs(x)"),
            "max": (f"std::numeric_limits<{wide}>::lowest()", "maximum(total, x)"),
            "min": (f"std::numeric_limits<{wide}>::max()", "minimum(total, x)"),
            "absmax": ("0", f"maximum<{wide}>(total, std::abs(x))"),
            "bitand": ("-1", "total & x"),
            "bitor": ("0", "total | x"),
            "bitxor": ("0", "total ^ x"),
        }
        if kind not in combine:
            raise Unsupported(f"T.reduce of kind {kind} is not supported on the CPU")
        first, step = combine[kind]
        if kind in ("max", "min") and ctype in ("float", "double", "bf16"):
            first = f"{'-' if kind == 'max' else ''}std::numeric_limits<{wide}>::infinity()"
        rank = len(s_extent)
        skip = [d for d in range(rank) if d != axis]
        # (rows, columns) reduce to (rows) or (rows, 1); a reduction to one element is written to index 0.
        place = (
            dict(zip(range(rank), range(rank), strict=True))
            if len(t_extent) == rank
            else {d: i for i, d in enumerate(skip)}
        )
        self.open("")
        s_start, t_start = self._hoist(s_start), self._hoist(t_start)
        names = ["0"] * rank
        count, loops = self._element_loops([s_extent[d] for d in skip])
        for d, name in zip(skip, loops, strict=True):
            names[d] = name
        t_at = [f"{start}" for start in t_start]
        for d in skip:
            t_at[place[d]] += f" + {names[d]}"
        at = ", ".join(t_at)
        self.line(f"{wide} total = {clear} ? {wide}({first}) : {wide}({t_name}.get({at}));")
        inner, loops = self._element_loops([s_extent[axis]])
        names[axis] = loops[0]
        s_at = ", ".join(f"{a} + {b}" for a, b in zip(s_start, names, strict=True))
        self.line(f"const {wide} x = {wide}({s_name}.get({s_at}));")
        self.line(f"total = {step};")
        self.close(inner)
        self.line(f"{t_name}.put({at}) = {ctype}(total);")
        self.close(count + 1)
