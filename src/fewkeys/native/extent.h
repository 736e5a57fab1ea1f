// The largest magnitudes of queries, keys and values, and copies of their rows head by head, in one pass over memory.
#pragma once
#include "lanes.h"

namespace fewkeys {

constexpr int64_t EXTENT = 16;  // rows of every head in one piece of work

// Compares magnitudes by their bits, which are ordered like the numbers: finite, then infinity, then NaN.
template <class T>
static inline void look_at(const T *row, int64_t count, ivec &most) {
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES) {
    const ivec bits = (ivec)load(row + d) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  for (; d < count; d++) {
    const float x = to_float(row[d]);
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    most[0] = std::max<int32_t>(most[0], bits & 0x7fffffff);
  }
}

template <class T>
static void extents(const Extents &p, int threads) {
  struct Part {
    const Rows &rows;
    T *copy;
    int64_t heads, count, dim, pieces;
  };
  const auto part = [&](const Rows &rows, void *copy, int64_t heads, int64_t count, int64_t dim) {
    return Part{rows, (T *)copy, heads, count, dim, p.batch * ((count + EXTENT - 1) / EXTENT)};
  };
  const Part parts[] = {part(p.query, p.query_copy, p.heads * p.gqa_ratio, p.queries, p.dim),
                        part(p.key, p.key_copy, p.heads, p.keys, p.dim),
                        part(p.value, p.value_copy, p.heads, p.keys, p.value_dim)};
  std::atomic<int32_t> most[3] = {};
  const auto look = [&](int, int64_t piece) {
    int at = 0;
    for (; piece >= parts[at].pieces; at++) piece -= parts[at].pieces;
    const Part &part = parts[at];
    const int64_t each = (part.count + EXTENT - 1) / EXTENT, b = piece / each, first = piece % each * EXTENT;
    ivec seen = {};
    // Models store the rows of all heads of a token side by side, so this order reads memory sequentially.
    for (int64_t n = first; n < std::min(part.count, first + EXTENT); n++)
      for (int64_t h = 0; h < part.heads; h++) {
        const T *row = part.rows.template at<T>(b, h, n);
        look_at(row, part.dim, seen);
        if (part.copy) std::copy_n(row, part.dim, part.copy + ((b * part.heads + h) * part.count + n) * part.dim);
      }
    int32_t largest = 0;
    for (int l = 0; l < LANES; l++) largest = std::max<int32_t>(largest, seen[l]);
    for (int32_t before = most[at]; before < largest && !most[at].compare_exchange_weak(before, largest);) {}
  };
  in_parallel(threads, parts[0].pieces + parts[1].pieces + parts[2].pieces, [] { return 0; }, look, 4);
  for (int at = 0; at < 3; at++) {
    const int32_t bits = most[at];
    memcpy(p.largest + at, &bits, sizeof bits);
  }
}

}  // namespace fewkeys
