"""A run's index.html: curves, the newest videos, flags, and what to type next. It opens from disk
and loads nothing from outside the run's folder."""

import html
import io
import json
import shlex
from pathlib import Path
from urllib.parse import quote

from clip_reward import UsageError, message_of
from environments import judges
from reward_head import without_hash
from training.run import CURVES, saved_flags, write

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 62rem; margin: auto; padding: 1rem; color: #222 }
h1 { font-size: 1.3rem; overflow-wrap: anywhere } h2 { font-size: 1.05rem; margin-top: 2rem }
svg, img, video { max-width: 100%; height: auto } video { background: #000 }
pre { background: #f3f3f3; padding: .7rem; white-space: pre-wrap }
"""


def read_scalars(folder):
    """Read the event files of a run -> {tag: ([step], [value])}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    series = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: ([x.step for x in of], [x.value for x in of]) for tag, of in series.items()}


def draw(scalars):
    """Draw the panels as SVG."""
    from matplotlib.figure import Figure

    figure = Figure((10, 8), layout="constrained")
    for axes, (title, tags) in zip(figure.subplots(3, 2).flat, CURVES.items()):
        axes.set(title=title, xlabel="environment steps")
        for tag in filter(scalars.get, tags):
            axes.plot(*scalars[tag], lw=1, label=tag.partition("/")[2])
            axes.legend(frameon=False, fontsize=8)
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    return svg.getvalue()[svg.getvalue().index("<svg") :]  # without the XML header


def films(folder):
    """Return the newest judged video of a run and the newest of its training, as HTML."""
    for pattern, sheet in ("success_*/episodes.mp4", "contact_sheet"), ("videos/step_*.mp4", None):
        for video in sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)[-1:]:
            files = video, video.with_name(f"{sheet or video.stem}.png")
            url, picture = (quote(str(file.relative_to(folder))) for file in files)
            title = str(video.relative_to(folder))
            if (judged := video.with_name("success.json")).exists():
                won, *_ = json.loads(judged.read_text())
                title += f": {100 * won['success_rate']:.0f} % of {won['episodes']} episodes"
            yield f"<h2>{html.escape(title)}</h2>"
            yield f'<video src="{url}" controls loop muted></video>'
            yield f'<p><img src="{picture}" alt="moments of the video"></p>'


def write_page(folder):
    """Write a run's index.html -> its path. Raises UsageError for a damaged run."""
    folder = Path(folder).resolve()
    flags, scalars = saved_flags(folder), read_scalars(folder)
    steps = max((steps[-1] for steps, _ in scalars.values()), default=0)
    tags = ("charts/clip_reward", "charts/success_rate", "charts/episodic_return")
    last = [f"{tag[7:]} {scalars[tag][1][-1]:.4g}" for tag in tags if tag in scalars]
    try:
        total, prompts, judge = (flags[x] for x in ("total_timesteps", "target_prompt", "judge"))
        task, head = flags["env_id"], without_hash(flags.get("reward_head", ""))
        goal = ", ".join([*prompts, *flags["target_image"], *filter(None, [head])])
        others = {"clip": goal, "ground-truth": f"the reward of {task} itself"}
        goal = others.get(flags["reward"], flags["reward"])
        resume = ["python", Path(flags["script"]).name, "--resume", str(folder)]
        if steps >= total:
            resume += ["--total-timesteps", str(2 * total)]
        for flag, own in ("--env-id", task), ("--judge", judge or ""):
            if ":" in own:  # code is run only if it is named
                resume += [flag, own]
        success = ["python", "eval_epic.py", "success", "--run", str(folder)]
        if judge or not judges.task_for(task, prompts):
            success += ["--judge", judge or "FILE.py:FUNCTION"]
        seen = list(films(folder))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder} is damaged: {message_of(error)}") from error
    texts = folder.name, goal, shlex.join(resume), shlex.join(success), json.dumps(flags, indent=1)
    name, goal, resume, success, flags = (html.escape(text) for text in texts)
    page = [
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><style>{STYLE}</style>',
        f"<title>{name}</title>\n<h1>{name}</h1>",
        f"<p><b>{goal}</b><br>{steps:,} of {total:,} steps. {', '.join(last)}</p>",
        draw(scalars),
        *seen,
        f"<h2>Resume</h2><pre>{resume}</pre>\n<h2>Judge</h2><pre>{success}</pre>",
        f"<h2>Flags</h2><pre>{flags}</pre></html>",
    ]
    path = folder / "index.html"
    write(path, "\n".join(page).encode())
    return path
