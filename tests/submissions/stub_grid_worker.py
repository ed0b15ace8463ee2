"""A worker for the tests of grids: real process, channel and loop, but no device. The second point kills it."""

import os
import sys

from harness import worker
from harness.verdict import Verdict


class StubSession:
    def __init__(self, job):
        self.job = job
        self.label = ""

    def count(self):
        return 144

    def load(self):
        pass

    def run(self, case_id, phase):
        phase("run")
        if case_id == 2:
            os.abort()
        result = self.job.result(case_id, Verdict.PASS, "", self.label)
        result.figures = {"peer_ms": 0.5, "gb_s": 100.0, "tflops": 2.0}
        return result

    def lost(self):
        return False


if __name__ == "__main__":
    sys.exit(worker.main(open_session=StubSession))
