"""Judges of two poses that no caption of tiny_clip has words for.

    python eval_epic.py label data/one.npz --judge benchmarks/poses.py:knees_up

States are the humanoid's, [B, 47]: qpos and qvel.
"""

import numpy as np

from environments import judges


def axis_heights(states):
    """Return z of the torso's forward, left and upward axes for humanoid states [B, S]: [3, B]."""
    w, x, y, z = states[:, 3:7].T
    return np.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)])


def on_side(states):
    """It lies on its side: the torso on the floor, one shoulder above the other."""
    _, left, _ = axis_heights(states)
    return (judges.measure(states)["trunk"] <= judges.TOUCH) & (np.abs(left) > 0.7)


def knees_up(states):
    """It lies on its back and has drawn up both knees."""
    found, (forward, _, _) = judges.measure(states), axis_heights(states)
    on_back = (found["trunk"] <= judges.TOUCH) & (forward > 0.7)
    return on_back & (found["bend"] > 1.2).all(1)
