# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint.async_save of the bytes of benchmark_save_load: how long it holds up the training."""

import argparse
import pathlib
import shutil
import statistics
import tempfile
import time

import torch
import torch.distributed
import torch.distributed.checkpoint as checkpoint
from torch import nn


class Training:
    def __init__(self, layers):
        self.model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.update(1)

    def update(self, rows):
        self.model(torch.ones(rows, 2048)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self):
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for slot, tensor in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{slot}.{name}"] = tensor
        return tensors


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default=".", help="where to write, some 3 GB")
    parser.add_argument("--layers", type=int, default=24, help="of 4.2 M parameters each")
    parser.add_argument("--rows", type=int, default=64, help="of an update's batch")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training = Training(arguments.layers)
    folder = pathlib.Path(tempfile.mkdtemp(dir=arguments.directory)).resolve()
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1)
        alone, blocked, whole, meanwhile = [], [], [], []
        for repeat in range(arguments.repeats):
            alone += [seconds(lambda: training.update(arguments.rows)) for _ in range(2)]
            start = time.perf_counter()
            written = checkpoint.async_save(training.tensors(), checkpoint_id=folder / str(repeat))
            blocked.append(time.perf_counter() - start)
            while not written.done():
                meanwhile.append(seconds(lambda: training.update(arguments.rows)))
            written.result()
            whole.append(time.perf_counter() - start)
            shutil.rmtree(folder / str(repeat))
        print(f"torch {torch.__version__}, {arguments.threads} threads; medians of {arguments.repeats}, the first left out")
        print(f"async_save holds up the training for {1e3 * statistics.median(blocked[1:]):.0f} ms, and has written "
              f"after {1e3 * statistics.median(whole[1:]):.0f} ms at most")
        print(f"an update: {1e3 * statistics.median(alone):.0f} ms alone, {1e3 * statistics.median(meanwhile):.0f} ms "
              "while a state is written")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
