"""Label a dataset as a person would who errs now and then: a judge presses the keys of the
labelling page, and 5 % of its answers are wrong.

    python eval_epic.py collect --source poses --out data/one.npz
    python benchmarks/labels.py --dataset data/one.npz --judge splits --count 100
    python eval_epic.py fit --dataset data/one.npz --judge splits --out data/head.safetensors
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: off
import egl_render

egl_render.setup_gl()  # before a judge imports mujoco
import numpy as np
import tyro

# isort: on
from evaluation import datasets, fit, label_page
from evaluation.runs import Own, task_of


@dataclass(kw_only=True)
class Args(Own):
    dataset: Path
    """a file made by eval_epic.py collect"""
    judge: str | None = None
    """as in eval_epic.py label"""
    count: int = 100
    """how many answers to give, beside those in the file"""
    uncertain: Path | None = None
    """as in eval_epic.py label"""
    errors: float = 0.05
    """share of wrong answers"""
    seed: int = 0
    """seed of the errors"""


def main(args: Args):
    data = datasets.load_dataset(args.dataset, args)
    task = task_of(args.judge, data.args, args.dataset)
    order = fit.least_sure(args.uncertain, data) if args.uncertain else None
    session = label_page.Session(data, task, "frame", data.folder / "labels.csv", order=order)
    data.folder.mkdir(parents=True, exist_ok=True)
    rng, verdicts = np.random.default_rng(args.seed), task.judge(data.states)
    todo = session.todo()[: args.count]
    for index in todo:
        session.answer(index, bool(verdicts[index] ^ (rng.random() < args.errors)))
    given = np.array([session.answers[index] for index in todo])
    wrong = (given != verdicts[todo]).sum()
    print(f"{len(todo)} answers, {given.sum()} of them yes, {wrong} wrong")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
