"""Other processes that keep cores busy beside a probe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

_PROGRAM = "import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"


@contextmanager
def busy(cores: Collection[int], number: int) -> Iterator[None]:
    """So many processes are busy on each of the cores, from before the block to its end."""
    commands = [[sys.executable, "-c", _PROGRAM.format(core=core)] for core in cores]
    others = [subprocess.Popen(each, stdout=subprocess.PIPE) for each in commands * number]
    try:
        for other in others:
            other.stdout.readline()
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
            other.stdout.close()
