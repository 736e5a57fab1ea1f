// Keys in two bits a number, and queries in integers: `fewkeys.sketch.codes` has the equations.
//
// Every step is an exact product, a sum in a fixed order or a correctly rounded operation, so the bits are torch's.
#pragma once
#include "largest.h"

namespace fewkeys {

constexpr int TABLE = 16;   // bytes of two dimensions in a block
constexpr int LEVELS = 10;  // the largest integer of a query
constexpr int UNIT = 4096;  // the factor of a key at the mean distance of the first block from the middle

template <int step>
static inline vec butterfly(vec x) {
  x = crossed<step>(x) + (vec)((ivec)x ^ ((count_up() & step) != 0 ? ivec{} + INT32_MIN : ivec{}));
  if constexpr (2 * step < LANES) return butterfly<2 * step>(x);
  return x;
}

// Replaces x (wide,) by H x, where H is the Hadamard matrix; wide is a power of 2, at least 16.
static inline void transform(float *x, int64_t wide) {
  count_multiply_adds(wide);
  for (int64_t d = 0; d < wide; d += LANES) store(x + d, butterfly<1>(load(x + d)));
  for (int64_t step = LANES; step < wide; step *= 2)
    for (int64_t first = 0; first < wide; first += 2 * step)
      for (int64_t d = first; d < first + step; d += LANES) {
        const vec a = load(x + d), b = load(x + d + step);
        store(x + d, a + b), store(x + d + step, a - b);
      }
}

// Rotates a query (dim,) into `turned` (wide,) and rounds it to integers (wide,).
template <class T>
static void round_query(const T *query, int64_t dim, int64_t wide, const float *sign, float *turned, int8_t *to) {
  for (int64_t d = 0; d < dim; d++) turned[d] = to_float(query[d]) * sign[d];
  std::fill(turned + dim, turned + wide, 0.0f);
  transform(turned, wide);
  float largest = std::numeric_limits<float>::min();
  for (int64_t d = 0; d < wide; d++) largest = std::max(largest, std::fabs(turned[d]));
  for (int64_t d = 0; d < wide; d++) {
    const float x = turned[d] / largest * LEVELS;
    to[d] = (int8_t)std::rint(x == x ? x : 0.0f);
  }
}

// Computes the codes of keys, block by block.
template <class T>
class Coder {
 public:
  explicit Coder(const Coding &p) : p(p), turned(p.wide), square(p.wide), code(CODED * p.wide) {}

  void run(int64_t head, int64_t block) {
    std::fill(code.begin(), code.end(), 0);
    int16_t *sigma = p.sigma + (head * p.blocks + block) * CODED;
    std::fill_n(sigma, CODED, 0);
    const int64_t first = block * CODED, count = std::min<int64_t>(CODED, p.keys - first);
    for (int64_t i = 0; i < count; i++)
      sigma[i] = levels(p.key.at<T>(head, first + i), head, &code[i * p.wide]);
    uint8_t *packed = p.packed + (head * p.blocks + block) * p.wide / 2 * TABLE;
    for (int64_t d = 0; d < p.wide; d += 2)
      for (int c = 0; c < TABLE; c++) {
        const uint8_t *low = &code[(c / 2 + c % 2 * 8) * p.wide + d], *high = low + TABLE * p.wide;
        *packed++ = low[0] | low[1] << 2 | high[0] << 4 | high[1] << 6;
      }
  }

 private:
  const Coding &p;
  Floats turned;
  aligned_vector<double> square;
  aligned_vector<uint8_t> code;

  // Writes the codes of a key; returns its factor.
  int16_t levels(const T *key, int64_t head, uint8_t *to) {
    const float *middle = p.middle + head * p.dim;
    for (int64_t d = 0; d < p.dim; d++) turned[d] = (to_float(key[d]) - middle[d]) * p.sign[d];
    std::fill(turned.begin() + p.dim, turned.end(), 0.0f);
    transform(turned.data(), p.wide);
    for (int64_t d = 0; d < p.wide; d++) square[d] = (double)turned[d] * turned[d];  // exact
    for (int64_t half = p.wide / 2; half; half /= 2)
      for (int64_t d = 0; d < half; d++) square[d] += square[d + half];
    const float sigma = std::sqrt(square[0] / p.wide);
    for (int64_t d = 0; d < p.wide; d++) {
      const float x = turned[d];
      to[d] = (x >= -sigma) + (x >= 0) + (x >= sigma);
    }
    // Keys at the middle have no size, also if all keys of the first block are (0 / 0).
    const float factor = sigma > 0 ? std::rint(sigma * UNIT / p.spread[head]) : 0;
    return factor < INT16_MAX ? factor : INT16_MAX;
  }
};

template <class T>
static void code_keys(const Coding &p, int threads) {
  in_parallel(
      threads, p.heads * p.blocks, [&] { return Coder<T>(p); },
      [&](Coder<T> &coder, int64_t t) { coder.run(t / p.blocks, t % p.blocks); }, 8);
}

}  // namespace fewkeys
