"""States of policies that a tiny_clip has taught, kept as hacked.npz for the next to learn from.

    python tiny_clip/hacked.py runs/RUN [runs/RUN ...]

Of every checkpoint of each run (trained with --keep-checkpoints 0) some episodes, with actions
sampled as in training, are added to what is there. Random policies never half-kneel or raise one
arm; who is paid for it does.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval_epic
from tiny_clip.data import HACKED

EPISODES, EVERY = 6, 8  # of each checkpoint, and how many steps of an episode make one state


def main(runs):
    with np.load(HACKED) as file:
        states, episodes, sources = ([file[key]] for key in ("states", "episode", "source"))
    for run in runs:
        args = eval_epic.load_run(run)
        for path in eval_epic.checkpoint_paths(run, ["all"]):
            seeds = np.random.SeedSequence((len(sources), 5)).generate_state(EPISODES)
            played = eval_epic.rollout(args, path, seeds, explore=True)
            kept = played["step"] % EVERY == EVERY - 1
            states.append(played["states"][kept, :24])
            episodes.append(played["episode"][kept] + sum(map(len, sources)))
            name = f"{args.reward.target_prompt[0]}, {path.stem} of {Path(run).resolve().name}"
            sources.append([name] * EPISODES)  # of each episode
    states, episode, source = map(np.concatenate, (states, episodes, sources))
    states, episode = states.astype(np.float32), episode.astype(np.int16)
    np.savez_compressed(HACKED, states=states, episode=episode, source=source)
    print(f"{HACKED}: {len(states)} states of {len(source)} episodes")


if __name__ == "__main__":
    main(sys.argv[1:])
