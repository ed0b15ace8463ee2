"""make traffic without a GPU: ncu is a script that prints what the real one would, the driver runs on the CPU."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from harness import catalog, cli, plan, traffic
from harness.devices import Device
from harness.verdict import ExitCode
from tests.fake_runner import H200

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def row(number: int, kernel: str, metric: str, value: str) -> str:
    fields = (
        number,
        7,
        "python3",
        "host",
        kernel,
        1,
        7,
        "(384, 1, 1)",
        "(132, 1, 1)",
        0,
        "9.0",
        "Command line",
        metric,
    )
    return ",".join(f'"{field}"' for field in (*fields, "byte", value))


SORT = [
    row(0, "sort_tiles(const int *, int *)", *counter) for counter in ((traffic.READ, "1,024"), (traffic.WRITTEN, "0"))
]
MAIN = [row(1, "moe_kernel", traffic.READ, "9,000,000"), row(1, "moe_kernel", traffic.WRITTEN, "1,000,000.0")]
REPORT = ["==PROF== Connected to process 7", "a word of the submission's", HEAD, *SORT, *MAIN]


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in on PATH that answers for the driver and prints the file `report` beside it."""
    folder = tmp_path / "with a space"
    folder.mkdir()
    tool, script = folder / "ncu", folder / "ncu.py"
    start = shlex.join([sys.executable, str(script)])  # a path with a space fits no #! line
    tool.write_text(f'#!/bin/sh\nexec {start} "$@"\n', encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    script.write_text(
        "import json, pathlib, sys\n"
        "here = pathlib.Path(__file__).parent\n"
        "(here / 'called').write_text(json.dumps(sys.argv[1:]))\n"
        "request = json.loads(pathlib.Path(sys.argv[-1]).read_text())\n"
        "if (here / 'answers').exists():\n"
        "    told = {'label': 'b1', 'read': 8_000_000, 'written': 2_000_000, 'parts': {'weights': 6_000_000}}\n"
        "    pathlib.Path(request['answer']).write_text(json.dumps(told))\n"
        "print((here / 'report').read_text())\n",
        encoding="utf-8",
    )
    (folder / "answers").touch()
    (folder / "report").write_text("\n".join(REPORT), encoding="utf-8")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(plan, "pick_device", lambda requested: H200)
    return folder


WORDS = ["traffic", "--task=fused_moe", "--lang=triton", "--cases=2"]


def test_a_report_is_read_launch_by_launch() -> None:
    sort, main = traffic.parse("\n".join(REPORT))
    assert sort == traffic.Kernel("sort_tiles(const int *, int *)", 1024, 0)
    assert main == traffic.Kernel("moe_kernel", 9_000_000, 1_000_000)
    assert traffic.parse("==PROF== nothing here") == []
    assert traffic.parse(HEAD) == []
    with pytest.raises(ValueError, match=r"no dram__bytes_read\.sum or no .* for moe_kernel"):
        traffic.parse("\n".join([HEAD, MAIN[0]]))


def test_a_line_has_the_sum_and_each_kernel(ncu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(WORDS) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[-5:] == ["8.0", "9.0", "1.125", "2.0", "1.0"]
    assert lines[3].strip() == "to be read: weights 6.0 MB"
    assert lines[4].strip().startswith("sort_tiles")
    assert lines[5].strip() == "moe_kernel: read 9.0 MB, written 1.0 MB"
    assert lines[6] == "1 of 1 cases counted"
    called = json.loads((ncu / "called").read_text(encoding="utf-8"))
    assert called[called.index("--metrics") + 1] == f"{traffic.READ},{traffic.WRITTEN}"
    assert called[called.index("--profile-from-start") + 1] == "off"


def test_without_cases_all_of_a_package_are_counted(ncu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = catalog.ROOT / "tasks/fused_moe/skew_config.py"  # imports tasks.common
    assert cli.main([*WORDS[:3], f"--config={config}"]) == ExitCode.OK
    assert "12 of 12 cases counted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("report", "answers", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", False, "nothing was counted: ==ERROR== ERR_NVGPUCTRPERM"),
        ("==PROF== no kernels were profiled", True, "nothing was counted: ==PROF== no kernels were profiled"),
        ("\n".join(REPORT), False, "nothing was counted"),
        ("\n".join([HEAD, MAIN[1]]), True, "ncu gave no dram__bytes_read.sum"),
    ],
)
def test_what_was_not_counted_is_no_figure(
    ncu: Path, capsys: pytest.CaptureFixture[str], report: str, answers: bool, said: str
) -> None:
    (ncu / "report").write_text(report, encoding="utf-8")
    if not answers:
        (ncu / "answers").unlink()
    assert cli.main(WORDS) == ExitCode.RUNTIME_ERROR
    out = capsys.readouterr().out
    assert said in out
    assert "0 of 1 cases counted" in out


def test_without_ncu_or_an_nvidia_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["traffic"]) == ExitCode.NEEDS_DEVICE
    assert "ncu needs an NVIDIA GPU and this is CPU" in capsys.readouterr().err
    monkeypatch.setattr(plan, "pick_device", lambda requested: Device("maca", "cuda", "MetaX C500", "c500"))
    assert cli.main(["traffic"]) == ExitCode.NEEDS_DEVICE
    monkeypatch.setattr(plan, "pick_device", lambda requested: H200)
    monkeypatch.setattr(traffic, "_NCU", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["traffic"]) == ExitCode.ENVIRONMENT
    assert "ncu is missing" in capsys.readouterr().err


def test_the_driver_runs_a_case_and_tells_its_floor(tmp_path: Path) -> None:
    answer, request = tmp_path / "answer.json", tmp_path / "request.json"
    asked = {
        "task": "fused_moe",
        "language": "triton",
        "variant": "",
        "config": str(catalog.suite_path("fused_moe", "tiny")),
        "submission": str(catalog.submission_path("fused_moe", "triton")),
        "device": "cpu",
        "settings": {},
        "case": 1,
        "answer": str(answer),
    }
    request.write_text(json.dumps(asked), encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run(traffic._driver(request), cwd=catalog.ROOT, check=True, env=environment)
    told = json.loads(answer.read_text(encoding="utf-8"))
    assert told["label"] == "one tile"
    rows, N, K = 128, told["written"] // 256, told["parts"]["a"] // 128
    assert told["written"] == 2 * rows * N
    assert told["parts"] == {"weights (1 of 3 experts)": N * K, "a": rows * K}
    assert 0 < told["read"] - N * K - rows * K < 8 * (rows + N)  # scales and tables
