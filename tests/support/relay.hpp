// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace tests {

/// A socket, closed by the destructor.
class Socket {
 public:
  explicit Socket(int descriptor) : descriptor_(descriptor) { require(descriptor); }
  static Socket of_tcp() { return Socket(::socket(AF_INET, SOCK_STREAM, 0)); }
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  int descriptor() const { return descriptor_; }
  static void require(int result) {
    if (result < 0) throw std::system_error(errno, std::generic_category(), "Relay");
  }

 private:
  int descriptor_;
};

/// Forwards connections to another port of this machine, to emulate a link that is slow, or that fails without notice
/// to either side.
class Relay {
 public:
  explicit Relay(std::uint16_t port, std::chrono::milliseconds delay = {}) : target_(address(port)), delay_(delay) {
    auto own = address(0);
    socklen_t size = sizeof own;
    Socket::require(::bind(listener_.descriptor(), pointer(own), size));
    Socket::require(::listen(listener_.descriptor(), 16));
    Socket::require(::getsockname(listener_.descriptor(), pointer(own), &size));
    port_ = ntohs(own.sin_port);
    thread_ = std::thread([this] { run(); });
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  /// Closes the connections.
  ~Relay() {
    ended_ = true;
    thread_.join();
  }

  std::uint16_t port() const { return port_; }
  /// Forwards nothing from now on.
  void cut() { cut_ = true; }

 private:
  static sockaddr_in address(std::uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }
  static sockaddr* pointer(sockaddr_in& address) { return reinterpret_cast<sockaddr*>(&address); }

  void run() {
    while (!ended_) {
      std::vector<pollfd> ready{{listener_.descriptor(), POLLIN, 0}};
      for (auto& end : ends_) ready.push_back({end.descriptor(), POLLIN, 0});
      if (cut_ || ::poll(ready.data(), ready.size(), 10) <= 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      for (std::size_t i = 1; i < ready.size(); ++i)
        if (ready[i].revents != 0) pass_on(i - 1);
      if (ready[0].revents != 0) accept();
    }
  }
  void accept() {
    ends_.emplace_back(::accept(listener_.descriptor(), nullptr, nullptr));
    ends_.push_back(Socket::of_tcp());
    Socket::require(::connect(ends_.back().descriptor(), pointer(target_), sizeof target_));
  }
  /// Forwards data from one end of a connection to the other, whose index differs in the last bit.
  void pass_on(std::size_t from) {
    auto& other = ends_[from ^ 1U];
    const auto count = ::recv(ends_[from].descriptor(), buffer_.data(), buffer_.size(), 0);
    if (count <= 0) {
      ::shutdown(other.descriptor(), SHUT_WR);
      return;
    }
    std::this_thread::sleep_for(delay_);
    if (!cut_) ::send(other.descriptor(), buffer_.data(), static_cast<std::size_t>(count), MSG_NOSIGNAL);
  }

  sockaddr_in target_;
  std::chrono::milliseconds delay_;
  Socket listener_ = Socket::of_tcp();
  std::uint16_t port_ = 0;
  std::vector<Socket> ends_;  // two per connection
  std::array<char, 65536> buffer_{};
  std::atomic<bool> cut_ = false, ended_ = false;
  std::thread thread_;
};

}  // namespace tests
