// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "support/files.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Reads TensorBoard's event files by their specification, without code of the library.
namespace testing {

inline std::uint64_t little_endian(std::string_view bytes) {
  std::uint64_t number = 0;
  for (auto byte = bytes.rbegin(); byte != bytes.rend(); ++byte)
    number = number << 8 | static_cast<unsigned char>(*byte);
  return number;
}

/// Computes the CRC by definition, bit by bit, and masks it as TFRecord does.
inline std::uint32_t masked_checksum(std::string_view bytes) {
  std::uint32_t crc = 0xffffffff;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78 : 0);
  }
  return std::rotr(~crc, 15) + 0xa282ead8;
}

struct Records {
  std::vector<std::string> whole;  ///< records before the first damaged one
  bool all = true;                 ///< false if a record is damaged
};

inline Records records_of(std::string_view file) {
  Records records;
  while (!file.empty()) {
    const auto length = little_endian(file.substr(0, 8));
    records.all = file.size() >= 16 && masked_checksum(file.substr(0, 8)) == little_endian(file.substr(8, 4)) &&
                  length <= file.size() - 16 &&
                  masked_checksum(file.substr(12, length)) == little_endian(file.substr(12 + length, 4));
    if (!records.all) break;
    records.whole.emplace_back(file.substr(12, length));
    file.remove_prefix(16 + length);
  }
  return records;
}

/// A field of a message of Protocol Buffers.
struct Field {
  std::uint64_t number = 0;     ///< the bits of a number
  std::string_view bytes = {};  ///< a text, a list or a message
};

/// Returns fields by number, all values of repeated ones, in order. Throws if the bytes are not a message.
inline std::multimap<int, Field> fields_of(std::string_view message) {
  const auto take = [&](std::size_t bytes) {
    if (bytes > message.size()) throw std::runtime_error("a message ends too early");
    const auto taken = message.substr(0, bytes);
    message.remove_prefix(bytes);
    return taken;
  };
  const auto varint = [&] {
    std::uint64_t number = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      if (shift > 63) throw std::runtime_error("a number is too long");
      number |= std::uint64_t{byte & 0x7fU} << shift;
      if (byte < 0x80) return number;
    }
  };
  std::multimap<int, Field> fields;
  while (!message.empty()) {
    const auto key = varint();
    Field field;
    switch (key & 7) {
      case 0:
        field.number = varint();
        break;
      case 1:
        field.number = little_endian(take(8));
        break;
      case 2:
        field.bytes = take(varint());
        break;
      case 5:
        field.number = little_endian(take(4));
        break;
      default:
        throw std::runtime_error("a field of an unknown kind");
    }
    fields.emplace(static_cast<int>(key >> 3), field);
  }
  return fields;
}

/// Returns a field that occurs at most once; 0 and no bytes if it is missing.
inline Field field_of(const std::multimap<int, Field>& fields, int number) {
  if (fields.count(number) > 1) throw std::runtime_error("a field is there twice");
  const auto found = fields.find(number);
  return found == fields.end() ? Field{} : found->second;
}

inline double real_of(const std::multimap<int, Field>& fields, int number) {
  return std::bit_cast<double>(field_of(fields, number).number);
}

inline std::vector<double> reals_of(std::string_view bytes) {
  if (bytes.size() % 8 != 0) throw std::runtime_error("a list of no whole numbers");
  std::vector<double> numbers;
  for (; !bytes.empty(); bytes.remove_prefix(8))
    numbers.push_back(std::bit_cast<double>(little_endian(bytes.substr(0, 8))));
  return numbers;
}

struct Histogram {
  double min, max, num, sum, sum_squares;
  std::vector<double> limits, counts;
};

struct Event {
  double wall_time = 0;
  std::int64_t step = 0;
  std::string version = {}, tag = {};
  bool starts = false;  ///< a session begins
  std::optional<float> number = {};
  std::optional<Histogram> histogram = {};
  std::optional<std::string> text = {};
};

inline Histogram histogram_in(std::string_view message) {
  const auto fields = fields_of(message);
  return {real_of(fields, 1),
          real_of(fields, 2),
          real_of(fields, 3),
          real_of(fields, 4),
          real_of(fields, 5),
          reals_of(field_of(fields, 6).bytes),
          reals_of(field_of(fields, 7).bytes)};
}

inline std::string text_in(std::string_view tensor, std::string_view metadata) {
  const auto plugin = fields_of(field_of(fields_of(metadata), 1).bytes);
  const auto fields = fields_of(tensor);
  const auto size = fields_of(field_of(fields_of(field_of(fields, 2).bytes), 2).bytes);
  if (field_of(plugin, 1).bytes != "text" || field_of(fields, 1).number != 7 || field_of(size, 1).number != 1)
    throw std::runtime_error("not a tensor of one text, for the text plugin");
  return std::string(field_of(fields, 8).bytes);
}

inline Event event_of(std::string_view record) {
  const auto fields = fields_of(record);
  Event event;
  event.wall_time = real_of(fields, 1);
  event.step = static_cast<std::int64_t>(field_of(fields, 2).number);
  event.version = field_of(fields, 3).bytes;
  event.starts = field_of(fields_of(field_of(fields, 7).bytes), 1).number == 1;
  if (fields.count(5) == 0) return event;
  const auto value = fields_of(field_of(fields_of(field_of(fields, 5).bytes), 1).bytes);
  event.tag = field_of(value, 1).bytes;
  if (value.count(2) > 0) event.number = std::bit_cast<float>(static_cast<std::uint32_t>(field_of(value, 2).number));
  if (value.count(5) > 0) event.histogram = histogram_in(field_of(value, 5).bytes);
  if (value.count(8) > 0) event.text = text_in(field_of(value, 8).bytes, field_of(value, 9).bytes);
  return event;
}

inline std::vector<Event> events_of(std::string_view file) {
  std::vector<Event> events;
  for (auto& record : records_of(file).whole) events.push_back(event_of(record));
  return events;
}

/// Lists event files in TensorBoard's reading order.
inline std::vector<std::filesystem::path> event_files_in(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> files;
  for (auto& entry : std::filesystem::directory_iterator(directory)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

/// Reads all events of a directory, except those that a later session replaces. Like TensorBoard, treats the first
/// start as the first session's.
inline std::vector<Event> events_in(const std::filesystem::path& directory) {
  std::vector<Event> events;
  bool has_started = false;
  for (auto& path : event_files_in(directory))
    for (auto& event : events_of(text_of(path))) {
      if (event.starts && std::exchange(has_started, true))
        std::erase_if(events, [&](const Event& other) { return other.step >= event.step; });
      events.push_back(event);
    }
  return events;
}

using Curve = std::vector<std::pair<std::int64_t, float>>;  // steps and values

inline std::map<std::string, Curve> curves_in(const std::filesystem::path& directory) {
  std::map<std::string, Curve> curves;
  for (auto& event : events_in(directory))
    if (event.number) curves[event.tag].emplace_back(event.step, *event.number);
  return curves;
}

}  // namespace testing
