"""A thread ends the process after every case, between two cases or in the next one."""

import os
import threading
import time


def run_kernel(case, phase):
    threading.Thread(target=lambda: (time.sleep(0.05), os._exit(9)), daemon=True).start()
    if case == 2:
        time.sleep(5)
