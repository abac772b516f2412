# SPDX-License-Identifier: Apache-2.0
"""Writes hugging_face_folders.hpp: folders that transformers' save_pretrained writes. Needs transformers.

    PYTHONPATH=tests/pytorch_values python tests/io/hugging_face_folders.py

The numbers of a model increase by 64ths through its weights in the order of their names, which 16 bits represent
exactly; weight_folders.test.cpp makes the same.
"""
import pathlib
import tempfile

import torch
from transformers import BloomConfig, BloomForSequenceClassification, BloomModel

from oracle import write_header
from safetensors_files import literal

CONFIG = BloomConfig(vocab_size=8, hidden_size=4, n_layer=1, n_head=2, num_labels=2)
FOLDERS = {"base": (BloomModel, torch.float16, 300),
           "classifier": (BloomForSequenceClassification, torch.bfloat16, 10_000)}


def fill(model):
    first = 0
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            weight.copy_(torch.arange(first, first + weight.numel()).remainder(128).reshape(weight.shape) / 64)
            first += weight.numel()


def files_of(kind, dtype, size):
    model = kind(CONFIG).to(dtype)
    fill(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=size)
        return {path.name: path.read_bytes() for path in sorted(pathlib.Path(folder).glob("model*"))}


def main():
    lines = ["/// The bytes of each file, by folder and name.",
             "inline const std::map<std::string, std::map<std::string, std::string>> hugging_face_folders = {"]
    for name, arguments in FOLDERS.items():
        lines.append(f'    {{"{name}",\n     {{')
        for file, data in files_of(*arguments).items():
            lines.append(f'    {{"{file}",\n     std::string({literal(data)}, {len(data)})}},')
        lines.append("    }},")
    lines.append("};")
    write_header(__file__, [["map", "string"]], lines)


if __name__ == "__main__":
    main()
