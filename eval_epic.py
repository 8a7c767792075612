"""How good is the reward? Look before you train.

Reward against pole angle and car position, one line per alpha (figure 2 of arXiv 2310.12921), for
any model; tiny_clip needs no network and takes seconds:

    python eval_epic.py landscape --clip-model local-dir:tiny_clip --render-size 96
    python eval_epic.py landscape --clip-model ViT-bigG-14/laion2b_s39b_b160k
"""

from __future__ import annotations

import csv
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

import clip_reward
import egl_render
from clip_reward import UsageError

# ------------------------------------------------------------------------------ landscape


@dataclass(frozen=True)
class Sweep:
    """One coordinate of a classic task from end to end; all others are zero."""

    env_id: str
    textured: bool
    label: str  # of the coordinate, with its unit
    values: tuple[float, float]
    index: int  # of the coordinate in the state
    state_size: int
    goal: float  # where the reward should be largest
    target_prompt: str
    baseline_prompt: str

    def states(self, count):
        """(values [count], states [count, S]) float64."""
        values = np.linspace(*self.values, count)
        states = np.zeros((count, self.state_size))
        states[:, self.index] = values
        return values, states

    def is_goal(self, values):
        """The tasks' own criterion: within 12 degrees of upright; at or beyond the flag."""
        if self.env_id == "CartPole-v1":
            return np.abs(values) <= math.radians(12)
        return values >= self.goal


CARTPOLE_PROMPTS = ("pole vertically upright on top of the cart", "pole and cart")
MOUNTAIN_PROMPTS = (
    "a car at the peak of the mountain, next to the yellow flag",
    "a car in the mountain",
)
MOUNTAIN = ("position", (-1.2, 0.6), 0, 2, egl_render.MOUNTAIN_GOALS["MountainCar-v0"])
SWEEPS = (
    Sweep("CartPole-v1", False, "pole angle (rad)", (-np.pi, np.pi), 2, 4, 0.0, *CARTPOLE_PROMPTS),
    Sweep("MountainCar-v0", False, *MOUNTAIN, *MOUNTAIN_PROMPTS),
    Sweep("MountainCar-v0", True, *MOUNTAIN, *MOUNTAIN_PROMPTS),
)


@dataclass
class Landscape:
    """Reward against pole angle and car position, plain and textured, one line per alpha."""

    clip_model: str = "ViT-bigG-14/laion2b_s39b_b160k"
    """ARCH/TAG of open_clip, hf-hub:ORG/NAME or local-dir:PATH; offline: local-dir:tiny_clip"""
    reward_alpha: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """strengths of goal-baseline regularisation, one line each"""
    points: int = 361
    """states on each line"""
    render_size: int = 480
    """height and width of the frames in pixels"""
    clip_batch_size: int = 64
    """frames per forward pass of CLIP"""
    clip_cache_dir: str | None = None
    """where downloaded weights are kept, default: open_clip's own cache"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """where CLIP computes"""
    allow_slow: bool = False
    """start even if this machine would need days for the model"""
    out: Path = Path("landscape.png")
    """the picture; a table of all values is written beside it as CSV"""


def check_landscape(args: Landscape) -> None:
    """Raises UsageError for what cannot work, before anything slow."""
    if not args.reward_alpha or not all(0 <= alpha <= 1 for alpha in args.reward_alpha):
        raise UsageError(f"--reward-alpha {args.reward_alpha} is outside [0, 1]")
    for name, least in (("points", 3), ("render_size", 1), ("clip_batch_size", 1)):
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(args, name)} is less than {least}")
    if args.out.suffix.lower() != ".png":
        raise UsageError(f"--out {args.out} does not end in .png")
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {args.out} cannot be written: {error.strerror}") from error
    if not os.access(args.out.parent, os.W_OK):
        raise UsageError(f"--out {args.out} cannot be written: no permission")
    frames = len(SWEEPS) * args.points
    clip_reward.check_cost(
        args.clip_model, [args.device], frames, args.allow_slow, args.clip_cache_dir
    )
    clip_reward.check_model(args.clip_model, args.clip_cache_dir)


def sweep_rewards(sweep: Sweep, args: Landscape):
    """Values [points] and, for every alpha, rewards [points], both float64."""
    values, states = sweep.states(args.points)
    clip = clip_reward.load_clip(args.clip_model, args.device, cache_dir=args.clip_cache_dir)
    reward = clip_reward.CLIPReward(clip, [sweep.target_prompt], [sweep.baseline_prompt])
    renderer = egl_render.ClassicRenderer(sweep.env_id, args.render_size, sweep.textured)
    embeddings = []
    for chunk in np.array_split(states, math.ceil(len(states) / args.clip_batch_size)):
        frames = torch.from_numpy(renderer.render(chunk))
        embeddings.append(reward.embed_images(frames))
    renderer.close()
    embeddings, rewards = torch.cat(embeddings), {}
    for reward.alpha in args.reward_alpha:  # pictures are embedded once for all of them
        rewards[reward.alpha] = reward.reward(embeddings).double().cpu().numpy()
    return values, rewards


def rescaled(x):
    """x [N] to [0, 1]; a constant to 0."""
    return (x - x.min()) / max(x.max() - x.min(), 1e-12)


def landscape(args: Landscape) -> None:
    """Draw the figure, write the table, print where each line has its maximum."""
    check_landscape(args)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SWEEPS), figsize=(12, 3.4), layout="constrained")
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(args.reward_alpha)))
    rows = []
    for sweep, ax in zip(SWEEPS, axes):
        look = "textured" if sweep.textured else "plain"
        values, rewards = sweep_rewards(sweep, args)
        is_goal = sweep.is_goal(values)
        print(f'{sweep.env_id} {look}, "{sweep.target_prompt}" / "{sweep.baseline_prompt}"')
        for (alpha, reward), color in zip(rewards.items(), colors):
            best, scaled = values[reward.argmax()], rescaled(reward)
            constant = reward.std() < 1e-9
            correlation = math.nan if constant else np.corrcoef(reward, is_goal)[0, 1]
            print(
                f"  alpha {alpha:.2f}: largest at {best:+.3f}, {abs(best - sweep.goal):.3f} from "
                f"the goal; Pearson correlation with goal / not goal {correlation:+.3f}; "
                f"reward {reward.min():.3f} to {reward.max():.3f}"
            )
            ax.plot(values, scaled, color=color, lw=1.4, label=f"{alpha:g}")
            rows += [
                (sweep.env_id, look, alpha, f"{value:.6f}", f"{r:.8f}", f"{s:.6f}", int(goal))
                for value, r, s, goal in zip(values, reward, scaled, is_goal)
            ]
        ax.axvline(sweep.goal, color="tab:red", ls="--", lw=1)
        ax.annotate("goal", (sweep.goal, 1.02), color="tab:red", ha="center", annotation_clip=False)
        ax.set(title=f"{sweep.env_id}, {look}", xlabel=sweep.label, ylim=(-0.02, 1.1))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("reward, rescaled to [0, 1]")
    axes[0].legend(title="alpha", frameon=False, fontsize="small")
    figure.suptitle(args.clip_model.removeprefix("local-dir:"), fontsize="medium")
    table = args.out.with_suffix(".csv")
    figure.savefig(args.out, dpi=120)
    with open(table, "w", newline="") as file:
        writer = csv.writer(file)
        head = "env_id look reward_alpha value reward rescaled is_goal"
        writer.writerow(head.split())
        writer.writerows(rows)
    print(f"wrote {args.out} and {table}")


COMMANDS = {Landscape: landscape}

if __name__ == "__main__":
    commands = {kind.__name__.lower(): kind for kind in COMMANDS}
    args = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    try:
        COMMANDS[type(args)](args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
