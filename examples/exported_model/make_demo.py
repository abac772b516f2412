#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes small models and data for this folder's program, without any download.

    make_demo.py demo --kind text --kind lm

For each kind, text (a BERT that separates good reviews from bad ones), lm (a Llama that writes reviews) and image (a
ViT for FashionMNIST), there are demo/KIND, a model that gradaccum-export exported, and demo/KIND.train.safetensors
and demo/KIND.validation.safetensors, the tensors that it takes. It needs what gradaccum-export needs.
"""

import argparse
import gzip
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
from gradaccum import export_model  # noqa: E402

FILES = {"train": 4000, "validation": 1000}  # rows
TOKENS = 32  # of a review, with padding
PAD, BEGIN = "[PAD]", "[CLS]"
NOT_A_LABEL = -100  # for losses

OPENINGS = ["i saw it last night", "we watched it on a rainy day", "my sister chose this film", "this is a long one"]
ASPECTS = ["plot", "acting", "music", "ending", "cast", "dialogue", "story", "opening"]
ADJECTIVES = {True: ["great", "moving", "clever", "funny", "gripping", "lovely"],
              False: ["dull", "clumsy", "boring", "awful", "weak", "tedious"]}
DEGREES = ["", "", "very", "really", "quite"]
NEGATIONS = ["not", "never", "hardly"]


def clause(rng, aspect, good):
    """Returns an opinion of an aspect. One in five negates the opposite word, so that no single word decides it."""
    is_negated = rng.random() < 1 / 5
    words = ["the", aspect, "was", rng.choice(NEGATIONS) if is_negated else "", rng.choice(DEGREES),
             rng.choice(ADJECTIVES[good != is_negated])]
    return [word for word in words if word]


def review(rng):
    """Returns the words of a review, and 1 if most of its three clauses praise, else 0."""
    words = [BEGIN, *rng.choice(OPENINGS).split()]
    verdicts = [rng.random() < 0.5 for _ in range(3)]
    for number, (aspect, good) in enumerate(zip(rng.sample(ASPECTS, 3), verdicts)):
        words.append("," if number == 0 else "and" if good == verdicts[number - 1] else "but")
        words += clause(rng, aspect, good)
    return [*words, "."], int(sum(verdicts) >= 2)


def vocabulary():
    words = {word for opening in OPENINGS for word in opening.split()}
    words.update(ASPECTS, *ADJECTIVES.values(), DEGREES, NEGATIONS, ["the", "was", ",", "and", "but", "."])
    return {word: number for number, word in enumerate([PAD, BEGIN, *sorted(words - {""})])}


def reviews(rng, rows):
    """Returns tensors of reviews: ids, mask and label, 1 for praise."""
    import torch
    numbers = vocabulary()
    texts, labels = zip(*(review(rng) for _ in range(rows)))
    ids = torch.tensor([[numbers[word] for word in text] + [numbers[PAD]] * (TOKENS - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": (ids != numbers[PAD]).long(), "labels": torch.tensor(labels)}


def text_data(arguments, name):
    return reviews(random.Random(name), FILES[name])


def lm_data(arguments, name):
    """Returns tensors for predicting every token from those before it."""
    data = text_data(arguments, name)
    return {**data, "labels": data["input_ids"].masked_fill(data["attention_mask"] == 0, NOT_A_LABEL)}


def idx(path):
    """Returns the bytes of a file of the data set as a tensor."""
    import torch
    if not path.is_file():
        raise SystemExit(f"make_demo: {path}: must exist, but does not: set --fashion-mnist to the folder of FashionMNIST's "
                         "files, which Debian's dataset-fashion-mnist has")
    content = bytearray(gzip.decompress(path.read_bytes()))
    sizes = [int.from_bytes(content[4 + 4 * i:8 + 4 * i], "big") for i in range(content[3])]
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


def image_data(arguments, name):
    folder, part = pathlib.Path(arguments.fashion_mnist), {"train": "train", "validation": "t10k"}[name]
    images = idx(folder / f"{part}-images-idx3-ubyte.gz")[:FILES[name], None]
    labels = idx(folder / f"{part}-labels-idx1-ubyte.gz")[:FILES[name]]
    return {"pixel_values": images.float() / 127.5 - 1, "labels": labels.long()}


def configurations():
    from transformers import BertConfig, LlamaConfig, ViTConfig
    small = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    words = dict(vocab_size=len(vocabulary()), max_position_embeddings=TOKENS, pad_token_id=0)
    return {"text": BertConfig(**small, **words, num_labels=2),
            "lm": LlamaConfig(**small, **words, bos_token_id=1, eos_token_id=None, tie_word_embeddings=True),
            "image": ViTConfig(**small, image_size=28, patch_size=7, num_channels=1, num_labels=10)}


# kind: its function for data, task and shape of a batch for gradaccum-export
KINDS = {"text": (text_data, "sequence-classification", f"16x{TOKENS}"),
         "lm": (lm_data, "causal-lm", f"16x{TOKENS}"),
         "image": (image_data, "image-classification", "16")}


def make(kind, arguments):
    from safetensors.torch import save
    output, (data, task, batch) = pathlib.Path(arguments.output), KINDS[kind]
    for name in FILES:
        (output / f"{kind}.{name}.safetensors").write_bytes(save(data(arguments, name)))  # only the owner can read save_file's
    config = output / f"{kind}.config.json"
    configurations()[kind].to_json_file(config)
    export_model.main(["--hugging-face", str(config), "--task", task, "--batch", batch, "--passes", "training",
                       "evaluation", "--output", str(output / kind)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="the folder to write to")
    parser.add_argument("--fashion-mnist", metavar="FOLDER", default="/usr/share/datasets/fashion-mnist",
                        help="where its four files are, for images; default: %(default)s")
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be given several times; default: all")
    arguments = parser.parse_args()
    pathlib.Path(arguments.output).mkdir(parents=True, exist_ok=True)
    for kind in arguments.kind or KINDS:
        make(kind, arguments)


if __name__ == "__main__":
    main()
