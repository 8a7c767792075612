"""Rewards of states by several models, prompts and alphas, on the workers of training."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from annotated_types import Interval
from tqdm import tqdm

import clip_reward
from egl_render import RenderArgs, UsageError
from training.flags import from_flags


def check_distinct(**flags):
    """Raise UsageError for a flag with nothing to compare, or with one thing twice."""
    for name, given in flags.items():
        if not given or len(set(given)) < len(given):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {' '.join(map(str, given))}: none, or one named twice")


@dataclass
class Rewards(clip_reward.RewardArgs):
    """Several models and alphas; each picture is embedded once by each model. Prompts that are not
    given are the task's."""

    reward: tyro.conf.Suppress[Literal["clip"]] = "clip"
    reward_alpha: Annotated[tuple[float, ...], Interval(ge=0, le=1)] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """strengths of goal-baseline regularisation"""
    clip_model: tuple[str, ...] = ("ViT-bigG-14/laion2b_s39b_b160k",)
    """models to compare: ARCH/TAG of open_clip, hf-hub:ORG/NAME or local-dir:PATH; offline:
    local-dir:tiny_clip"""
    view_reduction: Literal["mean", "min"] | None = None
    """what the rewards of a state's pictures become; default: as the run had it"""

    def each(self, states, prompts, flags):
        """clip_reward.RewardArgs of each model, with the largest alpha, checked for so many states.
        prompts: {"target_prompt", "baseline_prompt": [str]}, where none are given; flags: those of
        the run that the states are of."""
        check_distinct(reward_alpha=self.reward_alpha, clip_model=self.clip_model)
        views = from_flags(RenderArgs, flags).views
        values = vars(self) | {"reward_alpha": max(self.reward_alpha)}
        values["view_reduction"] = self.view_reduction or flags.get("view_reduction", "mean")
        values["clip_batch_size"] = max(1, self.clip_batch_size // views)  # states, for the workers
        for name in ("target_prompt", "baseline_prompt"):
            if not values[name.replace("prompt", "image")]:
                values[name] = values[name] or tuple(prompts[name])
        models = [clip_reward.RewardArgs(**values | {"clip_model": x}) for x in self.clip_model]
        for model in models:
            model.check(states * views)
        return models


def at_alphas(reward, embeddings, alphas):
    """A CLIPReward's rewards [B, alphas] of embeddings as it takes them."""
    rewards = []
    for reward.alpha in alphas:
        rewards.append(reward.reward(embeddings))
    return torch.stack(rewards, 1)


class Alphas(torch.nn.Module):
    """The reward at several alphas: frames as in CLIPReward -> [B, alphas] float32."""

    def __init__(self, device, args: clip_reward.RewardArgs, alphas):
        super().__init__()
        self.reward, self.alphas = clip_reward.make_clip_reward(device, args), alphas

    def forward(self, frames):
        return at_alphas(self.reward, self.reward.embed_images(frames), self.alphas)


def rewards_of(args: clip_reward.RewardArgs, alphas, make_renderer, states):
    """Rewards of states [N, S]: {alpha: [N] float64}."""
    make_reward = functools.partial(Alphas, args=args, alphas=alphas)
    rewards = scored(args, make_reward, make_renderer, states)
    return dict(zip(alphas, rewards.T.astype(np.float64)))


def scored(args: clip_reward.RewardArgs, make_reward, make_renderer, states):
    """What `make_reward` gives of states [N, S], drawn and scored on the devices of training, or of
    a few in this process, where workers would take longer to start: [N, ...] float32."""
    devices = args.devices() if args.reward_devices or len(states) > 2000 else []
    workers = 64 if clip_reward.is_ray(devices) else max(1, len(devices))
    once = 8 * args.clip_batch_size * workers
    parts = [states[start : start + once] for start in range(0, len(states), once)]
    sizes = args.clip_batch_size, args.worker_timeout
    with clip_reward.RewardPool(make_renderer, make_reward, devices, *sizes) as pool:
        rewards = [pool.score(part) for part in tqdm(parts, f"{once} states each", disable=None)]
    return np.concatenate(rewards)


@dataclass
class Model(clip_reward.RewardArgs):
    """One model, and how it is run."""

    reward: tyro.conf.Suppress[Literal["clip"]] = "clip"
    target_prompt: tyro.conf.Suppress[tuple[str, ...]] = ()
    target_image: tyro.conf.Suppress[tuple[str, ...]] = ()
    reward_alpha: tyro.conf.Suppress[float] = 0.0
    view_reduction: tyro.conf.Suppress[Literal["mean"]] = "mean"


class Variants(torch.nn.Module):
    """The reward of every view by every prompt and alpha: frames as in CLIPReward -> [B, V,
    prompts, alphas] float32."""

    def __init__(self, device, args: clip_reward.RewardArgs, prompts, alphas):
        super().__init__()
        how = args.clip_precision, args.clip_cache_dir
        clip, self.alphas = clip_reward.load_clip(args.clip_model, device, *how), alphas
        scene = {"baseline_prompts": args.baseline_prompt, "baseline_images": args.baseline_image}
        scene["alpha"] = max(alphas)
        self.rewards = [clip_reward.CLIPReward(clip, [x], **scene) for x in prompts]

    def forward(self, frames):
        views = self.rewards[0].embed_images(frames).flatten(0, -2)
        rewards = [at_alphas(reward, views, self.alphas) for reward in self.rewards]
        return torch.stack(rewards, 1).unflatten(0, (len(frames), -1))
