# SPDX-License-Identifier: Apache-2.0
"""fashion_epoch.cpp in Python: as tutorials have it (dataloader), or with an index a batch and fused AdamW (fused)."""

import pathlib

import numpy
import torch

from record import parse, record, seconds

batch_size = 64


def add_options(parser):
    parser.add_argument("program", choices=["dataloader", "fused", "fused-bf16"])
    parser.add_argument("--data", default="build/data/unzipped", help="the data set")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)


def read(directory, name, header):
    return torch.from_numpy(numpy.fromfile(pathlib.Path(directory, name), dtype=numpy.uint8)[header:])


def load_split(directory, prefix):
    images = read(directory, f"{prefix}-images-idx3-ubyte", 16).view(-1, 1, 28, 28).float().div_(255)
    images.sub_(0.2860).div_(0.3530)  # once, which is faster than in Python's tutorials
    return images, read(directory, f"{prefix}-labels-idx1-ubyte", 8).long()


def make_model():
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(784, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )


def batches_by_index(images, labels):
    for rows in torch.randperm(len(images)).split(batch_size):
        yield images[rows], labels[rows]


def main():
    arguments = parse(__doc__, add_options)
    torch.manual_seed(arguments.seed)
    images, labels = load_split(arguments.data, "train")
    fused, bfloat16 = arguments.program != "dataloader", arguments.program == "fused-bf16"
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-2, fused=fused or None)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size, shuffle=True)

    def epoch():
        for x, y in batches_by_index(images, labels) if fused else loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    times = [seconds(epoch) for _ in range(arguments.epochs)]
    test_images, test_labels = load_split(arguments.data, "t10k")
    with torch.no_grad():
        accuracy = 100 * (model(test_images).argmax(1) == test_labels).double().mean().item()
    name = "Python: AdamW(fused=True), index" + (", bfloat16" if bfloat16 else "") if fused else "Python: AdamW, DataLoader"
    record(arguments, name, times, accuracy=accuracy)


main()
