#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning a BLOOM of 560m's shapes by Python on a CUDA device: the peer of benchmark_device_bloom.

Transformers' model, reviews of IMDB's lengths of which 32 of about one length go together, padded to a multiple of 64,
autocast to bfloat16, PyTorch's fused AdamW; as it is, and by torch.compile, which compiles a second time for any length.
"""

import argparse
import collections
import math
import time

import torch
import transformers

PADDING, LONGEST, MULTIPLE, TOGETHER = 3, 1024, 64, 32


def batches_of(arguments):
    """Makes batches on the device, in a random order, each with its number of tokens without padding."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.exp(5.495 + 0.6465 * torch.randn(arguments.reviews, generator=generator)).round().clamp(10, LONGEST).long()
    batches = []
    for some in lengths.sort()[0].split(TOGETHER):
        longest = math.ceil(int(some.max()) / MULTIPLE) * MULTIPLE
        ids = torch.randint(4, arguments.words, (len(some), longest), generator=generator)
        mask = torch.arange(longest) < some[:, None]
        batches.append((ids.masked_fill(~mask, PADDING).to(arguments.device), mask.long().to(arguments.device),
                        (torch.arange(len(some)) % 2).to(arguments.device), int(some.sum())))
    counts = collections.Counter(batch[0].shape for batch in batches)
    frequent = dict(counts.most_common(arguments.lengths))
    return [batches[i] for i in torch.randperm(len(batches), generator=generator) if batches[i][0].shape in frequent]


def model_of(arguments):
    config = transformers.BloomConfig(vocab_size=arguments.words, hidden_size=arguments.width, n_layer=arguments.layers,
                                      n_head=16, pad_token_id=PADDING, num_labels=2, use_cache=False)
    torch.manual_seed(0)
    return transformers.BloomForSequenceClassification(config).to(arguments.device).train()


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


class Training:
    def __init__(self, model, arguments, compiled):
        self.model, self.device = torch.compile(model) if compiled else model, arguments.device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)

    def update(self, ids, mask, labels):
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def prepare(self, batches):
        """Trains each length once. Returns the seconds that it took."""
        start = time.monotonic()
        for ids, mask, labels, _ in {batch[0].shape: batch for batch in batches}.values():
            self.update(ids, mask, labels)
        synchronize(self.device)
        return time.monotonic() - start

    def train_for(self, seconds, batches):
        """Returns reviews and tokens per second."""
        start, reviews, tokens = time.monotonic(), 0, 0
        while True:
            for ids, mask, labels, true_tokens in batches:
                self.update(ids, mask, labels)
                reviews, tokens = reviews + len(ids), tokens + true_tokens
                if time.monotonic() - start > seconds:
                    synchronize(self.device)
                    took = time.monotonic() - start
                    return reviews / took, tokens / took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="of training, for each of the two (%(default)s)")
    parser.add_argument("--reviews", type=int, default=2048)
    parser.add_argument("--lengths", type=int, default=16, help="of reviews, the most frequent ones (%(default)s)")
    parser.add_argument("--words", type=int, default=250_880)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    batches, model = batches_of(arguments), model_of(arguments)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.layers} layers, {TOGETHER} at once")
    for name, compiled in (("Python, bf16-mixed, fused AdamW", False), ("the same, torch.compile", True)):
        training = Training(model, arguments, compiled)
        before = training.prepare(batches)
        reviews, tokens = training.train_for(arguments.seconds, batches)
        print(f"  {name:<44} {reviews:10.1f} reviews/s {tokens:10.0f} tokens/s {before:8.1f} s before", flush=True)


if __name__ == "__main__":
    main()
