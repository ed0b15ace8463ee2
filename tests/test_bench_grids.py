"""`make bench BASELINE=1` and `OURS=1`: the CSVs that come out, and what is said of them.

Libraries only check how they are called, and no time is real: neither needs a GPU.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import gc
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grid_fakes import DECODE, GRIDS, MLA, PAGED, RAGGED, install
from test_published_suites import _Mla
from torch import Tensor

from harness import catalog, cli, devices, languages, plan, runner, strict, worker
from harness.bench import calibration, grids, grids_worker, measure, telemetry
from harness.bench.measure import Measured
from harness.contract import load_contract
from harness.devices import Device
from harness.runner import Job
from harness.timing import Peaks
from harness.verdict import CaseResult, ExitCode, KitError

PEAKS = {
    "bytes_per_s": 4e12,
    "ops_per_s": {"bf16": 8e14, "int8": 16e14},
    "cold": True,
    "date": "2026-12-01T00:00:00+00:00",
    "device": "Pretended",
}
GPU = Device("cuda", "cuda", "Pretended GPU", "sm90")
NOW = datetime(2026, 12, 1, 2, 3, 4, tzinfo=timezone.utc)


class Channel:
    """What a worker reports to, without a process."""

    def __init__(self, on_result: Callable[[CaseResult], None]) -> None:
        self.result = on_result

    def send(self, event: str, **fields: Any) -> None:
        pass


@dataclasses.dataclass
class Pretended:
    """A GPU that is none: jobs run in this process, on the CPU, on small points, by a clock that says what it is told.

    `ms[number]`: the time of a point, 0.5 where it has none; or a function that raises instead.
    """

    folder: Path
    ms: dict[int, Any] = dataclasses.field(default_factory=dict)
    jobs: list[Job] = dataclasses.field(default_factory=list)

    def bench(self, *words: str) -> int:
        return cli.main(["bench", *words])

    def csv(self, name: str) -> list[list[str]]:
        """The lines of the one CSV whose name begins so."""
        (path,) = self.folder.glob(f"{name}_20*.csv")
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.reader(file))

    def json(self, name: str) -> dict[str, Any]:
        (path,) = self.folder.glob(f"{name}_20*.json")
        return dict(json.loads(path.read_text(encoding="utf-8")))


POINTS = 4


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which libraries are installed; both, unless a test takes one away."""
    return install(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, libraries: list[str]) -> Pretended:
    fake = Pretended(tmp_path / "tutorial")
    real, point = functools.cache(grids.of_task), {"now": 0}

    def of_task(task: str) -> dict[str, tuple[Any, ...]]:
        small = {"batch_size": 2, "seq_len": 33, "seq_len_kv": 33}
        return {
            name: tuple(
                dataclasses.replace(
                    grid,
                    points=tuple({**point, **{k: v for k, v in small.items() if k in point}} for point in few),
                )
                for grid in found
                for few in (grid.points[:POINTS],)
            )
            for name, found in real(task).items()
        }

    def run_jobs(jobs: Sequence[Job], on_result: Callable[[CaseResult], None], *rest: object) -> None:
        assert rest == (1, grids.WORKER)
        fake.jobs += jobs
        for job in jobs:
            assert job.cases is not None
            worker.serve(Channel(on_result), Job(**json.loads(json.dumps(vars(job)))), job.cases, Session)  # type: ignore[arg-type]

    class Session(grids_worker.GridSession):
        def run(self, case_id: int, phase: Callable[[str], None]) -> CaseResult:
            point["now"] = case_id
            return super().run(case_id, phase)

    def time_call(call: Callable[[], object], budget_s: float) -> Measured:
        assert budget_s == grids.BUDGET_S
        call()
        ms = fake.ms.get(point["now"], 0.5)
        if callable(ms):
            ms()
        return Measured(ms, ms * 0.99, ms * 1.01, 100, ms + 0.01, ["as told"], 1000, ms + 0.005)

    cpu = Device("cpu", "cpu", "CPU", "c500")
    monkeypatch.setattr(grids, "of_task", of_task)
    monkeypatch.setattr(grids, "folder", lambda grid: tmp_path / grid)
    monkeypatch.setattr(runner, "run_jobs", run_jobs)
    monkeypatch.setattr(plan, "pick_device", lambda requested: GPU)
    monkeypatch.setattr(devices, "pick", lambda requested=None: cpu)
    monkeypatch.setattr(calibration, "obtain", lambda device: PEAKS)
    monkeypatch.setattr(telemetry, "read", lambda kind: telemetry.Clocks(sm_mhz=1980.0))
    monkeypatch.setattr(measure, "time_call", time_call)
    monkeypatch.setattr(grids_worker, "gc", SimpleNamespace(collect=lambda: None))  # 0.3 s in a process like this one
    monkeypatch.setattr(
        languages,
        "load",
        lambda language, path, arguments, device, variant, settings: languages.Submission(
            language, path, lambda args: _computes(arguments, args)
        ),
    )
    return fake


def _computes(arguments: Sequence[str], args: Sequence[Any]) -> None:
    """Stands for a submission: the reference of whichever task has these arguments."""
    for task in catalog.tasks():
        contract = load_contract(catalog.reference_path(task))
        if contract.arguments == tuple(arguments):
            args[contract.output_indices[0]].copy_(contract.honest(*args)["output"])


def test_every_grid_is_written_with_its_columns_and_progress(
    gpu: Pretended, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.bench("--baseline") == ExitCode.OK
    shown = capsys.readouterr().out.splitlines()
    for api, (_, grid) in GRIDS.items():
        header, *lines = gpu.csv(api)
        assert header == list(grid.columns)
        assert len(lines) == POINTS
        assert [line[header.index("time_ms")] for line in lines] == ["0.500000"] * POINTS
    assert len(list(gpu.folder.glob("*.csv"))) == len(list(gpu.folder.glob("*.json"))) == len(GRIDS)
    # 2 sequences of 33 tokens, 8 KV heads of 64, 3 pages each; 32 query heads.
    moved = 2 * (2 * 33 * 2 * 8 * 64 + 2 * 2 * 32 * 64) + 4 * (2 + 6)
    flops = 4 * 2 * 33 * 32 * 64
    assert gpu.csv(DECODE)[1] == [
        *(DECODE, "2", "1", "33", "32", "8", "64"),
        *("0.500000", f"{moved / 0.5e-3 / 1e9:.3f}", f"{flops / 0.5e-3 / 1e12:.3f}"),
    ]
    first = f"[1/4] bs=2, kv_len=33, hd=64: 0.500ms, {moved / 5e5:.2f} GB/s, {flops / 5e8:.2f} TFLOPs"
    assert shown[0] == first
    assert any(line.startswith("[4/4] bs=2, kv_len=33, hd=512: 0.500ms, ") and "TFLOPs" not in line for line in shown)
    assert all("[4/4]" in shown[i] for i, line in enumerate(shown[1:]) if ".csv: 4 rows, 4 timed" in line)


def test_file_names_and_the_document_beside(gpu: Pretended) -> None:
    words = ["bench", "--baseline", f"--api={MLA}", "--points=2-3"]
    assert grids.run(cli._parser().parse_args(words), words, lambda: NOW) == ExitCode.OK
    assert sorted(path.name for path in gpu.folder.iterdir()) == [
        f"{MLA}_20261201_020304.csv",
        f"{MLA}_20261201_020304.json",
    ]
    document = gpu.json(MLA)
    assert document["csv"] == f"{MLA}_20261201_020304.csv"
    assert document["command"] == f"make bench BASELINE=1 API={MLA} POINTS=2-3"
    assert (document["calibration"], document["device"]["name"]) == (PEAKS, "Pretended GPU")
    assert document["clocks"]["after"]["sm_mhz"] == 1980.0
    assert [entry["case"] for entry in document["records"]] == [2, 3]
    entry = document["records"][0]
    assert (entry["peer_ms"], entry["ours_ms"], entry["peer_host_ms"]) == (0.5, None, 0.51)
    assert entry["peer"] == "FlashInfer BatchMLAPagedAttentionWrapper, backend auto"
    assert 0 < entry["roofline_percent"] < 100
    assert entry["notes"] == ["as told"]


def test_a_row_without_memory_is_kept_and_the_memory_is_given_back(
    gpu: Pretended, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, held, left = grids.of_task, [], []

    def of_task(task: str) -> Any:
        def build(point: Any, device: str, grid: Any) -> list[Any]:
            left.append(sum(reference() is not None for reference in held))
            args = grid.build(point, device)
            held.append(weakref.ref(args[0]))
            args[0].itself = args[0]  # what only the collector of cycles can free
            return list(args)

        return {
            name: tuple(dataclasses.replace(g, build=lambda p, d, g=g: build(p, d, g)) for g in found)
            for name, found in real(task).items()
        }

    monkeypatch.setattr(grids, "of_task", of_task)

    def no_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 34.00 GiB")

    monkeypatch.setattr(grids_worker, "gc", gc)
    gpu.ms[2] = no_memory
    assert gpu.bench("--baseline", f"--api={RAGGED}") == ExitCode.OK
    assert [line[-3:] for line in gpu.csv(RAGGED)[2:3]] == [["OOM", "OOM", "OOM"]]
    assert gpu.csv(RAGGED)[3][-3] == "0.500000"
    assert "[2/4] bs=2, seq_len=33, hd_qk=128, hd_vo=128: OOM\n" in capsys.readouterr().out
    assert left == [0] * POINTS
    assert gpu.json(RAGGED)["records"][1]["flags"] == ["OUT_OF_MEMORY"]


def test_a_figure_above_the_peak_is_flagged_and_left_out(gpu: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.ms |= {1: 1e-6, 3: 0.0}
    assert gpu.bench("--baseline", f"--api={PAGED}") == ExitCode.OK
    lines = gpu.csv(PAGED)
    assert [line[-3:] for line in (lines[1], lines[3])] == [["SUSPECT"] * 3] * 2
    assert lines[2][-3] == "0.500000"
    shown = capsys.readouterr().out
    # 4 * 2 * 33 * 33 * 32 * 128 FLOP in a nanosecond.
    assert "SUSPECT (1e-06 ms would be 35,684 TFLOPS, and this device was seen to do 800)" in shown
    assert "SUSPECT (not one kernel ran in the timed calls)" in shown
    assert shown.splitlines()[-1].endswith("4 rows, 2 timed, 2 SUSPECT")
    records = gpu.json(PAGED)["records"]
    assert [entry["tflops"] is None for entry in records] == [True, False, True, False]


@pytest.mark.parametrize(("share", "believed"), [(0.5, True), (1.05, True), (1.15, False), (80.0, False)])
def test_a_rate_may_pass_its_peak_by_a_tenth(share: float, believed: bool) -> None:
    peaks = Peaks(4e12, {"bf16": 8e14}, True)
    compute = {"flops": share * 8e11, "bytes": 0, "dtype": "bf16"}  # in 1 ms
    memory = {"flops": 0, "bytes": share * 4e9, "dtype": "bf16"}
    for workload, peak in ((compute, "TFLOPS, and this device was seen to do 800"), (memory, "seen to do 4,000")):
        doubt = grids_worker.above_peak(1.0, workload, peaks)
        assert (doubt == "") == believed
        assert believed or doubt.endswith(peak)


def test_a_library_that_computes_something_else_is_not_timed(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = _Mla.run

    def half(self: Any, q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, out: Tensor, return_lse: bool) -> None:
        real(self, q_nope, q_pe, ckv, kpe, out, return_lse)
        out[-1, 5] *= 0.9

    monkeypatch.setattr(_Mla, "run", half)
    assert gpu.bench("--baseline", f"--api={MLA}") == ExitCode.NOTHING_RAN
    assert {line[-1] for line in gpu.csv(MLA)[1:]} == {"WRONG"}
    assert "WRONG (the last sequence's output[0, 5, " in capsys.readouterr().out


def test_a_comparison_without_memory_is_noted(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(strict, "compare", none)
    assert gpu.bench("--baseline", f"--api={MLA}", "--points=1") == ExitCode.OK
    notes = gpu.json(MLA)["records"][0]["notes"]
    assert notes[0] == "not compared with the reference, which needs more memory than there is"


def test_a_point_that_a_library_refuses_is_an_error_with_its_words(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_with_kvcache", refuse)
    assert gpu.bench("--baseline", "--api=flash_attn_with_kvcache_headdim512") == ExitCode.NOTHING_RAN
    assert gpu.csv("flash_attn_with_kvcache_headdim512")[1] == ["2", "33", "8", "512", "ERROR", "ERROR"]
    assert "head dimension at most 256" in capsys.readouterr().out


def test_without_flash_attn_the_file_is_named_after_flashinfer(gpu: Pretended, libraries: list[str]) -> None:
    libraries.remove("flash_attn")
    assert gpu.bench("--baseline", "--api=flash_attn_with_kvcache_headdim64") == ExitCode.OK
    name = "flash_attn_with_kvcache_headdim64_by_flashinfer_decode"
    assert gpu.csv(name)[1][:4] == ["2", "33", "8", "64"]
    assert gpu.json(name)["records"][0]["peer"] == "FlashInfer BatchDecodeWithPagedKVCacheWrapper, CUDA cores"


@pytest.mark.parametrize(
    ("there", "api", "sentence"),
    [
        (["flash_attn"], MLA, "flashinfer is not installed; make env EXTRA=flashinfer."),
        ([], "flash_attn_with_kvcache", "neither flash_attn nor flashinfer is installed; make env EXTRA=flashinfer."),
    ],
)
def test_a_missing_library_is_one_sentence(
    there: list[str],
    api: str,
    sentence: str,
    gpu: Pretended,
    libraries: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    libraries[:] = there
    assert gpu.bench("--baseline", f"--api={api}") == ExitCode.ENVIRONMENT
    said = capsys.readouterr().err.strip()
    assert said.endswith(sentence)
    assert "\n" not in said
    assert not gpu.folder.exists()
    assert not gpu.jobs


def test_a_library_that_does_not_import_is_one_sentence(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert gpu.bench("--baseline", f"--api={MLA}") == ExitCode.ENVIRONMENT
    assert capsys.readouterr().err.startswith(f"{MLA}: flashinfer is installed but cannot be imported (")
    assert not gpu.folder.exists()


def test_an_interrupted_run_keeps_its_rows(gpu: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    real = grids._receive

    def interrupt(output: Any, stream: Any, result: CaseResult) -> None:
        if result.case == 3:
            raise KeyboardInterrupt
        real(output, stream, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "_receive", interrupt)
        assert gpu.bench("--baseline", f"--api={DECODE}") == ExitCode.INTERRUPTED
    assert len(gpu.csv(DECODE)) == 1 + 2
    assert [entry["case"] for entry in gpu.json(DECODE)["records"]] == [1, 2]
    assert "2 rows, 2 timed" in capsys.readouterr().out


def test_rows_are_on_disk_as_they_are_measured(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = grids._receive, []

    def receive(output: Any, stream: Any, result: CaseResult) -> None:
        real(output, stream, result)
        seen.append(len(gpu.csv(DECODE)) - 1)

    monkeypatch.setattr(grids, "_receive", receive)
    assert gpu.bench("--baseline", f"--api={DECODE}") == ExitCode.OK
    assert seen == [1, 2, 3, 4]


def test_ours_in_every_language_with_what_the_contract_leaves_out(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = grids.of_task

    def of_task(task: str) -> Any:
        return {
            name: tuple(
                dataclasses.replace(g, points=(g.points[0], {**g.points[1], "head_dim": 80}, g.points[2]))
                for g in found
            )
            for name, found in real(task).items()
        }

    monkeypatch.setattr(grids, "of_task", of_task)
    assert gpu.bench("--ours", "--grid=tutorial", "--task=paged_prefill", "--variant=plain") == ExitCode.OK
    header, *lines = gpu.csv(f"{PAGED}_ours")
    assert header == [*GRIDS[PAGED][1].columns, "language"]
    assert [line[-1] for line in lines] == ["cuda"] * 3 + ["triton"] * 3 + ["tilelang"] * 3
    assert [line[-2] for line in lines[1::3]] == ["NOT_COVERED"] * 3
    assert {line[-4] for line in lines} == {"0.500000", "NOT_COVERED"}
    shown = capsys.readouterr().out
    assert "triton [2/3] bs=2, seq_len=33, hd=80: NOT_COVERED (head_dim 80 is none of 64, 128, 256)\n" in shown
    assert "triton [1/3] bs=2, seq_len=33, hd=128: 0.500ms, " in shown
    entry = gpu.json(f"{PAGED}_ours")["records"][0]
    assert (entry["ours_ms"], entry["peer_ms"], entry["peer"]) == (0.5, None, "")


def test_json_is_one_document_and_progress_goes_to_stderr(
    gpu: Pretended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.bench("--baseline", "--json", f"--api={MLA}", f"--out={tmp_path / 'mine'}") == ExitCode.OK
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert [len(table["records"]) for table in document["tables"]] == [POINTS]
    assert Path(document["tables"][0]["csv"]).parent == tmp_path / "mine"
    assert said.err.startswith("[1/4] bs=2, ")
    assert not gpu.folder.exists()


def test_ours_that_is_wrong_is_a_failure(gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        languages,
        "load",
        lambda language, path, *rest, **settings: languages.Submission(language, path, lambda args: None),
    )
    assert gpu.bench("--ours", f"--api={MLA}", "--lang=triton", "--points=1") == ExitCode.REJECTED
    assert gpu.csv(f"{MLA}_ours")[1][-2:] == ["WRONG", "triton"]


def test_a_device_fault_costs_one_point(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    stub = (sys.executable, str(Path(__file__).parent / "submissions" / "stub_grid_worker.py"))
    grid = GRIDS[DECODE][1]
    head = {"date": NOW.isoformat(), "clocks": {}}
    output = grids.Output(grid, DECODE, gpu.folder, head, language_column=False)
    settings = {"grid": "tutorial", "library": 0}
    job = Job("kvcache_decode", "", "", DECODE, "", "", [1, 2, 3], "cpu", 60.0, settings, False)
    runner.run_jobs([job], lambda result: grids._receive(output, sys.stdout, result), 1, stub)
    output.close({})
    assert [line[-1] for line in gpu.csv(DECODE)[1:]] == ["2.000", "ERROR", "2.000"]
    assert "[2/144] bs=1, kv_len=512, hd=128: ERROR (the process was killed by SIGABRT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--baseline", "--ours"], ExitCode.USAGE, "BASELINE=1 and OURS=1: give one of them"),
        (["--api=x"], ExitCode.USAGE, "API=x: say whose kernels to time, BASELINE=1 or OURS=1."),
        (["--baseline", "--grid=tutor"], ExitCode.USAGE, "GRID=tutor: no such grid; choose one of tutorial."),
        (["--baseline", "--task=fused_moe"], ExitCode.MISSING_FILE, "TASK=fused_moe: it has no grid tutorial"),
        (["--baseline", "--api=BatchMLA"], ExitCode.USAGE, "API=BatchMLA: no such CSV; "),
        (["--baseline", "--points=x"], ExitCode.USAGE, "POINTS=x: x is no point; write numbers and ranges"),
        (["--ours", f"--api={MLA}", "--points=30-40"], ExitCode.MISSING_FILE, f"{MLA} has points 1 to 32."),
        (["--ours", "--suite=live"], ExitCode.USAGE, "SUITE=live: it means nothing on a grid"),
        (["--baseline", "--lang=triton"], ExitCode.USAGE, "LANG=triton: BASELINE=1 times libraries"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], code: ExitCode, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words]) == code
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert "\n" not in said


@pytest.mark.parametrize("words", [["--baseline"], ["--ours", "--grid=tutorial"]])
def test_without_a_gpu_it_is_one_sentence(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "_may_have_gpu", lambda: False)
    assert cli.main(["bench", *words]) == ExitCode.NEEDS_DEVICE
    said = capsys.readouterr()
    assert said.err.startswith("`make bench` times kernels on a GPU")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_options_of_grids_leave_other_benches_alone() -> None:
    parser = argparse.ArgumentParser()
    grids.add_options(parser)
    assert not grids.wanted(parser.parse_args([]))
    assert grids.wanted(parser.parse_args(["--baseline"]))
    with pytest.raises(KitError):
        grids.wanted(parser.parse_args(["--points=1"]))
