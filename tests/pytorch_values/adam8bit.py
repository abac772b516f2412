# SPDX-License-Identifier: Apache-2.0
"""Writes adam8bit.hpp: results of Adam in float32 with moments in bitsandbytes' block-wise quantization.

bitsandbytes' optimizers run on CUDA only; its maps and its dequantization also on the CPU. Its quantization there does
not always choose the nearest number of the map (3 of 100 second moments), so this script quantizes itself.
"""
import bitsandbytes.functional as bnb
import torch

from oracle import braced, waves, write_header

SIZE, STEPS, EVERY = 5000, 20, 113
# name: learning rate, weight decay, added to the gradient or not
OPTIMIZERS = {"Adam8bit": (1e-2, 0.1, True), "AdamW8bit": (1e-2, 0.1, False)}
BETA1, BETA2, EPS = 0.9, 0.99, 1e-8


class Moment:
    def __init__(self, signed):
        self.map = bnb.create_dynamic_map(signed=signed)
        self.write(torch.zeros(SIZE))

    def read(self):
        return bnb.dequantize_blockwise(self.codes, self.state)

    def write(self, numbers):
        _, self.state = bnb.quantize_blockwise(numbers, code=self.map, blocksize=256)
        scale = self.state.absmax.clamp_min(1e-30).repeat_interleave(256)[:SIZE]
        relative = (numbers / scale).double().unsqueeze(1)
        self.codes = (relative - self.map.double()).abs().argmin(1).to(torch.uint8)


def run(lr, weight_decay, coupled):
    parameter = waves(SIZE, start=0).float()
    first, second = Moment(True), Moment(False)
    for step in range(1, STEPS + 1):
        # Avoids 0, where a second moment may become 0, and differ from ours.
        gradient = waves(SIZE, start=1000 * step).float()
        gradient = 0.01 * (gradient + gradient.sign())
        if coupled:
            gradient = gradient + weight_decay * parameter
        m = BETA1 * first.read() + (1 - BETA1) * gradient
        v = BETA2 * second.read() + (1 - BETA2) * gradient * gradient
        if not coupled:
            parameter = parameter * (1 - lr * weight_decay)
        parameter = parameter - lr * (m / (1 - BETA1**step)) / ((v / (1 - BETA2**step)).sqrt() + EPS)
        first.write(m)
        second.write(v)
    return parameter[::EVERY].tolist(), first.codes[::EVERY].tolist(), second.codes[::EVERY].tolist()


def main():
    lines = [f"constexpr int adam8bit_size = {SIZE}, adam8bit_steps = {STEPS}, adam8bit_every = {EVERY};", "",
             "struct Adam8bitBaseline {", "  double lr, weight_decay;", "  std::vector<double> parameters;",
             "  std::vector<int> exp_avg, exp_avg_sq;  // codes", "};", "",
             "inline const std::map<std::string, Adam8bitBaseline> adam8bit = {"]
    for name, (lr, weight_decay, coupled) in OPTIMIZERS.items():
        values = ",\n      ".join(map(braced, run(lr, weight_decay, coupled)))
        lines.append(f'    {{"{name}",\n     {{{lr!r}, {weight_decay!r},\n      {values}}}}},')
    lines.append("};")
    write_header(__file__, [["map", "string", "vector"]], lines)


if __name__ == "__main__":
    main()
