// SPDX-License-Identifier: Apache-2.0
//
// Feeds arbitrary files to the IDX reader. The files of write_idx_files are a corpus to start from:
// fuzz_idx -max_total_time=60 CORPUS

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "idx.hpp"

using namespace fashion_mnist;

namespace {

/// A file in memory with a path.
struct MemoryFile {
  int descriptor = memfd_create("idx", 0);
  std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  ~MemoryFile() { close(descriptor); }
};

void read_as(const MemoryFile& file, IdxKind kind, std::size_t item_size) {
  try {
    const auto result = read_idx(file.path, kind);
    if (result.bytes.size() != static_cast<std::size_t>(result.count) * item_size) std::abort();
    if (kind == IdxKind::labels)
      for (const auto label : result.bytes)
        if (label >= class_count) std::abort();
  } catch (const std::runtime_error& error) {
    if (std::string(error.what()).find(file.path) == std::string::npos) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const MemoryFile file;
  if (write(file.descriptor, data, size) != static_cast<ssize_t>(size)) std::abort();
  read_as(file, IdxKind::images, image_side * image_side);
  read_as(file, IdxKind::labels, 1);
  return 0;
}
