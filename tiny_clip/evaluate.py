"""Print held-out figures of tiny_clip, or of any CLIP on the same states, as Markdown.

    python tiny_clip/evaluate.py > tiny_clip/figures.md
    python tiny_clip/evaluate.py --clip-model ViT-B-32/laion2b_s34b_b79k

States come from seeds that training never saw, and pictures and rewards from the same code that a
run uses. The exit code is 1 if the embedded model breaks a promise.
"""

import argparse
import dataclasses
import datetime
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: off
from clip_reward import CLIPReward, UsageError, load_clip  # before torch: it bounds spinning
import egl_render
import numpy as np
import torch
from scipy import stats

from environments import classic as task_pictures
from evaluation import metrics
from tiny_clip import classic, data, poses
from warp_render import WarpRenderer
# isort: on

HERE = Path(__file__).resolve().parent
# train.py uses 10 000 s + i for its seed s. The values 2 000 000 to 2 000 002 and 5 000 000 to
# 5 000 003 decided which weights to keep, so no figure comes from these.
SEED = 6_000_000
PROMPTS = {name: data.CAPTIONS[name][0].format(data.SUBJECT)
           for name in (*poses.TASKS, "lying", "robot", "upright", "peak")}  # fmt: skip
PROMISED = ("kneeling", "standing", "splits", "lotus", "arms_raised", "lying")
MIN_AUC, MIN_SPEARMAN = 0.95, 0.8
UNSEEN = classic.WORDS["unseen"]
CLASSIC_SCENES = [scene for scene in classic.SCENES if scene != "mountain_varied"]


def make_judge(clip_model, device="cpu"):
    """Return a function that maps frames [B, H, W, 3] uint8 to a model's plain rewards (alpha 0):
    {key of PROMPTS or sentence of UNSEEN: [B] float64}."""
    clip = load_clip(clip_model, device)
    sentences = PROMPTS | {sentence: sentence for sentence in UNSEEN.values()}
    rewards = {name: CLIPReward(clip, [sentence]) for name, sentence in sentences.items()}

    @torch.inference_mode()
    def judge(frames):
        chunks = torch.from_numpy(frames).split(128)
        embeddings = torch.cat([rewards["robot"].embed_images(chunk) for chunk in chunks])
        return {name: r.reward(embeddings).double().cpu().numpy() for name, r in rewards.items()}

    return judge


def auc(scores, truth, weight):
    """Return the area under the ROC curve of a concept's scores [B]: the chance that a state where
    it is true (truth [B] at least 0.6) scores above one where it is not (at most 0.3). States
    between these, or unknown (weight [B] not 1), are left out. NaN if one kind is missing."""
    known = (weight == 1) & ((truth >= 0.6) | (truth <= 0.3))
    return metrics.auc(scores[known], truth[known] >= 0.6)


def paper_camera(azimuth):
    return dataclasses.replace(egl_render.PAPER_CAMERA, azimuth=azimuth)


def draw(
    qpos, scene="canonical", size=64, camera=egl_render.PAPER_CAMERA, renderer_class=WarpRenderer
):
    """Draw positions [B, 24] at rest, in the "canonical" or "plain" scene -> frames [B, size, size,
    3] uint8."""
    renderer = renderer_class(data.scene_model(scene, None), size, camera)
    frames = renderer.render(np.pad(qpos, ((0, 0), (0, 23))))
    renderer.close()
    return frames


def table(head, rows):
    """Return a Markdown table; floats have three decimals."""
    rows = [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in [head, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def pose_figures(judge, count, size):
    """Measure how well each prompt tells its pose from others, on `count` samples of each pose and
    3 `count` rollout states: (Markdown, broken promises)."""
    rng = np.random.default_rng(SEED)
    samples = [poses.sample(name, rng, count) for name in poses.POSE_NAMES]
    rolled = poses.rollout_states(rng, 12)[:, :: max(1, 400 // count)].reshape(-1, 24)
    names = [*np.repeat(poses.POSE_NAMES, count), *["various"] * len(rolled)]
    qpos = np.concatenate([*samples, rolled])
    truth, weight = data.truth_of(names, qpos)
    by_egl = egl_render.PAPER_CAMERA, egl_render.MujocoRenderer
    looks = {  # n: every n-th state is drawn; arguments of draw
        f"textured, {size} px": (1, "canonical", size),
        f"plain, {size} px": (1, "plain", size),
        f"plain, default camera, {size} px": (1, "plain", size, data.environment_camera()),
        f"textured, azimuth 90, {size} px": (1, "canonical", size, paper_camera(90)),
        f"textured, azimuth 225, {size} px": (1, "canonical", size, paper_camera(225)),
        **{  # in software 0.1 s a picture
            f"textured, {px} px, EGL": (5, "canonical", px, *by_egl) for px in (size, 480)
        },
    }
    scores = {look: judge(draw(qpos[::every], *how)) for look, (every, *how) in looks.items()}

    def auc_of(prompt, concept, look):
        some, column = slice(None, None, looks[look][0]), data.CONCEPTS.index(concept)
        return auc(scores[look][prompt], truth[some, column], weight[some, column])

    aucs = {c: {look: auc_of(c, c, look) for look in looks} for c in (*poses.TASKS, "lying")}
    missed = [  # only the scene that runs draw by default is promised
        f"AUC of {c}, {look}: {figure:.3f} < {MIN_AUC}"
        for c in PROMISED
        for look, figure in aucs[c].items()
        if look.startswith("textured") and not figure >= MIN_AUC
    ]
    return [
        f"This is the one-vs-rest AUC of the prompt's reward (alpha 0) over {len(qpos)} states: "
        f"{count} of each pose, and rollouts of random policies. The camera is the paper's and "
        "MuJoCo Warp draws, unless the column says otherwise. "
        f"The AUC of {', '.join(PROMISED)} in the textured scene must be at least {MIN_AUC}.",
        table(["prompt", *looks], [[PROMPTS[c], *row.values()] for c, row in aucs.items()]),
        "Sentences it has never seen have this AUC in the textured scene:",
        table(["prompt", "AUC"], [[s, auc_of(s, c, next(iter(looks)))] for c, s in UNSEEN.items()]),
    ], missed


def blend_figures(judge, blends, size):
    """Measure how the reward rises on `blends` paths to each pose: (Markdown, broken promises)."""
    rng, t, ranks = np.random.default_rng(SEED + 1), np.linspace(0, 1, 11), {}
    for goal in poses.TASKS:
        if goal != "standing":
            ways = np.concatenate([poses.blend(goal, rng, t) for _ in range(blends)])
            rewards = judge(draw(ways, size=size))[goal].reshape(blends, len(t))
            ranks[goal] = [stats.spearmanr(t, along).statistic for along in rewards]
    mean = np.mean(list(ranks.values()))
    rows = [[goal, np.mean(found), min(found)] for goal, found in ranks.items()]
    missed = f"mean Spearman along blends {mean:.3f} < {MIN_SPEARMAN}"
    return [
        f"Does the reward rise on the way from standing into the pose? Spearman's rank correlation "
        f"along blends of 11 pictures has a mean of {mean:.3f}.",
        table(["goal", "mean", "lowest blend"], rows),
    ], [] if mean >= MIN_SPEARMAN else [missed]


LEVELS = {"none": (0, 0.1), "a little": (0.1, 0.4), "half": (0.4, 0.7), "there": (0.9, 1.01)}
VIEWS = (120, 180, 240)


def half_figures(judge, count, size):
    """Measure the reward of half a pose on held-out states of policies, and on `count` samples and
    2 `count` half poses of each task, seen as in `make train`: (Markdown, [])."""
    rng = np.random.default_rng(SEED + 2)
    samples = [poses.sample(name, rng, count) for name in poses.TASKS]
    halves = [
        poses.half(poses.sample("standing", rng)[0], poses.sample(goal, rng)[0], rng)
        for goal in poses.TASKS
        for _ in range(2 * count)
    ]
    qpos = np.concatenate([data.policy_states(held_out=True), *samples, halves])
    for state in qpos:
        poses.turn_to(state, rng.uniform(-np.pi, np.pi) / 6)
    views = [judge(draw(qpos, size=size, camera=paper_camera(azimuth))) for azimuth in VIEWS]
    degrees, rows = data.degrees(poses.describe(qpos)), []
    for task in poses.TASKS:
        degree, reward = degrees[task], np.mean([view[task] for view in views], 0)
        row = [PROMPTS[task], stats.spearmanr(degree, reward).statistic]
        for low, high in LEVELS.values():
            at = (low <= degree) & (degree < high)
            row.append(f"{reward[at].mean():.2f} +- {reward[at].std():.2f} ({at.sum()})")
        rows.append(row)
    return [
        "For half poses, the table shows the mean reward, its standard deviation and the number "
        f"of states, by how much of the pose a state shows (`data.degrees`). The {len(qpos)} "
        "states are those of policies that no training saw, half poses and whole poses. The "
        f"reward is the mean over the azimuths {VIEWS}:",
        table(["prompt", "Spearman", *LEVELS], rows),
    ], []


def classic_figures(judge, scenes=CLASSIC_SCENES, count=500, sizes=(64, 96)):
    """Measure how the reward agrees with the classic tasks' goals: (Markdown, broken promises)."""
    rows, missed = [], []
    for scene in scenes:
        concept, column, low, high, goal, most = "upright", 2, -np.pi, np.pi, 0.0, 0.05
        if scene != "cartpole":
            goal = task_pictures.MOUNTAIN_GOALS[classic.SCENES[scene][0]]
            concept, column, low, high, most = "peak", 0, -1.2, 0.6, 0.1
        rng = np.random.default_rng(SEED + 3)
        states = classic.sample_states(scene, rng, count)
        truth = classic.truth_of(scene, states)[concept]
        line = np.zeros((361, states.shape[1]))
        line[:, column] = np.linspace(low, high, len(line))
        for size in sizes:
            rewards = judge(classic.draw(scene, states, size, rng))[concept]
            along = judge(classic.draw(scene, line, size, rng))[concept]
            off = abs(line[along.argmax(), column] - goal)
            if off > most:
                missed.append(f"{scene}, {size} px: largest reward {off:.3f} from the goal")
            rank, linear = stats.spearmanr(truth, rewards), stats.pearsonr(truth, rewards)
            span = f"{along.min():.2f} to {along.max():.2f}"
            rows.append([scene, size, rank.statistic, linear.statistic, off, span])
    return [
        "For CartPole and MountainCar, the table shows how well the reward of the goal prompt "
        "agrees with how near the goal the state is (`classic.truth_of`; Spearman's and Pearson's "
        "correlation over random states). It also shows how far from the goal (rad, position) the "
        "reward has its maximum along one sweep:",
        table(["scene", "px", "Spearman", "Pearson", "maximum off by", "range"], rows),
    ], missed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clip-model", default=f"local-dir:{HERE}", help="as in the scripts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=40, help="states of each pose")
    parser.add_argument("--size", type=int, default=64, help="picture size in pixels")
    args = parser.parse_args()
    try:
        judge = make_judge(args.clip_model, args.device)
    except UsageError as error:
        sys.exit(f"error: {error}")
    parts = [pose_figures(judge, args.samples, args.size)]
    parts += [blend_figures(judge, max(2, args.samples // 4), args.size)]
    parts += [half_figures(judge, args.samples, args.size), classic_figures(judge)]
    figures, missed = (sum(column, []) for column in zip(*parts))
    model = args.clip_model.replace(str(HERE), HERE.name)
    source = f"{model}, states from seeds {SEED} to {SEED + 3}, {datetime.date.today()}"
    print("# Held-out figures", source, *figures, sep="\n\n")
    if args.clip_model == parser.get_default("clip_model"):
        sys.exit("\n".join(f"NOT MET: {line}" for line in missed) or 0)


if __name__ == "__main__":
    main()
