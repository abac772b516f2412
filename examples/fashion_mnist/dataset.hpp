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

/// Reads the images of an IDX file as uint8 [N, 28, 28].
inline at::Tensor read_idx_images(const std::filesystem::path& path) {
  auto file = read_idx(path, IdxKind::images);
  return torch::from_blob(file.bytes.data(), {file.count, image_side, image_side}, torch::kUInt8).clone();
}

/// Reads the labels of an IDX file as int64 [N], the type that cross entropy requires.
inline at::Tensor read_idx_labels(const std::filesystem::path& path) {
  auto file = read_idx(path, IdxKind::labels);
  return torch::from_blob(file.bytes.data(), {file.count}, torch::kUInt8).to(torch::kInt64);
}

/// Returns `directory/name.gz`, or `directory/name` if the file is not compressed.
inline std::filesystem::path find_idx_file(const std::filesystem::path& directory, const std::string& name) {
  for (const auto& candidate : {name + ".gz", name})
    if (std::filesystem::exists(directory / candidate)) return directory / candidate;
  fail(directory, "must hold ", name, ".gz or ", name, ", but does not (Debian's package is dataset-fashion-mnist)");
}

/// Reads `<prefix>-images-idx3-ubyte` and `<prefix>-labels-idx1-ubyte` and puts them on the device as a whole.
inline Split load_split(const std::filesystem::path& directory, const std::string& prefix, torch::Device device,
                        torch::Dtype dtype) {
  const auto image_path = find_idx_file(directory, prefix + "-images-idx3-ubyte");
  const auto label_path = find_idx_file(directory, prefix + "-labels-idx1-ubyte");
  const auto images = read_idx_images(image_path);
  const auto labels = read_idx_labels(label_path);
  if (labels.size(0) != images.size(0))
    fail(label_path, "must hold one label for each of the ", images.size(0), " images, got ", labels.size(0));
  // Copies bytes to the device, which converts them to floats.
  return {images.to(device).to(dtype).div_(255), labels.to(device)};
}

inline Dataset load_dataset(const std::filesystem::path& directory, torch::Device device = torch::kCPU,
                            torch::Dtype dtype = torch::kFloat32) {
  return {load_split(directory, "train", device, dtype), load_split(directory, "t10k", device, dtype)};
}

}  // namespace fashion_mnist
