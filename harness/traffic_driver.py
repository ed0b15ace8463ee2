"""One case of one submission, called once for a profiler to count: `python -m harness.traffic_driver run request.json`.

The first call compiles and allocates and is not counted; the second stands between cudaProfilerStart and Stop. The
answer, {"label", "read" and "written": bytes that the case must move at least, "parts"}, goes to the file that the
request names. `cases PACKAGE` prints how many cases a package has.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from harness import catalog, devices, languages, timing
from harness.contract import load_contract
from harness.package import load_package


def main() -> int:
    """Count a package's cases, or read the request, run, write the answer."""
    what, path = sys.argv[1], Path(sys.argv[2])
    if what == "cases":
        print(json.dumps(load_package(path).count()))
        return 0
    request = json.loads(path.read_text(encoding="utf-8"))
    device = devices.pick(request["device"])
    contract = load_contract(catalog.reference_path(request["task"]))
    package = load_package(Path(request["config"]))
    case = package.case(request["case"])
    args = package.generate(case, device.torch_name)
    settings = {**request["settings"], "outputs": contract.outputs}
    kernel = languages.load(
        request["language"], Path(request["submission"]), contract.arguments, device, request["variant"], settings
    )
    profiler: Any = importlib.import_module("torch.cuda.profiler")
    kernel.run(args)
    if device.is_gpu:
        timing.finish_device()
        profiler.start()
    kernel.run(args)
    if device.is_gpu:
        timing.finish_device()
        profiler.stop()
    workload = contract.workload(*args)
    written = sum(args[index].numel() * args[index].element_size() for index in contract.output_indices)
    answer = {
        "label": case.label or contract.label(args),
        "read": workload["bytes"] - written,
        "written": written,
        "parts": workload.get("parts", {}),
    }
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
