"""Several environments side by side, as one Gymnasium vector environment without autoreset: the
last observation of an episode is its own."""

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.resource_tracker
import signal

from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import _async_worker

from clip_reward import end_with_parent


def worker(*arguments):
    """A process for an environment: Gymnasium's, silent when the run is gone."""
    end_with_parent()
    with contextlib.suppress(EOFError, ConnectionError):
        _async_worker(*arguments)


def in_this_process(make_env, num_envs):
    return SyncVectorEnv([make_env] * num_envs, autoreset_mode=AutoresetMode.DISABLED)


@contextlib.contextmanager
def signals_later():
    """Ctrl-C and SIGTERM count when this is over: processes that are half started would complain.
    Those that start in it do not get Ctrl-C, not even while they import."""
    numbers, came = (signal.SIGINT, signal.SIGTERM), []
    handlers = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    multiprocessing.resource_tracker.ensure_running()  # which would unblock it when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in zip(numbers, handlers):
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def in_processes(make_env, num_envs, timeout):
    """A process for each; one that gives no answer for `timeout` seconds raises
    multiprocessing.TimeoutError."""
    # forkserver: processes share what is imported once, and inherit neither CUDA nor each other's
    # pipes, so that they end when this process does, however it does.
    multiprocessing.set_forkserver_preload(["torch", "gymnasium.envs.mujoco"])
    atexit.register(lambda: [process.kill() for process in multiprocessing.active_children()])
    options = {"copy": False, "autoreset_mode": AutoresetMode.DISABLED, "worker": worker}
    with signals_later():
        envs = AsyncVectorEnv([make_env] * num_envs, context="forkserver", **options)
    envs.reset_wait = functools.partial(envs.reset_wait, timeout=timeout)
    envs.step_wait = functools.partial(envs.step_wait, timeout=timeout)
    return envs
