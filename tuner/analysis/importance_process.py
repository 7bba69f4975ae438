"""fANOVA in a process of its own: Optuna takes 140 MiB and 4 s of imports, and is needed seldom.

The driver starts the process when a campaign has ended some trials, a minute before it needs the
first answer, and ends it when no campaign runs. Both write a line of JSON at a time: the arguments
of `explained`, and what it returns.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final

from layout_tuner.timing_mark import shares_cores, wait_while_timing
from layout_tuner.tuner.errors import AnalysisLostError

LONGEST_PAUSE_S: Final = 60.0
"""Most seconds for which the imports wait for ranks that time iterations on the same cores."""
_LOOK_CPU_S: Final = 0.02
"""Processor time of the imports between two looks whether ranks time iterations."""


Explain = Callable[..., dict[str, float]]
"""The signature of `explained`."""


def explained(
    *,
    ranks: Mapping[str, Sequence[int]],
    largest: Mapping[str, int],
    values: Sequence[float],
    seed: int,
) -> dict[str, float]:
    """The share of the variance of the values that each knob explains by itself.

    `ranks` are by knob those of each value, from 0 to the `largest` of the knob.
    """
    # Imported here: the driver needs it in the tests alone.
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.IntDistribution(0, largest[name]) for name in ranks
    }
    for row, value in enumerate(values):
        params = {name: of[row] for name, of in ranks.items()}
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=distributions, value=value)
        )
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=seed)
    found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: min(max(float(share), 0.0), 1.0) for name, share in found.items()}


class ImportanceProcess:
    """The process, started when it is needed; it ends with this one, which closes its input."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the process, and does not wait for its imports; without effect while it runs."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def explained(self, **question: Any) -> dict[str, float]:
        """As `explained`, once the imports are done.

        Raises AnalysisLostError if the process ends; the next call starts another one.
        """
        self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{json.dumps(question)}\n")
            process.stdin.flush()
            answer: dict[str, float] = json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:
            self.close()
            raise AnalysisLostError(
                "the process of the analysis ended; its log is above"
            ) from error
        return answer

    def close(self) -> None:
        """Ends the process, and gives its memory back."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def main() -> None:
    """Imports, then answers each line until there is none."""
    driver, paused_s = os.getppid(), 0.0

    def sleep(pause_s: float) -> bool:
        nonlocal paused_s
        paused_s += pause_s
        time.sleep(pause_s)
        return os.getppid() != driver

    def pause(_number: int, _frame: FrameType | None) -> None:
        wait_while_timing(sleep, longest_s=LONGEST_PAUSE_S - paused_s)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the driver ends this process
    if shares_cores():
        signal.signal(signal.SIGPROF, pause)
        signal.setitimer(signal.ITIMER_PROF, _LOOK_CPU_S, _LOOK_CPU_S)
    import optuna

    optuna.importance.FanovaImportanceEvaluator()  # imports scikit-learn
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    for line in sys.stdin:
        sys.stdout.write(f"{json.dumps(explained(**json.loads(line)))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
