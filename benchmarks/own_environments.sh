#!/usr/bin/env bash
# Test the parts that need their own virtual environments: the imitation example, and the wheel on
# each supported Python that is installed. This downloads about ten gigabytes.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/imitation"
sed 's/\[.*\]//' requirements.txt | grep -E '^(torch|torchvision|open_clip_torch|pydantic)==' >"$folder/pins"
"$folder/imitation/bin/pip" install -q imitation==1.0.1 -r "$folder/pins"
"$folder/imitation/bin/python" examples/imitation_reward.py 3200
for python in python3.11 python3.12 python3.13; do
    if $python --version; then .venv/bin/python tests/wheel.py --python $python; fi
done
