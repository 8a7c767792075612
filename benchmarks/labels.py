"""Label a dataset like a person who errs now and then: a judge presses the keys of the labelling
page, and 5 % of its answers are wrong. The flags are those of `eval_epic.py label`.

    python eval_epic.py collect --source poses --out data/one.npz
    python benchmarks/labels.py data/one.npz --judge splits --count 100
    python eval_epic.py fit --dataset data/one.npz --judge splits --out data/head.safetensors \\
        --clip-model tiny_clip
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval_epic

# isort: split
import numpy as np
import tyro
from pydantic.dataclasses import dataclass


@dataclass(kw_only=True)
class Args(eval_epic.Label):
    count: int | None = 100
    """how many answers to give, in addition to those in the file"""
    errors: float = 0.05
    """share of wrong answers"""
    seed: int = 0
    """seed of the order and of the errors"""


def main(args: Args):
    count, args.count = args.count, None
    session = args.session()
    rng, verdicts = np.random.default_rng(args.seed), session.task.judge(session.dataset.states)
    todo = session.todo()[:count]
    for index in todo:
        session.answer(index, bool(verdicts[index] ^ (rng.random() < args.errors)))
    given = np.array([session.answers[index] for index in todo])
    wrong = (given != verdicts[todo]).sum()
    print(f"{len(todo)} answers, {given.sum()} of them yes, {wrong} wrong")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
