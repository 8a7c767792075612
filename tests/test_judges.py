"""The judges against the pose library, of whose code they use none, and against states by hand."""

import inspect
import math
import re

import numpy as np
import pytest

import egl_render

egl_render.setup_gl()
import mujoco

from benchmarks import poses as poses_without_words
from clip_reward import UsageError
from environments import judges
from tiny_clip import poses


def judge_humanoid(states):
    """All eight tasks at once: {task: [B] bool}."""
    facts = judges.measure(states)
    return {name: holds(facts) for name, holds in judges.HUMANOID.items()}


@pytest.fixture(scope="module")
def verdicts():
    """{pose: {task: [30] bool}} on samples of the library."""
    rng = np.random.default_rng(77)
    samples = {name: poses.sample(name, rng, 30) for name in poses.POSE_NAMES}
    return {name: judge_humanoid(qpos) for name, qpos in samples.items()}


def test_every_task_of_the_library_has_a_judge_and_its_criterion_in_words():
    assert set(judges.HUMANOID) == set(poses.TASKS)
    for name, prompt in poses.TASKS.items():
        assert judges.TASKS[name].target_prompt == prompt
        assert judges.TASKS[name].baseline_prompt == "a humanoid robot"
    for task in judges.TASKS.values():
        assert len(task.criterion.split()) > 7 and task.criterion.endswith((".", ".)"))
    assert not re.search(r"(?m)^ *(from|import) .*(tiny_clip|poses)", inspect.getsource(judges))


WITH_ARMS = ("arms_raised", "hands_on_hips", "arms_crossed")  # who does these stands as well


@pytest.mark.parametrize("pose", poses.POSE_NAMES)
def test_a_pose_passes_its_own_judge_and_no_other(verdicts, pose):
    for task, passed in verdicts[pose].items():
        if task == pose or (task == "standing" and pose in WITH_ARMS):
            assert passed.all(), f"{task} rejects {np.flatnonzero(~passed)} of its own poses"
        else:
            assert not passed.any(), f"{task} accepts {np.flatnonzero(passed)} of {pose}"


@pytest.mark.parametrize("task", [name for name in judges.HUMANOID if name != "standing"])
def test_a_blend_from_standing_switches_once(task):
    for seed in range(3):
        path = poses.blend(task, np.random.default_rng(seed), np.linspace(0, 1, 41))
        passed = judge_humanoid(path)
        changes = np.diff(passed[task].astype(int))
        assert not passed[task][0] and passed[task][-1] and np.abs(changes).sum() == 1
        assert passed["standing"][0] and passed["standing"][-1] == (task in WITH_ARMS)


def moved(qpos, **velocity):
    """States [B, 47] of qpos [B, 24] whose torso has the given velocity."""
    qvel = np.zeros((len(qpos), 23))
    for axis, value in velocity.items():
        qvel[:, "xyz".index(axis)] = value
    return np.concatenate([qpos, qvel], 1)


@pytest.mark.parametrize("task", judges.HUMANOID)
def test_at_rest_both_forms_of_a_state_get_the_same_verdict(task):
    qpos = poses.sample(task, np.random.default_rng(3), 4)
    assert judges.TASKS[task].judge(qpos).tolist() == [True] * 4
    assert judges.TASKS[task].judge(moved(qpos)).tolist() == [True] * 4


@pytest.mark.parametrize("task", judges.HUMANOID)
def test_in_the_air_nothing_counts(task):
    qpos = poses.sample(task, np.random.default_rng(3), 4)
    qpos[:, 2] += 0.3
    assert not judges.TASKS[task].judge(qpos).any()


@pytest.mark.parametrize("task", ["standing", "kneeling", "one_leg", "arms_raised"])
def test_who_is_thrown_over_is_falling_and_who_sways_is_not(task):
    qpos = poses.sample(task, np.random.default_rng(3), 4)
    assert not judges.TASKS[task].judge(moved(qpos, x=4.0)).any()
    assert judges.TASKS[task].judge(moved(qpos, x=0.2, y=-0.2)).all()


def test_kneeling_wants_both_knees_and_the_torso_up():
    qpos = poses.sample("kneeling", np.random.default_rng(8), 8)
    tall = qpos[np.abs(qpos[:, 13]) < 1.8]  # thighs upright, the right knee bent by 90 degrees
    assert len(tall)
    one_knee = tall.copy()  # the right foot set up in front, the thigh level
    one_knee[:, 12], one_knee[:, 13] = np.radians(-90), np.radians(-90)
    assert not judges.TASKS["kneeling"].judge(one_knee).any()
    bent = tall.copy()
    for state in bent:  # the whole robot leans by 60 degrees, about the knees
        mujoco.mju_mulQuat(state[3:7], state[3:7].copy(), [np.cos(np.pi / 6), 0, 0.5, 0])
        poses.put_down(state)
    assert not judges.TASKS["kneeling"].judge(bent).any()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("outward, sits", [(0.17, True), (0.13, False)])  # m; docs/results.md
def test_lotus_wants_both_knees_to_the_side(side, outward, sits):
    facts = judges.measure(poses.sample("lotus", np.random.default_rng(3), 5))
    facts["knee_at"][:, side, 1] = outward
    facts["foot_at"][:, side, 1] = outward - 0.2
    assert (judges.HUMANOID["lotus"](facts) == sits).all()


def test_arms_crossed_needs_more_than_hands_that_touch():
    rng = np.random.default_rng(5)
    kneeling = poses.sample("kneeling", rng, 40)
    standing = poses.sample("standing", rng)[0]
    facts = judges.measure(kneeling)
    meeting = kneeling[np.abs(facts["hand_at"][..., 1]).max(1) < 0.09]  # hands as in prayer
    assert len(meeting)
    for arms in meeting[:, 18:24]:
        state = standing.copy()
        state[18:24] = arms
        assert not judges.TASKS["arms_crossed"].judge(state[None])[0]
        assert judges.TASKS["standing"].judge(state[None])[0]


def test_verdicts_do_not_depend_on_place_heading_or_company():
    rng = np.random.default_rng(6)
    qpos = np.concatenate([poses.sample(name, rng, 2) for name in judges.HUMANOID])
    turned = qpos.copy()
    turned[:, :2] += rng.uniform(-5, 5, (len(qpos), 2))
    for state in turned:
        state[3:7] = poses.rotate(state[3:7], [0, 0, 1], rng.uniform(0, 6))
    together, apart = judge_humanoid(qpos), judge_humanoid(turned)
    for name, passed in together.items():
        np.testing.assert_array_equal(passed, apart[name])
        one_by_one = [judges.TASKS[name].judge(state[None])[0] for state in qpos[:4]]
        assert passed[:4].tolist() == one_by_one


def test_measure_agrees_with_the_library_on_heights_and_wants_humanoid_states():
    rng = np.random.default_rng(9)
    qpos = np.concatenate([poses.sample(name, rng, 5) for name in ("kneeling", "lying_back")])
    facts, reference = judges.measure(qpos), poses.describe(qpos)
    low = reference["trunk"] < judges.REACH - 0.01
    assert low.sum() >= 5
    np.testing.assert_allclose(facts["trunk"][low], reference["trunk"][low], atol=1e-6)
    for name in ("up", "head", "pelvis"):
        np.testing.assert_allclose(facts[name], reference[name], atol=1e-9)
    for i, side in enumerate(judges.SIDES):
        np.testing.assert_allclose(facts["bend"][:, i], reference[f"{side}_bend"], atol=1e-9)
        foot = reference[f"{side}_foot"]
        near = foot < judges.REACH - 0.01
        np.testing.assert_allclose(facts["foot"][near, i], foot[near], atol=1e-6)
        for j, axis in enumerate("xyz"):
            place = facts["hand_at"][:, i, j]
            np.testing.assert_allclose(place, reference[f"{side}_hand_{axis}"], atol=1e-9)
    assert all(len(passed) == 0 for passed in judge_humanoid(np.empty((0, 47))).values())
    with pytest.raises(ValueError, match=r"\[B, 24\] or \[B, 47\], not \(3, 30\)"):
        judges.measure(np.zeros((3, 30)))


def test_distance_from_a_hull():
    square = np.array([[0, 0], [1, 0], [1, 1], [0, 1.0]])
    assert judges._outside(np.array([0.5, 0.5]), square) == 0
    assert judges._outside(np.array([2.0, 0.5]), square) == pytest.approx(1)
    assert judges._outside(np.array([2.0, 2.0]), square) == pytest.approx(2**0.5)
    assert judges._outside(np.array([0.5, 0.3]), square[:2]) == pytest.approx(0.3)
    assert judges._outside(np.array([3.0, 4.0]), square[:1]) == pytest.approx(5)
    assert judges._outside(np.array([3.0, 4.0]), square[:0]) == np.inf


def test_classic_tasks_are_judged_by_the_environments_own_rules():
    import gymnasium as gym

    degrees = np.radians([0, 11.9, -11.9, 12.1, 180, 0])
    states = np.zeros((6, 4))
    states[:, 2], states[5, 0] = degrees, 2.5
    assert judges.TASKS["cartpole"].judge(states).tolist() == [True] * 3 + [False] * 3
    env = gym.make("CartPole-v1").unwrapped
    assert env.theta_threshold_radians == pytest.approx(np.radians(12)) and env.x_threshold == 2.4
    for name, env_id in (
        ("mountain_car", "MountainCar-v0"),
        ("mountain_car_continuous", "MountainCarContinuous-v0"),
    ):
        goal = gym.make(env_id).unwrapped.goal_position
        states = np.array([[goal, 0], [goal + 0.05, 0], [goal - 0.001, 0.07], [-1.2, 0]])
        assert judges.TASKS[name].judge(states).tolist() == [True, True, False, False]


def test_the_task_of_a_run():
    assert judges.task_for("MountainCar-v0", ("anything",)).name == "mountain_car"
    assert judges.task_for("Humanoid-v5", ("a humanoid robot kneeling",)).name == "kneeling"
    assert judges.task_for("Humanoid-v5", ["a humanoid robot dancing"]) is None
    assert judges.task_for("HalfCheetah-v5", ["a humanoid robot kneeling"]) is None


def test_raised_hands_are_above_the_head_and_not_beside_one_that_leans():
    qpos = poses.sample("arms_raised", np.random.default_rng(4), 10)
    assert judges._raised(judges.measure(qpos)).all()
    leaning = qpos.copy()
    leaning[:, 2] = 1.0
    roll = np.array([math.cos(math.radians(30)), math.sin(math.radians(30)), 0.0, 0.0])
    for upright, row in zip(qpos, leaning):  # by 60 degrees: one hand comes down beside the head
        mujoco.mju_mulQuat(row[3:7], upright[3:7], roll)
    facts = judges.measure(leaning)
    assert (facts["hand_at"][..., 2] > 0.25).all(), "above it as the torso sees it"
    assert not judges._raised(facts).any()


def test_a_judge_by_name_or_from_ones_own_file(tmp_path):
    qpos = poses.sample("kneeling", np.random.default_rng(3), 2)
    assert judges.find_task("kneeling", None).judge(qpos).tolist() == [True, True]
    said = "--judge dancing: the judges of all tasks are: cartpole, .*FILE.py:FUNCTION"
    with pytest.raises(UsageError, match=said):
        judges.find_task("dancing", None)
    said = "--judge cartpole: the judges of Humanoid-v5 are: kneeling, lotus"
    with pytest.raises(UsageError, match=said):
        judges.find_task("cartpole", "Humanoid-v5")
    path = tmp_path / "mine.py"
    path.write_text(
        "def high(states):\n    '''It is\n    high.'''\n    return states[:, 2] > 1\n"
        "def heights(states):\n    return states[:, 2]\n"
        "number = 3\n"
    )
    task = judges.find_task(f"{path}:high", "Any-v0")
    assert (task.name, task.criterion) == ("high", "It is high.")
    assert task.judge(np.array([[0, 0, 2.0], [0, 0, 0.5]])).tolist() == [True, False]
    with pytest.raises(UsageError, match=r"returned \[2\] float64 for 2 states, not \[B\] bool"):
        judges.find_task(f"{path}:heights", None).judge(np.zeros((2, 3)))
    with pytest.raises(UsageError, match="mine.py:number: number is not a function"):
        judges.find_task(f"{path}:number", None)
    with pytest.raises(UsageError, match="low is not .* type --judge .*mine.py:high or --judge"):
        judges.find_task(f"{path}:low", None)
    for spec in (f"{tmp_path}/none.py:high", f"{tmp_path}:high"):
        with pytest.raises(UsageError, match="expected FILE.py:FUNCTION"):
            judges.find_task(spec, None)


def test_a_runs_judge_is_tried_on_one_state_before_it_is_needed(tmp_path):
    path, state = tmp_path / "mine.py", np.zeros(47)
    path.write_text("def some(states):\n    return states[:1, 0] > 0\n")
    with pytest.raises(UsageError, match=r"returned \[1\] bool for 2 states, not \[B\] bool"):
        judges.episode_judge(f"{path}:some", "Humanoid-v5", (), state)
    standing = judges.episode_judge(None, "Humanoid-v5", [poses.TASKS["standing"]], state)
    states = np.zeros((4, 3, 47))  # [T, N, S]: one falls at once, one after half of it, one never
    states[..., :24] = poses.sample("standing", np.random.default_rng(3))[0]
    states[:, 0, 2] = states[2:, 1, 2] = 0.1
    assert standing(states).tolist() == [False, True, True]
    assert judges.episode_judge(None, "Humanoid-v5", ["a robot dancing"], state) is None
    assert judges.episode_judge(None, "CartPole-v1", [], state) is None, "it has a rule of its own"


ON_BACK, ON_FRONT, UPRIGHT = (1, 0, -1, 0), (1, 0, 1, 0), (1, 0, 0, 0)
WITHOUT_WORDS = {  # direction of the quaternion, then hip and knee in radians, right and left
    "knees_up": (ON_BACK, (-1.0, -1.8), (-1.0, -1.8)),
    "one_leg_folded": (ON_FRONT, (0.0, -1.5), (0.0, 0.0)),
    "on_one_knee": (UPRIGHT, (0.0, -1.6), (-1.6, -1.6)),
    "sits_knees_up": (UPRIGHT, (-2.4, -1.4), (-2.4, -1.4)),
    "sits_on_heels": (UPRIGHT, (-1.1, -2.7), (-1.1, -2.7)),
}


@pytest.mark.parametrize("pose", WITHOUT_WORDS)
def test_poses_without_words_are_told_apart(pose):
    turn, *legs = WITHOUT_WORDS[pose]
    model = judges._humanoid()[1]
    qpos = model.qpos0.copy()
    qpos[3:7] = turn / np.linalg.norm(turn)
    qpos[18:] = np.radians([-51, -35, -85, 51, 35, -85])  # the arms out to the sides
    for side, (hip, knee) in zip(judges.SIDES, legs):
        qpos[model.joint(f"{side}_hip_y").qposadr] = hip
        qpos[model.joint(f"{side}_knee").qposadr] = knee
    states = np.array([poses.put_down(qpos.copy()), poses.put_down(qpos.copy(), height=1.0)])
    verdicts = {name: getattr(poses_without_words, name)(states) for name in WITHOUT_WORDS}
    assert [name for name, passed in verdicts.items() if passed[0]] == [pose]
    assert not any(passed[1] for passed in verdicts.values())  # in the air


@pytest.mark.parametrize("body", ["return 1 / 0", "raise SystemExit(3)", "exit()"])
def test_a_judge_of_ones_own_that_fails_names_its_line(body, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"import sys\n\ndef good(states):\n    {body}\n")
    task = judges.find_task(f"{path}:good", None)
    with pytest.raises(UsageError) as caught:
        task.judge(np.zeros((2, 4)))
    said = str(caught.value)
    assert said.startswith(f"--judge {path}:good failed: ") and "\n" not in said
    assert body == "exit()" or f"mine.py, line 4: {body})" in said
    path.write_text("import sys\nsys.exit(5)\n")
    with pytest.raises(UsageError, match=r"SystemExit: 5 .*mine.py, line 2: sys.exit\(5\)"):
        judges.find_task(f"{path}:good", None)
