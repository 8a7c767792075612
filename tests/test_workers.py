"""The pool of worker processes: its rewards, its errors, and processes really killed."""

import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
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
    return [worker.process.pid for worker in pool.workers]


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
    pool = Pool(PaintRenderer, make_reward, ["cpu", "cpu"], batch_size=3, timeout=3)
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
    assert pool.restarts == 0


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


def reward_without(error):
    return functools.partial(helpers.make_nothing, error=error)


@pytest.mark.parametrize(
    "make_reward, state, kind, message",
    [
        (MeanReward, -1, RunError, r"helpers\.py.*in render.*cannot paint -1"),
        (reward_that(error=helpers.Unpicklable), 1, RunError, r"in forward.*holds a lock"),
        (
            *(reward_that(error=torch.OutOfMemoryError()), 1, RunError),
            "^cpu has no memory for so many frames at once; use a smaller --clip-batch-size$",
        ),
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_replaced_and_its_chunks_are_done_again(number, pool, folder, capfd):
    """It was killed, or stopped for longer than --worker-timeout."""
    restarts, victim = pool.restarts, pids(pool)[0]
    pool.put(numbers(60))
    assert wait_until(lambda: any(folder.glob(f"{victim}_*")))
    os.kill(victim, number)
    np.testing.assert_array_equal(pool.take(), np.arange(60))
    assert pool.restarts == restarts + 1
    assert wait_until(lambda: helpers.gone([victim]), 10)
    how = "died .*" if number == signal.SIGKILL else "gave no answer for 3 s .--worker-timeout."
    said = f"WARNING: {NAME} {how}; it is started again\n"
    assert re.fullmatch(said, capfd.readouterr().err)

    def both_work_again():
        begun(folder)
        np.testing.assert_array_equal(pool.score(numbers(60)), np.arange(60))
        return {process for process, _ in begun(folder)} == set(pids(pool))

    assert wait_until(both_work_again) and victim not in pids(pool)


def test_one_that_dies_between_two_rollouts_is_replaced(pool):
    restarts = pool.restarts
    for worker in pool.workers:  # one in every rollout
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.join(10)
        np.testing.assert_array_equal(pool.score(numbers(30)), np.arange(30))
    assert pool.restarts == restarts + 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_second_loss_in_a_rollout_ends_it_in_one_line(number, folder):
    begun(folder)
    make_reward = functools.partial(MeanReward, delay=0.2, folder=folder)
    pool = Pool(PaintRenderer, make_reward, ["cpu", "cpu"], batch_size=2, timeout=2)
    pool.wait_ready()
    pool.put(numbers(40))
    at_work = set()  # one may begin later than the other, after a poll
    assert wait_until(lambda: len(at_work.update(p for p, _ in begun(folder)) or at_work) == 2)
    for pid in pids(pool):
        os.kill(pid, number)
    with pytest.raises(RunError) as error:
        pool.take()
    how = "died .*" if number == signal.SIGKILL else "gave no answer for 2 s .--worker-timeout."
    line = f"{NAME} {how}: the second lost worker in one rollout"
    assert re.fullmatch(line, str(error.value)) and error.value.__suppress_context__
    pool.close()
    assert wait_until(lambda: helpers.gone(pids(pool)), 10)


def test_a_worker_that_hangs_while_it_loads_is_told(monkeypatch):
    """Not by --worker-timeout: a large model takes its time."""
    monkeypatch.setattr(workers, "LOADING", 6)
    slow = functools.partial(helpers.make_slowly, seconds=600)
    pool = Pool(PaintRenderer, slow, ["cpu"], timeout=1)
    began, pool.lost = time.monotonic(), 1
    with pytest.raises(RunError, match="gave no answer for 6 s.*: the second lost worker"):
        pool.wait_ready()
    assert 6 < time.monotonic() - began < 30
    pool.close()
    monkeypatch.setattr(workers, "LOADING", 600)
    slow = functools.partial(helpers.make_slowly, seconds=3)
    pool = Pool(PaintRenderer, slow, ["cpu"], timeout=1)
    (line,) = pool.wait_ready()
    assert line.startswith(f"{NAME}: ") and not pool.restarts
    pool.close()


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
            print("PIDS", *[worker.process.pid for worker in pool.workers], flush=True)
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
        os.kill(children[0], signal.SIGSTOP)
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
    """Ctrl-C, a terminal that closes; also where a worker was replaced meanwhile."""
    body = """
            for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
                signal.signal(number, lambda number, frame: print("got", number, flush=True))
            print(*pool.take().astype(int), flush=True)
            pool.workers[0].process.kill()
            print(*pool.score([[float(n)] for n in range(8)]).astype(int), pool.restarts)
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
    assert out.splitlines()[-1] == "0 1 2 3 4 5 6 7 1", out
    assert re.fullmatch(f"WARNING: {NAME} died .*; it is started again\n", err)
    assert parent.returncode == 0 and helpers.gone(children)


@pytest.mark.parametrize(
    "body, code, said",
    [
        ("raise helpers.clip_reward.RunError('nothing')", 1, "error: nothing\n"),
        ("", 0, ""),  # nobody closed it
        ("pool.take(); pool.close(); print(pool.restarts)", 0, ""),
    ],
)
def test_a_parent_that_ends_while_chunks_run_ends_at_once(body, code, said, tmp_path):
    """concurrent.futures would wait for all of them."""
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


def test_a_file_that_makes_a_pool_when_it_is_imported_is_told(tmp_path):
    path = tmp_path / "guardless.py"
    path.write_text(GUARDLESS)
    printed = helpers.run(path, code=1).stderr.splitlines()
    assert 'below `if __name__ == "__main__":`, or use clip_reward.Scorer' in printed[-1]
    assert len(printed) < 30, printed


def test_what_workers_cannot_import_is_told():
    own = GUARDLESS.replace("pool = ", "def make(device):\n    pass\n\npool = ")
    notebook = own.replace("PaintRenderer, Mean", "make, Mean")  # which has no file either
    for words, code in ((["-"], GUARDLESS), (["-c", notebook], None)):
        process = subprocess.run(
            [sys.executable, *words],
            **{"input": code, "capture_output": True, "text": True, "env": helpers.environment()},
        )
        assert "workers cannot import code without a file" in process.stderr.splitlines()[-1]


class OtherLooks(PaintRenderer):
    """Draws in another way in every process."""

    def __init__(self, device="cpu", size=4):
        super().__init__(device, size)
        self.look = self.description = f"egl {os.getpid()}"


def test_workers_that_draw_otherwise_are_an_error():
    pool = Pool(OtherLooks, MeanReward, ["cpu", "cpu"])
    with pytest.raises(RunError, match="draws by egl .*, the others by egl.*--renderer"):
        pool.wait_ready()
    pool.close()


class Late:
    """Rewards that a device has computed a tenth of a second after it was asked."""

    def __init__(self, means, log):
        self.means, self.log, self.at = means, log, time.monotonic() + 0.1

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
    # a worker that dies with a chunk on its GPU: it is scored again
    pool.put(numbers[:8, None])
    wait_until(lambda: len(log.read_text().split()) >= 2 * 6 + 1)
    pool.workers[0].kill()
    np.testing.assert_array_equal(pool.take(), numbers[:8])
    assert pool.restarts == 1
    pool.close()
