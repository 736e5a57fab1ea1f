// The largest magnitudes of queries, keys and values (`fewkeys.core.validation.largest_entries`), and copies of their
// rows head by head, in one pass over memory.
#pragma once
#include "rows.h"

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
    int64_t count, dim, pieces;
  };
  const auto part = [&](const Rows &rows, void *copy, int64_t count, int64_t dim) {
    return Part{rows, (T *)copy, count, dim, p.heads / p.key.heads * divide_up(count, EXTENT)};
  };
  const Part parts[] = {part(p.query, p.query_copy, p.queries, p.dim), part(p.key, p.key_copy, p.keys, p.dim),
                        part(p.value, p.value_copy, p.keys, p.value_dim)};
  std::atomic<int32_t> most[3] = {};
  const auto look = [&](int, int64_t piece) {
    int at = 0;
    for (; piece >= parts[at].pieces; at++) piece -= parts[at].pieces;
    const Part &part = parts[at];
    const int64_t each = divide_up(part.count, EXTENT), first = piece % each * EXTENT;
    const int64_t head = piece / each * part.rows.heads;  // the first of the sequence
    const T *rows = part.rows.template at<T>(head, 0);
    ivec seen = {};
    // Models store the rows of all heads of a token side by side, so this order reads memory sequentially.
    for (int64_t n = first; n < std::min(part.count, first + EXTENT); n++)
      for (int64_t h = 0; h < part.rows.heads; h++) {
        const T *row = rows + h * part.rows.head + n * part.rows.row;
        prefetch(row + (std::min(part.count - 1, n + EXTENT) - n) * part.rows.row, part.dim * sizeof(T));
        look_at(row, part.dim, seen);
        if (part.copy) std::copy_n(row, part.dim, part.copy + ((head + h) * part.count + n) * part.dim);
      }
    int32_t largest = 0;
    for (int l = 0; l < LANES; l++) largest = std::max<int32_t>(largest, seen[l]);
    raise_to(most[at], largest);
  };
  in_parallel(threads, parts[0].pieces + parts[1].pieces + parts[2].pieces, [] { return 0; }, look, 4);
  for (int at = 0; at < 3; at++) {
    const int32_t bits = most[at];
    memcpy(p.largest + at, &bits, sizeof bits);
  }
}

}  // namespace fewkeys
