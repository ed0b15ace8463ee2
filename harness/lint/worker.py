"""What needs torch, in a process of its own: the kinds of run_kernel's parameters, and what its kernels need.

python -m harness.lint.worker contracts answer.json task ...
python -m harness.lint.worker usage answer.json task language file
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from harness import catalog
from harness.contract import load_contract
from harness.languages.python_source import describe
from harness.package import load_package
from harness.verdict import KernelFault, KitError

_MODULES = {
    "cuda": "harness.lint.cuda_usage",
    "triton": "harness.lint.triton_record",
    "tilelang": "harness.lint.tilelang_record",
}


def contracts(tasks: list[str]) -> dict[str, Any]:
    """By task: {"arguments", "scalars"}; a scalar is an argument that getTestCaseSize announces with the shape ()."""
    answer = {}
    for task in tasks:
        sizes = load_package(catalog.suite_path(task, "tiny")).case(1).sizes
        arguments = load_contract(catalog.reference_path(task)).arguments
        answer[task] = {"arguments": arguments, "scalars": [len(size) == 0 for size in sizes]}
    return answer


def usage(task: str, language: str, path: Path) -> dict[str, Any]:
    """{"rows", "notes", "fault"}: see harness/lint/resources.py. fault: why there are no rows, or ""."""
    arguments = load_contract(catalog.reference_path(task)).arguments
    notes: list[str] = []
    try:
        rows = importlib.import_module(_MODULES[language]).rows(task, path, arguments, notes)
        return {"rows": rows, "notes": notes, "fault": ""}
    except KernelFault as fault:
        return {"rows": [], "notes": notes, "fault": fault.message}
    except KitError:
        raise
    except Exception as error:  # run_kernel's own, for arguments that it must take
        return {"rows": [], "notes": notes, "fault": f"run_kernel raised {describe(error, path)}"}


def main() -> int:
    """Write the answer as JSON; a KitError becomes {"error", "code"}."""
    what, answer, *rest = sys.argv[1:]
    try:
        result = contracts(rest) if what == "contracts" else usage(rest[0], rest[1], Path(rest[2]))
    except KitError as error:
        result = {"error": str(error), "code": int(error.code)}
    Path(answer).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
