"""Poses of Gymnasium's humanoid: labelled states to train and test image models with.

    qpos = sample("kneeling", np.random.default_rng(0), n=8)  # [8, 24] settled on the floor
    path = blend("splits", rng, np.linspace(0, 1, 6))         # [6, 24] from standing to the pose
    walk = rollout_states(rng, n_episodes=4)                  # [4, 100, 24] of random policies
    kneels = is_pose("kneeling", describe(qpos))              # [8] bool

A pose has a few templates (poses.toml), joint angles in degrees by their names in humanoid.xml. A
sample is one of them, jittered, half of the time mirrored, put on the floor and settled in MuJoCo
with the joints held by springs. The body has narrow hips and no wrists or ankles: legs split to 126
degrees, lotus knees stay 12 to 18 cm above the floor, and arms cross in front of the chest.
"""

import functools
import tomllib
from pathlib import Path

import gymnasium
import mujoco
import numpy as np

HUMANOID_XML = str(Path(gymnasium.__file__).parent / "envs/mujoco/assets/humanoid.xml")
WORDS = tomllib.loads(Path(__file__).with_name("poses.toml").read_text())
TASKS, ARMS, TEMPLATES, CHECKS, WIDER, SOURCES = WORDS.values()  # TASKS: {pose: paper's prompt}
POSE_NAMES = (*TASKS, "lying_back", "lying_front", "squatting", "sitting", "crawling", "falling",
              "contorted")  # fmt: skip
JOINTS = [f"abdomen_{axis}" for axis in "zyx"]  # and the legs, in the order of qpos[7:18]
JOINTS += [f"{s}_{j}" for s in ("right", "left") for j in ("hip_x", "hip_z", "hip_y", "knee")]
ARM_JITTER, BODY_JITTER = 7.0, 4.0  # standard deviations, degrees
SETTLE_STEPS = 60  # of 4 ms: enough to fall from one knee onto both


@functools.lru_cache(1)
def _world():
    """Return Gymnasium's humanoid, unchanged: (model, data)."""
    model = mujoco.MjModel.from_xml_path(HUMANOID_XML)
    return model, mujoco.MjData(model)


@functools.lru_cache(1)
def _statue():
    """Return the humanoid with stiff springs that hold it at model.qpos_spring: (model, data)."""
    model = mujoco.MjModel.from_xml_path(HUMANOID_XML)
    model.opt.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    model.opt.timestep = 0.004
    model.jnt_stiffness[1:12], model.dof_damping[6:17] = 2000, 40
    model.jnt_stiffness[12:], model.dof_damping[17:] = 300, 8
    model.dof_damping[:6] = 5  # the free joint: no bouncing
    return model, mujoco.MjData(model)


def rotate(quat, axis, angle):
    """Return a unit quaternion [4] turned further by angle (radians) about a world axis [3]."""
    axis = np.asarray(axis, np.float64)
    by = np.r_[np.cos(angle / 2), np.sin(angle / 2) * axis / max(np.linalg.norm(axis), 1e-12)]
    out = np.empty(4)
    mujoco.mju_mulQuat(out, by, quat)
    return out


def _at(qpos):
    """Return the humanoid with its geometry at qpos [24]: (model, data)."""
    model, data = _world()
    data.qpos[:] = qpos
    mujoco.mj_kinematics(model, data)
    return model, data


def _bottoms(model, data):
    """Return the height of the lowest point of every geom but the floor, in m: [17]."""
    half = model.geom_size[1:, 1] * (model.geom_type[1:] == mujoco.mjtGeom.mjGEOM_CAPSULE)
    return data.geom_xpos[1:, 2] - half * abs(data.geom_xmat[1:, 8]) - model.geom_size[1:, 0]


def _lean(model, data):
    """Return the vector [3] from the middle of the supporting feet to the centre of mass, in m."""
    mass = model.body_mass / model.body_mass.sum()
    feet = data.geom_xpos[[model.geom("right_foot").id, model.geom("left_foot").id]]
    return mass @ data.xipos - feet[feet[:, 2] < feet[:, 2].min() + 0.1].mean(0)


def put_down(qpos, height=0.0):
    """Move qpos [24] in place to put its lowest geom `height` (m) above the floor; return it."""
    qpos[2] += height - _bottoms(*_at(qpos)).min()
    return qpos


def _draw(name, rng):
    """Draw one jittered template facing +x, not on the floor yet: qpos [24]."""
    ranges = _world()[0].jnt_range[1:]
    qpos = np.zeros(24)
    if name == "contorted":
        qpos[7:] = rng.uniform(ranges[:, 0], ranges[:, 1])
        qpos[3:7] = rng.normal(size=4)
        qpos[3:7] /= np.linalg.norm(qpos[3:7])
        return qpos
    weights = np.array([t.get("weight", 1) for t in TEMPLATES[name]], np.float64)
    template = TEMPLATES[name][rng.choice(len(weights), p=weights / weights.sum())]
    arms = ARMS[template["arms"][rng.integers(len(template["arms"]))]]
    right, left = np.array(arms[0], np.float64), np.array(arms[-1]) * [-1.0, -1.0, 1.0]
    body = [template.get(j, template.get(j.split("_", 1)[1], 0.0)) for j in JOINTS]
    angles = np.r_[body, right, left]
    scale = np.r_[np.full(11, BODY_JITTER), np.full(6, ARM_JITTER)] * template.get("jitter", 1.0)
    angles = np.radians(angles + scale * rng.normal(size=17))
    tilt = np.radians(3 * template.get("jitter", 1.0) * rng.normal(size=2))
    pitch, roll = np.radians(template.get("pitch", 0)) + tilt[0], tilt[1]
    qpos[7:] = np.clip(angles, ranges[:, 0], ranges[:, 1])
    qpos[3:7] = rotate(rotate([1, 0, 0, 0], [0, 1, 0], pitch), [1, 0, 0], roll)
    if template.get("balance"):  # turned until the centre of mass is above the supporting feet
        lean = _lean(*_at(qpos))
        angle = np.arctan2(np.hypot(lean[0], lean[1]), lean[2])
        qpos[3:7] = rotate(qpos[3:7], np.cross(lean, [0, 0, 1]), angle)
        qpos[3:7] = rotate(qpos[3:7], rng.normal(size=3) * [1, 1, 0], np.radians(1.5))
    if name == "falling":
        way, tilt = rng.uniform(0, 2 * np.pi), rng.uniform(np.radians(25), np.radians(60))
        qpos[3:7] = rotate(qpos[3:7], [np.cos(way), np.sin(way), 0], tilt)
    return _mirror(qpos) if rng.random() < 0.5 else qpos


def _mirror(qpos):
    """Return the pose as a mirror shows it: left and right change places."""
    out = qpos.copy()
    out[1] *= -1
    out[[4, 6]] *= -1  # roll and yaw
    out[[7, 9]] *= -1  # abdomen_z, abdomen_x
    out[10:18] = np.r_[qpos[14:18], qpos[10:14]]  # the hips' axes are mirror images already
    out[18:24] = np.r_[qpos[21:24], qpos[18:21]] * [-1, -1, 1, -1, -1, 1]
    return out


def _settled(name, rng, tries=200):
    """Draw samples facing +x until one passes its check: qpos [24]."""
    if name not in POSE_NAMES:
        raise ValueError(f"unknown pose {name!r}; one of: {', '.join(POSE_NAMES)}")
    model, data = _statue()
    for _ in range(tries):
        start = _draw(name, rng)
        qpos = put_down(start.copy())
        if name == "falling":
            put_down(qpos, rng.uniform(0, 0.05))
        else:
            mujoco.mj_resetData(model, data)
            model.qpos_spring[:] = data.qpos[:] = qpos
            mujoco.mj_step(model, data, SETTLE_STEPS * (2 if name == "contorted" else 1))
            qpos = put_down(data.qpos.copy())
        facts = describe(qpos[None])
        if name == "contorted":
            good = not any(within(limits, facts)[0] for limits in (CHECKS | WIDER).values())
        else:
            moved = np.abs(qpos[7:] - start[7:]).max()
            good = is_pose(name, facts)[0] and moved < np.radians(25)
        if good:
            return qpos
    raise RuntimeError(f"no sample of {name!r} passed its check in {tries} tries")


def _face(qpos, yaw, shift):
    """Return qpos [24] turned by yaw (radians) with the torso at shift [2] (m)."""
    out = qpos.copy()
    out[3:7] = rotate(qpos[3:7], [0, 0, 1], yaw)
    out[:2] = shift
    return out


def turn_to(qpos, yaw):
    """Turn qpos [24] in place until it faces yaw (radians; 0 is +x); return it."""
    w, x, y, z = qpos[3:7]
    heading = np.arctan2(2 * (x * y + w * z), 1 - 2 * (y * y + z * z))
    qpos[3:7] = rotate(qpos[3:7], [0, 0, 1], yaw - heading)
    return qpos


def sample(name, rng, n=1):
    """Sample n states of a pose: jittered template, random heading, settled on the floor.

    name: one of POSE_NAMES; rng: np.random.Generator. Returns qpos [n, 24] float64 (m, unit
    quaternion, radians); the lowest geom touches the floor ("falling": at most 5 cm above).
    Raises ValueError for an unknown name.
    """
    return np.stack([
        _face(_settled(name, rng), rng.uniform(0, 2 * np.pi), rng.normal(0, 0.05, 2))
        for _ in range(n)
    ])  # fmt: skip


def path(start, goal, t):
    """Interpolate from one state [24] to another, unsettled: qpos [K, 24] for t [K] in [0, 1].

    Joint angles are linear in t, the torso turns by slerp, and the lowest geom is on the floor.
    """
    turn = np.empty(3)  # the short way round
    mujoco.mju_subQuat(turn, goal[3:7], start[3:7])
    states = np.empty((len(t), 24))
    for qpos, s in zip(states, t):
        qpos[:] = (1 - s) * start + s * goal
        qpos[3:7] = start[3:7]
        mujoco.mju_quatIntegrate(qpos[3:7], turn, s)
        put_down(qpos)
    return states


LIMBS = slice(10, 14), slice(14, 18), slice(18, 21), slice(21, 24)  # legs, arms: right, left


def _leaning(qpos, rng, share, most):
    """Put qpos [24] down; with chance `share` first tilt it 0 to `most` degrees to any side."""
    if rng.random() < share:
        axis = [*rng.normal(size=2), 0]
        qpos[3:7] = rotate(qpos[3:7], axis, np.radians(rng.uniform(0, most)))
    return put_down(qpos)


def half(start, goal, rng):
    """Return a state [24] between two others [24]: the torso and each limb have gone a random part
    of the way (one arm raised, one knee down, arms not quite crossed). Half of the states lean."""
    t = np.clip(rng.uniform(-0.6, 1.6, 5), 0, 1)
    qpos = path(start, goal, t[:1])[0]
    for limb, s in zip(LIMBS, t[1:]):
        qpos[limb] = (1 - s) * start[limb] + s * goal[limb]
    return _leaning(qpos, rng, 0.5, 40)


def near(pose, rng):
    """Return a state [24] near another [24]: some limbs are turned by up to about 40 degrees in all
    joints, as often the wrong way as the right one. `half` yields few such states."""
    qpos, ranges = pose.copy(), _world()[0].jnt_range[1:]
    for limb in LIMBS:
        if rng.random() < 0.5:
            qpos[limb] += np.radians(rng.uniform(5, 40)) * rng.normal(size=len(qpos[limb]))
    qpos[7:] = np.clip(qpos[7:], ranges[:, 0], ranges[:, 1])
    return _leaning(qpos, rng, 0.3, 30)


def scattered(pose, rng):
    """Return a state [24] like another [24], but with half of the limbs, at random, anywhere their
    joints reach: an agent finds the states that `half` and `near` leave out."""
    qpos, ranges = pose.copy(), np.vstack([np.zeros((7, 2)), _world()[0].jnt_range[1:]])
    for limb in LIMBS:
        if rng.random() < 0.5:
            qpos[limb] = rng.uniform(*ranges[limb].T)
    return _leaning(qpos, rng, 0.3, 30)


def blend(goal_name, rng, t):
    """Return the `path` from a standing sample (t=0) to a goal sample (t=1) with its heading."""
    start, goal = _settled("standing", rng), _settled(goal_name, rng)
    yaw, shift = rng.uniform(0, 2 * np.pi), rng.normal(0, 0.05, 2)
    return path(_face(start, yaw, shift), _face(goal, yaw, shift), t)


def rollout_states(rng, n_episodes, length=100):
    """Play random policies in Humanoid-v5 without termination: qpos [n_episodes, length, 24].

    Every second episode starts at the environment's reset and takes uniform actions. The others
    take time-correlated actions of random strength, and half of them start from a library pose.
    """
    model, data = _world()
    low, high = model.actuator_ctrlrange.T
    states = np.empty((n_episodes, length, 24))
    for episode in range(n_episodes):
        mujoco.mj_resetData(model, data)
        wild = episode % 2 == 1
        if wild and rng.random() < 0.5:
            qpos = sample(POSE_NAMES[rng.integers(len(POSE_NAMES))], rng)[0]
            mujoco.mj_resetData(model, data)  # sample() works on the same data
            data.qpos[:] = qpos
        else:  # Humanoid-v5's reset: 0.01 around the initial state
            data.qpos[:] += rng.uniform(-0.01, 0.01, 24)
            data.qvel[:] = rng.uniform(-0.01, 0.01, 23)
        memory, strength = rng.uniform(0.8, 0.98), rng.uniform(0.3, 2.0)
        noise = rng.normal(size=17)
        for step in range(length):
            noise = memory * noise + np.sqrt(1 - memory**2) * rng.normal(size=17)
            smooth = np.clip(strength * noise * high, low, high)
            data.ctrl[:] = smooth if wild else rng.uniform(low, high)
            mujoco.mj_step(model, data, 5)  # frame_skip of Humanoid-v5
            states[episode, step] = data.qpos
    return states


def describe(qpos):
    """Return geometric facts of states qpos [B, 24]: dict of float64 [B], lengths in m.

    torso, head, pelvis: heights of the centres of these geoms.
    up, front: z of the torso's up axis (1 upright) and front axis (1 on the back, -1 face down).
    rest: height of the lowest point of everything but feet and shins.
    trunk: the same of head, torso and waist.
    off: horizontal distance from the centre of mass to the middle of the supporting feet.
    right_ and left_ each of:
        knee, foot, hand: heights of the lowest points.
        bend: angle of the knee in radians, 0 is straight.
        knee_fwd, knee_out, foot_fwd, foot_out: place relative to the pelvis, forward as the
            torso faces and outward to that side; horizontal (meaningless if |up| is small).
        hand_x, hand_y, hand_z: place relative to the torso in its own axes: forward, outward
            to that side (negative: past the middle), up.
    """
    rows = []
    for q in qpos:
        model, data = _at(q)
        low, lean = _bottoms(model, data), _lean(model, data)
        rows.append([data.geom_xpos.copy(), low, data.xpos.copy(), data.xmat[1].copy(), lean])
    at, low, bodies, torso, lean = (np.array(column) for column in zip(*rows, strict=True))
    ids = {model.geom(i).name: i for i in range(model.ngeom)}
    rest = [i - 1 for name, i in ids.items() if i and "foot" not in name and "shin" not in name]
    trunk = [ids[name] - 1 for name in ("head", "torso1", "uwaist", "lwaist")]
    torso = torso.reshape(-1, 3, 3)
    pelvis = at[:, ids["butt"]]
    fwd = torso[:, :2, 0] / np.maximum(np.hypot(*torso[:, :2, 0].T), 1e-9)[:, None]
    facts = dict(torso=at[:, ids["torso1"], 2], head=at[:, ids["head"], 2], pelvis=pelvis[:, 2],
                 up=torso[:, 2, 2], front=torso[:, 2, 0], rest=low[:, rest].min(1),
                 trunk=low[:, trunk].min(1), off=np.hypot(*lean[:, :2].T))  # fmt: skip
    for side, sign in (("right", -1), ("left", 1)):
        foot, hand = ids[f"{side}_foot"], ids[f"{side}_hand"]
        knee = bodies[:, model.body(f"{side}_shin").id]
        facts[f"{side}_knee"] = knee[:, 2] - model.geom_size[ids[f"{side}_shin1"], 0]
        facts[f"{side}_foot"], facts[f"{side}_hand"] = low[:, foot - 1], low[:, hand - 1]
        facts[f"{side}_bend"] = -np.asarray(qpos)[:, model.joint(f"{side}_knee").qposadr[0]]
        for part, point in (("knee", knee), ("foot", at[:, foot])):
            x, y = (point - pelvis)[:, :2].T
            facts[f"{side}_{part}_fwd"] = fwd[:, 0] * x + fwd[:, 1] * y
            facts[f"{side}_{part}_out"] = sign * (fwd[:, 0] * y - fwd[:, 1] * x)
        place = np.einsum("bij,bi->jb", torso, at[:, hand] - bodies[:, 1])
        facts[f"{side}_hand_x"], facts[f"{side}_hand_y"] = place[0], sign * place[1]
        facts[f"{side}_hand_z"] = place[2]
    return facts


def within(limits, facts):
    """Return whether states with these facts lie within limits, {fact: (low, high)}: bool [B]. A
    limit is for both sides unless it names one."""
    facts = dict(facts, lift=abs(facts["right_foot"] - facts["left_foot"]))
    facts["hands_y"] = facts["right_hand_y"] + facts["left_hand_y"]
    for side in ("right", "left"):
        facts[f"{side}_shin"] = facts[f"{side}_foot_fwd"] - facts[f"{side}_knee_fwd"]
    good = np.ones(len(facts["up"]), bool)
    for fact, (low, high) in limits.items():
        for name in {fact, f"right_{fact}", f"left_{fact}"} & facts.keys():
            good &= (low <= facts[name]) & (facts[name] <= high)
    return good


def is_pose(name, facts):
    """Return whether states with these facts are clearly in a pose: bool [B]."""
    good = within(CHECKS[name], facts)
    if name == "standing":
        good &= ~(is_pose("hands_on_hips", facts) | is_pose("arms_crossed", facts))
    return good
