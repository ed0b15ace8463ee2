"""What every g++ command of the CPU side has in common. Imports no torch."""

from __future__ import annotations

# Distributions build hardening into their g++ (Ubuntu: _FORTIFY_SOURCE at -O1 and above, stack protector, stack clash
# protection, control-flow protection). All is off, so that the same code runs everywhere: fortified headers define
# memcpy and its like a second time, and their longjmp ends the process when it goes from one fiber's stack to another;
# the others add accesses, or assume one stack.
UNHARDENED = (
    *("-U_FORTIFY_SOURCE", "-U_GLIBCXX_ASSERTIONS", "-fno-stack-protector", "-fno-stack-clash-protection"),
    "-fcf-protection=none",
)
