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
from typing import Any

from harness.process import Interrupted, Worker
from harness.verdict import CaseResult, Verdict

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
) -> None:
    """All cases of one job, each reported exactly once, by as many workers as it takes.

    Every worker reports at least one case or is the last one, so this ends.
    """
    wanted = job.cases
    reported: set[int] = set()

    def once(result: CaseResult) -> None:
        if result.case not in reported and (wanted is None or result.case in wanted):
            reported.add(result.case)
            deliver(result)

    remaining = wanted
    while True:
        worker = Worker(job, remaining, command, parallel)
        worker.notice = notice
        failure = worker.watch(once, stop)
        if wanted is None and worker.count is not None:
            wanted = list(range(1, worker.count + 1))
        remaining = [case for case in wanted or [0] if case not in reported]
        if not remaining:
            return
        verdict, detail = failure or (Verdict.RUNTIME_ERROR, "the worker ended before this case")
        if worker.case:
            worker.hand_over(job.result(worker.case, verdict, detail, worker.label), once)
            remaining = [case for case in remaining if case not in reported]
            if not remaining:
                return
        elif not worker.delivered:  # it did not get to a first case, so another one would not either
            for case in remaining:
                worker.hand_over(job.result(case, verdict, detail), once)
            return


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
    """
    inbox: queue.Queue[tuple[int, CaseResult] | BaseException | None] = queue.Queue()
    stop = threading.Event()
    waiting = collections.deque(enumerate(jobs))

    def put(number: int, result: CaseResult) -> None:
        inbox.put((number, result))

    def work() -> None:
        try:
            while waiting and not stop.is_set():
                try:
                    number, job = waiting.popleft()
                except IndexError:
                    return
                _run_job(job, functools.partial(put, number), stop, command, parallel, notice)
        except Interrupted:
            pass
        except BaseException as error:
            inbox.put(error)
        finally:
            inbox.put(None)

    threads = [threading.Thread(target=work) for _ in range(max(1, min(parallel, len(jobs))))]
    results: list[tuple[int, CaseResult]] = []
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
                results.append(item)
                on_result(item[1])
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    results.sort(key=lambda item: (item[0], item[1].case))
    return [result for _, result in results]
