// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/element_loop.hpp>
#include <gradaccum/detail/optimizers/adafactor_tensor.hpp>

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// All passes over some tensors; `each(count, body)` calls `body(i)` for each i below `count`.
template <class Each>
void take_passes(const std::vector<AdafactorTensor*>& tensors, const Each& each) {
  std::vector<std::pair<AdafactorTensor*, AdafactorPiece*>> pieces, cut;
  std::vector<std::pair<AdafactorTensor*, std::int64_t>> matrices;
  for (auto* tensor : tensors) {
    for (auto& piece : tensor->pieces()) pieces.emplace_back(tensor, &piece);
    for (std::int64_t i = 0; i < tensor->cut_matrices(); ++i) matrices.emplace_back(tensor, i);
    if (tensor->cut_matrices() > 0)
      for (auto& piece : tensor->pieces()) cut.emplace_back(tensor, &piece);
  }
  each(pieces.size(), [&](std::size_t i) { pieces[i].first->sum(*pieces[i].second); });
  each(matrices.size(), [&](std::size_t i) { matrices[i].first->make_factors(matrices[i].second); });
  each(cut.size(), [&](std::size_t i) { cut[i].first->measure_update(*cut[i].second); });
  for (auto* tensor : tensors) tensor->set_step_size();
  each(pieces.size(), [&](std::size_t i) { pieces[i].first->move(*pieces[i].second); });
}

/// Tensors that leave enough work for all threads are each one thread's alone: a gradient is still in its cache from
/// pass to pass, and nobody waits. Large ones are cut.
inline void take_passes(std::vector<AdafactorTensor>& tensors) {
  const auto parallel = [](std::size_t count, const auto& body) {
    if (count == 1) return body(0);  // threads would take longer to start
    if (count > 1)
      parallel_for(static_cast<std::int64_t>(count), [&](std::int64_t i) { body(static_cast<std::size_t>(i)); });
  };
  const auto serial = [](std::size_t count, const auto& body) {
    for (std::size_t i = 0; i < count; ++i) body(i);
  };
  std::vector<AdafactorTensor*> whole, large;
  std::int64_t elements = 0;
  for (auto& tensor : tensors) elements += tensor.elements();
  const auto threads = at::get_num_threads();
  for (auto& tensor : tensors) (2 * threads * tensor.elements() <= elements ? whole : large).push_back(&tensor);
  std::stable_sort(whole.begin(), whole.end(), [](auto* a, auto* b) { return a->elements() > b->elements(); });
  const auto hands = static_cast<std::size_t>(threads);
  parallel(std::min(hands, whole.size()), [&](std::size_t first) {
    for (auto i = first; i < whole.size(); i += hands) take_passes({whole[i]}, serial);
  });
  take_passes(large, parallel);
  for (auto& tensor : tensors) tensor.write_back();
}

}  // namespace gradaccum::detail
