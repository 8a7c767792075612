"""Does a state do what the prompt says? A function `states -> bool` for every task of the paper.

    judges.TASKS["kneeling"].judge(states)            # [B, S] float64 -> [B] bool
    judges.find_task("my_task.py:somersault", None)   # your own function of states

Prompts and criteria in words are in tasks.toml. arXiv 2310.12921 judges its videos by the same
criteria (appendix on the humanoid's tasks); here MuJoCo's geometry and contacts turn them into
numbers. The judges share no code with the pose library in tiny_clip/, but their limits were chosen
by looking at its samples and at frames of a run. The limits are strict about the prompt, but not
about style (where the arms of a kneeling robot are, how straight it stands, whether it rocks).
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import runpy
import sys
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np

import egl_render
from clip_reward import UsageError, one_line
from environments import classic

REACH = 0.10  # m: contacts are searched for up to this height above the floor
TOUCH = 0.06  # m: anything nearer looks as if it touches the floor; a rocking robot never lies flat
KNEE_TOUCH = 0.08  # m: the same for knees; up to here, frames of a run look like kneeling
KNEE = 0.12  # m from the knee joint: contacts of shin or thigh within this distance are the knee's
SIDES = ("right", "left")
OUTWARD = np.array([[1, -1, 1], [1, 1, 1]])  # of right and left
PARTS = {
    "trunk": ("torso1", "head", "uwaist", "lwaist"),
    "pelvis_floor": ("butt",),
    "arms": ("right_uarm1", "right_larm", "right_hand", "left_uarm1", "left_larm", "left_hand"),
}


@functools.lru_cache(1)
def _humanoid():
    """Return Gymnasium's humanoid, which reports contacts with the floor within REACH: (mujoco,
    model, data, {name of a geom: its number})."""
    egl_render.setup_gl()  # which has to come before mujoco
    import mujoco

    assets = os.path.join(os.path.dirname(gymnasium.__file__), "envs/mujoco/assets")
    model = mujoco.MjModel.from_xml_path(os.path.join(assets, "humanoid.xml"))
    model.geom_margin[model.geom("floor").id] = REACH  # nothing is stepped with this model
    return mujoco, model, mujoco.MjData(model), {model.geom(i).name: i for i in range(model.ngeom)}


def _outside(point, corners):
    """Return the distance [m] of a point [2] from the hull of corners [K, 2], inf if K is 0."""
    if not len(corners):
        return math.inf
    way = corners - point
    angles = np.sort(np.arctan2(way[:, 1], way[:, 0]))
    if np.diff(angles, append=angles[0] + 2 * np.pi).max() < np.pi:
        return 0.0
    # the nearest point of the hull lies on a segment between two corners (or is one of them)
    start, along = way[:, None], way[None] - way[:, None]
    t = -(start * along).sum(-1) / np.maximum((along**2).sum(-1), 1e-12)
    return float(np.linalg.norm(start + np.clip(t, 0, 1)[..., None] * along, axis=-1).min())


def measure(states):
    """Measure the geometry and contacts of humanoid states.

    Args:
        states: [B, 24] qpos or [B, 47] qpos and qvel, float64 (m, unit quaternion, radians and
            their rates). Without qvel the robot is taken to be at rest.
    Returns:
        dict of arrays, lengths in m:
        up [B]: z of the torso's upward axis, 1 is upright.
        head, pelvis [B], hand [B, 2]: heights of their centres.
        imbalance [B]: by how much the extrapolated centre of mass, com + velocity sqrt(height / g)
            (Hof et al. 2005, J. Biomechanics 38), lies outside the hull of the contacts with the
            floor; inf in the air.
        trunk, pelvis_floor, arms [B]: gap to the floor of torso, head and waist; of the pelvis; of
            arms and hands. inf beyond REACH.
        foot, shin, thigh, knee [B, 2] (right, left): gap to the floor. A knee is the part of shin
            and thigh within KNEE of the joint.
        bend [B, 2]: angle of the knee in radians, 0 is straight.
        shin_front [B, 2]: z of the shin's forward axis, -1 if it lies on the floor as in kneeling.
        knee_at, foot_at [B, 2, 3]: place relative to the pelvis: forward, outward to that side, up.
            Forward is horizontal, as the robot faces (it means nothing if |up| is small).
        hand_at [B, 2, 3]: place of the hand relative to the torso in the torso's own axes: forward,
            outward, up. The torso's centre is 6 cm below the shoulders, 47 cm above the hips.
        hand_hip [B, 2]: gap between the hand and the nearest of pelvis, lower waist and thighs.
    Raises:
        ValueError: wrong number of columns.
    """
    states = np.asarray(states, np.float64)
    if states.ndim != 2 or states.shape[1] not in (24, 47):
        raise ValueError(f"humanoid states must be [B, 24] or [B, 47], not {states.shape}")
    rows = [_facts(state) for state in (states if len(states) else np.zeros((1, 24)))]
    return {name: np.array([row[name] for row in rows])[: len(states)] for name in rows[0]}


def _facts(state):
    """Return `measure` of one state [24 or 47]."""
    mujoco, model, data, geom = _humanoid()
    data.qpos[:] = state[:24]
    data.qvel[:] = state[24:] if state.size > 24 else 0
    # the part of mj_forward without forces: positions, contacts, velocities
    mujoco.mj_fwdPosition(model, data)
    mujoco.mj_fwdVelocity(model, data)
    mujoco.mj_subtreeVel(model, data)
    limbs = ("hand", "foot", "shin1", "thigh1")
    hands, feet, shins, thighs = ([geom[f"{side}_{limb}"] for side in SIDES] for limb in limbs)
    at, torso, knees = data.geom_xpos, data.body("torso"), [data.body(f"{s}_shin") for s in SIDES]
    on_floor = (data.contact.geom == geom["floor"]).any(1)
    others = data.contact.geom.sum(1)[on_floor] - geom["floor"]
    dist, place = data.contact.dist[on_floor], data.contact.pos[on_floor]
    hips = (geom["butt"], geom["lwaist"], *thighs)
    gap, knee_gap, hand_hip = np.full(model.ngeom, np.inf), [], []
    np.minimum.at(gap, others, dist)
    for hand, shin, thigh, knee in zip(hands, shins, thighs, knees):
        near = np.linalg.norm(place - knee.xpos, axis=1) <= KNEE
        near &= (others == shin) | (others == thigh)
        knee_gap.append(dist[near].min(initial=np.inf))
        ways = [mujoco.mj_geomDistance(model, data, hand, hip, 2.0, None) for hip in hips]
        hand_hip.append(min(ways))
    ahead = math.sqrt(max(torso.subtree_com[2], 0.05) / -model.opt.gravity[2])  # s
    com = torso.subtree_com + ahead * torso.subtree_linvel
    axes, pelvis = torso.xmat.reshape(3, 3), at[geom["butt"]]
    x, y = axes[:2, 0] / max(np.hypot(*axes[:2, 0]), 1e-9)
    level = np.array([[x, -y, 0], [y, x, 0], [0, 0, 1]])
    return {
        "up": axes[2, 2],
        "head": at[geom["head"], 2],
        "pelvis": pelvis[2],
        "hand": at[hands, 2],
        "imbalance": _outside(com[:2], place[dist <= TOUCH, :2]),
        **{part: min(gap[geom[name]] for name in names) for part, names in PARTS.items()},
        "foot": gap[feet],
        "shin": gap[shins],
        "thigh": gap[thighs],
        "knee": knee_gap,
        "bend": [-data.joint(f"{side}_knee").qpos[0] for side in SIDES],
        "shin_front": [knee.xmat[6] for knee in knees],
        "knee_at": (np.array([knee.xpos for knee in knees]) - pelvis) @ level * OUTWARD,
        "foot_at": (at[feet] - pelvis) @ level * OUTWARD,
        "hand_at": (at[hands] - torso.xpos) @ axes * OUTWARD,
        "hand_hip": hand_hip,
    }


BALANCE = 0.2  # m of `imbalance` up to which a standing robot is not falling
KNEELING_BALANCE = 0.3  # wide hull, short fall; chosen by looking at frames of a training run


def _stands(f):
    """Return whether the robot is upright on one or both feet only, legs unfolded, not falling."""
    on_feet_only = (f["trunk"] > TOUCH) & (f["pelvis_floor"] > TOUCH) & (f["arms"] > TOUCH)
    on_feet_only &= (np.minimum(f["shin"], f["thigh"]).min(1) > TOUCH) & _feet(f).any(1)
    upright = (f["up"] > 0.85) & (f["pelvis"] > 0.7)  # within 32 degrees; straight legs: 0.86 m
    return on_feet_only & upright & (f["imbalance"] < BALANCE)


def _feet(f):
    return f["foot"] <= TOUCH


def _raised(f):
    """Return whether both hands are above the head (crown: 9 cm over its centre) at any lean."""
    return (f["hand"] > f["head"][:, None] + 0.06).all(1)


def _on_hips(f):
    """Return whether each hand is at the waist or pelvis on its own side, not in front or low."""
    forward, outward, up = np.moveaxis(f["hand_at"], -1, 0)
    near = (f["hand_hip"] < 0.16) & (np.abs(forward) < 0.13) & (outward > 0.1) & (outward < 0.31)
    return (near & (up > -0.46) & (up < -0.25)).all(1)


def _crossed(f):
    """Return whether the hands have passed each other in front of the chest (crossed forearms)."""
    forward, outward, up = np.moveaxis(f["hand_at"], -1, 0)
    return (outward.sum(1) < -0.04) & ((forward > 0.1) & (up > -0.25) & (up < 0.2)).all(1)


def _standing(f):
    """Return whether the robot is on both feet: "upright without falling" (paper's appendix)."""
    return _stands(f) & _feet(f).all(1)


def _kneeling(f):
    knees = (f["knee"] <= KNEE_TOUCH) & (f["bend"] > 1.0) & (f["shin_front"] < -0.3)
    torso_up = (f["up"] > 0.7) & (f["trunk"] > TOUCH)
    return knees.all(1) & torso_up & (f["imbalance"] < KNEELING_BALANCE)


def _seated(f):
    return (f["pelvis_floor"] <= TOUCH) & (f["trunk"] > TOUCH) & (f["up"] > 0.7)


def _lotus(f):
    knees = (f["pelvis"][:, None] + f["knee_at"][..., 2] < 0.26) & (f["bend"] > 1.5)
    outward = f["knee_at"][..., 1]
    inward = outward - f["foot_at"][..., 1]  # how much nearer the foot is to the middle
    return _seated(f) & (knees & (outward > 0.15) & (inward > 0.12)).all(1)


def _splits(f):
    straight = (f["bend"] < 0.5) & _feet(f) & (np.minimum(f["shin"], f["knee"]) <= TOUCH)
    legs = f["foot_at"][..., :2]
    sideways = np.arctan2(legs[..., 1], legs[..., 0])  # 0 is forward, pi / 2 to its own side
    open_enough = (sideways > 0.5).all(1) & (sideways.sum(1) > math.radians(105))
    open_enough &= (sideways < 2.6).all(1)
    return _seated(f) & straight.all(1) & open_enough


HUMANOID = {
    "standing": _standing,
    "arms_raised": lambda f: _standing(f) & _raised(f),
    "hands_on_hips": lambda f: _standing(f) & _on_hips(f),
    "arms_crossed": lambda f: _standing(f) & _crossed(f),
    "one_leg": lambda f: _stands(f) & ~_feet(f).all(1),
    "kneeling": _kneeling,
    "lotus": _lotus,
    "splits": _splits,
}


def _cart_pole(states):
    """Apply CartPole-v1's rule: the pole within 12 degrees, the cart within 2.4 of the middle."""
    return (np.abs(states[:, 2]) <= math.radians(12)) & (np.abs(states[:, 0]) <= 2.4)


THRESHOLD = 0.5  # share of successful steps that makes an episode a success (arXiv 2310.12921)


@dataclass(frozen=True)
class Task:
    """A task of the paper, or your own: its prompts, its criterion in words, its judge."""

    name: str
    judge: Callable  # states [B, S] float64 -> [B] bool
    criterion: str
    env_ids: tuple[str, ...] = ()  # empty: any
    target_prompt: str = ""
    baseline_prompt: str = ""
    paraphrases: tuple[str, ...] = ()  # other ways to say the target prompt
    episode_rule: str = "for at least half of the clip"  # that makes an episode a success

    @property
    def prompts(self):
        """The prompts by the names of their flags: {name: (str,)}."""
        return {"target_prompt": (self.target_prompt,), "baseline_prompt": (self.baseline_prompt,)}


def _judge_of(name, env_ids):
    if name in HUMANOID:
        return lambda states: HUMANOID[name](measure(states))
    if name == "cartpole":
        return _cart_pole
    return lambda states: states[:, 0] >= classic.MOUNTAIN_GOALS[env_ids[0]]


TASKS = {
    name: Task(name, _judge_of(name, words["env_ids"]), **words)
    for name, words in tomllib.loads((Path(__file__).parent / "tasks.toml").read_text()).items()
}


def tasks_of(env_id):
    """Return the tasks [Task] of an environment, or all tasks for None."""
    return [task for task in TASKS.values() if env_id is None or env_id in task.env_ids]


def task_for(env_id, target_prompts=()):
    """Return the Task that a run was about: the environment's only one, or the one with this
    prompt; None if the prompt is not one of the paper's."""
    here = tasks_of(env_id)
    named = [task for task in here if [task.target_prompt] == list(target_prompts)]
    return next(iter(here if len(here) == 1 else named), None)


def find_task(spec, env_id, target_prompts=()):
    """Return the Task to judge by; `spec` is its name, FILE.py:FUNCTION, or None (`task_for`).

    The function gets states [B, S] float64 (MuJoCo: qpos and qvel; classic tasks: env.state) and
    returns [B] bool; its docstring is the criterion.

    Raises:
        UsageError: no such task, file or function, or a task of another environment.
    """
    if spec and ":" in spec:
        return _own_task(spec)
    task = TASKS.get(spec) if spec else task_for(env_id, target_prompts)
    if task not in tasks_of(env_id):
        names = ", ".join(task.name for task in tasks_of(env_id)) or "none"
        problem = f"--judge {spec}" if spec else "name a judge with --judge"
        here = f"the judges of {env_id or 'all tasks'} are: {names}; or name your FILE.py:FUNCTION"
        raise UsageError(f"{problem}: {here}")
    return task


def _where(error):
    """Return the message of an exception and the line of code that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)} ({last.filename}, line {last.lineno}: {last.line})"


def _own_task(spec):
    path, _, name = spec.rpartition(":")
    if not os.path.isfile(path):
        raise UsageError(f"--judge {spec}: there is no file {path}; expected FILE.py:FUNCTION")
    # a file that is imported already, because the task is in it, is not run twice
    modules = [getattr(module, "__dict__", {}) for module in [*sys.modules.values()]]
    loaded = [names for names in modules if names.get("__file__") == os.path.abspath(path)]
    try:
        names = loaded[0] if loaded else runpy.run_path(path)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        problem = f"{_where(error)}; expected FILE.py:FUNCTION"
        raise UsageError(f"--judge {spec}: {problem}") from error
    if not callable(function := names.get(name)):
        functions = [x for x in names.values() if inspect.isfunction(x)]
        own = [x.__name__ for x in functions if x.__module__ == names["__name__"]]
        there = " or ".join(f"--judge {path}:{each}" for each in own)
        there = f"type {there}" if there else "it has none"
        raise UsageError(f"--judge {spec}: {name} is not a function in that file; {there}")

    def judge(states):
        try:
            verdict = np.asarray(function(states))
        except (Exception, SystemExit) as error:
            raise UsageError(f"--judge {spec} failed: {_where(error)}") from error
        if verdict.shape != (len(states),) or verdict.dtype != bool:
            made = f"{list(verdict.shape)} {verdict.dtype} for {len(states)} states"
            raise UsageError(f"--judge {spec} returned {made}, not [B] bool")
        return verdict

    return Task(name, judge, " ".join((function.__doc__ or spec).split()))


def episode_judge(spec, env_id, target_prompts, state):
    """Return a function of states [T, N, S] -> success [N] bool: `spec` (--judge), or the judge of
    the humanoid's task with this prompt; None if there is neither. An episode succeeds if half of
    its steps do, as in the paper. The judge is first tried on `state` [S], to find errors early."""
    if spec is None and (
        env_id in classic.CLASSIC_STATE_SIZES or not task_for(env_id, target_prompts)
    ):
        return None  # classic tasks have rules of their own, in `info`
    task = find_task(spec, env_id, target_prompts)
    if state is not None:
        task.judge(np.stack([state, state]))

    def success(states):
        good_steps = task.judge(np.concatenate(states)).reshape(states.shape[:2])
        return good_steps.mean(0) >= THRESHOLD

    return success
