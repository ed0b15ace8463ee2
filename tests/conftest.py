"""What every test file shares: repeatable property tests, a journal of their own, a copy of the kit to break."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from harness import journal

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
