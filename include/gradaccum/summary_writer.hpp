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

/// Where a `SummaryWriter` writes, and when.
struct SummaryWriterOptions {
  std::filesystem::path directory = {};                                  ///< made where it is not there; of one run
  std::chrono::duration<double> flush_every = std::chrono::seconds(10);  ///< >= 0
  std::optional<std::int64_t> purge_step = {};  ///< readers forget what the directory has of this step and later ones
};

/// Writes numbers, histograms and texts for TensorBoard, as PyTorch's SummaryWriter does.
///
///     ga::SummaryWriter writer({.directory = "runs/a"});
///     for (std::int64_t step = 0; step < 3; ++step) {
///       writer.add_scalar("train/loss", 1.0 / (step + 1), step);
///       writer.add_histogram("weights", model->parameters()[0], step);
///     }
///     writer.add_text("settings", "learning rate **0.1**", 0);
///     writer.flush();
///
/// Each writer has a file of its own, `events.out.tfevents.…`, whose name comes after those that are in the directory:
/// a training that goes on begins another, with `purge_step`. A directory is what TensorBoard calls a run; it reads one
/// file of it after the other, so one writer writes there at a time. Call it from one thread at a time.
///
/// Records are handed to the operating system every `flush_every` seconds, when there is a MiB, by `flush`, and at the
/// end; so a program that is killed leaves whole records, and perhaps a part of one, which readers leave out. Where
/// that fails, as the disk is full say, it throws `std::runtime_error` with the file's name: the file ends with its
/// last whole record then, and the others are kept, to be written by the next call. (The destructor does not throw:
/// `flush` before it tells.) Tags and texts that are no UTF-8 are escaped.
///
/// @note Waits for the device of a tensor. Memory: a MiB of records; of a tensor on a device, a piece of it on the
/// host.
class SummaryWriter {
 public:
  explicit SummaryWriter(const SummaryWriterOptions& options);
  SummaryWriter(const SummaryWriter&) = delete;
  SummaryWriter& operator=(const SummaryWriter&) = delete;
  ~SummaryWriter();

  /// As float32, which is what TensorBoard shows; NaN and infinities, too.
  void add_scalar(std::string_view tag, double value, std::int64_t step);

  /// The distribution of a tensor's elements, of any dtype and shape, in TensorFlow's buckets; of a sparse tensor the
  /// elements that it has, of complex ones both parts. NaN and infinities have no place in it: where there are some,
  /// their number is the scalar `tag/not_finite`. Of a tensor without elements nothing is written.
  void add_histogram(std::string_view tag, const at::Tensor& tensor, std::int64_t step);
  /// For those who have counted already.
  void add_histogram(std::string_view tag, const detail::ValueHistogram& histogram, std::int64_t step);

  /// Markdown. Its tag is `tag/text_summary`, as PyTorch's is.
  void add_text(std::string_view tag, std::string_view text, std::int64_t step);

  void flush();

  const std::filesystem::path& path() const;

 private:
  std::unique_ptr<detail::EventFile> file_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/summary_writer.ipp>
#endif
