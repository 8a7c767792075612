"""Success rate of policies: episodes, verdicts, intervals, and a video of them."""

import json
from contextlib import closing

import numpy as np

import egl_render
from clip_reward import UsageError
from environments import judges
from environments.judges import THRESHOLD
from evaluation import figures
from evaluation.datasets import labels_of, play, results_folder, write_csv
from evaluation.runs import checkpoint_paths, load_run, make_scorer, script_of, task_of
from training.run import say, write

VERDICT = {  # of an environment without a judge
    "name": "success",
    "judge": lambda states: np.full(len(states), np.nan),
    "criterion": 'The environment says so: info["success"] at the last step.',
}


def has_verdict(args):
    """Return whether the environment's info has "success"."""
    env = script_of(args).make_env(args)()
    env.reset(seed=0)
    return "success" in env.step(env.action_space.sample())[-1]


def play_runs(chosen, episodes, judge, own):
    """Play episodes of [(run, name of its checkpoint)] -> (judges.Task of the first run, path in it
    for the results, {name: Dataset}). Raises UsageError before anything slow starts."""
    all_args = [load_run(folder, own, stateless=not judge) for folder, _ in chosen]
    args, where = all_args[0], chosen[0][0]
    named = judge or args.judge or judges.task_for(args.env_id, args.target_prompt)
    if not named and has_verdict(args):
        task = judges.Task(**VERDICT, env_ids=(args.env_id,))
    else:
        task = task_of(judge, args, where)
    if task.env_ids and all_args[-1].env_id not in task.env_ids:
        problem = f"{task.name} cannot judge {all_args[-1].env_id}"
        raise UsageError(f"--compare {chosen[-1][0]}: {problem}")
    paths = [checkpoint_paths(folder, [name]) for folder, name in chosen]
    played = {}
    for (folder, name), args, path in zip(chosen, all_args, paths):
        kind = args.clip_model if args.reward == "clip" else args.reward
        name = f"{folder.resolve().name} ({kind}, {name})"
        played[name] = play(args, path, episodes, key=(0, 3))
    run, checkpoint = chosen[0]
    return task, run / f"success_{checkpoint}", played


def judge_episodes(source, data, task, labels):
    """Return a row {name, episode, good_steps, steps, success} for each episode that `labels` (as
    in `labels_of`) say anything about, and the verdicts [N] on states."""
    verdicts, answers = labels_of(labels, data, task)
    own_rule = bool(task.env_ids) and labels == "judge"  # not with your own judge or labels
    table = []
    for k in np.unique(data.episode).tolist():
        now = data.rows(k)
        good, name = verdicts[now], f"{source}, step {data.checkpoint_step[now[0]]}"
        good = good[np.isfinite(good)]
        own = data.success[now[0]] if own_rule else -1  # by the task's own rule; -1: it has none
        if k not in answers and not len(good) and own < 0:
            continue
        won = answers.get(k, own if own >= 0 else len(good) and good.mean() >= THRESHOLD)
        counts = {"good_steps": int(good.sum()), "steps": len(good), "success": int(won)}
        table.append({"name": name, "episode": k} | counts)
    return table, verdicts


def success(task, out, played, labels, videos):
    """Judge {name: Dataset} and write success.json, episodes.csv, a histogram, and a video and a
    contact sheet of the first `videos` episodes of each, to a new folder `out`, `out`_2, .."""
    from scipy.stats import binomtest  # takes a second

    say(f"{task.name}: {task.criterion}")
    table, films = [], []
    for source, data in played.items():
        judged, verdicts = judge_episodes(source, data, task, labels)
        table += judged
        if videos and data.states.shape[1]:
            with closing(make_scorer(data.args, cameras=1)) as scorer:
                for row in judged[:videos]:
                    now = data.rows(row["episode"])
                    frames = scorer.render(data.states[now], 160)
                    films.append((frames, verdicts[now], row["success"]))
    out = results_folder(out)
    write_csv(out / "episodes.csv", list(table[0]), table)
    summary, shares = [], {}
    for name in dict.fromkeys(row["name"] for row in table):
        rows = [row for row in table if row["name"] == name]
        share = [row["good_steps"] / row["steps"] for row in rows if row["steps"]]
        won, count = sum(row["success"] for row in rows), len(rows)
        low, high = binomtest(won, count).proportion_ci(method="wilson")
        words = f"success {100 * won / count:.0f} % ({won} of {count} episodes), 95 % interval"
        steps = f"; successful steps {100 * np.mean(share):.0f} %" if share else ""
        say(f"{name}: {words} {100 * low:.0f} to {100 * high:.0f} %{steps}")
        rate = {"episodes": count, "success_rate": won / count, "low": low, "high": high}
        summary.append({"name": name} | rate)
        shares[f"{name}: {100 * won / count:.0f} %"] = share
    write(out / "success.json", (json.dumps(summary, indent=2) + "\n").encode())
    figures.draw_success(out / "histogram.png", f"{task.name}, {data.args.env_id}", shares)
    say(f"wrote {out}/success.json, episodes.csv, histogram.png")
    if films:
        moments = np.linspace(0, len(films[0][0]) - 1, 10).astype(int)
        cells = (figures.moment(film, t) for film in films[:10] for t in moments)
        figures.write_sheet(out / "contact_sheet.png", cells)
        egl_render.write_video(out / "episodes.mp4", figures.judged_video(films), 30)
        say(f"contact sheet: {out}/contact_sheet.png", f"judged video: {out}/episodes.mp4")


def sheets(data, tasks, labels):
    """Write a contact sheet of 100 states, and for each task one of 20 good states and 20 others at
    random, to a new folder named sheets."""
    rng, rows = np.random.default_rng(0), np.linspace(0, len(data) - 1, min(len(data), 100))
    shown = {"states": (rows.astype(int), [None] * len(data))}
    for task in tasks:
        values, _ = labels_of(labels, data, task)
        both = [rng.permutation(np.flatnonzero(values == which))[:20] for which in (1, 0)]
        shown[task.name] = np.concatenate(both), values == 1
        good, known = (values == 1).sum(), np.isfinite(values).sum()
        say(f"{task.name}: {good} of {known} are good. {task.criterion}")
    out = results_folder(data.folder / "sheets")
    with closing(make_scorer(data.args)) as scorer:
        for name, (rows, good) in shown.items():
            if not len(rows):  # labels may be on whole episodes
                continue
            words = (f"{row} {data.pose[row] or data.step[row]}"[:16] for row in rows)
            frames = scorer.render(data.states[rows], 120)
            cells = map(figures.framed, frames, words, (good[row] for row in rows))
            figures.write_sheet(out / f"{name}.png", cells)
    say(f"wrote {out}")
