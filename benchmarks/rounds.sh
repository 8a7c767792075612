#!/usr/bin/env bash
# Run two rounds of 100 labels each, as in docs/labels.md, for POSE, ERRORS and SEED. A judge is the
# labelling model; ERRORS is its share of wrong answers. This takes 22 to 39 minutes on a busy core.
#   bash benchmarks/rounds.sh heels 0.05 1
#   bash benchmarks/rounds.sh splits 0.15 1
set -euo pipefail
pose=$1 errors=$2 seed=$3
out=runs/rounds_${pose}_${errors}_$seed
case $pose in
    heels) words="a humanoid robot seated down, meditating in the lotus position"
        judge=benchmarks/poses.py:sits_on_heels first=24000 start=() ;;
    splits) words="a humanoid robot practicing gymnastics, doing the side splits"
        # the prompt stays in the reward, beside the head
        judge=splits first=32000 start=(--resume "$out/first/*/checkpoints/step_32000.pt") ;;
esac
python=.venv/bin/python
label() { $python benchmarks/labels.py "$@" --judge $judge --by simulated --errors "$errors"; }
collect() { $python eval_epic.py collect --source run --explore --episodes 10 --every 5 "$@"; }
fit() { $python eval_epic.py fit --judge $judge --clip-model tiny_clip "$@"; }
train() { $python sac_clip_humanoid.py --clip-model tiny_clip --seed "$seed" "$@"; }

train --target-prompt "$words" --total-timesteps $first --runs-dir "$out/first"
collect --run "$out/first" --out "$out/one.npz"
label "$out/one.npz" --count 100 --seed "$seed"
fit --dataset "$out/one.npz" --out "$out/one.safetensors"
# shellcheck disable=SC2068
train ${start[@]} --reward-head "$out/one.safetensors" --judge $judge --total-timesteps $first \
    --runs-dir "$out/round1"
collect --run "$out/round1" --out "$out/two.npz"
label "$out/two.npz" --count 50 --seed "$seed"
label "$out/two.npz" --count 50 --seed "$seed" --uncertain "$out/one.safetensors"
fit --dataset "$out/one.npz" "$out/two.npz" --out "$out/two.safetensors"
train --resume "$out"/round1/*/checkpoints/step_$first.pt --reward-head "$out/two.safetensors" \
    --judge $judge --total-timesteps 64000 --runs-dir "$out/round2"
for run in "first best" "round1 best" "round1 $first" "round2 best" "round2 64000"; do
    set -- $run
    $python eval_epic.py success --run "$out/$1" --checkpoint "$2" --judge $judge --videos 0
done
