"""Rewards compared: models with labels (epic), prompts and cameras, a line of states."""

import functools
import itertools
import shlex
from dataclasses import replace

import numpy as np

import clip_reward
from clip_reward import UsageError
from environments import classic, judges
from evaluation import datasets, figures, runs
from evaluation.judging import labels_of
from evaluation.metrics import auc, epic_distance, epic_interval, interval, pearson
from evaluation.rewards import Variants, check_distinct, count_parameters, rewards_of, scored
from training.run import flags_of, from_flags


def labelled(data, task, labels):
    """Return the labelled rows [K] of a dataset and their labels [K]. Raises UsageError if all are
    the same."""
    values, _ = labels_of(labels, data, task)
    rows = np.flatnonzero(np.isfinite(values))
    if len(np.unique(values[rows])) < 2:
        what = f"all {len(rows)} labels on states of {data.path} are the same"
        raise UsageError(f"--labels {labels}: {what}; states of both kinds are needed")
    return rows, values[rows]


def epic(data, task, labels, reward, make_renderer):
    """Write EPIC distances of `reward` (evaluation.rewards.Rewards) to the labels of a dataset."""
    rows, truth = labelled(data, task, labels)
    states, episodes, name = data.states[rows], data.episode[rows], str(labels)
    name = name if name in ("judge", "env") else name.rpartition("/")[2].removesuffix(".csv")
    views = max(1, len(data.flags["camera_azimuth"]))
    models = reward.each(task.prompts if task and task.target_prompt else data.flags, views)
    out, good = datasets.results_folder(data.folder / f"epic_{name}"), truth > truth.mean()
    goal = ", ".join(models[0].target_prompt + models[0].target_image)
    print(f'"{goal}", {len(rows)} states of {len(np.unique(episodes))} episodes', end="")
    print(f", labels: {labels}, above their mean: {100 * good.mean():.1f} %")
    print(f"{'model':40} {'parameters':>12} {'alpha':>5}  EPIC distance (95 % interval)")
    table, first = [], {}
    for model in models:
        rewards = rewards_of(model, reward.reward_alpha, make_renderer, states)
        parameters = count_parameters(model.clip_model)
        first[model.clip_model] = rewards[reward.reward_alpha[0]]
        for alpha, values in rewards.items():
            found = epic_interval(values, truth, episodes)
            row = {"dataset": data.path.stem, "labels": labels, "task": task and task.name}
            row |= {"model": model.clip_model, "parameters": parameters, "reward_alpha": alpha}
            table.append(row | dict(zip(("epic", "low", "high"), found)) | {"states": len(rows)})
            print(f"{model.clip_model:40} {parameters:12,} {alpha:5.2f}  ", end="")
            print("{:.4f} ({:.4f} to {:.4f})".format(*found))
    datasets.write_csv(out / "epic.csv", table[0], table)
    figures.draw_epic(out, f"{data.path.stem}, labels: {name}", table, first, good)
    print(f"wrote {out}/epic.csv, epic_alpha.png, epic_scaling.png, histograms.png")


def prompts(data, task, prompts, alphas, labels, model, out, script=None):
    """Write AUC and EPIC distance of every combination of prompts, alphas and the cameras of a
    dataset, and print the command that trains with the best."""
    azimuths = tuple(data.flags["camera_azimuth"])
    said, views = (task.prompts if task.target_prompt else data.flags), max(1, len(azimuths))
    prompts = prompts or (*said["target_prompt"], *task.paraphrases)
    check_distinct(prompts=prompts, alphas=alphas, camera_azimuth=azimuths or ("its own",))
    rows, good = labelled(data, task, labels)
    good, states, episodes = good > 0, data.states[rows], data.episode[rows]
    scene = model.baseline_prompt or tuple(said["baseline_prompt"])
    model = replace(model, baseline_prompt=scene, target_prompt=prompts, reward_alpha=max(alphas))
    for prompt in prompts:
        clip_reward.check_prompts([prompt], scene, max(alphas))
    model.check()
    model.clip_batch_size = max(1, model.clip_batch_size // views)  # states
    out = datasets.results_folder(out.parent / "_".join(filter(None, (out.name, task.name))))
    make = functools.partial(Variants, model, prompts, alphas)
    rewards = scored(model, make, runs.renderer_of(data, script), states)  # [N, V, prompts, alphas]
    sets = [itertools.combinations(range(views), k) for k in sorted({1, min(views, 2), views})]
    table = []
    for chosen in itertools.chain(*sets):
        seen = " ".join(f"{azimuths[v]:g}" for v in chosen) if azimuths else ""
        by_prompt = rewards[:, chosen].mean(1)
        for (p, prompt), (a, alpha) in itertools.product(enumerate(prompts), enumerate(alphas)):
            row = {"prompt": prompt, "reward_alpha": alpha, "camera_azimuth": seen}
            for name, statistic in ("auc", auc), ("epic", epic_distance):
                found = interval(statistic, by_prompt[:, p, a], good, episodes, resamples=300)
                row |= dict(zip((name, f"{name}_low", f"{name}_high"), found))
            table.append(row | {"rewards": by_prompt[:, p, a]})
    title = f"{task.name}, {figures.short(model.clip_model)}"
    figures.draw_prompts(out / "prompts.png", title, table)
    table.sort(key=lambda row: (-round(row["auc"], 3), row["epic"]))
    best = table[0]
    print(f"{task.name}: {len(rows)} states, {good.sum()} of them good ({labels})")
    print(f"{'AUC (95 % interval)':24} {'EPIC (95 % interval)':24} alpha  {'azimuth':11}  prompt")
    for row in table[:20]:
        auc_words = "{auc:.3f} ({auc_low:.3f} to {auc_high:.3f})".format(**row)
        epic_words = "{epic:.3f} ({epic_low:.3f} to {epic_high:.3f})".format(**row)
        print(f"{auc_words:24} {epic_words:24} {row['reward_alpha']:5.2f}  ", end="")
        print(f"{row['camera_azimuth']:11}  {row['prompt']}")
    datasets.write_csv(out / "prompts.csv", [name for name in best if name != "rewards"], table)
    data.flags["camera_azimuth"] = tuple(map(float, best["camera_azimuth"].split()))
    scorer = runs.pictures(data, script)
    figures.write_sheet(out / "states.png", extremes(scorer, states, good, best["rewards"]))
    scorer.close()
    print(f"wrote {out}/prompts.csv ({len(table)} rows), prompts.png, states.png (by the best, ten")
    print("states each: highest rewards, highest of those not good, lowest of those that are)")
    print(f"train with the best:\n    {training_command(data, model, best, script)}")


def extremes(scorer, states, good, rewards):
    """Return cells of a contact sheet: ten states each that a reward likes best, that it likes best
    though they are not good, and that it likes least though they are."""
    order = np.argsort(-rewards, kind="stable")
    chosen = [order, order[~good[order]], order[good[order]][::-1]]
    rows = np.concatenate([np.resize(part[:10], 10) for part in chosen])
    frames = scorer.render(states[rows], 120)
    return list(map(figures.framed, frames, (f"{x:.3f}" for x in rewards[rows]), good[rows]))


def training_command(data, model, row, script=None):
    """Return the command line that trains on one of the combinations, drawn as `data` is."""
    module = runs.load_script(data.arguments["script"], script)
    args = from_flags(module.Args, data.flags)
    wanted = {"target_prompt": (row["prompt"],), "reward_alpha": row["reward_alpha"]}
    wanted["baseline_prompt"] = model.baseline_prompt if row["reward_alpha"] else ()
    wanted |= {x: getattr(model, x) for x in ("clip_model", "clip_precision")} | vars(args.render)
    default = flags_of(module.Args(env_id=args.env_id))
    words = ["--env-id", args.env_id]
    for name, value in wanted.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{'no-' * (not value)}{flag}"] * (value != default[name])
        elif value not in ((), default[name]) and name in default:
            values = np.atleast_1d(value).tolist()
            words += [f"--{flag}", *(f"{x:g}" if isinstance(x, float) else str(x) for x in values)]
    return f"python {script or module.__name__ + '.py'} {shlex.join(words)}"


SWEEPS = (  # one coordinate from end to end, all others are zero
    # environment, textured, its name and unit, from, to, index in the state
    ("CartPole-v1", False, "pole angle (rad)", -np.pi, np.pi, 2),
    ("MountainCar-v0", False, "position", -1.2, 0.6, 0),
    ("MountainCar-v0", True, "position", -1.2, 0.6, 0),
)


def landscape(reward, points, render_size, out):
    """Write the rewards of `reward` (evaluation.rewards.Rewards) along SWEEPS."""
    picture, file = out.with_suffix(".png"), out.with_suffix(".csv")
    picture.parent.mkdir(parents=True, exist_ok=True)
    panels, rows = {name: [] for name in reward.clip_model}, []
    for env_id, textured, label, low, high, index in SWEEPS:
        task, look = judges.task_for(env_id), "textured" if textured else "plain"
        goal = classic.MOUNTAIN_GOALS.get(env_id, 0.0)  # or a pole that stands upright
        values = np.linspace(low, high, points)
        states = np.zeros((points, classic.CLASSIC_STATE_SIZES[env_id]))
        states[:, index] = values
        good = task.judge(states)
        for model in reward.each(task.prompts):
            title = f"{figures.short(model.clip_model)}: {env_id}, {look}"
            draw = functools.partial(draw_classic, env_id, textured, render_size)
            rewards = rewards_of(model, reward.reward_alpha, draw, states)
            panels[model.clip_model].append((title, label, values, goal, rewards))
            for alpha, along in rewards.items():
                best, correlation = values[along.argmax()], pearson(along, good)
                print(f"{title}, alpha {alpha:.2f}: largest at {best:+.3f}, ", end="")
                print(f"goal at {goal:+.3f}; Pearson correlation with goal {correlation:+.3f}")
                row = {"model": model.clip_model, "env_id": env_id, "look": look}
                for value, number, is_goal in zip(values, along, good.astype(int)):
                    point = {"value": value, "reward": number, "is_goal": is_goal}
                    rows.append(row | {"reward_alpha": alpha} | point)
    figures.draw_landscape(picture, list(panels.values()))
    datasets.write_csv(file, rows[0], rows)
    print(f"wrote {picture} and {file}")


def draw_classic(env_id, textured, size, device):
    """Make the renderer of a classic task; called in every worker."""
    return classic.ClassicRenderer(env_id, size, textured)
