"""A reward from labels: the probability that a state is good, by logistic regression on CLIP's
embeddings of its pictures. `eval_epic.py fit` writes FILE; a run with `--reward-head FILE` uses it.

FILE has the safetensors format: "weight" [V * D] and "bias" [1] float32. Its metadata holds JSON
under "head", which says what the head was fitted to: the model, task and cameras under the names of
their flags ("flags"), and the numbers of labels ("labels").
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

# the flags that must be the same for a head and for the run that uses it
FLAGS = (
    "clip_model env_id textured camera_azimuth camera_distance camera_elevation camera_lookat"
).split()


class Head(torch.nn.Module):
    """Logistic regression on the unit-norm embeddings of all V views of a state.

    Args:
        weight, bias: [V * D] and [1] float32.
        about: {"flags": {name: value}, "labels": {"good": int, "other": int}, ..}, for the file.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, about: dict[str, Any]) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.about = about

    def check_size(self, dim: int) -> None:
        """Raise ValueError unless there is a weight for each of the D numbers of an embedding."""
        wanted = dim * max(1, len(self.about["flags"]["camera_azimuth"]))
        if len(self.weight) != wanted:
            problem = f"it has {len(self.weight)} weights, but its model and cameras need {wanted}"
            raise ValueError(f"{problem}; fit it again with eval_epic.py fit")

    def logits(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, D] or [B, V, D] float32 -> logits [B] float32."""
        return embeddings.flatten(1) @ self.weight + self.bias

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Embeddings as in `logits` -> probabilities [B] float32."""
        return torch.sigmoid(self.logits(embeddings))

    def to_bytes(self) -> bytes:
        """Return the content of the head's file."""
        return save(self.state_dict(), {"head": json.dumps(self.about)})


class HeadReward(torch.nn.Module):
    """Map frames to the head's probability [B] float32; with `mixed`, to the mean of that and the
    reward of `clip`, which must then be a CLIPReward; otherwise a CLIPEmbedder is enough."""

    def __init__(self, clip: Any, head: Head, mixed: bool = False) -> None:
        super().__init__()
        self.clip, self.head, self.mixed = clip, head.to(clip.device), mixed

    def forward(self, frames: Any) -> torch.Tensor:
        embeddings = self.clip.embed_images(frames)
        rewards = self.head(embeddings)
        return (rewards + self.clip.reward(embeddings)) / 2 if self.mixed else rewards


def with_hash(name: str) -> str:
    """Return a file's name as ABSOLUTE_PATH#SHA256, as in args.json, and any other unchanged."""
    if not os.path.isfile(name):
        return name
    path = Path(name).resolve()
    return f"{path}#{hashlib.sha256(path.read_bytes()).hexdigest()}"


def without_hash(name: str) -> str:
    """Return FILE for either FILE#SHA256 or FILE."""
    return re.sub("#[0-9a-f]{64}$", "", name)


def load_head(name: str, flags: dict[str, Any] | None = None) -> Head | None:
    """Load FILE or FILE#SHA256; "" gives None. Raises OSError or ValueError for a file that is
    missing, damaged, not a head, changed since it was hashed, or fitted with other `flags`."""
    if not name:
        return None
    path = without_hash(name)
    if path != name and with_hash(path) != name:
        raise ValueError(f"{path} is missing or has changed since the run began")
    if not os.path.isfile(path):
        raise ValueError(f"{path} does not exist")
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["head"])
            head = Head(file.get_tensor("weight"), file.get_tensor("bias"), about)
            wanted = {name: about["flags"][name] for name in FLAGS}
        for tensor in (head.weight, head.bias):
            if tensor.dtype != torch.float32 or tensor.ndim != 1 or not tensor.isfinite().all():
                raise ValueError
        counts = about["labels"]["good"], about["labels"]["other"]
        if len(head.bias) != 1 or any(type(count) is not int or count < 1 for count in counts):
            raise ValueError
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or was not made by eval_epic.py fit") from error
    for name, value in json.loads(json.dumps(flags or {}, default=str)).items():
        if value != wanted.get(name, value):
            was, now = (re.sub(r'[][",]|\.0\b', "", json.dumps(x)) for x in (wanted[name], value))
            raise ValueError(f"{path} was fitted with {name.replace('_', ' ')} {was}, not {now}")
    return head
