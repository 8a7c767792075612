"""What holds whatever goes in: the reward's formula, chunks, replay buffers."""

import collections

import numpy as np
import pytest
import torch
from helpers import MeanReward, PaintRenderer
from hypothesis import given, settings
from hypothesis import strategies as st

import clip_reward
import dqn_clip_classic as dqn
import sac_clip_humanoid as sac
from training.workers import Pool

settings.register_profile("here", deadline=None, max_examples=60)
settings.load_profile("here")
DIM = 6
vectors = st.lists(st.floats(-1, 1, width=32), min_size=DIM, max_size=DIM).map(np.array)
vectors = vectors.filter(lambda x: np.linalg.norm(x) > 0.1)


class Words(torch.nn.Module):
    """A CLIP that knows the embeddings of some letters."""

    def __init__(self, known):
        super().__init__()
        self.known = known

    def encode_text(self, tokens):
        return torch.tensor(np.stack([self.known[chr(row[0])] for row in tokens]))


def tokenizer(words, context=2):
    """The first letters of each."""
    return torch.tensor(
        [[ord(letter) for letter in word.ljust(context)[:context]] for word in words]
    )


def reward_of(targets, baselines, alpha):
    letters = "abcdefghij"
    known = dict(zip(letters, [*targets, *baselines]))
    cpu = torch.device("cpu")
    clip = clip_reward.LoadedCLIP(Words(known), tokenizer, None, cpu, torch.float32)
    words = [*letters[: len(known)]]
    return clip_reward.CLIPReward(clip, words[: len(targets)], words[len(targets) :], alpha)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@given(
    st.lists(vectors, min_size=1, max_size=3),
    st.lists(vectors, min_size=1, max_size=3),
    st.floats(0, 1),
    st.lists(vectors, min_size=1, max_size=5),
)
def test_the_reward_is_the_paper_s_formula(targets, baselines, alpha, states):
    """In float64, by the projection matrix of the line through b and g."""
    g, b = (unit(np.stack(x)).mean(0) for x in (targets, baselines))
    direction = g - b
    if np.linalg.norm(direction) < 1e-3:
        return
    s = unit(np.stack(states))
    projection = np.outer(direction, direction) / (direction @ direction)
    on_line = b + (s - b) @ projection
    expected = 1 - 0.5 * ((alpha * on_line + (1 - alpha) * s - g) ** 2).sum(-1)
    reward = reward_of(targets, baselines, alpha)
    got = reward.reward(torch.tensor(s, dtype=torch.float32)).numpy()
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert (got <= 1 + 1e-6).all(), "the goal itself has the highest reward"
    np.testing.assert_allclose(reward.reward(reward.g[None]).item(), 1, atol=1e-6)


@given(vectors, vectors, st.lists(vectors, min_size=1, max_size=5))
def test_without_regularisation_it_is_the_cosine_whatever_the_baseline(target, baseline, states):
    s = unit(np.stack(states))
    reward = reward_of([target], [baseline], 0.0)
    got = reward.reward(torch.tensor(s, dtype=torch.float32)).numpy()
    np.testing.assert_allclose(got, s @ unit(target), atol=1e-5)


@pytest.fixture(scope="module")
def pool():
    pool = Pool(PaintRenderer, MeanReward, ["cpu", "cpu"])
    yield pool
    pool.close()


@given(st.lists(st.lists(st.integers(0, 255), max_size=9), max_size=6), st.integers(1, 7))
def test_rewards_come_in_the_order_in_which_states_were_put(pool, parts, batch_size):
    pool.batch_size = batch_size
    for part in parts:
        pool.put(np.array(part, float).reshape(-1, 1))
        assert len(pool.rows) < batch_size, "full chunks leave at once"
    expected = np.array([value for part in parts for value in part], np.float32)
    np.testing.assert_array_equal(pool.take(), expected)
    assert len(pool.take()) == 0


def columns(first, count):
    """So many transitions of dqn's buffer, all different: numbers from `first` on."""
    number = np.arange(first, first + count, dtype=np.float32)
    wide = np.repeat(number[:, None], 4, 1)
    return wide, wide + 0.5, number.astype(int) % 2, number, number % 2


@given(st.integers(1, 12), st.lists(st.integers(1, 12), max_size=8), st.integers(0, 99))
def test_the_ring_holds_the_newest(size, counts, seed):
    counts = [min(count, size) for count in counts]
    buffer, newest, added = dqn.ReplayBuffer(size, 4, "cpu"), collections.deque(maxlen=size), 0
    for count in counts:
        buffer.add(*columns(added, count))
        newest.extend(range(added, added + count))
        added += count
    if not counts:
        return
    other = dqn.ReplayBuffer(size, 4, "cpu")
    other.load_state_dict(buffer.state_dict())
    for each in (buffer, other):
        assert each.count == added
        torch.manual_seed(seed)
        now, later, actions, rewards, ends = each.sample(64)
        assert set(rewards.tolist()) <= set(newest)
        assert (now == rewards[:, None]).all() and (later == now + 0.5).all()
        assert (actions == rewards.long() % 2).all() and (ends == rewards % 2).all()


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.data())
def test_n_steps_later_is_the_same_environment_and_episode(rollouts, T, N, added, data):
    n = data.draw(st.integers(1, T))
    buffer = sac.ReplayBuffer(rollouts, T, N, 3, 2, "cpu", 1.0, n)
    for k in range(added):
        step, env = np.indices((T + 1, N))
        observations = np.stack([np.full_like(step, k), step, env], -1)
        actions = observations[:-1, :, 1:]
        buffer.add(observations, actions, 100.0 * k + 10 * step[:-1] + env[:-1])
    now, later, actions, rewards = buffer.sample(200)
    assert (later - now == torch.tensor([0, n, 0])).all()
    assert (actions == now[:, 1:]).all()
    first = now @ torch.tensor([100.0, 10, 1])
    assert (rewards == n * first + 10 * sum(range(n))).all()
    assert set(now[:, 0].int().tolist()) <= set(range(max(0, added - rollouts), added))


@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**31))
def test_rewards_between_scored_steps_lie_on_straight_lines(T, every, N, seed):
    scored = clip_reward.scored_steps(T, every)
    assert scored[0] == 0 and scored[-1] == T - 1, "the first and the last, however short"
    assert all(t % every == 0 for t in scored[:-1]) and len(scored) == 1 + -(-(T - 1) // every)
    known = np.random.default_rng(seed).normal(size=(T, N)).astype(np.float32)
    rewards = np.full((T, N), np.nan, np.float32)
    rewards[scored] = known[scored]
    filled = clip_reward.interpolate(rewards, scored)
    assert filled.dtype == np.float32
    np.testing.assert_array_equal(filled[scored], known[scored])
    for a, b in zip(scored, scored[1:]):
        steps = (filled[b] - filled[a]) / (b - a)
        for t in range(a, b):
            np.testing.assert_allclose(filled[t], filled[a] + (t - a) * steps, atol=1e-5)
    if every == 1:
        np.testing.assert_array_equal(filled, known)
