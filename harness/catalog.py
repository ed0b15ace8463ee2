"""Where things live: tasks, their suites, their submissions. The only place that knows the folder layout."""

from __future__ import annotations

import difflib
from pathlib import Path

from harness.text import shown
from harness.verdict import ExitCode, KitError

ROOT = Path(__file__).resolve().parent.parent
TASKS = ROOT / "tasks"
LANGUAGES = ("cuda", "triton", "tilelang")
_SUITE_FILES = {
    "judge": "testcase_config.py",
    "live": "live_config.py",
    "tiny": "tiny_config.py",
    "demo": "demo_config.py",
    "large": "large_config.py",
}
SUITES = tuple(_SUITE_FILES)
VARIANTS = ("plain", "hopper", "all")  # the file to paste, the one beside it, both


def shown_path(path: str | Path) -> str:
    """A path as a sentence shows it: relative to the kit where it lies in it."""
    path = Path(path)
    return shown(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path))


def tasks() -> list[str]:
    """Names of the tasks: every folder of tasks/ that holds a reference.py, in alphabetical order."""
    return sorted(path.parent.name for path in TASKS.glob("*/reference.py"))


def _unknown(variable: str, value: str, known: list[str] | tuple[str, ...], code: ExitCode) -> KitError:
    near = difflib.get_close_matches(value, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}."
    noun = "language" if variable == "LANG" else variable.lower()
    return KitError(f"{variable}={shown(value)}: no such {noun}; {hint}", code)


def check_task(name: str) -> str:
    """`name` if it is a task, else KitError with the nearest one."""
    if name not in tasks():
        raise _unknown("TASK", name, tasks(), ExitCode.UNKNOWN_TASK)
    return name


def check_language(name: str) -> str:
    """`name` if it is a language, else KitError with the nearest one."""
    if name not in LANGUAGES:
        raise _unknown("LANG", name, LANGUAGES, ExitCode.UNKNOWN_LANGUAGE)
    return name


def check_variant(name: str) -> str:
    """`name` if it says which of a language's files is meant, else KitError with the nearest one."""
    if name not in VARIANTS:
        raise _unknown("VARIANT", name, VARIANTS, ExitCode.USAGE)
    return name


def check_suite(name: str) -> str:
    """`name` if some task may have a suite of that name, else KitError with the nearest one."""
    if name not in SUITES:
        raise _unknown("SUITE", name, SUITES, ExitCode.MISSING_FILE)
    return name


def suite_file(suite: str) -> str:
    """What the file of a suite is called in each task's folder."""
    return _SUITE_FILES[check_suite(suite)]


def suite_path(task: str, suite: str) -> Path:
    """The config file of a suite; KitError when the task has none."""
    path = TASKS / task / suite_file(suite)
    if not path.is_file():
        raise KitError(f"SUITE={suite}: {task} has no such suite ({path.relative_to(ROOT)}).", ExitCode.MISSING_FILE)
    return path


def reference_path(task: str) -> Path:
    """The task's ground truth and contract."""
    return TASKS / task / "reference.py"


def grids_path(task: str) -> Path:
    """The task's grids of points to time libraries on. It need not exist."""
    return TASKS / task / "grids.py"


def submission_path(task: str, language: str, variant: str = "") -> Path:
    """The file to paste, or with variant "hopper" the file beside it. It need not exist."""
    suffix = ".cu" if language == "cuda" else ".py"
    stem = "hopper" if variant == "hopper" else "run_kernel"
    return TASKS / task / language / (stem + suffix)
