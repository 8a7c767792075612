"""A run's index.html: curves, the newest videos, flags, and what to type next. It opens from the
disk and loads nothing but what lies in the run's folder."""

import html
import io
import json
import logging
import shlex
from pathlib import Path

from training.flags import typed

CURVES = {  # title: scalars, as on the first page of TensorBoard's custom layout
    "reward per step": ["charts/clip_reward"],
    "share of successful episodes": ["charts/success_rate"],
    "the environment's own return": ["charts/episodic_return"],
    "loss of the values": "losses/qf1_loss losses/qf2_loss losses/td_loss".split(),
    "loss of SAC's policy": ["losses/actor_loss"],
    "seconds of a rollout": "time/physics_s time/wait_s time/update_s".split(),
}
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
<p><b>{goal}</b> {pictures}<br>{steps:,} of {total:,} steps. {last}</p>
{curves}
{films}
<h2>Go on</h2><pre>{go_on}</pre>
<h2>Judge</h2><pre>{judge}</pre>
<h2>Flags</h2><table>{flags}</table>
</html>
"""


def events_of(folder):
    """TensorBoard's reader of a folder's event files; `Reload()` reads what has come since."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # it would tell of a resumed run that it passes over what came after the checkpoint
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 1, "tensors": 1})


def draw(scalars):
    """The panels as SVG."""
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
    """A video and its contact sheet, as HTML."""
    parts = [f"<h2>{html.escape(title)}</h2>"]
    width = "30rem" if video.parent.name == "videos" else "100%"  # several episodes side by side
    source = f'src="{video.relative_to(folder)}" style="width: {width}"'
    parts.append(f"<video {source} controls loop muted></video>")
    if sheet.exists():
        picture = sheet.relative_to(folder)
        parts.append(f'<p><a href="{picture}"><img src="{picture}" alt="moments of it"></a></p>')
    return "\n".join(parts)


def commands(folder, flags, steps):
    """What goes on with the run, and what judges it."""
    from evaluation import judges

    script, where = flags.get("script", "SCRIPT.py"), shlex.quote(str(folder))
    go_on = f"{typed(script)} --resume {where}"
    if steps >= flags["total_timesteps"]:
        go_on += f" --total-timesteps {2 * flags['total_timesteps']}"
    judge = Path(script).with_name("eval_epic.py")
    if not judge.exists():
        judge = Path(__file__).resolve().parent.parent / "eval_epic.py"
    judge = f"{typed(judge)} success --run {where}"
    if not (flags.get("judge") or judges.task_for(flags["env_id"], flags.get("target_prompt", ()))):
        judge += " --judge FILE.py:FUNCTION"
    return go_on, judge


def make_page(folder, events=None):
    """The page of the run in `folder` as it is now, HTML; `events` are its `events_of`."""
    folder, films = Path(folder), []
    flags = json.loads((folder / "args.json").read_text())
    events = (events or events_of(folder)).Reload()
    tags, scalars = events.Tags()["scalars"], {}
    for tag in tags:
        scalars[tag] = tuple(zip(*[(event.step, event.value) for event in events.Scalars(tag)]))
    steps, last = max((steps[-1] for steps, _ in scalars.values()), default=0), []
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
        title, sheet = f"While training: {video.stem}", video.with_suffix(".png")
        films.append(film(folder, title, video, sheet))
    rows = "".join(f"<tr><td>{x}<td>{html.escape(str(y))}" for x, y in flags.items())
    goal = f"the reward of {flags['env_id']} itself"
    if flags["reward"] == "clip":
        goal = ", ".join([*flags["target_prompt"], *flags.get("target_image", ())])
    goals = sorted(path.name for path in folder.glob("target_image_*"))
    goals = [f'<img src="{name}" alt="the goal" style="height: 6rem">' for name in goals]
    go_on, judge = commands(folder, flags, steps)
    return PAGE.format(
        name=html.escape(folder.name),
        goal=html.escape(goal),
        pictures=" ".join(goals),
        steps=steps,
        total=flags["total_timesteps"],
        last=html.escape(", ".join(last)),
        curves=draw(scalars),
        films="\n".join(films),
        go_on=html.escape(go_on),
        judge=html.escape(judge),
        flags=rows,
    )
