"""What the command line refuses and how: cases, files, numbers, devices; and the command that repeats a case."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_runner import H200, FakeRunner
from hypothesis import given
from hypothesis import strategies as st

from harness import child, cli, plan
from harness.text import shown
from harness.verdict import CaseResult, ExitCode, KitError

ROOT = Path(__file__).resolve().parent.parent
DEADLINES = ("nan", "0", "-1", "-0.0", "inf", "1e999", "soon", "7 s")

# -- what is refused


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--task=nope"], ExitCode.UNKNOWN_TASK, "TASK=nope: no such task"),
        (["--task=alhpa"], ExitCode.UNKNOWN_TASK, "did you mean alpha?"),
        (["--lang=rust"], ExitCode.UNKNOWN_LANGUAGE, "LANG=rust: no such language"),
        (["--suite=jugde"], ExitCode.MISSING_FILE, "did you mean judge?"),
        (["--suite=nope", "--task=alpha"], ExitCode.MISSING_FILE, "SUITE=nope: no such suite; choose one of"),
        (["--suite=nope", "--task=alpha", "--config=no.py"], ExitCode.MISSING_FILE, "SUITE=nope: no such suite"),
        (["--task="], ExitCode.USAGE, "--task=: nothing is named"),
        (["--cases="], ExitCode.USAGE, "--cases=: nothing is named"),
        (["--tas=alpha"], ExitCode.USAGE, "unrecognized arguments: --tas=alpha; `harness --help`"),
        (["--device=tpu"], ExitCode.USAGE, "DEVICE=tpu: no such device"),
        (["--suite=judge"], ExitCode.NEEDS_DEVICE, "run `make check SUITE=tiny` here"),
        (["--suite=live", "--task=alpha"], ExitCode.NEEDS_DEVICE, "run `make check TASK=alpha SUITE=tiny` here"),
        (["--jobs=0"], ExitCode.USAGE, "JOBS=0:"),
        (["--jobs=two"], ExitCode.USAGE, "JOBS=two:"),
        (["--jobs=" + 5000 * "9"], ExitCode.USAGE, "[4800 characters left out]"),
        (["--repeat=0"], ExitCode.USAGE, "REPEAT=0:"),
        (["--repeat=" + 5000 * "9"], ExitCode.USAGE, "[4800 characters left out]"),
        *((["--deadline=" + text], ExitCode.USAGE, f"--deadline={text}: write") for text in DEADLINES),
        (["--task=alpha", "--lang=triton", "--file=no.py"], ExitCode.MISSING_FILE, "FILE=no.py: no such file"),
        (["--task=alpha", "--lang=triton", "--file=tasks"], ExitCode.MISSING_FILE, "FILE=tasks: that is a folder"),
        (
            ["--task=alpha", "--lang=triton", "--file=~nobody-here/k.py"],
            ExitCode.MISSING_FILE,
            "FILE=~nobody-here/k.py",
        ),
        (["--task=alpha", "--config=" + 300 * "k"], ExitCode.MISSING_FILE, "kkk: no such file"),
        (["--task=alpha", "--config=a\0b"], ExitCode.MISSING_FILE, "CONFIG=a\\x00b: no such file"),
        (["--task=alpha", "--config=a\nb\x1b[31m"], ExitCode.MISSING_FILE, "CONFIG=a\\nb\\x1b[31m: no such file"),
        (["--task=alpha", "--config=tasks"], ExitCode.MISSING_FILE, "CONFIG=tasks: that is a folder"),
        (["--task=alpha", "--config=pipe"], ExitCode.MISSING_FILE, "CONFIG=pipe: that is a pipe"),
        (["--task=alpha", "--lang=triton", "--file=pipe"], ExitCode.MISSING_FILE, "FILE=pipe: that is a pipe"),
        (["--task=alpha", "--config=/dev/null"], ExitCode.MISSING_FILE, "CONFIG=/dev/null: that is a pipe, a device"),
        (["--task=alpha", "--lang=cuda", "--file=k.py"], ExitCode.USAGE, "FILE=k.py: by its name that is no C++ file"),
        (["--task=alpha", "--lang=triton", "--file=k.cu"], ExitCode.USAGE, "that is no Triton file"),
        (["--task=alpha", "--file=tasks"], ExitCode.USAGE, "LANG=cuda|triton|tilelang"),
        (["--config=no.py"], ExitCode.USAGE, "TASK=alpha|beta"),
        (["--task=alpha", "--config=no.py"], ExitCode.MISSING_FILE, "CONFIG=no.py: no such file"),
        (["--task=alpha", "--config=no.py", "--suite=tiny"], ExitCode.USAGE, "the first replaces the second"),
        (["--cases=1,,2"], ExitCode.USAGE, "CASES=1,,2: an empty part is no case"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], words: list[str], code: ExitCode, sentence: str
) -> None:
    os.mkfifo("pipe")
    assert cli.main(["check", *words]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert fake.jobs == []


@pytest.mark.parametrize(
    ("word", "code", "sentence"),
    [
        ("--task=nope", ExitCode.UNKNOWN_TASK, "TASK=nope: no such task"),
        ("--tas=alpha", ExitCode.USAGE, "unrecognized arguments"),
    ],
)
def test_a_mistake_under_json_is_one_document(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], word: str, code: ExitCode, sentence: str
) -> None:
    assert cli.main(["check", "--json", word]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    assert document["error"].startswith(sentence)


def test_an_interrupt_before_anything_runs_is_one_document_under_json(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(request: plan.Request) -> plan.Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "make", interrupted)
    assert cli.main(["check", "--json"]) == ExitCode.INTERRUPTED
    assert json.loads(capsys.readouterr().out) == {"error": "Interrupted.", "exit_code": ExitCode.INTERRUPTED}


def test_a_file_that_may_not_be_read_is_refused(
    fake: FakeRunner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("secret.py").touch()
    monkeypatch.setattr(plan.os, "access", lambda path, mode: False)  # root may read everything
    assert cli.main(["check", "--task=alpha", "--config=secret.py"]) == ExitCode.MISSING_FILE
    assert "CONFIG=secret.py: this user may not read it" in capsys.readouterr().err


def test_several_workers_on_a_gpu_are_refused(gpu: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--jobs=2"]) == ExitCode.USAGE
    assert "JOBS=2: on a GPU the cases are timed" in capsys.readouterr().err


# -- cases


@given(st.sets(st.integers(min_value=1, max_value=40), min_size=1), st.randoms(use_true_random=False))
def test_any_way_to_write_a_set_of_cases_gives_that_set(chosen: set[int], random: object) -> None:
    shuffle, coin = random.shuffle, random.random  # type: ignore[attr-defined]
    parts = [f"{case}-{case}" if coin() < 0.3 else f"{case}" for case in chosen]
    parts += [f"{case} - {case + 1}" for case in chosen if case + 1 in chosen and coin() < 0.5]
    shuffle(parts)
    assert plan.parse_cases(",".join(parts)) == sorted(chosen)


@pytest.mark.parametrize(
    "text",
    [
        *("0", "1-0", "3-1", "-1", "1-", "a", "1,x", "1;2", "1.5", "", ",", "1--2", "1-2-3", "²", "１", "1-３", "+1"),
        *("1_0", "1-99999999999", "1-2000", "99999999999", 5000 * "9", "1-" + 5000 * "9", "1\n2"),
    ],
)
def test_what_is_no_list_of_cases_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(KitError, match=r"^CASES=") as caught:
        plan.parse_cases(text)
    assert str(caught.value).startswith(f"CASES={shown(text)}: ")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["1,1", "1-2,2", "01,2", " 1 , 2 "])
def test_cases_may_be_given_twice(text: str) -> None:
    assert plan.parse_cases(text) == sorted({1, 2} if "2" in text else {1})


# -- devices


def test_no_device_node_means_no_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_may_have_gpu", lambda: False)
    monkeypatch.setattr(child.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert plan.pick_device(None).kind == "cpu"


def test_the_look_up_gives_devices_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def answer(probe: str) -> None:
        monkeypatch.setattr(
            child.subprocess, "run", lambda command, **options: real([command[0], "-c", probe, command[3]], **options)
        )

    monkeypatch.setattr(plan, "_may_have_gpu", lambda: True)
    answer(f"import json; print(json.dumps({{'device': {dataclasses.asdict(H200)!r}}}))")
    assert plan.pick_device(None) == H200
    answer("import json, sys; print(json.dumps({'error': sys.argv[1] + ' is not here', 'code': 13}))")
    with pytest.raises(KitError, match="maca is not here") as caught:
        plan.pick_device("maca")
    assert caught.value.code is ExitCode.NEEDS_DEVICE
    answer("raise SystemExit('driver too old')")
    with pytest.raises(KitError, match=r"driver too old.*DEVICE=cpu"):
        plan.pick_device(None)


def test_the_command_line_imports_neither_torch_nor_a_language() -> None:
    code = "import sys, harness.cli; print([m for m in ('torch', 'triton', 'tilelang', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"


# -- once more


def test_the_command_to_run_again_carries_what_was_given() -> None:
    request = plan.Request(task="alpha", language="cuda", file="my file.cu", device="cpu", suite="tiny")
    result = CaseResult("alpha", "cuda", "wave64", "tiny", 3)
    assert request.again(result) == "make check TASK=alpha LANG=cuda CASES=3 SUITE=tiny DEVICE=cpu 'FILE=my file.cu'"
    more = dataclasses.replace(request, repeat="5", jobs="2", counts=True, time=False)
    assert request.again(result) + " JOBS=2 REPEAT=5 NOTIME=1 COUNTS=1" == more.again(result)


@pytest.mark.parametrize(
    "changes",
    [
        {"lint": False},
        {"deadline_s": "7"},
        {"lint": False, "deadline_s": "0.5", "repeat": "5", "jobs": "2", "counts": True, "time": False},
        {"config": "my package.py", "file": "it's.py", "device": "cpu", "lint": False},
        {"suite": "tiny", "variant": "hopper", "lint": False},
    ],
)
def test_what_make_has_no_variable_for_is_repeated_without_make(changes: dict[str, Any]) -> None:
    request = plan.Request(**changes)
    words = shlex.split(request.again(CaseResult("alpha", "triton", changes.get("variant", ""), "tiny", 2)))
    assert words[:4] == [".venv/bin/python", "-m", "harness", "check"]
    options = cli._parser().parse_args(words[3:])
    assert plan.Request.of(options) == dataclasses.replace(request, task="alpha", language="triton", cases="2")
