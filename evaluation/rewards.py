"""Rewards of states by several models, prompts and alphas."""

from __future__ import annotations

import functools
import logging
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from annotated_types import Interval
from pydantic.dataclasses import dataclass
from tqdm import tqdm

import clip_reward
from clip_reward import RewardArgs, Scorer, UsageError
from training.workers import Pool

Alpha = Annotated[float, Interval(ge=0, le=1)]
IN_PROCESS = 2000  # states that are scored here before workers would have started


def check_distinct(**flags):
    """Raise UsageError for a flag with nothing to compare, or with one thing twice."""
    for name, given in flags.items():
        if not given or len(set(given)) < len(given):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {' '.join(map(str, given))}: none, or one named twice")


@dataclass
class Rewards(RewardArgs):
    """Models and alphas to compare. Each picture is embedded once by each model. Prompts that are
    not given are the task's."""

    reward: tyro.conf.Suppress[Literal["clip"]] = "clip"
    reward_alpha: tuple[Alpha, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """strengths of goal-baseline regularisation"""
    clip_model: tuple[str, ...] = ("ViT-bigG-14/laion2b_s39b_b160k",)
    """models: ARCH/TAG of open_clip, hf-hub:ORG/NAME or local-dir:PATH; offline:
    local-dir:tiny_clip"""

    def each(self, prompts, views=1):
        """Return checked RewardArgs of each model, with the largest alpha; {"target_prompt",
        "baseline_prompt"} are for where none are given. `views` are the pictures of a state."""
        check_distinct(reward_alpha=self.reward_alpha, clip_model=self.clip_model)
        values = vars(self) | {"reward_alpha": max(self.reward_alpha)}
        values["clip_batch_size"] = max(1, self.clip_batch_size // views)  # states
        if not self.target_image:
            values["target_prompt"] = self.target_prompt or tuple(prompts["target_prompt"])
        values["baseline_prompt"] = self.baseline_prompt or tuple(prompts["baseline_prompt"])
        models = []
        for model in self.clip_model:
            fields = RewardArgs.__dataclass_fields__
            models.append(RewardArgs(**{x: values[x] for x in fields} | {"clip_model": model}))
            models[-1].check()
        return models


@dataclass
class Model(RewardArgs):
    """One model, and how it is run."""

    reward: tyro.conf.Suppress[Literal["clip"]] = "clip"
    target_prompt: tyro.conf.Suppress[tuple[str, ...]] = ()
    target_image: tyro.conf.Suppress[tuple[str, ...]] = ()
    reward_alpha: tyro.conf.Suppress[float] = 0.0


def at_alphas(reward, embeddings, alphas):
    """Return a CLIPReward's rewards [B, alphas] of embeddings as it takes them."""
    rewards = []
    for reward.alpha in alphas:
        rewards.append(reward.reward(embeddings))
    return torch.stack(rewards, 1)


class Alphas(torch.nn.Module):
    """The reward at several alphas: frames as in CLIPReward -> [B, alphas] float32."""

    def __init__(self, args: RewardArgs, alphas, device):
        super().__init__()
        self.reward, self.alphas = clip_reward.make_clip_reward(args, device), alphas

    def forward(self, frames):
        return at_alphas(self.reward, self.reward.embed_images(frames), self.alphas)


class Variants(torch.nn.Module):
    """The reward of every view by every prompt and alpha: frames as in CLIPReward -> [B, V,
    prompts, alphas] float32."""

    def __init__(self, args: RewardArgs, prompts, alphas, device):
        super().__init__()
        args.check_speed(device)
        clip = clip_reward.load_clip(args.clip_model, device, args.clip_precision)
        scene, self.alphas = (args.baseline_prompt, max(alphas)), alphas
        self.rewards = [clip_reward.CLIPReward(clip, [prompt], *scene) for prompt in prompts]

    def forward(self, frames):
        views = self.rewards[0].embed_images(frames).flatten(0, -2)
        rewards = [at_alphas(reward, views, self.alphas) for reward in self.rewards]
        return torch.stack(rewards, 1).unflatten(0, (len(frames), -1))


def rewards_of(args: RewardArgs, alphas, make_renderer, states):
    """Return rewards of states [N, S]: {alpha: [N] float64}."""
    make_reward = functools.partial(Alphas, args, alphas)
    rewards = scored(args, make_reward, make_renderer, states)
    return dict(zip(alphas, rewards.T.astype(np.float64)))


def scored(args: RewardArgs, make_reward, make_renderer, states):
    """Return what `make_reward` makes of states [N, S]: [N, ...] float32, by the workers of
    training, or, of a few states, in this process."""
    devices, size = args.devices(), args.clip_batch_size
    if args.reward_devices or len(states) > IN_PROCESS:
        scorer = Pool(make_renderer, make_reward, devices, size, args.worker_timeout)
        score, size = scorer.score, 64 * size
    else:
        scorer = Scorer(make_renderer, make_reward, devices[0])
        score = lambda part: scorer.score(part)[0]  # noqa: E731
    parts = [states[start : start + size] for start in range(0, len(states), size)]
    rewards = [score(part) for part in tqdm(parts, f"{size} states each", disable=None)]
    scorer.close()
    return np.concatenate(rewards)


def count_parameters(name: str) -> int:
    """Return how many parameters a model has, without its weights."""
    import open_clip

    level = logging.root.manager.disable
    logging.disable()  # open_clip warns of random weights; these are none at all
    try:
        with torch.device("meta"):
            options = {"load_weights": False, "pretrained_text": False, "device": "meta"}
            model = open_clip.create_model(clip_reward.resolve(name)[0], **options)
    finally:
        logging.disable(level)
    return sum(weights.numel() for weights in model.parameters())
