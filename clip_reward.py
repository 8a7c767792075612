"""What a picture is worth: how well it fits a sentence, according to CLIP.

    clip = load_clip("ViT-B-32/laion2b_s34b_b79k", device="cuda:0")
    reward = CLIPReward(clip, ["a humanoid robot kneeling"], ["a humanoid robot"], alpha=0.5)
    reward(frames)                                    # [B, H, W, 3] uint8 -> [B] float32

    scorer = Scorer(make_renderer, make_reward, "cuda:0")
    rewards, *seconds = scorer.score(states)          # draws states [B, S], then scores them

Source: "Vision-Language Models are Zero-Shot Reward Models for Reinforcement Learning"
(arXiv 2310.12921), sections 2.2 and 3.
"""

import contextlib
import difflib
import functools
import json
import os
import re
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

# These are set before torch is imported. Threads that spin while they wait are fastest on an idle
# machine, but if another process keeps the same cores busy, SAC's updates fall from 65 a second to
# 1; with this bound, they only fall to 36 (two cores, batches of 256).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # kernels are not chosen by timing
os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")  # errors of flags stay short

import numpy as np
import torch
from annotated_types import Interval
from PIL import Image, ImageOps, PngImagePlugin
from pydantic import AfterValidator, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from reward_head import HeadReward, load_head, with_hash, without_hash

Array = torch.Tensor | np.ndarray


class UsageError(Exception):
    """A problem that the user can fix. The message is one line, and the exit code is 2."""


class RunError(RuntimeError):
    """Something that ends a run. The message is one line, and the exit code is 1."""


def shorten(text: str, width: int) -> str:
    """Cut a text to `width` characters, between words unless the last word is long."""
    return text if len(text) <= width else re.sub(r"\s\S{0,40}$", "", text[: width - 3]) + " .."


def one_line(error: BaseException) -> str:
    """Return an exception's type and message in one line of at most about 400 characters, without
    ANSI codes. A long message keeps the beginning of each of its lines, because load_state_dict
    writes one line each about missing, unexpected and misshapen weights."""
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).splitlines()
    lines = [" ".join(line.split()) for line in lines if line.strip()]
    # torch's advice and the traceback of another process stand above the line with the cause
    causes = [
        i for i, line in enumerate(lines) if re.match(r"(\S+ )?\S*(error|exception): ", line, re.I)
    ]
    lines = lines[max(causes, default=0) :]
    if len(" ".join(lines)) > 300:
        lines = [shorten(line, max(120, 300 // len(lines))) for line in lines]
    kind = type(error)
    own = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
    return ": ".join([name, *filter(None, [shorten(" ".join(lines), 350)])])


def message_of(error: BaseException) -> str:
    """Return `one_line` without the type, unless the message is one word, as a KeyError's is."""
    message = one_line(error).partition(": ")[2]
    return message if " " in message else one_line(error)


# ------------------------------------------------------------------------------ flags


def model_folder(name: str) -> Path:
    """Return the folder that a model's name means, in the current directory or else in this file's:
    tiny_clip is found from any directory."""
    folder = Path(name.removeprefix("local-dir:")).expanduser()
    beside_us = Path(__file__).resolve().parent / folder
    return folder if folder.is_dir() or not beside_us.is_dir() else beside_us


def full_name(name: str) -> str:
    """Return "local-dir:FOLDER" for the bare name of a folder that holds a model, and any other
    name unchanged."""
    bare = name and not name.startswith(("local-dir:", "hf-hub:"))
    here = bare and (model_folder(name) / "open_clip_config.json").is_file()
    return f"local-dir:{name}" if here else name


def render_size_of(name: str) -> int:
    """Return the frames' height and width in pixels that suit a model: "render_size" in the
    open_clip_config.json of its folder, otherwise 480, the paper's."""
    folder = model_folder(name)
    there = name.startswith("local-dir:") and (folder / "open_clip_config.json").is_file()
    return read_config(folder)[0] if there else 480


def read_config(folder: Path) -> tuple[int, str]:
    """Return "render_size" and the name of the Hugging Face tokenizer, "" for none, from the
    open_clip_config.json of a model's folder. Raises UsageError if it is damaged."""
    path = folder / "open_clip_config.json"
    try:
        config = json.loads(path.read_text())
        text = config["model_cfg"]["text_cfg"]
        return int(config.get("render_size", 480)), text.get("hf_tokenizer_name") or ""
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        problem = f"{path} is damaged: {message_of(error)}"
        raise UsageError(f"--clip-model local-dir:{folder}: {problem}") from error


ModelName = Annotated[str, AfterValidator(full_name)]


@dataclass(config={"extra": "forbid"})
class RewardArgs:
    """Flags of the reward."""

    target_prompt: tuple[str, ...] = ()
    """the goal, in words; several prompts are averaged"""
    baseline_prompt: tuple[str, ...] = ()
    """what every picture of the scene shows, in words, for --reward-alpha; several prompts are
    averaged (default: "a humanoid robot" for the humanoid)"""
    target_image: tuple[str, ...] = ()
    """files with pictures of the goal, in addition to a prompt or instead of it; pictures that are
    not square get black bars"""
    reward_head: str = ""
    """a head from `eval_epic.py fit`. The reward is the head's probability that a state is good or,
    with a target prompt or image, the mean of this probability and CLIP's reward"""
    reward_alpha: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """how strongly the reward is restricted to what distinguishes the target from the
    --baseline-prompt: from 0 (not at all: the plain cosine similarity) to 1 (completely)"""
    score_every: PositiveInt = 4
    """CLIP scores every `score_every`-th state of an episode, and the last one; the rewards of the
    states in between are interpolated (1: all states, as in the paper). --reward ground-truth
    ignores this flag"""
    reward: Literal["clip", "ground-truth"] = "clip"
    """clip: learn from CLIP's reward; ground-truth: from the environment's own, as a baseline"""
    clip_model: ModelName = "ViT-bigG-14/laion2b_s39b_b160k"
    """ARCH/TAG of open_clip, hf-hub:ORG/NAME or local-dir:PATH; tiny_clip works offline"""
    clip_batch_size: PositiveInt = 64
    """pictures that a worker draws and scores at once; fewer need less memory on the GPU"""
    reward_devices: tuple[str, ...] = ()
    """devices that draw and score, one worker each; name a device twice for two workers. The
    default is every CUDA device, or else one "cpu" per core (at most four). ray uses every GPU of a
    Ray cluster (its CPUs if it has no GPU), and ray:N uses N of them"""
    clip_precision: Literal["auto", "fp16", "bf16", "fp32", "int8"] = "auto"
    """number format of CLIP's image tower; auto: fp32 on the CPU, fp16 on a GPU, or bf16 there if
    fp16 overflows; int8: int8 for its linear layers, by torchao"""

    def __post_init__(self) -> None:
        self.target_image = tuple(map(os.path.abspath, self.target_image))
        self.reward_head = with_hash(self.reward_head)

    def devices(self) -> list[str]:
        """Return the devices named, or the default ones. Raises UsageError."""
        named = list(self.reward_devices)
        if set(named) == {"cpu"} or re.fullmatch(r"ray(:[1-9]\d*)?", " ".join(named)):
            return named
        there = ["cpu", *cuda_devices()]
        if unknown := " ".join(name for name in named if name not in there):
            here = ", ".join(there)
            raise UsageError(f"--reward-devices {unknown}: choose from {here}, ray or ray:N")
        return named or there[1:] or ["cpu"] * min(4, os.cpu_count() or 1)

    def check_reward(self) -> None:
        """Check the flags before anything slow starts, and download the model. Raises
        UsageError."""
        if self.reward != "clip":
            return
        targets = self.target_prompt + self.target_image
        if targets or not self.reward_head:
            check_prompts(targets, self.baseline_prompt, self.reward_alpha)
        try:
            load_head(self.reward_head, vars(self))
        except (OSError, ValueError) as error:
            raise UsageError(f"--reward-head {error}") from error
        for path in self.target_image:
            load_image(path)
        resolve(self.clip_model)
        devices = self.devices()
        if devices[0].startswith("ray"):  # its actors check and download for themselves
            return
        for device in devices:
            self.check_speed(device)
        ensure_downloaded(self.clip_model)

    def check_speed(self, device: object) -> None:
        """Raise UsageError if a model that is not a local folder would run on a CPU unasked."""
        folder = self.clip_model.startswith("local-dir:")
        if str(device) == "cpu" and not folder and "cpu" not in self.reward_devices:
            raise UsageError(
                f"--clip-model {self.clip_model} needs a CUDA GPU, and there is none that works; "
                "nothing was downloaded. Use the small bundled model, --clip-model tiny_clip, or "
                "wait for days with --reward-devices cpu"
            )

    def load_clip(self, device: str | torch.device) -> "LoadedCLIP":
        """Load the model that the flags name. Raises UsageError."""
        self.check_speed(device)
        return load_clip(self.clip_model, device, self.clip_precision)


@functools.cache
def cuda_devices() -> list[str]:
    """Return ["cuda:0", ...]. Raises UsageError for cards that the installed torch cannot use."""
    count, ours = torch.cuda.device_count(), f"torch {torch.__version__}"
    try:
        if count:
            torch.cuda.init()
    except RuntimeError as error:
        cause = f"the CUDA driver does not start ({message_of(error)})"
        need = f"{ours} needs a driver for CUDA {str(torch.version.cuda).partition('.')[0]}"
        ways = "update the driver, install a torch for an older CUDA, or use --reward-devices cpu"
        raise UsageError(f"GPUs found: {count}, but {cause}; {need}: {ways}") from error
    built = ", ".join(torch.cuda.get_arch_list() if count else [])
    for i in range(count):
        major, minor = torch.cuda.get_device_capability(i)
        card, codes = 10 * major + minor, re.findall(r"([a-z]+)_(\d+)", built)
        # sm_86 runs on any 8.x from 8.6 on, PTX (compute_86) on any later card
        runs = (int(n) <= card and (n[:-1] == str(major) or kind != "sm") for kind, n in codes)
        if built and not any(runs):
            what = f"{torch.cuda.get_device_name(i)} is sm_{card}, but {ours} is built for {built}"
            raise UsageError(f"{what}: use another torch or hide the GPU with CUDA_VISIBLE_DEVICES")
    return [f"cuda:{i}" for i in range(count)]


def check_prompts(targets: Sequence[str], baselines: Sequence[str], alpha: float) -> None:
    """Raise UsageError if the targets (words or picture files) or the baselines are missing."""
    if not targets or not all(map(str.strip, targets)):
        example = '--target-prompt "a humanoid robot kneeling", or --target-image FILE'
        raise UsageError(f"a target prompt is needed: {example}")
    if alpha > 0 and not (baselines and all(map(str.strip, baselines))):
        raise UsageError(f"--reward-alpha {alpha} needs a --baseline-prompt")


def check_lengths(tokenizer: Callable, prompts: Sequence[str]) -> None:
    """Raise UsageError for a prompt that is longer than the model's context."""
    context = tokenizer([""]).shape[1]
    padding = tokenizer([""], 2 * context).mode().values
    for text in prompts:
        # a prompt that was cut has more tokens in a context with room for them
        kept, all_of_it = ((tokenizer([text], n) != padding).sum() for n in (context, 2 * context))
        if kept < all_of_it:
            raise UsageError(f"the prompt {text[:40]!r}.. is too long: the model ignores its end")


# Pillow's limit of 1 MB is less than the metadata (XMP, colour profiles) of Photoshop or Blender
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


def load_image(path: str | Path) -> np.ndarray:
    """Read a picture, turned by its EXIF tag, on white -> [H, W, 3] uint8. Raises UsageError."""
    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file)
    except Exception as error:  # damaged files and huge pictures raise many types
        raise UsageError(f"{path} cannot be read as a picture: {message_of(error)}") from error
    if picture.mode.startswith(("I", "F")):
        raise UsageError(f"{path} has more than 8 bits per channel; save it with 8")
    white = Image.new("RGBA", picture.size, "white")
    return np.array(Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB"))


# ------------------------------------------------------------------------------ loading CLIP


@plain_dataclass
class LoadedCLIP:
    """A CLIP that is ready to embed: texts on the host, pictures on the device."""

    model: Any  # open_clip's
    tokenizer: Callable[..., torch.Tensor]  # its own: ([B texts], context) -> [B, context] int64
    preprocess: nn.Module  # its own: [B, H, W, 3] uint8 -> [B, 3, h, w] float32, normalised
    device: torch.device
    dtype: torch.dtype  # of the image tower


class Preprocess(nn.Module):
    """Apply open_clip's inference transform, given as its preprocess dict, to a batch of tensors on
    their device."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, cfg: dict) -> None:
        super().__init__()
        import open_clip

        keys = "mean std interpolation resize_mode fill_color".split()
        cfg = {key: cfg[key] for key in ("size", *keys) if cfg.get(key) is not None}
        transforms = open_clip.image_transform(cfg.pop("size"), is_train=False, **cfg).transforms
        # resize, crop or pad; then two steps for PIL's pictures; then normalise
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
            if hasattr(transform, "get_params"):  # open_clip's own, which uses a PIL picture's size
                picture = types.SimpleNamespace(size=images.shape[:1:-1])
                size = transform.get_params(picture, size, transform.longest)
            size = [size] if isinstance(size, int) else list(size)  # one number: the shorter edge
            # uint8 input gives uint8 output, rounded and clamped after the filter, as PIL does
            images = F.resize(images, size, transform.interpolation, antialias=True)
        return images.float() * self.scale + self.shift


# the files of weights that open_clip looks for in a folder, in its order of preference
WEIGHTS = (
    "open_clip_model.safetensors open_clip_pytorch_model.safetensors open_clip_pytorch_model.bin "
    "open_clip_pytorch_model.pth model.safetensors pytorch_model.bin pytorch_model.pth model.pth"
).split()
AUTO = {"cuda": "fp16"}  # the image tower's precision on devices other than a CPU
# if none of these files exists, transformers makes a tokenizer without a vocabulary
VOCABULARIES = "tokenizer.json", "*.model", "vocab.txt", "merges.txt"


def find_weights(folder: Path) -> str:
    """Return the file of weights in a model's folder: the first of WEIGHTS, or else the only file
    with another name, such as a training checkpoint, epoch_5.pt. Raises UsageError."""
    files = (path for path in folder.glob("[!.]*") if path.is_file())
    names = sorted(x.name for x in files if x.suffix in (".safetensors", ".bin", ".pth", ".pt"))
    names = [name for name in WEIGHTS if name in names][:1] or names
    if not names or not (folder / "open_clip_config.json").is_file():
        problem = f"needs open_clip_config.json and {WEIGHTS[0]}"
    elif len(names) > 1:
        problem = f"has several files of weights; keep one: {shorten(', '.join(names), 120)}"
    else:
        return str(folder / names[0])
    raise UsageError(f"--clip-model local-dir:{folder}: {folder.resolve()} {problem}")


def check_tokenizer(folder: Path) -> None:
    """Raise UsageError if a model's folder lacks the files of its Hugging Face tokenizer."""
    _, name = read_config(folder)
    kinds = ("tokenizer_config.json",), VOCABULARIES
    missing = [kind[0] for kind in kinds if not any(any(folder.glob(file)) for file in kind)]
    if name and missing:
        problem = f"needs {' and '.join(missing)} of {name}, the tokenizer"
        raise UsageError(f"--clip-model local-dir:{folder}: {folder.resolve()} {problem}")


def resolve(name: str) -> tuple[str, str | None]:
    """Split a model's name into open_clip's model_name and tag (None for a folder or hf-hub).

    Raises:
        UsageError: for an unknown name (it lists the nearest ones) or a folder without a model.
    """
    name = full_name(name)
    if name.startswith("local-dir:"):
        folder = model_folder(name)
        find_weights(folder)
        check_tokenizer(folder)
        return f"local-dir:{folder}", None
    if name.startswith("hf-hub:"):
        return name, None
    import open_clip  # takes seconds, and a folder does not need it

    pairs = [pair.replace(":", "/", 1) for pair in open_clip.list_pretrained(as_str=True)]
    if name not in pairs:
        near = ", ".join(difflib.get_close_matches(name, ["tiny_clip", *pairs], n=4, cutoff=0.1))
        forms = "tiny_clip, an ARCH/TAG of open_clip, local-dir:FOLDER or hf-hub:ORG/NAME"
        raise UsageError(f"--clip-model {name} is not {forms}; the nearest: {near}")
    arch, _, tag = name.partition("/")
    return arch, tag


def ensure_downloaded(name: str) -> None:
    """Download weights and tokenizer if they are not in the cache, once for all workers. Raises
    UsageError, which says what to do offline."""
    arch, tag = resolve(name)
    if arch.startswith("local-dir:"):
        return
    import open_clip

    try:
        open_clip.get_tokenizer(arch)  # small, so first
        hub = {"hf_hub": arch.removeprefix("hf-hub:") + "/"}
        open_clip.download_pretrained(open_clip.get_pretrained_cfg(arch, tag) if tag else hub)
    except Exception as error:  # the hub's, urllib's, transformers': all mean the same to the user
        raise UsageError(
            f"cannot get the weights of {name}: {message_of(error)}; if offline, use "
            "--clip-model tiny_clip (small, bundled, not zero-shot), or copy a model's files, "
            "which docs/troubleshooting.md lists, into a folder and use --clip-model "
            "local-dir:FOLDER"
        ) from error


def load_clip(name: str, device: str | torch.device = "cpu", precision: str = "auto") -> LoadedCLIP:
    """Load a CLIP-like model, its tokenizer and its preprocessing, in eval mode.

    Args:
        name: "ARCH/TAG" of `open_clip.list_pretrained()`, "local-dir:PATH", "hf-hub:ORG/NAME", or
            "tiny_clip".
        precision: of the image tower; "auto" is fp32 on the CPU, and on CUDA fp16, or bf16 if fp16
            overflows. The text tower, which is used once per prompt, stays on the host in fp32:
            not every GPU (or MIG instance) has the memory for both.
    Raises:
        UsageError: unknown name or unavailable weights. Weights are never silently random.
    """
    import open_clip
    from torch.fx.experimental.optimization import fuse

    device = torch.device(device)
    auto = AUTO.get(device.type, "fp32") if precision == "auto" else ""
    precision = auto or precision
    dtypes = {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "int8": torch.bfloat16,  # of the layers that are not linear
    }
    if precision not in dtypes:
        raise UsageError(f"precision must be auto, {', '.join(dtypes)}; not {precision!r}")
    if precision == "fp32":  # by default cuDNN rounds the inputs of convolutions to TF32's 10 bits
        torch.backends.cudnn.allow_tf32 = False
    ensure_downloaded(name)
    arch, tag = resolve(name)
    config = (open_clip.get_pretrained_cfg(arch, tag) if tag else None) or {}
    # OpenAI's weights were trained with QuickGELU. open_clip only warns when the architecture's
    # activation does not fit the weights, and gives wrong embeddings.
    options = {"force_quick_gelu": True} if config.get("quick_gelu") else {}
    create = functools.partial(
        open_clip.create_model, arch, tag, require_pretrained=True, **options
    )
    # open_clip alone would ignore a .pt file, and choose silently among several files
    ours = mock.patch("open_clip.factory._find_checkpoint_in_dir", find_weights)
    with ours:
        try:
            with weights_in_their_file():
                model = create()
            if any(weight.is_meta for weight in model.parameters()):
                model = create()  # the weights are not a state_dict but arrays in an .npz file
            tokenizer = open_clip.get_tokenizer(arch)
            tokenizer([""])  # does it work?
        except Exception as error:  # a configuration that fits no code, weights that fit no model
            problem = message_of(error)
            held = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
            if held and arch.startswith("local-dir:"):
                file = find_weights(model_folder(name))
                fit = Path(file).with_name("open_clip_pytorch_model.bin")
                problem = (
                    f"{file} holds {held[1]} besides the weights, and only weights are read; if "
                    'you trust the file, keep only its weights: python -c "import torch; torch.'
                    f"save(torch.load('{file}', weights_only=False)['state_dict'], '{fit}')\""
                )
            raise UsageError(f"--clip-model {name} cannot be loaded: {problem}") from error
        model.eval().requires_grad_(False)
        preprocess = Preprocess(open_clip.get_model_preprocess_cfg(model)).to(device)
        visual = model.visual
        if any(hasattr(module, "reparameterize") for module in visual.modules()):
            from timm.utils.model import reparameterize_model

            # MobileCLIP's branches become one convolution each: 73 ms a frame on a CPU, not 110
            visual = reparameterize_model(visual.float())
        if hasattr(visual, "layer1"):  # a residual network
            fused = fuse(visual.float())  # batch norms into convolutions: 1.18 times as fast
            for attribute in ("image_size", "preprocess_cfg"):  # open_clip reads them
                setattr(fused, attribute, getattr(visual, attribute))
            visual = fused.to(memory_format=torch.channels_last)  # the frames' own layout
        del model.visual
        model.float()  # the text tower
        model.visual = visual.to(device, dtypes[precision])
        if precision == "int8":
            round_linear_layers(model.visual, name)
    clip = LoadedCLIP(model, tokenizer, preprocess, device, dtypes[precision])
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    if auto == "fp16" and not CLIPEmbedder(clip).embed_images(noise).isfinite().all():
        print(f"{name} overflows in fp16: its image tower uses bf16", flush=True)
        return load_clip(name, device, "bf16")
    return clip


def round_linear_layers(visual: nn.Module, name: str) -> None:
    """Quantise the weights of linear layers to int8, and their inputs dynamically. Raises
    UsageError without torchao, or for the model `name` if it has no such layer."""
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise UsageError('--clip-precision int8 needs torchao: pip install ".[int8]"') from error
    if not any(isinstance(part, nn.Linear) for part in visual.modules()):
        raise UsageError(f"--clip-precision int8: the image tower of {name} has no linear layer")
    quantize_(visual, Int8DynamicActivationInt8WeightConfig())


@contextlib.contextmanager
def weights_in_their_file():
    """Let parameters take no memory in this context until load_state_dict assigns a file's weights.
    A safetensors file is memory-mapped, so all processes that read it share one copy."""
    register, load = nn.Module.register_parameter, nn.Module.load_state_dict

    def empty(module, name, param):
        if param is not None and module._parameters.get(name) is None:  # else: the file's weights
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    stay = {"to": lambda module, *args, **kwargs: module}  # open_clip's to(device), before it loads
    assign = functools.partialmethod(load, assign=True)
    with mock.patch.multiple(nn.Module, register_parameter=empty, load_state_dict=assign, **stay):
        yield


# ------------------------------------------------------------------------------ the reward


BATCH = 64  # pictures for the image tower at once; an H100 is as fast with 16 or 256


class CLIPEmbedder(nn.Module):
    """Embed pictures with a LoadedCLIP, which is not changed and can be shared."""

    def __init__(self, clip: LoadedCLIP) -> None:
        super().__init__()
        self.model, self.preprocess = clip.model, clip.preprocess
        self.device, self.dtype = clip.device, clip.dtype

    @torch.no_grad()
    def embed_images(self, frames: Array) -> torch.Tensor:
        """Embed uint8 frames [B, H, W, 3], V views of each state [B, V, H, W, 3], or one [H, W, 3]
        (a tensor on any device, or an array) -> [B, D] or [B, V, D] float32 unit-norm. Raises
        ValueError for other frames."""
        if isinstance(frames, np.ndarray):  # MuJoCo's render() returns a flipped view
            frames = np.ascontiguousarray(frames)
        frames = torch.as_tensor(frames).to(self.device)
        if frames.dtype != torch.uint8 or not 3 <= frames.ndim <= 5 or frames.shape[-1] != 3:
            shape = list(frames.shape)
            raise ValueError(f"frames must be [B, H, W, 3] uint8, not {shape} {frames.dtype}")
        frames = frames if frames.ndim > 3 else frames[None]
        height, width = frames.shape[-3:-1]
        if height != width:  # black bars: a model may crop to the centre
            x, y = max(0, height - width), max(0, width - height)
            bars = (0, 0, x // 2, x - x // 2, y // 2, y - y // 2)
            frames = nn.functional.pad(frames, bars)
        # all views of all states in one row, so that the batches are full
        batches = map(self.preprocess, frames.flatten(0, -4).split(BATCH))
        parts = [self.model.encode_image(images.to(self.dtype)).float() for images in batches]
        embeddings = nn.functional.normalize(torch.cat(parts), dim=-1)
        return embeddings.unflatten(0, frames.shape[:-3])


class CLIPReward(CLIPEmbedder):
    """Goal-baseline regularised CLIP reward (section 3.2 of the paper).

    For unit-norm image embedding s, target embedding g, baseline embedding b and the line L
    through b and g:

        R(s) = 1 - 1/2 || alpha proj_L(s) + (1 - alpha) s - g ||^2

    alpha = 0 with one target prompt is the plain cosine similarity s . g. The reward of a state
    that several cameras see is the mean over its pictures.

    Args:
        clip: LoadedCLIP.
        target_prompts, baseline_prompts: a str, or several, which are averaged (mean of the
            unit-norm embeddings, not renormalised). The baseline may be empty if alpha is 0.
        alpha: regularisation strength in [0, 1]; an attribute that may be changed.
        target_images: a picture's file, or several; averaged with the target prompts.
    Raises:
        UsageError: as `check_prompts`, or if both prompts mean the same to the model.
    """

    g: torch.Tensor
    b: torch.Tensor
    d: torch.Tensor

    def __init__(
        self,
        clip: LoadedCLIP,
        target_prompts: str | Sequence[str] = (),
        baseline_prompts: str | Sequence[str] = (),
        alpha: float = 0.0,
        target_images: str | Sequence[str] = (),
    ) -> None:
        super().__init__(clip)
        goals = target_prompts, baseline_prompts, target_images
        target_prompts, baseline_prompts, target_images = (
            [goal] if isinstance(goal, str) else goal for goal in goals
        )
        check_prompts([*target_prompts, *target_images], baseline_prompts, alpha)
        check_lengths(clip.tokenizer, [*target_prompts, *baseline_prompts])
        self.alpha = float(alpha)

        @torch.no_grad()
        def embed(prompts):
            embeddings = clip.model.encode_text(clip.tokenizer(list(prompts)))
            return nn.functional.normalize(embeddings, dim=-1).to(clip.device)

        pictures = [self.embed_images(load_image(path)) for path in target_images]
        g = torch.cat([*pictures, *([embed(target_prompts)] if target_prompts else [])]).mean(0)
        b = embed(baseline_prompts).mean(0) if baseline_prompts else g
        d = g - b
        if alpha > 0 and d.norm() < 1e-6:
            raise UsageError("target and baseline prompts are the same to the model; change one")
        self.register_buffer("g", g)
        self.register_buffer("b", b)
        self.register_buffer("d", d / d.norm().clamp_min(1e-12))  # unit direction of L

    def reward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Unit-norm embeddings [B, D] or [B, V, D] float32 -> rewards [B] float32."""
        on_line = self.b + ((embeddings - self.b) @ self.d)[..., None] * self.d
        mixed = self.alpha * on_line + (1 - self.alpha) * embeddings
        rewards = 1 - 0.5 * (mixed - self.g).square().sum(-1)
        return rewards if rewards.ndim == 1 else rewards.mean(1)

    def forward(self, frames: Array) -> torch.Tensor:
        """Frames as in `embed_images` -> rewards [B] float32."""
        return self.reward(self.embed_images(frames))


def make_clip_reward(args: RewardArgs, device: str | torch.device) -> nn.Module:
    """Load the model and the goal that `args` name -> reward module; every worker calls this."""
    head, words = load_head(args.reward_head), args.target_prompt + args.target_image
    clip = args.load_clip(device)
    goal = args.target_prompt, args.baseline_prompt, args.reward_alpha, args.target_image
    reward: Any = CLIPReward(clip, *goal) if words or not head else CLIPEmbedder(clip)
    for part in ("text", "transformer", "token_embedding", "ln_final", "text_decoder"):
        if hasattr(clip.model, part):  # gigabytes, and never needed again
            delattr(clip.model, part)
    if head:
        try:
            head.check_size(reward.embed_images(np.zeros((64, 64, 3), np.uint8)).shape[-1])
        except ValueError as error:
            raise UsageError(f"--reward-head {without_hash(args.reward_head)}: {error}") from error
        reward = HeadReward(reward, head, bool(words))
    return reward


def scored_steps(steps: int, every: int) -> list[int]:
    """List the steps of an episode that are scored: the first, every `every`-th, and the last."""
    return sorted({*range(0, steps, every), steps - 1})


def interpolate(rewards: np.ndarray, scored: list[int]) -> np.ndarray:
    """Interpolate rewards [T, N] linearly in each episode between the rows `scored`; other rows are
    not read -> [T, N] float32. A picture changes little from one step to the next: if every 4th
    step (of 15 ms) of the humanoid is scored, the correlation with all scores is 0.97 to 0.998."""
    steps = np.arange(len(rewards))
    columns = [np.interp(steps, scored, column[scored]) for column in rewards.T]
    return np.stack(columns, 1).astype(np.float32)


# ------------------------------------------------------------------------------ on one device


class Scorer:
    """Draw and score states on one device, in the process and thread that call it.

    Args:
        make_renderer: called as make_renderer(device), and with size=... for `render`; returns an
            object with .frame_shape ([V,] H, W, 3) and .render(states [B, S], out uint8), and maybe
            .draw(states) -> uint8 tensor on the device. None: `score` gets frames, not states.
        make_reward: called as make_reward(device); returns a module that maps frames
            [B, *frame_shape] uint8 on that device to [B, ...] float32. None: only `render` works.
        device: "cpu" or "cuda:i".
    """

    def __init__(self, make_renderer: Any, make_reward: Any, device: Any = "cpu") -> None:
        self.device, self.make_renderer = torch.device(device), make_renderer
        # the renderer first: it binds GL to the device before anything imports mujoco
        self.renderers: dict = {None: make_renderer(device)} if make_renderer else {}
        self.reward: Any = make_reward(self.device) if make_reward else None
        drawing: Any = self.renderers.get(None)
        self.look = getattr(drawing, "look", "")  # "egl" or "warp", the same for all workers
        self.description = f"pictures by {drawing.description}" if self.look else "ready"

    def score(self, states: np.ndarray) -> tuple[np.ndarray, float, float]:
        """States [B, S] float64, or frames [B, H, W, 3] uint8 without a renderer -> rewards
        [B, ...] float32, seconds of drawing, seconds of CLIP that drawing did not hide. Raises
        RunError if the device has too little memory, or for rewards of another shape."""
        return self.finish(self.launch(states))

    @torch.inference_mode()
    def launch(self, states: np.ndarray) -> tuple:
        """Draw `states` and hand them to CLIP. On a GPU this returns before CLIP has finished,
        so the next chunk can be drawn before `finish` waits for the rewards."""
        gpu, renderer = self.device.type != "cpu", self.renderers.get(None)
        began = time.perf_counter()
        try:
            if renderer and hasattr(renderer, "draw"):  # on the device
                frames = renderer.draw(states)
            elif renderer:
                shape, pinned = (len(states), *renderer.frame_shape), torch.cuda.is_available()
                frames = torch.empty(shape, dtype=torch.uint8, pin_memory=gpu and pinned)
                renderer.render(states, frames.numpy())
            else:
                frames = torch.from_numpy(states)
            drawn = time.perf_counter()
            rewards = self.reward(frames.to(self.device, non_blocking=True))
        except torch.OutOfMemoryError as error:
            problem = f"{self.device} has too little memory for {len(states)} states at once"
            raise RunError(f"{problem}; use a smaller --clip-batch-size") from error
        if (shape := tuple(np.shape(rewards)))[:1] != (len(states),):
            made = f"{list(shape)} for {len(states)} frames"
            raise RunError(f"the reward module returned {made}; it must return [B]")
        return rewards, drawn - began, time.perf_counter() - drawn

    @torch.inference_mode()
    def finish(self, launched: tuple) -> tuple[np.ndarray, float, float]:
        """Wait for the result of `launch` and return it as `score` does."""
        (rewards, render_s, clip_s), began = launched, time.perf_counter()
        rewards = rewards.float().cpu() if hasattr(rewards, "cpu") else rewards
        rewards = np.asarray(rewards, np.float32)
        return rewards, render_s, clip_s + time.perf_counter() - began

    def render(self, states: np.ndarray, size: int | None = None) -> np.ndarray:
        """Draw states [B, S] -> [B, H, W, 3] uint8, as they are scored or at another size; several
        views side by side."""
        if size not in self.renderers:
            self.renderers[size] = self.make_renderer(self.device, size=size)
        frames = self.renderers[size].render(np.asarray(states, np.float64))
        return np.concatenate(list(frames.swapaxes(0, 1)), 2) if frames.ndim == 5 else frames

    def close(self) -> None:
        """Free the GL contexts, in the thread that made them."""
        for renderer in self.renderers.values():
            if hasattr(renderer, "close"):
                renderer.close()
        self.renderers.clear()
