"""The pool of worker processes: its rewards, its errors, and processes really killed."""

import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from helpers import MeanReward, PaintRenderer, wait_until

import clip_reward
import sac_clip_humanoid as sac
from clip_reward import RunError, Scorer, UsageError
from training import workers
from training.workers import Pool

NAME = "reward worker on cpu"


def numbers(count, first=0):
    """States [count, 1], whose pictures are worth their numbers."""
    return np.arange(first, first + count, dtype=np.float64)[:, None] % 256


def pids(pool):
    return [worker.pid for worker in pool.workers]


def begun(folder):
    """The chunks begun since the last call: [(process, first state)], both int."""
    files = list(folder.iterdir())
    for file in files:
        file.unlink()
    return [tuple(map(int, file.name.split("_"))) for file in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("begun")


@pytest.fixture(scope="module")
def shared(folder):
    make_reward = functools.partial(MeanReward, delay=0.1, folder=folder)
    pool = Pool(PaintRenderer, make_reward, ["cpu", "cpu"], batch_size=3)
    pool.wait_ready()
    yield pool
    pool.close()


@pytest.fixture
def pool(shared, folder, capfd):
    """Two workers, chunks of three, a tenth of a second each."""
    begun(folder), capfd.readouterr()
    return shared


# ------------------------------------------------------------------------------ what comes back


def test_rewards_come_in_the_order_of_put_in_any_parts(pool):
    for parts in ([], [0], [1], [2, 1], [3], [4], [5, 0, 13], [40], [1] * 7):
        starts = np.cumsum([0, *parts])
        for count, start in zip(parts, starts):
            batch = numbers(count, start)
            pool.put(batch)
            batch[:] = 99  # what was put is the pool's: the caller may use the array again
        rewards = pool.take()
        assert rewards.dtype == np.float32
        np.testing.assert_array_equal(rewards, numbers(starts[-1])[:, 0])


def test_full_chunks_leave_while_the_episode_is_played(pool, folder):
    """They are with the workers, side by side, before anybody asks for their rewards."""
    for first in range(0, 8, 2):  # two chunks, and two states that make none
        pool.put(numbers(2, first))
    assert wait_until(lambda: len(list(folder.iterdir())) == 2, 20)
    played = begun(folder)
    assert {process for process, _ in played} == set(pids(pool)), "one each"
    assert {state for _, state in played} == {0, 3}
    np.testing.assert_array_equal(pool.take(), np.arange(8))
    assert [state for _, state in begun(folder)] == [6]
    assert 0.15 <= pool.clip_s < 1 and 0 < pool.render_s < 0.1


def test_pictures(pool):
    frames = pool.render(numbers(6))
    assert frames.shape == (6, 4, 4, 3) and frames.dtype == np.uint8
    assert frames[:, 0, 0, 0].tolist() == [*range(6)]
    assert pool.render(numbers(6), size=8).shape == (6, 8, 8, 3)


def test_rewards_are_equal_to_the_bit_whoever_computes_them(tmp_path, monkeypatch):
    """The embedded CLIP on pictures of MuJoCo: this process and two workers (test_ray: and Ray)."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    flags = {"target_prompt": helpers.KNEELING, "baseline_prompt": "a humanoid robot"}
    flags = {name: (words,) for name, words in flags.items()} | {"reward_alpha": 0.3}
    flags |= {"clip_model": helpers.TINY, "render_size": 64}
    args = sac.Args(**flags)
    make_renderer = functools.partial(sac.make_renderer, args)
    make_reward = functools.partial(clip_reward.make_clip_reward, args)
    states = helpers.humanoid_states(45)
    states[::2, 0] += 5.0  # metres: where the floor is drawn must not depend on the picture before
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in every worker
    scorer = Scorer(make_renderer, make_reward)
    chunks = [scorer.score(states[i : i + 8])[0] for i in range(0, 45, 8)]
    picture = scorer.render(states[:1], size=100)
    scorer.close()
    torch.set_num_threads(threads)
    expected = np.concatenate(chunks)
    assert expected.dtype == np.float32 and expected.std() > 1e-4
    pool = Pool(make_renderer, make_reward, ["cpu", "cpu"], 8)
    lines = pool.wait_ready()
    assert len(lines) == 2 and all(re.match(f"{NAME}: .", line) for line in lines)
    np.testing.assert_array_equal(pool.score(states), expected)
    assert pool.render_s > 0 and pool.clip_s > 0
    np.testing.assert_array_equal(pool.render(states[:1], size=100), picture)
    pool.close()
    assert wait_until(lambda: helpers.gone(pids(pool)), 10)
    left = [path.name for path in tmp_path.iterdir() if "wandb" in path.name]
    assert not left, "wandb was imported by a worker"


def modules_reward(device):
    """A reward that is 1 in a process where no module of these names was imported."""
    import timm.utils  # noqa: F401

    unwanted = [name for name in ("wandb", "sentry_sdk") if sys.modules.get(name)]
    return lambda frames: torch.full([len(frames)], float(not unwanted))


def test_frames_are_scored_without_a_renderer_and_wandb_is_not_imported():
    pool = Pool(None, modules_reward, ["cpu"], batch_size=4)
    np.testing.assert_array_equal(pool.score(np.full((9, 6, 7, 3), 7, np.uint8)), [1] * 9)
    pool.close()


# ------------------------------------------------------------------------------ what is raised


def reward_that(**what):
    return functools.partial(MeanReward, **what)


def reward_of_shape(*shape):
    return functools.partial(helpers.reward_of_shape, shape=shape)


def reward_without(error):
    return functools.partial(helpers.make_nothing, error=error)


@pytest.mark.parametrize(
    "make_reward, state, kind, message",
    [
        (MeanReward, -1, RunError, r"helpers\.py.*in render.*cannot paint -1"),
        (reward_that(error=helpers.Unpicklable), 1, RunError, r"in forward.*holds a lock"),
        (
            *(reward_that(error=torch.OutOfMemoryError()), 1, RunError),
            "^cpu has too little memory for 2 states at once; use a smaller --clip-batch-size$",
        ),
        (
            reward_of_shape(1),
            1,
            RunError,
            r"^the reward module returned \[B, 1\]; it must return \[B\]$",
        ),
        (reward_of_shape(2, 2), 1, RunError, r"returned \[B, 2, 2\]; it must return \[B\]$"),
        (reward_that(error=SystemExit(3)), 1, RunError, "in forward.*failed: SystemExit: 3$"),
        (reward_without(EOFError("truncated")), 1, RunError, "in make_nothing.*truncated"),
        (reward_without(UsageError("no weights")), 1, UsageError, "^no weights$"),
    ],
)
def test_what_a_worker_raises_arrives(make_reward, state, kind, message):
    pool = Pool(PaintRenderer, make_reward, ["cpu"])
    with pytest.raises(kind, match=f"(?s){message}"):
        pool.score([[3.0], [state]])
    pool.close()
    assert wait_until(lambda: helpers.gone(pids(pool)), 10)


# ------------------------------------------------------------------------------ lost workers


DIED = "a reward worker died (exit code {}; -9 often means too little memory)"


@pytest.mark.parametrize("moment", ["loading", "working", "idle"])
def test_a_worker_that_dies_ends_the_run_in_one_line(moment, tmp_path):
    make_reward = functools.partial(MeanReward, delay=0.2, folder=tmp_path)
    pool = Pool(PaintRenderer, make_reward, ["cpu", "cpu"], batch_size=2)
    if moment != "loading":
        pool.wait_ready()
    if moment == "working":
        pool.put(numbers(40))
        assert wait_until(lambda: len({process for process, _ in begun(tmp_path)}) == 2)
    os.kill(pids(pool)[1], signal.SIGKILL)
    with pytest.raises(RunError, match=f"^{re.escape(DIED.format(-9))}$") as error:
        pool.wait_ready()
        pool.score(numbers(40))
    assert error.value.__suppress_context__
    pool.close()
    assert wait_until(lambda: helpers.gone(pids(pool)), 10)


def test_workers_that_give_no_answer_end_the_run(tmp_path, monkeypatch):
    """One that is stopped keeps its chunk; the other one does the rest."""
    make_reward = functools.partial(MeanReward, delay=0.05, folder=tmp_path)
    pool = Pool(PaintRenderer, make_reward, ["cpu", "cpu"], batch_size=2)
    pool.wait_ready()
    monkeypatch.setattr(workers, "TIMEOUT", 2)
    pool.put(numbers(40))
    victim = pids(pool)[0]
    assert wait_until(lambda: any(tmp_path.glob(f"{victim}_*")))
    os.kill(victim, signal.SIGSTOP)
    with pytest.raises(RunError, match="^no answer from the reward workers for 2 s$"):
        pool.take()
    assert len(pool.results) >= 18, "of 20 chunks"
    pool.close()
    assert wait_until(lambda: helpers.gone(pids(pool)), 10)


def test_pictures_that_come_too_late_are_no_rewards(monkeypatch):
    """They are of a video, whose failure does not end a run."""
    pool = Pool(PaintRenderer, MeanReward, ["cpu"], batch_size=2)
    pool.wait_ready()
    os.kill(pids(pool)[0], signal.SIGSTOP)
    with monkeypatch.context() as patch, pytest.raises(RunError, match="no answer"):
        patch.setattr(workers, "TIMEOUT", 1)
        pool.render(numbers(3))
    os.kill(pids(pool)[0], signal.SIGCONT)
    np.testing.assert_array_equal(pool.score(numbers(5)), np.arange(5))
    pool.close()


def test_a_slow_worker_delays_nobody(tmp_path):
    """Whoever is free takes the next chunk, though another one still loads."""
    make_reward = functools.partial(helpers.first_is_slow, folder=tmp_path)
    pool = Pool(PaintRenderer, make_reward, ["cpu", "cpu"], batch_size=2)
    np.testing.assert_array_equal(pool.score(numbers(20)), np.arange(20))
    assert len(pool.lines) == 1
    assert len(pool.wait_ready()) == 2
    pool.close()


def test_a_pool_outlives_the_thread_that_made_it():
    pools = []

    def make():
        pools.append(Pool(PaintRenderer, MeanReward, ["cpu"]))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    time.sleep(1)
    np.testing.assert_array_equal(pools[0].score(numbers(4)), np.arange(4))
    pools[0].close()


# ------------------------------------------------------------------------------ the parent's end


def start(body, folder, workers=2, seconds=0.5):
    """A process, in a group of its own, with a pool whose workers are busy with states [8, 1]."""
    script = f"""
        import functools, os, pathlib, signal, sys, time
        import helpers
        from training.run import excepthook
        from training.workers import Pool
        if __name__ == "__main__":
            sys.excepthook = excepthook
            folder = pathlib.Path({str(folder)!r})
            make_reward = functools.partial(helpers.MeanReward, delay={seconds}, folder=folder)
            pool = Pool(helpers.PaintRenderer, make_reward, ["cpu"] * {workers}, batch_size=1)
            print("PIDS", *[worker.pid for worker in pool.workers], flush=True)
            pool.wait_ready()
            pool.put([[float(n)] for n in range(8)])
            {body}
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        **{"env": helpers.environment(), "start_new_session": True},
    )
    children = [int(pid) for pid in parent.stdout.readline().split()[1:]]
    assert len(children) == workers, parent.communicate()[1]
    return parent, children


@pytest.mark.parametrize("moment", ["working", "starting"])
def test_nothing_outlives_a_killed_parent(moment, tmp_path):
    parent, children = start("pool.take()", tmp_path, seconds=60)
    if moment == "working":
        assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    else:  # they have begun to import
        maps = [Path(f"/proc/{pid}/maps") for pid in children]
        assert wait_until(lambda: all("numpy" in path.read_text() for path in maps))
    everyone = helpers.descendants(parent.pid)
    assert set(children) <= set(everyone)
    parent.kill()
    parent.wait()
    try:  # one that still imports finds out when it has done so
        assert wait_until(lambda: helpers.gone(everyone), 3 if moment == "working" else 30)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)


def test_stop_signals_to_the_group_are_the_parents_alone(tmp_path):
    """Ctrl-C, a terminal that closes."""
    body = """
            for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
                signal.signal(number, lambda number, frame: print("got", number, flush=True))
            print(*pool.take().astype(int), flush=True)
            print(*pool.score([[float(n)] for n in range(8)]).astype(int))
    """
    parent, children = start(body.strip(), tmp_path)
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        os.killpg(parent.pid, number)
        assert parent.stdout.readline() == f"got {number.value}\n"
    assert parent.stdout.readline() == "0 1 2 3 4 5 6 7\n"
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        time.sleep(0.5)
        os.killpg(parent.pid, number)
    out, err = parent.communicate(timeout=120)
    assert out.splitlines()[-1] == "0 1 2 3 4 5 6 7", out
    assert (parent.returncode, err) == (0, "") and wait_until(lambda: helpers.gone(children), 10)


@pytest.mark.parametrize(
    "body, code, said",
    [
        ("raise helpers.clip_reward.RunError('nothing')", 1, "error: nothing\n"),
        ("", 0, ""),  # nobody closed it
        ("pool.take(); pool.close()", 0, ""),
    ],
)
def test_a_parent_that_ends_while_chunks_run_ends_at_once(body, code, said, tmp_path):
    seconds = 0.1 if "close" in body else 60
    parent, children = start(body, tmp_path, 1, seconds)
    out, err = parent.communicate(timeout=40)
    assert (parent.returncode, err) == (code, said)
    assert wait_until(lambda: helpers.gone(children), 10)


GUARDLESS = """
import numpy as np
from helpers import MeanReward, PaintRenderer
from training.workers import Pool

pool = Pool(PaintRenderer, MeanReward, ["cpu", "cpu"])
print(pool.score(np.zeros((4, 1))))
"""


def test_what_workers_cannot_import_is_told(tmp_path):
    """Python itself says why: a file that makes a pool when it is imported, code without a file."""
    path = tmp_path / "guardless.py"
    path.write_text(GUARDLESS)
    own = GUARDLESS.replace("pool = ", "def make(device):\n    pass\n\npool = ")
    notebook = own.replace("PaintRenderer, Mean", "make, Mean")
    for words, said in (
        ([path], "if __name__ == '__main__':"),
        (["-c", notebook], "Can't get attribute 'make'"),
    ):
        printed = helpers.run(*words, code=1).stderr
        assert said in printed and DIED.format(1) in printed.splitlines()[-1]


def test_only_the_pool_s_processes_are_killed(tmp_path):
    """Processes that a user's own program starts end as they wish."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    helpers.run(path)
    assert (tmp_path / "done").read_text() == "as it wished"


OWN = """
import multiprocessing
import time
from pathlib import Path

from helpers import MeanReward, PaintRenderer
from training.workers import Pool


def own():
    time.sleep(2)
    Path(__file__).with_name("done").write_text("as it wished")


if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=own).start()
    Pool(PaintRenderer, MeanReward, ["cpu"])
"""


class OtherLooks(PaintRenderer):
    """Draws in another way in every process."""

    def __init__(self, device="cpu", size=4):
        super().__init__(device, size)
        self.look = self.description = f"egl {os.getpid()}"


def test_workers_that_draw_otherwise_are_an_error():
    pool = Pool(OtherLooks, MeanReward, ["cpu", "cpu"])
    with pytest.raises(RunError, match="draws with egl .*, but the others .* egl.*--renderer"):
        pool.wait_ready()
    pool.close()


class Late:
    """Rewards that a device has computed a tenth of a second after it was asked."""

    def __init__(self, means, log):
        self.means, self.log, self.at = means, log, time.monotonic() + 0.1
        self.shape = means.shape

    def float(self):
        return self

    def cpu(self):
        time.sleep(max(0, self.at - time.monotonic()))
        self.log("done")
        return self.means


class LateReward(torch.nn.Module):
    """The mean of frames, from a device that computes while the next ones are drawn."""

    def __init__(self, device, folder):
        super().__init__()
        self.path = folder / f"log_{os.getpid()}"

    def log(self, word):
        with self.path.open("a") as file:
            file.write(word + " ")

    def forward(self, frames):
        self.log("launched")
        return Late(HandOver.frames.float().mean((1, 2, 3)), self.log)


class HandOver(PaintRenderer):
    """Hands its frames to the reward by the side: tensors on torch's "meta" have no content."""

    def render(self, states, out=None):
        HandOver.frames = torch.from_numpy(super().render(states, out).copy())
        return HandOver.frames.numpy()


def test_a_gpu_s_next_chunk_is_drawn_before_the_last_one_is_done(tmp_path):
    """torch's "meta" plays the GPU: not the CPU, and nothing there takes memory here."""
    pool = Pool(HandOver, functools.partial(LateReward, folder=tmp_path), ["meta"], 4)
    numbers = np.arange(18.0)
    np.testing.assert_array_equal(pool.score(numbers[:, None]), numbers)
    (log,) = tmp_path.iterdir()
    assert log.read_text().split()[:4] == ["launched", "launched", "done", "launched"]
    np.testing.assert_array_equal(pool.score(numbers[:3, None]), numbers[:3])
    pool.close()
