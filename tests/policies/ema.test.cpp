// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/memory_meter.hpp>
#include <gradaccum/policies/ema.hpp>

#include "support/models.hpp"
#include "support/waves.hpp"

#include <limits>

// pytorch_values/schedules.test.cpp compares with AveragedModel.

namespace ga = gradaccum;
using namespace testing;

namespace {

/// A model with the given parameters and buffers.
struct Bag : torch::nn::Module {
  explicit Bag(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers = {}) {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      register_parameter("p" + std::to_string(i), parameters[i], parameters[i].is_floating_point());
    for (std::size_t i = 0; i < buffers.size(); ++i) register_buffer("b" + std::to_string(i), buffers[i]);
  }
};

void move(torch::nn::Module& module, std::int64_t start) {
  at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.copy_(waves(parameter.sizes(), start++));
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() &&
         at::equal(a.detach().contiguous().flatten().view(at::kByte),
                   b.detach().contiguous().flatten().view(at::kByte));
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < b.size(); ++i)
    if (!same_bits(a.at(i), b[i])) return false;
  return a.size() == b.size();
}

/// Returns the averages, by swapping them in.
std::vector<at::Tensor> averages_of(ga::Ema::Running& ema, torch::nn::Module& module) {
  ema.swap(module);
  auto result = copies(module.parameters());
  for (auto& buffer : copies(module.buffers())) result.push_back(buffer);
  ema.swap(module);
  return result;
}

}  // namespace

TEST_CASE("Ema: the first update copies, the others are LibTorch's lerp, bit for bit") {
  for (auto dtype : {at::kFloat, at::kDouble, at::kComplexFloat})
    for (double decay : {0.0, 0.2, 0.9, 0.999, 1.0}) {
      INFO(dtype << ", decay " << decay);
      Bag bag({torch::zeros({5, 3}, dtype), torch::zeros({4, 6}, dtype).t(), torch::zeros({}, dtype),
               torch::zeros({0, 2}, dtype), torch::zeros({6, 6}, dtype).slice(1, 0, 6, 2)});
      ga::Ema::Running ema({.decay = decay});
      std::vector<at::Tensor> expected;
      for (int update = 0; update < 5; ++update) {
        move(bag, 50 * update);
        ema.update(bag);
        if (update == 0) expected = copies(bag.parameters());
        for (std::size_t i = 0; i < expected.size(); ++i)
          if (update > 0) expected[i].lerp_(bag.parameters()[i].detach(), 1 - decay);
      }
      CHECK(ema.updates() == 5);
      CHECK(same_bits(averages_of(ema, bag), expected));
      CHECK(same_bits(averages_of(ema, bag), copies(bag.parameters())) == (decay == 0));
    }
}

TEST_CASE("Ema: 16-bit parameters are averaged in float32") {
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    Bag bag({torch::zeros({7, 3}, dtype), torch::zeros({3}, at::kFloat), torch::zeros({2}, at::kDouble)});
    Bag exact({torch::zeros({7, 3}), torch::zeros({3}), torch::zeros({2}, at::kDouble)});
    ga::Ema::Running ema({.decay = 0.9999}), of_exact({.decay = 0.9999});
    at::Tensor in_16_bits;
    for (int update = 0; update < 40; ++update) {
      move(bag, 0);
      at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < 3; ++i) {
        bag.parameters()[i].add_(update > 0 ? 1 : 0);
        exact.parameters()[i].copy_(bag.parameters()[i]);
      }
      ema.update(bag);
      of_exact.update(exact);
      const auto p = bag.parameters()[0].detach();
      in_16_bits = update == 0 ? p.clone() : in_16_bits.lerp_(p, 1 - 0.9999);
    }
    const auto found = averages_of(ema, bag);
    auto expected = averages_of(of_exact, exact);
    expected[0] = expected[0].to(dtype);
    CHECK(same_bits(found, expected));
    CHECK((found[0] - in_16_bits).abs().max().item<double>() > 1e-3);  // rounded away
  }
}

TEST_CASE("Ema: many 16-bit parameters, which are copied in parts") {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 5; ++i) parameters.push_back(torch::full({1 << 21}, i, at::kBFloat16));
  parameters.push_back(torch::full({3}, 5.0));
  Bag bag(parameters);
  ga::Ema::Running ema({.decay = 0.5});
  ema.update(bag);
  {
    at::NoGradGuard no_grad;
    for (auto& parameter : bag.parameters()) parameter.add_(1);
  }
  ga::MemoryMeter meter;
  ema.update(bag);
  CHECK(meter.live_bytes() == 0);
  CHECK(meter.peak_bytes() < 5 * (4 << 21));
  const auto found = averages_of(ema, bag);
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(found[i].eq(static_cast<double>(i) + 0.5).all().item<bool>());
}

TEST_CASE("Ema: after swapping back, each parameter is the same tensor with the same bits") {
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    INFO(dtype);
    Bag bag({torch::zeros({5}, dtype), torch::zeros({4, 6}, dtype).t(),
             torch::zeros({2, 3, 4, 4}, dtype).to(at::MemoryFormat::ChannelsLast)});
    ga::Ema::Running ema({});
    ema.update(bag);
    move(bag, 1);
    {
      at::NoGradGuard no_grad;
      auto p = bag.parameters()[0];
      p[0] = std::numeric_limits<double>::quiet_NaN();
      p[1] = -std::numeric_limits<double>::infinity();
      p[2] = -0.0;
      p[3] = std::numeric_limits<float>::denorm_min();
    }
    const auto before = copies(bag.parameters());
    auto tensors = bag.parameters();
    const auto version = tensors[0]._version();
    const auto* const data = tensors[0].const_data_ptr();
    ema.swap(bag);
    CHECK(tensors[0].eq(0).all().item<bool>());
    CHECK(tensors[0].requires_grad());
    CHECK(tensors[0]._version() > version);  // autograd notices
    ema.swap(bag);
    CHECK(same_bits(bag.parameters(), before));
    CHECK(bag.parameters()[0].is_same(tensors[0]));
    CHECK(tensors[0].const_data_ptr() == data);
    CHECK(tensors[2].strides() == before[2].strides());
  }
}

TEST_CASE("Ema: training continues as without averaging") {
  const auto train = [](bool with_ema) {
    auto model = make_model(at::kFloat);
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    ga::Ema::Running ema({.decay = 0.9});
    for (auto& batch : make_batches({4, 4, 4, 4}, at::kFloat)) {
      loss_of(model, batch).backward();
      sgd.step();
      sgd.zero_grad();
      if (!with_ema) continue;
      ema.update(model);
      ema.swap(model);
      CHECK((distance(flat(model), flat(make_model(at::kFloat))) > 0));
      ema.swap(model);
    }
    return flat(model);
  };
  CHECK(same_bits(train(true), train(false)));
}

TEST_CASE("Ema: with a warm-up the first weights count less") {
  Bag bag({torch::zeros({1}, at::kDouble)});
  ga::Ema::Running ema({.decay = 0.3, .warmup = true});
  double average = 0;
  for (int update = 0; update < 8; ++update) {
    bag.parameters()[0].data().fill_(update);
    ema.update(bag);
    const double decay = update == 0 ? 0 : std::min(0.3, (1.0 + update) / (10 + update));  // 2/11, 3/12, then 0.3
    average = decay * average + (1 - decay) * update;
    CHECK(averages_of(ema, bag)[0].item<double>() == Approx(average).epsilon(1e-14));
  }
}

TEST_CASE("Ema: shared, frozen, integer and missing parameters") {
  struct Tied : torch::nn::Module {
    at::Tensor weight = torch::zeros({2});
    Tied() {
      register_parameter("first", weight);
      register_parameter("missing", {}, false);
      register_parameter("frozen", torch::zeros({2}), false);
      register_parameter("again", weight);
      register_parameter("whole", torch::zeros({2}, at::kLong), false);
    }
  } tied;
  ga::Ema::Running ema({.decay = 0.5});
  ema.update(tied);
  {
    at::NoGradGuard no_grad;
    for (auto* name : {"first", "frozen", "whole"}) tied.named_parameters()[name].fill_(8);
  }
  ema.update(tied);
  ema.swap(tied);
  CHECK(tied.weight.equal(torch::full({2}, 4.0)));
  CHECK(tied.named_parameters()["frozen"].equal(torch::full({2}, 4.0)));
  CHECK(!tied.named_parameters()["frozen"].requires_grad());
  CHECK(tied.named_parameters()["whole"].equal(torch::full({2}, 8)));
  ema.swap(tied);
  CHECK(tied.weight.equal(torch::full({2}, 8.0)));
  ga::Archive saved;
  saved("ema", ema);
  CHECK(saved.values().size() == 4);  // the count, and the shared parameter only under its first name
  CHECK(saved.values().contains("ema.average.first"));
}

TEST_CASE("Ema: buffers are the model's, or averaged") {
  for (bool buffers : {false, true}) {
    Bag bag({torch::zeros({1})}, {torch::zeros({2}), torch::zeros({1}, at::kLong), torch::zeros({1}, at::kBool)});
    ga::Ema::Running ema({.decay = 0.5, .buffers = buffers});
    ema.update(bag);
    for (auto& buffer : bag.buffers()) buffer.fill_(1);
    ema.update(bag);
    ema.swap(bag);
    CHECK(bag.buffers()[0].equal(torch::full({2}, buffers ? 0.5 : 1.0)));
    CHECK(bag.buffers()[1].item<std::int64_t>() == 1);
    CHECK(bag.buffers()[2].item<bool>());
    for (auto& buffer : bag.buffers()) buffer.fill_(0);  // as an evaluation may do
    ema.swap(bag);
    for (auto& buffer : bag.buffers()) CHECK(buffer.eq(buffers ? 1 : 0).all().item<bool>());
  }
}

TEST_CASE("Ema: a model is a module, a holder or a pointer; or has no parameters") {
  torch::nn::Linear holder(2, 2);
  const auto pointer = holder.ptr();
  ga::Ema::Running ema({.decay = 0.5});
  ema.update(holder);
  ema.update(pointer);
  ema.update(*holder);
  CHECK(ema.updates() == 3);
  torch::nn::Tanh empty;
  ga::Ema::Running of_none({});
  of_none.update(empty);
  of_none.update(empty);
  of_none.swap(empty);
  of_none.swap(empty);
}

TEST_CASE("Ema: calls in the wrong order change nothing") {
  Bag bag({torch::ones({2})});
  ga::Ema::Running ema({.decay = 0.5});
  REQUIRE_ERROR("Ema: swap needs averages; call update(model) after a step first", ema.swap(bag));
  ema.update(bag);
  bag.parameters()[0].data().fill_(3);
  ema.swap(bag);
  ga::Archive archive;
  REQUIRE_ERROR("Ema: an update needs the model's own weights, but it holds the averages; swap back first",
                ema.update(bag));
  REQUIRE_ERROR("Ema: saving needs the model's own weights", archive("ema", ema));
  ema.attach(bag);
  ga::Archive loading(ga::Archive::Values{});
  REQUIRE_ERROR("Ema: loading needs the model's own weights", loading("ema", ema));
  CHECK(archive.values().empty());
  CHECK(ema.updates() == 1);
  CHECK(bag.parameters()[0].equal(torch::ones({2})));
  ema.swap(bag);
  CHECK(bag.parameters()[0].equal(torch::full({2}, 3.0)));
}

TEST_CASE("Ema: a decay out of range") {
  Bag bag({torch::ones({2})});
  for (double decay : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    REQUIRE_ERROR("Ema: decay must be in [0, 1], got ", ga::Ema::Running({.decay = decay}));
    ga::Ema::Running ema({});
    ema.decay = decay;
    REQUIRE_ERROR("Ema: decay must be in [0, 1], got ", ema.update(bag));
    CHECK(ema.updates() == 0);
  }
}

TEST_CASE("Ema: another model, or one that has changed, is an error that names the parameter") {
  const auto zeros = [](at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
    return torch::zeros(shape, dtype);
  };
  Bag bag({zeros({2}), zeros({3, 2})});
  ga::Ema::Running ema({.decay = 0.5});
  ema.update(bag);
  bag.parameters()[0].data().fill_(1);
  const auto refuses = [&](const std::string& part, Bag other) {
    REQUIRE_ERROR(part, ema.update(other));
    REQUIRE_ERROR(part, ema.swap(other));
    for (auto& parameter : other.parameters()) CHECK(parameter.eq(0).all().item<bool>());
  };
  refuses("with p1, Float [3, 2] on cpu, got p1, Float [2, 3] on cpu; make a new Ema",
          Bag({zeros({2}), zeros({2, 3})}));
  refuses("with p0, Float [2] on cpu, got p0, Double [2] on cpu", Bag({zeros({2}, at::kDouble), zeros({3, 2})}));
  refuses("with p0, Float [2] on cpu, got p0, BFloat16 [2] on cpu", Bag({zeros({2}, at::kBFloat16), zeros({3, 2})}));
  refuses("as it was at the first update, but p1 is gone; make a new Ema", Bag({zeros({2})}));
  refuses("but p2 is new", Bag({zeros({2}), zeros({3, 2}), zeros({1})}));
  ema.buffers = true;
  refuses("but b0 is new", Bag({zeros({2}), zeros({3, 2})}, {zeros({1})}));
  ema.buffers = false;
  Bag elsewhere({torch::zeros({2}, at::kMeta), torch::zeros({3, 2}, at::kMeta)});
  REQUIRE_ERROR("got p0, Float [2] on meta", ema.update(elsewhere));

  ema.swap(bag);  // swapping back is possible after an error
  Bag other({zeros({2})});
  REQUIRE_ERROR("but p1 is gone", ema.swap(other));
  ema.swap(bag);
  CHECK(bag.parameters()[0].equal(torch::ones({2})));
  CHECK(ema.updates() == 1);
}

TEST_CASE("Ema: tensors that cannot be written to are refused immediately") {
  ga::Ema::Running ema({});
  const auto refuses = [&](const at::Tensor& tensor) {
    Bag bag({torch::ones({2}), tensor});
    REQUIRE_ERROR("Ema: p1 must be a dense tensor that can be written to, not sparse, expanded or an inference tensor",
                  ema.update(bag));
    CHECK(ema.updates() == 0);
  };
  refuses(torch::ones({1}).expand({3}));
  refuses(torch::eye(2).to_sparse());
  refuses(at::_efficientzerotensor({2}, at::TensorOptions(at::kFloat)));
  at::Tensor inference;
  {
    c10::InferenceMode mode;
    inference = torch::ones({2});
  }
  Bag bag({torch::ones({2})}, {inference});
  ema.buffers = true;
  REQUIRE_ERROR("Ema: b0 must be a dense tensor that can be written to", ema.update(bag));
}

TEST_CASE("Ema: in inference mode, with and without gradients") {
  Bag bag({torch::zeros({2})});
  ga::Ema::Running ema({.decay = 0.5});
  {
    c10::InferenceMode mode;
    ema.update(bag);
  }
  bag.parameters()[0].data().fill_(4);
  ema.update(bag);
  {
    c10::InferenceMode mode;
    ema.swap(bag);
    CHECK(bag.parameters()[0].eq(2).all().item<bool>());
    ema.swap(bag);
    ema.swap(bag);
  }
  ema.swap(bag);
  CHECK(bag.parameters()[0].eq(4).all().item<bool>());
  CHECK((bag.parameters()[0] * 2).sum().requires_grad());
}

TEST_CASE("Ema: takes the documented memory") {
  Bag bag({torch::zeros({1000}), torch::zeros({1000}, at::kBFloat16)});
  ga::Ema::Running ema({});
  ga::MemoryMeter meter;
  ema.update(bag);
  CHECK(meter.live_bytes() == 8000);
  ema.update(bag);
  CHECK(meter.live_bytes() == 8000);
  ema.swap(bag);
  CHECK(meter.live_bytes() == 8000 + 6000);
  ema.swap(bag);
  CHECK(meter.live_bytes() == 8000);
}

TEST_CASE("Ema: resumes from its saved state bitwise") {
  for (std::int64_t saved_after : {0, 1, 3}) {
    const auto values = [] { return std::vector<at::Tensor>{torch::zeros({2, 3}), torch::zeros({3}, at::kBFloat16)}; };
    const auto buffers = [] { return std::vector<at::Tensor>{torch::zeros({2}), torch::zeros({1}, at::kLong)}; };
    Bag through(values(), buffers()), resumed(values(), buffers());
    const ga::Ema options{.decay = 0.7, .warmup = true, .buffers = true};
    ga::Ema::Running ema(options), again(options);
    ga::Archive saved;
    if (saved_after > 0) again.update(resumed);  // replaces the current averages
    for (std::int64_t update = 0; update < 6; ++update) {
      if (update == saved_after) {
        saved("ema", ema);
        again.attach(resumed);
        ga::Archive loading(saved.values());
        loading("ema", again);
        loading.check_all_used();
      }
      move(through, update);
      ema.update(through);
      if (update < saved_after) continue;
      move(resumed, update);
      again.update(resumed);
    }
    CHECK(again.updates() == 6);
    CHECK(same_bits(averages_of(again, resumed), averages_of(ema, through)));
    if (saved_after == 0) continue;
    CHECK(saved.values().contains("ema.average.p0"));
    ga::Ema::Running fresh(options);
    for (std::int64_t update = saved_after; update < 6; ++update) move(resumed, update), fresh.update(resumed);
    CHECK(!same_bits(averages_of(fresh, resumed), averages_of(ema, through)));
  }
}

TEST_CASE("Ema: a state that does not fit changes nothing") {
  Bag bag({torch::ones({2}), torch::ones({3}, at::kBFloat16)});
  ga::Ema::Running ema({.decay = 0.5});
  ema.update(bag);
  bag.parameters()[0].data().fill_(3);
  ema.update(bag);
  ga::Archive saved;
  saved("ema", ema);
  const auto before = averages_of(ema, bag);
  const auto refuses = [&](const std::string& part, auto change) {
    auto values = saved.values();
    change(values);
    ga::Archive loading(values);
    REQUIRE_ERROR(part, loading("ema", ema));
    CHECK(ema.updates() == 2);
    CHECK(same_bits(averages_of(ema, bag), before));
  };
  refuses("Ema: loading needs the model; call attach(model) first", [](auto&) {});
  ema.attach(bag);
  refuses("must have a value 'ema.average.p1', but does not", [](auto& all) { all.erase("ema.average.p1"); });
  refuses("must have a value 'ema.updates'", [](auto& all) { all.erase("ema.updates"); });
  refuses("Ema: loaded updates must be >= 0, got -1", [](auto& all) { all["ema.updates"] = std::int64_t{-1}; });
  refuses("Ema: a loaded average must be that of p0, Float [2] on cpu; got one, Float [3] on cpu",
          [](auto& all) { all["ema.average.p0"] = torch::ones({3}); });
  refuses("Ema: a loaded average must be that of p1, Float [3] on cpu; got one, BFloat16 [3] on cpu",
          [](auto& all) { all["ema.average.p1"] = torch::ones({3}, at::kBFloat16); });
  refuses("got one, Float [2] on cpu", [](auto& all) { all["ema.average.p0"] = torch::ones({2}).to_sparse(); });
  refuses("got an undefined tensor", [](auto& all) { all["ema.average.p0"] = at::Tensor(); });
  ga::Archive loading(saved.values());
  loading("ema", ema);
  CHECK(same_bits(averages_of(ema, bag), before));
}

TEST_CASE("Ema: hooks of a policy") {
  static_assert(ga::policy<ga::Ema>);
  using Running = ga::Ema::Running;
  static_assert(ga::hook::attach<Running> && ga::hook::after_step<Running> && ga::hook::state<Running>);
  struct {
    Bag bag{{torch::ones({2})}};
    torch::nn::Module& module() { return bag; }
  } trainer;
  ga::Ema::Running ema({.decay = 0.5});
  ema.attach(trainer);
  CHECK(ema.updates() == 0);  // as with Python's AveragedModel, the weights after the first step begin the average
  for (int value : {8, 4}) {
    trainer.bag.parameters()[0].data().fill_(value);
    ema.after_step({.moved = true});
  }
  ema.swap(trainer.bag);
  CHECK(trainer.bag.parameters()[0].equal(torch::full({2}, 6.0)));
}

TEST_CASE("Ema: on a device, and on several", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto tensors = [] {
    return std::vector<at::Tensor>{torch::zeros({40, 3}), torch::zeros({9}, at::kBFloat16), torch::zeros({4}),
                                   torch::zeros({5}, at::kDouble)};
  };
  const auto averages_with = [&](const std::vector<at::Device>& devices) {
    auto parameters = tensors();
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i] = parameters[i].to(devices[i]);
    Bag bag(parameters);
    ga::Ema::Running ema({.decay = 0.9});
    for (int update = 0; update < 4; ++update) {
      move(bag, 10 * update);
      ema.update(bag);
    }
    ga::Archive saved;
    saved("ema", ema);
    ga::Ema::Running again({.decay = 0.9});
    again.attach(bag);
    ga::Archive loading(saved.values());
    loading("ema", again);
    std::vector<at::Tensor> result;
    for (auto& average : averages_of(again, bag)) result.push_back(average.cpu().to(at::kDouble).flatten());
    return torch::cat(result);
  };
  const at::Device host(at::kCPU), device(at::kCUDA, 0);
  const auto expected = averages_with({host, host, host, host});
  CHECK(distance(averages_with({device, device, device, device}), expected) < 1e-6);
  CHECK(distance(averages_with({device, host, device, host}), expected) < 1e-6);
}
