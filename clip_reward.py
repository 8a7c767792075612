"""The reward: how well a picture fits a sentence, and the worker processes that compute it.

    clip = load_clip("ViT-B-32/laion2b_s34b_b79k", device="cuda:0")
    reward = CLIPReward(clip, ["a humanoid robot kneeling"], ["a humanoid robot"], alpha=0.0)
    reward(frames)                                    # [B, H, W, 3] uint8 -> [B] float32

    with RewardPool(make_renderer, make_reward, devices=["cuda:0", "cuda:1"]) as pool:
        rewards = pool.score(states)                  # [B, S] float64 -> [B] float32

Source: "Vision-Language Models are Zero-Shot Reward Models for Reinforcement Learning"
(arXiv 2310.12921), sections 2.2 and 3.
"""

import atexit
import difflib
import itertools
import logging
import math
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import traceback
import urllib.request
import weakref
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import nn

import egl_render

# ------------------------------------------------------------------------------ loading CLIP

OFFLINE_HELP = (
    "without network use --clip-model local-dir:tiny_clip (small, embedded, not zero-shot), or "
    "copy a model's open_clip_config.json and open_clip_model.safetensors into a folder and use "
    "--clip-model local-dir:FOLDER"
)


class UsageError(Exception):
    """Something that the person at the terminal can mend; the message is one line that says how."""


@dataclass
class LoadedCLIP:
    """A CLIP ready to embed: open_clip model, its own tokenizer, its own preprocessing."""

    name: str
    model: nn.Module
    tokenizer: object  # list[str] -> [B, context] int64
    preprocess: nn.Module  # [B, H, W, 3] uint8 -> [B, 3, h, w] float32, normalised
    device: torch.device
    dtype: torch.dtype  # of the image tower


class Preprocess(nn.Module):
    """open_clip's inference transform, on tensors, on the device they are on.

    Args:
        cfg: open_clip's preprocess dict: size, mean, std, interpolation ("bicubic", "bilinear"),
            resize_mode ("shortest": fit the short edge, crop; "longest": fit the long edge, pad
            with fill_color; "squash": ignore the aspect ratio).
    """

    def __init__(self, cfg):
        super().__init__()
        from torchvision.transforms import InterpolationMode

        size = cfg["size"]
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.resize_mode = cfg["resize_mode"] or "shortest"
        self.fill = cfg.get("fill_color") or 0
        bilinear = cfg["interpolation"] == "bilinear"
        self.interpolation = InterpolationMode.BILINEAR if bilinear else InterpolationMode.BICUBIC
        # (x / 255 - mean) / std as one multiply-add
        mean, std = (torch.as_tensor(cfg[k], dtype=torch.float32) for k in ("mean", "std"))
        self.register_buffer("scale", (1 / (255 * std)).view(-1, 1, 1).expand(3, 1, 1).clone())
        self.register_buffer("shift", (-mean / std).view(-1, 1, 1).expand(3, 1, 1).clone())

    def forward(self, frames):
        """[B, H, W, 3] uint8 -> [B, 3, h, w] float32."""
        from torchvision.transforms.v2 import functional as F

        images = frames.permute(0, 3, 1, 2)
        height, width = images.shape[-2:]
        target_h, target_w = self.size
        if (height, width) != self.size:
            if self.resize_mode == "squash":
                size = self.size
            else:
                ratios = (target_h / height, target_w / width)
                ratio = min(ratios) if self.resize_mode == "longest" else max(ratios)
                if self.resize_mode == "longest":  # rounds as open_clip does
                    size = (round(height * ratio), round(width * ratio))
                elif ratio == ratios[0]:  # rounds down as torchvision does
                    size = (target_h, target_h * width // height)
                else:
                    size = (target_w * height // width, target_w)
            # uint8 in, uint8 out: rounds and clamps after the filter, as PIL does
            images = F.resize(images, size, self.interpolation, antialias=True)
            if self.resize_mode == "longest":
                pad_h, pad_w = target_h - size[0], target_w - size[1]
                sides = [pad_w // 2, pad_h // 2, pad_w - pad_w // 2, pad_h - pad_h // 2]
                images = F.pad(images, sides, fill=self.fill)
            images = F.center_crop(images, list(self.size))
        return images.float() * self.scale + self.shift


def _nearest(word, words):
    lower = {w.lower(): w for w in words}
    close = difflib.get_close_matches(word.lower(), lower, n=4, cutoff=0.4)
    return ", ".join(lower[w] for w in close) or ", ".join(list(words)[:4])


def _resolve(name):
    """Split a model name.

    Returns:
        (open_clip's model_name, tag or None, random: bool)
    Raises:
        UsageError: unknown schema, architecture or tag, with the nearest names.
    """
    if name.startswith("local-dir:"):
        folder = Path(name.partition(":")[2]).expanduser()
        beside_us = Path(__file__).resolve().parent / folder
        if not folder.is_dir() and beside_us.is_dir():
            folder = beside_us  # so that local-dir:tiny_clip works from any directory
        if not (folder / "open_clip_config.json").is_file():
            raise UsageError(f"--clip-model {name}: no open_clip_config.json in {folder.resolve()}")
        if not any(folder.glob("open_clip*.safetensors")) and not any(
            folder.glob("open_clip*.bin")
        ):
            raise UsageError(f"--clip-model {name}: no weights in {folder.resolve()}")
        return f"local-dir:{folder}", None, False
    if name.startswith("hf-hub:"):
        return name, None, False
    import open_clip  # which takes seconds: not for a folder

    arch, slash, tag = name.partition("/")
    if not slash or not tag:
        raise UsageError(
            f"--clip-model {name}: write ARCH/TAG, as in ViT-B-32/laion2b_s34b_b79k, or "
            f"local-dir:FOLDER, or hf-hub:ORG/NAME"
        )
    if arch not in open_clip.list_models():
        raise UsageError(
            f"--clip-model {name}: open_clip knows no architecture {arch!r}; nearest: "
            f"{_nearest(arch, open_clip.list_models())}"
        )
    tags = open_clip.list_pretrained_tags_by_model(arch)
    random, tag = tag == "random" or tag.startswith("random:"), tag.removeprefix("random:")
    if random and tag == "random":
        tag = tags[0] if tags else None
    elif tag not in tags:
        raise UsageError(
            f"--clip-model {name}: {arch} has no weights {tag!r}; nearest: {_nearest(tag, tags)}"
        )
    return arch, tag, random


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
        os.environ["HF_HUB_OFFLINE"] = "1"  # for the workers
        hub.HF_HUB_OFFLINE = True


def check_model(name, cache_dir=None):
    """Make sure, before anything slow starts, that `load_clip(name)` will work: the name is known,
    weights and tokenizer are there or get downloaded now, once for all workers.

    Raises:
        UsageError: unknown name (with the nearest), or nothing to be had (with the offline way).
    """
    arch, tag, random = _resolve(name)
    if random or arch.startswith("local-dir:"):
        return
    import open_clip

    try:
        _go_offline_if_alone()
        open_clip.get_tokenizer(arch, cache_dir=cache_dir)  # small, so first
        if arch.startswith("hf-hub:"):
            from huggingface_hub import hf_hub_download

            repository = arch.partition(":")[2]
            hf_hub_download(repository, "open_clip_config.json", cache_dir=cache_dir)
            open_clip.pretrained.download_pretrained_from_hf(repository, cache_dir=cache_dir)
        else:
            config = open_clip.get_pretrained_cfg(arch, tag)
            open_clip.download_pretrained(config, cache_dir=cache_dir)
    except ImportError as error:
        raise UsageError(f"{name} needs another package: pip install {error.name}") from error
    except Exception as error:  # the hub's, urllib's, transformers': all mean the same to the user
        cause = next(iter(str(error).splitlines()), "") or repr(error)
        if os.environ.get("HF_HUB_OFFLINE"):
            cause = "the model hub cannot be reached and they are not in the cache"
        raise UsageError(
            f"cannot get the weights of {name}: {cause[:200]}; {OFFLINE_HELP}"
        ) from error


def image_flops(name, cache_dir=None):
    """Floating-point operations to embed one picture, counted on a model without storage.

    Args:
        name: as in `load_clip`. Of an hf-hub model the configuration (a few KB) is fetched.
    """
    import open_clip
    from torch.utils.flop_counter import FlopCounterMode

    arch, _, _ = _resolve(name)
    if arch.startswith("hf-hub:"):
        from huggingface_hub import hf_hub_download

        _go_offline_if_alone()
        config = hf_hub_download(
            arch.partition(":")[2], "open_clip_config.json", cache_dir=cache_dir
        )
        arch = f"local-dir:{Path(config).parent}"
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # open_clip warns of random weights; these are none at all
    with torch.device("meta"):
        model = open_clip.create_model(
            arch, load_weights=False, pretrained_text=False, device="meta"
        )
        model.eval().requires_grad_(False)
        logger.setLevel(level)
        size = model.visual.image_size
        size = (size, size) if isinstance(size, int) else size
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.encode_image(torch.empty(1, 3, *size))
    return counter.get_total_flops()


SMALL_WEIGHTS = 20 * 2**20  # bytes: tiny_clip has 12 MB, and RN50, the smallest of CLIP's, 244


def check_cost(name, devices, frames, allow_slow=False, cache_dir=None):
    """Refuse to start in silence what a CPU cannot finish; nothing has been downloaded by then.

    Args:
        devices: the reward devices; with a CUDA device among them there is nothing to refuse.
        frames: how many pictures the run will score.
        allow_slow: go on with a warning instead.
    Raises:
        UsageError: a picture would take over a second, or the run over a day.
    """
    on_cpu = sum(not str(device).startswith("cuda") for device in devices)
    if not on_cpu:
        return
    if name.startswith("local-dir:"):
        files = Path(_resolve(name)[0].removeprefix("local-dir:")).glob("open_clip*")
        if sum(file.stat().st_size for file in files) < SMALL_WEIGHTS:
            return  # and spare importing open_clip to count
    try:
        flops = image_flops(name, cache_dir)
    except UsageError:
        raise
    except Exception as error:  # an architecture that cannot be counted this way, or no network
        print(f"WARNING: cost of {name} on this CPU unknown ({error})", file=sys.stderr)
        return
    a = torch.randn(1024, 1024)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    seconds = flops / (2 * 1024**3 / sorted(times)[1])
    # CPU workers share the cores; a GPU beside them gets no more than its share of the frames
    days = seconds * frames * on_cpu / len(devices) / 86400
    if seconds < 1 and days < 1:
        return
    cost = (
        f"{name} on this machine's CPU: at least {seconds:.2g} s a frame, {days:,.1f} days for the "
        f"{frames:,} frames of this run"
    )
    if allow_slow:
        print(f"WARNING: {cost}", file=sys.stderr)
        return
    raise UsageError(
        f"{cost}; nothing was downloaded. Use a machine with a CUDA GPU, or the small embedded "
        f"model: --clip-model local-dir:tiny_clip --render-size 96 (or --allow-slow to go on "
        f"regardless)"
    )


class _StandInTokenizer:
    """For random weights only, whose real tokenizer would have to be downloaded: bytes as ids."""

    def __init__(self, context_length):
        self.context_length = context_length

    def __call__(self, texts):
        ids = torch.zeros(len(texts), self.context_length, dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            data = list(text.encode())[: self.context_length]
            row[: len(data)] = torch.tensor(data) + 1
        return ids


def load_clip(name, device="cpu", precision="auto", cache_dir=None, compile=False):
    """Load a CLIP-like model with its own tokenizer and preprocessing.

    Args:
        name: "ARCH/TAG" for any pair of `open_clip.list_pretrained()`; "local-dir:PATH";
            "hf-hub:ORG/NAME"; "ARCH/random" (seeded random weights with the preprocessing of the
            architecture's first tag) or "ARCH/random:TAG" (of that tag), for tests and benchmarks.
        device: torch device.
        precision: "fp32", "bf16", "fp16" of the image tower, or "auto": fp16 on CUDA, else fp32.
            The text tower is only used once per prompt: it stays in float32 in the host's memory.
        cache_dir: where downloads go; None is the libraries' own place.
        compile: torch.compile the image tower, anew for every shape of a batch;
            benchmarks/clip_speed.py measures what that gains. Ignored without CUDA.
    Returns:
        LoadedCLIP, in eval mode, without gradients.
    Raises:
        UsageError: unknown name, or weights that cannot be had. Never silently random.
    """
    import open_clip

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
    keys = ("mean", "std", "interpolation", "resize_mode")
    # OpenAI's weights were trained with QuickGELU; open_clip only warns when the architecture's
    # default activation does not fit the weights, and gives wrong embeddings
    options = {"force_quick_gelu": True} if config.get("quick_gelu") else {}
    if random:
        print(
            f"WARNING: {name} has RANDOM weights; its reward means nothing (tests and benchmarks)",
            file=sys.stderr,
        )
        on = device if device.type == "cuda" else torch.device("cpu")  # which draws them in seconds
        with torch.random.fork_rng(devices=[on] if on.type == "cuda" else []), on:
            torch.manual_seed(0)  # every worker must draw the same weights
            model = open_clip.create_model(
                arch,
                device=on,
                load_weights=False,
                pretrained_text=False,
                force_preprocess_cfg={k: config[k] for k in keys if config.get(k)},
                **options,
            ).cpu()
    else:
        check_model(name, cache_dir)
        model = open_clip.create_model(
            arch, tag, cache_dir=cache_dir, require_pretrained=True, **options
        )
    try:
        if random:
            _go_offline_if_alone()
        tokenizer = open_clip.get_tokenizer(arch, cache_dir=cache_dir)
    except Exception as error:
        if not random or isinstance(error, ImportError):
            raise
        tokenizer = _StandInTokenizer(getattr(model, "context_length", 64))
    model.eval().requires_grad_(False)
    if hasattr(model.visual, "layer1"):  # CLIP's residual networks
        _fold_batch_norm(model.visual)
    model.visual.to(dtypes[precision])  # before the move: the device never holds it in float32
    model.visual.to(device)  # and nothing else: of ViT-bigG-14 the text tower is a quarter
    if device.type == "cpu" and hasattr(model.visual, "layer1"):
        model.visual.to(memory_format=torch.channels_last)  # convolutions: the frames come so
    if compile and device.type == "cuda":
        model.visual.compile(dynamic=False)
    preprocess = Preprocess(open_clip.get_model_preprocess_cfg(model)).to(device)
    return LoadedCLIP(name, model, tokenizer, preprocess, device, dtypes[precision])


def _fold_batch_norm(module):
    """Make one convolution of each and the batch norm that follows it: the same function of an
    evaluated network but for rounding, and less memory to go through."""
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    for (name, conv), (next_name, norm) in itertools.pairwise(module.named_children()):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(module, name, fuse_conv_bn_eval(conv, norm))
            setattr(module, next_name, nn.Identity())
    for child in module.children():
        _fold_batch_norm(child)


# ------------------------------------------------------------------------------ the reward


class CLIPReward(nn.Module):
    """Goal-baseline regularised CLIP reward (section 3.2 of the paper).

    For unit-norm image embedding s, target embedding g, baseline embedding b and the line L
    through b and g:

        R(s) = 1 - 1/2 || alpha proj_L(s) + (1 - alpha) s - g ||^2

    alpha = 0 with one target prompt is the plain cosine similarity s . g.

    Args:
        clip: LoadedCLIP. Its text tower is dropped once the prompts are embedded.
        target_prompts, baseline_prompts: lists of str; several are averaged (mean of the unit-norm
            embeddings, not renormalised). The baseline may be empty when alpha is 0.
        alpha: regularisation strength in [0, 1].
    Raises:
        UsageError: no target prompt, no baseline prompt though alpha > 0, alpha outside [0, 1], or
            target and baseline that mean the same to the model.
    """

    def __init__(self, clip, target_prompts, baseline_prompts=(), alpha=0.0):
        super().__init__()
        if not target_prompts:
            raise UsageError("a target prompt is needed")
        if not 0.0 <= alpha <= 1.0:
            raise UsageError(f"--reward-alpha must lie in [0, 1], not {alpha}")
        if alpha > 0 and not baseline_prompts:
            raise UsageError(f"--reward-alpha {alpha} needs a --baseline-prompt")
        if getattr(clip.model, "text_tower_dropped", False):
            raise ValueError("this LoadedCLIP served another CLIPReward already; load it again")
        self.clip, self.alpha = clip, float(alpha)
        self.model, self.preprocess = clip.model, clip.preprocess
        g = self._embed_prompts(target_prompts)
        b = self._embed_prompts(baseline_prompts) if baseline_prompts else g
        d = g - b
        if alpha > 0 and d.norm() < 1e-6:
            raise UsageError("target and baseline prompt are the same to the model; change one")
        self.register_buffer("g", g)
        self.register_buffer("b", b)
        self.register_buffer("d", d / d.norm().clamp_min(1e-12))  # unit direction of L
        for part in ("text", "transformer", "token_embedding", "ln_final", "text_decoder"):
            if hasattr(self.model, part):  # gigabytes, and never needed again
                delattr(self.model, part)
        self.model.text_tower_dropped = True

    @torch.no_grad()
    def _embed_prompts(self, prompts):
        embeddings = self.model.encode_text(self.clip.tokenizer(list(prompts))).float()
        return nn.functional.normalize(embeddings, dim=-1).mean(0).to(self.clip.device)

    @torch.no_grad()
    def embed_images(self, frames):
        """frames [B, H, W, 3] uint8, any device -> [B, D] float32 unit-norm, on the model's."""
        images = self.preprocess(frames.to(self.clip.device, non_blocking=True))
        embeddings = self.model.encode_image(images.to(self.clip.dtype))
        return nn.functional.normalize(embeddings.float(), dim=-1)

    def reward(self, embeddings):
        """embeddings [B, D] float32 unit-norm -> [B] float32."""
        on_line = self.b + ((embeddings - self.b) @ self.d)[:, None] * self.d
        mixed = self.alpha * on_line + (1 - self.alpha) * embeddings
        return 1 - 0.5 * (mixed - self.g).square().sum(-1)

    def forward(self, frames):
        """frames [B, H, W, 3] uint8 -> [B] float32."""
        return self.reward(self.embed_images(frames))


def make_clip_reward(
    device,
    clip_model,
    target_prompts,
    baseline_prompts=(),
    alpha=0.0,
    precision="auto",
    cache_dir=None,
    compile=False,
):
    """What a worker calls to get its reward; bind all but `device` with functools.partial."""
    clip = load_clip(clip_model, device, precision, cache_dir, compile)
    return CLIPReward(clip, target_prompts, baseline_prompts, alpha)


# ------------------------------------------------------------------------------ workers


class RewardWorkerError(RuntimeError):
    """A worker raised (its traceback is in the message) or died."""


CPU_BATCH_SIZE = 256
CUDA_BATCH_SIZES = [512, 256, 128, 64, 32, 16, 8, 4, 2, 1]
# No job is cut finer than this: tiny_clip on one core embeds 620 frames/s in batches of 16, 777 in
# batches of 64, 801 in batches of 256.
LEAST_BATCH = 64


class _Scorer:
    """What happens in one worker: states -> frames -> rewards, at most `batch_size` at once.

    On CUDA the two host buffers take turns: while the device copies and scores one, the next chunk
    is drawn into the other, so that a job costs max(render, CLIP) and not their sum.
    """

    def __init__(
        self, make_renderer, make_reward, make_video_renderer, needs_gl, device, batch_size
    ):
        self.device = torch.device(device)
        self.pad = self.device.type == "cuda"  # chunks of one shape: nothing is tuned twice
        self.description = str(device)
        if make_renderer and needs_gl:  # before the reward: it imports no mujoco, but a user's may
            self.description += ", " + egl_render.setup_gl(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
        self.make_video_renderer = make_video_renderer
        self.renderer = make_renderer() if make_renderer else None
        self.video_renderer = None if make_video_renderer else self.renderer
        self.reward = make_reward(self.device) if make_reward else None
        self.buffers = []
        self.batch_size = batch_size or self._largest_batch()
        if self.reward:
            self.description += f", at most {self.batch_size} frames at once"

    @torch.inference_mode()
    def _largest_batch(self):
        """The largest of CUDA_BATCH_SIZES that leaves a tenth of the device's memory: for the
        learner and for the frames of the next chunk."""
        if self.device.type != "cuda" or not (self.reward and self.renderer):
            return CPU_BATCH_SIZE
        for size in CUDA_BATCH_SIZES:
            try:
                shape = (size, *self.renderer.frame_shape)
                self.reward(torch.zeros(shape, dtype=torch.uint8, device=self.device)).cpu()
                free, total = torch.cuda.mem_get_info(self.device)
                fits = free > total / 10 or size == 1
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                fits = False
            torch.cuda.empty_cache()  # here the exception holds no tensor any more
            if fits:
                break
        return size

    def _buffer(self, turn, shape):
        """[B, H, W, 3] uint8 of this shape in host memory that no copy reads any more."""
        cuda = self.device.type == "cuda"
        there = self.buffers[0].shape if self.buffers else (0,)
        if there[0] < shape[0] or there[1:] != shape[1:]:
            if cuda:
                torch.cuda.synchronize()
            self.buffers = [
                torch.empty(shape, dtype=torch.uint8, pin_memory=cuda) for _ in range(1 + cuda)
            ]
            self.copied = [torch.cuda.Event() for _ in self.buffers] if cuda else []
        if cuda:
            self.copied[turn % 2].synchronize()
        return self.buffers[turn % len(self.buffers)][: shape[0]]

    def score(self, source, rewards, drawn, chunk):
        """Score in chunks of `chunk`, in smaller parts where they do not fit.

        Args:
            source: states [B, S] float64, or frames [B, H, W, 3] uint8 if `drawn`.
            rewards: [B] float32, written.
        Returns:
            (seconds drawing, seconds in CLIP)
        """
        while True:
            parts = -(-chunk // self.batch_size)
            size = -(-chunk // parts)  # as even as can be: a padded part is work for nothing
            try:
                return self._score(source, rewards, drawn, chunk, size)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                self.batch_size = size // 2
            # outside of the handler, whose exception holds the tensors that were in the way
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            print(
                f"WARNING: {self.device} ran out of memory with {size} frames at once; going on "
                f"with --clip-batch-size {self.batch_size}",
                file=sys.stderr,
            )

    @torch.inference_mode()
    def _score(self, source, rewards, drawn, chunk, size):
        render_s, clip_s, outputs, spans = 0.0, 0.0, [], []
        cuda = self.device.type == "cuda"
        # parts start where chunks do, so that none depends on which worker has which chunks
        starts = [
            (start, min(start + size, first + chunk, len(source)))
            for first in range(0, len(source), chunk)
            for start in range(first, min(first + chunk, len(source)), size)
        ]
        for turn, (start, stop) in enumerate(starts):
            count = stop - start
            if drawn and not self.pad:
                frames = torch.from_numpy(source[start:stop])
            else:
                item = source.shape[1:] if drawn else self.renderer.frame_shape
                # waits until the device has read what is in it: not a part of drawing
                frames = self._buffer(turn, (size if self.pad else count, *item))
            began = time.perf_counter()
            if not drawn:
                self.renderer.render(source[start:stop], frames[:count].numpy())
            elif self.pad:
                frames[:count] = torch.from_numpy(source[start:stop])
            drew = time.perf_counter()
            render_s += drew - began
            if cuda:
                span = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                span[0].record()
                frames = frames.to(self.device, non_blocking=True)
                self.copied[turn % 2].record()
                outputs.append(self.reward(frames)[:count])
                span[1].record()
                spans.append(span)
            else:
                outputs.append(self.reward(frames)[:count])
                clip_s += time.perf_counter() - drew
        if outputs:
            result = torch.cat(outputs).float().cpu()
            if not result.isfinite().all():
                raise FloatingPointError("non-finite reward; try --clip-precision bf16 or fp32")
            rewards[:] = result.numpy()
        clip_s += sum(begin.elapsed_time(end) for begin, end in spans) / 1000
        return render_s, clip_s

    def render(self, states, frames):
        """states [B, S] -> frames [B, H, W, 3], with the video renderer."""
        self.video_shape()
        began = time.perf_counter()
        self.video_renderer.render(states, frames)
        return time.perf_counter() - began, 0.0

    def run(self, kind, source, target, chunk):
        """One job: "render" states, or score "states" or "frames", into target."""
        if kind == "render":
            return self.render(source, target)
        return self.score(source, target, kind == "frames", chunk)

    def video_shape(self):
        """Shape of the video renderer's frames; makes it when it is first asked for."""
        if self.video_renderer is None:
            self.video_renderer = self.make_video_renderer()
        return self.video_renderer.frame_shape

    def close(self):
        """Free the renderers' GL contexts: one left to the end of a process may crash it there."""
        for renderer in {self.renderer, self.video_renderer} - {None}:
            getattr(renderer, "close", lambda: None)()


class _SharedArray:
    """A numpy array in named shared memory; the creator unlinks it, others attach by `spec`."""

    def __init__(self, shape, dtype, name=None):
        self.spec = (tuple(shape), np.dtype(dtype).str)
        size = max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self.owner = name is None
        if self.owner and os.path.isdir("/dev/shm"):
            # writing past a full /dev/shm kills the process without a word
            room = os.statvfs("/dev/shm")
            if size > room.f_bavail * room.f_frsize:
                raise MemoryError(
                    f"{size / 2**20:.0f} MiB do not fit into /dev/shm; start the container with "
                    "--shm-size=8g (or --ipc=host)"
                )
        self.memory = shared_memory.SharedMemory(name, create=self.owner, size=size)
        self.spec += (self.memory.name,)
        self.array = np.ndarray(shape, dtype, buffer=self.memory.buf)

    def release(self):
        self.array = None
        self.memory.close()
        if self.owner:
            self.memory.unlink()


def _exit_with_parent(parent_pid):
    """End this process when its parent is gone, however the parent died and whatever we do."""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)


def _next_job(connection):
    """The next job, or None when there will be none: told so, or the parent is gone."""
    try:
        return connection.recv()
    except EOFError:
        return None


def _worker_main(connection, parent_pid, threads, setup):
    """A worker's life: build the scorer, then serve jobs until told to stop."""
    # Ctrl-C and a SIGTERM to the whole group are the parent's business, which may want one more
    # rollout scored before it closes us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(parent_pid,), daemon=True).start()
    try:
        if threads:
            torch.set_num_threads(threads)
        scorer = _Scorer(*setup)
        connection.send(("ready", scorer.description))
        while (job := _next_job(connection)) is not None:
            number, kind, source_spec, target_spec, start, stop, chunk = job
            if kind == "video_shape":
                connection.send((number, scorer.video_shape()))
                continue
            source, target = _SharedArray(*source_spec), _SharedArray(*target_spec)
            began = time.perf_counter()
            seconds = scorer.run(kind, source.array[start:stop], target.array[start:stop], chunk)
            speed = (stop - start) / (time.perf_counter() - began)
            source.release()
            target.release()
            connection.send((number, (*seconds, speed)))
        scorer.close()
    except BaseException:
        try:
            connection.send(("error", traceback.format_exc()))
        except OSError:
            pass
        sys.exit(1)


class RewardFuture:
    """A job under way: `result()` waits and returns float32 [B]; `done()` tells without waiting."""

    def __init__(self, pool, number, kind, workers, source, target):
        self._pool, self._number, self._kind = pool, number, kind
        self._waiting = set(workers)
        self._source, self._target, self._result = source, target, None
        self.timings = {"render_s": 0.0, "clip_s": 0.0}

    def _collect(self, block):
        while self._waiting:
            reply = self._pool._reply(self._number, self._waiting, block)
            if reply is None:
                return False
            worker, (render_s, clip_s, speed) = reply
            self._waiting.discard(worker)
            if self._kind != "render":
                self._pool._measured(worker, speed)
            self.timings["render_s"] = max(self.timings["render_s"], render_s)
            self.timings["clip_s"] = max(self.timings["clip_s"], clip_s)
        if self._result is None:
            self._result = self._target.array.copy()
            self._pool._release(self._source, self._target)
            self._pool.timings = self.timings
        return True

    def done(self):
        """True when `result()` would not wait. Raises RewardWorkerError as `result` does."""
        return self._collect(block=False)

    def result(self):
        """The rewards [B] float32, in the order of the states.

        Raises:
            RewardWorkerError: a worker raised or died.
        """
        self._collect(block=True)
        return self._result


class RewardPool:
    """One process per device that draws and scores its share of the states.

    A job is cut into chunks of one size that depends on the job and on the number of workers alone;
    a worker gets a run of them, the longer the faster it was in the jobs before. So no device waits
    for another, and among equal devices no reward depends, to the last digit, on how fast they
    were.

    States go in and rewards come out through shared memory; pictures never leave a worker. Workers
    start with spawn (CUDA wants it), in parallel, in the background; the constructor returns at
    once. They end with `close()`, with the parent, or with the parent's death.

    Args:
        make_renderer: picklable, called without arguments in every worker once it is bound to its
            GPU; returns an object with .frame_shape (H, W, 3) and .render(states [B, S], out
            [B, H, W, 3]). None when only frames are handed in.
        make_reward: picklable, called as make_reward(device) in every worker; returns a module that
            maps frames [B, H, W, 3] uint8 on that device to [B] float32. None: only render.
        devices: torch devices, one worker each; one may be named several times. Empty: everything
            happens in the caller's process (on cuda:0 if there is one).
        batch_size: frames scored at once by one worker, at most; no result depends on it but for
            rounding. None: on CUDA the largest power of two up to 512 that fits, on the CPU 256. A
            worker whose device runs out of memory goes on with half, and says so. A worker on CUDA
            holds two pinned buffers of batch_size x H x W x 3 bytes, or less if its jobs are small.
        make_video_renderer: like make_renderer, for `render()`; default: the same renderer.
        needs_gl: choose OpenGL in every worker; False for renderers that draw without it.
    Attributes:
        timings: {"render_s", "clip_s"} of the job finished last: seconds, the slowest worker's.
        description: one line per worker once `wait_ready()` has returned.
    """

    def __init__(
        self,
        make_renderer,
        make_reward,
        devices=("cpu",),
        batch_size=None,
        make_video_renderer=None,
        needs_gl=True,
    ):
        self.timings = {"render_s": 0.0, "clip_s": 0.0}
        self.description = []
        self._jobs, self._replies, self._closed = 0, {}, False
        self._processes, self._connections, self._shared = [], [], set()
        self._scores = make_reward is not None
        self._video_shape = None
        self._local = None
        myself = weakref.ref(self)
        self._close_at_exit = lambda: myself() and myself().close()
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"--clip-batch-size must be positive, not {batch_size}")
        setup = (make_renderer, make_reward, make_video_renderer, needs_gl)
        devices = [str(device) for device in devices]
        self._batch_size = batch_size or CUDA_BATCH_SIZES[0]
        self._speeds = [None] * len(devices)  # frames per second, of late
        if not devices:
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
            self._local = _Scorer(*setup, device, batch_size)
            self.description = [self._local.description]
            return
        # Workers ignore SIGTERM: multiprocessing's own way to end them at exit would wait for ever
        atexit.register(self._close_at_exit)
        context = mp.get_context("spawn")
        threads = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
        threads = max(1, threads // max(1, sum(d == "cpu" for d in devices)))
        for index, device in enumerate(devices):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker_main,
                args=(
                    theirs,
                    os.getpid(),
                    threads if device == "cpu" else None,
                    (*setup, device, batch_size),
                ),
                name=f"reward-worker-{index}-{device}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._starting = set(range(len(devices)))
        self.description = [""] * len(devices)

    def wait_ready(self):
        """Wait until every worker has its renderer and its model.

        Raises:
            RewardWorkerError: a worker could not start; its traceback is in the message.
        """
        while self._local is None and self._starting:
            self._receive(self._starting, block=True)
        return self

    def submit(self, states=None, frames=None):
        """Start scoring; returns a RewardFuture.

        Args:
            states: [B, S] float64, drawn and scored by the workers; any B, also 0. Or
            frames: [B, H, W, 3] uint8, only scored.
        """
        if not self._scores:
            raise ValueError("this pool was made without make_reward; it can only render")
        if (states is None) == (frames is None):
            raise ValueError("hand in either states or frames")
        if frames is None:
            return self._start("states", np.asarray(states, np.float64), (), np.float32)
        frames = np.asarray(frames)
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
            raise ValueError(
                f"frames must be [B, H, W, 3] uint8, not {frames.shape} {frames.dtype}"
            )
        return self._start("frames", frames, (), np.float32)

    def score(self, states=None, frames=None):
        """`submit(...).result()`: [B] float32."""
        return self.submit(states, frames).result()

    def render(self, states):
        """Draw states [B, S] with the video renderer: [B, H, W, 3] uint8."""
        states = np.asarray(states, np.float64)
        if self._video_shape is None:
            if self._local:
                self._video_shape = self._local.video_shape()
            else:
                number = self._new_job()
                self._send(0, number, "video_shape", None, None, 0, 0, 0)
                self._video_shape = self._reply(number, {0}, block=True)[1]
        return self._start("render", states, self._video_shape, np.uint8).result()

    def _start(self, kind, source, item_shape, dtype):
        if self._closed:
            raise RuntimeError("the pool is closed")
        if self._local:
            future = RewardFuture(self, 0, kind, (), None, None)
            future._result = np.empty((len(source), *item_shape), dtype)
            chunk = self._chunk(len(source), 1)
            seconds = self._local.run(kind, source, future._result, chunk)
            self.timings = future.timings = dict(zip(("render_s", "clip_s"), seconds, strict=True))
            return future
        shared = _SharedArray(source.shape, source.dtype)
        self._shared.add(shared)
        shared.array[:] = source
        target = _SharedArray((len(source), *item_shape), dtype)
        self._shared.add(target)
        chunk = self._chunk(len(source), len(self._processes))
        bounds = self._shares(-(-len(source) // chunk)) * chunk
        number, workers = self._new_job(), []
        for worker, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
            stop = min(stop, len(source))
            if stop > start:
                self._send(worker, number, kind, shared.spec, target.spec, start, stop, chunk)
                workers.append(worker)
        return RewardFuture(self, number, kind, workers, shared, target)

    def _chunk(self, count, workers):
        """Frames per chunk: eight chunks a worker, so that drawing and CLIP overlap for seven
        eighths of a job and shares can follow speeds, unless that makes too small batches."""
        share = count / workers
        chunks = max(1, min(8, int(share / LEAST_BATCH)), math.ceil(share / self._batch_size))
        return max(1, math.ceil(share / chunks))

    def _shares(self, chunks):
        """Where each worker's run of chunks starts, and the end: [workers + 1] int. One chunk each,
        so that everyone stays measured, and the others by speed."""
        workers = len(self._processes)
        if chunks <= workers:
            return np.minimum(np.arange(workers + 1), chunks)
        speeds = np.array(self._speeds if all(self._speeds) else [1.0] * workers)
        ideal = speeds.cumsum() / speeds.sum() * chunks
        bounds = np.concatenate([[0], ideal.round().astype(int)])
        for worker in range(workers):  # forwards at least one each, backwards one left for each
            bounds[worker + 1] = max(bounds[worker + 1], bounds[worker] + 1)
        return np.minimum(bounds, chunks - np.arange(workers, -1, -1))

    def _measured(self, worker, speed):
        """Average over the last jobs: one is noisy where other programs run."""
        self._speeds[worker] = (speed + (self._speeds[worker] or speed)) / 2

    def _new_job(self):
        self._jobs += 1
        return self._jobs

    def _send(self, worker, *job):
        try:
            self._connections[worker].send(job)
        except OSError:  # it died: says how, with its traceback if it left one
            self._receive({worker}, block=True)

    def _reply(self, number, workers, block):
        """(worker, payload) of job `number` from any of `workers`; None: not there, not block."""
        while True:
            for worker in workers:
                if (worker, number) in self._replies:
                    return worker, self._replies.pop((worker, number))
            if not self._receive(workers, block):
                return None

    def _receive(self, workers, block):
        """Take in one message from any of `workers`. False if there was none and not block."""
        if self._closed:
            raise RuntimeError("the pool is closed")
        by_connection = {self._connections[w]: w for w in workers}
        by_sentinel = {self._processes[w].sentinel: w for w in workers}
        ready = multiprocessing.connection.wait(
            [*by_connection, *by_sentinel], timeout=None if block else 0
        )
        for connection in ready:
            if connection not in by_connection:
                continue
            worker = by_connection[connection]
            try:
                number, payload = connection.recv()
            except (EOFError, OSError):
                self._died(worker)
            if number == "error":
                name = self._processes[worker].name
                self.close()
                raise RewardWorkerError(f"{name} failed:\n{payload}")
            if number == "ready":
                self._starting.discard(worker)
                self.description[worker] = payload
            else:
                self._replies[worker, number] = payload
            return True
        for sentinel in ready:
            self._died(by_sentinel[sentinel])
        return False

    def _died(self, worker):
        process = self._processes[worker]
        process.join(5)
        code = process.exitcode
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
        if code == -9:
            how += " (out of memory?)"
        how += " while it started" if worker in self._starting else "; the job it had is lost"
        self.close()
        raise RewardWorkerError(f"{process.name} {how}")

    def close(self):
        """End the workers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if self._local:
            self._local.close()
        for connection in self._connections:
            try:
                connection.send(None)
            except OSError:
                pass
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._release(*self._shared)

    def _release(self, *arrays):
        for array in arrays:
            array.release()
            self._shared.discard(array)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
