"""A bad week: two runs at once, NaN, full disks, damaged files, signals and deaths. tests/chaos.py
does such things at random moments, for as long as one likes."""

import contextlib
import functools
import json
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
from helpers import KNEELING, TINY, checkpoint, equal, only_run, run, wait_until

import clip_reward
import dqn_clip_classic as dqn
import sac_clip_humanoid as sac
from training.run import checkpoints, load_checkpoint

SMALL = "--num-envs 2 --episode-length 12 --batch-size 16 --gradient-steps 6"
SMALL = f"{SMALL} --learning-starts 24 --checkpoint-freq 24 --video-freq 0".split()
TRUTH = [*SMALL, "--reward", "ground-truth"]
CLIP = [*SMALL, "--target-prompt", KNEELING, "--clip-model", TINY, "--render-size", 64]
CHEETAH = {sac: ["--env-id", "HalfCheetah-v5"], dqn: []}  # environments in processes
SLOW = pytest.mark.slow
LONG = ["--total-timesteps", 10**6]


@contextlib.contextmanager
def started(*words, patch="", **changes):
    """A script that runs as a user's does, after the Python `patch`; whatever it is, it is over in
    the end."""
    if patch:
        main = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
        words = ("-c", f"{textwrap.dedent(patch)}\n{main}", *words)
    process = subprocess.Popen(
        [*helpers.HANGS_UP, sys.executable, *map(str, words)],
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
    """Read what it prints until it reports this step."""
    assert any(line.startswith(f"step {step:,}/") for line in process.stdout)


def ended(process, code):
    """-> its only line on stderr."""
    _, printed = process.communicate(timeout=120)
    lines = [line for line in printed.splitlines() if line.strip()]
    assert process.returncode == code, printed
    assert len(lines) == 1, printed
    return lines[0]


def refused(*words, **changes):
    """-> its only line on stderr, an error of the user."""
    with started(*words, **changes) as process:
        return ended(process, 2)


def finite(state):
    """Whether no tensor in a checkpoint has a NaN or infinity."""
    if isinstance(state, dict):
        return all(map(finite, state.values()))
    if isinstance(state, (list, tuple)):
        return all(map(finite, state))
    return not isinstance(state, torch.Tensor) or bool(state.double().isfinite().all())


@SLOW
def test_random_deaths_in_short(tmp_path):
    """Resumed each time, it is equal to the bit to the run that was left alone."""
    line = chaos.Chaos("dqn", 1, ["rename", "kill", "full", "worker"], tmp_path).run()
    assert line.startswith("dqn: 4 deaths, equal to the bit")


# ------------------------------------------------------------------------------ resuming


DONE_FLAGS = [*TRUTH, "--num-envs", 1, "--learning-starts", 12, "--checkpoint-freq", 12]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a run of DQN that has ended after 48 steps, for tests to copy. What
    training/run.py does is the same for both scripts."""
    runs_dir = tmp_path_factory.mktemp("done")
    run(dqn.__file__, *DONE_FLAGS, "--total-timesteps", 48, "--runs-dir", runs_dir)
    folder = only_run(runs_dir)
    assert [*checkpoints(folder)] == [48, 36], "the newest two stay"
    return folder


def edit(folder, **flags):
    """Change flags in a run's args.json."""
    path = folder / "args.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | flags))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("checkpoints/*.pt")}


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "run")
    newest = folder / "checkpoints/step_48.pt"
    shutil.copy(newest, newest.with_name("step_48 (copy).pt"))
    cut(newest)
    (folder / "checkpoints/best.pt").write_bytes(b"broken")
    process = run(dqn.__file__, "--resume", folder)
    assert "step 48/" in process.stdout and "step 36/" not in process.stdout
    (warning,) = process.stderr.strip().splitlines()
    assert warning.startswith("WARNING: ") and str(newest) in warning
    assert newest.with_name("step_48.pt.damaged").exists()
    assert equal(checkpoint(folder), checkpoint(done))
    assert equal(checkpoint(folder, "best"), checkpoint(done, "best"))
    for path in checkpoints(folder).values():
        cut(path)
    with started(dqn.__file__, "--resume", folder) as process:
        _, printed = process.communicate(timeout=120)
    assert process.returncode == 2 and printed.count("WARNING") == 2 and "Trace" not in printed
    assert "it has no intact checkpoints/step_<n>.pt" in printed.splitlines()[-1]


@pytest.mark.parametrize("damage", [cut, flip, empty, Path.unlink])
def test_every_damage_is_noticed(done, damage, tmp_path):
    path = tmp_path / "step_48.pt"
    shutil.copy(done / "checkpoints/step_48.pt", path)
    load_checkpoint(path)
    damage(path)
    with pytest.raises(clip_reward.UsageError, match="step_48.pt is damaged or not a checkpoint"):
        load_checkpoint(path)


def test_one_edited_flag_does_not_damage_the_checkpoints(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "run")
    flag, default = "layer_norm", dqn.Args().layer_norm
    edit(folder, **{flag: not default})
    line = refused(dqn.__file__, "--resume", folder, "--total-timesteps", 72)
    assert line.startswith("error: the checkpoint does not fit these flags")
    assert contents(folder) == contents(done)
    edit(folder, **{flag: default})
    run(dqn.__file__, "--resume", folder, "--total-timesteps", 60)
    assert max(checkpoints(folder)) == 60


def test_nothing_is_left_to_do_and_strange_things_lie_in_the_folder(done, tmp_path):
    """Fewer steps than were done, a folder notes.tmp, and a lock that is a link."""
    folder = shutil.copytree(done, tmp_path / "run")
    (folder / "notes.tmp").mkdir()
    (folder / "checkpoints/notes.tmp").mkdir()
    target = tmp_path / "precious"
    target.write_text("precious")
    (folder / "lock").unlink()
    (folder / "lock").symlink_to(target)
    process = run(dqn.__file__, "--resume", folder, "--total-timesteps", 24)
    assert "Traceback" not in process.stderr and len(process.stderr.splitlines()) <= 1
    assert target.read_text() == "precious" and "step 48" not in process.stdout
    for step, path in checkpoints(done).items():
        assert checkpoints(folder)[step].read_bytes() == path.read_bytes()


def test_code_that_only_args_json_names_is_not_run(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "run")
    own = tmp_path / "own.py"
    own.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(s): return s[:, 0] > -9e9\n")
    edit(folder, judge=f"{own}:f")
    line = refused(dqn.__file__, "--resume", folder, "--total-timesteps", 60)
    assert f"--judge {own}:f" in line and not (tmp_path / "ran").exists()
    edit(folder, judge=None, env_id="own:Task-v0")
    line = refused(dqn.__file__, "--resume", folder, PYTHONPATH=f"{tmp_path}:{helpers.ROOT}")
    assert "--env-id own:Task-v0" in line and not (tmp_path / "ran").exists()
    edit(folder, judge=f"{own}:f", env_id=json.loads((done / "args.json").read_text())["env_id"])
    run(dqn.__file__, "--resume", folder, "--total-timesteps", 60, "--judge", f"{own}:f")
    assert (tmp_path / "ran").exists()
    assert helpers.scalars(folder)[0]["charts/success_rate"][-1].value == 1


def test_latest_says_which_run_it_cannot_read(done, tmp_path):
    good, bad = (shutil.copytree(done, tmp_path / name) for name in ("good", "bad"))
    for path in (bad / "checkpoints").iterdir():
        path.touch()  # the newer one
    (bad / "args.json").write_text("{")
    words = [*DONE_FLAGS, "--total-timesteps", 60, "--runs-dir", tmp_path]
    words += ["--resume", "latest"]
    process = run(dqn.__file__, *words)
    (warning,) = process.stderr.strip().splitlines()
    assert warning.startswith("WARNING") and f"{bad}/args.json is damaged" in warning
    assert max(checkpoints(good)) == 60


def test_no_code_is_run_from_a_checkpoint(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/owned",)

    torch.save({"global_step": 1, "it": Evil()}, tmp_path / "step_1.pt")
    with pytest.raises(clip_reward.UsageError, match="step_1.pt is damaged or not a checkpoint"):
        load_checkpoint(tmp_path / "step_1.pt")
    assert not (tmp_path / "owned").exists()


# ------------------------------------------------------------------------------ one writer


def test_two_runs_in_one_second_have_a_folder_each(tmp_path):
    words = [dqn.__file__, *TRUTH, "--total-timesteps", 48]
    clock = "import time; time.time = lambda: 1.7e9"
    with started(*words, "--runs-dir", tmp_path, patch=clock) as one:
        with started(*words, "--runs-dir", tmp_path, patch=clock) as two:
            assert [one.wait(120), two.wait(120)] == [0, 0]
    first, second = sorted(tmp_path.iterdir())
    assert second.name == f"{first.name}_2"
    assert equal(checkpoint(first), checkpoint(second))
    assert all(len(list(folder.glob("events*"))) == 1 for folder in (first, second))


def test_a_run_that_lives_cannot_be_resumed(tmp_path):
    words = [dqn.__file__, *TRUTH, *LONG, "--runs-dir", tmp_path]
    with started(*words) as alive:
        reaches(alive, 48)
        folder = only_run(tmp_path)
        before = (folder / "args.json").read_bytes()
        line = refused(dqn.__file__, "--resume", folder, "--total-timesteps", 10**7)
        assert line == f"error: another process is writing to {folder}"
        assert (folder / "args.json").read_bytes() == before
        children = helpers.descendants(alive.pid)
        alive.kill()
        assert alive.communicate(timeout=20)[1].strip() == "", "it dies silently"
        assert wait_until(lambda: helpers.gone(children), 5)
        last = max(checkpoints(folder))
        with started(dqn.__file__, "--resume", folder, "--total-timesteps", last + 24) as second:
            assert second.wait(120) == 0, "its lock has died with it"


# ------------------------------------------------------------------------------ NaN

IMPATIENT = "from training import workers; workers.TIMEOUT = 3"
BROKEN = """
    import threading
    import time

    import gymnasium as gym
    import numpy as np

    class Odd(Exception):
        "What cannot be pickled."

        def __init__(self, one, two):
            super().__init__(one)
            self.lock = threading.Lock()

    class Broken(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (3,))
        action_space = gym.spaces.Box(-1, 1, (2,))
        episodes = -1

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            self.age, self.episodes = 0, self.episodes + 1
            RESET
            return np.zeros(3, np.float32), {}

        def step(self, action):
            self.age += 1
            observation, reward = np.zeros(3, np.float32), 0.5
            if self.episodes == 2:
                STEP
            return observation, reward, False, False, {}

    gym.register("Broken-v0", Broken)
"""
# of environment 0 in the third rollout
SEED = f"seed {np.random.SeedSequence((1, 2)).generate_state(3)[0]}"


@pytest.mark.parametrize(
    "step, reset, message",
    [
        (
            "observation[1] = np.nan if self.age == 7 else 0",
            "pass",
            f"observation of environment 0 is not finite after step 7 of the episode with {SEED}",
        ),
        pytest.param(
            "reward = -np.inf if self.age == 9 else 0.5",
            "pass",
            f"reward of environment 0 is not finite after step 9 of the episode with {SEED}: -inf",
            marks=SLOW,
        ),
        pytest.param("reward = 1e30", "pass", "losses/qf1_loss is inf after 72 steps", marks=SLOW),
        ("raise Odd(1, 2)", "pass", "Odd"),
        pytest.param("pass", "if self.episodes == 2: raise Odd(1, 2)", "Odd", marks=SLOW),
        pytest.param("time.sleep(1000)", "pass", "timed out after 3 second", marks=SLOW),
    ],
    ids=["observation", "reward", "loss", "raises", "reset raises", "hangs"],
)
def test_what_an_environment_may_do(step, reset, message, tmp_path):
    """Whatever it is, the run ends, says it, and leaves a good checkpoint and no process."""
    source = textwrap.dedent(BROKEN).replace("STEP", step).replace("RESET", reset)
    (tmp_path / "broken_task.py").write_text(source)
    words = ["--env-id", "broken_task:Broken-v0", "--total-timesteps", 96]
    path = os.pathsep.join([str(tmp_path), helpers.environment()["PYTHONPATH"]])
    command = [sac.__file__, *TRUTH, *words, "--runs-dir", tmp_path / "runs"]
    with started(*command, patch=IMPATIENT, PYTHONPATH=path) as process:
        reaches(process, 48)
        children = helpers.descendants(process.pid)
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 1 and wait_until(lambda: helpers.gone(children), 5)
    line = printed.splitlines()[-1]
    assert line.startswith("error: ") and "saved: step_48.pt; resume with: python " in line
    if "Odd" in message:  # where the user's own environment is wrong
        assert "broken_task.py" in printed and "raise Odd(1, 2)" in printed
    elif "timed" in message:
        assert message in line
    else:
        assert message in line and len(printed.splitlines()) == 1, printed
    saved = checkpoint(only_run(tmp_path / "runs"))
    assert finite(saved) and saved["replay"]["count"] == saved["rollout"] == 2


def test_a_reward_that_is_not_finite_names_its_environment(tmp_path):
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(helpers.ROOT / "tiny_clip", model, ignore=shutil.ignore_patterns("*.py", "__*"))
    weights = load_file(model / "open_clip_model.safetensors")
    weights["visual.conv1.weight"].fill_(torch.nan)
    save_file(weights, model / "open_clip_model.safetensors")
    words = [dqn.__file__, *CLIP, "--clip-model", f"local-dir:{model}"]
    words += ["--reward-devices", "cpu", "--total-timesteps", 48, "--runs-dir", tmp_path / "runs"]
    with started(*words) as process:
        line = ended(process, 1)
    seed = np.random.SeedSequence((1, 0)).generate_state(3)[0]
    assert "error: reward of environment 0 is not finite after step 1 of the episode" in line
    assert f"with seed {seed}: nan" in line and line.endswith("nothing is saved")


# ------------------------------------------------------------------------------ full disks


def leftovers(folder):
    return [*folder.rglob("*.tmp"), *folder.rglob(".*")]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_last(tmp_path):
    words = [dqn.__file__, *TRUTH, *LONG, "--runs-dir", tmp_path]
    with started(*words) as process:
        reaches(process, 96)
        folder = only_run(tmp_path)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
        _, printed = process.communicate(timeout=120)
    lines = printed.splitlines()
    assert process.returncode == 1 and "Traceback" not in printed and len(lines) <= 2, printed
    assert re.search(r"error: .*step_\d+\.pt could not be written: .*File too large", lines[-1])
    last = max(checkpoints(folder))
    assert f"saved: step_{last}.pt" in lines[-1]
    assert checkpoint(folder)["global_step"] == last and not leftovers(folder)
    run(dqn.__file__, "--resume", folder, "--total-timesteps", last + 24)


@SLOW
def test_events_that_cannot_be_written_do_not_end_the_run(tmp_path):
    """TensorBoard writes them in a thread of its own, which dies of it."""
    script = tmp_path / "small.py"  # a best.pt of 8000 bytes
    text = Path(dqn.__file__).read_text()
    script.write_text(text.replace("HIDDEN = 256", "HIDDEN = 32"))
    words = [script, *TRUTH, *LONG, "--checkpoint-freq", 10**6, "--runs-dir", tmp_path / "runs"]
    with started(*words) as process:
        reaches(process, 2400)
        (events,) = only_run(tmp_path / "runs").glob("events*")
        assert wait_until(lambda: events.stat().st_size > 40_000, 20)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (40_000, 40_000))
        reaches(process, 12_000)
        process.send_signal(signal.SIGTERM)
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in printed, printed
    assert printed.count("WARNING: the curves could not be written") == 1
    assert re.search(r"error: .*\.pt could not be written: .*; nothing is saved", printed)


def test_a_resume_without_room_loses_nothing(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*.[jp][st]*")}
    no_room = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    with started(dqn.__file__, "--resume", folder, patch=no_room) as process:
        assert "File too large" in ended(process, 1)
    assert {path: path.read_bytes() for path in before} == before and not leftovers(folder)


@SLOW
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_called_so(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path])
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        words = [dqn.__file__, *CLIP, "--reward-devices", "cpu", "--video-freq", 24]
        with started(*words, *LONG, "--runs-dir", tmp_path) as process:
            reaches(process, 48)
            folder = only_run(tmp_path)
            with contextlib.suppress(OSError), (tmp_path / "filler").open("wb", 0) as file:
                while file.write(b"x" * 4096):
                    pass
            _, printed = process.communicate(timeout=120)
        *warnings, line = printed.splitlines()
        assert process.returncode == 1, printed
        assert all("could not be written" in x for x in warnings), printed  # films, curves
        assert re.search(r"error: .*\.pt could not be written: .*No space left on device", line)
        last = checkpoint(folder)["global_step"]
        assert f"saved: step_{last}.pt; resume with: " in line and not leftovers(
            folder / "checkpoints"
        )
        (tmp_path / "filler").unlink()
        run(dqn.__file__, "--resume", folder, "--total-timesteps", last + 24)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


# ------------------------------------------------------------------------------ stdout that ends


@pytest.mark.parametrize(
    "end",
    ["| head -1", pytest.param(">/dev/full", marks=SLOW), pytest.param(">&-", marks=SLOW)],
    ids=["head", "full", "closed"],
)
def test_stdout_may_end(end, tmp_path):
    words = [sys.executable, dqn.__file__, *TRUTH, "--total-timesteps", 72]
    line = " ".join(map(str, [*words, "--runs-dir", tmp_path, end]))
    process = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        **{"capture_output": True, "text": True, "timeout": 200, "env": helpers.environment()},
    )
    assert process.stderr.strip() == "" and process.returncode == 0
    assert max(checkpoints(only_run(tmp_path))) == 72


# ------------------------------------------------------------------------------ signals and deaths

STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
STOPPING = r"(?:stopping after this rollout(?:, in about \d+ s)?; Ctrl-C once more stops now)"


@pytest.mark.parametrize(
    "script, number",
    [
        (sac, signal.SIGINT),
        pytest.param(sac, signal.SIGTERM, marks=SLOW),
        pytest.param(dqn, signal.SIGHUP, marks=SLOW),
    ],
    ids=["sac-int", "sac-term", "dqn-hup"],
)
def test_a_signal_to_the_whole_group_ends_it_after_the_rollout(script, number, tmp_path):
    """SAC's environments are processes, DQN has a reward worker."""
    words = TRUTH if script is sac else [*CLIP, "--reward-devices", "cpu"]
    words = [script.__file__, *CHEETAH[script], *words, *LONG, "--runs-dir", tmp_path]
    with started(*words, "--checkpoint-freq", 0) as process:
        reaches(process, 48)
        folder = only_run(tmp_path)
        assert not checkpoints(folder)
        children = helpers.descendants(process.pid)
        assert len(children) >= (3 if script is sac else 1)
        os.killpg(process.pid, number)  # as a terminal does it
        output, printed = process.communicate(timeout=60)
    assert process.returncode == STOPS[number], printed
    assert re.fullmatch(STOPPING, printed.strip())
    last = checkpoint(folder)
    assert last["global_step"] == 24 * last["rollout"] > 24
    resume = f"resume with: python {script.__file__} --resume {folder}"
    assert f"saved: step_{last['global_step']}.pt; {resume}" in output
    assert wait_until(lambda: helpers.gone(children), 5)


@SLOW
def test_a_run_under_nohup_outlives_its_terminal(tmp_path):
    nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    words = [dqn.__file__, *CHEETAH[dqn], *CLIP, "--reward-devices", "cpu", *LONG]
    with started(*words, "--runs-dir", tmp_path, patch=nohup) as process:
        reaches(process, 48)
        os.killpg(process.pid, signal.SIGHUP)
        reaches(process, 120)
        process.terminate()
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 143 and re.fullmatch(STOPPING, printed.strip())


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    words = [sac.__file__, *CHEETAH[sac], *TRUTH, *LONG, "--gradient-steps", 10**6]
    with started(*words, "--learning-starts", 48, "--runs-dir", tmp_path) as process:
        reaches(process, 24)
        time.sleep(1)
        children = helpers.descendants(process.pid)
        for _ in range(2):
            time.sleep(1)
            assert process.poll() is None, "a rollout is not over"
            os.killpg(process.pid, signal.SIGINT)
        _, printed = process.communicate(timeout=10)
    assert process.returncode == 130 and re.fullmatch(STOPPING, printed.strip())
    assert wait_until(lambda: helpers.gone(children), 5)


@pytest.mark.parametrize(
    "script, number, delays",
    [
        pytest.param(sac, signal.SIGINT, (0.5, 2, 4), id="sac"),
        pytest.param(dqn, signal.SIGTERM, (1, 3), id="dqn"),
        pytest.param(sac, signal.SIGHUP, np.arange(0.5, 6), marks=SLOW, id="sac, often"),
    ],
)
def test_a_signal_during_the_start_is_quiet_and_leaves_no_folder(script, number, delays, tmp_path):
    words = [script.__file__, *CHEETAH[script], *CLIP, *LONG, "--reward-devices", "cpu"]
    for delay in delays:
        with started(*words, "--runs-dir", tmp_path) as process:
            time.sleep(delay)
            children = helpers.descendants(process.pid)
            os.killpg(process.pid, number)  # as a terminal does it
            output, printed = process.communicate(timeout=60)
            assert process.returncode in (-number, 128 + number), (delay, printed)
            assert re.fullmatch(f"{STOPPING}?", printed.strip()), (delay, printed)
            assert wait_until(functools.partial(helpers.gone, children), 5)
            assert output.count("step ") or not list(tmp_path.iterdir()), delay
        for path in tmp_path.iterdir():
            shutil.rmtree(path)


def environments(pid):
    """Processes of environments, which the forkserver has started."""
    (server,) = [
        child
        for child in helpers.descendants(pid)
        if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()
        and f"\nPPid:\t{pid}\n" in Path(f"/proc/{child}/status").read_text()
    ]
    return helpers.descendants(server)


STOPPED = pytest.param(signal.SIGSTOP, marks=SLOW, id="stopped")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, id="killed"), STOPPED])
def test_an_environment_that_dies_or_stops_ends_the_run(number, tmp_path):
    words = [sac.__file__, *CHEETAH[sac], *TRUTH, *LONG]
    with started(*words, "--runs-dir", tmp_path, patch=IMPATIENT) as process:
        reaches(process, 48)
        children = helpers.descendants(process.pid)
        os.kill(environments(process.pid)[0], number)
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 1
    folder, line = only_run(tmp_path), printed.splitlines()[-1]
    last = checkpoint(folder)["global_step"]
    assert line.startswith("error: ") and f"saved: step_{last}.pt" in line
    assert ("the process of an environment died (exit code -9)" in line) == (
        number == signal.SIGKILL
    )
    assert wait_until(lambda: helpers.gone(children), 5)
    run(sac.__file__, "--resume", folder, "--total-timesteps", last + 24)


# ------------------------------------------------------------------------------ wandb


@SLOW
def test_no_secret_is_written(tmp_path):
    secret = "0123456789abcdef" * 3
    words = [dqn.__file__, *TRUTH, "--total-timesteps", 48, "--track", "--runs-dir", tmp_path]
    words += ["--video-freq", 24]
    run(*words, WANDB_MODE="offline", WANDB_API_KEY=secret, HF_TOKEN=secret)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 4 and not any(secret.encode() in path.read_bytes() for path in files)


def test_wandb_without_a_key_is_one_line(tmp_path):
    words = [dqn.__file__, *TRUTH, "--total-timesteps", 48, "--track", "--runs-dir", tmp_path]
    usual = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    with started(*words, **usual) as process:
        line = ended(process, 2)
    assert line.startswith("error: --track: ") and "wandb login" in line and "offline" in line
