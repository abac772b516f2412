// SPDX-License-Identifier: Apache-2.0
//
// Reads arbitrary bytes as a config.json.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "model/config.hpp"

using bloom::BloomConfig;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string path = "a/file";
  try {
    const std::string_view bytes(reinterpret_cast<const char*>(data), size);
    const auto config = BloomConfig::from_json(bloom::parse_json(bytes, path), path);
    if (config.hidden_size % config.n_head != 0 || config.parameter_count() <= 0) std::abort();
    // The written file must be read back equal.
    const auto written = config.to_json();
    if (BloomConfig::from_json(bloom::parse_json(written.dump(), path), path).to_json() != written) std::abort();
  } catch (const std::runtime_error& error) {
    if (!std::string_view(error.what()).starts_with(path + ": ")) std::abort();
  }
  return 0;
}
