"""Where caches go when the kit's own folder cannot be written, and what is said of a disk that is full or closed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runner import FakeRunner

from harness import bootstrap, cache, cli, journal, process, runner
from harness.verdict import ExitCode, Verdict
from harness.worker import explain


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Path]]:
    """A kit and a home below tmp_path; the folders put into the set may not be written to, not even by root."""
    folders: set[Path] = set()
    real = os.access

    def access(path: str | Path, mode: int) -> bool:
        return real(path, mode) and not (mode & os.W_OK and Path(path) in folders)

    for name in ("kit", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(cache, "ROOT", tmp_path / "kit")
    monkeypatch.setattr(cache.os, "access", access)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CACHE_HOME", cache.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    cache.folder.cache_clear()
    yield folders
    cache.folder.cache_clear()


def test_caches_go_to_the_kit(closed: set[Path], tmp_path: Path) -> None:
    assert cache.folder() == tmp_path / "kit" / ".cache"
    assert cache.note() == ""


@pytest.mark.parametrize("what", ["kit", "kit/.cache", "kit/.cache/cuda"])
def test_caches_go_to_the_home_where_the_kit_is_closed(closed: set[Path], tmp_path: Path, what: str) -> None:
    if what != "kit":
        (tmp_path / "kit/.cache/cuda").mkdir(parents=True)
    closed.add(tmp_path / what)
    assert cache.folder() == tmp_path / "home/.cache/xpuoj-kit"
    assert cache.note().endswith(f"kit/.cache cannot be written: compiled kernels are kept in {cache.folder()}.")


def test_caches_go_to_a_folder_of_this_run_where_both_are_closed(closed: set[Path], tmp_path: Path) -> None:
    closed |= {tmp_path / "kit", tmp_path / "home"}
    folder = cache.folder()
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o77 == 0, "nobody else may put a library there"
    assert tmp_path not in folder.parents
    assert cache.folder() == folder


def test_a_file_in_the_place_of_the_folder_is_no_folder(closed: set[Path], tmp_path: Path) -> None:
    (tmp_path / "kit/.cache").touch()
    assert cache.folder() == tmp_path / "home/.cache/xpuoj-kit"


def test_workers_use_the_folder_of_their_parent(
    closed: set[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed.add(tmp_path / "kit")
    for name in ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    job = runner.Job("t", "tilelang", "", "tiny", "", "", None, "cpu", 1.0, {}, False)
    names = process.environment(job, 1, "mark")
    assert names["TRITON_CACHE_DIR"] == str(cache.folder() / "triton")
    assert names["TILELANG_CACHE_DIR"] == str(cache.folder() / "tilelang")
    monkeypatch.setenv(cache.VARIABLE, names[cache.VARIABLE])
    closed.clear()
    cache.folder.cache_clear()
    assert cache.folder() == tmp_path / "home/.cache/xpuoj-kit"


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")


def test_a_full_disk_is_one_sentence(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise FULL

    sentence = "/some/file cannot be written or read: No space left on device."
    assert explain(FULL, "load", Path("run_kernel.py")) == (Verdict.RUNTIME_ERROR, f"in phase load: {sentence}")
    monkeypatch.setattr(runner, "run_jobs", full)
    assert cli.main(["check", "--json", "--task=beta"]) == ExitCode.ENVIRONMENT
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": sentence, "exit_code": ExitCode.ENVIRONMENT}
    assert captured.err == sentence + "\n"
    monkeypatch.setattr(bootstrap.Kit, "ensure", full)
    assert bootstrap.main(["--json"]) == ExitCode.ENVIRONMENT
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"] == captured.err.strip()
    assert captured.err == f".venv cannot be made or brought up to date here: {sentence}\n"


def test_another_error_of_the_system_keeps_its_traceback(fake: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> Any:
        raise FileNotFoundError(errno.ENOENT, "a bug of ours")

    monkeypatch.setattr(runner, "run_jobs", lost)
    with pytest.raises(FileNotFoundError):
        cli.main(["check", "--task=beta"])


def test_half_a_line_is_taken_out_of_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        """A file on a disk with room for ten bytes more."""

        def __init__(self, path: Path) -> None:
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115

        def write(self, data: bytes) -> int:
            if len(data) <= 10:
                raise FULL
            return self.file.write(data[:10])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Disk:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

    assert journal.append({"run": 1}, tmp_path) == ""
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *mode, **options: Disk(self))
        assert "this run is not in the journal (No space left on device)" in journal.append({"run": 2}, tmp_path)
    assert path.read_bytes() == before
