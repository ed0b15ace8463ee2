"""The process that times candidates against the current file, in place of harness.worker; and the one that asks a
package for its cases.

    python -m harness.tune.worker --fd N                the protocol of harness.worker; a "case" is a candidate's number
    python -m harness.tune.worker cases task suite      one JSON line: [[number, label, {argument: shape}], ...]

The job's submission is the current file. Its settings: "candidates", path by number; "on", the cases to time them on;
"budget_s" per pair; "tuning", the row that Python submissions are to run. A result's counts are {"ratios": {case:
[current / candidate, low, high, candidate ms, current ms]}}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import catalog
from harness.faults import is_out_of_memory
from harness.languages.python_source import describe
from harness.runner import Job
from harness.verdict import CaseResult, KernelFault, KitError, Verdict
from harness.worker import JudgeSession, main


class TuneSession(JudgeSession):
    """Each run(number, ...) times one candidate on all cases of the job, in turn with the current file."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        from harness.bench import measure  # as the others: before any foreign code is loaded

        self._measure = measure
        self._paths = {int(number): Path(path) for number, path in job.settings["candidates"].items()}
        self._held: tuple[int, Any] | None = None  # the last case's buffers: one case at a time, for their size

    def count(self) -> int:
        return max(self._paths)

    def run(self, case_id: int, phase: Callable[[str], None]) -> CaseResult:
        path, job = self._paths[case_id], self._job
        result = job.result(case_id, Verdict.PASS, "")
        ratios: dict[str, Any] = {}
        try:
            phase("compile")
            candidate = self._load(path)
            for number in job.settings["on"]:
                ratios[str(number)] = self._pair(candidate, path, number, phase, result)
        except KernelFault as fault:
            result = job.result(case_id, fault.verdict, fault.message)
        result.counts = {"ratios": ratios}
        return result

    def _load(self, path: Path) -> Any:
        from harness import languages

        job, contract = self._job, self._contract
        return languages.load(job.language, path, contract.arguments, self._device, job.variant, job.settings)

    def _buffers(self, number: int, phase: Callable[[str], None]) -> Any:
        from harness import guard, roles

        if self._held is None or self._held[0] != number:
            self._held = None
            phase("generate")
            case = self._package.case(number)
            args = self._package.generate(case, self._device.torch_name)
            names, kinds, _ = roles.find_roles(self._package, case, args, self._contract)
            exact = self._contract.exact_allocations and self._job.language == "cuda"
            self._held = (number, guard.Buffers(args, names, kinds, exact))
        return self._held[1]

    def _pair(
        self, candidate: Any, path: Path, number: int, phase: Callable[[str], None], result: CaseResult
    ) -> list[float]:
        """Time a candidate and the current file on a case. KernelFault when the candidate cannot be timed."""
        from harness import guard, timing

        buffers = self._buffers(number, phase)
        args = buffers.arguments()

        def ours() -> None:
            try:
                candidate.run(args)
            except KernelFault:
                raise
            except Exception as error:
                verdict = Verdict.OUT_OF_MEMORY if is_out_of_memory(error) else Verdict.RUNTIME_ERROR
                raise KernelFault(verdict, f"case {number}: {describe(error, path)}") from error

        def holds() -> bool:
            return all(guard.differences(wanted[i], now) is None for i, now in buffers.outputs().items())

        phase("compile")  # Python's kernels compile at the first call
        self._submission.run(args)
        ours()
        timing.finish_device()
        wanted = buffers.snapshot()
        phase("time")
        hooks = timing.Hooks(before=lambda: buffers.repoison(0), holds=holds)
        pair = self._measure.time_pair(ours, lambda: self._submission.run(args), self._job.settings["budget_s"], hooks)
        result.notes += [note for note in pair.notes if note not in result.notes]
        if pair.wrong_calls:
            raise KernelFault(
                Verdict.NONDETERMINISTIC, f"case {number}: {pair.wrong_calls} timed calls gave another output"
            )
        if pair.ratio is None or pair.ratio_low is None or pair.ratio_high is None or pair.peer is None:
            raise KernelFault(Verdict.RUNTIME_ERROR, f"case {number}: not one kernel ran in the timed calls")
        return [pair.ratio, pair.ratio_low, pair.ratio_high, pair.ours.ms, pair.peer.ms]


def cases(task: str, suite: str) -> list[tuple[int, str, dict[str, list[int]]]]:
    """Number, label and the shapes of all cases of a suite, as the package announces them."""
    from harness.contract import load_contract
    from harness.package import load_package

    package = load_package(catalog.suite_path(task, suite))
    arguments = load_contract(catalog.reference_path(task)).arguments
    found = []
    for number in range(1, package.count() + 1):
        case = package.case(number)
        shapes = {name: list(size) for name, size in zip(arguments, case.sizes, strict=False) if size}
        found.append((number, case.label, shapes))
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["cases"]:
        try:
            print(json.dumps(cases(*sys.argv[2:])))
        except KitError as error:
            sys.exit(str(error))
    else:
        sys.exit(main(open_session=TuneSession))
