"""What every test file shares: repeatable property tests, a journal of their own, a copy of the kit to break."""

from __future__ import annotations

import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from fake_runner import H200, FakeRunner

from harness import catalog, devices, journal, languages, plan, runner

if TYPE_CHECKING:
    from judged import Bench

ROOT = Path(__file__).resolve().parent.parent

# The same examples on every machine and in every run; no deadline, since a shared core stalls now and then.
hypothesis.settings.register_profile("kit", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("kit")


@pytest.fixture(autouse=True, scope="session")
def _own_journal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs made by tests do not belong into the user's journal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "FOLDER", tmp_path_factory.mktemp("journal"))
        yield


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the kit's front end in a folder with spaces and Chinese characters in its path, and no environment."""
    root = tmp_path / "my kit 内核 1"
    shutil.copytree(ROOT / "harness", root / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRunner:
    """Two tasks: alpha has Triton and C++ submissions, beta Triton alone and a demo suite."""
    tasks = tmp_path / "tasks"
    files = [
        *("alpha/reference.py", "alpha/testcase_config.py", "alpha/live_config.py", "alpha/tiny_config.py"),
        *("alpha/triton/run_kernel.py", "alpha/cuda/run_kernel.cu"),
        *("beta/reference.py", "beta/testcase_config.py", "beta/tiny_config.py", "beta/demo_config.py"),
        "beta/triton/run_kernel.py",
    ]
    for name in files:
        (tasks / name).parent.mkdir(parents=True, exist_ok=True)
        (tasks / name).touch()
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    monkeypatch.setattr(catalog, "TASKS", tasks)
    monkeypatch.setattr(journal, "FOLDER", tmp_path / "journal")
    monkeypatch.setattr(plan, "_may_have_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)

    def module(language: str) -> types.SimpleNamespace:
        both = ("wave64", "warp32")
        return types.SimpleNamespace(
            variants=lambda device: both if language == "cuda" and not device.is_gpu else ("",)
        )

    monkeypatch.setattr(languages, "module", module)
    fake = FakeRunner()
    monkeypatch.setattr(runner, "run_jobs", fake)
    return fake


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, fake: FakeRunner) -> FakeRunner:
    monkeypatch.setattr(plan, "pick_device", lambda requested: devices.pick("cpu") if requested == "cpu" else H200)
    return fake


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose judge does not wait: what a kernel left on a thread (judged.Later) is done the moment it would."""
    import judged  # torch is only for the tests that need it

    from harness import judge, tamper

    monkeypatch.setattr(tamper, "_taken", None)
    monkeypatch.setattr(judge, "_sleep", judged.Later.finish)
    return judged.Bench(tmp_path)
