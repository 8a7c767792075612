"""Fit a reward head to labels: logistic regression on embeddings of pictures, cross-validated."""

import functools
import math
import os
import shlex
import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from clip_reward import CLIPReward, UsageError
from evaluation import figures
from evaluation.compare import training_command, words_for
from evaluation.datasets import labellers, labels_of
from evaluation.metrics import auc, interval
from evaluation.rewards import HeadModel, embed
from evaluation.runs import script_of
from reward_head import FLAGS, Head, load_head
from training.run import checkpoints, say, write

STRENGTHS = 10.0 ** np.arange(-1, 4)  # C of the logistic regression, from weak fits to strong
SIZES = 25, 50, 100, 200  # numbers of labels in the learning curve


class Labelled:
    """Features [K, D] float64, labels [K] bool (good or not) and episodes [K] of states."""

    def __init__(self, features, good, episodes):
        self.features, self.good, self.episodes = features, good, episodes

    def __getitem__(self, rows):
        return Labelled(self.features[rows], self.good[rows], self.episodes[rows])

    def __len__(self):
        return len(self.good)

    @functools.cached_property
    def folds(self):
        """Up to five folds of whole episodes, [(rows to fit, rows held out)]. Raises UsageError
        unless good states and others are in at least two episodes each."""
        from sklearn.model_selection import StratifiedGroupKFold  # takes a second

        fewest = min(len(np.unique(self.episodes[self.good == kind])) for kind in (True, False))
        if fewest < 2:
            problem = "good states and others must each be in at least two episodes"
            raise UsageError(f"{len(self)} labels are too few: {problem}")
        split = StratifiedGroupKFold(min(5, fewest), shuffle=True, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of folds with one kind only
            pairs = list(split.split(self.good, self.good, self.episodes))
        return [(rows, out) for rows, out in pairs if 0 < self.good[rows].sum() < len(rows)]

    def held_out(self, fit):
        """Return the logit of each label [K] from a `fit` (Labelled -> weight, bias) to the other
        folds, NaN where these have too few labels."""
        logits = np.full(len(self), np.nan)
        for rows, out in self.folds:
            try:
                weight, bias = fit(self[rows])
            except UsageError:
                continue
            logits[out] = self.features[out] @ weight + bias
        return logits

    def auc(self, logits):
        """Return the AUC of logits [K], without the NaN among them."""
        known = np.isfinite(logits)
        return auc(logits[known], self.good[known])

    def weakest(self, trials):
        """Return the index of the most regularised fit that ranks the labels about as well as the
        best: its AUC, a mean over folds, is lower by at most one standard error of this difference
        (the rule of Breiman et al. 1984). `trials`: held-out logits [S, K], the most regularised
        first. Folds with labels of one kind are skipped; if fewer than two remain, return 0."""
        found = [[auc(logits[out], self.good[out]) for logits in trials] for _, out in self.folds]
        found = np.array([row for row in found if np.isfinite(row).all()])
        if len(found) < 2:
            return 0
        behind = found[:, [found.mean(0).argmax()]] - found
        error = behind.std(0, ddof=1) / math.sqrt(len(found))
        return np.flatnonzero(behind.mean(0) <= error)[0]


def logistic(features, good, strength=1.0, class_weight=None):
    """Fit a logistic regression -> weight [D], bias."""
    from sklearn.linear_model import LogisticRegression  # takes a second

    model = LogisticRegression(C=strength, class_weight=class_weight, max_iter=5000)
    middle = features.mean(0)  # without centring it takes ten times as long
    (weight,), (bias,) = model.fit(features - middle, good).coef_, model.intercept_
    return weight, bias - weight @ middle


def fit_head(labelled):
    """Fit a Labelled -> weight [D], bias. Raises UsageError as `folds` does.

    Among fits that rank held-out labels about equally well it picks the most regularised: a policy
    visits states that nobody labelled and exploits the errors of a less regularised fit. All labels
    have the same weight: where good states are rare, a larger weight would amplify wrong labels. A
    second regression calibrates the logits (Platt 1999): otherwise a head that ranks well gives
    only 0 and 1, a reward that shows no progress. In the second regression both classes have the
    same weight, or a rare pose would get almost no reward.
    """

    def fit_with(strength):
        return lambda part: logistic(part.features, part.good, strength)

    trials = [labelled.held_out(fit_with(strength)) for strength in STRENGTHS]
    chosen = labelled.weakest(trials)
    known = np.isfinite(trials[chosen])
    weight, bias = fit_with(STRENGTHS[chosen])(labelled)
    held_out, good = trials[chosen][known, None], labelled.good[known]
    (scale,), shift = logistic(held_out, good, class_weight="balanced")
    return weight * scale, bias * scale + shift


def learning_curve(labelled, repeats=3):
    """Return {number of labels: mean AUC on held-out labels}. Each fit uses a random sample of the
    other folds' labels, as large as if only that number of labels had been given."""

    def fit_few(part, rng, share):
        return fit_head(part[rng.permutation(len(part))[: round(len(part) * share)]])

    curve = {}
    for size in [size for size in SIZES if size <= len(labelled)]:
        share, found = size / len(labelled), []
        for rng in map(np.random.default_rng, range(repeats)):
            few = functools.partial(fit_few, rng=rng, share=share)
            found.append(labelled.auc(labelled.held_out(few)))
        found = np.array(found)[np.isfinite(found)]
        curve[size] = found.mean() if len(found) else np.nan
    return curve


def fit(parts, model, out, judge=None):
    """Fit a head to the labels of datasets and write it to `out`. Print its AUC and the prompts'
    AUC, the learning curve, and the command that trains with it; draw its worst errors.

    Args:
        parts: [(Dataset, judges.Task or None, labels as in `labels_of`)].
        model: RewardArgs of the model to embed with, and of the prompts to compare with.
        judge: the value of --judge in the command.
    """
    sheet = out.with_suffix(".png")
    for path in (out, sheet):
        if path.exists() or out == sheet:
            raise UsageError(f"--out {out}: {path} exists already, or is a picture; change --out")
    data, task, _ = parts[0]
    flags = {name: vars(data.args)[name] for name in FLAGS} | {"clip_model": model.clip_model}
    states, names, truth, episodes, whose = [], [], [], [], Counter()
    for part, about, labels in parts:
        for name in FLAGS[1:]:  # all but the model
            if vars(part.args)[name] != flags[name]:
                raise UsageError(f"{part.path} and {data.path} differ in {name}")
        values, _ = labels_of(labels, part, about)
        rows = np.flatnonzero(np.isfinite(values))
        states.append(part.states[rows])
        truth.append(values[rows])
        known = labellers(labels, part, about.name) if labels not in ("judge", "env") else {}
        whose.update((known.get(row, labels) or "a person") for row in rows.tolist())
        names += [f"row {row} of {part.path.stem}" for row in rows]  # as in the file of labels
        episodes += [f"{part.path} {episode}" for episode in part.episode[rows]]
    states, truth = np.concatenate(states), np.concatenate(truth)
    if len(np.unique(truth)) < 2:  # before anything is embedded
        problem = "there must be states of both kinds"
        raise UsageError(f"all {len(truth)} labels are the same; {problem}")
    good = truth > truth.mean()
    embeddings, clip = embed(model, data.args, states)  # [K, V, D]
    features = embeddings.reshape(len(states), -1).astype(np.float64)
    labelled = Labelled(features, good, np.unique(episodes, return_inverse=True)[1])
    import sklearn.linear_model  # noqa: F401  (the limit needs its libraries to be loaded)

    with threadpool_limits(1):  # many small products: on a busy machine, more threads only wait
        (weight, bias), logits = fit_head(labelled), labelled.held_out(fit_head)
        curve = learning_curve(labelled)
    known = labelled[np.isfinite(logits)]
    found = interval(auc, logits[np.isfinite(logits)], known.good, known.episodes)
    say(f"{len(good)} labels in {len(np.unique(labelled.episodes))} episodes, {good.sum()} good")
    by = ", ".join(f"{who}: {count}" for who, count in whose.items())
    say(f"labels by {by}; all have the same weight")
    say("AUC (95 % interval); for the head, it is measured on held-out episodes:")
    few = "    unknown: too few labels to hold any out"
    say("    {:.3f} ({:.3f} to {:.3f})  the head".format(*found) if np.isfinite(found[0]) else few)
    prompts, _ = words_for(data, task)
    if prompts := model.target_prompt or prompts:
        words = CLIPReward(clip, prompts).reward(torch.from_numpy(embeddings)).numpy()
        beside = interval(auc, words, good, labelled.episodes)
        say("    {:.3f} ({:.3f} to {:.3f})  ".format(*beside) + f'"{", ".join(prompts)}"')
    for size, value in curve.items():
        say(f"    {value:.3f}  a head fitted to {size} labels")
    counts = {"good": int(good.sum()), "other": int((~good).sum())}
    about = {"flags": flags, "labels": counts, "task": task and task.name, "auc": found[0]}
    tensors = (torch.tensor(x, dtype=torch.float32) for x in (weight, np.atleast_1d(bias)))
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, Head(*tensors, about).to_bytes())
    # by how much a label was missed, the worst first, 20 of each kind
    misses = np.nan_to_num(np.where(good, -logits, logits), nan=-np.inf)
    order = np.argsort(-misses, kind="stable")
    worst = np.concatenate([order[good[order]][:20], order[~good[order]][:20]])
    chances = (f"{1 / (1 + np.exp(-logits[k])):.2f} {names[k]}" for k in worst)
    figures.draw_sheet(sheet, data.args, states[worst], chances, good[worst])
    say(f"wrote {out}, and its worst errors: {sheet} (green: labelled good)")
    wanted = {"reward_head": str(out), "clip_model": model.clip_model, "judge": judge}
    wanted |= {"target_prompt": (), "baseline_prompt": ()}
    command = training_command(data.args, wanted)
    for part, *_ in parts:  # the second round continues with the policy of the first
        newest = list(checkpoints(part.made.get("run") or "nowhere").values())[:1]
        if part.args.reward_head and newest:
            script = os.path.relpath(script_of(part.args).__file__)
            words = ["python", script, "--resume", str(newest[0]), "--reward-head", str(out)]
            command = shlex.join(words + (["--judge", judge] if judge else []))
    say("train with this head:", f"    {command}")


def least_sure(path, data):
    """Sort the rows of a Dataset by how sure the head at `path` is of them, the least sure first.
    The head sees them through its own cameras. Raises UsageError.

    A head weighs both classes equally. Here its logits are corrected for how rare good states were
    among its labels: then twice as many of the states that are asked about are good.
    """
    try:
        head = load_head(str(path), {"env_id": data.args.env_id})
    except (OSError, ValueError) as error:
        raise UsageError(f"--uncertain {error}") from error
    flags = dict(head.about["flags"])
    model = HeadModel(clip_model=flags.pop("clip_model"))
    embeddings, _ = embed(model, replace(data.args, **flags), data.states)
    try:
        head.check_size(embeddings.shape[-1])
    except ValueError as error:
        raise UsageError(f"--uncertain {path}: {error}") from error
    logits = head.logits(torch.from_numpy(embeddings))
    odds = head.about["labels"]["good"] / head.about["labels"]["other"]
    return torch.argsort((logits + math.log(odds)).abs(), stable=True).tolist()


def most_likely(name, data, task):
    """Sort the rows of a Dataset by the score of the model `name` with the prompt of a judges.Task,
    or else of the dataset, the highest first. Raises UsageError."""
    prompts, _ = words_for(data, task)
    if not prompts:
        raise UsageError(f"--likely {name}: neither {task.name} nor {data.path} has a prompt")
    model = HeadModel(target_prompt=prompts, clip_model=name)
    model.check_reward()
    embeddings, clip = embed(model, data.args, data.states)
    scores = CLIPReward(clip, prompts).reward(torch.from_numpy(embeddings))
    return torch.argsort(-scores, stable=True).tolist()
