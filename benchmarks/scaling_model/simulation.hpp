// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

/// A window of ranks that train together, computed from a few numbers: without LibTorch, processes or a network.
namespace scaling {

/// A message of n bytes takes latency + n / bytes_per_s (Hockney's model).
struct Link {
  double latency = 0;  ///< seconds
  double bytes_per_s = 1;
};

/// In how many messages n ranks reduce-scatter or all-gather; the bytes are the same.
enum class Pattern {
  ring,    ///< n - 1, to a neighbour: Gloo's, and NCCL's for large buckets
  halving  ///< log2(n), to ranks half as far each time (Rabenseifner)
};

struct Machine {
  std::int64_t ranks = 1;  ///< that share `inside`; each has a link `between` of its own
  Link inside = {}, between = {};
  double overlap = 1;              ///< the rate of computing beside a transfer; 1: as if there were none
  double scatter = 1, gather = 1;  ///< what a reduce-scatter, and an all-gather, take of half an all-reduce
  Pattern pattern = Pattern::ring;
};

/// What a rank computes, in seconds.
struct Compute {
  double forward = 0, backward = 0, step = 0;
  double norm = 0;     ///< of all gradients
  double further = 0;  ///< more for each further micro-batch of a window, which adds to the gradients that are there
};

/// Gradients that are sent together.
struct Bucket {
  double bytes = 0;
  double ready = 1;  ///< the part of backward after which it has been made
};

/// What each rank has all of.
enum class Way {
  unsharded,        ///< parameters, gradients and the optimizer's state
  shard_optimizer,  ///< parameters and gradients: ZeRO's stage 1
  shard_gradients   ///< parameters: ZeRO's stage 2
};

/// A window of one rank.
struct Window {
  double seconds = 0, sent_bytes = 0;
};

constexpr double library_bucket_bytes = 25 << 20;

/// As the library makes them: the last parameters first, a large gradient alone; in the order in which backward
/// completes them. The time of backward is taken to be shared out by bytes.
inline std::vector<Bucket> buckets_of(const std::vector<double>& parameters,
                                      double bucket_bytes = library_bucket_bytes) {
  constexpr double alone_from = 1 << 20;
  double all = 0, made = 0;
  for (auto bytes : parameters) all += bytes;
  std::vector<Bucket> buckets;
  std::size_t open = parameters.size();  // the place of the bucket that others may join
  for (auto bytes = parameters.rbegin(); bytes != parameters.rend(); ++bytes) {
    made += *bytes;
    const bool alone = *bytes >= std::min(alone_from, bucket_bytes);
    const bool joins = !alone && open < buckets.size() && buckets[open].bytes + *bytes <= bucket_bytes;
    if (!joins) buckets.emplace_back();
    if (!joins && !alone) open = buckets.size() - 1;
    auto& bucket = joins ? buckets[open] : buckets.back();
    bucket = {bucket.bytes + *bytes, made / all};
  }
  std::stable_sort(buckets.begin(), buckets.end(), [](auto& a, auto& b) { return a.ready < b.ready; });
  return buckets;
}

inline double messages(Pattern pattern, std::int64_t ranks) {
  const auto all = static_cast<double>(ranks);
  return pattern == Pattern::ring ? all - 1 : std::ceil(std::log2(all));
}

/// A reduce-scatter or an all-gather: half of an all-reduce. First inside of each machine, then between the machines,
/// each rank with those of its place and with its share of the bytes.
class Exchange {
 public:
  Exchange(const Machine& machine, std::int64_t ranks) : machine_(machine), inside_(std::min(ranks, machine.ranks)) {
    if (ranks < 1 || machine.ranks < 1 || ranks % inside_ != 0)
      throw std::invalid_argument("scaling: ranks must fill their machines, got " + std::to_string(ranks) + " for " +
                                  std::to_string(machine.ranks) + " a machine");
    machines_ = ranks / inside_;
  }

  double seconds(double bytes) const {
    return level(machine_.inside, inside_, bytes) +
           level(machine_.between, machines_, bytes / static_cast<double>(inside_));
  }
  double sent_bytes(double bytes) const { return part(inside_ * machines_) * bytes; }

 private:
  static double part(std::int64_t ranks) { return static_cast<double>(ranks - 1) / static_cast<double>(ranks); }
  double level(const Link& link, std::int64_t ranks, double bytes) const {
    return messages(machine_.pattern, ranks) * link.latency + part(ranks) * bytes / link.bytes_per_s;
  }

  Machine machine_;
  std::int64_t inside_, machines_ = 1;
};

/// One rank's processor, and its link, which sends one thing after another.
class Clock {
 public:
  explicit Clock(double overlap) : overlap_(overlap) {}

  void compute(double work) {
    const double beside = overlap_ * std::max(0.0, free_ - now_);  // what is done while the link is busy
    if (beside < work)
      now_ = std::max(now_, free_) + work - beside;
    else if (work > 0)
      now_ += work / overlap_;
  }
  /// Returns when it will have arrived.
  double send(double seconds) { return free_ = std::max(now_, free_) + seconds; }
  void wait(double until) { now_ = std::max(now_, until); }
  void wait() { wait(free_); }
  double now() const { return now_; }

 private:
  double overlap_, now_ = 0, free_ = 0;
};

/// The events of a window, in their order.
class Simulation {
 public:
  Simulation(const Machine& machine, const Compute& compute, const std::vector<Bucket>& buckets, std::int64_t ranks,
             Way way, double bucket_bytes)
      : machine_(machine),
        exchange_(machine, ranks),
        compute_(compute),
        buckets_(buckets),
        ranks_(ranks),
        way_(way),
        bucket_bytes_(bucket_bytes),
        clock_(machine.overlap) {}

  Window run(std::int64_t micro_batches) {
    for (std::int64_t i = 0; i < micro_batches; ++i) {
      clock_.compute(compute_.forward);
      backward(compute_.backward + (i > 0 ? compute_.further : 0),
               way_ == Way::shard_gradients || i + 1 == micro_batches);
    }
    agree();
    if (way_ != Way::unsharded && ranks_ > 1) gather_norms();
    clock_.compute(way_ == Way::unsharded ? compute_.step : compute_.step / static_cast<double>(ranks_));
    if (way_ != Way::unsharded)
      for (auto& bucket : buckets_) send(bucket.bytes, 1, machine_.gather);
    clock_.wait();
    return {clock_.now(), sent_bytes_};
  }

 private:
  void backward(double seconds, bool sends) {
    double done = 0;
    for (auto& bucket : buckets_) {
      if (!sends) break;
      clock_.compute((std::max(done, bucket.ready) - done) * seconds);
      done = std::max(done, bucket.ready);
      if (way_ == Way::unsharded)
        send(bucket.bytes, 2);
      else
        reduce_scatter(bucket.bytes);
    }
    clock_.compute((1 - done) * seconds);
  }
  /// At most as much as a bucket is under way: then the oldest is waited for. What is larger goes part by part.
  void reduce_scatter(double bytes) {
    const auto parts = std::max(std::ceil(bytes / bucket_bytes_), 1.0);
    for (double i = 0; i < parts; ++i) {
      for (; !under_way_.empty() && bytes_under_way_ + bytes / parts > bucket_bytes_; under_way_.pop_front()) {
        clock_.wait(under_way_.front().arrival);
        bytes_under_way_ -= under_way_.front().bytes;
      }
      under_way_.push_back({bytes / parts, send(bytes / parts, 1, machine_.scatter)});
      bytes_under_way_ += bytes / parts;
    }
  }
  /// A few numbers of each window: latencies.
  void agree() {
    send(0, 2);
    clock_.wait();
  }
  /// Waited for, as a program does that clips.
  void gather_norms() {
    clock_.compute(compute_.norm / static_cast<double>(ranks_));
    send(0, 1);
    clock_.wait();
  }
  /// `passes`: 1, a reduce-scatter or an all-gather; 2, an all-reduce. `times`: as long. Returns when it will have
  /// arrived.
  double send(double bytes, int passes, double times = 1) {
    sent_bytes_ += passes * exchange_.sent_bytes(bytes);
    return clock_.send(times * passes * exchange_.seconds(bytes));
  }

  Machine machine_;
  Exchange exchange_;
  Compute compute_;
  std::vector<Bucket> buckets_;
  std::int64_t ranks_;
  Way way_;
  double bucket_bytes_;
  struct Sent {
    double bytes = 0, arrival = 0;
  };
  std::deque<Sent> under_way_;  // gradients that are divided, the oldest first
  double bytes_under_way_ = 0;
  Clock clock_;
  double sent_bytes_ = 0;
};

inline Window window(const Machine& machine, const Compute& compute, const std::vector<Bucket>& buckets,
                     std::int64_t ranks, Way way, std::int64_t micro_batches,
                     double bucket_bytes = library_bucket_bytes) {
  return Simulation(machine, compute, buckets, ranks, way, bucket_bytes).run(micro_batches);
}

/// Of what as many ranks would train that need not exchange anything.
inline double efficiency(const Machine& machine, const Compute& compute, const std::vector<Bucket>& buckets,
                         std::int64_t ranks, Way way, std::int64_t micro_batches,
                         double bucket_bytes = library_bucket_bytes) {
  const auto alone = window(machine, compute, buckets, 1, Way::unsharded, micro_batches);
  return alone.seconds / window(machine, compute, buckets, ranks, way, micro_batches, bucket_bytes).seconds;
}

/// Parameters, gradients and AdamW's two moments in float32; a shard's buckets are there twice while they are sent.
inline double memory_bytes(const std::vector<Bucket>& buckets, std::int64_t ranks, Way way) {
  double all = 0, largest = 0;
  for (auto& bucket : buckets) all += bucket.bytes, largest = std::max(largest, bucket.bytes);
  const auto of_all = static_cast<double>(ranks);
  if (way == Way::unsharded) return 4 * all;
  const double whole = way == Way::shard_gradients ? 1 : 2;
  return (whole + (4 - whole) / of_all) * all + 2 * largest;
}

}  // namespace scaling
