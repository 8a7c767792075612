#!/usr/bin/env bash
# Train the paper's eight tasks from their sentences, with the script's defaults, and judge the runs:
#     benchmarks/eight_tasks.sh 7 8 9         # these seeds
#     benchmarks/eight_tasks.sh               # print the table of the runs judged so far
# The same command continues interrupted runs. RUNS: the folder of all runs; FRAMES: frames of each; FLAGS: more flags;
# LANES: runs at a time.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" RUNS=${RUNS:-runs/eight} FRAMES=${FRAMES:-64000} FLAGS=${FLAGS:-}
TASKS=${TASKS:-kneeling standing one_leg arms_crossed arms_raised lotus hands_on_hips splits}

train() { # TASK SEED
    local run="$RUNS/$1.$2" prompt
    prompt=$(python -c "from environments import judges; print(judges.TASKS['$1'].target_prompt)")
    mkdir -p "$run"
    # shellcheck disable=SC2086
    python sac_clip_humanoid.py --target-prompt "$prompt" --clip-model tiny_clip --total-timesteps "$FRAMES" \
        --seed "$2" --reward-devices cpu --video-freq 0 --checkpoint-freq 8000 --runs-dir "$run" --resume latest \
        $FLAGS >"$run/log" 2>&1
    for checkpoint in best "$FRAMES"; do
        compgen -G "$run/*/success_$checkpoint" >/dev/null ||
            python eval_epic.py success --run "$run" --judge "$1" --checkpoint "$checkpoint" --videos 0 \
                >>"$run/log" 2>&1
    done
}

table() { # success of best.pt and of the last checkpoint by task and seed, and the headline
    python - <<'END'
import json, os
from collections import defaultdict
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

rows, pictures, learned, runs = defaultdict(list), 0, 0, 0
for path in sorted(Path(os.environ["RUNS"]).glob("*.*/*/success_best/success.json")):
    task, seed = path.parents[2].name.rsplit(".", 1)
    last = path.parents[1] / f"success_{os.environ['FRAMES']}/success.json"
    best, last = (json.loads(p.read_text())[0]["success_rate"] for p in (path, last))
    rows[task].append((int(seed), f"{100 * best:.0f} ({100 * last:.0f})"))
    seen = EventAccumulator(str(path.parents[1])).Reload().Scalars("charts/clip_pictures")
    pictures, learned, runs = pictures + seen[-1].value, learned + (best >= 0.9), runs + 1
for task, found in rows.items():
    print(f"{task:14} ", ", ".join(f"{seed}: {rate}" for seed, rate in sorted(found)))
price = f"{pictures / learned:,.0f} pictures to a learned run" if learned else "none learned"
print(f"{learned} of {runs} runs have 90 % by best.pt (last checkpoint in brackets); {price}")
END
}

if [ "${1-}" = train ]; then
    "$@"
else
    for seed in "$@"; do
        for task in $TASKS; do echo train "$task" "$seed"; done
    done | xargs -r -P "${LANES:-2}" -L 1 "$0"
    table
fi
