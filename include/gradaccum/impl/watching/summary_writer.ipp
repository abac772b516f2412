// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/summary_writer.hpp>

#include <gradaccum/detail/watching/event_file.hpp>

#include <c10/util/Exception.h>

#include <string>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

/// Returns the seconds since 1970.
GRADACCUM_INLINE double time_of_event() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

GRADACCUM_INLINE std::string_view checked_tag(std::string_view tag) {
  TORCH_CHECK(!tag.empty(), "SummaryWriter: a tag must not be empty");
  return tag;
}

GRADACCUM_INLINE const SummaryWriterOptions& checked_options(const SummaryWriterOptions& options) {
  const auto seconds = options.flush_every.count();
  TORCH_CHECK(!options.directory.empty(), "SummaryWriter: directory must be given");
  TORCH_CHECK(seconds >= 0, "SummaryWriter: flush_every must be >= 0 seconds, got ", seconds);
  return options;
}

}  // namespace detail

GRADACCUM_INLINE SummaryWriter::SummaryWriter(const SummaryWriterOptions& options)
    : file_(std::make_unique<detail::EventFile>(detail::checked_options(options).directory, options.flush_every)) {
  file_->add(detail::version_event(detail::time_of_event()));
  for (int starts = options.purge_step ? 2 : 0; starts > 0; --starts)  // TensorBoard ignores a run's first start
    file_->add(detail::start_event(detail::time_of_event(), *options.purge_step));
  file_->flush();  // reports a full disk now
}

GRADACCUM_INLINE SummaryWriter::~SummaryWriter() = default;

GRADACCUM_INLINE void SummaryWriter::add_scalar(std::string_view tag, double value, std::int64_t step) {
  file_->add(detail::scalar_event(detail::time_of_event(), step, detail::checked_tag(tag), static_cast<float>(value)));
}

GRADACCUM_INLINE void SummaryWriter::add_histogram(std::string_view tag, const at::Tensor& tensor, std::int64_t step) {
  TORCH_CHECK(tensor.defined(), "SummaryWriter: a histogram must be of a tensor, got an undefined one for ", tag);
  add_histogram(tag, detail::histogram_of(tensor), step);
}

GRADACCUM_INLINE void SummaryWriter::add_histogram(std::string_view tag, const detail::ValueHistogram& histogram,
                                                   std::int64_t step) {
  detail::checked_tag(tag);
  if (histogram.numbers > 0) file_->add(detail::histogram_event(detail::time_of_event(), step, tag, histogram));
  if (histogram.others > 0) add_scalar(std::string(tag) + "/not_finite", static_cast<double>(histogram.others), step);
}

GRADACCUM_INLINE void SummaryWriter::add_text(std::string_view tag, std::string_view text, std::int64_t step) {
  const auto whole_tag = std::string(detail::checked_tag(tag)) + "/text_summary";
  file_->add(detail::text_event(detail::time_of_event(), step, whole_tag, text));
}

GRADACCUM_INLINE void SummaryWriter::flush() { file_->flush(); }

GRADACCUM_INLINE const std::filesystem::path& SummaryWriter::path() const { return file_->path(); }

}  // namespace gradaccum

#undef GRADACCUM_INLINE
