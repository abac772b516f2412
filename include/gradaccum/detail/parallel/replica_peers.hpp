// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/arrival_scope.hpp>
#include <gradaccum/detail/parallel/gradient_exchange.hpp>
#include <gradaccum/detail/parallel/links.hpp>
#include <gradaccum/detail/parallel/rank_states.hpp>
#include <gradaccum/detail/parallel/window_totals.hpp>
#include <gradaccum/detail/peers.hpp>
#include <gradaccum/detail/window_gradients.hpp>
#include <gradaccum/process_group.hpp>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace gradaccum::detail {

/// The other replicas of a model: windows become those of all of them.
///
/// When a rank has closed its window it says so, with its weight, and all hear the sums; a rank without data says that
/// instead, and follows as long as another has closed one. So ranks may have different numbers of micro-batches in a
/// window, and of windows.
class ReplicaPeers final : public Peers {
 public:
  /// `group` has more than one process.
  ReplicaPeers(ProcessGroup group, std::int64_t bucket_bytes, bool overlap)
      : group_(std::move(group)), links_(group_.links()), bucket_bytes_(bucket_bytes), overlap_(overlap) {}

  int rank() const override { return group_.rank(); }
  /// The replicas are gone, and with them their connections: whoever goes on to train hears of it.
  void disconnect() { exchange_.reset(), links_.reset(), group_ = {}; }

  std::function<WindowTotals()> report = [] { return WindowTotals(); };             ///< what else a rank tells
  std::function<void(const WindowTotals& own, const WindowTotals& all)> hear = {};  ///< what came of it

  void backward(const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in,
                const std::function<void()>& run) override {
    if (!overlap_) return run();
    exchange_ = exchange_of(window, accumulate_in);
    try {
      const ArrivalScope scope(exchange_);
      run();
    } catch (...) {
      end_window();
      throw;
    }
  }

  void end_window() override {
    if (const auto exchange = std::exchange(exchange_, {}); exchange && exchange->begun())
      links_->give_up("a window was discarded, or met an exception, when some of its gradients had been sent");
  }

  void reduce(const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in) override {
    const auto exchange = exchange_ ? std::exchange(exchange_, {}) : exchange_of(window, accumulate_in);
    const auto all = followed_ ? *std::exchange(followed_, {}) : agree(window, *exchange, /*active=*/true);
    exchange->finish(all.used);
    window->set_weights(1, all.weight);
  }

  bool others_continue(const std::shared_ptr<WindowGradients>& window) override {
    TORCH_CHECK(!followed_, "Replicas: others_continue() has said so, and the step() with the others has not come yet");
    auto all = agree(window, *exchange_of(window, {}), /*active=*/false);
    const bool others = all.active > 0;
    if (others) followed_ = std::move(all);
    return others;
  }

  void gather(Archive& archive) const override { RankStates(group_).gather(archive); }
  void pick(Archive::Values& values) const override { RankStates::pick(values, group_.rank()); }

  std::string say(const std::function<std::string()>& on_rank_0) const override {
    std::string error, text;
    if (group_.rank() == 0) {
      try {
        text = on_rank_0();
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
    }
    error = group_.all_gather(error)[0];
    if (!error.empty()) throw std::runtime_error(error);
    return group_.all_gather(text)[0];
  }

 private:
  std::shared_ptr<GradientExchange> exchange_of(const std::shared_ptr<WindowGradients>& window,
                                                std::optional<c10::ScalarType> accumulate_in) const {
    TORCH_CHECK(links_, "Replicas: must live as long as the accumulator is trained with, and are gone");
    return std::make_shared<GradientExchange>(links_, window, accumulate_in, bucket_bytes_);
  }

  WindowTotals agree(const std::shared_ptr<WindowGradients>& window, const GradientExchange& exchange, bool active) {
    auto own = report();
    own.weight = window->items();
    own.active = active ? 1 : 0;
    own.used = exchange.used();
    const auto sums = own.to_tensor();
    links_->wait(links_->begin_sum(Links::Line::agreement, sums), "the others to close their window");
    auto all = WindowTotals::from_tensor(sums);
    if (hear) hear(own, all);
    return all;
  }

  ProcessGroup group_;
  std::shared_ptr<Links> links_;
  const std::int64_t bucket_bytes_;
  const bool overlap_;
  std::shared_ptr<GradientExchange> exchange_;  // of the window whose last backward has run
  std::optional<WindowTotals> followed_;        // what was agreed about the window that is to be closed with others
};

}  // namespace gradaccum::detail
