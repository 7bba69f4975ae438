"""Builds AxoNN's grid and the matrices of the model, and prints the layouts as JSON.

It is rank 0 of a group whose collectives do nothing, on a CPU in the place of a GPU. Beside
axonn.json lies model.json, the shape that the script gets as LAYOUT_*.
"""

import json
from functools import partial
from pathlib import Path

import torch
from answers import print_answers
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.cuda.set_device = lambda _device: None
torch.cuda.device_count = lambda: 8
new_group = torch.distributed.new_group
torch.distributed.new_group = lambda ranks, backend: new_group(ranks=ranks, backend="fake")

from axonn import axonn  # noqa: E402
from axonn.intra_layer import fully_connected  # noqa: E402

torch.Tensor.cpu = lambda tensor: tensor  # of weights that have no data
fully_connected.initialize_params = partial(fully_connected.initialize_params, init_device="meta")


def layout_of(path, num_devices):
    said = json.loads(Path(path).read_text())
    model = json.loads(Path(path).with_name("model.json").read_text())
    world = {"rank": 0, "world_size": num_devices}
    torch.distributed.init_process_group("fake", store=FakeStore(), **world)
    axonn.init(**said["grid"])
    hidden, head = model["hidden_size"], model["hidden_size"] // model["num_heads"]
    for name in ("num_heads", "num_kv_heads"):
        fully_connected.Linear(hidden, model[name] * head, init_method=torch.nn.init.zeros_)
    for name in ("ffn_hidden_size", "vocab_size"):
        fully_connected.Linear(hidden, model[name], init_method=torch.nn.init.zeros_)
    return {
        "tp": axonn.config.G_intra_r,
        "tp_columns": axonn.config.G_intra_c,
        "dp": axonn.config.G_data * axonn.config.G_intra_d,
        "micro_batch_size": said["micro_batch_size"],
        "num_microbatches": said["gradient_accumulation_steps"],
        "precision": said["precision"],
    }


print_answers(layout_of, ValueError, AssertionError, forks=True)
