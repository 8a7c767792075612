"""Processes of this machine that draw and score: states out, rewards back.

pool = make_pool(make_renderer, make_reward, ["cuda:0", "cuda:1"])
for states in episode:         # [N, S] at every step
    pool.put(states)           # full chunks go to the workers at once
rewards = pool.take()          # [T * N] float32 in the order of put; waits for the rest
"""

import multiprocessing as mp
import os
import queue
import sys
import threading
import traceback
from multiprocessing import connection

import numpy as np
import torch

from clip_reward import RunError, Scorer, UsageError, one_line
from training.run import children, stop_signals_blocked

TIMEOUT = 600  # seconds without an answer from any worker or environment, after which a run ends


def make_pool(make_renderer, make_reward, devices, batch_size=64):
    """Make a Pool, or for the devices ["ray"] and ["ray:N"] a RayPool."""
    if devices and devices[0].startswith("ray"):
        from training.ray_workers import RayPool

        return RayPool(make_renderer, make_reward, devices, batch_size)
    return Pool(make_renderer, make_reward, devices, batch_size)


class Pool:
    """Workers that draw and score states in chunks of `batch_size`. All take the next chunk from
    one queue, so a slow one delays no other, and no reward depends on which worker computed it.

    RunError is raised when a worker fails or dies, or when none answers for ten minutes; a worker's
    UsageError is raised as it is. Workers end with this process, however it ends.

    Args:
        make_renderer, make_reward: as for `Scorer`; picklable.
        devices: one worker runs on each.
    Attributes:
        render_s, clip_s: seconds of drawing and CLIP for the last `take`, averaged over workers.
        look: how all workers draw, "egl" or "warp", once they are ready.
    """

    def __init__(self, make_renderer, make_reward, devices, batch_size=64):
        self.batch_size, self.rows = batch_size, []
        self.sent, self.collected = 0, 0  # jobs so far
        self.workers, self.answers = [], []  # processes, and the end of a pipe from each
        self.render_s, self.clip_s, self.look = 0.0, 0.0, ""
        self.lines, self.results = [], {}  # for `wait_ready`; {number of a job: its result}
        self._start(make_renderer, make_reward, devices)

    def _start(self, make_renderer, make_reward, devices):
        with stop_signals_blocked():
            context = mp.get_context("spawn")  # CUDA needs spawn
            self.jobs = context.Queue()
            self.jobs.cancel_join_thread()  # jobs left in it do not keep this process alive
            for device in devices:
                receiver, sender = context.Pipe(duplex=False)
                setup = self.jobs, sender, make_renderer, make_reward, device
                self.workers.append(context.Process(target=work, args=setup))
                self.workers[-1].start()
                sender.close()  # only the worker's end is left: if the worker dies, the pipe ends
                self.answers.append(receiver)
        children.extend(self.workers)

    def wait_ready(self) -> list[str]:
        """Wait until all workers have loaded -> lines that name their devices and renderers."""
        while len(self.lines) < len(self.workers):
            self._receive()
        return self.lines

    def put(self, states: np.ndarray) -> None:
        """Hand in states [B, S], or frames [B, H, W, 3] uint8 if the pool has no renderer."""
        self.rows += [*np.array(states)]  # a copy: the caller may use the array again
        while len(self.rows) >= self.batch_size:
            self._send("score", np.array(self.rows[: self.batch_size]))
            del self.rows[: self.batch_size]

    def take(self) -> np.ndarray:
        """Wait for the rewards [B] float32 of all that was put since the last `take`. Raises
        RunError for rewards of another shape."""
        if self.rows:
            self._send("score", np.array(self.rows))
        self.rows = []
        rewards, render_s, clip_s = zip(*self._collect() or [(np.empty(0, np.float32), 0, 0)])
        count = max(1, len(self.workers))
        self.render_s, self.clip_s = sum(render_s) / count, sum(clip_s) / count
        if shape := rewards[0].shape[1:]:
            made = f"[B{''.join(f', {n}' for n in shape)}]"
            raise RunError(f"the reward module returned {made}; it must return [B]")
        return np.concatenate(rewards)

    def score(self, states: np.ndarray) -> np.ndarray:
        """Call `put`, then `take`."""
        self.put(states)
        return self.take()

    def render(self, states: np.ndarray, size: int | None = None) -> np.ndarray:
        """Draw states [B, S] -> [B, H, W, 3] uint8, as `Scorer.render` does."""
        self._send("render", np.array(states), size)
        return self._collect()[0]

    def _send(self, *job):
        self.jobs.put((self.sent, *job))
        self.sent += 1

    def _collect(self):
        """Wait for the results of all jobs since the last call -> list, in their order."""
        numbers, self.collected = range(self.collected, self.sent), self.sent
        for number in numbers:
            while number not in self.results:
                self._receive()
        return [self.results.pop(number) for number in numbers]

    def _receive(self):
        """Wait for one message from a worker: the result of a job, how it draws, or an error."""
        number, result = self._next()
        if isinstance(result, Exception):
            raise result
        if isinstance(number, int):
            self.results[number] = result
            return
        look, line = result
        self.look = self.look or look
        if look != self.look:
            problem = f"{number} draws with {look}, but the others draw with {self.look}"
            raise RunError(f"{problem}: choose one with --renderer")
        self.lines.append(f"{number}: {line}")

    def _next(self):
        ready = connection.wait(self.answers, TIMEOUT)
        if not ready:
            raise RunError(f"no answer from the reward workers for {TIMEOUT} s")
        try:
            return ready[0].recv()
        except (EOFError, OSError):
            worker = self.workers[self.answers.index(ready[0])]
            worker.join(5)  # it may still print why
            code = f"exit code {worker.exitcode}; -9 often means too little memory"
            raise RunError(f"a reward worker died ({code})") from None

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.kill()


def load(make_renderer, make_reward, device):
    """Set up this process as a worker -> its Scorer."""
    if device == "cpu":
        torch.set_num_threads(1)  # so that sums do not depend on the number of workers
        os.nice(10)  # physics first: the next states wait for it
    # timm would import wandb, which takes three seconds and leaves folders if a worker is killed
    sys.modules.setdefault("wandb", None)
    return Scorer(make_renderer, make_reward, device)


def failure(name, error):
    """Return an exception in a form that can be sent to another process, since it may not pickle: a
    RunError with the traceback, whose last line says what failed."""
    if isinstance(error, UsageError | RunError):
        return error
    trace = "".join(traceback.format_exception(error))
    return RunError(f"{trace}the {name} failed: {one_line(error)}")


def end_with_parent():
    """End this process as soon as its parent has ended, however it ended."""
    connection.wait([mp.parent_process().sentinel])
    os._exit(1)


def work(jobs, answers, make_renderer, make_reward, device):
    """Be a worker: load, then do jobs (number, method, *arguments). Wait for a GPU's
    result only after drawing the next chunk, if there is one."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    name, launched = f"reward worker on {device}", []
    try:
        scorer = load(make_renderer, make_reward, device)
        answers.send((name, (scorer.look, scorer.description)))
        while True:
            try:
                number, method, *arguments = jobs.get(block=not launched)
            except queue.Empty:
                method = "finish"
            if method == "render":
                answers.send((number, scorer.render(*arguments)))
            elif method == "score":
                launched.append((number, scorer.launch(*arguments)))
            while launched and (method != "score" or device == "cpu" or launched[1:]):
                number, chunk = launched.pop(0)
                answers.send((number, scorer.finish(chunk)))
    except (Exception, SystemExit) as error:
        answers.send((name, failure(name, error)))
