"""What tiny_clip learns from: pictures of the scenes, captions, and how true each caption is.

    qpos, truth, weight = draw_states(np.random.default_rng(0), 600)   # [600, 24], [600, C] twice
    pictures, truth, weight, geometry = make_pictures([Job(seed=0, scene="varied", count=600)])

No picture has a caption of its own. CONCEPTS are C things that can be said of a picture, each in
several wordings, and `truth` says how true each is of each picture, from 0 to 1. Where geometry
cannot tell (does a robot in a heap sit?), `weight` is 0 and nothing is learned.
The humanoid is described here and in poses.py, CartPole and MountainCar in classic.py.
Importing this module chooses the GL backend and imports mujoco.
"""

import dataclasses
import functools
import itertools
import multiprocessing
from pathlib import Path

import numpy as np
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF
from tqdm import tqdm

import egl_render

egl_render.setup_gl("cpu")

import gymnasium
import mujoco

from scenes import paint
from tiny_clip import classic, poses
from warp_render import WarpRenderer

IMAGE_SIZE = 64
HACKED = Path(__file__).with_name("hacked.npz")

HUMANOID_CAPTIONS, WORDING = classic.WORDS["humanoid"], classic.WORDS["wording"]
CAPTIONS = HUMANOID_CAPTIONS | classic.CAPTIONS
CONCEPTS = tuple(CAPTIONS)
SUBJECT = "a humanoid robot"  # the paper's
BASELINES = ("robot", "cart", "mountain")  # true of every picture of their scenes


def reworded(caption, rng):
    """Reword a caption: its subject, beginning and end vary, and a small word may be dropped."""

    def pick(options):
        return options[rng.integers(len(options))]

    ends = WORDING["humanoid" if "{}" in caption else "classic"]
    subject = pick(WORDING["subjects"]) if rng.random() < 0.5 else SUBJECT
    text = caption.format(subject)
    if rng.random() < 0.3:
        text = pick(ends["prefixes"]) + text
    if rng.random() < 0.2:
        text += pick(ends["suffixes"])
    if rng.random() < 0.3:
        words = text.split(" ")
        small = [i for i, word in enumerate(words) if word in WORDING["small_words"]]
        if small and len(words) > 2:
            del words[pick(small)]
            text = " ".join(words)
    return text


def _ramp(x, low, high):
    return np.clip((x - low) / (high - low), 0.0, 1.0)


def _half(*parts, mean=0.2):
    """Combine the degrees of a pose's parts [B], all of which are needed: one part alone counts
    little, and each adds something; more with a larger `mean`, for poses of which nothing can be
    seen from standing."""
    return mean * np.mean(parts, 0) + (1 - mean) * np.min(parts, 0)


def degrees(facts):
    """Return how much of each of the paper's poses, and of lying, a state shows, from
    poses.describe(): dict of [B] in [0, 1].

    They are continuous in the state and rise along every path into the pose, because an agent in
    training passes through all states on the path and has to be told which is nearer. But half of a
    pose (one arm raised, one knee down, a lean) counts little, or the agent would stay there.
    """
    f = facts
    up = _ramp(f["up"], 0.7, 0.96) * _ramp(f["pelvis"], 0.55, 0.8) * _ramp(-f["off"], -0.35, -0.08)
    # a robot that leans back sits on the small of its back: only a fully upright one counts as 1
    seated = np.interp(f["up"], [0.4, 0.9, 0.98], [0, 0.8, 1]) * _ramp(-f["pelvis"], -0.45, -0.14)
    kneels, lotus, splits, feet, raised, hips, crossed = ([] for _ in range(7))
    for side in ("right", "left"):
        part = {name.partition("_")[2]: f[name] for name in f if name.startswith(side)}
        knee, knee_out, foot_out = part["knee"], part["knee_out"], part["foot_out"]
        x, y, z = (part[f"hand_{axis}"] for axis in "xyz")
        feet.append(_ramp(-part["foot"], -0.15, -0.04))
        raised.append(np.interp(z, [-0.35, 0.1, 0.35], [0, 0.35, 1]))
        beside = abs(np.stack([x, y - 0.21, z + 0.36])) - [[0.09], [0.08], [0.09]]
        beside = np.linalg.norm(beside.clip(0), axis=0)  # distance from a hand's place on its hip
        hips.append(np.interp(beside, [0, 0.05, 0.1, 0.4], [1, 0.55, 0.25, 0]))
        across = np.interp(y, [0.02, 0.08, 0.16, 0.35], [1, 0.5, 0.25, 0])
        before_chest = np.interp(z, [-0.4, -0.2, 0.05, 0.25], [0, 1, 1, 0])  # not before its face
        crossed.append(_half(across, _ramp(x, 0.0, 0.2), before_chest))
        # shin behind, knees together: unlike the lotus position
        behind = _ramp(part["knee_fwd"] - part["foot_fwd"], 0.0, 0.25)
        behind = behind * _ramp(-knee_out, -0.42, -0.28)
        kneels.append(np.interp(knee, [0.05, 0.1, 0.2, 0.42], [1, 0.65, 0.3, 0]) * behind)
        folded = _ramp(-foot_out, -0.45, -0.12) * _ramp(-part["foot_fwd"], -0.7, -0.25)
        before = _ramp(part["foot_fwd"], -0.1, 0.12)  # else it would sit on its heels
        down = np.interp(knee, [0.17, 0.25, 0.5], [1, 0.6, 0.1])
        folds = _half(down, _ramp(knee_out, 0, 0.3), folded, mean=0.5)
        lotus.append(folds * (0.3 + 0.7 * before))
        down = _ramp(-part["foot"], -0.4, -0.05) * np.interp(knee, [0.06, 0.2, 0.5], [1, 0.6, 0.1])
        splits.append(_ramp(foot_out, 0, 0.68) * (0.4 + 0.6 * down))
    passed = f["right_hand_y"] + f["left_hand_y"]  # negative: the hands have passed each other
    crossed.append(np.interp(passed, [-0.05, 0.1, 0.3, 0.7], [1, 0.6, 0.3, 0]))
    lift, lying = abs(f["right_foot"] - f["left_foot"]), _ramp(-f["torso"], -0.6, -0.28)
    lying = lying * _ramp(-f["up"], -0.75, -0.3)
    upright = np.interp(f["up"], [0, 0.5, 0.9, 0.98], [0, 0.3, 0.8, 1])
    lower = np.interp(f["pelvis"], [0.14, 0.45, 1], [1, 0.5, 0])
    lowest = np.interp(f["pelvis"], [0.13, 0.22, 0.45, 1], [1, 0.45, 0.35, 0])  # not on its heels
    # without these parts a policy stops half-way: on a folded leg, on the small of its back
    straight = np.interp(
        np.maximum(f["right_bend"], f["left_bend"]), [0.2, 0.5, 1.6], [1, 0.85, 0.2]
    )
    off_floor = np.interp(f["trunk"], [0, 0.06, 0.08], [0.3, 0.85, 1])
    stands = up * (0.2 + 0.8 * np.min(feet, 0))
    arms = {"arms_raised": raised, "hands_on_hips": hips, "arms_crossed": crossed}
    return {
        "standing": up * (0.6 + 0.4 * np.min(feet, 0)),
        **{pose: stands * (0.2 + 0.8 * _half(*both)) for pose, both in arms.items()},
        "one_leg": up * (0.2 + 0.8 * _ramp(lift, 0.02, 0.2)),
        "kneeling": _half(*kneels) * _ramp(f["up"], 0.3, 0.92) * _ramp(f["pelvis"], 0.12, 0.2),
        "lotus": _half(upright, lowest, *lotus, off_floor, mean=0.5),
        "splits": _half(upright, lower, *splits, straight, mean=0.5),
        "lying": lying,
        "lying_back": lying * _ramp(f["front"], 0.1, 0.75),
        "lying_front": lying * _ramp(-f["front"], 0.1, 0.75),
        "seated": seated,
    }


SMOOTHING = 0.02  # of the targets in train.py, so that logits do not grow without end
END = np.log(1 / SMOOTHING - 1)  # the logit of degree 1; that of degree 0 is -END
TASK_COLUMNS = [CONCEPTS.index(name) for name in poses.TASKS]


def task_truth(found):
    """Return truth [B, 8] of the paper's poses from the result of `degrees`. The loss pulls the
    cosine to the logit of its target: with these targets the cosine is linear in the degree."""
    degree = np.stack([found[name] for name in poses.TASKS], 1)
    target = 1 / (1 + np.exp(END * (1 - 2 * degree)))
    return (target - SMOOTHING) / (1 - 2 * SMOOTHING)


def _row(name):
    row = {"robot": 1.0, name: 1.0} | classic.WORDS["also_true"].get(name, {})
    return np.array([row.get(concept, 0.0) for concept in CONCEPTS])


GEOMETRY = 30  # columns of `geometry`


def geometry(qpos):
    """Return the numbers that train.py predicts from a picture besides its captions, for states
    qpos [B, 24]: the facts of poses.describe, but of left and right the larger and the smaller
    value, which mirroring does not change. [B, G] float64, lengths in m."""
    facts, columns = poses.describe(qpos), []
    for name, values in facts.items():
        side, _, part = name.partition("_")
        if side == "right":
            both = values, facts[f"left_{part}"]
            columns += np.maximum(*both), np.minimum(*both)
        elif side != "left":
            columns.append(values)
    return np.stack(columns, 1)


def _family(concepts):
    """Return weights [C]: 1 for a scene's own concepts, less for others, which are easy to tell."""
    return np.array([1.0 if concept in concepts else 0.15 for concept in CONCEPTS])


def truth_of(names, qpos):
    """Return how true each concept is of states qpos [B, 24] float64, and where it is known: truth
    [B, C], weight [B, C], float64 in [0, 1]. names [B] str: which pose of the library each was
    sampled from, or "various"."""
    names, facts = np.asarray(names), poses.describe(qpos)
    d = degrees(facts)
    truth = np.array([_row(name) for name in names])
    weight = np.tile(_family(HUMANOID_CAPTIONS), (len(qpos), 1))
    sampled, truth[:, TASK_COLUMNS] = truth[:, TASK_COLUMNS], task_truth(d)
    truth[:, TASK_COLUMNS] = np.maximum(truth[:, TASK_COLUMNS], 0.95 * (sampled == 1))
    # these kinds vary too much for a fixed row: use geometry, where it can tell
    unnamed, falling, contorted = (names == kind for kind in ("various", "falling", "contorted"))
    various = unnamed | falling | contorted
    geometry = {concept: d[concept] for concept in ("lying", "lying_back", "lying_front")}
    falls = poses.is_pose("falling", facts) & (facts["up"] <= 0.85)  # else it may catch itself
    at_rest = ("standing", "kneeling", "lying_back", "lying_front")
    rests = [poses.is_pose(name, facts) for name in at_rest]
    geometry["falling"] = np.where(unnamed, falls, falling)
    low_knees = np.maximum(facts["right_knee"], facts["left_knee"]) < 0.2
    half_down = (facts["pelvis"] > 0.2) & (facts["pelvis"] < 0.75)
    doubt = dict(
        falling=np.where(unnamed, ~(np.any(rests, 0) | falls), contorted),
        contorted=unnamed | falling,
        sitting=d["seated"] > 0.1,
        squatting=(facts["up"] > 0.4) & half_down,
        crawling=(facts["front"] < -0.3) & low_knees,
    )
    for concept, column in geometry.items():
        truth[various, CONCEPTS.index(concept)] = column[various]
    for concept, column in doubt.items():
        weight[various & column, CONCEPTS.index(concept)] = 0
    return truth, weight


def _turned(qpos, rng, facing=0.6):
    """Turn a share `facing` of states [B, 24] to within 30 degrees of +x, the initial heading of
    Humanoid-v5 and the side of the paper's camera; move all of them about the floor."""
    qpos = qpos.copy()
    for q in qpos:
        if rng.random() < facing:
            poses.turn_to(q, rng.uniform(-np.pi, np.pi) / 6)
        q[:2] = rng.uniform(-3, 3, 2)
    return qpos


def _path_truth(start, goal, t, qpos):
    """Return (truth, weight) along a blend: 1 - t times start's truth plus t times goal's. Geometry
    gives the truth of the paper's poses; concepts other than these and "robot" count little."""
    (a, _), (b, _) = truth_of([start] * len(qpos), qpos), truth_of([goal] * len(qpos), qpos)
    truth = (1 - t[:, None]) * a + t[:, None] * b
    weight = np.tile(0.3 * _family(HUMANOID_CAPTIONS), (len(qpos), 1))
    weight[:, [*TASK_COLUMNS, CONCEPTS.index("robot")]] = 1.0
    truth[:, TASK_COLUMNS] = task_truth(degrees(poses.describe(qpos)))
    return truth, weight


@functools.cache
def policy_states(held_out=False):
    """Load states that policies visited while learning poses, right or wrong: [B, 24] float64.
    Every fifth episode is held out. README.md says where they come from."""
    with np.load(HACKED) as file:
        return file["states"][(file["episode"] % 5 == 0) == held_out].astype(np.float64)


def draw_states(rng, count):
    """Draw states of every kind and their truth: qpos [count, 24], truth [count, C] and weight
    [count, C], all float64."""
    source, parts = poses.SOURCES, []
    todo = {kind: round(share * count) for kind, share in source["shares"].items()}

    def one_of(names):
        return names[rng.integers(len(names))]

    def state_of(kind):
        return poses.sample(one_of(source[kind]), rng)[0]

    share = np.array(list(source["poses"].values()))
    drawn = rng.choice(len(share), todo["sample"], p=share / share.sum())
    for name, n in zip(source["poses"], np.bincount(drawn, minlength=len(share))):
        if n:
            qpos = _turned(poses.sample(name, rng, n), rng)
            parts.append((qpos, *truth_of([name] * n, qpos)))
    for _ in range(0, todo["blend"], 6):
        goal, t = one_of(source["goals"]), np.sort(rng.uniform(0, 1, 6))
        qpos = _turned(poses.blend(goal, rng, t), rng)
        parts.append((qpos, *_path_truth("standing", goal, t, qpos)))
    for _ in range(0, todo["detour"], 4):
        start, goal = one_of(source["detour_starts"]), one_of(source["goals"])
        t, ends = np.sort(rng.uniform(0, 1, 4)), [poses.sample(x, rng)[0] for x in (start, goal)]
        qpos = _turned(poses.path(*ends, t), rng)
        # squared: half way out of a heap on the floor, hardly anything of the goal is visible
        parts.append((qpos, *_path_truth(start, goal, t**2, qpos)))
    halves = [
        *(poses.half(state_of("half_starts"), state_of("goals"), rng) for _ in range(todo["half"])),
        *(poses.near(state_of("goals"), rng) for _ in range(todo["near"])),
        *(poses.scattered(state_of("scattered"), rng) for _ in range(todo["scattered"])),
    ]
    rolled = poses.rollout_states(rng, max(2, todo["rollout"] // 40 // 2 * 2)).reshape(-1, 24)
    rolled = rolled[rng.choice(len(rolled), min(todo["rollout"] + 12, len(rolled)), replace=False)]
    played = rng.choice(policy_states(), todo["policy"], axis=0)
    various = np.concatenate([_turned(np.stack(halves), rng), rolled, _turned(played, rng)])
    parts.append((various, *truth_of(["various"] * len(various), various)))
    qpos, truth, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
    keep = rng.permutation(len(qpos))[:count]
    return qpos[keep], truth[keep], weight[keep]


SCENES = ("varied", "canonical", "plain", *classic.SCENES)
SIZES = {64: 0.75, 96: 0.2, 128: 0.05}  # px, by MuJoCo Warp


@dataclasses.dataclass(frozen=True)
class Job:
    """Pictures of one scene. EGL draws the share `full` of them at 480 px, with multisampling."""

    seed: int
    scene: str
    count: int
    full: float = 0.0


def scene_model(scene, rng):
    """Return a new mujoco.MjModel of a scene in SCENES."""
    if scene == "plain":
        return mujoco.MjModel.from_xml_path(poses.HUMANOID_XML)
    look = paint.paint_look(rng) if scene == "varied" else None
    return egl_render.textured_model(poses.HUMANOID_XML, look)


@functools.cache
def environment_camera():
    """Return the camera of Humanoid-v5's own render()."""
    return egl_render.env_camera(gymnasium.make("Humanoid-v5"))


def _cameras(scene, count, rng):
    """Return the cameras of `count` pictures, 30 pictures each: Warp draws these at once. Half of
    the pictures of the canonical scene are from the default azimuths of the humanoid."""
    cameras = [_camera(scene, rng) for _ in range(-(-count // 30))]
    if scene == "canonical":
        for i, azimuth in zip(range(0, len(cameras), 2), itertools.cycle((180.0, 120.0, 240.0))):
            cameras[i] = dataclasses.replace(egl_render.PAPER_CAMERA, azimuth=azimuth)
    return [cameras[i // 30] for i in range(count)]


def _camera(scene, rng):
    if scene == "plain" and rng.random() < 0.3:
        return environment_camera()
    if rng.random() < 0.2:
        return egl_render.PAPER_CAMERA
    # from the left side to the right
    camera = dataclasses.replace(egl_render.PAPER_CAMERA, azimuth=rng.uniform(90, 270))
    if scene == "canonical" and rng.random() < 0.7:
        return camera
    distance, elevation = 3.5 * rng.uniform(0.85, 1.15), rng.uniform(-25, 0)
    lookat = (0.0, 0.0, rng.uniform(0.7, 1.2))
    return dataclasses.replace(camera, distance=distance, elevation=elevation, lookat=lookat)


def draw_job(job):
    """Draw one job: pictures [count, 3, 64, 64] uint8; truth, weight [count, C] and geometry
    [count, G] float32, NaN where there is no humanoid."""
    draw = _draw_classic if job.scene in classic.SCENES else _draw_humanoid
    pictures, *known = draw(job, np.random.default_rng(job.seed))
    return pictures, *(column.astype(np.float32) for column in known)


def _draw_humanoid(job, rng):
    qpos, truth, weight = draw_states(rng, job.count)
    cameras = _cameras(job.scene, job.count, rng)
    for q, camera in zip(qpos, cameras, strict=True):
        if camera.track_body < 0:  # Gymnasium's camera looks at the origin
            q[:2] *= 0.1
    sizes = rng.choice(list(SIZES), job.count, p=list(SIZES.values()))
    sizes[: round(job.full * job.count)] = 480
    model = scene_model(job.scene, rng)
    states = np.pad(qpos, ((0, 0), (0, model.nv)))
    pictures = np.empty((job.count, 3, IMAGE_SIZE, IMAGE_SIZE), np.uint8)
    for size in sorted(set(sizes)):
        kind = egl_render.MujocoRenderer if size == 480 else WarpRenderer
        renderer = kind(model, int(size))
        for camera in dict.fromkeys(cameras):
            rows = np.flatnonzero((sizes == size) & [c == camera for c in cameras])
            renderer.cameras = [camera]  # a new renderer would cost a GL context
            if len(rows):
                pictures[rows] = shrink(renderer.render(states[rows]))
        renderer.close()
    return pictures, truth, weight, geometry(qpos)


def _draw_classic(job, rng):
    states = classic.sample_states(job.scene, rng, job.count)
    column = classic.truth_of(job.scene, states)
    truth = np.stack([column.get(concept, np.zeros(job.count)) for concept in CONCEPTS], 1)
    weight = np.tile(_family(classic.CAPTIONS), (job.count, 1))
    pictures = []
    for part in np.array_split(states, max(1, job.count // 100)):
        size = int(rng.choice([*SIZES, 480], p=[*(0.95 * p for p in SIZES.values()), 0.05]))
        pictures.append(shrink(classic.draw(job.scene, part, size, rng)))
    return np.concatenate(pictures), truth, weight, np.full((job.count, GEOMETRY), np.nan)


def shrink(frames):
    """Resize frames [B, H, W, 3] to [B, 3, 64, 64], both uint8, as the model's preprocessing."""
    nchw = torch.from_numpy(frames).permute(0, 3, 1, 2)
    size = [IMAGE_SIZE, IMAGE_SIZE]
    return TF.resize(nchw, size, InterpolationMode.BICUBIC, antialias=True).numpy()


def make_pictures(jobs, workers=2):
    """Draw all jobs in `workers` processes: pictures [N, 3, 64, 64] uint8, truth, weight [N, C] and
    geometry [N, G] float32."""
    with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
        parts = list(tqdm(pool.imap(draw_job, jobs), "scenes", len(jobs)))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def pose_columns(per_pose, seed):
    """Return dataset columns of samples of every pose in the library, at rest."""
    rngs = [np.random.default_rng((seed, k)) for k in range(len(poses.POSE_NAMES))]
    samples = [poses.sample(name, rng, per_pose) for name, rng in zip(poses.POSE_NAMES, rngs)]
    states = np.pad(np.concatenate(samples), ((0, 0), (0, 23)))
    return {"states": states, "pose": np.repeat(poses.POSE_NAMES, per_pose)}


def facing_columns(per_pose):
    """Return dataset columns of the pose library, facing within 30 degrees of +x, as every episode
    begins, and of as many held-out states of policies (hacked.npz)."""
    columns, rng = pose_columns(per_pose, seed=1), np.random.default_rng(1)
    for state in columns["states"]:
        poses.turn_to(state[:24], rng.uniform(-np.pi, np.pi) / 6)
    found = rng.permutation(policy_states(held_out=True))[: len(columns["pose"])]
    states = np.concatenate([columns["states"], np.pad(found, ((0, 0), (0, 23)))])
    return {"states": states, "pose": np.append(columns["pose"], ["policy"] * len(found))}
