// Products with rows at any address: dimensions are in the lanes, four rows at a time.
#pragma once
#include "products.h"

namespace fewkeys {

constexpr int FOUR = 4;

// The inner products of four rows with another, FILL dividing their width.
static inline __attribute__((always_inline)) void four_products(const float *row, int64_t stride, const float *other,
                                                                int width, float *sums) {
  count_multiply_adds(FOUR * width);
  vec sum[FOUR] = {};
  for (int d = 0; d < width; d += LANES) {
    const vec x = load(other + d);
#pragma GCC unroll 4
    for (int r = 0; r < FOUR; r++) sum[r] += load(row + r * stride + d) * x;
  }
#pragma GCC unroll 4
  for (int r = 0; r < FOUR; r++) sums[r] = sum_of_lanes(sum[r]);
}

// The sums of the lanes of four vectors.
static inline __attribute__((always_inline)) void sums_of_four(vec (&x)[FOUR], float *sums) {
  exchange<1>(x[0], x[1]);
  exchange<1>(x[2], x[3]);
  vec low = x[0] + x[1], high = x[2] + x[3];
  exchange<2>(low, high);
  low += high;
  if constexpr (LANES > 4) low += crossed<4>(low);
  if constexpr (LANES > 8) low += crossed<8>(low);
  for (int r = 0; r < FOUR; r++) sums[r] = low[r];
}

// The inner products of four rows with another.
template <class T>
static inline __attribute__((always_inline)) void four_dots(const T *const *row, const float *other, int dim,
                                                            float *sums) {
  count_multiply_adds(FOUR * dim);
  vec sum[FOUR] = {};
  int d = 0;
  for (; d + LANES <= dim; d += LANES) {
    const vec x = load(other + d);
#pragma GCC unroll 4
    for (int r = 0; r < FOUR; r++) sum[r] += load(row[r] + d) * x;
  }
  sums_of_four(sum, sums);
  for (; d < dim; d++)
    for (int r = 0; r < FOUR; r++) sums[r] += to_float(row[r][d]) * other[d];
}

template <int V, class T>
static inline __attribute__((always_inline)) void mix_rows_of(const T *const *row, const float *weight, int count,
                                                              int d, float *into) {
  vec sum[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) sum[v] = load(into + d + v * LANES);
  for (int i = 0; i < count; i++) {
    const T *from = row[i] + d;
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sum[v] += load(from + v * LANES) * weight[i];
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) store(into + d + v * LANES, sum[v]);
}

// Adds rows under weights.
template <class T>
static inline void mix_rows(const T *const *row, const float *weight, int count, int dim, float *into) {
  count_multiply_adds((int64_t)count * dim);
  int d = 0;
  for (; d + 8 * LANES <= dim; d += 8 * LANES) mix_rows_of<8>(row, weight, count, d, into);
  for (; d + 4 * LANES <= dim; d += 4 * LANES) mix_rows_of<4>(row, weight, count, d, into);
  for (; d + 2 * LANES <= dim; d += 2 * LANES) mix_rows_of<2>(row, weight, count, d, into);
  for (; d + LANES <= dim; d += LANES) mix_rows_of<1>(row, weight, count, d, into);
  for (; d < dim; d++)
    for (int i = 0; i < count; i++) into[d] += to_float(row[i][d]) * weight[i];
}

// Prefetches memory into the nearest cache, 3, or the one behind it, 2.
template <int cache = 3>
static inline void prefetch(const void *from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b, 0, cache);
}
static inline void prefetch_to_write(void *to, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((char *)to + b, 1);
}

}  // namespace fewkeys
