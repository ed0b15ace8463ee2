"""The environment made on first use: on a machine with torch, on an empty one, offline, interrupted, made by hand.

The packages are stand-ins of a few bytes, as folders or as wheels; the Python, its venv module and (where a test says
so) pip are real. Every "machine" is an empty virtual environment, so that what this machine really has stays out of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness import bootstrap
from harness.bootstrap import Kit, Requirement, read_lists
from harness.verdict import ExitCode

ROOT = Path(__file__).resolve().parent.parent
PINS = {"torch": "2.13.0", "triton": "3.7.1", "tilelang": "0.1.15"}

# A pip that logs its arguments, then does what FAKE_PIP says: fail, hang, or install what it was asked for.
FAKE_PIP = """
import json, os, sys, sysconfig, time
from pathlib import Path
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
site = Path(sysconfig.get_path("purelib"))
wanted = [word for word in sys.argv[1:] if "==" in word or ">=" in word or word == "numpy"]
for word in wanted:
    name, _, version = word.replace(">=", "==").partition("==")
    if name in os.environ.get("FAKE_PIP_FAILS", "").split(","):
        sys.exit("ERROR: No matching distribution found for " + word)
for word in wanted:
    name, _, version = word.replace(">=", "==").partition("==")
    (site / name).mkdir(exist_ok=True)
    (site / name / "__init__.py").write_text("")
    if os.environ.get("FAKE_PIP_HANGS"):
        (site / name / "half.py").write_text("")
        time.sleep(60)
    info = site / f"{name}-{version or '2.0'}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version or '2.0'}\\n")
"""


def metadata(name: str, version: str, requires: str = "") -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )


def put_package(site: Path, name: str, version: str, body: str = "") -> None:
    """A package of one empty module, as pip would have left it."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(body or f"__version__ = {version!r}\n", encoding="utf-8")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata(name, version), encoding="utf-8")


def put_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", f"__version__ = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", metadata(name, version, requires))
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


class Machine:
    """A Python (an empty virtual environment), a fake pip, and a checkout to set up."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.checkout = checkout
        self.python = self.make_python(folder / "machine")
        self.site = next((folder / "machine").glob("lib/python*/site-packages"))
        self.fakes = folder / "fakes"
        (self.fakes / "pip").mkdir(parents=True)
        (self.fakes / "pip" / "__init__.py").touch()
        (self.fakes / "pip" / "__main__.py").write_text(FAKE_PIP, encoding="utf-8")
        self.log = folder / "pip.log"
        self.wheels = folder / "wheels"
        self.wheels.mkdir()

    @staticmethod
    def make_python(folder: Path) -> Path:
        venv.create(folder, with_pip=False, symlinks=True)
        return folder / "bin" / "python"

    def with_torch(self, *packages: str) -> None:
        versions = {"torch": "2.8.0+vendor1", "triton": "3.0.0", "tilelang": "0.1.10", "numpy": "1.26.4"}
        for name in packages or versions:
            put_package(self.site, name, versions[name])

    def environment(self, real_pip: bool, extra: Mapping[str, str]) -> dict[str, str]:
        """`real_pip` means ensurepip's, or the one that the test itself could import where PYTHONPATH names it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": os.devnull}
        fake = {} if real_pip else {"PYTHONPATH": str(self.fakes), "FAKE_PIP_LOG": str(self.log)}
        return {**kept, **pip, **fake, **extra}

    def set_up(
        self, *arguments: str, python: Path | None = None, real_pip: bool = False, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [python or self.python, "-m", "harness.bootstrap", *arguments],
            cwd=self.checkout,
            env=self.environment(real_pip, extra),
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        assert done.stdout == ""
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def pip_calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def installed(self, name: str) -> tuple[str, str]:
        """Version and place of a package as the kit's environment sees it."""
        code = f"import importlib.metadata, {name}; print(importlib.metadata.version('{name}')); print({name}.__file__)"
        done = subprocess.run(
            [self.checkout / ".venv/bin/python", "-c", code], capture_output=True, encoding="utf-8", check=True
        )
        version, place = done.stdout.splitlines()
        return version, place


@pytest.fixture
def pip_at_hand(tmp_path: Path) -> dict[str, str]:
    """PYTHONPATH with a real pip on it, which saves the time of ensurepip; empty where this Python has no pip."""
    found = importlib.util.find_spec("pip")
    if found is None or found.origin is None:
        return {}
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip").symlink_to(Path(found.origin).parent, target_is_directory=True)
    return {"PYTHONPATH": str(tmp_path / "pip")}


@pytest.fixture
def machine(tmp_path: Path, checkout: Path) -> Machine:
    return Machine(tmp_path, checkout)


def test_machine_with_everything_needs_no_pip_and_keeps_its_torch(machine: Machine) -> None:
    machine.with_torch()
    done = machine.set_up(real_pip=True)
    assert done.returncode == 0, done.stderr
    assert machine.installed("torch") == ("2.8.0+vendor1", str(machine.site / "torch" / "__init__.py"))
    assert not list((machine.checkout / ".venv").glob("lib/python*/site-packages/pip")), "pip was not needed"
    assert machine.set_up(real_pip=True).stderr == "", "the second time there is nothing to do"


def test_machine_with_torch_gets_only_what_is_missing_under_constraints(machine: Machine) -> None:
    machine.with_torch("torch", "triton", "numpy")
    assert machine.set_up().returncode == 0
    (call,) = machine.pip_calls()
    assert call[-1] == "tilelang==0.1.15"
    assert not any(word.startswith(("torch", "triton", "numpy")) for word in call)
    constraints = Path(call[call.index("--constraint") + 1]).read_text(encoding="utf-8").splitlines()
    assert constraints == ["torch==2.8.0+vendor1", "triton==3.0.0"]
    assert machine.installed("torch")[0] == "2.8.0+vendor1"
    assert machine.installed("tilelang")[0] == "0.1.15"


def test_real_pip_cannot_replace_the_machines_torch(machine: Machine, pip_at_hand: dict[str, str]) -> None:
    """A TileLang that insists on another torch is left out, even though that torch is at hand."""
    machine.with_torch("torch", "triton", "numpy")
    put_wheel(machine.wheels, "tilelang", "0.1.15", requires="torch==2.13.0")
    put_wheel(machine.wheels, "torch", "2.13.0")
    done = machine.set_up(real_pip=True, **pip_at_hand)
    assert done.returncode == 0, done.stderr
    assert "tilelang==0.1.15 is missing" in done.stderr
    assert machine.installed("torch") == ("2.8.0+vendor1", str(machine.site / "torch" / "__init__.py"))


def test_missing_tilelang_offline_stops_nothing_and_is_tried_again_only_when_asked(machine: Machine) -> None:
    machine.with_torch("torch", "triton", "numpy")
    done = machine.set_up(FAKE_PIP_FAILS="tilelang")
    assert done.returncode == 0
    assert "tilelang==0.1.15 is missing" in done.stderr
    assert machine.set_up(FAKE_PIP_FAILS="tilelang").stderr == ""
    assert len(machine.pip_calls()) == 1
    assert machine.set_up("--retry").returncode == 0
    assert len(machine.pip_calls()) == 2
    assert machine.installed("tilelang")[0] == "0.1.15"


def test_empty_machine_gets_the_pins_from_a_folder_of_wheels(machine: Machine, pip_at_hand: dict[str, str]) -> None:
    for name, version in PINS.items():
        put_wheel(machine.wheels, name, version)
        put_wheel(machine.wheels, name, "99.0")  # newer is not what is pinned
    put_wheel(machine.wheels, "numpy", "2.4.6")
    done = machine.set_up(real_pip=True, **pip_at_hand)
    assert done.returncode == 0, done.stderr
    for name, version in PINS.items():
        assert machine.installed(name)[0] == version
        assert str(machine.checkout / ".venv") in machine.installed(name)[1]
    assert machine.set_up(real_pip=True, **pip_at_hand).stderr == ""


def test_empty_machine_without_network_says_what_is_missing_in_one_sentence(
    machine: Machine, pip_at_hand: dict[str, str]
) -> None:
    done = machine.set_up(real_pip=True, **pip_at_hand)
    assert done.returncode == ExitCode.ENVIRONMENT
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Missing: torch==2.13.0, triton==3.7.1, numpy>=1.26, and pip could not get them (ERROR: ")
    assert "PIP_FIND_LINKS" in last
    assert "PYTHON=" in last
    # And a later run, with what was missing at hand, repairs it.
    for name, version in {**PINS, "numpy": "2.4.6"}.items():
        put_wheel(machine.wheels, name, version)
    assert machine.set_up(real_pip=True, **pip_at_hand).returncode == 0
    assert machine.installed("torch")[0] == "2.13.0"


def test_machine_without_the_venv_module_is_told_so(machine: Machine) -> None:
    (machine.fakes / "venv.py").write_text("raise ImportError('venv is packaged apart')", encoding="utf-8")
    done = machine.set_up()
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "cannot make a virtual environment (venv is packaged apart)" in done.stderr
    (machine.fakes / "venv.py").unlink()
    assert machine.set_up().returncode == 0


def test_machine_without_pip_and_without_ensurepip_is_told_so(machine: Machine) -> None:
    (machine.fakes / "pip" / "__main__.py").rename(machine.fakes / "gone.py")
    (machine.fakes / "pip" / "__init__.py").write_text("raise ImportError", encoding="utf-8")
    (machine.fakes / "ensurepip.py").write_text("raise SystemExit('ensurepip is disabled here')", encoding="utf-8")
    done = machine.set_up()
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "no pip in" in done.stderr
    assert "ensurepip is disabled here" in done.stderr


def test_missing_extra_is_named_with_the_command_that_adds_it(machine: Machine) -> None:
    machine.with_torch()
    done = machine.set_up("test", FAKE_PIP_FAILS="hypothesis")
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "Missing: pytest>=7.4, pytest-xdist>=3.5, hypothesis>=6.100" in done.stderr
    assert "`make env EXTRA=test`" in done.stderr
    assert machine.set_up("test").returncode == 0
    assert machine.set_up("test").stderr == ""
    assert machine.set_up("nonsense").returncode == ExitCode.USAGE


def test_killed_set_up_is_made_again_from_nothing(machine: Machine) -> None:
    process = subprocess.Popen(
        [machine.python, "-m", "harness.bootstrap"],
        cwd=machine.checkout,
        env=machine.environment(False, {"FAKE_PIP_HANGS": "1"}),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    half = "lib/python*/site-packages/torch/half.py"
    deadline = time.monotonic() + 60
    while not list((machine.checkout / ".venv").glob(half)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert machine.set_up().returncode == 0
    assert not list((machine.checkout / ".venv").glob(half))
    assert machine.installed("torch")[0] == "2.13.0"


def test_two_set_ups_at_once_run_pip_once(machine: Machine) -> None:
    commands = [
        subprocess.Popen(
            [machine.python, "-m", "harness.bootstrap"],
            cwd=machine.checkout,
            env=machine.environment(False, {}),
            stderr=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]
    assert [command.wait(timeout=60) for command in commands] == [0, 0]
    assert len(machine.pip_calls()) == 1


def test_another_python_means_another_environment(machine: Machine, tmp_path: Path) -> None:
    assert machine.set_up().returncode == 0
    other = machine.make_python(tmp_path / "other")
    put_package(next((tmp_path / "other").glob("lib/python*/site-packages")), "torch", "2.11.0")
    done = machine.set_up(python=other)
    assert done.returncode == 0
    assert "and the torch it has" in done.stderr
    assert machine.installed("torch")[0] == "2.11.0"


def test_activated_environment_is_used_as_it_is(machine: Machine) -> None:
    assert machine.set_up().returncode == 0
    calls = machine.pip_calls()
    inside = machine.checkout / ".venv" / "bin" / "python"
    assert machine.set_up(python=inside).stderr == ""
    assert machine.set_up().stderr == "", "and does not disturb the stamp for the Python outside"
    assert machine.pip_calls() == calls


def test_package_that_vanished_is_installed_again(machine: Machine) -> None:
    assert machine.set_up().returncode == 0
    (site,) = (machine.checkout / ".venv").glob("lib/python*/site-packages")
    for entry in site.glob("triton*"):
        entry.rename(entry.with_name("gone-" + entry.name))
    assert machine.set_up().returncode == 0
    assert machine.pip_calls()[-1][-1] == "triton==3.7.1"
    assert machine.installed("triton")[0] == "3.7.1"


def hand_made(machine: Machine, **versions: str) -> Path:
    machine.make_python(machine.checkout / ".venv")
    (site,) = (machine.checkout / ".venv").glob("lib/python*/site-packages")
    for name, version in {**PINS, "numpy": "2.4.6", **versions}.items():
        put_package(site, name, version)
    (site / "mine.txt").touch()
    return site / "mine.txt"


def test_hand_made_environment_is_adopted_when_it_has_everything(machine: Machine) -> None:
    mine = hand_made(machine, torch="2.13.0+cpu")
    done = machine.set_up()
    assert (done.returncode, done.stderr) == (0, "")
    assert mine.exists()
    assert machine.pip_calls() == []


def test_hand_made_environment_with_another_torch_is_left_alone(machine: Machine) -> None:
    mine = hand_made(machine, torch="2.12.0")
    done = machine.set_up()
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "holds torch 2.12.0 where torch==2.13.0 is needed; move it away" in done.stderr
    assert mine.exists()
    assert machine.pip_calls() == []


@pytest.mark.parametrize("adopted", [False, True])
def test_environment_that_is_not_ours_is_never_deleted(machine: Machine, tmp_path: Path, adopted: bool) -> None:
    mine = hand_made(machine)
    if adopted:
        assert machine.set_up().returncode == 0
    other = machine.make_python(tmp_path / "other")
    put_package(next((tmp_path / "other").glob("lib/python*/site-packages")), "torch", "2.11.0")
    done = machine.set_up(python=other)
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "was not made by this kit" in done.stderr
    assert mine.exists()


def test_torch_that_does_not_import_is_an_error_not_an_empty_machine(machine: Machine) -> None:
    put_package(machine.site, "torch", "2.8.0", body="raise ImportError('libcudart.so.13 is not here')")
    done = machine.set_up()
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "libcudart.so.13 is not here" in done.stderr
    assert machine.pip_calls() == []


def test_old_python_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST_PYTHON", (99, 1))
    assert bootstrap.main([]) == ExitCode.ENVIRONMENT
    assert f"PYTHON={sys.executable} is Python" in capsys.readouterr().err


def test_the_list_reader_agrees_with_a_real_toml_parser() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    lists: dict[str, list[str]] = {}

    def collect(table: dict[str, object], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                collect(value, f"{prefix}{key}.")
            elif isinstance(value, list):
                lists[prefix + key] = value

    collect(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")), "")
    assert read_lists(ROOT / "pyproject.toml") == lists
    assert "tool.kit.pins" in lists


def test_the_list_reader_takes_comments_and_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '# a = [\n[one.two]\nname = "x"\nmany = [\n  "a==1", # why\n  "b",\n]\nfew = ["c"]\n', encoding="utf-8"
    )
    assert read_lists(path) == {"one.two.many": ["a==1", "b"], "one.two.few": ["c"]}


@pytest.mark.parametrize(
    ("requirement", "version", "accepted"),
    [
        ("torch==2.13.0", "2.13.0", True),
        ("torch==2.13.0", "2.13.0+cpu", True),
        ("torch==2.13.0", "2.13", True),
        ("torch==2.13.0", "2.13.1", False),
        ("torch==2.13.0", None, False),
        ("numpy>=1.26", "2.4.6", True),
        ("numpy>=1.26", "1.26.0rc1", True),
        ("numpy>=1.26", "1.9", False),
        ("numpy", None, True),
    ],
)
def test_versions_are_compared_as_numbers(requirement: str, version: str | None, accepted: bool) -> None:
    assert Requirement.parse(requirement).accepts(version) is accepted


def test_pins_hold_only_where_the_kit_brings_torch() -> None:
    kit = Kit(ROOT)
    own = {need.name: need.bound for need in kit.requirements("base", machine_torch=False)}
    assert {name: bound.removeprefix("==") for name, bound in own.items() if name in PINS} == PINS
    assert all(need.bound == "" for need in kit.requirements("base", machine_torch=True))
