#!/usr/bin/env bash
# Everything worth knowing about speed, on this machine, in under eight minutes with a GPU:
#
#     benchmarks/gpu.sh [FOLDER]         # FOLDER: all.json, table.txt, a log per piece
#
# Without a GPU (or with DEVICE=cpu) the same pieces run in a small form, in about three minutes.
# Every piece has a time limit and all together have one: a piece that fails or takes too long is
# named in the table, stops no other, and makes the exit code 1. What is most worth knowing comes
# first.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${1:-gpu_results}
DEVICE=${DEVICE:-$("$PYTHON" -c 'import torch; print("cuda:0" if torch.cuda.is_available() else "cpu")')}
# seconds for all pieces; a busy CPU gets more
BUDGET=${BUDGET:-$([ "$DEVICE" = cpu ] && echo 900 || echo 460)}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
rm -f "$OUT"/[0-9][0-9]_*.{json,status,log}
SECONDS=0

piece() { # NAME LIMIT SCRIPT ARGUMENTS...: run one, at most LIMIT seconds
    local name=$1 limit=$2 script=$3 began=$SECONDS code=124
    shift 3
    [ "$limit" -gt $((BUDGET - SECONDS)) ] && limit=$((BUDGET - SECONDS))
    if [ "$limit" -gt 5 ]; then
        # KILL, to the whole group: a training script takes TERM as "finish this rollout"
        timeout -s KILL "$limit" "$PYTHON" "benchmarks/$script" "$@" --json "$OUT/$name.json" \
            >"$OUT/$name.log" 2>&1
        code=$?
        [ $code = 137 ] && code=124
    fi
    echo "$code $((SECONDS - began))" >"$OUT/$name.status"
    echo "$name: exit code $code, $((SECONDS - began)) s" >&2
}

# The digits are the order in the table.
if [ "$DEVICE" = cpu ]; then
    cpu=(--device cpu --size 96 --seconds 0.3)
    piece 01_clip_tiny 300 clip_speed.py clip --models local-dir:tiny_clip --batches 16 64 "${cpu[@]}"
    piece 02_clip_RN50 300 clip_speed.py clip --models RN50 --batches 2 4 "${cpu[@]}"
    piece 10_end_to_end_tiny 300 pipeline.py --num-envs 2 --episode-length 50 --gradient-steps 5 \
        --rollouts 2 --reward-devices cpu --no-clip-alone
    piece 20_updates 300 updates.py --device cpu --rows plain --rounds 5
    piece 30_draw 300 clip_speed.py draw --workers 1 2 --devices cpu --size 96 --frames 64
    piece 31_pool 300 clip_speed.py pool --workers 1 2 --frames 400 --jobs 1
    piece 40_precisions 300 clip_speed.py precisions --frames 64 --device cpu
else
    clip() { piece "$1" "$2" clip_speed.py clip --device "$DEVICE" --models "${@:3}"; }
    end_to_end() { # NAME LIMIT ENVIRONMENTS MODEL: paper's pictures, two counted rollouts
        piece "$1" "$2" pipeline.py --clip-model "$4" --render-size 480 --reward-devices "$DEVICE" \
            --num-envs "$3" --rollouts 2
    }
    clip 01_clip_ViT-L-14 100 ViT-L-14 --compiled --batches 64 128 256
    clip 02_clip_ViT-bigG-14 60 ViT-bigG-14 --batches 64 128 256
    end_to_end 10_end_to_end_ViT-L-14 75 32 ViT-L-14/random
    piece 20_updates 40 updates.py --device "$DEVICE" --rows plain
    piece 21_updates_compiled 120 updates.py --device "$DEVICE" --rows compiled captured
    piece 30_draw 80 clip_speed.py draw --workers 1 2 4 8 --devices "$DEVICE" --frames 400
    piece 32_draw_light 40 clip_speed.py draw --workers 1 4 --devices "$DEVICE" --quality light
    clip 03_clip_small 50 RN50 ViT-B-32 --seconds 0.5
    end_to_end 11_end_to_end_ViT-B-32 40 32 ViT-B-32/random
    clip 04_clip_ViT-H-14 40 ViT-H-14 --batches 64 256
    clip 05_clip_SigLIP2 40 ViT-L-16-SigLIP2-384 --batches 64 256
    end_to_end 12_end_to_end_ViT-bigG-14 150 16 ViT-bigG-14/random
    piece 40_precisions 40 clip_speed.py precisions --device "$DEVICE"
    clip 06_compiled 60 ViT-B-32 ViT-H-14 --compiled --batches 256 --seconds 0.5
fi

"$PYTHON" benchmarks/clip_speed.py table "$OUT" | tee "$OUT/table.txt"
code=${PIPESTATUS[0]}
echo "($SECONDS s; all numbers: $OUT/all.json)"
exit "$code"
