"""Reward workers on a Ray cluster: two nodes on this machine, really killed."""

import contextlib
import functools
import os
import signal
import subprocess
import sys

import helpers
import numpy as np
import pytest
import test_runs
from helpers import MeanReward, PaintRenderer, only_run, wait_until

import eval_epic
import sac_clip_humanoid as sac
from clip_reward import RewardArgs, RewardPool, RewardWorkerError, UsageError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
from ray.cluster_utils import Cluster

from training.flags import from_flags


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


def slow_pool(devices, folder, **options):
    """The reward of a state is its number; (process, state) are files in `folder`."""
    make_reward = functools.partial(MeanReward, delay=0.2, folder=folder)
    return RewardPool(PaintRenderer, make_reward, devices, 2, **options).wait_ready()


def processes(folder):
    """Those that have begun a chunk since the last call."""
    found = {int(file.name.split("_")[0]) for file in folder.iterdir()}
    for file in folder.iterdir():
        file.unlink()
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_actor_changes_no_reward(cluster, number, tmp_path, capfd):
    with slow_pool(["ray:2"], tmp_path, worker_timeout=3) as pool:
        assert np.array_equal(pool.score(np.arange(60.0)[:, None]), np.arange(60.0))

        def both():
            pool.score(np.arange(20.0)[:, None])
            return len(processes(tmp_path)) == 2

        assert wait_until(both, 60)
        pool.put(np.arange(100, 160.0)[:, None])
        assert wait_until(lambda: len(list(tmp_path.iterdir())) > 3)
        victim = sorted(processes(tmp_path))[0]
        os.kill(victim, number)
        assert np.array_equal(pool.take(), np.arange(100, 160.0))
        assert pool.restarts == 1
        assert "WARNING: a Ray actor" in capfd.readouterr().err
        assert wait_until(lambda: helpers.gone([victim]), 10)
        processes(tmp_path)
        assert wait_until(both, 60)  # the one that took its place among them


def test_what_an_actor_raises_arrives(cluster):
    with RewardPool(PaintRenderer, MeanReward, ["ray:1"]) as pool:
        with pytest.raises(RewardWorkerError, match=r"(?s)helpers\.py.*cannot paint -1"):
            pool.score([[3.0], [-1.0]])
    make_reward = functools.partial(helpers.make_nothing, error=UsageError("no weights"))
    with RewardPool(PaintRenderer, make_reward, ["ray"]) as pool:
        with pytest.raises(UsageError, match="^no weights$"):
            pool.wait_ready()


def test_a_node_may_go_and_another_come(tmp_path):
    """No rollout is lost, and `ray` means as many workers as the cluster has now."""
    with two_nodes() as cluster, slow_pool(["ray"], tmp_path) as pool:
        numbers = np.arange(80.0)

        def busy():
            assert np.array_equal(pool.score(numbers[:24, None]), numbers[:24])
            return len(processes(tmp_path))

        assert wait_until(lambda: busy() == 2, 60)
        pool.put(numbers[:, None])
        assert wait_until(lambda: len(list(tmp_path.iterdir())) > 3)
        cluster.remove_node(cluster.second, allow_graceful=False)
        assert np.array_equal(pool.take(), numbers)
        assert pool.restarts == 1
        processes(tmp_path)
        assert busy() == 1
        cluster.add_node(num_cpus=2)
        assert wait_until(lambda: busy() == 3, 60)


def actor_at_work():
    """Number of the process of one that scores a chunk: Ray starts an idle one, or one that is not
    ready yet, again before anybody asks."""
    command = ["pgrep", "-f", "ray::_Remote.score"]
    found = []

    def look():
        found[:] = subprocess.run(command, capture_output=True, text=True).stdout.split()
        return found

    assert wait_until(look, 60)
    return int(found[0])


def test_a_run_on_two_nodes_is_the_local_run_though_an_actor_is_killed(cluster, tmp_path):
    more = ["--total-timesteps", 1440, "--video-freq", 720, "--clip-batch-size", 8, "--runs-dir"]
    flags = [sac.__file__, *test_runs.CLIP[sac], *more]
    helpers.run(*flags, tmp_path / "local", "--reward-devices", "cpu")
    process = subprocess.Popen(
        [sys.executable, *map(str, flags), tmp_path / "ray", "--reward-devices", "ray:2"],
        **{"stdout": subprocess.PIPE, "text": True, "env": helpers.environment()},
    )
    for line in process.stdout:
        if line.startswith("step 240 "):
            os.kill(actor_at_work(), signal.SIGKILL)
    assert process.wait() == 0
    local, ours = only_run(tmp_path / "local"), only_run(tmp_path / "ray")
    assert test_runs.equal(helpers.checkpoint(local), helpers.checkpoint(ours))
    restarts = [event.value for event in helpers.scalars(ours)[0]["charts/worker_restarts"]]
    assert (restarts[0], restarts[-1], len(restarts)) == (0, 1, 60)
    assert len(list((ours / "videos").glob("*.mp4"))) == 2


def test_rewards_for_epic_and_pictures_are_those_of_this_process(cluster):
    seen = from_flags(sac.Args, {"render_size": 64})
    make_renderer = functools.partial(sac.make_renderer, seen)
    args = {"target_prompt": ("a humanoid robot kneeling",), "clip_model": helpers.TINY}
    states, rewards, frames = helpers.humanoid_states(70), [], []
    for devices in ((), ("ray",)):
        flags = RewardArgs(**args, reward_devices=devices)
        rewards.append(eval_epic.rewards_of(flags, [0.0], make_renderer, states)[0.0])
        with RewardPool(make_renderer, None, list(devices)) as pool:
            frames.append(pool.wait_ready().render(states[:3], size=100))
    assert pool.description[-1].endswith("of 2 Ray actors; others join when they are ready")
    np.testing.assert_allclose(*rewards, atol=1e-5)  # this process has more threads
    np.testing.assert_array_equal(*frames)
    assert rewards[0].std() > 1e-4


def test_without_ray_the_flag_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    args = RewardArgs(target_prompt=("x",), clip_model=helpers.TINY, reward_devices=("ray:2",))
    with pytest.raises(
        UsageError, match=r'^--reward-devices ray needs Ray: pip install "\.\[ray\]"$'
    ):
        args.check(frames=1)
