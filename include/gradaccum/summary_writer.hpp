// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: watching

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum {

namespace detail {
class EventFile;
struct TensorBoardRun;
struct ValueHistogram;
}  // namespace detail

/// Options of a `SummaryWriter`.
struct SummaryWriterOptions {
  std::filesystem::path directory = {};                                  ///< a run's directory; created if needed
  std::chrono::duration<double> flush_every = std::chrono::seconds(10);  ///< >= 0
  std::optional<std::int64_t> purge_step = {};  ///< readers discard older records of this and later steps
};

/// Writes numbers, histograms and texts for TensorBoard, like PyTorch's SummaryWriter.
///
///     ga::SummaryWriter writer({.directory = "runs/a"});
///     for (std::int64_t step = 0; step < 3; ++step) {
///       writer.add_scalar("train/loss", 1.0 / (step + 1), step);
///       writer.add_histogram("weights", model->parameters()[0], step);
///     }
///     writer.add_text("settings", "learning rate **0.1**", 0);
///     writer.flush();
///
/// Each writer has its own file, `events.out.tfevents.…`, whose name sorts after the existing ones: a resumed training
/// starts another file, with `purge_step`. A directory is a run in TensorBoard, which reads its files in order, so only
/// one writer may write there at a time. Not thread-safe.
///
/// Records are written every `flush_every` seconds, when they reach a MiB, by `flush`, and at the end. After a kill the
/// file may end with a part of a record, which readers ignore. Throws `std::runtime_error` with the file's name if
/// writing fails: the file then ends with its last complete record, and the next call writes the others. The destructor
/// only warns: call `flush` before to get errors. Tags and texts that are not UTF-8 are escaped.
///
/// @note Synchronizes with the device of a tensor, and takes host memory for a piece of it.
class SummaryWriter {
 public:
  explicit SummaryWriter(const SummaryWriterOptions& options);
  ~SummaryWriter();

  /// Writes a number as float32, which is what TensorBoard shows. It may be NaN or infinite.
  void add_scalar(std::string_view tag, double value, std::int64_t step);

  /// Writes the distribution of a tensor's elements, of any dtype and shape, in TensorFlow's buckets: of sparse tensors
  /// the stored elements, of complex ones both parts. Non-finite elements are excluded; their number, if any, is the
  /// scalar `tag/not_finite`. Writes nothing for a tensor without elements.
  void add_histogram(std::string_view tag, const at::Tensor& tensor, std::int64_t step);

  /// Writes Markdown, with the tag `tag/text_summary` as in PyTorch.
  void add_text(std::string_view tag, std::string_view text, std::int64_t step);

  void flush();

  const std::filesystem::path& path() const;

 private:
  friend struct detail::TensorBoardRun;
  void add(std::string_view tag, const detail::ValueHistogram& histogram, std::int64_t step);

  std::unique_ptr<detail::EventFile> file_;
};

}  // namespace gradaccum

namespace gradaccum::detail {

/// The distribution of a tensor's finite numbers, in TensorFlow's buckets, whose limits grow by a tenth.
struct ValueHistogram {
  double min = std::numeric_limits<double>::infinity(), max = -min;
  double sum = 0, sum_of_squares = 0;
  std::int64_t numbers = 0, others = 0;    // others: NaN and infinities
  std::vector<double> limits = {};         // each bucket's right end, exclusive; its left end is the previous limit
  std::vector<double> numbers_below = {};  // counts by bucket
};

/// Counts all elements times `factor`: both parts of complex numbers, and the stored elements of sparse tensors, with
/// duplicates summed. Copies them to the host piece by piece. Synchronizes with the device.
ValueHistogram histogram_of(const at::Tensor& tensor, double factor = 1);

/// Returns a record of an event file: TensorBoard's `Event` message, serialized like PyTorch's SummaryWriter. `time` is
/// in seconds since 1970. Texts that are not UTF-8 are escaped, since a reader would give up the whole file.
std::string scalar_event(double time, std::int64_t step, std::string_view tag, float value);

/// True if an event file in this directory has a scalar of this tag and step.
bool event_files_have(const std::filesystem::path& directory, std::int64_t step, std::string_view tag);

/// Returns the text with bytes that are not UTF-8, which readers of Protocol Buffers require, escaped like `\xff`.
std::string as_utf8(std::string_view text);

/// Returns a guard that a policy holds during a fit. It flushes the file at its end, even after an exception, and
/// ignores errors, which `at_boundary` reports. The file may be made or replaced while the fit runs.
template <class File>
std::shared_ptr<void> flush_at_end(const std::shared_ptr<File>& file) {
  return {nullptr, [&file](void*) noexcept {
            try {
              if (file) file->flush();
            } catch (const std::exception&) {
            }
          }};
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/summary_writer.ipp>
#endif
