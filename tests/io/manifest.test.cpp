// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/io/formats.hpp>

#include "support/files.hpp"

#include <bit>
#include <cstdlib>
#include <limits>
#include <random>

namespace inner = gradaccum::detail;
using inner::Manifest;
using namespace testing;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr auto int_max = std::numeric_limits<std::int64_t>::max();
constexpr auto int_min = std::numeric_limits<std::int64_t>::min();

Manifest typical() {
  Manifest manifest;
  manifest.gradaccum = "0.1.0";
  manifest.libtorch = "2.15.0";
  manifest.files["model.safetensors"] = {123, 0xcbf43926};
  manifest.values = {
      {"accumulate.steps", std::int64_t{4}}, {"amp", true}, {"lr", 0.001}, {"text", std::string("größe")}};
  return manifest;
}

/// Corrects the checksum.
std::string mended(std::string text) {
  const auto at = text.find("\"crc32\": \"") + 10;
  text.replace(at, 8, "00000000");
  return text.replace(at, 8, inner::crc32_text(inner::crc32(text.data(), text.size())));
}

/// Replaces `from` by `to` in a typical text, and corrects the checksum.
std::string changed(const std::string& from, const std::string& to) {
  auto text = inner::text_of(typical());
  const auto at = text.find(from);
  REQUIRE(at != text.npos);
  return mended(text.replace(at, from.size(), to));
}

Manifest with_value(Manifest::Value value) {
  Manifest manifest;
  manifest.values["x"] = std::move(value);
  return manifest;
}

Manifest::Value again(const Manifest::Value& value) {
  return inner::manifest_of(inner::text_of(with_value(value)), "it").values.at("x");
}

}  // namespace

TEST_CASE("Manifest: its text") {
  CHECK(inner::text_of(typical()) == R"({
  "crc32": "6a6eb1bd",
  "format": "gradaccum training state",
  "format_version": 1,
  "gradaccum": "0.1.0",
  "libtorch": "2.15.0",
  "files": {
    "model.safetensors": {
      "bytes": 123,
      "crc32": "cbf43926"
    }
  },
  "values": {
    "accumulate.steps": 4,
    "amp": true,
    "lr": 0.001,
    "text": "größe"
  }
}
)");
  const auto read = inner::manifest_of(inner::text_of(typical()), "it");
  CHECK((read.values == typical().values));
  CHECK((read.files == typical().files));
  CHECK(read.gradaccum == "0.1.0");
  CHECK(read.libtorch == "2.15.0");
  const auto none = inner::manifest_of(inner::text_of({}), "it");
  CHECK((none.values.empty() && none.files.empty() && none.gradaccum.empty()));
}

TEST_CASE("Manifest: each value is read back unchanged, with its type") {
  for (const Manifest::Value& value : std::vector<Manifest::Value>{true,
                                                                   false,
                                                                   std::int64_t{0},
                                                                   std::int64_t{1},
                                                                   int_max,
                                                                   int_min,
                                                                   int_max - 1,
                                                                   0.0,
                                                                   1.0,
                                                                   -1.0,
                                                                   1e15,
                                                                   1e16,
                                                                   1e300,
                                                                   9007199254740993.0,
                                                                   9223372036854775808.0,
                                                                   infinity,
                                                                   -infinity,
                                                                   std::string(),
                                                                   std::string("nan"),
                                                                   std::string("{\"double\": \"nan\"}"),
                                                                   std::string("00000000"),
                                                                   std::string("a\0b\n\"\\\x7f", 8),
                                                                   std::string("\xf0\x9f\x98\x80 größe")})
    CHECK(again(value) == value);
  std::mt19937_64 random(1);
  std::vector<double> numbers{-0.0, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 0.1};
  while (numbers.size() < 3000)
    if (const auto number = std::bit_cast<double>(random()); !std::isnan(number)) numbers.push_back(number);
  int same = 0;
  for (const auto number : numbers)
    same += std::bit_cast<std::uint64_t>(std::get<double>(again(number))) == std::bit_cast<std::uint64_t>(number);
  CHECK(same == 3000);
  CHECK(std::isnan(std::get<double>(again(std::numeric_limits<double>::quiet_NaN()))));
}

TEST_CASE("Manifest: values that could not be read back are not written") {
  REQUIRE_ERROR("manifest.json: texts and names must be UTF-8, got \"a\xef\xbf\xbd\"",
                inner::text_of(with_value(std::string("a\xff"))));
  Manifest manifest;
  manifest.values["caf\xe9"] = true;
  REQUIRE_ERROR("must be UTF-8", inner::text_of(manifest));
  manifest = {};
  manifest.libtorch = "\xc0\x80";
  REQUIRE_ERROR("must be UTF-8", inner::text_of(manifest));
  for (const std::string name : {"", ".hidden", "..", "a/b", "a\\b", "größe", "a b", "manifest.json"}) {
    manifest = {};
    manifest.files[name];
    REQUIRE_ERROR("files must have plain names", inner::text_of(manifest));
  }
  REQUIRE_ERROR("must have at most 64 MiB, got", inner::text_of(with_value(std::string(Manifest::max_bytes, 'a'))));
}

TEST_CASE("Manifest: every flipped bit, and every other length, is an error that names the file") {
  const auto text = inner::text_of(typical());
  int named = 0;
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    auto flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    named += error_of([&] { inner::manifest_of(flipped, "it"); }).starts_with("it: ");
  }
  CHECK(named == static_cast<int>(8 * text.size()));
  named = 0;
  for (std::size_t size = 0; size < text.size(); ++size)
    named += error_of([&] { inner::manifest_of(text.substr(0, size), "it"); }).starts_with("it: ");
  CHECK(named == static_cast<int>(text.size()));
  REQUIRE_ERROR("it: must be as it was written, with the CRC-32 6a6eb1bd, got", inner::manifest_of(text + "\n", "it"));
}

TEST_CASE("Manifest: refused in spite of a correct checksum") {
  const auto refused = [](const std::string& message, const std::string& from, const std::string& to) {
    REQUIRE_ERROR("it: " + message, inner::manifest_of(changed(from, to), "it"));
  };
  CHECK(inner::manifest_of(changed("0.001", "0.002"), "it").values.at("lr") == Manifest::Value(0.002));
  const std::string version = "\"format_version\": 1", value = "\"amp\": true", bytes = "\"bytes\": 123";
  for (const std::string other : {"2", "0", "-1", "1.0", "\"1\"", "18446744073709551615", "null"})
    refused("\"format_version\" must be 1, got " + other + ": read it with the gradaccum that wrote it, or a newer one",
            version, "\"format_version\": " + other);
  refused("\"format\" must be \"gradaccum training state\", got \"gguf\"", "gradaccum training state", "gguf");
  refused("must have an entry \"format_version\"", version + ",", "");
  refused("must have an entry \"libtorch\"", "\"libtorch\": \"2.15.0\",", "");
  refused("\"libtorch\" must be a text, got 2", "\"2.15.0\"", "2");
  refused("must have only entries that this version of gradaccum knows, got \"rank\"", version,
          version + ", \"rank\": 0");
  const auto text = inner::text_of(typical());
  const auto from = text.find("{", text.find("files")), to = text.find("\n  }", from) + 4;
  refused("\"files\" must be an object, got []", text.substr(from, to - from), "[]");
  refused("its JSON must have every name once, got \"lr\"", value, "\"lr\": 1");
  refused("its JSON must not be nested deeper than 3", value, "\"amp\": {\"a\": {\"b\": 1}}");
  refused("must be JSON in UTF-8", value, "\"amp\": NaN");
  refused("must be JSON in UTF-8", "größe", "gr\xff");
  refused("must be JSON in UTF-8", value, value + ",,");
  for (const std::string wrong : {"null", "[]", "9223372036854775808", "18446744073709551615"})
    refused("the value \"amp\" must be true or false, a 64-bit integer, a double or a text, got " + wrong, value,
            "\"amp\": " + wrong);
  refused("its JSON must have no numbers beyond those of a double", value, "\"amp\": 1e400");
  refused("the value \"amp\" must be \"nan\", \"inf\" or \"-inf\", got", value, "\"amp\": {\"double\": \"1\"}");
  refused("\"double\" must be a text", value, "\"amp\": {\"double\": 1}");
  refused("must have only entries", value, "\"amp\": {\"double\": \"nan\", \"a\": 1}");
  refused("must have an entry \"double\"", value, "\"amp\": {}");
  for (const std::string wrong : {"-1", "-0", "1.0", "\"1\"", "18446744073709551616"})
    refused("the \"bytes\" of model.safetensors must be a whole number >= 0, got ", bytes, "\"bytes\": " + wrong);
  for (const std::string wrong : {"CBF43926", "cbf4392", "0cbf43926", "0xbf4392", "cbf4392g", ""})
    refused("\"crc32\" must be eight digits 0-9 a-f, got \"" + wrong + "\"", "cbf43926", wrong);
  refused("must have only entries that this version of gradaccum knows, got \"mode\"", bytes, bytes + ", \"mode\": 1");
  for (const std::string wrong :
       {"../up", "/etc/passwd", ".", "..", ".hidden", "a/b", "a\\\\b", "a b", "größe", "", "manifest.json", "a\\u0000"})
    refused("\"files\" must have plain names", "model.safetensors", wrong);
  refused("\"files\" must have plain names", "model.safetensors", std::string(256, 'a'));
}

TEST_CASE("Manifest: files that are not manifests") {
  for (const std::string text : {"", " ", "null", "[]", "1", "\"text\"", "{}", "{\"crc32\": 1}", "{\"crc32\": \"\"}",
                                 "{\"crc32\": \"\\u0030\\u0030000000\"}", "\xff", "[[[[[["})
    REQUIRE_ERROR("it: ", inner::manifest_of(text, "it"));
  REQUIRE_ERROR("it: must have at most 67108864 bytes, got 67108865",
                inner::manifest_of(std::string(Manifest::max_bytes + 1, ' '), "it"));
}

TEST_CASE("Manifest: Python can read, change and write it") {
  if (std::system("python3 -c 'import json, zlib' 2> /dev/null") != 0) SKIP("needs python3");
  const Directory directory;
  auto manifest = typical();
  manifest.values["nan"] = std::numeric_limits<double>::quiet_NaN();
  manifest.values["zeros"] = std::string("00000000");
  inner::write_manifest((directory / "x").parent_path(), manifest);
  write_text(directory / "change.py", R"(
import json, zlib
text = open("manifest.json", "rb").read()
m = json.loads(text)
assert list(m)[0] == "crc32" and m["values"]["lr"] == 0.001
assert zlib.crc32(text.replace(m["crc32"].encode(), b"00000000", 1)) == int(m["crc32"], 16)
m["values"]["lr"], m["crc32"] = 0.01, "00000000"
text = json.dumps(m, indent=2)
text = text.replace("00000000", f"{zlib.crc32(text.encode()):08x}", 1)
open("manifest.json", "w").write(text)
)");
  const auto folder = (directory / "x").parent_path();
  REQUIRE(std::system(("cd '" + folder.string() + "' && python3 change.py").c_str()) == 0);
  auto read = inner::read_manifest(folder);
  CHECK(read.values.at("lr") == Manifest::Value(0.01));
  CHECK(std::isnan(std::get<double>(read.values.at("nan"))));
  read.values["lr"] = 0.001;
  read.values["nan"] = manifest.values["nan"] = 0.0;
  CHECK((read.values == manifest.values));
  CHECK((read.files == manifest.files));
}

namespace {

/// A folder with the files a and b, and their manifest.
struct Folder {
  Directory directory;
  std::filesystem::path path = (directory / "x").parent_path();
  Manifest manifest;

  Folder() {
    for (const std::string name : {"a", "b"}) {
      inner::OutputFile file(path / name);
      const std::string text = "the bytes of " + name;
      file.write(text.data(), text.size());
      file.close();
      manifest.files[name] = {file.bytes(), file.crc32()};
    }
    inner::write_manifest(path, manifest);
  }
  void check() const { inner::check_files(path, inner::read_manifest(path)); }
};

}  // namespace

TEST_CASE("check_files: existing files equal the listed ones") {
  const Folder folder;
  const auto a = folder.path / "a", b = folder.path / "b";
  folder.check();
  SECTION("each flipped bit and each length") {
    const auto text = text_of(a);
    for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
      auto flipped = text;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      write_text(a, flipped);
      REQUIRE_ERROR(a.string() + ": must have the CRC-32 ", folder.check());
    }
    for (std::size_t size = 0; size < text.size(); ++size) {
      write_text(a, text.substr(0, size));
      REQUIRE_ERROR(a.string() + ": must have 14 bytes, as the manifest says, got " + std::to_string(size),
                    folder.check());
    }
    write_text(a, text + " ");
    REQUIRE_ERROR(a.string() + ": must have 14 bytes, as the manifest says, got 15", folder.check());
    write_text(a, text);
    folder.check();
  }
  SECTION("missing") {
    std::filesystem::remove(b);
    REQUIRE_ERROR(b.string() + ": must be a file that can be read, got No such file or directory", folder.check());
  }
  SECTION("two files swapped") {
    std::filesystem::rename(a, folder.path / "c");
    std::filesystem::rename(b, a);
    std::filesystem::rename(folder.path / "c", b);
    REQUIRE_ERROR(a.string() + ": must have the CRC-32 ", folder.check());
  }
  SECTION("one more") {
    write_text(folder.path / "c", "");
    REQUIRE_ERROR((folder.path / "c").string() + ": must be listed in manifest.json, or removed", folder.check());
  }
  SECTION("a symbolic link to the same bytes") {
    std::filesystem::rename(a, folder.path.string() + ".elsewhere");
    std::filesystem::create_symlink(folder.path.string() + ".elsewhere", a);
    REQUIRE_ERROR(a.string() + ": must be a regular file, got a symbolic link", folder.check());
    std::filesystem::remove(folder.path.string() + ".elsewhere");
  }
  SECTION("no manifest, or too large a one") {
    std::filesystem::resize_file(folder.path / "manifest.json", Manifest::max_bytes + 1);
    REQUIRE_ERROR("manifest.json: must have at most 64 MiB, got 67108865 bytes", folder.check());
    std::filesystem::remove(folder.path / "manifest.json");
    REQUIRE_ERROR((folder.path / "manifest.json").string() + ": must be a file that can be read", folder.check());
  }
}
