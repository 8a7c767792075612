"""How fast CLIP, the drawing and the pool are, each alone, and what reduced precision costs.

    python benchmarks/clip_speed.py clip --models RN50 ViT-L-14 --compiled   # frames/s, TFLOP/s
    python benchmarks/clip_speed.py draw --workers 1 2 4 8       # frames/s without CLIP
    python benchmarks/clip_speed.py pool --workers 1 2 4         # efficiency, with a simulated CLIP
    python benchmarks/clip_speed.py precisions                   # what fp16 and bf16 change
    python benchmarks/clip_speed.py table FOLDER                 # what gpu.sh made of all that

The first four take --json FILE. benchmarks/gpu.sh runs everything.
"""

import functools
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import clip_reward  # noqa: E402  (found through the line above)
import egl_render  # noqa: E402
import sac_clip_humanoid as sac  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROMPT = ["a humanoid robot kneeling"]
CUDA = torch.cuda.is_available()


@dataclass
class Clip:
    """Frames/s of CLIP alone, of frames that wait in the device's memory, by batch size."""

    models: tuple[str, ...] = ("local-dir:tiny_clip",)
    """as in load_clip; a bare architecture such as ViT-L-14 gets random weights"""
    batches: tuple[int, ...] = (64, 128, 256, 512) if CUDA else (16, 64)
    """batch sizes; those that do not fit are left out"""
    precision: str = "auto"
    """auto, fp32, bf16 or fp16"""
    compiled: bool = False
    """also torch.compile the image tower, at the batch size that was best without"""
    size: int = 480
    """height and width of the frames in pixels"""
    seconds: float = 1.5
    """per measurement"""
    device: str = "cuda:0" if CUDA else "cpu"
    json: Path | None = None


@dataclass
class Draw:
    """Frames/s drawn by 1, 2, ... workers, which share the devices; CLIP left out."""

    workers: tuple[int, ...] = (1, 2, 4, 8)
    devices: tuple[str, ...] = ("cuda:0",) if CUDA else ("cpu",)
    """taken in turns"""
    size: int = 480
    """height and width of the frames in pixels"""
    quality: str = "full" if CUDA else "light"
    """full or light"""
    frames: int = 1600
    """per worker and measurement"""
    json: Path | None = None


@dataclass
class Pool:
    """Parallel efficiency of the pool, with a CLIP that only takes its time: 1.0 is n times the
    speed of one worker with n."""

    workers: tuple[int, ...] = (1, 2, 4)
    cost: float = 2e-3
    """seconds per frame"""
    frames: int = 3200
    """per job"""
    jobs: int = 3
    """measured jobs (one more comes first and is not counted)"""
    slow: float = 1.0
    """the first worker takes this many times as long"""
    json: Path | None = None


@dataclass
class Precisions:
    """What reduced precision changes about the rewards of the same humanoid frames."""

    model: str = "local-dir:tiny_clip"
    """as in load_clip"""
    precisions: tuple[str, ...] = ("bf16", "fp16")
    """compared with fp32"""
    target_prompt: tuple[str, ...] = tuple(PROMPT)
    frames: int = 512
    """states of random behaviour"""
    size: int = 96
    """height and width of the frames in pixels"""
    device: str = "cuda:0" if CUDA else "cpu"
    json: Path | None = None


@dataclass
class Table:
    """One readable table, and one JSON, of the results in a folder."""

    folder: tyro.conf.Positional[Path]


def humanoid_states(count):
    """[count, 47] float64: qpos and qvel of Humanoid-v5 under random actions, also fallen."""
    import gymnasium as gym

    env = gym.make("Humanoid-v5", terminate_when_unhealthy=False, max_episode_steps=100)
    env.action_space.seed(0)
    states, over = [], True
    while len(states) < count:
        if over:
            env.reset(seed=len(states))
        *_, over, _ = env.step(env.action_space.sample())
        states.append(np.concatenate([env.unwrapped.data.qpos, env.unwrapped.data.qvel]))
    return np.stack(states)


class Nothing(nn.Module):
    """No reward, after `cost` seconds a frame."""

    def __init__(self, cost=0.0):
        super().__init__()
        self.cost = cost

    def forward(self, frames):
        time.sleep(self.cost * len(frames))
        return torch.zeros(len(frames), device=frames.device)


def make_nothing(device, cost=0.0):
    return Nothing(cost)


def make_slow_first(device, cost, slow, folder):
    """The worker that comes first is `slow` times as slow."""
    try:
        (Path(folder) / "first").touch(exist_ok=False)
    except FileExistsError:
        return Nothing(cost)
    return Nothing(cost * slow)


class Blank:
    """Draws nothing, at once."""

    frame_shape = (8, 8, 3)

    def render(self, states, out):
        out[:] = 0


def rate(function, count, seconds, device):
    """How many times `count` a second `function` does, over at least `seconds`."""
    wait = torch.cuda.synchronize if str(device).startswith("cuda") else lambda: None
    for _ in range(2):
        function()
    wait()
    calls, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        function()
        wait()
        calls += 1
    return count * calls / passed


def matmul_peak(precision, device, seconds=0.5):
    """Operations per second of square matrix products of this type, the best size."""
    best = 0.0
    for n in (4096, 8192) if str(device).startswith("cuda") else (512, 1024):
        a, b = (torch.randn(n, n, device=device, dtype=DTYPES[precision]) for _ in range(2))
        best = max(best, rate(functools.partial(torch.mm, a, b), 2 * n**3, seconds, device))
    return best


@torch.inference_mode()
def clip(args: Clip):
    precision = args.precision
    if precision == "auto":
        precision = "fp16" if args.device.startswith("cuda") else "fp32"
    peak = matmul_peak(precision, args.device)
    print(f"{machine(args.device)}: {precision} matrix products {peak / 1e12:.3g} TFLOP/s")
    result = {"machine": machine(args.device), "precision": precision, "matmul_flops": peak}
    print(f"{'model':>22} {'batch':>6} {'frames/s':>9} {'TFLOP/s':>8} {'of peak':>8}")
    for name in args.models:
        model = name if "/" in name or ":" in name else f"{name}/random"
        flops = clip_reward.image_flops(model)
        reward = clip_reward.make_clip_reward(args.device, model, PROMPT, precision=precision)

        def report(title, batch, speed, flops=flops):
            share = speed * flops / peak
            print(
                f"{title:>22} {batch:>6} {speed:>9.4g} {speed * flops / 1e12:>8.3g} {share:>8.0%}"
            )

        def measure(batch, reward=reward):
            shape = (batch, args.size, args.size, 3)
            frames = torch.randint(0, 256, shape, dtype=torch.uint8, device=args.device)
            return rate(lambda: reward(frames), batch, args.seconds, args.device)

        speeds = {}
        for batch in args.batches:
            try:
                speeds[batch] = measure(batch)
            except torch.OutOfMemoryError:
                break
            report(name, batch, speeds[batch])
        if not speeds:
            print(f"{name:>22} {args.batches[0]:>6} frames do not fit")
            continue
        best = max(speeds, key=speeds.get)
        entry = {"flops_per_frame": flops, "frames_per_s": speeds, "best_batch": best}
        entry |= {"best_frames_per_s": speeds[best], "of_peak": speeds[best] * flops / peak}
        result.setdefault("models", {})[name] = entry
        write(args.json, result)  # a time limit during the compilation takes away no more than that
        if args.compiled:
            start = time.perf_counter()
            reward.model.visual.compile(dynamic=False)
            speed = measure(best)
            report(f"{name}, compiled", best, speed)
            entry |= {"compiled_frames_per_s": speed, "compiled_gain": speed / speeds[best]}
            entry["compiled_of_peak"] = speed * flops / peak
            entry["compile_s"] = time.perf_counter() - start - args.seconds
            write(args.json, result)
        del reward
    return result


def draw(args: Draw):
    result = {"machine": machine(args.devices[0]), "size": args.size, "quality": args.quality}
    result["frames_per_s"] = {}
    make = functools.partial(sac.make_renderer, sac.Args(), args.size, args.quality)
    some = humanoid_states(100)
    for workers in args.workers:
        devices = [args.devices[i % len(args.devices)] for i in range(workers)]
        states = some[np.arange(args.frames * workers) % len(some)]
        with clip_reward.RewardPool(make, make_nothing, devices) as pool:
            pool.score(states[: 64 * workers])
            start = time.perf_counter()
            pool.score(states)
            speed = len(states) / (time.perf_counter() - start)
            if workers == args.workers[0]:
                print(pool.description[0])
        result["frames_per_s"][workers] = speed
        print(f"{workers:>3} workers {speed:>8.0f} frames/s")
        write(args.json, result)
    return result


def pool(args: Pool):
    import tempfile

    result = {"cost": args.cost, "frames_per_s": {}, "efficiency": {}}
    states = np.zeros((args.frames, 1))
    for workers in args.workers:
        with tempfile.TemporaryDirectory() as folder:
            make = functools.partial(make_slow_first, cost=args.cost, slow=args.slow, folder=folder)
            devices = ["cpu"] * workers
            with clip_reward.RewardPool(Blank, make, devices, needs_gl=False) as pool:
                pool.score(states)
                start = time.perf_counter()
                for _ in range(args.jobs):
                    pool.score(states)
                speed = args.frames * args.jobs / (time.perf_counter() - start)
        # what the workers can do together, each at its own speed, without any waiting
        efficiency = speed * args.cost / (workers - 1 + 1 / args.slow)
        result["frames_per_s"][workers], result["efficiency"][workers] = speed, efficiency
        print(f"{workers:>3} workers {speed:>8.0f} frames/s, efficiency {efficiency:.2f}")
        write(args.json, result)
    return result


def precisions(args: Precisions):
    from eval_epic import epic_distance, spearman

    egl_render.setup_gl(args.device)
    quality = "full" if args.device.startswith("cuda") else "light"
    renderer = sac.make_renderer(sac.Args(), args.size, quality)
    frames = np.empty((args.frames, *renderer.frame_shape), np.uint8)
    renderer.render(humanoid_states(args.frames), frames)
    renderer.close()
    rewards = {}
    with torch.inference_mode():
        for precision in ("fp32", *args.precisions):
            reward = clip_reward.make_clip_reward(
                args.device, args.model, list(args.target_prompt), precision=precision
            )
            parts = [reward(part).cpu() for part in torch.from_numpy(frames).split(64)]
            rewards[precision] = torch.cat(parts).double().numpy()
    exact = rewards.pop("fp32")
    result = {"model": args.model, "frames": args.frames, "standard_deviation": exact.std()}
    print(f"{args.model}, {args.frames} frames of {args.size} px, rewards in fp32", end=" ")
    print(f"{exact.mean():.4f} +- {exact.std():.4f}")
    print("        EPIC distance to fp32   largest difference   Spearman's correlation")
    for precision, values in rewards.items():
        entry = {
            "epic_distance": epic_distance(exact, values),
            "largest_difference": np.abs(values - exact).max(),
            "spearman": spearman(exact, values),
        }
        result[precision] = entry
        epic, largest, rank = entry.values()
        print(f"{precision:>7} {epic:>22.5f} {largest:>20.6f} {rank:>24.6f}")
    write(args.json, result)
    return result


def machine(device):
    name = torch.cuda.get_device_name(device) if str(device).startswith("cuda") else "cpu"
    return f"{name}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"


def write(path, result):
    if path:
        path.write_text(json.dumps(result, indent=2, default=float))


def table(args: Table):
    """Reads every JSON that gpu.sh's pieces left; writes all.json and prints the table. Exit code 1
    if a piece is missing."""
    results, missing = {}, {}
    for path in sorted(args.folder.glob("*.status")):
        name, (code, seconds) = path.stem, path.read_text().split()
        if int(code):
            missing[name] = "over its time limit" if code == "124" else f"exit code {code}"
        written = path.with_suffix(".json")
        if written.is_file() and written.stat().st_size:
            results[name] = json.loads(written.read_text()) | {"took_s": float(seconds)}
    alone = {}
    for result in results.values():
        for model, entry in result.get("models", {}).items():
            before = alone.get(model, entry)  # one piece may have measured it, and another compiled
            alone[model] = max(before, entry, key=lambda e: e["best_frames_per_s"])
            compiled = {k: v for e in (before, entry) for k, v in e.items() if "compile" in k}
            alone[model] = alone[model] | compiled
    machines = {r["machine"]: r for r in results.values() if "matmul_flops" in r}
    for title, result in machines.items():
        flops = result["matmul_flops"] / 1e12
        print(f"{title}: {result['precision']} matrix products {flops:.3g} TFLOP/s")
    if alone:
        print(f"\n{'CLIP alone':>22} {'batch':>6} {'frames/s':>9} {'of peak':>8} {'compiled':>9}")
    for model, entry in alone.items():
        gain = f"{entry['compiled_gain']:.2f} x" if "compiled_gain" in entry else "-"
        line = f"{model:>22} {entry['best_batch']:>6} {entry['best_frames_per_s']:>9.4g}"
        print(f"{line} {entry['of_peak']:>8.0%} {gain:>9}")
    for name, result in results.items():
        if "stages" in result:
            speed = result["stages"]["end to end"]["steps/s"]
            ratio = result.get("ratio_to_clip_alone")
            ratio = f", {ratio:.2f} of CLIP alone" if ratio else ""
            model, env = result["args"]["clip_model"], result["args"]["env_id"]
            print(f"\nend to end: {env}, {model}: {speed:.4g} steps/s{ratio}")
        elif "efficiency" in result:
            print("\npool, workers and efficiency:", rounded(result["efficiency"]))
        elif "frames_per_s" in result:
            look = f"{result['size']} px, {result['quality']} quality"
            print(f"\ndrawing at {look}, workers and frames/s:", end=" ")
            print(rounded(result["frames_per_s"]))
        elif "standard_deviation" in result:
            for precision in DTYPES.keys() & result.keys():
                print(f"\n{result['model']} in {precision}:", rounded(result[precision]))
        elif "models" not in result:
            print(f"\n{name}:", json.dumps(result))
    for name, problem in missing.items():
        print(f"\nINCOMPLETE {name}: {problem}; see {args.folder / name}.log")
    write(args.folder / "all.json", {"results": results, "incomplete": missing})
    sys.exit(1 if missing else 0)


def rounded(values):
    return ", ".join(f"{key}: {value:.4g}" for key, value in values.items())


def main():
    commands = {"clip": Clip, "draw": Draw, "pool": Pool, "precisions": Precisions, "table": Table}
    functions = {Clip: clip, Draw: draw, Pool: pool, Precisions: precisions, Table: table}
    args = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    try:
        functions[type(args)](args)
    except (clip_reward.UsageError, egl_render.GLError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
