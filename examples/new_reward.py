"""A reward of your own: anything that maps pictures to numbers.

    python examples/new_reward.py        # four poses of the humanoid, scored by two such rewards

A reward is a torch module that maps frames [B, H, W, 3] uint8 to [B] float32. Its factory is called
once in every worker with the worker's device, and must be picklable: a class or function at the top
level of a module, with its settings bound by functools.partial. (With several cameras the frames
are [B, V, H, W, 3], and the reward has to reduce V, as GoalDistance does.) The two rewards here are
the pixelwise distance to a picture of the goal, and a small head on CLIP's embeddings like those of
aesthetic scores.

To learn from one of them, copy a script, name the reward in Args, and replace the line that makes
it (docs/new_task.md):

    reward: str = "goal-distance"
    score = functools.partial(GoalDistance, goal=goal)
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone

import clip_reward

# isort: split
import numpy as np
import torch
from torch import nn

import egl_render
from warp_render import WarpRenderer


class GoalDistance(nn.Module):
    """1 minus the mean distance, per pixel and colour, to a picture [H, W, 3] uint8 of the goal,
    both shrunk to 16 x 16, so that an object near its goal scores higher than one far from it. With
    several cameras (frames [B, V, H, W, 3]), it is the mean over all pictures of a state."""

    def __init__(self, device, goal):
        super().__init__()
        self.goal = self.small(torch.as_tensor(goal, device=device)[None])
        self.device = device

    @staticmethod
    def small(frames):
        images = frames.permute(0, 3, 1, 2).float() / 255  # [B, 3, H, W]
        return nn.functional.adaptive_avg_pool2d(images, 16)

    def forward(self, frames):
        frames = torch.as_tensor(frames).to(self.device)
        distance = (self.small(frames.flatten(0, -4)) - self.goal).abs().mean((1, 2, 3))
        return 1 - distance.view(len(frames), -1).mean(1)


class LinearHead(nn.Module):
    """A linear layer on CLIP's unit-norm embeddings, as in most aesthetic scores. Its weights [D]
    and bias come from your own file. (Here they are one text embedding minus another, and 0.)"""

    def __init__(self, device, more, less, model="local-dir:tiny_clip"):
        super().__init__()
        clip = clip_reward.load_clip(model, device)
        self.clip, low = (clip_reward.CLIPReward(clip, [words]) for words in (more, less))
        self.weight, self.bias = self.clip.g - low.g, 0.0

    def forward(self, frames):
        return self.clip.embed_images(frames) @ self.weight + self.bias


def make_renderer(device, size=64):
    """Make the renderer of states; every worker calls this."""
    egl_render.setup_gl(device)  # before mujoco is imported
    from tiny_clip.poses import HUMANOID_XML

    return WarpRenderer(egl_render.textured_model(HUMANOID_XML), size, device=device)


def main():
    egl_render.setup_gl()
    from tiny_clip import poses

    rng, names = np.random.default_rng(1), ("kneeling", "standing", "lotus", "lying_back")
    qpos = np.concatenate([poses.sample(name, rng, 50) for name in names])
    states = np.pad(qpos, ((0, 0), (0, 23)))  # at rest
    goal = make_renderer("cpu").render(np.pad(poses.sample("kneeling", rng), ((0, 0), (0, 23))))[0]
    words = {"more": "a humanoid robot kneeling", "less": "a humanoid robot standing up"}
    rewards = {
        "distance to a picture of kneeling": functools.partial(GoalDistance, goal=goal),
        "head: kneeling against standing": functools.partial(LinearHead, **words),
    }
    for title, make_reward in rewards.items():
        scorer = clip_reward.Scorer(make_renderer, make_reward)  # in this process
        scores = scorer.score(states)[0].reshape(len(names), -1)
        means = "  ".join(f"{name} {mean:.3f}" for name, mean in zip(names, scores.mean(1)))
        print(f"{title}: {means}")


if __name__ == "__main__":
    main()
