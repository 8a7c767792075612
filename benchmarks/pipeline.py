r"""Measure where the time of a training run goes, and how fast CLIP and drawing are on their own.

This runs the training script for a few rollouts, as a user would, and reads its event file:

    python benchmarks/pipeline.py                                  # tiny_clip on this CPU
    python benchmarks/pipeline.py --env-id CartPole-v1             # DQN: dqn_clip_classic.py

This measures CLIP alone and drawing alone, on a GPU and without real weights:

    python benchmarks/random_clip.py ViT-L-14 /tmp/ViT-L-14
    python benchmarks/pipeline.py --clip-model local-dir:/tmp/ViT-L-14 --render-size 480 \
        --measure clip draw run --batches 64 128 256

Does everything else hide behind CLIP? Simulated devices compute 1.6 ms per frame (ViT-bigG-14 on
one H200) while the next frames are drawn (1.5 ms: OpenGL at 480 px; 0.1: MuJoCo Warp). This
measures first one device alone, and then all of them in a run with one update per rollout:

    python benchmarks/pipeline.py --scorer-ms 1.6 --draw-ms 1.5 --json overlap.json
    python benchmarks/pipeline.py --scorer-ms 16 --reward-devices cpu cpu cpu cpu     # or ray:4

All other flags are the training script's. Defaults: the embedded CLIP at its own resolution, every
state scored, and the paper's ratio of updates to steps.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# isort: off
import clip_reward  # before torch: it bounds how long threads spin
import dqn_clip_classic as dqn
import sac_clip_humanoid as sac
import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.benchmark import Timer
import training.workers
from environments import classic
# isort: on

COMMON = "--target-prompt words --clip-model tiny_clip --score-every 1"
SAC = "--num-envs 32 --episode-length 100 --gradient-steps 100 --batch-size 512"
DQN = "--num-envs 8 --episode-length 200 --gradient-steps 1600 --batch-size 64"


@dataclass
class Args:
    measure: tuple[Literal["clip", "draw", "score", "run"], ...] = ("run",)
    """clip: CLIP alone; draw: the workers without CLIP; score: the workers without a learner; run:
    the whole script"""
    batches: tuple[int, ...] = ()
    """batch sizes for CLIP alone, up to the first that runs out of memory; default: the script's"""
    scorer_ms: float = 0.0
    """simulate devices that compute this long per frame: one alone, then all in a run"""
    draw_ms: float = 0.0
    """with --scorer-ms: drawing takes this long per frame, while the device computes"""
    env_id: str = "Humanoid-v5"
    """the task"""
    states_per_worker: int = 800
    """number of states per worker for draw and score"""
    rollouts: int = 6
    """rollouts to measure, after one that is not counted"""
    json: Path | None = None
    """also write all results to this file"""


def machine(device):
    """Name the device and the software that are measured."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return f"{name}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"


class Blank:
    """A renderer that takes `ms` milliseconds per frame and draws nothing."""

    frame_shape = (8, 8, 3)

    def __init__(self, device, ms=0.0):
        self.ms = ms

    def render(self, states, out):
        time.sleep(1e-3 * self.ms * len(states))
        out[:] = 0


class Later:
    """Rewards of 0 that a device will have computed at time `ready`."""

    def __init__(self, count, ready):
        self.shape, self.ready = (count,), ready

    def float(self):
        return self

    def cpu(self):
        time.sleep(max(0.0, self.ready - time.perf_counter()))
        return torch.zeros(self.shape)


class Sleeper(torch.nn.Module):
    """A reward that takes `ms` milliseconds per frame. Like a GPU, it returns at once and computes
    batches one after another."""

    def __init__(self, device, ms=0.0):
        super().__init__()
        self.ms, self.ready = ms, 0.0

    def forward(self, frames):
        self.ready = max(self.ready, time.perf_counter()) + 1e-3 * self.ms * len(frames)
        return Later(len(frames), self.ready)


def run_asleep(scorer_ms, draw_ms):
    """Run the script named on the command line with workers that sleep. torch's "meta" stands in
    for the GPU: a device that is not the CPU."""
    pool = training.workers.Pool
    setup = functools.partial(Blank, ms=draw_ms), functools.partial(Sleeper, ms=scorer_ms)

    def asleep(draw, score, devices, *more):
        ray = devices[0].startswith("ray")
        return pool(*setup, devices if ray else ["meta"] * len(devices), *more)

    training.workers.Pool = asleep
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


@torch.inference_mode()
def clip_alone(args, batches):
    """Measure CLIP alone on the first reward device -> {batch size: frames/s}."""
    device, size, speeds = args.devices()[0], args.frame_size, {}
    names = {"reward": clip_reward.make_clip_reward(args, device)}
    for batch in batches or (args.clip_batch_size,):
        shape = (batch, size, size, 3)
        names["frames"] = torch.randint(256, shape, dtype=torch.uint8, device=device)
        clip_reward.BATCH = batch
        timer = Timer("reward(frames)", globals=names, num_threads=torch.get_num_threads())
        try:
            speeds[batch] = batch / timer.blocked_autorange(min_run_time=1).median
        except torch.OutOfMemoryError:
            break
        print(f"CLIP alone, batch {batch}: {speeds[batch]:.4g} frames/s", flush=True)
    return speeds


def pool_alone(make_renderer, make_reward, devices, batch_size, states):
    """Measure a pool that gets all `states` at once -> frames/s."""
    pool = training.workers.make_pool(make_renderer, make_reward, devices, batch_size)
    print(*pool.wait_ready(), sep="\n")
    pool.score(states[: 2 * batch_size * len(devices)])
    start = time.perf_counter()
    pool.score(states)
    speed = len(states) / (time.perf_counter() - start)
    pool.close()
    return speed


def workers_alone(script, args, make_reward, states_per_worker):
    """Measure the workers without a learner, on states of random actions -> states/s."""
    env = script.make_env(args)()
    env.action_space.seed(0)
    env.reset(seed=0)
    states = [env.step(env.action_space.sample())[4]["states"] for _ in range(100)]
    devices, make_renderer = args.devices(), functools.partial(script.make_renderer, args)
    states = np.resize(states, (states_per_worker * len(devices), len(states[0])))
    return pool_alone(make_renderer, make_reward, devices, args.clip_batch_size, states)


def whole_run(command, args, rollouts, views):
    """Run the script -> {stage: {"seconds_per_rollout", speed}}, medians over rollouts."""
    steps = args.num_envs * args.episode_length
    scored = len(clip_reward.scored_steps(args.episode_length, args.score_every))
    frames = args.num_envs * scored * views
    total = f"--total-timesteps {steps * (rollouts + 1)} --learning-starts 1 --video-freq 0"
    with tempfile.TemporaryDirectory() as folder:
        command = [*command, *total.split(), "--runs-dir", folder]
        if code := subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            sys.exit(code)
        events = EventAccumulator(str(next(Path(folder).iterdir()))).Reload()
    stages = {
        "physics": (steps, "steps/s"),
        "render": (frames, "frames/s"),
        "clip": (frames, "frames/s"),
        "update": (args.gradient_steps, "updates/s"),
    }
    seconds = {stage: [e.value for e in events.Scalars(f"time/{stage}_s")[1:]] for stage in stages}
    seconds["end to end"] = np.diff([e.wall_time for e in events.Scalars("time/update_s")])
    result = {}
    print(f"{'stage':>13} {'s/rollout':>10} {'units/s':>9}   (median of {rollouts} rollouts)")
    for stage, values in seconds.items():
        (count, unit), median = stages.get(stage, stages["physics"]), max(np.median(values), 1e-9)
        result[stage] = {"seconds_per_rollout": median, unit: count / median}
        print(f"{stage:>13} {median:>10.3f} {count / median:>9.4g}   {unit}")
    result["end to end"]["frames/s"] = frames / result["end to end"]["seconds_per_rollout"]
    return result


def main():
    own, flags = tyro.cli(Args, description=__doc__, return_unknown_args=True)
    script, ratio = (dqn, DQN) if own.env_id in classic.DISCRETE else (sac, SAC)
    defaults = f"--env-id {own.env_id} {COMMON} {ratio}"
    if own.scorer_ms:
        defaults += " --gradient-steps 1 --reward-devices cpu"
    flags = [*defaults.split(), *flags]
    args = tyro.cli(script.Args, args=flags, config=(tyro.conf.OmitArgPrefixes,))
    command, devices = [sys.executable, script.__file__, *flags], args.devices()
    alone, result = 0.0, {"machine": machine(devices[0]), "args": vars(args)}
    print(f"{args.env_id}, {args.clip_model}, {args.frame_size} px\n{result['machine']}")

    def keep(**more):
        result.update(more)
        if own.json:  # after every part: a time limit loses only the current one
            own.json.write_text(json.dumps(result, indent=2, default=str))

    if own.scorer_ms:
        sleep, chunk = functools.partial(Sleeper, ms=own.scorer_ms), args.clip_batch_size
        alone = pool_alone(Blank, sleep, ["meta"], chunk, np.zeros((50 * chunk, 47)))
        print(f"one such device alone: {alone:.4g} frames/s", flush=True)
        keep(scorer_alone_frames_per_s=alone)
        alone *= int(devices[0][4:] or 1) if devices[0].startswith("ray") else len(devices)
        ms = own.scorer_ms, own.draw_ms
        command[1:1] = "-c", f"from benchmarks import pipeline as p; p.run_asleep{ms}"
        own.measure = ("run",)
    if "clip" in own.measure:
        speeds = clip_alone(args, own.batches)
        keep(clip_alone_frames_per_s=speeds)
        alone = max(speeds.values()) * len(set(devices))
    for name, reward in (
        ("draw", Sleeper),
        ("score", functools.partial(clip_reward.make_clip_reward, args)),
    ):
        if name in own.measure:
            speed = workers_alone(script, args, reward, own.states_per_worker)
            print(f"{name}: {speed:.4g} states/s", flush=True)
            keep(**{f"{name}_alone_frames_per_s": speed})
    if "run" in own.measure:
        views = 1 if own.scorer_ms else args.views  # a simulated worker draws one view
        keep(stages=whole_run(command, args, own.rollouts, views))
        if alone:
            share = result["stages"]["end to end"]["frames/s"] / alone
            keep(end_to_end_of_alone=share)
            print(f"end to end has {share:.3f} of all scorers' speed alone ({alone:.4g} frames/s)")


if __name__ == "__main__":
    try:
        main()
    except clip_reward.UsageError as error:
        sys.exit(f"error: {error}")
