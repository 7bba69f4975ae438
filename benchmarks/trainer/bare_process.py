"""The bare loop in a process of its own, with the allocator's defaults.

Ranks keep the memory that they free (`workers/ranks/zygote_client.py`), which the bare loop gets
for nothing when it runs inside one. Here it runs as anybody would start it, and takes a step for
each batch that it is sent: pickled batches on stdin, losses on stdout.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from typing import Any, BinaryIO

import torch

from benchmarks.trainer.bare_model import MODEL, OPTIMIZER, SEED, BareLoop
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.trainer.batches import Batch


class BareProcess:
    """The other end: a step that another process takes, on this process's core.

    Raises:
        EOFError: from `step`, when the process has died; its error is on stderr.
    """

    def __init__(self, layout: Layout) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.trainer.bare_process",
                "--precision",
                layout.precision,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=kept,
        )

    def step(self, batch: Batch) -> float:
        """The mean loss before the step."""
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None
        assert answers is not None
        _send(to, (batch.ids_MT, batch.targets_MT))
        loss: float = pickle.load(answers)
        return loss


def _send(to: BinaryIO | Any, value: object) -> None:
    pickle.dump(value, to)
    to.flush()


def main() -> None:
    """Takes steps until stdin is closed."""
    parser = argparse.ArgumentParser(prog="benchmarks.trainer.bare_process")
    parser.add_argument("--precision", required=True)
    precision = parser.parse_args().precision
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    loop = BareLoop(MODEL, precision=precision, seed=SEED, settings=OPTIMIZER)
    while True:
        try:
            ids, targets = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _send(sys.stdout.buffer, loop.step(Batch(ids_MT=ids, targets_MT=targets)))


if __name__ == "__main__":
    main()
