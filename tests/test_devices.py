"""What has to hold on every device: here on the CPU, on a machine with a GPU there as well."""

import functools
import json

import helpers
import numpy as np
import pytest
import torch
from helpers import ROOT, TINY

import clip_reward
import egl_render
import sac_clip_humanoid as sac
from clip_reward import CLIPEmbedder, load_clip
from tiny_clip import poses
from training.workers import Pool
from warp_render import WarpRenderer

egl_render.quiet_mujoco()
MISSING = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
EACH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=MISSING)])


@pytest.fixture(scope="module")
def states():
    return helpers.humanoid_states(70)


def flags(device):
    words = {"target_prompt": ("a humanoid robot kneeling",), "clip_model": TINY}
    return sac.Args(**words, render_size=64, renderer="warp", reward_devices=(device,))


@EACH
def test_a_model_gives_the_embeddings_of_float32_on_the_cpu(device, states):
    frames = WarpRenderer(egl_render.textured_model(poses.HUMANOID_XML), 64).render(states)
    exact = CLIPEmbedder(load_clip(TINY)).embed_images(frames)
    for precision, tolerance in (("fp32", 1e-4), ("auto", 5e-3), ("bf16", 3e-2)):
        embeddings = CLIPEmbedder(load_clip(TINY, device, precision)).embed_images(frames)
        assert embeddings.device == torch.device(device) and embeddings.dtype == torch.float32
        torch.testing.assert_close(embeddings.cpu(), exact, atol=tolerance, rtol=0)


@EACH
def test_pictures_are_the_cpu_s_and_the_same_in_any_chunks(device, states):
    model = functools.partial(egl_render.textured_model, poses.HUMANOID_XML)
    renderer = WarpRenderer(model(), 64, device=device)
    frames = renderer.draw(states)
    assert frames.device == torch.device(device) and frames.dtype == torch.uint8
    parts = [renderer.draw(part) for part in np.split(states, [1, 5, 37])]
    assert torch.equal(torch.cat(parts), frames)
    exact = WarpRenderer(model(), 64).draw(states)
    assert (frames.cpu().int() - exact.int()).abs().float().mean() < 1


@pytest.mark.slow
@EACH
def test_two_workers_give_the_rewards_of_one(device, states):
    args, rewards = flags(device), []
    draw = functools.partial(sac.make_renderer, args)
    score = functools.partial(clip_reward.make_clip_reward, args)
    for devices in ([device], [device, device]):
        pool = Pool(draw, score, devices, 16)
        assert f"on {device}" in pool.wait_ready()[0]
        rewards.append(pool.score(states))
        pool.close()
    np.testing.assert_array_equal(*rewards)


@pytest.mark.slow
@EACH
def test_a_run_resumes_to_the_bit(device, tmp_path):
    """Where a GPU is, the networks learn there, and the policy acts on the CPU."""

    flags = f"--clip-model {TINY} --render-size 64 --renderer warp --reward-devices {device}"
    flags += " --target-prompt words --num-envs 2 --episode-length 20 --gradient-steps 10"
    flags += " --learning-starts 40 --batch-size 16 --video-freq 0"
    script = ROOT / "sac_clip_humanoid.py"
    for steps in (160, 80):
        folders = "--runs-dir", tmp_path / str(steps)
        helpers.run(script, *flags.split(), *folders, "--total-timesteps", steps)
    whole, part = (helpers.only_run(tmp_path / str(steps)) for steps in (160, 80))
    helpers.run(script, "--resume", part, "--total-timesteps", 160)
    assert helpers.equal(helpers.checkpoint(whole), helpers.checkpoint(part))
    assert json.loads((part / "args.json").read_text())["renderer"] == "warp"
