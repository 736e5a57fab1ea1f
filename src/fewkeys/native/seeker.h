// Selects the number of a rank; equal numbers are ordered by their places.
#pragma once
#include "lanes.h"

namespace fewkeys {

// The bits of a float, ordered as floats are; zeros are equal. No branch: random signs would be mispredicted.
static inline uint32_t ordered(float x) {
  x += 0.0f;
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits ^ (-(bits >> 31) | 0x80000000u);
}
// And back.
static inline float number_of(uint32_t bits) {
  bits ^= ((bits >> 31) - 1) | 0x80000000u;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// The sort key: a number and its place. NaN counts as zero.
static inline uint64_t sortable(float number, int64_t place) {
  return (uint64_t)ordered(number == number ? number : 0.0f) << 32 | (uint64_t)place;
}

// Finds, of many that are `sortable`, the one of which `rank` are smaller. They go to bins by how far their numbers are
// from a middle: bins near it are narrow, and so few share that of the one sought.
class Seeker {
 public:
  explicit Seeker(int64_t most) : bin(most), left(most) {}

  uint64_t seek(const uint64_t *key, int64_t count, int64_t rank, float middle) {
    int32_t many[1 << BITS] = {};
    for (int64_t i = 0; i < count; i++) {
      bin[i] = sortable(number_of(key[i] >> 32) - middle, 0) >> (64 - BITS);
      many[bin[i]]++;
    }
    int32_t its = 0;
    for (; rank >= many[its]; its++) rank -= many[its];
    int64_t inside = 0;
    for (int64_t i = 0; i < count; i++) left[inside] = key[i], inside += bin[i] == its;
    std::nth_element(left.begin(), left.begin() + rank, left.begin() + inside);
    return left[rank];
  }

 private:
  static constexpr int BITS = 10;  // of a number, that decide its bin: the sign, the exponent and a bit
  std::vector<int32_t> bin;
  std::vector<uint64_t> left;
};

}  // namespace fewkeys
