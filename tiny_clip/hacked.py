"""States of policies, kept as hacked.npz for tiny_clip to learn from.

    python tiny_clip/hacked.py POSE:RUN [POSE:RUN ...]

Random policies never half-kneel or raise one arm, but policies that are rewarded for a pose do.
From the replay buffer in the newest checkpoint of each run, this script adds as many states near
the pose as far from it. It drops random states of earlier runs, so that the file keeps its size.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_clip import data, poses
from training.run import checkpoints, load_checkpoint

PER_TENTH = 250  # states of each run from each tenth of the way into its pose
KEPT = 62_000  # states in the file


def states_of(pose, run, rng):
    """Return states from a run's replay buffer: qpos [B, 24] (x and y are 0) and the number of each
    one's episode [B]."""
    seen = load_checkpoint(next(iter(checkpoints(run).values())))["replay"]["rings"][0]
    seen = seen[:, 1:, :, :22]  # observations [rollouts, T, N, 22]: qpos without x and y
    episode = np.arange(seen.shape[0] * seen.shape[2]).reshape(seen.shape[0], 1, -1)
    episode = np.broadcast_to(episode, seen.shape[:3]).ravel()
    some = rng.permutation(len(episode))[:20_000]
    states = np.pad(seen.reshape(-1, 22).numpy()[some], ((0, 0), (2, 0)))
    tenth = (10 * data.degrees(poses.describe(states.astype(np.float64)))[pose]).astype(int)
    kept = np.concatenate([np.flatnonzero(tenth == k)[:PER_TENTH] for k in range(11)])
    return states[kept], episode[some][kept]


def main(runs):
    rng = np.random.default_rng(len(runs))
    with np.load(data.HACKED) as file:
        old, old_episode, source = file["states"], file["episode"], file["source"]
    states, episode, source = [], [], [source]
    for pose, run in (name.split(":", 1) for name in runs):
        qpos, numbers = states_of(pose, run, rng)
        names, numbers = np.unique(numbers, return_inverse=True)
        states.append(qpos)
        episode.append(numbers + sum(map(len, source)))
        source.append([f"{pose}, {Path(run).resolve().name}"] * len(names))  # of each episode
        print(f"{source[-1][0]}: {len(qpos)} states")
    kept = np.sort(rng.permutation(len(old))[: KEPT - sum(map(len, states))])
    states = np.concatenate([old[kept], *states]).astype(np.float16)  # half a millimetre off
    episode = np.concatenate([old_episode[kept], *episode]).astype(np.int32)
    # runs of one seed begin alike: a state stays in the training episode, if it is in one
    first = np.argsort(episode % 5 == 0, kind="stable")
    _, unique = np.unique(states[first], axis=0, return_index=True)
    rows = np.sort(first[unique])
    states, episode = states[rows], episode[rows]
    np.savez_compressed(data.HACKED, states=states, episode=episode, source=np.concatenate(source))
    print(f"{data.HACKED}: {len(states)} states")


if __name__ == "__main__":
    main(sys.argv[1:])
