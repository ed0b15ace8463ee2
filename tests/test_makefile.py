"""The Makefile as a user meets it: what reaches the commands, whatever the locale, the folder or the value.

The Python that make calls is a stand-in that writes down its arguments and environment; one test at the end is real.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.verdict import ExitCode

ROOT = Path(__file__).resolve().parent.parent
VARIABLES = ["TASK", "LANG", "SUITE", "CASES", "DEVICE", "CONFIG", "FILE", "JSON", "COUNTS", "JOBS", "PYTHON", "EXTRA"]
VARIABLES += ["REPEAT", "NOTIME", "VARIANT", "BUDGET", "OUT", "ROW", "PLAN", "TOOL"]

# Called with the file of the log, who it stands for, and the arguments.
STAND_IN = """
import json, os, sys
with open(sys.argv[1], "a", encoding="utf-8") as log:
    log.write(json.dumps([sys.argv[2], sys.argv[3:], dict(os.environ)]) + "\\n")
sys.exit(int(os.environ.get("EXIT_OF_" + sys.argv[2], "0")))
"""


class Kit:
    """A copy of the kit. `machine` (PYTHON), `python` (.venv's) and two tools only write down how they are called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root.parent / "calls.jsonl"
        self.machine = root.parent / "the machine's python"
        self.stand_in(self.machine, "machine")
        for name in ("python", "clang-format", "shellcheck"):
            self.stand_in(root / ".venv" / "bin" / name, name.replace("-", "_"))

    def stand_in(self, path: Path, who: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        script = self.root.parent / "stand_in.py"
        script.write_text(STAND_IN, encoding="utf-8")
        words = [sys.executable, "-S", str(script), str(self.log), who]
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        path.chmod(0o755)

    def make(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "MAKEFLAGS", "MAKELEVEL")}
        return subprocess.run(
            ["make", *words],
            cwd=self.root,
            env={**kept, "PYTHON": str(self.machine), **environment},
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            check=False,
        )

    def calls(self) -> list[tuple[str, list[str], dict[str, str]]]:
        return [tuple(json.loads(line)) for line in self.log.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def kit(checkout: Path) -> Kit:
    return Kit(checkout)


def test_make_alone_lists_every_command_and_variable(kit: Kit) -> None:
    done = kit.make()
    assert done.returncode == 0
    assert not kit.log.exists(), "help needs no environment"
    assert done.stdout == kit.make("help").stdout
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets
    for target in targets[1].split():
        assert re.search(rf"^  {target} +\S", done.stdout, re.MULTILINE), target
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in VARIABLES:
        assert re.search(rf"^  {name}=", done.stdout, re.MULTILINE), name


def test_the_readme_explains_every_variable_and_exit_code() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in VARIABLES:
        assert f"`{name}=" in readme, name
    for code in ExitCode:
        assert f"| {code.value} |" in readme, code


def test_ci_runs_what_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "make test" in readme
    assert "make test" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_check_makes_the_environment_first_and_stops_when_it_cannot(kit: Kit) -> None:
    assert kit.make("check").returncode == 0
    assert [(who, words) for who, words, _ in kit.calls()] == [
        ("machine", ["-m", "harness.bootstrap"]),
        ("python", ["-m", "harness", "check"]),
    ]
    kit.log.unlink()
    assert kit.make("check", EXIT_OF_machine="14").returncode != 0
    assert [who for who, *_ in kit.calls()] == ["machine"]
    kit.log.unlink()
    assert kit.make("check", EXIT_OF_python="1").returncode != 0


@pytest.mark.parametrize("locale", ["zh_CN.UTF-8", "C", "triton"])
def test_lang_of_the_environment_is_no_language(kit: Kit, locale: str) -> None:
    assert kit.make("check", LANG=locale).returncode == 0
    _, words, environment = kit.calls()[-1]
    assert words == ["-m", "harness", "check"]
    assert "LANG" not in environment
    assert environment["PYTHONUTF8"] == "1"


def test_lang_of_the_command_line_is_a_language_and_reaches_no_child(kit: Kit) -> None:
    assert kit.make("check", "LANG=triton", "TASK=alpha", LANG="zh_CN.UTF-8").returncode == 0
    for _, _, environment in kit.calls():
        for name in (*VARIABLES, "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES"):
            assert name not in environment, name
    assert kit.calls()[-1][1] == ["-m", "harness", "check", "--task=alpha", "--lang=triton"]


@pytest.mark.parametrize(
    "value",
    ["a b.py", "it's.py", '"q".py', "$HOME.py", "$(shell touch hit)", "`touch hit`", "; touch hit", "内核/✓.py", "-x"],
)
def test_a_value_arrives_as_it_was_written(kit: Kit, value: str) -> None:
    assert kit.make("check", f"FILE={value}", f"CONFIG={value}").returncode == 0
    assert kit.calls()[-1][1] == ["-m", "harness", "check", f"--config={value}", f"--file={value}"]
    assert not (kit.root / "hit").exists()


def test_every_variable_of_check_reaches_it(kit: Kit) -> None:
    values = {
        "TASK": "a",
        "LANG": "b",
        "SUITE": "c",
        "CASES": "1",
        "DEVICE": "d",
        "CONFIG": "e",
        "FILE": "f",
        "VARIANT": "hopper",
        "JOBS": "2",
    }
    words = [f"{name}={value}" for name, value in values.items()]
    assert kit.make("check", *words, "JSON=1", "COUNTS=1").returncode == 0
    expected = [f"--{name.lower()}={value}" for name, value in values.items()]
    assert kit.calls()[-1][1] == ["-m", "harness", "check", *expected, "--json", "--counts"]


def test_every_variable_of_bench_reaches_it(kit: Kit) -> None:
    names = ("TASK", "LANG", "SUITE", "CASES", "DEVICE", "CONFIG", "FILE", "VARIANT", "BUDGET", "OUT")
    assert kit.make("bench", *(f"{name}=a b" for name in names), "JSON=1").returncode == 0
    assert kit.calls()[-1][1] == ["-m", "harness", "bench", *(f"--{name.lower()}=a b" for name in names), "--json"]


def test_the_variables_of_lint_reach_it(kit: Kit) -> None:
    assert kit.make("lint", "TASK=t", "LANG=cuda", "FILE=my file.cu", "JOBS=3", "JSON=1").returncode == 0
    assert kit.make("lint-compat", "TASK=t", "JOBS=3").returncode == 0
    commands = [words for who, words, _ in kit.calls() if who == "python"]
    assert commands == [
        ["-m", "harness", "lint", "--task=t", "--lang=cuda", "--file=my file.cu", "--jobs=3", "--json"],
        ["-m", "harness", "lint-compat", "--task=t", "--jobs=3"],
    ]


def test_variables_but_lang_may_come_from_the_environment(kit: Kit) -> None:
    assert kit.make("check", TASK="alpha", CASES="1").returncode == 0
    assert kit.calls()[-1][1] == ["-m", "harness", "check", "--task=alpha", "--cases=1"]


def test_python_of_the_command_line_picks_the_machine(kit: Kit) -> None:
    other = kit.root.parent / "other python"
    kit.stand_in(other, "other")
    assert kit.make("check", f"PYTHON={other}").returncode == 0
    assert [who for who, *_ in kit.calls()] == ["other", "python"]


@pytest.mark.parametrize("word", ["TAKS=alpha", "task=alpha", "LANGUAGE=triton"])
def test_a_misspelt_variable_is_refused(kit: Kit, word: str) -> None:
    done = kit.make("check", word)
    assert done.returncode != 0
    assert f"{word.partition('=')[0]}=: no such variable" in done.stderr
    assert not kit.log.exists()


def test_what_stops_make_before_the_run_is_one_document_under_json(kit: Kit) -> None:
    for words, code in ((["TAKS=alpha"], 2), (["PYTHON=/no/such python"], 14)):
        done = kit.make("check", "JSON=1", *words)
        assert done.returncode != 0
        assert json.loads(done.stdout)["exit_code"] == code
        assert done.stderr.startswith("Makefile:") or "PYTHON=/no/such python: no such program; name" in done.stderr
        assert not kit.log.exists()
        assert kit.make("check", *words).stdout == ""
    assert kit.make("check", "JSON=1", EXIT_OF_machine="14").returncode != 0
    assert kit.calls()[-1][1] == ["-m", "harness.bootstrap", "--json"]


def test_test_and_env_ask_for_their_extras(kit: Kit) -> None:
    assert kit.make("test").returncode == 0
    assert kit.make("env").returncode == 0
    assert kit.make("env", "EXTRA=flash-attn").returncode == 0
    assert [words for _, words, _ in kit.calls()] == [
        ["-m", "harness.bootstrap", "test"],
        ["-m", "pytest", "tests", "-n", "auto", "--maxprocesses=4", "--dist=loadfile"],
        ["-m", "harness.bootstrap", "--retry"],
        ["-m", "harness.bootstrap", "--retry", "flash-attn"],
    ]


def test_lint_code_covers_the_tracked_kernels_and_scripts(kit: Kit) -> None:
    for name in ("a kernel.cu", "deep/simulator.hpp", "deep/cuda.h", "other.cuh", ".ci/run", "untracked.cu", "x.py"):
        (kit.root / name).parent.mkdir(parents=True, exist_ok=True)
        (kit.root / name).touch()
    git = ["git", "-c", "user.name=test", "-c", "user.email=test", "-C", str(kit.root)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "*.cu", "*.hpp", "*.h", "*.cuh", ".ci/run", "x.py"], check=True)
    subprocess.run([*git, "rm", "-q", "--cached", "untracked.cu"], check=True)
    done = kit.make("lint-code")
    assert done.returncode == 0, done.stderr
    tools: dict[str, Any] = {who: words for who, words, _ in kit.calls()}
    formatted = tools["clang_format"]
    assert formatted[:2] == ["--dry-run", "-Werror"]
    assert {"a kernel.cu", "deep/simulator.hpp", "deep/cuda.h", "other.cuh"} <= set(formatted)
    assert "untracked.cu" not in formatted
    assert tools["shellcheck"] == [".ci/run"]
    modules = [words[1:] for who, words, _ in kit.calls() if who == "python"]
    assert modules == [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]]
    for tool in ("clang_format", "shellcheck", "python"):
        assert kit.make("lint-code", **{f"EXIT_OF_{tool}": "1"}).returncode != 0, tool


def test_clean_leaves_the_environment_and_the_results(kit: Kit) -> None:
    caches = [
        kit.root / name for name in (".cache/triton", ".pytest_cache", "harness/__pycache__", "tests/a/__pycache__")
    ]
    kept = [kit.root / name for name in (".venv/bin", "results/journal", "tasks/a b")]
    for folder in (*caches, *kept):
        folder.mkdir(parents=True, exist_ok=True)
    assert kit.make("clean").returncode == 0
    assert not any(folder.exists() for folder in caches)
    assert all(folder.exists() for folder in kept)


@pytest.mark.parametrize("locale", [{"LANG": "C", "PYTHONIOENCODING": "gbk"}])
def test_a_real_check_in_a_chinese_folder_on_a_gbk_terminal(checkout: Path, locale: dict[str, str]) -> None:
    """A submission in that folder prints a character that GBK lacks, and is wrong; all of it must be reported."""
    shutil.copytree(ROOT / "tasks", checkout / "tasks", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / ".venv" / "bin").mkdir(parents=True)
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    text = (
        "import triton\n\n\n@triton.jit\ndef unused(x):\n    pass\n\n\n"
        "def run_kernel(q, k, v, output, qo_indptr, kv_indptr, batch_size, seq_len,"
        " num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal):\n    print('内核 ✓😀')\n    output.zero_()\n"
    )
    (checkout / "我的 kernel.py").write_text(text, encoding="utf-8")
    words = ["TASK=ragged_prefill", "LANG=triton", "CASES=1", "DEVICE=cpu", "FILE=我的 kernel.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "MAKE"))}
    done = subprocess.run(
        ["make", "check", *words, "PYTHON=true"],
        cwd=checkout,
        env={**environment, **locale},
        capture_output=True,
        timeout=240,
        check=False,
    )
    out, err = done.stdout.decode("gbk"), done.stderr.decode("gbk", "replace")
    assert done.returncode == 2, out + err
    assert "WRONG_ANSWER" in out, out + err
    assert "    | 内核 ✓\\U0001f600\n" in out or "    | 内核 \\u2713\\U0001f600\n" in out, out
    assert "'FILE=我的 kernel.py'" in out
    assert "0 of 1 PASS, 1 " in out
    assert "Traceback" not in out + err
