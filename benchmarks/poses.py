"""Judges of five poses that no caption of tiny_clip describes.

    python eval_epic.py label data/one.npz --judge benchmarks/poses.py:knees_up

States are the humanoid's, [B, 47]: qpos and qvel.
"""

from environments import judges


def front(states):
    """Return z of the torso's front axis for states [B, S]: 1 on its back, -1 face down."""
    w, x, y, z = states[:, 3:7].T
    return 2 * (x * z - w * y)


def knees_up(states):
    """It lies on its back and has drawn up both knees."""
    found = judges.measure(states)
    on_back = (found["trunk"] <= judges.TOUCH) & (front(states) > 0.7)
    return on_back & (found["bend"] > 1.2).all(1)


def one_leg_folded(states):
    """It lies face down with one leg folded and the other straight."""
    found = judges.measure(states)
    on_front = (found["trunk"] <= judges.TOUCH) & (front(states) < -0.7)
    return on_front & (found["bend"].max(1) > 1.2) & (found["bend"].min(1) < 0.6)


def on_one_knee(states):
    """It is down on one knee: the other knee is off the floor, the torso upright."""
    found = judges.measure(states)
    one = (found["knee"].min(1) <= judges.KNEE_TOUCH) & (found["knee"].max(1) > judges.REACH)
    return one & (found["up"] > 0.7) & (found["trunk"] > judges.REACH)


def sits_knees_up(states):
    """It sits on the floor with both knees drawn up, its back off the floor."""
    found = judges.measure(states)
    sits = (found["pelvis_floor"] <= judges.TOUCH) & (found["trunk"] > judges.TOUCH)
    return sits & ((found["bend"] > 1.2) & (found["knee_at"][..., 2] > 0)).all(1)


def sits_on_heels(states):
    """It sits on its heels, the shins on the floor and the torso upright."""
    found = judges.measure(states)
    folded = ((found["shin"] <= judges.TOUCH) & (found["bend"] > 2.2)).all(1)
    return folded & (found["pelvis"] < 0.3) & (found["up"] > 0.7) & (found["trunk"] > judges.TOUCH)
