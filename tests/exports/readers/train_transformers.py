"""The loss of a model of the library and its gradients, from weights that a file states.

An asked file is JSON: the fields of the configuration, `model_type` among them. Beside it lies
`weights.pt`: the tokens, the targets, and the weights by the library's names. The gradients are
written to `gradients.pt`; the answer has the loss, and the parameters that got no weight.
"""

import json
from pathlib import Path

import torch
from answers import print_answers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM


def trained(path, _):
    fields, folder = json.loads(Path(path).read_text()), Path(path).parent
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for module in model.modules():  # norms of latents do not take the configuration's number
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = getattr(config, "rms_norm_eps", module.variance_epsilon)
    asked = torch.load(folder / "weights.pt")
    loaded = model.load_state_dict(asked["weights"], strict=False)
    logits = model(input_ids=asked["ids"], use_cache=False).logits
    loss = cross_entropy(logits.float().flatten(0, 1), asked["targets"].flatten())
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    torch.save(gradients, folder / "gradients.pt")
    known = dict(model.named_parameters())
    missing = [name for name in loaded.missing_keys if name in known]
    return {"loss": loss.item(), "missing": missing, "unknown": loaded.unexpected_keys}


print_answers(trained, ValueError, TypeError, KeyError, AttributeError, RuntimeError)
