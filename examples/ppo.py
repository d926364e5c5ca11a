"""Reinforcement learning: PPO on CartPole; policy and value are two outputs of one agent.

Needs the package gymnasium; run ``python examples/ppo.py`` (half a minute on a CPU).
"""

from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

from tnt_optim import TNT

COPIES, ROLLOUT, PASSES, BATCH, DISCOUNT = 8, 128, 4, 256, 0.99


def network(outputs: int) -> nn.Sequential:
    """From observations (N, 4) to (N, outputs)."""
    hidden = nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


def train(policy: nn.Module, value: nn.Module, opt: Any, rollouts: int, seed: int) -> list[float]:
    """Returns the mean length of the episodes that end in each rollout; 500 is the best."""
    reset = {"autoreset_mode": AutoresetMode.SAME_STEP}
    envs = gymnasium.make_vec("CartPole-v1", COPIES, "sync", vector_kwargs=reset)
    state, ages, lengths = torch.from_numpy(envs.reset(seed=seed)[0]), torch.zeros(COPIES), []
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, rollouts)
    for _ in range(rollouts):
        steps, ended = [], []
        for _ in range(ROLLOUT):
            with torch.no_grad():
                logits, expected = policy(state), value(state)[:, 0]
            action = torch.multinomial(logits.softmax(1), 1)
            following, _, over, late, _ = envs.step(action[:, 0].numpy())
            ages, done = ages + 1, torch.from_numpy(over | late)
            ended += ages[done].tolist()
            ages[done] = 0
            steps.append((state, action, logits, expected, done))
            state = torch.from_numpy(following)
        lengths += [sum(ended) / len(ended)] if ended else lengths[-1:]
        # Generalised advantages: what came after an action, beyond the value that was expected.
        with torch.no_grad():
            gain, later, gains = torch.zeros(COPIES), value(state)[:, 0], []
        for *_, expected, done in reversed(steps):  # each step's reward is 1
            gain = 1 + DISCOUNT * ~done * (later + 0.95 * gain) - expected
            gains, later = [gain, *gains], expected
        parts = [torch.cat(part) for part in zip(*steps, strict=True)] + [torch.cat(gains)]
        for rows in torch.cat([torch.randperm(len(parts[0])) for _ in range(PASSES)]).split(BATCH):
            states, actions, old, expected, _, gain = (part[rows] for part in parts)
            opt.zero_grad()
            logits, values = policy(states), value(states)
            opt.observe((logits, values))  # of TNT; AdamW has no such method
            log_p = logits.log_softmax(1)
            ratio = (log_p - old.log_softmax(1)).gather(1, actions)[:, 0].exp()
            unit = (gain - gain.mean()) / gain.std()
            surrogate = torch.minimum(unit * ratio, unit * ratio.clamp(0.8, 1.2)).mean()
            error = (values[:, 0] - expected - gain).square().mean()
            entropy = -(log_p.exp() * log_p).sum(1).mean()
            (0.25 * error - surrogate - 0.01 * entropy).backward()
            opt.step()
        schedule.step()
    return lengths


def main(rollouts: int = 100) -> tuple[list[float], TNT]:
    """Trains for ``rollouts`` rollouts; returns the episodes' mean lengths and the optimizer."""
    torch.manual_seed(0)
    agent = nn.ModuleList([network(outputs=2), network(outputs=1)])
    opt = TNT(agent.parameters(), likelihood=("categorical", "gaussian"))
    return train(*agent, opt, rollouts, seed=0), opt


if __name__ == "__main__":
    print(*(f"{length:.0f}" for length in main()[0]), "steps in the episodes of each rollout")
