"""States of policies, kept as hacked.npz for tiny_clip to learn from.

    python tiny_clip/hacked.py runs/RUN [runs/RUN ...]

Random policies never half-kneel or raise one arm; who is paid for it does. Of the replay buffer in
each run's newest checkpoint some states are added to what is there, as many far from the pose that
the run was about as near to it.
"""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evaluation import runs as played
from tiny_clip import data, poses
from training.run import checkpoints, load_checkpoint, saved_flags

PER_DEGREE = 150  # of each run, so many states (or all) from each tenth of the way into its pose


def states_of(run, rng):
    """States of a run's replay: (qpos [B, 24] but for x and y, number of their episode [B], what
    run it was)."""
    env_id = saved_flags(run)["env_id"]
    paid = env_id.startswith("tiny_clip.teacher:")  # code, but ours
    args = played.load_run(run, played.Own(env_id=env_id if paid else None))
    pose = gym.make(env_id).unwrapped.pose if paid else played.task_of(None, args, run).name
    step, path = max(checkpoints(run).items())
    seen = load_checkpoint(path)["replay"]["rings"][0][:, 1:, :, :22]  # Humanoid-v5: qpos[2:] first
    episode = np.arange(seen.shape[0] * seen.shape[2]).reshape(seen.shape[0], 1, -1)
    episode = np.broadcast_to(episode, seen.shape[:3]).ravel()
    some = rng.permutation(len(episode))[:20_000]
    states = np.pad(seen.reshape(-1, 22).numpy()[some], ((0, 0), (2, 0)))
    tenth = (10 * data.degrees(poses.describe(states.astype(np.float64)))[pose]).astype(int)
    kept = np.concatenate([np.flatnonzero(tenth == k)[:PER_DEGREE] for k in range(11)])
    _, episode = np.unique(episode[some][kept], return_inverse=True)
    name = f"{pose}, {args.reward}, {step} of {Path(run).resolve().name}"
    return states[kept], episode, name


def main(runs):
    rng = np.random.default_rng(0)
    with np.load(data.HACKED) as file:
        states, episodes, sources = ([file[key]] for key in ("states", "episode", "source"))
    for run in runs:
        qpos, episode, name = states_of(run, rng)
        states.append(qpos)
        episodes.append(episode + sum(map(len, sources)))
        sources.append([name] * (episode.max() + 1))  # of each episode
        print(f"{name}: {len(qpos)} states")
    states, episode, source = map(np.concatenate, (states, episodes, sources))
    # a picture does not show the half millimetre that half precision is off
    states, episode = states.astype(np.float16), episode.astype(np.int32)
    _, first = np.unique(states, axis=0, return_index=True)  # runs of one seed begin alike
    states, episode = states[np.sort(first)], episode[np.sort(first)]
    np.savez_compressed(data.HACKED, states=states, episode=episode, source=source)
    print(f"{data.HACKED}: {len(states)} states of {len(source)} episodes")


if __name__ == "__main__":
    main(sys.argv[1:])
