// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/io/safetensors.hpp>

#include "support/files.hpp"

#include <cmath>
#include <cstdlib>
#include <new>
#include <sstream>

#include <malloc.h>
#include <sys/stat.h>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;

namespace {
std::size_t largest_allocation = 0;
std::int64_t allocated = 0, most_allocated = 0;
}  // namespace

// Counts this program's allocations. AddressSanitizer has its own operator new.
#ifndef __SANITIZE_ADDRESS__
void* operator new(std::size_t size) {
  largest_allocation = std::max(largest_allocation, size);
  void* const memory = std::malloc(std::max<std::size_t>(size, 1));
  if (!memory) throw std::bad_alloc();
  allocated += static_cast<std::int64_t>(::malloc_usable_size(memory));
  most_allocated = std::max(most_allocated, allocated);
  return memory;
}
void operator delete(void* memory) noexcept {
  allocated -= static_cast<std::int64_t>(::malloc_usable_size(memory));
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
#endif

namespace {

std::string eight_bytes(std::uint64_t number) {
  std::string bytes(8, '\0');
  for (unsigned i = 0; i < 8; ++i) bytes[i] = static_cast<char>(number >> (8 * i));
  return bytes;
}

/// Makes a file of this header and a number of zeros.
std::string file_of(const std::string& header, std::size_t zeros = 0) {
  return eight_bytes(header.size()) + header + std::string(zeros, '\0');
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":[)" + shape + R"(],"data_offsets":[)" + offsets + "]}";
}
std::string repeated(const std::string& text, int times) {
  std::string all;
  while (times-- > 0) all += text;
  return all;
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{" + entry("a", dtype, shape, offsets) + "}";
}

std::string bytes_of(const at::Tensor& tensor) {
  const auto plain = tensor.contiguous();
  return {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()};
}

/// Returns whether dtype, shape and every bit are equal, also of NaN.
bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && bytes_of(a) == bytes_of(b);
}

std::string saved(const ga::io::Tensors& tensors, const ga::io::Metadata& metadata = {}) {
  testing::Directory directory;
  ga::io::save_file(tensors, directory / "file", metadata);
  return testing::text_of(directory / "file");
}

ga::io::Tensors one_of_each_dtype() {
  ga::io::Tensors tensors;
  for (auto& [name, type] : inner::safetensors_dtypes) {
    auto bytes = torch::arange(96, at::kByte) * 37 + 11;
    if (type == at::kBool) bytes = bytes % 2;
    tensors[std::string(name)] = bytes.view(type).view({3, -1});
  }
  return tensors;
}

const std::string one_float = one("F32", "1", "0,4");

}  // namespace

TEST_CASE("safetensors: every dtype is read back bitwise, mapped and loaded") {
  testing::Directory directory;
  const auto tensors = one_of_each_dtype();
  CHECK(tensors.size() == 16);
  ga::io::save_file(tensors, directory / "file");
  const ga::io::SafetensorsFile file(directory / "file");
  const auto loaded = ga::io::load_file(directory / "file");
  CHECK(loaded.size() == tensors.size());
  for (auto& [name, tensor] : tensors) {
    INFO(name);
    CHECK(same(file.get_tensor(name), tensor));
    CHECK(same(loaded.at(name), tensor));
    loaded.at(name).view(at::kByte).bitwise_xor_(1);
    CHECK(!same(loaded.at(name), tensor));
  }
}

TEST_CASE("safetensors: NaN's bits, infinities, no dimensions, no elements, any strides") {
  testing::Directory directory;
  const auto nans =
      torch::tensor(std::vector<std::int32_t>{0x7fc00001, -4194303, 0x7f800001, 0x7f800000, -0x7fffffff - 1})
          .view(at::kFloat);
  const auto ramp = torch::arange(24, at::kFloat).view({2, 3, 4});
  const auto complex = torch::view_as_complex(torch::arange(8, at::kFloat).view({4, 2}));
  const ga::io::Tensors tensors{{"nans", nans},
                                {"number", torch::scalar_tensor(2.5, at::kDouble)},
                                {"none", torch::empty({0}, at::kHalf)},
                                {"none of some", torch::empty({2, 0, 3}, at::kInt)},
                                {"transposed", ramp.transpose(0, 2)},
                                {"a part", ramp.slice(2, 1, 4, 2)},
                                {"expanded", torch::arange(3).expand({4, 3})},
                                {"channels last", torch::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)},
                                {"conjugate", complex.conj()},
                                {"negative", torch::imag(complex.conj())},
                                {"parameter", torch::ones({2}, at::TensorOptions().requires_grad(true))}};
  CHECK(tensors.at("conjugate").is_conj());
  CHECK(tensors.at("negative").is_neg());
  ga::io::save_file(tensors, directory / "file");
  const auto loaded = ga::io::load_file(directory / "file");
  for (auto& [name, tensor] : tensors) {
    INFO(name);
    CHECK(same(loaded.at(name), tensor.detach().resolve_conj().resolve_neg()));
    CHECK(loaded.at(name).is_contiguous());
    CHECK(!loaded.at(name).requires_grad());
  }
  CHECK(loaded.at("none of some").sizes() == at::IntArrayRef{2, 0, 3});
  CHECK(loaded.at("number").dim() == 0);
}

TEST_CASE("safetensors: names and metadata of any text; an empty file") {
  testing::Directory directory;
  const auto x = torch::arange(4, at::kByte);
  const ga::io::Tensors tensors{{"", x}, {"\"\\\n\x01", x + 1}, {"größe", x + 2}, {std::string("a\0b", 3), x + 3}};
  const ga::io::Metadata metadata{{"format", "pt"}, {"", ""}, {"é\"", std::string("\0\n", 2)}};
  ga::io::save_file(tensors, directory / "file", metadata);
  const ga::io::SafetensorsFile file(directory / "file");
  CHECK(file.metadata() == metadata);
  CHECK(file.path() == directory / "file");
  std::vector<std::string> names;
  for (auto& [name, tensor] : tensors) {
    names.push_back(name);
    CHECK(same(file.get_tensor(name), tensor));
    CHECK(file.contains(name));
  }
  CHECK(file.keys() == names);
  CHECK(!file.contains("format"));
  CHECK(!file.contains("__metadata__"));
  REQUIRE_ERROR("file: must have a tensor \"b\", but does not", file.get_tensor("b"));
  CHECK(saved({}) == file_of("{}      "));
  testing::write_text(directory / "nothing", saved({}));
  CHECK(ga::io::load_file(directory / "nothing").empty());
}

TEST_CASE("safetensors: the layout: by dtype, then by name; a header of a multiple of 8; the same bytes again") {
  const auto x = torch::zeros({2, 3});
  const ga::io::Tensors tensors{{"b", x},
                                {"a", x.to(at::kBool)},
                                {"c", x.to(at::kHalf)},
                                {"d", x.to(at::kLong)},
                                {"B", x},
                                {"e", torch::scalar_tensor(1.0, at::kFloat)}};
  const auto bytes = saved(tensors, {{"k", "v"}});
  const std::string header = R"({"__metadata__":{"k":"v"},)" + entry("d", "I64", "2,3", "0,48") + "," +
                             entry("B", "F32", "2,3", "48,72") + "," + entry("b", "F32", "2,3", "72,96") + "," +
                             entry("e", "F32", "", "96,100") + "," + entry("c", "F16", "2,3", "100,112") + "," +
                             entry("a", "BOOL", "2,3", "112,118") + "}";
  const auto padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  CHECK(bytes.substr(0, 8 + padded.size()) == eight_bytes(padded.size()) + padded);
  CHECK(bytes.size() == 8 + padded.size() + 118);
  CHECK(saved(tensors, {{"k", "v"}}) == bytes);
}

TEST_CASE("SafetensorsFile: tensors map the file, outlive it, and can be written to") {
  testing::Directory directory;
  const auto x = torch::arange(6, at::kFloat).view({2, 3});
  ga::io::save_file({{"x", x}, {"y", x + 1}}, directory / "file");
  const auto before = testing::text_of(directory / "file");
  at::Tensor mapped, again;
  {
    const ga::io::SafetensorsFile file(directory / "file");
    mapped = file.get_tensor("x");
    again = file.get_tensor("x");
    CHECK(file.get_tensor("y").const_data_ptr<float>() == mapped.const_data_ptr<float>() + 6);
  }
  std::filesystem::remove(directory / "file");
  CHECK(same(mapped, x));
  mapped.add_(1);
  CHECK(same(mapped, x + 1));
  CHECK(same(again, x + 1));  // shares the memory
  testing::write_text(directory / "file", before);
  const ga::io::SafetensorsFile file(directory / "file"), other(directory / "file");
  file.get_tensor("x").fill_(7);
  CHECK(same(other.get_tensor("x"), x));
  CHECK(testing::text_of(directory / "file") == before);
}

TEST_CASE("SafetensorsFile: a tensor whose memory is released is read again, without the changes to it") {
  testing::Directory directory;
  const auto large = torch::arange(1 << 20, at::kInt), small = torch::ones({3}, at::kInt);
  ga::io::save_file({{"large", large}, {"small", small}}, directory / "file");
  const ga::io::SafetensorsFile file(directory / "file");
  const auto tensor = file.get_tensor("large"), other = file.get_tensor("small");
  other.fill_(7);
  const auto resident = [] { return *ga::detail::occupied_memory(at::kCPU); };
  const auto before = resident();
  CHECK(torch::equal(tensor, large));
  tensor.fill_(7);
  const auto read = resident() - before;
  CHECK(read >= 4 << 20);
  file.release("large");
  CHECK(resident() - before <= read - (3 << 20));
  const auto of_whole_pages = [](const at::Tensor& all) { return all.slice(0, 1 << 15, -(1 << 15)); };
  CHECK(torch::equal(of_whole_pages(tensor), of_whole_pages(large)));
  CHECK(torch::equal(other, torch::full({3}, 7, at::kInt)));  // it shares a page with the end of the other
  REQUIRE_ERROR("must have a tensor \"other\", but does not", file.release("other"));
}

TEST_CASE("SafetensorsFile: numbers that are not aligned are copied") {
  testing::Directory directory;
  for (std::size_t spaces = 0; spaces < 8; ++spaces) {
    const auto header =
        "{" + entry("a", "U8", "3", "0,3") + "," + entry("x", "F64", "2", "3,19") + "}" + std::string(spaces, ' ');
    const std::array<double, 2> numbers{1.25, -3};
    testing::write_text(directory / "file",
                        file_of(header, 3) + std::string(reinterpret_cast<const char*>(numbers.data()), 16));
    const ga::io::SafetensorsFile file(directory / "file");
    const auto x = file.get_tensor("x"), again = file.get_tensor("x");
    const bool is_aligned = (8 + header.size() + 3) % 8 == 0;
    CHECK(reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 8 == 0);
    CHECK((x.const_data_ptr() == again.const_data_ptr()) == is_aligned);
    CHECK(same(x, torch::tensor({1.25, -3.0}, at::kDouble)));
  }
}

TEST_CASE("safetensors: a file may be saved over while it is mapped, with its own tensors") {
  testing::Directory directory;
  const auto x = torch::arange(5, at::kDouble);
  ga::io::save_file({{"x", x}}, directory / "file");
  const ga::io::SafetensorsFile file(directory / "file");
  const auto mapped = file.get_tensor("x");
  ga::io::save_file({{"x", mapped}, {"y", mapped * 2}}, directory / "file");
  CHECK(same(mapped, x));
  CHECK(file.keys().size() == 1);
  const auto loaded = ga::io::load_file(directory / "file");
  CHECK(same(loaded.at("x"), x));
  CHECK(same(loaded.at("y"), x * 2));
}

TEST_CASE("write_safetensors: contiguous tensors are written without a copy") {
  struct Sink {
    std::vector<const void*> from;
    std::size_t bytes = 0;
    void write(const void* data, std::size_t size) {
      from.push_back(data);
      bytes += size;
    }
  } sink;
  const auto x = torch::rand({3, 4}), y = torch::rand({3, 4});
  inner::write_safetensors([&](auto* data, auto size) { sink.write(data, size); },
                           {{"x", x}, {"y", y.t()}, {"z", torch::empty({0})}}, {});
  REQUIRE(sink.from.size() == 3);
  CHECK(sink.from[1] == x.const_data_ptr());
  CHECK(sink.from[2] != y.const_data_ptr());
  CHECK(sink.bytes % 8 == 0);
}

TEST_CASE("save_file: refuses tensors that a file cannot store, and leaves the existing file") {
  testing::Directory directory;
  const auto x = torch::ones({2});
  ga::io::save_file({{"x", x}}, directory / "file");
  const auto before = testing::text_of(directory / "file");
  const auto save = [&](const std::string& name, const at::Tensor& tensor, const ga::io::Metadata& metadata = {}) {
    ga::io::save_file({{"x", x}, {name, tensor}}, directory / "file", metadata);
  };
  REQUIRE_ERROR("the tensor \"y\" must be defined", save("y", at::Tensor()));
  REQUIRE_ERROR("the tensor \"y\" must have a dtype that safetensors has, got ComplexDouble",
                save("y", x.to(at::kComplexDouble)));
  REQUIRE_ERROR("the tensor \"y\" must", save("y", torch::quantize_per_tensor(x, 0.1, 0, at::kQInt8)));
  REQUIRE_ERROR("the tensor \"y\" must be dense", save("y", x.to_sparse()));
  REQUIRE_ERROR("the tensor \"y\" must be dense", save("y", torch::eye(2).to_sparse_csr()));
  REQUIRE_ERROR("the tensor \"y\" must be dense", save("y", x.to(at::kMeta)));
  REQUIRE_ERROR("must be UTF-8", save("\xff", x));
  REQUIRE_ERROR("must be UTF-8", save("y", x, {{"a", "\xc3"}}));
  REQUIRE_ERROR("__metadata__", save("__metadata__", x));
  REQUIRE_ERROR("every name once", save("__metadata__", x, {{"a", "b"}}));
  REQUIRE_ERROR("a name of at most 4096 bytes, got 4097", save(std::string(4097, 'n'), x));
  REQUIRE_ERROR("at most 64 dimensions, got 65", save("y", torch::ones(std::vector<std::int64_t>(65, 1))));
  CHECK(testing::text_of(directory / "file") == before);
  CHECK(std::distance(std::filesystem::directory_iterator(directory / ""), {}) == 1);
  save(std::string(4096, 'n'), torch::ones(std::vector<std::int64_t>(64, 1)));
  CHECK(ga::io::load_file(directory / "file").size() == 2);
}

TEST_CASE("SafetensorsFile: every invalid file is refused with a specific sentence") {
  const auto many_ones = [](int count) {
    std::string text = "1";
    for (int i = 1; i < count; ++i) text += ",1";
    return text;
  };
  const std::string a = entry("a", "F32", "1", "0,4"), spaces(100'000'001, ' ');
  struct Case {
    std::string sentence, bytes;
  };
  const std::vector<Case> cases{
      {"must have at least 8 bytes, got 0", ""},
      {"must have at least 8 bytes, got 7", std::string(7, '\0')},
      {"at most 100000000 bytes, got 100000001", file_of("{}" + spaces.substr(2))},
      {"at most 100000000 bytes, got 18446744073709551615", std::string(8, '\xff') + "{}"},
      {"at most 100000000 bytes, got 9223372036854775808", eight_bytes(std::uint64_t{1} << 63) + "{}"},
      {"its header must end with the file or before, got 3 bytes of 2", eight_bytes(3) + "{}"},
      {"its header must end with the file or before, got 60", eight_bytes(60)},
      {"its header must begin with {", file_of("")},
      {"its header must begin with {", file_of(" {}")},
      {"its header must begin with {", file_of("[]")},
      {"its header must begin with {", file_of("\xef\xbb\xbf{}")},
      {"must be JSON in UTF-8, got what is none at byte 2", file_of("{")},
      {"must be JSON in UTF-8", file_of("{]")},
      {"must be JSON in UTF-8", file_of("{\"a\xff\":1}")},
      {"must be JSON in UTF-8", file_of("{\"\xed\xa0\x80\":1}")},
      {"must be JSON in UTF-8, got what is none at byte 4", file_of("{} x")},
      {"must be JSON in UTF-8, got what is none at byte 3", file_of("{}{}")},
      {"must be JSON in UTF-8, got a zero at byte 3", file_of(std::string("{}\0x", 4))},
      {"must be JSON in UTF-8", file_of("{'a':1}")},
      {"must be JSON in UTF-8", file_of("{/**/}")},
      {"no numbers beyond those of a double", file_of(one("F32", "1e999", "0,4"))},
      {"must have every name once, got \"a\" twice", file_of("{" + a + "," + a + "}", 4)},
      {"every name once, got \"a\" twice", file_of("{" + a + "," + entry("\\u0061", "F32", "1", "0,4") + "}", 4)},
      {"every name once, got \"shape\" twice",
       file_of(R"({"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}})", 4)},
      {"every name once, got \"k\" twice", file_of(R"({"__metadata__":{"k":"1","k":"1"}})")},
      {"every name once, got \"__metadata__\" twice", file_of(R"({"__metadata__":{},"__metadata__":{}})")},
      {"must not be nested deeper than 3", file_of(one("F32", "[1]", "0,4"), 4)},
      {"must not be nested deeper than 3", file_of("{\"a\":" + std::string(1'000'000, '['))},
      {"must not be nested deeper than 3", file_of(R"({"__metadata__":{"a":{"b":{}}}})")},
      // Objects cost the same in parents of any size: a parser that searches all siblings would take hours.
      {"must have dtype, shape and data_offsets", file_of("{\"a\":[" + repeated("{},", 1'000'000) + "{}]}")},
      {"the tensor \"a\" must have dtype, shape and data_offsets, and nothing else",
       file_of(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4)},
      {"must have dtype, shape and data_offsets", file_of(R"({"a":{"dtype":"F32","shape":[1]}})", 4)},
      {"must have dtype, shape and data_offsets",
       file_of(R"({"a":{"dtype":"F32","shape":[1],"data_offset":[0,4]}})", 4)},
      {"must have dtype, shape and data_offsets", file_of(R"({"a":[0,1,2]})", 4)},
      {"must have dtype, shape and data_offsets", file_of(R"({"a":"b"})", 4)},
      {"shape must have whole numbers from 0 to 2^63 - 1 only", file_of(one("F32", "1.0", "0,4"), 4)},
      {"shape must have whole numbers", file_of(one("F32", "1e0", "0,4"), 4)},
      {"shape must have whole numbers", file_of(one("F32", "-1,-1", "0,4"), 4)},
      {"shape must have whole numbers", file_of(one("F32", "-0", "0,0"))},
      {"shape must have whole numbers", file_of(one("F32", "true", "0,4"), 4)},
      {"shape must have whole numbers", file_of(one("F32", "\"1\"", "0,4"), 4)},
      {"shape must have whole numbers", file_of(one("F32", "null", "0,4"), 4)},
      {"shape must have whole numbers", file_of(one("F32", "9223372036854775808,0", "0,0"))},
      {"shape must have whole numbers", file_of(one("F32", "18446744073709551617", "0,4"), 4)},
      {"data_offsets must have whole numbers", file_of(one("F32", "1", "-4,0"), 4)},
      {"data_offsets must have whole numbers", file_of(one("F32", "1", "0,4.0"), 4)},
      {"data_offsets must have whole numbers",
       file_of(one("F32", "1", "18446744073709551612,18446744073709551616"), 4)},
      {"the tensor \"a\": shape must be an array",
       file_of(R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})", 4)},
      {"data_offsets must be an array", file_of(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":4}})", 4)},
      {"must have a begin and an end that is not before", file_of(one("F32", "1", "4"), 4)},
      {"must have a begin and an end that is not before", file_of(one("F32", "1", "0,4,8"), 8)},
      {"must have a begin and an end that is not before", file_of(one("F32", "1", "4,0"), 4)},
      {"__metadata__ must be an object", file_of(R"({"__metadata__":[]})")},
      {"__metadata__ must be an object", file_of(R"({"__metadata__":null})")},
      {"__metadata__ must have texts only, got another value for \"k\"", file_of(R"({"__metadata__":{"k":1}})")},
      {"__metadata__ must have texts only", file_of(R"({"__metadata__":{"k":{}}})")},
      {"the tensor \"a\" must have a dtype of safetensors, got \"F99\"", file_of(one("F99", "1", "0,4"), 4)},
      {"must have a dtype of safetensors, got \"f32\"", file_of(one("f32", "1", "0,4"), 4)},
      {"must have a dtype of safetensors, got 32",
       file_of(R"({"a":{"dtype":32,"shape":[1],"data_offsets":[0,4]}})", 4)},
      {"must have fewer than 2^63 bits", file_of(one("F32", "4294967296,4294967296", "0,4"), 4)},
      {"must have fewer than 2^63 bits", file_of(one("F32", "288230376151711744", "0,4"), 4)},
      {"must have fewer than 2^63 bits", file_of(one("F32", "0,4294967296,4294967296", "0,0"))},
      {"must end at a whole byte", file_of(one("F4", "3", "0,1"), 1)},
      {"must have the bytes of its shape and dtype, 8, got 4", file_of(one("F32", "2", "0,4"), 4)},
      {"must have the bytes of its shape and dtype, 0, got 4", file_of(one("F32", "0", "0,4"), 4)},
      {"must have the bytes of its shape and dtype, 4, got 0", file_of(one("F32", "", "0,0"))},
      {"must begin where the one before ends, at 0, got 4", file_of(one("F32", "1", "4,8"), 8)},
      {"the tensor \"b\" must begin where the one before ends, at 4, got 8",
       file_of("{" + a + "," + entry("b", "F32", "1", "8,12") + "}", 12)},
      {"the tensor \"b\" must begin where the one before ends, at 4, got 2",
       file_of("{" + a + "," + entry("b", "F32", "1", "2,6") + "}", 6)},
      {"must begin where the one before ends, at 4, got 0",
       file_of("{" + a + "," + entry("b", "F32", "1", "0,4") + "}", 4)},
      {"must begin where the one before ends, at 4, got 2",
       file_of("{" + a + "," + entry("b", "F32", "0", "2,2") + "}", 4)},
      {"its tensors must be all of its data, 5 bytes, got 4", file_of(one_float, 5)},
      {"its tensors must be all of its data, 3 bytes, got 4", file_of(one_float, 3)},
      {"its tensors must be all of its data, 1 bytes, got 0", file_of("{}", 1)},
      {"must have a name of at most 4096 bytes, got 4097",
       file_of("{" + entry(std::string(4097, 'n'), "F32", "1", "0,4") + "}", 4)},
      {"at most 64 dimensions, got 65", file_of(one("F32", many_ones(65), "0,4"), 4)},
  };
  testing::Directory directory;
  for (auto& [sentence, bytes] : cases) {
    INFO(sentence);
    const auto path = directory / "file";
    testing::write_text(path, bytes);
    const auto message = testing::error_of([&] { ga::io::SafetensorsFile{path}; });
    INFO("message: " << message);
    CHECK(message.starts_with(path.string() + ": "));
    CHECK(testing::contains(message, sentence));
  }
}

TEST_CASE("SafetensorsFile: at most a million tensors, and a header never takes more than 300 MB") {
  const std::string what = "a file";
  const auto error_of = [&what](const std::string& begin, const std::string& value, int count) {
    std::string text = begin;
    for (int i = 0; i < count; ++i) text += (i ? ",\"" : "\"") + std::to_string(i) + "\":" + value;
    text += begin.size() > 1 ? "}}" : "}";
    const auto before = most_allocated = allocated;
    const auto error = testing::error_of([&] { inner::parse_safetensors_header(text, 0, what); });
    INFO(error << ": " << most_allocated - before << " bytes for " << text.size());
    CHECK(most_allocated - before < std::int64_t{300'000'000});
    return error;
  };
  const std::string tensor = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})", metadata = R"({"__metadata__":{)";
  CHECK(error_of("{", tensor, 1'000'001) == "a file: must have at most 1000000 tensors, got more");
  CHECK(error_of("{", tensor, 1000).empty());
  CHECK(testing::contains(error_of("{", "0", 1000), "must have dtype"));
  const std::string too_many = "a file: its JSON must have at most 1100000 values (each tensor counts alone)";
  CHECK(error_of("{", "0", 1'200'000) == too_many);
  CHECK(error_of(metadata, "\"\"", 1'200'000) == too_many);
  CHECK(error_of(metadata, "\"\"", 1000).empty());
  std::string values = R"({"a":[0)";
  for (int i = 0; i < 1'200'000; ++i) values += ",0";
  CHECK(testing::error_of([&] { inner::parse_safetensors_header(values + "]}", 0, what); }) == too_many);
}

TEST_CASE("SafetensorsFile: unusual and valid files are read") {
  testing::Directory directory;
  const auto load = [&](const std::string& bytes) {
    testing::write_text(directory / "file", bytes);
    return ga::io::load_file(directory / "file");
  };
  CHECK(load(file_of(one_float + "    ", 4)).size() == 1);
  CHECK(
      load(file_of("{\n \"a\" : {\"data_offsets\":[0, 4],\"shape\":[ ],\"dtype\":\"F32\"}\t}\r\n", 4)).at("a").dim() ==
      0);
  CHECK(load(file_of(one("F32", "0,4294967296", "0,0"))).at("a").sizes() == at::IntArrayRef{0, 4294967296});
  const auto in_any_order = load(file_of("{" + entry("z", "U8", "1", "0,1") + "," + entry("a", "U8", "2", "1,3") + "," +
                                             entry("m", "U8", "0", "1,1") + "}",
                                         3));
  CHECK(in_any_order.size() == 3);
  CHECK(in_any_order.at("m").numel() == 0);
  CHECK(load(file_of(R"({"__metadata__":{}})")).empty());
}

TEST_CASE("SafetensorsFile: dtypes that LibTorch lacks, and invalid flags, are refused when they are read") {
  testing::Directory directory;
  const auto path = directory / "file";
  testing::write_text(path, file_of("{" + entry("a", "F6_E2M3", "4", "0,3") + "," + entry("b", "BOOL", "2", "3,5") +
                                    "," + entry("c", "BOOL", "2", "5,7") + "}") +
                                std::string("\0\0\0\0\1\1\2", 7));
  const ga::io::SafetensorsFile file(path);
  REQUIRE_ERROR("file: the tensor \"a\" must have a dtype of LibTorch, got F6_E2M3", file.get_tensor("a"));
  CHECK(file.get_tensor("b").equal(torch::tensor({false, true})));
  REQUIRE_ERROR("file: the tensor \"c\" must have only bytes 0 and 1, as its dtype is bool", file.get_tensor("c"));
  REQUIRE_ERROR("got F6_E2M3", ga::io::load_file(path));
}

TEST_CASE("SafetensorsFile: paths that are not files") {
  testing::Directory directory;
  REQUIRE_ERROR("nowhere: must be a file that can be read, got No such file",
                ga::io::SafetensorsFile(directory / "nowhere"));
  REQUIRE_ERROR("must be a regular file, got a directory", ga::io::SafetensorsFile(directory / ""));
  REQUIRE(mkfifo((directory / "pipe").c_str(), 0600) == 0);
  REQUIRE_ERROR("must be a regular file, got a pipe", ga::io::SafetensorsFile(directory / "pipe"));
  REQUIRE_ERROR("nowhere/file", ga::io::save_file({}, directory / "nowhere" / "file"));
}

TEST_CASE("SafetensorsFile: nothing is allocated for sizes that a header only claims") {
  testing::Directory directory;
  const std::vector<std::string> claims{eight_bytes(99'999'999) + "{}",
                                        file_of(one("U8", "4611686018427387904", "0,4611686018427387904")),
                                        file_of(one("U8", "4611686018427387904", "0,1"), 1),
                                        file_of(one("U8", "1", "4611686018427387904,4611686018427387905"), 1)};
  for (auto& bytes : claims) {
    testing::write_text(directory / "file", bytes);
    largest_allocation = 0;
    CHECK_THROWS(ga::io::SafetensorsFile(directory / "file"));
    CHECK(largest_allocation < 10'000);
#ifndef __SANITIZE_ADDRESS__
    CHECK(largest_allocation > 0);
#endif
  }
}

TEST_CASE("SafetensorsFile: a header with any changed byte is refused, or its tensors fill the data") {
  const auto good = saved({{"weight", torch::ones({2, 3})}, {"bias", torch::ones({2}, at::kHalf)}}, {{"format", "pt"}});
  const std::string what = "a file";
  constexpr int some_under_sanitizers = testing::sanitized ? 4 : 1;
  int refused = 0, read = 0;
  for (std::size_t at = 0; at + 28 < good.size(); ++at)
    for (int flip = 1; flip < 256; flip += some_under_sanitizers) {
      auto bytes = good;
      bytes[at] = static_cast<char>(bytes[at] ^ flip);
      try {
        const auto header = inner::read_safetensors_header(bytes, what);
        std::size_t size = 0;
        for (auto& [name, entry] : header.tensors) {
          REQUIRE((entry.begin <= entry.end && header.data_begin + entry.end <= bytes.size()));
          size += entry.end - entry.begin;
        }
        REQUIRE(header.data_begin + size == bytes.size());
        ++read;
      } catch (const std::runtime_error&) {
        ++refused;
      }
    }
  CHECK(refused > 10'000 / some_under_sanitizers);
  CHECK(read > 100 / some_under_sanitizers);  // names and metadata may have any value
}
