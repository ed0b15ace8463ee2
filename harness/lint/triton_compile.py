"""Compile recorded Triton kernels offline and say what they need.

Runs without a GPU and without torch, under Triton 3.0 as well as under today's: the request (harness/lint/compat.py)
names the file, the targets and the specialisations that harness/lint/triton_record.py noted.

    python -m harness.lint.triton_compile request.json answer.json
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import source

# Target name -> (back end, architecture, lanes of a warp).
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "gfx90a": ("hip", "gfx90a", 64),
}


class Known(Exception):
    """Raised out of a compilation by `intermediate`, whose caller knows the result already."""


def compile_kernel(
    function: Any,
    specialisation: dict[str, Any],
    target: str,
    assemble: bool = True,
    intermediate: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One specialisation for one target: {"shared", "registers", "spills", "async"} or {"error": one line}.

    shared: bytes per program; registers: 32-bit, per thread; spills: bytes per thread; async: asynchronous copies. A
    number that the compiler does not give is left out. `assemble` False stops before ptxas. `intermediate` gets the
    text after the first stage; a Known that it raises passes through.
    """
    compiler: Any = importlib.import_module("triton.compiler")
    target_class: Any = importlib.import_module("triton.backends.compiler").GPUTarget
    chosen = target_class(*TARGETS[target])
    backend: Any = importlib.import_module("triton.compiler.compiler").make_backend(chosen)
    try:
        with _stages(type(backend), assemble, intermediate):
            compiled = compiler.compile(
                _source(compiler, function, specialisation), target=chosen, options=specialisation["options"]
            )
    except Known:
        raise
    except Exception as error:
        return {"error": _reason(error)}
    result: dict[str, Any] = {"shared": compiled.metadata.shared}
    if "ptx" in compiled.asm:
        result["async"] = len(re.findall(r"\bcp\.async\.(?!commit|wait)", compiled.asm["ptx"]))
    if "amdgcn" in compiled.asm:
        pattern = r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count): *(\d+)"
        numbers = {name: int(value) for name, value in re.findall(pattern, compiled.asm["amdgcn"])}
        result["registers"] = numbers["vgpr_count"]
        result["spills"] = 4 * (numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"])
    return result


@contextlib.contextmanager
def _stages(backend: Any, assemble: bool, intermediate: Callable[[str], None]) -> Iterator[None]:
    """Within the block the back end shows its first stage's result, and leaves ptxas out where nobody asks for it."""
    original = backend.add_stages

    def add_stages(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        original(self, stages, *rest)
        first = stages["ttir"]

        def ttir(module: Any, metadata: Any) -> Any:
            result = first(module, metadata)
            intermediate(str(result))
            return result

        stages["ttir"] = ttir
        if "cubin" in stages and not assemble:
            stages["cubin"] = lambda ptx, metadata: b""

    backend.add_stages = add_stages
    try:
        yield
    finally:
        backend.add_stages = original


def _source(compiler: Any, function: Any, specialisation: dict[str, Any]) -> Any:
    """The ASTSource of a specialisation, in the form that this Triton's constructor takes."""
    arguments = specialisation["arguments"]
    divisible = [i for i, a in enumerate(arguments) if a.get("divisible")]
    if "constexprs" in inspect.signature(compiler.ASTSource.__init__).parameters:
        signature = {a["name"]: "constexpr" if "value" in a else a["type"] for a in arguments}
        constants = {a["name"]: _constant(a["value"]) for a in arguments if "value" in a}
        attributes: Any = {(i,): [["tt.divisibility", 16]] for i in divisible}
        return compiler.ASTSource(function, signature, constants, attributes)
    # Triton 3.0: arguments go by place, an integer that is 1 keeps its type, and attributes have a class of their own.
    described: Any = importlib.import_module("triton.compiler.compiler").AttrsDescriptor
    places = {i: a["type"] for i, a in enumerate(arguments) if "type" in a}
    ones = tuple(i for i, a in enumerate(arguments) if "type" in a and "value" in a)
    by_place = {i: _constant(a["value"]) for i, a in enumerate(arguments) if "value" in a}
    return compiler.ASTSource(function, places, by_place, described(tuple(divisible), ones))


def _constant(value: Any) -> Any:
    """A constexpr as the request spells it: JSON's own types, and {"dtype": name} for a type of the language."""
    if isinstance(value, dict):
        language: Any = importlib.import_module("triton.language")
        by_name = {str(kind): kind for kind in vars(language).values() if isinstance(kind, language.dtype)}
        return by_name[value["dtype"]]
    return value


def _reason(error: BaseException) -> str:
    """The innermost cause of a compiler's exception in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = getattr(error, "error_message", None) or (lines[-1] if lines else "")
    return f"{type(error).__name__}: {text}"[:300]


def main() -> int:
    """Read the request, write {"version", "results": one per specialisation and its target}."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if importlib.util.find_spec("torch") is None:
        # A submission only names torch where it is imported, so an empty stand-in will do.
        sys.modules["torch"] = types.ModuleType("torch")
    module = source.load_module(Path(request["file"]), "submission")
    results = [
        compile_kernel(getattr(module, s["kernel"]), s, target)
        for target, s in zip(request["targets"], request["specialisations"], strict=True)
    ]
    answer = {"version": importlib.import_module("triton").__version__, "results": results}
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
