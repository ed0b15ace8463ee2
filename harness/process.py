"""One worker process from start to end: its environment, its deadlines, its output, and its certain death.

The worker leads a session of its own, so that TERM and KILL reach all that it starts. What leaves the session (setsid,
a double fork) is found by a mark in its environment. Results come over a private socket, prints over a pipe. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import cache, catalog
from harness.contract import wants_exact_allocations
from harness.verdict import CaseResult, Verdict

if TYPE_CHECKING:
    from harness.runner import Job

OUTPUT_LIMIT = 1 << 20  # bytes printed during one case before its worker is stopped
KEPT = 1 << 16  # bytes of them that are shown: the first and the last half
STARTUP_S = 300.0  # for imports and loading, and again in each case for compiling; apart from the case's deadline
GRACE_S = 2.0  # between TERM and KILL
_TICK_S = 0.1
_LONGEST_MESSAGE = 1 << 24
_MARK = "KIT_RUN"  # in the environment of a worker and of all that it starts
_COMPILE_PHASES = ("start", "package", "load", "compile")
# Variables of make's command line, which mean nothing, or something else, to a compiler or a submission.
_NOT_INHERITED = (
    *("LANG", "LANGUAGE", "TASK", "SUITE", "CASES", "DEVICE", "CONFIG", "FILE", "JOBS"),
    *("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "TRITON_INTERPRET", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
)


class Interrupted(Exception):
    """The run was stopped from outside; the worker is gone."""


class Capture:
    """Head and tail of what was printed, and how much it was."""

    def __init__(self) -> None:
        self.count = 0
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        self.count += len(data)
        room = KEPT // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: -KEPT // 2]

    def text(self) -> str:
        left_out = self.count - len(self._head) - len(self._tail)
        between = f"\n[{left_out} bytes left out]\n" if left_out else ""
        return self._head.decode("utf-8", "replace") + between + self._tail.decode("utf-8", "replace")


def environment(job: Job, parallel: int, mark: str) -> dict[str, str]:
    """The environment of a job's worker."""
    names = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    names[cache.VARIABLE] = str(cache.folder())
    names.setdefault("TRITON_CACHE_DIR", str(cache.folder() / "triton"))
    names.setdefault("TILELANG_CACHE_DIR", str(cache.folder() / "tilelang"))
    names |= {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1", _MARK: mark}
    names["PYTHONPATH"] = os.pathsep.join([str(catalog.ROOT), *filter(None, [names.get("PYTHONPATH")])])
    if job.device == "cpu":
        names["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // parallel))
        if job.language == "triton":
            names["TRITON_INTERPRET"] = "1"  # read when triton is imported, so it cannot be set later
    elif job.language == "cuda" and wants_exact_allocations(catalog.reference_path(job.task)):
        names["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return names


class Worker:
    """A running worker and what is known of it. `watch` follows it to its end."""

    def __init__(self, job: Job, cases: list[int] | None, command: Sequence[str], parallel: int) -> None:
        self.job = job
        self.count: int | None = None
        self.case = 0  # the case in flight; 0 between cases and before the first
        self.phase = "start"
        self.label = ""
        self.finished = False  # it said that it is done, or that its device is lost
        self.delivered: list[int] = []
        self.printed = Capture()
        self.notice: Callable[[Worker], None] = lambda worker: None  # told of every count and phase
        self._token = secrets.token_hex(16)
        self._mark = secrets.token_hex(16)
        self._pending = b""
        self._clock = time.monotonic()
        self._spent = {True: 0.0, False: 0.0}  # seconds of this case: compiling, and all else
        self._startup_s = float(job.settings.get("startup_s", STARTUP_S))
        ours, theirs = socket.socketpair()
        self._socket = ours
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                cwd=catalog.ROOT,
                env=environment(job, parallel, self._mark),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._selector = selectors.DefaultSelector()
        for fd in (self._output, ours.fileno()):
            self._selector.register(fd, selectors.EVENT_READ)
        envelope = {"job": dataclasses.asdict(job), "cases": cases, "token": self._token}
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(envelope).encode())

    # -- watching --------------------------------------------------------------------------------------------------

    def watch(self, deliver: Callable[[CaseResult], None], stop: threading.Event) -> tuple[Verdict, str] | None:
        """Follow the worker to its end, which it does not outlive, with all that it started.

        Gives None when it finished by itself with everything said, else what became of it.
        """
        try:
            while True:
                if stop.is_set():
                    raise Interrupted
                self._pause(_TICK_S)
                end = self._exit()  # before reading, so that nothing said before the end is missed
                self._take(deliver)
                if self.finished:
                    return None
                if self.printed.count > OUTPUT_LIMIT:
                    return Verdict.OUTPUT_LIMIT, f"printed more than {OUTPUT_LIMIT} bytes in phase {self.phase}"
                if end is not None:
                    return Verdict.RUNTIME_ERROR, f"{_describe(end)} in phase {self.phase}, before it gave a result"
                if self._overdue():
                    limit = self._startup_s if self.phase in _COMPILE_PHASES else self.job.deadline_s
                    return Verdict.TIMEOUT, f"stopped in phase {self.phase} after {limit:g} s"
        finally:
            self._end()

    def _pause(self, seconds: float) -> None:
        """Until there is something to read, at most `seconds`."""
        if self._selector.get_map():
            self._selector.select(seconds)
        else:  # the worker closed both
            time.sleep(min(seconds, 0.02))

    def _exit(self) -> os.waitid_result | None:
        # WNOWAIT leaves a zombie, so that its process group cannot be anyone else's before `_end` kills what is in it.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _overdue(self) -> bool:
        compiling = self.phase in _COMPILE_PHASES
        spent = self._spent[compiling] + time.monotonic() - self._clock
        return spent > (self._startup_s if compiling else self.job.deadline_s)

    def _take(self, deliver: Callable[[CaseResult], None]) -> None:
        """Read what is there. Messages first, then output, then act: what was printed before a message is its own."""
        self._pending += self._read(self._socket.fileno(), _LONGEST_MESSAGE)
        room = max(0, OUTPUT_LIMIT + 1 - self.printed.count)
        self.printed.add(self._read(self._output, room))
        *lines, self._pending = self._pending.split(b"\n")
        if len(self._pending) > _LONGEST_MESSAGE:
            self._pending = b""
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # whatever is no message of ours is ignored
                message = json.loads(line)
                if message["token"] == self._token:
                    self._act(message, deliver)

    def _read(self, fd: int, limit: int) -> bytes:
        """What can be read without waiting, at most `limit` bytes. A descriptor at its end is watched no longer."""
        data = bytearray()
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while len(data) < limit:
                chunk = os.read(fd, min(1 << 16, limit - len(data)))
                if not chunk:
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(fd)
                    break
                data += chunk
        return bytes(data)

    def _act(self, message: dict[str, Any], deliver: Callable[[CaseResult], None]) -> None:
        event = message["event"]
        if event == "count":
            self.count = int(message["n"])
            self.notice(self)
        elif event == "phase":
            now = time.monotonic()
            case = int(message["case"])
            if case != self.case:
                self._spent = {True: 0.0, False: 0.0}
            else:
                self._spent[self.phase in _COMPILE_PHASES] += now - self._clock
            self.case, self.phase, self.label, self._clock = case, str(message["phase"]), str(message["label"]), now
            self.notice(self)
        elif event == "result":
            result = CaseResult.from_json(message["record"])
            if self.printed.count <= OUTPUT_LIMIT:  # else `watch` gives the verdict
                self.hand_over(result, deliver)
                with contextlib.suppress(OSError):
                    self._socket.send(b"\n")
        elif event in ("done", "broken"):
            self.finished = True

    def hand_over(self, result: CaseResult, deliver: Callable[[CaseResult], None]) -> None:
        """Deliver a result with what was printed since the one before."""
        result.output += self.printed.text()
        self.printed = Capture()
        self.delivered.append(result.case)
        self.case, self.phase, self.label, self._clock = 0, "between cases", "", time.monotonic()
        self._spent = {True: 0.0, False: 0.0}
        deliver(result)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """TERM, a grace, KILL, for the whole group; then whatever escaped from it."""
        assert self._process.stdout is not None
        try:
            if not self.finished:
                self._signal(signal.SIGTERM)
            self._wait(GRACE_S)
            self._signal(signal.SIGKILL)
            self._wait(5 * GRACE_S)  # a process that hangs in a driver may not even die of KILL
        finally:
            if self._exit() is not None:
                self._process.wait()
            kill_marked(self._mark)
            self._selector.close()
            self._socket.close()
            self._process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _wait(self, seconds: float) -> None:
        """Wait for the end of the process; what it still prints is thrown away, so that it cannot block on the pipe."""
        until = time.monotonic() + seconds
        while self._exit() is None and time.monotonic() < until:
            self._pause(0.02)
            for fd in (self._output, self._socket.fileno()):
                self._read(fd, 1 << 20)


def _describe(end: os.waitid_result) -> str:
    if end.si_code == os.CLD_EXITED:
        return f"the process ended with exit status {end.si_status}"
    try:
        name = signal.Signals(end.si_status).name
    except ValueError:
        name = f"signal {end.si_status}"
    hint = " (often the system, out of memory)" if end.si_status == signal.SIGKILL else ""
    return f"the process was killed by {name}{hint}"


def kill_marked(mark: str) -> None:
    """KILL every process whose environment carries the mark, again and again until none is left (they may fork)."""
    wanted = f"{_MARK}={mark}".encode()
    for _ in range(100):
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)
