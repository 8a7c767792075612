"""A run: its flags, its folder, what is logged and saved, how it ends and how it is resumed."""

import atexit
import contextlib
import copy
import datetime
import fcntl
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import zipfile
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval
from PIL import Image
from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass

import egl_render
from clip_reward import (
    RewardArgs,
    RunError,
    UsageError,
    message_of,
    one_line,
    render_size_of,
    shorten,
)


@dataclass(config={"extra": "forbid"})
class RunArgs(egl_render.RenderArgs, RewardArgs):
    """Flags of every run, after those of the reward and the pictures; the scripts' Args extend
    them."""

    seed: Annotated[int, Interval(ge=0, lt=2**63)] = 1
    """seed of the networks, the environments, exploration and replay"""
    compile: bool = False
    """compile the updates (on a GPU into one CUDA graph): the start takes longer, but every update
    takes less time"""
    track: bool = False
    """also log to Weights & Biases, which reads WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE"""
    runs_dir: str = "runs"
    """folder of all runs"""
    checkpoint_freq: NonNegativeInt = 128_000
    """steps between checkpoints; the end of a run always has one"""
    video_freq: NonNegativeInt = 128_000
    """steps between videos; the end of a run always has one (0: no videos)"""
    judge: str | None = None
    """the judge, whose verdicts on states are logged as charts/success_rate and never used as a
    reward: a task in environments/judges.py, or FILE.py:FUNCTION (states [B, S] -> [B] bool);
    default: the task with the given prompt, if there is one"""
    resume: str | None = None
    """what to resume. A run's folder, or a folder with one run in it, continues that run with its
    own flags. latest continues the newest run in --runs-dir that was started with these flags, or
    starts a new run if there is none. A checkpoint, RUN/checkpoints/step_<n>.pt, gives its networks
    to a new run, which may have other flags, such as another --reward-head"""

    @property
    def frame_size(self) -> int:
        """Height and width of the frames in pixels: --render-size, or the size for the model."""
        return self.render_size or render_size_of(self.clip_model)


# These flags may be given with --resume. They set how long and where a run continues, and how
# often it saves, but not what it learns. (DQN's schedules stretch with --total-timesteps.)
RESUME_MAY_CHANGE = set(
    "total_timesteps checkpoint_freq video_freq reward_devices clip_batch_size "
    "compile track judge runs_dir resume renderer".split()
)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Silence the resource tracker's warning of semaphores that a process leaves when it ends at once.
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
children = []  # processes of reward workers and environments: they end with this one

LINE = 110  # characters per line on the console
BEST_WINDOW = 20  # rollouts whose mean reward decides best.pt: fewer may have lucky starts

CURVES = {  # the panels of TensorBoard's tab Custom Scalars, and of a run's page
    "reward per step": ["charts/clip_reward"],
    "share of successful episodes": ["charts/success_rate"],
    "the environment's own return": ["charts/episodic_return"],
    "value loss": ["losses/qf1_loss", "losses/qf2_loss", "losses/td_loss"],
    "SAC's policy loss": ["losses/actor_loss"],
    "seconds per rollout": ["time/physics_s", "time/wait_s", "time/update_s"],
}


def free_memory():
    """Return the bytes that are free on this machine, at most the limit of a container or job."""
    group = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().rpartition("0::/")[2][:-1])
    files = [folder / "memory.max" for folder in (group, *group.parents)]
    limits = [path.read_text() for path in files if path.is_file()]
    free = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    return min([1024 * int(free[1]), *(int(limit) for limit in limits if limit[0] != "m")])


def check_memory(args, needs):
    """Raise UsageError if too little memory is free for the learner on its device (`needs`, {flag:
    bytes}), or for the pictures that this machine's workers and a video hold at once."""
    picture = 3 * args.frame_size**2
    chunk = min(args.clip_batch_size, args.num_envs * args.episode_length) * len(args.devices())
    pictures = {
        "--render-size, --clip-batch-size": picture * chunk * (args.reward == "clip"),
        "--render-size, --video-freq": picture * args.episode_length * (args.video_freq > 0),
    }
    host = free_memory()
    learner = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else host
    for sizes, free in ((needs, learner), (pictures, host)):
        if sum(sizes.values()) > free:
            most = max(sizes, key=sizes.get)
            problem = f"{sizes[most] / 1e9:,.1f} GB are needed, but {free / 1e9:,.1f} GB are free"
            raise UsageError(f"{most}: {problem}")


def run_folder(name):
    """Return the folder of a run: `name` itself, the only run in it, or for "latest" the newest run
    below runs/. Raises UsageError."""
    found = list(Path(name).glob("args.json")) or list(Path(name).glob("*/args.json"))
    if str(name) == "latest" and not found:
        found = sorted(Path("runs").rglob("args.json"), key=os.path.getmtime)[-1:]
        say(*(f"latest: {path.parent}" for path in found))
    if len(found) != 1:
        raise UsageError(f"{name} is neither a run's folder (args.json) nor a folder with one run")
    return found[0].parent


def saved_flags(run_dir):
    """Read a run's args.json: {name: value}, with "script", the file that was started. Raises
    UsageError."""
    path = Path(run_dir) / "args.json"
    try:
        with path.open() as file:
            text = file.read(1_000_001)
        if len(text) > 1_000_000:
            raise ValueError("it is larger than a megabyte")
        return dict(json.loads(text).items())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {message_of(error)}") from error


def make_args(flags, Args, where):
    """Return the Args of saved flags. Raises UsageError if they are damaged or another script's."""
    flags = {name: value for name, value in flags.items() if name != "script"}
    try:
        return Args(**flags)
    except (TypeError, ValueError) as error:  # pydantic's
        problem = shorten(" ".join(str(error).split()), 400)
        raise UsageError(
            f"{where} is damaged or from another script or version: {problem}"
        ) from error


def load_args(run_dir, Args):
    """Return the Args of a run. Raises UsageError as `make_args` does."""
    return make_args(saved_flags(run_dir), Args, Path(run_dir) / "args.json")


def changed_flags(was, now):
    """List the flags that differ between two Args though --resume may not change them."""
    was, now = vars(was), vars(now)
    return [name for name in was if was[name] != now[name] and name not in RESUME_MAY_CHANGE]


def latest_run(args):
    """Return the folder of the newest run with a checkpoint and these flags, or None."""
    found = Path(args.runs_dir).glob("*/checkpoints/step_*.pt")
    folders = [path.parents[1] for path in sorted(found, key=os.path.getmtime, reverse=True)]
    for folder in dict.fromkeys(folders):
        try:
            if not changed_flags(load_args(folder, type(args)), args):
                return str(folder)
        except UsageError as error:
            warn(f"--resume latest skips a run: {error}")
    return None


@contextlib.contextmanager
def stop_signals_blocked():
    """Hold back stop signals while processes are started. These inherit the block, so they never
    see a signal to the whole group, which only this process handles."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    resource_tracker.ensure_running()  # it inherits the block too, but unblocks two signals here
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@atexit.register
def kill_children():
    for process in children:  # they have nothing to save
        process.kill()


def on_stop_signals(handler):
    """Call `handler` at a stop signal. Under nohup SIGHUP stays ignored."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def parse_args(Args, description):
    """Parse the command line, with --resume on top of the run's own flags. From here on errors are
    one line, and until the run has begun a stop signal ends the program at once. A new run that
    starts with the networks of a checkpoint has --learning-starts 0 unless that is given."""
    import tyro

    sys.excepthook = excepthook
    on_stop_signals(end_now)
    # tyro prints an empty line before indented text, in addition to the text's own
    parse = functools.partial(tyro.cli, Args, description=description.replace(":\n\n ", ":\n "))
    try:
        args = parse()
    except OSError:  # --help | head
        sys.exit(141)
    finally:
        say(end="")
    if args.resume == "latest":
        args.resume = latest_run(args)
        say(f"--resume latest: {args.resume or 'there is no such run yet, so a new one starts'}")
    if args.resume is None:
        return args
    path = Path(args.resume).resolve()
    new = path.suffix == ".pt" and path.is_file()
    folder = run_folder(path.parents[1] if new else args.resume)
    given, saved = own_code(args), load_args(folder, Args)
    if new:
        saved.learning_starts = 0
    args = parse(default=saved)
    args.resume = str(path if new else folder)
    changed = changed_flags(saved, args)
    if changed and not new:
        flag, was = changed[0].replace("_", "-"), vars(saved)[changed[0]]
        raise UsageError(f"--{flag} was {was!r} in the run to resume; leave it out")
    if needed := [word for word in own_code(args) if word not in given]:
        raise UsageError(f"args.json names code that may not be yours; to run it add {needed[-1]}")
    return args


def own_code(args):
    """List the flags that name the user's own code."""
    flags = {"--env-id": args.env_id, "--judge": args.judge}
    return [f"{flag} {shlex.quote(x)}" for flag, x in flags.items() if ":" in (x or "")]


def end_now(number, _):
    """Handle a signal by ending at once: there is nothing to save."""
    kill_children()
    os._exit(128 + number)


def cut(error):
    """Return the message of a UsageError in one printable line of at most 700 characters: a damaged
    file may put anything into it."""
    return shorten("".join(filter(str.isprintable, " ".join(str(error).splitlines()))), 700)


def excepthook(kind, error, trace, after=""):
    """End the program with a line that names the cause. Errors other than UsageError (exit code 2)
    and RunError (1) have their traceback above it."""
    lines = str(error).splitlines() or [""]
    lost = issubclass(kind, (EOFError, ConnectionError))  # what Gymnasium raises for a dead process
    if lost and connection.wait([process.sentinel for process in children], timeout=1):
        codes = sorted({str(c.exitcode) for c in children if c.exitcode is not None})
        lines = [f"the process of an environment died (exit code {', '.join(codes)})"]
    elif issubclass(kind, UsageError):
        lines = [cut(error)]
    elif not issubclass(kind, RunError):
        sys.__excepthook__(kind, error, trace)
        lines = [one_line(error)]
    print(*lines[:-1], f"error: {lines[-1]}{after}", sep="\n", file=sys.stderr)
    sys.exit(2 if issubclass(kind, UsageError) else 1)


def thread_failed(failed):
    """Warn that the event file cannot be written, which has ended TensorBoard's thread."""
    if not issubclass(failed.exc_type, OSError):
        return threading.__excepthook__(failed)
    warn(f"the curves could not be written: {failed.exc_value}; the run continues without them")


def warn(line):
    """Print one line to stderr, if that is still open."""
    with contextlib.suppress(OSError):
        os.write(2, f"WARNING: {line}\n".encode())


def say(*lines, end="\n"):
    """Print lines, or nothing once stdout is closed (`| head -1`)."""
    try:
        print(*lines, sep="\n", end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def checkpoints(run_dir):
    """Return the checkpoints of a run without best.pt, newest first: {step: path}."""
    paths = Path(run_dir).glob("checkpoints/step_*.pt")
    found = {int(path.stem[5:]): path for path in paths if path.stem[5:].isdecimal()}
    return dict(sorted(found.items(), reverse=True))


def load_checkpoint(path):
    """Load a checkpoint without running any code in it. Raises UsageError if it is damaged, which
    the checksums that torch.save writes reveal."""
    try:
        with zipfile.ZipFile(path) as file:
            if name := file.testzip():
                raise ValueError(f"wrong checksum of {name}")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        counts = isinstance(saved, dict) and (saved.get("global_step"), saved.get("rollout", 0))
        if not counts or any(type(count) is not int or not 0 <= count < 2**63 for count in counts):
            raise ValueError("it holds no number of steps")
        return saved
    except Exception as error:  # there are half a dozen types
        raise UsageError(f"{path} is damaged or not a checkpoint: {message_of(error)}") from error


def check_weights(network, where):
    """Raise UsageError for a NaN or infinity among the weights of a network."""
    for name, weights in network.state_dict().items():
        if not weights.isfinite().all():
            raise UsageError(f"{where}: NaN or infinity in {name}; use an earlier checkpoint")


def write(path, content):
    """Write bytes, or something for torch.save, to a temporary file that is flushed to the disk and
    renamed: a kill or a full disk leaves the old file. Raises RunError."""
    temporary = path.with_name(".partial")  # one name: the next write replaces what a kill left
    try:
        with temporary.open("wb") as file:
            file.write(content) if isinstance(content, bytes) else torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        # torch.save reports something else after the disk's own error
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise RunError(f"{path} could not be written: {cause}") from error


class Run:
    """A run's folder, which only this process writes to, with its event file and checkpoints.

    Attributes:
        folder: runs/<env>__<goal>__<script>__<seed>__<time>/.
        step, rollout: environment steps and rollouts so far; the script counts them.
        stopped: the signal that asked to stop after this rollout, or 0.
    """

    def __init__(self, args):
        from torch.utils.tensorboard import SummaryWriter  # slow to import: not before --help

        self.args, self.step, self.rollout, self.stopped = args, 0, 0, 0
        self.look = ""  # how pictures are drawn
        self.best, self.recent = {}, []  # best.pt's content, and the latest mean rewards
        self.to_save = {}  # the learner between two rollouts, which is saved at a failure
        self.saved_step, self.began, self.first_step = -1, time.perf_counter(), 0
        self.logged, self.rollout_s = self.began, 0.0  # time of last log, seconds of last rollout
        self.judged = False  # whether a success rate was logged
        try:
            start = Path(args.resume or "")  # a run's folder, or a checkpoint for a new run
            self.resumed = bool(args.resume) and not start.is_file()
            self.restored = load_checkpoint(start) if start.is_file() else {}
            self.folder = start if self.resumed else self._new_folder()
            if not self.resumed:
                sys.excepthook = self._failed  # removes the folder if the start is refused
            self._lock()
            saved = {"script": os.path.abspath(sys.argv[0])} | vars(args)
            if self.resumed:
                self.restored = self._newest_checkpoint()
                self.step = self.first_step = self.restored["global_step"]
                saved["resume"] = saved_flags(self.folder).get("resume")  # as when the run began
            (self.folder / "checkpoints").mkdir(exist_ok=True)
            write(self.folder / "args.json", json.dumps(saved, indent=2).encode())
            if args.track:
                self._track()
            self.writer = SummaryWriter(self.folder, purge_step=self.step + 1)
            rows = "\n".join(f"|{name}|{value}|" for name, value in vars(args).items())
            self.writer.add_text("hyperparameters", f"|flag|value|\n|-|-|\n{rows}")
            panels = {title: ["Multiline", tags] for title, tags in CURVES.items()}
            self.writer.add_custom_scalars({"the run": panels})
        except OSError as error:
            raise RunError(f"no run can be written to {args.runs_dir}: {error}") from error
        sys.excepthook, threading.excepthook = self._failed, thread_failed
        on_stop_signals(self._stop)
        say(f"run folder {self.folder}", f"curves: tensorboard --logdir {args.runs_dir}")

    def _new_folder(self):
        """Make runs/<env>__<goal>__<script>__<seed>__<time>, with _2, .. appended if that is taken.
        The goal is a few words of the prompt, without those of the baseline."""
        args = self.args
        files = *args.target_image, args.reward_head
        goal = (*args.target_prompt, *(Path(x).stem for x in files if x), "")[0]
        for words in args.baseline_prompt:
            goal = goal.removeprefix(words)
        goal = re.sub(r"\W+", "_", goal)[:40].strip("_") if args.reward == "clip" else args.reward
        parts = args.env_id, goal, Path(sys.argv[0]).stem, args.seed, int(time.time())
        name = "__".join(map(str, parts))
        for suffix in ("", *(f"_{i}" for i in range(2, 1000))):
            folder = Path(self.args.runs_dir) / re.sub(r"[^\w.-]", "_", name + suffix)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder

    def _lock(self):
        """Lock the folder for as long as this process lives. Raises UsageError."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            lock = os.open(self.folder / "lock", flags, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is writing to {self.folder}") from None
        except OSError as error:
            warn(f"{self.folder} cannot be locked ({error}); do not resume it until this run ends")

    def _newest_checkpoint(self):
        """Load the newest intact checkpoint; damaged ones are renamed."""
        for path in checkpoints(self.folder).values():
            try:
                return load_checkpoint(path)
            except UsageError as error:
                path.replace(f"{path}.damaged")
                warn(f"{error}; it is now {path.name}.damaged, and the one before it is used")
        raise UsageError(f"--resume {self.folder}: it has no intact checkpoints/step_<n>.pt")

    def _track(self):
        try:
            import wandb
        except ImportError as error:
            raise UsageError('--track needs Weights & Biases: pip install ".[track]"') from error
        names = {"name": self.folder.name, "id": self.folder.name, "dir": self.folder}
        try:  # "allow": a resumed run continues its curve
            wandb.init(sync_tensorboard=True, config=vars(self.args), resume="allow", **names)
        except wandb.errors.Error as error:  # no key, no network
            problem = f"--track: {message_of(error)}"
            raise UsageError(f"{problem} Or set WANDB_MODE=offline") from error

    def restore(self, parts, look=""):
        """With --resume, restore {name: module, optimiser, buffer or tensor} from the checkpoint; a
        checkpoint of another run restores only modules. Optimiser settings (lr, fused, capturable)
        are not restored: they come from this run. `look` says how pictures are drawn; raises
        UsageError if they were drawn differently and the reward depends on them."""
        self.look, self.to_save = look, parts
        restored, self.restored = self.restored, {}  # a checkpoint keeps its file mapped
        if not restored:
            return
        if not self.resumed:
            module = torch.nn.Module
            parts = {name: part for name, part in parts.items() if isinstance(part, module)}
        elif self.args.reward != "ground-truth" and look != restored.get("look", look):
            were = f"the run's pictures were drawn by {restored['look']}, and now {look} draws them"
            raise UsageError(f"{were}: add --renderer {restored['look']}")
        try:
            for name, part in parts.items():
                state = restored[name]
                if isinstance(part, torch.Tensor):
                    part.data.copy_(state)
                    continue
                if "param_groups" in state:
                    state = state | {"param_groups": part.state_dict()["param_groups"]}
                part.load_state_dict(state)
                if isinstance(part, torch.nn.Module):
                    check_weights(part, self.args.resume)
            if self.resumed:
                self.rollout, self.recent = restored["rollout"], [*map(float, restored["recent"])]
                self.best = copy.deepcopy(dict(restored["best"]))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            problem = f"it has no {error}" if isinstance(error, KeyError) else message_of(error)
            raise UsageError(
                f"the checkpoint does not fit these flags or networks: {problem}"
            ) from error
        if not self.resumed:
            return say(f"this run starts with the networks of {self.args.resume}; all else is new")
        if self.best:  # the file may be from a later rollout
            write(self.folder / "checkpoints/best.pt", self.best)
        self.saved_step = self.step

    def due(self, every, start, end):
        """Return whether a multiple of `every` steps, or the end of the run, lies in (start, end].
        If `every` is 0, return False."""
        last = end >= self.args.total_timesteps
        return every > 0 and (last or end // every > start // every)

    def log(self, scalars):
        """Write {tag: value} to the event file, and print as many charts as fit on one line of the
        console. Raises RunError for a NaN or infinity."""
        for tag, value in scalars.items():
            if not math.isfinite(value):
                raise RunError(f"{tag} is {value} after {self.step} steps")
        total = f"{self.args.total_timesteps:,}"
        steps = f"step {self.step:,}/{total}".ljust(2 * len(total) + 6)
        left = max(0, self.args.total_timesteps - self.step) / self.speed
        line = f"{steps}  left {datetime.timedelta(seconds=round(left))}"
        for tag, value in scalars.items():  # padded, so that every line has the same columns
            word = f"  {tag.removeprefix('charts/')} {value:<7.4g}"
            if tag.startswith("charts/") and len(line + word) <= LINE:
                line += word
        say(line.rstrip())
        self.rollout_s = time.perf_counter() - self.logged
        self.logged = time.perf_counter()
        self.judged = "charts/success_rate" in scalars
        with contextlib.suppress(OSError):  # if the disk is full, a checkpoint will say so
            for tag, value in scalars.items():
                self.writer.add_scalar(tag, value, self.step)

    @property
    def speed(self):
        """Environment steps per second since this process began, everything included."""
        return (self.step - self.first_step) / (time.perf_counter() - self.began)

    def check_finite(self, seeds, first=0, **arrays):
        """Raise RunError for a NaN or infinity in arrays [T, N, ...] of episodes that began with
        these seeds [N]. Row t belongs to the state `first` + t steps after the reset."""
        for name, array in arrays.items():
            wrong = np.argwhere(~np.isfinite(array))
            if len(wrong):
                t, n = wrong[0][:2]
                when = f"after step {first + t} of the episode with seed {seeds[n]}"
                raise RunError(f"{name} of environment {n} is not finite {when}: {array[t, n]}")

    def keep_best(self, reward, **networks):
        """Save checkpoints/best.pt: the networks after the BEST_WINDOW rollouts in a row with the
        highest mean reward so far. Before there are that many rollouts, it holds the newest
        networks: the mean of fewer may be high by luck."""
        self.recent = [*self.recent, float(reward)][-BEST_WINDOW:]
        count, mean = len(self.recent), sum(self.recent) / len(self.recent)
        if not self.best or count > self.best.get("rollouts", count) or mean >= self.best["reward"]:
            state = {name: network.state_dict() for name, network in networks.items()}
            about = {"global_step": self.step, "reward": mean, "rollouts": count}
            self.best = copy.deepcopy(state) | about
            write(self.folder / "checkpoints/best.pt", self.best)

    def save(self, parts):
        """Save all that --resume needs as checkpoints/step_<n>.pt, unless this step is saved; only
        the newest two are kept. Raises RunError."""
        if self.step == self.saved_step:
            return
        state = {"global_step": self.step, "rollout": self.rollout}
        state |= {"best": self.best, "recent": self.recent, "look": self.look}
        for name, part in parts.items():
            state[name] = part.detach() if isinstance(part, torch.Tensor) else part.state_dict()
        write(self.folder / f"checkpoints/step_{self.step}.pt", state)
        self.saved_step = self.step
        for old in list(checkpoints(self.folder).values())[2:]:
            old.unlink(missing_ok=True)

    def video(self, frames, fps, draw=None):
        """Write frames [T, H, W, 3] uint8, or those that `draw` makes from states, as
        videos/step_<n>.mp4, five frames as one .png, and a small GIF for TensorBoard. `fps` None
        means 30 frames a second. A failure only prints a warning."""
        path, fps = self.folder / f"videos/step_{self.step}.mp4", fps or 30
        try:
            frames = draw(frames) if draw else frames
            egl_render.write_video(path, frames, fps)
            moments = frames[np.linspace(0, len(frames) - 1, 5).astype(int)]
            sheet = Image.fromarray(np.concatenate(list(moments), 1)).quantize(128)
            sheet.save(path.with_suffix(".png"))
            # a third of a megabyte each, so that ten million steps take less than 100 MB
            every, thin = -(-len(frames) // 20), -(-frames.shape[1] // 80)
            gif = frames[::every, ::thin, ::thin]
            egl_render.add_video(self.writer, "videos/rollout", gif, self.step, fps / every)
        except Exception as error:  # whatever an encoder raises
            warn(f"{path} could not be written: {message_of(error)}; the run continues without it")

    def _stop(self, number, _):
        if self.stopped == number == signal.SIGINT:
            end_now(number, _)
        self.stopped = number
        with contextlib.suppress(OSError):
            wait = f", in about {self.rollout_s:.0f} s" if self.rollout_s else ""
            line = f"\nstopping after this rollout{wait}; Ctrl-C once more stops now\n"
            os.write(2, line.encode())

    def _command(self, script, *words):
        """Return a command line, with the flags that name the user's own code."""
        return " ".join([shlex.join(["python", script, *words]), *own_code(self.args)])

    def _how_to_resume(self):
        command = self._command(sys.argv[0], "--resume", str(self.folder))
        saved = next(iter(checkpoints(self.folder).values()), None)
        return f"saved: {saved.name}; resume with: {command}" if saved else "nothing is saved"

    def _failed(self, kind, error, trace):
        """sys.excepthook of a run: save the learner as it was after the last rollout, and say what
        went wrong and how to resume. A start that is refused leaves no folder of its own."""
        if issubclass(kind, UsageError) and not (self.resumed or self.rollout):
            shutil.rmtree(self.folder, ignore_errors=True)
            excepthook(kind, error, trace)
        if self.to_save and self.rollout:
            with contextlib.suppress(RunError):
                self.save(self.to_save)
        excepthook(kind, error, trace, f"; {self._how_to_resume()}")

    def close(self):
        """Close the event file; say where things are. After a signal, exit with its code."""
        with contextlib.suppress(OSError):
            self.writer.close()
        say(f"videos and checkpoints are in {self.folder}")
        if self.judged:
            best = (self.folder / "checkpoints/best.pt").exists()
            words = [] if best else ["--checkpoint", str(self.step)]
            if Path(sys.argv[0]).name not in ("sac_clip_humanoid.py", "dqn_clip_classic.py"):
                words += ["--script", sys.argv[0]]
            command = self._command("eval_epic.py", "success", "--run", str(self.folder), *words)
            say(f"judge it: {command}")
        if self.stopped and self.step < self.args.total_timesteps:
            say(f"stopped; {self._how_to_resume()}")
            sys.exit(128 + self.stopped)
