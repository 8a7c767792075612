#!/usr/bin/env bash
# Everything that README and docs tell to type, in a short form: what runs in the project's own
# environment, then the example and the wheel that want one of their own. Two hours on two cores that
# do other work meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
PY=$PWD/.venv/bin/python
"$PY" benchmarks/docs_commands.py
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/imitation"
sed 's/\[.*\]//' requirements.txt | grep -E '^(torch|torchvision|open_clip_torch|annotated-types)==' > "$folder/pins.txt"
"$folder/imitation/bin/pip" install -q imitation==1.0.1 -r "$folder/pins.txt"
"$folder/imitation/bin/python" examples/imitation_reward.py 3200
for python in python3.11 python3.12 python3.13; do
    if $python --version; then "$PY" tests/wheel.py --python $python; fi  # one that runs
done
