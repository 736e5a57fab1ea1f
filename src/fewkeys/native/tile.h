// Softmax for a tile of queries, one in each lane. All attention kernels use it.
#pragma once
#include "products.h"

namespace fewkeys {

// Copies rows as floats, padded with zeros to `width`.
template <class T>
static void copy_rows(const T *rows, int64_t stride, int count, int dim, int width, float *into) {
  for (int j = 0; j < count; j++, rows += stride, into += width) {
    int d = 0;
    for (; d + LANES <= dim; d += LANES) store(into + d, load(rows + d));
    for (; d < dim; d++) into[d] = to_float(rows[d]);
    for (int d = dim; d < width; d++) into[d] = 0.0f;
  }
}

// Rows as padded floats: in place if they already are, otherwise copied to `into`.
template <class T>
static const float *as_floats(const T *rows, int64_t &stride, int count, int dim, int width, float *into) {
  if constexpr (sizeof(T) == sizeof(float))
    if (dim == width) return (const float *)rows;
  copy_rows(rows, stride, count, dim, width, into);
  stride = width;
  return into;
}

// The state of a tile's softmax: the largest score and the sum of weights of every query.
struct Tile {
  vec top[WIDE], sum[WIDE] = {};

  Tile() {
    for (int w = 0; w < WIDE; w++) top[w] = broadcast(-INFINITY);
  }

  // For queries that see no key: subtracting 0 instead of -inf makes their weights e^-inf = 0 instead of NaN.
  void settle() {
    for (int w = 0; w < WIDE; w++) top[w] = top[w] == broadcast(-INFINITY) ? broadcast(0.0f) : top[w];
  }

  // Turns scores into weights in place.
  void weigh(float *score, int count) {
    count_multiply_adds(count * TILE);
    for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {  // one at a time: several would not fit in registers
      const vec largest = top[w];
      vec mass = sum[w];
      for (float *to = score + v, *end = to + count * TILE; to != end; to += TILE) {
        const vec x = exponential(load(to) - largest);
        store(to, x);
        mass += x;
      }
      sum[w] = mass;
    }
  }
};

}  // namespace fewkeys
