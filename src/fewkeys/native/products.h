// The matrix products of attention.
//
// A tile holds TILE queries (or keys), one in each lane, dimension after dimension. So the scores of a key with a tile
// are vectors, and no sum across lanes is needed.
#pragma once
#include <limits>
#include <type_traits>

#include "lanes.h"

namespace fewkeys {

// At most TILE rows (count, dim), transposed to lanes (dim, TILE), `pitch` apart, and scaled; lanes beyond count are
// zero.
template <class T>
static __attribute__((noinline)) void to_lanes(const T *const *rows, int count, int dim, float scale, float *into,
                                               int64_t pitch = TILE) {
  const int whole = dim / LANES * LANES;
  for (int part = 0; part < TILE; part += LANES) {
    for (int d = 0; d < whole; d += LANES) {
      vec x[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) x[i] = part + i < count ? load(rows[part + i] + d) * scale : vec{};
      transpose_step<LANES / 2>(x);
#pragma GCC unroll 16
      for (int e = 0; e < LANES; e++) store(into + (d + e) * pitch + part, x[e]);
    }
    for (int d = whole; d < dim; d++)
      for (int i = part; i < part + LANES; i++)
        into[d * pitch + i] = i < count ? to_float(rows[i][d]) * scale : 0.0f;
  }
}
// The same for rows that are `stride` apart.
template <class T>
static inline void to_lanes(const T *rows, int64_t stride, int count, int dim, float scale, float *into,
                            int64_t pitch = TILE) {
  const T *at[TILE];
  for (int i = 0; i < count; i++) at[i] = rows + i * stride;
  to_lanes(at, count, dim, scale, into, pitch);
}

// Inner products of R rows with W vectors of lanes.
template <int R, int W>
static __attribute__((noinline)) void dots_of(const float *row, int64_t stride, int dim, const float *lanes,
                                              float *into) {
  vec sum[R][W] = {};
  for (int d = 0; d < dim; d++, lanes += TILE) {
    vec x[W];
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) x[w] = load(lanes + w * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) sum[r][w] += x[w] * row[r * stride + d];
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)  // unrolled like the loop above: an array that is indexed would live in memory
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) store(into + r * TILE + w * LANES, sum[r][w]);
}

// Inner products of R rows with the first `used` lanes, a multiple of LANES.
template <int R>
static inline void dots_with(const float *row, int64_t stride, int dim, const float *lanes, float *into, int used) {
  int part = 0;
  for (; part + 2 * LANES <= used; part += 2 * LANES) dots_of<R, 2>(row, stride, dim, lanes + part, into + part);
  if (part < used) dots_of<R, 1>(row, stride, dim, lanes + part, into + part);
}

// The same for `count` rows, at most R.
template <int R>
static inline void dots_up_to(int count, const float *row, int64_t stride, int dim, const float *lanes, float *into,
                              int used) {
  if constexpr (R > 0) {
    if (count == R)
      dots_with<R>(row, stride, dim, lanes, into, used);
    else
      dots_up_to<R - 1>(count, row, stride, dim, lanes, into, used);
  }
}

// Inner products (count, TILE) of rows (count, dim) with lanes (dim, TILE), for the first `used` lanes.
static inline void dots(const float *row, int64_t stride, int count, int dim, const float *lanes, float *into,
                        int used = TILE) {
  count_multiply_adds((int64_t)count * dim * used);
  int c = 0;
  for (; c + ROWS <= count; c += ROWS) dots_with<ROWS>(row + c * stride, stride, dim, lanes, into + c * TILE, used);
  dots_up_to<ROWS - 1>(count - c, row + c * stride, stride, dim, lanes, into + c * TILE, used);
}

template <int Q, int V>
static __attribute__((noinline)) void mix_of(const float *value, int64_t stride, int count, const float *weight,
                                             int64_t pitch, float *into, int64_t to) {
  vec sum[Q][V];
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sum[q][v] = load(into + q * to + v * LANES);
  for (int c = 0; c < count; c++, value += stride, weight += pitch) {
    vec x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) x[v] = load(value + v * LANES);
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sum[q][v] += x[v] * weight[q];
  }
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) store(into + q * to + v * LANES, sum[q][v]);
}

// Adds weighted sums of values (count, dim) to SOME rows (dim), which are `to` apart. Weights (count, SOME) are `pitch`
// apart. FILL divides dim.
static inline void mix(const float *value, int64_t stride, int count, int dim, const float *weight, int64_t pitch,
                       float *into, int64_t to) {
  count_multiply_adds((int64_t)count * dim * SOME);
  constexpr int STEP = ABREAST * LANES;
  int v = 0;
  for (; v + STEP <= dim; v += STEP) mix_of<SOME, ABREAST>(value + v, stride, count, weight, pitch, into + v, to);
  for (; v + 2 * LANES <= dim; v += 2 * LANES) mix_of<SOME, 2>(value + v, stride, count, weight, pitch, into + v, to);
  for (; v + LANES <= dim; v += LANES) mix_of<SOME, 1>(value + v, stride, count, weight, pitch, into + v, to);
}

// Adds X^T X of rows X (count, dim) to a matrix (dim, dim), of which only the upper triangle is right. FILL divides
// dim.
static inline void add_square(const float *row, int64_t stride, int count, int dim, float *sums) {
  for (int d = 0; d < dim; d += SOME) {
    const int from = d / FILL * FILL;
    mix(row + from, stride, count, dim - from, row + d, stride, sums + d * dim + from, dim);
  }
}

// Cholesky factorisation: U of A = U^T U, for a symmetric matrix (dim, dim), of which the upper triangle is read, with
// `ridge` times the mean of its diagonal added to the diagonal. Returns false if A is not positive definite.
static __attribute__((noinline)) bool factorise(const float *matrix, int64_t dim, float ridge, float *root) {
  float trace = 0.0f;
  for (int64_t d = 0; d < dim; d++) trace += matrix[d * dim + d];
  std::copy_n(matrix, dim * dim, root);
  for (int64_t d = 0; d < dim; d++) root[d * dim + d] += ridge * (trace / dim) + std::numeric_limits<float>::min();
  count_multiply_adds(dim * dim * dim / 6);
  // Subtracts `count` rows, each times its entry in column e, from the row `to`, from column e on.
  const auto take = [=](float *to, int64_t e, const float *row, auto count) {
    float by[SOME];
    for (int r = 0; r < count; r++) by[r] = row[r * dim + e];
    int64_t d = e / LANES * LANES;
    for (; d + LANES <= dim; d += LANES) {
      vec left = load(to + d);
      for (int r = 0; r < count; r++) left -= load(row + r * dim + d) * by[r];
      store(to + d, left);
    }
    for (; d < dim; d++)
      for (int r = 0; r < count; r++) to[d] -= row[r * dim + d] * by[r];
  };
  for (int64_t first = 0; first < dim; first += SOME) {
    float *rows = root + first * dim;
    const int64_t stop = std::min(dim, first + SOME);
    for (int64_t d = first; d < stop; d++) {
      float *row = root + d * dim;
      take(row, d, rows, int(d - first));
      if (!(row[d] > 0.0f && row[d] <= std::numeric_limits<float>::max())) return false;
      const float inverse = 1.0f / std::sqrt(row[d]);
      for (int64_t e = d; e < dim; e++) row[e] *= inverse;
    }
    for (int64_t e = stop; e < dim; e++) take(root + e * dim, e, rows, std::integral_constant<int, SOME>());
  }
  for (int64_t d = 1; d < dim; d++) std::fill_n(root + d * dim, d, 0.0f);
  return true;
}

}  // namespace fewkeys
