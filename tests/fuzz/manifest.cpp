// SPDX-License-Identifier: Apache-2.0
//
// Arbitrary bytes to the reader of manifests; and the same with its checksum mended, to get past that.

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

/// What could be read is what is read again when it is written. In texts, as NaN is not equal to itself.
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
