"""DQN from a sentence: the reward of a step is CLIP's score of its picture against a prompt
(VLM-RM, arXiv 2310.12921; double DQN, arXiv 1509.06461). The network, replay buffer, updates, loop
and names of all scalars are in this file. The tasks are in environments/.

This trains on CartPole:

    python dqn_clip_classic.py --target-prompt "pole vertically upright on top of the cart"

This runs offline on a laptop, with the small CLIP that comes with the project:

    python dqn_clip_classic.py --target-prompt "pole vertically upright on top of the cart" \\
        --clip-model tiny_clip

This trains on MountainCar in the same way:

    python dqn_clip_classic.py --env-id MountainCar-v0 --clip-model tiny_clip \\
        --target-prompt "a car at the peak of the mountain, next to the yellow flag" \\
        --total-timesteps 100000

This trains on another Gymnasium task with discrete actions (MODULE:NAME for one of your own):

    python dqn_clip_classic.py --env-id Acrobot-v1 --target-prompt "a pendulum pointing up"

The paper's own settings are in docs/paper.md.

This checks DQN itself on Gymnasium's own CartPole (a return of 475 counts as solved):

    python dqn_clip_classic.py --reward ground-truth --terminate --num-envs 1 \\
        --episode-length 500 --total-timesteps 100000 --learning-starts 1000 --gradient-steps 250 \\
        --learning-rate 3e-4 --anneal-lr --tau 0.02 --target-network-frequency 1 --layer-norm \\
        --end-e 0.01 --video-freq 0
"""

import copy
import functools
import math
import os
import signal
import time
from typing import Annotated

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports prints no traceback

import clip_reward  # before torch: it bounds how long threads spin

# isort: split
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from annotated_types import Interval
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from clip_reward import UsageError
from environments import classic, judges, tasks
from training.run import Run, RunArgs, check_memory, parse_args, say
from training.workers import make_pool

Share = Annotated[float, Interval(ge=0, le=1)]


@dataclass(config={"extra": "forbid"})
class Args(RunArgs):
    """Flags of DQN. The flags of every run are in training/run.py, those of the reward in
    clip_reward.py, and those of the pictures in egl_render.py. --help shows all of them."""

    env_id: str = "CartPole-v1"
    """Gymnasium task with discrete actions; MODULE:NAME imports MODULE first, which registers it.
    CartPole-v1, MountainCar-v0 and MuJoCo tasks whose pictures depend only on their states are
    drawn from their states; other tasks draw themselves with render()"""
    total_timesteps: PositiveInt = 40_000
    """environment steps, rounded up to whole rollouts"""
    num_envs: PositiveInt = 4
    """parallel environments, each in a process (CartPole-v1, MountainCar-v0: all in one)"""
    episode_length: Annotated[int, Interval(ge=1, le=10**6)] = 200
    """steps per episode; a rollout is one episode of each environment"""
    terminate: bool = False
    """end episodes where Gymnasium ends them, to check DQN (only with --reward ground-truth)"""
    buffer_size: PositiveInt = 100_000
    """transitions in the replay buffer"""
    gamma: Annotated[float, Interval(ge=0, lt=1)] = 0.99
    """discount factor"""
    batch_size: PositiveInt = 64
    """transitions per update"""
    learning_starts: NonNegativeInt = 1000
    """steps of random actions before the first update"""
    gradient_steps: PositiveInt = 200
    """updates per rollout of num_envs * episode_length steps (fewer after a shorter rollout)"""
    target_network_frequency: PositiveInt = 1
    """updates of the network per update of the target network"""
    tau: Annotated[float, Interval(gt=0, le=1)] = 0.01
    """target smoothing coefficient; 1 copies the network, as in the paper"""
    double: bool = True
    """double DQN: the network chooses the next action and the target network evaluates it"""
    learning_rate: Annotated[float, Interval(gt=0, le=1)] = 5e-4
    """learning rate of the network"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0 over total_timesteps (not in the paper)"""
    max_grad_norm: Annotated[float, Interval(gt=0)] = 10.0
    """norm to which gradients are clipped"""
    layer_norm: bool = False
    """use layer norm in the hidden layers, which keeps values from diverging (not in the paper)"""
    start_e: Share = 1.0
    """initial epsilon (constant within a rollout)"""
    end_e: Share = 0.04
    """final epsilon"""
    exploration_fraction: Share = 0.16
    """fraction of total_timesteps over which epsilon falls from start_e to end_e"""

    checkpoint_freq: NonNegativeInt = 64_000
    """steps between checkpoints; the end of a run always has one"""
    video_freq: NonNegativeInt = 64_000
    """steps between videos; the end of a run always has one (0: no videos)"""


def make_env(args: Args, filmed=False):
    """Return a function that makes one environment: observations [O], endless episodes, actions
    from 0, and in `info` the states or frames for pictures."""
    by_state = not tasks.why_own_render(args.env_id)

    def thunk():
        if args.terminate:
            return classic.OriginalTask(gym.make(args.env_id, max_episode_steps=-1))
        env = tasks.make_endless(args, by_state, filmed)
        first = int(getattr(env.action_space, "start", 0))
        if not first:
            return env
        space = gym.spaces.Discrete(env.action_space.n)
        return gym.wrappers.TransformAction(env, lambda action: action + first, space)

    return thunk


def make_renderer(args: Args, device="cpu", size: int | None = None):
    """Make the renderer of states; every reward worker calls this."""
    return tasks.make_renderer(args, device, size)


def check_args(args: Args):
    """Check the flags before anything slow starts -> a state [S] float64 of the task, or None if
    the task draws itself. Raises UsageError with one line that says what is wrong."""
    actions, state, observation_dim = tasks.describe_env(args.env_id, make_env(args, filmed=True))
    rollout = args.num_envs * args.episode_length
    if not isinstance(actions, gym.spaces.Discrete):
        other = "; use sac_clip_humanoid.py" if isinstance(actions, gym.spaces.Box) else ""
        raise UsageError(
            f"--env-id {args.env_id}: DQN needs discrete actions, not {actions}{other}"
        )
    if args.terminate and args.reward == "clip":
        raise UsageError("--terminate would leak what the task is; use --reward ground-truth")
    if args.terminate and args.env_id not in classic.DISCRETE:
        raise UsageError(f"--terminate needs --env-id {' or '.join(classic.DISCRETE)}")
    if args.buffer_size < rollout:
        raise UsageError(f"--buffer-size {args.buffer_size} is below a rollout of {rollout} steps")
    if args.learning_starts > max(rollout, args.total_timesteps):
        raise UsageError(f"--learning-starts {args.learning_starts} is beyond --total-timesteps")
    tasks.check_drawing(args, state)
    check_memory(args, {
        "--buffer-size": args.buffer_size * (8 * observation_dim + 16),
        "--batch-size": 4 * args.batch_size * (2 * observation_dim + 4 * HIDDEN),
        "HIDDEN": 4 * 5 * HIDDEN**2,  # two networks; one has a gradient and two averages
    })  # fmt: skip
    args.check_reward()
    return state


HIDDEN = 256  # width of the two hidden layers


class QNetwork(nn.Module):
    """Observations [B, O] -> values of all actions [B, A]."""

    def __init__(self, observation_dim, action_space, args: Args):
        super().__init__()
        layers = []
        for inputs in (observation_dim, HIDDEN):
            layers += [nn.Linear(inputs, HIDDEN), *([nn.LayerNorm(HIDDEN)] * args.layer_norm)]
            layers.append(nn.ReLU())
        self.net = nn.Sequential(*layers, nn.Linear(HIDDEN, int(action_space.n)))

    def forward(self, observations):
        return self.net(observations)

    @torch.no_grad()
    def best_actions(self, observations):
        """Array [N, O] -> greedy actions, array [N] int64."""
        device = self.net[0].weight.device
        observations = torch.as_tensor(observations, dtype=torch.float32, device=device)
        return self(observations).argmax(1).cpu().numpy()


class ReplayBuffer:
    """A ring of transitions."""

    def __init__(self, size, observation_dim, device):
        self.size, self.count = size, 0  # count: transitions ever added
        self.rings = (
            torch.empty(size, observation_dim, device=device),
            torch.empty(size, observation_dim, device=device),
            torch.empty(size, dtype=torch.int64, device=device),
            torch.empty(size, device=device),
            torch.empty(size, device=device),
        )

    def add(self, *columns):
        """Add observations [K, O], next observations [K, O], actions [K], rewards [K], terminations
        [K]; K is at most the buffer's size."""
        slots = (self.count + torch.arange(len(columns[0]))) % self.size
        for ring, column in zip(self.rings, columns, strict=True):
            ring[slots] = torch.as_tensor(column).to(ring)
        self.count += len(slots)

    def state_dict(self):
        # copies, because torch.save would write the whole ring behind a slice
        return {"count": self.count, "rings": [ring[: self.count].clone() for ring in self.rings]}

    def load_state_dict(self, state):
        self.count = state["count"]
        for ring, filled in zip(self.rings, state["rings"], strict=True):
            ring[: len(filled)] = filled

    def sample(self, batch_size):
        """Sample observations [B, O], next observations [B, O], actions [B], rewards [B],
        terminations [B] (1 where s' is the end and worth nothing)."""
        filled = min(self.count, self.size)
        index = torch.randint(filled, (batch_size,), device=self.rings[0].device)
        return [ring.index_select(0, index) for ring in self.rings]


def update(batch, q_network, target_network, optimizer, args: Args):
    """Take one step on the Huber loss of the Bellman error -> {name: scalar [] to log}."""
    observations, next_observations, actions, rewards, terminations = batch
    with torch.no_grad():
        next_values = target_network(next_observations)
        # The maximum over one network's noisy values is too high (150 on CartPole, where no policy
        # gets above 100). Double DQN: one network chooses, the other evaluates.
        choosing = q_network(next_observations) if args.double else next_values
        next_values = next_values.gather(1, choosing.argmax(1, keepdim=True)).squeeze(1)
        # The end of an episode is a time limit, that is, a truncation: the value of its last state
        # is bootstrapped like any other. Only --terminate makes terminations.
        targets = rewards + args.gamma * (1 - terminations) * next_values
    values = q_network(observations)
    # not gather: its gradient is a scatter, slow with deterministic algorithms and --compile
    taken = actions[:, None] == torch.arange(values.shape[1], device=values.device)
    values = (values * taken).sum(1)
    loss = F.smooth_l1_loss(values, targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"td_loss": loss.detach(), "q_values": values.detach().mean()}


def make_learner(args: Args, observation_dim, action_space, device):
    """Return the two networks and the optimiser by name."""
    q_network, target_network = (
        QNetwork(observation_dim, action_space, args).to(device) for _ in range(2)
    )
    target_network.load_state_dict(q_network.state_dict())
    target_network.requires_grad_(False)
    optimizer = torch.optim.Adam(
        q_network.parameters(),
        lr=torch.tensor(args.learning_rate, device=device),  # a float would be compiled in
        fused=True,
        capturable=args.compile and device.type == "cuda",  # by a CUDA graph
    )
    return {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """Interpolate from `start` at step 0 to `end` at `duration`, and return `end` afterwards."""
    return start + (end - start) * min(1.0, step / max(1, duration))


if __name__ == "__main__":
    args = parse_args(Args, __doc__)
    state = check_args(args)
    T, N = args.episode_length, args.num_envs
    use_clip = args.reward != "ground-truth"
    scored = clip_reward.scored_steps(T, args.score_every)
    drawn_from = "frames" if state is None else "states"  # in `infos`
    judge = judges.episode_judge(args.judge, args.env_id, args.target_prompt, state)

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms need it
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)  # denormals in Adam's averages slow a CPU down a hundredfold
    torch.set_num_threads(1)  # products this small are faster with one thread
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # The reward workers load CLIP while the environments are made.
    draw = functools.partial(make_renderer, args) if drawn_from == "states" else None
    score = functools.partial(clip_reward.make_clip_reward, args) if use_clip else None
    devices = args.devices() if use_clip else ["cpu"]
    chunk = max(1, args.clip_batch_size // args.views)  # states
    needed = use_clip or (draw and args.video_freq)
    if needed or drawn_from == "frames":
        say(tasks.how_drawn(args.env_id))
    pool = make_pool(draw, score, devices if needed else [], chunk)
    envs = tasks.make_vector_env(args, [make_env(args, filmed=i == 0) for i in range(N)])
    observation_dim = envs.single_observation_space.shape[0]
    action_count = int(envs.single_action_space.n)
    say(*pool.wait_ready())
    run = Run(args)

    learner = make_learner(args, observation_dim, envs.single_action_space, device)
    q_network, target_network = learner["q_network"], learner["target_network"]
    params, target_params = list(q_network.parameters()), list(target_network.parameters())
    learn = functools.partial(update, **learner, args=args)
    if args.compile:
        learn = torch.compile(learn, dynamic=False)
        if device.type == "cuda":  # all kernels as one CUDA graph
            from tensordict.nn import CudaGraphModule

            learn = CudaGraphModule(learn, warmup=5)
    buffer = ReplayBuffer(args.buffer_size, observation_dim, device)
    updates = torch.zeros((), dtype=torch.int64)
    saved = learner | {"replay": buffer, "updates": updates}
    run.restore(saved, pool.look)  # with --resume

    while run.step < args.total_timesteps and not run.stopped:
        # All randomness follows from (seed, number of the rollout): a resumed run continues as the
        # uninterrupted one would have, without any generator's state being saved.
        sequence = np.random.SeedSequence((args.seed, run.rollout))
        *env_seeds, torch_seed = map(int, sequence.generate_state(N + 1))
        torch.manual_seed(torch_seed)
        rng = np.random.default_rng(sequence)
        learned = int(updates) > 0
        exploration_steps = args.exploration_fraction * args.total_timesteps
        epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, run.step)
        explore = rng.random((T, N)) < (epsilon if learned else 1.0)
        any_action = rng.integers(action_count, size=(T, N))
        observations = np.zeros((T + 1, N, observation_dim), np.float32)
        actions, env_rewards = np.zeros((T, N), np.int64), np.zeros((T, N))
        terminations, valid = np.zeros((T, N)), np.zeros((T, N), bool)
        film = run.due(args.video_freq, run.step, run.step + T * N)
        pictured = []  # the states or frames of every step, for pictures of s'

        # 1. Play one episode of every environment. The workers draw and score its states meanwhile,
        # and the policy acts on the CPU: on a GPU it would queue behind CLIP.
        t0 = time.perf_counter()
        acting = copy.deepcopy(q_network).cpu()
        observations[0], _ = envs.reset(seed=env_seeds, options={"film": film})
        for t in range(T):
            best_actions = acting.best_actions(observations[t])
            actions[t] = np.where(explore[t], any_action[t], best_actions)
            observations[t + 1], env_rewards[t], _, _, infos = envs.step(actions[t])
            if drawn_from in infos:
                states = np.stack(infos[drawn_from])  # [N, S], or frames [N, H, W, 3]
                pictured.append(states if drawn_from == "states" else states[:1].copy())
                if use_clip and t in scored:
                    pool.put(states)
            valid[t] = ~infos.get("over", np.zeros(N, bool))  # --terminate: only until the end
            terminations[t] = infos.get("terminated", 0)
            if not valid[t].any():
                break

        # 2. Take the rewards. The reward of (s, a, s') is CLIP's score of the picture of s'.
        t1 = time.perf_counter()
        rewards = env_rewards
        if use_clip:
            rewards = np.zeros((T, N), np.float32)
            rewards[scored] = pool.take().reshape(-1, N)
        t2 = time.perf_counter()
        run.check_finite(env_seeds, observation=observations)
        run.check_finite(env_seeds, first=1, env_reward=env_rewards, reward=rewards)
        if use_clip:
            rewards = clip_reward.interpolate(rewards, scored)
        run.to_save = {}  # a failure from here to the end of the rollout saves nothing
        columns = (observations[:-1], observations[1:], actions, rewards, terminations)
        buffer.add(*(column[valid] for column in columns))
        steps = int(valid.sum())
        run.step += steps
        run.rollout += 1
        if learned:
            run.keep_best(rewards.mean(), q_network=q_network)

        # 3. Learn
        t3 = time.perf_counter()
        if args.anneal_lr:
            lr = linear_schedule(args.learning_rate, 0.0, args.total_timesteps, run.step)
            learner["optimizer"].param_groups[0]["lr"].fill_(lr)
        due = math.ceil(args.gradient_steps * steps / (T * N))
        losses = []
        for _ in range(due if run.step >= args.learning_starts else 0):
            losses.append(learn(buffer.sample(args.batch_size)))
            updates += 1
            if updates % args.target_network_frequency == 0:
                with torch.no_grad():
                    torch._foreach_lerp_(target_params, params, args.tau)
        means = {}
        for name in losses[0] if losses else ():
            means[f"losses/{name}"] = torch.stack([x[name] for x in losses]).mean().item()
        t4 = time.perf_counter()

        # 4. Log
        success = infos.get("success")
        if judge:
            success = judge(np.stack(pictured)[:, :8])  # only eight, as judging takes time
        scalars = {"charts/clip_reward": rewards.mean()} if use_clip else {}
        if success is not None:
            scalars["charts/success_rate"] = np.mean(success)
        scalars |= {"charts/episodic_return": env_rewards.sum(0).mean(), "charts/SPS": run.speed}
        scalars["charts/epsilon"] = epsilon if learned else 1.0
        scalars |= means
        scalars |= {"time/physics_s": t1 - t0, "time/wait_s": t2 - t1, "time/update_s": t4 - t3}
        scalars["time/judge_s"] = time.perf_counter() - t4
        if use_clip:
            scalars["charts/episodic_clip_return"] = rewards.sum(0).mean()
            scalars["charts/clip_pictures"] = run.rollout * len(scored) * N * args.views
            scalars |= {"time/render_s": pool.render_s, "time/clip_s": pool.clip_s}
        run.log(scalars)
        run.to_save = saved

        # 5. Save
        if run.due(args.checkpoint_freq, run.step - steps, run.step):
            run.save(saved)
        if pictured and run.due(args.video_freq, run.step - steps, run.step):
            episode = np.stack([states[0] for states in pictured])  # of the first environment
            episode = episode[valid[: len(episode), 0]]
            render = functools.partial(pool.render, size=240) if draw else None
            run.video(episode, envs.metadata.get("render_fps"), render)

    run.save(saved)  # a stopped run is saved, too
    envs.close()
    run.close()
