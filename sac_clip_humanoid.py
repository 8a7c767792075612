"""SAC from a sentence: the reward of a step is CLIP's score of its picture against a prompt
(VLM-RM, arXiv 2310.12921; SAC, arXiv 1812.05905). The networks, exploration, replay buffer,
updates, loop and names of all scalars are in this file. The tasks are in environments/.

With the defaults CLIP scores few pictures; docs/results.md shows what a policy learns from them.
This command uses every GPU of the machine (--reward-devices cuda:0 cuda:1 uses only these two, and
--reward-devices ray uses all GPUs of a Ray cluster):

    python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling"

This runs offline on a laptop, with the small CLIP that comes with the project:

    python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling" \\
        --clip-model tiny_clip --total-timesteps 64000

The paper's own settings are in docs/paper.md.

This trains on another Gymnasium task with continuous actions (MODULE:NAME for one of your own):

    python sac_clip_humanoid.py --env-id Ant-v5 --target-prompt "a four-legged robot on its back"

This learns from the environment's own reward, as a baseline (nothing is drawn):

    python sac_clip_humanoid.py --reward ground-truth --video-freq 0
"""

import copy
import functools
import math
import os
import re
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
from environments import judges, tasks
from training.run import Run, RunArgs, check_memory, parse_args, say
from training.workers import make_pool


@dataclass(config={"extra": "forbid"})
class Args(RunArgs):
    """Flags of SAC. The flags of every run are in training/run.py, those of the reward in
    clip_reward.py, and those of the pictures in egl_render.py. --help shows all of them."""

    env_id: str = "Humanoid-v5"
    """Gymnasium task with continuous actions; MODULE:NAME imports MODULE first, which registers it.
    A MuJoCo task whose pictures depend only on its states is drawn from its states; any other task
    draws itself with render()"""
    total_timesteps: PositiveInt = 300_000
    """environment steps, rounded up to whole rollouts"""
    num_envs: PositiveInt = 8
    """parallel environments, each in a process (Humanoid-v5, MountainCarContinuous: all in one)"""
    episode_length: Annotated[int, Interval(ge=1, le=10**6)] = 100
    """steps per episode; no episode ends earlier. A rollout is one episode of each environment"""
    action_repeat: PositiveInt | None = None
    """steps for which the policy holds an action (default: 2 for the humanoid, otherwise 1, as in
    the paper). They make one transition, whose reward is their mean. A step of the humanoid takes
    15 ms, in which a good action gains too little for the critics to see"""
    buffer_size: PositiveInt = 24_000
    """environment steps in the replay buffer, rounded down to whole rollouts (the paper: a
    million). With older steps in the batches, the humanoid learned less (docs/results.md)"""
    gamma: Annotated[float, Interval(ge=0, lt=1)] = 0.97
    """discount factor per environment step"""
    n_step: PositiveInt = 3
    """transitions whose rewards a critic's target sums before it bootstraps (n-step returns, Sutton
    and Barto 2018, chapter 7; the paper: 1). The target includes the policy's entropy only for the
    state from which it bootstraps"""
    tau: Annotated[float, Interval(gt=0, le=1)] = 0.005
    """smoothing coefficient of the target critics and of the averaged actor, per update"""
    batch_size: PositiveInt = 128
    """transitions per update"""
    learning_starts: NonNegativeInt = 4800
    """steps of random actions before the first update"""
    gradient_steps: PositiveInt = 600
    """updates after each rollout (num_envs * episode_length steps)"""
    learning_rate: Annotated[float, Interval(gt=0, le=1)] = 1e-3
    """learning rate of actor, critics and entropy coefficient (the paper: 6e-4)"""
    normalize: bool = True
    """normalise observations by their running mean and standard deviation (SimBa), and the hidden
    layers of the critics by layer norm (DroQ, SimBa), which keeps their values reasonable with many
    updates per step. The paper does neither"""
    pink_noise: bool = True
    """explore with pink noise, also in the random actions before learning, and with a random
    amplitude for each episode and action dimension; a quarter of the environments then take the
    averaged actor's mean actions (best.pt is the one with the highest reward there). Otherwise
    explore with the policy's own white noise, independent in every action (as in the paper)"""
    mirror: bool = True
    """only Humanoid-v5: exchange left and right in half of every batch. The robot is symmetric, so
    each side learns what the other has tried. A sentence about one side needs --no-mirror"""
    entropy_coef: Annotated[float | None, Interval(ge=0, lt=1e6)] = None
    """fixed entropy coefficient (default: it starts at 0.05 and is tuned until the policy's entropy
    is -dim(actions))"""

    def __post_init__(self):
        super().__post_init__()
        humanoid = self.env_id.startswith("Humanoid")
        self.action_repeat = self.action_repeat or (2 if humanoid else 1)
        self.mirror = self.mirror and self.env_id == "Humanoid-v5"
        if humanoid:
            self.baseline_prompt = self.baseline_prompt or ("a humanoid robot",)
            self.camera_azimuth = self.camera_azimuth or (180.0, 120.0, 240.0)


# The agent observes the positions and velocities of the joints of Humanoid-v5, and each body's
# inertia and velocity about the centre of mass, which tell it whether it is falling (253 numbers).
# The forces of actuators and contacts (95 numbers, up to 5000) are left out.
NO_FORCES = {f"include_{part}_in_observation": False for part in ("qfrc_actuator", "cfrc_ext")}


def make_env(args: Args, filmed=False):
    """Return a function that makes one environment: observations [O], endless episodes, and in
    `info` the states or frames for pictures."""
    by_state = not tasks.why_own_render(args.env_id)
    kwargs = NO_FORCES if args.env_id == "Humanoid-v5" else {}
    return functools.partial(tasks.make_endless, args, by_state, filmed, **kwargs)


def make_vector_env(args: Args):
    """Return the environments as one Gymnasium vector environment that never resets itself."""
    if args.env_id == "Humanoid-v5":
        from environments.humanoid import HumanoidVectorEnv

        # the results are the same bit for bit, in half the time (docs/speed.md)
        return HumanoidVectorEnv(args.num_envs, **NO_FORCES)
    thunks = [make_env(args, filmed=i == 0) for i in range(args.num_envs)]
    return tasks.make_vector_env(args, thunks)


def make_renderer(args: Args, device="cpu", size: int | None = None):
    """Make the renderer of states; every reward worker calls this."""
    return tasks.make_renderer(args, device, size)


def check_args(args: Args):
    """Check the flags before anything slow starts -> a state [S] float64 of the task, or None if
    the task draws itself. Raises UsageError with one line that says what is wrong."""
    actions, state, observation_dim = tasks.describe_env(args.env_id, make_env(args, filmed=True))
    continuous = isinstance(actions, gym.spaces.Box) and actions.dtype.kind == "f"
    if not continuous or not actions.is_bounded():
        other = "; use dqn_clip_classic.py" if isinstance(actions, gym.spaces.Discrete) else ""
        need = f"SAC needs bounded continuous actions, not {actions}"
        raise UsageError(f"--env-id {args.env_id}: {need}{other}")
    rollout = args.num_envs * args.episode_length
    if args.episode_length % args.action_repeat:
        flags = f"--episode-length {args.episode_length}, --action-repeat {args.action_repeat}"
        raise UsageError(f"{flags}: an episode is a whole number of repeats")
    if args.n_step * args.action_repeat > args.episode_length:
        raise UsageError(f"--n-step {args.n_step} is longer than an episode")
    if args.buffer_size < rollout:
        raise UsageError(f"--buffer-size {args.buffer_size} is below a rollout of {rollout} steps")
    if args.learning_starts > max(rollout, args.total_timesteps):
        raise UsageError(f"--learning-starts {args.learning_starts} is beyond --total-timesteps")
    sided = re.search(r"\b(left|right)\b", " ".join(args.target_prompt), re.IGNORECASE)
    if sided and args.mirror:
        raise UsageError(f"--target-prompt says {sided[0]!r}: add --no-mirror")
    tasks.check_drawing(args, state)
    transitions = max(rollout, min(args.buffer_size, args.total_timesteps))
    numbers = observation_dim + math.prod(actions.shape) + 1
    check_memory(args, {
        "--buffer-size": 4 * transitions // args.action_repeat * numbers,
        "--batch-size": 4 * args.batch_size * (2 * observation_dim + 12 * HIDDEN),  # in fact 14
        "HIDDEN": 4 * 15 * HIDDEN**2,  # six networks; three have a gradient and two averages each
    })  # fmt: skip
    args.check_reward()
    return state


class RunningNorm(nn.Module):
    """Normalise observations [B, O] by their running mean and standard deviation, and clip them to
    +-10: RSNorm in SimBa (Lee et al. 2024). Statistics are merged as in Chan et al. (1979)."""

    def __init__(self, observation_dim):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(observation_dim))
        self.register_buffer("var", torch.ones(observation_dim))

    @torch.no_grad()
    def add(self, observations):
        """Update the statistics with observations [..., O], in place: a CUDA graph reads them."""
        x = observations.flatten(0, -2)
        self.count += len(x)
        share, ahead = len(x) / self.count, x.mean(0) - self.mean
        self.mean += share * ahead
        self.var.lerp_(x.var(0, correction=0) + (1 - share) * ahead.square(), share.float())

    def forward(self, x):
        return ((x - self.mean) * (self.var + 1e-4).rsqrt()).clamp(-10, 10)


HIDDEN = 256  # width of the two hidden layers of actor and critics


def mlp(inputs: int, outputs: int, layer_norm: bool = False) -> nn.Sequential:
    layers = []
    for width in (inputs, HIDDEN):
        layers.append(nn.Linear(width, HIDDEN))
        if layer_norm:
            layers.append(nn.LayerNorm(HIDDEN))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(HIDDEN, outputs))


class TwinCritic(nn.Module):
    """Q1 and Q2: observations [B, O], actions [B, A] -> [2, B]. The actor shares `normalize`."""

    def __init__(self, observation_dim, action_dim, args: Args, normalize):
        super().__init__()
        self.normalize = normalize
        inputs = observation_dim + action_dim
        self.qf1 = mlp(inputs, 1, args.normalize)
        self.qf2 = mlp(inputs, 1, args.normalize)

    def forward(self, observations, actions):
        x = torch.cat([self.normalize(observations), actions], 1)
        return torch.cat([self.qf1(x), self.qf2(x)], 1).T


LOG_STD_MIN, LOG_STD_MAX = -5, 2


class Actor(nn.Module):
    """Squashed Gaussian policy. Actions are in [-1, 1]; `to_env` scales them for `envs.step`."""

    def __init__(self, observation_dim, action_space, args: Args):
        super().__init__()
        self.normalize = RunningNorm(observation_dim) if args.normalize else nn.Identity()
        self.net = mlp(observation_dim, 2 * math.prod(action_space.shape))
        bounds = np.stack([action_space.low, action_space.high]).astype(np.float32)
        low, high = torch.from_numpy(bounds).reshape(2, -1)
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("action_bias", (high + low) / 2)
        self.action_space = action_space

    def forward(self, observations):
        """[B, O] -> mean [B, A] and log standard deviation [B, A] before squashing."""
        mean, log_std = self.net(self.normalize(observations)).chunk(2, dim=1)
        # tanh bounds log_std smoothly: clamping would stop the gradient outside the bounds
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(log_std) + 1)
        return mean, log_std

    def sample(self, observations, noise=None):
        """[B, O] -> actions [B, A] in [-1, 1] (reparameterised), log densities [B]. The standard
        normal noise [B, A] is sampled here unless it is given."""
        mean, log_std = self(observations)
        noise = torch.randn_like(mean) if noise is None else noise
        x = mean + log_std.exp() * noise
        log_density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        # minus log d tanh(x)/dx = log(1 - tanh(x)^2), in the form that does not overflow
        log_density = log_density - 2 * (math.log(2) - x - F.softplus(-2 * x))
        return torch.tanh(x), log_density.sum(1)

    def to_env(self, actions):
        """Actions [N, A] in [-1, 1] -> array [N, *action shape] in the environment's units."""
        actions = actions * self.action_scale + self.action_bias
        actions = actions.cpu().numpy().reshape(len(actions), *self.action_space.shape)
        return np.clip(actions, self.action_space.low, self.action_space.high)  # it was rounded

    @torch.no_grad()
    def best_actions(self, observations):
        """Array [N, O] -> mean actions, as an array in the environment's units."""
        observations = torch.as_tensor(observations, dtype=torch.float32)
        mean, _ = self(observations.to(self.action_scale.device))
        return self.to_env(torch.tanh(mean))


def exploration_noise(T, N, action_dim, pink, varied):
    """Draw normal noise [T, N, A] of variance 1 for N episodes of T actions. Pink noise has a power
    spectrum of 1/f over an episode (Eberhard et al., "Pink Noise Is All You Need", ICLR 2023): its
    slow parts move limbs, which hardly follow a torque that changes every step. `varied` multiplies
    it by an exponential amplitude of mean 1 for each episode and action dimension (so the variance
    is 2 over all episodes): a few limbs explore far from the policy's pose while the others hold it
    (docs/results.md)."""
    noise = torch.randn(N, action_dim, T)
    if pink:
        amplitude = torch.fft.fftfreq(T).abs().clamp(min=1 / T).rsqrt()
        amplitude /= amplitude.square().mean().sqrt()  # the variance of every step stays 1
        noise = torch.fft.ifft(torch.fft.fft(noise) * amplitude).real
    if varied:
        noise = noise * torch.empty(N, action_dim, 1).exponential_()
    return noise.permute(2, 0, 1)


class ReplayBuffer:
    """A ring of whole float32 rollouts. Fixed-length episodes have no reset inside, so the next
    observation is the next row: T + 1 rows take half the memory of T pairs of observations."""

    def __init__(self, rollouts, T, N, observation_dim, action_dim, device, gamma=0.95, n_step=1):
        self.gamma = gamma
        self.n_step = n_step
        self.count = 0  # rollouts ever added
        self.observations = torch.empty(rollouts, T + 1, N, observation_dim, device=device)
        self.actions = torch.empty(rollouts, T, N, action_dim, device=device)
        self.rewards = torch.empty(rollouts, T, N, device=device)
        self.rings = (self.observations, self.actions, self.rewards)

    def add(self, *rollout):
        """Add one rollout: observations [T+1, N, O], actions [T, N, A], rewards [T, N]."""
        for ring, values in zip(self.rings, rollout, strict=True):
            ring[self.count % len(ring)] = torch.as_tensor(values).to(ring)
        self.count += 1

    def state_dict(self):
        # copies, because torch.save would write the whole ring behind a slice
        return {"count": self.count, "rings": [ring[: self.count].clone() for ring in self.rings]}

    def load_state_dict(self, state):
        self.count = state["count"]
        for ring, filled in zip(self.rings, state["rings"], strict=True):
            ring[: len(filled)] = filled

    def sample(self, batch_size):
        """Sample observations [B, O], those n steps later [B, O], actions [B, A] and the discounted
        sums of the n rewards between them [B]. All n steps are in one episode."""
        (rollouts, T, N), n = self.rewards.shape, self.n_step
        starts = (T - n + 1) * N  # in every rollout
        filled = min(self.count, rollouts) * starts
        index = torch.randint(filled, (batch_size,), device=self.rewards.device)
        rollout = index // starts
        step = index + rollout * (n - 1) * N  # among the actions and rewards
        row = step + rollout * N  # among the observations: each rollout has N more of them
        observations, rewards = self.observations.flatten(0, 2), self.rewards.flatten()
        now, later = observations[row], observations[row + n * N]
        returns = sum(self.gamma**k * rewards[step + k * N] for k in range(n))
        return now, later, self.actions.flatten(0, 2)[step], returns


def mirror_half(batch, mirror):
    """Exchange left and right in the first half of a batch, in place: `mirror` has the columns and
    signs of observations, of those n steps later, and of actions."""
    for x, (columns, signs) in zip(batch, mirror):
        half = len(x) // 2
        x[:half] = x[:half, columns] * signs


def update_critic(batch, actor, critic, target_critic, optimizer, alpha, gamma):
    """Take one step on the soft Bellman error -> {name: scalar [] to log}."""
    observations, next_observations, actions, rewards = batch
    with torch.no_grad():
        next_actions, next_log_density = actor.sample(next_observations)
        next_values = target_critic(next_observations, next_actions).amin(0)
        # There is no (1 - done), because nothing terminates here: the end of an episode is a time
        # limit, a truncation, and the value of its last state is bootstrapped like any other.
        targets = rewards + gamma * (next_values - alpha * next_log_density)
    values = critic(observations, actions)
    losses = (values - targets).square().mean(1)
    optimizer.zero_grad()
    losses.sum().backward()
    optimizer.step()
    qf1_loss, qf2_loss = losses.detach()
    qf1_values, qf2_values = values.detach().mean(1)
    return {
        "qf1_loss": qf1_loss,
        "qf2_loss": qf2_loss,
        "qf1_values": qf1_values,
        "qf2_values": qf2_values,
    }


def update_actor(observations, actor, critic, optimizer, alpha):
    """Take one step that raises the soft value of the policy's actions -> {name: scalar to log}."""
    actions, log_density = actor.sample(observations)
    loss = (alpha * log_density - critic(observations, actions).amin(0)).mean()
    optimizer.zero_grad()
    loss.backward(inputs=list(actor.parameters()))  # no gradients of the critics' weights
    optimizer.step()
    return {"actor_loss": loss.detach(), "entropy": -log_density.detach().mean()}


def update_alpha(entropy, action_dim, alpha, log_alpha, optimizer):
    """Take one step of the entropy coefficient towards a policy entropy of -dim(actions) -> {name:
    scalar [] to log}."""
    loss = alpha * (entropy + action_dim)
    log_alpha.grad = loss  # alpha = exp(log_alpha) is its own derivative
    optimizer.step()
    return {"alpha_loss": loss}


def make_learner(args: Args, observation_dim, action_space, device):
    """Return networks, optimisers and the logarithm of the entropy coefficient [] by name."""
    actor = Actor(observation_dim, action_space, args).to(device)
    shape = (observation_dim, math.prod(action_space.shape), args, actor.normalize)
    critic, target_critic = TwinCritic(*shape).to(device), TwinCritic(*shape).to(device)
    target_critic.load_state_dict(critic.state_dict())
    target_critic.requires_grad_(False)
    averaged_actor = copy.deepcopy(actor).requires_grad_(False)
    averaged_actor.normalize = actor.normalize  # the copy would have statistics of its own
    tuned = args.entropy_coef is None
    entropy_coef = torch.tensor(0.05 if tuned else args.entropy_coef, device=device)
    log_alpha = entropy_coef.log().requires_grad_(tuned)
    captured = args.compile and device.type == "cuda"
    settings = {"lr": args.learning_rate, "fused": True, "capturable": captured}
    adam = functools.partial(torch.optim.Adam, **settings)
    return {
        "actor": actor,
        "averaged_actor": averaged_actor,
        "critic": critic,
        "target_critic": target_critic,
        "actor_optimizer": adam(actor.parameters()),
        "critic_optimizer": adam(critic.parameters()),
        "alpha_optimizer": adam([log_alpha]),
        "log_alpha": log_alpha,
    }


def update(batch, learner, args: Args):
    """Take one step of critics, actor, entropy coefficient, target critics and averaged actor ->
    {name: scalar [] to log}."""
    actor = learner["actor"]
    critic = learner["critic"]
    target_critic = learner["target_critic"]
    log_alpha = learner["log_alpha"]
    observations, _, actions, _ = batch
    alpha = log_alpha.detach().exp()
    gamma = args.gamma ** (args.action_repeat * args.n_step)
    optimizer = learner["critic_optimizer"]
    scalars = update_critic(batch, actor, critic, target_critic, optimizer, alpha, gamma)
    scalars |= update_actor(observations, actor, critic, learner["actor_optimizer"], alpha)
    scalars["alpha"] = alpha
    if args.entropy_coef is None:
        optimizer = learner["alpha_optimizer"]
        entropy, action_dim = scalars["entropy"], actions.shape[1]
        scalars |= update_alpha(entropy, action_dim, alpha, log_alpha, optimizer)
    with torch.no_grad():
        params = [*critic.parameters(), *actor.parameters()]
        averages = [*target_critic.parameters(), *learner["averaged_actor"].parameters()]
        torch._foreach_lerp_(averages, params, args.tau)
    return scalars


if __name__ == "__main__":
    args = parse_args(Args, __doc__)
    state = check_args(args)
    T, N, R = args.episode_length, args.num_envs, args.action_repeat
    use_clip = args.reward != "ground-truth"
    scored = clip_reward.scored_steps(T, args.score_every)
    drawn_from = "frames" if state is None else "states"  # in `infos`
    judge = judges.episode_judge(args.judge, args.env_id, args.target_prompt, state)

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms need it
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would fill the whole buffer
    torch.set_num_threads(1)  # products this small are faster with one thread
    torch.set_flush_denormal(True)  # denormals in Adam's averages slow a CPU down a hundredfold
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # The reward workers load CLIP while the environments are made.
    draw = functools.partial(make_renderer, args) if drawn_from == "states" else None
    score = functools.partial(clip_reward.make_clip_reward, args) if use_clip else None
    devices = args.devices() if use_clip else args.devices()[:1]
    chunk = max(1, args.clip_batch_size // args.views)  # states
    needed = use_clip or (draw and args.video_freq)
    if needed or drawn_from == "frames":
        say(tasks.how_drawn(args.env_id))
    pool = make_pool(draw, score, devices if needed else [], chunk)
    envs = make_vector_env(args)
    observation_dim = envs.single_observation_space.shape[0]
    say(*pool.wait_ready())
    run = Run(args)

    # Networks and optimisers. The entropy is always that of actions scaled to [-1, 1].
    action_dim = math.prod(envs.single_action_space.shape)
    learner = make_learner(args, observation_dim, envs.single_action_space, device)
    actor, averaged_actor = learner["actor"], learner["averaged_actor"]
    learn = functools.partial(update, learner=learner, args=args)
    if args.compile:
        learn = torch.compile(learn, dynamic=False)
        if device.type == "cuda":  # all kernels as one CUDA graph
            from tensordict.nn import CudaGraphModule

            learn = CudaGraphModule(learn, warmup=5)
    rollouts = min(args.buffer_size, max(args.total_timesteps, run.step) + T * N - 1) // (T * N)
    steady = N // 4 if args.pink_noise else 0  # environments without exploration
    sizes = rollouts, T // R, N, observation_dim, action_dim
    buffer = ReplayBuffer(*sizes, device, args.gamma**R, args.n_step)
    mirror = []
    if args.mirror:
        pairs = [[torch.as_tensor(x).to(device) for x in pair] for pair in envs.mirror()]
        mirror = pairs[0], *pairs
    saved = learner | {"replay": buffer}
    run.restore(saved, pool.look)  # with --resume

    while run.step < args.total_timesteps and not run.stopped:
        # All randomness follows from (seed, number of the rollout): a resumed run continues as the
        # uninterrupted one would have, without any generator's state being saved.
        sequence = np.random.SeedSequence((args.seed, run.rollout))
        *env_seeds, torch_seed = map(int, sequence.generate_state(N + 1))
        torch.manual_seed(torch_seed)
        random_actions = run.step < args.learning_starts
        varied = args.pink_noise and not random_actions
        noise = exploration_noise(T // R, N, action_dim, args.pink_noise, varied)
        film = run.due(args.video_freq, run.step, run.step + T * N)
        observations = np.empty((T + 1, N, observation_dim), np.float32)
        actions = np.empty((T // R, N, action_dim), np.float32)
        env_rewards = np.empty((T, N))
        pictured = []  # the states or frames of every step, for pictures

        # 1. Play one episode of every environment: physics only. The workers draw and score some of
        # its states meanwhile, and the policy acts on the CPU: on a GPU it would queue behind CLIP.
        t0 = time.perf_counter()
        acting, averaged = copy.deepcopy(actor).cpu(), copy.deepcopy(averaged_actor).cpu()
        observations[0], _ = envs.reset(seed=env_seeds, options={"film": film})
        for t in range(T):
            if t % R == 0:  # otherwise the action is held
                with torch.no_grad():
                    if random_actions:  # erf makes the normal noise uniform
                        action = torch.erf(noise[t // R] / math.sqrt(2))
                    else:
                        now = torch.as_tensor(observations[t])
                        action, _ = acting.sample(now, noise[t // R])
                        action[:steady] = torch.tanh(averaged(now[:steady])[0])
                actions[t // R] = action.numpy()
            stepped = envs.step(acting.to_env(action))
            observations[t + 1], env_rewards[t], _, _, infos = stepped
            if drawn_from in infos:
                states = np.stack(infos[drawn_from])  # [N, S], or frames [N, H, W, 3]
                pictured.append(states if drawn_from == "states" else states[:1].copy())
                if use_clip and t in scored:
                    pool.put(states)
        success = infos.get("success")

        # 2. Take the rewards. The reward of (s, a, s') is CLIP's score of the picture of s'.
        t1 = time.perf_counter()
        rewards = env_rewards
        if use_clip:
            rewards = np.zeros((T, N), np.float32)
            rewards[scored] = pool.take().reshape(-1, N)
        t2 = time.perf_counter()
        run.check_finite(env_seeds, observation=observations, action=actions.repeat(R, 0))
        run.check_finite(env_seeds, first=1, env_reward=env_rewards, reward=rewards)
        if use_clip:
            rewards = clip_reward.interpolate(rewards, scored)
        run.to_save = {}  # a failure from here to the end of the rollout saves nothing
        transition_rewards = rewards.reshape(T // R, R, N).mean(1)
        buffer.add(observations[::R], actions, transition_rewards)
        run.step += T * N
        run.rollout += 1
        if not random_actions:
            run.keep_best(rewards[:, : steady or N].mean(), averaged_actor=averaged_actor)
        if args.normalize:
            actor.normalize.add(torch.as_tensor(observations, device=device))

        # 3. Learn
        t3 = time.perf_counter()
        losses = []
        for _ in range(args.gradient_steps if run.step >= args.learning_starts else 0):
            batch = buffer.sample(args.batch_size)
            mirror_half(batch, mirror)
            losses.append(learn(batch))
        means = {}
        for name in losses[0] if losses else ():
            means[f"losses/{name}"] = torch.stack([x[name] for x in losses]).mean().item()
        t4 = time.perf_counter()

        # 4. Log
        scalars = {"charts/clip_reward": rewards.mean()} if use_clip else {}
        if judge:
            eight = [states[:8] for states in pictured]  # judging takes time, too
            success = judge(np.stack(eight))
        if success is not None:
            scalars["charts/success_rate"] = np.mean(success)
        scalars |= {"charts/episodic_return": env_rewards.sum(0).mean(), "charts/SPS": run.speed}
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
        if run.due(args.checkpoint_freq, run.step - T * N, run.step):
            run.save(saved)
        if pictured and film:
            episode = np.stack([states[0] for states in pictured])  # of the first environment
            render = functools.partial(pool.render, size=240) if draw else None
            run.video(episode, envs.metadata.get("render_fps"), render)

    run.save(saved)  # a stopped run is saved, too
    envs.close()
    run.close()
