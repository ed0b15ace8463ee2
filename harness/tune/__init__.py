"""`make tune`: a pruned offline search over a kernel's few parameters, on the device at hand.

    places.py   where in a submission a parameter stands, and the file with another value there
    space.py    a task's search spaces (tasks/<task>/tuning.py), their candidates, and what arithmetic rules out
    search.py   successive halving: who is timed on which cases, and what came of it
    worker.py   the process that times candidates against the current file
    cli.py      the command

The submission itself is never edited: candidates are written under .cache/tune.
"""
