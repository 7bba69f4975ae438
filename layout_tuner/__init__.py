"""The Python client of a service, predictions without one, and `report_step` for trainers.

```python
from layout_tuner import Client

with Client() as client:  # the service of this machine, or that of LAYOUT_TUNER_URL
    space = {"global_batch_size": 8, "tp": [1, 2], "micro_batch_size": range(1, 3)}
    client.create_campaign(
        {
            "name": "mine",
            "model": "tiny",
            "cluster": "local-cpu",
            "space": space,
            "budget": {"trials": 2},
        }
    )
    client.wait("mine")
    for trial in client.leaderboard("mine").trials:
        print(trial.rank, trial.layout_key, trial.measurement.tokens_per_s)
```

Without a service, `plan` ranks the layouts of a campaign by predictions, and `estimate` predicts
one layout; nothing is run:

```python
import layout_tuner

best = layout_tuner.plan("examples/gpt-22b-frontier.yaml", software="megatron-lm").layouts[0]
one = layout_tuner.estimate("gpt-22b", {"tp": 8, "num_microbatches": 8}, cluster="frontier")
print(best.layout_key, best.predicted.step_time_s, one.tokens_per_s, one.fits)
```

A training program that a worker runs as a probe calls `report_step` after each optimizer step.
Importing this package imports nothing but that function: each other name is imported at its first
use.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from layout_tuner.step_reports import report_step as report_step


@cache
def _sources() -> dict[str, str]:
    """The module of each name, as `__init__.pyi` imports it; read when a name is asked for."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use; the module keeps it."""
    if name == "__all__":
        value: Any = sorted([*_sources(), "__version__"])
    elif name == "__version__":
        value = import_module("layout_tuner.version").version()
    elif name in _sources():
        value = getattr(import_module(_sources()[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_sources(), "__all__", "__version__"})
