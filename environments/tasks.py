"""Gymnasium tasks as both scripts use them: how a task is made, what its pictures are drawn from,
episodes that never end, and a process for each environment."""

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import traceback
from typing import Any

import gymnasium as gym
import numpy as np
from PIL import Image, ImageOps

import egl_render
from clip_reward import (
    RunError,
    UsageError,
    message_of,
    one_line,
    render_size_of,
    scored_steps,
)
from environments import classic, own_render
from training.run import children, free_memory, stop_signals_blocked, warn
from training.workers import TIMEOUT, failure
from warp_render import WarpRenderer


def make_task(env_id: str, **kwargs: Any) -> gym.Env:
    """Call `gym.make`, but without the window that some tasks open by default."""
    with contextlib.suppress(Exception):  # gym.make says what is wrong
        module, _, name = env_id.rpartition(":")
        if module:
            importlib.import_module(module)
        creator = gym.spec(name).entry_point
        if isinstance(creator, str):
            creator = gym.envs.registration.load_env_creator(creator)
        if inspect.signature(creator).parameters["render_mode"].default == "human":
            kwargs = {"render_mode": None} | kwargs
    return gym.make(env_id, **kwargs)


@contextlib.contextmanager
def errors_of_task(env_id: str) -> Any:
    """Turn any error of a user's task into a UsageError that says where it was raised."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        cause = error.__cause__ if isinstance(error, RunError) and error.__cause__ else error
        problem = message_of(error)
        if not isinstance(cause, RunError | gym.error.Error):
            place = traceback.extract_tb(cause.__traceback__)[-1]
            problem = one_line(cause) if str(cause) else repr(place.line)
            problem += f" ({os.path.basename(place.filename)}, line {place.lineno})"
        if isinstance(cause, gym.error.UnregisteredEnv):
            own = f"For your own task, type --env-id MODULE:{env_id}, which imports MODULE.py"
            problem += f" {own}" if ":" not in env_id else " The module has to register it"
        raise UsageError(f"--env-id {env_id}: {problem}") from error


@functools.cache  # making an environment takes time
def why_own_render(env_id: str) -> str:
    """Return why only its own render() can draw the task, or "" if it is drawn from states. Raises
    UsageError if the task cannot be made."""
    if env_id in classic.TASKS:
        return ""
    egl_render.setup_gl()  # before mujoco is imported
    egl_render.quiet_mujoco()
    with errors_of_task(env_id):
        return own_render.why_own_render(functools.partial(make_task, env_id))


def how_drawn(env_id: str) -> str:
    """Return a sentence that says what the pictures of a task are made from."""
    why = why_own_render(env_id)
    by_states = "from its states, by workers that start now"
    return f"{env_id} is drawn " + (f"by its own render(): {why}" if why else by_states)


def describe_env(env_id: str, make: Any) -> tuple[gym.Space, np.ndarray | None, int]:
    """Make an environment, and step and draw it once -> the action space, a state [S] float64 (None
    for a task that draws itself), and the size of an observation. Raises UsageError if anything
    fails."""
    with errors_of_task(env_id):
        env = make()
        env.reset(seed=0, options={"film": True})
        env.action_space.seed(0)
        info = env.step(env.action_space.sample())[-1]
        env.close()  # some tasks allow only one environment at a time
    return env.action_space, info.get("states"), env.observation_space.shape[0]


def check_drawing(args: Any, state: np.ndarray | None) -> None:
    """Raise UsageError for flags that mean nothing for a task with this `state`, and warn of a
    --render-size beyond the one that a model's folder names."""
    if args.judge and state is None:
        raise UsageError(f"--judge: {args.env_id} has no states to judge")
    if state is None or args.env_id in classic.TASKS:
        for name in egl_render.CAMERA_VALUES:
            if getattr(args, f"camera_{name}") not in (None, ()):
                raise UsageError(f"--camera-{name}: {args.env_id} has no camera")
    size, suits = args.render_size, render_size_of(args.clip_model)
    if args.reward == "clip" and (size or 0) > suits and suits != 480:  # 480: no size is named
        model = args.clip_model.removeprefix("local-dir:")
        warn(f"--render-size {size}: {model} is made for {suits}, which it gets without this flag")


def own_picture(env: gym.Env, size: int, shape: tuple | None = None) -> np.ndarray:
    """Return the picture of the task's own render() [H, W, 3] uint8, at most `size` high and wide,
    with black bars if its shape is not `shape`. Raises RunError if render() gives no picture."""
    frame: Any = env.render()
    form = frame.shape[2:] if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 else None
    if form not in ((), (1,), (3,), (4,)):
        given = getattr(frame, "shape", type(frame).__name__), getattr(frame, "dtype", "")
        raise RunError(f"its render() must return [H, W, 3] uint8, not {given[0]} {given[1]}")
    image = Image.fromarray(frame[..., 0] if form == (1,) else frame).convert("RGB")
    image.thumbnail((size, size))  # never enlarges
    return np.asarray(ImageOps.pad(image, shape[1::-1]) if shape else image)


def simulated_time(env: Any) -> float:
    """Return the time of MuJoCo's simulation in seconds, 0 for other tasks."""
    data = vars(env.unwrapped).get("data")  # a property is not read: it may do anything
    mujoco: Any = sys.modules.get("mujoco")
    return data.time if mujoco and isinstance(data, mujoco.MjData) else 0.0


class EndlessEpisodes(gym.Wrapper):
    """Episodes that never end by themselves: an early end would leak information about the task
    (section 4.1 of the paper). `info`, which is pickled at every step, only keeps "states" or
    "frames" for pictures, and "success" where the task has a rule of its own.

    Frames, [H, W, 3] uint8 of at most --render-size and all of the first one's shape, are rendered
    at the steps that CLIP scores. A `filmed` environment renders all steps of an episode that began
    with reset(options={"film": True})."""

    def __init__(self, env: gym.Env, args: Any, by_state: bool, filmed: bool) -> None:
        super().__init__(env)
        self.by_state = by_state  # whether pictures are drawn from states
        self.filmed = filmed and args.video_freq > 0
        self.frame_size = args.frame_size
        self.frame_shape: Any = None  # of the first
        steps = scored_steps(args.episode_length, args.score_every)
        self.rendered = [] if args.reward == "ground-truth" else steps

    def call(self, method, *args, **kwargs):
        try:
            result = method(*args, **kwargs)
            shape, wanted = np.shape(result[0]), self.observation_space.shape
            if shape != wanted:  # Gymnasium would broadcast one number
                raise RunError(f"its observation has the shape {shape}, not {wanted}")
            return result
        except (Exception, SystemExit) as error:
            # an error that cannot be pickled would make Gymnasium wait for ever
            raise failure("environment", error) from error

    def reset(self, *, seed=None, options=None):
        self.t = 0
        self.film = self.filmed and options["film"]
        return self.call(self.env.reset, seed=seed)

    def step(self, action):
        return self.call(self._step, action)

    def _step(self, action):
        before = simulated_time(self)
        observation, reward, _, _, info = self.env.step(action)
        if simulated_time(self) < before:
            raise RunError(egl_render.UNSTABLE)
        success = info.get("success", info.get("is_success"))
        try:
            info = {} if success is None else {"success": float(np.mean(success))}
        except (TypeError, ValueError) as error:
            raise RunError(f"the success in its info is not a number: {success!r}") from error
        if self.by_state:
            task = self.unwrapped
            known = self.spec.id in classic.TASKS
            info["states"] = (
                np.array(task.state, np.float64) if known else egl_render.state_of(task.data)
            )
        elif self.film or self.t in self.rendered:
            info["frames"] = own_picture(self.env, self.frame_size, self.frame_shape)
            self.frame_shape = info["frames"].shape
        self.t += 1
        return observation, float(reward), False, False, info


def make_endless(args: Any, by_state: bool, filmed: bool = False, **kwargs: Any) -> gym.Env:
    """Make one environment with flat observations and endless episodes. Raises UsageError for
    observations that vary in size.

    Args:
        by_state: whether its pictures are drawn from states, that is `not why_own_render(..)`.
        filmed: whether videos show this environment.
        kwargs: for `gym.make`.
    """
    if multiprocessing.parent_process() is not None:
        gym.logger.min_level = gym.logger.ERROR  # the parent has printed the same warnings
    kwargs |= {"max_episode_steps": -1}  # no time limit
    if args.env_id in classic.TASKS:  # the checker would warn about angles beyond 24 degrees
        env = gym.make(args.env_id, disable_env_checker=True, **kwargs)
        env = classic.TASKS[args.env_id](env)
    else:
        egl_render.quiet_mujoco()
        if not by_state and (args.reward != "ground-truth" or args.video_freq):
            kwargs["render_mode"] = "rgb_array"
        try:  # True would make v4 tasks pay the healthy reward in every state
            env = make_task(args.env_id, terminate_when_unhealthy=False, **kwargs)
        except Exception:  # a task without this flag
            env = make_task(args.env_id, **kwargs)
    flat = False
    with contextlib.suppress(NotImplementedError):  # a space of the package's own, such as words
        flat = env.observation_space.is_np_flattenable
    if not flat:
        problem = "its observations vary in size or are not numbers; a wrapper can flatten them"
        raise UsageError(f"--env-id {args.env_id}: {problem}")
    if len(env.observation_space.shape or ()) != 1:  # pictures, a Dict, a number
        env = gym.wrappers.FlattenObservation(env)
    return EndlessEpisodes(env, args, by_state, filmed)


def environment_process(index, make, pipe, parent_pipe, memory, errors, *more):
    """Run Gymnasium's worker, but without its traceback when the script is gone, or when the
    environment cannot be made."""
    from gymnasium.vector.async_vector_env import _async_worker

    def made():
        try:
            return make()
        except Exception as error:
            errors.put((index, RunError, failure("environment", error), ""))
            pipe.send((None, False))
            raise SystemExit from None

    with contextlib.suppress(EOFError, BrokenPipeError):
        _async_worker(index, made, pipe, parent_pipe, memory, errors, *more)


def make_vector_env(args: Any, thunks: list) -> gym.vector.VectorEnv:
    """Return environments as one vector environment that never resets itself. Each has its own
    process, except classic tasks: their steps take microseconds, so they stay in this one."""
    modes: dict = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}
    if len(thunks) == 1 or args.env_id in classic.TASKS:
        return gym.vector.SyncVectorEnv(thunks, **modes)
    if len(tempfile.gettempdir()) > 60:  # the forkserver's socket: a path of at most 107 characters
        tempfile.tempdir = "/tmp"
    # forkserver: processes share the modules below, and inherit neither CUDA nor threads
    multiprocessing.set_forkserver_preload(["torch", "gymnasium.envs.mujoco"])
    if 60_000_000 * len(thunks) > free_memory():  # bytes of each process; measured: 73 MB
        raise UsageError(f"--num-envs {len(thunks)}: too little memory is free for so many")
    before = set(multiprocessing.active_children())
    with stop_signals_blocked():
        modes |= {"context": "forkserver", "worker": environment_process, "copy": False}
        try:
            envs = gym.vector.AsyncVectorEnv(thunks, **modes)
        except (EOFError, ConnectionError) as error:
            raise RunError("an environment's process died while starting") from error
        finally:  # some processes may live although another one could not be made
            children.extend(set(multiprocessing.active_children()) - before)
    waits: Any = envs
    waits.reset_wait = functools.partial(envs.reset_wait, timeout=TIMEOUT)
    waits.step_wait = functools.partial(envs.step_wait, timeout=TIMEOUT)
    return envs


def make_renderer(
    args: Any, device: Any = "cpu", size: int | None = None, camera: Any = None
) -> Any:
    """Make a renderer of states on a device, at --render-size or another `size`, for a `Scorer`.
    Settings of a MuJoCo task's camera that no flag gives come from `camera`, an
    egl_render.Camera, or are chosen by `egl_render.choose_camera`."""
    size = size or args.frame_size
    if args.env_id in classic.TASKS:
        textured = args.textured and args.env_id != "CartPole-v1"
        return classic.ClassicRenderer(args.env_id, size, textured)
    egl_render.setup_gl(device)  # before mujoco is imported
    egl_render.quiet_mujoco()
    env = make_task(args.env_id).unwrapped
    camera = egl_render.choose_camera(args, env, camera)
    model = egl_render.drawn_model(env, args.textured, sites_as_geoms=True)
    if egl_render.draws_by_warp(args, model):
        return WarpRenderer(model, size, camera, device)
    return egl_render.MujocoRenderer(egl_render.drawn_model(env, args.textured), size, camera)
