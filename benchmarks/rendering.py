"""What a picture costs in software, and what cheaper pictures do to the reward.

    python benchmarks/rendering.py                     # tiny_clip, 64 px, the textured humanoid
    python benchmarks/rendering.py --json rendering.json

The states are those of the pose library. Every setting of light quality draws them; EPIC distance
is that of the reward on its pictures to the reward on full-quality ones: at the same size, and at
four times the size, which CLIP's preprocessing then shrinks. AUC and EPIC distance to the judge
(judges.py) say what the reward is worth. Settings are timed in turn, so that whatever else runs on
the machine slows them all alike; cpu_ms is the CPU time of all threads, which it hardly changes.
"""

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass
class Args:
    clip_model: str = "local-dir:tiny_clip"
    """as in the script"""
    task: str = "kneeling"
    """one of judges.TASKS of the humanoid: its target prompt and its judge"""
    size: int = 64
    """height and width of the frames in pixels"""
    textured: bool = True
    """the realistic scene or Gymnasium's own"""
    per_pose: int = 8
    """states of every pose"""
    rounds: int = 7
    """timings of every setting, of which the median counts"""
    timed: int = 24
    """frames of a timing"""
    json: str = ""
    """also write the table to this file"""


def settings(light):
    """{name: Light}: one change at a time, from MuJoCo's default geometry to `light` and beyond."""

    def but(**changes):
        return dataclasses.replace(light, **changes)

    return {
        "light": light,
        "MuJoCo's floor": but(floor_cells=None),
        "100 cells": but(floor_cells=100),
        "40 cells": but(floor_cells=40),
        "10 cells": but(floor_cells=10),
        "28 x 16 facets": but(slices=28, stacks=16),
        "10 x 6 facets": but(slices=10, stacks=6),
        "8 x 5 facets": but(slices=8, stacks=5),
        "4 samples": but(samples=4),
        "512 px shadows": but(shadowsize=512),
    }


def main():
    args = tyro.cli(Args, description=__doc__)
    import egl_render

    gl = egl_render.setup_gl("cpu")
    import torch

    import eval_epic
    import judges
    import sac_clip_humanoid as sac
    from clip_reward import CLIPReward, load_clip
    from tiny_clip.train import auc

    torch.set_num_threads(1)
    task = judges.TASKS.get(args.task)
    if task is None or "Humanoid-v5" not in task.env_ids:
        print(f"error: --task {args.task} is not one of the humanoid's", file=sys.stderr)
        sys.exit(2)
    states = eval_epic.collect_poses(args.per_pose, seed=0)["states"]
    truth = task.judge(states)
    clip = load_clip(args.clip_model.replace("tiny_clip", str(ROOT / "tiny_clip")))
    reward = CLIPReward(clip, [task.target_prompt])

    def renderer(size, quality):
        return sac.make_renderer(sac.Args(textured=args.textured), size, quality)

    def score(renderer):
        parts = np.array_split(states, max(1, len(states) // 64))
        with torch.inference_mode():
            return np.concatenate([reward(torch.from_numpy(renderer.render(p))) for p in parts])

    renderers = {"full": renderer(args.size, "full")}
    kept = egl_render.LIGHT
    for name, light in settings(kept).items():
        egl_render.LIGHT = light
        renderers[name] = renderer(args.size, "light")
    egl_render.LIGHT = kept
    large = renderer(4 * args.size, "full")
    of_large = score(large)
    rewards = {name: score(renderer) for name, renderer in renderers.items()}

    seconds = {name: [] for name in renderers}
    for _ in range(args.rounds):
        for name, one in renderers.items():
            wall, cpu = time.perf_counter(), time.process_time()
            one.render(states[: args.timed])
            seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    table = {}
    for name, values in rewards.items():
        wall, cpu = np.median(seconds[name], axis=0) / min(args.timed, len(states))
        table[name] = {
            "frames/s": 1 / wall,
            "cpu_ms": 1e3 * cpu,
            "epic_full": eval_epic.epic_distance(values, rewards["full"]),
            "epic_large": eval_epic.epic_distance(values, of_large),
            "auc": float(auc(values, truth)),
            "epic_judge": eval_epic.epic_distance(values, truth),
        }
    print(f"{len(states)} states, {int(truth.sum())} {args.task}; {args.size} px, ", end="")
    print(f"{args.clip_model}; {gl}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    columns = list(table["full"])
    print(f"{'setting':>16} " + " ".join(f"{column:>10}" for column in columns))
    for name, row in table.items():
        digits = {"frames/s": 0, "cpu_ms": 2}
        print(f"{name:>16} " + " ".join(f"{row[c]:>10.{digits.get(c, 4)}f}" for c in columns))
    if args.json:
        result = {"args": dataclasses.asdict(args), "gl": gl, "settings": table}
        Path(args.json).write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
