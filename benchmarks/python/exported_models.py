# SPDX-License-Identifier: Apache-2.0
"""A training step, forward and backward, of five architectures of Hugging Face's: in Python as it is and by torch.compile,
and exported to C++ (exported_step), in turn."""

import pathlib
import re
import statistics
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))
import torch
import transformers

from gradaccum import export_model
from record import parse, record, seconds

TEXT = dict(vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
CONFIGS = {  # and the shape of a batch
    "bert": (transformers.BertConfig(**TEXT, **NO_DROPOUT), "sequence-classification", "8x128"),
    "llama": (transformers.LlamaConfig(**TEXT), "causal-lm", "8x128"),
    "gpt2": (transformers.GPT2Config(vocab_size=8000, n_embd=256, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0,
                                     attn_pdrop=0), "causal-lm", "8x128"),
    "bloom": (transformers.BloomConfig(vocab_size=8000, hidden_size=256, n_layer=4, n_head=4, pad_token_id=3),
              "sequence-classification", "8x128"),
    "vit": (transformers.ViTConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
                                   image_size=64, patch_size=8, num_labels=10, **NO_DROPOUT), "image-classification", "8"),
}


def exported(name, folder):
    """Exports the model unless its folder exists. Returns Python's model with a batch."""
    config, task, shape = CONFIGS[name]
    config.to_json_file(folder / f"{name}.json", use_diff=True)
    given = ["--hugging-face", str(folder / f"{name}.json"), "--task", task, "--batch", shape, "--passes", "training",
             "--output", str(folder / name)]
    if not (folder / name).exists():
        export_model.main(given)
    arguments = export_model.arguments_of_command(given)
    model, _ = export_model.model_of(arguments)
    return model, export_model.sample_of(model, task, shape)


def step_of(model, batch):
    def step():
        model.zero_grad()
        model(**batch).loss.backward()
    step()
    step()
    return step


def median_of(step, repeats):
    runs = int(0.2 / seconds(step)) + 1
    return statistics.median(seconds(lambda: [step() for _ in range(runs)]) / runs for _ in range(repeats))


def main():
    def add(parser):
        parser.add_argument("--program", required=True, help="the program exported_step")
        parser.add_argument("--folder", type=pathlib.Path, default="build/exported_benchmark", help="where models are exported")
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--repeats", type=int, default=5, help="how often each is timed in a round")
        parser.add_argument("--keep-memory", action="store_true", help="the C++ program keeps freed memory")
    arguments = parse(__doc__, add)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    program = [arguments.program, "--threads", str(torch.get_num_threads()), *(["--keep-memory"] if arguments.keep_memory else [])]
    for name in CONFIGS:
        model, batch = exported(name, arguments.folder)
        eager, compiled = step_of(model, batch), step_of(torch.compile(model), batch)
        times = {"Python as it is": [], "torch.compile": [], "ExportedModel": [], "to the first update": []}
        for _ in range(arguments.rounds):
            times["Python as it is"].append(median_of(eager, arguments.repeats))
            times["torch.compile"].append(median_of(compiled, arguments.repeats))
            text = subprocess.run([*program, str(arguments.folder / name)], check=True, capture_output=True, text=True).stdout
            for of, value in zip(("ExportedModel", "to the first update"), re.findall(r"[\d.e-]+(?= s)", text)):
                times[of].append(float(value))
        peer = statistics.median(times["Python as it is"])
        for of, taken in times.items():
            record(arguments, f"{name}, {of}", taken, ratio=peer / statistics.median(taken))


main()
