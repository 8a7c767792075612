"""The pictures that eval_epic.py writes: contact sheets, judged videos, and the paper's figures."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from environments.judges import THRESHOLD
from evaluation.runs import make_scorer

GOOD, BAD = (0, 150, 0), (210, 0, 0)  # a verdict on one state
BORDER, LINE = 4, 13  # pixels: a frame's width, a line of text's height


def framed(picture, caption, good=None):
    """Return a picture [H, W, 3] uint8 with a caption below, black on white: [H', W', 3] uint8.
    good: True or False draws a green or red border, the verdict on this state."""
    height, width = picture.shape[0] + 2 * BORDER, picture.shape[1] + 2 * BORDER
    lines = caption.count("\n") + 1
    out = Image.new("RGB", (width, height + LINE * lines + 2), "white")
    draw = ImageDraw.Draw(out)
    if good is not None:
        draw.rectangle((0, 0, width - 1, height - 1), fill=GOOD if good else BAD)
    out.paste(Image.fromarray(picture), (BORDER, BORDER))
    draw.text((BORDER, height), caption, fill="black", spacing=1)
    return np.asarray(out)


def titled(picture, words):
    """Return a picture [H, W, 3] uint8 with a line of text above it: [H', W, 3] uint8."""
    line = Image.new("RGB", (picture.shape[1], LINE + 2 * BORDER), "white")
    ImageDraw.Draw(line).text((BORDER, BORDER), words, fill="black")
    return np.concatenate([np.asarray(line), picture])


def grid(cells, columns):
    """Lay out pictures [N, H, W, 3] uint8 in rows of `columns`, filled with white: [H', W', 3]."""
    white = np.full_like(cells[0], 255)
    cells = [*cells, *[white] * (-len(cells) % columns)]
    rows = (cells[k : k + columns] for k in range(0, len(cells), columns))
    return np.concatenate([np.concatenate(row, 1) for row in rows])


def write_sheet(path, cells, columns=10, title=None):
    """Write pictures from `framed` as a contact sheet, a PNG file, with a title above it."""
    sheet = grid(list(cells), columns)
    Image.fromarray(titled(sheet, title) if title else sheet).save(path)


def draw_sheet(path, args, states, captions, good):
    """Draw states [N, S] as a script does with `args` and write a contact sheet of them."""
    with closing(make_scorer(args)) as scorer:
        cells = map(framed, scorer.render(states, 120), captions, good)
        write_sheet(path, cells, 4 if args.views > 1 else 10)


# An episode is (frames [T, H, W, 3] uint8, steps [T] 1 or 0, success).


def moment(episode, t):
    """Frame an episode's picture at step t, or its last one if the episode is shorter. The border
    is the verdict on the step; the words below are the verdict on the whole episode."""
    frames, steps, success = episode
    t, verdict = min(t, len(frames) - 1), "success" if success else "failure"
    known = np.isfinite(steps[t])  # NaN where only the whole episode has a verdict
    good = f": {steps[: t + 1].sum():.0f} good" if known else ""
    words = f"step {t + 1}{good}\nepisode: {verdict}"
    return framed(frames[t], words, steps[t] == 1 if known else None)


def judged_video(episodes):
    """Lay out episodes side by side, eight in a row, as one video: [T, H', W', 3] uint8."""
    length = max(len(frames) for frames, _, _ in episodes)
    columns = min(8, len(episodes))
    return np.stack([grid([moment(e, t) for e in episodes], columns) for t in range(length)])


def new_figure(width, height, title=None):
    """Make a matplotlib Figure of this size in inches."""
    from matplotlib.figure import Figure  # takes half a second

    figure = Figure((width, height), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    return figure


def save_with_legend(figure, path, columns=2):
    """Write a figure with the legend of its first axes below it."""
    handles = figure.axes[0].get_legend_handles_labels()
    options = {"loc": "outside lower center", "frameon": False, "fontsize": "small"}
    figure.legend(*handles, ncols=columns, **options)
    figure.savefig(path)


def short(model):
    """Shorten a model's name for a figure: ViT-L-14/openai, or a folder's name."""
    return Path(model.partition(":")[2]).name if ":" in model else model


def draw_epic(path, title, table, good):
    """Draw figures 4a, 4b and 7 of arXiv 2310.12921: EPIC distance by alpha and by size, and each
    model's rewards of good and other states (the latter two at the first alpha).

    table: rows of compare.compare with "parameters"; good [K] bool: which states the labels call
    good.
    """
    models = list(dict.fromkeys(row["model"] for row in table))
    rows = 1 + math.ceil(len(models) / 2)
    figure = new_figure(9, 3 * rows + 0.6, title)
    by_alpha, by_size = (figure.add_subplot(rows, 2, place) for place in (1, 2))
    for place, model in enumerate(models, 3):
        of_model = [row for row in table if row["model"] == model]
        keys = ("reward_alpha", "epic", "epic_low", "epic_high")
        alpha, epic, low, high = np.array(sorted([row[key] for key in keys] for row in of_model)).T
        by_alpha.plot(alpha, epic, marker="o", ms=4, label=short(model))
        by_alpha.fill_between(alpha, low, high, alpha=0.15, lw=0)
        first = of_model[0]
        around = [[first["epic"] - first["epic_low"]], [first["epic_high"] - first["epic"]]]
        by_size.errorbar(first["parameters"], first["epic"], around, fmt="o")
        panel, both = (
            figure.add_subplot(rows, 2, place),
            [first["rewards"][x] for x in (good, ~good)],
        )
        style = {"color": ["tab:green", "tab:red"], "label": ["good", "not good"], "alpha": 0.5}
        panel.hist(both, 40, density=True, histtype="stepfilled", **style)
        panel.set(title=short(model), xlabel="reward", yticks=[])
        panel.legend(frameon=False, fontsize="small")
    by_alpha.set(xlabel="alpha", ylabel="EPIC distance (band: 95 %)")
    by_size.set(xlabel="parameters", ylabel=f"EPIC, alpha {first['reward_alpha']:g}", xscale="log")
    save_with_legend(figure, path)


def draw_success(path, title, results):
    """Draw successful steps per episode as a histogram (figures 5 and 6 of arXiv 2310.12921).

    results: {name: [N] share of good steps in an episode} of each policy.
    """
    figure = new_figure(5.2, 3.6, title)
    ax = figure.subplots()
    ax.hist([100 * np.array(x) for x in results.values()], range(0, 101, 5), label=list(results))
    ax.axvline(100 * THRESHOLD, color="0.5", ls="--", lw=1)
    ax.set(xlabel="successful steps of an episode, %", ylabel="episodes")
    ax.yaxis.get_major_locator().set_params(integer=True)
    save_with_legend(figure, path, columns=1)
