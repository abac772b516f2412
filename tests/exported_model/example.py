# SPDX-License-Identifier: Apache-2.0
"""example.py PROGRAM FOLDER LIBRARY: examples/exported_model trains a model of the tests, and resumes."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))
from gradaccum.compile_step import Manifest  # noqa: E402


def export_with_library(exported, library, folder):
    """Copies a test's export, whose code is in the program, and adds that code as a library."""
    shutil.copytree(exported, folder)
    manifest = Manifest(folder, json.loads((folder / "manifest.json").read_text()))
    manifest.add(f"graph-0.{manifest['graph-0.code']}.so", pathlib.Path(library).read_bytes())
    manifest.write()


def data_of(batches, path):
    """Returns all rows of the batches of Python's training."""
    tensors = load_file(batches)
    names = ("input_ids", "attention_mask", "labels")
    count = sum(name.startswith("loss.") for name in tensors)
    data = {name: numpy.concatenate([tensors[f"{number}.{name}"] for number in range(count)]) for name in names}
    save_file(data, path)
    save_file({name: tensor[:0] for name, tensor in data.items()}, path.with_name("empty.safetensors"))


def run(*command):
    return subprocess.run(command, capture_output=True, text=True)


def main():
    program, exported, library = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        export_with_library(exported / "bert", library, folder / "model")
        data_of(exported / "bert.safetensors", folder / "data.safetensors")

        def train(output, *options):
            return run(program, "--model", folder / "model", "--data", folder / "data.safetensors", "--batch-size", "4",
                       "--accumulate", "2", "--learning-rate", "1e-2", "--output", folder / output, *options)

        straight = train("straight", "--epochs", "4", "--report", folder / "page.html")
        assert straight.returncode == 0, straight.stderr
        assert "training of attention_mask Long [*, 10], input_ids Long [*, 10], labels Long [*]" in straight.stdout
        assert "epoch 4: training loss" in straight.stdout and (folder / "page.html").is_file()
        before, after = (load_file(path / "model.safetensors") for path in (folder / "model", folder / "straight"))
        assert before.keys() == after.keys() and (folder / "straight/config.json").is_file()
        assert not any(numpy.array_equal(before[name], after[name]) for name in before if name.endswith("query.weight"))

        refused = run(program, "--model", folder / "model", "--data", folder / "none.safetensors")
        assert refused.returncode == 1 and refused.stderr.startswith("exported_model: ") and "none.safetensors" in refused.stderr
        empty = folder / "empty.safetensors"
        for options in (("--data", empty), ("--validation", empty)):
            refused = train("none", *options)
            assert refused.returncode == 1 and f"{empty}: must have rows" in refused.stderr, refused.stderr
        refused = train("model", "--epochs", "1")
        assert refused.returncode == 2 and "--output: must not be the folder of an exported model" in refused.stderr, refused.stderr


main()
