"""Stands for the workers in tests of the command line (see the fixtures `fake` and `gpu`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.devices import Device
from harness.runner import Job
from harness.verdict import CaseResult, Verdict

H200 = Device("cuda", "cuda", "NVIDIA H200", "sm90")


def passed(job: Job, case: int) -> CaseResult:
    return CaseResult(
        job.task, job.language, job.variant, job.suite, case, f"label {case}", Verdict.PASS, Verdict.PASS, margin=0.25
    )


class FakeRunner:
    """Stands for runner.run_jobs: answers each job with `answer`, remembers what it was given."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.parallel = 0
        self.answer: Callable[[Job], list[CaseResult]] = lambda job: [passed(job, case) for case in job.cases or [1, 2]]

    def __call__(
        self, jobs: Sequence[Job], on_result: Callable[[CaseResult], None], parallel: int = 1
    ) -> list[CaseResult]:
        self.jobs, self.parallel = list(jobs), parallel
        results = [result for job in jobs for result in self.answer(job)]
        for result in results:
            on_result(result)
        return results
