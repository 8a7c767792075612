"""Held-out figures of tiny_clip, or of any CLIP on the same states; writes the model card.

    python tiny_clip/evaluate.py                                     # tiny_clip/README.md
    python tiny_clip/evaluate.py --clip-model ViT-B-32/laion2b_s34b_b79k   # prints only

States come from seeds that training never saw, pictures and rewards from the same code that a run
uses. Ends with code 1 if the embedded model misses what it promises.
"""

import argparse
import datetime
import json
import os
import sys
import time

# see train.py
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from safetensors import safe_open

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import egl_render
from clip_reward import CLIPReward, UsageError, load_clip
from eval_epic import pearson, spearman
from tiny_clip import classic, data, poses
from tiny_clip.train import auc

HERE = os.path.dirname(os.path.abspath(__file__))
# train.py uses 10 000 s + i of its seed s, and 1 000 000 + i to report progress; 2 000 000 to
# 2 000 002 led to the second run, so no figure is taken from them any more
SEED = 5_000_000
PROMPTS = {
    **{name: task["target_prompt"] for name, task in poses.TASKS.items()},
    "lying": "a humanoid robot lying on the ground",
    "robot": "a humanoid robot",
    "upright": classic.CAPTIONS["upright"][0],
    "peak": classic.CAPTIONS["peak"][0],
}
HUMANOID_PROMPTS = [name for name in PROMPTS if name in data.HUMANOID_CAPTIONS]
PROMISED = ("kneeling", "standing", "splits", "lotus", "arms_raised", "lying")
MIN_AUC, MIN_SPEARMAN = 0.95, 0.8
UNSEEN = {  # sentences that are not among the captions nor a rewording of one
    "kneeling": "an android praying on bended knee, both shins against the stone",
    "splits": "a machine stretching its legs apart to the left and to the right, like a gymnast",
    "lying": "a robot sleeping on the stones",
    "arms_raised": "a robot cheering with its hands high over its head",
}


class Judge:
    """Rewards of one model: pictures are embedded once, then compared with every prompt."""

    def __init__(self, clip_model, device):
        self.clip_model, self.device = clip_model, device
        self.rewards = {name: self.reward_of(prompt) for name, prompt in PROMPTS.items()}
        self.eye = next(iter(self.rewards.values()))

    def reward_of(self, prompt):
        """The plain CLIP reward (alpha 0) for a prompt: a CLIPReward."""
        return CLIPReward(load_clip(self.clip_model, self.device), [prompt])

    def embed(self, frames):
        """frames [B, H, W, 3] uint8 -> embeddings [B, D]."""
        chunks = torch.from_numpy(frames).split(128)
        return torch.cat([self.eye.embed_images(chunk) for chunk in chunks])

    def score(self, embeddings, prompt):
        """embeddings [B, D] -> rewards for a key of PROMPTS, or a CLIPReward: [B] float64."""
        reward = self.rewards.get(prompt, prompt) if isinstance(prompt, str) else prompt
        return reward.reward(embeddings).double().cpu().numpy()


def make_renderer(scene, camera, size, quality):
    """A MujocoRenderer of the "canonical" or "plain" scene, "paper" or "default" camera."""
    model = data.scene_model(scene, None)
    view = egl_render.PAPER_CAMERA if camera == "paper" else data.environment_camera()
    return egl_render.MujocoRenderer(model, size, view, quality)


def draw(renderer, qpos):
    """Frames of positions [B, 24] at rest: [B, H, W, 3] uint8."""
    velocities = np.zeros((len(qpos), renderer.model.nv))
    return renderer.render(np.concatenate([qpos, velocities], 1))


def held_out_states(count):
    """`count` samples of each pose and as many rollout states as of three poses:
    (names [B] str, qpos [B, 24], truth [B, C], weight [B, C])."""
    rng = np.random.default_rng(SEED)
    names = [name for name in poses.POSE_NAMES for _ in range(count)]
    qpos = [poses.sample(name, rng, count) for name in poses.POSE_NAMES]
    rolled = poses.rollout_states(rng, 12)[:, :: max(1, 400 // count)].reshape(-1, 24)
    names = np.array(names + ["rollout"] * len(rolled))
    qpos = np.concatenate([*qpos, rolled])
    return names, qpos, *data.truth_of(names, qpos)


def concept_auc(judge, embeddings, concept, truth, weight, prompt=None):
    """One-vs-rest AUC of a prompt: true from 0.6, false to 0.3, what is unclear is left out."""
    c = data.CONCEPTS.index(concept)
    sure = (weight[:, c] == 1) & ((truth[:, c] >= 0.6) | (truth[:, c] <= 0.3))
    scores = judge.score(embeddings, concept if prompt is None else judge.reward_of(prompt))
    return auc(scores[sure], truth[sure, c] >= 0.6)


def blend_figures(judge, renderer, blends):
    """Goal -> (mean, lowest) Spearman of the reward with the way gone, over `blends` blends."""
    rng, t, figures = np.random.default_rng(SEED + 1), np.linspace(0, 1, 11), {}
    for goal in poses.TASKS:
        if goal == "standing":
            continue
        values = []
        for _ in range(blends):
            embeddings = judge.embed(draw(renderer, poses.blend(goal, rng, t)))
            values.append(spearman(t, judge.score(embeddings, goal)))
        figures[goal] = (np.mean(values), np.min(values))
    return figures


def rollout_figures(judge, renderer, episodes=16):
    """What -> (number, mean and largest kneeling reward) of states of a random policy, and the
    rank correlation of the reward with how much the geometry kneels (data.degrees)."""
    rng = np.random.default_rng(SEED + 2)
    qpos = poses.rollout_states(rng, 2 * episodes)[::2]  # the even ones start as a run does
    scores = np.stack([judge.score(judge.embed(draw(renderer, q)), "kneeling") for q in qpos])
    labels = np.stack([poses.label(q) for q in qpos])
    degree = data.degrees(poses.describe(qpos.reshape(-1, 24)))["kneeling"].reshape(scores.shape)
    start = np.zeros_like(scores, bool)
    start[:, :5] = True
    groups = {
        "the first five steps": start,
        "falling": labels == "falling",
        "lying": np.char.startswith(labels, "lying"),
        "not on the knees (degree below 0.05)": degree < 0.05,
        "half on the knees (0.3 to 0.6)": (degree >= 0.3) & (degree <= 0.6),
        "on the knees (above 0.8)": degree > 0.8,
        "all": np.ones_like(start),
    }
    rows = {
        name: (int(mask.sum()), scores[mask].mean(), scores[mask].max())
        for name, mask in groups.items()
        if mask.any()
    }
    return rows, spearman(degree.ravel(), scores.ravel())


# Scene -> the goal's coordinate and how far from it the reward may be largest (rad, position)
CLASSIC_GOALS = {
    "cartpole": (0.0, 0.05),
    "mountain": (0.5, 0.1),
    "mountain_plain": (0.5, 0.1),
    "mountain_continuous": (0.45, 0.1),
    "mountain_continuous_plain": (0.45, 0.1),
}


def classic_figures(judge, count=500, sizes=(64, 96)):
    """Rows of a table on CartPole's and MountainCar's scenes, and the promises not kept."""
    rows, missed = [], []
    for scene, (goal, most) in CLASSIC_GOALS.items():
        concept = "upright" if scene == "cartpole" else "peak"
        rng = np.random.default_rng(SEED + 3)
        states = classic.sample_states(scene, rng, count)
        truth = classic.truth_of(scene, states)[concept]
        column = 2 if scene == "cartpole" else 0
        low, high = (-np.pi, np.pi) if scene == "cartpole" else (-1.2, 0.6)
        line = np.zeros((361, states.shape[1]))
        line[:, column] = np.linspace(low, high, len(line))
        for size in sizes:
            rewards = judge.score(judge.embed(classic.draw(scene, states, size, rng)), concept)
            along = judge.score(judge.embed(classic.draw(scene, line, size, rng)), concept)
            off = abs(line[along.argmax(), column] - goal)
            if off > most:
                missed.append(f"{scene}, {size} px: largest reward {off:.3f} from the goal")
            rank, linear = spearman(truth, rewards), pearson(truth, rewards)
            figures = (f"{rank:.3f}", f"{linear:.3f}", f"{off:.3f}")
            rows.append((scene, size, *figures, f"{along.min():.2f} to {along.max():.2f}"))
    return rows, missed


def images_per_second(judge, size, batch=256, seconds=3.0):
    """Frames of size x size that the model preprocesses and embeds a second."""
    frames = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8)
    judge.eye.embed_images(frames)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        judge.eye.embed_images(frames)
        done += batch
    return done / (time.perf_counter() - began)


def table(head, rows):
    """A Markdown table."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


CARD = """# tiny_clip: the embedded model

A small CLIP for the scenes of this project: the humanoid, CartPole, MountainCar. It loads as any
other open_clip model (`--clip-model local-dir:tiny_clip`), needs no network and runs on a CPU.

**It is not zero-shot.** It was trained on pictures of these very scenes with captions made from the
simulator's state, about what is listed below. It exists so that the whole system can be run,
tested and demonstrated within minutes anywhere. It says nothing about what pretrained CLIP
understands: results about CLIP need real CLIP.

{figures}

## How it was trained
- Model: open_clip ModifiedResNet, layers 1-1-1-1, 64 px; text transformer of width 64 with 2 layers
  and the standard CLIP tokenizer (32 tokens); embeddings of 64 numbers; half precision on disk.
- Data (`data.py`, `poses.py`): pictures drawn on the spot. States: samples of every pose
  of the library (44 %), blends from standing into a goal pose (20 %), blends from lying, falling
  or contorted states into one (14 %), rollouts of random policies (22 %). Scenes: varied textures
  and light, the canonical textured scene, Gymnasium's plain one. Mostly the paper's camera, exact
  and jittered. Mostly light quality at 64 to 224 px, some full at 480 px.
- CartPole and MountainCar (`classic.py`), since the third run: any angle and position, more of them
  near the goal; the landscape, varied landscapes, Gymnasium's own look; 64 to 480 px.
- Captions: {concepts} things that can be said of a picture in {captions} wordings, with the paper's
  goal prompts and its baseline prompts ("a humanoid robot", "pole and cart", "a car in the
  mountain"), which are true of every picture of their scene. How true each is of each
  picture, 0 to 1, follows from the pose, from how far a blend has come, or from geometry.
- Loss: sigmoid cross entropy of every picture with captions of every concept (as SigLIP, with soft
  targets), plus the variance of the baseline prompts over their scenes' pictures. AdamW, cosine
  schedule, averaged weights. The cosines are spread wide because they are the reward.
- Runs of `tiny_clip/train.py`, in this order (minutes with other work on the same cores; shares
  of {scenes} scenes):
{history}

## Intended use and limits
- Intended: demonstrations, tests, and development of the pipeline without a GPU or a network.
- Poses outside the library and sentences far from the captions get rewards that mean little; see
  "sentences it has never seen" above. It knows no other scene, robot, camera angle or task.
- CartPole's pole is 13 pixels long at 64 px: a lean of 3 degrees moves its tip by less than one.
- An agent optimises whatever the model gets wrong. Look at the videos before believing a reward.
- Hands on hips, arms crossed and one leg are differences of a few pixels at 64 px.
- The standing prompt counts every upright standing pose as standing, whatever the arms do.

Figures by `python tiny_clip/evaluate.py` on {today}, {machine_cpus} CPU cores. States from seeds
{seed_range}. Training used others, and the second run was decided on those of seeds 2000000 to
2000002, which are not these.
"""


def evaluate(clip_model, device, count, size):
    """All figures: (Markdown, list of promises that are not kept)."""
    judge = Judge(clip_model, device)
    names, qpos, truth, weight = held_out_states(count)
    conditions = {
        f"textured, {size} px": ("canonical", "paper", size, "light", slice(None)),
        f"plain, {size} px": ("plain", "paper", size, "light", slice(None)),
        f"plain, default camera, {size} px": ("plain", "default", size, "light", slice(None)),
        "textured, 480 px, full": ("canonical", "paper", 480, "full", slice(None, None, 5)),
    }
    aucs, embedded = {}, {}
    for condition, (scene, camera, pixels, quality, rows) in conditions.items():
        renderer = make_renderer(scene, camera, pixels, quality)
        embedded[condition] = judge.embed(draw(renderer, qpos[rows]))
        renderer.close()
        for concept in (*poses.TASKS, "lying"):
            figure = concept_auc(judge, embedded[condition], concept, truth[rows], weight[rows])
            aucs[concept, condition] = figure
    first = next(iter(conditions))
    unseen = {
        prompt: concept_auc(judge, embedded[first], concept, truth, weight, prompt)
        for concept, prompt in UNSEEN.items()
    }
    means = {
        (prompt, pose): judge.score(embedded[first], prompt)[names == pose].mean()
        for prompt in HUMANOID_PROMPTS
        for pose in poses.POSE_NAMES
    }
    renderer = make_renderer("canonical", "paper", size, "light")
    blends = blend_figures(judge, renderer, blends=max(2, count // 4))
    rollouts, agreement = rollout_figures(judge, renderer)
    renderer.close()
    mean_spearman = float(np.mean([mean for mean, _ in blends.values()]))

    def below(chosen):
        return [
            f"{concept}, {condition}: {aucs[concept, condition]:.3f}"
            for condition in chosen
            for concept in PROMISED
            if not aucs[concept, condition] >= MIN_AUC
        ]

    # the promise is for the scene that a run shows unless told otherwise; the others are reported
    textured = [condition for condition in conditions if condition.startswith("textured")]
    others = below(condition for condition in conditions if condition not in textured)
    missed = [f"AUC of {figure} < {MIN_AUC}" for figure in below(textured)]
    if not mean_spearman >= MIN_SPEARMAN:
        missed.append(f"mean Spearman along blends {mean_spearman:.3f} < {MIN_SPEARMAN}")

    classics, classic_missed = classic_figures(judge)
    missed += classic_missed

    sections = [
        "## Held-out figures",
        f"One-vs-rest AUC of the prompt's reward (alpha 0) over {len(qpos)} states: {count} of "
        "each pose and rollouts of random policies. The paper's camera unless said otherwise.",
        table(
            ["prompt", *conditions],
            [
                [PROMPTS[c], *(f"{aucs[c, condition]:.3f}" for condition in conditions)]
                for c in (*poses.TASKS, "lying")
            ],
        ),
        f"Of {', '.join(PROMISED)} below {MIN_AUC} in the scenes that a run does not show unless "
        f"told to (`--no-textured`, `--camera default`): {'; '.join(others) or 'none'}.",
        f"Does the reward rise on the way from standing into the pose? Spearman's rank correlation "
        f"along blends of 11 pictures, mean {mean_spearman:.3f}.",
        table(
            ["goal", "mean", "lowest blend"],
            [[goal, f"{mean:.3f}", f"{low:.3f}"] for goal, (mean, low) in blends.items()],
        ),
        "Mean reward of each prompt (columns) for each pose (rows), textured scene:",
        table(
            ["pose", *HUMANOID_PROMPTS],
            [
                [pose, *(f"{means[prompt, pose]:.2f}" for prompt in HUMANOID_PROMPTS)]
                for pose in poses.POSE_NAMES
            ],
        ),
        "Kneeling reward in episodes of a random policy (a kneeling robot gets "
        f"{means['kneeling', 'kneeling']:.2f}). Over all their states its rank correlation with "
        f"how much the geometry kneels is {agreement:.2f}.",
        table(
            ["states", "number", "mean", "largest"],
            [
                [name, number, f"{mean:.2f}", f"{top:.2f}"]
                for name, (number, mean, top) in rollouts.items()
            ],
        ),
        "Sentences it has never seen (AUC, textured):",
        table(["prompt", "AUC"], [[prompt, f"{value:.3f}"] for prompt, value in unseen.items()]),
        "CartPole and MountainCar: how the reward for the goal prompt agrees with how near the "
        "goal the state is (`classic.truth_of`; Spearman's and Pearson's correlation over random "
        "states), and how far from the goal (rad, position) it is largest along one sweep:",
        table(["scene", "px", "Spearman", "Pearson", "maximum off by", "range"], classics),
        f"Speed: {images_per_second(judge, size):.0f} pictures/s of {size} px on "
        f"{torch.get_num_threads()} threads ({device}).",
    ]
    return "\n\n".join(sections), missed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clip-model", default=f"local-dir:{HERE}", help="as in the scripts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=40, help="states of each pose")
    parser.add_argument("--size", type=int, default=64, help="pixels of the pictures")
    parser.add_argument("--card", help="where to write the card (local-dir: its README.md)")
    args = parser.parse_args()
    try:
        figures, missed = evaluate(args.clip_model, args.device, args.samples, args.size)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(figures)
    if args.clip_model.startswith("local-dir:"):
        folder = args.clip_model.removeprefix("local-dir:")
        weights = os.path.join(folder, "open_clip_model.safetensors")
        figures += f" File: {os.path.getsize(weights) / 1e6:.1f} MB."
        with safe_open(weights, "pt") as file:
            history = json.loads((file.metadata() or {}).get("history", "[]"))
        card = CARD.format(
            figures=figures,
            concepts=len(data.CONCEPTS),
            captions=sum(map(len, data.CAPTIONS.values())),
            today=datetime.date.today(),
            machine_cpus=os.cpu_count(),
            seed_range=f"{SEED} to {SEED + 2}",
            scenes=", ".join(data.SCENES),
            history="\n".join(f"  {i}. {run}" for i, run in enumerate(history, 1)),
        )
        path = args.card or os.path.join(folder, "README.md")
        with open(path, "w") as file:
            file.write(card)
        print(f"\nwrote {path}")
    for line in missed:
        print(f"NOT MET: {line}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
