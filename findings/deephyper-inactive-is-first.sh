#!/bin/bash
# DeepHyper proposes an inactive hyperparameter with the first value of its list.
#
# Version: deephyper 0.13.2 with ConfigSpace 1.2.2.
# Behaviour: a hyperparameter whose condition does not hold is absent from ConfigSpace's
# configurations. DeepHyper's proposals have it, and with the first choice of its list: neither with
# the stated default nor with a mark for "no value". A run function that uses it trains with it.
# Seen: every proposal with kernel=plain has tile=64, while the default of tile is 16.
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet deephyper==0.13.2 ConfigSpace==1.2.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import sys
from importlib.metadata import version

from ConfigSpace import EqualsCondition
from deephyper.hpo import CBO, HpProblem

problem = HpProblem()
kernel = problem.add_hyperparameter(["plain", "tiled"], "kernel")
tile = problem.add_hyperparameter([64, 32, 16], "tile", default_value=16)
problem.add_condition(EqualsCondition(tile, kernel, "tiled"))
search = CBO(problem, random_state=1, n_initial_points=4, checkpoint_history_to_csv=False)
proposed = {"plain": set(), "tiled": set()}
for _ in range(12):
    (point,) = search.ask(1)
    proposed[point["kernel"]].add(point["tile"])
    search.tell([(point, float(point["tile"]))])
in_space = dict(problem.space.get_default_configuration())
print(f"deephyper {version('deephyper')}: proposed with plain: {sorted(proposed['plain'])}")
print(f"ConfigSpace {version('ConfigSpace')}: default configuration: {in_space}")
sys.exit(proposed["plain"] != {64} or "tile" in in_space)
PROGRAM
