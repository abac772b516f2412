// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/replica_peers.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/gradient_exchange.hpp>
#include <gradaccum/detail/parallel/nccl.hpp>
#include <gradaccum/detail/parallel/piece_exchange.hpp>
#include <gradaccum/detail/parallel/rank_states.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/detail/window/arrival_scope.hpp>
#include <gradaccum/detail/window/optimizer_of_shards.hpp>
#include <gradaccum/detail/window/shards.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/ops/tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <exception>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE ReplicaPeers::ReplicaPeers(std::shared_ptr<Links> links, std::int64_t bucket_bytes, bool overlap,
                                            bool sharded)
    : links_(std::move(links)), bucket_bytes_(bucket_bytes), overlap_(overlap), sharded_(sharded) {}

GRADACCUM_INLINE void ReplicaPeers::connect(const std::vector<at::Tensor>& parameters) {
  const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
  line_ = links_->connect_devices(links_->all_gather(device_place(parameters)), device);
}

GRADACCUM_INLINE void ReplicaPeers::disconnect() {
  end_window();
  links_.reset();
}

GRADACCUM_INLINE int ReplicaPeers::rank() const { return links_ ? links_->rank() : 0; }

GRADACCUM_INLINE void ReplicaPeers::join(AnyOptimizer& optimizer) {
  if (!sharded_) return;
  const auto* const itself = optimizer.torch_optimizer();
  TORCH_CHECK(itself,
              "Shard: the optimizer must be a torch::optim::Optimizer, whose groups can be given parts of the "
              "parameters; got ",
              optimizer.name());
  TORCH_CHECK(
      itself->state().empty(), "Shard: ", optimizer.name(),
      " must not have any state yet, as torch::optim::Adagrad has from the beginning, and others when they have "
      "stepped; load a state when the Replicas are made, by ga::load or ga::OptimizerState of the accumulator");
  divided_ = itself;
  shards_ =
      std::make_shared<Shards>(optimizer.parameters(), optimizer.steps_by_elements(), rank(), links_->world_size());
}

GRADACCUM_INLINE std::string ReplicaPeers::settings_of_divided() const {
  std::string lines;
  for (std::size_t i = 0; divided_ != nullptr && i < divided_->param_groups().size(); ++i)
    lines += c10::str("learning rate of group ", i, ": ", divided_->param_groups()[i].options().get_lr(), "\n");
  return lines;
}

GRADACCUM_INLINE void ReplicaPeers::backward(const std::shared_ptr<WindowGradients>& window,
                                             std::optional<c10::ScalarType> accumulate_in,
                                             const std::function<void()>& run) {
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

GRADACCUM_INLINE void ReplicaPeers::end_window() {
  const auto exchange = std::exchange(exchange_, {});
  const bool agreed = std::exchange(followed_, {}).has_value();
  if (agreed || (exchange && exchange->begun()))
    links_->give_up("a window was discarded, or met an exception, when others counted on its gradients");
}

GRADACCUM_INLINE void ReplicaPeers::reduce(const std::shared_ptr<WindowGradients>& window,
                                           std::optional<c10::ScalarType> accumulate_in) {
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

/// Others wait for this rank's pieces: they hear of an exception.
GRADACCUM_INLINE bool ReplicaPeers::step(AnyOptimizer& optimizer, const std::shared_ptr<WindowGradients>& window) {
  if (!shards_) return take_step(optimizer, Gradients(window));
  try {
    TORCH_CHECK(optimizer.steps_by_elements() || !shards_->any_is_cut(), "Shard: ", optimizer.name(),
                " was made to look at whole parameters after they had been divided; call stochastic_rounding before "
                "the Replicas are made");
    const auto places = window->sums().places();
    OptimizerOfShards of_shards(optimizer, *shards_, window);
    const bool moved = take_step(of_shards, Gradients(window));
    if (moved) exchange_pieces(*links_, line_, *shards_, places, bucket_bytes_);
    return moved;
  } catch (const std::exception& error) {
    links_->give_up(error.what());
    throw;
  }
}

GRADACCUM_INLINE bool ReplicaPeers::others_continue(const std::shared_ptr<WindowGradients>& window) {
  TORCH_CHECK(!followed_, "Replicas: others_continue() has said so, and the step() with the others has not come yet");
  auto all = agree(window, *exchange_of(window, {}), /*active=*/false);
  const bool others = all.active > 0;
  if (others) followed_ = std::move(all);
  return others;
}

GRADACCUM_INLINE void ReplicaPeers::add_up(const at::Tensor& tensor) const {
  if (links_) links_->all_reduce(tensor);
}

GRADACCUM_INLINE void ReplicaPeers::gather(Archive& archive) const {
  TORCH_CHECK(links_ || !shards_, "Replicas: must live as long as states are saved of what they have divided");
  if (!links_) return;
  try {
    gather_states(*links_, archive);
  } catch (const std::exception& error) {
    links_->give_up(error.what());
    throw;
  }
}

GRADACCUM_INLINE void ReplicaPeers::pick(Archive::Values& values) const { pick_state(values, rank()); }

GRADACCUM_INLINE void ReplicaPeers::give_up(const std::string& why) {
  if (links_) links_->give_up(why);
}

GRADACCUM_INLINE std::shared_ptr<GradientExchange> ReplicaPeers::exchange_of(
    const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in) const {
  TORCH_CHECK(links_, "Replicas: must live as long as the accumulator is trained with, and are gone");
  return std::make_shared<GradientExchange>(links_, line_, window, accumulate_in, bucket_bytes_);
}

/// All ranks hear the sums of what each tells.
GRADACCUM_INLINE WindowTotals ReplicaPeers::agree(const std::shared_ptr<WindowGradients>& window,
                                                  const GradientExchange& exchange, bool active) {
  auto own = report ? report() : WindowTotals();
  own.weight = window->items();
  own.active = active ? 1 : 0;
  own.used = exchange.used();
  std::vector<double> numbers{own.weight, own.active, own.samples, own.micro_batches, own.loss, own.stop, own.signal};
  numbers.insert(numbers.end(), own.used.begin(), own.used.end());
  const auto sums = at::tensor(numbers, at::kDouble);
  links_->wait(links_->begin_sum(Links::Line::agreement, sums), "the others to close their window");
  const auto* const of_all = sums.const_data_ptr<double>();
  WindowTotals all{of_all[0], of_all[1], of_all[2], of_all[3],
                   of_all[4], of_all[5], of_all[6], std::vector<double>(of_all + 7, of_all + sums.numel())};
  if (hear) hear(own, all);
  return all;
}

GRADACCUM_INLINE std::vector<std::string> ReplicaPeers::texts_of_all(const std::string& own) const {
  return links_ ? links_->all_gather(own) : std::vector{own};
}

}  // namespace gradaccum::detail
