"""A run's index.html: curves, the newest videos, flags, and what to type next. It opens from the
disk and loads nothing but what lies in the run's folder."""

import html
import io
import json
import shlex
from pathlib import Path

from environments import judges
from training.run import CURVES, saved_flags, write

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{name}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 62rem; margin: auto; padding: 1rem; color: #222 }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere }} h2 {{ font-size: 1.05rem; margin-top: 2rem }}
svg, img, video {{ max-width: 100%; height: auto }} video {{ background: #000 }}
pre {{ background: #f3f3f3; padding: .7rem; white-space: pre-wrap }}
td {{ padding: 0 1.2rem 0 0; vertical-align: top; overflow-wrap: anywhere }}
</style>
<h1>{name}</h1>
<p><b>{goal}</b><br>{steps:,} of {total:,} steps. {last}</p>
{curves}
{films}
<h2>Resume</h2><pre>{resume}</pre>
<h2>Judge</h2><pre>{judge}</pre>
<h2>Flags</h2><table>{flags}</table>
</html>
"""


def scalars_of(folder):
    """Read {tag: ([step], [value])} from the event files of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    series = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: ([e.step for e in x], [e.value for e in x]) for tag, x in series.items()}


def draw(scalars):
    """Draw the panels as SVG."""
    from matplotlib.figure import Figure

    drawn = {title: [x for x in tags if x in scalars] for title, tags in CURVES.items()}
    drawn = {title: tags for title, tags in drawn.items() if tags}
    rows = (len(drawn) + 1) // 2
    figure = Figure((10, 2.7 * rows), layout="constrained")
    for number, (title, tags) in enumerate(drawn.items(), 1):
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
    return svg.getvalue().partition("<svg")[2].join(["<svg", ""])  # without XML's own first lines


def film(folder, title, video, sheet):
    """Return a video and its contact sheet as HTML."""
    parts = [f"<h2>{html.escape(title)}</h2>"]
    width = "30rem" if video.parent.name == "videos" else "100%"  # several episodes side by side
    source = f'src="{video.relative_to(folder)}" style="width: {width}"'
    parts.append(f"<video {source} controls loop muted></video>")
    if sheet.exists():
        picture = sheet.relative_to(folder)
        parts.append(f'<p><a href="{picture}"><img src="{picture}" alt="moments of it"></a></p>')
    return "\n".join(parts)


def commands(folder, flags, steps):
    """Return the commands that resume the run and that judge it."""
    where = shlex.quote(str(folder))
    script = Path(flags.get("script", "SCRIPT.py")).name
    resume = f"python {shlex.quote(script)} --resume {where}"
    if steps >= flags["total_timesteps"]:
        resume += f" --total-timesteps {2 * flags['total_timesteps']}"
    judge = f"python eval_epic.py success --run {where}"
    if flags.get("judge"):
        judge += f" --judge {shlex.quote(flags['judge'])}"
    elif not judges.task_for(flags["env_id"], flags.get("target_prompt", ())):
        judge += " --judge FILE.py:FUNCTION"
    return resume, judge


def write_page(folder):
    """Write index.html into the folder of a run. Raises UsageError."""
    folder, films, last = Path(folder), [], []
    flags, scalars = saved_flags(folder), scalars_of(folder)
    steps = max((steps[-1] for steps, _ in scalars.values()), default=0)
    for tag in ("charts/clip_reward", "charts/success_rate", "charts/episodic_return"):
        if tag in scalars:
            last.append(f"{tag.partition('/')[2]} {scalars[tag][1][-1]:.4g}")
    for summary in sorted(folder.glob("success_*/success.json"), key=lambda x: x.stat().st_mtime):
        won, *_ = json.loads(summary.read_text())
        title = f"Judged: {100 * won['success_rate']:.0f} % of {won['episodes']} episodes"
        paths = [summary.with_name(name) for name in ("episodes.mp4", "contact_sheet.png")]
        if all(path.exists() for path in paths):
            films = [film(folder, f"{title} ({summary.parent.name})", *paths)]  # the newest
    for video in sorted(folder.glob("videos/step_*.mp4"), key=lambda x: int(x.stem[5:]))[-1:]:
        title = f"While training: {video.stem}"
        films.append(film(folder, title, video, video.with_suffix(".png")))
    goal = f"the reward of {flags['env_id']} itself"
    if flags["reward"] == "clip":
        goal = ", ".join([*flags["target_prompt"], *flags.get("target_image", ())])
    resume, judge = (html.escape(command) for command in commands(folder, flags, steps))
    cells = {html.escape(str(x)): html.escape(str(y)) for x, y in flags.items()}
    page = PAGE.format(
        name=html.escape(folder.resolve().name),
        goal=html.escape(goal),
        steps=steps,
        total=flags["total_timesteps"],
        last=html.escape(", ".join(last)),
        curves=draw(scalars),
        films="\n".join(films),
        resume=resume,
        judge=judge,
        flags="".join(f"<tr><td>{x}<td>{y}" for x, y in cells.items()),
    )
    write(folder / "index.html", page.encode())
