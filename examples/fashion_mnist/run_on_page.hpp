// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/run_page.hpp>

namespace fashion_mnist {

namespace ga = gradaccum;

/// The curves of one run on a page that shows several. Without a page it does nothing. Hand-written loops call it, and
/// the Trainer uses it as a policy.
struct RunOnPage {
  ga::RunPage* page = nullptr;
  ga::Curves* curves = nullptr;
  double done = 0, epoch = 0;  // fractions of all runs: those before this one, and one epoch of this one
  double sum = 0, count = 0;   // of the current window's losses
  std::int64_t last = 0;       // update

  void after_step(const ga::Step& step) {
    if (curves) curves->add("train/loss", step.update, step.loss.item<double>());
  }
  void on_validation(const ga::Validation& validation) { add(validation.found, validation.update); }

  /// Adds the loss of a micro-batch, after the optimizer's step; a point is the mean of a window.
  void add(const at::Tensor& loss, std::int64_t updates) {
    if (!curves) return;
    sum += loss.item<double>();
    ++count;
    end_window(updates);
  }
  /// Ends a window. Call it after a flush, too, whose window may be shorter.
  void end_window(std::int64_t updates) {
    if (!curves || updates == last) return;
    curves->add("train/loss", updates, sum / count);
    sum = count = 0;
    last = updates;
  }
  /// Adds the evaluation on the test images at the end of an epoch.
  void add(const ga::Evaluation& test, std::int64_t updates) {
    if (!curves) return;
    for (const auto& [name, value] : test.metrics) curves->add("test/" + name, updates, value);
    done += epoch;
    page->update({.fraction = done});
  }
};

}  // namespace fashion_mnist
