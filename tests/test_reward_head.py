"""A reward from labels: what `eval_epic.py fit` writes, who refuses it, runs that learn from it."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, TINY, checkpoint, humanoid_states, only_run, run
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression

import clip_reward
import dqn_clip_classic as dqn
import eval_epic
import sac_clip_humanoid as sac
from clip_reward import CLIPReward, UsageError, load_clip
from environments import judges
from evaluation import datasets, fit
from evaluation.metrics import auc
from evaluation.rewards import embed
from reward_head import FLAGS, Head, HeadReward, load_head, with_hash

PROMPT = "pole vertically upright on top of the cart"


def save_states(path, states, **columns):
    """A dataset of CartPole states as from `collect`."""
    args = dqn.Args(render_size=48, clip_model=TINY)
    datasets.save_dataset(datasets.Dataset(args, {"source": "uniform"}, states, **columns), path)
    return path


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """200 CartPole states in 40 episodes, and a person's labels.csv, of which 10 are wrong."""
    path = tmp_path_factory.mktemp("data") / "poles.npz"
    rng = np.random.default_rng(0)
    states = np.zeros((200, 4))
    states[:, 2] = rng.uniform(-0.6, 0.6, 200)
    save_states(path, states, episode=np.repeat(np.arange(40), 5))
    good = judges.TASKS["cartpole"].judge(states)
    good[rng.permutation(200)[:10]] ^= True
    path.with_suffix("").mkdir()
    with open(path.with_suffix("") / "labels.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(datasets.LABEL_COLUMNS)
        rows.writerows(("poles", "frame", k, "cartpole", int(yes)) for k, yes in enumerate(good))
    return path


@pytest.fixture(scope="module")
def head(labelled):
    """(the file of a head fitted to them, what was printed)."""
    out = labelled.with_name("upright.safetensors")
    words = ["--dataset", labelled, "--out", out]
    return out, run(ROOT / "eval_epic.py", "fit", *words).stdout


# ------------------------------------------------------------------------------ fit


def test_a_head_is_fitted_named_and_shown(labelled, head):
    path, printed = head
    with safe_open(path, "pt") as file:
        weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
        about = json.loads(file.metadata()["head"])
    assert weight.shape == (64,) and bias.shape == (1,) and path.stat().st_size < 10_000
    flags = about["flags"]
    assert flags["clip_model"] == TINY and flags["env_id"] == "CartPole-v1"
    assert flags["camera_azimuth"] == [] and about["task"] == "cartpole"
    assert sum(about["labels"].values()) == 200 and 60 < about["labels"]["good"] < 90
    # the head against the truth, of which it saw 5 % wrong labels, by numpy alone
    data = datasets.load_dataset(labelled)
    embeddings, _ = embed(clip_reward.RewardArgs(clip_model=TINY), data.args, data.states)
    logits = embeddings[:, 0] @ weight.numpy() + bias.item()
    assert auc(logits, judges.TASKS["cartpole"].judge(data.states)) > 0.97
    found = load_head(str(path))(torch.from_numpy(embeddings))
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-5)
    # printed: its AUC, held out, beside that of the words, and the curve
    lines = {line.split("  ")[-1]: line.split()[0] for line in printed.splitlines() if line.strip()}
    assert float(lines["the head"]) == pytest.approx(about["auc"], abs=1e-3)
    words = CLIPReward(load_clip(TINY), PROMPT).reward(torch.from_numpy(embeddings[:, 0]))
    truth, _ = datasets.labels_of(
        labelled.with_suffix("") / "labels.csv", data, judges.TASKS["cartpole"]
    )
    assert float(lines[f'"{PROMPT}"']) == pytest.approx(auc(words.numpy(), truth > 0), abs=2e-3)
    assert [f"head fitted to {size} labels" in printed for size in (25, 50, 100, 200)] == [True] * 4
    assert f"--reward-head {path}" in printed and "python dqn_clip_classic.py" in printed
    sheet = Image.open(path.with_suffix(".png"))
    assert sheet.width > 1000 and len(sheet.getcolors(10**6)) > 50


def test_episodes_are_held_out_whole():
    """Features that tell the episode and nothing else: a fold that had a state of an episode would
    know the others."""
    rng = np.random.default_rng(0)
    episodes = np.repeat(np.arange(30), 8)
    features = np.eye(30)[episodes] + 0.01 * rng.normal(size=(240, 30))
    good = (np.arange(30) % 3 == 0)[episodes]
    known = fit.Labelled(features, good, episodes)
    assert known.auc(known.held_out(fit.fit_head)) < 0.65
    for rows, out in known.folds:
        assert not set(episodes[rows]) & set(episodes[out])
    alone = fit.Labelled(features, good, np.arange(240))  # the leak that this avoids
    assert alone.auc(alone.held_out(fit.fit_head)) > 0.95


def test_probabilities_are_as_sure_as_held_out_labels_allow():
    rng = np.random.default_rng(1)
    direction, features = rng.normal(size=150), rng.normal(size=(2000, 150))
    chance = 1 / (1 + np.exp(-features @ direction / 4))
    good, episodes = rng.random(2000) < chance, np.arange(2000)
    some, rest = slice(0, 200), slice(200, None)
    weight, bias = fit.fit_head(fit.Labelled(features[some], good[some], episodes[some]))
    found = 1 / (1 + np.exp(-(features[rest] @ weight + bias)))
    # of 200 labels in 150 dimensions all can be explained; the head does not believe it
    assert auc(found, good[rest]) > 0.75
    for low, high in (0.0, 0.35), (0.35, 0.65), (0.65, 1.0):
        inside = (found >= low) & (found < high)
        assert inside.sum() > 50
        assert abs(found[inside].mean() - good[rest][inside].mean()) < 0.15


def test_rare_good_states_weigh_no_more_than_others():
    rng = np.random.default_rng(0)
    features, slips = rng.normal(size=(300, 8)), rng.random(300) < 0.05
    good = (features[:, 0] > 1.5) ^ slips
    weight, _ = fit.fit_head(fit.Labelled(features, good, np.arange(300) // 5))

    def cosine(**flags):
        (other,) = LogisticRegression(**flags).fit(features, good).coef_
        return weight @ other / np.linalg.norm(weight) / np.linalg.norm(other)

    assert max(cosine(C=strength) for strength in fit.STRENGTHS) > 1 - 1e-6
    assert cosine(class_weight="balanced") < 1 - 1e-3


@pytest.mark.parametrize("spread, strength", [(1.0, 0.1), (0.02, 1000.0)])
def test_the_weakest_fit_is_chosen_that_ranks_about_as_well(spread, strength):
    """Where the label shows in a feature of little spread, only a strong fit can use it."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 20))
    features[:, 0] *= spread
    good = features[:, 0] > 0
    weight, _ = fit.fit_head(fit.Labelled(features, good, np.arange(200) // 5))
    same = LogisticRegression(C=strength, max_iter=5000).fit(features, good).coef_[0]
    assert weight @ same / np.linalg.norm(weight) / np.linalg.norm(same) > 1 - 1e-4


def test_labels_that_are_too_few_or_alike_are_one_line(labelled, tmp_path):
    for count, problem in (3, "too few"), (0, "no label"):
        path = save_states(tmp_path / f"few{count}.npz", np.zeros((6, 4)))
        path.with_suffix("").mkdir()
        rows = [f"{path.stem},frame,{k},cartpole,{int(k < 1)}" for k in range(count)]
        labels = path.with_suffix("") / "labels.csv"
        labels.write_text("\n".join(["dataset,unit,index,task,label", *rows]))
        command = eval_epic.Fit(dataset=(path,), out=tmp_path / "h.safetensors")
        with pytest.raises(UsageError, match=problem):
            command()
    with pytest.raises(UsageError, match="none/labels.csv: No such file.*eval_epic.py label"):
        path = save_states(tmp_path / "none.npz", np.zeros((6, 4)))
        eval_epic.Fit(dataset=(path,), out=tmp_path / "h.safetensors")()
    with pytest.raises(UsageError, match="exists already"):
        eval_epic.Fit(dataset=(labelled,), out=labelled)()
    (tmp_path / "mine.png").write_text("a picture")
    for name in ("mine.safetensors", "other.png"):  # its own picture is NAME.png
        with pytest.raises(UsageError, match="change --out"):
            eval_epic.Fit(dataset=(labelled,), out=tmp_path / name)()
    assert (tmp_path / "mine.png").read_text() == "a picture"
    assert not (tmp_path / "h.safetensors").exists()


def test_datasets_of_other_cameras_do_not_go_together(tmp_path):
    paths = []
    for k, azimuth in enumerate([(180.0,), (120.0,)]):
        args = sac.Args(render_size=48, clip_model=TINY, camera_azimuth=azimuth)
        states = humanoid_states(20, seed=k)
        paths.append(tmp_path / f"{k}.npz")
        datasets.save_dataset(datasets.Dataset(args, {"source": "run"}, states), paths[-1])
    command = eval_epic.Fit(
        dataset=tuple(paths), out=tmp_path / "h", labels="judge", judge="standing"
    )
    with pytest.raises(UsageError, match="differ in camera_azimuth"):
        command()


# ------------------------------------------------------------------------------ label


def test_the_least_sure_frames_are_asked_first(labelled, head, tmp_path):
    path, _ = head
    states = np.zeros((60, 4))
    states[:, 2] = np.random.default_rng(5).uniform(-1, 1, 60)
    more = save_states(tmp_path / "more.npz", states)
    data = datasets.load_dataset(more)
    embeddings, _ = embed(clip_reward.RewardArgs(clip_model=TINY), data.args, states)
    loaded = load_head(str(path))
    chance = loaded(torch.from_numpy(embeddings)).double().numpy()
    good, other = loaded.about["labels"].values()
    chance = chance * good / (chance * good + (1 - chance) * other)  # Bayes: good ones are rarer
    doubt = np.abs(np.log(chance / (1 - chance)))
    order = fit.least_sure(path, data)
    assert sorted(order) == list(range(60))
    assert (np.diff(doubt[order]) >= -1e-6).all() and np.ptp(doubt) > 0.2
    # as a person would, with errors: the answers are in the file that `fit` reads
    words = [more, "--count", 20, "--uncertain", path, "--errors", 0.25]
    printed = run(ROOT / "benchmarks/labels.py", *words).stdout
    with open(tmp_path / "more/labels.csv", newline="") as file:
        answers = {int(row["index"]): row["label"] == "1" for row in csv.DictReader(file)}
    assert list(answers) == order[:20]
    truth = judges.TASKS["cartpole"].judge(states)
    wrong = sum(truth[k] != label for k, label in answers.items())
    assert (
        1 <= wrong <= 10
        and f"20 answers, {sum(answers.values())} of them yes, {wrong} wrong" in printed
    )


def test_the_likely_frames_are_those_that_the_words_like_best(tmp_path):
    states = np.zeros((40, 4))
    states[:, 2] = np.random.default_rng(6).uniform(-3, 3, 40)
    path = save_states(tmp_path / "poles.npz", states)
    session = eval_epic.Label(dataset=path, likely=TINY, count=10).session()
    embeddings, clip = embed(clip_reward.RewardArgs(clip_model=TINY), session.dataset.args, states)
    with torch.no_grad():
        goal = clip.model.encode_text(clip.tokenizer([PROMPT]), normalize=True).float()
    rewards = (torch.from_numpy(embeddings[:, 0]) @ goal.T)[:, 0].numpy()
    assert session.todo() == np.argsort(-rewards, kind="stable")[:10].tolist()
    assert np.abs(states[session.todo(), 2]).max() < np.abs(states[:, 2]).mean()
    own = tmp_path / "own.py"
    own.write_text("def left(states): return states[:, 0] < 0")
    with pytest.raises(UsageError, match="neither left nor .*poles.npz has words"):
        eval_epic.Label(dataset=path, judge=f"{own}:left", likely=TINY).session()


@pytest.mark.slow
def test_a_second_dataset_may_have_no_good_state(labelled, tmp_path):
    states = np.zeros((30, 4))
    states[:, 2] = np.random.default_rng(7).uniform(0.5, 3, 30)
    path, out = save_states(tmp_path / "fallen.npz", states), tmp_path / "head.safetensors"
    fit = eval_epic.Fit(dataset=(labelled, path), labels="judge", out=out)
    fit()
    assert load_head(str(out)).about["labels"]["other"] >= 30
    alone = eval_epic.Fit(dataset=(path,), labels="judge", out=tmp_path / "none.safetensors")
    with pytest.raises(UsageError, match="all 30 labels are the same"):
        alone()


def test_what_cannot_be_uncertain(labelled, head, tmp_path):
    for path, problem in (labelled, "not made by eval_epic.py fit"), ("nothing", "does not exist"):
        with pytest.raises(UsageError, match=f"--uncertain .*{problem}"):
            eval_epic.Label(dataset=labelled, uncertain=path)()
    for order in {"uncertain": head[0]}, {"likely": TINY}:
        with pytest.raises(UsageError, match="--unit frame"):
            eval_epic.Label(dataset=labelled, unit="episode", **order)()


# ------------------------------------------------------------------------------ the reward


def test_the_reward_is_the_heads_or_the_mean_of_both():
    clip = load_clip(TINY)
    torch.manual_seed(0)
    frames = torch.randint(256, (5, 3, 64, 64, 3), dtype=torch.uint8)  # three views
    head = Head(torch.randn(3 * 64), torch.tensor([0.3]), {})
    words = CLIPReward(clip, PROMPT)
    embeddings = words.embed_images(frames)
    expected = []
    for views in embeddings.double().numpy():
        logit = float(np.concatenate(list(views)) @ head.weight.double().numpy() + 0.3)
        expected.append(1 / (1 + np.exp(-logit)))
    found = HeadReward(clip_reward.CLIPEmbedder(clip), head)(frames)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    mixed = HeadReward(words, head, mixed=True)(frames)
    torch.testing.assert_close(mixed, (found + words(frames)) / 2)


def refusal(*words):
    """The one line with which DQN refuses to start."""
    script = ROOT / "dqn_clip_classic.py"
    lines = run(script, "--runs-dir", "/nowhere", *words, code=2).stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: --reward-head ")
    return lines[0]


def test_a_head_that_does_not_fit_is_one_line(head, tmp_path):
    path, _ = head
    words = ["--reward-head", path, "--render-size", 48]
    model = tmp_path / "model"
    model.symlink_to(ROOT / "tiny_clip")
    line = refusal(*words, "--clip-model", f"local-dir:{model}")
    assert f"{path} was fitted with clip model {TINY}, not local-dir:{model}" in line
    words += ["--clip-model", TINY]
    assert "fitted with textured true, not false" in refusal(*words, "--no-textured")
    other = refusal(*words, "--env-id", "MountainCar-v0")
    assert "fitted with env id CartPole-v1, not MountainCar-v0" in other
    words[1] = tmp_path / "missing"
    assert "does not exist" in refusal(*words)
    (tmp_path / "half").write_bytes(path.read_bytes()[:400])
    save_file({"weight": torch.zeros(64), "bias": torch.zeros(1)}, tmp_path / "foreign")
    for name in "half", "foreign":
        words[1] = tmp_path / name
        assert "is damaged, or was not made by eval_epic.py fit" in refusal(*words)


SMALL = [
    *("--num-envs", 2, "--episode-length", 12, "--render-size", 48),
    *("--batch-size", 16, "--gradient-steps", 6, "--learning-starts", 24, "--clip-model", TINY),
    *("--video-freq", 0, "--reward-devices", "cpu", "--checkpoint-freq", 24),
]


@pytest.mark.slow
def test_dqn_learns_from_a_head_beside_words(head, tmp_path):
    copied = tmp_path / "head.safetensors"
    copied.write_bytes(head[0].read_bytes())
    words = ["--reward-head", copied, "--target-prompt", PROMPT]
    script = ROOT / "dqn_clip_classic.py"
    run(script, *words, *SMALL, "--total-timesteps", 48, "--runs-dir", tmp_path / "first")
    first = only_run(tmp_path / "first")
    saved = json.loads((first / "args.json").read_text())
    assert saved["reward_head"] == with_hash(str(copied))
    assert len(saved["reward_head"].rpartition("#")[2]) == 64
    # its rewards are the means of what the head and the words say
    rewards = checkpoint(first)["replay"]["rings"][3]
    assert (rewards >= 0).all() and (rewards <= 1).all() and rewards.std() > 0
    # another head under the same name
    tensors = load_head(str(copied))
    copied.write_bytes(Head(-tensors.weight, tensors.bias, tensors.about).to_bytes())
    refused = run(script, "--resume", first, "--total-timesteps", 96, code=2).stderr
    assert f"--reward-head {copied} is missing or has changed" in refused
    assert len(refused.splitlines()) == 1
    # a new run may go on with it
    words = ["--resume", first / "checkpoints/step_48.pt", "--reward-head", copied]
    run(script, *words, "--total-timesteps", 24, "--runs-dir", tmp_path / "new")
    saved = json.loads((only_run(tmp_path / "new") / "args.json").read_text())
    assert saved["reward_head"] == with_hash(str(copied))
    rewards = checkpoint(only_run(tmp_path / "new"))["replay"]["rings"][3]
    assert len(rewards) == 24 and rewards.std() > 0


@pytest.mark.slow
def test_sac_learns_from_a_head_of_three_cameras(tmp_path):
    """collect, fit to a judge, train, judge, page: by relative paths, in a folder of one's own."""
    look = ["--render-size", 48, "--camera-azimuth", 120, 180, 240]

    def act(script, *words, code=0):
        command = [sys.executable, ROOT / script, *words]
        done = subprocess.run(
            list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    act("eval_epic.py", "collect", "--source", "poses", "--per-pose", 4, "--out", "p.npz", *look)
    labels = ["--labels", "judge", "--judge", "kneeling", "--clip-model", TINY]
    printed = act("eval_epic.py", "fit", "--dataset", "p.npz", "--out", "h.safetensors", *labels)
    command = printed.splitlines()[-1].split()
    assert command[2:6] == ["--env-id", "Humanoid-v5", "--reward-head", "h.safetensors"]
    few = ["--total-timesteps", 48, "--learning-starts", 24, "--num-envs", 2]
    few += ["--episode-length", 12, "--gradient-steps", 2, "--video-freq", 0]
    printed = act("sac_clip_humanoid.py", *command[2:], *few)
    assert "clip_reward" in printed and "success_rate" in printed
    folder = only_run(tmp_path / "runs")
    assert "__h__" in folder.name
    saved = json.loads((folder / "args.json").read_text())
    assert saved["reward_head"].startswith(f"{tmp_path / 'h.safetensors'}#")
    other = [*command[2:], *few, "--camera-azimuth", 180]
    line = "was fitted with camera azimuth 120 180 240, not 180"
    assert line in act("sac_clip_humanoid.py", *other, code=2)
    act("eval_epic.py", "collect", "--source", "run", "--run", folder, "--out", "q.npz")
    both = ["--dataset", "p.npz", "q.npz", "--out", "h2.safetensors"]
    command = act("eval_epic.py", "fit", *both, *labels).splitlines()[-1].split()
    newest = folder / "checkpoints/step_48.pt"
    assert command[2:6] == ["--resume", str(newest), "--reward-head", "h2.safetensors"]
    act("sac_clip_humanoid.py", *command[2:])
    Path(tmp_path / "h.safetensors").unlink()  # a policy is judged without its reward
    act("eval_epic.py", "success", "--run", folder, "--episodes", 2, "--videos", 1)
    assert str(tmp_path / "h.safetensors") in (folder / "index.html").read_text()


def test_a_head_of_another_shape_or_type_is_refused(tmp_path):
    path, flags = tmp_path / "h.safetensors", dict.fromkeys(FLAGS, None) | {"camera_azimuth": []}
    about = {"flags": flags, "labels": {"good": 3, "other": 4}}
    weight, bias = torch.ones(64), torch.zeros(1)
    path.write_bytes(Head(weight, bias, about).to_bytes())
    load_head(str(path)).check_size(64)
    with pytest.raises(ValueError, match="64 weights, but its model and cameras need 63"):
        load_head(str(path)).check_size(63)
    wrong = [(weight.double(), bias, about), (weight, torch.zeros(2), about)]
    wrong += [(weight[None], bias, about), (weight * np.nan, bias, about)]
    wrong += [(weight, bias, about | {"labels": x}) for x in ({}, None, {"good": 0, "other": "4"})]
    for parts in wrong:
        path.write_bytes(Head(*parts).to_bytes())
        with pytest.raises(ValueError, match="damaged, or was not made by eval_epic.py fit"):
            load_head(str(path))
