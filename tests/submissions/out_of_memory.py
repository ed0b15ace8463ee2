"""Case 2 asks for more memory than there is."""


def run_kernel(case, phase):
    if case == 2:
        bytearray(1 << 62)
