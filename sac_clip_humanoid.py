"""SAC from a sentence: the reward of a step is how well CLIP finds its picture to fit the words.
(VLM-RM, arXiv 2310.12921; SAC, arXiv 1812.05905.) The whole experiment is in this file.

One GPU, the paper's setting (ViT-bigG-14, 10 million steps):

    python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling"

Several GPUs, a process each (instead of their names `ray`: all GPUs of a Ray cluster, see README):

    python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling" \\
        --reward-devices cuda:0 cuda:1 cuda:2 cuda:3

Offline on a laptop, with the small CLIP that comes with the project:

    python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling" \\
        --clip-model local-dir:tiny_clip --render-size 64 --camera-azimuth 120 180 240 --n-step 3 \\
        --num-envs 8 --total-timesteps 64000 --learning-starts 4800 --gradient-steps 600 \\
        --batch-size 128 --gamma 0.97 --entropy-coef 0.05 --normalize-observations --layer-norm

Another task (any of Gymnasium's with continuous actions, MODULE:NAME of your own included):

    python sac_clip_humanoid.py --env-id Ant-v5 --target-prompt "a four-legged robot on its back"

The environment's own reward instead, as a baseline (nothing is drawn):

    python sac_clip_humanoid.py --reward ground-truth --video-freq 0
"""

import functools
import math
import multiprocessing
import signal
import time
from dataclasses import dataclass, field
from typing import Annotated, Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the next lines import: no traceback

import clip_reward  # before torch: it bounds how long threads spin

# isort: split
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from annotated_types import Interval
from PIL import Image

import egl_render
from egl_render import Count, LearningRate, Positive, UsageError
from environments import classic, vector
from training.flags import RunArgs, parse_args
from training.run import Rings, Run, compile_update, load_judge, make_pool, seed_everything


@dataclass
class Args(RunArgs):
    reward: clip_reward.RewardArgs = field(default_factory=clip_reward.RewardArgs)
    render: egl_render.RenderArgs = field(default_factory=egl_render.RenderArgs)

    env_id: str = "Humanoid-v5"
    """any Gymnasium task with continuous actions; MODULE:NAME imports MODULE first, which registers
    it. MuJoCo tasks are drawn from their states, others by their own render()"""
    total_timesteps: Positive = 10_000_000
    """environment steps in all, rounded up to whole rollouts"""
    num_envs: Positive = 32
    """environments stepped in parallel, one process each (Humanoid-v5 and MountainCarContinuous:
    in this one)"""
    episode_length: Positive = 100
    """steps of every episode; no episode ends earlier, and a rollout is one episode of each"""
    buffer_size: Positive = 1_000_000
    """transitions in the replay buffer, rounded down to whole rollouts"""
    gamma: Annotated[float, Interval(ge=0, lt=1)] = 0.95
    """discount factor"""
    n_step: Positive = 1
    """rewards that a target sums before it bootstraps; with 3 they get to earlier states in a third
    of the updates (Sutton and Barto 2018, chapter 7; not in the paper). Entropy counts in every
    nth step only"""
    tau: Annotated[float, Interval(gt=0, le=1)] = 0.005
    """share of the critics that moves into the target critics at each update"""
    batch_size: Positive = 512
    """transitions per update"""
    learning_starts: Count = 50_000
    """steps of random actions before the first update"""
    random_repeat: Positive = 1
    """steps for which each random action is held: with a new one every step a car never leaves its
    valley, with one for 25 steps every fifth episode gets to the top (not in the paper)"""
    gradient_steps: Positive = 100
    """updates after each rollout (num_envs * episode_length steps)"""
    policy_lr: LearningRate = 6e-4
    """learning rate of the actor"""
    q_lr: LearningRate = 6e-4
    """learning rate of the critics and of the entropy coefficient"""
    hidden_size: Positive = 256
    """width of the two hidden layers of actor and critics"""
    layer_norm: bool = False
    """normalise the critics' hidden layers, as DroQ and SimBa do: their values stay sane when there
    are many updates per step (not in the paper)"""
    normalize_observations: bool = False
    """bring every observation to mean 0 and standard deviation 1 over all so far, as SimBa does:
    Humanoid-v5's contact forces reach 5000 where its joint angles reach 3 (not in the paper)"""
    autotune: bool = True
    """tune the entropy coefficient to a policy entropy of -dim(actions)"""
    entropy_coef: Annotated[float, Interval(ge=0, lt=1e6)] = 1.0
    """the entropy coefficient, with --autotune only where it starts"""

    def __post_init__(self):
        given = self.reward.baseline_prompt or self.reward.baseline_image
        if not given and self.env_id.startswith("Humanoid"):
            self.reward.baseline_prompt = ("a humanoid robot",)


def check_args(args: Args) -> None:
    """Raise UsageError, one line that says what to type instead, before anything slow starts."""
    args.check()
    if args.autotune and args.entropy_coef == 0:
        raise UsageError("--entropy-coef 0.0 cannot be tuned (see --no-autotune)")
    if args.n_step > args.episode_length:
        raise UsageError(f"--n-step {args.n_step} is beyond --episode-length {args.episode_length}")
    scene, observation_dim, action_dim = check_env(args.env_id)
    for flag, given in ("judge", args.judge), ("camera-azimuth", args.render.camera_azimuth):
        if scene == "frames" and given:
            raise UsageError(f"--{flag} {given} wants states; {args.env_id} is drawn by render()")
    args.check_memory(observation_dim + action_dim + 1)
    args.reward.check(frames=args.total_timesteps * args.render.views)


MOUNTAIN_CAR = "MountainCarContinuous-v0"  # a goal that absorbs, and steps of microseconds


@functools.cache  # it makes an environment
def check_env(env_id: str) -> tuple[Literal["states", "frames"], int, int]:
    """What a task is drawn from: its states (MuJoCo, MountainCar), or else by its `render()`; how
    many numbers an observation and an action have.

    Raises:
        UsageError: no such task, or not one that SAC can learn.
    """
    egl_render.quiet_mujoco()
    try:
        env = gym.make(env_id)
    except (gym.error.Error, ImportError, ValueError) as error:  # with the nearest names
        raise UsageError(f"--env-id {env_id}: {' '.join(str(error).split())}") from error
    actions = env.action_space
    if isinstance(actions, gym.spaces.Discrete):
        raise UsageError(f"--env-id {env_id} has discrete actions; use dqn_clip_classic.py")
    if not isinstance(actions, gym.spaces.Box) or not actions.is_bounded():
        raise UsageError(f"--env-id {env_id}: SAC needs bounded continuous actions, not {actions}")
    has_state = hasattr(env.unwrapped, "data") or env_id == MOUNTAIN_CAR
    sizes = gym.spaces.flatdim(env.observation_space), math.prod(actions.shape)
    return "states" if has_state else "frames", *sizes


class SceneInInfo(gym.Wrapper):
    """Episodes that never end by themselves, and an `info` with nothing but what a picture needs,
    "states" or else "frames", and "success" where the task has a rule of its own.

    An early end would tell the agent about the task (section 4.1 of the paper). `info` is pickled
    through a pipe at every step: the humanoid's state makes that 533 bytes a step.
    """

    def __init__(self, env, frame_size):
        super().__init__(env)
        self.frame_size = frame_size

    def step(self, action):
        observation, reward, _, _, info = self.env.step(action)
        info = {key: info[key] for key in info if key == "success"}
        task = self.unwrapped
        if hasattr(task, "data"):  # MuJoCo's
            info["states"] = np.concatenate([task.data.qpos, task.data.qvel])
        elif task.spec.id == MOUNTAIN_CAR:
            info["states"] = np.array(task.state, np.float64)
        elif self.render_mode:
            image = Image.fromarray(self.env.render())
            image.thumbnail((self.frame_size, self.frame_size))  # never enlarges
            info["frames"] = np.asarray(image)  # [H, W, 3] uint8
        return observation, float(reward), False, False, info


def make_env(args: Args):
    """A function that makes one environment."""
    drawn = args.reward.reward == "clip" or args.video_freq
    frames = drawn and check_env(args.env_id)[0] == "frames"

    def thunk():
        egl_render.quiet_mujoco()
        if multiprocessing.parent_process() is not None:
            gym.logger.min_level = gym.logger.ERROR  # the parent has printed the same warnings
        kwargs = {"max_episode_steps": -1}  # no time limit
        if frames:
            kwargs["render_mode"] = "rgb_array"
        try:  # with True, v4 tasks pay for health whatever the robot does
            env = gym.make(args.env_id, terminate_when_unhealthy=False, **kwargs)
        except TypeError:  # a task without health
            env = gym.make(args.env_id, **kwargs)
        if args.env_id == MOUNTAIN_CAR:
            env = classic.AbsorbingGoal(env)
        if len(env.observation_space.shape or ()) != 1:  # pictures, or a Dict of several
            env = gym.wrappers.FlattenObservation(env)
        return SceneInInfo(env, args.render.render_size)

    return thunk


def make_renderer(args: Args, size: int | None = None):
    """What draws states; called in every reward worker, after it was bound to its GPU."""
    egl_render.quiet_mujoco()
    size = size or args.render.render_size
    if args.env_id == MOUNTAIN_CAR:
        return egl_render.ClassicRenderer(args.env_id, size, args.render.textured)
    env = gym.make(args.env_id).unwrapped
    model = egl_render.textured_model(env.fullpath) if args.render.textured else env.model
    camera = egl_render.choose_camera(args.render, env)
    return egl_render.MujocoRenderer(model, size, camera, args.render.render_quality)


class RunningNorm(nn.Module):
    """Observations [B, O], each with mean 0 and standard deviation 1 over all that were learned
    from, within +-10. RSNorm in SimBa (Lee et al. 2024); added up as in Chan et al. (1979)."""

    def __init__(self, observation_dim):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(observation_dim))
        self.register_buffer("var", torch.ones(observation_dim))

    @torch.no_grad()
    def add(self, observations):
        """Count in some more, [..., O]. In place: a captured CUDA graph reads the same tensors."""
        x = observations.flatten(0, -2)
        self.count += len(x)
        share, ahead = len(x) / self.count, x.mean(0) - self.mean
        self.mean += share * ahead
        self.var.lerp_(x.var(0, correction=0) + (1 - share) * ahead.square(), share.float())

    def forward(self, x):
        return ((x - self.mean) * (self.var + 1e-4).rsqrt()).clamp(-10, 10)


def mlp(inputs: int, hidden: int, outputs: int, layer_norm: bool = False) -> nn.Sequential:
    layers = []
    for width in (inputs, hidden):
        layers += [nn.Linear(width, hidden), *([nn.LayerNorm(hidden)] * layer_norm), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


class TwinCritic(nn.Module):
    """Q1 and Q2: observations [B, O], actions [B, A] -> values [2, B]. normalize: the actor's."""

    def __init__(self, observation_dim, action_dim, args: Args, normalize):
        super().__init__()
        self.normalize = normalize
        inputs = observation_dim + action_dim
        self.qf1 = mlp(inputs, args.hidden_size, 1, args.layer_norm)
        self.qf2 = mlp(inputs, args.hidden_size, 1, args.layer_norm)

    def forward(self, observations, actions):
        x = torch.cat([self.normalize(observations), actions], 1)
        return torch.cat([self.qf1(x), self.qf2(x)], 1).T


LOG_STD_MIN, LOG_STD_MAX = -5, 2


class Actor(nn.Module):
    """Squashed Gaussian policy. Actions are in [-1, 1] everywhere but in `envs.step`: `to_env`."""

    def __init__(self, observation_dim, action_space, args: Args):
        super().__init__()
        normalize = args.normalize_observations
        self.normalize = RunningNorm(observation_dim) if normalize else nn.Identity()
        self.net = mlp(observation_dim, args.hidden_size, 2 * math.prod(action_space.shape))
        bounds = np.stack([action_space.low, action_space.high]).astype(np.float32)
        low, high = torch.from_numpy(bounds).flatten(1)
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("action_bias", (high + low) / 2)
        self.action_shape = action_space.shape

    def forward(self, observations):
        """[B, O] -> mean [B, A] and log standard deviation [B, A] before squashing."""
        mean, log_std = self.net(self.normalize(observations)).chunk(2, dim=1)
        # tanh keeps log_std inside its range smoothly: clamping would stop the gradient there
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(log_std) + 1)
        return mean, log_std

    def sample(self, observations):
        """[B, O] -> actions [B, A] in [-1, 1] (reparameterised), log densities [B]."""
        mean, log_std = self(observations)
        noise = torch.randn_like(mean)
        x = mean + log_std.exp() * noise
        log_density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        # minus log d tanh(x)/dx = log(1 - tanh(x)^2), in the form that does not overflow
        log_density = log_density - 2 * (math.log(2) - x - F.softplus(-2 * x))
        return torch.tanh(x), log_density.sum(1)

    def to_env(self, actions):
        """Actions [N, A] in [-1, 1] -> array [N, *action shape] in the environment's units."""
        actions = actions * self.action_scale + self.action_bias
        return actions.cpu().numpy().reshape(len(actions), *self.action_shape)

    @torch.no_grad()
    def best_actions(self, observations):
        """Array [N, O] -> mean actions, as an array in the environment's units."""
        observations = torch.as_tensor(observations, dtype=torch.float32)
        mean, _ = self(observations.to(self.action_scale.device))
        return self.to_env(torch.tanh(mean))


class ReplayBuffer(Rings):
    """A ring of whole rollouts, float32. Fixed-length episodes have no reset inside, so the next
    observation is the following row: T + 1 rows for T steps, half the memory of storing both."""

    def __init__(self, rollouts, T, N, observation_dim, action_dim, device, gamma=0.95, n_step=1):
        self.gamma, self.n_step, self.count = gamma, n_step, 0  # count: rollouts ever added
        self.observations = torch.empty(rollouts, T + 1, N, observation_dim, device=device)
        self.actions = torch.empty(rollouts, T, N, action_dim, device=device)
        self.rewards = torch.empty(rollouts, T, N, device=device)
        self.rings = (self.observations, self.actions, self.rewards)

    def add(self, *rollout):
        """One rollout: observations [T+1, N, O], actions [T, N, A], rewards [T, N]."""
        super().add(*(torch.as_tensor(values)[None] for values in rollout))

    def sample(self, batch_size):
        """-> observations [B, O], those n steps later [B, O], actions [B, A], and what the rewards
        of these n steps sum up to, discounted [B]. All n steps are in one episode."""
        (rollouts, T, N), n = self.rewards.shape, self.n_step
        starts = (T - n + 1) * N  # in every rollout
        filled = min(self.count, rollouts) * starts
        index = torch.randint(filled, (batch_size,), device=self.rewards.device)
        rollout = index // starts
        step = index + rollout * (n - 1) * N  # among the actions and rewards
        row = step + rollout * N  # of the observations, which have one more in every rollout
        observations, rewards = self.observations.flatten(0, 2), self.rewards.flatten()
        now, later = observations[row], observations[row + n * N]
        returns = sum(self.gamma**k * rewards[step + k * N] for k in range(n))
        return now, later, self.actions.flatten(0, 2)[step], returns


def update_critic(batch, actor, critic, target_critic, optimizer, alpha, gamma):
    """One step on the soft Bellman error -> losses [2], mean values [2]."""
    observations, next_observations, actions, rewards = batch
    with torch.no_grad():
        next_actions, next_log_density = actor.sample(next_observations)
        next_values = target_critic(next_observations, next_actions).amin(0)
        # No (1 - done): nothing terminates here. The end of an episode is a time limit, that is a
        # truncation, and the value of the last state is bootstrapped like any other.
        targets = rewards + gamma * (next_values - alpha * next_log_density)
    values = critic(observations, actions)
    losses = (values - targets).square().mean(1)
    optimizer.zero_grad()
    losses.sum().backward()
    optimizer.step()
    return losses.detach(), values.detach().mean(1)


def update_actor(observations, actor, critic, optimizer, alpha):
    """One step up the soft value of the policy's own actions -> loss [], log densities [B]."""
    actions, log_density = actor.sample(observations)
    loss = (alpha * log_density - critic(observations, actions).amin(0)).mean()
    optimizer.zero_grad()
    loss.backward(inputs=list(actor.parameters()))  # spares the gradients of the critics' weights
    optimizer.step()
    return loss.detach(), log_density.detach()


LOSSES = "qf1_loss qf2_loss qf1_values qf2_values actor_loss alpha_loss alpha entropy".split()


def make_learner(args: Args, observation_dim, action_space, device):
    """Networks, optimisers, and the logarithm of the entropy coefficient [], by name."""
    actor = Actor(observation_dim, action_space, args).to(device)
    shape = (observation_dim, math.prod(action_space.shape), args, actor.normalize)
    critic, target_critic = TwinCritic(*shape).to(device), TwinCritic(*shape).to(device)
    target_critic.load_state_dict(critic.state_dict())
    target_critic.requires_grad_(False)
    log_alpha = torch.tensor(args.entropy_coef, device=device).log().requires_grad_(args.autotune)
    captured = args.compile and device.type == "cuda"
    adam = functools.partial(torch.optim.Adam, fused=True, capturable=captured)
    return {
        "actor": actor,
        "critic": critic,
        "target_critic": target_critic,
        "actor_optimizer": adam(actor.parameters(), lr=args.policy_lr),
        "critic_optimizer": adam(critic.parameters(), lr=args.q_lr),
        "alpha_optimizer": adam([log_alpha], lr=args.q_lr),
        "log_alpha": log_alpha,
    }


def update(batch, learner, args: Args):
    """One step of critics, actor, entropy coefficient and target critics -> [8], see LOSSES."""
    *networks, actor_optimizer, critic_optimizer, alpha_optimizer, log_alpha = learner.values()
    actor, critic, target_critic = networks
    alpha = log_alpha.detach().exp()
    qf_losses, qf_values = update_critic(
        batch, actor, critic, target_critic, critic_optimizer, alpha, args.gamma**args.n_step
    )
    actor_loss, log_density = update_actor(batch[0], actor, critic, actor_optimizer, alpha)
    entropy, target_entropy = -log_density.mean(), -batch[2].shape[1]
    alpha_loss = alpha * (entropy - target_entropy)
    if args.autotune:
        log_alpha.grad = alpha_loss  # alpha = exp(log_alpha) is its own derivative
        alpha_optimizer.step()
    with torch.no_grad():
        params, target_params = list(critic.parameters()), list(target_critic.parameters())
        torch._foreach_lerp_(target_params, params, args.tau)
    scalars = torch.stack([actor_loss, alpha_loss, alpha, entropy])
    return torch.cat([qf_losses, qf_values, scalars])


if __name__ == "__main__":
    args = parse_args(Args, __doc__)
    check_args(args)
    scene, observation_dim, action_dim = check_env(args.env_id)
    use_clip = args.reward.reward == "clip"
    judge = load_judge(args)
    T, N = args.episode_length, args.num_envs
    device = seed_everything(args)
    # The reward workers start in the background, and load CLIP while the environments are made.
    draw = functools.partial(make_renderer, args) if scene == "states" else None
    pool = make_pool(args, draw)
    run = Run(args)

    if args.env_id == "Humanoid-v5":
        from environments.humanoid import HumanoidVectorEnv

        envs = HumanoidVectorEnv(N)  # the same to the bit, and 2.5 times as fast
    elif N == 1 or args.env_id == MOUNTAIN_CAR:
        envs = vector.in_this_process(make_env(args), N)
    else:
        envs = vector.in_processes(make_env(args), N, timeout=args.reward.worker_timeout)

    # Networks and optimisers. The entropy is that of actions in [-1, 1], whatever their units are.
    learner = make_learner(args, observation_dim, envs.single_action_space, device)
    actor = learner["actor"]
    learn = functools.partial(update, learner=learner, args=args)
    if args.compile:
        learn = compile_update(learn, device)

    rollouts = min(args.buffer_size, args.total_timesteps + T * N - 1) // (T * N)
    sizes = rollouts, T, N, observation_dim, action_dim
    buffer = ReplayBuffer(*sizes, device, args.gamma, args.n_step)
    run.start(learner, buffer, pool, envs)  # with --resume: as they were

    while run.goes_on():
        # All randomness follows from (seed, number of the rollout): a resumed run goes on as the
        # uninterrupted one would have, without any generator's state being saved.
        sequence = np.random.SeedSequence((args.seed, buffer.count))
        *env_seeds, torch_seed = map(int, sequence.generate_state(N + 1))
        torch.manual_seed(torch_seed)
        random_actions = run.global_step < args.learning_starts
        observations = np.empty((T + 1, N, observation_dim), np.float32)
        actions = np.empty((T, N, action_dim), np.float32)
        env_rewards, scenes = np.empty((T, N)), []

        # 1. One episode of every environment: physics only. The workers draw and score its states
        # while it is played.
        t0 = time.perf_counter()
        observations[0], _ = envs.reset(seed=env_seeds)
        for t in range(T):
            with torch.no_grad():
                if not random_actions:
                    action, _ = actor.sample(torch.as_tensor(observations[t], device=device))
                elif t % args.random_repeat == 0:
                    action = torch.rand(N, action_dim, device=device) * 2 - 1
            stepped = envs.step(actor.to_env(action))
            observations[t + 1], env_rewards[t], _, _, infos = stepped
            actions[t] = action.cpu().numpy()
            if scene in infos:
                pictured = np.stack(infos[scene])  # states [N, S] or frames [N, H, W, 3]
                scenes.append(pictured if scene == "states" else pictured[:1])
            if use_clip:
                pool.put(**{scene: pictured})
        run.check_finite(env_seeds, observations, env_rewards)
        t1 = time.perf_counter()
        success = infos.get("success")
        if judge:
            success = judge(np.stack(scenes))

        # 2. The rewards: that of (s, a, s') is that of the picture of s'
        rewards = pool.take().reshape(T, N) if use_clip else env_rewards
        buffer.add(observations, actions, rewards)
        run.global_step += T * N
        if not random_actions:
            run.keep_best(rewards.mean(), actor=actor)
        if args.normalize_observations:
            actor.normalize.add(torch.as_tensor(observations, device=device))

        # 3. Learn
        t2 = time.perf_counter()
        losses = []
        for _ in range(args.gradient_steps if run.global_step >= args.learning_starts else 0):
            losses.append(learn(buffer.sample(args.batch_size)))
        means = torch.stack(losses).mean(0).tolist() if losses else []  # waits for the GPU, once

        # 4. Log
        seconds = {"physics_s": t1 - t0, "wait_s": t2 - t1, "update_s": time.perf_counter() - t2}
        more = {f"losses/{name}": value for name, value in zip(LOSSES, means, strict=False)}
        note = "random actions" * random_actions
        run.log(rewards, env_rewards, success, seconds, more, note)

        # 5. Keep
        if scenes and run.due(args.video_freq):
            frames = np.stack([states[0] for states in scenes])  # the first environment's episode
            if scene == "states":
                frames = pool.render(frames, size=max(240, args.render.render_size))
            run.save_video(frames, envs.metadata.get("render_fps", 30))
        run.keep()

    envs.close()
    run.close()
