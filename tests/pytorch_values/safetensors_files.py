# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors_files.hpp: files of Python's safetensors.

Their numbers are bytes in arithmetic sequence, viewed as each dtype; safetensors_files.test.cpp makes the same.
"""
import torch
from safetensors.torch import save

from oracle import write_header

DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
          "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
          "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def counting(dtype, size, first):
    """Returns `size` bytes: first, first + 37, ..."""
    count = (torch.arange(size) * 37 + first) % (2 if dtype == "BOOL" else 256)
    return count.to(torch.uint8).view(DTYPES[dtype])


# Metadata of one entry, because Python writes several in random order.
FILES = {
    "every_dtype": ({f"a {name}": counting(name, 24, first) for first, name in enumerate(DTYPES)}, {"format": "pt"}),
    "shapes": ({"matrix": counting("F32", 24, 0).reshape(2, 3), "number": counting("I64", 8, 1).reshape(()),
                "none": torch.empty(0, 5, dtype=torch.float16), "B": counting("F32", 4, 2),
                "b": counting("F32", 4, 3)}, None),
    "texts": ({'größe "\\\n\x01\x7f': counting("U8", 3, 0), "": counting("U8", 1, 1)}, {"é\t": '"\x1f'}),
    "nothing": ({}, None),
}


def literal(data):
    """Returns the bytes as C++ texts, one per line."""
    lines = [""]
    for byte in data:
        if len(lines[-1]) > 100:
            lines.append("")
        shown = "\\" + chr(byte) if chr(byte) in '"\\' else chr(byte)
        lines[-1] += shown if 32 <= byte < 127 else f"\\{byte:03o}"
    return "\n     ".join(f'"{line}"' for line in lines)


def main():
    lines = ["inline const std::map<std::string, std::string> safetensors_files = {"]
    for name, (tensors, metadata) in FILES.items():
        data = save(tensors, metadata)
        lines.append(f'    {{"{name}",\n     std::string({literal(data)}, {len(data)})}},')
    lines.append("};")
    write_header(__file__, [["map", "string"]], lines)


if __name__ == "__main__":
    main()
