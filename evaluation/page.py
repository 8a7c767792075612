"""A run's index.html: curves, the newest videos, flags, and what to type next. It opens from the
disk and loads nothing but what lies in the run's folder."""

import html
import io
import json
import shlex
from pathlib import Path
from urllib.parse import quote

from clip_reward import UsageError, first_line
from environments import judges
from training.run import CURVES, saved_flags, write

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 62rem; margin: auto; padding: 1rem; color: #222 }
h1 { font-size: 1.3rem; overflow-wrap: anywhere } h2 { font-size: 1.05rem; margin-top: 2rem }
svg, img, video { max-width: 100%; height: auto } video { background: #000 }
pre { background: #f3f3f3; padding: .7rem; white-space: pre-wrap }
td { padding: 0 1.2rem 0 0; vertical-align: top; overflow-wrap: anywhere }
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

    panels = {title: [x for x in tags if x in scalars] for title, tags in CURVES.items()}
    panels = {title: tags for title, tags in panels.items() if tags}
    rows = (len(panels) + 1) // 2
    figure = Figure((10, 2.7 * rows), layout="constrained")
    for number, (title, tags) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, 2, number)
        for tag in tags:
            axes.plot(*scalars[tag], lw=1, label=tag)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("environment steps", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if len(tags) > 1:
            axes.legend(frameon=False, fontsize=8)
        if tags == ["charts/success_rate"]:
            axes.set_ylim(-0.03, 1.03)
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    return svg.getvalue()[svg.getvalue().index("<svg") :]  # without XML's own first lines


def films(folder):
    """Return the newest judged video of a run and the newest of its training, as HTML."""
    judged = sorted(folder.glob("success_*/episodes.mp4"), key=lambda path: path.stat().st_mtime)
    trained = {int(path.stem[5:]): path for path in folder.glob("videos/step_[0-9]*.mp4")}
    shown = []
    for video in judged[-1:]:
        won, *_ = json.loads(video.with_name("success.json").read_text())
        title = f"Judged: {100 * won['success_rate']:.0f} % of {won['episodes']} episodes"
        shown.append((f"{title} ({video.parent.name})", video, "contact_sheet.png", "100%"))
    for step, video in sorted(trained.items())[-1:]:
        shown.append((f"While training: step {step:,}", video, f"{video.stem}.png", "30rem"))
    for title, video, sheet, width in shown:
        url, picture = (quote(str(x.relative_to(folder))) for x in (video, video.with_name(sheet)))
        yield f"<h2>{html.escape(title)}</h2>"
        yield f'<video src="{url}" style="width: {width}" controls loop muted></video>'
        yield f'<p><a href="{picture}"><img src="{picture}" alt="moments of it"></a></p>'


def make_page(folder):
    """Return the page of a run as it is now. Raises UsageError for a damaged run."""
    flags, scalars, escape = saved_flags(folder), read_scalars(folder), html.escape
    steps = max((steps[-1] for steps, _ in scalars.values()), default=0)
    last = [
        f"{tag.partition('/')[2]} {scalars[tag][1][-1]:.4g}"
        for tag in ("charts/clip_reward", "charts/success_rate", "charts/episodic_return")
        if tag in scalars
    ]
    try:
        total, prompts = int(flags["total_timesteps"]), list(flags["target_prompt"])
        goal = ", ".join(map(str, [*prompts, *flags["target_image"]]))
        judge = flags["judge"] or judges.task_for(flags["env_id"], prompts) or "FILE.py:FUNCTION"
        seen = list(films(folder))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder} is damaged: {first_line(error)}") from error
    if flags.get("reward") != "clip":
        goal = f"the reward of {flags['env_id']} itself"
    resume = ["python", Path(str(flags.get("script"))).name, "--resume", str(folder)]
    resume += ["--total-timesteps", str(2 * total)] * (steps >= total)
    for flag, own in ("--env-id", flags["env_id"]), ("--judge", flags.get("judge")):
        resume += [flag, own] * (":" in str(own))  # code is run only if it is named
    success = ["python", "eval_epic.py", "success", "--run", str(folder)]
    success += ["--judge", judge] if isinstance(judge, str) else []
    rows = "".join(f"<tr><td>{escape(x)}<td>{escape(str(y))}" for x, y in flags.items())
    return "\n".join([
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><style>{STYLE}</style>',
        f"<title>{escape(folder.name)}</title>\n<h1>{escape(folder.name)}</h1>",
        f"<p><b>{escape(goal)}</b><br>{steps:,} of {total:,} steps. {escape(', '.join(last))}</p>",
        draw(scalars),
        *seen,
        f"<h2>Resume</h2><pre>{escape(shlex.join(resume))}</pre>",
        f"<h2>Judge</h2><pre>{escape(shlex.join(success))}</pre>",
        f"<h2>Flags</h2><table>{rows}</table></html>",
    ])  # fmt: skip


def write_page(folder):
    """Write a run's index.html -> its path."""
    path = Path(folder).resolve() / "index.html"
    write(path, make_page(path.parent).encode())
    return path
