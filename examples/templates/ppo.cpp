// SPDX-License-Identifier: Apache-2.0
// Proximal policy optimisation (arXiv 1707.06347) of CartPole, with the names of CleanRL's ppo.py; advantages are
// normalised over the whole batch. `ppo FOLDER` trains, and resumes from its newest state. `ppo FOLDER record` records
// the training step; once gradaccum-compile-step has compiled FOLDER/step, updates take less than half the time. For
// another task with discrete actions, change Environment, Agent and `hyper`: 2.5e-4 suits more tasks as learning_rate.
#include <torch/torch.h>
#include <gradaccum/gradaccum.hpp>

#include <cmath>
#include <filesystem>
#include <iostream>

namespace ga = gradaccum;

struct {
  std::int64_t total_timesteps = 150'000, num_envs = 8, num_steps = 32, num_minibatches = 4, update_epochs = 4;
  double learning_rate = 2.5e-3, gamma = 0.99, gae_lambda = 0.95, clip_coef = 0.2, ent_coef = 0.01, vf_coef = 0.5;
  double max_grad_norm = 0.5, target_kl = 0;                                // 0: without a limit
  bool anneal_lr = true, norm_adv = true, clip_vloss = true, fp16 = false;  // fp16: mixed precision, scaled losses
  std::int64_t micro_batches = 1;      // parts of a minibatch that are computed one by one, where memory is short
  std::int64_t report_every = 10'000;  // steps between two lines and states
} hyper;

/// A pole on a cart, as Gymnasium's CartPole-v1: action 0 pushes the cart to the left, 1 to the right.
struct Environment {
  static constexpr std::int64_t observation_size = 4, actions = 2, max_steps = 500;
  std::array<double, 4> cart{near_zero(), near_zero(), near_zero(), near_zero()};
  double total_reward = 0;  // of the episode so far; step() adds to it

  static double near_zero() { return torch::rand({}, torch::kDouble).item<double>() * 0.1 - 0.05; }
  void observe(float* observation) const { std::copy_n(cart.begin(), observation_size, observation); }
  /// Returns the reward, and whether the episode has ended. As in CleanRL, the limit of steps is an end like others.
  std::pair<double, bool> step(std::int64_t action) {
    constexpr double gravity = 9.8, mass = 1.1, pole_share = 0.1 / mass, half_length = 0.5, seconds = 0.02;
    auto& [x, speed, angle, turning] = cart;
    const double force = action == 1 ? 10 : -10, sine = std::sin(angle), cosine = std::cos(angle);
    const double push = force / mass + pole_share * half_length * turning * turning * sine;
    const double turn = (gravity * sine - cosine * push) / (half_length * (4.0 / 3 - pole_share * cosine * cosine));
    x += seconds * speed, angle += seconds * turning;
    speed += seconds * (push - pole_share * half_length * turn * cosine), turning += seconds * turn;
    return {1, ++total_reward == max_steps || std::abs(x) > 2.4 || std::abs(angle) > 12 * M_PI / 180};
  }
  void state(ga::Archive& archive) { archive("cart", cart), archive("total_reward", total_reward); }
};

struct Agent : torch::nn::Module {
  torch::nn::Sequential actor = register_module("actor", network(Environment::actions, 0.01));
  torch::nn::Sequential critic = register_module("critic", network(1, 1));

  static torch::nn::Sequential network(std::int64_t outputs, double gain) {
    torch::nn::Sequential layers(torch::nn::Linear(Environment::observation_size, 64), torch::nn::Tanh(),
                                 torch::nn::Linear(64, 64), torch::nn::Tanh(), torch::nn::Linear(64, outputs));
    for (auto& parameter : layers->parameters())
      parameter.dim() == 1 ? torch::nn::init::zeros_(parameter) : torch::nn::init::orthogonal_(parameter, M_SQRT2);
    torch::nn::init::orthogonal_(layers->parameters()[4], gain);  // of the last layer
    return layers;
  }
  at::Tensor logits(const at::Tensor& observation) { return actor->forward(observation); }
  at::Tensor value(const at::Tensor& observation) { return critic->forward(observation).squeeze(-1); }
};

/// Observations, actions, their logarithmic probabilities, advantages, values and returns: a row for each step.
using Batch = std::array<at::Tensor, 6>;
constexpr const char* statistics_names[]{"policy loss", "value loss", "entropy", "KL"};

/// Returns the loss with its statistics (KL by http://joschu.net/blog/kl-approx.html).
ga::Loss objective(Agent& agent, Batch& batch) {
  const auto& [observation, action, old_log_prob, advantage, old_value, target] = batch;
  const ga::Autocast autocast(observation.device(), torch::kHalf, hyper.fp16);
  const auto log_probs = agent.logits(observation).log_softmax(1);
  const auto log_ratio = log_probs.gather(1, action.unsqueeze(1)).squeeze(1) - old_log_prob, ratio = log_ratio.exp();
  const auto clip = hyper.clip_coef;
  const auto policy_loss = -torch::min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean();
  const auto entropy = -(log_probs.exp() * log_probs).sum(1).mean(), kl = (ratio - 1 - log_ratio).mean();
  const auto value = agent.value(observation);
  const auto near_old = old_value + (value - old_value).clamp(-clip, clip), error = (value - target).square();
  const auto value_loss = 0.5 * (hyper.clip_vloss ? error.max((near_old - target).square()) : error).mean();
  return ga::Loss{policy_loss - hyper.ent_coef * entropy + hyper.vf_coef * value_loss, action.size(0)}.with(
      torch::stack({policy_loss, value_loss, entropy, kl}).detach(), {});
}

struct Training {
  Agent agent;
  ga::optim::Adam adam{agent.parameters(), ga::optim::AdamOptions(hyper.learning_rate).eps(1e-5)};
  ga::GradAccumulator<ga::optim::Adam> optimizer{adam, {.steps = hyper.micro_batches}};
  ga::LearningRates rates{optimizer};
  ga::AmpScaler scaler{{.enabled = hyper.fp16}};
  std::vector<Environment> environments = std::vector<Environment>(std::size_t(hyper.num_envs));
  at::Tensor last_returns = torch::zeros({100}, torch::kDouble), statistics;  // of episodes, and of the last minibatch
  std::int64_t timesteps = 0, episodes = 0;

  /// Draws an action for each environment, and takes it. `ended` becomes 1 where an episode has ended, else 0.
  void act(const at::Tensor& observation, const at::Tensor& action, const at::Tensor& reward, const at::Tensor& ended) {
    const auto probs = agent.logits(observation).softmax(1).cpu();
    action.copy_((probs / torch::empty_like(probs).exponential_()).argmax(1));
    for (std::size_t i = 0; i < environments.size(); ++i) {
      const auto [gain, ends] = environments[i].step(action.const_data_ptr<std::int64_t>()[i]);
      reward.mutable_data_ptr<float>()[i] = static_cast<float>(gain);
      ended.mutable_data_ptr<float>()[i] = ends;
      if (ends) last_returns[episodes++ % 100] = std::exchange(environments[i], Environment()).total_reward;
    }
  }

  /// Plays num_steps steps in each environment, and estimates values and advantages (arXiv 1506.02438).
  Batch play() {
    const at::NoGradGuard no_grad;
    const auto steps = hyper.num_steps, envs = hyper.num_envs;
    const auto device = agent.parameters()[0].device();
    const ga::Autocast autocast(device, torch::kHalf, hyper.fp16);
    const auto observation = torch::empty({steps + 1, envs, Environment::observation_size});
    const auto reward = torch::zeros({steps, envs}), ended = reward.clone(), action = reward.to(torch::kLong);
    auto* to = observation.mutable_data_ptr<float>();
    for (std::int64_t t = 0; t <= steps; ++t) {
      for (auto& environment : environments) environment.observe(std::exchange(to, to + Environment::observation_size));
      if (t < steps) act(observation[t].to(device), action[t], reward[t], ended[t]);
    }
    const auto values = agent.value(observation.to(device)).to(torch::kFloat).cpu();
    const auto value = values.slice(0, 0, steps), alive = 1 - ended, decay = hyper.gamma * hyper.gae_lambda * alive;
    const auto error = reward + hyper.gamma * values.slice(0, 1) * alive - value;
    auto advantage = torch::empty_like(error), sum = torch::zeros({envs});
    for (auto t = steps - 1; t >= 0; --t) advantage[t] = sum = error[t] + decay[t] * sum;

    Batch batch{observation.slice(0, 0, steps), action, action, advantage, value, advantage + value};
    for (auto& tensor : batch) tensor = tensor.flatten(0, 1).to(device);
    batch[2] = agent.logits(batch[0]).log_softmax(1).gather(1, batch[1].unsqueeze(1)).squeeze(1);
    if (hyper.norm_adv) batch[3] = (batch[3] - batch[3].mean()) / (batch[3].std() + 1e-8);
    return batch;
  }

  void iterate(auto& loss_of, std::int64_t total_timesteps) {  // loss_of: the objective, itself or recorded
    if (hyper.anneal_lr) rates.set(hyper.learning_rate * (1 - double(timesteps) / double(total_timesteps)));
    const auto batch = play();
    for (std::int64_t epoch = 0; epoch < hyper.update_epochs; ++epoch) {
      const auto order = torch::randperm(batch[0].size(0), batch[0].device());
      for (auto& rows : order.tensor_split(hyper.num_minibatches * hyper.micro_batches)) {
        auto minibatch = batch;
        for (auto& tensor : minibatch) tensor = tensor.index_select(0, rows);
        const auto loss = loss_of(minibatch);
        optimizer.backward(scaler.scale(loss));
        optimizer.clip_grad_norm_(hyper.max_grad_norm);  // unscales first
        scaler.step(optimizer);
        scaler.update();
        optimizer.zero_grad();
        statistics = loss.output;
      }
      if (hyper.target_kl > 0 && statistics[3].item<double>() > hyper.target_kl) break;  // KL
    }
    timesteps += batch[0].size(0);
  }

  void train(auto loss_of, std::int64_t total_timesteps, const std::string& states) {
    ga::load(states, *this, {.if_any = true});
    std::cout << timesteps << " of " << total_timesteps << " steps" << std::endl;
    while (timesteps < total_timesteps) {
      iterate(loss_of, total_timesteps);
      if (timesteps % hyper.report_every >= hyper.num_envs * hyper.num_steps && timesteps < total_timesteps) continue;
      std::cout << timesteps << " steps, " << episodes << " episodes: mean return " << mean_return();
      for (int i = 0; i < 4; ++i) std::cout << ", " << statistics_names[i] << ' ' << statistics[i].item<float>();
      std::cout << std::endl;
      ga::save(states, *this, {.keep_last = 2});
    }
    std::cout << loss_of.report();  // how many updates were replayed or compiled
  }

  std::int64_t updates() const { return optimizer.updates(); }
  double mean_return() const { return last_returns.slice(0, 0, episodes).mean().item<double>(); }  // of 100 episodes
  void state(ga::Archive& archive) {
    archive("agent", ga::ModelState(agent)), archive("optimizer", ga::OptimizerState(optimizer, agent));
    archive("scaler", scaler), archive("random", ga::RandomState()), archive("last_returns", last_returns);
    archive("timesteps", timesteps), archive("episodes", episodes), archive("environments", environments);
  }
};

int main(int argc, char** argv) try {
  if (argc < 2 || argv[1][0] == '-') {
    std::cout << "usage: ppo FOLDER [STEPS [SEED]] | ppo FOLDER record\n";
    return argc < 2 ? 1 : 0;
  }
  torch::set_num_threads(1);  // threads wait for one another longer than such a network computes
  torch::manual_seed(argc > 3 ? std::stoull(argv[3]) : 1);
  Training training;
  if (torch::cuda::is_available()) training.agent.to(torch::kCUDA);
  const std::string folder = argv[1], recorded = folder + "/step";
  if (argc > 2 && argv[2] == std::string("record")) {
    auto minibatch = training.play();
    for (auto& tensor : minibatch) tensor = tensor.tensor_split(hyper.num_minibatches * hyper.micro_batches)[0];
    std::cout << ga::save_step(training.agent, objective, minibatch, recorded);
    return 0;
  }
  const auto steps = argc > 2 ? std::int64_t(std::stod(argv[2])) : hyper.total_timesteps;
  if (std::filesystem::exists(recorded))
    training.train(ga::CompiledStep(training.agent, objective, recorded), steps, folder + "/states");
  else  // without a GPU, a GraphedStep runs the objective itself
    training.train(ga::GraphedStep(training.agent, objective), steps, folder + "/states");
  return 0;
} catch (const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  std::cerr << "ppo: " << (torch ? torch->what_without_backtrace() : error.what()) << "; --help shows the arguments\n";
  return 1;
}
