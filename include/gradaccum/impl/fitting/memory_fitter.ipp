// SPDX-License-Identifier: Apache-2.0
// Searches for the number of rows that fit into memory, and restarts a batch that ran out of it.
#pragma once

#include <gradaccum/detail/fitting/memory_fitter.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/platform/platform.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <new>
#include <string_view>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns first * second / third, rounded down, without overflow.
GRADACCUM_INLINE std::int64_t scaled(std::int64_t first, std::int64_t second, std::int64_t third) {
  const auto result =
      static_cast<long double>(first) * static_cast<long double>(second) / static_cast<long double>(third);
  constexpr auto most = std::numeric_limits<std::int64_t>::max() / 2;
  return result < static_cast<long double>(most) ? static_cast<std::int64_t>(result) : most;
}

GRADACCUM_INLINE void CheckpointSearch::find_parts(torch::nn::Module& module,
                                                   const std::vector<CheckpointedSequential>& more) {
  if (found_) return;
  std::vector<std::shared_ptr<CheckpointedSequentialImpl>> parts;
  for (auto& part : more) {
    TORCH_CHECK(part->options().segments == 0, "FitMemory: checkpointed parts must have memory_budget, not segments");
    parts.push_back(part.ptr());
  }
  const auto add = [&](std::shared_ptr<CheckpointedSequentialImpl> part) {
    const bool is_new = part && part->options().memory_budget > 0 && std::ranges::find(parts, part) == parts.end();
    if (is_new) parts.push_back(std::move(part));
  };
  add({std::shared_ptr<void>(), dynamic_cast<CheckpointedSequentialImpl*>(&module)});  // without ownership
  for (auto& part : module.modules(/*include_self=*/false))
    add(std::dynamic_pointer_cast<CheckpointedSequentialImpl>(part));
  parts_ = std::move(parts);
  for (auto& part : parts_) part->set_memory_budget(0);
  found_ = true;
}

GRADACCUM_INLINE void CheckpointSearch::probe() {
  if (!searches()) return;
  probing_ = true;
  way_.checkpointed = true;
  set_budget(1);
}

/// Estimates the bytes for keeping everything. Parts do not all peak at the same time, so that less than the sum of
/// their bytes is added. Keeps everything also if up to an eighth may be missing.
GRADACCUM_INLINE void CheckpointSearch::end_probe(std::int64_t taken, std::int64_t budget) {
  std::int64_t more = 0;
  for (auto& part : parts_)
    if (part->has_plan()) more += part->plan().plain.peak_bytes - part->plan().predicted.peak_bytes;
  more = scaled(more, std::min(taken, bytes()), std::max<std::int64_t>(bytes(), 1));
  const bool fits = budget == 0 || taken + more <= budget + budget / 8;
  probing_ = false;
  go({/*checkpointed=*/!fits}, /*settled=*/!fits);
  set_budget(0);  // to be divided
}

/// Returns the sum of the parts' budgets. A part that needs more than its share counts with its need.
GRADACCUM_INLINE std::int64_t CheckpointSearch::budget() const {
  std::int64_t all = 0;
  for (auto& part : parts_)
    if (budget_ > 0) all += std::max(budget_, part->has_plan() ? part->plan().predicted.peak_bytes : 0);
  return all;
}

GRADACCUM_INLINE void CheckpointSearch::share(std::int64_t bytes) {
  if (!way_.checkpointed || budget_ > 0) return;
  set_budget(std::max<std::int64_t>(bytes / 4 * 3 / static_cast<std::int64_t>(parts_.size()), 1));
}

GRADACCUM_INLINE void CheckpointSearch::set_budget(std::int64_t each) {
  if (std::exchange(budget_, each) == each) return;
  for (auto& part : parts_) part->set_memory_budget(each, /*or_least=*/each > 0);
}

GRADACCUM_INLINE std::int64_t CheckpointSearch::bytes() const {
  std::int64_t all = 0;
  for (auto& part : parts_)
    if (way_.checkpointed && part->has_plan()) all += part->plan().predicted.peak_bytes;
  return all;
}

GRADACCUM_INLINE void CheckpointSearch::took(std::int64_t elements, double seconds, bool left) {
  constexpr int enough = 3;  // the fastest of this many counts
  if (!searches() || !(left || way_.checkpointed)) return;
  seconds_ = std::min(seconds_, seconds / static_cast<double>(elements));
  if (++timed_ < enough) return;
  const bool faster = seconds_ < 0.98 * best_seconds_;
  if (faster) best_ = way_, best_seconds_ = seconds_;
  const bool may_grow = left && (elements > way_.most / 2 || !way_.checkpointed);
  if (faster && may_grow)
    go({/*checkpointed=*/true, 2 * elements}, /*settled=*/false);
  else
    go(best_, /*settled=*/true);
}

GRADACCUM_INLINE bool CheckpointSearch::fails(std::int64_t over) {
  if (parts_.empty()) return false;
  if (probing_) return timed_++ == 0;  // once more, without measuring the stages
  if (!way_.checkpointed || !settled_) {
    go(way_.checkpointed ? best_ : Way{/*checkpointed=*/true}, /*settled=*/true);
    return true;
  }
  const auto at_least = [&](auto& part) { return part->has_plan() && part->plan().least_bytes >= budget_; };
  if (budget_ <= 1 || std::ranges::all_of(parts_, at_least)) return false;  // nothing more can be recomputed
  const auto less = std::max(budget_ / 8, (over + over / 8) / static_cast<std::int64_t>(parts_.size())) + 1;
  set_budget(std::max<std::int64_t>(budget_ - less, 1));
  return true;
}

GRADACCUM_INLINE void CheckpointSearch::go(const Way& way, bool settled) {
  seconds_ = std::numeric_limits<double>::infinity();
  timed_ = 0;
  settled_ = settled;
  way_ = way;
  if (!way_.checkpointed) set_budget(0);
}

GRADACCUM_INLINE void CheckpointSearch::state(Archive& archive) {
  auto way = way_;
  auto settled = settled_;
  auto budget = budget_;
  archive("checkpointed", way.checkpointed);
  archive("most", way.most);
  archive("settled", settled);
  archive("checkpoint_budget", budget);
  archive("best_checkpointed", best_.checkpointed);
  archive("best_most", best_.most);
  archive("best_seconds", best_seconds_);
  if (!archive.loading()) return;
  TORCH_CHECK(
      way.most >= 1 && budget >= 0 && (budget == 0 || way.checkpointed) && (!way.checkpointed || !parts_.empty()),
      "FitMemory: a saved plan's checkpoint budget must be >= 0 and fit the model's checkpointed parts, got ", budget);
  probing_ = false;
  go(way, settled);
  set_budget(budget);
}

GRADACCUM_INLINE std::int64_t RowPlan::rows_for(std::int64_t bytes, std::int64_t least) {
  if (empty()) return least;
  if (fits_.bytes > bytes) failed(fits_);
  if (fits_.rows == 0) return std::max(fewer_rows(bytes), least);
  if (fits_.bytes >= bytes - bytes / 20) return std::max(fits_.rows, least);
  return std::max(more_rows(bytes), least);
}

/// Guesses the rows that fit by assuming that rows account for half of the bytes.
GRADACCUM_INLINE std::int64_t RowPlan::fewer_rows(std::int64_t bytes) const {
  if (too_many_.bytes <= bytes || bytes <= 0) return too_many_.rows / 2;
  return too_many_.rows - 2 * (too_many_.rows - scaled(too_many_.rows, bytes, too_many_.bytes));
}

GRADACCUM_INLINE std::int64_t RowPlan::more_rows(std::int64_t bytes) const {
  const auto in_proportion = scaled(fits_.rows, bytes, std::max<std::int64_t>(fits_.bytes, 1));
  if (in_proportion == fits_.rows && too_many_.rows != fits_.rows + 1 && one_more_bytes() <= bytes)
    return fits_.rows + 1;
  if (too_many_.rows == 0 || in_proportion < too_many_.rows) return in_proportion;
  const auto between = too_many_.rows - fits_.rows;
  const auto more =
      too_many_.bytes > bytes ? scaled(between, bytes - fits_.bytes, too_many_.bytes - fits_.bytes) : between / 2;
  return std::min(fits_.rows + more, too_many_.rows - 1);
}

/// Estimates the bytes of one more row than fits_: adds the last growth per row, or half of an average row before any
/// growth.
GRADACCUM_INLINE std::int64_t RowPlan::one_more_bytes() const {
  if (before_.rows == 0) return fits_.bytes + fits_.bytes / (2 * fits_.rows);
  return fits_.bytes + scaled(fits_.bytes - before_.bytes, 1, fits_.rows - before_.rows);
}

GRADACCUM_INLINE std::optional<std::int64_t> RowPlan::bytes_for(std::int64_t rows) const {
  if (fits_.rows == 0) return std::nullopt;
  if (rows == fits_.rows + 1) return one_more_bytes();
  if (rows > fits_.rows && too_many_.rows > fits_.rows && too_many_.bytes > fits_.bytes)
    return fits_.bytes + scaled(rows - fits_.rows, too_many_.bytes - fits_.bytes, too_many_.rows - fits_.rows);
  return scaled(fits_.bytes, rows, fits_.rows);
}

GRADACCUM_INLINE void RowPlan::measured(Point point, bool certain) {
  const bool better = certain && !certain_ && point.rows >= fits_.rows / 2;
  if (point.rows < fits_.rows && !better) return;
  if (point.rows > fits_.rows && certain_) before_ = fits_;
  if (point.rows < fits_.rows) before_ = {};
  fits_ = point;
  certain_ = certain_ || certain;
  if (too_many_.rows <= fits_.rows) too_many_ = {};
}

GRADACCUM_INLINE void RowPlan::failed(Point point) {
  if (too_many_.rows == 0 || point.rows <= too_many_.rows) too_many_ = point;
  if (fits_.rows >= point.rows) fits_ = before_ = {};
}

GRADACCUM_INLINE void RowPlan::state(Archive& archive) {
  RowPlan plan = *this;
  const auto point = [&archive](const std::string& name, Point& of) {
    archive(name + "rows", of.rows);
    archive(name + "bytes", of.bytes);
    TORCH_CHECK(of.rows >= 0 && of.bytes >= 0, "FitMemory: the rows and bytes of a saved plan must be >= 0, got ",
                of.rows, " and ", of.bytes);
  };
  point("", plan.fits_);
  point("too_many_", plan.too_many_);
  point("before_", plan.before_);
  archive("certain", plan.certain_);
  *this = plan;
}

GRADACCUM_INLINE void MemoryFitter::run(const Limits& limits, const DividedBatch& batch) {
  TORCH_CHECK(limits.budget >= 0, "FitMemory: budget must be >= 0, got ", limits.budget);
  TORCH_CHECK(limits.min_rows >= 1 && limits.min_rows <= std::int64_t{1} << 40,
              "FitMemory: min_rows must be >= 1, got ", limits.min_rows);
  limits_ = limits;
  for (int of_least = 0, attempts = 0;; ++attempts) {
    const auto queries = queries_;
    const auto failure = attempt(batch, /*may_begin_again=*/attempts < 10);
    if (!failure) return;
    release_kept_memory(batch.device);
    batch.undo();
    release_kept_memory(batch.device);
    if (failure->is_none) {
      queries_ = queries;
      continue;
    }
    ++plan_.replays;
    queries_ = std::min<std::int64_t>(queries_, 1);
    of_least = failure->is_least ? of_least + 1 : 0;
    // Retries once after running out of memory, or if a checkpointed part may have measured its stages.
    if (of_least == 0 || (of_least == 1 && (failure->bytes == 0 || search_.way().checkpointed))) continue;
    of_least = 0;
    if (search_.fails(failure->bytes > 0 ? failure->bytes - limits.budget : 0)) continue;
    TORCH_CHECK(failure->bytes == 0, "FitMemory: the budget must be at least ", failure->bytes, " bytes, which ",
                failure->rows, " row(s) of ", batch.kind.text, " and the gradients took, got ", limits.budget);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "FitMemory: ", failure->rows, " row(s) of ", batch.kind.text,
                     " ran out of memory twice and cannot be divided further: ", failure->text);
  }
}

GRADACCUM_INLINE void MemoryFitter::find_parts(torch::nn::Module& module,
                                               const std::vector<CheckpointedSequential>& more) {
  search_.find_parts(module, more);
  if (!search_.searches()) return;
  expected_gradient_bytes_ = 0;
  for (auto& parameter : module.parameters())
    if (parameter.requires_grad()) expected_gradient_bytes_ += static_cast<std::int64_t>(parameter.nbytes());
}

GRADACCUM_INLINE std::optional<std::int64_t> MemoryFitter::known_rows(const RowKind& kind) const {
  std::optional<std::int64_t> most;
  for (auto& known : known_) {
    const auto rows = plan_of(known).fits().rows;
    if (known.kind.covers(kind) && rows > 0) most = std::max(most.value_or(0), rows);
  }
  return most;
}

/// Returns a kind's index. A new kind starts with the rows known for the next larger kind.
GRADACCUM_INLINE std::size_t MemoryFitter::index_of(const RowKind& kind) {
  const auto known = std::ranges::find(known_, kind, &Known::kind);
  if (known != known_.end()) return static_cast<std::size_t>(known - known_.begin());
  const Known* larger = nullptr;
  for (auto& other : known_)
    if (other.kind.covers(kind) && (!larger || other.kind.elements < larger->kind.elements)) larger = &other;
  Known added{kind, {}, {}};
  if (larger) {  // its rows take more: upper bounds
    added.plan.measured(larger->plan.fits(), /*certain=*/false);
    added.checkpointed.measured(larger->checkpointed.fits(), /*certain=*/false);
  }
  known_.push_back(std::move(added));
  plan_.layouts.push_back({kind.text});
  return known_.size() - 1;
}

/// Queries the device's memory twice, since the first update may allocate the optimizer's state.
GRADACCUM_INLINE std::int64_t MemoryFitter::budget(c10::Device device) {
  if (limits_.budget > 0) return plan_.budget = limits_.budget;
  if (queries_++ < 2) {
    const auto available = available_memory(device).value_or(0);
    plan_.budget = device.is_cpu() ? available / 5 * 4 : available / 10 * 9;  // the CPU runs out without warning
  }
  return plan_.budget > 0 ? plan_.budget : std::numeric_limits<std::int64_t>::max() / 4;
}

/// Returns the rows that fit into `bytes` together with gradients and the budget of checkpointed parts.
GRADACCUM_INLINE std::int64_t MemoryFitter::rows_for(Known& known, std::int64_t bytes) {
  const auto most = search_.way().most / std::max<std::int64_t>(known.kind.elements, 1);
  return std::min(plan_of(known).rows_for(bytes - gradient_bytes() - search_.budget(), limits_.min_rows),
                  std::max(most, limits_.min_rows));
}

GRADACCUM_INLINE void MemoryFitter::choose_rows(std::size_t kind, std::int64_t bytes) {
  search_.share(bytes - gradient_bytes());
  plan_.checkpoint_budget = search_.budget();
  auto& layout = plan_.layouts[kind];
  const auto rows = rows_for(known_[kind], bytes);
  if (rows == layout.rows) return;
  layout.rows = rows;
  layout.predicted_bytes = gradient_bytes() + search_.budget() + plan_of(known_[kind]).bytes_for(rows).value_or(0);
  layout.measured_bytes = 0;
}

/// Returns the rows of the next micro-batch: at most `most`, and so that the rest can be divided into `least` to
/// `most`, too. If that is impossible, one micro-batch has more.
GRADACCUM_INLINE std::int64_t rows_of_piece(std::int64_t left, std::int64_t most, std::int64_t least) {
  if (left <= most || left < 2 * least) return left;
  for (auto rows = most; rows >= least; --rows)
    if ((left - rows + most - 1) / most * least <= left - rows) return rows;
  return std::min(most, left - least);
}

/// Runs the batch once. If a window's first micro-batch takes too much, runs the next to see its memory without
/// gradients. The first micro-batch on a device is run without measuring, and undone: a device's libraries allocate
/// workspaces at their first use on a thread and keep them (cuBLAS at the first matrix product, forward and backward).
GRADACCUM_INLINE auto MemoryFitter::attempt(const DividedBatch& batch, bool may_begin_again) -> std::optional<Failure> {
  const bool warms_up = !batch.device.is_cpu() && warm_device_ != batch.device && MemoryMeter::possible();
  if (known_.empty() && MemoryMeter::possible()) search_.probe();
  std::optional<MemoryMeter> meter;
  if (!warms_up && MemoryMeter::possible()) meter.emplace();
  const auto bytes = budget(batch.device);
  const auto kind = index_of(batch.kind);
  plan_.gradient_bytes = std::max(plan_.gradient_bytes, batch.gradient_bytes);
  plan_.last_rows.clear();
  std::optional<Failure> first;
  for (Piece piece; piece.to < batch.rows;) {
    choose_rows(kind, bytes);
    const auto rows = plan_.layouts[kind].rows;
    piece = {.from = piece.to, .before = batch.gradient_bytes};
    piece.to = piece.from + rows_of_piece(batch.rows - piece.from, rows, limits_.min_rows);
    // A loss scale that fits the first micro-batch would be too large for one of more than twice the rows.
    const bool outgrows_first = !plan_.last_rows.empty() && piece.rows() > 2 * plan_.last_rows.front();
    if (may_begin_again && !first && outgrows_first && batch.is_scaled()) return Failure{.is_none = true};
    const bool probes = search_.probes();
    auto failure = run(batch, piece, meter ? &*meter : nullptr, plan_of(known_[kind]));
    if (!failure && warms_up) {
      warm_device_ = batch.device;
      return Failure{.is_none = true};
    }
    const bool is_least =
        rows <= limits_.min_rows || piece.rows() > rows || batch.rows < 2 * limits_.min_rows;  // cannot be divided
    if (first) {
      first->bytes = std::max(first->bytes, piece.bytes());
      return first;
    }
    if (failure) {
      failure->is_least = is_least;
      if (!is_least || failure->bytes == 0 || piece.from > 0 || piece.to == batch.rows) return failure;
      first = failure;
    }
    plan_.last_rows.push_back(piece.rows());
    if (probes || piece.rows() != rows) continue;  // a probe may run another way than it selects
    auto& measured = plan_.layouts[kind].measured_bytes;
    measured = std::max(measured, piece.bytes());
    const bool has_more = piece.rows() < batch.rows;
    if (!is_timed(batch, piece) || (has_more && rows_for(known_[kind], bytes) != rows)) continue;
    const auto elements = rows * std::max<std::int64_t>(known_[kind].kind.elements, 1);  // longer rows take longer
    search_.took(elements, piece.seconds, has_more);
  }
  return first;
}

/// Runs and measures a micro-batch. Returns a failure if it ran out of memory, or took more than a given budget. The
/// first of a window is an upper bound, since it allocates gradients, too. Checkpointed parts count by their plan,
/// which may be for more rows.
GRADACCUM_INLINE auto MemoryFitter::run(const DividedBatch& batch, Piece& piece, MemoryMeter* meter, RowPlan& plan)
    -> std::optional<Failure> {
  if (meter) meter->reset_peak();
  const auto live = meter ? meter->live_bytes(batch.device) : 0;
  piece.before += live;
  const auto start = std::chrono::steady_clock::now();
  try {
    piece.of_kind = batch.run(piece.from, piece.to);
    if (is_timed(batch, piece) && !batch.device.is_cpu())
      c10::impl::VirtualGuardImpl(batch.device.type()).synchronizeDevice(batch.device.index());
  } catch (const std::exception& error) {
    if (!is_out_of_memory(std::current_exception())) throw;
    plan.failed({std::max(piece.rows(), plan.fits().rows), 0});
    const auto* const torch = dynamic_cast<const c10::Error*>(&error);
    return Failure{.rows = piece.rows(), .text = torch ? torch->what_without_backtrace() : error.what()};
  }
  piece.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!meter) return std::nullopt;
  piece.own = meter->peak_bytes(batch.device) - live;
  plan_.gradient_bytes = std::max(plan_.gradient_bytes, batch.gradient_bytes + meter->live_bytes(batch.device));
  const bool first = piece.before == 0;
  const RowPlan::Point point{piece.rows(), std::max({piece.own - search_.bytes(), piece.own / 4, std::int64_t{1}})};
  if (plan_.budget == 0 || piece.bytes() <= plan_.budget) {
    if (piece.of_kind && (!first || plan.empty())) plan.measured(point, !first);
    // The first micro-batch may have had its peak before its gradients were complete.
    if (search_.probes() && piece.from == 0)
      search_.end_probe(piece.bytes() + std::min(gradient_bytes(), search_.bytes()), plan_.budget);
    return std::nullopt;
  }
  plan.failed(point);
  if (limits_.budget == 0) return std::nullopt;  // the device had more than it reported
  return Failure{.rows = piece.rows(), .bytes = piece.bytes()};
}

/// Returns whether the search times a micro-batch. A batch that runs in one micro-batch cannot become faster.
GRADACCUM_INLINE bool MemoryFitter::is_timed(const DividedBatch& batch, const Piece& piece) const {
  return search_.searches() && (search_.way().checkpointed || piece.rows() < batch.rows);
}

GRADACCUM_INLINE void MemoryFitter::state(Archive& archive) {
  auto number = static_cast<std::int64_t>(known_.size());
  archive("layouts", number);
  archive("gradient_bytes", plan_.gradient_bytes);
  TORCH_CHECK(number >= 0 && static_cast<std::size_t>(number) <= archive.values().size() + known_.size() &&
                  plan_.gradient_bytes >= 0,
              "FitMemory: the counts of a saved plan must be >= 0 and fit its values, got ", number);
  search_.state(archive);
  if (archive.loading()) known_.assign(static_cast<std::size_t>(number), {}), plan_.layouts.clear();
  for (std::size_t i = 0; i < known_.size(); ++i) {
    auto& [kind, plan, checkpointed] = known_[i];
    std::string sizes;
    for (const auto size : kind.sizes) sizes += plain_text(sizes.empty() ? "" : " ", size);
    const auto name = "layout-" + std::to_string(i) + ".";
    archive(name + "form", kind.form);
    archive(name + "sizes", sizes);
    archive(name + "elements", kind.elements);
    archive(name + "batch", kind.text);
    archive(name + "plan", plan);
    archive(name + "checkpointed", checkpointed);
    if (!archive.loading()) continue;
    auto numbers = plain_stream(sizes);
    for (std::int64_t size = 0; numbers >> size;) kind.sizes.push_back(size);
    plan_.layouts.push_back({kind.text});
  }
}

GRADACCUM_INLINE std::optional<std::int64_t> number_in(const std::filesystem::path& file) {
  return bytes_after("", " " + text_of_system_file(file));
}

/// Returns the bytes left in one control group. Inactive file pages count as free, since they are reclaimed on demand.
GRADACCUM_INLINE std::optional<std::int64_t> memory_left_in(const std::filesystem::path& folder) {
  const auto statistics = text_of_system_file(folder / "memory.stat");
  for (const auto& [limit, usage, inactive] :
       {std::array{"memory.max", "memory.current", "inactive_file"},
        std::array{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}})
    if (const auto most = number_in(folder / limit))
      return *most - number_in(folder / usage).value_or(0) + bytes_after(inactive, statistics).value_or(0);
  return std::nullopt;
}

GRADACCUM_INLINE std::optional<std::int64_t> least(std::optional<std::int64_t> one, std::optional<std::int64_t> other) {
  if (!one || !other) return one ? one : other;
  return std::min(*one, *other);
}

GRADACCUM_INLINE std::optional<std::int64_t> memory_left_by_groups(const std::filesystem::path& groups,
                                                                   const std::filesystem::path& mounted) {
  std::optional<std::int64_t> left;
  for (auto& folder : control_groups(text_of_system_file(groups), "memory"))
    left = least(left, memory_left_in(mounted / folder));
  return left;
}

/// Returns the address space left by `ulimit -v`.
GRADACCUM_INLINE std::optional<std::int64_t> addresses_left() {
  const auto limit = limit_of_addresses();
  if (!limit) return std::nullopt;
  return *limit - bytes_after("VmSize", text_of_system_file("/proc/self/status")).value_or(0);
}

GRADACCUM_INLINE std::optional<std::int64_t> available_memory(c10::Device device) {
  if (!device.is_cpu()) {
    static_cast<void>(at::empty({0}, device));  // before its first use the allocator has no statistics
    const auto memory = device_memory(device);
    if (!memory) return std::nullopt;
    return memory->free + memory->reserved - memory->allocated;
  }
  const auto available = bytes_after("MemAvailable", text_of_system_file("/proc/meminfo"));
  const auto left = least(available, least(memory_left_by_groups(), addresses_left()));
  return left ? std::optional(std::max<std::int64_t>(*left, 0)) : std::nullopt;
}

/// Matches messages, too: the CPU's allocator, cuBLAS and cuDNN have no class for this error.
GRADACCUM_INLINE bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const c10::Error& known) {
    const std::string_view text(known.msg());
    return std::ranges::any_of(std::array{"DefaultCPUAllocator: ", "out of memory", "_ALLOC_FAILED"},
                               [&](auto* part) { return text.find(part) != std::string_view::npos; });
  } catch (const std::bad_alloc&) {
    return true;
  } catch (...) {
    return false;
  }
}

GRADACCUM_INLINE void release_kept_memory(c10::Device device) {
  at::autocast::clear_cache();
  if (!device.is_cpu()) empty_device_cache(device);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
