#!/usr/bin/env bash
# Train and judge the paper's eight tasks by their sentences, first runs, one recipe, two at a time:
#     benchmarks/eight_tasks.sh 4 5 6         # these seeds; two CPU cores need five hours
# The same command continues what was interrupted. RUNS: the folder of all runs; FRAMES: of each.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 RUNS=${RUNS:-runs/eight}

train() { # TASK SEED FRAMES
    local run="$RUNS/$1.$2" prompt
    prompt=$(python -c "from environments import judges; print(judges.TASKS['$1'].target_prompt)")
    mkdir -p "$run"
    python sac_clip_humanoid.py --target-prompt "$prompt" --clip-model local-dir:tiny_clip --render-size 64 \
        --camera-azimuth 120 180 240 --n-step 3 --num-envs 8 --total-timesteps "$3" --learning-starts 4800 \
        --gradient-steps 600 --batch-size 128 --gamma 0.97 --entropy-coef 0.05 --normalize-observations \
        --layer-norm --seed "$2" --reward-devices cpu --video-freq 0 --checkpoint-freq 8000 \
        --runs-dir "$run" --resume latest >"$run/log" 2>&1
    for checkpoint in best "$3"; do
        python eval_epic.py success --run "$run" --checkpoint "$checkpoint" --videos 0 2>>"$run/log" | grep ": success "
    done
}

if [ "${1-}" = train ]; then
    "$@"
else
    for seed in "$@"; do
        for task in kneeling standing one_leg arms_crossed arms_raised lotus hands_on_hips splits; do
            case $task in lotus | hands_on_hips) frames=128000 ;; *) frames=64000 ;; esac
            echo train $task "$seed" "${FRAMES:-$frames}"
        done
    done | xargs -P 2 -L 1 "$0"
fi
