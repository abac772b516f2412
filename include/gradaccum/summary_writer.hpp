// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>

namespace gradaccum {

namespace detail {
class EventFile;
struct ValueHistogram;
}  // namespace detail

/// The directory of a `SummaryWriter`, and its flush interval.
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
/// Each writer has its own file, `events.out.tfevents.…`, whose name sorts after those in the directory: a resumed
/// training starts another, with `purge_step`. A directory is a run in TensorBoard, which reads its files one after the
/// other, so only one writer may write there at a time. Not thread-safe.
///
/// Records are written to the file every `flush_every` seconds, when there is a MiB, by `flush`, and at the end. If the
/// program is killed, the file has whole records and perhaps a part of one, which readers ignore. If writing fails, for
/// example because the disk is full, it throws `std::runtime_error` with the file's name: the file then ends with its
/// last whole record, and the next call writes the others. The destructor does not throw, so call `flush` first to get
/// errors. Tags and texts that are not UTF-8 are escaped.
///
/// @note Waits for the device of a tensor. Takes a MiB for records, and the host memory of a piece of such a tensor.
class SummaryWriter {
 public:
  explicit SummaryWriter(const SummaryWriterOptions& options);
  ~SummaryWriter();

  /// Writes a number as float32, which is what TensorBoard shows. It may be NaN or infinite.
  void add_scalar(std::string_view tag, double value, std::int64_t step);

  /// Writes the distribution of a tensor's elements, of any dtype and shape, in TensorFlow's buckets. Includes only the
  /// stored elements of a sparse tensor, and both parts of complex ones. NaN and infinities are excluded; if there are
  /// any, their number is written as the scalar `tag/not_finite`. Writes nothing for a tensor without elements.
  void add_histogram(std::string_view tag, const at::Tensor& tensor, std::int64_t step);

  /// Writes Markdown, with the tag `tag/text_summary` as in PyTorch.
  void add_text(std::string_view tag, std::string_view text, std::int64_t step);

  void flush();

  const std::filesystem::path& path() const;

 private:
  friend struct TensorBoard;
  void add(std::string_view tag, const detail::ValueHistogram& histogram, std::int64_t step);

  std::unique_ptr<detail::EventFile> file_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/summary_writer.ipp>
#endif
