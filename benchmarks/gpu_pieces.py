r"""Measure one piece of what only a GPU can show; `benchmarks/gpu.sh` measures all pieces.

    python benchmarks/gpu_pieces.py --piece per_step --reward-devices cuda:0 --json per_step.json

bits: two runs of the same flags, and whether their last checkpoints are equal, bit for bit.
per_step: pictures a second if each step is drawn by OpenGL and scored before the next one, against
    chunks that are drawn and scored by a worker, by OpenGL and by MuJoCo Warp.
memory: the most memory that loading and then scoring two chunks takes.
profile: the ten kernels (on a CPU: operators) that take the most time while a chunk is scored.

All other flags are those of sac_clip_humanoid.py.
"""

import functools
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# isort: off
import clip_reward  # before torch: it bounds how long threads spin
import sac_clip_humanoid as sac
import torch
import tyro
from benchmarks import pipeline
from tests import helpers
# isort: on


@dataclass
class Args:
    piece: Literal["bits", "per_step", "memory", "profile"]
    """what to measure"""
    states: int = 128
    """states that per_step draws and scores"""
    json: Path | None = None
    """also write the result to this file"""


def bits(own, args, flags):
    """Run the script twice -> whether the checkpoints are equal."""
    steps = 3 * args.num_envs * args.episode_length
    command = [sys.executable, sac.__file__, *flags, "--total-timesteps", str(steps)]
    command += ["--learning-starts", "1", "--video-freq", "0", "--runs-dir"]
    states = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*command, folder], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
            states.append(helpers.checkpoint(helpers.only_run(folder)))
    equal = helpers.equal(*states)
    if not equal:
        sys.exit(f"error: two runs of {steps} steps have different checkpoints")
    print(f"two runs of {steps} steps have the same checkpoint, bit for bit")
    return {"equal": equal, "steps": steps}


def make_scorer(args, renderer):
    """Make the Scorer with which a worker would draw and score."""
    draw = functools.partial(sac.make_renderer, replace(args, renderer=renderer))
    reward = functools.partial(clip_reward.make_clip_reward, args)
    return clip_reward.Scorer(draw, reward, args.devices()[0])


def per_step(own, args, flags):
    """Draw and score the same states step by step and in chunks -> {way: pictures/s}."""
    states, speeds = helpers.humanoid_states(own.states), {}
    for way, renderer, size, ahead in (  # a worker draws a chunk while CLIP computes
        ("a step at a time, OpenGL", "egl", args.num_envs, 0),
        ("chunks, OpenGL", "egl", args.clip_batch_size, 1),
        ("chunks, MuJoCo Warp", "warp", args.clip_batch_size, 1),
    ):
        scorer = make_scorer(args, renderer)
        chunks = [states[i : i + size] for i in range(0, len(states), size)]
        scorer.score(chunks[0])  # warms up
        began, launched = time.perf_counter(), []
        for chunk in chunks:
            launched.append(scorer.launch(chunk))
            if len(launched) > ahead:
                scorer.finish(launched.pop(0))
        for last in launched:
            scorer.finish(last)
        speeds[way] = args.views * len(states) / (time.perf_counter() - began)
        print(f"{way}: {speeds[way]:.4g} pictures/s ({scorer.description})", flush=True)
        scorer.close()
    ours = max(list(speeds.values())[1:])
    print(f"chunks are {ours / speeds['a step at a time, OpenGL']:.2f} times as fast")
    return {"pictures_per_s": speeds}


def memory(own, args, flags):
    """Load, then score two chunks at once as a worker does -> the peak GB after each."""
    result, chunk = {}, helpers.humanoid_states(args.clip_batch_size)
    scorer = make_scorer(args, args.renderer)

    def peak(stage):
        if scorer.device.type == "cuda":
            most = torch.cuda.max_memory_reserved(scorer.device)
        else:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        result[stage] = most / 1e9
        print(f"{stage}: at most {result[stage]:.2f} GB on {scorer.device}", flush=True)

    peak("loading")
    for launched in [scorer.launch(chunk), scorer.launch(chunk)]:
        scorer.finish(launched)
    peak("scoring")
    return {"peak_gb": result}


def profile(own, args, flags):
    """Profile the scoring of one chunk -> [[kernel, ms, calls]], the ten that take the most."""
    scorer, chunk = make_scorer(args, args.renderer), helpers.humanoid_states(args.clip_batch_size)
    scorer.score(chunk)
    with torch.profiler.profile() as profiler:
        scorer.score(chunk)
    gpu = scorer.device.type == "cuda"
    on = "self_device_time_total" if gpu else "self_cpu_time_total"
    kind = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
    found = [e for e in profiler.key_averages() if e.device_type == kind]  # no operator twice
    events = sorted(((e.key, getattr(e, on) / 1e3, e.count) for e in found), key=lambda e: -e[1])
    whole = sum(ms for _, ms, _ in events)
    for name, ms, count in events[:10]:
        print(f"{ms:9.3f} ms {ms / whole:6.1%} {count:6d} x {name[:90]}")
    print(f"{whole:9.3f} ms in all, for {args.views * len(chunk)} pictures")
    return {"kernels": events[:10], "ms": whole}


def main():
    own, flags = tyro.cli(Args, description=__doc__, return_unknown_args=True)
    flags = [*pipeline.COMMON.split(), *flags]
    args = tyro.cli(sac.Args, args=flags, config=(tyro.conf.OmitArgPrefixes,))
    result = {"machine": pipeline.machine(args.devices()[0]), "args": vars(args)}
    print(f"{args.clip_model}, {args.frame_size} px\n{result['machine']}", flush=True)
    result |= globals()[own.piece](own, args, flags)
    if own.json:
        own.json.write_text(json.dumps(result, indent=2, default=str))


if __name__ == "__main__":
    try:
        main()
    except clip_reward.UsageError as error:
        sys.exit(f"error: {error}")
