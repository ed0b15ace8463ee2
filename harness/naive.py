"""A worker that judges as a plain judge does: a few calls on the same data, the baseline, one look by the check.

`python -m harness.naive --fd N`, in place of harness.worker, for a job whose settings say "naive". Nothing is guarded,
poisoned, repeated or compared with a reference; inputs that the package declares are shared with the baseline. It
exists to say which wrong kernels the published checks let pass (docs/mutants.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from harness.faults import BaselineUnavailable
from harness.runner import Job
from harness.verdict import CaseResult, Verdict
from harness.worker import JudgeSession, main

CALLS = 3  # warm-up and timed calls before the one look


class NaiveSession(JudgeSession):
    """The plain judge. Both verdicts of a result are what the check says."""

    def run(self, case_id: int, phase: Callable[[str], None]) -> CaseResult:
        package, contract = self._package, self._contract
        case = package.case(case_id)
        self.label = case.label
        phase("generate")
        args = package.generate(case, self._device.torch_name)
        phase("run")
        target = package.own(args)
        for _ in range(CALLS):
            self._submission.run(target)
        phase("baseline")
        try:
            expected = package.run_baseline(case, args)
        except BaselineUnavailable:
            expected = list(args)
            for index, value in zip(contract.output_indices, contract.reference(*args).values(), strict=True):
                expected[index] = value.to(args[index].dtype)
        phase("check")
        good, said = package.check(case, args, target, expected)
        return self._job.result(case_id, Verdict.PASS if good else Verdict.WRONG_ANSWER, said, case.label)


def open_session(job: Job) -> JudgeSession:
    """The plain judge for a job that asks for it, the kit's own for any other."""
    return NaiveSession(job) if job.settings.get("naive") else JudgeSession(job)


if __name__ == "__main__":
    sys.exit(main(open_session=open_session))
