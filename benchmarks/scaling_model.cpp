// SPDX-License-Identifier: Apache-2.0
//
// How far training in several processes goes: a simulation of a window, checked against what processes of this machine
// measure (--check), and asked about machines that are not here. docs/scaling.md says what its numbers mean.

#include <exception>
#include <fstream>
#include <map>
#include <string>

#include "harness.hpp"
#include "scaling_model/check.hpp"
#include "scaling_model/table.hpp"

namespace {

using namespace scaling;
using table::Setup;

/// What is given: nominal rates of links and memory; latencies that NCCL assumes (tuning.cc); 40 % of the processor's
/// rate for 6 operations a parameter and token; a step that reads and writes 28 bytes a parameter.
Setup h100() {
  return {.name = "Eight H100 a machine, NVLink, 400 Gb/s InfiniBand a GPU; 8,192 tokens a micro-batch",
          .machine = {.ranks = 8, .inside = {3.4e-6, 450e9}, .between = {14e-6, 50e9}, .overlap = 0.88},
          .compute = {.forward = 0.050, .backward = 0.100, .step = 0.010, .further = 0.004},
          .parameter_bytes = 4.83e9,
          .bucket_bytes = 64 << 20,  // a gradient of 48 MiB goes in one
          .layers = 24,
          .gradients = 4};
}
Setup ethernet() {
  return {.name = "A processor of 2 TFLOP/s a machine, 25 Gb/s Ethernet; 4,096 tokens a micro-batch",
          .machine = {.ranks = 1, .inside = {}, .between = {50e-6, 3.125e9}, .overlap = 0.97},
          .compute = {.forward = 0.348, .backward = 0.696, .step = 0.012, .further = 0.005},
          .parameter_bytes = 340e6,
          .layers = 12,
          .gradients = 4};
}
/// The check's model and its numbers of two processes, as if machines of this kind were linked by its loopback.
Setup measured_here() {
  return {.name = "A core of an AMD EPYC with AVX-512 a machine, linked by loopback (measured, 2026-11-25)",
          .machine = {.ranks = 1, .inside = {}, .between = {401e-6, 1.90e9}, .overlap = 0.46},
          .compute = {.forward = 0.0144, .backward = 0.0202, .step = 0.0106, .further = 0.0030},
          .parameter_bytes = 33.6e6,
          .layers = 8,
          .gradients = 1};
}

struct Request {
  Setup setup = h100();
  check::Options how;
  bool checks = false;
  std::string measure, picture;
};

void add_link(CLI::App& app, const std::string& name, Link& link) {
  app.add_option("--latency-" + name, link.latency, "of a message, in seconds")->check(CLI::NonNegativeNumber);
  app.add_option("--bandwidth-" + name, link.bytes_per_s, "of a rank, bytes a second")->check(CLI::PositiveNumber);
}

/// The machine comes first: what follows it changes it.
void add_options(CLI::App& app, Request& request) {
  auto& [name, machine, compute, bytes, bucket_bytes, layers, gradients, small_bytes] = request.setup;
  const std::map<std::string, Setup (*)()> machines{
      {"h100", h100}, {"ethernet", ethernet}, {"measured", measured_here}};
  app.add_option_function<std::string>(
         "--machine", [&request, machines](const std::string& of) { request.setup = machines.at(of)(); },
         "whose numbers the table begins with; the defaults below are h100's")
      ->check(CLI::IsMember(machines));
  app.add_option("--ranks", machine.ranks, "of a machine")->check(CLI::IsMember({1, 2, 4, 8}));
  add_link(app, "inside", machine.inside);
  add_link(app, "between", machine.between);
  app.add_option("--overlap", machine.overlap, "the rate of computing beside a transfer")->check(CLI::Range(0.0, 1.0));
  app.add_flag_callback(
      "--halving", [&request] { request.setup.machine.pattern = Pattern::halving; },
      "log2(n) messages, not a ring's n - 1");
  app.add_option("--forward", compute.forward, "of a micro-batch, in seconds")->check(CLI::NonNegativeNumber);
  app.add_option("--backward", compute.backward, "of a micro-batch, in seconds")->check(CLI::PositiveNumber);
  app.add_option("--further", compute.further, "more for each further micro-batch of a window, in seconds");
  app.add_option("--step", compute.step, "of all parameters, in seconds")->check(CLI::NonNegativeNumber);
  app.add_option("--parameter-bytes", bytes, "of all, and of all gradients")->check(CLI::PositiveNumber);
  app.add_option("--layers", layers, "of the model")->check(CLI::PositiveNumber);
  app.add_option("--gradients", gradients, "of a layer")->check(CLI::PositiveNumber);
  app.add_option("--small-bytes", small_bytes, "of one more gradient of a layer")->check(CLI::NonNegativeNumber);
  app.add_option("--bucket-bytes", bucket_bytes, "of gradients that are sent together")->check(CLI::PositiveNumber);
  app.add_option("--picture", request.picture, "write the table to this file, as an SVG");
  app.add_flag("--check", request.checks, "in place of the table: measure windows here, and compute them");
  app.add_option("--rounds", request.how.rounds, "of the check")->check(CLI::Range(21, 10000));
  app.add_option("--launch", request.how.launch, "what starts several processes");
  app.add_option("--measure", request.measure, "what --check starts: measure, and write to this file");
}

void answer(const Request& request, const harness::Options& options) {
  if (!request.measure.empty()) return measured::measure(request.measure, request.how.rounds);
  if (request.checks) return check::run(request.how, options);
  table::print(request.setup);
  if (!request.picture.empty()) std::ofstream(request.picture) << table::to_svg(request.setup);
}

}  // namespace

int main(int argc, char** argv) {
  Request request;
  request.how.program = argv[0];
  const auto options = harness::parse(argc, argv, "How far several processes go: a window, computed and measured",
                                      [&](CLI::App& app) { add_options(app, request); });
  try {
    answer(request, options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
