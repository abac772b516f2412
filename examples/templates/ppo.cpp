// SPDX-License-Identifier: Apache-2.0
// Proximal policy optimisation (arXiv 1707.06347) of CartPole, with the names of CleanRL's ppo.py. Other than there,
// advantages are normalised over the whole batch, and learning_rate, num_envs and num_steps fit this task.
//
//     ./ppo [STEPS [SEED [FOLDER]]]     trains; with a folder, saves there, and resumes from its newest state
//     ./ppo record FOLDER               records the training step. Once gradaccum-compile-step has compiled FOLDER/step,
//                                       updates take less than half the time. Record again after a change
//                                       of the objective or of hyperparameters
//
// For a task of your own with discrete actions, change Environment and Agent, then the hyperparameters.
#include <torch/torch.h>
#include <gradaccum/gradaccum.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <string>
#include <utility>

namespace ga = gradaccum;

struct {
  std::int64_t total_timesteps = 150'000, num_envs = 8, num_steps = 32, num_minibatches = 4, update_epochs = 4;
  double learning_rate = 2.5e-3, gamma = 0.99, gae_lambda = 0.95, clip_coef = 0.2, ent_coef = 0.01, vf_coef = 0.5;
  double max_grad_norm = 0.5, target_kl = 0;  // 0: without a limit
  bool anneal_lr = true, norm_adv = true, clip_vloss = true;
  bool fp16 = false;                   // mixed precision with a loss scale, for large networks on a GPU
  std::int64_t micro_batches = 1;      // parts of a minibatch that are computed one by one, where memory is short
  std::int64_t report_every = 10'000;  // steps between two lines and states
} hyper;

/// A pole on a cart, as Gymnasium's CartPole-v1: 0 pushes the cart to the left, 1 to the right.
struct Environment {
  static constexpr std::int64_t states = 4, observations = 4, actions = 2, most_steps = 500;
  struct Outcome {
    double reward;
    bool ended;
  };

  static void reset(double* state) {
    const auto random = torch::rand({states}, torch::kDouble).mul_(0.1).sub_(0.05);
    std::copy_n(random.const_data_ptr<double>(), states, state);
  }
  static void observe(const double* state, float* observation) { std::copy_n(state, states, observation); }
  static Outcome step(double* state, std::int64_t action) {
    constexpr double gravity = 9.8, pole_mass = 0.1, mass = 1.1, half_length = 0.5, seconds = 0.02;
    auto &x = state[0], &speed = state[1], &angle = state[2], &turning = state[3];
    const double force = action == 1 ? 10 : -10, sine = std::sin(angle), cosine = std::cos(angle);
    const double push = (force + pole_mass * half_length * turning * turning * sine) / mass;
    const double inertia = half_length * (4.0 / 3 - pole_mass * cosine * cosine / mass);
    const double turning_rate = (gravity * sine - cosine * push) / inertia;
    x += seconds * speed;
    speed += seconds * (push - pole_mass * half_length * turning_rate * cosine / mass);
    angle += seconds * turning;
    turning += seconds * turning_rate;
    return {.reward = 1, .ended = std::abs(x) > 2.4 || std::abs(angle) > 12 * M_PI / 180};
  }
};

struct AgentImpl : torch::nn::Module {
  torch::nn::Sequential actor = register_module("actor", network(Environment::actions, 0.01));
  torch::nn::Sequential critic = register_module("critic", network(1, 1));

  static torch::nn::Sequential network(std::int64_t outputs, double gain) {
    const auto linear = [](std::int64_t in, std::int64_t out, double scale) {
      torch::nn::Linear layer(in, out);
      torch::nn::init::orthogonal_(layer->weight, scale);
      torch::nn::init::zeros_(layer->bias);
      return layer;
    };
    return torch::nn::Sequential(linear(Environment::observations, 64, M_SQRT2), torch::nn::Tanh(),
                                 linear(64, 64, M_SQRT2), torch::nn::Tanh(), linear(64, outputs, gain));
  }
  /// Returns the logarithmic probabilities of all actions, and of the drawn ones.
  std::pair<at::Tensor, at::Tensor> log_probs(const at::Tensor& observation, const at::Tensor& action) {
    const auto all = actor->forward(observation).log_softmax(1);
    return {all, all.gather(1, action.unsqueeze(1)).squeeze(1)};
  }
};
TORCH_MODULE(Agent);

/// Observations, actions, their logarithmic probabilities, advantages, values and returns: a row for each step.
using Batch = std::array<at::Tensor, 6>;

/// Returns the loss, with the policy's and the value's loss, the entropy and how far the policy has moved since it
/// played (http://joschu.net/blog/kl-approx.html).
ga::Loss objective(Agent& agent, Batch& batch) {
  const auto& [observation, action, old_log_prob, advantage, old_value, target] = batch;
  const ga::Autocast autocast(observation.device(), torch::kHalf, hyper.fp16);
  const auto [log_probs, log_prob] = agent->log_probs(observation, action);
  const auto log_ratio = log_prob - old_log_prob, ratio = log_ratio.exp();
  const auto clipped_ratio = ratio.clamp(1 - hyper.clip_coef, 1 + hyper.clip_coef);
  const auto policy_loss = -torch::min(ratio * advantage, clipped_ratio * advantage).mean();
  const auto entropy = -(log_probs.exp() * log_probs).sum(1).mean(), kl = (ratio - 1 - log_ratio).mean();
  const auto value = agent->critic->forward(observation).squeeze(1);
  const auto clipped = old_value + (value - old_value).clamp(-hyper.clip_coef, hyper.clip_coef);
  auto error = (value - target).square();
  if (hyper.clip_vloss) error = torch::max(error, (clipped - target).square());
  const auto value_loss = 0.5 * error.mean();
  return ga::Loss{policy_loss - hyper.ent_coef * entropy + hyper.vf_coef * value_loss, action.size(0)}.with(
      torch::stack({policy_loss, value_loss, entropy, kl}).detach(), {});
}

struct Training {
  Agent agent;
  ga::optim::Adam adam{agent->parameters(), ga::optim::AdamOptions(hyper.learning_rate).eps(1e-5)};
  ga::GradAccumulator<ga::optim::Adam> optimizer{adam, {.steps = hyper.micro_batches}};
  ga::LearningRates rates{optimizer};
  ga::AmpScaler scaler{{.enabled = hyper.fp16}};
  at::Tensor environments = torch::empty({hyper.num_envs, Environment::states}, torch::kDouble);
  at::Tensor lengths = torch::zeros({hyper.num_envs}, torch::kLong);    // of the episodes so far
  at::Tensor returns = torch::zeros({hyper.num_envs}, torch::kDouble);  // of the episodes so far
  at::Tensor last_returns = torch::zeros({100});                        // of the last episodes
  at::Tensor statistics;                                                // of the last minibatch, by objective
  std::int64_t timesteps = 0, episodes = 0;

  Training() {
    for (std::int64_t i = 0; i < hyper.num_envs; ++i) Environment::reset(environments[i].mutable_data_ptr<double>());
  }

  /// Draws an action for each environment, and takes it. `ended` becomes 1 where an episode has ended, else 0.
  void act(const at::Tensor& observation, const at::Tensor& action, const at::Tensor& reward, const at::Tensor& ended) {
    const auto probs = agent->actor->forward(observation).softmax(1).cpu();
    action.copy_((probs / torch::empty_like(probs).exponential_()).argmax(1));
    for (std::int64_t i = 0; i < hyper.num_envs; ++i) {
      auto* const state = environments.mutable_data_ptr<double>() + i * Environment::states;
      const auto outcome = Environment::step(state, action.const_data_ptr<std::int64_t>()[i]);
      auto& length = ++lengths.mutable_data_ptr<std::int64_t>()[i];
      auto& sum = returns.mutable_data_ptr<double>()[i] += outcome.reward;
      const bool ends = outcome.ended || length == Environment::most_steps;
      reward.mutable_data_ptr<float>()[i] = static_cast<float>(outcome.reward);
      ended.mutable_data_ptr<float>()[i] = ends;
      if (!ends) continue;
      last_returns[episodes++ % last_returns.size(0)] = std::exchange(sum, 0);
      length = 0;
      Environment::reset(state);
    }
  }

  /// Plays num_steps steps in each environment, and estimates values and advantages (arXiv 1506.02438).
  Batch play() {
    const at::NoGradGuard no_grad;
    const auto steps = hyper.num_steps, envs = hyper.num_envs;
    const auto device = agent->parameters()[0].device();
    const ga::Autocast autocast(device, torch::kHalf, hyper.fp16);
    const auto observation = torch::empty({steps + 1, envs, Environment::observations});
    const auto action = torch::empty({steps, envs}, torch::kLong);
    const auto reward = torch::empty({steps, envs}), ended = torch::empty({steps, envs});
    for (std::int64_t t = 0; t <= steps; ++t) {
      const auto now = observation[t];
      for (std::int64_t i = 0; i < envs; ++i)
        Environment::observe(environments.const_data_ptr<double>() + i * Environment::states,
                             now.mutable_data_ptr<float>() + i * Environment::observations);
      if (t < steps) act(now.to(device), action[t], reward[t], ended[t]);
    }
    const auto values = agent->critic->forward(observation.to(device)).squeeze(2).to(torch::kFloat).cpu();
    const auto value = values.slice(0, 0, steps), goes_on = 1 - ended;
    const auto error = reward + hyper.gamma * values.slice(0, 1) * goes_on - value,
               advantage = torch::empty_like(error);
    auto sum = torch::zeros({envs});
    for (auto t = steps - 1; t >= 0; --t)
      advantage[t] = sum = error[t] + hyper.gamma * hyper.gae_lambda * goes_on[t] * sum;

    const auto flat = [&](const at::Tensor& tensor) { return tensor.flatten(0, 1).to(device); };
    Batch batch{flat(observation.slice(0, 0, steps)), flat(action), {}, flat(advantage), flat(value), {}};
    auto& [seen, done, log_prob, advantages, old_value, target] = batch;
    log_prob = agent->log_probs(seen, done).second;
    target = advantages + old_value;
    if (hyper.norm_adv) advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8);
    return batch;
  }

  /// Plays and learns. `step` is the objective, itself or recorded.
  void iterate(auto& step, std::int64_t total_timesteps) {
    if (hyper.anneal_lr)
      rates.set(hyper.learning_rate * (1 - static_cast<double>(timesteps) / static_cast<double>(total_timesteps)));
    const auto batch = play();
    const auto rows = hyper.num_envs * hyper.num_steps, parts = hyper.num_minibatches * hyper.micro_batches;
    for (std::int64_t epoch = 0; epoch < hyper.update_epochs; ++epoch) {
      auto shuffled = batch;
      const auto order = torch::randperm(rows, batch[0].device());
      for (auto& tensor : shuffled) tensor = tensor.index_select(0, order);
      for (std::int64_t part = 0; part < parts; ++part) {
        auto minibatch = shuffled;
        for (auto& tensor : minibatch) tensor = tensor.narrow(0, part * rows / parts, rows / parts);
        const auto loss = step(minibatch);
        optimizer.backward(scaler.scale(loss));
        optimizer.clip_grad_norm_(hyper.max_grad_norm);
        scaler.step(optimizer);
        scaler.update();
        optimizer.zero_grad();
        statistics = loss.output;
      }
      if (hyper.target_kl > 0 && statistics[3].item<double>() > hyper.target_kl) break;
    }
    timesteps += rows;
  }

  std::int64_t updates() const { return optimizer.updates(); }
  void state(ga::Archive& archive) {
    archive("agent", ga::ModelState(agent)), archive("optimizer", ga::OptimizerState(optimizer, agent));
    archive("scaler", scaler), archive("random", ga::RandomState());
    archive("environments", environments), archive("lengths", lengths), archive("returns", returns);
    archive("last_returns", last_returns), archive("timesteps", timesteps), archive("episodes", episodes);
    TORCH_CHECK(environments.size(0) == hyper.num_envs, "the state has ", environments.size(0), " environments");
  }
  /// Returns the mean of the last 100 episodes.
  double mean_return() const {
    return last_returns.sum().item<double>() / static_cast<double>(std::clamp<std::int64_t>(episodes, 1, 100));
  }
};

void train(Training& training, auto step, std::int64_t total_timesteps, const std::string& folder) {
  if (!folder.empty() && !ga::load(folder + "/states", training, {.if_any = true}).empty())
    std::cout << "resumed at " << training.timesteps << " steps\n";
  const auto begin = std::chrono::steady_clock::now();
  const auto updates_before = training.updates();
  while (training.timesteps < total_timesteps) {
    const auto reports = training.timesteps / hyper.report_every;
    training.iterate(step, total_timesteps);
    if (training.timesteps / hyper.report_every == reports && training.timesteps < total_timesteps) continue;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const auto statistics = training.statistics.cpu();
    std::cout << training.timesteps << " steps, " << training.episodes << " episodes: mean return "
              << training.mean_return() << ", losses " << statistics[0].item<float>() << " (policy) and "
              << statistics[1].item<float>() << " (value), entropy " << statistics[2].item<float>() << ", KL "
              << statistics[3].item<float>() << ", "
              << std::lround(static_cast<double>(training.updates() - updates_before) / seconds.count()) << " updates/s"
              << std::endl;
    if (!folder.empty()) ga::save(folder + "/states", training, {.keep_last = 2});
  }
  std::cout << step.report();  // how many updates were replayed or compiled
}

std::int64_t whole_number(const std::string& text, const char* what) {
  TORCH_CHECK(!text.empty() && text.size() < 19 && text.find_first_not_of("0123456789") == text.npos, what,
              " must be a whole number, got '", text, "'; --help shows the arguments");
  return std::stoll(text);
}

int main(int argc, char** argv) try {
  const auto argument = [&](int i, auto otherwise) { return argc > i ? std::string(argv[i]) : otherwise; };
  const std::string first = argument(1, std::to_string(hyper.total_timesteps));
  const bool records = first == "record";
  const std::string folder = argument(records ? 2 : 3, std::string());
  if (first == "--help" || (records && folder.empty())) {
    std::cout << "usage: ppo [STEPS [SEED [FOLDER]]] | ppo record FOLDER\n";
    return records;
  }
  torch::set_num_threads(1);  // threads wait for one another longer than such a network computes
  torch::manual_seed(records ? 1 : static_cast<std::uint64_t>(whole_number(argument(2, std::string("1")), "SEED")));
  Training training;
  if (torch::cuda::is_available()) training.agent->to(torch::kCUDA);
  const auto recorded = folder + "/step";
  if (records) {
    auto minibatch = training.play();
    const auto rows = minibatch[0].size(0) / hyper.num_minibatches / hyper.micro_batches;
    for (auto& tensor : minibatch) tensor = tensor.narrow(0, 0, rows);
    std::cout << ga::save_step(training.agent, objective, minibatch, recorded);
    return 0;
  }
  const auto total_timesteps = whole_number(first, "STEPS");
  if (!folder.empty() && std::filesystem::exists(recorded)) {
    std::cout << "using the compiled step in " << recorded << '\n';
    train(training, ga::CompiledStep(training.agent, objective, recorded), total_timesteps, folder);
  } else {  // without a GPU the objective runs itself
    train(training, ga::GraphedStep(training.agent, objective), total_timesteps, folder);
  }
  return 0;
} catch (const c10::Error& error) {
  std::cerr << "ppo: " << error.what_without_backtrace() << '\n';
  return 1;
} catch (const std::exception& error) {
  std::cerr << "ppo: " << error.what() << "; --help shows the arguments\n";
  return 1;
}
