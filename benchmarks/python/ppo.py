# SPDX-License-Identifier: Apache-2.0
"""The updates of benchmark_ppo.cpp in Python, as CleanRL's ppo.py makes them: Adam, clipping, 64 rows, one thread."""

import torch
from torch import nn

from record import parse, record, seconds


def network(outputs, gain):
    def linear(inputs, outputs, gain=2**0.5):
        layer = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
        return layer

    return nn.Sequential(linear(4, 64), nn.Tanh(), linear(64, 64), nn.Tanh(), linear(64, outputs, gain))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = network(2, 0.01), network(1, 1.0)

    def action_and_value(self, observation, action=None):
        distribution = torch.distributions.Categorical(logits=self.actor(observation))
        if action is None:
            action = distribution.sample()
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(observation)


def main():
    arguments = parse(__doc__)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    observation, advantage, target = torch.randn(64, 4), torch.randn(64), torch.randn(64)
    with torch.no_grad():
        action, old_log_prob, _, old_value = agent.action_and_value(observation)
        old_value = old_value.view(-1)

    def update():
        _, log_prob, entropy, value = agent.action_and_value(observation, action)
        ratio = (log_prob - old_log_prob).exp()
        policy_loss = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
        value = value.view(-1)
        clipped = old_value + torch.clamp(value - old_value, -0.2, 0.2)
        value_loss = 0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2).mean()
        loss = policy_loss - 0.01 * entropy.mean() + 0.5 * value_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()

    times = [seconds(lambda: [update() for _ in range(100)]) / 100 for _ in range(10)]
    record(arguments, "Python: an update as CleanRL's ppo.py", times[1:])
    with torch.no_grad():
        few = torch.randn(8, 4)
        times = [seconds(lambda: [agent.action_and_value(few) for _ in range(100)]) / 100 for _ in range(10)]
    record(arguments, "Python: actions and values of 8 rows", times[1:])


main()
