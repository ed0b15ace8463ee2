"""The process that computes and times the points of a grid: one library's call, or one submission, point after point.

Speaks the protocol of harness.worker, a point in the place of a case, so that a device fault costs one point. Of each
point the output is compared before anything is timed: its last sequence, where every offset is at its largest, against
the task's reference. A figure above what the device was seen to do is not believed.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import catalog, devices, faults, gate, languages, strict, timing
from harness.bench import calibration, grids, measure
from harness.contract import load_contract
from harness.guard import Finding
from harness.runner import Job
from harness.timing import Peaks
from harness.verdict import CaseResult, ExitCode, KitError, Verdict
from harness.worker import is_lost, main


class GridSession:
    """The points of one grid, as the Job names them: `suite` its api, `settings["library"]` the number of one of its
    libraries, or None for the submission."""

    def __init__(self, job: Job) -> None:
        self.label = ""
        self._job = job
        self._device = devices.pick(job.device)
        self._contract = load_contract(catalog.reference_path(job.task))
        self._grid = grids.find(job.task, job.settings["grid"], job.suite)
        number = job.settings["library"]
        self._library = None if number is None else self._grid.libraries[number]
        self._peaks = calibration.peaks(job.settings["calibration"])

    def count(self) -> int:
        return len(self._grid.points)

    def load(self) -> None:
        if self._device.is_gpu:
            timing.flush_buffer()  # now, so that no point runs out of memory over it
        if self._library is not None:
            module = self._library.module
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise KitError(
                    f"{module} is installed but cannot be imported ({error}).", ExitCode.ENVIRONMENT
                ) from error
            return
        job, path = self._job, Path(self._job.submission)
        if job.settings.get("lint", True):
            gate.admit(path, job.language)
        settings = {**job.settings, "outputs": self._contract.outputs}
        self._submission = languages.load(
            job.language, path, self._contract.arguments, self._device, job.variant, settings
        )

    def run(self, case_id: int, phase: Callable[[str], None]) -> CaseResult:
        job, point = self._job, self._grid.points[case_id - 1]
        self.label = self._grid.label(point)
        result = CaseResult(job.task, job.language, job.variant, job.suite, case_id, self.label)
        result.detail = self._grid.uncovered(point) if self._library is None else ""
        if result.detail:
            return result
        gc.collect()  # what the point before left behind, above all when it ran out of memory
        if self._device.is_gpu:
            torch.cuda.empty_cache()
        args = self._grid.build(point, self._device.torch_name)
        phase("compile")
        call = self._prepare(args)
        output = call()
        self._finish()
        phase("check")
        finding = self._compare(args, output, result.notes)
        if finding is None:
            phase("time")
            finding = self._time(call, self._contract.workload(*args), result)
        result.judge = result.strict = finding.verdict if finding else Verdict.PASS
        result.detail = finding.detail if finding else ""
        return result

    def lost(self) -> bool:
        return is_lost(self._device)

    def _finish(self) -> None:
        if self._device.is_gpu:
            timing.finish_device()

    def _prepare(self, args: list[Any]) -> Callable[[], Tensor]:
        if self._library is not None:
            planned: Callable[[], Tensor] = self._library.plan(args)
            return planned
        output: Tensor = args[self._contract.output_indices[0]]

        def call() -> Tensor:
            self._submission.run(args)
            return output

        return call

    def _compare(self, args: Sequence[Any], output: Tensor, notes: list[str]) -> Finding | None:
        """Hold the last sequence of the output against the reference."""
        index, name = self._contract.output_indices[0], self._contract.outputs[0]
        whole = list(args)
        whole[index] = output.view(args[index].shape)
        last = self._grid.last(whole)
        try:
            truth, honest = (compute(*last)[name] for compute in (self._contract.reference, self._contract.honest))
            return strict.compare(f"the last sequence's {name}", last[index], truth, honest).finding
        except Exception as error:
            if not faults.is_out_of_memory(error):
                raise
            notes.append("not compared with the reference, which needs more memory than there is")
            return None

    def _time(self, call: Callable[[], Tensor], workload: Mapping[str, Any], result: CaseResult) -> Finding | None:
        """Fill in what the record wants to know of a call that computes the right thing."""
        measured = measure.time_call(call, self._job.settings["time_budget_s"])
        result.notes += measured.notes
        if measured.ms <= 0:
            return Finding(Verdict.SUSPECT_TIME, "not one kernel ran in the timed calls")
        doubt = above_peak(measured.ms, workload, self._peaks)
        if doubt:
            return Finding(Verdict.SUSPECT_TIME, doubt)
        floor_ms, floor_by = timing.roofline_ms(workload, self._peaks)
        whose = "ours" if self._library is None else "peer"
        result.peer = "" if self._library is None else self._library.name
        result.figures = {
            f"{whose}_ms": measured.ms,
            f"{whose}_host_ms": measured.host_ms,
            f"{whose}_host_calls": measured.host_calls,
            f"{whose}_event_ms": measured.event_ms,
            "samples": measured.samples,
            "clock": measured.clock,
            "stopped": measured.stopped,
            "floor_ms": floor_ms,
            "floor_by": floor_by,
            "roofline_percent": 100 * floor_ms / measured.ms,
            "tflops": workload["flops"] / measured.ms / 1e9,
            "gb_s": workload["bytes"] / measured.ms / 1e6,
            "flags": [] if self._peaks.cold else ["warm cache"],
        }
        return None


def above_peak(ms: float, workload: Mapping[str, Any], peaks: Peaks) -> str:
    """Which rate of a time lies further above the device's peaks than calibration can err, in words; "" for none."""
    seconds, dtype = ms / 1e3, workload["dtype"]
    for unit, rate, peak in (
        ("TFLOPS", workload["flops"] / seconds / 1e12, peaks.ops_per_s[dtype] / 1e12),
        ("GB/s", workload["bytes"] / seconds / 1e9, peaks.bytes_per_s / 1e9),
    ):
        if rate > peak * timing.ALLOWANCE:
            return f"{ms:.4g} ms would be {rate:,.0f} {unit}, and this device was seen to do {peak:,.0f}"
    return ""


if __name__ == "__main__":
    sys.exit(main(open_session=GridSession))
