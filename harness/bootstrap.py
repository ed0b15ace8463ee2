"""Make `.venv` on first use, or bring it up to date: `python3 -m harness.bootstrap [test] [lint] [flashinfer] ...`.

Runs under any Python from 3.10 on, with the standard library alone, and does nothing when a stamp says that nothing
changed. Two kinds of machine:

* Python already has torch (a C500 image, a GPU box): the environment sees that Python's packages and only what is
  missing is added. Its torch and Triton are constraints for pip, and with nothing missing pip is not run at all.
* Python has no torch: an isolated environment with the pins of pyproject.toml.

TileLang alone may stay missing when pip cannot get it: the two other languages then still run.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import faults
from harness.requirements import Requirement, read_lists, satisfied
from harness.verdict import ExitCode, KitError

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 10)
OPTIONAL = ("tilelang",)
KEPT = ("torch", "triton")  # never replaced where the machine brought its own
_CHOOSE = "make check PYTHON=/path/to/python3"
_STAMP = "kit-{}.json"
_OUTER = "kit-outer.pth"  # names the packages of a virtual environment that brought torch
_UNFINISHED = "kit-unfinished"  # there while pip runs: an environment that still has it was interrupted

# Runs in the environment's own Python: where it is from, and version and place of each package that it can import.
_PROBE = """
import importlib.metadata as metadata, importlib.util, json, sys
packages = {}
for name, module in json.loads(sys.argv[1]).items():
    spec = importlib.util.find_spec(module) if module else None
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        distribution = None
    place = spec.origin if spec else str(distribution.locate_file("")) if distribution and not module else None
    if place:
        packages[name] = {"version": distribution.version if distribution else None, "place": place}
print(json.dumps({"base": sys.base_prefix, "version": list(sys.version_info[:3]), "packages": packages}))
"""
# Distributions whose module is known; the others count as there when their metadata is.
_MODULES = {
    "torch": "torch",
    "triton": "triton",
    "tilelang": "tilelang",
    "numpy": "numpy",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
    "pytest-xdist": "xdist",
    "flashinfer-python": "flashinfer",
    "flash-attn": "flash_attn",
}


class Kit:
    """The checkout and its `.venv`."""

    def __init__(self, root: Path, say: Any = None) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.lists = read_lists(root / "pyproject.toml")
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))

    def requirements(self, group: str, machine_torch: bool) -> list[Requirement]:
        """What a group ("base" or an extra) asks for. Pins hold where the kit brings torch itself."""
        if group != "base":
            extras = self.lists.get(f"project.optional-dependencies.{group}")
            if extras is None:
                raise KitError(f"{group}: pyproject.toml has no such extra.", ExitCode.USAGE)
            return [Requirement.parse(text) for text in extras]
        pins = {pin.name: pin for pin in map(Requirement.parse, self.lists["tool.kit.pins"])}
        wanted = [Requirement.parse(text) for text in self.lists["project.dependencies"]]
        if machine_torch:
            # Whatever the machine brought is right: a vendor's build of an older release is what the card runs.
            return [Requirement(need.name, "") for need in wanted]
        return [pins.get(need.name, need) for need in wanted]

    def ensure(self, groups: Sequence[str], retry: bool = False) -> None:
        """Bring `.venv` to where every group is importable; KitError (ENVIRONMENT) says what is in the way."""
        with _locked(self.root):
            self._ensure("base", retry)
            for group in groups:
                self._ensure(group, retry)

    def _ensure(self, group: str, retry: bool) -> None:
        stamp = self.venv / _STAMP.format(group)
        if not retry and self._is_current(group, stamp):
            return
        if group == "base":
            self._make_environment()
        machine_torch = self._sees_machine()
        needs = self.requirements(group, machine_torch)
        before = self._probe(needs)
        missing = [need for need in needs if not satisfied(need, before)]
        absent: list[str] = []
        if missing:
            if not self._is_ours():
                self._refuse_to_replace(missing, before)
            absent = self._install(group, missing, self._constraints() if machine_torch else {})
        after = self._probe(needs) if missing else before
        if group == "base" and missing:
            self._try_imports()
        record = {
            "key": self._key(group),
            "python": self._identity(),
            "made": self._is_ours(),
            "packages": {name: found["version"] for name, found in after.items()},
            "places": [found["place"] for found in after.values()],
            "absent": absent,
        }
        stamp.write_text(json.dumps(record, indent=1, ensure_ascii=True), encoding="utf-8")

    # -- the stamp

    def _key(self, group: str) -> str:
        """Changes when the lists, the Python or the packages that PYTHONPATH adds change."""
        parts = [group, json.dumps(self.lists, sort_keys=True), self._identity(), sys.version]
        parts.append(os.environ.get("PYTHONPATH", ""))
        return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()

    def _identity(self) -> str:
        """The Python that was chosen; asked from inside `.venv` (activated), the one it was made for."""
        if not self._inside():
            return sys.prefix
        return str(_read_json(self.venv / _STAMP.format("base")).get("python", sys.base_prefix))

    def _inside(self) -> bool:
        return self.venv.is_dir() and os.path.realpath(sys.prefix) == os.path.realpath(self.venv)

    def _is_current(self, group: str, stamp: Path) -> bool:
        record = _read_json(stamp)
        return (
            record.get("key") == self._key(group)
            and not (self.venv / _UNFINISHED).exists()
            and self.python.exists()
            and all(os.path.exists(place) for place in record.get("places", [""]))
        )

    # -- the environment

    def _make_environment(self) -> None:
        outer_torch = False if self._inside() else _has_torch()
        if self.venv.exists() and not (self.venv / _UNFINISHED).exists() and self._fits(outer_torch):
            return
        if self._inside():
            raise KitError(
                ".venv is not whole and is the Python in use; run `deactivate` and try again.", ExitCode.ENVIRONMENT
            )
        if self.venv.exists() and not self._is_ours():
            raise KitError(
                f"{self.venv} was not made by this kit, nor by the Python chosen ({sys.executable}); "
                "move it away and try again.",
                ExitCode.ENVIRONMENT,
            )
        self._say(f"Making .venv with {sys.executable}" + (" and the torch it has" if outer_torch else ""))
        self._empty()
        # "System" means the Python below a virtual environment, not that environment: its folders are named instead.
        nested = sys.prefix != sys.base_prefix
        try:
            import venv  # some systems package it apart from Python

            venv.create(self.venv, system_site_packages=outer_torch and not nested, symlinks=True)
        except (ImportError, OSError) as error:
            raise KitError(
                f"PYTHON={sys.executable} cannot make a virtual environment ({error}); add its venv module "
                f"(Debian: python3-venv) or choose another: {_CHOOSE}.",
                ExitCode.ENVIRONMENT,
            ) from error
        if outer_torch and nested:
            sites = [entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")]
            inner = next(self.venv.glob("lib/python*/site-packages"))
            (inner / _OUTER).write_text("".join(f"{site}\n" for site in sites), encoding="utf-8")
        # Ours from here on, and not current yet: it has no key.
        record = json.dumps({"python": self._identity(), "made": True}, ensure_ascii=True)
        (self.venv / _STAMP.format("base")).write_text(record, encoding="utf-8")
        (self.venv / _UNFINISHED).unlink(missing_ok=True)

    def _empty(self) -> None:
        """An empty `.venv` that says it is unfinished, at every moment of its emptying too."""
        self.venv.mkdir(exist_ok=True)
        (self.venv / _UNFINISHED).touch()
        for entry in self.venv.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _UNFINISHED:
                entry.unlink()

    def _fits(self, outer_torch: bool) -> bool:
        """Whether the environment that is there was made for the Python now chosen."""
        if not self.python.exists():
            return False
        try:
            state = self._ask(self.python, {})
        except KitError:
            return False
        if self._inside():
            return True
        made_for = _read_json(self.venv / _STAMP.format("base")).get("python")
        return (
            state["version"] == list(sys.version_info[:3])
            and os.path.realpath(state["base"]) == os.path.realpath(sys.base_prefix)
            and made_for in (None, sys.prefix)
            and self._sees_machine() == outer_torch
        )

    def _is_ours(self) -> bool:
        """Made by this code, so that it may be made again; one that was adopted is the user's."""
        made = _read_json(self.venv / _STAMP.format("base")).get("made") is True
        return made or (self.venv / _UNFINISHED).exists()

    def _sees_machine(self) -> bool:
        if any(self.venv.glob(f"lib/python*/site-packages/{_OUTER}")):
            return True
        config = (self.venv / "pyvenv.cfg").read_text(encoding="utf-8")
        return any(line.replace(" ", "") == "include-system-site-packages=true" for line in config.splitlines())

    def _probe(self, needs: Sequence[Requirement]) -> dict[str, dict[str, Any]]:
        packages: dict[str, dict[str, Any]] = self._ask(
            self.python, {need.name: _MODULES.get(need.name) for need in needs}
        )["packages"]
        return packages

    def _ask(self, python: Path, modules: dict[str, str | None]) -> dict[str, Any]:
        done = _run([str(python), "-c", _PROBE, json.dumps(modules)])
        if done.returncode:
            raise KitError(f"{python} does not run ({_last_line(done)}).", ExitCode.ENVIRONMENT)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def _try_imports(self) -> None:
        """A package that is there and does not import (a lost shared library) is found now, not in the first case."""
        modules = ("torch", "triton", "numpy")
        done = _run([str(self.python), "-c", f"import {', '.join(modules)}"])
        if done.returncode:
            raise KitError(
                f"One of {', '.join(modules)} is installed but does not import: {_last_line(done)}",
                ExitCode.ENVIRONMENT,
            )

    # -- pip

    def _refuse_to_replace(self, missing: Sequence[Requirement], found: dict[str, dict[str, Any]]) -> None:
        wrong = [
            f"{need.name} {found[need.name]['version']} where {need} is needed"
            for need in missing
            if need.name in found
        ]
        if wrong:
            raise KitError(
                f"{self.venv} was not made by this kit and holds {', '.join(wrong)}; move it away and try again.",
                ExitCode.ENVIRONMENT,
            )

    def _constraints(self) -> dict[str, str]:
        found = self._probe([Requirement(name, "") for name in KEPT])
        return {name: package["version"] for name, package in found.items() if package["version"]}

    def _install(self, group: str, missing: list[Requirement], kept: dict[str, str]) -> list[str]:
        """Install; the names of optional packages that pip could not get. KitError when a needed one is among them."""
        self._say(f"Installing into .venv, once: {', '.join(map(str, missing))}")
        pinned = {pin.name: pin for pin in map(Requirement.parse, self.lists["tool.kit.pins"])}
        wanted = [pinned.get(need.name, need) if not need.bound else need for need in missing]
        needed = [need for need in wanted if need.name not in OPTIONAL]
        optional = [need for need in wanted if need.name in OPTIONAL]
        reason = self._pip(wanted, kept)
        if not reason:
            return []
        if needed and optional:
            reason = self._pip(needed, kept)
        if needed and reason:
            again = "make env" if group == "base" else f"make env EXTRA={group}"
            raise KitError(
                f"Missing: {', '.join(map(str, needed))}, and pip could not get them ({reason}); run `{again}` with "
                f"a network or with PIP_FIND_LINKS=folder-of-wheels, or choose a Python that has them: {_CHOOSE}.",
                ExitCode.ENVIRONMENT,
            )
        for need in optional:
            self._say(
                f"{need} is missing and pip could not get it: what needs it is skipped until `make env` succeeds."
            )
        return [need.name for need in optional]

    def _pip(self, wanted: Sequence[Requirement], kept: dict[str, str]) -> str:
        """Run pip with the user's own configuration; "" or pip's reason."""
        if _run([str(self.python), "-c", "import pip"]).returncode:
            made = _run([str(self.python), "-m", "ensurepip"])
            if made.returncode:
                return f"no pip in {sys.executable}, and its ensurepip fails: {_last_line(made)}"
        marker = self.venv / _UNFINISHED
        marker.touch()
        constraints = self.venv / "kit-constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()), encoding="utf-8")
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--progress-bar", "off"]
        command += ["--constraint", str(constraints), *map(str, wanted)]
        # "pip install" into the user's home, a common setting, is refused inside an environment.
        done = _run(command, {**os.environ, "PIP_USER": "0"})
        marker.unlink()
        return _last_line(done) if done.returncode else ""


def _has_torch() -> bool:
    """Whether the Python that runs this imports torch. One that is there but broken is an error, not a "no"."""
    if importlib.util.find_spec("torch") is None:
        return False
    done = _run([sys.executable, "-c", "import torch"])
    if done.returncode:
        raise KitError(
            f"PYTHON={sys.executable} has a torch that does not import ({_last_line(done)}); mend it, "
            f"or choose another: {_CHOOSE}.",
            ExitCode.ENVIRONMENT,
        )
    return True


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says most: the last one that begins with ERROR, else the last one."""
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One set-up at a time (`make -j`): the second waits for the first, then finds its stamp."""
    folder = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Prints to stderr only, so that a `--json` run after it stays clean, unless there will be none."""
    parser = argparse.ArgumentParser(prog="python3 -m harness.bootstrap", description=__doc__.splitlines()[0])
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml, such as test, lint, flashinfer")
    parser.add_argument("--retry", action="store_true", help="look again for what could not be installed last time")
    parser.add_argument("--json", action="store_true", help="say on stdout as well, as JSON, why there is no .venv")
    options = parser.parse_args(arguments)
    try:
        if sys.version_info < OLDEST_PYTHON:
            have, need = (".".join(map(str, version[:2])) for version in (sys.version_info, OLDEST_PYTHON))
            raise KitError(
                f"PYTHON={sys.executable} is Python {have}; the kit needs {need} or newer: {_CHOOSE}.",
                ExitCode.ENVIRONMENT,
            )
        started = time.monotonic()
        kit = Kit(ROOT)
        kit.ensure(options.extras, options.retry)
        if options.retry:
            print(f".venv is ready ({time.monotonic() - started:.0f} s).", file=sys.stderr)
    except KitError as error:
        return _refuse(str(error), error.code, options.json)
    except OSError as error:
        if not faults.cannot_write(error):
            raise
        sentence = f".venv cannot be made or brought up to date here: {faults.cannot_write(error)}"
        return _refuse(sentence, ExitCode.ENVIRONMENT, options.json)
    except KeyboardInterrupt:
        return _refuse("Interrupted; run it again to finish the set-up.", ExitCode.INTERRUPTED, options.json)
    return ExitCode.OK


def _refuse(sentence: str, code: ExitCode, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": sentence, "exit_code": int(code)}))
    print(sentence, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
