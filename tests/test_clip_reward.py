"""The reward's numbers, the models and their preprocessing, against independent computations."""

import argparse
import concurrent.futures
import copy
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import helpers
import numpy as np
import open_clip
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from helpers import ROOT, MeanReward, PaintRenderer
from open_clip.tokenizer import HFTokenizer
from PIL import Image, PngImagePlugin

import clip_reward
import sac_clip_humanoid as sac
from clip_reward import CLIPReward, RewardArgs, RunError, Scorer, UsageError, load_clip

TINY = helpers.TINY
TARGETS = [helpers.KNEELING, "a robot on its knees"]
BASELINES = ["a humanoid robot", "a robot"]


@pytest.fixture(scope="module")
def tiny():
    return load_clip(TINY)


def load_without_weights(name, **options):
    """`load_clip` of weights that nobody has here -> (clip, the model as open_clip makes it, with
    the same random weights)."""
    made, create_model = [], open_clip.create_model

    def create(*names, require_pretrained, **options):
        assert require_pretrained, "else open_clip is content with random weights"
        made.append(create_model(*names, load_weights=False, **options))
        return copy.deepcopy(made[-1])

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        patch.setattr(clip_reward, "ensure_downloaded", lambda name: None)
        patch.setattr(open_clip.factory, "download_pretrained", lambda *_, **__: "/nowhere")
        patch.setattr(open_clip, "create_model", create)
        return load_clip(name, **options), made[-1].eval()


@pytest.fixture(scope="module")
def rn50():
    return load_without_weights("RN50/openai")


@pytest.fixture(scope="module")
def frames():
    """[6, 120, 120, 3] uint8: pictures of a falling humanoid."""
    renderer = sac.make_renderer(sac.Args(camera_azimuth=(180.0,)), size=120)
    frames = renderer.render(helpers.humanoid_states(60)[::10])
    renderer.close()
    return frames


def text_embeddings(prompts):
    """[len, D] float64 unit-norm, straight from open_clip."""
    model = open_clip.create_model(TINY).eval()
    with torch.no_grad():
        embeddings = model.encode_text(open_clip.get_tokenizer(TINY)(prompts)).double().numpy()
    return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)


# ------------------------------------------------------------------------------ the formula


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("targets, baselines", [(TARGETS[:1], BASELINES[:1]), (TARGETS, BASELINES)])
def test_reward_is_the_papers_formula(tiny, frames, alpha, targets, baselines):
    reward = CLIPReward(tiny, targets, baselines, alpha)
    s = reward.embed_images(torch.from_numpy(frames)).double().numpy()
    np.testing.assert_allclose(np.linalg.norm(s, axis=1), 1.0, atol=1e-6)
    g, b = text_embeddings(targets).mean(0), text_embeddings(baselines).mean(0)
    direction = g - b
    projection = alpha * np.outer(direction, direction) / (direction @ direction)
    projection += (1 - alpha) * np.eye(len(g))
    expected = 1 - 0.5 * (((s - g) @ projection) ** 2).sum(1)
    got = reward(torch.from_numpy(frames)).numpy()
    assert got.dtype == np.float32 and got.shape == (len(frames),)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert got.std() > 1e-4, "the pictures differ, so must the rewards"
    if alpha == 0 and len(targets) == 1:
        np.testing.assert_allclose(got, s @ g, atol=1e-5)  # the cosine


def test_one_picture_or_many_as_tensor_or_array(tiny, frames):
    reward = CLIPReward(tiny, TARGETS)
    expected = reward(torch.from_numpy(frames))
    torch.testing.assert_close(reward(frames), expected, atol=0, rtol=0)
    for picture in (frames[2], torch.from_numpy(frames[2])):
        assert reward.embed_images(picture).shape == (1, text_embeddings(["x"]).shape[1])
        torch.testing.assert_close(reward(picture), expected[2:3], atol=1e-5, rtol=0)


def test_a_single_sentence_is_no_list_of_letters(tiny, frames):
    one = CLIPReward(tiny, "a robot", "a thing", 0.5)
    assert torch.equal(one(frames), CLIPReward(tiny, ["a robot"], ["a thing"], 0.5)(frames))


@pytest.mark.parametrize(
    "change",
    [
        lambda frames: frames.float() / 255,
        lambda frames: frames.permute(0, 3, 1, 2),
        lambda frames: torch.cat([frames, frames[..., :1]], -1),  # RGBA
        lambda frames: frames[0, 0],
    ],
)
def test_other_frames_are_refused(tiny, frames, change):
    with pytest.raises(ValueError, match=r"frames must be \[B, H, W, 3\] uint8, not \["):
        CLIPReward(tiny, ["a robot"])(change(torch.as_tensor(frames)))


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_state_is_worth_the_mean_of_its_views(tiny, frames, alpha):
    views = frames[:6].reshape(3, 2, *frames.shape[1:])
    reward = CLIPReward(tiny, TARGETS, BASELINES, alpha)
    each = np.stack([reward(views[:, v]).numpy() for v in range(2)], 1)
    assert np.abs(each[:, 0] - each[:, 1]).max() > 1e-3
    np.testing.assert_allclose(reward(views).numpy(), each.mean(1), atol=1e-6)
    assert reward.embed_images(views).shape[:2] == (3, 2)


def test_pictures_as_goals_count_as_sentences_do(tiny, frames, tmp_path):
    paths = [str(tmp_path / f"{n}.png") for n in range(2)]
    for path, frame in zip(paths, frames):
        Image.fromarray(frame).save(path)
    words, s = text_embeddings(TARGETS), CLIPReward(tiny, TARGETS).embed_images(frames)
    alone = CLIPReward(tiny, target_images=paths[:1])
    np.testing.assert_allclose(alone(frames), s @ s[0], atol=1e-5)
    assert alone(frames[:1]).item() == pytest.approx(1, abs=1e-5)
    mixed = CLIPReward(tiny, TARGETS, BASELINES[:1], 0.5, paths)
    np.testing.assert_allclose(mixed.g, np.concatenate([words, s[:2]]).mean(0), atol=1e-5)
    np.testing.assert_allclose(mixed.b, text_embeddings(BASELINES[:1])[0], atol=1e-5)
    deep = np.zeros((32, 32), np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    with pytest.raises(UsageError, match="deep.png has more than 8 bits"):
        clip_reward.load_image(tmp_path / "deep.png")
    (tmp_path / "text.png").write_text("not a picture")
    for path in (tmp_path / "text.png", tmp_path / "none.png", tmp_path):
        with pytest.raises(UsageError, match=f"^{path} cannot be read as a picture: .+"):
            RewardArgs(target_image=(str(path),), clip_model=TINY).check_reward()


def test_a_picture_is_read_as_a_viewer_shows_it(frames, tmp_path, monkeypatch):
    picture = frames[0, :, :48]
    seen = Image.fromarray(picture)
    seen.save(tmp_path / "plain.png")
    clear = np.dstack([picture, np.full(picture.shape[:2], 255, np.uint8)])
    clear[:20, :, 3] = 0  # whatever colours are hidden there
    Image.fromarray(clear).save(tmp_path / "clear.png")
    orientation = Image.Exif()
    orientation[0x0112] = 6  # taken by a camera that lay on its side
    lying = seen.transpose(Image.Transpose.ROTATE_90)
    lying.save(tmp_path / "lying.png", exif=orientation)
    on_white = picture.copy()
    on_white[:20] = 255
    expected = {"plain": picture, "clear": on_white, "lying": picture}
    for name, pixels in expected.items():
        np.testing.assert_array_equal(clip_reward.load_image(tmp_path / f"{name}.png"), pixels)
    monkeypatch.chdir(tmp_path)
    args = RewardArgs(target_image=("plain.png",), clip_model=TINY)
    monkeypatch.chdir("/")
    args.check_reward()


@pytest.mark.parametrize("kind", ["iTXt", "zTXt", "iCCP", "eXIf", "JPEG"])
def test_a_picture_with_megabytes_of_metadata_is_read(kind, tmp_path):
    path, red = tmp_path / "goal.png", Image.new("RGB", (8, 6), "red")
    info, many = PngImagePlugin.PngInfo(), 3 * 2**20
    if kind == "iTXt":
        info.add_itxt("XML:com.adobe.xmp", "x" * many, zip=True)
    elif kind == "zTXt":
        info.add_text("Comment", "x" * many, zip=True)
    red.save(path, pnginfo=info, **{"icc_profile": bytes(many)} if kind == "iCCP" else {})
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "x" * (many if kind == "eXIf" else 60_000)
    if kind == "eXIf":
        red.save(path, exif=exif)
    elif kind == "JPEG":
        path = tmp_path / "goal.jpg"
        red.save(path, exif=exif, icc_profile=bytes(many), quality=100)
    pixels = clip_reward.load_image(path)
    assert pixels.shape == ((8, 6, 3) if kind in ("eXIf", "JPEG") else (6, 8, 3))
    assert np.abs(pixels - [255.0, 0, 0]).max() <= 2


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "YCbCr"])
def test_a_picture_of_any_mode_is_read(frames, mode, tmp_path):
    picture = Image.fromarray(frames[0]).convert(mode)
    path = tmp_path / ("goal.jpg" if mode in ("CMYK", "YCbCr") else "goal.png")
    picture.save(path, **{"quality": 100, "subsampling": 0} if path.suffix == ".jpg" else {})
    difference = clip_reward.load_image(path) - np.array(picture.convert("RGB"), np.float64)
    assert np.abs(difference).mean() < 2


def test_clear_colours_are_white_and_of_an_animation_the_first_picture_counts(tmp_path):
    palette = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8), "P")
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.save(tmp_path / "clear.png", transparency=1)
    pixels = clip_reward.load_image(tmp_path / "clear.png")
    assert pixels.tolist() == [[[255, 0, 0], [255] * 3], [[255] * 3, [255, 0, 0]]]
    first, second = (Image.new("RGB", (5, 4), colour) for colour in ("red", "blue"))
    first.save(tmp_path / "two.gif", save_all=True, append_images=[second])
    assert (clip_reward.load_image(tmp_path / "two.gif") == [255, 0, 0]).all()


def test_a_picture_that_cannot_be_read_is_one_line(tmp_path):
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
    for name in ("a.png", "a.jpg", "a.gif", "a.webp", "a.bmp"):
        noise.save(tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    Image.new("1", (15_000, 15_000)).save(tmp_path / "bomb.png")
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "x" * 70 * 2**20, zip=True)
    noise.save(tmp_path / "text.png", pnginfo=info)
    for path in tmp_path.iterdir():
        with pytest.raises(UsageError, match=f"^{path} cannot be read as a picture: .+") as error:
            clip_reward.load_image(path)
        assert "\n" not in str(error.value)


def test_a_second_reward_of_the_same_clip_and_workers_without_words(tiny, frames):
    kept = set(tiny.model.state_dict())
    first, second = CLIPReward(tiny, TARGETS[:1]), CLIPReward(tiny, BASELINES[:1], alpha=0.0)
    embeddings = torch.from_numpy(text_embeddings([TARGETS[0], BASELINES[0]])).float()
    s = first.embed_images(frames)
    for reward, embedding in zip((first, second), embeddings):
        torch.testing.assert_close(reward(frames), s @ embedding, atol=1e-5, rtol=0)
    assert set(tiny.model.state_dict()) == kept
    args = RewardArgs(target_prompt=TARGETS[:1], clip_model=TINY)
    worker = clip_reward.make_clip_reward(args, "cpu")
    torch.testing.assert_close(worker(frames), first(frames), atol=0, rtol=0)
    for part in ("transformer", "token_embedding"):
        assert any(name.startswith(part) for name in kept)
        assert not any(name.startswith(part) for name in worker.model.state_dict())


@pytest.mark.parametrize(
    "targets, baselines, alpha, message",
    [
        ([], BASELINES, 0.0, "target prompt"),
        (TARGETS, (), 0.5, "baseline"),
        (TARGETS, (" ",), 0.5, "baseline"),
        (TARGETS, TARGETS, 0.5, "same to the model"),
        (["a robot &amp; a car"], ["a robot & a car"], 0.5, "same to the model"),
        (["a robot " * 80], (), 0.0, "^the prompt 'a robot .*' *.. is too long: .*end"),
    ],
)
def test_bad_prompts(tiny, targets, baselines, alpha, message):
    with pytest.raises(UsageError, match=message):
        CLIPReward(tiny, targets, baselines, alpha)


WORDS = ["<pad>", "</s>", "<unk>", "<s>", *"abcdefghijklmnopqrstuvwxyz", "robot"]


def save_tokenizer(folder, template="$A </s>", **settings):
    """Write a Hugging Face tokenizer that knows WORDS."""
    numbers = {word: number for number, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [(word, numbers[word]) for word in ("<s>", "</s>")]
    processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    made.post_processor = processor
    settings = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"} | settings
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **settings).save_pretrained(folder)


TOKENIZERS = {  # name: what `save_tokenizer` gets, how many tokens it adds
    "pads with the end, as SigLIP's": ({"pad_token": "</s>"}, 1),
    "begins and ends, as RoBERTa's": ({"template": "<s> $A </s>"}, 2),
    "pads at the left": ({"padding_side": "left"}, 1),
    "adds nothing": ({"template": "$A"}, 0),
}


@pytest.mark.parametrize("kind", ["tiny_clip", "ViT-B-32", *TOKENIZERS])
def test_a_prompt_is_too_long_exactly_if_its_end_is_cut_off(kind, tmp_path):
    if kind in TOKENIZERS:
        settings, added = TOKENIZERS[kind]
        save_tokenizer(tmp_path, **settings)
        tokenizer = HFTokenizer(tmp_path, context_length=16)
        prompts = {f"{word} " * n: n + added for word in ("robot", "机器", "🤖") for n in range(30)}
    else:
        tokenizer = open_clip.get_tokenizer(TINY if kind == "tiny_clip" else kind)
        prompts = ["🤖", "→", "???", "a robot 🤖 →!", "робот", "a", "x" * 60, "机器", "&amp;", ""]
        prompts += [
            sign * n for sign in ("🤖", "a ", "! ", "!", "机", "robot, ") for n in range(90)
        ]
        prompts = {prompt: len(tokenizer.encode(prompt)) + 2 for prompt in prompts}
    context = tokenizer([""]).shape[1]
    assert {context, context + 1} <= set(prompts.values()), "both sides of the limit are tried"
    for prompt, tokens in prompts.items():
        try:
            clip_reward.check_lengths(tokenizer, [prompt])
            assert tokens <= context, prompt
        except UsageError as error:
            assert tokens > context and "too long" in str(error), prompt


# ------------------------------------------------------------------------------ preprocessing


@pytest.mark.parametrize("height, width", [(480, 480), (479, 301), (120, 333), (64, 64)])
@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("size", [(224, 320), 64])
def test_preprocessing_is_open_clips_own(size, mode, height, width):
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    picture = coarse.resize((width, height), Image.Resampling.BILINEAR)
    for interpolation in ("bicubic", "bilinear"):
        config = dict(interpolation=interpolation, resize_mode=mode, fill_color=255)
        config |= dict(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
        theirs = open_clip.image_transform(size, is_train=False, **config)(picture)
        ours = clip_reward.Preprocess(config | {"size": size})
        (got,) = ours(torch.from_numpy(np.array(picture))[None])
        assert got.shape == theirs.shape and got.dtype == torch.float32
        # two steps of 255: PIL and torchvision round each in its own way, after either axis
        assert (got - theirs).abs().max() <= 2.01 / 255 / 0.2
        assert (got - theirs).abs().mean() <= 0.01


@pytest.mark.parametrize("kind", ["tiny", "rn50"])
def test_a_loaded_model_has_its_own_preprocessing(frames, kind, request):
    clip = request.getfixturevalue(kind)
    clip, theirs = clip if kind == "rn50" else (clip, clip.model)
    config = open_clip.get_model_preprocess_cfg(theirs)
    config = {key: config[key] for key in ("mean", "std", "interpolation", "resize_mode")}
    transform = open_clip.image_transform(theirs.visual.image_size, is_train=False, **config)
    wide = [Image.fromarray(frame).resize((600, 400)) for frame in frames[:2]]
    expected = torch.stack(list(map(transform, wide)))
    ours = clip.preprocess(torch.from_numpy(np.stack(wide)))
    assert ours.shape == expected.shape and (ours - expected).abs().mean() <= 0.01
    with torch.no_grad():
        a, b = clip.model.encode_image(ours), clip.model.encode_image(expected)
    assert torch.nn.functional.cosine_similarity(a, b).min() >= 0.999


# ------------------------------------------------------------------------------ loading


@pytest.mark.parametrize("module", ["clip_reward", "sac_clip_humanoid", "dqn_clip_classic"])
def test_importing_bounds_the_spinning_of_threads_before_torch(module):
    script = f"""
        import os, sys
        class Finder:
            def find_spec(name, path, target=None):
                if name == "torch" and "GOMP_SPINCOUNT" not in os.environ:
                    sys.exit("too late")
        sys.meta_path.insert(0, Finder)
        import {module}
        print(os.environ["GOMP_SPINCOUNT"], "torch" in sys.modules)
    """
    given = {"GOMP_SPINCOUNT": "7"} if module == "dqn_clip_classic" else {}
    printed = helpers.run("-c", textwrap.dedent(script), **given).stdout
    assert printed.split() == [given.get("GOMP_SPINCOUNT", "1000"), "True"]


@pytest.mark.parametrize(
    "name, hints",
    [
        ("ViT-B-31/openai", ["--clip-model ViT-B-31/openai", "ViT-B-32"]),
        ("ViT-B-32/openia", ["ViT-B-32/openai"]),
        ("ViT-B-32", ["ARCH/TAG"]),
        ("tiny-clip", ["the nearest: tiny_clip"]),
        ("local-dir:/nowhere", ["/nowhere needs open_clip_config.json and"]),
    ],
)
def test_unknown_models_name_the_nearest(name, hints):
    for check in clip_reward.resolve, clip_reward.ensure_downloaded, load_clip:
        with pytest.raises(UsageError) as error:
            check(name)
        assert all(hint in str(error.value) for hint in hints)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["ViT-B-32/laion2b_s34b_b79k", "hf-hub:laion/nothing"])
def test_missing_weights_name_the_offline_way(name, monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for check in clip_reward.ensure_downloaded, load_clip:
        with pytest.raises(UsageError, match=f"^cannot get the weights of {name}: .*tiny_clip"):
            check(name)


@pytest.mark.parametrize("damage", ["dangling", "missing", "cut", "config", "fits not"])
def test_a_damaged_folder_is_one_line(damage, tmp_path):
    names = "open_clip_config.json", "open_clip_model.safetensors"
    for name in names:
        shutil.copy(ROOT / "tiny_clip" / name, tmp_path)
    config, weights = (tmp_path / name for name in names)
    if damage == "dangling":
        weights.unlink()
        weights.symlink_to(tmp_path / "gone")
    elif damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif damage == "config":
        config.write_text(config.read_text()[:100])
    else:
        values = json.loads(config.read_text())
        values["model_cfg"]["embed_dim"] += 1
        config.write_text(json.dumps(values))
    with pytest.raises(UsageError, match=rf"^--clip-model local-dir:{tmp_path}\b.+") as error:
        load_clip(f"local-dir:{tmp_path}")
    assert "\n" not in str(error.value)


def model_folder(folder, weights=None, config=None, file="open_clip_model.safetensors"):
    """Write a folder like tiny_clip with other weights, another configuration, other files."""
    folder.mkdir(exist_ok=True)
    values = config or json.loads((ROOT / "tiny_clip/open_clip_config.json").read_text())
    (folder / "open_clip_config.json").write_text(json.dumps(values))
    weights = tiny_weights() if weights is None else weights
    if file.endswith(".safetensors"):
        safetensors.torch.save_file(weights, folder / file)
    else:
        torch.save(weights, folder / file)
    return f"local-dir:{folder}"


def tiny_weights():
    return safetensors.torch.load_file(ROOT / "tiny_clip/open_clip_model.safetensors")


def trained(prefix="module.", **others):
    """What open_clip's training saves, from several GPUs."""
    weights = {prefix + name: weight for name, weight in tiny_weights().items()}
    return {"epoch": 5, "name": "mine", "state_dict": weights, "optimizer": {"lr": 0.1}} | others


def refused(name):
    """-> why a model cannot be loaded, which is one line without ANSI codes."""
    with pytest.raises(UsageError) as error:
        load_clip(name)
    assert str(error.value).isprintable()
    return str(error.value)


@pytest.mark.parametrize(
    "file, prefix",
    [
        *[("epoch_5.pt", "module."), ("epoch_latest.pt", ""), ("mine.pth", "module.")],
        *[("mine.bin", ""), ("mine.safetensors", None), ("model.safetensors", None)],
    ],
)
def test_a_folder_s_only_file_of_weights_is_loaded_by_any_name(
    tiny, file, prefix, tmp_path, caplog
):
    name = model_folder(tmp_path, None if prefix is None else trained(prefix), file=file)
    (tmp_path / f"._{file}").touch()  # macOS leaves such files
    RewardArgs(target_prompt=("words",), clip_model=name).check_reward()
    ours, theirs = load_clip(name).model.state_dict(), tiny.model.state_dict()
    assert ours.keys() == theirs.keys() and not caplog.records
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_of_several_files_the_one_that_open_clip_prefers_or_none(tiny, tmp_path):
    for epoch in range(100):
        (tmp_path / f"epoch_{epoch}.pt").write_bytes(b"")
    name = model_folder(tmp_path, {"state_dict": {}}, file="epoch_5.pt")
    said = refused(name)
    assert "several files of weights" in said and "epoch_0.pt, epoch_1.pt, " in said
    assert len(said) < 400
    with pytest.raises(UsageError, match="several files of weights"):
        RewardArgs(target_prompt=("words",), clip_model=name).check_reward()
    model_folder(tmp_path, {}, file="pytorch_model.bin")
    model_folder(tmp_path, {}, file="another.safetensors")
    model_folder(tmp_path, trained(), file="open_clip_pytorch_model.bin")
    folder = tmp_path / "open_clip_pytorch_model.bin"
    assert open_clip.factory._find_checkpoint_in_dir(tmp_path) == str(folder)
    ours, theirs = load_clip(name).model.state_dict(), tiny.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def without(*names):
    return {name: weight for name, weight in tiny_weights().items() if name not in names}


def test_weights_that_do_not_fit_are_named(tmp_path):
    wide = json.loads((ROOT / "tiny_clip/open_clip_config.json").read_text())
    wide["model_cfg"]["embed_dim"] = 32
    said = refused(model_folder(tmp_path / "wide", config=wide))
    assert "size mismatch for text_projection: " in said and "[64, 64]" in said
    said = refused(model_folder(tmp_path / "missing", without("logit_scale")))
    assert said.endswith('Missing key(s) in state_dict: "logit_scale".')
    said = refused(model_folder(tmp_path / "more", tiny_weights() | {"extra": torch.ones(1)}))
    assert said.endswith('Unexpected key(s) in state_dict: "extra".')
    other = {f"model.{name}": weight for name, weight in tiny_weights().items()}
    other |= {"text_projection": torch.ones(3, 3), "logit_scale": torch.ones(())}
    said = refused(model_folder(tmp_path / "other", other, file="epoch_1.pt"))
    assert "Missing key(s) in state_dict: " in said and "Unexpected key(s) in state_dict: " in said
    assert '"positional_embedding", ' in said and '"model.' in said
    assert "size mismatch for text_projection: " in said and len(said) < 500


@pytest.mark.parametrize("file", ["epoch_5.pt", "open_clip_pytorch_model.bin"])
def test_a_checkpoint_with_its_flags_inside_says_how_to_keep_its_weights(tiny, file, tmp_path):
    name = model_folder(tmp_path, trained(args=argparse.Namespace(lr=1)), file=file)
    said = refused(name)
    assert f"{tmp_path / file} holds argparse.Namespace" in said and "trust" in said
    code = said[said.index('python -c "') :].split('"')[1]
    subprocess.run([sys.executable, "-c", code], check=True)
    ours, theirs = load_clip(name).model.state_dict(), tiny.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("content", [b"", b"not weights", b"<html>404</html>" * 99, [1, 2], {}])
def test_a_file_that_holds_no_weights_is_one_line(content, tmp_path):
    name = model_folder(tmp_path, content, file="epoch_5.pt")
    if isinstance(content, bytes):
        (tmp_path / "epoch_5.pt").write_bytes(content)
    said = refused(name)
    assert said.startswith(f"--clip-model {name} cannot be loaded: ") and len(said) < 500
    assert "two options" not in said, "torch's advice is not the cause"


def test_a_tokenizer_beside_the_weights_is_used_and_what_it_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = json.loads((ROOT / "tiny_clip/open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "timm/ViT-B-16-SigLIP"
    name = model_folder(tmp_path, config=config)
    both = "tokenizer_config.json", "tokenizer.json"
    assert f"{tmp_path} needs {' and '.join(both)} of timm/ViT-B-16-SigLIP" in refused(name)
    save_tokenizer(tmp_path)
    clip = load_clip(name)
    assert clip.tokenizer(["a robot"])[0].tolist() == [4, WORDS.index("robot"), 1, *[0] * 29]
    assert CLIPReward(clip, ["a robot"]).g.norm().item() == pytest.approx(1, abs=1e-5)
    for file in both:
        content = (tmp_path / file).read_text()
        (tmp_path / file).unlink()
        assert f"{tmp_path} needs {file} of timm/ViT-B-16-SigLIP" in refused(name)
        with pytest.raises(UsageError, match=file):
            RewardArgs(target_prompt=("words",), clip_model=name).check_reward()
        (tmp_path / file).write_text(content[: len(content) // 2])
        assert "cannot be loaded: " in refused(name)
        (tmp_path / file).write_text(content)
    save_tokenizer(tmp_path, pad_token=None)
    assert "padding token" in refused(name)


def test_an_error_in_one_line_keeps_its_cause():
    def both(error):
        lines = clip_reward.message_of(error), clip_reward.one_line(error)
        assert all(line.isprintable() and len(line) < 450 for line in lines)
        return lines

    assert both(ValueError("no such thing")) == ("no such thing", "ValueError: no such thing")
    assert both(KeyError("actor")) == ("KeyError: 'actor'",) * 2
    assert both(StopIteration()) == ("StopIteration",) * 2
    assert both(ValueError("\n")) == ("ValueError",) * 2
    assert both(ValueError("\x1b[1mone\x1b[0m\n\n  two"))[0] == "one two"
    try:
        exec("import os\nos.kill(")
    except SyntaxError as error:
        assert both(error)[0] == "'(' was never closed (<string>, line 2)"
    there = "Traceback (most recent call last):\n  File 'x', line 1\nValueError: the cause"
    assert both(RuntimeError(f"ray::f()\n{there}"))[0] == "ValueError: the cause"
    said, _ = both(OSError("a word " * 100))
    assert said.endswith("word ..") or said.endswith("a ..")
    assert both(OSError(f"no {'x' * 999}"))[0].startswith("no xxx")
    said, _ = both(RuntimeError("head:\n" + "\n".join(f"{k}: " + "word " * 99 for k in "abc")))
    assert all(f" {k}: word word" in said for k in "abc")


def test_a_folder_beside_the_scripts_and_a_precision_that_does_not_exist(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert clip_reward.resolve(TINY) == (f"local-dir:{ROOT}/tiny_clip", None)
    with pytest.raises(UsageError, match="must be auto, fp32, bf16, fp16, int8; not 'fp64'"):
        load_clip(TINY, precision="fp64")


def test_weights_of_openai_get_their_activation_and_only_the_image_tower_is_rounded():
    """open_clip only warns where the activation does not fit the weights."""
    clip, _ = load_without_weights("ViT-B-32/openai", device="meta", precision="bf16")  # as a GPU
    for tower in clip.model, clip.model.visual:
        activation = tower.transformer.resblocks[0].mlp.gelu
        assert activation(torch.tensor(1.0)).item() == pytest.approx(1 / (1 + np.exp(-1.702)))
    text = [p for name, p in clip.model.named_parameters() if not name.startswith("visual.")]
    assert {(p.device.type, p.dtype) for p in text} == {("cpu", torch.float32)}
    image = clip.model.visual.parameters()
    assert {(p.device.type, p.dtype) for p in image} == {("meta", torch.bfloat16)}


@pytest.mark.slow
def test_linear_layers_of_int8_by_torchao(frames, monkeypatch):
    exact = clip_reward.CLIPEmbedder(load_without_weights("ViT-B-32/openai")[0]).embed_images(
        frames
    )
    clip, _ = load_without_weights("ViT-B-32/openai", precision="int8")
    assert clip.dtype == torch.bfloat16
    layer = clip.model.visual.transformer.resblocks[0].mlp.c_fc
    assert layer.weight.qdata.dtype == torch.int8
    assert (clip_reward.CLIPEmbedder(clip).embed_images(frames) * exact).sum(-1).min() > 0.995
    with pytest.raises(UsageError, match="tiny_clip has no linear layer"):
        load_clip(TINY, precision="int8")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UsageError, match=r'pip install ".\[int8\]"'):
        load_clip(TINY, precision="int8")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["ViT-B-32", "RN50", "coca_base", "MobileCLIP-S1"])
def test_weights_that_stay_in_their_file_are_those_that_open_clip_reads(arch, tmp_path):
    """Also of other kinds of models, in half precision."""
    folder = tmp_path / arch
    script = ROOT / "benchmarks/random_clip.py"
    subprocess.run([sys.executable, script, arch, folder], check=True, capture_output=True)
    theirs = open_clip.create_model(f"local-dir:{folder}", require_pretrained=True).state_dict()
    with clip_reward.weights_in_their_file():
        ours = open_clip.create_model(f"local-dir:{folder}", require_pretrained=True)
    assert not any(weight.is_meta for weight in (*ours.parameters(), *ours.buffers()))
    ours = ours.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name].float(), weight.float()), name


LOADING = """
import sys
import torch
import clip_reward

def send(module, device, dtype=None, to=torch.nn.Module.to):
    for weight in module.parameters():  # as to a GPU: each is read and converted
        weight.to(dtype, copy=True).sum()
    return to(module, device, dtype)

def load(name, device):
    args = clip_reward.RewardArgs(target_prompt=("words",), clip_model=name)
    clip_reward.make_clip_reward(args, device)

load("local-dir:tiny_clip", "cpu")  # so that all is imported
torch.nn.Module.to = send
torch.set_num_threads(1)
print("ready", flush=True)
input()
load(sys.argv[1], "meta")
print("loaded", flush=True)
input()
"""


@pytest.mark.slow
def test_four_workers_share_a_model_s_file(tmp_path):
    """Their shares of the host's memory (PSS), pages of the mapped file included. "meta" takes the
    part of a GPU: what is there needs no memory here. Each one has held its text tower in float32,
    0.6 of the file, and malloc keeps a part of that."""
    script = ROOT / "benchmarks/random_clip.py"
    subprocess.run([sys.executable, script, "ViT-L-14", tmp_path], check=True, capture_output=True)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    command = [sys.executable, "-c", LOADING, f"local-dir:{tmp_path}"]
    workers = [subprocess.Popen(command, **pipes) for _ in range(4)]

    def memory():
        shares = [Path(f"/proc/{worker.pid}/smaps_rollup").read_text() for worker in workers]
        return sum(int(re.search(r"^Pss: +(\d+)", share, re.M)[1]) for share in shares) * 1024

    try:
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        before, peak = memory(), 0
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
        with concurrent.futures.ThreadPoolExecutor() as threads:
            loaded = [threads.submit(worker.stdout.readline) for worker in workers]
            while not all(line.done() for line in loaded):
                peak = max(peak, memory())
                time.sleep(0.02)
        assert [line.result() for line in loaded] == ["loaded\n"] * 4
    finally:
        for worker in workers:
            worker.kill()
    files = (peak - before) / (tmp_path / "open_clip_model.safetensors").stat().st_size
    print(f"four workers: {files:.2f} times the file")
    assert 0.3 < files < 4  # without sharing 6 or more; the peak is sampled


def test_other_weights_keep_their_activation(tiny):
    assert isinstance(tiny.model.transformer.resblocks[0].mlp.gelu, torch.nn.GELU)


@pytest.mark.parametrize("kind", ["tiny", "rn50"])
def test_folding_batch_norm_away_changes_no_embedding(kind, request):
    clip = request.getfixturevalue(kind)
    if kind == "rn50":
        clip, theirs = clip
    else:
        theirs = open_clip.create_model(TINY, require_pretrained=True).eval()
    assert any(isinstance(part, torch.nn.BatchNorm2d) for part in theirs.modules())
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in clip.model.modules())
    same_embeddings(clip.model, theirs)


def same_embeddings(ours, theirs):
    size = np.broadcast_to(theirs.visual.image_size, 2)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, expected = ours.encode_image(images, True), theirs.encode_image(images, True)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_mobileclip_s_branches_become_one_and_its_embeddings_stay():
    clip, theirs = load_without_weights("MobileCLIP2-S0/dfndr2b")
    ours, before = (len(list(x.visual.modules())) for x in (clip.model, theirs))
    assert ours < 0.6 * before
    same_embeddings(clip.model, theirs)


# ------------------------------------------------------------------------------ devices

LARGE = "ViT-bigG-14/laion2b_s39b_b160k"


@pytest.fixture
def downloads(monkeypatch):
    """What would have been downloaded, on a machine with the CUDA devices `downloads.cuda`."""

    class Names(list):
        cuda = []

    names = Names()
    monkeypatch.setattr(clip_reward, "ensure_downloaded", names.append)
    monkeypatch.setattr(clip_reward, "cuda_devices", lambda: names.cuda)
    return names


@pytest.mark.parametrize("name", [LARGE, "hf-hub:laion/CLIP-ViT-B-32-laion2B-s34B-b79K"])
def test_a_large_model_without_a_gpu_is_refused_before_any_download(name, downloads):
    args = RewardArgs(target_prompt=("words",), clip_model=name)
    with pytest.raises(UsageError) as error:
        args.check_reward()
    (line,) = str(error.value).splitlines()
    assert name in line and "GPU" in line and not downloads
    assert "--clip-model tiny_clip" in line and "--reward-devices cpu" in line
    with pytest.raises(UsageError, match="needs a CUDA GPU"):  # as an actor of Ray
        clip_reward.make_clip_reward(args, "cpu")
    downloads.cuda = ["cuda:0"]
    args.check_reward()
    assert downloads == [name]
    args.reward_devices = ("cuda:0", "cpu")  # it is asked for
    args.check_reward()
    RewardArgs(target_prompt=("words",), clip_model=TINY, reward_devices=("cpu",)).check_reward()
    assert downloads == [name, name, TINY]


def test_the_precision_of_the_image_tower_is_a_flag():
    args = RewardArgs(target_prompt=("words",), clip_model=TINY, clip_precision="bf16")
    reward = clip_reward.make_clip_reward(args, "cpu")
    assert {part.dtype for part in reward.model.visual.parameters()} == {torch.bfloat16}
    assert reward(np.zeros((2, 64, 64, 3), np.uint8)).isfinite().all()


def test_devices(downloads):
    def devices(*names):
        return RewardArgs(reward_devices=names).devices()

    assert devices() == ["cpu"] * min(4, os.cpu_count())
    assert devices("cpu", "cpu") == ["cpu", "cpu"]
    assert devices("ray") == ["ray"] and devices("ray:12") == ["ray:12"]
    downloads.cuda = ["cuda:0", "cuda:1"]
    assert devices() == ["cuda:0", "cuda:1"]
    assert devices("cuda:1", "cpu", "cuda:1") == ["cuda:1", "cpu", "cuda:1"]
    for names in ["cuda:2"], ["gpu"], ["ray", "cpu"], ["ray:0"], ["ray:2:0.5"], ["ray", "ray"]:
        with pytest.raises(UsageError, match=f"^--reward-devices .*{names[0]}.*ray:N") as error:
            devices(*names)
        assert "\n" not in str(error.value)


def test_cards_whose_driver_does_not_start_are_one_line(monkeypatch):
    def init():
        raise RuntimeError("CUDA driver version is insufficient\nfor the runtime")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    clip_reward.cuda_devices.cache_clear()
    said = "^GPUs found: 2, but .*driver version is insuf.*--reward-devices cpu"
    with pytest.raises(UsageError, match=said) as e:
        RewardArgs(target_prompt=("words",), clip_model=LARGE).check_reward()
    assert "\n" not in str(e.value)
    needed = f"torch {torch.__version__} needs a driver for CUDA 13: update the driver"
    assert needed in str(e.value)
    RewardArgs(target_prompt=("words",), clip_model=TINY, reward_devices=("cpu",)).check_reward()
    clip_reward.cuda_devices.cache_clear()


@pytest.mark.parametrize(
    "card, built, fits",
    [
        ((9, 0), "sm_80 sm_90", True),
        ((8, 9), "sm_75 sm_80", True),  # code for 8.0 runs on 8.9
        ((6, 1), "sm_75 sm_80 compute_80", False),  # older than all
        ((8, 0), "sm_75 sm_86", False),
        ((12, 0), "sm_80 sm_90a", False),  # newer than all, without PTX
        ((12, 1), "sm_90 compute_90", True),
        ((10, 3), "sm_100", True),
        ((9, 0), "", True),  # not known
    ],
)
def test_a_card_that_torch_was_not_built_for_is_named_before_any_download(
    card, built, fits, monkeypatch
):
    there = {"device_count": 1, "init": None, "get_arch_list": built.split()}
    there |= {"get_device_capability": card, "get_device_name": "GT 7"}
    for name, value in there.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(clip_reward, "ensure_downloaded", (loaded := []).append)
    clip_reward.cuda_devices.cache_clear()
    args = RewardArgs(target_prompt=("words",), clip_model=LARGE)
    try:
        if fits:
            args.check_reward()
        else:
            number = f"^GT 7 is sm_{card[0]}{card[1]}, but torch {re.escape(torch.__version__)}"
            with pytest.raises(
                UsageError, match=f"{number} is built for sm_.*CUDA_VISIBLE_DEVICES$"
            ):
                args.check_reward()
    finally:
        clip_reward.cuda_devices.cache_clear()
    assert loaded == [LARGE] * fits


# ------------------------------------------------------------------------------ the scorer


def test_a_scorer_draws_and_scores():
    scorer = Scorer(PaintRenderer, MeanReward)
    states = np.array([[3.0], [200.0], [7.0]])
    rewards, render_s, clip_s = scorer.score(states)
    assert rewards.tolist() == [3, 200, 7] and rewards.dtype == np.float32
    assert render_s > 0 and clip_s > 0
    assert scorer.score(states[:0])[0].shape == (0,)
    assert scorer.render(states).shape == (3, 4, 4, 3)
    assert scorer.render(states, size=9).shape == (3, 9, 9, 3)
    scorer.close()
    frames = np.full((2, 6, 7, 3), 5, np.uint8)
    assert Scorer(None, MeanReward).score(frames)[0].tolist() == [5, 5]
    assert Scorer(None, lambda device: lambda frames: [5, 6]).score(frames)[0].tolist() == [5, 6]
    make_reward = functools.partial(MeanReward, error=torch.OutOfMemoryError())
    said = "^cpu has too little memory for .* at once;.*--clip-batch-size$"
    with pytest.raises(RunError, match=said):
        Scorer(PaintRenderer, make_reward).score(states)


@pytest.mark.parametrize("wrong", ["number", "tensor", "one", "few"])
def test_rewards_of_another_shape_are_refused(wrong):
    made = {
        "number": 18.0,
        "tensor": torch.tensor(18.0),
        "one": torch.ones(1),
        "few": torch.ones(2),
    }
    scorer = Scorer(PaintRenderer, lambda device: lambda frames: made[wrong])
    with pytest.raises(RunError, match=r"^the reward module returned \[.*\] for 3 frames; it must"):
        scorer.score(np.zeros((3, 1)))


def test_several_views_are_drawn_side_by_side():
    args = sac.Args(camera_azimuth=(180.0, 90.0))
    scorer = Scorer(functools.partial(sac.make_renderer, args), None)
    states = helpers.humanoid_states(2)
    both = scorer.render(states, size=32)
    scorer.close()
    for view, azimuth in enumerate(args.camera_azimuth):
        args.camera_azimuth = (azimuth,)
        renderer = sac.make_renderer(args, size=32)
        np.testing.assert_array_equal(both[:, :, 32 * view :][:, :, :32], renderer.render(states))
        renderer.close()


@pytest.mark.parametrize("factor, dtype", [(1, torch.float16), (1e6, torch.bfloat16)])
def test_a_tower_that_overflows_in_half_precision_gets_bfloat16(
    factor, dtype, tmp_path, monkeypatch, capsys
):
    """The CPU plays the GPU. The second model's first layer gives numbers beyond 65504."""
    shutil.copytree(ROOT / "tiny_clip", tmp_path / "model")
    weights = safetensors.torch.load_file(file := tmp_path / "model/open_clip_model.safetensors")
    weights["visual.bn1.weight"] = factor * weights["visual.bn1.weight"].float()
    safetensors.torch.save_file(weights, file)
    monkeypatch.setitem(clip_reward.AUTO, "cpu", "fp16")
    clip = load_clip(name := f"local-dir:{tmp_path}/model")
    assert clip.dtype == {weight.dtype for weight in clip.model.visual.parameters()}.pop() == dtype
    said = f"{name} overflows in fp16: its image tower uses bf16\n"
    assert capsys.readouterr().out == (said if factor > 1 else "")


def test_batches_are_full_whatever_the_number_of_views(tiny, frames, monkeypatch):
    reward, sizes = CLIPReward(tiny, TARGETS), []
    whole = reward(views := np.resize(frames, (7, 3, *frames.shape[1:])))
    encode = tiny.model.encode_image
    monkeypatch.setattr(clip_reward, "BATCH", 8)
    monkeypatch.setattr(tiny.model, "encode_image", lambda x: (sizes.append(len(x)), encode(x))[1])
    torch.testing.assert_close(reward(views), whole, atol=1e-5, rtol=0)
    assert sizes == [8, 8, 5]
