// SPDX-License-Identifier: Apache-2.0
// Implements learning rates of an optimizer's groups, and schedules that set them.
#pragma once

#include <gradaccum/learning_rates.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <numbers>
#include <stdexcept>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE LearningRates::LearningRates(Groups groups) : groups_(std::move(groups)) {
  first_ = rate_of(this->groups()[0].options());
  follow();
}

GRADACCUM_INLINE std::vector<optim::ParamGroupRef> LearningRates::groups() const {
  auto groups = groups_();
  TORCH_CHECK(!groups.empty(), "LearningRates: the optimizer must have a parameter group");
  return groups;
}

/// Checks that the options can get and set their rate: LibTorch's options can, but their base class throws.
GRADACCUM_INLINE double LearningRates::rate_of(torch::optim::OptimizerOptions& options) {
  double rate = 0;
  try {
    rate = options.get_lr();
    options.set_lr(rate);
  } catch (const c10::Error&) {
    TORCH_CHECK(false, "LearningRates: ", detail::type_name(options), " must override get_lr() and set_lr()");
  }
  TORCH_CHECK(detail::is_finite(rate) && rate >= 0, "LearningRates: a group's rate must be finite and >= 0, got ",
              rate);
  return rate;
}

/// Computes the ratios of new groups.
GRADACCUM_INLINE void LearningRates::follow() {
  const auto groups = this->groups();
  auto ratios = ratios_;
  ratios.resize(std::min(ratios.size(), groups.size()));
  for (auto i = ratios.size(); i < groups.size(); ++i) {
    const auto rate = rate_of(groups[i].options());
    TORCH_CHECK(first_ > 0 || rate == 0, "LearningRates: the first group's rate must be > 0 if another's is, got 0 ",
                "and ", rate, "; groups keep their ratio to the first");
    ratios.push_back(rate == first_ ? 1 : rate / first_);
  }
  ratios_ = std::move(ratios);
}

GRADACCUM_INLINE void LearningRates::set(double rate) {
  TORCH_CHECK(detail::is_finite(rate) && rate >= 0, "LearningRates: a rate must be finite and >= 0, got ", rate);
  follow();
  for (auto ratio : ratios_)
    TORCH_CHECK(detail::is_finite(rate * ratio), "LearningRates: a group's rate must be finite, got ", rate, " * ",
                ratio);
  const auto groups = this->groups();
  for (std::size_t i = 0; i < ratios_.size(); ++i) groups[i].options().set_lr(rate * ratios_[i]);
}

/// Groups that were there before any rate was set keep the program's ratio.
GRADACCUM_INLINE void LearningRates::state(Archive& archive) {
  const auto known = static_cast<std::ptrdiff_t>(ratios_.size());
  archive.if_not_all_fit([this, before = ratios_] { ratios_ = before; });
  follow();
  auto groups = std::ssize(ratios_);
  archive("groups", groups);
  // The optimizer's state throws then, unless changes are allowed.
  if (groups != std::ssize(ratios_)) return archive.leave_out("ratios");
  auto ratios = ratios_;
  archive("ratios", ratios);
  if (!archive.loading()) return;
  for (const auto ratio : ratios)
    TORCH_CHECK(detail::is_finite(ratio) && ratio >= 0, "LearningRates: a saved ratio must be finite and >= 0, got ",
                ratio);
  archive.when_all_fit([=, this] { std::copy(ratios.begin() + known, ratios.end(), ratios_.begin() + known); });
}

GRADACCUM_INLINE void LearningRates::reduce(double factor, double least, double eps) {
  follow();
  for (auto& group : groups()) {
    const auto before = group.options().get_lr(), after = std::max(before * factor, least);
    if (before - after > eps) group.options().set_lr(after);
  }
}

}  // namespace gradaccum

namespace gradaccum::detail {

/// Each returns the factor, falling from 1 to 0, after `done` of `length` updates. Equal Python's expressions bit for
/// bit.
GRADACCUM_INLINE double linear_decay(double done, double length) { return (length - done) / length; }
GRADACCUM_INLINE double cosine_decay(double done, double length) {
  return 0.5 * (1 + std::cos(std::numbers::pi * (done / length)));
}
GRADACCUM_INLINE double one_minus_sqrt_decay(double done, double length) { return 1 - std::sqrt(done / length); }

/// The common form of all learning rates: a warm-up to `peak`, a plateau, and a decay over the last updates of `total`.
///
/// Members are checked at every call, since the classes are aggregates without constructors.
struct Phases {
  static constexpr std::int64_t no_end = std::numeric_limits<std::int64_t>::max();

  const char* owner;  // for errors
  double peak;
  std::int64_t warmup;
  std::optional<double> start;
  std::int64_t total = no_end;
  double end = peak;
  std::optional<std::int64_t> decay = {};  // updates; by default all after the warm-up

  double at(std::int64_t update, double (*falling)(double, double)) const {
    check(update);
    if (update >= total) return end;
    if (update < warmup) {
      // By default the line would be 0 at update -1, since a first update with rate 0 would change nothing.
      const auto first = start.value_or(peak / (static_cast<double>(warmup) + 1));
      return std::lerp(first, peak, static_cast<double>(update) / static_cast<double>(warmup));
    }
    const auto length = decay.value_or(total - warmup), done = update - (total - length);
    return done <= 0 ? peak : std::lerp(end, peak, falling(static_cast<double>(done), static_cast<double>(length)));
  }

 private:
  void check(std::int64_t update) const {
    require(detail::is_finite(peak) && peak > 0, "peak must be finite and > 0", peak);
    require(total >= 1, "total must be >= 1", total);
    require(0 <= warmup, "warmup must be >= 0", warmup);
    if (warmup > total)
      throw std::invalid_argument(
          c10::str(owner, ": warmup must be <= total, got ", warmup, " updates of ", total,
                   "; a rate whose total is left out has as many as the fit: give it fewer, or fit more updates"));
    require(!decay || (1 <= *decay && *decay <= total - warmup), "decay must be in [1, total - warmup]",
            decay.value_or(0));
    require(!start || (0 <= *start && *start <= peak), "start must be in [0, peak]", start.value_or(0));
    require(0 <= end && end <= peak, "end must be in [0, peak]; it is a rate, not a factor", end);
    require(update >= 0, "the update must be >= 0", update);
  }

  void require(bool holds, const char* requirement, auto got) const {
    if (!holds) throw std::invalid_argument(c10::str(owner, ": ", requirement, ", got ", got));
  }
};

}  // namespace gradaccum::detail

namespace gradaccum::lr {

GRADACCUM_INLINE double Constant::operator()(std::int64_t update) const {
  return detail::Phases{"lr::Constant", peak, warmup, start}.at(update, detail::linear_decay);
}

GRADACCUM_INLINE double Cosine::operator()(std::int64_t update) const {
  return detail::Phases{"lr::Cosine", peak, warmup, start, total, end}.at(update, detail::cosine_decay);
}

GRADACCUM_INLINE double Linear::operator()(std::int64_t update) const {
  return detail::Phases{"lr::Linear", peak, warmup, start, total, end}.at(update, detail::linear_decay);
}

GRADACCUM_INLINE double WarmupStableDecay::operator()(std::int64_t update) const {
  const auto falling = shape == Decay::linear   ? detail::linear_decay
                       : shape == Decay::cosine ? detail::cosine_decay
                                                : detail::one_minus_sqrt_decay;
  return detail::Phases{"lr::WarmupStableDecay", peak, warmup, start, total, end, decay}.at(update, falling);
}

}  // namespace gradaccum::lr

#undef GRADACCUM_INLINE
