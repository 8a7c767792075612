"""Success rate of policies: episodes, verdicts, intervals, and a video of them."""

import json

import numpy as np

import egl_render
from clip_reward import UsageError
from evaluation import datasets, figures, runs
from training.run import flags_of


def labels_of(source, dataset, task):
    """Return what `source` ("judge", "env", or a CSV file of a person's labels, which may be on
    whole episodes) knows of each state: ([N] float64, NaN where nothing; {episode: bool})."""
    if source == "judge":
        return task.judge(dataset.states).astype(np.float64), {}
    if source == "env":
        return dataset.env_reward, {}
    answers = datasets.read_labels(source, dataset, task.name)
    labels = np.full(len(dataset), np.nan)
    labels[list(answers["frame"])] = list(answers["frame"].values())
    return labels, answers["episode"]


def play(args):
    """Play what --run and --compare of eval_epic.Success name -> (task, folder for the results,
    {name: Dataset}). Raises UsageError before anything slow."""
    chosen = [(args.run, args.checkpoint)] + [(args.compare, "best")] * bool(args.compare)
    those = [runs.load_run(folder, args.script) for folder, _ in chosen]
    task = runs.task_of(args.judge, flags_of(those[0]), args.run)
    if task.env_ids and those[-1].env_id not in task.env_ids:
        raise UsageError(f"--compare {args.compare}: {those[-1].env_id} has no {task.name}")
    paths = [runs.checkpoint_paths(folder, [name]) for folder, name in chosen]
    out, played = datasets.results_folder(args.run / f"success_{args.checkpoint}"), {}
    for (folder, name), flags, path in zip(chosen, those, paths):
        kind = "ground truth" if flags.reward.reward != "clip" else flags.reward.clip_model
        dataset = runs.dataset_of_run(flags, path, args.episodes, 0, key=3)
        played[f"{folder.resolve().name} ({kind}, {name})"] = dataset
    return task, out, played


def success(task, out, played, labels, videos, script=None):
    """Judge {name: Dataset} and write success.json, episodes.csv, a histogram, and a video and a
    contact sheet of the first `videos` episodes."""
    from scipy.stats import binomtest  # takes a second

    print(f"{task.name}: {task.criterion}")
    own_rule = bool(task.env_ids) and labels == "judge"  # not where somebody else's judge is asked
    table, films = [], []
    for source, data in played.items():
        verdicts, answers = labels_of(labels, data, task)
        judged = judge_episodes(source, data, verdicts, answers, own_rule)
        table += judged
        if videos:
            scorer = runs.pictures(data, script, cameras=1)
            for row in judged[:videos]:
                now = data.rows(row["episode"])
                frames = scorer.render(data.states[now], 160)
                films.append((frames, verdicts[now], row["success"]))
            scorer.close()
    datasets.write_csv(out / "episodes.csv", table[0], table)
    summary, shares = [], {}
    for name in dict.fromkeys(row["name"] for row in table):
        rows = [row for row in table if row["name"] == name]
        share = [row["good_steps"] / row["steps"] for row in rows if row["steps"]]
        won, count = sum(row["success"] for row in rows), len(rows)
        low, high = binomtest(won, count).proportion_ci(method="wilson")
        print(f"{name}: success {100 * won / count:.0f} % ({won} of {count} episodes), ", end="")
        print(f"95 % interval {100 * low:.0f} to {100 * high:.0f} %; ", end="")
        print(f"successful steps {100 * np.mean(share or [0]):.0f} %")
        rate = {"episodes": count, "success_rate": won / count, "low": low, "high": high}
        summary.append({"name": name} | rate)
        shares[f"{name}: {100 * won / count:.0f} %"] = share
    (out / "success.json").write_text(json.dumps(summary, indent=2) + "\n")
    figures.draw_success(out / "histogram.png", f"{task.name}, {data.flags['env_id']}", shares)
    print(f"wrote {out}/success.json, episodes.csv, histogram.png")
    if films:
        moments = np.linspace(0, len(films[0][0]) - 1, 10).astype(int)
        cells = [figures.moment(film, t) for film in films[:10] for t in moments]
        figures.write_sheet(out / "contact_sheet.png", cells)
        egl_render.write_video(out / "episodes.mp4", figures.judged_video(films), 30)
        print(f"contact sheet: {out}/contact_sheet.png\njudged video: {out}/episodes.mp4")


def judge_episodes(source, dataset, verdicts, answers, own_rule):
    """Return a row {name, episode, good_steps, steps, success} for each episode that anything is
    known of: verdicts [N] on states, NaN where there is none, answers {episode: bool} on whole
    episodes, and, with own_rule, what the environment itself calls a success."""
    table = []
    for k in np.unique(dataset.episode).tolist():
        now = dataset.rows(k)
        name = f"{source}, step {dataset.checkpoint_step[now[0]]}"
        row = {"name": name, "episode": k, "good_steps": int(np.nansum(verdicts[now]))}
        row["steps"] = int(np.isfinite(verdicts[now]).sum())
        row["success"] = int(answers.get(k, dataset.episode_success(k, verdicts, own_rule)))
        table += [row] if row["steps"] or k in answers else []
    return table
