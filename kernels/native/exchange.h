// How ranks exchange data inside an op: `_exchange.py` says how; on the CPU flag 0 is all flags.
#pragma once
#include "common.h"

#include <poll.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace inkling {

constexpr int64_t CONTROL = 32, FLAGS = 256, HEADER = CONTROL + FLAGS;  // words
constexpr int64_t ERROR = 0, LIMIT = 1, LIFE = 8, LIMIT_MS = 5000, PAUSE_MS = 1000, HALF_ALIGNMENT = 32;
constexpr float ABSENT_LOGIT = -1e30f;

class Exchange {
 public:
  Exchange(const Tensor& peers, const Tensor& exchange, const Tensor& step_counter, const Tensor& rank, int64_t call,
           int64_t calls, int64_t world)
      : peers_(data<int64_t>(peers)), block_(data<int64_t>(exchange)),
        sequence_(data<int64_t>(step_counter)[0] * calls + call + 1), own_(data<int32_t>(rank)[0]), world_(world),
        half_((exchange.numel() - HEADER) / 2 / HALF_ALIGNMENT * HALF_ALIGNMENT) {
    STD_TORCH_CHECK(0 <= own_ && own_ < world && world <= peers.numel(), "rank ", own_, " of ", world);
  }

  // Where this rank writes `count` elements of its part.
  template <typename T>
  T* part(int64_t count) const {
    STD_TORCH_CHECK(count * static_cast<int64_t>(sizeof(T)) <= half_ * 8, "a part of ", count,
                    " elements is larger than the exchange's halves");
    return reinterpret_cast<T*>(block_ + offset());
  }

  // Publishes the part and returns every rank's, in rank order; null for one that gave nothing.
  template <typename T>
  std::vector<const T*> publish() const {
    flag(block_, CONTROL).store(sequence_, std::memory_order_release);
    std::vector<const T*> parts(world_);
    Wait wait;
    for (int64_t r = 0; r < world_; r++) {
      int64_t* peer = r == own_ ? block_ : reinterpret_cast<int64_t*>(peers_[r]);
      if (peer != nullptr && arrived(peer, r, wait)) parts[r] = reinterpret_cast<const T*>(peer + offset());
    }
    return parts;
  }

 private:
  using Clock = std::chrono::steady_clock;

  // When a call began to wait, and when it last looked at the clock, whichever rank it waits for.
  struct Wait {
    Clock::time_point start = Clock::now(), last = start;
  };

  int64_t offset() const { return HEADER + (sequence_ & 1) * half_; }

  static std::atomic_ref<int64_t> flag(int64_t* block, int64_t word) { return std::atomic_ref(block[word]); }

  // Waits for a rank's flag; false, and noted, when time is over.
  // Time in which this rank did not look, as when all are suspended, does not count.
  bool arrived(int64_t* peer, int64_t r, Wait& wait) const {
    for (int64_t tries = 0; flag(peer, CONTROL).load(std::memory_order_acquire) < sequence_; tries++) {
      if (block_[ERROR] != 0) return false;
      if (tries % 64 == 63) {
        int64_t limit = block_[LIMIT] != 0 ? block_[LIMIT] : LIMIT_MS;
        Clock::time_point now = Clock::now();
        if (now - wait.last > std::chrono::milliseconds(PAUSE_MS)) wait.start += now - wait.last;
        if (now - wait.start > std::chrono::milliseconds(limit)) block_[ERROR] = 1 + r;
        wait.last = now;
      }
      if (tries % 1024 == 1023) note_dead();
      if (tries > 64) std::this_thread::yield();
    }
    return true;
  }

  // Notes a rank whose process has ended.
  void note_dead() const {
    for (int64_t r = 0; r < world_; r++) {
      pollfd socket{static_cast<int>(block_[LIFE + r]) - 1, 0, 0};
      if (socket.fd >= 0 && poll(&socket, 1, 0) > 0 && (socket.revents & (POLLHUP | POLLERR))) block_[ERROR] = 1 + r;
    }
  }

  const int64_t* peers_;
  int64_t* block_;
  int64_t sequence_, own_, world_, half_;
};

// to = the sum of `parts`, fp32 in rank order, rounded once.
template <typename T>
inline void rank_sum(const std::vector<const T*>& parts, int64_t count, T* to) {
  for (int64_t i = 0; i < count; i++) {
    float sum = 0;
    for (const T* part : parts)
      if (part != nullptr) sum += load(part + i);
    store(to + i, sum);
  }
}

}  // namespace inkling
