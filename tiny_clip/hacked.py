"""States of policies that a tiny_clip has taught, kept as hacked.npz for the next to learn from.

    python tiny_clip/hacked.py runs/RUN [runs/RUN ...]

Of every checkpoint of each run (trained with --keep-checkpoints 0) some episodes, with actions
sampled as in training. Random policies never half-kneel or raise one arm; who is paid for it does.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval_epic
from tiny_clip.data import HACKED

EPISODES, EVERY = 6, 8  # of each checkpoint, and how many steps of an episode make one state


def main(runs):
    states, episodes, names = [], [], []
    for run in runs:
        args = eval_epic.load_run(run)
        for path in eval_epic.checkpoint_paths(run, ["all"]):
            seeds = np.random.SeedSequence((len(names), 5)).generate_state(EPISODES)
            played = eval_epic.rollout(args, path, seeds, explore=True)
            kept = played["step"] % EVERY == EVERY - 1
            states.append(played["states"][kept, :24])
            episodes.append(played["episode"][kept] + EPISODES * len(names))
            names.append(f"{args.reward.target_prompt[0]}, {path.stem}")
    states, episodes = np.concatenate(states).astype(np.float32), np.concatenate(episodes)
    source = np.repeat(names, EPISODES)  # of each episode
    np.savez_compressed(HACKED, states=states, episode=episodes.astype(np.int16), source=source)
    print(f"{HACKED}: {len(states)} states of {len(source)} episodes")


if __name__ == "__main__":
    main(sys.argv[1:])
