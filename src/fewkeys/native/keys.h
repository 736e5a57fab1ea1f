// The spread, importance and cluster of every key, and sums over clusters (`fewkeys.sketch.clusters`).
#pragma once
#include "tile.h"

namespace fewkeys {

constexpr int64_t PIECE = 4096;  // keys of a partial sum; fixed, so that sums do not depend on the number of threads
constexpr int64_t FEW = 64;      // rows that are copied at once

// Squared distances of the keys in `lanes` from `middle`.
static void measure(const float *lanes, const float *middle, int dim, float *square) {
  count_multiply_adds(dim * TILE);
  for (int v = 0; v < TILE; v += LANES) {
    vec sum = {};
    for (int d = 0; d < dim; d++) {
      const vec x = load(lanes + d * TILE + v) - middle[d];
      sum += x * x;
    }
    store(square + v, sum);
  }
}

// Products of an upper triangular matrix (dim, dim) with `lanes`.
static void triangular(const float *form, int dim, const float *lanes, float *to) {
  for (int r = 0; r < dim; r += ROWS)
    dots(form + r * dim + r, dim, std::min(ROWS, dim - r), dim - r, lanes + r * TILE, to + r * TILE);
}

// Spread, and half the variance of the scores, of the keys in `lanes`. form: L^T, upper triangular, and the mean query.
// scores (D + 1, TILE) <- form times the keys.
static void see(const float *form, const float *shift, int dim, const float *lanes, float *scores, float *spread,
                float *half) {
  triangular(form, dim, lanes, scores);
  measure(scores, shift, dim, spread);
  dots(form + dim * dim, dim, 1, dim, lanes, scores + dim * TILE);
  for (int v = 0; v < TILE; v += LANES) {
    const vec along = load(scores + dim * TILE + v) - shift[dim];
    // k^T C k = E (q . k)^2 - (m . k)^2
    store(half + v, 0.5f * (load(spread + v) - along * along));
  }
}

// The largest `scores + constant` of every lane, and the first that attains it; scores (count, TILE).
static void nearest_of(const float *scores, const float *constant, int count, float *nearest, int32_t *label) {
  count_multiply_adds(count * TILE);
  for (int v = 0; v < TILE; v += LANES) {
    vec best = broadcast(-INFINITY);
    ivec whose = {};
    for (int c = 0; c < count; c++) {
      const vec x = load(scores + c * TILE + v) + constant[c];
      const ivec closer = x > best;
      best = closer ? x : best;
      whose = closer ? ivec{} + c : whose;
    }
    store(nearest + v, best);
    memcpy(label + v, &whose, sizeof whose);
  }
}

// Sums V vectors of every row, and the squares of their entries.
template <int V, class T>
static void add_up(const T *row, int64_t stride, int64_t count, float *sums, vec &square) {
  vec sum[V] = {}, squares[V] = {};
  for (int64_t j = 0; j < count; j++, row += stride)
    for (int v = 0; v < V; v++) {
      const vec x = load(row + v * LANES);
      sum[v] += x, squares[v] += x * x;
    }
  for (int v = 0; v < V; v++) store(sums + v * LANES, load(sums + v * LANES) + sum[v]), square += squares[v];
}

// Sums rows; returns the sum of the squares of all entries.
template <class T>
static float add_rows(const T *row, int64_t stride, int64_t count, int64_t dim, float *sums) {
  count_multiply_adds(count * dim);
  vec square = {};
  int64_t d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) add_up<4>(row + d, stride, count, sums + d, square);
  for (; d + 2 * LANES <= dim; d += 2 * LANES) add_up<2>(row + d, stride, count, sums + d, square);
  for (; d + LANES <= dim; d += LANES) add_up<1>(row + d, stride, count, sums + d, square);
  float squares = sum_of_lanes(square);
  for (; d < dim; d++)
    for (int64_t j = 0; j < count; j++) {
      const float x = to_float(row[j * stride + d]);
      sums[d] += x, squares += x * x;
    }
  return squares;
}

}  // namespace fewkeys
