"""Case 2 leaves a program running in the worker's process group, with an empty environment; its id is in $PID_FILE."""

import os
import subprocess


def run_kernel(case, phase):
    if case == 2:
        child = subprocess.Popen(["/bin/sleep", "600"], env={})
        with open(os.environ["PID_FILE"], "w", encoding="utf-8") as file:
            file.write(str(child.pid))
