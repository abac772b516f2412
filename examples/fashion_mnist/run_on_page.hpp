// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/run_page.hpp>

namespace fashion_mnist {

namespace ga = gradaccum;

/// One of the runs on a page of several: its curves. Without a page it does nothing. For a loop of one's own, and a
/// policy of the Trainer's.
struct RunOnPage {
  ga::RunPage* page = nullptr;
  ga::Curves* curves = nullptr;
  double done = 0, epoch = 0;  // of all runs: the part that those before this one are, and that an epoch of it is
  double sum = 0, count = 0;   // of the losses of the window so far
  std::int64_t last = 0;       // update

  void after_step(const ga::Step& step) {
    if (curves) curves->add("train/loss", step.update, step.loss.item<double>());
  }
  void on_validation(const ga::Validation& validation) { add(validation.found, validation.update); }

  /// The loss of a micro-batch, after the optimizer's step: a window is the mean of several.
  void add(const at::Tensor& loss, std::int64_t updates) {
    if (!curves) return;
    sum += loss.item<double>();
    ++count;
    end_window(updates);
  }
  /// After a flush, too, whose window may be shorter than the others.
  void end_window(std::int64_t updates) {
    if (!curves || updates == last) return;
    curves->add("train/loss", updates, sum / count);
    sum = count = 0;
    last = updates;
  }
  /// What the test images say at the end of an epoch.
  void add(const ga::Evaluation& test, std::int64_t updates) {
    if (!curves) return;
    for (const auto& [name, value] : test.metrics) curves->add("test/" + name, updates, value);
    done += epoch;
    page->update({.fraction = done});
  }
};

}  // namespace fashion_mnist
