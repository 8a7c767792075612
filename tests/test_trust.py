"""A bad week: two runs at once, numbers that are none, full disks, damaged files, deaths.
tests/chaos.py does such things at random moments, for as long as one likes."""

import contextlib
import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import chaos
import helpers
import numpy as np
import pytest
import torch
from helpers import KNEELING, ROOT, TINY, checkpoint, equal, only_run, run, wait_until
from PIL import Image

import clip_reward
import dqn_clip_classic as dqn
import sac_clip_humanoid as sac
from training.flags import checkpoints, load_args
from training.run import load_checkpoint

SMALL = "--num-envs 2 --episode-length 12 --hidden-size 32 --batch-size 16 --gradient-steps 6"
SMALL = f"{SMALL} --learning-starts 24 --checkpoint-freq 24 --video-freq 0".split()
TRUTH = [*SMALL, "--reward", "ground-truth"]
CLIP = [*SMALL, "--target-prompt", KNEELING, "--clip-model", TINY, "--render-size", 64]
CHEETAH = {sac: ["--env-id", "HalfCheetah-v5"], dqn: []}  # environments in processes
BOTH = pytest.mark.parametrize("script", [sac, dqn], ids=["sac", "dqn"])


@contextlib.contextmanager
def started(*words, patch="", **changes):
    """A script that runs as a user's does, after the Python `patch`; whatever it is, it is over in
    the end."""
    if patch:
        main = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
        words = ("-c", f"{textwrap.dedent(patch)}\n{main}", *words)
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        **{"env": helpers.environment(**changes), "start_new_session": True},
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def reaches(process, step):
    assert any(line.startswith(f"step {step:,} ") for line in process.stdout)


def ended(process, code):
    """-> its only line on stderr."""
    _, printed = process.communicate(timeout=120)
    lines = [line for line in printed.splitlines() if line.strip()]
    assert process.returncode == code, printed
    assert len(lines) == 1, printed
    return lines[0]


def finite(state):
    """Whether all tensors in a checkpoint are numbers."""
    if isinstance(state, dict):
        return all(map(finite, state.values()))
    if isinstance(state, (list, tuple)):
        return all(map(finite, state))
    return not isinstance(state, torch.Tensor) or bool(state.double().isfinite().all())


def test_random_deaths_in_short(tmp_path):
    """The longest, hence the first: with two processes none waits for it in the end."""
    line = chaos.Chaos("dqn", 1, ["rename", "full", "cut"], tmp_path).run()
    assert line.startswith("dqn: 3 deaths, equal to the bit")


# ------------------------------------------------------------------------------ one writer


@BOTH
def test_two_runs_in_one_second_have_a_folder_each(script, tmp_path):
    words = [script.__file__, *CHEETAH[script], *TRUTH, "--total-timesteps", 48]
    clock = "import time; time.time = lambda: 1.7e9"
    with started(*words, "--runs-dir", tmp_path, patch=clock) as one:
        with started(*words, "--runs-dir", tmp_path, patch=clock) as two:
            assert [one.wait(120), two.wait(120)] == [0, 0]
    first, second = sorted(tmp_path.iterdir())
    assert second.name == f"{first.name}_2"
    assert equal(checkpoint(first), checkpoint(second))
    assert all(len(list(folder.glob("events*"))) == 1 for folder in (first, second))


@BOTH
def test_a_run_that_lives_cannot_be_resumed(script, tmp_path):
    words = [script.__file__, *CHEETAH[script], *TRUTH, "--total-timesteps", 10**6]
    with started(*words, "--runs-dir", tmp_path) as alive:
        reaches(alive, 48)
        folder = only_run(tmp_path)
        before = (folder / "args.json").read_bytes()
        with started(script.__file__, "--resume", folder, "--total-timesteps", 10**7) as second:
            line = ended(second, 2)
        assert re.search(rf"process {alive.pid} on \S+ is writing to it", line)
        assert (folder / "args.json").read_bytes() == before
        alive.kill()
        alive.wait()
        done = max(checkpoints(folder))
        with started(script.__file__, "--resume", folder, "--total-timesteps", done + 24) as second:
            assert second.wait(120) == 0, "its lock has died with it"


# ------------------------------------------------------------------------------ not a number

BROKEN = """
    import gymnasium as gym
    import numpy as np

    class Broken(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (3,))
        action_space = gym.spaces.Box(-1, 1, (2,))

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            self.age = 0
            return np.zeros(3, np.float32), {}

        def step(self, action):
            self.age += 1
            observation, reward = np.zeros(3, np.float32), 0.5
            FAULT
            return observation, reward, False, False, {}

    gym.register("Broken-v0", Broken)
"""


@pytest.mark.parametrize(
    "fault, message",
    [
        ("observation[1] = np.nan * (self.np_random.random() < 2 and self.age == 7)", "[1] of"),
        ("reward = -np.inf if self.age == 9 else 0.5", "reward of environment 0 is -inf, 8 steps"),
        ("reward = 1e30", "losses/qf1_loss is inf after 24 steps"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
    ids=["observation", "reward", "loss", "raises"],
)
def test_what_an_environment_gives_that_is_no_number(fault, message, tmp_path):
    if "nan" in fault:
        fault = "observation[1] = np.nan if self.age == 7 else 0"
        message = "observation[1] of environment 0 is nan, 7 steps after it was reset with seed "
        message += str(np.random.SeedSequence((1, 0)).generate_state(3)[0])
    source = textwrap.dedent(BROKEN).replace("FAULT", fault)
    (tmp_path / "broken_task.py").write_text(source)
    words = ["--env-id", "broken_task:Broken-v0", "--total-timesteps", 96, "--runs-dir"]
    path = os.pathsep.join([str(tmp_path), helpers.environment()["PYTHONPATH"]])
    command = [sac.__file__, *TRUTH, *words, tmp_path / "runs"]
    with started(*command, PYTHONPATH=path) as process:
        _, printed = process.communicate(timeout=120)
    assert process.returncode == 1
    line = printed.splitlines()[-1]
    assert line.startswith("error: ") and message in line, printed
    if "division" in message:  # where the user's own environment is wrong
        assert "broken_task.py" in printed and "1 / 0" in printed
    else:
        assert "Traceback" not in printed
    folder = only_run(tmp_path / "runs")
    saved = checkpoint(folder)
    assert f"step_{saved['global_step']}.pt" in line and "--resume" in line
    assert finite(saved) and saved["replay"]["count"] == len(saved["history"]) == 0


@BOTH
def test_a_reward_that_is_no_number_is_kept_with_its_picture(script, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(ROOT / "tiny_clip", model, ignore=shutil.ignore_patterns("*.py", "__*"))
    weights = load_file(model / "open_clip_model.safetensors")
    weights["visual.conv1.weight"].fill_(torch.nan)
    save_file(weights, model / "open_clip_model.safetensors")
    words = [script.__file__, *CLIP, "--clip-model", f"local-dir:{model}"]
    words += ["--reward-devices", "cpu", "--total-timesteps", 48, "--runs-dir", tmp_path / "runs"]
    with started(*words) as process:
        line = ended(process, 1)
    assert "CLIP's reward of scene 0 of this rollout is nan; try --clip-precision" in line
    folder = only_run(tmp_path / "runs")
    (scene,) = folder.glob("not_finite_*.npz")
    assert str(scene) in line
    states = np.load(scene)["states"]
    args = load_args(folder, script.Args)
    expected = script.make_renderer(args).render(states[None])[0]
    np.testing.assert_array_equal(np.asarray(Image.open(scene.with_suffix(".png"))), expected)
    assert checkpoint(folder)["global_step"] == 0


# ------------------------------------------------------------------------------ full disks


def limit_files(pid, size):
    """From now on the process cannot write beyond `size` bytes of a file."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


def leftovers(folder):
    return [*folder.rglob("*.tmp"), *folder.rglob(".*")]


@BOTH
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_last(script, tmp_path):
    words = [script.__file__, *CHEETAH[script], *TRUTH, "--total-timesteps", 10**6]
    words += ["--keep-checkpoints", 0, "--runs-dir", tmp_path]
    with started(*words) as process:
        reaches(process, 96)
        folder = only_run(tmp_path)
        limit_files(process.pid, 20_000)
        _, printed = process.communicate(timeout=120)
    lines = printed.splitlines()
    assert process.returncode == 1 and "Traceback" not in printed and len(lines) <= 2, printed
    assert re.search(r"error: .*step_\d+\.pt could not be written: .*File too large", lines[-1])
    last = max(checkpoints(folder))
    assert f"saved: step_{last}.pt" in lines[-1]
    assert checkpoint(folder)["global_step"] == last and not leftovers(folder)
    run(script.__file__, "--resume", folder, "--total-timesteps", last + 24)


@BOTH
def test_a_resume_without_room_loses_nothing(script, tmp_path):
    words = [script.__file__, *CHEETAH[script], *TRUTH, "--runs-dir", tmp_path]
    run(*words, "--total-timesteps", 48)
    folder = only_run(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*.[jp][st]*")}
    no_room = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    with started(script.__file__, "--resume", folder, patch=no_room) as process:
        assert "File too large" in ended(process, 1)
    assert {path: path.read_bytes() for path in before} == before and not leftovers(folder)
    with started(*words, "--total-timesteps", 48, patch=no_room) as process:
        assert "File too large" in ended(process, 1)
    assert only_run(tmp_path) == folder, "no folder of a run that never began"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_called_so_and_costs_no_more_than_a_video(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path])
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        words = [dqn.__file__, *CLIP, "--reward-devices", "cpu", "--checkpoint-freq", 2400]
        words += ["--video-freq", 24, "--total-timesteps", 10**6, "--runs-dir", tmp_path]
        with started(*words) as process:
            reaches(process, 48)
            folder = only_run(tmp_path)
            filler = tmp_path / "filler"
            with contextlib.suppress(OSError), filler.open("wb", 0) as file:
                while file.write(b"x" * 4096):
                    pass
            reaches(process, 240)  # it goes on, without videos
            process.send_signal(signal.SIGTERM)
            _, printed = process.communicate(timeout=120)
        assert process.returncode == 1
        assert printed.count("WARNING") == 1 and "Traceback" not in printed, printed
        assert re.search("could not be written: .*No space left on device", printed)
        assert printed.splitlines()[-1].endswith("nothing is saved")
        assert not leftovers(folder)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


# ------------------------------------------------------------------------------ damaged files


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def foreign(path):
    torch.save({"global_step": 96, "replay": {}}, path)


def empty(path):
    path.write_bytes(b"")


@BOTH
def test_a_damaged_checkpoint_falls_back_to_the_one_before(script, tmp_path):
    words = [script.__file__, *CHEETAH[script], *TRUTH, "--total-timesteps", 96, "--runs-dir"]
    run(*words, tmp_path / "whole")
    whole = only_run(tmp_path / "whole")
    assert [*checkpoints(whole)] == [96, 72]
    # both scripts read it in the same way, and SAC's environments start slowly
    for damage in (cut, flip, empty, foreign, Path.unlink)[(3 if script is sac else 0) :]:
        name = damage.__name__
        folder = shutil.copytree(whole, tmp_path / name)
        newest = folder / "checkpoints/step_96.pt"
        shutil.copy(newest, newest.with_name("step_96 (copy).pt"))
        damage(newest)
        (folder / "checkpoints/best.pt").write_bytes(b"broken")
        process = run(script.__file__, "--resume", folder)
        warnings = process.stderr.strip().splitlines()
        if damage != Path.unlink:
            (warning,) = warnings
            assert warning.startswith("WARNING: ") and str(newest) in warning, name
        assert "step 96 " in process.stdout and "step 72 " not in process.stdout
        assert equal(checkpoint(folder), checkpoint(whole)), name
        assert equal(checkpoint(folder, "best"), checkpoint(whole, "best")), name
    for path in checkpoints(folder).values():
        cut(path)
    with started(script.__file__, "--resume", folder) as process:
        _, printed = process.communicate(timeout=120)
    assert process.returncode == 2 and printed.count("WARNING") == 2
    assert printed.splitlines()[-1].endswith("no checkpoint in it is whole")


def test_no_code_is_run_from_a_checkpoint(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/owned",)

    torch.save({"global_step": 1, "it": Evil()}, tmp_path / "step_1.pt")
    with pytest.raises(clip_reward.UsageError, match="step_1.pt is damaged or no checkpoint"):
        load_checkpoint(tmp_path / "step_1.pt")
    assert not (tmp_path / "owned").exists()


# ------------------------------------------------------------------------------ deaths


def environments(pid):
    """Processes of environments, which the forkserver has started."""
    (server,) = [
        child
        for child in helpers.descendants(pid)
        if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()
        and f"\nPPid:\t{pid}\n" in Path(f"/proc/{child}/status").read_text()
    ]
    return helpers.descendants(server)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_environment_that_dies_or_stops_ends_the_run_in_one_line(number, tmp_path):
    words = [sac.__file__, *CHEETAH[sac], *TRUTH, "--total-timesteps", 10**6]
    with started(*words, "--worker-timeout", 3, "--runs-dir", tmp_path) as process:
        reaches(process, 48)
        children = helpers.descendants(process.pid)
        os.kill(environments(process.pid)[0], number)
        line = ended(process, 1)
    if number == signal.SIGKILL:
        assert re.match(r"error: the process of environment \d was killed .*exit code -9", line)
    else:
        assert "an environment hangs (--worker-timeout): " in line and "after 3 second" in line
    folder = only_run(tmp_path)
    assert f"saved: step_{checkpoint(folder)['global_step']}.pt" in line
    assert wait_until(lambda: helpers.gone(children), 2)
    done = checkpoint(folder)["global_step"] + 24
    run(sac.__file__, "--resume", folder, "--total-timesteps", done)


@BOTH
def test_a_killed_run_is_silent_and_a_signal_saves(script, tmp_path):
    words = [script.__file__, *CHEETAH[script], *TRUTH, "--total-timesteps", 10**6]
    with started(*words, "--checkpoint-freq", 10**6, "--runs-dir", tmp_path) as process:
        reaches(process, 48)
        folder = only_run(tmp_path)
        assert not checkpoints(folder)
        process.send_signal(signal.SIGUSR1)
        assert wait_until(lambda: checkpoints(folder), 20)
        reaches(process, max(checkpoints(folder)) + 24)
        children = helpers.descendants(process.pid)
        process.kill()
        assert process.communicate(timeout=20)[1].strip() == ""
        assert wait_until(lambda: helpers.gone(children), 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
@BOTH
def test_a_signal_during_the_start_is_quiet_and_leaves_no_folder(script, number, tmp_path):
    words = [script.__file__, *CHEETAH[script], *CLIP, "--total-timesteps", 10**6]
    words += ["--reward-devices", "cpu", "--runs-dir", tmp_path]
    for delay in (0.3, 1.5, 2.5, 3.5, 4.5)[:: 1 if script is sac else 2]:
        with started(*words) as process:
            time.sleep(delay)
            children = helpers.descendants(process.pid)
            os.killpg(process.pid, number)  # as a terminal does it
            output, printed = process.communicate(timeout=60)
            assert process.returncode in (-number, 128 + number), (delay, printed)
            stopping = "stopping after this rollout; Ctrl-C once more to stop now"
            assert printed.strip() in ("", stopping), (delay, printed)
            assert wait_until(functools.partial(helpers.gone, children), 2)
            assert output.count("step ") or not list(tmp_path.iterdir()), delay
        for path in tmp_path.iterdir():
            shutil.rmtree(path)


def test_track_without_a_key_is_one_line(tmp_path):
    words = [dqn.__file__, *TRUTH, "--total-timesteps", 48, "--track", "--runs-dir"]
    changes = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "online"}
    with started(*words, tmp_path / "runs", **changes) as process:
        assert ended(process, 2).startswith("error: --track: ")
    assert not list((tmp_path / "runs").iterdir())


def test_no_secret_is_written(tmp_path):
    secret = "0123456789abcdef" * 3
    words = [dqn.__file__, *TRUTH, "--total-timesteps", 48, "--track", "--runs-dir", tmp_path]
    words += ["--video-freq", 24]
    run(*words, WANDB_MODE="offline", WANDB_API_KEY=secret, HF_TOKEN=secret)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    kept = [path for path in files if "wandb" in str(path) and path.suffix == ".mp4"]
    assert len(kept) == 2, "videos in wandb's run"
    assert len(files) > 4 and not any(secret.encode() in path.read_bytes() for path in files)
