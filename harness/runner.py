"""The side that never runs foreign code: gives each Job to worker processes and collects their results.

A worker is replaced after a crash, a hang, a flood of output or a device fault, and the remaining cases still run.
Imports no torch.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.catalog import shown_path
from harness.process import Interrupted, Worker
from harness.text import ranges
from harness.verdict import CaseResult, ExitCode, KitError, Verdict

WORKER = (sys.executable, "-m", "harness.worker")


@dataclasses.dataclass
class Job:
    """One submission against one package. `deadline_s`: seconds for one case, compiling not counted.

    `settings` go to the language's loader; "startup_s" among them replaces STARTUP_S.
    """

    task: str
    language: str
    variant: str
    suite: str
    config: str
    submission: str
    cases: list[int] | None  # 1-based; None: all
    device: str  # a kind: cpu, cuda or maca
    deadline_s: float
    settings: dict[str, Any]
    required: bool

    def result(self, case: int, verdict: Verdict, detail: str, label: str = "") -> CaseResult:
        """A record with the same word for both verdicts. Case 0 stands for a job whose cases are not known."""
        return CaseResult(
            self.task,
            self.language,
            self.variant,
            self.suite,
            case,
            label,
            judge=verdict,
            strict=verdict,
            detail=detail,
            required=self.required,
        )


def _run_job(
    job: Job,
    deliver: Callable[[CaseResult], None],
    stop: threading.Event,
    command: Sequence[str],
    parallel: int,
    notice: Callable[[Worker], None],
    absent: Callable[[list[int], int], None],
) -> None:
    """All cases of one job that there are, each reported exactly once, by as many workers as it takes.

    `absent` is told of those that there are not, and how many there are, before any case runs. Every worker reports at
    least one case or is the last one, so this ends.
    """
    wanted = job.cases
    reported: set[int] = set()

    def once(result: CaseResult) -> None:
        if result.case not in reported and (wanted is None or result.case in wanted):
            reported.add(result.case)
            deliver(result)

    def noticed(worker: Worker) -> None:
        nonlocal wanted
        count = worker.count
        if wanted is not None and count is not None and max(wanted, default=0) > count:
            beyond, wanted = [case for case in wanted if case > count], [case for case in wanted if case <= count]
            absent(beyond, count)
        notice(worker)

    remaining = wanted
    while True:
        worker = Worker(job, remaining, command, parallel)
        worker.notice = noticed
        failure = worker.watch(once, stop)
        if wanted is None and worker.count is not None:
            wanted = list(range(1, worker.count + 1))
        remaining = [case for case in ([0] if wanted is None else wanted) if case not in reported]
        if not remaining:
            return
        verdict, detail = failure or (Verdict.RUNTIME_ERROR, "the worker ended before this case")
        if worker.phase == "package" and verdict is Verdict.RUNTIME_ERROR:  # nothing of the submission was loaded yet
            verdict, detail = Verdict.PACKAGE_ERROR, f"{shown_path(job.config)}: {detail}"
        if worker.case:
            worker.hand_over(job.result(worker.case, verdict, detail, worker.label), once)
            remaining = [case for case in remaining if case not in reported]
            if not remaining:
                return
        elif not worker.delivered:  # it did not get to a first case, so another one would not either
            for case in remaining:
                worker.hand_over(job.result(case, verdict, detail), once)
            return


def _no_such_case(cases: Sequence[int], there: str) -> KitError:
    return KitError(f"CASES={ranges(cases)}: no such case; {there}.", ExitCode.MISSING_FILE)


def run_jobs(
    jobs: Sequence[Job],
    on_result: Callable[[CaseResult], None],
    parallel: int = 1,
    command: Sequence[str] = WORKER,
    notice: Callable[[Worker], None] = lambda worker: None,
) -> list[CaseResult]:
    """Run the jobs, `parallel` at a time, and give their results in the order of jobs and cases.

    `on_result` is called in the calling thread, in order of arrival. Whatever ends the call, an interrupt from the
    keyboard or an error of `on_result` included, no worker process outlives it. `command` starts a worker. `notice` is
    called in other threads with a worker whose count of cases, case or phase has changed.

    A job that names cases which its package does not have gets one SKIPPED record for them, the last of all. KitError
    (MISSING_FILE) when no job has them: before any case runs where all jobs share one package, else at the end.
    """
    inbox: queue.Queue[tuple[int, CaseResult] | BaseException | None] = queue.Queue()
    stop = threading.Event()
    waiting = collections.deque(enumerate(jobs))
    beyond: dict[int, tuple[list[int], int]] = {}  # by job: cases that its package does not have, how many it has
    alone = len({job.config for job in jobs}) == 1

    def absent(number: int, cases: list[int], count: int) -> None:
        if alone:
            raise _no_such_case(cases, f"{shown_path(jobs[number].config)} has cases 1 to {count}")
        beyond[number] = cases, count

    def put(number: int, result: CaseResult) -> None:
        inbox.put((number, result))

    def work() -> None:
        try:
            while waiting and not stop.is_set():
                try:
                    number, job = waiting.popleft()
                except IndexError:
                    return
                deliver, lacking = functools.partial(put, number), functools.partial(absent, number)
                _run_job(job, deliver, stop, command, parallel, notice, lacking)
        except Interrupted:
            pass
        except BaseException as error:
            inbox.put(error)
        finally:
            inbox.put(None)

    threads = [threading.Thread(target=work) for _ in range(max(1, min(parallel, len(jobs))))]
    results: list[tuple[int, CaseResult]] = []

    def receive(number: int, result: CaseResult) -> None:
        results.append((number, result))
        on_result(result)

    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            item = inbox.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                receive(*item)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    for number, (cases, count) in sorted(beyond.items()):
        detail = f"there is no case {ranges(cases)}: {Path(jobs[number].config).name} has cases 1 to {count}."
        receive(number, jobs[number].result(cases[0], Verdict.SKIPPED, detail))
    nowhere = set.intersection(*(set(cases) for cases, _ in beyond.values())) if len(beyond) == len(jobs) > 0 else None
    if nowhere:
        raise _no_such_case(sorted(nowhere), "none of these suites has it")
    results.sort(key=lambda item: (item[0], item[1].case))
    return [result for _, result in results]
