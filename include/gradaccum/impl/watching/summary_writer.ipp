// SPDX-License-Identifier: Apache-2.0
// Writes TensorBoard's event files.
#pragma once

#include <gradaccum/detail/watching/event_file.hpp>
#include <gradaccum/summary_writer.hpp>

#include <gradaccum/detail/kernels/crc32.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns the beginnings of TensorFlow's buckets: ... -1.1e-12, -1e-12, 0, 1e-12, 1.1e-12, ... up to 1e20.
GRADACCUM_INLINE const std::vector<double>& bucket_limits() {
  static const auto limits = [] {
    std::vector<double> above;
    for (double limit = 1e-12; limit < 1e20; limit *= 1.1) above.push_back(limit);
    std::vector<double> all(above.rbegin(), above.rend());
    for (double& limit : all) limit = -limit;
    all.push_back(0);
    all.insert(all.end(), above.begin(), above.end());
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

/// Counts float64 numbers on the CPU. counts[i] is the number of those with i limits at or below them.
GRADACCUM_INLINE void count_numbers(const at::Tensor& numbers, std::vector<double>& counts, ValueHistogram& histogram) {
  const auto& limits = bucket_limits();
  const auto all = at::from_blob(const_cast<double*>(limits.data()), {static_cast<std::int64_t>(limits.size())},
                                 at::TensorOptions(at::kDouble));
  const auto buckets = at::bucketize(numbers, all, /*out_int32=*/true, /*right=*/true);
  const auto* const bucket = buckets.const_data_ptr<int>();
  const auto* const number = numbers.const_data_ptr<double>();
  for (std::int64_t i = 0; i < numbers.numel(); ++i) {
    if (!std::isfinite(number[i])) {
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
  const auto is_used = [](double count) { return count > 0; };
  const auto first = std::find_if(counts.begin(), counts.end(), is_used) - counts.begin();
  const auto last = counts.rend() - std::find_if(counts.rbegin(), counts.rend(), is_used) - 1;
  for (auto i = std::max<std::ptrdiff_t>(first - 1, 0); i <= last; ++i) {
    const auto bucket = static_cast<std::size_t>(i);
    const bool is_above_all = bucket == bucket_limits().size();
    histogram.limits.push_back(is_above_all ? histogram.max : bucket_limits()[bucket]);
    histogram.numbers_below.push_back(counts[bucket]);
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

GRADACCUM_INLINE ProtobufMessage begun_event(double time, std::int64_t step) {
  return ProtobufMessage().real(1, time).whole(2, step);
}

GRADACCUM_INLINE std::string summary_event(double time, std::int64_t step, const ProtobufMessage& value) {
  return begun_event(time, step).message(5, ProtobufMessage().message(1, value)).text();
}

GRADACCUM_INLINE ProtobufMessage begun_value(std::string_view tag) { return ProtobufMessage().bytes(1, as_utf8(tag)); }

GRADACCUM_INLINE std::string scalar_event(double time, std::int64_t step, std::string_view tag, float value) {
  return summary_event(time, step, begun_value(tag).single(2, value));
}

/// Cuts off the time at the beginning and the value at the end.
GRADACCUM_INLINE std::string bytes_of_scalar_events(std::int64_t step, std::string_view tag) {
  const auto event = scalar_event(1, step, tag, 0);
  return event.substr(1 + sizeof(double), event.size() - 1 - sizeof(double) - sizeof(float));
}

inline constexpr std::string_view event_file_prefix = "events.out.tfevents.";
inline constexpr std::size_t event_time_digits = 10;  // equal in all names, as these are compared as strings

/// Returns the seconds since 1970 in the name of an event file; 0 if there are none.
GRADACCUM_INLINE std::int64_t time_of_event_file(std::string_view name) {
  std::int64_t seconds = 0;
  if (!name.starts_with(event_file_prefix)) return 0;
  name.remove_prefix(event_file_prefix.size());
  const auto* const end = name.data() + std::min(name.size(), event_time_digits);
  return std::from_chars(name.data(), end, seconds).ptr == end ? seconds : 0;
}

/// Returns a time after those of all files in the directory, even if two start in one second or the clock was set back.
GRADACCUM_INLINE std::int64_t time_of_next_event_file(const std::filesystem::path& directory) {
  using std::chrono::seconds, std::chrono::system_clock;
  auto time = std::chrono::duration_cast<seconds>(system_clock::now().time_since_epoch()).count();
  for (auto& name : names_in(directory)) time = std::max(time, time_of_event_file(name) + 1);
  return std::min<std::int64_t>(time, 9'999'999'999);
}

GRADACCUM_INLINE std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == 0) return "localhost";
  std::string host(name.data());
  const auto is_plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; };
  std::replace_if(
      host.begin(), host.end(), [&](char c) { return !is_plain(static_cast<unsigned char>(c)); }, '_');
  return host;
}

GRADACCUM_INLINE EventFile::EventFile(const std::filesystem::path& directory, std::chrono::duration<double> flush_every)
    : flush_every_(flush_every) {
  make_directory(directory);
  const auto time = time_of_next_event_file(directory);
  for (int number = 0; !descriptor_ || descriptor_->number() < 0; ++number) {
    if (descriptor_ && errno != EEXIST) file_error(path_, "must be made anew", errno);  // otherwise another thread's
    path_ = directory / fmt::format("{}{:0{}}.{}.{}.{}", event_file_prefix, time, event_time_digits, host_name(),
                                    ::getpid(), number);
    descriptor_.emplace(path_, O_WRONLY | O_CREAT | O_EXCL | O_APPEND, 0666);
  }
}

GRADACCUM_INLINE EventFile::~EventFile() {
  try {
    flush();
  } catch (const std::exception&) {  // call flush() to get errors
  }
}

/// Appends the lowest byte first, as in Protocol Buffers and TensorFlow's records.
GRADACCUM_INLINE void append_little_endian(std::string& text, std::uint64_t number, int bytes) {
  for (; bytes > 0; --bytes, number >>= 8) text += static_cast<char>(number & 0xff);
}

/// Returns TensorFlow's masked checksum, for bytes that may contain checksums.
GRADACCUM_INLINE std::uint32_t masked_crc32c(std::string_view text) {
  const auto crc = crc32c(text.data(), text.size());
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8;
}

GRADACCUM_INLINE void EventFile::add(std::string_view record) {
  constexpr std::size_t much = 1 << 20;
  std::string length;
  append_little_endian(length, record.size(), 8);
  auto framed = length;
  append_little_endian(framed, masked_crc32c(length), 4);
  framed += record;
  append_little_endian(framed, masked_crc32c(record), 4);
  waiting_ += framed;
  if (waiting_.size() >= much || Clock::now() - flushed_ >= flush_every_) flush();
}

GRADACCUM_INLINE void EventFile::flush() {
  flushed_ = Clock::now();
  cut_off_what_is_torn();
  std::size_t written = 0;
  try {
    while (written < waiting_.size()) written += write_some(std::string_view(waiting_).substr(written));
  } catch (...) {
    keep_whole_records(written);
    throw;
  }
  keep_whole_records(written);
}

GRADACCUM_INLINE std::size_t EventFile::write_some(std::string_view text) {
  for (;;) {
    const auto written = ::write(descriptor_->number(), text.data(), text.size());
    if (written > 0) return static_cast<std::size_t>(written);
    if (written == 0) errno = EIO;  // should not happen; retrying might never end
    if (errno != EINTR) file_error(path_, "must be written to", errno);
  }
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

GRADACCUM_INLINE void EventFile::keep_whole_records(std::size_t written) {
  const auto whole = bytes_of_whole_records(waiting_, written);
  whole_ += whole;
  waiting_.erase(0, whole);
  is_torn_ = written > whole;
  if (is_torn_ && ::ftruncate(descriptor_->number(), static_cast<off_t>(whole_)) == 0) is_torn_ = false;
}

GRADACCUM_INLINE void EventFile::cut_off_what_is_torn() {
  if (is_torn_ && ::ftruncate(descriptor_->number(), static_cast<off_t>(whole_)) != 0)
    file_error(path_, "must be cut off after its last whole record", errno);
  is_torn_ = false;
}

GRADACCUM_INLINE bool event_files_have(const std::filesystem::path& directory, std::string_view bytes) {
  for (auto& name : names_in(directory))
    if (name.starts_with(event_file_prefix) &&
        MappedFile(directory / name).text().find(bytes) != std::string_view::npos)
      return true;
  return false;
}

GRADACCUM_INLINE void ProtobufMessage::varint(std::uint64_t number) {
  for (; number >= 0x80; number >>= 7) text_ += static_cast<char>((number & 0x7f) | 0x80);
  text_ += static_cast<char>(number);
}

GRADACCUM_INLINE ProtobufMessage& ProtobufMessage::whole(std::uint32_t field, std::int64_t number) {
  if (number == 0) return *this;
  begin(field, 0);
  varint(static_cast<std::uint64_t>(number));
  return *this;
}

/// Writes -0, unlike 0.
GRADACCUM_INLINE ProtobufMessage& ProtobufMessage::real(std::uint32_t field, double number) {
  const auto bits = std::bit_cast<std::uint64_t>(number);
  if (bits == 0) return *this;
  begin(field, 1);
  append_little_endian(text_, bits, 8);
  return *this;
}

GRADACCUM_INLINE ProtobufMessage& ProtobufMessage::single(std::uint32_t field, float number) {
  begin(field, 5);
  append_little_endian(text_, std::bit_cast<std::uint32_t>(number), 4);
  return *this;
}

GRADACCUM_INLINE ProtobufMessage& ProtobufMessage::bytes(std::uint32_t field, std::string_view bytes) {
  begin(field, 2);
  varint(bytes.size());
  text_ += bytes;
  return *this;
}

GRADACCUM_INLINE ProtobufMessage& ProtobufMessage::reals(std::uint32_t field, const std::vector<double>& numbers) {
  if (numbers.empty()) return *this;
  begin(field, 2);
  varint(8 * numbers.size());
  for (const double number : numbers) append_little_endian(text_, std::bit_cast<std::uint64_t>(number), 8);
  return *this;
}

/// Returns the number of bytes of the first character, by table 3-7 of the Unicode standard; 0 if it is invalid.
GRADACCUM_INLINE std::size_t utf8_character_bytes(std::string_view text) {
  const auto is_in = [text](std::size_t index, unsigned lowest, unsigned highest) {
    if (index >= text.size()) return false;
    const auto byte = static_cast<unsigned char>(text[index]);
    return byte >= lowest && byte <= highest;
  };
  const auto follows = [&](std::size_t index) { return is_in(index, 0x80, 0xbf); };
  if (is_in(0, 0x00, 0x7f)) return 1;
  if (is_in(0, 0xc2, 0xdf)) return follows(1) ? 2 : 0;
  if (is_in(0, 0xe0, 0xef))  // neither overlong nor a UTF-16 surrogate
    return is_in(1, is_in(0, 0xe0, 0xe0) ? 0xa0 : 0x80, is_in(0, 0xed, 0xed) ? 0x9f : 0xbf) && follows(2) ? 3 : 0;
  if (!is_in(0, 0xf0, 0xf4)) return 0;
  const bool is_second = is_in(1, is_in(0, 0xf0, 0xf0) ? 0x90 : 0x80, is_in(0, 0xf4, 0xf4) ? 0x8f : 0xbf);
  return is_second && follows(2) && follows(3) ? 4 : 0;
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

/// Returns the seconds since 1970.
GRADACCUM_INLINE double event_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
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
  file_->add(detail::begun_event(detail::event_time(), 0).bytes(3, "brain.Event:2").text());
  // A training's start makes readers discard this and later steps of other files: TensorBoard itself from the second
  // start in a directory on, other readers at each.
  for (int starts = options.purge_step ? 2 : 0; starts > 0; --starts) {
    const auto start = detail::ProtobufMessage().whole(1, /*START=*/1);
    file_->add(detail::begun_event(detail::event_time(), *options.purge_step).message(7, start).text());
  }
  file_->flush();  // reports a full disk now
}

GRADACCUM_INLINE SummaryWriter::~SummaryWriter() = default;

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
    detail::ProtobufMessage message;
    message.real(1, histogram.min).real(2, histogram.max).real(3, static_cast<double>(histogram.numbers));
    message.real(4, histogram.sum).real(5, histogram.sum_of_squares);
    message.reals(6, histogram.limits).reals(7, histogram.numbers_below);
    file_->add(detail::summary_event(detail::event_time(), step, detail::begun_value(tag).message(5, message)));
  }
  if (histogram.others > 0) add_scalar(std::string(tag) + "/not_finite", static_cast<double>(histogram.others), step);
}

/// Makes a tensor of one text, which the text plugin shows.
GRADACCUM_INLINE void SummaryWriter::add_text(std::string_view tag, std::string_view text, std::int64_t step) {
  using Message = detail::ProtobufMessage;
  constexpr std::int64_t texts = 7;
  const auto shape = Message().message(2, Message().whole(1, 1));
  const auto tensor = Message().whole(1, texts).message(2, shape).bytes(8, detail::as_utf8(text));
  const auto metadata = Message().message(1, Message().bytes(1, "text"));
  auto value = detail::begun_value(std::string(detail::checked_tag(tag)) + "/text_summary");
  file_->add(detail::summary_event(detail::event_time(), step, value.message(8, tensor).message(9, metadata)));
}

GRADACCUM_INLINE void SummaryWriter::flush() { file_->flush(); }

GRADACCUM_INLINE const std::filesystem::path& SummaryWriter::path() const { return file_->path(); }

}  // namespace gradaccum

#undef GRADACCUM_INLINE
