"""Write a randomly initialised CLIP to a folder, for `--clip-model local-dir:FOLDER`.

    python benchmarks/random_clip.py ViT-L-14 /tmp/ViT-L-14

It is for benchmarks, tests and machines without network: it is as fast and as large as the real
model, with the preprocessing of its first pretrained weights, but its rewards mean nothing.
"""

import json
import logging
import sys
from pathlib import Path

import open_clip
import torch
import tyro
from safetensors.torch import save_file


def main(arch: tyro.conf.Positional[str], folder: tyro.conf.Positional[Path]) -> None:
    """Write open_clip_config.json and open_clip_model.safetensors (half precision).

    Args:
        arch: an architecture of open_clip.list_models()
        folder: where to write, created if missing
    """
    if arch not in open_clip.list_models():
        sys.exit(f"error: {arch} is not in open_clip.list_models()")
    config = open_clip.get_model_config(arch)
    text = config.get("text_cfg", {})
    if "hf_model_name" in text or text.get("hf_tokenizer_name"):
        sys.exit(f"error: the text tower or tokenizer of {arch} needs a download from Hugging Face")
    tags = open_clip.list_pretrained_tags_by_model(arch)
    pretrained = open_clip.get_pretrained_cfg(arch, tags[0]) if tags else {}
    config |= {"quick_gelu": True} if pretrained.get("quick_gelu") else {}
    names = ("mean", "std", "interpolation", "resize_mode")
    preprocess = {name: pretrained[name] for name in names if pretrained.get(name)}
    written = {"model_cfg": config, "preprocess_cfg": preprocess}

    print(f"WARNING: {arch} in {folder} has RANDOM weights", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps(written, indent=2))
    logging.disable()  # open_clip, too, warns that these weights are random
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"load_weights": False, "pretrained_text": False, "device": device}
    with torch.device(device):  # a CPU takes minutes for the large ones
        model = open_clip.create_model(f"local-dir:{folder}", **options)
    weights = {name: value.cpu().contiguous() for name, value in model.half().state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
