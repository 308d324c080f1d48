// The threads of one call: a spinning barrier, and fair shares of work.
//
// A decode step has some forty phases of a few microseconds each; starting a parallel region for each would cost more
// than the work. So one region spans the whole call, and phases are separated by this barrier.
#pragma once

#include <immintrin.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "simd.h"

namespace turnout {

class Team {
 public:
  // Wait for everybody. A thread whose partner lost its core yields, then sleeps, instead of burning its own.
  void barrier(int size) {
    if (size == 1) return next_.store(0, std::memory_order_relaxed);
    const unsigned generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; spins++) {
      if (spins < SPINS)
        _mm_pause();
      else if (spins < SPINS + YIELDS)
        sched_yield();
      else
        usleep(NAP_US);
    }
  }

  // The next piece of work that no thread has taken since the last barrier.
  Index take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static constexpr int SPINS = 4096, YIELDS = 64, NAP_US = 50;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> generation_{0};
  alignas(64) std::atomic<Index> next_{0};
};

struct Range {
  Index begin, end;
};

// A thread's contiguous share of `count` pieces.
inline Range share(Index count, int thread, int threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

struct Worker {
  Team* team;
  int thread, threads;
  std::int8_t* quantized;  // room for the rows of one product with a matrix of integers, common to the team

  void barrier() const { team->barrier(threads); }
  Range share(Index count) const { return turnout::share(count, thread, threads); }
};

}  // namespace turnout
