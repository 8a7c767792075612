"""A dataset: states, what is known of them, and what they were made from, in one .npz file.

Pictures are not part of it: a picture is a function of a state, drawn when somebody looks. A
person's labels and all results are in the folder of the same name, data/kneeling/.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clip_reward import UsageError
from environments.judges import THRESHOLD, task_for


@dataclass
class Dataset:
    """All arrays have a row for each of N states; a single value holds for all."""

    arguments: dict  # what it was made from: source, seed, run, .. and "flags", those of the run
    states: np.ndarray  # [N, S] float64
    episode: np.ndarray = None  # [N] int
    step: np.ndarray = 0  # [N] int, in the episode, from 0
    checkpoint_step: np.ndarray = -1  # [N] int, -1: from no checkpoint
    env_reward: np.ndarray = np.nan  # [N] the environment's own reward, NaN where unknown
    success: np.ndarray = -1  # [N] its episode's, by the task's own rule; -1: it has none
    pose: np.ndarray = ""  # [N] str, "" where unknown
    path: Path = Path("dataset.npz")

    def __post_init__(self):
        self.episode = np.arange(len(self)) if self.episode is None else self.episode
        for name in COLUMNS[1:]:
            setattr(self, name, np.full(len(self), getattr(self, name)))

    def __len__(self):
        return len(self.states)

    @property
    def flags(self):
        """{name: value} of the run, or of one that would draw these states: env_id, camera, .."""
        return self.arguments["flags"]

    @property
    def folder(self):
        """Where labels and results are: beside the file, under its name."""
        return self.path.with_suffix("")

    def rows(self, episode):
        """Return the rows of an episode in the order of time."""
        rows = np.flatnonzero(self.episode == episode)
        return rows[np.argsort(self.step[rows], kind="stable")]

    def episode_success(self, episode, verdicts, own_rule=True):
        """Return whether an episode is a success: by the task's own rule if it has one, else if the
        verdicts [N] (1, 0, NaN: none) on at least half of its states are good."""
        rows = self.episode == episode
        own = self.success[rows][0]
        if own_rule and own >= 0:
            return bool(own)
        judged = verdicts[rows][np.isfinite(verdicts[rows])]
        return bool(len(judged) and judged.mean() >= THRESHOLD)


COLUMNS = [field.name for field in dataclasses.fields(Dataset)][1:-1]


def save_dataset(dataset, path):
    """Write the .npz of a dataset."""
    columns = {name: getattr(dataset, name) for name in COLUMNS}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, arguments=json.dumps(dataset.arguments), **columns)


def load_dataset(path) -> Dataset:
    """Read a file that `save_dataset` wrote. Raises UsageError for anything else."""
    path = Path(path)
    try:
        with np.load(path) as file:
            data = Dataset(
                json.loads(str(file["arguments"])), **{x: file[x] for x in COLUMNS}, path=path
            )
        data.flags["env_id"], data.flags["target_prompt"], data.arguments["script"]
        assert data.states.ndim == 2 and all(len(getattr(data, x)) == len(data) for x in COLUMNS)
        return data
    except Exception as error:  # unpacking alone raises half a dozen kinds
        made = "what eval_epic.py collect makes"
        raise UsageError(f"{path} is missing, damaged or not {made}: {error!r}") from error


def uniform_columns(env_id, count, seed):
    """Return columns of states drawn uniformly. CartPole: the track, all angles, velocities up to 2
    (no picture shows them); MountainCar: its observation space. The environment's own reward is
    known except for MountainCarContinuous, where it depends on the action."""
    high = [2.4, 2.0, np.pi, 2.0] if env_id == "CartPole-v1" else [0.6, 0.07]
    low = np.negative(high) if env_id == "CartPole-v1" else [-1.2, -0.07]
    states = np.random.default_rng(seed).uniform(low, high, (count, len(low)))
    good = task_for(env_id).judge(states)
    own = {"CartPole-v1": good * 1.0, "MountainCar-v0": good - 1.0}
    return {"states": states, "env_reward": own.get(env_id, np.nan)}


def results_folder(path):
    """Make a new folder: `path`, or where that exists already `path`_2, _3, .."""
    folder, number = path, 1
    while folder.exists():
        number += 1
        folder = path.with_name(f"{path.name}_{number}")
    folder.mkdir(parents=True)
    return folder


def write_csv(path, columns, rows):
    """Write rows, each {column: value}, as a CSV file that is flushed to the disk and renamed into
    place. Raises OSError; the old file stays then."""
    partial = Path(path).with_name(f".{Path(path).name}.tmp")
    with open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


LABEL_COLUMNS = ["dataset", "unit", "index", "task", "label"]


def label_rows(path):
    """Read a file of labels -> (columns, rows {column: value}). Raises OSError, or UsageError for a
    file that is not a CSV with LABEL_COLUMNS."""
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file, restval="")
            columns, rows = reader.fieldnames or [], list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: not a CSV file: {error}") from error
    if not set(LABEL_COLUMNS) <= set(columns):
        raise UsageError(f"{path}: not labels; the columns are {','.join(LABEL_COLUMNS)}")
    return columns, rows


def read_labels(path, dataset, task, needed=True):
    """Read a person's labels of a dataset: {"frame": {row: bool}, "episode": {number: bool}}, in
    the order of the file. Rows on other datasets and tasks are skipped.

    Args:
        path: CSV with LABEL_COLUMNS: the dataset's name (that of its file), "frame" or "episode",
            its number, the task's name, 1 or 0.
        needed: whether it is an error if there are none.
    Raises UsageError as `label_rows`, and for a row that says nothing.
    """
    there = {"frame": range(len(dataset)), "episode": set(dataset.episode.tolist())}
    labels, others = {"frame": {}, "episode": {}}, set()
    for line, row in enumerate(label_rows(path)[1], 2):
        name, unit, index, about, label = (row[column] for column in LABEL_COLUMNS)
        if (name, about) != (dataset.path.stem, task):
            others.add(f"{about} on {name}")
        elif index.isdecimal() and int(index) in there.get(unit, ()) and label in ("0", "1"):
            labels[unit][int(index)] = label == "1"
        else:
            wanted = f"a frame or episode of {dataset.path} and 0 or 1"
            raise UsageError(f"{path}, line {line}: not {wanted}: {unit} {index}, {label!r}")
    if needed and not labels["frame"] and not labels["episode"]:
        found = ", ".join(sorted(others)) or "nothing"
        raise UsageError(f"{path}: no label for {task} on {dataset.path.stem}; it has {found}")
    return labels
