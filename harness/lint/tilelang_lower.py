"""Lower TileLang kernels offline and say what they need: without a GPU, under TileLang 0.1.10 as well as today's.

The request (harness/lint/compat.py) names the file, the targets and the builders' arguments that
harness/lint/tilelang_record.py noted.

    python -m harness.lint.tilelang_lower request.json answer.json
"""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ctokens, source

TARGETS: dict[str, dict[str, str]] = {
    "sm_80": {"kind": "cuda", "arch": "sm_80"},
    "sm_90": {"kind": "cuda", "arch": "sm_90"},
    "gfx942": {"kind": "hip", "mcpu": "gfx942"},
}
# Calls of asynchronous copies in lowered sources, as names begin: cp.async, TMA, and AMD's direct loads.
_ASYNC = ("cp_async_gs", "tma_load", "cp_async_bulk", "async_copy", "ptx_cp_async")
_BYTES = {"char": 1, "uchar": 1, "half": 2, "half_t": 2, "bfloat16_t": 2, "short": 2, "int": 4, "uint": 4, "float": 4}


def program(builder: Any, args: Sequence[Any], target: str) -> Any:
    """The tile program that a @tilelang.jit function makes of its arguments for a target."""
    with _target(target):
        return builder.get_tir(*args)


def _target(name: str) -> Any:
    return importlib.import_module("tvm.target").Target(TARGETS[name])


def lower(builder: Any, args: Sequence[Any], target: str) -> dict[str, Any]:
    """{"threads", "shared" bytes per block, "async" copies, "source"} of one kernel, or {"error": one line}."""
    tilelang: Any = importlib.import_module("tilelang")
    transform: Any = importlib.import_module("tvm").transform
    configs = {str(getattr(k, "value", k)): v for k, v in (getattr(builder, "pass_configs", None) or {}).items()}
    try:
        tile_program = program(builder, args, target)
        with transform.PassContext(opt_level=3, config=configs), _target(target):
            artifact = tilelang.lower(tile_program, target=_target(target))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]}
    text, threads, shared = str(artifact.kernel_source), 1, 0
    for function in artifact.device_mod.functions.values():
        attributes = dict(function.attrs.items())
        extents = dict(attributes.get("thread_extent", {}).items())
        threads = max(threads, math.prod(int(v) for k, v in extents.items() if str(k).startswith("threadIdx")))
        shared = max(shared, int(attributes.get("dyn_shared_memory_buf", 0)))
    return {
        "threads": threads,
        "shared": shared + static_shared(text),
        "async": sum(token.kind == "name" and token.text.startswith(_ASYNC) for token in ctokens.solid(text)),
        "source": text,
    }


def static_shared(text: str) -> int:
    """Bytes of the `__shared__` arrays of fixed size in a lowered source."""
    tokens, total = ctokens.solid(text), 0
    for at, token in enumerate(tokens):
        if token.text != "__shared__" or (at > 0 and tokens[at - 1].text == "extern"):
            continue
        end = next(i for i in range(at, len(tokens)) if tokens[i].text == ";")
        words = [t.text for t in tokens[at:end]]
        sizes = [int(n) for n in re.findall(r"\[(\d+)\]", "".join(words))]
        total += math.prod(sizes) * max((_BYTES.get(word, 0) for word in words), default=0)
    return total


def main() -> int:
    """Read the request, write {"version", "results": one per kernel and its target}, without the sources."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    module = source.load_module(Path(request["file"]), "submission")
    results = [
        lower(getattr(module, kernel["kernel"]), kernel["arguments"], target)
        for target, kernel in zip(request["targets"], request["specialisations"], strict=True)
    ]
    for result in results:
        result.pop("source", None)
    answer = {"version": importlib.import_module("tilelang").__version__, "results": results}
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
