"""Case 2 prints just less than 1 MiB."""


def run_kernel(case, phase):
    if case == 2:
        print("first" + "x" * 1_000_000 + "last")
