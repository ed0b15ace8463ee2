"""A baseline that loads something from its own folder by a relative path, and reads a value off the device."""

from packages.plain import check, genTestCase, getNumOfTestcases, getTestCaseSize  # noqa: F401


def baseline(x, out, factor):
    with open("side.txt", encoding="utf-8") as file:
        scale = int(file.read()) if x.sum().item() > 0 else 0
    out.copy_(x * factor * scale)
