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

// Spread and importance of the keys in `lanes`. form: L^T, upper triangular, and the mean query. `scores` has D + 1
// rows.
static void see(const float *form, const float *shift, int dim, const float *lanes, float *scores, float *spread,
                float *importance) {
  triangular(form, dim, lanes, scores);
  measure(scores, shift, dim, spread);
  dots(form + dim * dim, dim, 1, dim, lanes, scores + dim * TILE);
  for (int v = 0; v < TILE; v += LANES) {
    const vec along = load(scores + dim * TILE + v) - shift[dim];
    // k^T C k = E (q . k)^2 - (m . k)^2
    store(importance + v, along + 0.5f * (load(spread + v) - along * along));
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

// Sums of keys and values by cluster, a few keys at a time.
template <class T>
class Adder {
 public:
  explicit Adder(const Sums &p)
      : p(p), both(p.dim + p.value_dim), tall(round_up(p.dim)), wide(round_up(p.value_dim)), keys(FEW * tall),
        copy(FEW * wide) {}

  // Adds the keys first .. last - 1 to sums (C, D + Dv) and products (D, Dv), padded in both dimensions.
  void add_all(int64_t head, int64_t first, int64_t last, float *sums, float *products) {
    const T *key = p.key.at<T>(head, 0), *value = p.value.at<T>(head, 0);
    for (int64_t begin = first; begin < last; begin += FEW) {
      const int64_t end = std::min(last, begin + FEW);
      for (int64_t j = begin; j < end; j++) {
        const float share = p.share[head * p.keys + j];
        if (share == 0.0f) continue;
        float *into = sums + p.label[head * p.keys + j] * both;
        add(into, key + j * p.key.row, share, p.dim);
        add(into + p.dim, value + j * p.value.row, share, p.value_dim);
      }
      if (p.middle) multiply(head, begin, end - begin, products);
    }
  }

 private:
  const Sums &p;
  const int64_t both, tall, wide;
  Floats keys, copy;

  void multiply(int64_t head, int64_t begin, int count, float *products) {
    const float *middle = p.middle + head * p.dim;
    const T *key = p.key.at<T>(head, begin);
    for (int j = 0; j < count; j++, key += p.key.row) {
      const float share = p.share[head * p.keys + begin + j];
      float *to = &keys[j * tall];
      for (int64_t d = 0; d < p.dim; d++) to[d] = share * (to_float(key[d]) - middle[d]);
    }
    int64_t stride = p.value.row;
    const float *value = as_floats(p.value.at<T>(head, begin), stride, count, p.value_dim, wide, copy.data());
    for (int64_t d = 0; d < tall; d += SOME)
      mix(value, stride, count, wide, &keys[d], tall, products + d * wide, wide);
  }
};

template <class T>
static void label_sums(const Sums &p, int threads) {
  const int64_t pieces = divide_up(p.keys, PIECE), heads = p.heads, both = p.dim + p.value_dim;
  const int64_t size = p.count * both, wide = round_up(p.value_dim), square = p.middle ? round_up(p.dim) * wide : 0;
  Floats parts(heads * pieces * (size + square));
  const auto add_piece = [&](Adder<T> &adder, int64_t t) {
    const int64_t first = t % pieces * PIECE;
    float *sums = parts.data() + t * (size + square);
    adder.add_all(t / pieces, first, std::min(p.keys, first + PIECE), sums, sums + size);
  };
  in_parallel(threads, heads * pieces, [&] { return Adder<T>(p); }, add_piece);
  in_parallel(threads, heads, [] { return 0; }, [&](int, int64_t head) {
    for (int64_t piece = 0; piece < pieces; piece++) {
      const float *from = parts.data() + (head * pieces + piece) * (size + square);
      add(p.sums + head * size, from, 1.0f, size);
      for (int64_t d = 0; p.middle && d < p.dim; d++)
        add(p.products + (head * p.dim + d) * p.value_dim, from + size + d * wide, 1.0f, p.value_dim);
    }
  });
}

// Sums V vectors of every row, and the squares of their entries.
template <int V, class T>
static void add_up(const T *row, int64_t stride, int64_t count, float *sums, vec &square) {
  vec sum[V] = {};
  for (int64_t j = 0; j < count; j++, row += stride)
    for (int v = 0; v < V; v++) {
      const vec x = load(row + v * LANES);
      sum[v] += x;
      square += x * x;
    }
  for (int v = 0; v < V; v++) store(sums + v * LANES, load(sums + v * LANES) + sum[v]);
}

// Sums rows; returns the sum of the squares of all entries.
template <class T>
static float add_rows(const T *row, int64_t stride, int64_t count, int64_t dim, float *sums) {
  count_multiply_adds(count * dim);
  vec square = {};
  int64_t d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) add_up<4>(row + d, stride, count, sums + d, square);
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
