#!/bin/bash
# transformers: the norms of DeepSeek-V3's latents ignore the configuration's rms_norm_eps.
#
# Version: transformers 5.24.0 with torch 2.13.0.
# Behaviour: rms_norm_eps reaches the norms of a layer and of the model. Those of the latents of
# queries, keys and values (q_a_layernorm, kv_a_layernorm) are made without it, and keep 1e-6. A
# port that takes the one eps of config.json for all norms differs where the latents are small.
# Seen: with rms_norm_eps=1e-3 the latents' norms have 1e-06, the others 0.001.
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error HF_HOME="$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import sys

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "vocab_size": 64,
}
model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, rms_norm_eps=1e-3))
found = {
    name: module.variance_epsilon
    for name, module in model.named_modules()
    if hasattr(module, "variance_epsilon")
}
for name, eps in found.items():
    print(f"{name}: {eps:g}")
latents = {eps for name, eps in found.items() if "_a_layernorm" in name}
others = {eps for name, eps in found.items() if "_a_layernorm" not in name}
sys.exit((latents, others) != ({1e-6}, {1e-3}))
PROGRAM
