#!/usr/bin/env bash
# Everything worth knowing about speed, on this machine, in under ten minutes with a GPU:
#
#     benchmarks/gpu.sh [FOLDER]         # FOLDER: table.txt; of every piece .txt .json .err
#
# Without a GPU (or with DEVICE=cpu) the same pieces run in a small form, in about a minute.
# Every piece has a time limit, and so have all together: a piece that fails or takes too long is
# named in the table, stops no other, and makes the exit code 1. The most important ones come first.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${1:-gpu_results}
DEVICE=${DEVICE:-$("$PYTHON" -c 'import torch; print("cuda:0" if torch.cuda.is_available() else "cpu")')}
BUDGET=${BUDGET:-$([ "$DEVICE" = cpu ] && echo 900 || echo 560)} # seconds for all pieces
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
rm -f "$OUT"/*.{json,txt,err}
MODELS=$(mktemp -d)
trap 'rm -rf "$MODELS"' EXIT
SECONDS=0
FAILED=0

piece() { # NAME LIMIT SCRIPT ARGUMENTS...: run one, at most LIMIT seconds, and add it to the table
    local name=$1 limit=$2 began=$SECONDS code=124
    shift 2
    [ "$limit" -gt $((BUDGET - SECONDS)) ] && limit=$((BUDGET - SECONDS))
    if [ "$limit" -gt 5 ]; then
        # KILL, to the whole group: a training script takes TERM as "finish this rollout"
        timeout -s KILL "$limit" "$PYTHON" "benchmarks/$1" "${@:2}" --json "$OUT/$name.json" \
            >"$OUT/$name.txt" 2>"$OUT/$name.err"
        code=$?
    fi
    {
        echo "== $name ($((SECONDS - began)) s): benchmarks/$*"
        cat "$OUT/$name.txt" 2>/dev/null
        [ $code = 0 ] || echo "INCOMPLETE: $name, exit code $code (124, 137: time limit); see $OUT/$name.err"
        echo
    } | tee -a "$OUT/table.txt"
    [ $code = 0 ] || FAILED=1
}

model() { # ARCH LIMIT ARGUMENTS...: CLIP of random weights, alone and end to end
    [ -d "$MODELS/$1" ] || timeout "$2" "$PYTHON" benchmarks/random_clip.py "$1" "$MODELS/$1"
    piece "$1" "$2" pipeline.py --measure clip run --clip-model "local-dir:$MODELS/$1" \
        --reward-devices "$DEVICE" "${@:3}"
}

draw() { # NAME QUALITY DEVICES...
    piece "$1" 40 pipeline.py --measure draw --render-size 480 --render-quality "$2" \
        --reward-devices "${@:3}"
}

if [ "$DEVICE" = cpu ]; then
    small=(--num-envs 2 --episode-length 50 --gradient-steps 5 --rollouts 2)
    piece tiny_clip 300 pipeline.py --measure clip draw run "${small[@]}" --reward-devices cpu
    piece updates 300 updates.py --device cpu --rows plain --rounds 1
    piece overlap 300 pipeline.py --scorer-ms 1.6 --num-envs 4 --rollouts 2
    model ViT-B-32 300 "${small[@]}" --episode-length 8 --clip-batch-size 16
else
    paper=(--render-size 480 --rollouts 2)
    model ViT-L-14 110 "${paper[@]}" --batches 64 128 256
    draw draw_by_1 full "$DEVICE"
    draw draw_by_4 full "$DEVICE" "$DEVICE" "$DEVICE" "$DEVICE"
    piece updates 60 updates.py --device "$DEVICE" --rows plain
    piece overlap 60 pipeline.py --scorer-ms 1.6 --rollouts 2
    model ViT-bigG-14 200 "${paper[@]}" --batches 64 256 --num-envs 16
    piece updates_compiled 120 updates.py --device "$DEVICE" --rows compiled
    piece ray 90 pipeline.py --clip-model "local-dir:$MODELS/ViT-L-14" "${paper[@]}" \
        --reward-devices ray:1
    draw draw_light_by_4 light "$DEVICE" "$DEVICE" "$DEVICE" "$DEVICE"
fi

echo "($SECONDS s; the table: $OUT/table.txt, all numbers: $OUT/*.json)"
exit $FAILED
