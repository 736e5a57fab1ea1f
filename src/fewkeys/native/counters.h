// Counts the arithmetic of kernels and the bytes of their buffers, in builds with -DFEWKEYS_COUNT. Tests then see how
// both grow with the length. In all other builds the calls below do nothing.
#pragma once
#include <cstdint>

#ifdef FEWKEYS_COUNT
#include <atomic>
#include <deque>
#include <mutex>
#include <new>

namespace fewkeys {

struct Counter {
  std::atomic<int64_t> multiply_adds{0}, bytes{0};
};

// One counter for each thread that ever ran; only that thread adds to it.
struct Counters {
  std::mutex enrolling;
  std::deque<Counter> of_threads;

  static Counters &all() {
    static Counters counters;
    return counters;
  }

  static Counter &of_thread() {
    static thread_local Counter &counter = all().enroll();
    return counter;
  }

  // The counts of all threads since the last call.
  void take(int64_t &multiply_adds, int64_t &bytes) {
    const std::lock_guard<std::mutex> hold(enrolling);
    multiply_adds = bytes = 0;
    for (Counter &counter : of_threads)
      multiply_adds += counter.multiply_adds.exchange(0), bytes += counter.bytes.exchange(0);
  }

 private:
  Counter &enroll() {
    const std::lock_guard<std::mutex> hold(enrolling);
    return of_threads.emplace_back();
  }
};

static inline void count_multiply_adds(int64_t number) {
  Counters::of_thread().multiply_adds.fetch_add(number, std::memory_order_relaxed);
}
// Counts allocations down to the one that fails. Tests use it to simulate a lack of memory.
static inline std::atomic<int64_t> &failing() {
  static std::atomic<int64_t> number{0};
  return number;
}
static inline void count_bytes(int64_t number) {
  if (failing() > 0 && failing().fetch_sub(1) == 1) throw std::bad_alloc();
  Counters::of_thread().bytes.fetch_add(number, std::memory_order_relaxed);
}

}  // namespace fewkeys
#else
namespace fewkeys {

static inline void count_multiply_adds(int64_t) {}
static inline void count_bytes(int64_t) {}

}  // namespace fewkeys
#endif
