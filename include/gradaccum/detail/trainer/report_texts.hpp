// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/fit_report.hpp>
#include <gradaccum/run_page.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum::detail {

/// What a page says of a training.

/// `1 sample`, `64 samples`
std::string plural_text(std::int64_t count, std::string_view noun);
/// `20 epochs, or 1:00:00`
std::string limits_text(const FitOptions& options);
/// `1,204 MB`, of 2^20 bytes
std::string megabytes_text(double bytes);
/// Their number, and their bytes.
std::string parameters_text(const std::vector<at::Tensor>& parameters);

/// A tile with the best that a validation found, if there is one that has this metric.
void best_tile(RunPage& page, std::string_view metric, bool lowest);
/// The numbers of a report.
void show_report(RunPage& page, const FitReport& report);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/report_texts.ipp>
#endif
