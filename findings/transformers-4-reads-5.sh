#!/bin/bash
# transformers 4 reads a config.json that transformers 5 wrote without an error, as another model.
#
# Version: written by transformers 5.24.0, read by 4.57.1.
# Behaviour: version 5 writes rope_theta inside of rope_parameters, and the experts of Qwen3-MoE as
# num_local_experts. Version 4 takes both words for unknown ones, keeps them, and gives the model its
# class's defaults. Other mixtures (Qwen2-MoE, OLMoE, DeepSeek-V3) keep their number of experts.
# Seen: 32 experts and the base 1,000,000 are read as 128 and 10,000, beside num_local_experts=32
# and rope_parameters.
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
for version in 5.24.0 4.57.1; do
  "${PYTHON:-python3}" -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version"
done
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error HF_HOME="$folder"
"$folder/5.24.0/bin/python" - "$folder" <<'PROGRAM'
import sys

from transformers import OlmoeConfig, Qwen3MoeConfig

for name, config in {"qwen3_moe": Qwen3MoeConfig, "olmoe": OlmoeConfig}.items():
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    config(num_experts=32, rope_parameters=rope).save_pretrained(f"{sys.argv[1]}/{name}")
PROGRAM
cat > "$folder/read.py" <<'PROGRAM'
import sys

import transformers

found = {}
for name in ("qwen3_moe", "olmoe"):
    config = transformers.AutoConfig.from_pretrained(f"{sys.argv[1]}/{name}")
    base = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    found[name] = config.num_experts, base
    print(f"transformers {transformers.__version__}: {name}: {found[name][0]} experts, base {base:g}")
qwen, olmoe = found.values()
expected = ((32, 1e6), (32, 1e6)) if transformers.__version__[0] == "5" else ((128, 1e4), (32, 1e4))
sys.exit((qwen, olmoe) != expected)
PROGRAM
for version in 5.24.0 4.57.1; do
  "$folder/$version/bin/python" "$folder/read.py" "$folder"
done
