#!/usr/bin/env bash
# Make the measurements of the first half hour on a machine with GPUs, the most important first:
#
#     benchmarks/gpu.sh [FOLDER]              # all of it
#     PORTION=1 benchmarks/gpu.sh FOLDER      # the pieces that fit into 560 s; then PORTION=2, ..
#     DRY=1 benchmarks/gpu.sh                 # list the pieces: portion, name, limit in seconds
#
# FOLDER gets summary.txt (a line for each piece), table.txt and results.json, which are written after every piece and
# include the pieces of earlier calls, and at the end results.tar.gz with everything. ONLY=clip,run_egl runs only these
# pieces; FROM=clip skips those before clip. Without a GPU (or with DEVICE=cpu) the pieces run in a small form. A piece
# that fails or takes longer than its limit makes the exit code 1, but does not stop the others.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${1:-gpu_results}
GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
GPUS=${GPUS:-0} # also if that Python fails
DEVICE=${DEVICE:-$([ "$GPUS" -gt 0 ] && echo cuda:0 || echo cpu)}
NAMES=() FAILED=0 REACHED=${FROM:+no} IN=1 FILLED=0 SECONDS=0
if [ -z "${DRY-}" ]; then
    mkdir -p "$OUT"
    OUT=$(cd "$OUT" && pwd)
fi

piece() { # NAME LIMIT ARGUMENTS...: run Python, at most LIMIT seconds, and add it to the table
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    NAMES+=("$name")
    [ $((FILLED += limit)) -le 560 ] || { IN=$((IN + 1)) FILLED=$limit; }
    [ "$name" != "${FROM-}" ] || REACHED=yes
    [ "$REACHED" != no ] && [ "${PORTION:-$IN}" = $IN ] && [[ ",${ONLY:-$name}," == *",$name,"* ]] || return 0
    [ -z "${DRY-}" ] || { echo "$IN $name $limit" && return; }
    rm -f "$OUT/$name".{txt,json,err}
    [ "$DEVICE" = cpu ] && limit=1700 # a CPU's speed is not known
    # KILL, to the whole group: a training script takes TERM as "finish this rollout"
    timeout -s KILL "$limit" "$PYTHON" "$@" >"$OUT/$name.out" 2>"$OUT/$name.err"
    code=$?
    [ $code = 0 ] || FAILED=1
    {
        echo "== $name ($((SECONDS - began)) s): $*"
        cat "$OUT/$name.out"
        [ $code = 0 ] || echo "INCOMPLETE: $name, exit code $code (137: time limit); see $OUT/$name.err"
        echo
    } | tee "$OUT/$name.txt"
    rm "$OUT/$name.out"
    results
}

results() { # write the results of all pieces so far, in the order of this file
    "$PYTHON" - "$OUT" "${NAMES[@]}" <<'END' || true
import json, sys
from pathlib import Path
folder, tables = Path(sys.argv[1]), {}
for name in sys.argv[2:]:
    if (path := folder / f"{name}.txt").exists():
        tables[name] = path.read_text()
(folder / "table.txt").write_text("".join(tables.values()))
lines = [text.splitlines() for text in tables.values()]  # the first, and the last but the empty one
(folder / "summary.txt").write_text("".join(f"{x[0].split(':')[0]}: {x[-2]}"[:149] + "\n" for x in lines))
found = {name: json.loads(path.read_text()) for name in tables if (path := folder / f"{name}.json").exists()}
(folder / "results.json").write_text(json.dumps(found, indent=1))
END
}

pipeline() { # NAME LIMIT ARGUMENTS...
    piece "$1" "$2" benchmarks/pipeline.py "${@:3}" --json "$OUT/$1.json"
}

other() { # NAME LIMIT ARGUMENTS...
    piece "$1" "$2" benchmarks/gpu_pieces.py --piece "$1" "${@:3}" --json "$OUT/$1.json"
}

repeat() { # N: print the device N times
    for ((i = 0; i < $1; i++)); do printf '%s ' "$DEVICE"; done
}

MANY=() devices=("$DEVICE")
if [ "$DEVICE" = cpu ]; then
    echo "no GPU: the pieces run on the CPU in small forms, whose times say nothing about a GPU"
    MODEL=tiny_clip SIZE=64 BATCHES="4 8" WORKERS=2 PRECISIONS="fp32 fp16" STATES=2 ROWS="plain" PER_STEP=8 INT8=bf16
    TESTS=embeddings RENDERERS=(warp) STEPS=48
    tiny=(--num-envs 2 --episode-length 8 --gradient-steps 2 --clip-batch-size 4)
    small=("${tiny[@]}" --rollouts 1 --states-per-worker 4)
    learn=(--num-envs 2 --episode-length 12 --learning-starts 24 --gradient-steps 2)
else
    MODEL=${TMPDIR:-/tmp}/random_ViT-bigG-14 SIZE=480 BATCHES="16 64 256" WORKERS=4 PRECISIONS="fp32 fp16 bf16" STATES=8
    PER_STEP=1024 INT8=int8 ROWS="plain compiled sb3" TESTS=cuda RENDERERS=(warp egl) STEPS=40000
    tiny=() small=(--rollouts 3) learn=()
    for n in 2 4 8; do [ "$GPUS" -lt "$n" ] || MANY+=("$n"); done
    mapfile -t devices < <(seq -f 'cuda:%.0f' 0 $((GPUS - 1)))
fi
score=(--clip-model "local-dir:$MODEL" --render-size "$SIZE")
one=(--reward-devices "$DEVICE")
read -ra several <<<"$(repeat $WORKERS)"
read -ra batches <<<"$BATCHES"
read -ra precisions <<<"$PRECISIONS"
read -ra rows <<<"$ROWS"

# 1. Does everything import, and does MuJoCo Warp draw?
piece imports 90 -c "
import mujoco, mujoco_warp, open_clip, PIL.Image, sys, torch, torchvision, warp
import sac_clip_humanoid as sac
for package in torch, torchvision, open_clip, mujoco, mujoco_warp, warp:
    print(package.__name__, package.__version__ if hasattr(package, '__version__') else '')
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), torch.cuda.get_arch_list(), torch.version.cuda)
renderer = sac.make_renderer(sac.Args(clip_model='tiny_clip', renderer='warp'), '$DEVICE', 480)
_, state, _ = sac.tasks.describe_env('Humanoid-v5', sac.make_env(sac.Args()))
PIL.Image.fromarray(renderer.render(state[None])[0].swapaxes(0, 1).reshape(480, -1, 3)).save('$OUT/picture.png')
print(renderer.description, '$OUT/picture.png')
"
# 2. CLIP alone, with random weights, as large as the real one
[ "$DEVICE" = cpu ] || piece random_clip 150 benchmarks/random_clip.py ViT-bigG-14 "$MODEL"
pipeline clip 120 --measure clip "${score[@]}" --batches "${batches[@]}" "${one[@]}"
# 3. The whole run, and its share of CLIP alone
pipeline run_warp 150 --measure clip run "${score[@]}" "${small[@]}" "${one[@]}" --renderer warp
# 4. The tests of devices
piece tests 240 -m pytest -p no:cacheprovider --durations 0 tests/test_devices.py -k "$TESTS"
# 5. Learning to success, and whether a run is repeated bit for bit
piece learn 300 sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling" --clip-model tiny_clip \
    --total-timesteps $STEPS --runs-dir "$OUT/learn" "${one[@]}" --resume latest "${learn[@]}"
piece judged 80 eval_epic.py success --run "$OUT/learn" --checkpoint $STEPS --videos 4
other bits 120 "${tiny[@]}" "${one[@]}" --renderer warp
# 6. Updates; the same states in every way and precision, as rewards
piece updates 120 benchmarks/updates.py --device "$DEVICE" --rows "${rows[@]}" --rounds 1 --json "$OUT/updates.json"
piece renderers 180 benchmarks/renderers.py --device "$DEVICE" --render-size "$SIZE" --per-task "$STATES" \
    --precisions "${precisions[@]}" --out "$OUT/renderers.png" --json "$OUT/renderers.json"
# 7. Where the time and the memory go; how much int8 and compiled updates gain
other profile 60 "${score[@]}" "${tiny[@]}" "${one[@]}" --renderer warp
other memory 60 "${score[@]}" "${tiny[@]}" "${one[@]}" --renderer warp
pipeline clip_int8 90 --measure clip "${score[@]}" --clip-precision $INT8 --batches "${batches[@]:1:1}" "${one[@]}"
pipeline run_compiled 200 "${score[@]}" "${small[@]}" "${one[@]}" --renderer warp --compile
# 8. Drawing and CLIP without a learner, three cameras, Ray, more GPUs
pipeline score_warp 90 --measure score "${score[@]}" "${small[@]}" "${one[@]}" --renderer warp
pipeline cameras 180 "${score[@]}" "${small[@]}" "${one[@]}" --camera-azimuth 120 180 240
pipeline ray 120 "${score[@]}" "${small[@]}" --reward-devices ray:1
for n in "${MANY[@]}"; do
    pipeline "gpus_$n" 120 "${score[@]}" "${small[@]}" --reward-devices "${devices[@]:0:$n}"
done
# 9. Drawing alone; then EGL, which comes last because it may hang: a run, drawing and scoring a step
# at a time (as other code does) against chunks, and which device is which
for renderer in "${RENDERERS[@]}"; do
    draw=(--measure draw --render-size "$SIZE" --renderer "$renderer")
    pipeline "draw_$renderer" 40 "${draw[@]}" "${small[@]}" "${one[@]}"
    pipeline "draw_${renderer}_by_$WORKERS" 60 "${draw[@]}" "${small[@]}" --reward-devices "${several[@]}"
done
[ "$DEVICE" = cpu ] || pipeline run_egl 180 "${score[@]}" "${small[@]}" "${one[@]}" --renderer egl
other per_step 90 --states "$PER_STEP" "${score[@]}" "${one[@]}" "${tiny[@]}"
[ "$DEVICE" = cpu ] || pipeline devices 60 --measure draw --renderer egl --states-per-worker 64 "${small[@]}" \
    --reward-devices "${devices[@]}"

[ -z "${DRY-}" ] || exit 0
cd "$OUT"
FILES=(summary.txt table.txt results.json picture.png renderers.png learn)
for name in "${NAMES[@]}"; do FILES+=("$name".txt "$name".json "$name".err); done
for i in "${!FILES[@]}"; do [ -e "${FILES[i]}" ] || unset "FILES[i]"; done
tar -czf results.tar.gz --exclude 'step_*.pt' "${FILES[@]}"
cat summary.txt
echo "($SECONDS s; all of it: $OUT/results.tar.gz)"
exit $FAILED
