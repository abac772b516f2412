# SPDX-License-Identifier: Apache-2.0
"""Writes flop_counter.hpp: the operations of forward and backward passes of twelve networks, counted by FlopCounterMode.

Each network is a function of two tensors: one that needs a gradient, and a weight.
"""
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from oracle import write_header

CONVOLUTION = ((3, 8, 12, 10), (6, 8, 3, 2))
TRANSPOSED = ((3, 8, 12, 10), (8, 6, 3, 2))
SEQUENCES = (2, 4, 16, 8)

NETWORKS = {
    "linear": ((5, 7, 16), (24, 16), lambda x, w: F.linear(x, w, w[:, 0])),
    "matmul": ((2, 3, 5, 7), (7, 4), torch.matmul),
    "bmm": ((6, 5, 7), (6, 7, 4), torch.bmm),
    "baddbmm": ((6, 5, 7), (6, 7, 4), lambda x, w: torch.baddbmm(x[:, :, :1], x, w)),
    "matrix_vector": ((5, 7), (7,), torch.mv),
    "conv1d": ((3, 8, 20), (6, 8, 5), lambda x, w: F.conv1d(x, w, stride=2, padding=1)),
    "conv2d_dilated": (*CONVOLUTION, lambda x, w: F.conv2d(x, w, stride=(2, 1), padding=(0, 1), dilation=2)),
    "conv2d_groups": ((3, 8, 12, 10), (6, 4, 3, 2), lambda x, w: F.conv2d(x, w, groups=2)),
    "conv_transpose2d": (*TRANSPOSED, lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1)),
    "conv3d": ((2, 3, 6, 7, 8), (4, 3, 2, 3, 3), F.conv3d),
    "attention": (SEQUENCES, SEQUENCES, lambda x, w: F.scaled_dot_product_attention(x, w, w, is_causal=False)),
    "attention_of_parts": (SEQUENCES, SEQUENCES, lambda x, w: (x @ w.mT).softmax(-1) @ w),
}


def counts_of(x_shape, w_shape, network, needs_x):
    x = torch.ones(x_shape, requires_grad=needs_x)
    w = torch.ones(w_shape, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        network(x, w).sum().backward()
    return counter.get_total_flops()


lines = ["struct Flops {", "  std::int64_t with_input = 0, without = 0;  // with and without the input's gradient", "};", "",
         "const std::map<std::string, Flops> flops = {"]
for name, (x_shape, w_shape, network) in NETWORKS.items():
    counts = [counts_of(x_shape, w_shape, network, needs_x) for needs_x in (True, False)]
    lines.append(f'    {{"{name}", {{{counts[0]}, {counts[1]}}}}},')
lines.append("};")
write_header(__file__, [["cstdint", "map", "string"]], lines)
