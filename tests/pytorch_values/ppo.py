# SPDX-License-Identifier: Apache-2.0
"""Writes ppo.hpp: updates of proximal policy optimisation, with the losses of CleanRL's ppo.py, on given samples."""
import torch

from oracle import braced, fill_with_waves, waves, write_header

UPDATES, ROWS = 6, 40


def network(outputs):
    return torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
                               torch.nn.Linear(64, outputs))


def loss_of(actor, critic, batch):
    clip_coef, ent_coef, vf_coef = 0.2, 0.01, 0.5
    distribution = torch.distributions.Categorical(logits=actor(batch["observation"]))
    ratio = torch.exp(distribution.log_prob(batch["action"]) - batch["log_prob"])
    policy_loss = torch.max(-batch["advantage"] * ratio,
                            -batch["advantage"] * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)).mean()
    value = critic(batch["observation"]).flatten()
    clipped = batch["value"] + torch.clamp(value - batch["value"], -clip_coef, clip_coef)
    value_loss = 0.5 * torch.max((value - batch["target"]) ** 2, (clipped - batch["target"]) ** 2).mean()
    return policy_loss - ent_coef * distribution.entropy().mean() + vf_coef * value_loss


def main():
    actor, critic = network(2).double(), network(1).double()
    agent = torch.nn.ModuleDict({"actor": actor, "critic": critic})
    fill_with_waves(agent, amplitude=0.2)
    batch = {"observation": waves(ROWS, 4, start=100), "action": (waves(ROWS, start=300) > 0).long(),
             "log_prob": waves(ROWS, start=400) * 0.3 - 0.7, "advantage": waves(ROWS, start=500),
             "value": waves(ROWS, start=600), "target": waves(ROWS, start=700) * 2}
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    samples = []
    for update in range(UPDATES):
        optimizer.param_groups[0]["lr"] = 2.5e-3 * (1 - update / UPDATES)
        optimizer.zero_grad()
        loss = loss_of(actor, critic, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        samples.append([loss.item(), norm.item()] + [p.detach().square().sum().item() for p in agent.parameters()])
    rows = ",\n    ".join(map(braced, samples))
    write_header(__file__, [["vector"]],
                 [f"constexpr int ppo_rows = {ROWS};", "",
                  "// Of each update: the loss, the norm of the gradients, and the sum of squares of each parameter.",
                  f"inline const std::vector<std::vector<double>> ppo_updates = {{\n    {rows}}};"])


if __name__ == "__main__":
    main()
