"""Case 2 raises, two functions deep."""


def pick(table):
    return table["missing"]


def run_kernel(case, phase):
    if case == 2:
        pick({})
