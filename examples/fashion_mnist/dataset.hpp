// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <string>

#include "idx.hpp"

namespace fashion_mnist {

/// Images and their classes: floats [N, 28, 28] in [0, 1], and int64 [N] in [0, 10).
struct Split {
  at::Tensor images, labels;
};

struct Dataset {
  Split train, test;
};

/// Reads `directory/name.gz`, or `directory/name` if the file is not compressed, as bytes on the device.
inline at::Tensor read_bytes(const std::filesystem::path& directory, const std::string& name, IdxKind kind,
                             torch::Device device) {
  auto path = directory / (name + ".gz");
  if (!std::filesystem::exists(path)) path = directory / name;
  if (!std::filesystem::exists(path))
    fail(directory, "must hold ", name, ".gz or ", name, ", but does not (Debian's package is dataset-fashion-mnist)");
  auto file = read_idx(path, kind);
  const auto size = static_cast<std::int64_t>(file.bytes.size());
  return torch::from_blob(file.bytes.data(), {size}, torch::kUInt8).to(device, torch::kUInt8, false, /*copy=*/true);
}

/// Reads `<prefix>-images-idx3-ubyte` and `<prefix>-labels-idx1-ubyte` and puts them on the device as a whole.
inline Split load_split(const std::filesystem::path& directory, const std::string& prefix, torch::Device device,
                        torch::Dtype dtype) {
  const auto images = read_bytes(directory, prefix + "-images-idx3-ubyte", IdxKind::images, device);
  const auto labels = read_bytes(directory, prefix + "-labels-idx1-ubyte", IdxKind::labels, device);
  const auto count = images.numel() / (image_side * image_side);
  if (labels.numel() != count)
    fail(directory / (prefix + "-labels-idx1-ubyte"), "must hold one label for each of the ", count, " images, got ",
         labels.numel());
  return {images.view({count, image_side, image_side}).to(dtype).div_(255), labels.to(torch::kInt64)};
}

inline Dataset load_dataset(const std::filesystem::path& directory, torch::Device device = torch::kCPU,
                            torch::Dtype dtype = torch::kFloat32) {
  return {load_split(directory, "train", device, dtype), load_split(directory, "t10k", device, dtype)};
}

}  // namespace fashion_mnist
