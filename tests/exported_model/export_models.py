# SPDX-License-Identifier: Apache-2.0
"""export_models.py FOLDER NAME...: exports models of the tests, and trains each in Python: FOLDER/NAME is the export,
FOLDER/NAME.N.cpp its code, and FOLDER/NAME.safetensors the batches with Python's results."""

import contextlib
import json
import pathlib
import shutil
import sys
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "compiled_step"))
import wheel  # noqa: E402, F401: finds python/ and torch

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from gradaccum import export, export_model, linear_cross_entropy  # noqa: E402

TEXT = dict(vocab_size=40, hidden_size=16, num_attention_heads=2, intermediate_size=24, num_hidden_layers=1)
CONFIGS = {
    "bert": transformers.BertConfig(**TEXT, num_labels=3, max_position_embeddings=16, pad_token_id=0),
    "llama": transformers.LlamaConfig(**TEXT, num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16),
    "bloom": transformers.BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2, num_labels=3, pad_token_id=3),
    "vit": transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
                                  image_size=8, patch_size=4, num_channels=1, num_labels=4),
}
TASKS = {"bert": "sequence-classification", "llama": "causal-lm", "gpt2": "causal-lm", "bloom": "sequence-classification",
         "vit": "image-classification"}
# name, configuration, further arguments
MODELS = [
    ("bert", "bert", ["--precision", "64", "--passes", "training"]),
    ("llama", "llama", ["--precision", "64", "--passes", "training"]),
    ("gpt2", "gpt2", ["--precision", "64", "--passes", "training"]),
    ("bloom", "bloom", ["--precision", "64", "--passes", "training"]),
    ("vit", "vit", ["--precision", "64"]),
    ("llama_bf16", "llama", ["--precision", "bf16-mixed", "--passes", "training", "--freeze", "model.norm"]),
]
ROWS, UPDATES = 4, 20


class Own(torch.nn.Module):
    """Running statistics, random numbers, a tied and a frozen parameter, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.dropout = torch.nn.Dropout(0.25)
        self.middle, self.again = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.again.weight = self.middle.weight
        self.again.bias.requires_grad_(False)
        self.last = torch.nn.Linear(8, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, x):
        x = self.dropout(torch.relu(self.norm(self.first(x)))) * self.scale
        return self.last(torch.tanh(self.again(torch.tanh(self.middle(x)))))


class Small(torch.nn.Module):
    """The module that is exported in float16."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@contextlib.contextmanager
def all_in_float64():
    """Computes in float64 the parts that transformers always computes in float32, to compare exactly."""
    to, softmax = torch.Tensor.to, torch.nn.functional.softmax

    def kept(tensor, *arguments, **named):
        if tensor.dtype == torch.float64 and arguments[:1] == (torch.float32,):
            return tensor
        return to(tensor, *arguments, **named)

    with mock.patch.object(torch.Tensor, "to", kept), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double), \
            mock.patch.object(torch.nn.functional, "softmax", lambda tensor, dim=-1, dtype=None, **more: softmax(tensor, dim, **more)):
        yield


def own_loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch["labels"])


def arguments_of(folder, name, kind, more):
    config = folder / f"{name}.json"
    CONFIGS[kind].to_json_file(config, use_diff=True)
    shape = str(ROWS) if kind == "vit" else f"{ROWS}x10"
    return ["--hugging-face", str(config), "--task", TASKS[kind], "--batch", shape, "--output",
            str(folder / name), "--capability", "DEFAULT", "--source-only", *more]


def export_of_hugging_face(folder, name, kind, more):
    """Exports by the command, and returns the model, a function of its batches, and the loss with its items."""
    given = arguments_of(folder, name, kind, more)
    export_model.main(given)
    arguments = export_model.arguments_of_command(given)
    model, autocast = export_model.model_of(arguments)
    model.config.use_cache = False

    def sample(seed):
        batch = export_model.sample_of(model, TASKS[kind], arguments.batch[0], seed)
        if seed % 2 == 0:
            batch["labels"][2:] = -100  # the first micro-batch of a window has fewer labels than rows
        return batch

    def loss(batch):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            mean = model(**batch).loss
        counted = batch["labels"][:, 1:] if TASKS[kind] == "causal-lm" else batch["labels"]  # a text counts from its second token on
        return mean, int((counted != -100).sum())
    return model, sample, loss


def export_of_own(folder, name, module, autocast):
    """Exports a module of the tests, with all kinds of passes, without autocast."""
    torch.manual_seed(1)
    model = module()

    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(ROWS, 6, generator=generator), "labels": torch.randint(3, (ROWS,), generator=generator)}

    def loss(batch):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return own_loss(model(batch["x"]), batch), len(batch["labels"])

    export.export(model, sample(0), own_loss, folder / name, autocast=autocast, capability="DEFAULT", source_only=True,
                  passes=("training",) if autocast else export.PASSES)
    return model, sample, loss


def trained(model, sample, loss, least_rows, scale):
    """Trains with windows of two micro-batches of different sizes; with a loss scale, unless it is 0. Returns the
    batches, losses and parameters."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1, enabled=scale != 0)
    # A gradient that is exactly 0 in theory is noise, and a small eps would turn it into full steps.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, eps=1e-4, weight_decay=0.1)
    kept = {}
    torch.manual_seed(7)
    for update in range(UPDATES):
        batches = [sample(100 + 2 * update + i) for i in range(2)]
        rows = ROWS - 1 if update % 2 else least_rows
        batches[1] = {name: tensor[:rows] for name, tensor in batches[1].items()}
        losses = []
        for i, batch in enumerate(batches):
            kept.update({f"{2 * update + i}.{name}": tensor.clone() for name, tensor in batch.items()})
            losses.append(loss(batch))
            kept[f"loss.{2 * update + i}"] = losses[-1][0].detach().double()
        items = sum(items for _, items in losses)
        scaler.scale(sum(mean * (items_of / items) for mean, items_of in losses)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    kept.update({f"after.{name}": value.detach().clone() for name, value in
                 (*model.named_parameters(), *model.named_buffers())})
    return kept


def main():
    folder = pathlib.Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    linear_cross_entropy.MEMORY_BUDGET = ROWS * 40 * 4 * 4  # logits of 4 of a text's 9 tokens: three parts
    exports = {name: lambda name=name, how=how: export_of_hugging_face(folder, name, *how) for name, *how in MODELS}
    exports["own"] = lambda: export_of_own(folder, "own", Own, None)
    exports["half"] = lambda: export_of_own(folder, "half", Small, torch.float16)
    for name in sys.argv[2:]:
        in_float64 = any(name == of and "64" in how for of, _, how in MODELS)
        with all_in_float64() if in_float64 else contextlib.nullcontext():
            model, sample, loss = exports[name]()
            kept = trained(model, sample, loss, 2 if name == "own" else 1, 1024 if name == "half" else 0)
            save_file(kept, folder / f"{name}.safetensors")
        manifest = json.loads((folder / name / "manifest.json").read_text())["values"]
        for number in range(manifest["graphs"]):
            code = manifest[f"graph-{number}.code"]
            shutil.copyfile(folder / name / f"graph-{number}.{code}.cpp", folder / f"{name}.{number}.cpp")


if __name__ == "__main__":
    main()
