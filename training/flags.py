"""What both scripts' command lines have in common: a run's flags, how they are read, checked, kept
in args.json and read again by --resume."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch.multiprocessing as mp

import egl_render
from clip_reward import STARTING, RunError
from egl_render import Count, UsageError


@dataclass
class RunArgs:
    """The flags that are about a run as such; the scripts' Args begin with them."""

    exp_name: str = Path(sys.argv[0]).stem
    """the name of this experiment"""
    seed: Count = 1
    """seed of everything: networks, environments, exploration, replay"""
    torch_deterministic: bool = True
    """use deterministic algorithms on the GPU as well"""
    cuda: bool = True
    """learn on the GPU if there is one"""
    compile: bool = False
    """updates by torch.compile, and on the GPU as one CUDA graph (wants a C++ compiler)"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline needs no account)"""
    wandb_project_name: str = "clip-reward"
    """the wandb project"""
    wandb_entity: str | None = None
    """the wandb team, default: your own account"""
    runs_dir: str = "runs"
    """the folder that gets a folder for this run"""
    checkpoint_freq: Count = 128_000
    """steps between checkpoints, of which the end of the run always has one; SIGUSR1 makes one more
    after the rollout"""
    keep_checkpoints: Count = 2
    """how many of them stay beside best.pt, each with the whole replay buffer; 0: all"""
    video_freq: Count = 128_000
    """steps between videos, and one at the end; 0: none"""
    judge: str | None = None
    """draw charts/success_rate by this judge of states, for you to look at and never as a reward: a
    task of evaluation/judges.py, or FILE.py:FUNCTION (states [B, S] -> [B] bool); default: the
    task with this prompt, if there is one"""
    resume: str | None = None
    """folder of the run to go on with, as it was started; flags beside it that do not change the
    experiment are accepted, such as a larger --total-timesteps. latest: the newest run in
    --runs-dir that was started with the same flags, or a new one if there is none"""

    def check(self):
        """Raise UsageError for flags out of their bounds, for what cannot take effect, for a
        --runs-dir without access."""
        egl_render.check_bounds(type(self), vars(self))
        rollout = self.num_envs * self.episode_length
        if not 0 < len(self.exp_name.encode()) <= 100:
            raise UsageError(f"--exp-name {self.exp_name[:20]!r}: not of 1 to 100 letters")
        if self.render.camera_azimuth and self.env_id in egl_render.CLASSIC_STATE_SIZES:
            raise UsageError(f"--camera-azimuth: {self.env_id} has no camera")
        azimuths = self.render.camera_azimuth
        if len({angle % 360 for angle in azimuths}) < len(azimuths):
            raise UsageError(f"--camera-azimuth {azimuths}: one camera is named twice")
        if self.reward.view_reduction == "min" and self.render.views < 2:
            raise UsageError("--view-reduction min: there is one camera; see --camera-azimuth")
        if self.episode_length > self.total_timesteps:
            which = f"longer than the run, --total-timesteps {self.total_timesteps}"
            raise UsageError(f"--episode-length {self.episode_length} is {which}")
        if self.learning_starts > max(rollout, self.total_timesteps):
            which = f"beyond --total-timesteps {self.total_timesteps}: nothing would be learned"
            raise UsageError(f"--learning-starts {self.learning_starts} is {which}")
        if self.buffer_size < rollout:
            raise UsageError(f"--buffer-size {self.buffer_size} is less than a rollout, {rollout}")
        if self.track and not importlib.util.find_spec("wandb"):
            raise UsageError('--track needs wandb: pip install "clip-reward[track]"')
        try:
            os.makedirs(self.runs_dir, exist_ok=True)
            tempfile.TemporaryFile(dir=self.runs_dir).close()
        except OSError as error:
            raise UsageError(f"--runs-dir {self.runs_dir}: {error.strerror}") from error

    def check_memory(self, row):
        """Raise UsageError for sizes that fit in no memory of this machine, before anything is
        allocated. `row` is how many numbers a transition has."""
        width, rollout = self.hidden_size, self.num_envs * self.episode_length
        numbers = {  # at least so many
            "buffer_size": row * min(self.buffer_size, self.total_timesteps + rollout),
            "episode_length": row * rollout,
            "hidden_size": 8 * width * (width + row),  # networks, targets, Adam's two averages
            "batch_size": self.batch_size * (row + 4 * width),
            "render_size": self.reward.clip_batch_size * self.render.render_size**2,
        }
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name = max(numbers, key=numbers.get)
        if (needed := 4 * sum(numbers.values())) > there:
            value = flags_of(self)[name]
            sizes = f"at least {needed / 1e9:,.0f} GB, and this machine has {there / 1e9:.0f}"
            raise UsageError(f"--{name.replace('_', '-')} {value}: all sizes together need {sizes}")


# What flags beside --resume may change: how long, where and how often, but not what is learned
# (with --total-timesteps DQN's schedules of --anneal-lr and --exploration-fraction get longer).
RESUME_MAY_CHANGE = set(
    "total_timesteps checkpoint_freq keep_checkpoints video_freq reward_devices clip_batch_size "
    "clip_cache_dir worker_timeout allow_slow cuda compile track judge runs_dir resume".split()
)


COMMANDS = {  # of training/launch.py
    "sac_clip_humanoid.py": "clip-reward-sac",
    "dqn_clip_classic.py": "clip-reward-dqn",
    "eval_epic.py": "clip-reward-eval",
}


def typed(script):
    """What somebody types to start a script here: its command if it was installed by pip, else the
    Python that runs this and the script's path."""
    here, script, python = Path(__file__).resolve().parents[1], Path(script), Path(sys.executable)
    if "site-packages" in here.parts and script.resolve().parent == here:
        return COMMANDS[script.name]
    if (found := shutil.which("python")) and Path(found).parent == python.parent:
        python = Path("python")  # of the virtual environment that is active
    paths = (
        x.relative_to(Path.cwd()) if x.is_relative_to(Path.cwd()) else x for x in (python, script)
    )
    return " ".join(shlex.quote(str(path)) for path in paths)


def flags_of(args):
    """All flags of a dataclass, those of nested groups among them: {name: value}."""
    values = {}
    for name, value in vars(args).items():
        values |= flags_of(value) if dataclasses.is_dataclass(value) else {name: value}
    return values


def experiment_of(args):
    """Those of `flags_of` that say what is learned, which --resume may not change."""
    return {x: y for x, y in flags_of(args).items() if x not in RESUME_MAY_CHANGE}


def from_flags(kind, values):
    """The dataclass `kind` from what `flags_of` gave; what is missing gets its default."""
    known = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default_factory):
            known[field.name] = from_flags(field.default_factory, values)
        elif field.name in values:
            known[field.name] = values[field.name]
    return kind(**known)


def saved_flags(run_dir):
    """What args.json of a run says: {name: value}, and "script", what was started. Raises
    UsageError for no run's folder or a damaged file."""
    path = Path(run_dir) / "args.json"
    try:
        saved = json.loads(path.read_text()).items()
    except OSError as error:
        raise UsageError(f"{run_dir}: not the folder of a run, it has no args.json") from error
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    return {name: tuple(x) if isinstance(x, list) else x for name, x in saved}


def load_args(run_dir, Args):
    """The Args that a run was started with. Raises UsageError as `saved_flags`, and for another
    script's."""
    values = saved_flags(run_dir)
    values.pop("script", None)
    if foreign := ", ".join(sorted(values.keys() - flags_of(Args()).keys())):
        raise UsageError(f"{run_dir}: a run of another script or version; it has {foreign}")
    return from_flags(Args, values)


def latest_run(args):
    """Folder of the newest run in --runs-dir with a checkpoint that differs in no flag but those
    that --resume may change, or None."""
    found = Path(args.runs_dir).glob("*/checkpoints/step_*.pt")
    folders = [path.parents[1] for path in sorted(found, key=os.path.getmtime, reverse=True)]
    for folder in dict.fromkeys(folders):
        with contextlib.suppress(UsageError):  # another script's
            if not changed_flags(flags_of(load_args(folder, type(args))), args):
                return str(folder)
    return None


def changed_flags(was, args):
    """Names of the flags that differ from {name: value} though --resume may not change them."""
    now = flags_of(args)
    return [x for x in was if was[x] != now.get(x) and x not in RESUME_MAY_CHANGE]


@contextlib.contextmanager
def errors_in_one_line():
    """In one line on stderr: what tyro says in a box of a command line that is wrong."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            yield
    except SystemExit:
        first, *_ = re.split(r"\n[├|][─-]+[┤|]\n", box.getvalue())
        words = " ".join(re.sub(r"[│|╭╮╰╯─]", " ", first).split())
        if words:
            print(f"error: {words}", file=sys.stderr)
        raise


def excepthook(kind, error, trace):
    """sys.excepthook: a UsageError ends the program with one line and exit code 2, a RunError with
    1."""
    if issubclass(kind, (UsageError, RunError)):
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if kind is UsageError else 1)
    sys.__excepthook__(kind, error, trace)


def end_at_once(number, _):
    """End without a word on a signal, while there is nothing to save. By no exception: a module
    that is just being imported would make another one of it."""
    with STARTING:
        for process in mp.active_children():
            process.kill()
        os._exit(128 + number)


def parse_args(Args, description):
    """The command line, with --resume on top of the run's own flags. From here on errors are one
    line (see `excepthook`), and Ctrl-C and SIGTERM end the program without a word."""
    import tyro

    sys.excepthook = excepthook
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_at_once)
    options = {"description": description, "config": (tyro.conf.OmitArgPrefixes,)}
    with errors_in_one_line():
        args = tyro.cli(Args, **options)
    if args.resume == "latest":
        args.resume = latest_run(args)
        print(f"--resume latest: {args.resume or 'no such run yet, a new one'}")
    if (resume := args.resume) is None:
        return args
    saved = load_args(resume, Args)
    if not checkpoints(resume):
        raise UsageError(f"--resume {resume}: it has no checkpoints/step_<n>.pt")
    args = tyro.cli(Args, default=saved, **options)
    args.resume = resume
    for name in changed_flags(flags_of(saved), args):
        flag, was = name.replace("_", "-"), flags_of(saved)[name]
        raise UsageError(f"--{flag} was {was!r} in the run to resume; drop it")
    return args


def checkpoints(run_dir):
    """A run's checkpoints but for best.pt, the newest first: {step: path}."""
    paths = Path(run_dir).glob("checkpoints/step_*.pt")
    found = {int(path.stem[5:]): path for path in paths if path.stem[5:].isdecimal()}
    return dict(sorted(found.items(), reverse=True))
