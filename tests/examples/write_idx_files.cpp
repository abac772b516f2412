// SPDX-License-Identifier: Apache-2.0
//
// write_idx_files DIRECTORY: writes a tiny data set in FashionMNIST's format, for fashion_mnist.test.cmake.

#include <cstdio>
#include <exception>
#include <filesystem>

#include "idx_files.hpp"

int main(int argc, char** argv) {
  try {
    if (argc != 2) throw std::runtime_error("usage: write_idx_files DIRECTORY");
    std::filesystem::create_directories(argv[1]);
    idx_files::write_split(argv[1], "train", 320);
    idx_files::write_split(argv[1], "t10k", 100);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
