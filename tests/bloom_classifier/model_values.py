# SPDX-License-Identifier: Apache-2.0
"""Writes data/: small random BLOOM classifiers in transformers' format, and transformers' results for them.

A folder has config.json, model.safetensors and values.safetensors, with for each padding the inputs, scores, loss and
gradients, and with the weights after ten steps of AdamW. `python model_values.py` in any folder.
"""
import json
import pathlib
import shutil

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

DATA = pathlib.Path(__file__).parent / "data"
PAD, LENGTHS, LONG, STEPS = 3, [7, 12, 4], 300, 10
MODELS = {
    "heads_4": dict(n_head=4, hidden_size=24, num_labels=2),
    "heads_3": dict(n_head=3, hidden_size=12, num_labels=3, apply_residual_connection_post_layernorm=True,
                    hidden_dropout=0.1, attention_dropout=0.2),
    "heads_6": dict(n_head=6, hidden_size=18, num_labels=2, layer_norm_epsilon=1e-4),
}


def make_model(options):
    """Makes a model with weights so large that attention, its scale and ALiBi all affect the scores."""
    config = transformers.BloomConfig(vocab_size=40, n_layer=2, pad_token_id=PAD, initializer_range=0.3, **options)
    model = transformers.BloomForSequenceClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + ("layernorm.weight" in name or name.endswith("ln_f.weight")))
    return model


def padded(rows, side):
    length = max(map(len, rows))
    ids, mask = torch.full((len(rows), length), PAD), torch.zeros(len(rows), length, dtype=torch.long)
    for row, tokens in enumerate(rows):
        place = slice(0, len(tokens)) if side == "right" else slice(length - len(tokens), length)
        ids[row, place], mask[row, place] = tokens, 1
    return ids, mask


def make_inputs(labels):
    rows = [torch.randint(4, 40, (length,)) for length in LENGTHS]
    holes = torch.ones(3, 12, dtype=torch.long)
    holes[0, 3:5] = holes[1, 0] = holes[2, 1] = 0
    inputs = {
        "none": (torch.randint(4, 40, (3, 9)), None),
        "left": padded(rows, "left"),
        "right": padded(rows, "right"),
        "left_without_mask": (padded(rows, "left")[0], None),
        "holes": (torch.randint(4, 40, (3, 12)), holes),
        "long": padded([torch.randint(4, 40, (length,)) for length in (LONG, LONG - 30)], "right"),
    }
    return inputs, torch.randint(labels, (3,))


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def train(model, ids, mask, labels):
    """Returns the losses of the steps, in evaluation mode, without dropout."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def make_values(model):
    inputs, labels = make_inputs(model.config.num_labels)
    values = {"labels": labels, "slopes": _get_alibi_slopes(model.config.n_head, torch.device("cpu"))}
    for padding, (ids, mask) in inputs.items():
        values[f"{padding}.input_ids"] = ids
        if mask is not None:
            values[f"{padding}.attention_mask"] = mask
        output = model(ids, attention_mask=mask, labels=labels[: len(ids)])
        values[f"{padding}.logits"], values[f"{padding}.loss"] = output.logits.detach(), output.loss.detach()
        if padding in ("none", "left", "right"):
            model.zero_grad()
            output.loss.backward()
            values |= {f"{padding}.gradients.{name}": gradient for name, gradient in gradients(model).items()}
    model.train()
    torch.manual_seed(7)
    with torch.no_grad():
        hidden = model.transformer.word_embeddings_layernorm(model.transformer.word_embeddings(inputs["none"][0]))
        alibi = model.transformer.build_alibi_tensor(torch.ones(hidden.shape[:2]), model.config.n_head, hidden.dtype)
        causal = torch.full((hidden.shape[1],) * 2, -torch.inf).triu(1)
        values["dropout.hidden"] = model.transformer.h[0](hidden, alibi, causal)[0]
    model.eval()
    values["losses"] = train(model, *inputs["left"], labels)
    values |= {f"trained.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return values


def check_config_of_cpp():
    """Checks that transformers reads its own configuration from config_of_cpp.json, C++'s to_json of heads_3."""
    read = transformers.BloomConfig(**json.loads((DATA / "config_of_cpp.json").read_text()))
    own = transformers.BloomConfig.from_pretrained(DATA / "heads_3")
    for name in ("model_type", "vocab_size", "num_labels", "id2label", "pad_token_id", "initializer_range", *MODELS["heads_3"],
                 "n_layer", "layer_norm_epsilon"):
        assert getattr(read, name) == getattr(own, name), name


def main():
    torch.set_num_threads(1)  # the order of sums depends on it
    for seed, (name, options) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        folder = DATA / name
        shutil.rmtree(folder, ignore_errors=True)
        model = make_model(options).eval()
        model.save_pretrained(folder)
        values = make_values(model)
        save_file({key: tensor.contiguous() for key, tensor in values.items()}, folder / "values.safetensors")
    check_config_of_cpp()


if __name__ == "__main__":
    main()
