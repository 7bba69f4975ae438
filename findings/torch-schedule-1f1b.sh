#!/bin/bash
# torch's schedules of pipelines differ in how few micro-batches they take.
#
# Version: torch 2.13.0, torch/distributed/pipelining/schedules.py.
# Behaviour: of a pipeline of 4 stages, Schedule1F1B refuses 3 micro-batches; ScheduleGPipe takes 1,
# and ScheduleInterleaved1F1B with 8 stages on 4 ranks takes 2.
# Seen: "Number of microbatches (3) must be greater than or equal to the number of stages (4)."
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PROGRAM'
import sys

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)


def stage(index, stages):
    return PipelineStage(nn.Linear(4, 4), index, stages, torch.device("cpu"))


def answer(schedule, stages, microbatches):
    try:
        schedule(stages, n_microbatches=microbatches, loss_fn=nn.MSELoss())
    except ValueError as error:
        return str(error)
    return "accepted"


found = {
    "1F1B, 3 micro-batches": answer(Schedule1F1B, stage(0, 4), 3),
    "1F1B, 4 micro-batches": answer(Schedule1F1B, stage(0, 4), 4),
    "GPipe, 1 micro-batch": answer(ScheduleGPipe, stage(0, 4), 1),
    "interleaved, 2 micro-batches": answer(ScheduleInterleaved1F1B, [stage(0, 8), stage(4, 8)], 2),
}
for case, said in found.items():
    print(f"torch {torch.__version__}: {case}: {said}")
refused, *accepted = found.values()
sys.exit("must be greater than or equal to" not in refused or set(accepted) != {"accepted"})
PROGRAM
