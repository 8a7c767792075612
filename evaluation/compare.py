"""Compare rewards of models, prompts and cameras with labels, and alphas along a coordinate."""

import csv
import itertools
import os
import shlex
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

import dqn_clip_classic as dqn
import egl_render
from environments import classic, judges
from evaluation import figures
from evaluation.datasets import results_folder, two_classes, write_csv
from evaluation.metrics import auc, epic_distance, gap, interval, pearson, spearman
from evaluation.rewards import count_parameters, score
from evaluation.runs import make_scorer, script_of
from training.run import say


def compare(data, rows, truth, models, goals, alphas, camera_sets, resamples):
    """Score states of a dataset by every combination -> [{"model", "prompt", "reward_alpha",
    "camera_azimuth", "auc", "auc_low", "auc_high", "epic", .., "gap", .., "rewards" [K]}].

    Args:
        rows, truth: which states [K], and their labels [K]; AUC counts labels above their mean as
            good. Intervals are bootstrapped over episodes.
        models: [RewardArgs]; goals and alphas as in `score`; camera_sets: [(number of view, ..)].
    """
    azimuths, good = data.args.camera_azimuth, truth > truth.mean()
    table, kinds = [], {"auc": (auc, good), "epic": (epic_distance, truth), "gap": (gap, good)}
    for model in models:
        scores = score(model, goals, alphas, data.args, data.states[rows])  # [K, V, goals, alphas]
        variants = camera_sets, enumerate(goals), enumerate(alphas)
        for cameras, (g, goal), (a, alpha) in itertools.product(*variants):
            rewards = scores[:, cameras, g, a].mean(1).astype(np.float64)
            row = {"model": model.clip_model, "prompt": ", ".join(goal), "reward_alpha": alpha}
            row["camera_azimuth"] = " ".join(f"{azimuths[v]:g}" for v in cameras if azimuths)
            for name, (statistic, labels) in kinds.items():
                found = interval(statistic, rewards, labels, data.episode[rows], resamples)
                row |= dict(zip((name, f"{name}_low", f"{name}_high"), found))
            table.append(row | {"rewards": rewards})
    return table


def say_table(table, last, words):
    """Print rows of `compare`; each line ends with `words`, filled in from its row."""
    say(f"{'AUC (95 % interval)':24} {'EPIC (95 % interval)':24} alpha  {last}")
    for row in table:
        auc_cell = "{auc:.3f} ({auc_low:.3f} to {auc_high:.3f})".format(**row)
        epic_cell = "{epic:.3f} ({epic_low:.3f} to {epic_high:.3f})".format(**row)
        say(f"{auc_cell:24} {epic_cell:24} {row['reward_alpha']:5.2f}  {words.format(**row)}")


def words_for(data, task):
    """Return (target prompts, baseline prompts) of a task, or else of a dataset."""
    said = task.prompts if task and task.target_prompt else vars(data.args)
    return tuple(said["target_prompt"]), tuple(said["baseline_prompt"])


def epic(data, task, labels, reward):
    """Compare the models of `reward` (Rewards) with a dataset's labels, in a table and figures."""
    rows, truth = two_classes(labels, data, task)
    models, good = reward.models(*words_for(data, task)), truth > truth.mean()
    goal, cameras = models[0].target_prompt, [tuple(range(data.args.views))]
    words = f'"{", ".join(goal + models[0].target_image)}", {len(rows)} states'
    say(f"{words}, labels: {labels}; {100 * good.mean():.1f} % of the labels are above their mean")
    table = compare(data, rows, truth, models, [goal], reward.reward_alpha, cameras, 1000)
    sizes = {model.clip_model: count_parameters(model.clip_model) for model in models}
    about = {"dataset": data.path.stem, "labels": labels, "task": task and task.name}
    about["states"] = len(rows)
    table = [about | row | {"parameters": sizes[row["model"]]} for row in table]
    say_table(table, f"{'parameters':>12}  model", "{parameters:12,}  {model}")
    out = results_folder(data.folder / f"epic_{Path(labels).stem}")
    write_csv(out / "epic.csv", [name for name in table[0] if name != "rewards"], table)
    title = f"{data.path.stem}, labels: {Path(labels).stem}"
    figures.draw_epic(out / "epic.png", title, table, good)
    say(f"wrote {out}/epic.csv, epic.png")


def prompts(data, task, labels, reward, out, judge=None):
    """Compare the models, prompts and alphas of `reward` (Prompts) and the cameras of a dataset by
    its labels. Print a table and the command that trains with the best row and --judge `judge`, and
    draw a contact sheet."""
    views = data.args.views
    targets, baselines = words_for(data, task)
    targets = reward.target_prompt or (*targets, *task.paraphrases)
    rows, truth = two_classes(labels, data, task)
    models, good = reward.models(targets, baselines), truth > truth.mean()
    goals, sizes = [(prompt,) for prompt in targets], sorted({1, min(views, 2), views})
    cameras = [chosen for size in sizes for chosen in itertools.combinations(range(views), size)]
    table = compare(data, rows, truth, models, goals, reward.reward_alpha, cameras, 300)
    table.sort(key=lambda row: (-round(row["auc"], 3), row["epic"]))
    best, out = table[0], results_folder(out.parent / f"{out.name}_{task.name}")
    say(f"{task.name}: {len(rows)} states, {good.sum()} of them good ({labels})")
    columns = f"{'azimuth':11}  prompt, model"
    say_table(table[:20], columns, "{camera_azimuth:11}  {prompt}, {model}")
    write_csv(out / "prompts.csv", [name for name in best if name != "rewards"], table)
    seen = tuple(map(float, best["camera_azimuth"].split()))
    data.args = replace(data.args, camera_azimuth=seen)
    order = np.argsort(-best["rewards"], kind="stable")
    chosen = [order, order[~good[order]], order[good[order]][::-1]]
    shown = np.concatenate([np.resize(part[:10], 10) for part in chosen])
    with closing(make_scorer(data.args)) as scorer:
        frames = scorer.render(data.states[rows[shown]], 120)
    words = (f"reward {x:.3f}" for x in best["rewards"][shown])
    title = "Green: good, red: not good. Rows: highest rewards; highest of red; lowest of green"
    cells = map(figures.framed, frames, words, good[shown])
    figures.write_sheet(out / "states.png", cells, title=title)
    say(f"wrote {out}/prompts.csv ({len(table)} rows) and states.png, which shows for the best row")
    say("the ten highest rewards, the ten highest among bad states, the ten lowest among good ones")
    found = {"target_prompt": best["prompt"], "reward_alpha": best["reward_alpha"]}
    found["clip_model"] = best["model"]
    found["baseline_prompt"] = models[0].baseline_prompt if best["reward_alpha"] else ()
    found["judge"] = judge
    if task.name in judges.HUMANOID and best["prompt"] != task.target_prompt:
        found["judge"] = task.name  # the script finds the judge only by the paper's prompt
    say_worth()
    say("train with the best row:", f"    {training_command(data.args, found)}")


WORTH = Path(__file__).with_name("worth.csv")  # benchmarks/worth.py fills in auc, epic and gap


def say_worth():
    """Print how well AUC, EPIC distance and gap predicted the success of trained policies."""
    with WORTH.open(newline="") as file:
        rows = list(csv.DictReader(file))
    tasks, index = np.unique([row["task"] for row in rows], return_inverse=True)
    say(f"AUC, EPIC distance and gap correlate with the success of {len(rows)} trained policies by")
    say(f"(rank, 95 % interval; docs/results.md), over {len(tasks)} tasks | within a task:")

    def column(name):
        values = np.array([float(row[name]) for row in rows])
        return values, values - (np.bincount(index, values) / np.bincount(index))[index]

    for name, label in ("auc", "AUC"), ("epic", "EPIC distance"), ("gap", "gap to hacked states"):
        pairs = zip(column(name), column("success"))
        found = [interval(spearman, *pair, np.arange(len(rows)), 300) for pair in pairs]
        cells = ("{:+.2f} ({:+.2f} to {:+.2f})".format(*x) for x in found)
        say(f"    {' | '.join(cells)}  {label}")


def training_command(args, found):
    """Return the command line that trains with the flags `found`, {name: value}, and draws as a
    script does with `args`."""
    script, default = script_of(args), vars(type(args)(env_id=args.env_id))
    pictures = [flag.name for flag in fields(egl_render.RenderArgs)]
    wanted = default | {name: getattr(args, name) for name in pictures} | found
    words = ["python", os.path.relpath(script.__file__), "--env-id", args.env_id]
    for name, value in wanted.items():
        flag = name.replace("_", "-")
        if value is False and default[name]:
            words.append(f"--no-{flag}")
        elif value not in ((), None, default[name]):
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [f"--{flag}", *(f"{x:g}" if isinstance(x, float) else str(x) for x in values)]
    return shlex.join(words)


SWEEPS = (  # one coordinate from end to end, all others are zero
    # environment, textured, the coordinate's name and unit, from, to, index in the state, goal
    ("CartPole-v1", False, "pole angle (rad)", -np.pi, np.pi, 2, 0.0),
    ("MountainCar-v0", False, "position", -1.2, 0.6, 0, classic.MOUNTAIN_GOALS["MountainCar-v0"]),
    ("MountainCar-v0", True, "position", -1.2, 0.6, 0, classic.MOUNTAIN_GOALS["MountainCar-v0"]),
)


def landscape(reward, render_size, out):
    """Draw the rewards of `reward` (Rewards) along SWEEPS, and print where they are largest."""
    rows, columns = len(reward.clip_model), len(SWEEPS)
    figure = figures.new_figure(4 * columns, 3.2 * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False)
    for panels, (env_id, textured, label, low, high, index, goal) in zip(axes.T, SWEEPS):
        task = judges.task_for(env_id)
        surface = "textured" if textured else "plain"
        values = np.linspace(low, high, 361)
        states = np.zeros((len(values), classic.CLASSIC_STATE_SIZES[env_id]))
        states[:, index] = values
        args = dqn.Args(env_id=env_id, render_size=render_size, textured=textured)
        for ax, model in zip(panels, reward.models(*task.prompts.values())):
            title = f"{figures.short(model.clip_model)}: {env_id}, {surface}"
            scores = score(model, [model.target_prompt], reward.reward_alpha, args, states)[:, 0, 0]
            for alpha, along in zip(reward.reward_alpha, scores.T.astype(np.float64)):
                best, correlation = values[along.argmax()], pearson(along, task.judge(states))
                say(
                    f"{title}, alpha {alpha:.2f}: largest at {best:+.3f}, goal at {goal:+.3f}; "
                    f"Pearson correlation with goal {correlation:+.3f}"
                )
                rescaled = (along - along.min()) / (np.ptp(along) or 1)
                ax.plot(values, rescaled, lw=1.4, label=f"alpha {alpha:g}")
            ax.axvline(goal, color="black", ls="--", lw=1, label="goal")
            ax.set(title=title, xlabel=label, ylabel="reward, rescaled")
            ax.locator_params(nbins=6)
    out.parent.mkdir(parents=True, exist_ok=True)
    figures.save_with_legend(figure, out, columns=6)
    say(f"wrote {out}")
