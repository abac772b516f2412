// SPDX-License-Identifier: Apache-2.0
// Parses manifests, indexes of weights and safetensors headers from untrusted files.
#pragma once

#include <gradaccum/detail/io/formats.hpp>

#include <gradaccum/detail/kernels/crc32.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

using Json = nlohmann::json;

/// Returns a value as one line of ASCII, which can be cut anywhere.
GRADACCUM_INLINE std::string one_line(const Json& json) { return json.dump(-1, ' ', true); }

GRADACCUM_INLINE std::string in_quotes(std::string_view name) {
  return Json(name.substr(0, 200)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

[[noreturn]] GRADACCUM_INLINE void format_error(const std::string& what, const std::string& requirement) {
  throw std::runtime_error(what + ": " + requirement);
}

[[noreturn]] GRADACCUM_INLINE void name_twice_error(const std::string& what, const std::string& name) {
  format_error(what, "its JSON must have every name once, got " + in_quotes(name) + " twice");
}

/// Reads a member of the outermost object, which is then dropped.
using TakeMember = std::function<void(const std::string& name, const Json& object)>;

/// Builds a value from the events of nlohmann's parser. Also refuses a name that an object has twice, and deep nesting,
/// which that parser accepts. Json::parse with a callback would take quadratic time: it searches the parent after each
/// object.
///
/// With `take`, objects that are members of the outermost one are passed to it as they end, and dropped, so that a
/// million of them never exist together.
class JsonBuilder : public nlohmann::json_sax<Json> {
 public:
  JsonBuilder(std::size_t max_depth, const std::string& what, const TakeMember& take)
      : max_depth_(max_depth), what_(what), take_(take) {}

  Json root;

  bool start_object(std::size_t /*size*/) override { return open(Json::object()); }
  bool start_array(std::size_t /*size*/) override { return open(Json::array()); }
  bool end_object() override {
    open_.pop_back();
    if (!take_ || open_.size() != 1) return true;
    take_(outer_member_->first, outer_member_->second);
    open_.front()->get_ref<Json::object_t&>().erase(outer_member_);
    values_ = values_before_;
    return true;
  }
  bool end_array() override { return open_.pop_back(), true; }
  bool key(string_t& name) override {
    const auto [member, is_new] = open_.back()->get_ref<Json::object_t&>().try_emplace(name);
    if (!is_new) name_twice_error(what_, name);
    member_ = &member->second;
    if (open_.size() == 1) outer_member_ = member, values_before_ = values_;
    return true;
  }
  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& /*value*/) override { return false; }  // JSON has none
  bool parse_error(std::size_t byte, const std::string& /*token*/, const Json::exception& error) override {
    if (dynamic_cast<const Json::out_of_range*>(&error))
      format_error(what_, "its JSON must have no numbers beyond those of a double");
    format_error(what_, "must be JSON in UTF-8, got what is none at byte " + std::to_string(byte));
  }

 private:
  bool add(Json value) { return next() = std::move(value), true; }
  bool open(Json empty) {
    if (open_.size() == max_depth_)
      format_error(what_, "its JSON must not be nested deeper than " + std::to_string(max_depth_));
    auto& here = next();
    here = std::move(empty);
    open_.push_back(&here);
    return true;
  }
  /// Returns the element that receives the next value.
  Json& next() {
    constexpr std::size_t max_values = 1'100'000;  // a few bytes of text may become a value of 150
    if (++values_ > max_values)
      format_error(what_, "its JSON must have at most " + std::to_string(max_values) + " values" +
                              (take_ ? " (each tensor counts alone)" : ""));
    if (open_.empty()) return root;
    return open_.back()->is_array() ? open_.back()->emplace_back() : *member_;
  }

  std::size_t max_depth_, values_ = 0, values_before_ = 0;  // before the outermost object's last member
  const std::string& what_;
  const TakeMember& take_;
  std::vector<Json*> open_;  // the outermost first; an open one never moves
  Json* member_ = nullptr;
  Json::object_t::iterator outer_member_ = {};
};

/// Parses exactly one JSON value, from untrusted text.
GRADACCUM_INLINE Json parse_json(std::string_view text, std::size_t max_depth, const std::string& what,
                                 const TakeMember& take = {}) {
  // nlohmann's parser takes a zero byte for the end of the text.
  if (const auto zero = text.find('\0'); zero != text.npos)
    format_error(what, "must be JSON in UTF-8, got a zero at byte " + std::to_string(zero + 1));
  JsonBuilder builder(max_depth, what, take);
  Json::sax_parse(text.begin(), text.end(), &builder);
  return std::move(builder.root);
}

GRADACCUM_INLINE std::string crc32_text(std::uint32_t crc) {
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", crc);
  return digits;
}

GRADACCUM_INLINE std::string crc_of(std::string_view text) { return crc32_text(crc32(text.data(), text.size())); }

GRADACCUM_INLINE bool is_file_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name.front() != '.' && name != manifest_name &&
         name.find_first_not_of(plain_characters) == name.npos;
}

GRADACCUM_INLINE std::string quoted(const std::string& text) {
  try {
    return Json(text).dump();
  } catch (const Json::type_error&) {
    throw std::runtime_error("manifest.json: texts and names must be UTF-8, got " + in_quotes(text));
  }
}

/// Writes an object from names and JSON values, one entry a line.
GRADACCUM_INLINE std::string lines_of(const std::vector<std::pair<std::string, std::string>>& entries,
                                      std::size_t depth) {
  std::string text;
  for (auto& [name, json] : entries)
    text += (text.empty() ? "\n" : ",\n") + std::string(2 * depth, ' ') + quoted(name) + ": " + json;
  return text.empty() ? "{}" : "{" + text + "\n" + std::string(2 * (depth - 1), ' ') + "}";
}

GRADACCUM_INLINE std::string json_of_value(const Manifest::Value& value) {
  if (auto* const text = std::get_if<std::string>(&value)) return quoted(*text);
  const auto* const number = std::get_if<double>(&value);
  if (!number || is_finite(*number)) return std::visit([](auto& held) { return Json(held).dump(); }, value);
  return lines_of({{"double", is_nan(*number) ? "\"nan\"" : *number > 0 ? "\"inf\"" : "\"-inf\""}}, 3);
}

GRADACCUM_INLINE std::string text_of(const Manifest& manifest) {
  std::vector<std::pair<std::string, std::string>> files, values;
  for (const auto& [name, file] : manifest.files) {
    if (!is_file_name(name))
      throw std::runtime_error("manifest.json: files must have plain names, got " + in_quotes(name));
    files.emplace_back(name,
                       lines_of({{"bytes", std::to_string(file.bytes)}, {"crc32", quoted(crc32_text(file.crc32))}}, 3));
  }
  for (const auto& [name, value] : manifest.values) values.emplace_back(name, json_of_value(value));
  auto text = lines_of({{"crc32", quoted("00000000")},
                        {"format", quoted(manifest.format)},
                        {"format_version", "1"},
                        {"gradaccum", quoted(manifest.gradaccum)},
                        {"libtorch", quoted(manifest.libtorch)},
                        {"files", lines_of(files, 2)},
                        {"values", lines_of(values, 2)}},
                       1) +
              "\n";
  if (text.size() > Manifest::max_bytes)
    throw std::runtime_error("manifest.json: must have at most 64 MiB, got " + std::to_string(text.size()) + " bytes");
  return text.replace(text.find("00000000"), 8, crc_of(text));
}

/// Turns untrusted JSON into a manifest.
struct ManifestReader {
  const std::string& what;

  Manifest read(std::string_view text, const std::string& format) const {
    if (text.size() > Manifest::max_bytes)
      fail("must have at most " + std::to_string(Manifest::max_bytes) + " bytes", text.size());
    const auto json = parse_json(text, 3, what);
    check_crc32(text_in(json, "crc32"), text);
    const auto& found = text_in(json, "format");
    if (found != format) fail("\"format\" must be \"" + format + "\"", found);
    const auto& version = in(json, "format_version");
    if (!version.is_number_unsigned() || version.get<std::uint64_t>() != 1)
      format_error(what, "\"format_version\" must be 1, got " + one_line(version) +
                             ": read it with the gradaccum that wrote it, or a newer one");
    only(json, {"crc32", "format", "format_version", "gradaccum", "libtorch", "files", "values"});
    Manifest manifest;
    manifest.format = format;
    manifest.gradaccum = text_in(json, "gradaccum");
    manifest.libtorch = text_in(json, "libtorch");
    for (const auto& [name, file] : object(in(json, "files"), "\"files\" ")) manifest.files[name] = file_of(name, file);
    for (const auto& [name, value] : object(in(json, "values"), "\"values\" "))
      manifest.values[name] = value_of(name, value);
    return manifest;
  }

  [[noreturn]] void fail(const std::string& requirement, const Json& got) const {
    auto shown = one_line(got);
    if (shown.size() > 200) shown = shown.substr(0, 200) + "...";
    throw std::runtime_error(what + ": " + requirement + ", got " + shown);
  }

  const Json::object_t& object(const Json& json, const std::string& name = "") const {
    if (!json.is_object()) fail(name + "must be an object", json);
    return json.get_ref<const Json::object_t&>();
  }
  const Json& in(const Json& json, const std::string& name) const {
    const auto found = object(json).find(name);
    if (found == object(json).end()) fail("must have an entry \"" + name + "\"", json);
    return found->second;
  }
  const std::string& text_in(const Json& json, const std::string& name) const {
    const auto& found = in(json, name);
    if (!found.is_string()) fail("\"" + name + "\" must be a text", found);
    return found.get_ref<const std::string&>();
  }
  void only(const Json& json, std::initializer_list<std::string_view> names) const {
    for (const auto& [name, value] : object(json))
      if (std::find(names.begin(), names.end(), name) == names.end())
        fail("must have only entries that this version of gradaccum knows", name);
  }

  void check_crc32(const std::string& digits, std::string_view text) const {
    const auto at = text.find(digits);
    if (at == text.npos || digits.size() != 8) fail("\"crc32\" must be eight digits 0-9 a-f", digits);
    const auto computed = crc_of(std::string(text).replace(at, 8, "00000000"));
    if (computed != digits) fail("must be as it was written, with the CRC-32 " + digits, computed);
  }

  Manifest::File file_of(const std::string& name, const Json& json) const {
    if (!is_file_name(name)) fail("\"files\" must have plain names (A-Z a-z 0-9 _ . -, no dot in front)", name);
    const auto& bytes = in(json, "bytes");
    if (!bytes.is_number_unsigned()) fail("the \"bytes\" of " + name + " must be a whole number >= 0", bytes);
    only(json, {"bytes", "crc32"});
    const auto& digits = text_in(json, "crc32");
    std::uint32_t crc = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), crc, 16);
    if (crc32_text(crc) != digits) fail("\"crc32\" must be eight digits 0-9 a-f", digits);
    return {bytes.get<std::uint64_t>(), crc};
  }

  Manifest::Value value_of(const std::string& name, const Json& json) const {
    if (json.is_boolean()) return json.get<bool>();
    if (json.is_string()) return json.get<std::string>();
    if (json.is_number_float()) return json.get<double>();
    if (json.is_number() && (!json.is_number_unsigned() || json.get<std::uint64_t>() >> 63 == 0))
      return json.get<std::int64_t>();
    if (!json.is_object())
      fail("the value " + in_quotes(name) + " must be true or false, a 64-bit integer, a double or a text", json);
    only(json, {"double"});
    const auto& text = text_in(json, "double");
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text != "-inf") fail("the value " + in_quotes(name) + " must be \"nan\", \"inf\" or \"-inf\"", json);
    return -std::numeric_limits<double>::infinity();
  }
};

GRADACCUM_INLINE Manifest manifest_of(std::string_view text, const std::string& what, std::string_view format) {
  return ManifestReader{what}.read(text, std::string(format));
}

GRADACCUM_INLINE void write_manifest(const std::filesystem::path& folder, const Manifest& manifest) {
  const auto text = text_of(manifest);
  OutputFile file(folder / manifest_name);
  file.write(text.data(), text.size());
  file.close();
}

GRADACCUM_INLINE Manifest read_manifest(const std::filesystem::path& folder, std::string_view format) {
  const auto path = folder / manifest_name;
  InputFile file(path);
  if (file.bytes() > Manifest::max_bytes)
    throw std::runtime_error(path.string() + ": must have at most 64 MiB, got " + std::to_string(file.bytes()) +
                             " bytes");
  std::string text(static_cast<std::size_t>(file.bytes()), '\0');
  text.resize(file.read_at(0, text.data(), text.size()));
  return manifest_of(text, path.string(), format);
}

inline constexpr std::size_t chunk_of_listed_file = 1 << 20;

GRADACCUM_INLINE ListedFile::ListedFile(const std::filesystem::path& path, const Manifest::File& listed)
    : path_(path), listed_(listed), file_(path) {
  if (file_.bytes() != listed.bytes) fail(std::to_string(listed.bytes) + " bytes", std::to_string(file_.bytes()));
}

GRADACCUM_INLINE std::uint32_t ListedFile::read(std::uint64_t offset, std::span<std::byte> bytes,
                                                std::uint32_t crc) const {
  while (!bytes.empty()) {
    const auto now = bytes.first(std::min(bytes.size(), chunk_of_listed_file));
    if (file_.read_at(offset, now.data(), now.size()) != now.size())
      fail(std::to_string(listed_.bytes) + " bytes", "fewer");
    crc = crc32(now.data(), now.size(), crc);  // while they are in the cache
    offset += now.size();
    bytes = bytes.subspan(now.size());
  }
  return crc;
}

GRADACCUM_INLINE void ListedFile::check(std::uint32_t crc) const {
  if (crc != listed_.crc32) fail("the CRC-32 " + crc32_text(listed_.crc32), crc32_text(crc));
}

GRADACCUM_INLINE void ListedFile::fail(const std::string& requirement, const std::string& got) const {
  throw std::runtime_error(path_.string() + ": must have " + requirement + ", as the manifest says, got " + got);
}

GRADACCUM_INLINE void check_file(const std::filesystem::path& path, const Manifest::File& listed) {
  const ListedFile file(path, listed);
  std::vector<std::byte> chunk(chunk_of_listed_file);
  std::uint32_t crc = 0;
  for (std::uint64_t at = 0; at < listed.bytes; at += chunk.size()) {
    chunk.resize(std::min<std::uint64_t>(listed.bytes - at, chunk.size()));
    crc = file.read(at, chunk, crc);
  }
  file.check(crc);
}

GRADACCUM_INLINE void check_no_others(const std::filesystem::path& folder, const Manifest& manifest) {
  for (const auto& name : names_in(folder))
    if (name != manifest_name && manifest.files.count(name) == 0)
      throw std::runtime_error((folder / name).string() + ": must be listed in " + manifest_name + ", or removed");
}

GRADACCUM_INLINE void check_files(const std::filesystem::path& folder, const Manifest& manifest) {
  check_no_others(folder, manifest);
  for (const auto& [name, file] : manifest.files) check_file(folder / name, file);
}

GRADACCUM_INLINE WeightMap read_weights_index(std::string_view text, const std::string& what) {
  constexpr std::size_t max_bytes = 100'000'000, max_tensors = 1'000'000, max_name = 4096, max_depth = 8;
  const auto fail = [&what](const std::string& requirement, const std::string& got) {
    format_error(what, requirement + ", got " + got);
  };
  if (text.size() > max_bytes) fail("must have at most 100000000 bytes", std::to_string(text.size()));
  const auto json = parse_json(text, max_depth, what);
  if (!json.is_object()) fail("must be an object", json.type_name());
  const auto found = json.find("weight_map");
  if (found == json.end() || !found->is_object())
    fail("must have an object \"weight_map\"", found == json.end() ? "none" : found->type_name());
  if (found->size() > max_tensors) fail("must have at most 1000000 tensors", std::to_string(found->size()));
  WeightMap files;
  for (const auto& [name, value] : found->get_ref<const Json::object_t&>()) {
    if (name.size() > max_name) fail("a tensor's name must have at most 4096 bytes", std::to_string(name.size()));
    if (!value.is_string()) fail("the file of " + in_quotes(name) + " must be a text", value.type_name());
    const auto& file = value.get_ref<const std::string&>();
    // The name must not leave the folder or refer to a pickle.
    if (!is_file_name(file) || !file.ends_with(".safetensors"))
      fail("the file of " + in_quotes(name) +
               " must have a plain name (A-Z a-z 0-9 _ . -, no dot in front) that ends in .safetensors",
           in_quotes(file));
    files.emplace_hint(files.end(), name, file);
  }
  return files;
}

GRADACCUM_INLINE std::string text_of_index(const WeightMap& files, std::uint64_t total_parameters,
                                           std::uint64_t total_size) {
  std::vector<std::pair<std::string, std::string>> entries;
  for (const auto& [name, file] : files) entries.emplace_back(name, quoted(file));
  const auto metadata =
      lines_of({{"total_parameters", std::to_string(total_parameters)}, {"total_size", std::to_string(total_size)}}, 2);
  return lines_of({{"metadata", metadata}, {"weight_map", lines_of(entries, 2)}}, 1) + "\n";
}

GRADACCUM_INLINE std::size_t safetensors_dtype_rank(std::string_view dtype) {
  const auto& all = safetensors_dtype_bits;
  return static_cast<std::size_t>(std::ranges::find(all, dtype, [](auto& known) { return known.first; }) - all.begin());
}

inline constexpr std::size_t max_safetensors_header = 100'000'000;  // bytes, as in the reference implementation

/// Throws the parts, texts and numbers, as one message unless the condition holds.
template <class... Parts>
void require_format(bool condition, const Parts&... parts) {
  const auto text_of = []<class Part>(const Part& part) {
    if constexpr (std::is_integral_v<Part>)
      return std::to_string(part);
    else
      return std::string_view(part);
  };
  if (!condition) throw std::runtime_error((std::string() + ... + std::string(text_of(parts))));
}

/// Reads the sizes or offsets of a tensor; `shown`: the beginning of messages.
GRADACCUM_INLINE std::vector<std::int64_t> whole_numbers_of(const Json& value, const std::string& shown) {
  require_format(value.is_array(), shown, " must be an array");
  std::vector<std::int64_t> numbers;
  for (auto& element : value) {
    require_format(element.is_number_unsigned() && element.get<std::uint64_t>() >> 63 == 0, shown,
                   " must have whole numbers from 0 to 2^63 - 1 only");
    numbers.push_back(element.get<std::int64_t>());
  }
  return numbers;
}

GRADACCUM_INLINE void check_size(const SafetensorsEntry& entry, const std::string& shown) {
  std::int64_t bits = safetensors_dtype_bits[safetensors_dtype_rank(entry.dtype)].second;
  bool is_empty = false;
  for (auto size : entry.shape) {
    is_empty = is_empty || size == 0;  // an empty tensor's strides are still products of the other sizes
    require_format(!__builtin_mul_overflow(bits, std::max<std::int64_t>(size, 1), &bits), shown,
                   " must have fewer than 2^63 bits");
  }
  if (is_empty) bits = 0;
  require_format(bits % 8 == 0, shown, " must end at a whole byte");
  const auto bytes = static_cast<std::uint64_t>(bits / 8);
  require_format(bytes == entry.end - entry.begin, shown, " must have the bytes of its shape and dtype, ", bytes,
                 ", got ", entry.end - entry.begin);
}

GRADACCUM_INLINE SafetensorsEntry safetensors_entry_of(const std::string& name, const Json& value,
                                                       const std::string& what) {
  const auto shown = what + ": the tensor " + in_quotes(name);
  require_format(name.size() <= 4096, shown, " must have a name of at most 4096 bytes, got ", name.size());
  require_format(value.is_object() && value.size() == 3 && value.contains("dtype") && value.contains("shape") &&
                     value.contains("data_offsets"),
                 shown, " must have dtype, shape and data_offsets, and nothing else");
  const auto& dtype = value.at("dtype");
  require_format(
      dtype.is_string() && safetensors_dtype_rank(dtype.get_ref<const std::string&>()) < safetensors_dtype_bits.size(),
      shown, " must have a dtype of safetensors, got ", one_line(dtype).substr(0, 60));
  SafetensorsEntry entry{.dtype = dtype.get<std::string>(),
                         .shape = whole_numbers_of(value.at("shape"), shown + ": shape")};
  require_format(entry.shape.size() <= 64, shown, " must have at most 64 dimensions, got ", entry.shape.size());
  const auto offsets = whole_numbers_of(value.at("data_offsets"), shown + ": data_offsets");
  require_format(offsets.size() == 2 && offsets[0] <= offsets[1], shown,
                 " must have a begin and an end that is not before");
  entry.begin = static_cast<std::uint64_t>(offsets[0]);
  entry.end = static_cast<std::uint64_t>(offsets[1]);
  check_size(entry, shown);
  return entry;
}

GRADACCUM_INLINE std::map<std::string, std::string> metadata_of(const Json& value, const std::string& what) {
  require_format(value.is_object(), what, ": __metadata__ must be an object");
  std::map<std::string, std::string> metadata;
  for (auto& [key, held] : value.get_ref<const Json::object_t&>()) {
    require_format(held.is_string(), what, ": __metadata__ must have texts only, got another value for ",
                   in_quotes(key));
    metadata.emplace_hint(metadata.end(), key, held.get_ref<const std::string&>());
  }
  return metadata;
}

/// Throws unless the tensors are all of the data, without gaps or overlaps.
GRADACCUM_INLINE void check_offsets(const std::map<std::string, SafetensorsEntry>& tensors, std::uint64_t data_size,
                                    const std::string& what) {
  using Named = const std::pair<const std::string, SafetensorsEntry>;
  std::vector<Named*> order;
  for (auto& named : tensors) order.push_back(&named);
  std::ranges::sort(order, {}, [](Named* named) { return std::pair(named->second.begin, named->second.end); });
  std::uint64_t end = 0;
  for (auto* named : order) {
    require_format(named->second.begin == end, what, ": the tensor ", in_quotes(named->first),
                   " must begin where the one before ends, at ", end, ", got ", named->second.begin);
    end = named->second.end;
  }
  require_format(end == data_size, what, ": its tensors must be all of its data, ", data_size, " bytes, got ", end);
}

GRADACCUM_INLINE SafetensorsHeader read_safetensors_header(std::string_view file, const std::string& what) {
  const auto size = safetensors_header_size(file.substr(0, 8), file.size(), what);
  auto header = parse_safetensors_header(file.substr(8, size), file.size() - 8 - size, what);
  header.data_begin = 8 + size;
  return header;
}

GRADACCUM_INLINE std::uint64_t safetensors_header_size(std::string_view first, std::uint64_t file_size,
                                                       const std::string& what) {
  require_format(first.size() == 8 && file_size >= 8, what, ": must have at least 8 bytes, got ", file_size);
  std::uint64_t size = 0;
  for (unsigned i = 0; i < 8; ++i) size |= std::uint64_t{static_cast<unsigned char>(first[i])} << (8 * i);
  require_format(size <= max_safetensors_header, what, ": its header must have at most 100000000 bytes, got ", size);
  require_format(size <= file_size - 8, what, ": its header must end with the file or before, got ", size, " bytes of ",
                 file_size - 8);
  return size;
}

GRADACCUM_INLINE SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_size,
                                                            const std::string& what) {
  require_format(text.size() <= max_safetensors_header, what, ": its header must have at most 100000000 bytes, got ",
                 text.size());
  require_format(text.starts_with('{'), what, ": its header must begin with {");
  SafetensorsHeader header;
  bool has_metadata = false;
  const auto take = [&](const std::string& name, const Json& value) {
    const bool is_metadata = name == "__metadata__";
    const bool is_new = is_metadata ? !std::exchange(has_metadata, true) : !header.tensors.contains(name);
    if (!is_new) name_twice_error(what, name);
    if (is_metadata) {
      header.metadata = metadata_of(value, what);
      return;
    }
    require_format(header.tensors.size() < 1'000'000, what, ": must have at most 1000000 tensors, got more");
    header.tensors.emplace(name, safetensors_entry_of(name, value, what));
  };
  const auto others = parse_json(text, 3, what, take);
  for (auto& [name, value] : others.get_ref<const Json::object_t&>()) take(name, value);  // refuses them
  check_offsets(header.tensors, data_size, what);
  return header;
}

/// Returns the header's JSON, padded with spaces so that the data begins at a multiple of 8.
GRADACCUM_INLINE std::string safetensors_json(const std::vector<NamedSafetensorsEntry>& tensors,
                                              const std::map<std::string, std::string>& metadata,
                                              const std::string& what) try {
  std::string text;
  const auto add = [&text](const std::string& name, const std::string& json) {
    text += (text.empty() ? "{" : ",") + Json(name).dump() + ":" + json;
  };
  if (!metadata.empty()) add("__metadata__", Json(metadata).dump());
  for (auto& [name, entry] : tensors)
    add(name, "{\"dtype\":\"" + entry.dtype + "\",\"shape\":" + Json(entry.shape).dump() +
                  ",\"data_offsets\":" + Json::array({entry.begin, entry.end}).dump() + "}");
  text += text.empty() ? "{}" : "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
} catch (const Json::type_error&) {
  format_error(what, "names and metadata must be UTF-8");
}

GRADACCUM_INLINE std::string lay_out_safetensors(std::vector<NamedSafetensorsEntry>& tensors,
                                                 const std::map<std::string, std::string>& metadata,
                                                 const std::string& what) {
  std::ranges::sort(tensors, {}, [](auto& named) {
    return std::pair(safetensors_dtype_rank(named.second.dtype), std::string_view(named.first));
  });
  std::uint64_t end = 0;
  for (auto& [name, entry] : tensors) {
    const auto size = entry.end - entry.begin;
    entry.begin = std::exchange(end, end + size);
    entry.end = end;
  }
  const auto text = safetensors_json(tensors, metadata, what);
  parse_safetensors_header(text, end, what);  // throws if it could not be read back
  std::string size(8, '\0');
  for (unsigned i = 0; i < 8; ++i) size[i] = static_cast<char>(text.size() >> (8 * i));
  return size + text;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
