#!/usr/bin/env bash
# Two rounds of 100 labels each, as docs/labels.md says, for a pose and three seeds. A judge plays
# the model that labels; ERRORS is the share of its wrong answers. Two hours a seed on two cores.
#   bash benchmarks/rounds.sh heels 0.05
#   bash benchmarks/rounds.sh splits 0.15
set -euo pipefail
pose=$1 errors=$2
case $pose in
    heels) words="a humanoid robot seated down, meditating in the lotus position"
        judge=benchmarks/poses.py:sits_on_heels first=24000 ;;
    splits) words="a humanoid robot practicing gymnastics, doing the side splits"
        judge=splits first=32000 ;;
esac
python=.venv/bin/python
for seed in 1 2 3; do
    out=runs/rounds_${pose}_${errors}_$seed
    judged="--judge $judge"
    label() { $python benchmarks/labels.py "$@" $judged --by simulated --errors "$errors"; }
    collect() {
        $python eval_epic.py collect --source run --run "$1" --explore \
            --episodes 10 --every 5 --out "$2"
    }
    $python sac_clip_humanoid.py --target-prompt "$words" --clip-model tiny_clip \
        --total-timesteps $first --seed $seed --runs-dir $out/first
    collect $out/first $out/one.npz
    label $out/one.npz --count 100 --seed $seed
    $python eval_epic.py fit --dataset $out/one.npz $judged --clip-model tiny_clip \
        --out $out/one.safetensors
    $python sac_clip_humanoid.py --reward-head $out/one.safetensors $judged --clip-model tiny_clip \
        --total-timesteps $first --seed $seed --runs-dir $out/round1
    collect $out/round1 $out/two.npz
    label $out/two.npz --count 50 --seed $seed
    label $out/two.npz --count 50 --seed $seed --uncertain $out/one.safetensors
    $python eval_epic.py fit --dataset $out/one.npz $out/two.npz $judged --clip-model tiny_clip \
        --out $out/two.safetensors
    $python sac_clip_humanoid.py --resume $out/round1/*/checkpoints/step_$first.pt \
        --reward-head $out/two.safetensors $judged --total-timesteps 64000 --seed $seed \
        --runs-dir $out/round2
    for round in 1 2; do
        $python eval_epic.py success --run $out/round$round $judged --videos 4
    done
done
