"""The process that runs foreign code: one task, language and suite, case after case.

`python -m harness.worker --fd N` reads one JSON object from stdin ({"job", "cases", "token"}) and reports over the
private socket N, one JSON object a line, each with the token:

    {"event": "phase", "case": i, "phase": name, "label": text}    case 0: before the first case
    {"event": "count", "n": cases in the package}
    {"event": "result", "record": CaseResult.to_json()}            the parent answers with one byte
    {"event": "broken"}                                            the device is lost; the process ends
    {"event": "done"}

Whatever is printed goes to stdout and stderr, which the parent captures. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import fcntl
import json
import os
import resource
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from harness.faults import PackageError, cannot_write, is_device_fault, is_out_of_memory
from harness.runner import Job
from harness.verdict import CaseResult, KernelFault, KitError, Verdict

if TYPE_CHECKING:
    from harness.devices import Device

# Bound now, before any foreign code can replace them.
_write, _read, _dumps, _getpid, _exit = os.write, os.read, json.dumps, os.getpid, os._exit
_libc = ctypes.CDLL(None)
_FRAMES_SHOWN = 3
_PR_SET_PDEATHSIG = 1


class Channel:
    """The private way to the parent. Lines of JSON out, one byte back for each result."""

    def __init__(self, fd: int, token: str) -> None:
        # A high, unguessed number, closed on exec: hard to hit by a stray close(3) or write(4), lost to child programs.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        lowest = min(limit, 1024) // 2
        self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest + secrets.randbelow(max(lowest // 2, 1)))
        os.close(fd)
        self._token = token
        self._pid = _getpid()

    def send(self, event: str, **fields: Any) -> None:
        """One message; whatever was printed before it is flushed first. OSError when the channel was closed."""
        if _getpid() != self._pid:
            _exit(70)  # a submission forked, and its child came back here: it must not report in our name
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # the submission closed or replaced it
                stream.flush()
        _libc.fflush(None)
        line = _dumps({"token": self._token, "event": event, **fields})
        data = f"\n{line}\n".encode()  # the leading newline ends whatever garbage came before
        while data:
            data = data[_write(self._fd, data) :]

    def result(self, result: CaseResult) -> None:
        """Report a case, and wait until the parent has taken what was printed up to here."""
        self.send("result", record=result.to_json())
        if not _read(self._fd, 1):
            _exit(0)  # the parent is gone


class Session(Protocol):
    """What `serve` drives. The real one is JudgeSession; tests have cheaper ones."""

    label: str  # of the current case

    def count(self) -> int:
        """The number of cases in the package."""

    def load(self) -> None:
        """Load the submission."""

    def run(self, case_id: int, phase: Callable[[str], None]) -> CaseResult:
        """Run one case; `phase` is told where it is."""

    def lost(self) -> bool:
        """True when the device no longer answers, as after an illegal access: this process can then do no more."""


class JudgeSession:
    """A judge package, a submission and a task's contract, as the Job names them."""

    def __init__(self, job: Job) -> None:
        # The harness's own modules bind their clocks and comparisons before any foreign code is loaded.
        from harness import catalog, devices, judge
        from harness.contract import load_contract
        from harness.package import load_package

        self._job, self._judge = job, judge
        self.label = ""
        self._device = devices.pick(job.device)
        self._contract = load_contract(catalog.reference_path(job.task))
        self._package = load_package(Path(job.config))

    def count(self) -> int:
        return self._package.count()

    def load(self) -> None:
        from harness import gate, languages, tamper, timing

        job, contract = self._job, self._contract
        if job.settings.get("lint", True):
            gate.admit(Path(job.submission), job.language)
        self._timer = timing.pair
        if "bench" in job.settings:
            from harness.bench import trial

            self._timer = trial.timer(job.settings["bench"], self._device.kind)
        elif self._device.is_gpu:
            timing.calibrate()  # while nobody else can have a hand in it
        tamper.snapshot()
        settings = {**job.settings, "outputs": contract.outputs}
        self._submission = languages.load(
            job.language, Path(job.submission), contract.arguments, self._device, job.variant, settings
        )

    def run(self, case_id: int, phase: Callable[[str], None]) -> CaseResult:
        case = self._package.case(case_id)
        self.label = case.label
        repeat = int(self._job.settings.get("repeat", 1))
        margins: list[float] = []
        first: CaseResult | None = None
        for again in range(repeat):
            result = self._judge.run_case(
                self._job,
                self._package,
                case,
                self._submission,
                self._contract,
                self._device,
                phase,
                again,
                self._timer,
            )
            first = first or result
            margins.append(result.margin or 0.0)
            if not result.ok:
                break
        if repeat > 1:
            if first is not None and result.ok:  # only the first was timed
                result.ours_ms, result.baseline_ms = first.ours_ms, first.baseline_ms
                result.peer, result.score = first.peer, first.score
            result.margin = max(margins)
            result.notes.append(f"{len(margins) - (not result.ok)} of {repeat} repetitions passed, each on other data")
        return result

    def lost(self) -> bool:
        return is_lost(self._device)


def is_lost(device: Device) -> bool:
    """True when a device no longer answers this process."""
    if not device.is_gpu:
        return False
    import torch

    try:
        torch.cuda.synchronize()
        torch.ones(1, device=device.torch_name).item()
    except Exception as error:
        return not is_out_of_memory(error)
    return False


def explain(error: BaseException, phase: str, submission: Path) -> tuple[Verdict, str]:
    """The verdict for an exception that ended a case or a load, and one sentence.

    An exception of the submission is shown with the last lines of its own file that led to it. One that touches no line
    of it and is no fault of the device is ours: its traceback goes to stderr as well.
    """
    if isinstance(error, KernelFault):
        return error.verdict, error.message
    if isinstance(error, PackageError):
        return Verdict.PACKAGE_ERROR, str(error)
    if isinstance(error, KitError):
        return Verdict.SKIPPED, str(error)
    text = f"{type(error).__name__}: {_one_line(error)}" if str(error) else type(error).__name__
    if is_out_of_memory(error):
        return Verdict.OUT_OF_MEMORY, f"out of memory in phase {phase}: {text}"
    own = str(submission.resolve())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    where = ", ".join(f"{submission.name}:{frame.lineno} ({frame.name})" for frame in frames[-_FRAMES_SHOWN:])
    if isinstance(error, SystemExit):
        text = f"it called exit({error.code!r})"
    if where:
        return Verdict.RUNTIME_ERROR, f"{where}: {text}, in phase {phase}"
    if unwritable := cannot_write(error):
        return Verdict.RUNTIME_ERROR, f"in phase {phase}: {unwritable}"
    if not is_device_fault(error):
        traceback.print_exception(error)
    return Verdict.RUNTIME_ERROR, f"{text}, in phase {phase}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-195:]}"


def serve(channel: Channel, job: Job, cases: Sequence[int] | None, open_session: Callable[[Job], Session]) -> None:
    """Run `cases` (None: all) and report each. Returns when all are reported or the device is lost."""
    submission = Path(job.submission)

    def failed(case_id: int, error: BaseException, phase: str, label: str = "") -> CaseResult:
        verdict, detail = explain(error, phase, submission)
        return job.result(case_id, verdict, detail, label)

    phase = "package"
    try:
        channel.send("phase", case=0, phase=phase, label="")
        session = open_session(job)
        count = session.count()
        channel.send("count", n=count)
        # The parent says what is to be said of cases that there are not.
        cases = [case for case in range(1, count + 1) if cases is None or case in cases]
        if not cases:
            return
        phase = "load"
        channel.send("phase", case=0, phase=phase, label="")
        session.load()
    except BaseException as error:
        # Not the channel's own OSError: then this report fails too, and the parent sees a process without results.
        for case_id in cases or [0]:
            channel.result(failed(case_id, error, phase))
        return
    for case_id in cases:
        now = "generate"

        def enter(name: str, case_id: int = case_id) -> None:
            nonlocal now
            now = name
            channel.send("phase", case=case_id, phase=name, label=session.label)

        session.label = ""
        try:
            enter(now)
            result = session.run(case_id, enter)
        except BaseException as error:
            result = failed(case_id, error, now, session.label)
        channel.result(result)
        if session.lost():
            channel.send("broken")
            return


def main(argv: Sequence[str] | None = None, open_session: Callable[[Job], Session] = JudgeSession) -> int:
    """Entry point. Returns 0 when everything could be reported, whatever the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m harness.worker")
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args(argv)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if the parent is killed outright, so are we
    faulthandler.enable()
    envelope = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    channel = Channel(options.fd, envelope["token"])
    serve(channel, Job(**envelope["job"]), envelope["cases"], open_session)
    channel.send("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
