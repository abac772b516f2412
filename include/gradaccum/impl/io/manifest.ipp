// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/manifest.hpp>

#include <gradaccum/detail/io/safetensors_header.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <system_error>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string crc32_text(std::uint32_t crc) {
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", crc);
  return digits;
}

GRADACCUM_INLINE bool is_file_name(std::string_view name) {
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '-';
  };
  return !name.empty() && name.size() <= 255 && name.front() != '.' && name != manifest_name &&
         std::all_of(name.begin(), name.end(), is_plain);
}

GRADACCUM_INLINE std::string quoted(const std::string& text) {
  if (auto json = json_of(text)) return *std::move(json);
  throw std::runtime_error("manifest.json: texts and names must be UTF-8, got " + in_quotes(text));
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
  if (auto* const flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (auto* const whole = std::get_if<std::int64_t>(&value)) return std::to_string(*whole);
  const auto number = std::get<double>(value);
  if (std::isfinite(number)) return json_of(number);
  return lines_of({{"double", std::isnan(number) ? "\"nan\"" : number > 0 ? "\"inf\"" : "\"-inf\""}}, 3);
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
  return text.replace(text.find("00000000"), 8, crc32_text(crc32(text.data(), text.size())));
}

/// Turns untrusted JSON into a manifest.
class ManifestReader {
 public:
  ManifestReader(const std::string& what, std::string_view format) : what_(what), format_(format) {}

  Manifest read(std::string_view text) const {
    if (text.size() > Manifest::max_bytes)
      fail("must have at most " + std::to_string(Manifest::max_bytes) + " bytes", Json{std::uint64_t{text.size()}});
    const auto json = parse_json(text, 3, what_);
    check_crc32(text_in(json, "crc32"), text);
    check_format(json);
    only(json, {"crc32", "format", "format_version", "gradaccum", "libtorch", "files", "values"});
    Manifest manifest;
    manifest.format = format_;
    manifest.gradaccum = text_in(json, "gradaccum");
    manifest.libtorch = text_in(json, "libtorch");
    for (const auto& [name, file] : object_in(json, "files")) manifest.files[name] = file_of(name, file);
    for (const auto& [name, value] : object_in(json, "values")) manifest.values[name] = value_of(name, value);
    return manifest;
  }

 private:
  [[noreturn]] void fail(const std::string& requirement, const Json& got) const {
    auto shown = got.text();
    if (shown.size() > 200) shown = shown.substr(0, 200) + "...";
    throw std::runtime_error(what_ + ": " + requirement + ", got " + shown);
  }

  const Json::Object& object(const Json& json, const std::string& what = "") const {
    if (const auto* const held = json.as<Json::Object>()) return *held;
    fail(what + "must be an object", json);
  }
  const Json& in(const Json& json, const std::string& name) const {
    const auto found = object(json).find(name);
    if (found == object(json).end()) fail("must have an entry \"" + name + "\"", json);
    return found->second;
  }
  const Json::Object& object_in(const Json& json, const std::string& name) const {
    return object(in(json, name), "\"" + name + "\" ");
  }
  const std::string& text_in(const Json& json, const std::string& name) const {
    const auto& found = in(json, name);
    if (const auto* const text = found.as<std::string>()) return *text;
    fail("\"" + name + "\" must be a text", found);
  }
  void only(const Json& json, std::initializer_list<std::string_view> names) const {
    for (const auto& [name, value] : object(json))
      if (std::find(names.begin(), names.end(), name) == names.end())
        fail("must have no other entries than this gradaccum knows", Json{name});
  }

  std::uint32_t crc32_in(const Json& json) const {
    const auto& digits = text_in(json, "crc32");
    std::uint32_t crc = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), crc, 16);
    if (crc32_text(crc) != digits) fail("\"crc32\" must be eight digits 0-9 a-f", Json{digits});
    return crc;
  }

  void check_crc32(const std::string& digits, std::string_view text) const {
    const auto at = text.find(digits);
    if (at == text.npos || digits.size() != 8) fail("\"crc32\" must be eight digits 0-9 a-f", Json{digits});
    const auto before = crc32("00000000", 8, crc32(text.data(), at));
    const auto computed = crc32_text(crc32(text.data() + at + 8, text.size() - at - 8, before));
    if (computed != digits) fail("must be as it was written, with the CRC-32 " + digits, Json{computed});
  }

  void check_format(const Json& json) const {
    const auto& format = text_in(json, "format");
    if (format != format_) fail("\"format\" must be \"" + format_ + "\"", Json{format});
    const auto& version = in(json, "format_version");
    const auto* const number = version.as<std::uint64_t>();
    if (!number || *number != 1)
      throw std::runtime_error(what_ + ": \"format_version\" must be 1, got " + version.text() +
                               ": read it with the gradaccum that wrote it, or a newer one");
  }

  Manifest::File file_of(const std::string& name, const Json& json) const {
    if (!is_file_name(name)) fail("\"files\" must have plain names (A-Z a-z 0-9 _ . -, no dot in front)", Json{name});
    const auto& bytes = in(json, "bytes");
    const auto* const number = bytes.as<std::uint64_t>();
    if (!number) fail("the \"bytes\" of " + name + " must be a whole number >= 0", bytes);
    only(json, {"bytes", "crc32"});
    return {*number, crc32_in(json)};
  }

  Manifest::Value value_of(const std::string& name, const Json& json) const {
    if (const auto* const flag = json.as<bool>()) return *flag;
    if (const auto* const text = json.as<std::string>()) return *text;
    if (const auto* const number = json.as<double>()) return *number;
    if (const auto* const negative = json.as<std::int64_t>()) return *negative;
    const auto* const whole = json.as<std::uint64_t>();
    if (whole && *whole >> 63 == 0) return static_cast<std::int64_t>(*whole);
    if (json.as<Json::Object>()) return not_finite(name, json);
    fail("the value " + in_quotes(name) + " must be true or false, a 64-bit integer, a double or a text", json);
  }

  double not_finite(const std::string& name, const Json& json) const {
    only(json, {"double"});
    const auto& text = text_in(json, "double");
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text != "-inf") fail("the value " + in_quotes(name) + " must be \"nan\", \"inf\" or \"-inf\"", json);
    return -std::numeric_limits<double>::infinity();
  }

  const std::string& what_;
  const std::string format_;
};

GRADACCUM_INLINE Manifest manifest_of(std::string_view text, const std::string& what, std::string_view format) {
  return ManifestReader(what, format).read(text);
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
  text.resize(file.read(text.data(), text.size()));
  return manifest_of(text, path.string(), format);
}

inline constexpr std::size_t chunk_of_listed_file = 1 << 20;

GRADACCUM_INLINE ListedFile::ListedFile(const std::filesystem::path& path, const Manifest::File& listed)
    : path_(path), listed_(listed), file_(path), left_(listed.bytes) {
  if (file_.bytes() != listed.bytes) fail(std::to_string(listed.bytes) + " bytes", std::to_string(file_.bytes()));
}

GRADACCUM_INLINE void ListedFile::read(void* data, std::uint64_t size) {
  for (auto* bytes = static_cast<char*>(data); size > 0;) {
    const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(size, chunk_of_listed_file));
    if (file_.read(bytes, wanted) != wanted) fail(std::to_string(listed_.bytes) + " bytes", "fewer");
    crc_ = crc32(bytes, wanted, crc_);  // while they are in the cache
    bytes += wanted;
    size -= wanted;
    left_ -= wanted;
  }
}

GRADACCUM_INLINE void ListedFile::read(std::span<const std::span<std::byte>> pieces, const ForEach& for_each) {
  std::vector<std::uint64_t> places{listed_.bytes - left_};
  for (auto piece : pieces) places.push_back(places.back() + piece.size());
  if (places.back() != listed_.bytes) fail(std::to_string(listed_.bytes) + " bytes", std::to_string(places.back()));
  std::vector<std::uint32_t> crcs(pieces.size());
  for_each(pieces.size(), [&](std::size_t i) { crcs[i] = read_piece(places[i], pieces[i]); });
  for (std::size_t i = 0; i < pieces.size(); ++i) crc_ = crc32_of_both(crc_, crcs[i], pieces[i].size());
  left_ = 0;
}

GRADACCUM_INLINE void ListedFile::check() const {
  if (crc_ != listed_.crc32) fail("the CRC-32 " + crc32_text(listed_.crc32), crc32_text(crc_));
}

GRADACCUM_INLINE void ListedFile::fail(const std::string& requirement, const std::string& got) const {
  throw std::runtime_error(path_.string() + ": must have " + requirement + ", as the manifest says, got " + got);
}

GRADACCUM_INLINE std::uint32_t ListedFile::read_piece(std::uint64_t place, std::span<std::byte> piece) const {
  std::uint32_t crc = 0;
  while (!piece.empty()) {
    const auto now = piece.first(std::min(piece.size(), chunk_of_listed_file));
    if (file_.read_at(place, now.data(), now.size()) != now.size())
      fail(std::to_string(listed_.bytes) + " bytes", "fewer");
    crc = crc32(now.data(), now.size(), crc);
    place += now.size();
    piece = piece.subspan(now.size());
  }
  return crc;
}

GRADACCUM_INLINE void check_file(const std::filesystem::path& path, const Manifest::File& listed) {
  ListedFile file(path, listed);
  std::vector<char> chunk(chunk_of_listed_file);
  while (file.left() > 0) file.read(chunk.data(), std::min<std::uint64_t>(file.left(), chunk.size()));
  file.check();
}

GRADACCUM_INLINE void check_no_others(const std::filesystem::path& folder, const Manifest& manifest) {
  for (const auto& name : names_in(folder))
    if (name != manifest_name && manifest.files.count(name) == 0)
      throw std::runtime_error((folder / name).string() + ": must be listed in " + manifest_name + ", or not be there");
}

GRADACCUM_INLINE void check_files(const std::filesystem::path& folder, const Manifest& manifest) {
  check_no_others(folder, manifest);
  for (const auto& [name, file] : manifest.files) check_file(folder / name, file);
}

GRADACCUM_INLINE std::string StateName::text() const {
  auto digits = std::to_string(step);
  digits.insert(0, digits.size() < 6 ? 6 - digits.size() : 0, '0');
  return "step-" + digits + (repeat > 0 ? "." + std::to_string(repeat) : "");
}

GRADACCUM_INLINE std::optional<StateName> StateName::of(std::string_view text) {
  StateName name;
  if (!text.starts_with("step-")) return {};
  const auto* const end = text.data() + text.size();
  const auto step = std::from_chars(text.data() + 5, end, name.step);
  if (step.ptr != end && *step.ptr == '.') std::from_chars(step.ptr + 1, end, name.repeat);
  const bool has_next = name.repeat < std::numeric_limits<std::int64_t>::max();
  if (name.step < 0 || !has_next || name.text() != text) return {};
  return name;
}

GRADACCUM_INLINE bool of_one_step(const std::filesystem::path& one, const std::filesystem::path& other) {
  const auto first = StateName::of(one.filename().string()), second = StateName::of(other.filename().string());
  return first && second && first->step == second->step;
}

/// Locks the directory for this writer until destruction or the end of the process.
class StateLock {
 public:
  explicit StateLock(const std::filesystem::path& path) : directory_(path, O_RDONLY | O_DIRECTORY) {
    if (directory_.number() < 0) file_error(path, "must be a directory that can be opened", errno);
    // Other errors mean a file system without locks; there the user has to ensure that there is one writer.
    if (::flock(directory_.number(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      throw std::runtime_error(path.string() + ": must have one writer, and is being written to by another process " +
                               "or thread: wait for it, or choose another directory");
  }

 private:
  Descriptor directory_;
};

GRADACCUM_INLINE std::vector<StateDirectory::State> StateDirectory::finished() const {
  std::vector<State> states;
  std::error_code ignored;
  for (const auto& name : names_in(path_))
    if (const auto state = StateName::of(name); state && std::filesystem::is_directory(path_ / name, ignored))
      states.push_back({*state, path_ / name});
  std::sort(states.begin(), states.end());
  return states;
}

GRADACCUM_INLINE std::filesystem::path StateDirectory::add(
    std::int64_t step, const std::function<void(const std::filesystem::path&)>& write) {
  if (step < 0) throw std::runtime_error(path_.string() + ": step must be >= 0, got " + std::to_string(step));
  make_directory(path_);
  const StateLock lock(path_);
  remove_leftovers();
  const auto path = name_for(step), unfinished = temporary_name(path);
  if (::mkdir(unfinished.c_str(), 0777) != 0) file_error(unfinished, "must be made", errno);
  try {
    write(unfinished);
    sync_directory(unfinished);
    if (std::rename(unfinished.c_str(), path.c_str()) != 0) file_error(unfinished, "must be given its name", errno);
  } catch (...) {
    std::error_code ignored;  // a later sweep removes what cannot be removed now
    std::filesystem::remove_all(unfinished, ignored);
    throw;
  }
  try {
    sync_directory(path_);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path.string() +
                             ": is written, but might not be there after a power failure: " + error.what());
  }
  return path;
}

/// Picks a name after all states of that step, so that the newest state sorts last.
GRADACCUM_INLINE std::filesystem::path StateDirectory::name_for(std::int64_t step) const {
  StateName name{step, 0};
  for (const auto& other : names_in(path_))
    if (const auto taken = StateName::of(other); taken && taken->step == step)
      name.repeat = std::max(name.repeat, taken->repeat + 1);
  return path_ / name.text();
}

GRADACCUM_INLINE std::filesystem::path StateDirectory::replace(const std::filesystem::path& older,
                                                               const std::filesystem::path& newer) {
  const StateLock lock(path_);
  if (std::rename(older.c_str(), temporary_name(older).c_str()) != 0) file_error(older, "must be removed", errno);
  if (std::rename(newer.c_str(), older.c_str()) != 0) file_error(newer, "must be given its name", errno);
  remove_leftovers();
  return older;
}

GRADACCUM_INLINE void StateDirectory::keep_last(std::int64_t count, const std::vector<std::filesystem::path>& others) {
  if (count < 1) throw std::runtime_error(path_.string() + ": must keep >= 1 states, got " + std::to_string(count));
  if (finished().empty()) return;
  const StateLock lock(path_);
  const auto states = finished();
  for (std::size_t i = 0; i + static_cast<std::uint64_t>(count) < states.size(); ++i) {
    const auto& path = states[i].path;
    if (std::find(others.begin(), others.end(), path) != others.end()) continue;
    if (std::rename(path.c_str(), temporary_name(path).c_str()) != 0) file_error(path, "must be removed", errno);
  }
  remove_leftovers();
}

GRADACCUM_INLINE void StateDirectory::sweep() const {
  if (leftovers().empty()) return;
  const StateLock lock(path_);
  remove_leftovers();
}

GRADACCUM_INLINE std::vector<std::filesystem::path> StateDirectory::leftovers() const {
  std::vector<std::filesystem::path> paths;
  for (const auto& name : names_in(path_))
    if (const auto at = name.find(".tmp-"); at != name.npos && StateName::of(std::string_view(name).substr(0, at)))
      paths.push_back(path_ / name);
  return paths;
}

GRADACCUM_INLINE void StateDirectory::remove_leftovers() const {
  const auto paths = leftovers();
  if (paths.empty()) return;
  // Otherwise a power failure could bring back the name of a removed state without all of its files.
  sync_directory(path_);
  std::error_code ignored;  // network file systems keep files that are being read; the next sweep removes them
  for (const auto& path : paths) std::filesystem::remove_all(path, ignored);
}

[[noreturn]] GRADACCUM_INLINE void refuse_pickle(const std::filesystem::path& path) {
  throw std::runtime_error(
      path.string() +
      ": must be in safetensors files; a pickle can run any program, and is not read. This line makes "
      "model.safetensors of it, in its folder:\n"
      "python3 -c \"import glob, torch, safetensors.torch; safetensors.torch.save_file("
      "{n: t.clone(memory_format=torch.contiguous_format) for f in glob.glob('pytorch_model*.bin') "
      "for n, t in torch.load(f, map_location='cpu', weights_only=True).items()}, "
      "'model.safetensors', {'format': 'pt'})\"");
}

GRADACCUM_INLINE std::filesystem::path weights_path(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto is_there = [&](const char* name) {  // true also for a dangling link, so that errors name it
    return std::filesystem::exists(std::filesystem::symlink_status(path / name, ignored));
  };
  constexpr const char* pickles[] = {"pytorch_model.bin", "pytorch_model.bin.index.json"};
  if (!std::filesystem::is_directory(path, ignored)) {
    for (auto* name : pickles)
      if (path.filename() == name) refuse_pickle(path);
    return path;
  }
  for (auto* name : {weights_name, weights_index_name})
    if (is_there(name)) return path / name;
  for (auto* name : pickles)
    if (is_there(name)) refuse_pickle(path / name);
  throw std::runtime_error(path.string() + ": must have " + weights_name + " or " + weights_index_name +
                           ", got a folder without them; a file of another name is read by its own path");
}

[[noreturn]] GRADACCUM_INLINE void index_error(const std::string& what, const std::string& requirement,
                                               const std::string& got) {
  throw std::runtime_error(what + ": " + requirement + ", got " + got);
}

GRADACCUM_INLINE WeightMap read_weights_index(std::string_view text, const std::string& what) {
  constexpr std::size_t max_bytes = 100'000'000, max_tensors = 1'000'000, max_name = 4096, max_depth = 8;
  if (text.size() > max_bytes) index_error(what, "must have at most 100000000 bytes", std::to_string(text.size()));
  const auto json = parse_json(text, max_depth, what);
  const auto* const index = json.as<Json::Object>();
  if (!index) index_error(what, "must be an object", json.kind());
  const auto found = index->find("weight_map");
  const auto* const map = found == index->end() ? nullptr : found->second.as<Json::Object>();
  if (!map)
    index_error(what, "must have an object \"weight_map\"", found == index->end() ? "none" : found->second.kind());
  if (map->size() > max_tensors) index_error(what, "must have at most 1000000 tensors", std::to_string(map->size()));
  WeightMap files;
  for (const auto& [name, value] : *map) {
    if (name.size() > max_name)
      index_error(what, "a tensor's name must have at most 4096 bytes", std::to_string(name.size()));
    const auto* const file = value.as<std::string>();
    if (!file) index_error(what, "the file of " + in_quotes(name) + " must be a text", value.kind());
    // The name must not leave the folder or refer to a pickle.
    if (!is_file_name(*file) || !file->ends_with(".safetensors"))
      index_error(what,
                  "the file of " + in_quotes(name) +
                      " must have a plain name (A-Z a-z 0-9 _ . -, no dot in front) that ends in .safetensors",
                  in_quotes(*file));
    files.emplace_hint(files.end(), name, *file);
  }
  return files;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
