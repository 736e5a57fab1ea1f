// Counts the arithmetic of kernels and the bytes of their buffers, so that tests see how both grow with the length, in
// builds with -DFEWKEYS_COUNT.
#pragma once
#include <atomic>
#include <cstdint>
#include <new>

namespace fewkeys {

#ifdef FEWKEYS_COUNT
inline std::atomic<int64_t> multiply_adds{0}, bytes_taken{0};
// Allocations up to the one that fails, by which tests simulate a lack of memory; 0: none fails.
inline std::atomic<int64_t> until_failure{0};

static inline void count_multiply_adds(int64_t number) { multiply_adds.fetch_add(number, std::memory_order_relaxed); }
static inline void count_bytes(int64_t number) {
  if (until_failure > 0 && until_failure.fetch_sub(1) == 1) throw std::bad_alloc();
  bytes_taken.fetch_add(number, std::memory_order_relaxed);
}
#else
static inline void count_multiply_adds(int64_t) {}
static inline void count_bytes(int64_t) {}
#endif

}  // namespace fewkeys
