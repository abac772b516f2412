# SPDX-License-Identifier: Apache-2.0
"""Exports a model of Hugging Face's, with its training step, for ga::ExportedModel to train and run in C++.

    gradaccum-export --hugging-face bert-base-uncased/ --task sequence-classification --batch 8x256 --output model

It needs Python's torch of the version that the program is built with, transformers, and a C++ compiler (g++, or $CXX).
For a torch.nn.Module of your own, see gradaccum.export.export.
"""

import argparse
import pathlib
import re

from gradaccum import compile_step
from gradaccum.compile_step import PASSES, Failure

TASKS = {"sequence-classification": "AutoModelForSequenceClassification", "causal-lm": "AutoModelForCausalLM",
         "image-classification": "AutoModelForImageClassification"}
PRECISIONS = {"32": (None, None), "64": ("float64", None), "bf16-mixed": (None, "bfloat16"), "16-mixed": (None, "float16"),
              "bf16": ("bfloat16", None)}
# Files of a model's folder that belong to its weights.
COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
              "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "preprocessor_config.json",
              "chat_template.jinja")


def model_of(arguments):
    """Returns the model in training mode, with the folder's weights, or new ones if it has none."""
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = pathlib.Path(arguments.hugging_face)
    kind = getattr(transformers, TASKS[arguments.task])
    options = {} if arguments.num_labels is None else {"num_labels": arguments.num_labels}
    torch.manual_seed(arguments.seed)
    if source.is_file():
        config = transformers.AutoConfig.from_pretrained(source, **options)
        model = kind.from_config(config, dtype=torch.float32)
    else:
        if not source.is_dir():
            raise Failure(f"{source}: must be a model's folder or its config.json; a model of the Hub is "
                          f"fetched by: hf download {arguments.hugging_face} --local-dir model")
        model = kind.from_pretrained(source, dtype=torch.float32, **options)
    dtype, autocast = PRECISIONS[arguments.precision]
    if dtype:
        model = model.to(getattr(torch, dtype))
    model.config.dtype = model.dtype
    for pattern in arguments.freeze:
        frozen = [parameter for name, parameter in model.named_parameters() if name.startswith(pattern)]
        if not frozen:
            raise Failure(f"--freeze {pattern}: no parameter's name begins with it")
        for parameter in frozen:
            parameter.requires_grad_(False)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise Failure("--device cuda: this machine has no CUDA device; export on one with the kind of GPU to train on")
    return model.to(arguments.device).train(), getattr(torch, autocast) if autocast else None


class HeadByParts:
    """The passes of a causal language model whose loss is by parts of the tokens, so that not all logits exist at a time.

    parts: by the number of tokens."""

    def __init__(self, parts):
        self.parts = parts

    @staticmethod
    def forward(model, batch):
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        if "labels" not in batch:  # inference
            return model(**inputs)
        head = model.get_output_embeddings()
        return model.base_model(**inputs).last_hidden_state, head.weight, head.bias

    def loss(self, output, batch):
        from gradaccum.linear_cross_entropy import linear_cross_entropy
        (hidden, weight, bias), labels = output, batch["labels"]
        return linear_cross_entropy(hidden[:, :-1], weight, labels[:, 1:], bias, self.parts[int(labels.shape[1])])

    @staticmethod
    def items(batch):
        return (batch["labels"][:, 1:] != -100).sum()


def has_plain_head(model, batch):
    """Returns whether a causal language model's loss is that of HeadByParts: some scale their logits, or have a further
    loss. Runs a few tokens with large logits in place of the head's, with which any difference is large."""
    import torch
    few = {name: tensor[:1, :16].to(model.device) for name, tensor in batch.items()}
    seen = {}

    def replaced(_, given, logits):
        seen["hidden"] = given[0]
        seen["logits"] = 30 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits.device)
        return seen["logits"]

    head = model.get_output_embeddings()
    if head is None:
        return False
    hook = head.register_forward_hook(replaced)
    try:
        with torch.no_grad():
            model.eval()
            own, hidden = model(**few).loss, HeadByParts.forward(model, few)[0]
    except Exception:  # any of a model with other parts
        return False
    finally:
        hook.remove()
        model.train()
    plain = torch.nn.functional.cross_entropy(seen["logits"][0, :-1], few["labels"][0, 1:])
    return torch.equal(seen["hidden"], hidden) and torch.allclose(own.float(), plain, rtol=1e-5)


def passes_of(model, autocast, task, batches):
    """Returns arguments of `export` for the passes of a model: HeadByParts, if logits take more than its budget. In float16
    it would lose the gradients of single classes, which are scaled later."""
    import torch
    from gradaccum.linear_cross_entropy import MEMORY_BUDGET, parts_of
    if task != "causal-lm":
        return {"loss": None}
    classes, wide = model.config.get_text_config().vocab_size, torch.promote_types(model.dtype, torch.float32)
    most = classes * wide.itemsize * max(batch["labels"].numel() for batch in batches)
    if most <= MEMORY_BUDGET:
        return {"loss": None}
    why = ("in float16" if torch.float16 in (autocast, model.dtype) else
           "for a head that is no plain product" if not has_plain_head(model, batches[0]) else "")
    if why:
        print(f"gradaccum-export: all logits exist at a time, {why}: {most / 1e9:.1f} GB, and their gradient")
        return {"loss": None}
    parts = {}
    for labels in (batch["labels"] for batch in batches):
        tokens = labels.shape[1]
        parts[tokens] = max(parts.get(tokens, 1), parts_of(labels[:, 1:], classes, MEMORY_BUDGET, wide))
    return {"loss": HeadByParts(parts).loss, "forward": HeadByParts.forward, "items": HeadByParts.items, "output": False}


def sample_of(model, task, batch, seed=0):
    """Returns a batch of that shape with random numbers."""
    import torch
    generator = torch.Generator().manual_seed(seed)
    sizes = [int(size) for size in batch.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", batch) else []
    if task == "image-classification":
        if len(sizes) not in (1, 4):
            raise Failure(f"--batch must be rows, or rows x channels x height x width, such as 8x3x224x224, got {batch}")
        shape = sizes if len(sizes) == 4 else [*sizes, *image_sizes(model.config, batch)]
        pixels = torch.randn(shape, generator=generator).to(model.dtype)
        return {"pixel_values": pixels, "labels": labels_of(model, sizes[0], generator)}
    if len(sizes) != 2:
        raise Failure(f"--batch must be rows x tokens, such as 8x256, got {batch}")
    config, (rows, tokens) = model.config.get_text_config(), sizes
    ids = torch.randint(config.vocab_size, (rows, tokens), generator=generator)
    lengths = torch.randint((tokens + 1) // 2, tokens + 1, (rows,), generator=generator)
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    ids[mask == 0] = config.pad_token_id or 0
    if task == "causal-lm":
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if isinstance(end := config.eos_token_id, int) and end < config.vocab_size:  # some models classify at this token: one per row
        ids[ids == end] = (end + 1) % config.vocab_size
        ids[torch.arange(rows), lengths - 1] = end
    return {"input_ids": ids, "attention_mask": mask, "labels": labels_of(model, rows, generator)}


def image_sizes(config, batch):
    """Returns channels, height and width of a model's images."""
    size = getattr(config, "image_size", None)
    if size is None or not hasattr(config, "num_channels"):
        raise Failure(f"--batch {batch}: the model's config has no size of images: give rows x channels x height x width, "
                      f"such as {batch}x3x224x224")
    return (config.num_channels, *(size if isinstance(size, (tuple, list)) else (size, size)))


def labels_of(model, rows, generator):
    """Returns random labels for the loss that transformers chooses: classes, or floating point numbers."""
    import torch
    config = model.config
    kind = config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification")
    if kind == "single_label_classification":
        return torch.randint(config.num_labels, (rows,), generator=generator)
    numbers = torch.randn((rows, config.num_labels) if config.num_labels > 1 else (rows,), generator=generator)
    return (numbers if kind == "regression" else (numbers > 0)).to(model.dtype)


def companions(arguments, model):
    """Returns the other files that from_pretrained reads with the weights."""
    source = pathlib.Path(arguments.hugging_face)
    found = {"config.json": model.config.to_json_string(use_diff=True).encode()}
    if source.is_dir():
        found.update({name: (source / name).read_bytes() for name in COMPANIONS[1:] if (source / name).is_file()})
    return found


def arguments_of_command(given=None):
    parser = argparse.ArgumentParser(prog="gradaccum-export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hugging-face", metavar="FOLDER_OR_CONFIG", required=True,
                        help="a folder with config.json and weights, or a config.json alone for new weights")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--batch", action="append", required=True, metavar="ROWSxTOKENS",
                        help="a shape of batches, 8x256; for images rows alone, or 8x3x224x224; may be given several times. "
                             "Rows may be any where the model allows it")
    parser.add_argument("--these-rows", action="store_true", help="compile for these numbers of rows only")
    parser.add_argument("--output", required=True, help="the folder to write")
    parser.add_argument("--precision", choices=PRECISIONS, default="32", help="as in Lightning; default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="to train on; default: %(default)s")
    parser.add_argument("--num-labels", type=int, help="classes of a new head")
    parser.add_argument("--freeze", action="append", default=[], metavar="PREFIX", help="parameters that are not trained")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES, help="the code that is needed; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of new weights; default: %(default)s")
    compile_step.add_arguments(parser)
    return parser.parse_args(given)


def main(given=None):
    """Exports with the given arguments, or with the command line's."""
    arguments = arguments_of_command(given)
    with compile_step.failures_told("gradaccum-export", arguments.traceback):
        try:
            import safetensors, transformers  # noqa: F401
            from gradaccum.export import export
        except ImportError as error:
            raise Failure(f"{error}: pip install torch transformers safetensors") from None
        model, autocast = model_of(arguments)
        files = companions(arguments, model)
        model.config.use_cache = False  # the saved configuration keeps it
        batches = [sample_of(model, arguments.task, batch) for batch in arguments.batch]
        export(
            model, batches, folder=arguments.output, rows="these" if arguments.these_rows else "any", autocast=autocast,
            files=files, passes=arguments.passes, capability=arguments.capability, source_only=arguments.source_only,
            **passes_of(model, autocast, arguments.task, batches))
        check_loads(model, arguments)


def check_loads(model, arguments):
    """Checks that transformers reads the weights back."""
    import torch
    back = type(model).from_pretrained(arguments.output).state_dict()
    other = [name for name, value in model.state_dict().items() if name not in back or not torch.equal(back[name], value.cpu())]
    if other:
        raise Failure(f"{arguments.output}: transformers must read the weights unchanged, but does not: {', '.join(other[:3])}")


if __name__ == "__main__":
    main()
