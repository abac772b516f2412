// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/replica_communicator.hpp>
#include <gradaccum/replicas.hpp>

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/parallel/gradient_exchange.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstring>
#include <exception>
#include <mutex>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <variant>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

/// Returns a line for each tensor. `describe` returns what must be the same on all ranks.
template <class Named, class Describe>
std::string described(const Named& tensors, const Describe& describe) {
  std::string lines;
  for (auto& tensor : tensors) lines += tensor.key() + ": " + describe(tensor.value()) + "\n";
  return lines;
}

/// Throws on all ranks if their lines are not equal, and names the first that differs.
GRADACCUM_INLINE void check_same_lines(const ProcessGroup& group, const std::string& lines, const char* what) {
  const auto all = group.all_gather(lines);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    std::istringstream first(all[0]), other(all[rank]);
    std::string expected, got;
    do {
      expected.clear(), got.clear();
      std::getline(first, expected), std::getline(other, got);
    } while (expected == got);
    TORCH_CHECK(false, "Replicas: ", what, " must be the same on all ranks, but rank 0 has '", expected, "', and rank ",
                rank, " has '", got, "'");
  }
}

/// Returns the dtype and shape, and whether the tensor is frozen.
GRADACCUM_INLINE std::string shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), tensor.requires_grad() ? "" : " frozen");
}

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<detail::ReplicaCommunicator> Replicas::peers_of(const ProcessGroup& group,
                                                                                 const ReplicasOptions& options) {
  TORCH_CHECK(options.bucket_bytes >= 1, "Replicas: bucket_bytes must be >= 1, got ", options.bucket_bytes);
  return group.connections() ? std::make_shared<detail::ReplicaCommunicator>(group.connections(), options) : nullptr;
}

GRADACCUM_INLINE Replicas::~Replicas() {
  if (peers_) peers_->disconnect();
}

GRADACCUM_INLINE void Replicas::begin(const ReplicasOptions& options,
                                      const std::vector<at::Tensor>& of_optimizer) const {
  auto lines = detail::described(model_->named_parameters(), detail::shape_of) +
               detail::described(model_->named_buffers(), detail::shape_of);
  for (auto& parameter : of_optimizer) lines += "in the optimizer: " + detail::shape_of(parameter) + "\n";
  lines += c10::str("in the optimizer, pieces: ", peers_->shards() ? peers_->shards()->number_of_pieces() : 0, "\n");
  detail::check_same_lines(group_, lines, "the model's parameters and buffers, and what is divided");
  broadcast(model_->parameters());
  broadcast(model_->buffers());
  peers_->connect(model_->parameters());
  if (!options.seed_by_rank || group_.rank() == 0) return;
  for (auto& [name, generator] : detail::default_generators()) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(generator.current_seed() + static_cast<std::uint64_t>(group_.rank()));
  }
}

GRADACCUM_INLINE void Replicas::broadcast(const std::vector<at::Tensor>& tensors) const {
  for (auto& tensor : tensors)
    if (tensor.defined()) group_.broadcast(tensor);
}

GRADACCUM_INLINE void Replicas::broadcast_buffers() const { broadcast(model_->buffers()); }

GRADACCUM_INLINE void Replicas::check_equal() const {
  if (!group_.connections()) return;
  const auto numbers = [](const at::Tensor& tensor) { return detail::fingerprint_of(tensor); };
  detail::check_same_lines(group_, detail::described(model_->named_parameters(), numbers),
                           "the parameters (dtype, shape, checksum)");
  detail::check_same_lines(group_, peers_->settings_of_divided(), "the settings of an optimizer that is divided");
}

}  // namespace gradaccum

namespace gradaccum::detail {

/// The exchange of a window's norms between all ranks, in flight or complete.
struct ReplicaCommunicator::NormsOfAll {
  std::weak_ptr<Connections> links;  // expire with the replicas, even if the window lives on
  Connections::Pending pending;
  at::Tensor said;  // each rank's norm in its own place, so the sum is exact; then the number of ranks with an overflow
  bool heard = false;

  WindowGradients::Measure wait() {
    if (!heard) {
      const auto open = links.lock();
      TORCH_CHECK(open && pending, "Replicas: must live as long as norms are asked for, and are gone");
      open->wait(pending, "the norms of all parts");
      heard = true;
      pending.reset();
    }
    const auto ranks = said.numel() - 1;
    return {l2_norm_of(said.narrow(0, 0, ranks)).item<double>(), said.const_data_ptr<double>()[ranks] == 0};
  }
};

GRADACCUM_INLINE ReplicaCommunicator::ReplicaCommunicator(std::shared_ptr<Connections> links,
                                                          const ReplicasOptions& options)
    : connections_(std::move(links)), options_(options) {}

GRADACCUM_INLINE void ReplicaCommunicator::connect(const std::vector<at::Tensor>& parameters) {
  const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
  line_ = connections_->connect_devices(connections_->all_gather(device_place(parameters)), device);
}

GRADACCUM_INLINE void ReplicaCommunicator::disconnect() {
  if (norms_) norms_->pending.reset();
  norms_.reset();
  end_window();
  connections_.reset();
}

GRADACCUM_INLINE int ReplicaCommunicator::rank() const { return connections_ ? connections_->rank() : 0; }

GRADACCUM_INLINE void ReplicaCommunicator::join(AnyOptimizer& optimizer) {
  if (options_.shard == Shard::none) return;
  const auto* const itself = optimizer.torch_optimizer;
  TORCH_CHECK(itself,
              "Shard: the optimizer must be a torch::optim::Optimizer, whose groups can be given parts of the "
              "parameters; got ",
              optimizer.name());
  TORCH_CHECK(
      itself->state().empty(), "Shard: ", optimizer.name(),
      " must not have any state yet, as torch::optim::Adagrad has from the beginning, and others when they have "
      "stepped; load a state when the Replicas are made, by ga::load or ga::OptimizerState of the accumulator");
  divided_ = itself;
  shards_ = std::make_shared<Shards>(optimizer.parameters(), optimizer.steps_by_elements(), rank(),
                                     connections_->world_size());
}

GRADACCUM_INLINE std::string ReplicaCommunicator::settings_of_divided() const {
  std::string lines;
  for (std::size_t i = 0; divided_ != nullptr && i < divided_->param_groups().size(); ++i)
    lines += c10::str("learning rate of group ", i, ": ", divided_->param_groups()[i].options().get_lr(), "\n");
  return lines;
}

GRADACCUM_INLINE void ReplicaCommunicator::begin_exchange(const std::shared_ptr<WindowGradients>& window,
                                                          std::optional<c10::ScalarType> accumulate_in) {
  TORCH_CHECK(connections_, "Replicas: must live as long as the accumulator is trained with, and are gone");
  if (shards_)
    exchange_ =
        std::make_shared<GradReduceScatter>(connections_, line_, window, accumulate_in, options_.bucket_bytes, shards_);
  else
    exchange_ = std::make_shared<GradAllReduce>(connections_, line_, window, accumulate_in, options_.bucket_bytes);
}

GRADACCUM_INLINE void ReplicaCommunicator::backward(const std::shared_ptr<WindowGradients>& window,
                                                    std::optional<c10::ScalarType> accumulate_in,
                                                    const std::function<void()>& run) {
  if (!options_.overlap && !take_each_backward()) return run();
  try {
    if (!exchange_) begin_exchange(window, accumulate_in);
    shards_ ? run_round(*window, accumulate_in, run) : run_and_send(run);
  } catch (...) {
    end_window();
    throw;
  }
}

GRADACCUM_INLINE void ReplicaCommunicator::run_and_send(const std::function<void()>& run) {
  if (!options_.overlap) return run();
  const GradReadyScope scope(exchange_);
  run();
}

/// Announces that this rank runs a backward, without knowing which others do: all will send.
GRADACCUM_INLINE void ReplicaCommunicator::run_round(WindowGradients& window,
                                                     std::optional<c10::ScalarType> accumulate_in,
                                                     const std::function<void()>& run) {
  connections_->begin_exchange(exchange_.get());
  at::Tensor sums;
  const auto said = begin_sums(sums, {.running = 1, .used = std::vector<double>(exchange_->parameters().size())});
  counted_on_ = true;
  window.set_elsewhere();
  exchange_->begin_round();
  run_and_send(run);
  window.fold_into_sums(accumulate_in);  // those that were not sent
  exchange_->end_round();
  connections_->wait(said, "the others to send gradients");
}

GRADACCUM_INLINE void ReplicaCommunicator::end_window() {
  const auto exchange = std::exchange(exchange_, {});
  const bool agreed = std::exchange(followed_, {}).has_value();
  const bool counted_on = std::exchange(counted_on_, false);
  if (shards_) shards_->clear_gradients();
  if (connections_) connections_->end_exchange(exchange.get());
  if (connections_ && (counted_on || agreed || (exchange && exchange->begun())))
    connections_->give_up("a window was discarded, or met an exception, when others counted on its gradients");
}

GRADACCUM_INLINE void ReplicaCommunicator::or_give_up(c10::function_ref<void()> work) const {
  try {
    work();
  } catch (const std::exception& error) {
    if (connections_) connections_->give_up(error.what());
    throw;
  }
}

GRADACCUM_INLINE void ReplicaCommunicator::reduce(const std::shared_ptr<WindowGradients>& window,
                                                  std::optional<c10::ScalarType> accumulate_in) {
  or_give_up([&] {
    if (!exchange_) begin_exchange(window, accumulate_in);
    const auto all = followed_ ? *followed_ : agree(window, /*active=*/true);
    if (!shards_)
      exchange_->end_round();
    else if (all.unsent > 0)
      exchange_->send_round();
    const auto unit = exchange_->finish(all.used, all.weight);
    window->set_weights(unit, all.weight);
    if (shards_) measure_all(*window);
    used_.clear();
    for (std::size_t place = 0; place < all.used.size(); ++place)
      if (all.used[place] > 0) used_.push_back(place);
  });
  exchange_.reset(), followed_.reset();
  counted_on_ = false;
}

/// Begins the exchange on all ranks now, so that a rank that reads the norm later does not wait for those that do not.
GRADACCUM_INLINE void ReplicaCommunicator::measure_all(WindowGradients& window) {
  if (norms_) norms_->wait();  // of a window that was not stepped: each rank waits for it once
  const auto own = window.measure();
  const auto said = at::zeros({connections_->world_size() + 1}, at::kDouble);
  said.mutable_data_ptr<double>()[rank()] = own.norm;
  said.mutable_data_ptr<double>()[connections_->world_size()] = own.finite ? 0 : 1;
  norms_ = std::make_shared<NormsOfAll>(
      NormsOfAll{connections_, connections_->begin_all_reduce(Connections::Channel::agreement, said), said});
  window.set_measure_of_all([norms = norms_] { return norms->wait(); });
}

/// Returns the result of the whole step, even if this rank has no piece.
GRADACCUM_INLINE StepResult ReplicaCommunicator::step_own(AnyOptimizer& optimizer, Gradients gradients) const {
  TORCH_CHECK(optimizer.steps_by_elements() || !shards_->any_is_cut(), "Shard: ", optimizer.name(),
              " was made to look at whole parameters after they had been divided; call stochastic_rounding before "
              "the Replicas are made");
  shards_->check(*optimizer.torch_optimizer);
  if (gradients.overflowed()) return StepResult::skipped;  // on all ranks: the host knows the findings on all pieces
  if (!gradients.raw().empty())
    shards_->with_own(*optimizer.torch_optimizer, [&] { step_optimizer(optimizer, gradients); });
  return StepResult::stepped;
}

GRADACCUM_INLINE StepResult ReplicaCommunicator::step(AnyOptimizer& optimizer,
                                                      const std::shared_ptr<WindowGradients>& window) {
  if (!shards_) return step_optimizer(optimizer, Gradients(window));
  TORCH_CHECK(connections_, "Replicas: must live as long as the accumulator is trained with, and are gone");
  connections_->check_usable();  // otherwise this rank's pieces would move before it notices a failure
  StepResult result = StepResult::empty;
  or_give_up([&] {
    if (!used_.empty()) result = step_own(optimizer, Gradients(window));
    if (result) all_gather_parameters(*connections_, line_, *shards_, used_, options_.bucket_bytes);
    window->wait_for_measure();
    norms_.reset();
  });
  return result;
}

GRADACCUM_INLINE bool ReplicaCommunicator::others_continue(const std::shared_ptr<WindowGradients>& window,
                                                           std::optional<c10::ScalarType> accumulate_in) {
  TORCH_CHECK(!followed_, "Replicas: others_continue() has said so, and the step() with the others has not come yet");
  or_give_up([&] {
    if (!exchange_) begin_exchange(window, accumulate_in);
    followed_ = agree(window, /*active=*/false);
  });
  if (followed_->active > 0) return true;
  followed_.reset();
  if (!exchange_->begun()) exchange_.reset();  // otherwise it has sums of a window that goes on
  return false;
}

GRADACCUM_INLINE void ReplicaCommunicator::all_reduce(const at::Tensor& tensor) const {
  if (connections_) connections_->all_reduce(tensor);
}

GRADACCUM_INLINE void ReplicaCommunicator::gather(Archive& archive) const {
  TORCH_CHECK(connections_ || !shards_, "Replicas: must live as long as states are saved of what they have divided");
  if (connections_) or_give_up([&] { gather_states(*connections_, archive); });
}

GRADACCUM_INLINE void ReplicaCommunicator::keep_own_values(Archive::Values& values) const {
  pick_state(values, rank());
}

GRADACCUM_INLINE void ReplicaCommunicator::give_up(const std::string& why) {
  if (connections_) connections_->give_up(why);
}

/// Begins to sum numbers over all ranks. `sums` has them when the result has been waited for.
GRADACCUM_INLINE Connections::Pending ReplicaCommunicator::begin_sums(at::Tensor& sums, const WindowTotals& own) const {
  std::vector<double> numbers{own.weight, own.active, own.samples, own.micro_batches, own.loss,
                              own.stop,   own.signal, own.running, own.unsent};
  numbers.insert(numbers.end(), own.used.begin(), own.used.end());
  sums = at::tensor(numbers, at::kDouble);
  return connections_->begin_all_reduce(Connections::Channel::agreement, sums);
}

GRADACCUM_INLINE WindowTotals ReplicaCommunicator::sums_of_all(const WindowTotals& own) const {
  at::Tensor sums;
  connections_->wait(begin_sums(sums, own), "the others to close their window");
  const auto* const all = sums.const_data_ptr<double>();
  return {all[0], all[1], all[2], all[3], all[4],
          all[5], all[6], all[7], all[8], std::vector<double>(all + 9, all + sums.numel())};
}

/// Sums each rank's numbers over all, and repeats while a rank is inside a window's backward.
GRADACCUM_INLINE WindowTotals ReplicaCommunicator::agree(const std::shared_ptr<WindowGradients>& window, bool active) {
  auto own = report ? report() : WindowTotals();
  own.weight = window->items();
  own.active = active ? 1 : 0;
  own.used = exchange_->used();
  own.unsent = exchange_->has_unsent() ? 1 : 0;
  auto all = sums_of_all(own);
  while (all.running > 0) {
    window->set_elsewhere();
    exchange_->send_round();
    own.unsent = 0;
    all = sums_of_all(own);
  }
  if (on_reduced) on_reduced(own, all);
  return all;
}

GRADACCUM_INLINE std::vector<std::string> ReplicaCommunicator::all_gather_text(const std::string& own) const {
  return connections_ ? connections_->all_gather(own) : std::vector{own};
}

/// A sequence of numbers and strings as bytes.
class Packed {
 public:
  explicit Packed(std::string bytes = {}) : bytes_(std::move(bytes)) {}
  const std::string& bytes() const { return bytes_; }
  bool at_end() const { return place_ == bytes_.size(); }

  template <class Number>
  requires std::is_arithmetic_v<Number>
  void put(Number number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }
  void put(std::string_view text) {
    put(static_cast<std::uint64_t>(text.size()));
    bytes_.append(text);
  }
  template <class Number>
  Number take() {
    Number number{};
    std::memcpy(&number, take(sizeof(number)).data(), sizeof(number));
    return number;
  }
  std::string take_text() { return std::string(take(take<std::uint64_t>())); }

 private:
  std::string_view take(std::uint64_t size) {
    TORCH_CHECK(size <= bytes_.size() - place_, "ProcessGroup: another rank sent less than it announced");
    const auto part = std::string_view(bytes_).substr(place_, size);
    place_ += size;
    return part;
  }

  std::string bytes_;
  std::size_t place_ = 0;
};

GRADACCUM_INLINE std::string pack(const Archive::Values& values) {
  Packed packed;
  for (auto& [name, value] : values) {
    packed.put(name);
    packed.put(static_cast<std::uint8_t>(value.index()));
    std::visit(
        [&]<class T>(const T& held) {
          if constexpr (std::is_same_v<T, std::string>) {
            packed.put(std::string_view(held));
          } else if constexpr (std::is_same_v<T, at::Tensor>) {
            TORCH_INTERNAL_ASSERT(!held.defined());
          } else {
            packed.put(held);
          }
        },
        value);
  }
  return packed.bytes();
}

GRADACCUM_INLINE Archive::Values unpack(const std::string& bytes) {
  Packed packed(bytes);
  Archive::Values values;
  while (!packed.at_end()) {
    const auto name = packed.take_text();
    switch (packed.take<std::uint8_t>()) {
      case 0:
        values[name] = packed.take<bool>();
        break;
      case 1:
        values[name] = packed.take<std::int64_t>();
        break;
      case 2:
        values[name] = packed.take<double>();
        break;
      case 3:
        values[name] = packed.take_text();
        break;
      default:
        values[name] = at::Tensor();
    }
  }
  return values;
}

inline constexpr auto names_missing = "has not";  // names that rank 0 has and this rank lacks, one per line

GRADACCUM_INLINE std::string prefix_of_rank(int rank) { return "rank_" + std::to_string(rank) + "."; }

GRADACCUM_INLINE Archive::Values fingerprints_of(const Archive::Values& values) {
  auto prints = values;
  for (auto& [name, value] : prints)
    if (const auto* const tensor = std::get_if<at::Tensor>(&value)) value = fingerprint_of(*tensor);
  return prints;
}

/// Returns the values that differ from rank 0's, `first`, in which fingerprints replace tensors.
GRADACCUM_INLINE Archive::Values what_differs(const Archive::Values& values, const Archive::Values& first) {
  const auto to_the_bit = [](auto& value) { return pack({{"", value}}); };  // NaN equals NaN
  Archive::Values own;
  const auto prints = fingerprints_of(values);
  for (auto& [name, value] : values)
    if (const auto known = first.find(name);
        known == first.end() || to_the_bit(known->second) != to_the_bit(prints.at(name)))
      own[name] = value;
  std::string missing;
  for (auto& [name, value] : first)
    if (!values.contains(name)) missing += name + "\n";
  if (!missing.empty()) own[names_missing] = missing;
  return own;
}

/// Moves the defined tensors out of `values`, and adds the prefix to their names.
GRADACCUM_INLINE Archive taken_tensors(Archive::Values& values, const std::string& prefix) {
  auto taken = Archive::of_references();
  for (auto value = values.begin(); value != values.end();) {
    auto* const tensor = std::get_if<at::Tensor>(&value->second);
    if (tensor == nullptr || !tensor->defined()) {
      ++value;
      continue;
    }
    taken(prefix + value->first, *tensor);
    value = values.erase(value);
  }
  return taken;
}

GRADACCUM_INLINE void gather_states(Connections& links, Archive& archive) {
  const bool is_first = links.rank() == 0;
  const auto first = unpack(links.all_gather(is_first ? pack(fingerprints_of(archive.values())) : "")[0]);
  auto own = is_first ? Archive::Values() : what_differs(archive.values(), first);
  if (!is_first) archive = taken_tensors(own, prefix_of_rank(links.rank()));
  const auto all = links.all_gather(pack(own));
  if (!is_first) return;
  for (int rank = 1; rank < links.world_size(); ++rank)
    for (auto& [name, value] : unpack(all[static_cast<std::size_t>(rank)]))
      std::visit([&, &key = name](auto& held) { archive(prefix_of_rank(rank) + key, held); }, value);
}

GRADACCUM_INLINE void pick_state(Archive::Values& values, int rank) {
  Archive::Values own;
  const auto prefix = prefix_of_rank(rank);
  for (auto value = values.lower_bound("rank_"); value != values.end() && value->first.starts_with("rank_");) {
    if (without_rank(value->first) == value->first) {  // a part whose name merely begins like that
      ++value;
      continue;
    }
    if (value->first.starts_with(prefix)) own[value->first.substr(prefix.size())] = value->second;
    value = values.erase(value);
  }
  if (const auto missing = own.extract(names_missing)) {
    std::istringstream lines(std::get<std::string>(missing.mapped()));
    for (std::string name; std::getline(lines, name);) values.erase(name);
  }
  for (auto& [name, value] : own) values[name] = value;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
