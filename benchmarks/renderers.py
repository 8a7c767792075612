r"""Draw and score the same states in every way this machine can: pictures, rewards, CPU time.

    python benchmarks/renderers.py --out docs/renderers.png            # tiny_clip on this CPU
    python benchmarks/renderers.py --device cuda:0 --render-size 480 --clip-model ViT-L-14/openai

Each way has its own process, because environment variables bind OpenGL to one device. EPIC
distance, rank correlation (Spearman) and difference compare rewards with those of the first way in
the first precision; each is the worst over the tasks. Times are CPU times of the drawing process
per frame, medians of five.
"""

import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# isort: off
import clip_reward  # before torch: it bounds how long threads spin
import egl_render
import numpy as np
import torch
import tyro
from PIL import Image
from scipy.stats import spearmanr
# isort: on

from evaluation import figures, metrics
from warp_render import WarpRenderer

MESA = {"__EGL_VENDOR_LIBRARY_FILENAMES": "/usr/share/glvnd/egl_vendor.d/50_mesa.json"}
WAYS = {"egl": ("egl", {}), "Mesa": ("egl", MESA), "warp": ("warp", {})}  # environment variables
WORDS = {"egl": "EGL", "Mesa": "EGL by Mesa", "warp": "MuJoCo Warp"}


@dataclass
class Args:
    device: str = "cpu"
    """where pictures are drawn (Mesa: always on the CPU) and scored"""
    clip_model: str = "local-dir:tiny_clip"
    """the model"""
    precisions: tuple[str, ...] = ("fp32", "fp16")
    """number formats of the image tower; emulated-int8 is fp32 with the weights and inputs of its
    linear and convolutional layers rounded to 8 bits"""
    render_size: int = 64
    """height and width in pixels"""
    per_task: int = 8
    """states of each of the paper's eight tasks"""
    out: Path | None = None
    """draw one state of each task in every way"""
    json: Path | None = None
    """also write the table to this file"""


def states_and_prompts(per_task):
    """Return library poses at rest [8 * per_task, 47], and the tasks' prompts."""
    from environments import judges
    from tiny_clip import poses

    rng = np.random.default_rng(0)
    qpos = np.concatenate([poses.sample(task, rng, per_task) for task in poses.TASKS])
    prompts = [judges.TASKS[task].target_prompt for task in poses.TASKS]
    return np.pad(qpos, ((0, 0), (0, 23))), prompts


def emulate_int8(visual):
    """Round weights to 255 levels for each output, and inputs for each picture or token."""

    def rounded(x, dims):
        step = x.abs().amax(dims, keepdim=True).clamp_min(1e-12) / 127
        return (x / step).round() * step

    def round_input(_, inputs):
        return (rounded(inputs[0], (1, 2, 3) if inputs[0].ndim == 4 else -1),)

    for part in visual.modules():
        if isinstance(part, torch.nn.Conv2d | torch.nn.Linear):
            part.weight.data = rounded(part.weight.data, tuple(range(1, part.weight.ndim)))
            part.register_forward_pre_hook(round_input)


def draw(args, renderer, variables):
    """Draw and score one way -> description, frames, CPU ms per frame, {precision: rewards}."""
    os.environ.update(variables)
    device = "cpu" if variables else args.device
    egl_render.setup_gl(device)
    egl_render.quiet_mujoco()
    from tiny_clip import poses

    states, prompts = states_and_prompts(args.per_task)
    model = egl_render.textured_model(poses.HUMANOID_XML)
    look = model, args.render_size, egl_render.PAPER_CAMERA
    drawing = egl_render.MujocoRenderer(*look) if renderer == "egl" else WarpRenderer(*look, device)
    frames, times = drawing.render(states), []
    for _ in range(5):
        began = time.process_time()
        drawing.render(states[:32])
        times.append(1e3 * (time.process_time() - began) / len(states[:32]))
    rewards = {}
    for precision in args.precisions:
        loaded = "fp32" if precision == "emulated-int8" else precision
        clip = clip_reward.load_clip(args.clip_model, args.device, loaded)
        if loaded != precision:
            emulate_int8(clip.model.visual)
        goals = [clip_reward.CLIPReward(clip, prompt) for prompt in prompts]
        embeddings = goals[0].embed_images(frames)
        rewards[precision] = [goal.reward(embeddings).cpu().numpy() for goal in goals]
    return drawing.description, frames, float(np.median(times)), rewards


def main(args):
    table, rows, first, enlarge = [], [], None, max(1, 112 // args.render_size)
    for name, way in WAYS.items():
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn) as process:
            try:
                described, frames, ms, rewards = process.submit(draw, args, *way).result()
            except (clip_reward.UsageError, BrokenExecutor) as error:  # OpenGL may also crash
                print(f"{name}: {error}")
                continue
        first = first or rewards[args.precisions[0]]
        shown = frames[:: args.per_task].repeat(enlarge, 1).repeat(enlarge, 2)
        rows.append(
            figures.grid([figures.framed(frame, WORDS[name]) for frame in shown], len(shown))
        )
        for precision, values in rewards.items():
            epic = max(metrics.epic_distance(a, b) for a, b in zip(values, first, strict=True))
            ranks = min(spearmanr(a, b).statistic for a, b in zip(values, first, strict=True))
            most = float(np.abs(np.stack(values) - np.stack(first)).max())
            table.append((name, precision, ms, epic, ranks, most, described))
            line = (
                "{:>5} {}: {:.2f} CPU ms, EPIC distance {:.4f}, ranks {:.4f}, difference {:.4f}; {}"
            )
            print(line.format(*table[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(table, indent=2))
    if args.out:
        from tiny_clip import poses  # imports mujoco

        empty = np.full((1, *shown.shape[2:]), 255, np.uint8)
        titles = [figures.framed(empty, task.replace("_", " ")) for task in poses.TASKS]
        titles = figures.grid(titles, len(titles))
        Image.fromarray(np.concatenate([titles, *rows])).save(args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
