"""Who scores, where: a pool of worker processes or Ray actors.

pool = Pool(make_renderer, make_reward, ["cuda:0", "cuda:1"])
for states in episode:         # [N, S] at every step
    pool.put(states)           # full chunks go to the workers at once
rewards = pool.take()          # [T * N] float32 in the order of put; waits for the rest
"""

import collections
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker

import numpy as np
import torch
import torch.multiprocessing as mp

from clip_reward import RunError, Scorer, UsageError, first_line

# Silence the resource tracker's leaked-semaphore warning: a process that ends at once leaves some.
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NO_GUARD = 77  # exit code of a worker that imports a script which makes a Pool when imported
IN_PROCESS = "or use clip_reward.Scorer, which needs no workers"
LOADING = 600  # s that a worker gets, at least, to import, draw and load its model


@contextlib.contextmanager
def stop_signals_blocked():
    """Hold back stop signals while processes are started: these inherit the block and never see a
    signal to the whole group. This process handles it afterwards; till then a handler keeps it,
    because threads of libraries do not block it and would let it kill a process half started."""
    held, in_main = [], threading.current_thread() is threading.main_thread()
    signals = STOP_SIGNALS if in_main else ()  # only the main thread may set handlers
    handlers = {n: signal.signal(n, lambda number, _: held.append(number)) for n in signals}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    resource_tracker.ensure_running()  # inherits the block too, but unblocks two signals here
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


def kill_children() -> None:
    """Kill every process that multiprocessing started here; none has anything to save."""
    for process in mp.active_children():
        process.kill()


# atexit is too late: before it, concurrent.futures waits for chunks that nobody will take
threading._register_atexit(kill_children)


def warn(line: str) -> None:
    """Print one line to stderr, if that is still open."""
    with contextlib.suppress(OSError):
        os.write(2, f"WARNING: {line}\n".encode())


class Pool:
    """Workers that draw and score states in chunks of `batch_size`, up to two with each worker.

    No reward depends on which worker computed it. If a worker dies, or gives no answer for
    `timeout` seconds, it is replaced and its chunks are done again; the second loss before `take`
    raises RunError. Ray itself restarts actors whose process or node is lost; that does not count.
    What a worker raises is raised here, with its traceback.

    Args:
        make_renderer, make_reward: as for `Scorer`; picklable.
        devices: a worker for each (none: the pool is not used); or ["ray"], an actor per GPU of the
            cluster (per CPU if it has no GPU), later nodes included; or ["ray:N"], N actors.
    Attributes:
        render_s, clip_s: seconds of drawing and CLIP for the last `take`, a worker's on average.
        restarts: how many workers were replaced, by Ray or here.
        look: how all of them draw, such as "egl" or "warp".
    """

    def __init__(self, make_renderer, make_reward, devices, batch_size=64, timeout=600):
        self.setup = make_renderer, make_reward
        self.batch_size, self.timeout = batch_size, timeout
        self.rows, self.queue = [], collections.deque()  # states; jobs (number, method, states, ..)
        self.running, self.results = {}, {}  # {future: (worker, call)}; {number: result}
        self.sent = self.lost = self.restarts = 0
        self.workers, self.cluster, self.look, self.ready = [], None, "", False
        if devices and devices[0].startswith("ray"):
            self.count, self.cluster = int(devices[0][4:] or 0), connect_to_ray()
            self._grow()
        else:
            for device in devices:
                self._start(LocalWorker(*self.setup, device))

    def _grow(self):
        """Start missing actors: up to N, or as many as the cluster has room for."""
        ray, kind = self.cluster
        wanted = self.count or int(ray.cluster_resources().get(kind, 0))
        while len(self.workers) < wanted:
            self._start(RayWorker(ray, kind, self.setup, len(self.workers)))

    def _start(self, worker):
        if worker not in self.workers:
            self.workers.append(worker)
        worker.room, worker.jobs = 0, {}  # no chunk before it has loaded; {number: job} with it
        worker.since, worker.hung = time.monotonic(), ""
        self.running[worker.start()] = worker, "load"

    def wait_ready(self) -> list[str]:
        """Wait until every local worker, or one actor, has loaded -> lines: what they run on."""
        enough = 1 if self.cluster else len(self.workers)
        while sum(bool(worker.line) for worker in self.workers) < enough:
            self._pump(seconds=1)
        self.ready = True
        return [
            f"{worker.name}: {worker.line or 'joins when it is ready'}" for worker in self.workers
        ]

    def put(self, states: np.ndarray) -> None:
        """Hand in states [B, S], or frames [B, H, W, 3] uint8 if the pool has no renderer."""
        self.rows += [*np.array(states)]  # a copy: the caller may use the array again
        while len(self.rows) >= self.batch_size:
            self._send("score", self.rows[: self.batch_size])
            del self.rows[: self.batch_size]
        self._pump(seconds=0)

    def take(self) -> np.ndarray:
        """Wait for the rewards [B, ...] float32 of all that was put since the last `take`."""
        if self.rows:
            self._send("score", self.rows)
        self.rows = []
        rewards, render_s, clip_s = zip(*self._collect() or [(np.empty(0, np.float32), 0, 0)])
        count = len(self.workers)
        self.render_s, self.clip_s = sum(render_s) / count, sum(clip_s) / count
        if self.cluster:
            self._grow()
        return np.concatenate(rewards)

    def score(self, states: np.ndarray) -> np.ndarray:
        """`put` and `take`."""
        self.put(states)
        return self.take()

    def render(self, states: np.ndarray, size: int | None = None) -> np.ndarray:
        """Draw states [B, S] -> [B, H, W, 3] uint8, as `Scorer.render`."""
        self._send("render", states, size)
        return self._collect()[0]

    def _send(self, method, states, *more):
        self.queue.append((self.sent, method, np.array(states), *more))
        self.sent += 1

    def _collect(self):
        while len(self.results) < self.sent:
            self._pump(seconds=1, all_is_sent=True)
        parts = [self.results.pop(number) for number in range(self.sent)]
        self.sent = self.lost = 0
        return parts

    def _call(self, worker, *call):
        if worker.room == 2:
            worker.since = time.monotonic()
        worker.room -= 1
        self.running[worker.submit(*call)] = worker, call[0]

    def _pump(self, seconds, all_is_sent=False):
        """Hand out chunks, wait at most `seconds` for a result, collect, replace lost workers. When
        all is sent, idle workers are asked for what their GPUs still compute."""
        while self.queue and (worker := max(self.workers, key=lambda worker: worker.room)).room:
            number, method, *arguments = job = self.queue.popleft()
            worker.jobs[number] = job
            self._call(worker, method, number, *arguments)
        for worker in self.workers:
            if all_is_sent and not self.queue and worker.jobs and worker.room == 2:
                self._call(worker, "finish")
        lost = {}
        for future in wait(self.running, seconds, FIRST_COMPLETED).done:
            worker, call = self.running[future]
            try:
                result = future.result()
            except Exception as error:
                if not worker.is_lost(error):
                    raise getattr(error, "cause", error) from None  # Ray wraps what an actor raises
                lost[worker] = error
                continue
            del self.running[future]
            worker.since = time.monotonic()
            if call == "load":
                self._joined(worker, *result)
                continue
            worker.room += 1
            for number, part in result:
                self.results[number] = part
                worker.jobs.pop(number, None)
            if call == "finish":  # a restarted actor has forgotten what it was given
                self.queue.extendleft(worker.jobs.values())
                worker.jobs = {}
        for worker, error in lost.items():
            self._replace(worker, error)
        for worker, call in self.running.values():
            limit = max(LOADING, self.timeout) if call == "load" else self.timeout
            if time.monotonic() - worker.since > limit:
                worker.since = time.monotonic()
                if self.cluster and call == "load":
                    warn(f"{worker.name} has not loaded yet; is there room for it in the cluster?")
                    continue
                worker.hung = f"gave no answer for {limit} s (--worker-timeout)"
                worker.kill()  # the next round finds it lost

    def _joined(self, worker, look, line):
        """Let a worker start once it has loaded, if it draws as the others do."""
        self.look = self.look or look
        if look != self.look:
            problem = f"{worker.name} draws by {look}, the others by {self.look}"
            raise RunError(f"{problem}: choose with --renderer")
        worker.line, worker.room = line, 2
        if self.ready:  # a later actor, or one on another node
            print(f"{worker.name}: {line}", flush=True)

    def _replace(self, worker, error):
        self.running = {f: what for f, what in self.running.items() if what[0] is not worker}
        self.queue.extendleft(reversed(worker.jobs.values()))
        how = worker.hung or worker.death(error)
        self.restarts += 1
        self.lost += bool(worker.hung) or isinstance(worker, LocalWorker)
        if self.lost > 1:
            raise RunError(f"{worker.name} {how}: the second lost worker in one rollout") from None
        warn(f"{worker.name} {how}; it is started again")
        self._start(worker)

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()


def _load(make_renderer, make_reward, device):
    """Set up a worker's process and its scorer -> how it draws, and a line: what it runs on."""
    global scorer
    if parent := mp.parent_process():  # a Ray actor has none
        with contextlib.suppress(AttributeError):  # Linux: end with the parent, however that ends
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent.pid:  # it has ended already
            os._exit(1)
    if device == "cpu":
        torch.set_num_threads(1)  # whatever the number of workers, the same sums in the same order
        os.nice(10)  # physics first: the next states wait for it
    # timm would import wandb: three seconds, and folders in /tmp that a killed worker leaves
    sys.modules.setdefault("wandb", None)
    scorer = Scorer(make_renderer, make_reward, device)
    return scorer.look, scorer.description


computing = collections.deque()  # (number, launched) of chunks on this worker's GPU


def _work(method, number=None, *args):
    """Score or render job `number` -> [(number, result)] of all jobs that are done. A GPU's chunk
    counts as done once the next one has been drawn, or at "finish"."""
    if method == "render":
        return [(number, scorer.render(*args))]
    if method == "score":
        computing.append((number, scorer.launch(*args)))
    left = 1 if method == "score" and scorer.device.type != "cpu" else 0
    done = [computing.popleft() for _ in range(len(computing) - left)]
    return [(number, scorer.finish(launched)) for number, launched in done]


def _call(method, *args):
    """Load or work. Exceptions become a RunError with their traceback as text, because not all can
    be pickled."""
    try:
        return _load(*args) if method == "load" else _work(method, *args)
    except (UsageError, RunError):
        raise
    except Exception:
        raise RunError(f"a reward worker failed:\n{traceback.format_exc()}") from None


class LocalWorker:
    """A process of this machine, behind an executor."""

    def __init__(self, *setup):
        self.setup, self.name, self.line = setup, f"reward worker on {setup[-1]}", ""

    def start(self):
        path = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
        parts = [getattr(part, "func", part) for part in self.setup[:2]]
        needed = path or any(getattr(part, "__module__", "") == "__main__" for part in parts)
        if needed and not os.path.isfile(path or ""):
            problem = "workers cannot import code without a file: save it in one"
            raise UsageError(f"{problem}, {IN_PROCESS}")
        if getattr(mp.current_process(), "_inheriting", False):  # a worker, which imports the file
            os._exit(NO_GUARD)
        before = set(mp.active_children())
        with stop_signals_blocked():
            self.executor = ProcessPoolExecutor(1, mp.get_context("spawn"))  # CUDA wants spawn
            ready = self.executor.submit(_call, "load", *self.setup)
        (self.process,) = set(mp.active_children()) - before
        return ready

    def submit(self, *job):
        try:
            return self.executor.submit(_call, *job)
        except BrokenProcessPool as error:  # it died while it was idle
            failed = Future()
            failed.set_exception(error)
            return failed

    def is_lost(self, error):
        return isinstance(error, BrokenProcessPool)

    def death(self, error):
        self.process.join()
        if self.process.exitcode == NO_GUARD:
            guard = 'make the Pool below `if __name__ == "__main__":`'
            raise UsageError(f"workers import this file: {guard}, {IN_PROCESS}")
        return "died (out of memory?)"

    def kill(self):
        self.process.kill()

    close = kill


class Actor:
    """The class of a Ray actor. It loads at its first call, which raises any errors of loading."""

    def __init__(self, *setup):
        self.setup, self.line = setup, None

    def call(self, *job):
        if not self.line:
            look, line = _call("load", *self.setup)
            self.line = look, f"{line}, at {socket.gethostname()}"
        return _call(*job) if job else self.line


class RayWorker:
    """An actor of a Ray cluster, which restarts it wherever there is room."""

    def __init__(self, ray, kind, setup, number):
        self.ray, self.name, self.line = ray, f"Ray actor {number}", ""
        options = {"max_restarts": -1, f"num_{kind.lower()}s": 1}
        device = "cuda:0" if kind == "GPU" else "cpu"  # the one GPU that Ray lets it see
        self.actor = ray.remote(**options)(Actor).remote(*setup, device)

    def start(self):
        return self.actor.call.options(max_task_retries=-1).remote().future()

    def submit(self, *job):
        return self.actor.call.remote(*job).future()

    def is_lost(self, error):
        errors = self.ray.exceptions
        return isinstance(error, errors.RayError) and not isinstance(error, errors.RayTaskError)

    def death(self, error):
        return f"is gone ({first_line(error)})"

    def kill(self):
        self.ray.kill(self.actor, no_restart=False)

    def close(self):
        self.ray.kill(self.actor)


def connect_to_ray():
    """Connect to the cluster of RAY_ADDRESS or `ray start`, else start one on this machine -> (ray,
    "GPU" or, where it has none, "CPU"); waits for its first node. Raises UsageError."""
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # or a wrong address takes 40 s to fail
    try:
        import ray
    except ImportError:
        raise UsageError('--reward-devices ray needs Ray: pip install ".[ray]"') from None
    if not ray.is_initialized():
        try:
            ray.init(logging_level="error", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = "the address is RAY_ADDRESS, or was left by `ray start` (`ray stop` removes it)"
            raise UsageError(f"--reward-devices ray: {error}; {where}") from error
    while not {"GPU", "CPU"} & (has := ray.cluster_resources()).keys():
        warn("the Ray cluster has neither GPU nor CPU yet; waiting for its first node")
        time.sleep(10)
    return ray, "GPU" if "GPU" in has else "CPU"
