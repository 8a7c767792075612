"""Where the time of a training run goes, and how many environment steps a second come out.

Runs the training script as a user would, for a few rollouts, and reads its event file:

    python benchmarks/pipeline.py                                  # tiny_clip on this CPU
    python benchmarks/pipeline.py --clip-model ViT-L-14/random --render-size 480 \
        --reward-devices cuda:0 --num-envs 32                      # a GPU
    python benchmarks/pipeline.py --json pipeline.json

Defaults: the paper's update ratio (100 updates per rollout of 32 x 100 steps, batch 512) with the
embedded CLIP at its own resolution.
"""

import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass
class Args:
    env_id: str = "Humanoid-v5"
    """the task"""
    clip_model: str = "local-dir:tiny_clip"
    """as in the script; ARCH/random for speed without weights"""
    render_size: int = 64
    """height and width of the frames in pixels"""
    render_quality: str = "auto"
    """auto, light or full"""
    reward_devices: tuple[str, ...] = ()
    """as in the script"""
    num_envs: int = 32
    """parallel environments"""
    episode_length: int = 100
    """steps per rollout of each environment"""
    gradient_steps: int = 100
    """updates per rollout"""
    batch_size: int = 512
    """transitions per update"""
    rollouts: int = 6
    """measured rollouts (one more comes first and is not counted)"""
    json: str = ""
    """also write the table to this file"""


def crossing_bytes(env_id):
    """Bytes per environment step that cross a process boundary beside observation and action.

    From the environment's process: reward and the two flags (as Gymnasium's worker pickles them)
    and the pickled info with the physics state. To the reward workers and back: state and reward
    in shared memory.
    """
    from multiprocessing.reduction import ForkingPickler

    from sac_clip_humanoid import make_env

    env = make_env(env_id, scene="states")()
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(env.action_space.sample())
    reply = ((None, reward, terminated, truncated, info), True)
    state = next(iter(info.values()))
    return len(ForkingPickler.dumps(reply, pickle.HIGHEST_PROTOCOL)) + state.nbytes + 4


def run(args):
    """Run the script; returns {scalar: [values per measured rollout]}, with "step" and "wall"."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = args.num_envs * args.episode_length
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "sac_clip_humanoid.py"),
            *("--target-prompt", "a humanoid robot kneeling", "--runs-dir", folder),
            *("--total-timesteps", str(steps * (args.rollouts + 1)), "--learning-starts", "0"),
            *("--video-freq", "0", "--allow-slow"),
        ]
        for key, value in asdict(args).items():
            if key not in ("rollouts", "json") and value != ():
                values = value if isinstance(value, tuple) else (value,)
                command += ["--" + key.replace("_", "-"), *map(str, values)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        (folder,) = Path(folder).iterdir()
        events = EventAccumulator(str(folder)).Reload()
    scalars = {
        tag: np.array([event.value for event in events.Scalars(tag)][1:])
        for tag in ("time/physics_s", "time/render_s", "time/clip_s", "time/update_s")
    }
    walls = np.array([event.wall_time for event in events.Scalars("time/update_s")])
    return scalars | {"wall": np.diff(walls)}


def main():
    args = tyro.cli(Args, description=__doc__)
    scalars = run(args)
    steps = args.num_envs * args.episode_length
    counts = {
        "physics": (steps, scalars["time/physics_s"], "steps/s"),
        "render": (steps, scalars["time/render_s"], "frames/s"),
        "CLIP": (steps, scalars["time/clip_s"], "frames/s"),
        "update": (args.gradient_steps, scalars["time/update_s"], "updates/s"),
        "end to end": (steps, scalars["wall"], "steps/s"),
    }
    device = "cpu"
    if any(d.startswith("cuda") for d in args.reward_devices) or not args.reward_devices:
        import torch

        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else device
    print(f"{args.env_id}, {args.clip_model}, {args.render_size} px, {args.num_envs} environments,")
    print(f"{args.gradient_steps} updates of {args.batch_size} per {steps} steps;", end=" ")
    print(f"{os.cpu_count()} cores ({platform.machine()}), {device}, {time.strftime('%Y-%m-%d')}")
    table = {}
    print(f"{'stage':>12} {'s/rollout':>10} {'units/s':>9}   (median of {args.rollouts} rollouts)")
    for stage, (count, seconds, unit) in counts.items():
        seconds = float(np.median(seconds))
        table[stage] = {"seconds_per_rollout": seconds, unit: count / max(seconds, 1e-9)}
        print(f"{stage:>12} {seconds:>10.2f} {count / max(seconds, 1e-9):>9.0f}   {unit}")
    crossing = crossing_bytes(args.env_id)
    print(f"beside observation and action {crossing} bytes a step cross a process boundary")
    if args.json:
        result = {"args": asdict(args), "stages": table, "crossing_bytes_per_step": crossing}
        Path(args.json).write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
