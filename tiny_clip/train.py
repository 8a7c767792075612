"""Train tiny_clip, the small CLIP that this project embeds, on pictures of the project's scenes.

    make tiny_clip                                  # all thirteen trainings in turn: 346 minutes
    python tiny_clip/train.py --pictures 4800 --epochs 10 --out /tmp/try    # a quick try
    python tiny_clip/evaluate.py > tiny_clip/figures.md                     # held-out figures

It writes open_clip_config.json and open_clip_model.safetensors (half precision) to a folder that
open_clip loads as `local-dir:tiny_clip`. The loss is SigLIP's (a sigmoid for every pair of picture
and caption), with soft targets from data.py instead of "this caption belongs to this picture".
"""

import argparse
import os
import sys
import time
from pathlib import Path

# Threads that wait for each other in a busy loop make everything five times slower when another
# process wants the cores too; this must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.optim.swa_utils import AveragedModel, update_bn
from torchvision.transforms.v2 import functional as TF

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_clip import data

HERE = Path(__file__).resolve().parent
CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
MEAN, STD = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
# The cosines of degree 0 and 1. Cosines are the reward, so they span a wide range. They are fixed:
# if scale and bias were learned, they would drift, because cosines that are too high count more.
COSINES = -0.27, 0.38
REWORDINGS, CAPTIONS_PER_STEP = 30, 3  # per caption, drawn once; per concept and step
COSINE_WEIGHT = 10.0  # of the cosines' squared errors, relative to the cross entropy
OVERPAID_WEIGHT = 4.0  # factor on cosines that are too high: an agent seeks such states and stays
UNIFORMITY_WEIGHT = 0.05  # of the loss that keeps pictures apart, also beyond the captions
GEOMETRY_WEIGHT = 0.3  # of predicting hands, feet and knees from the picture
EXACT_WEIGHT = 3.0  # of the first caption of each concept, which is in every step
PER_JOB = 600  # pictures; a varied scene changes from job to job


def training_jobs(pictures, seed, shares):
    """Return the jobs that draw the pictures, with a share for each of data.SCENES."""
    count = min(PER_JOB, pictures // 4)
    total = round(pictures / count)
    scenes = np.searchsorted(np.cumsum(shares[:-1]), (np.arange(total) + 0.5) / total)
    return [
        data.Job(seed * 10_000 + i, data.SCENES[scene], count, full=0.04 if i % 3 == 0 else 0.0)
        for i, scene in enumerate(scenes)
    ]


def caption_draws(seed, generator):
    """Yield captions for step after step, every concept's first one and some random rewordings:
    (tokens [P, 32], concept of each [P], weight of each [P])."""
    rng = np.random.default_rng(seed)
    tokenizer = open_clip.SimpleTokenizer(context_length=32)
    exact = tokenizer([lines[0].format(data.SUBJECT) for lines in data.CAPTIONS.values()])
    pools = [
        tokenizer([data.reworded(line, rng) for line in lines for _ in range(REWORDINGS)]
                  + [line.format(data.SUBJECT) for line in lines] * (REWORDINGS // 3))
        for lines in data.CAPTIONS.values()
    ]  # fmt: skip
    index = torch.arange(len(pools))
    concepts = torch.cat([index, index.repeat_interleave(CAPTIONS_PER_STEP)])
    weights = torch.where(torch.arange(len(concepts)) < len(index), EXACT_WEIGHT, 1.0)
    while True:
        size = (CAPTIONS_PER_STEP,)
        drawn = [pool[torch.randint(len(pool), size, generator=generator)] for pool in pools]
        yield torch.cat([exact, *drawn]), concepts, weights


def normalised(pictures):
    """Turn uint8 [B, 3, 64, 64] into the image tower's input, channels last for speed on CPUs."""
    pictures = TF.normalize(pictures.float() / 255, MEAN, STD)
    return pictures.contiguous(memory_format=torch.channels_last)


def augmented(pictures, generator):
    """Mirror, shift, zoom, and vary contrast, brightness, tint: uint8 [B, 3, 64, 64] -> uint8."""
    size = len(pictures)

    def uniform(low, high, *shape):
        return torch.empty(size, *shape).uniform_(low, high, generator=generator)

    pictures = pictures.float()
    mirrored = uniform(0, 1) < 0.5
    pictures[mirrored] = pictures[mirrored].flip(-1)
    moved = torch.arange(size // 2)  # the batch is shuffled: any half will do
    theta = torch.zeros(len(moved), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = uniform(0.95, 1.05)[moved]
    theta[:, :, 2] = uniform(-0.08, 0.08, 2)[moved]
    grid = F.affine_grid(theta, [len(moved), 3, *pictures.shape[2:]], align_corners=False)
    pictures[moved] = F.grid_sample(
        pictures[moved], grid, padding_mode="reflection", align_corners=False
    )
    middle = pictures.mean((2, 3), keepdim=True)
    pictures = (pictures - middle) * uniform(0.8, 1.2, 1, 1, 1) + middle
    pictures = pictures * uniform(0.85, 1.15, 1, 1, 1) + uniform(-8, 8, 3, 1, 1)
    return pictures.round().clamp(0, 255).to(torch.uint8)


def loss_of(model, pictures, truth, weight, captions):
    """Sigmoid cross entropy of every picture [B] with every caption [P] against truth [B, C]."""
    tokens, concepts, caption_weight = captions
    images = model.encode_image(normalised(pictures), normalize=True)
    texts = model.encode_text(tokens, normalize=True)
    cosine, scale, bias = images @ texts.T, model.logit_scale.exp(), model.logit_bias  # [B, P]
    target = truth[:, concepts]
    target_weight = weight[:, concepts] * caption_weight * (1 + 2 * target)  # few are true
    smooth = data.SMOOTHING + (1 - 2 * data.SMOOTHING) * target
    loss = F.binary_cross_entropy_with_logits(
        scale * cosine + bias, smooth, target_weight, reduction="sum"
    )
    # The cross entropy is flat where a target is near 0 or 1, which is where an agent in training
    # stays: 0.9 of a pose or all of it. So the cosine itself is pulled to its target, too.
    off = cosine - (torch.logit(smooth) - bias) / scale
    off_weight = target_weight * torch.where(off > 0, OVERPAID_WEIGHT, 1.0)
    loss = loss + COSINE_WEIGHT * (off.square() * off_weight).sum()
    # "a humanoid robot" is a baseline prompt: every picture should have the same cosine with it
    uneven = 0.0
    for concept in map(data.CONCEPTS.index, data.BASELINES):
        own = truth[:, concept] == 1
        if own.sum() > 1:
            uneven = uneven + cosine[own, concept].var() * own.float().mean()
    # No caption is true of an unknown scene's pictures. These still have to be told apart, or none
    # of them could be a goal (Wang and Isola 2020, equation 5).
    alike = torch.pdist(images).square().mul(-2).exp().mean().log()
    return loss / target_weight.sum() + uneven + UNIFORMITY_WEIGHT * alike


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pictures", type=int, default=36_000)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.62, 0.23, 0.15],
                        help=f"shares of the scenes {', '.join(data.SCENES)}")  # fmt: skip
    parser.add_argument("--init", type=Path, help="folder of a model to continue from")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=2, help="processes that draw")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the model")
    args = parser.parse_args()
    started = time.time()

    def say(text):
        print(f"[{time.time() - started:6.0f} s] {text}", flush=True)

    jobs = training_jobs(args.pictures, args.seed, args.shares)
    drawn = map(torch.from_numpy, data.make_pictures(jobs, args.workers))
    pictures, truth, weight, geometry = drawn
    say(f"{len(pictures)} pictures")

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    torch.set_num_threads(2)
    source = args.init or HERE
    model = open_clip.create_model(f"local-dir:{source}", load_weights=args.init is not None)
    model = model.to(memory_format=torch.channels_last)
    scale = 2 * data.END / (COSINES[1] - COSINES[0])
    torch.nn.init.constant_(model.logit_scale.requires_grad_(False), np.log(scale))
    torch.nn.init.constant_(model.logit_bias.requires_grad_(False), -scale * sum(COSINES) / 2)
    average = AveragedModel(  # exponential, faster at first
        model, avg_fn=lambda old, new, n: old + (new - old) * max(0.005, 10 / (n + 10))
    )
    captions = caption_draws(args.seed, generator)
    # Few pictures show where on a hip a hand belongs, but all show where the hands are. The last
    # layer's input has to predict these places by a linear map, which is discarded afterwards.
    features = []
    model.visual.layer4.register_forward_hook(lambda *call: features.append(call[-1].flatten(1)))
    tokens, channels = model.visual.attnpool.positional_embedding.shape  # places and their mean
    head = torch.nn.Linear((tokens - 1) * channels, data.GEOMETRY)
    humanoid = ~geometry[:, 0].isnan()
    std, mean = torch.std_mean(geometry[humanoid], 0)
    geometry = ((geometry - mean) / std).clamp(-3, 3)
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embedding" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embedding" in n]
    groups = [{"params": [*matrices, *head.parameters()]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, args.lr, (0.9, 0.98), weight_decay=0.05)
    steps = len(pictures) // args.batch_size * args.epochs
    warmup = min(100, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / warmup) * (1.01 + np.cos(np.pi * step / steps)) / 2.01,
    )
    losses = []
    for _ in range(args.epochs):
        order = torch.randperm(len(pictures), generator=generator)
        for rows in order[: steps // args.epochs * args.batch_size].split(args.batch_size):
            model.train()
            batch = augmented(pictures[rows], generator)
            loss = loss_of(model, batch, truth[rows], weight[rows], next(captions))
            robots, geometry_loss = rows[humanoid[rows]], torch.zeros(())
            places = head(features.pop())[humanoid[rows]]
            if len(robots):
                geometry_loss = F.mse_loss(places, geometry[robots])
            loss = loss + GEOMETRY_WEIGHT * geometry_loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append((loss.item(), geometry_loss.item()))
            average.update_parameters(model)
            if len(losses) % 50 == 0:
                mean = np.mean(losses[-50:], 0)
                say(f"step {len(losses)}/{steps} loss {mean[0]:.4f} geometry {mean[1]:.3f}")
    # recompute batch norm's statistics on shuffled pictures without augmentation: scenes differ
    shuffled = torch.randperm(len(pictures), generator=generator)[: 60 * 256].split(256)
    update_bn((normalised(pictures[rows]) for rows in shuffled), average)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / CONFIG).write_text((source / CONFIG).read_text())
    state = average.module.half().state_dict()
    save_file(
        {key: value.contiguous() for key, value in state.items()},
        args.out / WEIGHTS,
        {"format": "pt"},
    )
    (args.out / WEIGHTS).chmod(0o644)  # safetensors lets only the owner read
    say(f"wrote {args.out}; its held-out figures: tiny_clip/evaluate.py")


if __name__ == "__main__":
    main()
