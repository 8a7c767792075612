"""Rewards of states by several models, prompts and alphas."""

import contextlib
import functools
import logging
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from annotated_types import Interval
from pydantic.dataclasses import dataclass
from tqdm import tqdm

import clip_reward
from clip_reward import ModelName, UsageError
from evaluation.runs import script_of

Alphas = tuple[Annotated[float, Interval(ge=0, le=1)], ...]


@dataclass
class Rewards(clip_reward.RewardArgs):
    """Each model embeds each picture once. By default, the prompts are the task's."""

    reward: tyro.conf.Suppress[Literal["clip"]] = "clip"
    reward_head: tyro.conf.Suppress[str] = ""
    reward_devices: tuple[str, ...] = ()
    """the device that scores: cuda:i or cpu (default: the first GPU; a small model needs none)"""
    score_every: tyro.conf.Suppress[int] = 1
    reward_alpha: Alphas = (0.0, 0.25, 0.5, 0.75, 1.0)
    """alphas to compare: how strongly a reward ignores everything that does not distinguish the
    target from the --baseline-prompt, from 0 (not at all) to 1 (completely)"""
    clip_model: tuple[ModelName, ...] = ("ViT-bigG-14/laion2b_s39b_b160k",)
    """models to compare: ARCH/TAG of open_clip, hf-hub:ORG/NAME or local-dir:PATH; offline:
    tiny_clip"""

    def models(self, target_prompt, baseline_prompt):
        """Return the checked RewardArgs of each model, with the largest alpha, and with these
        prompts if the flags give none."""
        if not self.reward_alpha or not self.clip_model:
            raise UsageError("--reward-alpha, --clip-model: one of them has no value")
        values = vars(self) | {"reward_alpha": max(self.reward_alpha)}
        if not self.target_image:
            values["target_prompt"] = self.target_prompt or tuple(target_prompt)
        values["baseline_prompt"] = self.baseline_prompt or tuple(baseline_prompt)
        models = [clip_reward.RewardArgs(**values | {"clip_model": x}) for x in self.clip_model]
        for model in models:
            model.check_reward()
        return models


@dataclass
class Prompts(Rewards):
    """Each model embeds each picture once."""

    target_prompt: tuple[str, ...] = ()
    """prompts to compare; default: the task's and some paraphrases"""
    target_image: tyro.conf.Suppress[tuple[str, ...]] = ()
    reward_alpha: Alphas = (0.0, 0.5, 1.0)
    """alphas to compare: how strongly a reward ignores everything that does not distinguish the
    target from the --baseline-prompt, from 0 (not at all) to 1 (completely)"""


@dataclass
class HeadModel(clip_reward.RewardArgs):
    """The model whose embeddings a head is fitted to."""

    target_prompt: tuple[str, ...] = ()
    """words to compare the head with; default: the task's"""
    clip_model: ModelName | None = None
    """as in training; default: the model of the dataset's run"""
    baseline_prompt: tyro.conf.Suppress[tuple[str, ...]] = ()
    target_image: tyro.conf.Suppress[tuple[str, ...]] = ()
    reward: tyro.conf.Suppress[Literal["clip"]] = "clip"
    reward_head: tyro.conf.Suppress[str] = ""
    reward_alpha: tyro.conf.Suppress[float] = 0.0
    reward_devices: tuple[str, ...] = ()
    """the device that embeds: cuda:i or cpu (default: the first GPU; a small model needs none)"""
    score_every: tyro.conf.Suppress[int] = 1


class Variants(torch.nn.Module):
    """The reward of every view for every goal and alpha: frames as in CLIPReward -> [B, V, goals,
    alphas] float32. A goal is a tuple of prompts, which are averaged as in training."""

    def __init__(self, device, args: clip_reward.RewardArgs, goals, alphas):
        super().__init__()
        clip = args.load_clip(device)
        scene = args.baseline_prompt, max(alphas), args.target_image
        self.alphas = alphas
        self.rewards = [clip_reward.CLIPReward(clip, goal, *scene) for goal in goals]

    def forward(self, frames):
        views = self.rewards[0].embed_images(frames).flatten(0, -2)
        scores = []
        for reward in self.rewards:
            for reward.alpha in self.alphas:
                scores.append(reward.reward(views))
        shape = len(frames), -1, len(self.rewards), len(self.alphas)
        return torch.stack(scores, 1).reshape(shape)


def score(model: clip_reward.RewardArgs, goals, alphas, args, states):
    """Draw states [N, S] as a script does with `args` and score them on one device -> [N, V, goals,
    alphas] float32."""
    make_reward = functools.partial(Variants, args=model, goals=goals, alphas=alphas)
    return through(make_reward, model, args, states)


def embed(model: clip_reward.RewardArgs, args, states):
    """Draw states [N, S] as a script does with `args` and embed them on one device -> [N, V, D]
    float32 unit-norm, and the LoadedCLIP."""
    clip = model.load_clip(model.devices()[0])
    embedder = clip_reward.CLIPEmbedder(clip)
    found = through(lambda _: embedder.embed_images, model, args, states)
    return found.reshape(len(states), -1, found.shape[-1]), clip


def through(make_reward, model, args, states):
    """Draw states [N, S] as a script does with `args` -> the results of `make_reward` (as for a
    Scorer) for these pictures, on the first of the model's devices."""
    args = replace(args, clip_model=model.clip_model)  # the model's render size is the default
    make_renderer = functools.partial(script_of(args).make_renderer, args)
    size = max(1, model.clip_batch_size // args.views)
    starts = tqdm(range(0, len(states), size), f"{size} states each", disable=None)
    scorer = clip_reward.Scorer(make_renderer, make_reward, model.devices()[0])
    with contextlib.closing(scorer):
        return np.concatenate([scorer.score(states[k : k + size])[0] for k in starts])


def count_parameters(name):
    """Count a model's parameters without loading its weights. Raises UsageError."""
    import open_clip

    options = {"load_weights": False, "pretrained_text": False, "device": "meta"}
    before = logging.root.manager.disable
    logging.disable()  # open_clip warns of random weights, but here there are no weights
    try:
        with torch.device("meta"):
            model = open_clip.create_model(clip_reward.resolve(name)[0], **options)
    finally:
        logging.disable(before)
    return sum(weights.numel() for weights in model.parameters())
