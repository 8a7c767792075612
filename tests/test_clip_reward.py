"""The reward's numbers against independent computations; the pool's processes really killed."""

import functools
import os
import signal
import subprocess
import sys
import textwrap

import helpers
import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

import clip_reward
from clip_reward import CLIPReward, RewardPool, RewardWorkerError, UsageError, load_clip

TINY = "local-dir:tiny_clip"
TARGETS = ["a humanoid robot kneeling", "a robot on its knees"]
BASELINES = ["a humanoid robot", "a robot"]


@pytest.fixture(scope="module")
def frames():
    """[6, 120, 120, 3] uint8: pictures of a falling humanoid."""
    import egl_render

    egl_render.setup_gl("cpu")
    renderer = helpers.make_humanoid_renderer(120)
    pictures = renderer.render(helpers.humanoid_states(60)[::10])
    renderer.close()
    return pictures


def text_embeddings(prompts):
    """[len, D] float64 unit-norm, straight from open_clip."""
    model = open_clip.create_model("local-dir:tiny_clip").eval()
    tokens = open_clip.get_tokenizer("local-dir:tiny_clip")(prompts)
    with torch.no_grad():
        embeddings = model.encode_text(tokens).double().numpy()
    return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)


# ------------------------------------------------------------------------------ the formula


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("targets, baselines", [(TARGETS[:1], BASELINES[:1]), (TARGETS, BASELINES)])
def test_reward_is_the_papers_formula(frames, alpha, targets, baselines):
    reward = CLIPReward(load_clip(TINY), targets, baselines, alpha)
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


def test_alpha_zero_is_the_cosine(frames):
    reward = CLIPReward(load_clip(TINY), TARGETS[:1], BASELINES, 0.0)
    s = reward.embed_images(torch.from_numpy(frames)).double().numpy()
    cosine = s @ text_embeddings(TARGETS[:1])[0]
    np.testing.assert_allclose(reward(torch.from_numpy(frames)).numpy(), cosine, atol=1e-5)


def test_alpha_zero_needs_no_baseline_and_one_does(frames):
    clip = load_clip(TINY)
    with pytest.raises(UsageError, match="baseline"):
        CLIPReward(clip, TARGETS, (), 0.5)
    assert CLIPReward(clip, TARGETS).alpha == 0.0


@pytest.mark.parametrize(
    "targets, baselines, alpha, message",
    [
        ([], BASELINES, 0.0, "target prompt"),
        (TARGETS, BASELINES, 1.5, "alpha"),
        (TARGETS, BASELINES, -0.1, "alpha"),
        (TARGETS, TARGETS, 0.5, "same"),
    ],
)
def test_bad_prompts(targets, baselines, alpha, message):
    with pytest.raises(UsageError, match=message):
        CLIPReward(load_clip(TINY), targets, baselines, alpha)


# ------------------------------------------------------------------------------ preprocessing

PREPROCESSED = [
    ("ViT-B-32/random:openai", "openai"),
    ("ViT-L-14/random:laion2b_s32b_b82k", "laion2b_s32b_b82k"),
    ("ViT-B-16-SigLIP2/random", "webli"),
    ("RN50/random:openai", "openai"),
    (TINY, None),
]


@pytest.mark.parametrize("name, tag", PREPROCESSED)
def test_preprocessing_is_open_clips_own(frames, name, tag):
    clip = load_clip(name)
    size = clip.model.visual.image_size
    config = open_clip.get_pretrained_cfg(name.partition("/")[0], tag) if tag else {}
    transform = open_clip.image_transform(
        size,
        is_train=False,
        mean=config.get("mean"),
        std=config.get("std"),
        resize_mode=config.get("resize_mode"),
        interpolation=config.get("interpolation"),
    )
    large = np.stack([np.asarray(Image.fromarray(f).resize((480, 480))) for f in frames[:3]])
    wide = np.stack([np.asarray(Image.fromarray(f).resize((600, 400))) for f in frames[:3]])
    for pictures in (large, wide, frames[:3]):
        ours = clip.preprocess(torch.from_numpy(pictures))
        theirs = torch.stack([transform(Image.fromarray(p)) for p in pictures])
        assert ours.shape == theirs.shape and ours.dtype == torch.float32
        assert (ours - theirs).abs().mean() <= 0.01
    with torch.no_grad():
        a = clip.model.encode_image(clip.preprocess(torch.from_numpy(large)))
        b = clip.model.encode_image(torch.stack([transform(Image.fromarray(p)) for p in large]))
    assert torch.nn.functional.cosine_similarity(a, b).min() >= 0.999


def test_longest_edge_is_fitted_and_padded():
    config = dict(size=32, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")
    pad = clip_reward.Preprocess(config | {"resize_mode": "longest", "fill_color": 255})
    image = pad(torch.zeros(1, 20, 40, 3, dtype=torch.uint8))
    assert image.shape == (1, 3, 32, 32)
    assert (image[0, :, :8] == 1).all() and (image[0, :, -8:] == 1).all()
    assert (image[0, :, 8:-8] == -1).all()


# ------------------------------------------------------------------------------ loading


def test_random_weights_are_loud_and_the_same_everywhere(capsys):
    first = load_clip("RN50/random").model.visual.state_dict()
    assert "RANDOM" in capsys.readouterr().err
    second = load_clip("RN50/random").model.visual.state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


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


def test_local_model_without_weights_is_an_error(tmp_path):
    (tmp_path / "open_clip_config.json").write_text("{}")
    with pytest.raises(UsageError, match="no weights"):
        load_clip(f"local-dir:{tmp_path}")


def test_image_flops_of_a_known_model():
    # ViT-B-32: 12 layers of width 768 on 50 tokens, twice the multiply-adds, + patches + projection
    tokens, width = 50, 768
    layer = 2 * (12 * width**2 * tokens + 2 * tokens**2 * width)
    expected = 12 * layer + 2 * 49 * (32 * 32 * 3) * width + 2 * width * 512
    assert clip_reward.image_flops("ViT-B-32/openai") == pytest.approx(expected, rel=0.01)


def test_cost_of_a_big_model_on_a_cpu_is_told(capsys):
    big = "ViT-bigG-14/laion2b_s39b_b160k"
    with pytest.raises(UsageError, match=r"s a frame.*days.*local-dir:tiny_clip.*--allow-slow"):
        clip_reward.check_cost(big, ["cpu"], 10_000_000)
    clip_reward.check_cost(big, ["cpu"], 10_000_000, allow_slow=True)
    assert "days" in capsys.readouterr().err
    clip_reward.check_cost(big, ["cuda:0"], 10_000_000)
    clip_reward.check_cost(TINY, ["cpu"], 1_000_000)


# ------------------------------------------------------------------------------ the pool


def paint_pool(devices, **options):
    make_reward = functools.partial(helpers.make_mean_reward, delay=options.pop("delay", 0.0))
    return RewardPool(helpers.make_paint_renderer, make_reward, devices, **options)


def paint_states(count):
    return np.arange(count, dtype=np.float64)[:, None] % 256


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_pool_equals_the_single_process(workers):
    make_renderer = functools.partial(helpers.make_humanoid_renderer, textured=True)
    make_reward = functools.partial(
        clip_reward.make_clip_reward,
        clip_model=TINY,
        target_prompts=TARGETS,
        baseline_prompts=BASELINES,
        alpha=0.3,
    )
    states = helpers.humanoid_states(101)
    with RewardPool(make_renderer, make_reward, devices=[]) as local:
        expected = local.score(states)
    assert expected.std() > 1e-4
    with RewardPool(make_renderer, make_reward, ["cpu"] * workers, batch_size=16) as pool:
        for count in (1, 7, 101):
            got = pool.score(states[:count])
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected[:count], atol=1e-5)
        assert pool.timings["render_s"] > 0 and pool.timings["clip_s"] > 0
        assert len(pool.description) == workers
        pictures = pool.render(states[:3])
        np.testing.assert_allclose(pool.score(frames=pictures), expected[:3], atol=1e-5)


def test_pool_takes_any_number_of_states_and_overlapping_jobs(monkeypatch):
    created = []  # names in /dev/shm, where other programs may have theirs

    class Recorded(clip_reward._SharedArray):
        def __init__(self, *args):
            super().__init__(*args)
            created.append(self.memory.name)

    monkeypatch.setattr(clip_reward, "_SharedArray", Recorded)
    with paint_pool(["cpu", "cpu"], batch_size=5) as pool:
        pool.wait_ready()
        pool.submit(paint_states(3))  # whose result nobody fetches
        jobs = [pool.submit(paint_states(count)) for count in (0, 1, 13, 200)]
        for job in reversed(jobs):
            rewards = job.result()
            np.testing.assert_array_equal(rewards, paint_states(len(rewards))[:, 0])
            assert job.done()
        assert [len(job.result()) for job in jobs] == [0, 1, 13, 200]
        frames = np.full((9, 4, 4, 3), 7, np.uint8)
        np.testing.assert_array_equal(pool.score(frames=frames), np.full(9, 7))
        assert pool.render(paint_states(6))[5].max() == 5
        assert set(os.listdir("/dev/shm")) & set(created)  # of the job nobody fetched
    assert len(created) == 14 and not set(os.listdir("/dev/shm")) & set(created)


def test_pool_uses_its_workers_side_by_side(tmp_path):
    make_reward = functools.partial(helpers.make_rendezvous_reward, folder=tmp_path, count=2)
    with RewardPool(helpers.make_paint_renderer, make_reward, ["cpu", "cpu"]) as pool:
        job = pool.submit(paint_states(6))
        assert not job.done()
        np.testing.assert_array_equal(job.result(), np.arange(6))


@pytest.mark.parametrize("kind", ["states", "frames"])
@pytest.mark.parametrize("pad", [False, True])
def test_running_out_of_memory_halves_the_batch_and_goes_on(kind, pad, capsys):
    with paint_pool([], batch_size=64) as pool:
        scorer = pool._local
        scorer.reward = helpers.HungryReward(fits=9)
        scorer.pad = pad
        states = paint_states(201)
        pictures = np.broadcast_to(states.astype(np.uint8)[:, :, None, None], (201, 4, 4, 3))
        source = {"states": states} if kind == "states" else {"frames": pictures.copy()}
        np.testing.assert_array_equal(pool.score(**source), states[:, 0])
        assert scorer.batch_size <= 9 and scorer.reward.largest <= 9
        warnings = capsys.readouterr().err.splitlines()
        assert f"going on with --clip-batch-size {scorer.batch_size}" in warnings[-1]
        again = scorer.batch_size
        np.testing.assert_array_equal(pool.score(**source), states[:, 0])
        assert scorer.batch_size == again and not capsys.readouterr().err, "it has learned"
        scorer.reward = helpers.HungryReward(fits=0)
        with pytest.raises(torch.OutOfMemoryError):
            pool.score(**source)


def test_padding_keeps_one_shape_and_changes_no_reward():
    with paint_pool([], batch_size=16) as pool:
        pool._local.pad = True
        pool._local.reward = helpers.HungryReward(fits=16)
        for count in (100, 5, 0, 100):
            expected = paint_states(count)[:, 0]
            np.testing.assert_array_equal(pool.score(paint_states(count)), expected)
            pictures = np.full((count, 6, 5, 3), 7, np.uint8)  # other than the renderer's
            np.testing.assert_array_equal(pool.score(frames=pictures), np.full(count, 7))
        assert pool._local.reward.shapes == {15, 5}, "7 chunks of 15 hold 100; 5 are one of 5"


def test_a_build_of_pytorch_without_cuda_is_enough(monkeypatch):
    def event(*_, **__):  # as there
        raise RuntimeError("Tried to instantiate dummy base class Event")

    monkeypatch.setattr(torch.cuda, "Event", event)
    with paint_pool([]) as pool:
        np.testing.assert_array_equal(pool.score(paint_states(9)), paint_states(9)[:, 0])


def test_no_batch_size_is_found_for_the_device():
    with paint_pool(["cpu"]) as pool:
        assert "at most 256 frames" in pool.wait_ready().description[0]


def test_the_largest_batch_that_fits_is_found(monkeypatch):
    with paint_pool([]) as pool:
        scorer = pool._local
        scorer.reward = helpers.HungryReward(fits=100)
        monkeypatch.setattr(scorer, "device", torch.device("cuda"))
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *a, device, **k: zeros(*a, **k))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        free = iter([5, 20])  # of 100 bytes: 64 fit and leave too little, 32 leave enough
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 100))
        assert scorer._largest_batch() == 32
        scorer.reward.fits = 0
        with pytest.raises(torch.OutOfMemoryError):
            scorer._largest_batch()
        monkeypatch.undo()


def test_shares_follow_the_measured_speed_and_rewards_do_not():
    make_reward = functools.partial(
        clip_reward.make_clip_reward, clip_model=TINY, target_prompts=TARGETS[:1]
    )
    make_renderer = functools.partial(helpers.make_humanoid_renderer, size=64)
    states = helpers.humanoid_states(90)
    states[::2, 0] += 5.0  # metres: where the floor is drawn must not depend on the picture before
    with RewardPool(make_renderer, make_reward, ["cpu", "cpu"], batch_size=8) as pool:
        expected = pool.score(states)
        assert all(speed > 0 for speed in pool._speeds), "both were measured"
        for speeds in ([1.0, 9.0], [100.0, 1.0], [3.0, 2.0]):
            pool._speeds = speeds
            np.testing.assert_array_equal(pool.score(states), expected)  # to the last bit


def test_shares():
    with paint_pool([]) as pool:
        pool._processes = [None] * 3  # no more is asked than how many there are
        for speeds, chunks, shares in [
            ([None, 5.0, 5.0], 12, [4, 4, 4]),  # not all measured: equal
            ([1.0, 2.0, 1.0], 16, [4, 8, 4]),
            ([1000.0, 1.0, 1.0], 8, [6, 1, 1]),
            ([1.0, 1.0, 1000.0], 8, [1, 1, 6]),
            ([1.0, 2.0, 3.0], 3, [1, 1, 1]),
            ([1.0, 2.0, 3.0], 2, [1, 1, 0]),
            ([1.0, 2.0, 3.0], 0, [0, 0, 0]),
        ]:
            pool._speeds = speeds
            assert np.diff(pool._shares(chunks)).tolist() == shares
        pool._processes = []
        pool._batch_size = 256
        assert pool._chunk(3200, 1) == 247 and pool._chunk(3200, 2) == 200
        assert pool._chunk(100, 2) == 50 and pool._chunk(0, 2) == 1


def test_only_the_image_tower_goes_to_the_device():
    clip = load_clip("ViT-B-32/random", device="meta", precision="bf16")  # holds no numbers
    text = [p for name, p in clip.model.named_parameters() if not name.startswith("visual.")]
    assert {p.device.type for p in text} == {"cpu"} and {p.dtype for p in text} == {torch.float32}
    image = list(clip.model.visual.parameters())
    assert {p.device.type for p in image} == {"meta"} and {p.dtype for p in image} == {
        torch.bfloat16
    }


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


def test_pool_refuses_wrong_arguments():
    with paint_pool([]) as pool:
        with pytest.raises(ValueError, match="either"):
            pool.submit()
        with pytest.raises(ValueError, match="uint8"):
            pool.submit(frames=np.zeros((2, 4, 4, 3)))
    with pytest.raises(UsageError, match="batch"):
        paint_pool([], batch_size=0)
    with RewardPool(helpers.make_paint_renderer, None, []) as pool:
        assert pool.render(paint_states(2)).shape == (2, 4, 4, 3)
        with pytest.raises(ValueError, match="only render"):
            pool.score(paint_states(2))


def test_a_workers_exception_arrives_with_its_traceback():
    with paint_pool(["cpu", "cpu"]) as pool:
        with pytest.raises(RewardWorkerError, match=r"(?s)helpers\.py.*cannot paint -1"):
            pool.score(np.array([[3.0], [-1.0]]))
    assert not any(p.is_alive() for p in pool._processes)
    with RewardPool(helpers.make_paint_renderer, helpers.make_broken_reward, ["cpu"]) as pool:
        with pytest.raises(RewardWorkerError, match="this model was never there"):
            pool.wait_ready()


def make_truncated_reward(device):
    raise EOFError("truncated weights")


def test_no_exception_is_mistaken_for_the_end():
    with RewardPool(helpers.make_paint_renderer, make_truncated_reward, ["cpu"]) as pool:
        with pytest.raises(RewardWorkerError, match="truncated weights"):
            pool.wait_ready()


@pytest.mark.parametrize("ending, code", [("", 0), ("raise SystemExit(3)", 3)])
def test_a_pool_left_open_does_not_hang_the_interpreter(ending, code):
    script = f"""
import helpers, numpy as np
from clip_reward import RewardPool
if __name__ == "__main__":
    pool = RewardPool(helpers.make_paint_renderer, helpers.make_mean_reward, ["cpu"])
    print(pool.score(np.ones((4, 1))))
    {ending}
"""
    environment = helpers.importable_environment()
    run = subprocess.run([sys.executable, "-c", script], env=environment, timeout=90)
    assert run.returncode == code


def test_a_killed_worker_is_an_error_and_not_a_hang():
    with paint_pool(["cpu", "cpu"], delay=30) as pool:
        pool.wait_ready()
        job = pool.submit(paint_states(4))
        os.kill(pool._processes[1].pid, signal.SIGKILL)
        with pytest.raises(RewardWorkerError, match="killed by signal 9"):
            job.result()
    assert not helpers.wait_until_gone([p.pid for p in pool._processes], 10)


def test_no_worker_outlives_a_killed_parent():
    script = """
        import functools, helpers, numpy as np
        from clip_reward import RewardPool
        if __name__ == "__main__":
            slow = functools.partial(helpers.make_mean_reward, delay=60)
            pool = RewardPool(helpers.make_paint_renderer, slow, ["cpu", "cpu"]).wait_ready()
            job = pool.submit(np.ones((4, 1)))
            print(*[p.pid for p in pool._processes], flush=True)
            job.result()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env=helpers.importable_environment(),
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2 and all(map(helpers.process_is_alive, workers))
    everyone = helpers.descendants(parent.pid)
    parent.kill()
    parent.wait()
    assert not helpers.wait_until_gone(everyone, 15)


@pytest.mark.parametrize("name", ["local-dir:tiny_clip", "RN50/random"])
def test_folding_batch_norm_away_changes_no_embedding(name):
    clip = load_clip(name)
    if name.endswith("random"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            theirs = open_clip.create_model("RN50-quickgelu", load_weights=False).eval()
    else:
        theirs = open_clip.create_model(name, require_pretrained=True).eval()
    assert any(isinstance(part, torch.nn.BatchNorm2d) for part in theirs.modules())
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in clip.model.modules())
    size = clip.preprocess.size[0]
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, expected = clip.model.encode_image(images, True), theirs.encode_image(images, True)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
