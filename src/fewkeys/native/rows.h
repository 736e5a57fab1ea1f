// Products with rows at any addresses: the dimensions are in the lanes, four rows at a time.
#pragma once
#include "products.h"

namespace fewkeys {

constexpr int FOUR = 4;

// The sums of the lanes of four vectors.
static inline __attribute__((always_inline)) void sums_of_four(vec (&x)[FOUR], float *sums) {
  exchange<1>(x[0], x[1]);
  exchange<1>(x[2], x[3]);
  vec low = x[0] + x[1], high = x[2] + x[3];
  exchange<2>(low, high);
  low += high;
  if constexpr (LANES > 4) low += crossed<4>(low);
  if constexpr (LANES > 8) low += crossed<8>(low);
  typedef float four __attribute__((vector_size(FOUR * sizeof(float)), aligned(4), may_alias));
  *(four *)sums = four{low[0], low[1], low[2], low[3]};
}

// The inner products of four rows with `other`.
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

// The inner products of dense rows (count, width) with `other`. FOUR divides the count, FILL the width.
static inline void products_with(const float *row, int64_t count, const float *other, int64_t width, float *to) {
  for (int64_t j = 0; j < count; j += FOUR, row += FOUR * width) {
    const float *const four[FOUR] = {row, row + width, row + 2 * width, row + 3 * width};
    four_dots(four, other, width, to + j);
  }
}

// The weighted sum of such rows.
static inline void sum_rows(const float *row, int64_t count, const float *weight, int64_t width, float *to) {
  count_multiply_adds(count * width);
  for (int64_t d = 0; d < width; d += LANES) {
    vec sum[FOUR] = {};
    for (int64_t j = 0; j < count; j += FOUR) {
#pragma GCC unroll 4
      for (int r = 0; r < FOUR; r++) sum[r] += load(row + (j + r) * width + d) * weight[j + r];
    }
    store(to + d, (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
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

// Adds the weighted sum of rows.
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

// Turns the scores of a query into weights, in whole vectors, and returns their sum.
static inline float exponentials(float *score, int64_t count, float top) {
  count_multiply_adds(count);
  vec sum = {};
  for (int64_t v = 0; v < count; v += LANES) {
    const vec x = exponential(load(score + v) - top);
    store(score + v, x);
    sum += x;
  }
  return sum_of_lanes(sum);
}

// Prefetches memory, to read or to write, into the first-level cache (3) or the second-level cache (2).
template <int cache = 3, bool to_write = false>
static inline void prefetch(const void *from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b, to_write, cache);
}

}  // namespace fewkeys
