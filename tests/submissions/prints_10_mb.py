"""Case 2 prints 10 MB in lines of 100 bytes."""


def run_kernel(case, phase):
    if case == 2:
        for number in range(100_000):
            print(f"{number:099d}")
