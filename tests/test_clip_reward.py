"""The reward's numbers against independent computations; the pool's processes really killed."""

import functools
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time

import helpers
import numpy as np
import open_clip
import pytest
import torch
from helpers import ROOT, MeanReward, PaintRenderer, wait_until
from PIL import Image

import clip_reward
import sac_clip_humanoid as sac
from clip_reward import (
    CLIPReward,
    NotFiniteError,
    RewardArgs,
    RewardPool,
    RewardWorkerError,
    UsageError,
    load_clip,
)
from training.flags import from_flags

TINY = helpers.TINY
TARGETS = [helpers.KNEELING, "a robot on its knees"]
BASELINES = ["a humanoid robot", "a robot"]


@pytest.fixture(scope="module")
def tiny():
    return load_clip(TINY)


@pytest.fixture(scope="module")
def rn50():
    return load_clip("RN50/random:openai")


@pytest.fixture(scope="module")
def frames():
    """[6, 120, 120, 3] uint8: pictures of a falling humanoid."""
    make_renderer = functools.partial(sac.make_renderer, sac.Args(), 120)
    with RewardPool(make_renderer, None, []) as pool:
        return pool.render(helpers.humanoid_states(60)[::10])


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


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_several_views_of_a_state_are_averaged_or_the_worst_counts(tiny, frames, alpha):
    views = frames[:6].reshape(3, 2, *frames.shape[1:])
    for name, reduce in ("mean", np.mean), ("min", np.min):
        reward = CLIPReward(tiny, TARGETS, BASELINES, alpha, view_reduction=name)
        each = np.stack([reward(views[:, v]).numpy() for v in range(2)], 1)
        assert np.abs(each[:, 0] - each[:, 1]).max() > 1e-3
        np.testing.assert_allclose(reward(views).numpy(), reduce(each, 1), atol=1e-6)
    assert reward.embed_images(views).shape[:2] == (3, 2)


def test_pictures_as_goals_count_as_sentences_do(tiny, frames, tmp_path):
    paths = [str(tmp_path / f"{n}.png") for n in range(3)]
    for path, frame in zip(paths, frames):
        Image.fromarray(frame).save(path)
    words, s = text_embeddings(TARGETS), CLIPReward(tiny, TARGETS).embed_images(frames)
    alone = CLIPReward(tiny, target_images=paths[:1])
    np.testing.assert_allclose(alone(frames), s @ s[0], atol=1e-5)
    assert alone(frames[:1]).item() == pytest.approx(1, abs=1e-5)
    mixed = CLIPReward(tiny, TARGETS, BASELINES[:1], 0.5, paths[:2], paths[2:])
    g = np.concatenate([words, s[:2]]).mean(0)
    b = np.concatenate([text_embeddings(BASELINES[:1]), s[2:3]]).mean(0)
    np.testing.assert_allclose(mixed.g, g, atol=1e-5)
    np.testing.assert_allclose(mixed.b, b, atol=1e-5)
    deep = np.zeros((32, 32), np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    with pytest.raises(UsageError, match="deep.png has more than 8 bits"):
        clip_reward.load_image(tmp_path / "deep.png")
    (tmp_path / "text.png").write_text("not a picture")
    for path in (tmp_path / "text.png", tmp_path / "none.png", tmp_path):
        with pytest.raises(UsageError, match=f"{path} is no picture"):
            RewardArgs(target_image=(str(path),), clip_model=TINY).check(1)


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
    args.check(1)


def test_a_second_reward_of_the_same_clip_and_workers_without_words(tiny, frames):
    kept = set(tiny.model.state_dict())
    first, second = CLIPReward(tiny, TARGETS[:1]), CLIPReward(tiny, BASELINES[:1], alpha=0.0)
    embeddings = torch.from_numpy(text_embeddings([TARGETS[0], BASELINES[0]])).float()
    s = first.embed_images(frames)
    for reward, embedding in zip((first, second), embeddings):
        torch.testing.assert_close(reward(frames), s @ embedding, atol=1e-5, rtol=0)
    assert set(tiny.model.state_dict()) == kept
    args = RewardArgs(target_prompt=TARGETS[:1], clip_model=TINY)
    worker = clip_reward.make_clip_reward("cpu", args)
    torch.testing.assert_close(worker(frames), first(frames), atol=0, rtol=0)
    for part in ("transformer", "token_embedding"):
        assert any(name.startswith(part) for name in kept)
        assert not any(name.startswith(part) for name in worker.model.state_dict())


@pytest.mark.parametrize(
    "targets, baselines, alpha, message",
    [
        ([], BASELINES, 0.0, "target prompt"),
        (TARGETS, (), 0.5, "baseline"),
        (TARGETS, BASELINES, 1.5, "alpha"),
        (TARGETS, BASELINES, -0.1, "alpha"),
        (TARGETS, TARGETS, 0.5, "same"),
    ],
)
def test_bad_prompts(tiny, targets, baselines, alpha, message):
    with pytest.raises(UsageError, match=message):
        CLIPReward(tiny, targets, baselines, alpha)


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
    config = open_clip.get_model_preprocess_cfg(clip.model)
    config = {key: config[key] for key in ("mean", "std", "interpolation", "resize_mode")}
    transform = open_clip.image_transform(clip.model.visual.image_size, is_train=False, **config)
    wide = [Image.fromarray(frame).resize((600, 400)) for frame in frames[:2]]
    theirs = torch.stack(list(map(transform, wide)))
    ours = clip.preprocess(torch.from_numpy(np.stack(wide)))
    assert ours.shape == theirs.shape and (ours - theirs).abs().mean() <= 0.01
    with torch.no_grad():
        a, b = clip.model.encode_image(ours), clip.model.encode_image(theirs)
    assert torch.nn.functional.cosine_similarity(a, b).min() >= 0.999


# ------------------------------------------------------------------------------ loading


@pytest.mark.parametrize(
    "module", ["clip_reward", "sac_clip_humanoid", "dqn_clip_classic", "eval_epic"]
)
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
    for given, expected in ({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"):
        printed = helpers.run("-c", textwrap.dedent(script), **given).stdout
        assert printed.split() == [expected, "True"]


def test_random_weights_are_loud_and_the_same_everywhere(rn50, capsys):
    again = load_clip("RN50/random:openai").model.visual.state_dict()
    assert "RANDOM" in capsys.readouterr().err
    for key, value in rn50.model.visual.state_dict().items():
        assert torch.equal(value, again[key])


@pytest.mark.parametrize(
    "name, hints",
    [
        ("ViT-B-31/openai", ["ViT-B-32"]),
        ("ViT-B-32/openia", ["openai"]),
        ("ViT-B-32", ["ARCH/TAG"]),
        ("local-dir:/nowhere", ["/nowhere"]),
    ],
)
def test_unknown_models_name_the_nearest(name, hints):
    for check in (clip_reward.check_model, load_clip):
        with pytest.raises(UsageError) as error:
            check(name)
        assert all(hint in str(error.value) for hint in hints)
        assert "\n" not in str(error.value)


def test_missing_weights_name_the_offline_way(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="local-dir:tiny_clip"):
        clip_reward.check_model("ViT-B-32/laion2b_s34b_b79k", cache_dir=str(tmp_path))
    (tmp_path / "open_clip_config.json").write_text("{}")
    with pytest.raises(UsageError, match="no weights"):
        load_clip(f"local-dir:{tmp_path}")


def test_image_flops_of_a_known_model():
    # ViT-B-32: 12 layers of width 768 on 50 tokens, twice the multiply-adds, + patches + projection
    tokens, width = 50, 768
    layer = 2 * (12 * width**2 * tokens + 2 * tokens**2 * width)
    expected = 12 * layer + 2 * 49 * (32 * 32 * 3) * width + 2 * width * 512
    assert clip_reward.image_flops("ViT-B-32/openai") == pytest.approx(expected, rel=0.01)


def test_the_whole_cost_decides(capsys, monkeypatch):
    # a CPU of 100 GFLOP/s, on which ViT-L-14 (162 GFLOP) takes 1.6 s a frame
    measured = [2 * 2 * 1024**3 / 1e11]
    monkeypatch.setattr(clip_reward.timeit, "repeat", lambda *_, **__: measured)
    large, big = "ViT-L-14/laion2b_s32b_b82k", "ViT-bigG-14/laion2b_s39b_b160k"
    clip_reward.check_cost(large, ["cpu"], 1000)
    assert not capsys.readouterr().err, "27 minutes"
    clip_reward.check_cost(large, ["cpu"], 10_000)
    assert "1.6 s a frame, 4.5 hours for 10,000 frames" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"days for 10,000,000.*local-dir:tiny_clip.*--allow-slow"):
        clip_reward.check_cost(big, ["cpu", "cpu"], 10_000_000)
    clip_reward.check_cost(big, ["cpu"], 10_000_000, allow_slow=True)
    assert "days" in capsys.readouterr().err
    clip_reward.check_cost(big, ["cuda:0"], 10_000_000)
    clip_reward.check_cost(TINY, ["cpu"], 1_000_000)


def test_only_the_image_tower_goes_to_the_device():
    clip = load_clip("ViT-B-32/random", device="meta", precision="bf16")  # holds no numbers
    text = [p for name, p in clip.model.named_parameters() if not name.startswith("visual.")]
    assert {(p.device.type, p.dtype) for p in text} == {("cpu", torch.float32)}
    image = clip.model.visual.parameters()
    assert {(p.device.type, p.dtype) for p in image} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize(
    "name", ["ViT-B-32", "ViT-B-16-SigLIP2", "coca_ViT-B-32", "RN50", "EVA02-B-16"]
)
def test_attention_is_pytorch_s_own_operation(name):
    with torch.device("meta"):
        model = open_clip.create_model(name, load_weights=False, device="meta").eval()
    model.requires_grad_(False)
    size = model.visual.image_size
    size = (size, size) if isinstance(size, int) else size
    with torch.profiler.profile() as profile, torch.inference_mode():
        model.visual(torch.empty(1, 3, *size, device="meta"))
    counts = {event.key: event.count for event in profile.key_averages()}
    fused = ("aten::scaled_dot_product_attention", "aten::_native_multi_head_attention")
    layers = 1 if name == "RN50" else 12
    assert sum(counts.get(operation, 0) for operation in fused) >= layers, "in every layer"


@pytest.mark.parametrize("kind", ["tiny", "rn50"])
def test_folding_batch_norm_away_changes_no_embedding(kind, request):
    clip = request.getfixturevalue(kind)
    if kind == "rn50":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            theirs = open_clip.create_model("RN50-quickgelu", load_weights=False).eval()
    else:
        theirs = open_clip.create_model(TINY, require_pretrained=True).eval()
    assert any(isinstance(part, torch.nn.BatchNorm2d) for part in theirs.modules())
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in clip.model.modules())
    size = np.broadcast_to(theirs.visual.image_size, 2)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, expected = clip.model.encode_image(images, True), theirs.encode_image(images, True)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------------------ the pool


CUDA = [(["cuda:0", "cuda:0"], "states")] * torch.cuda.is_available()


def paint_pool(devices, batch_size=64, **options):
    make_reward = functools.partial(MeanReward, **options)
    return RewardPool(PaintRenderer, make_reward, devices, batch_size)


def paint_states(count, first=0):
    return np.arange(first, first + count, dtype=np.float64)[:, None] % 256


def test_rewards_are_the_same_to_the_last_bit_whoever_computes_them():
    args = RewardArgs(
        target_prompt=TARGETS, baseline_prompt=BASELINES, reward_alpha=0.3, clip_model=TINY
    )
    make_reward = functools.partial(clip_reward.make_clip_reward, args=args)
    seen = from_flags(sac.Args, {"render_size": 64})
    make_renderer = functools.partial(sac.make_renderer, seen)
    states = helpers.humanoid_states(90)
    states[::2, 0] += 5.0  # metres: where the floor is drawn must not depend on the picture before
    with RewardPool(make_renderer, make_reward, devices=[]) as local:
        expected = local.score(states)
        pictures = local.render(states[:2], size=100)
        assert pictures.shape == (2, 100, 100, 3)
    assert expected.dtype == np.float32 and expected.std() > 1e-4
    rewards = []
    for workers in (1, 2, 3):
        with RewardPool(make_renderer, make_reward, ["cpu"] * workers, 8) as pool:
            rewards.append(pool.score(states))
            assert pool.timings["render_s"] > 0 and pool.timings["clip_s"] > 0
            if workers == 2:
                assert len(pool.wait_ready().description) == 2
                np.testing.assert_array_equal(pool.render(states[:2], size=100), pictures)
                scored = pool.score(frames=pool.render(states[:11]))
                np.testing.assert_allclose(scored, expected[:11], atol=1e-5)
    np.testing.assert_allclose(rewards[0], expected, atol=1e-5)
    np.testing.assert_array_equal(rewards[0], rewards[1])
    np.testing.assert_array_equal(rewards[0], rewards[2])


def test_rewards_stream_while_the_episode_is_played(tmp_path):
    """Full chunks are with the workers, side by side, before anybody asks for their rewards."""
    with paint_pool(["cpu"] * 2, 4, folder=tmp_path, delay=2.0) as pool:
        pool.wait_ready()
        for first in range(0, 18, 3):  # four chunks, and two states that make none
            pool.put(states=paint_states(3, first))

        def begun():
            return [file.name.split("_") for file in tmp_path.iterdir()]

        assert wait_until(lambda: len({process for process, _ in begun()}) == 2)
        assert {state for _, state in begun()} <= {"0", "4", "8", "12"}
        np.testing.assert_array_equal(pool.take(), np.arange(18))
        assert len(begun()) == 5 and len(pool.take()) == 0


@pytest.mark.parametrize("devices", [[], ["cpu", "cpu"]])
def test_any_number_of_states_in_any_parts(devices):
    with paint_pool(devices, 5) as pool:
        for parts in ([], [0], [1], [4, 1], [5], [6], [3, 0, 13], [200], [1] * 11):
            starts = np.cumsum([0, *parts])
            for count, start in zip(parts, starts):
                batch = paint_states(count, start)
                pool.put(states=batch)
                batch[:] = 99  # what was put is the pool's: the caller may use the array again
            rewards = pool.take()
            assert rewards.dtype == np.float32
            np.testing.assert_array_equal(rewards, paint_states(starts[-1])[:, 0])
        frames = np.full((9, 6, 7, 3), 7, np.uint8)
        np.testing.assert_array_equal(pool.score(frames=frames), [7] * 9)
        assert pool.render(paint_states(6))[5].max() == 5
        assert pool.render(paint_states(6), size=8).shape == (6, 8, 8, 3)
        assert set(pool.wait_ready().description) == {"reward worker on cpu"}


def test_pool_refuses_wrong_arguments():
    with paint_pool([]) as pool:
        with pytest.raises(ValueError, match="either"):
            pool.put()
        with pytest.raises(ValueError, match="uint8"):
            pool.put(frames=np.zeros((2, 4, 4, 3)))
        pool.put(paint_states(1))
        with pytest.raises(ValueError, match="either"):
            pool.put(frames=np.zeros((2, 4, 4, 3), np.uint8))
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(paint_states(2))
    with pytest.raises(ValueError, match="batch_size is 0"):
        paint_pool([], 0)
    with RewardPool(PaintRenderer, None, []) as pool:
        assert pool.render(paint_states(2)).shape == (2, 4, 4, 3)
        with pytest.raises(ValueError, match="only render"):
            pool.score(paint_states(2))


def reward_that(**what):
    return functools.partial(MeanReward, **what)


def reward_without(error):
    return functools.partial(helpers.make_nothing, error=error)


@pytest.mark.parametrize(
    "make_reward, state, kind, message",
    [
        (MeanReward, -1, RewardWorkerError, r"helpers\.py.*cannot paint -1"),
        (reward_that(gain=float("nan")), 1, NotFiniteError, "scene 0.*is nan.*--clip-precision"),
        (
            *(reward_that(error=torch.OutOfMemoryError()), 1, RewardWorkerError),
            "cpu has no memory for so many frames.*--clip-batch-size",
        ),
        (reward_without(EOFError("truncated")), 1, RewardWorkerError, "truncated"),
        (reward_without(UsageError("no weights")), 1, UsageError, "^no weights$"),
    ],
)
def test_what_a_worker_raises_arrives(make_reward, state, kind, message):
    with RewardPool(PaintRenderer, make_reward, ["cpu"]) as pool:
        with pytest.raises(kind, match=f"(?s){message}"):
            pool.score([[3.0], [state]])
    assert helpers.gone([worker.process.pid for worker in pool._workers])


@pytest.mark.parametrize(
    "number, devices, kind",
    [
        (signal.SIGKILL, ["cpu"], "states"),
        (signal.SIGKILL, ["cpu", "cpu"], "frames"),
        (signal.SIGSTOP, ["cpu", "cpu"], "states"),
        (signal.SIGSTOP, ["cpu"], "frames"),
        *((number, *row) for row in CUDA for number in (signal.SIGKILL, signal.SIGSTOP)),
    ],
)
def test_a_lost_worker_is_replaced_and_changes_no_reward(number, devices, kind, tmp_path, capfd):
    """killed, or stopped for longer than worker_timeout; frames so big that its pipe gets full"""
    shape = (30, 1) if kind == "states" else (30, 300, 300, 3)
    values = np.random.default_rng(0).integers(256, size=shape)
    batch = {kind: values.astype(float if kind == "states" else np.uint8)}
    make_reward = functools.partial(MeanReward, delay=0.1, folder=tmp_path)
    with RewardPool(PaintRenderer, MeanReward, [], 2) as pool:
        expected = pool.score(**batch)
    with RewardPool(PaintRenderer, make_reward, devices, 2, worker_timeout=3) as pool:
        pool.wait_ready().put(**batch)
        assert wait_until(lambda: len(list(tmp_path.iterdir())) == len(devices))
        pid = pool._workers[0].process.pid
        os.kill(pid, number)
        assert np.array_equal(pool.take(), expected)
        assert pool.restarts == 1
        assert np.array_equal(pool.score(**batch), expected)
        assert pool.restarts == 1
        pids = [worker.process.pid for worker in pool._workers]
    assert wait_until(lambda: helpers.gone([pid, *pids]), 10)
    how = "was killed .out of memory.., exit code -9"
    if number == signal.SIGSTOP:
        how = "gave no answer for 3 s .--worker-timeout."
    warning = capfd.readouterr().err
    assert re.fullmatch(f"WARNING: reward-worker-0-{devices[0]} {how}; .*\n", warning)


def test_one_worker_may_be_lost_in_every_rollout_but_not_two_in_one():
    with paint_pool(["cpu", "cpu"], 2, delay=0.1) as pool:
        pool.wait_ready()
        for rollout in range(2):
            pool.put(paint_states(20))
            os.kill(pool._workers[rollout].process.pid, signal.SIGKILL)
            assert np.array_equal(pool.take(), np.arange(20) % 256)
            assert pool.restarts == rollout + 1
        pool.put(paint_states(40))
        for worker in pool._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(RewardWorkerError, match="killed.*-9"):
            pool.take()
        assert pool.restarts == 3


def test_a_worker_that_cannot_be_started_again_ends_the_pool(monkeypatch):
    with paint_pool(["cpu", "cpu"], 2, delay=0.2) as pool:
        pool.wait_ready()
        monkeypatch.setattr(pool._workers[0], "start", lambda: open("/dev/null/no process"))
        pool.put(paint_states(20))
        os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(RewardWorkerError, match="worker-0-cpu cannot be started: .*Not a dir"):
            pool.take()
        with pytest.raises(RuntimeError, match="closed"):
            pool.render(paint_states(2))


@pytest.mark.parametrize(
    "devices, ending, code", [(["cpu"], "raise SystemExit(3)", 3), ([], "", 0)]
)
def test_a_pool_left_open_does_not_hang_the_interpreter(devices, ending, code):
    script = f"""
        from helpers import PaintRenderer, MeanReward
        from clip_reward import RewardPool
        if __name__ == "__main__":
            pool = RewardPool(PaintRenderer, MeanReward, {devices})
            print(pool.score([[1.0]] * 4))
            {ending}
    """
    process = helpers.run("-c", textwrap.dedent(script), code=code)
    assert process.stdout == "[1. 1. 1. 1.]\n" and not process.stderr


@pytest.mark.parametrize("delay", [60, 1])
def test_no_worker_outlives_a_killed_parent(delay, tmp_path):
    script = f"""
        import functools, pathlib, time
        from helpers import PaintRenderer, MeanReward
        from clip_reward import RewardPool
        if __name__ == "__main__":
            folder = pathlib.Path({str(tmp_path)!r})
            make_reward = functools.partial(MeanReward, delay={delay}, folder=folder)
            pool = RewardPool(PaintRenderer, make_reward, ["cpu", "cpu"], 1).wait_ready()
            pool.put([[1.0], [2.0], [3.0], [4.0]])
            print("PIDS", *[worker.process.pid for worker in pool._workers], flush=True)
            pool.take()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        **{"stdout": subprocess.PIPE, "text": True, "env": helpers.environment()},
    )
    line = next(line for line in parent.stdout if line.startswith("PIDS"))
    workers = [int(pid) for pid in line.split()[1:]]
    everyone = helpers.descendants(parent.pid)
    assert len(workers) == 2 and set(workers) <= set(everyone)
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    if delay == 1:  # it dies with answers in its pipes that it has not read
        parent.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: helpers.gone(everyone), 2)


def test_what_cannot_be_loaded_or_told_apart_is_one_line(monkeypatch, tmp_path, capsys):
    with pytest.raises(UsageError, match="must be auto, fp32, bf16, fp16; not 'fp64'"):
        load_clip(TINY, precision="fp64")
    same = ["a robot &amp; a car"], ["a robot & a car"]  # to the tokenizer
    with pytest.raises(UsageError, match="the same to the model"):
        CLIPReward(load_clip(TINY), *same, alpha=0.5)
    for name in ("open_clip_config.json", "open_clip_model.safetensors"):
        shutil.copy(ROOT / "tiny_clip" / name, tmp_path)
    config = json.loads((tmp_path / "open_clip_config.json").read_text())
    config["model_cfg"]["embed_dim"] += 1
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="cannot be loaded: "):
        load_clip(f"local-dir:{tmp_path}")

    def no_count(name):
        raise RuntimeError("no such operation")

    monkeypatch.setattr(clip_reward, "image_flops", no_count)
    clip_reward.check_cost("RN50/random", ["cpu"], 10**9)
    assert "cost of RN50/random on this CPU unknown" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)  # local-dir:tiny_clip works from any directory
    clip_reward.check_model(TINY)


def test_what_a_ray_actor_does_needs_no_ray(monkeypatch):
    """The actor's class in this process: a chunk comes and goes as one string of bytes."""
    lowered, threads = [], torch.get_num_threads()
    monkeypatch.setattr(os, "nice", lowered.append)
    actor = clip_reward._Remote("CPU", PaintRenderer, MeanReward)
    try:
        assert actor.wait_ready() == f"reward worker on cpu, at {socket.gethostname()}"
        states = np.array([[3.0], [200.0]])
        rewards, *seconds = pickle.loads(actor.score(pickle.dumps(("states", states))))
        assert rewards.tolist() == [3.0, 200.0] and min(seconds) >= 0
        assert lowered == [10] and torch.get_num_threads() == 1
    finally:
        actor.scorer.close()
        torch.set_num_threads(threads)
