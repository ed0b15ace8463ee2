"""Case 2 leaves a process behind that has a session of its own and no parent; its id goes to $PID_FILE."""

import os
import time


def run_kernel(case, phase):
    if case == 2:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(os.environ["PID_FILE"], "w", encoding="utf-8") as file:
                    file.write(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        os.wait()
        while not os.path.exists(os.environ["PID_FILE"]) or not os.path.getsize(os.environ["PID_FILE"]):
            time.sleep(0.01)
