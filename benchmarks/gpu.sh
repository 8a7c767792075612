#!/usr/bin/env bash
# What to measure in the first half hour on a machine with GPUs, most important first:
#
#     benchmarks/gpu.sh [FOLDER]    # writes table.txt, results.json; per piece .txt .json .err
#
# Without a GPU (or with DEVICE=cpu) the same pieces run in a small form. PIECES="clip run_egl" runs
# only these. On a GPU every piece has a limit in seconds; the whole has one everywhere (BUDGET). A
# piece that fails or takes too long is named in the table and makes the exit code 1, but does not
# stop the others.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${1:-gpu_results}
GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
DEVICE=${DEVICE:-$([ "${GPUS:-0}" -gt 0 ] && echo cuda:0 || echo cpu)}
BUDGET=${BUDGET:-1700}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
rm -f "$OUT"/*.{json,txt,err}
MODELS=$(mktemp -d)
trap 'rm -rf "$MODELS"' EXIT
SECONDS=0
FAILED=0

piece() { # NAME LIMIT ARGUMENTS...: run Python, at most LIMIT seconds, and add it to the table
    local name=$1 limit=$2 began=$SECONDS code=124
    [[ " ${PIECES:-$name} " == *" $name "* ]] || return 0
    shift 2
    [ "$DEVICE" = cpu ] && limit=$BUDGET # a CPU's speed is not known
    [ "$limit" -gt $((BUDGET - SECONDS)) ] && limit=$((BUDGET - SECONDS))
    if [ "$limit" -gt 5 ]; then
        # KILL, to the whole group: a training script takes TERM as "finish this rollout"
        timeout -s KILL "$limit" "$PYTHON" "$@" >"$OUT/$name.txt" 2>"$OUT/$name.err"
        code=$?
    fi
    {
        echo "== $name ($((SECONDS - began)) s): $*"
        cat "$OUT/$name.txt" 2>/dev/null
        [ $code = 0 ] || echo "INCOMPLETE: $name, exit code $code (124, 137: time limit); see $OUT/$name.err"
        echo
    } | tee -a "$OUT/table.txt"
    [ $code = 0 ] || FAILED=1
}

pipeline() { # NAME LIMIT ARGUMENTS...
    piece "$1" "$2" benchmarks/pipeline.py "${@:3}" --json "$OUT/$1.json"
}

repeat() { # N: the device, N times
    for ((i = 0; i < $1; i++)); do printf '%s ' "$DEVICE"; done
}

if [ "$DEVICE" = cpu ]; then
    echo "no GPU: small forms on the CPU, whose times say nothing about a GPU" | tee "$OUT/table.txt"
    MODEL=tiny_clip SIZE=64 BATCHES="4 8" WORKERS=2 MANY=() PRECISIONS="fp32 fp16" STATES=2
    TESTS=(-k embeddings) RENDERERS=(warp)
    small=(--num-envs 2 --episode-length 8 --gradient-steps 2 --rollouts 1 --states-per-worker 4)
    small+=(--clip-batch-size 4) overlap=("${small[@]}")
else
    MODEL=$MODELS/ViT-bigG-14 SIZE=480 BATCHES="64 128 256" WORKERS=4 PRECISIONS="fp32 fp16" STATES=8
    TESTS=() RENDERERS=(egl warp)
    small=(--rollouts 3) overlap=(--rollouts 2)
    MANY=() && for n in 2 4 8; do [ "$GPUS" -ge "$n" ] && MANY+=("$n"); done
    mapfile -t devices < <(seq -f 'cuda:%.0f' 0 $((GPUS - 1)))
fi
score=(--clip-model "local-dir:$MODEL" --render-size "$SIZE")
one=(--reward-devices "$DEVICE")
read -ra several <<<"$(repeat $WORKERS)"

# 1. Which EGL device is which CUDA device, and what draws there
pipeline devices 60 --measure draw --renderer egl --states-per-worker 64 "${small[@]}" \
    --reward-devices "${devices[@]:-cpu}"
# 2. The tests of devices
piece tests 180 -m pytest -q -p no:cacheprovider tests/test_devices.py "${TESTS[@]}"
# 3. Drawing alone
for renderer in "${RENDERERS[@]}"; do
    draw=(--measure draw --render-size "$SIZE" --renderer "$renderer")
    pipeline "draw_$renderer" 40 "${draw[@]}" "${small[@]}" "${one[@]}"
    pipeline "draw_${renderer}_by_$WORKERS" 60 "${draw[@]}" "${small[@]}" --reward-devices "${several[@]}"
done
# 4. CLIP alone, with random weights, as large as the real one
[ "$DEVICE" = cpu ] || timeout 200 "$PYTHON" benchmarks/random_clip.py "$(basename "$MODEL")" "$MODEL"
read -ra batches <<<"$BATCHES"
pipeline clip 120 --measure clip "${score[@]}" --batches "${batches[@]}" "${one[@]}"
pipeline clip_compiled 300 --measure clip "${score[@]}" --compile --batches "${batches[@]:0:1}" "${one[@]}"
# 5. Drawing and CLIP without a learner
for renderer in "${RENDERERS[@]}"; do
    pipeline "score_$renderer" 90 --measure score "${score[@]}" "${small[@]}" "${one[@]}" \
        --renderer "$renderer"
done
# 6. The whole run: plain, compiled
for renderer in "${RENDERERS[@]}"; do
    pipeline "run_$renderer" 180 "${score[@]}" "${small[@]}" "${one[@]}" --renderer "$renderer"
done
pipeline run_compiled 400 "${score[@]}" "${small[@]}" "${one[@]}" --renderer warp --compile
piece updates 90 benchmarks/updates.py --device "$DEVICE" --rows plain --rounds 1 --json "$OUT/updates.json"
# 7. The same states in every way and precision, as rewards
read -ra precisions <<<"$PRECISIONS"
piece renderers 180 benchmarks/renderers.py --device "$DEVICE" --render-size "$SIZE" --per-task "$STATES" \
    --precisions "${precisions[@]}" --out "$OUT/renderers.png" --json "$OUT/renderers.json"
# 8. Three cameras
pipeline cameras 180 "${score[@]}" "${small[@]}" "${one[@]}" --camera-azimuth 120 180 240
# 9. Through Ray, and with a simulated device: does everything hide behind CLIP?
pipeline ray 120 "${score[@]}" "${small[@]}" --reward-devices ray:1
pipeline overlap_egl 90 --scorer-ms 1.6 --draw-ms 1.5 "${overlap[@]}"
pipeline overlap_warp 90 --scorer-ms 1.6 --draw-ms 0.1 "${overlap[@]}"
# 10. More GPUs
for n in "${MANY[@]}"; do
    pipeline "gpus_$n" 120 "${score[@]}" "${small[@]}" --reward-devices "${devices[@]:0:$n}"
done

"$PYTHON" - "$OUT" <<'END'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
(folder / "results.json").write_text(json.dumps(found, indent=1))
END
echo "($SECONDS s; the table: $OUT/table.txt, all numbers: $OUT/results.json)"
exit $FAILED
