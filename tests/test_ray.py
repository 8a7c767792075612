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
from helpers import ROOT, MeanReward, PaintRenderer, only_run, wait_until

import clip_reward
import sac_clip_humanoid as sac
from clip_reward import RewardArgs, RewardPool, RewardWorkerError, UsageError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
from ray.cluster_utils import Cluster  # noqa: E402


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


def test_rewards_are_the_local_pools_to_the_bit(cluster):
    args = RewardArgs(target_prompt=("a humanoid robot kneeling",), clip_model=helpers.TINY)
    make_reward = functools.partial(clip_reward.make_clip_reward, args=args)
    seen = clip_reward.from_flags(sac.Args, {"render_size": 64})
    make_renderer = functools.partial(sac.make_renderer, seen)
    states = helpers.humanoid_states(90)
    rewards, frames = [], []
    for devices in (["cpu"], ["ray"]):
        with RewardPool(make_renderer, make_reward, devices, 8) as pool:
            rewards.append(pool.wait_ready().score(states))
            frames.append(pool.render(states[:3], size=100))
    assert "1 of 2 Ray actors" in pool.description[-1] or "2 of 2" in pool.description[-1]
    assert rewards[0].std() > 1e-4
    np.testing.assert_array_equal(*rewards)
    np.testing.assert_array_equal(*frames)


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


@test_runs.BOTH
def test_a_run_on_two_nodes_is_the_local_run_though_an_actor_is_killed(cluster, script, tmp_path):
    more = ["--total-timesteps", 1440, "--video-freq", 720, "--clip-batch-size", 8, "--runs-dir"]
    flags = [script.__file__, *test_runs.CLIP[script], *more]
    helpers.run(*flags, tmp_path / "local", "--reward-devices", "cpu")
    process = subprocess.Popen(
        [sys.executable, *map(str, flags), tmp_path / "ray", "--reward-devices", "ray:2"],
        **{"stdout": subprocess.PIPE, "text": True, "env": helpers.environment()},
    )
    for line in process.stdout:
        if line.startswith("step 240 "):
            actors = subprocess.run(
                ["pgrep", "-n", "-f", "ray::_Remote"], capture_output=True, text=True
            )
            os.kill(int(actors.stdout.split()[0]), signal.SIGKILL)
    assert process.wait() == 0
    local, ours = only_run(tmp_path / "local"), only_run(tmp_path / "ray")
    assert test_runs.equal(helpers.checkpoint(local), helpers.checkpoint(ours))
    restarts = [event.value for event in helpers.scalars(ours)[0]["charts/worker_restarts"]]
    assert (restarts[0], restarts[-1], len(restarts)) == (0, 1, 60)
    assert len(list((ours / "videos").iterdir())) == 2


def test_epic_on_ray_is_epic_here(cluster, tmp_path):
    data = tmp_path / "data.npz"
    collect = ["collect", "--source", "uniform", "--out", data, "--states", 60]
    helpers.run(ROOT / "eval_epic.py", *collect, "--render-size", 64)
    epic = ["epic", "--dataset", data, "--clip-model", helpers.TINY, "--reward-devices"]
    for device in ("cpu", "ray"):
        helpers.run(ROOT / "eval_epic.py", *epic, device)
    here, on_ray = (tmp_path / f"data/epic_judge{n}/epic.csv" for n in ("", "_2"))
    assert here.read_text() == on_ray.read_text() and "tiny_clip" in here.read_text()


def test_without_ray_the_flag_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    args = RewardArgs(target_prompt=("x",), clip_model=helpers.TINY, reward_devices=("ray:2",))
    with pytest.raises(
        UsageError, match=r'^--reward-devices ray needs Ray: pip install "\.\[ray\]"$'
    ):
        args.check(frames=1)
