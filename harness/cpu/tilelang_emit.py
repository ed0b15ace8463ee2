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

from harness.cpu.tilelang_expr import Unsupported, bits_of, kind_of, op_of, walk
from harness.cpu.tilelang_ops import TileOperators

# Statements that only order threads, or only advise the GPU compiler: nothing to do when one thread does everything.
_ORDERING = {"tvm_storage_sync", "sync_warp", "threadfence", "threadfence_block", "fence_proxy_async", "sync_grid"}
_ADVICE = {"no_set_max_nreg", "set_max_nreg", "annotate_producer_reg_dealloc", "annotate_consumer_reg_alloc"}


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


class _Emitter(TileOperators):
    def __init__(self, func: Any, pass_configs: Mapping[str, Any]) -> None:
        super().__init__(guarded=not pass_configs.get("tl.disable_safe_memory_legalize", False))
        self.func = func
        self.threads = [1, 1, 1]
        self.parallel = 0  # nesting of T.Parallel
        self.shared_bytes = 0

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
