// SPDX-License-Identifier: Apache-2.0
//
// Reads arbitrary bytes as the index of a folder of weights.

#include <gradaccum/detail/io/formats.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

using namespace gradaccum::detail;

namespace {

const std::string path = "a/file";

void require(bool condition) {
  if (!condition) std::abort();
}

/// Checks that names stay in the folder and are of safetensors files, and that the result can be read back equal.
void check(const WeightMap& files) {
  for (auto& [name, file] : files) {
    require(!file.empty() && file.front() != '.' && file.size() <= 255 && file.ends_with(".safetensors"));
    require(file.find_first_of(std::string_view("/\\:\0", 4)) == file.npos);
  }
  require(read_weights_index(nlohmann::json{{"weight_map", files}}.dump(), path) == files);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  WeightMap files;
  try {
    files = read_weights_index({reinterpret_cast<const char*>(data), size}, path);
  } catch (const std::runtime_error& error) {
    require(std::string_view(error.what()).starts_with(path + ": "));
    return 0;
  }
  check(files);
  return 0;
}
