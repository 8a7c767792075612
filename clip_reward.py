"""The reward: how well a picture fits a sentence, and the workers that compute it.

    clip = load_clip("ViT-B-32/laion2b_s34b_b79k", device="cuda:0")
    reward = CLIPReward(clip, ["a humanoid robot kneeling"], ["a humanoid robot"], alpha=0.0)
    reward(frames)                                    # [B, H, W, 3] uint8 -> [B] float32

    with RewardPool(make_renderer, make_reward, devices=["cuda:0", "cuda:1"]) as pool:
        for states in episode:                        # [N, S] float64, at every step
            pool.put(states=states)                   # full chunks leave for the workers at once
        rewards = pool.take()                         # [T * N] float32, waits for the rest

Source: "Vision-Language Models are Zero-Shot Reward Models for Reinforcement Learning"
(arXiv 2310.12921), sections 2.2 and 3.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import ctypes
import difflib
import functools
import json
import logging
import os
import pickle
import queue
import re
import signal
import socket
import struct
import sys
import threading
import time
import timeit
import traceback
import types
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

# Before torch: threads that spin for long while they wait are quickest on an idle machine, but with
# another process on the same cores (the workers of a run) updates fall from 65 to 1 a second; with
# this bound to 36 (2 cores, batch 256; docs/speed.md).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# For multiprocessing's own process, which would tell of semaphores when a run is killed.
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")

import numpy as np
import torch
import torch.multiprocessing as mp
from annotated_types import Interval
from numpy.typing import ArrayLike
from PIL import Image, ImageOps
from torch import nn

import egl_render
from egl_render import Positive, Share, UsageError

Array = torch.Tensor | np.ndarray
MakeRenderer = Callable | None
MakeReward = Callable | None

# ------------------------------------------------------------------------------ flags

RAY_DEVICES = re.compile(r"ray(?::([1-9]\d*))?(?::(1|0?\.\d*[1-9]0*))?")  # how many, GPUs each


def is_ray(devices: Sequence[str]) -> bool:
    return any(device.startswith("ray") for device in devices)


@dataclass
class RewardArgs:
    """The flags that are about the reward."""

    reward: Literal["clip", "ground-truth"] = "clip"
    """ground-truth is the environment's own reward, as a baseline"""
    target_prompt: tuple[str, ...] = ()
    """what to do, in words; several prompts are averaged"""
    baseline_prompt: tuple[str, ...] = ()
    """what the scene is anyway, several are averaged (only --reward-alpha needs it); default: "a
    humanoid robot" for the humanoid, none for other tasks"""
    target_image: tuple[str, ...] = ()
    """files of pictures of the goal, square as what is drawn (else a model may see the middle
    alone), beside words or instead of them: all are averaged"""
    baseline_image: tuple[str, ...] = ()
    """files of pictures of the scene as it is anyway"""
    reward_alpha: Share = 0.0
    """strength of goal-baseline regularisation, 0 (plain cosine) to 1 (only target - baseline)"""
    view_reduction: Literal["mean", "min"] = "mean"
    """what the rewards of a state's pictures become, with several --camera-azimuth"""
    clip_model: str = "ViT-bigG-14/laion2b_s39b_b160k"
    """ARCH/TAG of open_clip, hf-hub:ORG/NAME or local-dir:PATH; offline: local-dir:tiny_clip"""
    clip_batch_size: Positive = 64
    """pictures drawn and scored at once by a worker: memory and speed, but no result"""
    clip_precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """number format of CLIP's image tower; auto: fp16 on a GPU, else fp32"""
    clip_cache_dir: str | None = None
    """where downloaded weights are kept, default: open_clip's own cache"""
    reward_devices: tuple[str, ...] = ()
    """where frames are drawn and scored, a process each (one device may be named several times);
    default: every CUDA device, else one "cpu" per core, at most four. ray: every GPU of a Ray
    cluster (CPUs if it has none), ray:N: N of them, ray:N:0.5: half a GPU each"""
    worker_timeout: Annotated[int, Interval(ge=1, lt=2**31)] = 600
    """seconds without an answer after which a worker counts as hung and is replaced; to start it
    has 600 or more"""
    allow_slow: bool = False
    """start even if this machine would need days for the model"""

    def __post_init__(self) -> None:
        self.target_image, self.baseline_image = (
            tuple(map(os.path.abspath, paths)) for paths in (self.target_image, self.baseline_image)
        )  # so that they are found from any folder

    def devices(self) -> list[str]:
        """The devices named, or the default. Raises UsageError for one that does not exist."""
        if is_ray(self.reward_devices):
            if len(self.reward_devices) > 1 or not RAY_DEVICES.fullmatch(self.reward_devices[0]):
                named = " ".join(self.reward_devices)
                raise UsageError(f"--reward-devices {named}: Ray's are ray, ray:N or ray:N:SHARE")
            return list(self.reward_devices)
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        for name in self.reward_devices:
            if name not in ["cpu", *cuda]:
                here = " ".join(["cpu", *cuda])
                raise UsageError(f"--reward-devices {name} does not exist; here: {here}")
        return list(self.reward_devices) or cuda or ["cpu"] * min(4, os.cpu_count() or 1)

    def check(self, frames: int) -> None:
        """Raise UsageError for what cannot work, before anything slow starts; downloads the model
        if need be. `frames` is how many pictures will be scored."""
        if self.reward != "clip":
            return
        targets = self.target_prompt + self.target_image
        check_prompts(targets, self.baseline_prompt + self.baseline_image, self.reward_alpha)
        for path in self.target_image + self.baseline_image:
            load_image(path)
        devices = self.devices()
        if is_ray(devices):
            devices = [ray_cluster()[1].lower()]
        on_hub = self.clip_model.startswith("hf-hub:")  # its cost stands in what is downloaded
        if on_hub:
            check_model(self.clip_model, self.clip_cache_dir)
        check_cost(self.clip_model, devices, frames, self.allow_slow)
        if not on_hub:
            check_model(self.clip_model, self.clip_cache_dir)
        prompts = self.target_prompt + self.baseline_prompt
        # a worker looks at all, but takes longer to say so
        if any(len(prompt) > 60 for prompt in prompts):
            import open_clip  # which takes seconds

            arch, _, random = _resolve(self.clip_model)
            if not random:
                check_lengths(open_clip.get_tokenizer(arch, cache_dir=self.clip_cache_dir), prompts)


def check_prompts(targets: Sequence[str], baselines: Sequence[str], alpha: float) -> None:
    """Raise UsageError for prompts, or files of pictures, and a --reward-alpha that make no
    reward."""
    if not targets or not all(map(str.strip, targets)):
        example = '--target-prompt "a humanoid robot kneeling", or --target-image FILE'
        raise UsageError(f"a target prompt is needed: {example}")
    if not 0 <= alpha <= 1:
        raise UsageError(f"--reward-alpha {alpha} is outside [0, 1]")
    if alpha > 0 and not (baselines and all(map(str.strip, baselines))):
        raise UsageError(f"--reward-alpha {alpha} needs a --baseline-prompt")
    told, scene = ({" ".join(text.lower().split()) for text in x} for x in (targets, baselines))
    if alpha > 0 and told == scene:
        raise UsageError(f"--baseline-prompt {baselines} is the target, too: the same")


def load_image(path: str | Path) -> np.ndarray:
    """[H, W, 3] uint8 of a picture's file, as a viewer shows it: turned as its camera says, what is
    transparent white. Raises UsageError."""
    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file)
            if picture.mode.startswith(("I", "F")):
                raise UsageError(f"{path} has more than 8 bits per channel; save it with 8")
            picture = picture.convert("RGBA")
            white = Image.new("RGBA", picture.size, "white")
            return np.array(Image.alpha_composite(white, picture).convert("RGB"))
    except (OSError, Image.DecompressionBombError) as error:
        raise UsageError(f"{path} is no picture that can be read: {first_line(error)}") from error


def check_lengths(tokenizer: Callable, prompts: Sequence[str]) -> None:
    """Raise UsageError for a prompt whose end the model would not read."""
    for text in prompts:
        shorter = re.sub(r"\w\W*$", "", text)  # by its last letter
        if torch.equal(tokenizer([text]), tokenizer([shorter])):
            raise UsageError(f"the prompt {text[:40]!r}.. is too long: its end would not be read")


# ------------------------------------------------------------------------------ loading CLIP

OFFLINE_HELP = (
    "without network use --clip-model local-dir:tiny_clip (small, embedded, not zero-shot), or "
    "copy a model's open_clip_config.json and open_clip_model.safetensors into a folder and use "
    "--clip-model local-dir:FOLDER"
)


@dataclass
class LoadedCLIP:
    """A CLIP ready to embed: open_clip model, its own tokenizer, its own preprocessing."""

    model: Any  # open_clip's
    tokenizer: Callable[[list[str]], torch.Tensor]  # -> [B, context] int64
    preprocess: nn.Module  # [B, H, W, 3] uint8 -> [B, 3, h, w] float32, normalised
    device: torch.device
    dtype: torch.dtype  # of the image tower


class Preprocess(nn.Module):
    """open_clip's inference transform for tensors, on the device they are on.

    Args:
        cfg: open_clip's preprocess dict: size, mean, std, interpolation, resize_mode, fill_color.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, cfg: dict) -> None:
        super().__init__()
        import open_clip

        keys = "mean std interpolation resize_mode fill_color".split()
        cfg = {key: cfg[key] for key in ("size", *keys) if cfg.get(key) is not None}
        transforms = open_clip.image_transform(cfg.pop("size"), is_train=False, **cfg).transforms
        # the resizing, and the cropping or padding if there is one; then two for PIL's pictures
        *self.geometry, _, _, normalize = transforms
        # (x / 255 - mean) / std as one multiply-add
        statistics = torch.tensor([normalize.mean, normalize.std])
        mean, std = statistics.view(2, -1, 1, 1).expand(2, 3, 1, 1)
        self.register_buffer("scale", 1 / (255 * std))
        self.register_buffer("shift", -mean / std)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """[B, H, W, 3] uint8 -> [B, 3, h, w] float32."""
        from torchvision.transforms.v2 import functional as F

        images = frames.permute(0, 3, 1, 2)
        for transform in self.geometry:
            if not hasattr(transform, "interpolation"):
                images = transform(images)
                continue
            size = transform.size
            if hasattr(transform, "get_params"):  # open_clip's own, written for PIL's pictures
                picture = types.SimpleNamespace(size=images.shape[:1:-1])
                size = transform.get_params(picture, size, transform.longest)
            size = [size] if isinstance(size, int) else list(size)  # one number: the shorter edge
            # uint8 in, uint8 out: rounds and clamps after the filter, as PIL does
            images = F.resize(images, size, transform.interpolation, antialias=True)
        return images.float() * self.scale + self.shift


def _resolve(name):
    """A model's name -> (open_clip's model_name, tag or None, random: bool). Raises UsageError for
    what is not known, with the nearest names."""
    if name.startswith("local-dir:"):
        folder = Path(name.partition(":")[2]).expanduser()
        beside_us = Path(__file__).resolve().parent / folder
        if not folder.is_dir() and beside_us.is_dir():
            folder = beside_us  # so that local-dir:tiny_clip works from any directory
        if not (folder / "open_clip_config.json").is_file():
            raise UsageError(f"--clip-model {name}: no open_clip_config.json in {folder.resolve()}")
        if not [*folder.glob("open_clip*.safetensors"), *folder.glob("open_clip*.bin")]:
            raise UsageError(f"--clip-model {name}: no weights in {folder.resolve()}")
        return f"local-dir:{folder}", None, False
    if name.startswith("hf-hub:"):
        return name, None, False
    import open_clip  # which takes seconds: not for a folder

    arch, _, tag = name.partition("/")
    random, _, of = tag.partition(":")
    pairs = [pair.replace(":", "/", 1) for pair in open_clip.list_pretrained(as_str=True)]
    asked, known = (arch, open_clip.list_models()) if random == "random" else (name, pairs)
    if asked not in known:
        near = ", ".join(difflib.get_close_matches(asked, known, n=4, cutoff=0.1))
        forms = "an ARCH/TAG of open_clip, local-dir:FOLDER or hf-hub:ORG/NAME"
        raise UsageError(f"--clip-model {name}: not {forms}; nearest: {near}")
    if random == "random":
        of = of or next(iter(open_clip.list_pretrained_tags_by_model(arch)), None)
        return arch, of, True
    return arch, tag, False


def _go_offline_if_alone():
    """With no way to the model hub, say so to its library at once: it would try every file ten
    times, half a minute long, before it looks into its own cache."""
    import huggingface_hub.constants as hub

    address = urlsplit(hub.ENDPOINT)
    if hub.HF_HUB_OFFLINE or urllib.request.getproxies().get(address.scheme):
        return
    try:
        port = address.port or {"http": 80, "https": 443}[address.scheme]
        socket.create_connection((address.hostname, port), timeout=5).close()
    except OSError:
        hub.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"  # the latter for the workers


def _check_folder(name, folder):
    """Raise UsageError for a local model whose files are not whole."""
    from safetensors import safe_open

    path = folder / "open_clip_config.json"
    try:
        json.loads(path.read_text())["model_cfg"]
        for path in folder.glob("open_clip*.safetensors"):
            safe_open(path, "np")  # reads how long it ought to be
    except Exception as error:  # safetensors' own, json's, missing keys
        raise UsageError(f"--clip-model {name}: {path} is damaged: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """An exception's first line, or what kind it is."""
    return next(iter(str(error).splitlines()), "")[:200] or repr(error)


def check_model(name: str, cache_dir: str | None = None) -> None:
    """Make sure that `load_clip(name)` will work: weights and tokenizer are there or get downloaded
    now, once for all workers. Raises UsageError for an unknown name (with the nearest), or if there
    is nothing to be had (with the offline way)."""
    arch, tag, random = _resolve(name)
    if arch.startswith("local-dir:"):
        return _check_folder(name, Path(arch.removeprefix("local-dir:")))
    if random:
        return
    import open_clip

    try:
        _go_offline_if_alone()
        open_clip.get_tokenizer(arch, cache_dir=cache_dir)  # small, so first
        hub = {"hf_hub": arch.removeprefix("hf-hub:") + "/"}
        config = open_clip.get_pretrained_cfg(arch, tag) if tag else hub
        open_clip.download_pretrained(config, cache_dir=cache_dir)
    except ImportError as error:
        raise UsageError(f"{name} needs another package: pip install {error.name}") from error
    except Exception as error:  # the hub's, urllib's, transformers': all mean the same to the user
        cause = first_line(error)
        if os.environ.get("HF_HUB_OFFLINE"):
            cause = "the model hub cannot be reached and they are not in the cache"
        raise UsageError(f"cannot get the weights of {name}: {cause}; {OFFLINE_HELP}") from error


def model_without_weights(name: str) -> Any:
    """open_clip's model of that name on the device "meta", to be counted and not to be used."""
    import open_clip

    options = {"load_weights": False, "pretrained_text": False, "device": "meta"}
    logging.disable()  # open_clip warns of random weights; these are none at all
    with torch.device("meta"):
        model = open_clip.create_model(_resolve(name)[0], **options).eval()
    logging.disable(logging.NOTSET)
    return model


@torch.no_grad()
def image_flops(name: str) -> int:
    """Floating-point operations to embed one picture."""
    from torch.utils.flop_counter import FlopCounterMode

    model = model_without_weights(name)
    size = model.visual.image_size
    size = (size, size) if isinstance(size, int) else size
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model.encode_image(torch.empty(1, 3, *size))
    return counter.get_total_flops()


def check_cost(name: str, devices: Sequence[str], frames: int, allow_slow: bool = False) -> None:
    """Raise UsageError, or with `allow_slow` warn, of what would take a CPU over a day to score so
    many frames, by the model's operations and this CPU's measured speed. Nothing is downloaded."""
    on_cpu, arch = sum(device == "cpu" for device in devices), _resolve(name)[0]
    if not on_cpu:
        return
    if arch.startswith("local-dir:"):  # tiny_clip has 12 MB, and RN50, the smallest of CLIP's, 244
        files = Path(arch.removeprefix("local-dir:")).glob("open_clip*")
        if sum(file.stat().st_size for file in files) < 20e6:
            return
    try:
        flops = image_flops(name)
    except Exception as error:  # an architecture that cannot be counted so, or not without network
        print(f"WARNING: cost of {name} on this CPU unknown ({error})", file=sys.stderr)
        return
    a = torch.randn(1024, 1024)
    seconds = flops / (2 * 1024**3) * min(timeit.repeat(lambda: a @ a, number=2, repeat=4)) / 2
    # CPU workers share the cores; a GPU beside them gets no more than its share of the frames
    hours = seconds * frames * on_cpu / len(devices) / 3600
    total = f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"
    cost = f"{name} on this machine's CPU: at least {seconds:.2g} s a frame, {total} for {frames:,}"
    if hours > 24 and not allow_slow:
        raise UsageError(
            f"{cost} frames; nothing was downloaded. Use a machine with a CUDA GPU, or the small "
            "embedded model: --clip-model local-dir:tiny_clip --render-size 64 (or --allow-slow)"
        )
    if hours > 1:
        print(f"WARNING: {cost} frames", file=sys.stderr)


def load_clip(
    name: str,
    device: str | torch.device = "cpu",
    precision: str = "auto",
    cache_dir: str | None = None,
) -> LoadedCLIP:
    """Load a CLIP-like model, its tokenizer and preprocessing -> LoadedCLIP, in eval mode.

    Args:
        name: "ARCH/TAG" of `open_clip.list_pretrained()`; "local-dir:PATH"; "hf-hub:ORG/NAME";
            for tests and benchmarks "ARCH/random" or "ARCH/random:TAG": seeded random weights with
            the preprocessing of that tag or of the architecture's first.
        device: of the image tower; the text tower, used once per prompt, stays on the host.
        precision: of the image tower; "auto": fp16 on CUDA, else fp32. The text tower has float32.
        cache_dir: where downloads go; None is the libraries' own place.
    Raises UsageError: unknown name, or weights that cannot be had. Never silently random.
    """
    import open_clip
    from torch.fx.experimental.optimization import fuse

    device = torch.device(device)
    if precision == "auto":
        precision = "fp16" if device.type == "cuda" else "fp32"
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        raise UsageError(f"--clip-precision must be auto, {', '.join(dtypes)}; not {precision!r}")
    if precision == "fp32":  # by default cuDNN would round what it convolves to TF32's 10 bits
        torch.backends.cudnn.allow_tf32 = False
    arch, tag, random = _resolve(name)
    config = (open_clip.get_pretrained_cfg(arch, tag) if tag else {}) or {}
    # OpenAI's weights were trained with QuickGELU; open_clip only warns when the architecture's
    # default activation does not fit the weights, and gives wrong embeddings
    options: dict = {"force_quick_gelu": True} if config.get("quick_gelu") else {}
    if random:
        print(
            f"WARNING: {name} has RANDOM weights; its reward means nothing (tests and benchmarks)",
            file=sys.stderr,
        )
        keys = [k for k in ("mean", "std", "interpolation", "resize_mode") if config.get(k)]
        options |= {"force_preprocess_cfg": {key: config[key] for key in keys}}
        options |= {"load_weights": False, "pretrained_text": False}
        on = device if device.type == "cuda" else torch.device("cpu")  # which draws them in seconds
        with torch.random.fork_rng(devices=[on] if on.type == "cuda" else []), on:
            torch.manual_seed(0)  # every worker must draw the same weights
            model = open_clip.create_model(arch, device=on, **options).cpu()
        # they know no words, and the real tokenizer may have to be downloaded
        tokenizer = functools.partial(_bytes_as_tokens, getattr(model, "context_length", 64))
    else:
        check_model(name, cache_dir)
        options |= {"cache_dir": cache_dir, "require_pretrained": True}
        try:
            model = open_clip.create_model(arch, tag, **options)
            tokenizer = open_clip.get_tokenizer(arch, cache_dir=cache_dir)
        except Exception as error:  # a configuration that fits no code, weights that fit no model
            raise UsageError(
                f"--clip-model {name} cannot be loaded: {first_line(error)}"
            ) from error
    model.eval().requires_grad_(False)
    preprocess = Preprocess(open_clip.get_model_preprocess_cfg(model)).to(device)
    if hasattr(model.visual, "layer1"):  # a residual network: on the CPU 1.18 times as fast, with
        fused = fuse(model.visual)  # one convolution of each and the batch norm behind it
        for attribute in ("image_size", "preprocess_cfg"):  # what open_clip asks for
            setattr(fused, attribute, getattr(model.visual, attribute))
        model.visual = fused.to(memory_format=torch.channels_last)  # the frames come so
    model.visual.to(dtypes[precision])  # before the move: the device never holds it in float32
    model.visual.to(device)  # and nothing else: of ViT-bigG-14 the text tower is a quarter
    return LoadedCLIP(model, tokenizer, preprocess, device, dtypes[precision])


def _bytes_as_tokens(length, texts):
    return torch.tensor([[*text.encode().ljust(length, b"\0")[:length]] for text in texts])


# ------------------------------------------------------------------------------ the reward


class CLIPReward(nn.Module):
    """Goal-baseline regularised CLIP reward (section 3.2 of the paper).

    For unit-norm image embedding s, target embedding g, baseline embedding b and the line L
    through b and g:

        R(s) = 1 - 1/2 || alpha proj_L(s) + (1 - alpha) s - g ||^2

    alpha = 0 with one target prompt is the plain cosine similarity s . g.

    Args:
        clip: LoadedCLIP. It stays as it is and can serve other rewards.
        target_prompts, baseline_prompts: lists of str; several are averaged (mean of the unit-norm
            embeddings, not renormalised). The baseline may be empty when alpha is 0.
        alpha: regularisation strength in [0, 1]; an attribute that may be changed.
        target_images, baseline_images: lists of pictures' files; they count as prompts do.
        view_reduction: "mean" or "min" of the rewards of a state's pictures.
    Raises UsageError as `check_prompts`, or if both prompts mean the same to the model.
    """

    g: torch.Tensor
    b: torch.Tensor
    d: torch.Tensor

    def __init__(
        self,
        clip: LoadedCLIP,
        target_prompts: Sequence[str] = (),
        baseline_prompts: Sequence[str] = (),
        alpha: float = 0.0,
        target_images: Sequence[str] = (),
        baseline_images: Sequence[str] = (),
        view_reduction: Literal["mean", "min"] = "mean",
    ) -> None:
        super().__init__()
        targets = [*target_prompts, *target_images]
        check_prompts(targets, [*baseline_prompts, *baseline_images], alpha)
        check_lengths(clip.tokenizer, [*target_prompts, *baseline_prompts])
        self.model, self.preprocess = clip.model, clip.preprocess
        self.device, self.dtype, self.alpha = clip.device, clip.dtype, float(alpha)
        reductions: dict[str, Any] = {"mean": torch.mean, "min": torch.amin}
        self.reduce = reductions[view_reduction]

        @torch.no_grad()
        def embed(prompts, images):
            parts = [self.embed_images(load_image(path)) for path in images]
            if prompts:
                texts = clip.model.encode_text(clip.tokenizer(list(prompts))).float()
                parts.append(nn.functional.normalize(texts, dim=-1).to(clip.device))
            return torch.cat(parts).mean(0)

        g = embed(target_prompts, target_images)
        b = embed(baseline_prompts, baseline_images) if baseline_prompts or baseline_images else g
        d = g - b
        if alpha > 0 and d.norm() < 1e-6:
            raise UsageError("target and baseline prompt are the same to the model; change one")
        self.register_buffer("g", g)
        self.register_buffer("b", b)
        self.register_buffer("d", d / d.norm().clamp_min(1e-12))  # unit direction of L

    @torch.no_grad()
    def embed_images(self, frames: Array) -> torch.Tensor:
        """frames uint8 [B, H, W, 3], V views of each state [B, V, H, W, 3], or a single [H, W, 3],
        tensor on any device or array -> [B, D] or [B, V, D] float32 unit-norm, on the model's
        device."""
        if isinstance(frames, np.ndarray):  # MuJoCo's render() gives a view from the last row up
            frames = np.ascontiguousarray(frames)
        frames = torch.as_tensor(frames).to(self.device)
        frames = frames if frames.ndim > 3 else frames[None]
        images = self.preprocess(frames.flatten(0, -4))
        embeddings = self.model.encode_image(images.to(self.dtype))
        return nn.functional.normalize(embeddings.float(), dim=-1).unflatten(0, frames.shape[:-3])

    def reward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """embeddings [B, D] or [B, V, D] float32 unit-norm -> [B] float32."""
        on_line = self.b + ((embeddings - self.b) @ self.d)[..., None] * self.d
        mixed = self.alpha * on_line + (1 - self.alpha) * embeddings
        rewards = 1 - 0.5 * (mixed - self.g).square().sum(-1)
        return rewards if rewards.ndim == 1 else self.reduce(rewards, dim=1)

    def forward(self, frames: Array) -> torch.Tensor:
        """frames as in `embed_images` -> [B] float32."""
        return self.reward(self.embed_images(frames))


def make_clip_reward(device: str | torch.device, args: RewardArgs) -> CLIPReward:
    """What a worker calls to get its reward; bind `args` with functools.partial."""
    clip = load_clip(args.clip_model, device, args.clip_precision, args.clip_cache_dir)
    images = args.target_image, args.baseline_image, args.view_reduction
    reward = CLIPReward(clip, args.target_prompt, args.baseline_prompt, args.reward_alpha, *images)
    for part in ("text", "transformer", "token_embedding", "ln_final", "text_decoder"):
        if hasattr(clip.model, part):  # gigabytes, and never needed again
            delattr(clip.model, part)
    return reward


# ------------------------------------------------------------------------------ workers


class RunError(RuntimeError):
    """What ends a run, in one line: exit code 1."""


class RewardWorkerError(RunError):
    """A worker raised (its traceback is in the message), died, or gave no answer."""


class NotFiniteError(RunError):
    """A reward that is no number.

    Attributes:
        kind, scene: "states" and the state [S] that has it, or "frames" and its picture.
        frame: its picture [H, W, 3] uint8.
    """

    def __init__(self, message: str, kind: str, scene: np.ndarray, frame: np.ndarray) -> None:
        super().__init__(message)
        self.kind, self.scene, self.frame = kind, scene, frame


class Scorer:
    """What happens on one torch device, whoever runs it: one thread owns the GL context and draws,
    one owns the model and scores, so that chunk k + 1 is drawn while chunk k is scored. Arguments
    as of `RewardPool`."""

    def __init__(
        self, make_renderer: MakeRenderer, make_reward: MakeReward, device: str | torch.device
    ) -> None:
        self.device, self.make_renderer = torch.device(device), make_renderer
        self.cuda = self.device.type == "cuda"
        egl_render.setup_gl(device)  # before anything imports mujoco
        self.drawing = concurrent.futures.ThreadPoolExecutor(1)
        # on a GPU both at once; a worker on the CPU has one core, and two threads cost it 5 %
        self.scoring = concurrent.futures.ThreadPoolExecutor(1) if self.cuda else self.drawing
        self.renderers = {}  # by size; made and used by the thread that draws
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None
        renderer = self.drawing.submit(self._renderer) if make_renderer else None
        self.loading = self.scoring.submit(self._load, renderer, make_reward)

    def _load(self, renderer, make_reward):
        # one after the other: two threads that import much at once may wait for each other
        if renderer:
            renderer.result()
        self.reward = make_reward(self.device) if make_reward else None

    def wait_ready(self) -> str:
        """Wait for renderer and model -> one line on what they run on."""
        self.loading.result()
        drawn_by = getattr(self.renderers.get(None), "description", "")
        line = f"reward worker on {self.device}"
        return f"{line}, pictures by {drawn_by}" if drawn_by else line

    def submit(self, kind: str, batch: np.ndarray, size: int | None = None) -> Future:
        """Start one chunk: "states" [B, S] or "frames" [B, H, W, 3] -> Future of (rewards [B]
        float32, seconds drawing, seconds scoring); "render", states -> Future of frames."""
        if kind == "render":
            return self.drawing.submit(self._render, batch, size)
        drawn = self.drawing.submit(self._draw, kind, batch)
        return self.scoring.submit(self._score, drawn)

    def _render(self, batch, size):
        frames = self._renderer(size).render(batch)
        return np.concatenate(list(frames.swapaxes(0, 1)), 2) if frames.ndim == 5 else frames

    def _renderer(self, size=None):
        if size not in self.renderers:
            options = {} if size is None else {"size": size}
            self.renderers[size] = self.make_renderer(**options)
        return self.renderers[size]

    def _draw(self, kind, batch):
        began = time.perf_counter()
        if kind == "frames":
            frames = torch.from_numpy(batch)
        else:
            renderer = self._renderer()
            shape = (len(batch), *renderer.frame_shape)
            frames = torch.empty(shape, dtype=torch.uint8, pin_memory=self.cuda)
            renderer.render(batch, frames.numpy())
        if self.cuda:  # copies beside what the model computes on the device's main stream
            with torch.cuda.stream(self.stream):
                frames = frames.to(self.device, non_blocking=True)
            self.stream.synchronize()
        return frames, time.perf_counter() - began

    @torch.inference_mode()
    def _score(self, drawn):
        self.loading.result()
        try:
            frames, render_s = drawn.result()
            began = time.perf_counter()
            rewards = self.reward(frames).float().cpu()
        except torch.OutOfMemoryError as error:
            problem = f"{self.device} has no memory for so many frames at once"
            raise RewardWorkerError(f"{problem}; use a smaller --clip-batch-size") from error
        return rewards.numpy(), render_s, time.perf_counter() - began

    def close(self) -> None:
        """Free the GL contexts, in the thread that made them: one left to the end of a process may
        crash it there."""
        with contextlib.suppress(RuntimeError):  # the interpreter is ending and its threads have
            for renderer in self.renderers.values():
                if hasattr(renderer, "close"):
                    self.drawing.submit(renderer.close)
        for thread in (self.drawing, self.scoring):
            thread.shutdown()


def _scorer(setup, device):
    """The Scorer of a process that is there for nothing else."""
    if device == "cpu":  # whatever the number of workers, the same sums in the same order
        torch.set_num_threads(1)
        os.nice(10)  # physics first: it is what the next states wait for
    return Scorer(*setup, device)


def end_with_parent() -> None:
    """How a process of a run ends is for the run to decide: Ctrl-C and a SIGTERM to the whole group
    are not for this one, and when its parent is gone Linux kills it (one that is stopped or hangs
    would not notice)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(AttributeError):  # elsewhere
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _serve(connection, device, *setup):
    """A worker process: answers come in the order of what was sent, "ready" before all."""
    end_with_parent()
    scorer = _scorer(setup, device)
    answering = concurrent.futures.ThreadPoolExecutor(1)

    def answer(result):
        try:
            connection.send((None, result()))
        except (UsageError, RewardWorkerError) as error:
            connection.send((type(error), str(error)))
        except BaseException:
            connection.send((RewardWorkerError, f"it failed:\n{traceback.format_exc()}"))

    answering.submit(answer, scorer.wait_ready)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone, however it died
        while True:
            answering.submit(answer, scorer.submit(*connection.recv()).result)
    os._exit(1)


def death(exitcode: int) -> str:
    """How a process ended, in words."""
    how = "was killed (out of memory?)" if exitcode == -signal.SIGKILL else "died"
    return f"{how}, exit code {exitcode}"


def _hangs(name, timeout):
    return RewardWorkerError(f"{name} gave no answer for {timeout} s (--worker-timeout)")


# Held while a process is half started, which would complain if it were left. A second signal may
# come while the first one's handler holds it.
STARTING = threading.RLock()


class _Process:
    """A `Scorer` in a process of its own: `submit` sends, `result` receives."""

    def __init__(self, name, timeout, *setup):
        self.name, self.worker_timeout, self.setup = name, timeout, setup
        self.closing, self.closed, self.process = threading.Lock(), False, None

    def start(self):
        context = mp.get_context("spawn")  # which CUDA wants
        self.connection, theirs = context.Pipe()
        arguments = (theirs, *self.setup)
        process = context.Process(target=_serve, args=arguments, name=self.name, daemon=True)
        with STARTING:
            process.start()
        theirs.close()
        self.process = process  # only one that runs can be killed

    def submit(self, *job):
        try:
            self.connection.send(job)
        except BlockingIOError:  # half a message is sent, and nothing may follow it
            raise _hangs(self.name, self.timeout) from None
        except OSError:  # it died: `result` says how
            pass
        return self

    def result(self):
        """The next answer. Raises what the worker raised, RewardWorkerError if it died or hangs."""
        try:
            kind, value = self.connection.recv()
        except BlockingIOError:
            raise _hangs(self.name, self.timeout) from None
        except (EOFError, OSError):
            self.process.join(5)
            raise RewardWorkerError(f"{self.name} {death(self.process.exitcode)}") from None
        if kind:
            raise kind(f"{self.name}: {value}" if kind is RewardWorkerError else value)
        return value

    def wait_ready(self):
        """The first answer. Imports and weights may take longer than any chunk."""
        self._limit(max(600, self.worker_timeout))
        line = self.result()
        self._limit(self.worker_timeout)
        return line

    def _limit(self, timeout):
        """From now on sending and receiving raise BlockingIOError after so many seconds."""
        self.timeout = timeout
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                pipe.setsockopt(socket.SOL_SOCKET, way, struct.pack("ll", timeout, 0))

    def restart(self):
        """Start it, in place of one that is lost. Not in the main thread: a signal's handler might
        leave it half started."""
        with self.closing:
            if not self.closed:
                self._kill()
                try:
                    self.start()
                except OSError as error:
                    raise RewardWorkerError(f"{self.name} cannot be started: {error}") from error

    def close(self):
        with self.closing:
            self.closed = True
            self._kill()  # it keeps nothing that has to be written, and may be stopped

    def _kill(self):
        if self.process:
            self.process.kill()
            self.process.join(5)  # one that is stuck in a driver dies later, or never


def ray_cluster() -> tuple[types.ModuleType, str]:
    """Connect to the cluster that RAY_ADDRESS or `ray start` names, else start one on this machine
    -> (ray, "GPU" or, where it has none, "CPU"); waits for the first. Raises UsageError."""
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # 40 s for an address without a cluster
    try:
        import ray
    except ImportError:
        raise UsageError('--reward-devices ray needs Ray: pip install ".[ray]"') from None
    if not ray.is_initialized():
        try:
            ray.init(logging_level="error", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = "it is RAY_ADDRESS, or what `ray start` left here and `ray stop` removes"
            raise UsageError(f"--reward-devices ray: {error}; {where}") from error
    while not {"GPU", "CPU"} & (has := ray.cluster_resources()).keys():
        print("the Ray cluster has neither GPU nor CPU yet; waiting for its first node", flush=True)
        time.sleep(10)
    return ray, "GPU" if "GPU" in has else "CPU"


class _Remote:
    """What a Ray actor is: a `Scorer` on the one GPU that Ray lets it see."""

    def __init__(self, kind, *setup):
        self.scorer = _scorer(setup, "cuda:0" if kind == "GPU" else "cpu")

    def wait_ready(self):
        return f"{self.scorer.wait_ready()}, at {socket.gethostname()}"

    def score(self, job):
        return pickle.dumps(self.scorer.submit(*pickle.loads(job)).result())


class _Actor:
    """A `Scorer` as a Ray actor, with the methods of `_Process`. When its process or its node is
    gone, Ray starts it again where there is room; its chunks do not wait for that, hence no
    retries: the pool gives them to others."""

    def __init__(self, kind, share, timeout, *setup):
        import ray

        self.ray, self.timeout = ray, timeout
        resources = {"num_gpus": share} if kind == "GPU" else {"num_cpus": share}
        options = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 2}
        self.actor = self.ray.remote(**options, **resources)(_Remote).remote(kind, *setup)

    def wait_ready(self):
        try:
            return self._get(self.actor.wait_ready.options(max_task_retries=-1).remote())
        except ConnectionError as error:  # though tried for ever: Ray has given it up
            raise RewardWorkerError(str(error)) from None

    def submit(self, *job):  # pickled here: as one string of bytes it costs half of Ray's time
        ref = self.actor.score.remote(pickle.dumps(job))
        return types.SimpleNamespace(result=lambda: pickle.loads(self._get(ref, self.timeout)))

    def _get(self, ref, timeout=None):
        errors = self.ray.exceptions
        try:
            return self.ray.get(ref, timeout=timeout)
        except (UsageError, RewardWorkerError) as error:  # which Ray has wrapped
            raise error.cause from None
        except errors.RayTaskError as error:
            raise RewardWorkerError(f"a Ray actor failed:\n{error}") from None
        except errors.GetTimeoutError:
            raise _hangs("a Ray actor", timeout) from None
        except errors.RayError as error:  # its process or node is gone
            raise ConnectionError(f"a Ray actor is gone: {str(error).splitlines()[0]}") from None

    def restart(self):
        self.ray.kill(self.actor, no_restart=False)

    def close(self):
        self.ray.kill(self.actor)


def warn(line: str) -> None:
    """Print a warning of one line to stderr."""
    with contextlib.suppress(OSError):  # of a pipe that nobody reads; print would keep the text
        os.write(2, f"WARNING: {line}\n".encode())


class RewardPool:
    """Workers, one process each, that draw and score states in chunks of `batch_size`.

    The chunks stand in one queue; in this process a thread per worker takes them from there and
    keeps two with its worker, one being drawn and one being scored. Whoever is done takes the next.
    Chunks depend on nothing but the order of `put`, so no reward depends on who computed it.
    Workers start in the background; they end with `close()`, or however the parent ends.

    A worker that is lost (it died, hangs or raised) is started again and its chunks are done by
    whoever is free; the second that is lost between two calls of `take` or `render` ends the pool
    with its cause, and so does one that cannot start at first. Ray starts its own again as often as
    their process or node is gone; those that cannot start are left out while others work.

    Args:
        make_renderer: picklable, called without arguments in every worker once it is bound to its
            GPU, and with size=... for `render`; returns an object with .frame_shape (H, W, 3), or
            (V, H, W, 3) for V views, and .render(states [B, S], out [B, *frame_shape]). None: only
            frames are handed in.
        make_reward: picklable, called as make_reward(device) in every worker; returns a module that
            maps frames [B, *frame_shape] uint8 on that device to [B, ...] float32. None: only
            render.
        devices: torch devices, a worker each; or one of "ray", "ray:N", "ray:N:SHARE". Empty: this
            process, on cuda:0 if there is one.
        batch_size: states per chunk.
        worker_timeout: seconds without an answer after which a worker counts as hung.
    Attributes:
        timings: {"render_s", "clip_s"} of what was taken last: seconds, a worker's on average.
        description: one line per worker, once `wait_ready()` has returned.
        restarts: how many workers were lost and started again, or are to be by Ray.
    """

    def __init__(
        self,
        make_renderer: MakeRenderer,
        make_reward: MakeReward,
        devices: Sequence[str | torch.device] = ("cpu",),
        batch_size: int = 64,
        worker_timeout: int = 600,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, not positive")
        self.batch_size, self.scores = batch_size, make_reward is not None
        self.timings, self.description, self.restarts = {}, [], 0
        self._queue, self._futures, self._closed = queue.SimpleQueue(), [], False
        self._waiting, self._kind = [], ""  # what is put and makes no full chunk yet
        self._setup, self._timeout = (make_renderer, make_reward), worker_timeout
        self._workers, self._ready, self._threads = [], [], []
        self._working, self._losses = set(), 0  # lost since the last results, but for Ray's own
        self._ray = RAY_DEVICES.fullmatch(str(devices[0])) if devices else None
        # decided once: a cluster that lost its last GPU is not one of CPUs
        self._cluster = ray_cluster() if self._ray else None
        # Workers ignore SIGTERM: multiprocessing's own way to end them at exit would wait for ever
        atexit.register(self.close)
        if self._ray:
            self._grow()
        elif not devices:
            self._add(Scorer(*self._setup, "cuda:0" if torch.cuda.is_available() else "cpu"))
        else:
            for index, device in enumerate(map(str, devices)):
                name = f"reward-worker-{index}-{device}"
                self._add(_Process(name, worker_timeout, device, *self._setup))

    def _add(self, worker):
        ready = concurrent.futures.Future()
        thread = threading.Thread(target=self._feed, args=(worker, ready), daemon=True)
        self._workers.append(worker)
        self._ready.append(ready)
        self._threads.append(thread)
        thread.start()

    def _grow(self):
        """Ask Ray for the actors that are still missing: of N, or of as many as there is room for
        in the cluster as it is now."""
        (ray, kind), (count, share) = self._cluster, self._ray.groups()
        share = float(share or 1)
        count = count or ray.cluster_resources().get(kind, 0) / share
        for _ in range(len(self._workers), int(count)):
            self._add(_Actor(kind, share, self._timeout, *self._setup))

    def _feed(self, worker, ready):
        """Feed one worker, and those that replace it, until the pool closes."""
        # inherited by the workers that this thread starts: Ctrl-C while one imports is not for it
        resource_tracker.ensure_running()  # which would unblock them when it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        under_way = collections.deque()  # (future, *chunk) that are with the worker
        lost = isinstance(worker, _Process)  # not started yet
        while True:
            try:
                if lost:
                    worker.restart()
                line = worker.wait_ready()
                self._working.add(worker)
                if not ready.done():
                    ready.set_result(line)
                return self._keep_busy(worker, under_way)
            except BaseException as error:
                cause, lines = error, str(error).splitlines() or [repr(error)]
            if self._closed:
                return
            # else a Ray actor whose process or node is gone, and which Ray starts again
            lost = not (isinstance(worker, _Actor) and isinstance(cause, ConnectionError))
            first, worked = not ready.done(), worker in self._working
            self._working.discard(worker)
            brief = " ".join(dict.fromkeys([lines[0], lines[-1]]))  # of a traceback
            if lost:
                self._losses += 1
                if first:
                    ready.set_exception(cause)
                elif isinstance(cause, UsageError):  # it has worked before
                    cause = RewardWorkerError(str(cause))
                if self._ray and not worked and self._working:
                    worker.close()
                    return warn(f"{brief}; it is left out")
                if self._losses > 1 or first or isinstance(worker, Scorer):
                    break
            self.restarts += 1
            while under_way:
                self._queue.put(under_way.popleft())
            warn(f"{brief}; it is started again")
        while job := under_way.popleft() if under_way else self._queue.get():
            job[0].set_exception(cause)

    def _keep_busy(self, worker, under_way):
        """Keep two chunks with the worker until there are no more."""
        results = collections.deque()
        while True:
            with contextlib.suppress(queue.Empty):
                while len(under_way) < 2:
                    job = self._queue.get(block=not under_way)
                    if job is None:
                        return
                    under_way.append(job)
                    results.append(worker.submit(*job[1:]).result)
            result = results.popleft()()
            under_way.popleft()[0].set_result(result)

    def wait_ready(self) -> "RewardPool":
        """Wait until every worker, or the first of Ray's, has its renderer and its model. Raises
        UsageError, RewardWorkerError if one could not start."""
        if self._ray:
            print(f"waiting for the first of {len(self._ready)} Ray actors", flush=True)
            done, _ = concurrent.futures.wait(self._ready, return_when="FIRST_COMPLETED")
            count = f"{len(done)} of {len(self._ready)} Ray actors; others join when they are ready"
            good = [ready for ready in done if not ready.exception()]
            self.description = [*self._results(good or list(done)), count]
        else:
            self.description = self._results(self._ready)
        return self

    def put(self, states: ArrayLike | None = None, frames: ArrayLike | None = None) -> None:
        """Hand in states [B, S] float64 to be drawn and scored, or frames [B, H, W, 3] uint8; any
        B. Every full chunk is on its way when this returns."""
        if not self.scores:
            raise ValueError("this pool was made without make_reward; it can only render")
        if (states is None) == (frames is None):
            raise ValueError("hand in either states or frames")
        kind = "frames" if states is None else "states"
        if self._waiting and kind != self._kind:
            raise ValueError("either states or frames between two calls of take()")
        batch = np.array(frames if states is None else states, None if states is None else float)
        if kind == "frames" and (batch.dtype != np.uint8 or batch.shape[3:] != (3,)):
            raise ValueError(f"frames must be [B, H, W, 3] uint8, not {batch.shape} {batch.dtype}")
        self._kind = kind
        self._waiting += [batch] * bool(len(batch))
        self._send(self.batch_size)

    def _send(self, least):
        if sum(map(len, self._waiting)) < least:
            return
        rows = np.concatenate(self._waiting)
        while len(rows) >= least:
            chunk, rows = np.split(rows, [self.batch_size])
            self._futures.append((self._submit(self._kind, chunk), chunk))
        self._waiting = [rows] * bool(len(rows))

    def _submit(self, *chunk):
        if self._closed:
            raise RuntimeError("the pool is closed")
        future = concurrent.futures.Future()
        self._queue.put((future, *chunk))
        return future

    def _results(self, futures):
        if futures and self._closed:
            raise RuntimeError("the pool is closed")
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()  # the first error, however long others still take
        except BaseException:
            self.close()
            raise
        self._losses = 0
        return [future.result() for future in futures]

    def take(self) -> np.ndarray:
        """Rewards [B] float32 of all that was put since the last time, in its order; waits. Raises
        RewardWorkerError if a second worker was lost; the pool is closed then. NotFiniteError."""
        self._send(1)
        sent, self._futures = self._futures, []
        results = self._results([future for future, _ in sent]) or [(np.empty(0, np.float32), 0, 0)]
        parts, render_s, clip_s = zip(*results)
        workers = max(1, len(self._working))
        self.timings = {"render_s": sum(render_s) / workers, "clip_s": sum(clip_s) / workers}
        if self._cluster:
            with contextlib.suppress(self._cluster[0].exceptions.RayError):  # ask again next time
                self._grow()
        rewards = np.concatenate(parts)
        if not np.isfinite(rewards).all():
            self._raise_not_finite(rewards, np.concatenate([chunk for _, chunk in sent]))
        return rewards

    def _raise_not_finite(self, rewards, scenes):
        worst = int(np.argwhere(~np.isfinite(rewards))[0, 0])
        words = f"CLIP's reward of scene {worst} of this rollout is {rewards[worst]}"
        scene = scenes[worst]
        frame = scene if self._kind == "frames" else self.render(scene[None])[0]
        hint = "try --clip-precision bf16 or fp32"
        raise NotFiniteError(f"{words}; {hint}", self._kind, scene, frame)

    def score(self, states: ArrayLike | None = None, frames: ArrayLike | None = None) -> np.ndarray:
        """`put` and `take`: [B] float32."""
        self.put(states, frames)
        return self.take()

    def render(self, states: ArrayLike, size: int | None = None) -> np.ndarray:
        """Draw states [B, S]: [B, H, W, 3] uint8, as they are scored or at another size; several
        views side by side."""
        states = np.asarray(states, np.float64)
        chunks = [states[i : i + self.batch_size] for i in range(0, len(states), self.batch_size)]
        frames = self._results([self._submit("render", chunk, size) for chunk in chunks])
        return np.concatenate(frames)

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.close()
        for thread in self._threads:  # one that still ran might crash an interpreter that ends
            thread.join(5)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
