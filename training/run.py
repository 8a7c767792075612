"""A run: seeds, pool, the rings of a replay buffer, its folder with events and checkpoints, and how
it ends."""

import atexit
import contextlib
import copy
import fcntl
import filecmp
import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from PIL import Image

import egl_render
from clip_reward import (
    NotFiniteError,
    RewardPool,
    RunError,
    death,
    first_line,
    is_ray,
    make_clip_reward,
    warn,
)
from egl_render import UsageError
from training.flags import (
    changed_flags,
    checkpoints,
    end_at_once,
    excepthook,
    experiment_of,
    flags_of,
    from_flags,
    typed,
)
from training.page import CURVES, events_of, make_page


class DiskError(RunError):
    """A file that could not be written."""


def load_checkpoint(path):
    """What a checkpoint holds; tensors stay in the file until they are used. No code in it is run.
    Raises UsageError for one that is damaged, by the checksums that torch.save writes."""
    try:
        with zipfile.ZipFile(path) as file:
            if name := file.testzip():
                raise ValueError(f"wrong checksum of {name}")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # half a dozen kinds
        raise UsageError(f"{path} is damaged or no checkpoint: {first_line(error)}") from error


def write(path, content):
    """Write `content`, bytes or something for torch.save, to a file that is flushed to the disk and
    then renamed to `path`: a kill or a full disk leaves the old one. Raises DiskError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content) if isinstance(content, bytes) else torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        # torch.save says something else of a full disk, after the error that there was
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise DiskError(f"{path} could not be written: {cause}") from error


def seed_everything(args):
    """Seed PyTorch for the networks (loops seed again for every rollout) -> learner's device."""
    torch.manual_seed(args.seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # determinism wants it
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would touch the whole buffer
    # Adam's averages of units that died become numbers that take a CPU a hundred times as long
    torch.set_flush_denormal(True)
    return torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")


def make_pool(args, make_renderer):
    """The RewardPool of a run, or None where nothing is scored and nothing drawn for videos."""
    use_clip = args.reward.reward == "clip"
    if not use_clip and not (make_renderer and args.video_freq):
        return None
    score = functools.partial(make_clip_reward, args=args.reward) if use_clip else None
    devices = args.reward.devices()
    if not use_clip:
        devices = ["ray:1" if is_ray(devices) else devices[0]]
    states = max(1, args.reward.clip_batch_size // args.render.views)
    return RewardPool(make_renderer, score, devices, states, args.reward.worker_timeout)


def compile_update(update, device):
    """`update(batch)` by torch.compile; on CUDA captured in a graph as well, with no Python and no
    gaps between its kernels. All batches must have the shapes of the first."""
    update = torch.compile(update, dynamic=False)
    if device.type != "cuda":
        return update
    from tensordict.nn import CudaGraphModule

    return CudaGraphModule(update, warmup=5)


class Rings:
    """What a replay buffer keeps: tensors `rings` that are filled in turn, and `count`, how many
    rows were ever added."""

    def add(self, *columns):
        """Rows [K, ...] for every ring, of which K <= its size."""
        slots = (self.count + torch.arange(len(columns[0]))) % len(self.rings[0])
        self.before = self.count, slots, [ring[slots] for ring in self.rings]
        for ring, column in zip(self.rings, columns, strict=True):
            ring[slots] = torch.as_tensor(column).to(ring)
        self.count += len(slots)

    def undo(self):
        """Take the last `add` back."""
        self.count, slots, overwritten = self.before
        for ring, rows in zip(self.rings, overwritten, strict=True):
            ring[slots] = rows

    def state_dict(self):
        # torch.save writes all that lies behind a slice, hence the copies
        return {"count": self.count, "rings": [ring[: self.count].clone() for ring in self.rings]}

    def load_state_dict(self, state):
        self.count = state["count"]
        for ring, filled in zip(self.rings, state["rings"], strict=True):
            ring[: len(filled)] = filled


def load_judge(args):
    """--judge, or that of the humanoid's task with this prompt, or None: a function of states
    [T, N, S] -> success [N] bool. An episode succeeds if half of its steps do, as in the paper."""
    from evaluation import judges

    task = None
    if args.judge:
        task = judges.find_task(args.judge, args.env_id)
    elif args.env_id not in egl_render.CLASSIC_STATE_SIZES:  # whose own rule is in `info`
        task = judges.task_for(args.env_id, args.reward.target_prompt)
    if task is None:
        return None

    def success(states):
        good_steps = task.judge(np.concatenate(states)).reshape(states.shape[:2])
        return good_steps.mean(0) >= judges.THRESHOLD

    return success


class Run:
    """A run's folder, which no other process can write to, with its event file and checkpoints; a
    progress bar; how a run ends. Its first lines are `Run(args)` and, when all is made that it
    keeps, `start`; then comes `while run.goes_on()`.

    However a run ends, what it had learned by the end of its last rollout is saved: also if an
    exception ends it, or numbers that are none. Then one line says why, where, and how to go on.

    Attributes:
        folder: runs/<env>__<exp>__<seed>__<time>/.
        history: mean reward of every rollout.
        global_step: environment steps so far.
        stopped: the signal (Ctrl-C or SIGTERM) that asked for an end after this rollout, or 0.
    """

    def __init__(self, args):
        from torch.utils.tensorboard import SummaryWriter  # slow to import: not before --help

        self.args, self.stopped, self.save_soon, self.warned = args, 0, False, False
        self.history, self.global_step, self.best, self.good = [], 0, {}, None
        sys.excepthook = self._failed
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end_at_once)
        # a thread of TensorBoard's tells what it could not write, and then the main thread does
        told = threading.excepthook
        threading.excepthook = lambda x: issubclass(x.exc_type, OSError) or told(x)
        try:
            self.folder = None
            atexit.register(self._discard)
            self.folder = Path(args.resume) if args.resume else self._new_folder()
            self._lock()
            self.checkpoint = self._newest_checkpoint() if args.resume else {}
            self.first_step = self.checkpoint.get("global_step", 0)
            (self.folder / "checkpoints").mkdir(exist_ok=True)
            for left in (*self.folder.rglob("*.tmp"), *self.folder.glob("videos/.*")):
                left.unlink()  # by one that was killed
            kept = {"script": sys.argv[0]} | flags_of(args)
            self._keep_goals()
            write(self.folder / "args.json", json.dumps(kept, indent=2).encode())
            if args.track:
                self._track()
            self.writer = SummaryWriter(self.folder, purge_step=self.first_step + 1)
            self._introduce()
            self.events = events_of(self.folder)
        except OSError as error:
            raise DiskError(f"no run can be written to {args.runs_dir}: {error}") from error

    def _keep_goals(self):
        """Copies of the pictures that are the goal: with --resume they have to be the same."""
        for name in ("target_image", "baseline_image"):
            for number, path in enumerate(getattr(self.args.reward, name), 1):
                kept = self.folder / f"{name}_{number}{Path(path).suffix}"
                if not kept.exists():
                    shutil.copyfile(path, kept)
                elif not filecmp.cmp(path, kept, shallow=False):
                    raise UsageError(f"{path} is not what this run began with, which is {kept}")

    def _introduce(self):
        """Flags for the tabs Text and HParams, and a page that begins with what matters."""
        from torch.utils.tensorboard.summary import hparams

        rows = "\n".join(f"|{name}|{value}|" for name, value in flags_of(self.args).items())
        self.writer.add_text("hyperparameters", f"|parameter|value|\n|-|-|\n{rows}")
        flags = experiment_of(self.args).items()
        plain = {x: y if isinstance(y, (bool, int, float)) else str(y) for x, y in flags}
        metrics = "charts/clip_reward", "charts/success_rate", "charts/episodic_return"
        # Without the first, which says what flags there are: TensorBoard would take that of one run
        # for all, and DQN's are others than SAC's. Without the third, which says that it is over.
        self.writer.file_writer.add_summary(hparams(plain, dict.fromkeys(metrics))[1])
        panels = {title: ["Multiline", tags] for title, tags in CURVES.items()}
        self.writer.add_custom_scalars({"the run": panels})

    def _end_at_once(self, *received):
        self._discard()
        end_at_once(*received)

    def _new_folder(self):
        """One that this process has made, and no other."""
        args = self.args
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        name = re.sub("[/:]", "_", name)
        for number in itertools.count(1):
            path = Path(args.runs_dir) / (name if number == 1 else f"{name}_{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(parents=True)
                return path

    def _discard(self):
        """Remove the folder of a new run that ended before it had anything to keep."""
        new = self.folder and not self.args.resume
        if new and not (self.history or checkpoints(self.folder)):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _lock(self):
        """Keep others out for as long as this process lives. Raises UsageError."""
        self.lock = (self.folder / "lock").open("a+")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            holder = self.lock.read().strip()
            raise UsageError(f"--resume {self.folder}: {holder} is writing to it") from None
        except OSError as error:
            warn(f"{self.folder} cannot be locked ({error}); do not resume it while it runs")
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.lock.flush()

    def _newest_checkpoint(self):
        """The newest that is whole and this run's. Raises UsageError if there is none."""
        for path in checkpoints(self.folder).values():
            try:
                checkpoint = load_checkpoint(path)
                was = checkpoint.get("flags", {"flags": 0})
                was = was | flags_of(from_flags(type(self.args), was))  # older ones in today's form
                if changed := changed_flags(was, self.args):
                    raise UsageError(f"{path} is of another run: {', '.join(changed)} differ")
                return checkpoint
            except UsageError as error:
                aside = path.replace(f"{path}.damaged")
                warn(f"{error}; it is {aside.name} now, and the one before it is used")
        raise UsageError(f"--resume {self.folder}: no checkpoint in it is whole")

    def _track(self):
        import wandb

        args = self.args
        names = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        names |= {"name": self.folder.name, "dir": self.folder}
        identity = re.sub(r"[^\w-]", "_", self.folder.name, flags=re.ASCII)[-128:]
        names |= {"id": identity, "resume": "allow"}  # one curve, also of a resumed run
        hook = sys.excepthook  # wandb's would print a traceback before the one line
        try:
            wandb.init(sync_tensorboard=True, config=flags_of(args), **names)
        except wandb.errors.Error as error:
            raise UsageError(f"--track: {first_line(error)}") from error
        sys.excepthook = hook

    def start(self, learner, buffer, pool, envs, progress=None):
        """Wait for the pool; keep from now on {name: network, optimiser or tensor}, the replay
        buffer and what else counts, {name: value}; with --resume they become what they were. Of an
        optimiser's settings, which are this run's and this device's, nothing changes. The processes
        of `envs` are looked at when something ends the run."""
        from tqdm import tqdm

        self.learner, self.buffer, self.progress = learner, buffer, progress or {}
        self.pool = pool if self.args.reward.reward == "clip" else None
        if pool:
            print(*pool.wait_ready().description, sep="\n")
        gigabytes = sum(ring.nbytes for ring in buffer.rings) / 1e9
        print(f"replay buffer ({gigabytes:.2f} GB) on {buffer.rings[0].device}")
        self.processes = getattr(envs, "processes", [])
        if saved := self.checkpoint:
            for name, part in learner.items():
                state = saved[name]
                if isinstance(part, torch.Tensor):
                    part.data.copy_(state)
                    continue
                if "param_groups" in state:
                    state = state | {"param_groups": part.state_dict()["param_groups"]}
                part.load_state_dict(state)
            buffer.load_state_dict(saved["replay"])
            self.progress.update(saved["progress"])
            self.history, self.global_step = saved["history"], saved["global_step"]
            if best := saved["best"]:  # the file may be of a later rollout, or damaged
                self.best = copy.deepcopy(best)
                write(self.folder / "checkpoints/best.pt", best)
        self.checkpoint = None  # it maps the file, which would keep its space until the end
        self.ends = self.global_step >= self.args.total_timesteps
        self.began = time.perf_counter()
        sys.stdout.reconfigure(line_buffering=True)  # a line per rollout in log files as well
        options = {"unit": "step", "smoothing": 0.1, "disable": None}
        self.bar = tqdm(total=self.args.total_timesteps, initial=self.global_step, **options)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGUSR1, self._save_soon)
        print(f"run folder {self.folder}\ncurves: tensorboard --logdir {self.args.runs_dir}")

    def _stop(self, number, _):
        if self.stopped and number == signal.SIGINT:  # SIGTERM may come from several who end a job
            sys.exit(128 + number)
        self.stopped = number
        with contextlib.suppress(OSError):  # of `| tee`, which dies of the same Ctrl-C
            os.write(2, b"\nstopping after this rollout; Ctrl-C once more to stop now\n")

    def _save_soon(self, *_):
        self.save_soon = True

    def goes_on(self):
        """Whether there is one more rollout to do."""
        self.good = self._state(copy.deepcopy), self.buffer.count
        return not self.ends

    def _state(self, copied=lambda state: state):
        """What a checkpoint has, but for the replay buffer."""
        learner = {}
        for name, part in self.learner.items():
            learner[name] = part.detach() if isinstance(part, torch.Tensor) else part.state_dict()
        state = copied(learner | {"progress": self.progress})
        state |= {"global_step": self.global_step, "history": self.history[:], "best": self.best}
        return state | {"flags": experiment_of(self.args)}

    def check_finite(self, seeds, observations, rewards):
        """Raise RunError if an environment gave what is no number: observations [T + 1, N, O] and
        rewards [T, N] of episodes that began with these seeds [N]."""
        for name, values in ("observation", observations), ("reward", rewards):
            if not (good := np.isfinite(values)).all():
                t, n, *which = np.argwhere(~good)[0].tolist()
                what = f"{name}{which or ''} of environment {n} is {values[t, n, *which]}"
                when = f"{t} steps after it was reset with seed {seeds[n]}"
                raise RunError(f"{what}, {when}")

    def log(self, rewards, env_rewards, success, seconds, more, note):
        """The end of a rollout: events, a line on the console, the bar. rewards (learned from) and
        env_rewards (the environment's own) are [T, N], success [N] bool or None, seconds {what its
        time went into: s}, more {tag: value}, note for the end of the line."""
        for tag, value in more.items():
            if not math.isfinite(value):
                raise RunError(f"{tag} is {value} after {self.global_step} steps")
        if self.pool:
            seconds = seconds | self.pool.timings
            more = more | {"charts/worker_restarts": self.pool.restarts}
        # decided once: a signal that comes later than this ends the next rollout
        self.ends = bool(self.stopped) or self.global_step >= self.args.total_timesteps
        self.history.append(float(rewards.mean()))
        elapsed = time.perf_counter() - self.began
        charts = {"SPS": (self.global_step - self.first_step) / elapsed}
        charts["episodic_return"] = env_rewards.sum(0).mean()
        if success is not None:
            charts["success_rate"] = np.mean(success)
        if self.args.reward.reward == "clip":
            charts["episodic_clip_return"] = rewards.sum(0).mean()
            charts["clip_reward"] = rewards.mean()
        line = "  ".join(f"{name} {value:.4g}" for name, value in charts.items())
        times = "  ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        with contextlib.suppress(OSError):
            self.bar.write(f"step {self.global_step:,}  {line}  {times}  {note}")
            self.bar.update(self.global_step - self.bar.n)
        scalars = {f"charts/{name}": value for name, value in charts.items()} | more
        scalars |= {f"time/{name}": value for name, value in seconds.items()}
        with self._dispensable("events"):
            for tag, value in scalars.items():
                self.writer.add_scalar(tag, value, self.global_step)

    @contextlib.contextmanager
    def _dispensable(self, what):
        """The run goes on without what cannot be written here, with one warning in all."""
        try:
            yield
        except Exception as error:  # of the disk; of what draws the page, of wandb
            if not self.warned:
                warn(f"{what} could not be written: {first_line(error)}; the run goes on without")
            self.warned = True
            if not isinstance(error, (OSError, DiskError)):
                return
            with contextlib.suppress(OSError):  # the old one has ended with the error
                if shutil.disk_usage(self.folder).free > 1e6:
                    self.writer = type(self.writer)(self.folder)

    def due(self, every):
        """Whether this rollout passed a multiple of `every`, or the run ends; never if it is 0."""
        before = self.good[0]["global_step"]
        return every > 0 and (self.ends or before // every != self.global_step // every)

    def keep(self):
        """checkpoints/step_<n>.pt, if it is due: all that --resume needs. Older ones are removed
        as --keep-checkpoints says."""
        if self.due(self.args.checkpoint_freq or math.inf) or self.save_soon:
            self.save_soon = False
            self._save(self._state())

    def _save(self, state):
        path = self.folder / f"checkpoints/step_{state['global_step']}.pt"
        write(path, state | {"replay": self.buffer.state_dict()})
        if kept := self.args.keep_checkpoints:
            for old in list(checkpoints(self.folder).values())[kept:]:
                old.unlink(missing_ok=True)
        with self._dispensable("index.html"):
            self.writer.flush()
            write(self.folder / "index.html", make_page(self.folder, self.events).encode())

    def keep_best(self, reward, **networks):
        """checkpoints/best.pt: those networks whose rollout had the highest reward so far."""
        if not self.best or reward >= self.best["reward"]:
            state = {name: network.state_dict() for name, network in networks.items()}
            state |= {"global_step": self.global_step, "reward": float(reward)}
            self.best = copy.deepcopy(state)
            with self._dispensable("best.pt"):  # it is in every checkpoint, too
                write(self.folder / "checkpoints/best.pt", state)

    def save_video(self, frames, fps):
        """frames [T, H, W, 3] uint8, several cameras' side by side, as videos/step_<n>.mp4, some
        ten moments of it as a picture, and small in TensorBoard."""
        from evaluation.figures import grid

        path = self.folder / f"videos/step_{self.global_step}.mp4"
        with self._dispensable("a video"):
            egl_render.write_video(path, frames, fps)
            across = -(-5 // max(1, frames.shape[2] // frames.shape[1]))
            moments = np.linspace(0, len(frames) - 1, 10 - 10 % across).astype(int)
            sheet = Image.fromarray(grid(frames[moments], across))
            sheet.resize((1200, 1200 * sheet.height // sheet.width)).save(path.with_suffix(".png"))
            thin = -(-frames.shape[1] // 400)  # TensorBoard takes GIFs: small ones
            thumbnails = frames[:, ::thin, ::thin]
            egl_render.add_video(self.writer, "videos/rollout", thumbnails, self.global_step, fps)
            if self.args.track:
                import wandb

                wandb.log({"videos/rollout": wandb.Video(str(path), format="mp4")})

    def _failed(self, kind, error, trace):
        """sys.excepthook: saves what was good; one line of what ended the run and how to go on."""
        sys.excepthook = excepthook
        if self.good is None or kind is UsageError:
            return excepthook(kind, error, trace)
        self.bar.close()
        cause = str(error) if issubclass(kind, RunError) else self._dead_environment(kind, error)
        if cause is None:  # of an environment or a script that somebody writes
            sys.__excepthook__(kind, error, trace)
            cause = f"{kind.__name__}: {first_line(error)}"
        try:
            if isinstance(error, NotFiniteError):
                cause += f"; {self._save_scene(error)}"
            state, count = self.good
            if self.buffer.count != count:
                self.buffer.undo()
            if not isinstance(error, DiskError):
                self._save(state)
        except (DiskError, OSError) as second:
            cause += f"; {second}"
        print(f"error: {cause}; {self._how_to_go_on()}", file=sys.stderr)
        sys.exit(1)

    def _dead_environment(self, kind, error):
        """Whose process died, and how, if that is what the error came from."""
        if issubclass(kind, mp.TimeoutError):
            return f"an environment hangs (--worker-timeout): {error}"
        for n, process in enumerate(self.processes):
            if issubclass(kind, (EOFError, ConnectionError)):
                process.join(1)
                if process.exitcode is not None:
                    return f"the process of environment {n} {death(process.exitcode)}"
        return None

    def _save_scene(self, error):
        path = self.folder / f"not_finite_{self.global_step}.npz"
        np.savez(path, **{error.kind: error.scene})
        Image.fromarray(error.frame).save(path.with_suffix(".png"))
        return f"the scene is in {path} and .png"

    def _how_to_go_on(self):
        for path in checkpoints(self.folder).values():
            return f"saved: {path.name}; go on with: {typed(sys.argv[0])} --resume {self.folder}"
        return "nothing is saved"

    def close(self):
        """Close all files; say what was learned, where things are, and how to go on."""
        self.bar.close()
        with self._dispensable("events"):
            self.writer.close()
        tenth = max(1, len(self.history) // 10)
        first, last = np.mean(self.history[:tenth]), np.mean(self.history[-tenth:])
        print(f"reward per step: {first:.4f} in the first tenth, {last:.4f} in the last")
        print(f"videos and checkpoints are in {self.folder}")
        if self.stopped and self.global_step < self.args.total_timesteps:
            print(f"stopped; {self._how_to_go_on()}")
            sys.exit(128 + self.stopped)
