"""Train tiny_clip, the small CLIP that this project embeds, on pictures of the project's scenes.

    python tiny_clip/train.py                       # two CPU cores, 35 minutes
    python tiny_clip/train.py --init tiny_clip --seed 2 --pictures 12000 --shares 0.3 0.2 0.5 \\
        --epochs 5 --lr 5e-4                        # 11 more: the plain scene had come too short
    python tiny_clip/train.py --init tiny_clip --seed 3 --pictures 30000 --epochs 5 --lr 7e-4 \\
        --shares 0.16 0.12 0.12 0.22 0.12 0.06 0.07 0.08 0.05    # CartPole and MountainCar as well
    python tiny_clip/train.py --pictures 4800 --epochs 10 --out /tmp/try    # a quick try
    python tiny_clip/evaluate.py                    # held-out figures, writes the model card

Writes open_clip_config.json and open_clip_model.safetensors (half precision): a folder that
open_clip loads as `local-dir:tiny_clip`. The loss is SigLIP's (a sigmoid for every pair of picture
and caption), with soft targets from data.py instead of "this caption belongs to this picture".
"""

import argparse
import copy
import datetime
import json
import os
import sys
import time

# Threads that wait for each other in a busy loop make everything five times slower when another
# process wants the cores too; it must be said before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tiny_clip import data

WIDTHS = {"small": 16, "base": 24, "large": 48}  # of the residual network's first layer
CONTEXT_LENGTH = 32
MEAN, STD = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
# Cosines are the reward, so they should use their range: the scale stays low, or the network could
# tell everything apart within a few hundredths.
SCALE_RANGE = np.log([6.0, 12.0])
SMOOTHING = 0.02  # of the targets, so that nothing is pushed further and further apart
REWORDINGS, CAPTIONS_PER_STEP = 30, 3  # drawn once of every caption; of every concept and step
EXACT_WEIGHT = 3.0  # of the first caption of each concept, which comes in every step
HELD_OUT_SEED = 1_000_000  # jobs with this seed and above are never trained on
REPORT = ("kneeling", "standing", "splits", "lotus", "arms_raised", "lying", "upright", "peak")


def model_config(size):
    """open_clip_config.json of a model size: a residual network and a short text transformer."""
    width = WIDTHS[size]
    return {
        "model_cfg": {
            "embed_dim": 64,
            "init_logit_scale": float(np.log(10.0)),
            "init_logit_bias": -4.0,
            "vision_cfg": {
                "image_size": data.IMAGE_SIZE,
                "layers": [1, 1, 1, 1],
                "width": width,
                "head_width": width * 4,
            },
            "text_cfg": {
                "context_length": CONTEXT_LENGTH,
                "vocab_size": 49408,
                "width": 64,
                "heads": 4,
                "layers": 2,
            },
        },
        "preprocess_cfg": {
            "size": data.IMAGE_SIZE,
            "mode": "RGB",
            "mean": list(MEAN),
            "std": list(STD),
            "interpolation": "bicubic",
            "resize_mode": "shortest",
        },
    }


def training_jobs(pictures, seed, shares):
    """The pictures to draw, by the share of each of data.SCENES."""
    count = 600
    total = max(round(pictures / count), 4)
    jobs = []
    for i in range(total):
        scene = data.SCENES[np.searchsorted(np.cumsum(shares[:-1]), (i + 0.5) / total)]
        jobs.append(data.Job(seed * 10_000 + i, scene, count, full=0.08 if i % 3 == 0 else 0.0))
    return jobs


class Captions:
    """Every concept's captions with rewordings, as tokens, and draws from them."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        tokenizer = open_clip.SimpleTokenizer(context_length=CONTEXT_LENGTH)
        self.exact = tokenizer([data.exact(lines[0]) for lines in data.CAPTIONS.values()])
        self.pools = [
            tokenizer([data.reworded(line, rng) for line in lines for _ in range(REWORDINGS)]
                      + [data.exact(line) for line in lines] * (REWORDINGS // 3))
            for lines in data.CAPTIONS.values()
        ]  # fmt: skip

    def draw(self, generator):
        """(tokens [P, 32], concept of each [P], weight of each [P])."""
        tokens, concepts = [self.exact], [torch.arange(len(self.exact))]
        for concept, pool in enumerate(self.pools):
            picks = torch.randint(len(pool), (CAPTIONS_PER_STEP,), generator=generator)
            tokens.append(pool[picks])
            concepts.append(torch.full((CAPTIONS_PER_STEP,), concept))
        weights = torch.ones(sum(len(c) for c in concepts))
        weights[: len(self.exact)] = EXACT_WEIGHT
        return torch.cat(tokens), torch.cat(concepts), weights


def normalised(pictures):
    """uint8 [B, 3, 64, 64] to what the image tower takes, channels last for speed on CPUs."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    pictures = (pictures.float() / 255 - mean) / std
    return pictures.contiguous(memory_format=torch.channels_last)


def augmented(pictures, generator):
    """Mirrored, moved, zoomed, lightened, tinted: uint8 [B, 3, 64, 64] -> uint8."""
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
    cosine = images @ texts.T  # [B, P]
    target = truth[:, concepts]
    target_weight = weight[:, concepts] * caption_weight * (1 + 2 * target)  # the true are few
    logits = model.logit_scale.exp() * cosine + model.logit_bias
    smooth = SMOOTHING + (1 - 2 * SMOOTHING) * target
    loss = F.binary_cross_entropy_with_logits(logits, smooth, target_weight, reduction="sum")
    # "a humanoid robot" is a baseline prompt: every picture shall be equally much of one
    uneven = 0.0
    for concept in map(data.CONCEPTS.index, data.BASELINES):
        own = truth[:, concept] == 1
        if own.sum() > 1:
            uneven = uneven + cosine[own, concept].var() * own.float().mean()
    return loss / target_weight.sum() + uneven


def auc(scores, positive):
    """Area under the ROC curve: chance that a positive scores above a negative, ties one half."""
    order, counts = np.unique(scores, return_inverse=True, return_counts=True)[1:]
    ranks = np.cumsum(counts) - (counts - 1) / 2
    p, n = positive.sum(), (~positive).sum()
    return (ranks[order][positive].sum() - p * (p + 1) / 2) / (p * n) if p and n else float("nan")


@torch.inference_mode()
def held_out_auc(model, pictures, truth, weight, exact_tokens):
    """One-vs-rest AUC of the concepts of REPORT: true from 0.6, false to 0.3. dict of float."""
    model.eval()
    images = torch.cat([model.encode_image(normalised(x), True) for x in pictures.split(256)])
    cosine = (images @ model.encode_text(exact_tokens, True).T).double().numpy()
    figures = {}
    for name in REPORT:
        c = data.CONCEPTS.index(name)
        yes, no = (truth[:, c] >= 0.6).numpy(), (truth[:, c] <= 0.3).numpy()
        sure = (yes | no) & (weight[:, c] == 1).numpy()
        figures[name] = auc(cosine[sure, c], yes[sure])
    return figures


@torch.no_grad()
def follow(average, model, decay):
    """Move `average` towards `model`, parameters and batch norm's running statistics alike."""
    new = model.state_dict()
    for name, ours in average.state_dict().items():
        if ours.is_floating_point():
            ours.lerp_(new[name], 1 - decay)


@torch.no_grad()
def recalibrate(model, pictures, seed, batches=60):
    """Set batch norm's running statistics to the mean over shuffled, plain training pictures."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # a plain average
    model.train()
    for rows in torch.randperm(len(pictures), generator=generator).split(256)[:batches]:
        model.encode_image(normalised(pictures[rows]))
    model.eval()


def save(model, config, folder, history):
    """Write the folder that open_clip loads as local-dir:FOLDER; history (list of str: one training
    each) goes beside the weights, for the model card."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "open_clip_config.json"), "w") as file:
        json.dump(config, file, indent=2)
        file.write("\n")
    state = {
        key: (value.half() if value.is_floating_point() else value).contiguous()
        for key, value in model.state_dict().items()
    }
    metadata = {"format": "pt", "history": json.dumps(history)}
    path = os.path.join(folder, "open_clip_model.safetensors")
    save_file(state, path, metadata)
    os.chmod(path, 0o644)  # safetensors keeps files to their owner


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", choices=WIDTHS, default="base")
    parser.add_argument("--pictures", type=int, default=36_000)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.62, 0.23, 0.15],
                        help=f"of the pictures in the scenes {', '.join(data.SCENES)}")  # fmt: skip
    parser.add_argument("--init", help="folder of a model to go on with")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=2, help="processes that draw")
    parser.add_argument("--data", help="npz: the pictures, drawn and written there when missing")
    parser.add_argument("--out", default=here, help="folder of the model")
    args = parser.parse_args()
    started = time.time()

    def say(text):
        print(f"[{time.time() - started:6.0f} s] {text}", flush=True)

    # pictures: the held-out ones first, from seeds of their own
    chosen = [scene for scene, share in zip(data.SCENES, args.shares) if share > 0]
    held_out = [data.Job(HELD_OUT_SEED + i, scene, 600) for i, scene in enumerate(chosen)]
    jobs = held_out + training_jobs(args.pictures, args.seed, args.shares)
    if args.data and os.path.exists(args.data):
        arrays = list(np.load(args.data).values())
    else:
        total = sum(job.count for job in jobs)
        arrays = data.make_pictures(
            jobs, args.workers, lambda n: n % 6000 or say(f"{n}/{total} pictures drawn")
        )[:3]
        if args.data:
            np.savez(args.data, *arrays)
    pictures, truth, weight = map(torch.from_numpy, arrays)
    held = sum(job.count for job in held_out)
    test = (pictures[:held], truth[:held], weight[:held])
    pictures, truth, weight = pictures[held:], truth[held:], weight[held:]
    say(f"{len(pictures)} pictures, {held} held out")

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    torch.set_num_threads(2)
    config = model_config(args.size)
    model = open_clip.CLIP(**config["model_cfg"]).to(memory_format=torch.channels_last)
    history = []
    if args.init:
        path = os.path.join(args.init, "open_clip_model.safetensors")
        model.load_state_dict(load_file(path))
        with safe_open(path, "pt") as file:
            history = json.loads(file.metadata()["history"])
    average = copy.deepcopy(model).requires_grad_(False)
    captions = Captions(args.seed)
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embedding" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embedding" in n]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
    )
    steps = len(pictures) // args.batch_size * args.epochs
    warmup = min(100, steps // 10 + 1)
    step, losses = 0, []
    for epoch in range(args.epochs):
        for rows in torch.randperm(len(pictures), generator=generator).split(args.batch_size):
            if len(rows) < args.batch_size:
                continue
            rate = min(1, (step + 1) / warmup) * (1.01 + np.cos(np.pi * step / steps)) / 2.01
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate
            model.train()
            batch = augmented(pictures[rows], generator)
            loss = loss_of(model, batch, truth[rows], weight[rows], captions.draw(generator))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(*SCALE_RANGE)
            follow(average, model, min(0.995, 1 - 10 / (step + 11)))
            step += 1
            losses.append(loss.item())
            if step % 50 == 0:
                say(f"step {step}/{steps} loss {np.mean(losses[-50:]):.4f}")
        figures = held_out_auc(average, *test, captions.exact)
        say(
            f"epoch {epoch + 1}/{args.epochs} held-out AUC "
            + " ".join(f"{name} {value:.3f}" for name, value in figures.items())
        )
    recalibrate(average, pictures, args.seed)
    history.append(
        f"seed {args.seed}, {len(pictures)} pictures, shares {args.shares}, {args.epochs} epochs, "
        f"lr {args.lr}, init {args.init}: {(time.time() - started) / 60:.0f} minutes on "
        f"{os.cpu_count()} cores, {datetime.date.today()}"
    )
    save(average, config, args.out, history)
    saved = open_clip.create_model(f"local-dir:{args.out}")  # as any user gets it
    figures = held_out_auc(saved, *test, captions.exact)
    size = os.path.getsize(os.path.join(args.out, "open_clip_model.safetensors")) / 1e6
    say(
        f"{args.out}: {size:.1f} MB, scale {saved.logit_scale.exp():.1f}, held-out AUC "
        + " ".join(f"{name} {value:.3f}" for name, value in figures.items())
    )


if __name__ == "__main__":
    main()
