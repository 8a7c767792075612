"""Where the time of a training run goes, and how many environment steps a second come out.

Runs the training script as a user would, for a few rollouts, and reads its event file:

    python benchmarks/pipeline.py                                  # tiny_clip on this CPU
    python benchmarks/pipeline.py --clip-model ViT-L-14/random --render-size 480 \
        --reward-devices cuda:0 --num-envs 32                      # a GPU
    python benchmarks/pipeline.py --env-id CartPole-v1             # DQN: dqn_clip_classic.py
    python benchmarks/pipeline.py --json pipeline.json
    python benchmarks/pipeline.py --rollouts 63                    # 200 000 steps: is it steady?

It compares the end with CLIP alone, at its best batch and with nothing else to do, and the last
tenth of the run with the first: seconds per step, and memory.

Defaults: the paper's update ratio with the embedded CLIP at its own resolution. That is, with SAC,
100 updates of 512 transitions per rollout of 32 x 100 steps; for CartPole and MountainCar with DQN,
200 updates of 64 per 200 steps, in rollouts of 8 x 200 steps.
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
    num_envs: int | None = None
    """parallel environments, default: 32, DQN 8"""
    episode_length: int | None = None
    """steps per rollout of each environment, default: 100, DQN 200"""
    gradient_steps: int | None = None
    """updates per rollout, default: 100, DQN 1600"""
    batch_size: int | None = None
    """transitions per update, default: 512, DQN 64"""
    rollouts: int = 6
    """measured rollouts (one more comes first and is not counted)"""
    json: str = ""
    """also write the table to this file"""
    clip_alone: bool = True
    """measure CLIP alone first, for the ratio"""


# The paper's update ratio. How many environments share a rollout changes only how many pictures
# the reward workers get at once.
SAC = dict(num_envs=32, episode_length=100, gradient_steps=100, batch_size=512)
DQN_TASKS = ("CartPole-v1", "MountainCar-v0")
DQN = dict(num_envs=8, episode_length=200, gradient_steps=1600, batch_size=64)


def crossing_bytes(env_id):
    """Bytes per environment step that cross a process boundary beside observation and action.

    From the environment's process: reward and the two flags (as Gymnasium's worker pickles them)
    and the pickled info with the physics state. To the reward workers and back: state and reward
    in shared memory. Classic control steps in the script's own process.
    """
    from multiprocessing.reduction import ForkingPickler

    from egl_render import CLASSIC_STATE_SIZES
    from sac_clip_humanoid import make_env

    if env_id in CLASSIC_STATE_SIZES:
        return 8 * CLASSIC_STATE_SIZES[env_id] + 4
    env = make_env(env_id, scene="states")()
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(env.action_space.sample())
    reply = ((None, reward, terminated, truncated, info), True)
    state = next(iter(info.values()))
    return len(ForkingPickler.dumps(reply, pickle.HIGHEST_PROTOCOL)) + state.nbytes + 4


def alone(args):
    """Frames per second of CLIP alone at its best batch, all reward devices together."""
    cuda = [device for device in args.reward_devices if device.startswith("cuda")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "benchmarks/clip_speed.py"), "clip"]
        command += ["--models", args.clip_model, "--size", str(args.render_size)]
        command += ["--json", f"{folder}/clip.json"]
        if cuda or args.reward_devices:
            command += ["--device", cuda[0] if cuda else "cpu"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        (model,) = json.loads(Path(f"{folder}/clip.json").read_text())["models"].values()
    if not args.reward_devices:
        import torch

        return model["best_frames_per_s"] * max(1, torch.cuda.device_count())
    return model["best_frames_per_s"] * max(1, len(set(cuda)))


def memory(pid):
    """Resident MB of a process and of all its descendants."""

    def resident(pid):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def below(pid):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                yield from (child, *below(child))

    try:
        return resident(pid), sum(map(resident, below(pid)))
    except (FileNotFoundError, ProcessLookupError):  # one has just ended
        return None


def tenth(args):
    """The number of rollouts in the first and the last tenth of the run."""
    return max(1, args.rollouts // 10)


def buffer_mb(args, steps):
    """What SAC's replay buffer takes for these steps; it is touched as it fills."""
    import gymnasium as gym

    env = gym.make(args.env_id)
    observation, action = (np.prod(s.shape) for s in (env.observation_space, env.action_space))
    env.close()
    ends = (args.episode_length + 1) / args.episode_length
    return steps * 4 * (ends * observation + action + 1) / 1e6


def run(args):
    """Run the script; returns ({scalar: [values per measured rollout]} with "wall", and the memory
    [3, samples]: time, MB of the script's process, MB of all processes below)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = args.num_envs * args.episode_length
    dqn = args.env_id in DQN_TASKS
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / ("dqn_clip_classic.py" if dqn else "sac_clip_humanoid.py")),
            *("--target-prompt", "any words: they are embedded once", "--runs-dir", folder),
            *("--total-timesteps", str(steps * (args.rollouts + 1)), "--learning-starts", "0"),
            *("--video-freq", "0", "--eval-episodes", "0", "--allow-slow"),
        ]
        not_flags = ("rollouts", "json", "clip_alone") + ("render_quality",) * dqn
        for key, value in asdict(args).items():
            if key not in not_flags and value != ():
                values = value if isinstance(value, tuple) else (value,)
                command += ["--" + key.replace("_", "-"), *map(str, values)]
        process, samples = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL), []
        while process.poll() is None:
            if now := memory(process.pid):
                samples.append((time.time(), *now))
            time.sleep(0.5)
        if process.returncode:
            sys.exit(process.returncode)
        (folder,) = Path(folder).iterdir()
        events = EventAccumulator(str(folder)).Reload()
    scalars = {
        tag: np.array([event.value for event in events.Scalars(tag)][1:])
        for tag in ("time/physics_s", "time/render_s", "time/clip_s", "time/update_s")
    }
    walls = np.array([event.wall_time for event in events.Scalars("time/update_s")])
    samples = np.array(samples).T
    # after the first tenth: the first updates allocate once and for all
    between = (walls[tenth(args)] <= samples[0]) & (samples[0] <= walls[-1])
    return scalars | {"wall": np.diff(walls)}, samples[:, between]


def main():
    args = tyro.cli(Args, description=__doc__)
    for name, value in (DQN if args.env_id in DQN_TASKS else SAC).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    fastest = alone(args) if args.clip_alone else None
    scalars, samples = run(args)
    steps = args.num_envs * args.episode_length
    device = "cpu"
    if any(d.startswith("cuda") for d in args.reward_devices) or not args.reward_devices:
        import torch

        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else device
    render, clip = scalars["time/render_s"], scalars["time/clip_s"]
    # a CUDA worker draws and scores at the same time
    reward = render + clip if device == "cpu" else np.maximum(render, clip)
    counts = {
        "physics": (steps, scalars["time/physics_s"], "steps/s"),
        "render": (steps, render, "frames/s"),
        "CLIP": (steps, clip, "frames/s"),
        "render + CLIP": (steps, reward, "frames/s"),
        "update": (args.gradient_steps, scalars["time/update_s"], "updates/s"),
        "end to end": (steps, scalars["wall"], "steps/s"),
    }
    print(f"{args.env_id}, {args.clip_model}, {args.render_size} px, {args.num_envs} environments,")
    print(f"{args.gradient_steps} updates of {args.batch_size} per {steps} steps;", end=" ")
    print(f"{os.cpu_count()} cores ({platform.machine()}), {device}, {time.strftime('%Y-%m-%d')}")
    table = {}
    print(f"{'stage':>13} {'s/rollout':>10} {'units/s':>9}   (median of {args.rollouts} rollouts)")
    for stage, (count, seconds, unit) in counts.items():
        seconds = float(np.median(seconds))
        table[stage] = {"seconds_per_rollout": seconds, unit: count / max(seconds, 1e-9)}
        print(f"{stage:>13} {seconds:>10.2f} {count / max(seconds, 1e-9):>9.0f}   {unit}")
    result = {"args": asdict(args), "stages": table}
    if fastest:
        ratio = table["end to end"]["steps/s"] / fastest
        result |= {"clip_alone_frames_per_s": fastest, "ratio_to_clip_alone": ratio}
        print(f"CLIP alone {fastest:.4g} frames/s: end to end is {ratio:.2f} of it")
    few = tenth(args)
    parts = scalars["wall"][:few], scalars["wall"][-few:]
    first, last = (float(np.median(part)) / steps for part in parts)
    result["ms_per_step"] = {"first_tenth": 1e3 * first, "last_tenth": 1e3 * last}
    print(f"a step takes {1e3 * first:.3g} ms in the first tenth, {1e3 * last:.3g} ms in the last")
    if samples.shape[1]:
        (main_mb, main_end), (others_mb, others_end) = samples[1:, [0, -1]].tolist()
        result["memory_mb"] = {"main": [main_mb, main_end], "others": [others_mb, others_end]}
        print("memory from the end of the first tenth to the end:", end=" ")
        print(f"{main_mb:.0f} -> {main_end:.0f} MB, all processes below it", end=" ")
        print(f"{others_mb:.0f} -> {others_end:.0f} MB", end="")
        if args.env_id not in DQN_TASKS:
            filled = buffer_mb(args, steps * (args.rollouts - few))
            result["memory_mb"]["buffer_filled"] = filled
            print(f"; the replay buffer filled by {filled:.0f} MB", end="")
        print()
    crossing = crossing_bytes(args.env_id)
    print(f"beside observation and action {crossing} bytes a step cross a process boundary")
    if args.json:
        result["crossing_bytes_per_step"] = crossing
        Path(args.json).write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
