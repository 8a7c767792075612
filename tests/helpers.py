"""Small picklable pieces that the tests hand to worker processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

HUMANOID_STATE_SIZE = 47  # nq 24 + nv 23


class PaintRenderer:
    """Paints the first number of a state (0..255) into every pixel of a tiny frame."""

    frame_shape = (4, 4, 3)

    def render(self, states, out):
        for state, frame in zip(states, out, strict=True):
            if state[0] < 0:
                raise ValueError(f"cannot paint {state[0]}")
            frame[:] = np.uint8(state[0])


class MeanReward(torch.nn.Module):
    """The mean pixel, after `delay` seconds a call."""

    def __init__(self, delay=0.0):
        super().__init__()
        self.delay = delay

    def forward(self, frames):
        time.sleep(self.delay)
        return frames.float().mean(dim=(1, 2, 3))


class HungryReward(MeanReward):
    """The mean pixel, but no more than `fits` frames fit into the device's memory."""

    def __init__(self, fits):
        super().__init__()
        self.fits, self.largest, self.shapes = fits, 0, set()

    def forward(self, frames):
        if len(frames) > self.fits:
            raise torch.OutOfMemoryError(f"{len(frames)} frames do not fit")
        self.largest = max(self.largest, len(frames))
        self.shapes.add(len(frames))
        return super().forward(frames)


class RendezvousReward(MeanReward):
    """The mean pixel, once `count` processes have come here at the same time."""

    def __init__(self, folder, count):
        super().__init__()
        self.folder, self.count = folder, count

    def forward(self, frames):
        (self.folder / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(list(self.folder.iterdir())) < self.count:
            if time.monotonic() > deadline:
                raise TimeoutError("nobody else came: the workers do not work side by side")
            time.sleep(0.01)
        return super().forward(frames)


def make_rendezvous_reward(device, folder, count):
    return RendezvousReward(folder, count)


def make_paint_renderer():
    return PaintRenderer()


def make_mean_reward(device, delay=0.0):
    return MeanReward(delay)


def make_broken_reward(device):
    raise LookupError("this model was never there")


def make_humanoid_renderer(size=96, quality="light", textured=False):
    import gymnasium as gym

    import egl_render

    env = gym.make("Humanoid-v5").unwrapped
    model = egl_render.textured_model(env.fullpath) if textured else env.model
    return egl_render.MujocoRenderer(model, size, egl_render.PAPER_CAMERA, quality)


def humanoid_states(count, seed=0):
    """[count, 47] float64: a random rollout of Humanoid-v5."""
    import gymnasium as gym

    env = gym.make("Humanoid-v5", terminate_when_unhealthy=False, max_episode_steps=-1)
    env.reset(seed=seed)
    env.action_space.seed(seed)
    states = np.empty((count, HUMANOID_STATE_SIZE))
    for state in states:
        env.step(env.action_space.sample())
        data = env.unwrapped.data
        state[:] = np.concatenate([data.qpos, data.qvel])
    env.close()
    return states


def importable_environment():
    """The environment for a new Python process that can import what this one can."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def process_is_alive(pid):
    """True if `pid` runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds):
    """The pids still alive after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if process_is_alive(pid)]
        if not alive:
            break
        time.sleep(0.1)
    return [pid for pid in pids if process_is_alive(pid)]


def descendants(pid):
    """All living processes below `pid`."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        for child in parents.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def run_script(command, code=0, **environment):
    """Run a training script; returns the finished process after checking its exit code."""
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | environment
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process


def only_run(runs_dir):
    """The one run folder in there."""
    (folder,) = [path for path in Path(runs_dir).iterdir() if path.is_dir()]
    return folder


def scalars(folder):
    """A run's TensorBoard events: {tag: scalar events}, {tag: image events}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()
    values = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return values, {tag: events.Images(tag) for tag in events.Tags()["images"]}
