"""The library's own count of parameters: of a class's default configuration, with some changes.

An asked file is JSON: `model_type`, and the words that differ from the class's defaults. The answer
has the whole configuration as the library writes it, and the parameters of its causal language
model, built without memory. Where the library has none, they are those of the bare model with an
output projection.
"""

import json
from pathlib import Path

import torch
from answers import print_answers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM


def counted(path, _):
    fields = json.loads(Path(path).read_text())
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    is_whole = type(config) in AutoModelForCausalLM._model_mapping
    with torch.device("meta"):
        model = (AutoModelForCausalLM if is_whole else AutoModel).from_config(config)
    model.tie_weights()
    parameters = sum(each.numel() for each in model.parameters())
    if not is_whole and not getattr(config, "tie_word_embeddings", False):
        parameters += config.vocab_size * config.hidden_size
    return {
        "config": json.loads(config.to_json_string(use_diff=False)),
        "parameters": parameters,
    }


print_answers(counted, ValueError, TypeError, KeyError, AttributeError, RuntimeError)
