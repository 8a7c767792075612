"""Reward workers on a Ray cluster: two nodes on this machine, really killed."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import helpers
import numpy as np
import pytest
from helpers import MeanReward, PaintRenderer, only_run, wait_until

import clip_reward
import sac_clip_humanoid as sac
from clip_reward import RunError, UsageError
from training import workers
from training.workers import make_pool

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
from ray.cluster_utils import Cluster


@contextlib.contextmanager
def two_nodes():
    ray.shutdown()  # of another cluster
    environment = os.environ.copy()
    os.environ |= helpers.environment()  # Ray's processes inherit it, so they find helpers.py
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.second = cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ |= environment


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as cluster:
        yield cluster


@contextlib.contextmanager
def slow_pool(devices, folder):
    """The reward of a state is its number; (process, state) are files in `folder`."""
    make_reward = functools.partial(MeanReward, delay=0.2, folder=folder)
    pool = make_pool(PaintRenderer, make_reward, devices, 2)
    pool.wait_ready()
    try:
        yield pool
    finally:
        pool.close()


def score(pool, count):
    """Whether so many states come back as they should."""
    states = np.arange(float(count))[:, None]
    return np.array_equal(pool.score(states), states[:, 0])


def at_work(folder):
    return {int(file.name.split("_")[0]) for file in folder.iterdir()}


def all_at_work(pool, folder, count):
    """Whether so many processes score the states of a rollout."""
    for file in folder.iterdir():
        file.unlink()
    return score(pool, 20) and len(at_work(folder)) == count


@pytest.mark.slow
def test_lost_actors_change_no_reward(cluster, tmp_path, capfd, monkeypatch):
    """Ray starts killed ones again, any number in a rollout; one that is stopped is killed."""
    with slow_pool(["ray:2"], tmp_path) as pool:
        assert wait_until(lambda: all_at_work(pool, tmp_path, 2), 60)
        for count, number, timeout in ((2, signal.SIGKILL, 120), (1, signal.SIGSTOP, 30)):
            monkeypatch.setattr(workers, "TIMEOUT", timeout)
            victims = sorted(at_work(tmp_path))[:count]
            states = np.arange(100, 160.0)
            pool.put(states[:, None])
            for victim in victims:
                assert wait_until(lambda: any(tmp_path.glob(f"{victim}_1??")))  # noqa: B023
                os.kill(victim, number)
            assert np.array_equal(pool.take(), states)
            assert wait_until(lambda: helpers.gone(victims), 60)  # noqa: B023
            assert capfd.readouterr().err.count("WARNING: a Ray actor is gone") == count
            assert wait_until(lambda: all_at_work(pool, tmp_path, 2), 60)


@pytest.mark.slow
def test_what_an_actor_raises_arrives(cluster):
    pool = make_pool(PaintRenderer, MeanReward, ["ray:1"])
    with pytest.raises(RunError, match=r"(?s)helpers\.py.*cannot paint -1"):
        pool.score([[3.0], [-1.0]])
    pool.close()
    make_reward = functools.partial(helpers.make_nothing, error=UsageError("no weights"))
    pool = make_pool(PaintRenderer, make_reward, ["ray"])
    with pytest.raises(UsageError, match="^no weights$"):
        pool.wait_ready()
    pool.close()


@pytest.mark.slow
def test_actors_that_the_cluster_has_no_room_for_end_no_run(cluster, tmp_path, monkeypatch):
    """They may come with nodes that are still to be started: that takes longer than to load."""
    with slow_pool(["ray:4"], tmp_path) as pool:
        assert wait_until(lambda: all_at_work(pool, tmp_path, 2), 60)
        monkeypatch.setattr(workers, "TIMEOUT", 2)
        assert score(pool, 60) and score(pool, 60)


@pytest.mark.slow
def test_a_cluster_without_room_ends_the_run_in_one_line(cluster, tmp_path, monkeypatch):
    with slow_pool(["ray:2"], tmp_path) as pool:
        assert wait_until(lambda: all_at_work(pool, tmp_path, 2), 60)
        monkeypatch.setattr(workers, "TIMEOUT", 1)
        problem = "^no answer from Ray's actors for 2 s; is there room for them in the cluster.$"
        with pytest.raises(RunError, match=problem), slow_pool(["ray:1"], tmp_path):
            pass


@pytest.mark.slow
def test_a_node_may_go_and_another_come(tmp_path):
    """No rollout is lost, and `ray` means as many workers as the cluster has now."""
    with two_nodes() as cluster, slow_pool(["ray"], tmp_path) as pool:
        assert wait_until(lambda: all_at_work(pool, tmp_path, 2), 60)
        numbers = np.arange(100, 180.0)
        pool.put(numbers[:, None])
        assert wait_until(lambda: any(tmp_path.glob("*_10?")))
        cluster.remove_node(cluster.second, allow_graceful=False)
        assert np.array_equal(pool.take(), numbers)
        assert all_at_work(pool, tmp_path, 1)
        cluster.add_node(num_cpus=2)
        assert wait_until(lambda: all_at_work(pool, tmp_path, 3), 60)


POOL = """
import functools, sys
import numpy as np
from helpers import MeanReward, PaintRenderer
from training import run
from training.workers import make_pool
if __name__ == "__main__":
    sys.excepthook = run.excepthook
    make_reward = functools.partial(MeanReward, delay=0.2)
    pool = make_pool(PaintRenderer, make_reward, ["ray:2"], 2)
    while True:
        pool.score(np.arange(4.0)[:, None])
        print("scored", flush=True)
"""


@pytest.mark.slow
def test_a_ray_of_this_machine_ends_with_the_run_and_the_run_with_its_raylet(tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    environment = helpers.environment()
    environment.pop("RAY_ADDRESS", None)

    def start():
        process = subprocess.Popen(
            [sys.executable, tmp_path / "pool.py"],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
            **{"env": environment, "start_new_session": True},
        )
        assert process.stdout.readline() == "scored\n"
        return process, helpers.descendants(process.pid)

    process, started = start()
    process.kill()
    assert len(started) < 12 and wait_until(lambda: helpers.gone(started), 100)
    process, started = start()
    (raylet,) = (
        pid
        for pid in started
        if b"raylet/raylet\0" in Path(f"/proc/{pid}/cmdline").read_bytes()[:300]
    )
    os.kill(raylet, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert errors.endswith("error: Ray has ended on this machine\n") and process.returncode == 1
    assert wait_until(lambda: helpers.gone(started), 100)


@pytest.mark.slow
def test_a_job_that_ends_every_actor_ends_the_run(cluster, tmp_path):
    make_reward = functools.partial(MeanReward, folder=tmp_path, fatal=True)
    pool = make_pool(PaintRenderer, make_reward, ["ray:1"])
    with pytest.raises(RunError, match="^4 Ray actors in a row were lost$"):
        pool.score([[3.0]])
    pool.close()


def actor_at_work():
    """Number of the process of one that scores a chunk: Ray starts an idle one, or one that is not
    ready yet, again before anybody asks."""
    command = ["pgrep", "-f", "ray::Actor.call"]
    found = []

    def look():
        found[:] = subprocess.run(command, capture_output=True, text=True).stdout.split()
        return found

    assert wait_until(look, 60)
    return int(found[0])


@pytest.mark.slow
def test_a_run_on_two_nodes_is_the_local_run_though_an_actor_is_killed(cluster, tmp_path):
    flags = [sac.__file__, "--target-prompt", helpers.KNEELING, "--clip-model", helpers.TINY]
    flags += ["--num-envs", 2, "--episode-length", 12, "--render-size", 64]
    flags += ["--batch-size", 16, "--gradient-steps", 6, "--learning-starts", 24]
    flags += ["--total-timesteps", 1440, "--video-freq", 720, "--clip-batch-size", 8, "--runs-dir"]
    helpers.run(*flags, tmp_path / "local", "--reward-devices", "cpu")
    process = subprocess.Popen(
        [sys.executable, *map(str, flags), tmp_path / "ray", "--reward-devices", "ray:2"],
        **{"stdout": subprocess.PIPE, "text": True, "env": helpers.environment()},
    )
    for line in process.stdout:
        if line.startswith("step 240/"):
            os.kill(actor_at_work(), signal.SIGKILL)
    assert process.wait() == 0
    local, ours = only_run(tmp_path / "local"), only_run(tmp_path / "ray")
    assert helpers.equal(helpers.checkpoint(local), helpers.checkpoint(ours))
    assert len(list((ours / "videos").glob("*.mp4"))) == 2


@pytest.mark.slow
def test_actors_score_and_draw_as_processes_do_to_the_bit(cluster):
    flags = {"target_prompt": (helpers.KNEELING,), "clip_model": helpers.TINY, "render_size": 64}
    args = sac.Args(**flags)
    make_renderer = functools.partial(sac.make_renderer, args)
    make_reward = functools.partial(clip_reward.make_clip_reward, args)
    states, rewards, frames = helpers.humanoid_states(40), [], []
    for devices in ["cpu"], ["ray"]:
        pool = make_pool(make_renderer, make_reward, devices, 8)
        lines = pool.wait_ready()
        rewards.append(pool.score(states))
        frames.append(pool.render(states[:3], size=100))
        pool.close()
    assert lines and all(line.startswith("Ray actor: ") for line in lines)
    np.testing.assert_array_equal(*rewards)
    np.testing.assert_array_equal(*frames)
    assert rewards[0].std() > 1e-4


def test_without_ray_the_flag_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        UsageError, match=r'^--reward-devices ray needs Ray: pip install "\.\[ray\]"$'
    ):
        make_pool(PaintRenderer, MeanReward, ["ray:2"])
