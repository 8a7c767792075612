r"""Where the time of a training run goes, and how fast CLIP and the drawing are, each alone.

Runs the training script as a user would, for a few rollouts, and reads its event file:

    python benchmarks/pipeline.py                                  # tiny_clip on this CPU
    python benchmarks/pipeline.py --clip-model ViT-L-14/random --render-size 480 \
        --measure clip run --batches 64 128 256                    # a GPU, and CLIP alone
    python benchmarks/pipeline.py --env-id CartPole-v1             # DQN: dqn_clip_classic.py

Drawing alone, at a size and quality, by one worker per name:

    python benchmarks/pipeline.py --measure draw --render-size 480 --render-quality full \
        --reward-devices cuda:0 cuda:0 cuda:0 cuda:0

Does everything else hide behind CLIP? One worker that draws nothing and sleeps for every frame (1.6
ms: ViT-bigG-14 on one H200), first alone and then in a run with one update per rollout:

    python benchmarks/pipeline.py --scorer-ms 1.6 --json overlap.json

All other flags are the training script's. Defaults: the embedded CLIP at its own resolution, and
the paper's update ratio (how many environments share a rollout is only how much comes at once).
"""

import functools
import json
import os
import platform
import runpy
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: off
import clip_reward  # before torch: it bounds how long threads spin
import dqn_clip_classic as dqn
import sac_clip_humanoid as sac
import numpy as np
import torch
import tyro
from training.flags import flags_of
# isort: on

ROOT = Path(__file__).resolve().parent.parent
COMMON = "--target-prompt words --clip-model local-dir:tiny_clip --render-size 64 --allow-slow"
SAC = "--num-envs 32 --episode-length 100 --gradient-steps 100 --batch-size 512"
DQN = "--num-envs 8 --episode-length 200 --gradient-steps 1600 --batch-size 64"


@dataclass
class Args:
    measure: tuple[Literal["clip", "draw", "run"], ...] = ("run",)
    """clip: CLIP alone, of frames that wait in the device's memory; draw: the workers without CLIP;
    run: the whole script"""
    batches: tuple[int, ...] = ()
    """batch sizes for CLIP alone, default: --clip-batch-size; those that do not fit are left out"""
    scorer_ms: float = 0.0
    """instead of drawing and CLIP a worker that sleeps this long per frame: alone, and in a run"""
    env_id: str = "Humanoid-v5"
    """the task"""
    rollouts: int = 6
    """measured rollouts (one more comes first and is not counted)"""
    json: Path | None = None
    """also write everything to this file"""


class Blank:
    """Draws nothing, at once."""

    frame_shape = (8, 8, 3)

    def render(self, states, out):
        out[:] = 0


class Sleeper(torch.nn.Module):
    """The reward 0, after `ms` milliseconds a frame."""

    def __init__(self, device, ms=0.0):
        super().__init__()
        self.ms = ms

    def forward(self, frames):
        time.sleep(1e-3 * self.ms * len(frames))
        return torch.zeros(len(frames), device=frames.device)


def run_asleep(ms):
    """Run the script that is named on the command line with one worker that sleeps."""
    pool, sleep = clip_reward.RewardPool, functools.partial(Sleeper, ms=ms)
    run_with(lambda *given: pool(Blank, sleep, ["cpu"], *given[3:]))


def run_with(pool):
    """Run the script that is named on the command line with `pool` for its RewardPool."""
    import training.run

    training.run.RewardPool = pool
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


@torch.inference_mode()
def clip_alone(args, batches):
    """Frames/s of CLIP on the first reward device, by batch size, and its operations per frame."""
    from torch.utils.benchmark import Timer

    device, size = args.reward.devices()[0], args.render.render_size
    tera = 1e-12 * clip_reward.image_flops(args.reward.clip_model)
    names = {"reward": clip_reward.make_clip_reward(device, args.reward)}
    speeds = {}
    for batch in batches or (args.reward.clip_batch_size,):
        shape = (batch, size, size, 3)
        names["frames"] = torch.randint(256, shape, dtype=torch.uint8, device=device)
        timer = Timer("reward(frames)", globals=names, num_threads=torch.get_num_threads())
        try:
            speeds[batch] = batch / timer.blocked_autorange(min_run_time=1).median
        except torch.OutOfMemoryError:
            break
        work = f"{tera:.3g} TFLOP each, {speeds[batch] * tera:.3g} TFLOP/s"
        print(f"CLIP alone, batch {batch}: {speeds[batch]:.4g} frames/s, {work}", flush=True)
    return {"frames_per_s": speeds, "tflop_per_frame": tera}


def pool_alone(make_renderer, make_reward, devices, batch_size, states):
    """Frames/s of a pool that is handed `states` at once."""
    with clip_reward.RewardPool(make_renderer, make_reward, devices, batch_size) as pool:
        pool.wait_ready().score(states[: 2 * batch_size * len(devices)])
        start = time.perf_counter()
        pool.score(states)
        speed = len(states) / (time.perf_counter() - start)
        print(*pool.description[:1], f"{len(devices)} workers alone: {speed:.4g} frames/s")
    return speed


def draw_alone(script, args, frames_per_worker=800):
    """Frames/s drawn by the workers, of states that random actions led to."""
    env = script.make_env(args)()
    env.action_space.seed(0)
    env.reset(seed=0)
    states = [env.step(env.action_space.sample())[4]["states"] for _ in range(100)]
    devices, make_renderer = args.reward.devices(), functools.partial(script.make_renderer, args)
    states = np.resize(states, (frames_per_worker * len(devices), len(states[0])))
    return pool_alone(make_renderer, Sleeper, devices, args.reward.clip_batch_size, states)


def whole_run(command, args, rollouts):
    """Run the script; {stage: what it took and how much it did a second}, medians over rollouts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = args.num_envs * args.episode_length
    total = f"--total-timesteps {steps * (rollouts + 1)} --learning-starts 1 --video-freq 0"
    with tempfile.TemporaryDirectory() as folder:
        command = [*command, *total.split(), "--runs-dir", folder]
        code = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
        if code:
            sys.exit(code)
        events = EventAccumulator(str(next(Path(folder).iterdir()))).Reload()
    stages = {
        "physics": (steps, "physics_s", "steps/s"),
        "render": (steps, "render_s", "frames/s"),
        "CLIP": (steps, "clip_s", "frames/s"),
        "update": (args.gradient_steps, "update_s", "updates/s"),
        "end to end": (steps, None, "steps/s"),
    }
    result = {}
    print(f"{'stage':>13} {'s/rollout':>10} {'units/s':>9}   (median of {rollouts} rollouts)")
    for stage, (count, scalar, unit) in stages.items():
        logged = events.Scalars(f"time/{scalar or 'update_s'}")
        values = [e.value for e in logged[1:]] if scalar else np.diff([e.wall_time for e in logged])
        seconds = max(float(np.median(values)), 1e-9)
        result[stage] = {"seconds_per_rollout": seconds, unit: count / seconds}
        print(f"{stage:>13} {seconds:>10.3f} {count / seconds:>9.4g}   {unit}")
    return result


def main():
    own, flags = tyro.cli(Args, description=__doc__, return_unknown_args=True)
    script, ratio = (dqn, DQN) if own.env_id in ("CartPole-v1", "MountainCar-v0") else (sac, SAC)
    defaults = f"--env-id {own.env_id} {COMMON} {ratio}"
    flags = [*defaults.split(), *(["--gradient-steps", "1"] if own.scorer_ms else []), *flags]
    args = tyro.cli(script.Args, args=flags, config=(tyro.conf.OmitArgPrefixes,))
    start = f"from benchmarks import pipeline; pipeline.run_asleep({own.scorer_ms})"
    command = [sys.executable, *(["-c", start] if own.scorer_ms else []), script.__file__, *flags]
    devices = args.reward.devices()
    cuda = {device for device in devices if device.startswith("cuda")}
    device = torch.cuda.get_device_name(devices[0]) if cuda else "cpu"
    machine = f"{device}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    print(f"{args.env_id}, {args.reward.clip_model}, {args.render.render_size} px; {machine}")
    result = {"machine": machine, "args": flags_of(args)}

    def keep(**more):
        result.update(more)
        if own.json:  # after every part: a time limit takes away no more than the rest
            own.json.write_text(json.dumps(result, indent=2, default=str))

    if own.scorer_ms:
        sleep = functools.partial(Sleeper, ms=own.scorer_ms)
        alone = pool_alone(Blank, sleep, ["cpu"], args.reward.clip_batch_size, np.zeros((3200, 47)))
        stages = whole_run(command, args, own.rollouts)
        share = stages["end to end"]["steps/s"] / alone
        keep(scorer_alone_frames_per_s=alone, stages=stages, end_to_end_of_scorer_alone=share)
        print(f"end to end is {share:.3f} of that scorer alone")
        return
    if "clip" in own.measure:
        keep(clip_alone=clip_alone(args, own.batches))
    if "draw" in own.measure:
        keep(draw_alone_frames_per_s=draw_alone(script, args))
    if "run" in own.measure:
        keep(stages=whole_run(command, args, own.rollouts))
    if {"run", "clip"} <= set(own.measure):
        alone = max(result["clip_alone"]["frames_per_s"].values()) * max(1, len(cuda))
        keep(end_to_end_of_clip_alone=result["stages"]["end to end"]["steps/s"] / alone)
        print(f"end to end is {result['end_to_end_of_clip_alone']:.2f} of CLIP alone")


if __name__ == "__main__":
    try:
        main()
    except clip_reward.UsageError as error:
        sys.exit(f"error: {error}")
