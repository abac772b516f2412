// SPDX-License-Identifier: Apache-2.0
// Writes TensorBoard's event files.
#pragma once

#include <gradaccum/summary_writer.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns the beginnings of TensorFlow's buckets: ... -1.1e-12, -1e-12, 0, 1e-12, 1.1e-12, ... up to 1e20.
GRADACCUM_INLINE const std::vector<double>& bucket_limits() {
  static const auto limits = [] {
    std::vector<double> all{0};
    for (double limit = 1e-12; limit < 1e20; limit *= 1.1) all.insert(all.end(), {-limit, limit});
    std::ranges::sort(all);
    return all;
  }();
  return limits;
}

/// Returns the elements in one dimension, without a copy if possible.
GRADACCUM_INLINE at::Tensor elements_of(const at::Tensor& tensor) {
  auto elements = tensor.detach();
  if (elements.is_sparse()) elements = elements.coalesce().values();
  if (elements.layout() != at::kStrided) elements = elements.to_dense();
  if (elements.is_complex()) elements = at::view_as_real(elements.resolve_conj());
  return elements.reshape({-1});
}

/// Counts float64 numbers on the CPU. counts[i] is how many have i limits at or below them.
GRADACCUM_INLINE void count_numbers(const at::Tensor& numbers, std::vector<double>& counts, ValueHistogram& histogram) {
  const auto& limits = bucket_limits();
  const auto all = at::from_blob(const_cast<double*>(limits.data()), {static_cast<std::int64_t>(limits.size())},
                                 at::TensorOptions(at::kDouble));
  const auto buckets = at::bucketize(numbers, all, /*out_int32=*/true, /*right=*/true);
  const auto* const bucket = buckets.const_data_ptr<int>();
  const auto* const number = numbers.const_data_ptr<double>();
  for (std::int64_t i = 0; i < numbers.numel(); ++i) {
    if (!detail::is_finite(number[i])) {
      ++histogram.others;
      continue;
    }
    ++counts[static_cast<std::size_t>(bucket[i])];
    ++histogram.numbers;
    histogram.min = std::min(histogram.min, number[i]);
    histogram.max = std::max(histogram.max, number[i]);
    histogram.sum += number[i];
    histogram.sum_of_squares += number[i] * number[i];
  }
}

/// Keeps the buckets from the one before the first non-empty one, whose beginning is the former's limit, to the last.
GRADACCUM_INLINE void keep_used_buckets(const std::vector<double>& counts, ValueHistogram& histogram) {
  const auto& limits = bucket_limits();
  std::size_t first = 0, last = counts.size() - 1;
  while (counts[first] == 0) ++first;
  while (counts[last] == 0) --last;
  for (auto i = first > 0 ? first - 1 : 0; i <= last; ++i) {
    histogram.limits.push_back(i == limits.size() ? histogram.max : limits[i]);
    histogram.numbers_below.push_back(counts[i]);
  }
}

GRADACCUM_INLINE ValueHistogram histogram_of(const at::Tensor& tensor, double factor) {
  constexpr std::int64_t piece = 1 << 18;
  const at::NoGradGuard no_grad;
  const auto elements = elements_of(tensor);
  ValueHistogram histogram;
  std::vector<double> counts(bucket_limits().size() + 1);
  for (std::int64_t begin = 0; begin < elements.numel(); begin += piece) {
    auto numbers = elements.narrow(0, begin, std::min(piece, elements.numel() - begin)).to(at::kCPU).to(at::kDouble);
    count_numbers((factor == 1 ? numbers : numbers.mul(factor)).contiguous(), counts, histogram);
  }
  if (histogram.numbers > 0) keep_used_buckets(counts, histogram);
  return histogram;
}

/// Returns the number's lowest byte first, as in Protocol Buffers and TensorFlow's records.
GRADACCUM_INLINE std::string little_endian(std::uint64_t number, int bytes) {
  std::string text;
  for (; bytes > 0; --bytes, number >>= 8) text += static_cast<char>(number & 0xff);
  return text;
}

// A message of Protocol Buffers (proto3) is the text of its fields, in the order of their numbers. Readers take 0 for a
// missing number, so the official libraries omit zeros, except in a oneof.

GRADACCUM_INLINE std::string varint(std::uint64_t number) {
  std::string text;
  for (; number >= 0x80; number >>= 7) text += static_cast<char>((number & 0x7f) | 0x80);
  return text += static_cast<char>(number);
}

GRADACCUM_INLINE std::string whole_field(unsigned field, std::int64_t number) {
  return number == 0 ? "" : varint(field << 3) + varint(static_cast<std::uint64_t>(number));
}

/// Writes -0, unlike 0.
GRADACCUM_INLINE std::string real_field(unsigned field, double number) {
  const auto bits = std::bit_cast<std::uint64_t>(number);
  return bits == 0 ? "" : varint(field << 3 | 1) + little_endian(bits, 8);
}

/// Returns a field that is a text, or another message.
GRADACCUM_INLINE std::string text_field(unsigned field, std::string_view text) {
  return (varint(field << 3 | 2) + varint(text.size())).append(text);
}

GRADACCUM_INLINE std::string reals_field(unsigned field, const std::vector<double>& numbers) {
  std::string list;
  for (const double number : numbers) list += little_endian(std::bit_cast<std::uint64_t>(number), 8);
  return text_field(field, list);
}

GRADACCUM_INLINE std::string begun_event(double time, std::int64_t step) {
  return real_field(1, time) + whole_field(2, step);
}

GRADACCUM_INLINE std::string summary_event(double time, std::int64_t step, std::string_view tag,
                                           const std::string& value) {
  return begun_event(time, step) + text_field(5, text_field(1, text_field(1, as_utf8(tag)) + value));
}

GRADACCUM_INLINE std::string scalar_event(double time, std::int64_t step, std::string_view tag, float value) {
  return summary_event(time, step, tag, varint(2 << 3 | 5) + little_endian(std::bit_cast<std::uint32_t>(value), 4));
}

inline constexpr std::string_view event_file_prefix = "events.out.tfevents.";
inline constexpr std::size_t event_time_digits = 10;  // equal in all names, as these are compared as strings

/// Returns the seconds since 1970.
GRADACCUM_INLINE double event_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Returns a time later than all in the names of the directory's files, even if two start in one second or the clock
/// was set back.
GRADACCUM_INLINE std::int64_t time_of_next_event_file(const std::filesystem::path& directory) {
  auto time = static_cast<std::int64_t>(event_time());
  for (auto& name : names_in(directory)) {
    const auto digits =
        name.starts_with(event_file_prefix) ? name.substr(event_file_prefix.size(), event_time_digits) : "";
    std::int64_t other = 0;
    const auto* const end = digits.data() + digits.size();
    if (std::from_chars(digits.data(), end, other).ptr == end) time = std::max(time, other + 1);
  }
  return std::min<std::int64_t>(time, 9'999'999'999);
}

GRADACCUM_INLINE std::string host_name() {
  auto host = machine_name();
  if (host.empty()) return "localhost";
  for (char& letter : host)
    if (plain_characters.find(letter) == plain_characters.npos) letter = '_';
  return host;
}

/// Returns TensorFlow's masked checksum, for bytes that may contain checksums.
GRADACCUM_INLINE std::string masked_crc32c(std::string_view text) {
  return little_endian(std::rotr(crc32c(text.data(), text.size()), 15) + 0xa282ead8, 4);
}

/// Returns the size of the whole records in the first `size` bytes.
GRADACCUM_INLINE std::size_t bytes_of_whole_records(std::string_view records, std::size_t size) {
  std::size_t end = 0;
  while (end + 16 <= size) {
    std::uint64_t length = 0;
    for (std::size_t i = 8; i > 0; --i) length = length << 8 | static_cast<unsigned char>(records[end + i - 1]);
    if (length > size - end - 16) break;
    end += 16 + length;
  }
  return end;
}

/// A new TensorBoard file of serialized Events, framed with lengths and checksums like TensorFlow's records.
///
/// Readers take the files of a directory in the order of their names and do not return to one, so the name sorts after
/// all existing ones. Records are buffered in memory and written together. A record that could not be written, for
/// example because the disk is full, stays in the buffer, and its bytes in the file are cut off.
class EventFile {
 public:
  /// Creates the directory if needed. Records wait no longer than `flush_every`, as long as others follow.
  EventFile(const std::filesystem::path& directory, std::chrono::duration<double> flush_every)
      : flush_every_(flush_every) {
    make_directory(directory);
    const auto time = time_of_next_event_file(directory);
    for (int number = 0; !descriptor_ || !*descriptor_; ++number) {
      if (descriptor_ && last_error() != std::errc::file_exists)  // that is another thread's file
        file_error(path_, "must be a new file that can be created", last_error());
      path_ = directory / fmt::format("{}{:0{}}.{}.{}.{}", event_file_prefix, time, event_time_digits, host_name(),
                                      process_id(), number);
      descriptor_.emplace(path_, Descriptor::Open::new_file);
    }
  }
  EventFile& operator=(EventFile&&) = delete;

  void add(std::string_view record) {
    constexpr std::size_t much = 1 << 20;
    auto framed = little_endian(record.size(), 8);
    framed.append(masked_crc32c(framed)).append(record).append(masked_crc32c(record));
    waiting_ += framed;
    if (waiting_.size() >= much || Clock::now() - flushed_ >= flush_every_) flush();
  }

  void flush() {
    flushed_ = Clock::now();
    if (!cut_off_what_is_torn()) file_error(path_, "must be cut off after its last whole record", last_error());
    std::size_t written = 0;
    const auto keep = c10::make_scope_exit([&] { keep_whole_records(written); });
    while (written < waiting_.size()) {
      const auto now = descriptor_->write(waiting_.data() + written, waiting_.size() - written);
      if (now == 0) file_error(path_, "must be written to", last_error());
      written += now;
    }
  }

  const std::filesystem::path& path() const { return path_; }

 private:
  using Clock = std::chrono::steady_clock;

  /// Keeps the whole records among the first `written` buffered bytes, which are in the file, and cuts off the rest.
  void keep_whole_records(std::size_t written) {
    const auto whole = bytes_of_whole_records(waiting_, written);
    whole_ += whole;
    waiting_.erase(0, whole);
    is_torn_ = written > whole;
    cut_off_what_is_torn();
  }

  /// Returns true if no torn record is left.
  bool cut_off_what_is_torn() {
    is_torn_ = is_torn_ && !descriptor_->cut(whole_);
    return !is_torn_;
  }

  std::filesystem::path path_;
  std::optional<Descriptor> descriptor_;
  std::chrono::duration<double> flush_every_;
  Clock::time_point flushed_ = Clock::now();
  std::string waiting_;      // whole records
  std::uint64_t whole_ = 0;  // bytes of whole records in the file
  bool is_torn_ = false;     // the file has part of another record
};

GRADACCUM_INLINE bool event_files_have(const std::filesystem::path& directory, std::int64_t step,
                                       std::string_view tag) {
  const auto event = scalar_event(1, step, tag, 0);  // without its time at the beginning and its value at the end:
  const auto bytes = event.substr(1 + sizeof(double), event.size() - 1 - sizeof(double) - sizeof(float));
  for (auto& name : names_in(directory))
    if (name.starts_with(event_file_prefix) &&
        MappedFile(directory / name).text().find(bytes) != std::string_view::npos)
      return true;
  return false;
}

/// Returns the number of bytes of the first character; 0 if it is cut off, overlong, a surrogate or above U+10FFFF.
GRADACCUM_INLINE std::size_t utf8_character_bytes(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const auto bytes = first < 0x80 ? 1 : static_cast<std::size_t>(std::countl_one(first));
  if (first >> 6 == 2 || bytes > 4 || bytes > text.size()) return 0;
  auto point = bytes == 1 ? std::uint32_t{first} : first & (0x7fU >> bytes);
  for (const char letter : text.substr(1, bytes - 1)) {
    const auto next = static_cast<unsigned char>(letter);
    if (next >> 6 != 2) return 0;
    point = point << 6 | (next & 0x3fU);
  }
  constexpr std::array<std::uint32_t, 5> least{0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = point >= 0xd800 && point < 0xe000;
  return point >= least[bytes] && !is_surrogate && point <= 0x10ffff ? bytes : 0;
}

GRADACCUM_INLINE std::string as_utf8(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const auto bytes = utf8_character_bytes(text);
    if (bytes > 0) result += text.substr(0, bytes);
    if (bytes == 0) result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    text.remove_prefix(bytes > 0 ? bytes : 1);
  }
  return result;
}

GRADACCUM_INLINE std::string_view checked_tag(std::string_view tag) {
  TORCH_CHECK(!tag.empty(), "SummaryWriter: a tag must not be empty");
  return tag;
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE SummaryWriter::SummaryWriter(const SummaryWriterOptions& options) {
  const auto seconds = options.flush_every.count();
  TORCH_CHECK(!options.directory.empty(), "SummaryWriter: directory must be given");
  TORCH_CHECK(seconds >= 0, "SummaryWriter: flush_every must be >= 0 seconds, got ", seconds);
  file_ = std::make_unique<detail::EventFile>(options.directory, options.flush_every);
  file_->add(detail::begun_event(detail::event_time(), 0) + detail::text_field(3, "brain.Event:2"));
  // A START record makes readers discard this and later steps of other files: TensorBoard itself from the second start
  // in a directory on, other readers at each.
  for (int starts = options.purge_step ? 2 : 0; starts > 0; --starts)
    file_->add(detail::begun_event(detail::event_time(), *options.purge_step) +
               detail::text_field(7, detail::whole_field(1, /*START=*/1)));
  file_->flush();  // reports a full disk now
}

GRADACCUM_INLINE SummaryWriter::~SummaryWriter() {
  try {
    flush();
  } catch (const std::exception& error) {
    TORCH_WARN("SummaryWriter: the last numbers were not written: ", error.what());
  }
}

GRADACCUM_INLINE void SummaryWriter::add_scalar(std::string_view tag, double value, std::int64_t step) {
  file_->add(detail::scalar_event(detail::event_time(), step, detail::checked_tag(tag), static_cast<float>(value)));
}

GRADACCUM_INLINE void SummaryWriter::add_histogram(std::string_view tag, const at::Tensor& tensor, std::int64_t step) {
  TORCH_CHECK(tensor.defined(), "SummaryWriter: a histogram must be of a tensor, got an undefined one for ", tag);
  add(tag, detail::histogram_of(tensor), step);
}

GRADACCUM_INLINE void SummaryWriter::add(std::string_view tag, const detail::ValueHistogram& histogram,
                                         std::int64_t step) {
  detail::checked_tag(tag);
  if (histogram.numbers > 0) {
    using detail::real_field, detail::reals_field;
    const auto message = real_field(1, histogram.min) + real_field(2, histogram.max) +
                         real_field(3, static_cast<double>(histogram.numbers)) + real_field(4, histogram.sum) +
                         real_field(5, histogram.sum_of_squares) + reals_field(6, histogram.limits) +
                         reals_field(7, histogram.numbers_below);
    file_->add(detail::summary_event(detail::event_time(), step, tag, detail::text_field(5, message)));
  }
  if (histogram.others > 0) add_scalar(std::string(tag) + "/not_finite", static_cast<double>(histogram.others), step);
}

/// Makes a tensor of one text, which the text plugin shows.
GRADACCUM_INLINE void SummaryWriter::add_text(std::string_view tag, std::string_view text, std::int64_t step) {
  using detail::text_field, detail::whole_field;
  constexpr std::int64_t texts = 7;
  const auto shape = text_field(2, whole_field(1, 1));
  const auto tensor = whole_field(1, texts) + text_field(2, shape) + text_field(8, detail::as_utf8(text));
  const auto metadata = text_field(1, text_field(1, "text"));
  file_->add(detail::summary_event(detail::event_time(), step, std::string(detail::checked_tag(tag)) + "/text_summary",
                                   text_field(8, tensor) + text_field(9, metadata)));
}

GRADACCUM_INLINE void SummaryWriter::flush() { file_->flush(); }

GRADACCUM_INLINE const std::filesystem::path& SummaryWriter::path() const { return file_->path(); }

}  // namespace gradaccum

#undef GRADACCUM_INLINE
