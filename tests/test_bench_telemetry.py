"""What nvidia-smi and mx-smi say, gaps and all; and the day's calibration, with its own process."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from harness import cache, timing
from harness.bench import calibration, telemetry
from harness.bench.telemetry import Clocks, parse_mx, parse_nvidia
from harness.devices import Device
from harness.verdict import ExitCode, KitError

H200 = Device("cuda", "cuda", "NVIDIA H200", "sm90")

# -- telemetry ---------------------------------------------------------------------------------------------------------

MX = """mx-smi  version: 2.2.9

=================== MetaX System Management Interface Log ===================
Timestamp                                         : Tue Apr  1 10:10:23 2025

Attached GPUs                                     : 1
GPU#0  MXC500  0000:0e:00.0
    Clocks
        XCORE_CLK                                 : 1125 MHz
        MC0_CLK                                   : 1800 MHz
    Temperature
        hotspot(Celsius)                          : 47.50
    Board Power
        12V                                       : 12.05 V 5.20 A 62.66 W
        Total                                     : 112.66 W
    Clock throttle reasons
        idle                                      : Active
        power brake                               : Not Active
        board power limit                         : Active
"""


@pytest.mark.parametrize(
    ("text", "clocks"),
    [
        ("1980, 3201, 34, 121.35, 0x0000000000000000\n", Clocks(1980, 3201, 34, 121.35)),
        ("345, 3201, 30, 76.2, 0x0000000000000001\n", Clocks(345, 3201, 30, 76.2)),  # idle is no throttling
        ("1410, 3201, 71, 698.90, 0x0000000000000004", Clocks(1410, 3201, 71, 698.9, ["power cap"])),
        ("1, 2, 3, 4, 0x00000000000000E8", None),
        ("[N/A], 3201, 34, [Not Supported], [N/A]", Clocks(None, 3201, 34, None)),
        ('Field "clocks_event_reasons.active" is not a valid field to query.\n\n1, 2, 3, 4, 0x0\n', Clocks(1, 2, 3, 4)),
    ],
)
def test_nvidia_smi_is_read(text: str, clocks: Clocks | None) -> None:
    expected = clocks or Clocks(
        1, 2, 3, 4, ["hardware slowdown", "thermal (software)", "thermal (hardware)", "power brake"]
    )
    assert parse_nvidia(text) == expected


@pytest.mark.parametrize("text", ["", "No devices were found\n", "1980, 34\n", "a, b, c, d, e, f"])
def test_what_nvidia_smi_says_instead_is_a_note(text: str) -> None:
    clocks = parse_nvidia(text)
    assert clocks.note.startswith("nvidia-smi says: ")
    assert clocks.sm_mhz is None
    assert str(clocks) == clocks.note


def test_mx_smi_is_read() -> None:
    assert parse_mx(MX) == Clocks(1125, 1800, 47.5, 112.66, ["board power limit"])
    assert parse_mx("Device or resource busy\n").note == "mx-smi says: Device or resource busy"
    assert parse_mx("").note == "mx-smi says: nothing"


def test_clocks_in_words_and_as_json() -> None:
    assert str(Clocks(1410.0, None, 71.0, 698.9, ["power cap"])) == "1410 MHz, 71 C, 699 W, held back by power cap"
    assert Clocks(1410.0).to_json() == {
        "sm_mhz": 1410.0,
        **dict.fromkeys(("memory_mhz", "temperature_c", "power_w")),
        "throttle": [],
    }
    assert Clocks(note="no tool").to_json()["note"] == "no tool"


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    for name in ("CUDA_VISIBLE_DEVICES", "MACA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_tool_is_asked_for_the_visible_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(path, "nvidia-smi", f'echo "$@" > {path}/asked; echo "1980, 3201, 34, 121.35, 0x0"')
    assert telemetry.read("cuda") == Clocks(1980, 3201, 34, 121.35)
    fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    asked = (path / "asked").read_text(encoding="utf-8").strip()
    assert asked == f"--id=0 --format=csv,noheader,nounits --query-gpu={fields}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a; touch hit,2")
    telemetry.read("cuda")
    assert (path / "asked").read_text(encoding="utf-8").startswith("--id=GPU-5a; touch hit --format")
    tool(path, "mx-smi", f'echo "$@" > {path}/asked; echo "XCORE_CLK : 1125 MHz"')
    assert telemetry.read("maca") == Clocks(1125)
    asked = (path / "asked").read_text(encoding="utf-8").strip()
    assert asked == "-i 0 --show-clock --show-temperature --show-board-power --show-clk-tr"


def test_an_old_driver_is_asked_by_the_old_name(path: Path) -> None:
    tool(path, "nvidia-smi", 'case "$*" in *event*) echo "not a valid field"; exit 2;; esac; echo "1, 2, 3, 4, 0x4"')
    assert telemetry.read("cuda") == Clocks(1, 2, 3, 4, ["power cap"])


def test_a_missing_a_failing_and_a_hanging_tool_are_notes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert telemetry.read("maca").note == "mx-smi is not here: no clocks, no temperature, no power"
    tool(path, "nvidia-smi", "echo cannot talk to the driver >&2; exit 9")
    assert telemetry.read("cuda").note == "nvidia-smi says: cannot talk to the driver"
    tool(path, "nvidia-smi", "sleep 60")
    monkeypatch.setattr(telemetry, "_TIMEOUT_S", 0.2)
    assert telemetry.read("cuda").note == "nvidia-smi did not answer in 0.2 s"


def test_the_device_is_kept_busy_until_the_answer_is_there(path: Path) -> None:
    tool(path, "nvidia-smi", f'while [ ! -e {path}/go ]; do sleep 0.01; done; echo "1, 2, 3, 4, 0x0"')
    calls = []

    def work() -> None:
        calls.append(1)
        if len(calls) == 5:
            (path / "go").touch()

    assert telemetry.read("cuda", work) == Clocks(1, 2, 3, 4)
    assert len(calls) >= 5


# -- calibration -------------------------------------------------------------------------------------------------------

NOW = datetime(2026, 12, 1, 12, tzinfo=timezone.utc)
PEAKS = {"bytes_per_s": 4e12, "ops_per_s": {"bf16": 8e14, "int8": 1.6e15}, "cold": True}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A .cache of its own, and how often a device was measured (each time a bit faster)."""
    times: list[int] = []

    def measure() -> dict[str, Any]:
        times.append(1)
        return {**PEAKS, "bytes_per_s": 4e12 + len(times)}

    monkeypatch.setattr(cache, "folder", lambda: tmp_path / ".cache")
    monkeypatch.setattr(calibration, "_measured", measure)
    return times


def test_a_calibration_serves_for_a_day_on_one_device(measured: list[int]) -> None:
    first = calibration.obtain(H200, NOW)
    assert first == {**PEAKS, "bytes_per_s": 4e12 + 1, "date": "2026-12-01T12:00:00+00:00", "device": "NVIDIA H200"}
    assert calibration.obtain(H200, NOW + timedelta(hours=23, minutes=59)) == first
    assert len(measured) == 1
    assert calibration.obtain(H200, NOW + timedelta(days=1)) != first
    assert calibration.obtain(Device("cuda", "cuda", "NVIDIA H100", "sm90"), NOW + timedelta(days=1)) != first
    assert len(measured) == 3


def test_a_calibration_of_the_future_is_made_anew(measured: list[int]) -> None:
    """A clock that was set back would otherwise keep it for long."""
    first = calibration.obtain(H200, NOW)
    assert calibration.obtain(H200, NOW - timedelta(minutes=1)) != first


@pytest.mark.parametrize(
    "stored",
    [
        *("", "{", "[]", "null", "{}"),
        json.dumps({**PEAKS, "date": "yesterday", "device": "NVIDIA H200"}),
        json.dumps({**PEAKS, "date": NOW.isoformat()}),
        json.dumps({**PEAKS, "bytes_per_s": 0, "date": NOW.isoformat(), "device": "NVIDIA H200"}),
        json.dumps({**PEAKS, "ops_per_s": {"bf16": 1}, "date": NOW.isoformat(), "device": "NVIDIA H200"}),
        json.dumps({**PEAKS, "date": "2026-12-01T12:00:00", "device": "NVIDIA H200"}),  # in no time zone
    ],
)
def test_a_stored_calibration_that_says_too_little_is_made_anew(measured: list[int], stored: str) -> None:
    calibration.stored_at().parent.mkdir()
    calibration.stored_at().write_text(stored, encoding="utf-8")
    assert calibration.obtain(H200, NOW)["bytes_per_s"] == 4e12 + 1


def test_a_checkout_that_cannot_be_written_to_measures_each_time(measured: list[int], tmp_path: Path) -> None:
    (tmp_path / ".cache").touch()
    for number in (1, 2):
        assert calibration.obtain(H200, NOW)["bytes_per_s"] == 4e12 + number


def test_measuring_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / ".cache")
    good = [sys.executable, "-c", f"print('hello'); print({json.dumps(json.dumps(PEAKS))})"]
    monkeypatch.setattr(calibration, "_COMMAND", good)
    assert calibration.obtain(H200, NOW)["ops_per_s"] == PEAKS["ops_per_s"]
    calibration.stored_at().unlink()
    monkeypatch.setattr(calibration, "_COMMAND", [sys.executable, "-c", "raise RuntimeError('CUDA error: busy')"])
    with pytest.raises(KitError, match=r"could not be calibrated \(RuntimeError: CUDA error: busy\)") as error:
        calibration.obtain(H200, NOW)
    assert error.value.code == ExitCode.ENVIRONMENT


def test_what_that_process_prints_is_what_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peaks = timing.Peaks(4e12, {"bf16": 8e14, "int8": 1.6e15}, True)
    monkeypatch.setattr(timing, "calibrate", lambda: peaks)
    calibration.main()
    assert calibration.peaks(json.loads(capsys.readouterr().out)) == peaks
