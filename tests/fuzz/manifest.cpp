// SPDX-License-Identifier: Apache-2.0
//
// Reads arbitrary bytes as a manifest; then corrects the checksum and reads them again, to get beyond it.

#include <gradaccum/detail/io/formats.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace inner = gradaccum::detail;

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

/// Reads a manifest. A result can be written and read back equal; compares texts, because NaN is not equal to itself.
void read(std::string_view text) {
  try {
    const auto manifest = inner::manifest_of(text, "the file");
    const auto written = inner::text_of(manifest);
    const auto again = inner::manifest_of(written, "its copy");
    require(again.files == manifest.files && again.values.size() == manifest.values.size());
    require(inner::text_of(again) == written);
    for (const auto& file : manifest.files) require(inner::is_file_name(file.first));
  } catch (const std::runtime_error& error) {
    require(std::string_view(error.what()).starts_with("the file: "));
  }
}

std::string mended(std::string text) {
  const std::string_view key = "\"crc32\": \"";
  const auto at = text.find(key);
  if (at == text.npos || text.size() - at < key.size() + 8) return text;
  text.replace(at + key.size(), 8, "00000000");
  return text.replace(at + key.size(), 8, inner::crc32_text(inner::crc32(text.data(), text.size())));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  read(text);
  read(mended(text));
  return 0;
}
