"""A worker for the runner's own tests: real process, channel and loop, but no torch, no package and no kernel.

A submission is any Python file with `run_kernel(case, phase)`, which does in case 2 what its name says.
"""

import runpy
import sys
from pathlib import Path

from harness import worker
from harness.verdict import Verdict


class StubSession:
    def __init__(self, job):
        self.job = job
        self.label = ""
        self.names = {}

    def count(self):
        return 4 if self.job.config.startswith("four") else 3

    def load(self):
        self.names = runpy.run_path(str(Path(self.job.submission).resolve()))

    def run(self, case_id, phase):
        self.label = f"case {case_id}"
        phase("run")
        self.names["run_kernel"](case_id, phase)
        return self.job.result(case_id, Verdict.PASS, "", self.label)

    def lost(self):
        return bool(self.names.get("LOST"))


if __name__ == "__main__":
    sys.exit(worker.main(open_session=StubSession))
