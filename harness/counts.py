"""`counts`: what the simulator counts in the C++ submissions, as a table in the READMEs of the tasks.

The cases are those of tasks/<task>/counts_config.py, a package like a suite's, with two names more: TILE, in words,
and TILES, how many of them each case has. One run per case, on waves of 64 lanes; its output must hold against
reference.py.

A submission is run here in the command's own process: only the kit's own can be named.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness import catalog, devices
from harness.source import load_module
from harness.verdict import ExitCode, KitError

BEGIN, END = "<!-- counts begin -->", "<!-- counts end -->"
MODE = "wave64"  # the C500's
LINE = 128  # bytes of a transaction


class Row(NamedTuple):
    """One case. `floor`: bytes of the contract's workload; the others are sums over all launches."""

    label: str
    floor: int
    tiles: int
    counts: dict[str, int]

    @property
    def moved(self) -> int:
        """Bytes between blocks and the rest of the chip: lines of 128 bytes, each once per block and direction."""
        return LINE * (self.counts["global_lines_read"] + self.counts["global_lines_written"])

    def text(self) -> str:
        """The row of the table."""
        per_tile = [self.counts[name] / self.tiles for name in ("mma", "barriers")]
        cells = [
            self.label,
            f"{self.floor / 1e3:.0f}",
            f"{self.moved / 1e3:.0f}",
            f"{self.moved / self.floor:.2f}",
            f"{self.counts['global_bytes_written'] / 1e3:.0f}",
            str(self.counts["blocks"]),
            str(self.tiles),
            *(f"{value:.1f}" for value in per_tile),
            f"{self.counts['bank_conflicts'] / max(1, self.counts['shared_accesses']):.2f}",
        ]
        return "| " + " | ".join(cells) + " |"


def add(commands: Any) -> None:
    """Add the subcommand to the command line's parser."""
    parser = commands.add_parser(
        "counts", allow_abbrev=False, help="the simulator's counts of the C++ submissions, into the task READMEs"
    )
    parser.set_defaults(run=_run)
    parser.add_argument("--task", help="one task; all that have counts_config.py without it")


def _run(options: argparse.Namespace, words: list[str]) -> int:
    tasks = [catalog.check_task(options.task)] if options.task else catalog.tasks()
    chosen = [task for task in tasks if config_path(task).is_file()]
    if options.task and not chosen:
        where = catalog.shown_path(config_path(options.task))
        raise KitError(
            f"TASK={options.task}: {where} is not there; it lists the cases to count.", ExitCode.MISSING_FILE
        )
    for task in chosen:
        readme = catalog.TASKS / task / "README.md"
        module = load_module(config_path(task), "counts_config")
        rows = []
        for row in count(task, module.TILES):
            rows.append(row)
            print(f"{task} {row.text()}", flush=True)
        generated = table(task, module.TILE, rows)
        readme.write_text(written(readme, generated), encoding="utf-8")
    return ExitCode.OK


def config_path(task: str) -> Path:
    """The package of the cases to count. It need not exist."""
    return catalog.TASKS / task / "counts_config.py"


def count(task: str, tiles: tuple[int, ...]) -> Iterator[Row]:
    """Run each case once. KitError when an output is wrong: nobody wants to know what a wrong kernel moves."""
    from harness import languages, strict
    from harness.contract import load_contract
    from harness.package import load_package

    contract = load_contract(catalog.reference_path(task))
    package = load_package(config_path(task))
    settings = {"counts": True, "outputs": contract.outputs}
    path = catalog.submission_path(task, "cuda")
    submission = languages.load("cuda", path, contract.arguments, devices.pick("cpu"), MODE, settings)
    for number in range(1, package.count() + 1):
        case = package.case(number)
        args = [_aligned(arg) for arg in package.generate(case, "cpu")]
        submission.run(args)
        counts = submission.drain()
        truth, honest = contract.reference(*args), contract.honest(*args)
        for name, index in zip(contract.outputs, contract.output_indices, strict=True):
            finding = strict.compare(name, args[index], truth[name], honest[name]).finding
            if finding is not None:
                where = catalog.shown_path(config_path(task))
                raise KitError(f"{where}, case {number}: {finding.verdict}: {finding.detail}", ExitCode.REJECTED)
        yield Row(case.label, contract.workload(*args)["bytes"], tiles[number - 1], counts)


def _aligned(arg: Any) -> Any:
    """A tensor as the device would have it, at a multiple of 256 bytes: on the CPU lines would be cut anywhere."""
    if not hasattr(arg, "data_ptr"):
        return arg
    raw = arg.new_empty(arg.numel() + 256 // arg.element_size())
    start = -raw.data_ptr() % 256 // arg.element_size()
    copy = raw[start : start + arg.numel()].view(arg.shape)
    copy.copy_(arg)
    return copy


def table(task: str, tile: str, rows: list[Row]) -> str:
    """The generated part of a README."""
    head = ["case", "floor, KB", "moved, KB", "moved / floor", "written, KB", "blocks", "tiles"]
    head += ["MMAs per tile", "barriers per tile", "conflicts per access"]
    digest = hashlib.sha256(catalog.submission_path(task, "cuda").read_bytes()).hexdigest()[:12]
    lines = [
        "| " + " | ".join(head) + " |",
        "| " + " | ".join(["---"] + ["---:"] * (len(head) - 1)) + " |",
        *(row.text() for row in rows),
        "",
        f"* Waves of 64 lanes, tuning row of the C500, `run_kernel.cu` {digest}. A tile is {tile}.",
        "* Floor: every live input read once, the output written once. Moved: 128-byte lines, once per block that"
        " reads or writes them, whichever cache or memory they come from. Written: bytes stored, workspace included.",
        "* Conflicts: extra passes over the banks of shared memory, per access of a wave.",
        f"* `make counts TASK={task}` counts again, `make check TASK={task} LANG=cuda"
        f" CONFIG=tasks/{task}/counts_config.py COUNTS=1` shows every counter.",
    ]
    return "\n".join(lines)


def written(readme: Path, generated: str) -> str:
    """The README with that between its markers. KitError when it has no such markers."""
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        message = f"{readme}: put one line `{BEGIN}` and below it one `{END}` where the table of counts goes."
        raise KitError(message, ExitCode.MISSING_FILE)
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{before}{BEGIN}\n\n{generated}\n\n{after}"
