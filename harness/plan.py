"""From what the user asked for to the jobs to run: devices, suites, cases, files. Every refusal is one sentence."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import math
import os
import shlex
import shutil
import stat
import sys
from pathlib import Path

from harness import catalog, child, devices, languages
from harness.devices import Device
from harness.runner import Job
from harness.text import shown, whole_number
from harness.verdict import CaseResult, ExitCode, KitError

GPU_SUITES = ("judge", "live", "large")
HOPPER = "hopper"  # the variant beside the file to paste, for compute capability 9.x
OWN_CONFIG = "config"  # what the suite is called when the user gave a package of their own
LANGUAGE_NAMES = {"cuda": "C++", "triton": "Triton", "tilelang": "TileLang"}
_PYTHON_LANGUAGES = ("triton", "tilelang")  # each needs the package of its own name
_LONGEST_RANGE = 1000  # cases; the longest suite has 36
# A case that takes longer, compiling not counted, is taken to hang. On a GPU the slowest honest step is a baseline that
# builds its own kernels at the first call (200 s on 16 cores for FlashInfer's).
_DEADLINE_S = {"cpu": 120.0, "cuda": 600.0, "maca": 600.0}

# Runs in a process of its own, so that the one that reads the command line never imports torch.
_PROBE = """
import dataclasses, json, sys
from harness import devices
from harness.verdict import KitError
try:
    print(json.dumps({"device": dataclasses.asdict(devices.pick(sys.argv[1] or None))}))
except KitError as error:
    print(json.dumps({"error": str(error), "code": error.code}))
"""


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of `check` or `bench` as given; None where the user said nothing."""

    task: str | None = None
    language: str | None = None
    suite: str | None = None
    cases: str | None = None
    device: str | None = None
    config: str | None = None
    file: str | None = None
    jobs: str | None = None
    deadline_s: str | None = None
    counts: bool = False
    repeat: str | None = None
    lint: bool = True
    time: bool = True
    variant: str = "plain"  # of catalog.VARIANTS

    @classmethod
    def of(cls, options: argparse.Namespace) -> Request:
        """What a command's options ask for; those that it does not have keep their defaults."""
        names = {"lang": "language", "deadline": "deadline_s"}
        given = {names.get(name, name): value for name, value in vars(options).items()}
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in known})

    def again(self, result: CaseResult) -> str:
        """The command that runs one case again as it was run: make's, or ours where make has no variable for it."""
        values = {
            "task": result.task,
            "lang": result.language,
            "cases": str(result.case) if result.case else self.cases,
            "variant": HOPPER if result.variant == HOPPER else None,
            "suite": self.suite,
            "device": self.device,
            "config": self.config,
            "file": self.file,
            "jobs": self.jobs,
            "repeat": self.repeat,
        }
        given = {name: value for name, value in values.items() if value}
        deadline = [] if self.deadline_s is None else [f"--deadline={self.deadline_s}"]
        flags = {"--no-time": not self.time, "--counts": self.counts, "--no-lint": not self.lint}
        if self.lint and not deadline:
            words = ["make", "check", *(f"{name.upper()}={value}" for name, value in given.items())]
            words += [word for word, meant in (("NOTIME=1", not self.time), ("COUNTS=1", self.counts)) if meant]
        else:
            words = [".venv/bin/python", "-m", "harness", "check"]
            words += [f"--{name}={value}" for name, value in given.items()]
            words += [*deadline, *(flag for flag, meant in flags.items() if meant)]
        return " ".join(shlex.quote(word) for word in words)


@dataclasses.dataclass
class Plan:
    """What will run, and what will not with the reason in its record."""

    device: Device
    jobs: list[Job]
    skipped: list[CaseResult]
    parallel: int


def parse_cases(text: str, variable: str = "CASES") -> list[int]:
    """ "1,3-5" -> [1, 3, 4, 5]; KitError names the part of the variable that is no number or range."""
    noun, given = variable.lower().removesuffix("s"), f"{variable}={shown(text)}"
    chosen: set[int] = set()
    for part in text.split(","):
        ends = [whole_number(end) for end in part.split("-", 1)]
        first, last = ends[0], ends[-1]
        if first is None or last is None:
            raise KitError(
                f"{given}: {shown(part.strip()) or 'an empty part'} is no {noun}; "
                "write numbers and ranges, as in 1,3-5."
            )
        if first < 1:
            raise KitError(f"{given}: {noun}s count from 1.")
        if last < first:
            raise KitError(f"{given}: the range {part.strip()} runs backwards; write {last}-{first}.")
        if last - first >= _LONGEST_RANGE:
            raise KitError(f"{given}: the range {part.strip()} is longer than any suite.")
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def pick_device(requested: str | None) -> Device:
    """devices.pick, without importing torch here: at once where no GPU can be, in a process of its own otherwise."""
    if requested == "cpu" or (requested and requested not in devices.KINDS):
        return devices.pick(requested)
    if requested is None and not _may_have_gpu():
        return devices.pick("cpu")
    try:
        answer = child.ask([sys.executable, "-c", _PROBE, requested or ""])
    except child.NoAnswer as last:
        raise KitError(
            f"The device could not be looked up ({last}); DEVICE=cpu does without one.", ExitCode.ENVIRONMENT
        ) from None
    if "error" in answer:
        raise KitError(answer["error"], ExitCode(answer["code"]))
    return Device(**answer["device"])


def _may_have_gpu() -> bool:
    """False only where torch could not find one either: no device node of NVIDIA's (or of WSL's) and no MACA."""
    return any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists() or devices.has_maca()


def make(request: Request, device: Device | None = None) -> Plan:
    """Check the request and lay out its jobs, one per task, language and variant. Raises KitError.

    device: what `pick_device` gave for it, where somebody has asked already.
    """
    tasks = [catalog.check_task(request.task)] if request.task else catalog.tasks()
    chosen = [catalog.check_language(request.language)] if request.language else list(catalog.LANGUAGES)
    cases = None if request.cases is None else parse_cases(request.cases)
    if request.suite:
        catalog.check_suite(request.suite)
    config = _own_config(request)
    file = own_file(request)
    device = device or pick_device(request.device)
    files = _files(request, device)
    suite = OWN_CONFIG if config else request.suite or ("judge" if device.is_gpu else "tiny")
    _check_suite_runs(request, suite, device)
    parallel, repeat = _parallel(request, device), _repeat(request)
    deadline_s = _DEADLINE_S[device.kind] if request.deadline_s is None else parse_deadline(request.deadline_s)

    plan = Plan(device, [], [], parallel)
    named = bool(request.task and request.language)
    for task in tasks:
        path = config or _suite_or_none(task, suite, must_exist=request.task is not None)
        for language, beside in itertools.product(chosen, files):
            submission = file or catalog.submission_path(task, language, beside)
            if beside and request.variant == "all" and not submission.is_file():
                continue
            reason = _missing_file(task, language, suite, path, submission)
            lack = "" if reason else _lacking(language, device)
            if lack and request.language:
                raise KitError(f"LANG={language}: {lack}", ExitCode.ENVIRONMENT)
            if reason or lack:
                detail = reason or lack
                plan.skipped.append(CaseResult(task, language, beside, suite, 0, detail=detail, required=named))
                continue
            for variant in (beside,) if beside else languages.module(language).variants(device):
                plan.jobs.append(
                    Job(
                        task=task,
                        language=language,
                        variant=variant,
                        suite=suite,
                        config=str(path),
                        submission=str(submission),
                        cases=cases,
                        device=device.kind,
                        deadline_s=deadline_s * repeat,
                        settings={
                            "counts": request.counts,
                            "repeat": repeat,
                            "lint": request.lint and beside != HOPPER,  # which is never pasted
                            "time": request.time,
                        },
                        required=named,
                    )
                )
    return plan


def _files(request: Request, device: Device) -> tuple[str, ...]:
    """Which of a language's files are meant: "" for the one to paste, HOPPER for the one beside it."""
    wanted = catalog.check_variant(request.variant)
    has_hopper = device.tuning.startswith("sm9")
    if wanted == HOPPER and not has_hopper and device.kind != "cpu":  # without a GPU a model of Hopper runs it
        raise KitError(
            f"VARIANT={HOPPER}: its kernels need an NVIDIA GPU of compute capability 9.x, and this is {device.name} "
            f"({device.tuning}); leave VARIANT out for the file to paste.",
            ExitCode.NEEDS_DEVICE,
        )
    if wanted == HOPPER:
        return (HOPPER,)
    return ("", HOPPER) if wanted == "all" and has_hopper and not request.file else ("",)


def _missing_file(task: str, language: str, suite: str, config: Path | None, submission: Path) -> str:
    """Which file of a task and language is missing, or ""."""
    if config is None:
        return f"{task} has no suite {suite}."
    if not submission.is_file():
        where = submission.relative_to(catalog.ROOT)
        return f"{task} has no {LANGUAGE_NAMES[language]} submission yet ({where})."
    return ""


def _lacking(language: str, device: Device) -> str:
    """Which package or compiler a language lacks on this machine, or "". (A GPU's own compilers are asked later.)"""
    if language in _PYTHON_LANGUAGES and importlib.util.find_spec(language) is None:
        return f"{language} is not installed in this environment; `make env` tries again to install it."
    compiler = (os.environ.get("CXX") if language == "tilelang" else "") or "g++"
    if language != "triton" and not device.is_gpu and shutil.which(compiler) is None:
        name = LANGUAGE_NAMES[language]
        return f"{compiler} is missing, which {name} needs without a GPU; install it or put it on PATH."
    return ""


def _suite_or_none(task: str, suite: str, must_exist: bool) -> Path | None:
    try:
        return catalog.suite_path(task, suite)
    except KitError as error:
        if must_exist or error.code != ExitCode.MISSING_FILE:
            raise
        return None


def _check_suite_runs(request: Request, suite: str, device: Device) -> None:
    if suite in GPU_SUITES and not device.is_gpu:
        instead = ["make", "check"]
        instead += [f"TASK={request.task}"] if request.task else []
        instead += [f"LANG={request.language}"] if request.language else []
        raise KitError(
            f"SUITE={suite}: its cases are sized for a GPU and would take hours to interpret or simulate on a CPU; "
            f"run `{' '.join([*instead, 'SUITE=tiny'])}` here, or this command on a machine with a GPU.",
            ExitCode.NEEDS_DEVICE,
        )


def _parallel(request: Request, device: Device) -> int:
    if request.jobs is None:
        return 1 if device.is_gpu else os.cpu_count() or 1
    jobs = parse_jobs(request.jobs)
    if device.is_gpu and jobs > 1 and request.time:
        raise KitError(
            f"JOBS={shown(request.jobs)}: on a GPU the cases are timed, so they run one at a time; "
            "leave JOBS out, or add NOTIME=1 to check without timing."
        )
    return jobs


def parse_jobs(text: str) -> int:
    """A number of workers, at least 1. Raises KitError."""
    jobs = whole_number(text)
    if not jobs:
        raise KitError(f"JOBS={shown(text)}: write how many workers may run at a time, as in JOBS=2.")
    return jobs


def _repeat(request: Request) -> int:
    if request.repeat is None:
        return 1
    repeat = whole_number(request.repeat)
    if not repeat:
        raise KitError(f"REPEAT={shown(request.repeat)}: write how often each case is judged, as in REPEAT=5.")
    return repeat


def parse_deadline(text: str) -> float:
    """Seconds, more than 0 and finite. Raises KitError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise KitError(
            f"--deadline={shown(text)}: write after how many seconds a case is taken to hang, as in --deadline=600."
        )
    return seconds


def _own_config(request: Request) -> Path | None:
    if not request.config:
        return None
    given = f"CONFIG={shown(request.config)}"
    if request.suite:
        raise KitError(f"{given} and SUITE={request.suite}: the first replaces the second; give one of them.")
    if not request.task:
        raise KitError(f"{given}: say which contract it follows, TASK={'|'.join(catalog.tasks())}.")
    return _existing("CONFIG", request.config)


def own_file(request: Request) -> Path | None:
    """The user's own submission, or None; KitError when it is not there or nobody says what it is."""
    if not request.file:
        return None
    if not (request.task and request.language):
        raise KitError(f"FILE={shown(request.file)}: say what it is, TASK=name and LANG={'|'.join(catalog.LANGUAGES)}.")
    if (request.file.endswith(".py") and request.language == "cuda") or (
        request.file.endswith(".cu") and request.language in _PYTHON_LANGUAGES
    ):
        raise KitError(f"FILE={shown(request.file)}: by its name that is no {LANGUAGE_NAMES[request.language]} file.")
    return _existing("FILE", request.file)


def _existing(name: str, value: str) -> Path:
    given = f"{name}={shown(value)}"
    try:
        path = Path(value).expanduser().absolute()
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise KitError(f"{given}: no such file (looked for {shown(str(path))}).", ExitCode.MISSING_FILE) from None
    except (OSError, RuntimeError, ValueError) as error:  # too long; ~user without such a user; a null character
        reason = getattr(error, "strerror", None) or str(error)
        raise KitError(f"{given}: no such file ({reason}).", ExitCode.MISSING_FILE) from None
    if stat.S_ISDIR(kind):
        raise KitError(f"{given}: that is a folder; name the file in it.", ExitCode.MISSING_FILE)
    if not stat.S_ISREG(kind):  # workers read it again and again, and a pipe would make them wait
        raise KitError(f"{given}: that is a pipe, a device or a socket; save it as a file.", ExitCode.MISSING_FILE)
    if not os.access(path, os.R_OK):
        raise KitError(f"{given}: this user may not read it; chmod +r makes it readable.", ExitCode.MISSING_FILE)
    return path
