"""make counts: a case run in the simulator, the table, and where it goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_sanitize import CONFIG, REFERENCE, SOURCE

from harness import catalog, cli, counts
from harness.counts import BEGIN, END, Row
from harness.verdict import ExitCode, KitError

README = f"# toy\n\n{BEGIN}\nold\n{END}\n\n## After\n"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task whose kernel multiplies 4 (or, wrongly, 6) floats."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "reference.py").write_text(REFERENCE.replace('"bytes": 0', '"bytes": 512'), encoding="utf-8")
    (folder / "README.md").write_text(README, encoding="utf-8")
    extra = 'CASE_LABELS = ("n4", "n4 again")\nTILE = "a row"\nTILES = (1, 2)\n'
    (folder / "counts_config.py").write_text(CONFIG.replace("{sizes}", "[4, 4]") + extra, encoding="utf-8")
    monkeypatch.setattr(catalog, "TASKS", tmp_path)
    monkeypatch.setattr(catalog, "submission_path", lambda *names: SOURCE)
    return folder


def test_a_count_goes_between_the_markers(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["counts", "--task=toy"]) == ExitCode.OK
    text = (toy / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# toy\n\n{BEGIN}\n\n| case | floor, KB |")
    assert text.endswith(f"\n\n{END}\n\n## After\n")
    assert "old" not in text
    # A line of x and one of y, as torch's memory is aligned to 64 bytes; 16 bytes are stored by one block.
    assert "| n4 | 1 | 0 | 0.50 | 0 | 1 | 1 | 0.0 | 0.0 | 0.00 |" in text
    assert "A tile is a row." in text
    assert "`make counts TASK=toy`" in text
    assert "toy | n4 again | " in capsys.readouterr().out
    before = text
    assert cli.main(["counts", "--task=toy"]) == ExitCode.OK
    assert (toy / "README.md").read_text(encoding="utf-8") == before


def test_a_wrong_kernel_is_not_counted(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = toy / "counts_config.py"
    path.write_text(path.read_text(encoding="utf-8").replace("[4, 4]", "[4, 6]"), encoding="utf-8")
    assert cli.main(["counts", "--task=toy"]) == ExitCode.REJECTED
    assert "case 2: " in capsys.readouterr().err
    assert (toy / "README.md").read_text(encoding="utf-8") == README


def test_what_is_missing_is_named(toy: Path) -> None:
    readme = toy / "README.md"
    readme.write_text(README.replace(BEGIN, ""), encoding="utf-8")
    with pytest.raises(KitError, match="put one line `<!-- counts begin -->`"):
        counts.written(readme, "x")
    (toy / "counts_config.py").unlink()
    assert cli.main(["counts", "--task=toy"]) == ExitCode.MISSING_FILE


def test_a_row_adds_up() -> None:
    numbers = {"global_lines_read": 30, "global_lines_written": 10, "global_bytes_written": 1280, "blocks": 3}
    numbers |= {"mma": 64, "barriers": 12, "bank_conflicts": 5, "shared_accesses": 20}
    assert Row("b1", 4000, 8, numbers).text() == "| b1 | 4 | 5 | 1.28 | 1 | 3 | 8 | 8.0 | 1.5 | 0.25 |"


def test_every_task_shows_its_counts() -> None:
    for task in catalog.tasks():
        text = (catalog.TASKS / task / "README.md").read_text(encoding="utf-8")
        shown = text[text.index(BEGIN) : text.index(END)]
        names: dict[str, object] = {}
        exec(compile(counts.config_path(task).read_text(encoding="utf-8"), task, "exec"), names)
        for label in names["CASE_LABELS"]:
            assert f"| {label} | " in shown, (task, label)
        assert len(names["TILES"]) == len(names["CASE_LABELS"])
