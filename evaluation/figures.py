"""The pictures that eval_epic.py writes: contact sheets, judged videos, and the paper's figures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from environments.judges import THRESHOLD

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


def grid(cells, columns):
    """Lay out pictures [N, H, W, 3] uint8 in rows of `columns`, filled with white: [H', W', 3]."""
    white = np.full_like(cells[0], 255)
    cells = [*cells, *[white] * (-len(cells) % columns)]
    rows = (cells[k : k + columns] for k in range(0, len(cells), columns))
    return np.concatenate([np.concatenate(row, 1) for row in rows])


def write_sheet(path, cells):
    """Write a contact sheet of pictures as from `framed`, as PNG, ten in a row."""
    Image.fromarray(grid(list(cells), 10)).save(path)


# An episode is (frames [T, H, W, 3] uint8, steps [T] 1 or 0, success).


def moment(episode, t):
    """Frame an episode's picture at step t (later its last): the border is the verdict on the step,
    the words below that on the whole episode."""
    frames, steps, success = episode
    t, verdict = min(t, len(frames) - 1), "success" if success else "failure"
    words = f"step {t + 1}: {steps[: t + 1].sum():.0f} good\nepisode: {verdict}"
    return framed(frames[t], words, steps[t] == 1)


def judged_video(episodes):
    """Lay out episodes side by side, eight in a row, as one video: [T, H', W', 3] uint8."""
    length = max(len(frames) for frames, _, _ in episodes)
    columns = min(8, len(episodes))
    return np.stack([grid([moment(e, t) for e in episodes], columns) for t in range(length)])


def new_figure(width=5.2, height=3.6, title=None):
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


def draw_epic(out, title, table, good):
    """Draw figures 4a, 4b and 7 of arXiv 2310.12921: epic_alpha.png, epic_scaling.png,
    histograms.png (at the first alpha).

    table: rows of compare.compare with "parameters"; good [K] bool: which states the labels call
    good.
    """
    models = list(dict.fromkeys(row["model"] for row in table))
    by_alpha, by_size = new_figure(title=title), new_figure(title=title)
    histograms = new_figure(5.2, 2.2 * len(models) + 0.8, title)
    ax, ax_size = by_alpha.subplots(), by_size.subplots()
    for model, panel in zip(models, histograms.subplots(len(models), squeeze=False).flat):
        first, *_ = rows = [row for row in table if row["model"] == model]
        rows = sorted(rows, key=lambda row: row["reward_alpha"])
        keys = ("reward_alpha", "epic", "epic_low", "epic_high")
        alpha, epic, low, high = ([row[key] for row in rows] for key in keys)
        (line,) = ax.plot(alpha, epic, marker="o", ms=4, label=short(model))
        ax.fill_between(alpha, low, high, color=line.get_color(), alpha=0.15, lw=0)
        where = math.log10(first["parameters"])
        ax_size.plot(where, first["epic"], "o", color=line.get_color(), label=short(model))
        ax_size.vlines(where, first["epic_low"], first["epic_high"], color=line.get_color())
        values = first["rewards"]
        values = np.clip((values - values.mean()) / (values.std() or 1), -4, 4)
        for which, name, color in ((good, "good", "tab:green"), (~good, "not good", "tab:red")):
            bins = np.linspace(-4, 4, 41)
            panel.hist(values[which], bins, density=True, color=color, alpha=0.5, label=name)
        panel.set(title=short(model), xlabel="standardised reward", yticks=[])
    ax.set(xlabel="alpha", ylabel="EPIC distance (band: 95 %)")
    ax_size.set(xlabel="log10(parameters)", ylabel=f"EPIC, alpha {first['reward_alpha']:g}")
    ax_size.margins(x=0.15)
    save_with_legend(by_alpha, out / "epic_alpha.png")
    save_with_legend(by_size, out / "epic_scaling.png")
    save_with_legend(histograms, out / "histograms.png")


def draw_success(path, title, results):
    """Draw successful steps per episode as a histogram (figures 5 and 6 of arXiv 2310.12921).

    results: {name: [N] share of good steps in an episode} of each policy.
    """
    figure = new_figure(title=title)
    ax = figure.subplots()
    ax.hist([100 * np.array(x) for x in results.values()], range(0, 101, 5), label=list(results))
    ax.axvline(100 * THRESHOLD, color="0.5", ls="--", lw=1)
    ax.set(xlabel="successful steps of an episode, %", ylabel="episodes")
    ax.yaxis.get_major_locator().set_params(integer=True)
    save_with_legend(figure, path, columns=1)


def draw_landscape(path, panels, columns):
    """Draw rewards along one coordinate, one line per alpha (figure 2 of arXiv 2310.12921).

    panels: [(title, x label, values [N], goal, {alpha: [N] rewards})], so many columns in a row.
    """
    rows = len(panels) // columns
    figure = new_figure(4 * columns, 3.2 * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for ax, (title, label, values, goal, rewards) in zip(axes, panels):
        for k, (alpha, reward) in enumerate(rewards.items()):
            rescaled = (reward - reward.min()) / (np.ptp(reward) or 1)
            color = (0.1, 0.2 + 0.7 * k / len(rewards), 0.5)
            ax.plot(values, rescaled, color=color, lw=1.4, label=f"alpha {alpha:g}")
        ax.axvline(goal, color="tab:red", ls="--", lw=1)
        ax.annotate("goal", (goal, 1.02), color="tab:red", ha="center", annotation_clip=False)
        ax.set_title(title, size="medium")
        ax.set(xlabel=label, ylabel="reward, rescaled", ylim=(-0.02, 1.1))
        ax.locator_params(nbins=6)
    save_with_legend(figure, path, columns=6)
