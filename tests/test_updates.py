"""The updates against the papers' formulas in plain autograd, and the benchmark of their speed."""

import copy
import functools
import json
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers import run as run_script

import dqn_clip_classic as dqn
import sac_clip_humanoid as sac

OBSERVATIONS, ACTIONS, BATCH = 7, 3, 32


class PlainAdam:
    """Algorithm 1 of arXiv 1412.6980 with PyTorch's defaults."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr, self.steps = list(parameters), lr, 0
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    def step(self, loss, max_norm=float("inf")):
        gradients = torch.autograd.grad(loss, self.parameters)
        length = sum(g.square().sum() for g in gradients).sqrt()
        self.steps += 1
        with torch.no_grad():
            for p, g, m, v in zip(self.parameters, gradients, self.m, self.v):
                g = g * min(1.0, max_norm / length.item())
                m.copy_(0.9 * m + 0.1 * g)
                v.copy_(0.999 * v + 0.001 * g**2)
                m_hat, v_hat = m / (1 - 0.9**self.steps), v / (1 - 0.999**self.steps)
                p -= self.lr * m_hat / (v_hat.sqrt() + 1e-8)


def run(layers, x):
    """The network of the papers, written out: linear, perhaps layer norm, ReLU; twice; linear."""
    *hidden, (weight, bias) = layers
    for weight_, bias_, *norm in hidden:
        x = x @ weight_.T + bias_
        if norm:
            x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
            x = x * norm[0] + norm[1]
        x = x.clamp(min=0)
    return x @ weight.T + bias


def layers(network):
    """float64 copies of a Sequential's parameters, those of a layer and its norm together."""
    parameters = [p.detach().double().requires_grad_() for p in network.parameters()]
    each = 4 if len(parameters) == 10 else 2
    return [parameters[:each], parameters[each : 2 * each], parameters[2 * each :]]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small networks, so that float32 stays close to float64."""
    for script in (sac, dqn):
        monkeypatch.setattr(script, "HIDDEN", 24)


def flat(*networks):
    return [parameter for network in networks for layer in network for parameter in layer]


def assert_same(network, expected):
    for parameter, value in zip(network.parameters(), flat(expected), strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("autotune", [True, False])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_three_sac_updates_are_those_of_the_paper(layer_norm, autotune, n_step):
    args = sac.Args(normalize=layer_norm, entropy_coef=None if autotune else 0.3)
    args.n_step, args.action_repeat = n_step, 1 if n_step == 1 else 2
    args.gamma, args.tau, args.learning_rate = 0.9, 0.1, 2e-3
    torch.manual_seed(0)
    space, device = gym.spaces.Box(-1, 1, (ACTIONS,)), torch.device("cpu")
    learner = sac.make_learner(args, OBSERVATIONS, space, device)
    actor, target = learner["actor"], learner["target_critic"]
    for network in (actor, learner["critic"], target):  # of observations: tested elsewhere
        network.normalize = torch.nn.Identity()
    log_alpha = learner["log_alpha"]
    policy, averaged = layers(actor.net), layers(learner["averaged_actor"].net)
    critics = [layers(qf) for qf in (learner["critic"].qf1, learner["critic"].qf2)]
    targets = [layers(qf) for qf in (target.qf1, target.qf2)]
    entropy_coef = log_alpha.detach().double().requires_grad_()  # its logarithm
    policy_adam = PlainAdam(flat(policy), args.learning_rate)
    critic_adam = PlainAdam(flat(*critics), args.learning_rate)
    alpha_adam = PlainAdam([entropy_coef], args.learning_rate)

    def sample(observations, noise):
        mean, log_std = run(policy, observations).chunk(2, 1)
        log_std = -5 + 3.5 * (log_std.tanh() + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x = mean + log_std.exp() * noise
        actions = x.tanh()
        density = normal.log_prob(x) - (1 - actions**2).log()
        return actions, density.sum(1)

    def value(networks, observations, actions):
        return [run(layers_, torch.cat([observations, actions], 1))[:, 0] for layers_ in networks]

    for step in range(3):
        batch = [torch.randn(BATCH, OBSERVATIONS), torch.randn(BATCH, OBSERVATIONS)]
        batch += [torch.rand(BATCH, ACTIONS) * 2 - 1, torch.randn(BATCH)]
        torch.manual_seed(100 + step)
        result = sac.update(batch, learner, args)
        torch.manual_seed(100 + step)  # the same two draws: for s', then for s
        later_noise, noise = (torch.randn(BATCH, ACTIONS).double() for _ in range(2))
        observations, later, actions, rewards = (x.double() for x in batch)
        alpha = entropy_coef.exp().item()
        with torch.no_grad():
            later_actions, density = sample(later, later_noise)
            soft = torch.minimum(*value(targets, later, later_actions)) - alpha * density
            y = rewards + (0.9 if n_step == 1 else 0.9**6) * soft
        losses = [(q - y).square().mean() for q in value(critics, observations, actions)]
        means = [q.mean().item() for q in value(critics, observations, actions)]
        critic_adam.step(sum(losses))
        own_actions, density = sample(observations, noise)
        q = torch.minimum(*value(critics, observations, own_actions))
        actor_loss = (alpha * density - q).mean()
        policy_adam.step(actor_loss)
        alpha_loss = -(entropy_coef.exp() * (density.detach() - ACTIONS)).mean()
        if autotune:
            alpha_adam.step(alpha_loss)
        with torch.no_grad():
            for old, new in zip(flat(*targets, averaged), flat(*critics, policy)):
                old.copy_(0.9 * old + 0.1 * new)
        expected = {"qf1_loss": losses[0].item(), "qf2_loss": losses[1].item()}
        expected |= {"qf1_values": means[0], "qf2_values": means[1]}
        expected |= {"actor_loss": actor_loss.item(), "entropy": -density.mean().item()}
        expected |= {"alpha": alpha} | ({"alpha_loss": alpha_loss.item()} if autotune else {})
        logged = {name: value.item() for name, value in result.items()}
        assert logged == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert_same(actor.net, policy)
    assert_same(learner["averaged_actor"].net, averaged)
    assert_same(learner["critic"].qf1, critics[0])
    assert_same(learner["critic"].qf2, critics[1])
    assert_same(target.qf1, targets[0])
    assert_same(target.qf2, targets[1])
    assert log_alpha.item() == pytest.approx(entropy_coef.item(), abs=1e-6)
    assert (log_alpha.item() == pytest.approx(np.log(0.3), abs=1e-6)) != autotune


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_three_dqn_updates_are_those_of_the_paper(layer_norm, double):
    args = dqn.Args(layer_norm=layer_norm, learning_rate=2e-3, gamma=0.9)
    args.double = double
    torch.manual_seed(0)
    space, device = gym.spaces.Discrete(ACTIONS), torch.device("cpu")
    learner = dqn.make_learner(args, OBSERVATIONS, space, device)
    q_network = learner["q_network"]
    torch.nn.init.normal_(learner["target_network"].net[-1].weight)  # not the same as q_network
    if layer_norm:  # weights of 1 and biases of 0 would hide mistakes
        for norm in (q_network.net[1], q_network.net[4]):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
            torch.nn.init.uniform_(norm.bias, -0.5, 0.5)
    online, target = layers(q_network.net), layers(learner["target_network"].net)
    adam = PlainAdam(flat(online), args.learning_rate)
    for max_norm in (10.0, 0.05, 10.0):  # the second gradient is cut
        args.max_grad_norm = max_norm
        batch = [torch.randn(BATCH, OBSERVATIONS), torch.randn(BATCH, OBSERVATIONS)]
        batch += [torch.randint(ACTIONS, (BATCH,)), 2 * torch.randn(BATCH)]
        batch += [(torch.rand(BATCH) < 0.2).float()]
        result = dqn.update(batch, **learner, args=args)
        observations, later, _, rewards, ends = (x.double() for x in batch)
        with torch.no_grad():
            judged = run(target, later)
            best = run(online, later).argmax(1) if double else judged.argmax(1)
            y = rewards + 0.9 * (1 - ends) * judged[range(BATCH), best]
        values = run(online, observations)[range(BATCH), batch[2]]
        error = (values - y).abs()
        assert (error > 1).any() and (error < 1).any(), "both branches of Huber's loss"
        loss = torch.where(error < 1, 0.5 * error**2, error - 0.5).mean()
        adam.step(loss, max_norm)
        expected = {"td_loss": loss.item(), "q_values": values.mean().item()}
        logged = {name: value.item() for name, value in result.items()}
        assert logged == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert_same(q_network.net, online)
    assert_same(learner["target_network"].net, target)


def gradient(learner, batch, args):
    """What `dqn.update` leaves in the parameters' grad, before it was clipped."""
    args.max_grad_norm = 1e9
    dqn.update(batch, **learner, args=args)
    return torch.cat([p.grad.flatten() for p in learner["q_network"].parameters()])


class Dueling(dqn.QNetwork):
    """A copy of the script may change the forward pass: the mean advantage is subtracted."""

    def forward(self, observations):
        values = self.net(observations)
        return values.mean(1, keepdim=True).tanh() + values - values.mean(1, keepdim=True)


class BatchNormed(dqn.QNetwork):
    """Or add a layer that normalises over the batch."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.net.insert(1, torch.nn.BatchNorm1d(24))
        torch.nn.init.uniform_(self.net[1].weight, 0.5, 1.5)


@pytest.mark.parametrize("kind", [Dueling, BatchNormed])
def test_dqn_learns_whatever_the_network_is(kind):
    """The update's gradient is autograd's own of the loss, written out here."""
    args = dqn.Args(gamma=0.9)
    torch.manual_seed(0)
    networks = [kind(OBSERVATIONS, gym.spaces.Discrete(ACTIONS), args) for _ in range(2)]
    networks[1].requires_grad_(False)
    optimizer = torch.optim.SGD(networks[0].parameters(), lr=0.0)
    learner = dict(zip(("q_network", "target_network", "optimizer"), [*networks, optimizer]))
    batch = [torch.randn(BATCH, OBSERVATIONS), torch.randn(BATCH, OBSERVATIONS)]
    batch += [torch.randint(ACTIONS, (BATCH,)), torch.randn(BATCH), torch.zeros(BATCH)]
    online, target = copy.deepcopy(networks)
    found = gradient(learner, batch, args)
    observations, later, actions, rewards, _ = batch
    best = online(later).argmax(1)
    y = rewards + 0.9 * target(later).detach()[range(BATCH), best]
    error = (online(observations)[range(BATCH), actions] - y).abs()
    loss = torch.where(error < 1, 0.5 * error**2, error - 0.5).mean()
    expected = torch.autograd.grad(loss, list(online.parameters()))
    expected = torch.cat([x.flatten() for x in expected])
    assert expected.norm() > 1e-2
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("script", [sac, dqn], ids=["sac", "dqn"])
def test_compiled_updates_are_the_plain_ones(script):
    import torch._inductor.config as inductor  # slow to import

    # On CUDA the last calls are the captured graph
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    batches = [[*torch.randn(2, BATCH, OBSERVATIONS)] for _ in range(10)]
    for batch in batches:
        if script is sac:
            batch += [torch.rand(BATCH, ACTIONS) * 2 - 1, torch.randn(BATCH)]
        else:
            batch += [torch.randint(ACTIONS, (BATCH,)), torch.randn(BATCH), torch.zeros(BATCH)]
    results, networks = [], []
    for compiled in (False, True):
        torch.manual_seed(1)
        args = script.Args(compile=compiled)
        if script is sac:
            args.normalize = True
            space, seen = gym.spaces.Box(-1, 1, (ACTIONS,)), torch.cat([b[0] for b in batches])
            learner = sac.make_learner(args, OBSERVATIONS, space, device)
            settings = {"learner": learner}
        else:
            space = gym.spaces.Discrete(ACTIONS)
            settings = learner = dqn.make_learner(args, OBSERVATIONS, space, device)
        update = functools.partial(script.update, **settings, args=args)
        if compiled:  # as the scripts do it
            update = torch.compile(update, dynamic=False)
            if device.type == "cuda":
                from tensordict.nn import CudaGraphModule

                update = CudaGraphModule(update, warmup=5)
        torch.manual_seed(2)
        rows = []
        for i, batch in enumerate(batches):
            if script is dqn:  # as --anneal-lr does
                learner["optimizer"].param_groups[0]["lr"].fill_(1e-3 / (i + 1))
            else:  # as after every rollout
                learner["actor"].normalize.add(seen[: BATCH * (i + 1)].to(device) * 3)
            with inductor.patch(fallback_random=True):  # the plain update's random numbers
                scalars = update([x.to(device) for x in batch])
            rows.append({name: value.cpu() for name, value in scalars.items()})
        results.append(rows)
        networks.append(next(iter(learner.values())).state_dict())
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(*networks, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("script", [sac, dqn], ids=["sac", "dqn"])
def test_an_update_sorts_scatters_and_reads_back_nothing(script):
    """Such operations are slow on a GPU, wait for it, or are not deterministic."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    names, args = set(), script.Args()
    batch = [torch.randn(BATCH, OBSERVATIONS), torch.randn(BATCH, OBSERVATIONS)]
    if script is sac:
        space = gym.spaces.Box(-1, 1, (ACTIONS,))
        settings = {"learner": sac.make_learner(args, OBSERVATIONS, space, torch.device("cpu"))}
        batch += [torch.rand(BATCH, ACTIONS) * 2 - 1, torch.randn(BATCH)]
    else:
        space = gym.spaces.Discrete(ACTIONS)
        settings = dqn.make_learner(args, OBSERVATIONS, space, torch.device("cpu"))
        batch += [torch.randint(ACTIONS, (BATCH,)), torch.randn(BATCH), torch.zeros(BATCH)]
    with Names():
        script.update(batch, **settings, args=args)
    assert {"addmm", "mm", "mul"} <= names
    wrong = "scatter", "sort", "index_put", "nonzero", "unique", "_local_scalar_dense"
    assert not [name for name in names if any(part in name for part in wrong)]


# ------------------------------------------------------------------------------ benchmark


def benchmark(*flags, code=0, **environment):
    return run_script(ROOT / "benchmarks/updates.py", *flags, code=code, **environment)


def test_the_benchmark_prints_and_writes_updates_per_second(tmp_path):
    result = tmp_path / "updates.json"
    flags = ("--rounds", 1, "--rows", "plain", "--device", "cpu", "--json", result)
    printed = benchmark(*flags).stdout
    assert "SAC" in printed and "DQN" in printed and "plain" in printed
    result = json.loads(result.read_text())
    assert set(result) == {"machine", "updates_per_second"}
    assert set(result["updates_per_second"]) == {"SAC", "DQN"}
    for rows in result["updates_per_second"].values():
        assert set(rows) == {"plain"} and rows["plain"] > 0
