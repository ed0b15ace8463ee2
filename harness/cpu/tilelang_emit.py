"""Write one TileLang kernel, as its front end parsed it, as C++ that runs the blocks one after another.

The input is the tile-level program (T.copy, T.gemm, T.reduce, loops over elements), before any lowering to a target.
Blocks run in order, statements of a block one after another for the whole block, T.Parallel as plain loops. That keeps
the meaning of every tile-level program; what depends on single threads is refused, or run for each thread in turn.
Types are exact (bf16 rounds on every store), a tile nobody wrote holds NaN, and every index is checked against its
buffer's shape, in all memory scopes. As on a GPU, T.copy, T.fill and T.atomic_add of a region that reaches outside a
tensor read 0 and write nothing there, unless the kernel's pass_configs switch that guard off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.cpu.tilelang_expr import Expressions, Unsupported, bits_of, kind_of, op_of, walk

# Statements that only order threads, or only advise the GPU compiler: nothing to do when one thread does everything.
_ORDERING = {"tvm_storage_sync", "sync_warp", "threadfence", "threadfence_block", "fence_proxy_async", "sync_grid"}
_ADVICE = {"no_set_max_nreg", "set_max_nreg", "annotate_producer_reg_dealloc", "annotate_consumer_reg_alloc"}
_TILE_SCOPES = ("shared", "shared.dyn", "local.fragment")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One argument of the kernel. `dtype` as torch spells it; `rank` 0 for a scalar."""

    name: str
    dtype: str
    rank: int


@dataclasses.dataclass(frozen=True)
class Program:
    """C++ text with `extern "C" int tile_run(void** data, const int64_t* values, const double* reals, char* message)`.

    `values` holds the shapes of the tensors and the integer scalars in the parameters' order, `reals` the float
    scalars. `shared_bytes`: the most shared memory that is in use at one time.
    """

    text: str
    parameters: tuple[Parameter, ...]
    shared_bytes: int


def emit(func: Any, pass_configs: Mapping[str, Any] | None = None) -> Program:
    """C++ for a `tilelang` PrimFunc. Raises Unsupported."""
    return _Emitter(func, pass_configs or {}).program()


def _shared_peak(block: Any) -> int:
    """Bytes of shared memory in use at one time: a tile is live from its first to its last top-level statement."""
    size: dict[Any, int] = {}
    for buffer in block.alloc_buffers:
        if str(buffer.scope()).startswith("shared"):
            count = 1
            for extent in buffer.shape:
                count *= int(extent)
            size[buffer.data] = count * max(1, bits_of(str(buffer.dtype)) // 8)
    body = block.body
    while kind_of(body) in ("AttrStmt", "SBlockRealize", "SBlock"):
        body = body.block if kind_of(body) == "SBlockRealize" else body.body
    live: list[set[Any]] = []
    for statement in body.seq if kind_of(body) == "SeqStmt" else [body]:
        live.append({node.buffer.data for node in walk(statement) if kind_of(node) in ("BufferLoad", "BufferStore")})
    peak = 0
    for step in range(len(live)):
        now = [b for b in size if any(b in s for s in live[: step + 1]) and any(b in s for s in live[step:])]
        peak = max(peak, sum(size[b] for b in now))
    return peak


class _Emitter(Expressions):
    def __init__(self, func: Any, pass_configs: Mapping[str, Any]) -> None:
        super().__init__()
        self.func = func
        self.guarded = not pass_configs.get("tl.disable_safe_memory_legalize", False)
        self.lines: list[str] = []
        self.depth = 1
        self.threads = [1, 1, 1]
        self.parallel = 0  # nesting of T.Parallel
        self.shared_bytes = 0

    # ---- text -------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(text + " {")
        self.depth += 1

    def close(self, count: int = 1) -> None:
        for _ in range(count):
            self.depth -= 1
            self.line("}")

    # ---- the whole function -----------------------------------------------------------------------------------------

    def program(self) -> Program:
        parameters: list[Parameter] = []
        checks: list[tuple[str, int, Any, str]] = []
        values = reals = tensors = 0
        for param in self.func.params:
            buffer = self.func.buffer_map.get(param) if hasattr(self.func.buffer_map, "get") else None
            if buffer is None:
                ctype = self.ctype(param.dtype)
                parameters.append(Parameter(str(param.name), str(param.dtype), 0))
                name = self.declare(param)
                if str(param.dtype).startswith("float"):
                    self.line(f"const {ctype} {name} = static_cast<{ctype}>(reals[{reals}]);")
                    reals += 1
                else:
                    self.line(f"const {ctype} {name} = static_cast<{ctype}>(values[{values}]);")
                    values += 1
                continue
            rank, ctype, label = len(buffer.shape), self.ctype(buffer.dtype), str(buffer.name)
            parameters.append(Parameter(label, str(buffer.dtype), rank))
            name = self.buffers[buffer] = self.unique(label)
            sizes = ", ".join(f"values[{values + d}]" for d in range(rank))
            self.line(
                f'const Buffer<{ctype}, {rank}> {name}{{static_cast<{ctype}*>(data[{tensors}]), "{label}", true, '
                f"{{{sizes}}}}};"
            )
            for axis, extent in enumerate(buffer.shape):
                if kind_of(extent) == "Var" and extent not in self.names:
                    var = self.declare(extent)
                    ctype = self.ctype(extent.dtype)
                    self.line(f"const {ctype} {var} = static_cast<{ctype}>(values[{values + axis}]);")
                else:
                    checks.append((label, axis, extent, f"values[{values + axis}]"))
            tensors += 1
            values += rank
        for label, axis, extent, found in checks:
            self.line(f'tile::expect_dim("{label}", {axis}, {self.expr(extent)}, {found});')
        self.statement(self.func.body)
        text = "\n".join(
            [
                "using namespace tile;",
                'extern "C" int tile_run(void** data, const int64_t* values, const double* reals, char* message) try {',
                *self.lines,
                "  return OK;",
                "} catch (const Fault& fault) {",
                "  std::strcpy(message, fault.text);",
                "  return fault.kind;",
                "}",
                "",
            ]
        )
        return Program(text, tuple(parameters), self.shared_bytes)

    # ---- statements -------------------------------------------------------------------------------------------------

    def statement(self, node: Any) -> None:
        kind = kind_of(node)
        if self._runs_per_thread(node):
            self._per_thread(node)
            return
        handler = getattr(self, f"_stmt_{kind.lower()}", None)
        if handler is None:
            raise Unsupported(f"a {kind} statement is not supported on the CPU")
        handler(node)

    def _stmt_seqstmt(self, node: Any) -> None:
        for child in node.seq:
            self.statement(child)

    def _stmt_sblockrealize(self, node: Any) -> None:
        self._stmt_sblock(node.block)

    def _stmt_sblock(self, node: Any) -> None:
        launch = node.annotations.get("tl.launch_threads") if node.annotations else None
        if launch is not None:
            self.threads = [int(n) for n in launch]
        self.shared_bytes = max(self.shared_bytes, _shared_peak(node))
        for buffer in node.alloc_buffers:
            try:
                shape = [int(extent) for extent in buffer.shape]
            except TypeError:
                raise Unsupported(f"tile {buffer.name} has a shape that is only known at run time") from None
            ctype, count = self.ctype(buffer.dtype), 1
            for extent in shape:
                count *= extent
            name = self.buffers[buffer] = self.unique(str(buffer.name))
            sizes = ", ".join(map(str, shape))
            self.line(f"alignas(64) static {ctype} {name}data[{count}];")
            self.line(f'const Buffer<{ctype}, {len(shape)}> {name}{{{name}data, "{buffer.name}", false, {{{sizes}}}}};')
            self.line(f"poison({name}data, {count});")
        self.statement(node.body)

    def _stmt_attrstmt(self, node: Any) -> None:
        self.statement(node.body)

    def _stmt_bind(self, node: Any) -> None:
        if kind_of(node.value) == "Call" and op_of(node.value) == "launch_thread_idx":
            self.thread_axes[node.var] = int(node.value.args[0])
            return
        self.line(f"const {self.ctype(node.var.dtype)} {self.declare(node.var)} = {self.expr(node.value)};")

    def _stmt_for(self, node: Any) -> None:
        tag = str(node.thread_binding.thread_tag) if node.thread_binding is not None else ""
        var, ctype = self.declare(node.loop_var), self.ctype(node.loop_var.dtype)
        low, extent = self.expr(node.min), self.expr(node.extent)
        if tag and not tag.startswith("blockIdx."):
            raise Unsupported(f"a loop bound to {tag} is not supported on the CPU")
        if tag:
            axis = tag[-1]
            self.line(f'const int64_t {var}end = grid("{axis}", {extent});')
            self.open(f"for ({ctype} {var} = 0; {var} < {var}end; ++{var})")
            self.line(f"block_index[{'xyz'.index(axis)}] = {var};")
            self.statement(node.body)
            self.close()
            return
        is_parallel = int(node.kind) == 1
        if is_parallel and self.threaded:
            raise Unsupported("T.Parallel inside a branch on the thread index deadlocks or races on a GPU")
        step = self.expr(node.step) if getattr(node, "step", None) is not None else "1"
        self.line(f"const {ctype} {var}low = {low}, {var}end = {var}low + {extent};")
        self.open(f"for ({ctype} {var} = {var}low; {var} < {var}end; {var} += {step})")
        self.parallel += is_parallel
        self.statement(node.body)
        self.parallel -= is_parallel
        self.close()

    def _stmt_while(self, node: Any) -> None:
        self.open(f"while ({self.expr(node.condition)})")
        self.statement(node.body)
        self.close()

    def _stmt_ifthenelse(self, node: Any) -> None:
        self.open(f"if ({self.expr(node.condition)})")
        self.statement(node.then_case)
        self.close()
        if node.else_case is not None:
            self.open("else")
            self.statement(node.else_case)
            self.close()

    def _stmt_bufferstore(self, node: Any) -> None:
        buffer, scope = node.buffer, str(node.buffer.scope())
        if self.threaded and scope.startswith("local"):
            raise Unsupported(
                f"{buffer.name} would hold another value in every thread; pass it on through shared memory instead"
            )
        by_all = self.parallel == 0 and not self.threaded and not scope.startswith("local")
        if by_all and any(
            kind_of(n) == "BufferLoad" and n.buffer.same_as(buffer) and str(n.indices) == str(node.indices)
            for n in walk(node.value)
        ):
            raise Unsupported(
                f"every thread of the block updates {buffer.name} in place, which is a race on a GPU; "
                "do it in T.Parallel or in one thread"
            )
        ctype = self.ctype(buffer.dtype)
        self.line(f"{self._access(node, 'put')} = {ctype}({self.expr(node.value)});")

    def _stmt_evaluate(self, node: Any) -> None:
        call = node.value
        if kind_of(call) != "Call":
            return
        op = op_of(call)
        if op in _ADVICE or (op in _ORDERING and not self.threaded):
            return
        if op in _ORDERING:
            raise Unsupported(f"{op} inside a branch on the thread index deadlocks on a GPU")
        if op == "break_loop":
            self.line("break;")
        elif op == "continue_loop":
            self.line("continue;")
        elif op.startswith("tileop."):
            if self.threaded:
                raise Unsupported(
                    f"T.{op[7:]} inside a branch on the thread index: all threads of a block must take part"
                )
            handler = getattr(self, f"_tile_{op[7:]}", None)
            if handler is None:
                raise Unsupported(f"T.{op[7:]} is not supported on the CPU")
            handler(call)
        else:
            self.line(f"(void)({self.expr(call)});")

    # ---- what each thread does by itself ----------------------------------------------------------------------------

    def _runs_per_thread(self, node: Any) -> bool:
        """A branch on the thread index, or a leaf that every thread of the block executes with an effect of its own."""
        if self.threaded or self.parallel:
            return False
        kind = kind_of(node)
        if kind == "IfThenElse":
            return any(n in self.thread_axes for n in walk(node.condition) if kind_of(n) == "Var")
        if kind not in ("BufferStore", "Evaluate", "Bind") or (kind == "Bind" and node.var in self.thread_axes):
            return False
        for n in walk(node):
            if (kind_of(n) == "Var" and n in self.thread_axes) or (
                kind_of(n) == "Call" and op_of(n).startswith("atomic_")
            ):
                return True
        return False

    def _per_thread(self, node: Any) -> None:
        if kind_of(node) == "Bind":
            raise Unsupported(f"{node.var.name} would hold another value in every thread, which cannot run on the CPU")
        self.threaded = True
        for axis, extent in enumerate(self.threads):
            self.open(f"for (int32_t thread{axis} = 0; thread{axis} < {extent}; ++thread{axis})")
        for var, axis in self.thread_axes.items():
            self.names[var] = f"thread{axis}"
        self.statement(node)
        self.close(3)
        self.threaded = False

    # ---- tile operators ---------------------------------------------------------------------------------------------

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
