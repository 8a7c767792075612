"""Ray actors that draw and score, on all nodes of a cluster (--reward-devices ray)."""

import os
import socket
import time
from collections import Counter, deque

from clip_reward import RunError, UsageError, message_of
from training import run, workers


def connect_to_ray():
    """Connect to the cluster of RAY_ADDRESS or `ray start`, or else start one on this machine, and
    wait for its first node -> (ray, "GPU", or "CPU" if it has no GPU). Raises UsageError."""
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # or a wrong address takes 40 s to fail
    try:
        import ray
    except ImportError:
        raise UsageError('--reward-devices ray needs Ray: pip install ".[ray]"') from None
    if not ray.is_initialized():
        try:
            ray.init(logging_level="error", log_to_driver=False, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = "the address is in RAY_ADDRESS, or left by `ray start` (`ray stop` removes it)"
            raise UsageError(f"--reward-devices ray: {message_of(error)}; {where}") from error
    while not {"GPU", "CPU"} & (has := ray.cluster_resources()).keys():
        run.warn("the Ray cluster has neither GPU nor CPU yet; waiting for its first node")
        time.sleep(10)
    return ray, "GPU" if "GPU" in has else "CPU"


class Actor:
    """The class of a Ray actor. It loads at its first call, which raises any errors of loading."""

    def __init__(self, *setup):
        self.setup, self.scorer = setup, None

    def call(self, method, *arguments):
        """Do a Pool's job -> its result, or "load" -> (how the actor draws, a line about it)."""
        try:
            self.scorer = self.scorer or workers.load(*self.setup)
            if method == "load":
                return self.scorer.look, f"{self.scorer.description}, at {socket.gethostname()}"
            return getattr(self.scorer, method)(*arguments)
        except (Exception, SystemExit) as error:
            raise workers.failure("Ray actor", error) from None


LOAD = ("Ray actor", "load")  # a job with a name in place of a number


class RayPool(workers.Pool):
    """A Pool of Ray actors: for "ray:N" N of them, for "ray" one per GPU of the cluster (per CPU if
    it has no GPU), also on nodes that join later. The least busy actor gets the next job; none has
    more than two. A lost actor is replaced if there is room, and free actors repeat its jobs."""

    def _start(self, make_renderer, make_reward, devices):
        self.ray, self.kind = connect_to_ray()
        self.count = int(devices[0][4:] or 0)
        self.node = self.ray.get_runtime_context().get_node_id()
        device = "cuda:0" if self.kind == "GPU" else "cpu"  # the one GPU that Ray lets it see
        self.setup = make_renderer, make_reward, device
        self.jobs, self.answers = deque(), deque()
        self.calls, self.lost = {}, 0  # {call: (actor, its job)}; actors lost since the last answer
        self._grow()

    def _grow(self):
        """Start missing actors: N, or as many as the cluster has room for."""
        count = self.count or int(self.ray.cluster_resources().get(self.kind, 0))
        while len(self.workers) < count:
            make = self.ray.remote(**{f"num_{self.kind.lower()}s": 1})(Actor)
            self.workers.append(make.remote(*self.setup))
            self.calls[self.workers[-1].call.remote("load")] = self.workers[-1], LOAD

    def wait_ready(self):
        while not self.lines:
            self._receive()
        return self.lines

    def take(self):
        rewards = super().take()
        self._grow()
        return rewards

    def _send(self, *job):
        self.jobs.append((self.sent, *job))
        self.sent += 1
        self._pump(0)

    def _next(self):
        for _ in range(2):
            deadline = time.monotonic() + workers.TIMEOUT
            while time.monotonic() < deadline:
                self._pump(1)
                if self.answers:
                    return self.answers.popleft()
                alive = [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]
                if self.node not in alive:  # then all of our actors have ended, too
                    raise RunError("Ray has ended on this machine")
            for actor in {actor for actor, job in self.calls.values() if job is not LOAD}:
                self.ray.kill(actor)  # perhaps it hangs: the others are idle
        problem = f"no answer from Ray's actors for {2 * workers.TIMEOUT} s"
        raise RunError(f"{problem}; is there room for them in the cluster?")

    def _pump(self, seconds):
        """Hand out jobs and wait at most `seconds` for an answer."""
        busy = Counter(actor for actor, _ in self.calls.values())
        busy.update(actor for actor, job in self.calls.values() if job is LOAD)  # counts as two
        while self.jobs and (free := [actor for actor in self.workers if busy[actor] < 2]):
            actor, job = min(free, key=busy.__getitem__), self.jobs.popleft()
            self.calls[actor.call.remote(*job[1:])] = actor, job
            busy[actor] += 1
        answers, _ = self.ray.wait([*self.calls], timeout=seconds) if self.calls else ([], [])
        for answer in answers:
            actor, job = self.calls.pop(answer)
            try:
                self.answers.append((job[0], self.ray.get(answer)))
                if job is not LOAD:
                    self.lost = 0
            except self.ray.exceptions.RayTaskError as error:
                self.answers.append((job[0], error.cause))
            except self.ray.exceptions.RayError as error:
                if job is not LOAD:
                    self.jobs.appendleft(job)
                if actor in self.workers:  # this is the first of its calls that fails
                    run.warn(f"a Ray actor is gone ({message_of(error)}); its jobs are repeated")
                    self.workers.remove(actor)
                    self.lost += 1
                    if self.lost > 2 * len(self.workers) + 3:  # perhaps one job kills its actors
                        raise RunError(f"{self.lost} Ray actors in a row were lost") from error
                    self._grow()

    def close(self):
        for actor in self.workers:
            self.ray.kill(actor)
