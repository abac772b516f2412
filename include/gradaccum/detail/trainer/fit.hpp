// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/data_position.hpp>
#include <gradaccum/detail/trainer/fit_scope.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/training_state.hpp>

#include <cstdint>
#include <exception>

namespace gradaccum::detail {

/// One `fit` of a Trainer, which it is a friend of: the epochs, from the first or from a state on.
template <class Trainer, class Batches>
class Fit {
 public:
  Fit(Trainer& trainer, Batches& batches) : trainer_(trainer), batches_(batches) {}

  FitReport run(const FitOptions& options) {
    const FitScope scope(trainer_.module(), trainer_.device(), status_,
                         {.options = options, .batches = batches_of(batches_)});
    const DataScope holding(data_, batches_);
    return trainer_.policies_.template in_scopes<hooks::fit_scope>([&] {
      return trainer_.or_discard([&] {
        resume();
        or_give_up([&] {
          while (!status_.done() || data_.is_in_epoch()) run_epoch();  // one that was done may have its epoch to end
        });
        return scope.report();
      });
    });
  }

 private:
  /// An exception here is the end for other processes, too: they would wait for windows that never come.
  template <class Work>
  void or_give_up(const Work& work) {
    try {
      work();
    } catch (const std::exception& error) {
      if (const auto peers = trainer_.peers()) peers->give_up(error.what());
      throw;
    }
  }

  /// Policies begin the epoch before they are loaded: so they may do both.
  void resume() {
    const auto* const peers = trainer_.peers().get();
    const auto folder = of_rank_0(peers, [&] { return state_to_resume(status_.options); });
    if (folder.empty()) return;
    auto archive = on_all(peers, [&] { return open_state(folder, status_.options.allow_changes, peers); });
    status_.resumed_from = folder.string();
    if (const auto epoch = epoch_in_hand(archive)) begin_epoch(*epoch);
    on_all(peers, [&] {
      load_state(archive, trainer_);
      return true;
    });
  }

  void begin_epoch(std::int64_t epoch) {
    status_.epoch = epoch;
    data_.begin_epoch();
    trainer_.template call<hooks::on_epoch_begin>(epoch);
  }

  void run_epoch() {
    if (!data_.resumes()) begin_epoch(trainer_.counts_.epochs++);
    if (!data_.exhausted() && !status_.done()) run_batches();
    if (!interrupted() && (status_.options.tail == Tail::flush || status_.options.smoke)) {
      trainer_.flush();
      at_boundary();
    }
    if (interrupted()) return;
    if (status_.options.tail == Tail::drop) trainer_.discard();
    go_along();
    if (interrupted()) return;
    status_.end_epoch(trainer_.window_.has_weight());
    data_.end_epoch();
    trainer_.policies_.template processes_first<hooks::on_epoch_end>(status_.epoch);
    trainer_.policies_.others_continue();  // none do: what somebody wanted since, to stop say, is known to all now
    at_boundary();
  }

  /// With other processes, as long as they have batches.
  void go_along() {
    while (!interrupted()) {
      const bool continues = trainer_.policies_.others_continue();
      if (continues) trainer_.flush();  // with theirs
      if (continues || interrupted()) at_boundary();
      if (!continues) return;
    }
  }

  void run_batches() {
    for (auto&& batch : batches_) {
      if (data_.skips(batch)) continue;
      data_.see(batch);
      trainer_.step(batch);
      at_boundary();
      data_.forget();
      if (status_.done()) return;
    }
    data_.exhaust();
  }

  void at_boundary() { trainer_.template call<hooks::at_boundary>(); }
  bool interrupted() const { return status_.signal != 0; }

  Trainer& trainer_;
  Batches& batches_;
  FitStatus& status_ = trainer_.status_;
  DataPosition& data_ = trainer_.data_;
};

}  // namespace gradaccum::detail
