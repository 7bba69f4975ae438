"""A small model under the names of Hugging Face's, for DeepSpeed's engine."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

HIDDEN, EXPERTS, VOCABULARY = 64, 16, 128
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
LAYERS_TO_SHARD = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.up_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.down_proj\.weight$"], "partition_type": "row"},
    ],
}
"""What AutoTP has to be told of a model that it does not know."""


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        return x + self.down_proj(functional.gelu(self.up_proj(x)))


class Experts(nn.Module):
    """The weights of Mixtral's experts, as transformers 5 stores them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = Router(), Experts()
        self.top_k, self.num_experts = 2, EXPERTS


class SmallModel(nn.Module):
    """An embedding, two feed-forwards (or one and a mixture of experts), a head and its loss."""

    def __init__(self, has_experts=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.model.layers:
            layer.mlp = FeedForward()
        if has_experts:
            self.model.layers[1].mlp = MixtureOfExperts()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.config = SimpleNamespace(
            model_type="mixtral",
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN,
            hidden_act="silu",
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.model.layers:
            x = layer.mlp(x)
        logits = self.lm_head(x).flatten(0, 1).float()
        return functional.cross_entropy(logits, tokens.flatten())
