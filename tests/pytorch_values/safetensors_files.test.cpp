// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/io/safetensors.hpp>

#include "support/files.hpp"

#include "pytorch_values/safetensors_files.hpp"

// The files of safetensors_files.py, compared with the bytes of Python's safetensors.

namespace ga = gradaccum;
using pytorch_values::safetensors_files;

namespace {

at::Tensor counting(at::ScalarType dtype, std::int64_t size, std::int64_t first) {
  const auto count = (torch::arange(size) * 37 + first).remainder(dtype == at::kBool ? 2 : 256);
  return count.to(at::kByte).view(dtype);
}

struct File {
  ga::io::Tensors tensors;
  ga::io::Metadata metadata;
};

std::map<std::string, File> make_files() {
  const std::vector<std::pair<std::string, at::ScalarType>> dtypes{{"BOOL", at::kBool},
                                                                   {"U8", at::kByte},
                                                                   {"I8", at::kChar},
                                                                   {"U16", at::kUInt16},
                                                                   {"I16", at::kShort},
                                                                   {"U32", at::kUInt32},
                                                                   {"I32", at::kInt},
                                                                   {"U64", at::kUInt64},
                                                                   {"I64", at::kLong},
                                                                   {"F16", at::kHalf},
                                                                   {"BF16", at::kBFloat16},
                                                                   {"F32", at::kFloat},
                                                                   {"F64", at::kDouble},
                                                                   {"C64", at::kComplexFloat},
                                                                   {"F8_E4M3", at::kFloat8_e4m3fn},
                                                                   {"F8_E5M2", at::kFloat8_e5m2}};
  File every_dtype{{}, {{"format", "pt"}}};
  for (auto& [name, dtype] : dtypes)
    every_dtype.tensors["a " + name] = counting(dtype, 24, static_cast<std::int64_t>(every_dtype.tensors.size()));
  return {
      {"every_dtype", every_dtype},
      {"shapes",
       {{{"matrix", counting(at::kFloat, 24, 0).view({2, 3})},
         {"number", counting(at::kLong, 8, 1).view(at::IntArrayRef{})},
         {"none", torch::empty({0, 5}, at::kHalf)},
         {"B", counting(at::kFloat, 4, 2)},
         {"b", counting(at::kFloat, 4, 3)}},
        {}}},
      {"texts",
       {{{"größe \"\\\n\x01\x7f", counting(at::kByte, 3, 0)}, {"", counting(at::kByte, 1, 1)}}, {{"é\t", "\"\x1f"}}}},
      {"nothing", {}}};
}

std::string bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

}  // namespace

TEST_CASE("PyTorch's values: files of Python's safetensors are read") {
  testing::Directory directory;
  for (auto& [name, file] : make_files()) {
    INFO(name);
    testing::write_text(directory / name, safetensors_files.at(name));
    CHECK(ga::io::SafetensorsFile(directory / name).metadata() == file.metadata);
    const auto loaded = ga::io::load_file(directory / name);
    CHECK(loaded.size() == file.tensors.size());
    for (auto& [key, tensor] : file.tensors) {
      INFO(key);
      CHECK(loaded.at(key).scalar_type() == tensor.scalar_type());
      CHECK(loaded.at(key).sizes() == tensor.sizes());
      CHECK(bytes_of(loaded.at(key)) == bytes_of(tensor));
    }
  }
}

TEST_CASE("PyTorch's values: save_file writes the bytes of Python's safetensors") {
  testing::Directory directory;
  const auto files = make_files();
  CHECK(files.size() == safetensors_files.size());
  const auto saved = [&](const File& file) {
    ga::io::save_file(file.tensors, directory / "file", file.metadata);
    return testing::text_of(directory / "file");
  };
  for (auto& [name, file] : files) {
    INFO(name);
    CHECK(saved(file) == safetensors_files.at(name));
  }
  auto other = files.at("shapes");
  other.tensors["B"] = counting(at::kFloat, 4, 4);
  CHECK(saved(other) != safetensors_files.at("shapes"));
}
