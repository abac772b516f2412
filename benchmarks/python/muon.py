# SPDX-License-Identifier: Apache-2.0
"""The update of benchmark_muon.cpp in Python: 4 transformer blocks, matrices by Muon, the rest by AdamW(fused=True)."""

import torch
from torch import nn

from record import parse, record, seconds


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def main():
    arguments = parse(__doc__)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(256, 4) for _ in range(4)))
    x, y = torch.randn(8, 64, 256), torch.randn(8, 64, 256)
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], fused=True)

    def update():
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        muon.step()
        adamw.step()

    times = [seconds(lambda: [update() for _ in range(5)]) / 5 for _ in range(10)]
    record(arguments, "Python: torch.optim.Muon", times[1:])


main()
