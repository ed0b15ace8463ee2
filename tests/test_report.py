"""`make report`: the tables and plots of the task READMEs are what results/*.json say, and a stale one is noticed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness import catalog, report, report_plot
from harness.verdict import ExitCode, KitError

PEERS = {"toy": "FlashInfer"}


def bench_record(case: int, language: str = "cuda", **changes: Any) -> dict[str, Any]:
    base = {
        "task": "toy",
        "language": language,
        "variant": "",
        "suite": "judge",
        "case": case,
        "label": f"b{case}",
        "peer": "testcase_config.py baseline",
        "ours_ms": 2.0,
        "peer_ms": 3.0,
        "ratio": 1.5,
        "floor_ms": 1.0,
        "floor_by": "bytes",
        "roofline_percent": 50.0,
        "clock": "kernels",
        "flags": [],
        "notes": [],
    }
    return {**base, **changes}


def bench(records: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    base = {
        "date": "2026-12-02T10:00:00+00:00",
        "command": "make bench TASK=toy",
        "device": {"kind": "cuda", "name": "NVIDIA H200", "tuning": "sm90"},
        "versions": {"torch": "2.11.0"},
        "clocks": {},
        "calibration": {"bytes_per_s": 1.0},
        "records": records,
    }
    return {**base, **changes}


def check_record(case: int, language: str = "cuda", **changes: Any) -> dict[str, Any]:
    base = {
        "task": "toy",
        "language": language,
        "suite": "judge",
        "case": case,
        "label": f"b{case}",
        "judge": "PASS",
        "strict": "PASS",
        "ours_ms": 4.0,
        "baseline_ms": 3.0,
        "baseline": "testcase_config.py baseline",
    }
    return {**base, **changes}


def check(records: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    base = {
        "date": "2026-12-01T10:00:00+00:00",
        "command": "harness check --task toy",
        "device": {"kind": "cuda", "name": "NVIDIA H200", "tuning": "sm90"},
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "interrupted": False,
        "records": records,
    }
    return {**base, **changes}


class Toy:
    """A folder of results, and a task `toy` with a README."""

    def __init__(self, root: Path) -> None:
        self.results, self.tasks = root / "results", root / "tasks"
        self.readme = self.tasks / "toy" / "README.md"
        self.results.mkdir()
        self.readme.parent.mkdir(parents=True)
        self.readme.write_text("# toy\n\n<!-- report begin: FlashInfer -->\n<!-- report end -->\n\nMore.\n", "utf-8")

    def keep(self, name: str, document: Any) -> None:
        (self.results / name).write_text(json.dumps(document), encoding="utf-8")

    def section(self) -> str:
        return report.section("toy", self.results, PEERS)[0]

    def rows(self) -> list[list[str]]:
        lines = [line for line in self.section().splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


# -- what is committed -------------------------------------------------------------------------------------------------


def test_the_readmes_and_plots_are_what_make_report_makes() -> None:
    assert report.stale() == [], "run `make report` and commit what it changes"


def test_a_stale_readme_and_a_stale_plot_are_noticed(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    for task in catalog.tasks():
        (tasks / task).mkdir(parents=True)
        for path in (catalog.TASKS / task).glob("*"):
            if path.name == "README.md" or path.suffix == ".svg":
                shutil.copy(path, tasks / task / path.name)
    assert report.stale(tasks=tasks) == []
    plots = sorted(tasks.glob("*/results-*.svg"))
    assert plots

    readme = plots[0].parent / "README.md"
    text = readme.read_text(encoding="utf-8")
    measured = text[text.index(report.BEGIN) :].splitlines()
    row = measured[1 + next(i for i, line in enumerate(measured) if line.startswith("| --- |"))]
    cells = row.split("|")
    cells[4] = " 0.00001 "
    readme.write_text(text.replace(row, "|".join(cells)), encoding="utf-8")
    plots[1].write_text(plots[1].read_text(encoding="utf-8").replace("sha256:", "sha256:0"), encoding="utf-8")
    stray = plots[0].with_name("results-other.svg")
    stray.write_text("<svg/>", encoding="utf-8")
    assert sorted(report.stale(tasks=tasks)) == sorted([readme, plots[1], stray])
    plots[0].unlink()
    assert plots[0] in report.stale(tasks=tasks)


# -- tables ------------------------------------------------------------------------------------------------------------


def test_a_bench_table_has_floor_peer_times_ratios_percent_and_their_means(toy: Toy) -> None:
    records = [bench_record(1), bench_record(2, ours_ms=0.012345, peer_ms=0.01, ratio=0.82, roofline_percent=8.0)]
    records += [
        bench_record(1, "triton", peer_ms=5.0, ratio=2.5),
        bench_record(1, "triton", variant="hopper", ours_ms=1.25),
    ]
    toy.keep("bench-h200-toy.json", bench(records))
    head, rule, first, second, means = toy.rows()
    assert head[:6] == ["case", "floor, ms", "peer, ms", "CUDA, ms", "ratio", "% of roofline"]
    assert head[6::3] == ["Triton, ms", "Triton hopper, ms"]
    assert len(rule) == len(head) == len(means) == 12
    assert first[:6] == ["b1", "1.000", "3.000", "2.000", "**1.50**", "50"]  # the peer's median of 3, 5 and 3
    assert second[:6] == ["b2", "1.000", "0.01000", "0.01235", "0.82", "8"]  # the ratio is of pairs, not of medians
    assert second[6:] == ["-"] * 6
    assert means[4:6] == [f"**{math.sqrt(1.5 * 0.82):.2f}**", "20"]
    assert means[7] == "**2.50** (1 of 2)"
    text = toy.section()
    assert "Peer: FlashInfer" in text
    assert "CUDA, Triton, Triton hopper: 2026-12-02, `make bench TASK=toy`, torch 2.11.0." in text


def test_what_bench_kept_counts_before_what_check_kept(toy: Toy) -> None:
    toy.keep("h200-judge.json", [check([check_record(1), check_record(2)], date="2027-01-01T00:00:00+00:00")])
    assert [row[0] for row in toy.rows()[2:-1]] == ["b1", "b2"]
    toy.keep("bench-h200-toy.json", bench([bench_record(1)]))
    assert [row[:4] for row in toy.rows()[2:-1]] == [["b1", "1.000", "3.000", "2.000"]]


def test_check_records_have_no_floor_and_the_newest_run_counts(toy: Toy) -> None:
    old = check([check_record(1, ours_ms=9.0), check_record(1, "triton")], interrupted=True)
    new = check([check_record(1)], date="2026-12-03T00:00:00+00:00", command="harness check --lang cuda")
    toy.keep("h200-judge.json", [new, old])
    head, _, first, _ = toy.rows()
    assert head == ["case", "floor, ms", "peer, ms", "CUDA, ms", "ratio", "Triton, ms", "ratio"]
    assert first == ["b1", "-", "3.000", "4.000", "0.75", "4.000", "0.75"]
    text = toy.section()
    assert "* Triton: 2026-12-01, `harness check --task toy` (ended early), torch 2.11.0, triton 3.6.0." in text
    assert "* CUDA: 2026-12-03, `harness check --lang cuda`" in text
    assert "come with `make bench`" in text


@pytest.mark.parametrize(
    ("document", "cell"),
    [
        (bench([bench_record(1), bench_record(2, ours_ms=None, flags=["SUSPECT_TIME", "above the peak"])]), "SUSPECT"),
        (check([check_record(1), check_record(2, strict="RACE")]), "RACE"),
        (check([check_record(1), check_record(2, judge="WRONG_ANSWER")]), "WRONG_ANSWER"),
    ],
)
def test_a_case_that_is_not_right_or_not_believed_shows_that_instead_of_a_time(
    toy: Toy, document: Any, cell: str
) -> None:
    toy.keep("bench-h200-toy.json", document)
    *_, first, second, means = toy.rows()
    assert second[3].startswith(cell)
    assert second[4] == "-"
    assert means[4] == f"{first[4]} (1 of 2)", "it is in no mean"


def test_a_baseline_that_is_no_competitor_gives_no_ratio_and_no_plot(toy: Toy) -> None:
    toy.keep("h200-judge.json", [check([check_record(1), check_record(1, "triton", peer="a table", baseline_ms=8.0)])])
    text, plots = report.section("toy", toy.results, {"toy": "-"})
    assert "| b1 | - | 8.000 | 4.000 | - | 4.000 | **2.00** |" in text, "a peer with a name of its own is one"
    assert [each.name for each in plots["results-h200.svg"]] == ["Triton"]
    toy.keep("h200-judge.json", [check([check_record(1)])])
    text, plots = report.section("toy", toy.results, {"toy": "-"})
    assert "| b1 | - | 4.000 |" in text
    assert "ratio |" not in text
    assert plots == {}


def test_a_device_without_times_gets_no_table(toy: Toy) -> None:
    assert toy.section() == "Not measured yet.\n"
    cpu = check([check_record(1)], device={"kind": "cpu", "name": "CPU", "tuning": "c500"})
    untimed = check([check_record(1, ours_ms=None), check_record(2, ours_ms=None, strict="RACE")])
    toy.keep("cpu.json", [cpu])
    toy.keep("mutants-cpu.json", {"device": "CPU", "mutants": {}})
    assert toy.section() == "Not measured yet.\n"
    toy.keep("h200.json", [untimed])
    assert toy.rows() == []
    assert "1 of 2 cases PASS in CUDA, 2026-12-01 (`harness check --task toy`); not timed yet." in toy.section()


def test_devices_and_suites_have_tables_of_their_own(toy: Toy) -> None:
    c500 = {"kind": "maca", "name": "MetaX C500", "tuning": "c500"}
    toy.keep("bench-h200-toy.json", bench([bench_record(1), bench_record(1, suite="live")]))
    toy.keep("bench-c500-toy.json", bench([bench_record(1, clock="events")], device=c500))
    text, plots = report.section("toy", toy.results, PEERS)
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert titles == ["### MetaX C500", "### NVIDIA H200", "### NVIDIA H200, suite live"]
    assert sorted(plots) == ["results-c500.svg", "results-h200-live.svg", "results-h200.svg"]
    assert text.count("by CUDA events where the profiler saw nothing") == 1


def test_searches_are_told_with_their_losses(toy: Toy) -> None:
    candidates = [
        {"row": "(1, 2)", "ratio": [0.9, 0.89, 0.91], "state": "slower"},
        {"row": "(2, 2)", "ratio": [1.1, 1.09, 1.11], "state": "faster"},
        {"row": "(3, 2)", "ratio": None, "state": "failed: RACE on case 1"},
        {"row": "(4, 2)", "ratio": None, "state": "pruned: too big"},
    ]
    run = {"task": "toy", "language": "triton", "suite": "judge", "row": "sm90", "cases": [1, 2], "date": "2026-12-02"}
    run |= {"device": {"name": "NVIDIA H200", "kind": "cuda"}, "candidates": candidates}
    toy.keep("tune-h200-toy-triton.json", {"runs": [run, {**run, "task": "other"}]})
    assert toy.section().splitlines()[2] == (
        "* Triton, row sm90, NVIDIA H200, 2026-12-02, 2 judge cases: `(2, 2)` 1.100 (faster); `(1, 2)` 0.900 (slower); "
        "`(3, 2)` failed: RACE on case 1."
    )


# -- READMEs -----------------------------------------------------------------------------------------------------------


def test_only_what_lies_between_the_markers_is_replaced_and_twice_is_once(toy: Toy) -> None:
    toy.keep("h200.json", [check([check_record(1, baseline_ms=None)])])
    assert report.make(toy.results, toy.tasks) == [toy.readme]
    text = toy.readme.read_text(encoding="utf-8")
    assert text.startswith("# toy\n\n<!-- report begin: FlashInfer -->\n\n### NVIDIA H200\n")
    assert text.endswith("\n\n<!-- report end -->\n\nMore.\n")
    assert report.make(toy.results, toy.tasks) == []
    (toy.results / "h200.json").unlink()
    report.make(toy.results, toy.tasks)
    assert "Not measured yet." in toy.readme.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- report begin: X -->\n",
        "<!-- report end -->\n<!-- report begin: X -->\n",
        "<!-- report begin: X -->\n<!-- report end -->\n<!-- report end -->\n",
        "<!-- report begin: X\n<!-- report end -->\n",
    ],
)
def test_a_readme_without_its_markers_is_named(toy: Toy, text: str) -> None:
    toy.readme.write_text(text, encoding="utf-8")
    with pytest.raises(KitError, match=r"README\.md: put one line"):
        report.make(toy.results, toy.tasks)


def test_results_that_are_no_json_are_named(toy: Toy) -> None:
    (toy.results / "bench-h200-toy.json").write_text("{", encoding="utf-8")
    with pytest.raises(KitError, match=r"bench-h200-toy\.json: no JSON") as caught:
        report.make(toy.results, toy.tasks)
    assert caught.value.code is ExitCode.MISSING_FILE


# -- plots -------------------------------------------------------------------------------------------------------------

SERIES = [
    report_plot.Series("CUDA", "toy on NVIDIA H200", ["b1", "b2", "b3"], [0.5, None, 1.2]),
    report_plot.Series("Triton hopper", "toy on NVIDIA H200", ["b1", "b2", "b3"], [0.9, 1.0, 3.0]),
]


def test_a_plot_is_the_same_file_each_time_and_names_what_it_shows(tmp_path: Path) -> None:
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in (first, second):
        report_plot.draw(SERIES, path, report.fingerprint(SERIES))
    text = first.read_text(encoding="utf-8")
    assert text == second.read_text(encoding="utf-8")
    assert report.fingerprint(SERIES) in text
    assert len(text) < 40_000
    for word in ("toy on NVIDIA H200", "CUDA: 0.77", "Triton hopper: 1.39", "b3"):
        assert word in text, word


def test_the_fingerprint_changes_with_every_number() -> None:
    changed = [
        SERIES[0],
        report_plot.Series("Triton hopper", "toy on NVIDIA H200", ["b1", "b2", "b3"], [0.9, 1.0, 3.1]),
    ]
    assert report.fingerprint(changed) != report.fingerprint(SERIES)
    assert report.fingerprint(SERIES[:1]) != report.fingerprint(SERIES)


def test_without_matplotlib_the_way_to_it_is_told(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(report_plot.importlib, "import_module", missing)
    toy.keep("bench-h200-toy.json", bench([bench_record(1)]))
    with pytest.raises(KitError, match="make env EXTRA=report") as caught:
        report.make(toy.results, toy.tasks)
    assert caught.value.code is ExitCode.ENVIRONMENT
