// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/report_texts.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/number_text.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/progress_line.hpp>

#include <fmt/format.h>

#include <iterator>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string plural_text(std::int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count_text(count), noun, count == 1 ? "" : "s");
}

GRADACCUM_INLINE std::string limits_text(const FitOptions& options) {
  std::string text;
  const auto say = [&text](const std::string& limit) { text += (text.empty() ? "" : ", or ") + limit; };
  if (options.epochs) say(plural_text(*options.epochs, "epoch"));
  if (options.updates) say(plural_text(*options.updates, "update"));
  if (options.samples) say(plural_text(*options.samples, "sample"));
  if (options.time) say(duration_text(options.time->count()));
  return text.empty() ? "1 epoch" : text;
}

GRADACCUM_INLINE std::string megabytes_text(double bytes) {
  const double megabytes = bytes / static_cast<double>(MiB);
  return megabytes < 9.95 ? fmt::format("{:.1f} MB", megabytes)
                          : count_text(static_cast<std::int64_t>(megabytes + 0.5)) + " MB";
}

GRADACCUM_INLINE std::string parameters_text(const std::vector<at::Tensor>& parameters) {
  std::int64_t count = 0, bytes = 0;
  for (auto& parameter : parameters) {
    count += parameter.numel();
    bytes += parameter.numel() * static_cast<std::int64_t>(parameter.element_size());
  }
  return fmt::format("{}, {}", count_text(count), megabytes_text(static_cast<double>(bytes)));
}

/// `validation/loss` of any name, the first that there is; null if there is none.
GRADACCUM_INLINE const Curves::Named* validated_curve(const Curves& curves, std::string_view metric) {
  for (auto& named : curves.all()) {
    const auto slash = named.name.rfind('/');
    if (slash != std::string::npos && named.name.substr(slash + 1) == metric && !named.name.starts_with("train/"))
      return &named;
  }
  return nullptr;
}

GRADACCUM_INLINE void best_tile(RunPage& page, std::string_view metric, bool lowest) {
  const auto* const named = validated_curve(page.curves(), metric);
  if (!named) return;
  const auto best = lowest ? named->curve.lowest() : named->curve.highest();
  const auto of = named->name.substr(0, named->name.rfind('/'));
  if (best)
    page.tile("best " + (of == "validation" ? "" : of + ' ') + std::string(metric), number_text(best->value),
              "at update " + count_text(best->update));
}

GRADACCUM_INLINE void show_report(RunPage& page, const FitReport& report) {
  page.number("epochs", report.epochs);
  page.number("updates", report.updates);
  page.number("skipped", report.skipped);
  page.number("samples", report.samples);
  page.number("seconds", report.seconds, duration_text(report.seconds));
  page.number("samples per second", report.samples_per_second, rate_text(report.samples_per_second));
  page.number("validations", std::ssize(report.validations));
  if (report.nan_batches > 0) page.number("left out for a loss of NaN or infinity", report.nan_batches);
}

}  // namespace gradaccum::detail
