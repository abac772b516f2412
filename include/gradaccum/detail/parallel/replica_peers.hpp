// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/gradient_exchange.hpp>
#include <gradaccum/detail/parallel/links.hpp>
#include <gradaccum/detail/parallel/nccl.hpp>
#include <gradaccum/detail/parallel/rank_states.hpp>
#include <gradaccum/detail/parallel/window_totals.hpp>
#include <gradaccum/detail/window/arrival_scope.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/process_group.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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
  /// From device to device, where each rank has these on one of its own.
  void connect(const std::vector<at::Tensor>& parameters) {
    const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
    line_ = links_->connect_devices(group_.all_gather(device_place(parameters)), device);
  }
  /// The replicas are gone, and with them their connections: whoever goes on to train hears of it.
  void disconnect() {
    end_window();
    links_.reset(), group_ = {};
  }

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
    const auto exchange = std::exchange(exchange_, {});
    const bool agreed = std::exchange(followed_, {}).has_value();
    if (agreed || (exchange && exchange->begun()))
      links_->give_up("a window was discarded, or met an exception, when others counted on its gradients");
  }

  void reduce(const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in) override {
    if (!exchange_) exchange_ = exchange_of(window, accumulate_in);
    try {
      const auto all = followed_ ? *followed_ : agree(window, *exchange_, /*active=*/true);
      const auto unit = exchange_->finish(all.used, all.weight);
      window->set_weights(unit, all.weight);
    } catch (const std::exception& error) {
      links_->give_up(error.what());
      throw;
    }
    exchange_.reset(), followed_.reset();
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

  std::string say(const std::string& on_rank_0) const override {
    return group_.all_gather(group_.rank() == 0 ? on_rank_0 : "")[0];
  }
  std::string first_error(const std::string& own) const override {
    const auto all = group_.all_gather(own);
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      if (!all[rank].empty()) return c10::str("rank ", rank, ": ", all[rank].substr(0, all[rank].find('\n')));
    return "";
  }
  void give_up(const std::string& why) override {
    if (links_) links_->give_up(why);
  }

 private:
  std::shared_ptr<GradientExchange> exchange_of(const std::shared_ptr<WindowGradients>& window,
                                                std::optional<c10::ScalarType> accumulate_in) const {
    TORCH_CHECK(links_, "Replicas: must live as long as the accumulator is trained with, and are gone");
    return std::make_shared<GradientExchange>(links_, line_, window, accumulate_in, bucket_bytes_);
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
  Links::Line line_ = Links::Line::gradients;
  std::shared_ptr<GradientExchange> exchange_;  // of the window whose last backward has run
  std::optional<WindowTotals> followed_;        // what was agreed about the window that is to be closed with others
};

}  // namespace gradaccum::detail
