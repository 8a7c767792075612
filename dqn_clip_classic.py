"""DQN from a sentence: the reward of a step is how well CLIP finds its picture to fit the words.
(VLM-RM, arXiv 2310.12921; double DQN, arXiv 1509.06461.) The whole experiment is in this file.

CartPole, the paper's setting (ViT-bigG-14, 3 million steps):

    python dqn_clip_classic.py --target-prompt "pole vertically upright on top of the cart"

Offline on a laptop, with the small CLIP that comes with the project:

    python dqn_clip_classic.py --target-prompt "pole vertically upright on top of the cart" \\
        --clip-model local-dir:tiny_clip --render-size 64 --num-envs 4 --learning-starts 1000 \\
        --total-timesteps 40000 --learning-rate 5e-4 --anneal-lr --tau 0.01 \\
        --target-network-frequency 1 --best-window 5

MountainCar in the same way:

    python dqn_clip_classic.py --env-id MountainCar-v0 \\
        --target-prompt "a car at the peak of the mountain, next to the yellow flag" \\
        --clip-model local-dir:tiny_clip --render-size 64 --num-envs 4 --learning-starts 1000 \\
        --total-timesteps 60000 --learning-rate 5e-4 --anneal-lr --tau 0.01 \\
        --target-network-frequency 1 --best-window 5

DQN itself, on Gymnasium's own CartPole (475 is its mark for solved):

    python dqn_clip_classic.py --reward ground-truth --terminate --episode-length 500 \\
        --total-timesteps 100000 --learning-starts 1000 --gradient-steps 250 \\
        --learning-rate 3e-4 --anneal-lr --tau 0.02 --target-network-frequency 1 --layer-norm \\
        --end-e 0.01 --best-window 10 --video-freq 0
"""

import functools
import math
import signal
import time
from dataclasses import dataclass, field
from typing import Annotated

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the next lines import: no traceback

import clip_reward  # before torch: it bounds how long threads spin

# isort: split
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from annotated_types import Interval

import egl_render
from egl_render import Count, LearningRate, Positive, Share, UsageError
from environments import classic, vector
from training.flags import RunArgs, parse_args
from training.run import Rings, Run, compile_update, load_judge, make_pool, seed_everything


@dataclass
class Args(RunArgs):
    reward: clip_reward.RewardArgs = field(default_factory=clip_reward.RewardArgs)
    render: egl_render.RenderArgs = field(default_factory=egl_render.RenderArgs)

    env_id: str = "CartPole-v1"
    """CartPole-v1 or MountainCar-v0"""
    total_timesteps: Positive = 3_000_000
    """environment steps in all, rounded up to whole rollouts"""
    num_envs: Positive = 1
    """environments stepped in turn by this process: a step takes microseconds"""
    episode_length: Positive = 200
    """steps of every episode; a rollout is one episode of each environment"""
    terminate: bool = False
    """end episodes where Gymnasium ends them, to check DQN itself (only --reward ground-truth)"""
    buffer_size: Positive = 100_000
    """transitions in the replay buffer"""
    gamma: Annotated[float, Interval(ge=0, lt=1)] = 0.99
    """discount factor"""
    batch_size: Positive = 64
    """transitions per update"""
    learning_starts: Count = 75_000
    """steps of random actions before the first update"""
    gradient_steps: Positive = 200
    """updates after each rollout (num_envs * episode_length steps; fewer after a shorter one)"""
    target_network_frequency: Positive = 200
    """updates between those of the target network"""
    tau: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """share of the network that moves into the target network then; 1: a copy"""
    double: bool = True
    """double DQN: the network chooses the next action, the target network judges it; without, the
    target network does both"""
    learning_rate: LearningRate = 2.3e-3
    """learning rate of the network"""
    anneal_lr: bool = False
    """let the learning rate fall linearly to 0 over total_timesteps (not in the paper)"""
    max_grad_norm: Annotated[float, Interval(gt=0)] = 10.0
    """longer gradients are cut to this length"""
    hidden_size: Positive = 256
    """width of the two hidden layers"""
    layer_norm: bool = False
    """normalise the hidden layers, against values that run away (not in the paper)"""
    start_e: Share = 1.0
    """share of random actions at first (of a rollout's actions: it changes between rollouts)"""
    end_e: Share = 0.04
    """share of random actions in the end"""
    exploration_fraction: Share = 0.16
    """part of total_timesteps over which the share falls from start_e to end_e"""
    best_window: Positive = 1
    """rollouts in a row whose mean reward is compared to choose checkpoints/best.pt"""

    checkpoint_freq: Count = 64_000
    """steps between checkpoints; the end of the run always has one"""
    video_freq: Count = 64_000
    """steps between videos, and one at the end; 0: none"""


TASKS = {"CartPole-v1": classic.CartPoleTask, "MountainCar-v0": classic.MountainCarTask}


def make_env(args: Args):
    """A function that makes one environment."""

    def thunk():
        # no time limit. The checker would complain of angles beyond 24 degrees
        env = gym.make(args.env_id, max_episode_steps=-1, disable_env_checker=True)
        return classic.OriginalTask(env) if args.terminate else TASKS[args.env_id](env)

    return thunk


def make_renderer(args: Args, size: int | None = None):
    """What draws states; called in every reward worker."""
    textured = args.render.textured and args.env_id != "CartPole-v1"
    return egl_render.ClassicRenderer(args.env_id, size or args.render.render_size, textured)


def check_args(args: Args) -> None:
    """Raise UsageError, one line that says what to type instead, before anything slow starts."""
    if args.env_id not in TASKS:
        other = "for tasks with continuous actions use sac_clip_humanoid.py"
        raise UsageError(f"--env-id {args.env_id}: this script has {' and '.join(TASKS)}; {other}")
    args.check()
    args.check_memory(row=12)  # two observations, action, reward, termination
    if args.terminate and args.reward.reward == "clip":
        raise UsageError("--terminate tells about the task: only with --reward ground-truth")
    args.reward.check(frames=args.total_timesteps)


class QNetwork(nn.Module):
    """Observations [B, O] -> values of all actions [B, A]."""

    def __init__(self, observation_dim, action_space, args: Args):
        super().__init__()
        layers, width = [], args.hidden_size
        for inputs in (observation_dim, width):
            layers += [nn.Linear(inputs, width), *([nn.LayerNorm(width)] * args.layer_norm)]
            layers.append(nn.ReLU(inplace=True))
        self.net = nn.Sequential(*layers, nn.Linear(width, int(action_space.n)))

    def forward(self, observations):
        return self.net(observations)

    def outputs(self, observations):
        """[B, O] -> the observations and what every layer makes of them, the values [B, A] last."""
        outputs = [observations]
        for layer in self.net:
            outputs.append(layer(outputs[-1]))
        return outputs

    def gradients(self, outputs, gradient):
        """`outputs` and the loss's gradient with respect to the values [B, A] -> its gradients with
        respect to all parameters, in their order."""
        gradients = []
        layers = list(zip(self.net, outputs))
        for i, (layer, x) in reversed(list(enumerate(layers))):
            if isinstance(layer, nn.Linear):
                gradients += [gradient.sum(0), gradient.T @ x]
                gradient = gradient @ layer.weight if i else None
            elif isinstance(layer, nn.ReLU):  # in place: x is positive where its input was
                gradient = torch.ops.aten.threshold_backward(gradient, x, 0)
            else:  # layer norm: weight * normal + bias
                variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
                scale = (variance + layer.eps).rsqrt()
                normal = (x - mean) * scale
                gradients += [gradient.sum(0), (gradient * normal).sum(0)]
                gradient = gradient * layer.weight
                along = normal * (gradient * normal).mean(1, keepdim=True)
                gradient = scale * (gradient - gradient.mean(1, keepdim=True) - along)
        return gradients[::-1]

    @torch.no_grad()
    def best_actions(self, observations):
        """Array [N, O] -> greedy actions, array [N] int64."""
        device = self.net[0].weight.device
        return self(torch.as_tensor(observations, device=device)).argmax(1).cpu().numpy()


class ReplayBuffer(Rings):
    """A ring of transitions: `add` takes observations [K, O], next observations [K, O], actions
    [K], rewards [K], terminations [K]."""

    def __init__(self, size, observation_dim, device):
        self.size, self.count = size, 0  # count: transitions ever added
        self.rings = (
            torch.empty(size, observation_dim, device=device),
            torch.empty(size, observation_dim, device=device),
            torch.empty(size, dtype=torch.int64, device=device),
            torch.empty(size, device=device),
            torch.empty(size, device=device),
        )

    def sample(self, batch_size):
        """-> observations [B, O], next observations [B, O], actions [B], rewards [B],
        terminations [B] (1 where s' is the end and worth nothing)."""
        filled = min(self.count, self.size)
        index = torch.randint(filled, (batch_size,), device=self.rings[0].device)
        return [ring.index_select(0, index) for ring in self.rings]


@torch.inference_mode()  # there is no autograd here: 7 % faster than under no_grad
def update(batch, q_network, target_network, optimizer, args: Args):
    """One step on the Bellman error (Huber's) -> loss and mean value [2]."""
    observations, next_observations, actions, rewards, terminations = batch
    B = len(rewards)
    inputs = torch.cat([observations, next_observations]) if args.double else observations
    outputs = q_network.outputs(inputs)
    next_values = target_network(next_observations)
    # The maximum of one network's own errors is too high (values of 150 on CartPole, where no
    # policy gets above 100). Double DQN: one network chooses, the other judges.
    choosing = outputs[-1][B:] if args.double else next_values
    next_values = next_values.gather(1, choosing.argmax(1, keepdim=True))[:, 0]
    # The end of an episode is a time limit, that is a truncation: the value of its last state
    # is bootstrapped like any other. Only --terminate makes terminations.
    targets = rewards + args.gamma * (1 - terminations) * next_values
    outputs = [x[:B] for x in outputs]  # of the observations
    values = outputs[-1].gather(1, actions[:, None])[:, 0]
    # The gradient by hand: with products this small autograd's bookkeeping takes as long as they do
    # (docs/speed.md).
    errors = values - targets
    slopes = errors.clamp(-1, 1)  # of Huber's loss
    taken = actions[:, None] == torch.arange(outputs[-1].shape[1], device=actions.device)
    gradients = q_network.gradients(outputs, taken * (slopes / B)[:, None])
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    for parameter, gradient in zip(q_network.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    loss = (slopes * (errors - slopes / 2)).mean()
    return torch.stack([loss, values.mean()])


def make_learner(args: Args, observation_dim, action_space, device):
    """The two networks and the optimiser by name."""
    q_network, target_network = (
        QNetwork(observation_dim, action_space, args).to(device) for _ in range(2)
    )
    target_network.load_state_dict(q_network.state_dict())
    target_network.requires_grad_(False)
    optimizer = torch.optim.Adam(
        q_network.parameters(),
        lr=torch.tensor(args.learning_rate, device=device),  # compiling makes numbers constants
        fused=True,
        capturable=args.compile and device.type == "cuda",  # by a CUDA graph
    )
    return {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to `end` at step `duration`, and `end` from there on."""
    return start + (end - start) * min(1.0, step / max(1, duration))


if __name__ == "__main__":
    args = parse_args(Args, __doc__)
    check_args(args)
    use_clip, T, N = args.reward.reward == "clip", args.episode_length, args.num_envs
    judge = load_judge(args)
    device = seed_everything(args)
    torch.set_num_threads(1)  # such small products: 596 updates/s, with two threads 370 (2 cores)
    pool = make_pool(args, functools.partial(make_renderer, args))
    run = Run(args)
    envs = vector.in_this_process(make_env(args), N)
    observation_dim = envs.single_observation_space.shape[0]
    action_count = int(envs.single_action_space.n)
    learner = make_learner(args, observation_dim, envs.single_action_space, device)
    q_network, target_network, optimizer = learner.values()
    params, target_params = list(q_network.parameters()), list(target_network.parameters())
    learn = functools.partial(update, **learner, args=args)
    if args.compile:
        learn = compile_update(learn, device)
    buffer = ReplayBuffer(args.buffer_size, observation_dim, device)
    progress = {"updates": 0, "scores": []}  # mean rewards of the learned policy's last rollouts
    run.start(learner, buffer, pool, envs, progress)  # with --resume: as they were

    while run.goes_on():
        # All randomness follows from (seed, number of the rollout), also after --resume.
        sequence = np.random.SeedSequence((args.seed, len(run.history)))
        *env_seeds, torch_seed = map(int, sequence.generate_state(N + 1))
        torch.manual_seed(torch_seed)
        rng = np.random.default_rng(sequence)
        learned = progress["updates"] > 0
        exploration_steps = args.exploration_fraction * args.total_timesteps
        epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, run.global_step)
        explore = rng.random((T, N)) < (epsilon if learned else 1.0)
        any_action = rng.integers(action_count, size=(T, N))
        observations = np.zeros((T + 1, N, observation_dim), np.float32)
        actions, env_rewards = np.zeros((T, N), np.int64), np.zeros((T, N))
        terminations, valid = np.zeros((T, N)), np.zeros((T, N), bool)
        states = np.zeros((T, N, observation_dim))  # of s'

        # 1. One episode of every environment. The workers draw and score its states while it is
        # played.
        t0 = time.perf_counter()
        observations[0], _ = envs.reset(seed=env_seeds)
        for t in range(T):
            best_actions = q_network.best_actions(observations[t])
            actions[t] = np.where(explore[t], any_action[t], best_actions)
            observations[t + 1], env_rewards[t], _, _, infos = envs.step(actions[t])
            states[t] = np.stack(infos["states"])
            if use_clip:
                pool.put(states=states[t])
            valid[t] = ~infos.get("over", np.zeros(N, bool))  # with --terminate: before this step
            terminations[t] = infos.get("terminated", 0)
            if not valid[t].any():
                break
        run.check_finite(env_seeds, observations, env_rewards)
        t1 = time.perf_counter()
        success = infos.get("success")
        if judge:
            success = judge(states)

        # 2. The rewards: that of (s, a, s') is that of the picture of s'
        rewards = pool.take().reshape(T, N) if use_clip else env_rewards
        columns = (observations[:-1], observations[1:], actions, rewards, terminations)
        buffer.add(*(column[valid] for column in columns))
        steps = int(valid.sum())
        run.global_step += steps
        if learned:
            scores = [*progress["scores"], float(rewards.mean())][-args.best_window :]
            progress["scores"] = scores
            if len(scores) == args.best_window:
                run.keep_best(np.mean(scores), q_network=q_network)

        # 3. Learn
        t2 = time.perf_counter()
        if args.anneal_lr:
            lr = linear_schedule(args.learning_rate, 0.0, args.total_timesteps, run.global_step)
            optimizer.param_groups[0]["lr"].fill_(lr)
        due = math.ceil(args.gradient_steps * steps / (T * N))
        losses = []
        for _ in range(due if run.global_step >= args.learning_starts else 0):
            losses.append(learn(buffer.sample(args.batch_size)))
            progress["updates"] += 1
            if progress["updates"] % args.target_network_frequency == 0:
                with torch.no_grad():
                    torch._foreach_lerp_(target_params, params, args.tau)
        means = torch.stack(losses).mean(0).tolist() if losses else []  # waits for the GPU, once

        # 4. Log
        seconds = {"physics_s": t1 - t0, "wait_s": t2 - t1, "update_s": time.perf_counter() - t2}
        more = dict(zip(("losses/td_loss", "losses/q_values"), means, strict=False))
        more["charts/epsilon"] = epsilon if learned else 1.0
        note = "random actions" * (not learned)
        run.log(rewards, env_rewards, success, seconds, more, note)

        # 5. Keep
        if run.due(args.video_freq):
            film = states[:, 0][valid[:, 0]]  # the first environment's episode
            fps = envs.metadata["render_fps"]
            run.save_video(pool.render(film, size=600), fps)
        run.keep()

    envs.close()
    run.close()
