"""The options of `bench`."""

from __future__ import annotations

import argparse
from typing import Any

from harness.bench import engine, grids


def add(commands: Any) -> None:
    """Add the subcommand to the command line's parser."""
    bench = commands.add_parser(
        "bench", allow_abbrev=False, help="on a GPU: time submissions beside their baselines, alternating"
    )
    bench.set_defaults(run=_run)
    bench.add_argument("--task", help="one task; all of them without it")
    bench.add_argument("--lang", help="cuda, triton or tilelang; all of them without it")
    bench.add_argument("--suite", help="judge by default")
    bench.add_argument("--cases", help="which cases, as in 1,3-5")
    bench.add_argument("--variant", default="all", help="plain: the file to paste; hopper: hopper.* beside it; all")
    bench.add_argument("--device", help="maca or cuda; what the machine has by default")
    bench.add_argument("--config", help="a problem package of your own instead of a suite")
    bench.add_argument("--file", help="a submission of your own instead of the kit's")
    bench.add_argument("--budget", metavar="SECONDS", help=f"of repetition per case, {engine.BUDGET_S:g} by default")
    bench.add_argument("--out", metavar="FOLDER", help="keep the records there as well as in results/journal")
    bench.add_argument("--no-lint", dest="lint", action="store_false", help="run what the judge's sandbox would refuse")
    bench.add_argument("--deadline", metavar="SECONDS", help="after how long a case is taken to hang")
    bench.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")
    grids.add_options(bench)


def _run(options: argparse.Namespace, words: list[str]) -> int:
    return grids.run(options, words) if grids.wanted(options) else engine.run(options, words)
