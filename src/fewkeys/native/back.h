// The parts that gradients of attention share, tile by tile.
//
// With weights P, values v and the gradient g of the output, the weights have the gradient G = g v^T, the scores
// S = P (G - sum_c P_c G_c), and queries, keys and values get S k, S^T q and P^T g.
#pragma once
#include <atomic>
#include <thread>

#include "columns.h"

namespace fewkeys {

// Padded keys and values, and their gradients.
struct KeyValues {
  const int deep, wide;
  aligned_vector<float> key, value, to_key, to_value;

  // Gradients are added to SOME rows at once, the last of which may be padding.
  KeyValues(int64_t most, int dim, int value_dim)
      : deep(round_up(dim)), wide(round_up(value_dim)), key(most * deep), value(most * wide),
        to_key((most + SOME) * deep), to_value((most + SOME) * wide) {}

  void clear() {
    std::fill(to_key.begin(), to_key.end(), 0.0f);
    std::fill(to_value.begin(), to_value.end(), 0.0f);
  }
};

// A tile of queries and the gradients of their outputs: as rows, and in lanes.
template <class T>
class TileBack {
 public:
  TileBack(int dim, int value_dim)
      : dim(dim), value_dim(value_dim), deep(round_up(dim)), wide(round_up(value_dim)), query(TILE * deep),
        out(TILE * wide), query_lanes(dim * TILE), out_lanes(value_dim * TILE), to_query(TILE * deep),
        transposed(TILE * TILE) {}

  void set(const T *queries, int64_t query_pitch, const T *outs, int64_t out_pitch, int count) {
    rows = count;
    copy_rows(queries, query_pitch, rows, dim, deep, query.data());
    copy_rows(outs, out_pitch, rows, value_dim, wide, out.data());
    to_lanes(query.data(), deep, rows, dim, 1.0f, query_lanes.data());
    to_lanes(out.data(), wide, rows, value_dim, 1.0f, out_lanes.data());
    std::fill(to_query.begin(), to_query.end(), 0.0f);
  }

  // Products (count, TILE) of keys with the queries, of values with the gradients.
  void key_products(const KeyValues &at, int first, int count, float *products) const {
    dots(at.key.data() + first * deep, deep, count, dim, query_lanes.data(), products);
  }
  void value_products(const KeyValues &at, int first, int count, float *products) const {
    dots(at.value.data() + first * wide, wide, count, value_dim, out_lanes.data(), products);
  }

  // Adds to the gradients of queries, keys and values, by weights P and score gradients S (count, TILE).
  void accumulate(const float *weight, const float *grad, KeyValues &with, int first, int count) {
    if (!count) return;
    for (int i = 0; i < rows; i += SOME)
      mix(with.key.data() + first * deep, deep, count, deep, grad + i, TILE, to_query.data() + i * deep, deep);
    accumulate_rows(grad, query, deep, with.to_key.data() + first * deep, count);
    accumulate_rows(weight, out, wide, with.to_value.data() + first * wide, count);
  }

  void write(float *to) const {
    for (int i = 0; i < rows; i++) std::copy_n(&to_query[i * deep], dim, to + i * dim);
  }

 private:
  const int dim, value_dim, deep, wide;
  int rows = 0;
  aligned_vector<float> query, out, query_lanes, out_lanes, to_query, transposed;

  // Adds to every column the rows of the tile under its weights.
  void accumulate_rows(const float *weight, const aligned_vector<float> &from, int width, float *into, int count) {
    for (int begin = 0; begin < count; begin += TILE) {
      const int columns = std::min(TILE, count - begin);
      to_lanes(weight + begin * TILE, TILE, columns, TILE, 1.0f, transposed.data());
      // Zeros follow the last column.
      for (int c = 0; c < columns; c += SOME)
        mix(from.data(), width, rows, width, &transposed[c], TILE, into + (begin + c) * width, width);
    }
  }
};

// Divides the weights of every query by their sum.
static inline void divide(float *weight, int count, const vec *inverse) {
  count_multiply_adds(count * TILE);
  for (int c = 0; c < count; c++)
    for (int w = 0, v = 0; w < WIDE; w++, v += LANES)
      store(weight + c * TILE + v, load(weight + c * TILE + v) * inverse[w]);
}
static inline void invert(const Tile &tile, vec *inverse) {
  for (int w = 0; w < WIDE; w++) inverse[w] = tile.sum[w] == 0.0f ? vec{} : 1.0f / tile.sum[w];
}
// Adds P G to the sums.
static inline void add_products(const float *weight, const float *grad, int count, vec *sum) {
  count_multiply_adds(count * TILE);
  for (int c = 0; c < count; c++)
    for (int w = 0, v = 0; w < WIDE; w++, v += LANES)
      sum[w] += load(weight + c * TILE + v) * load(grad + c * TILE + v);
}
// G becomes S.
static inline void grads_of_scores(const float *weight, float *grad, int count, const vec *mean, float scale) {
  count_multiply_adds(count * TILE);
  for (int c = 0; c < count; c++)
    for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
      float *to = grad + c * TILE + v;
      store(to, load(weight + c * TILE + v) * (load(to) - mean[w]) * scale);
    }
}

// Threads add their gradients in a fixed order, so that the rounding does not change.
class Sequencer {
 public:
  explicit Sequencer(int64_t count) : next(count) {
    for (auto &number : next) number = 0;
  }
  void wait(int64_t which, int64_t number) {
    while (next[which].load(std::memory_order_acquire) != number) Team::check(), std::this_thread::yield();
  }
  void advance(int64_t which) { next[which].fetch_add(1, std::memory_order_release); }

 private:
  aligned_vector<std::atomic<int64_t>> next;
};

}  // namespace fewkeys
