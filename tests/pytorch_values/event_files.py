# SPDX-License-Identifier: Apache-2.0
"""Writes event_files.hpp: the records of PyTorch's SummaryWriter, and TensorBoard's values from files of ours.

The folder event_files has two files of one run that C++ wrote, by `gradaccum.tests.pytorch_values "[write]"` in this
folder: one of a training that was killed after step 4, and one of its continuation from step 3.
"""
import math
import pathlib
import struct
import tempfile

import torch
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

from oracle import write_header
from safetensors_files import literal

SUMMARY = "min", "max", "num", "sum", "sum_squares"
FOLDER = pathlib.Path(__file__).parent / "event_files"


def first(directory):
    with SummaryWriter(directory) as writer:
        writer.add_text("settings", "learning rate **0.1**, größe", 0)
        writer.add_scalar("train/loss", 0.1, 1)
        writer.add_scalar("train/loss", 0.25, 2)
        writer.add_scalar("größe", -math.inf, 2)
        writer.add_scalar("zero", 0.0, 0)
        writer.add_histogram("weights", torch.arange(8, 24) / 8, 1)
        writer.add_histogram("small", torch.tensor([-4, -1, 0, 1, 3], dtype=torch.float64) / 2**40, 2)
        writer.add_histogram("half", torch.tensor([1.5, 2.5, 2.5], dtype=torch.float16), 2)
        writer.add_histogram("whole", torch.tensor([[3, 1], [2, 3]]), 2)
        writer.add_histogram("zeros", torch.zeros(2), 0)
        writer.add_scalar("train/loss", math.nan, 3)
        writer.add_scalar("train/loss", 5.0, 4)


def resumed(directory):
    with SummaryWriter(directory, purge_step=3) as writer:
        writer.add_scalar("train/loss", 0.125, 3)
        writer.add_scalar("train/loss", 0.0625, 4)
        writer.add_scalar("train/loss", 16777217.0, 5)


def records_of(file):
    """Returns the content of the records, without checksums."""
    data = file.read_bytes()
    while data:
        length, = struct.unpack("<Q", data[:8])
        yield data[12:12 + length]
        data = data[16 + length:]


def is_start(record):
    return record.endswith(b"\x3a\x02\x08\x01")


def untimed(records):
    """Returns records without their time, the name of the writer, and the repeated version before a START."""
    version = b"\x1a\x0dbrain.Event:2"
    records = [record[9:] for record in records]
    assert records[0].startswith(version)
    return [version] + [record for record in records[1:] if b"brain.Event:2" not in record]


def written_by_pytorch(calls):
    """Returns PyTorch's records with the START repeated: TensorBoard uses the second in a directory, others the first."""
    with tempfile.TemporaryDirectory() as directory:
        calls(directory)
        file, = pathlib.Path(directory).iterdir()
        records = untimed(records_of(file))
        return records[:1] + [record for record in records[1:] if is_start(record)] + records[1:]


def number(value):
    return {math.inf: "INFINITY", -math.inf: "-INFINITY"}.get(value, repr(float(value)))


def numbers(values):
    return "{" + ", ".join(map(number, values)) + "}"


def read_by_tensorboard():
    """Reads by the class that programs use, and by the one that TensorBoard uses, which must agree."""
    events = EventAccumulator(str(FOLDER), STORE_EVERYTHING_SIZE_GUIDANCE).Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    histograms = {tag: [(event.step, event.histogram_value) for event in events.Histograms(tag)]
                  for tag in events.Tags()["histograms"]}

    shown = PluginEventAccumulator(str(FOLDER), {"tensors": 0}, {"scalars": 0, "histograms": 0, "text": 0}).Reload()
    texts = {}
    for tag in shown.Tags()["tensors"]:
        plugin = shown.SummaryMetadata(tag).plugin_data.plugin_name
        values = [(event.step, tensor_util.make_ndarray(event.tensor_proto)) for event in shown.Tensors(tag)]
        if plugin == "scalars":
            assert [(step, value.item()) for step, value in values] == scalars[tag], tag
        elif plugin == "histograms":
            for (step, buckets), (expected_step, histogram) in zip(values, histograms[tag], strict=True):
                assert step == expected_step and buckets[:, 2].sum() == histogram.num, tag
                assert (buckets[0, 0], buckets[-1, 1]) == tuple(map(torch.tensor, (histogram.min, histogram.max))), tag
        else:
            assert plugin == "text", plugin
            texts[tag] = [(step, value[0]) for step, value in values]
    assert len(scalars) + len(histograms) + len(texts) == len(shown.Tags()["tensors"])
    return scalars, histograms, texts


def main():
    ours = [untimed(records_of(file)) for file in sorted(FOLDER.iterdir())]
    pytorch = [written_by_pytorch(calls) for calls in (first, resumed)]
    assert ours == pytorch, "the records of event_files are not those of PyTorch's SummaryWriter"
    scalars, histograms, texts = read_by_tensorboard()

    lines = ["struct ReadHistogram {", "  std::int64_t step;", "  double min, max, num, sum, sum_squares;",
             "  std::vector<double> limits, counts;", "};", "",
             "/// Of two files, one after the other, without their times.",
             "inline const std::vector<std::vector<std::string>> event_records = {"]
    for records in pytorch:
        lines += ["    {", *(f"     std::string({literal(record)}, {len(record)})," for record in records), "    },"]
    lines += ["};", "", "/// What TensorBoard reads in event_files: steps and values.",
              "inline const std::map<std::string, std::vector<std::pair<std::int64_t, double>>> read_scalars = {"]
    for tag, events in scalars.items():
        lines.append(f'    {{"{tag}", {{{", ".join(f"{{{step}, {number(value)}}}" for step, value in events)}}}}},')
    lines += ["};", "", "inline const std::map<std::string, std::vector<ReadHistogram>> read_histograms = {"]
    for tag, events in histograms.items():
        shown = (f"{{{step}, {', '.join(number(getattr(read, name)) for name in SUMMARY)}, "
                 f"{numbers(read.bucket_limit)}, {numbers(read.bucket)}}}" for step, read in events)
        lines.append(f'    {{"{tag}", {{{", ".join(shown)}}}}},')
    lines += ["};", "", "inline const std::map<std::string, std::vector<std::pair<std::int64_t, std::string>>> "
              "read_texts = {"]
    for tag, events in texts.items():
        lines.append(f'    {{"{tag}", {{{", ".join(f"{{{step}, {literal(text)}}}" for step, text in events)}}}}},')
    write_header(__file__, [["cmath", "cstdint", "map", "string", "utility", "vector"]], lines + ["};"])


if __name__ == "__main__":
    main()
