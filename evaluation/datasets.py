"""A dataset: states, the facts known about them, and their origin, in one .npz file.

Pictures are not part of it: a picture is a function of a state, drawn when it is needed. Labels
and all results are in the folder of the same name, data/kneeling/.
"""

import codecs
import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clip_reward import UsageError, message_of, shorten
from environments.classic import CLASSIC_STATE_SIZES
from environments.judges import task_for
from evaluation.runs import Own, args_of, rollout, script_of, state_size
from training.run import write

COLUMNS = "states", "episode", "step", "checkpoint_step", "env_reward", "success", "pose"


@dataclass
class Dataset:
    """All arrays have one row for each of N states."""

    args: Any  # Args of a script: the task of these states, its prompt and judge, their pictures
    made: dict  # the origin of the states: "source" (run, uniform, poses), seed, ..
    states: np.ndarray  # [N, S] float64
    episode: Any = None  # [N] int
    step: Any = 0  # [N] int, in the episode, from 0
    checkpoint_step: Any = -1  # [N] int, -1: from no checkpoint
    env_reward: Any = np.nan  # [N] the environment's own reward, NaN where unknown
    success: Any = -1  # [N] of its episode, by the task's own rule; -1: there is no rule
    pose: Any = ""  # [N] str, "" where unknown
    path: Path = Path("dataset.npz")

    def __post_init__(self):
        self.episode = np.arange(len(self)) if self.episode is None else self.episode
        for name in COLUMNS[1:]:  # a single value holds for all states
            setattr(self, name, np.full(len(self), getattr(self, name)))

    def __len__(self):
        return len(self.states)

    @property
    def folder(self):
        """Where labels and results are: beside the file, under its name."""
        return self.path.with_suffix("")

    def rows(self, episode):
        """Return the rows of an episode in the order of time."""
        rows = np.flatnonzero(self.episode == episode)
        return rows[np.argsort(self.step[rows], kind="stable")]


def save_dataset(dataset, path):
    """Write the .npz of a dataset."""
    columns = {name: getattr(dataset, name) for name in COLUMNS}
    saved = {"script": script_of(dataset.args).__file__, "flags": vars(dataset.args)}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, arguments=json.dumps(dataset.made | saved, default=str), **columns)


def load_dataset(path, own=None) -> Dataset:
    """Read a file that `save_dataset` wrote. Raises UsageError for any other file and, as `args_of`
    does, for code that `own` (an Own) does not name."""
    path = Path(path)
    try:
        with np.load(path) as file:
            columns = {name: file[name] for name in COLUMNS}
            made = dict(json.loads(str(file["arguments"])))
        saved = dict(made.pop("flags")) | {"script": made.pop("script")}
        states = columns["states"]
        if states.ndim != 2 or not len(states) or not np.isfinite(states).all():
            raise ValueError("it has no states, or a NaN or infinity in them")
        data = Dataset(saved, made, **columns, path=path)
    except Exception as error:  # unpacking raises many types
        problem = f"missing, damaged or not what eval_epic.py collect makes: {message_of(error)}"
        raise UsageError(f"{path} is {problem}") from error
    data.args = args_of(saved, path, own or Own())
    size = state_size(data.args, path)
    if size not in (None, states.shape[1]) or len({len(x) for x in columns.values()}) > 1:
        raise UsageError(f"{path}: {data.args.env_id} needs states [N, {size}] and columns [N]")
    return data


def play(args, paths, episodes, key, explore=False, every=1, made=()):
    """Play episodes of each checkpoint in `paths` and keep every `every`-th step -> Dataset.

    Args:
        key: (seed, number of the use), which determines starts that training never uses.
        made: what else to record about the dataset's origin.
    """
    parts, (seed, use) = [], key
    for k, path in enumerate(paths):
        # a spawn key: SeedSequence((0, 3, 0)) equals SeedSequence((0, 3)), which a rollout uses
        seeds = np.random.SeedSequence(seed, spawn_key=(use, k)).generate_state(episodes)
        parts.append(rollout(args, path, seeds, explore))
        parts[k]["episode"] += k * episodes
    kept = parts[0]["step"] % every == every - 1
    columns = {name: np.concatenate([part[name][kept] for part in parts]) for name in parts[0]}
    return Dataset(args, {"source": "run"} | dict(made), **columns)


def uniform_columns(env_id, count, seed):
    """Draw states uniformly -> columns of a Dataset. CartPole: the track, all angles, velocities up
    to 2 (no picture shows them); MountainCar: its observation space. The tasks' own rewards are
    known, except MountainCarContinuous's, which depends on the action."""
    if env_id not in CLASSIC_STATE_SIZES:
        raise UsageError(f"--env-id {env_id}: choose from {', '.join(CLASSIC_STATE_SIZES)}")
    high = [2.4, 2.0, np.pi, 2.0] if env_id == "CartPole-v1" else [0.6, 0.07]
    low = np.negative(high) if env_id == "CartPole-v1" else [-1.2, -0.07]
    states = np.random.default_rng(seed).uniform(low, high, (count, len(low)))
    good = task_for(env_id).judge(states)
    own = {"CartPole-v1": good * 1.0, "MountainCar-v0": good - 1.0}
    return {"states": states, "env_reward": own.get(env_id, np.nan)}


def results_folder(path):
    """Make a new folder: `path`, or if that exists already `path`_2, _3, .."""
    folder, number = path, 1
    while folder.exists():
        number += 1
        folder = path.with_name(f"{path.name}_{number}")
    folder.mkdir(parents=True)
    return folder


def write_csv(path, columns, rows):
    """Write rows, each {column: value}, as a CSV file; a kill or a full disk leaves the old file.
    Raises RunError."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write(Path(path), file.getvalue().encode())


# the name of the dataset's file, "frame" or "episode", its number, the task's name, 1 or 0
LABEL_COLUMNS = ["dataset", "unit", "index", "task", "label"]


def label_rows(path):
    """Read a file of labels, also one that a spreadsheet has saved (docs/labels.md) -> columns,
    {line: {column: value}}. Raises UsageError if it cannot be read or is not a CSV file with
    LABEL_COLUMNS."""
    try:
        data, line, table = Path(path).read_bytes(), 1, {}
    except OSError as error:
        how = "make it with: python eval_epic.py label DATASET"
        raise UsageError(f"labels {path}: {error.strerror}; {how}") from error
    utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if utf_16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")  # Excel's encoding in western Europe
    head = next(filter(str.strip, text.splitlines()), "")
    form = {"delimiter": max(",;\t", key=head.count), "skipinitialspace": True, "strict": True}
    try:
        for cells in (reader := csv.reader(io.StringIO(text, newline=""), **form)):
            table[line] = [cell.strip() for cell in cells]
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(f"{path}, line {line}: this is not CSV: {error} in a cell") from error
    (line, header), *rows = [(n, cells) for n, cells in table.items() if any(cells)] or [(1, [])]
    header, wanted = [name.lower() for name in header], ",".join(LABEL_COLUMNS)
    if any(header.count(name) != 1 for name in LABEL_COLUMNS):
        problem = f"the columns must include {wanted}, each once, not {shorten(head, 80)!r}"
        raise UsageError(f"{path}, line {line}: these are not labels: {problem}")
    if "\0" in text:
        raise UsageError(f"{path} has NUL bytes, so it is not CSV; save it as CSV again")
    columns = list(dict.fromkeys(header))
    rows = {line: dict.fromkeys(columns, "") | dict(zip(header, cells)) for line, cells in rows}
    for line, row in rows.items():
        if not all(row[column] for column in LABEL_COLUMNS):
            raise UsageError(f"{path}, line {line}: {wanted} must all have a value")
    return columns, rows


def rows_about(path, dataset, task):
    """Return the rows of a file of labels that are about a dataset and task: {line: row}."""
    about = dataset.path.stem, task
    rows = label_rows(path)[1].items()
    return {k: x for k, x in rows if (x["dataset"].removesuffix(".npz"), x["task"]) == about}


def read_labels(path, dataset, task):
    """Read the labels of a dataset -> {"frame": {row: bool}, "episode": {number: bool}}, in
    the order of the file. Rows on other datasets and tasks are skipped. Raises UsageError for a
    row that cannot be used."""
    there = {"frame": range(len(dataset)), "episode": set(dataset.episode.tolist())}
    labels = {"frame": {}, "episode": {}}
    for line, row in rows_about(path, dataset, task).items():
        unit, index, label = row["unit"], row["index"], row["label"]
        if (
            not index.isdecimal()
            or len(index) > 18
            or int(index) not in there.get(unit, ())
            or label not in ("0", "1")
        ):
            wanted = f"must be a frame or episode of {dataset.path}, labelled 0 or 1"
            found = shorten(f"{unit} {index}, {label!r}", 60)
            raise UsageError(f"{path}, line {line}: {wanted}, not {found}")
        labels[unit][int(index)] = label == "1"
    return labels


def labellers(path, dataset, task):
    """Return who labelled frames in a file of labels: {row: its "by"}, "" for a person."""
    frames = (x for x in rows_about(path, dataset, task).values() if x["unit"] == "frame")
    return {int(row["index"]): row.get("by", "") for row in frames}


def labels_of(source, dataset, task):
    """Return the labels of `source` ("judge", "env", or a CSV file, which may label whole episodes
    instead): ([N] float64, NaN for a state without a label; {episode: bool})."""
    if source == "judge":
        return task.judge(dataset.states).astype(np.float64), {}
    if source == "env":
        return dataset.env_reward, {}
    answers = read_labels(source, dataset, task.name)
    if not any(answers.values()):
        raise UsageError(f"{source} has no label for {task.name} on {dataset.path.stem}")
    labels = np.full(len(dataset), np.nan)
    labels[list(answers["frame"])] = list(answers["frame"].values())
    return labels, answers["episode"]


def two_classes(source, dataset, task):
    """Read labels as `labels_of` does -> (rows with a label [K], their labels [K]). Raises
    UsageError if all labels are the same: no statistic is defined then."""
    values, _ = labels_of(source, dataset, task)
    rows = np.flatnonzero(np.isfinite(values))
    if len(np.unique(values[rows])) < 2:
        problem = f"all {len(rows)} labels on states of {dataset.path} are the same"
        raise UsageError(f"--labels {source}: {problem}; there must be states of both kinds")
    return rows, values[rows]
