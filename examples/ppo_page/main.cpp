// SPDX-License-Identifier: Apache-2.0
//
// ppo_page FOLDER [STEPS [SEED]]: trains the template ppo.cpp, and writes FOLDER/page.html with its curves and with
// frames of an episode before and after. If FOLDER/step has the compiled step (`ppo FOLDER record`), uses it.

#define main ppo_main  // the program itself
#include "../templates/ppo.cpp"
#undef main

namespace {

/// Draws the rail, the cart, the pole and its hinge.
ga::Drawing frame_of(const Environment& environment, std::int64_t step) {
  const double x = 2.6 + environment.cart[0], angle = environment.cart[2], top = 0.25;
  return {.width = 5.2,
          .height = 1.5,
          .lines = {{.points = {{0, 0.1}, {5.2, 0.1}}, .width = 1.5, .colour = 7},
                    {.points = {{x - 0.3, top - 0.08}, {x + 0.3, top - 0.08}}, .width = 9, .colour = 0},
                    {.points = {{x, top}, {x + std::sin(angle), top + std::cos(angle)}}, .width = 4, .colour = 1},
                    {.points = {{x, top}}, .width = 6, .colour = 7}},
          .caption = "step " + std::to_string(step)};
}

/// Plays an episode with the most probable actions, and draws every `every`-th step and the last.
std::vector<ga::Drawing> play_episode(Training& training, std::int64_t every) {
  const at::NoGradGuard no_grad;
  const auto device = training.agent.parameters()[0].device();
  Environment environment{.cart = {0, 0, 0.05, 0}};
  std::vector<ga::Drawing> frames{frame_of(environment, 0)};
  const auto observation = torch::empty({1, Environment::observation_size});
  for (std::int64_t step = 1; step <= Environment::max_steps; ++step) {
    environment.observe(observation.mutable_data_ptr<float>());
    const auto action = training.agent.logits(observation.to(device)).argmax(1).item<std::int64_t>();
    const bool ended = environment.step(action).second;
    if (step % every == 0 || ended) frames.push_back(frame_of(environment, step));
    if (ended) break;
  }
  return frames;
}

void add_curves(ga::RunPage& page, Training& training) {
  const auto update = training.updates();
  page.add("train/return", update, training.mean_return());
  page.add("train/lr", update, training.adam.param_groups()[0].options().get_lr());
  for (int i = 0; i < 4; ++i)
    page.add(c10::str("train/", statistics_names[i]), update, training.statistics[i].item<double>());
}

void train_with_page(Training& training, auto step, std::int64_t total_timesteps, const std::string& folder) {
  ga::RunPage page({.path = folder + "/page.html", .title = "CartPole, by proximal policy optimisation"});
  page.set("agent", "actor and critic, 4-64-64 with tanh");
  page.draw("Before learning", play_episode(training, 8));
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t line = 1; training.timesteps < total_timesteps;) {
    training.iterate(step, total_timesteps);
    add_curves(page, training);
    page.tile("steps", static_cast<double>(training.timesteps));
    page.tile("mean return", training.mean_return(), "of 100 episodes, 500 at most");
    page.update({.fraction = static_cast<double>(training.timesteps) / static_cast<double>(total_timesteps)});
    if (training.timesteps < line * hyper.report_every && training.timesteps < total_timesteps) continue;
    std::cout << training.timesteps << " steps, " << training.episodes << " episodes: mean return "
              << training.mean_return() << std::endl;
    ++line;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  page.tile("updates/s", std::round(static_cast<double>(training.updates()) / seconds.count()), "with the steps");
  page.draw("After " + std::to_string(training.timesteps) + " steps", play_episode(training, 50));
  page.end();
  std::cout << step.report() << "The page: " << folder << "/page.html\n";
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2 || argv[1] == std::string("--help")) {
    std::cout << "usage: ppo_page FOLDER [STEPS [SEED]]\n";
    return argc < 2;
  }
  const std::string folder = argv[1];
  torch::set_num_threads(1);
  torch::manual_seed(argc > 3 ? std::stoull(argv[3]) : 1);
  Training training;
  if (torch::cuda::is_available()) training.agent.to(torch::kCUDA);
  const auto steps = argc > 2 ? std::int64_t(std::stod(argv[2])) : hyper.total_timesteps;
  if (std::filesystem::exists(folder + "/step"))
    train_with_page(training, ga::CompiledStep(training.agent, objective, folder + "/step"), steps, folder);
  else
    train_with_page(training, ga::GraphedStep(training.agent, objective), steps, folder);
  return 0;
} catch (const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  std::cerr << "ppo_page: " << (torch ? torch->what_without_backtrace() : error.what()) << '\n';
  return 1;
}
