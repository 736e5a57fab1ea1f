// Attention of each query to the keys that it chose by their codes, to the unfinished block of keys that it is in, and
// to means of all other keys (`fewkeys.select.key_scan`).
//
// The chosen keys lie anywhere in memory, so several tiles of queries are processed together. First all of them choose
// keys. Then every query attends to its chosen keys CHUNK by CHUNK, while a cache near the core holds the chunk, with
// the dimensions in the lanes. Chunks begin at fixed positions: no output depends on which queries are processed
// together. A tile shares the unfinished block and the means, so these are its columns, with the queries in the lanes.
#pragma once
#include "code_scan.h"
#include "extent.h"
#include "rows.h"
#include "tile.h"

namespace fewkeys {

// T: dtype of queries and outputs. R: dtype of keys and values in memory.
template <class T, class R>
class ScanAttention {
 public:
  explicit ScanAttention(const ScanAttend &p)
      : p(p), alone(p.of.queries < CODED), dim(p.of.dim), wide(round_up(p.value_dim)), scanner(p.of),
        lanes(dim * TILE) {}

  // Computes the outputs of tiles. `ready`: the best keys of every query, where they were chosen before.
  void attend(int64_t head, const Asking *tile, int tiles, Largest *ready = nullptr) {
    const int64_t rows = tiles * TILE, seen = tile[tiles - 1].seen;
    asked.resize(rows * dim), place.resize(rows * p.of.count);
    kept.assign(rows, 0), next.assign(rows, 0);
    mixed.assign(rows * wide, 0.0f), sum.assign(rows, 0.0f), top.assign(rows, -INFINITY);
    for (int t = 0; t < tiles; t++) {
      if (!ready) scanner.choose(head, tile[t], scanner.lists);
      note(head, tile[t], t * TILE, ready ? ready : scanner.lists);
    }
    past_key = p.key.at<R>(head, 0), past_value = p.value.at<R>(head, 0);
    past_scale = SCALED ? p.scales.at<float>(head, 0) : nullptr;
    // A few queries share no keys, so one chunk holds all keys. This depends on the number of queries in the call
    // alone, not on the batch or the threads: sums then have the same order everywhere.
    const int64_t chunk = alone ? std::max<int64_t>(1, seen) : CHUNK;
    for (int64_t stop = chunk; stop < seen + chunk; stop += chunk)
      for (int64_t q = 0; q < rows; q++) take(q, stop);
    for (int t = 0; t < tiles; t++) finish(head, tile[t], t * TILE);
  }

 private:
  static constexpr int CHUNK = 2048, AHEAD = 3072;  // keys of a chunk; bytes of keys that are prefetched
  // Whether keys and values are int8 with a scale for each row.
  static constexpr bool SCALED = std::is_same_v<R, int8_t>;

  const ScanAttend &p;
  const bool alone;  // the call has few queries
  const int64_t dim, wide;
  Scanner<T> scanner;
  const R *past_key, *past_value;  // of the head
  const float *past_scale;
  int near = 0;
  Floats lanes, key, value, score, logit, size;
  aligned_vector<const R *> row;
  // For each query: its scaled row (asked), its chosen keys (place), their number (kept), and how many of them it has
  // attended to (next); the weighted sum of values (mixed), the sum of weights, and the score whose weight is 1 (top).
  Floats asked, mixed, sum, top;
  aligned_vector<int32_t> place, kept, next;

  // Stores the queries of a tile and the keys that they chose, at q and after.
  void note(int64_t head, const Asking &tile, int64_t q, Largest *best) {
    for (int i = 0; i < tile.rows; i++, q++) {
      const T *from = tile.row<T>(p.of, head, i);
      for (int64_t d = 0; d < dim; d++) asked[q * dim + d] = to_float(from[d]) * p.scale;
      kept[q] = best[i].finish();
      std::copy_n(best[i].places(), kept[q], place.data() + q * p.of.count);
    }
  }

  // Attends to the chosen keys of query q that lie before `stop` and were not attended to yet.
  void take(int64_t q, int64_t stop) {
    const int32_t *at = place.data() + q * p.of.count + next[q], left = kept[q] - next[q];
    int64_t count = 0;
    while (count < left && at[count] < stop) count++;
    if (!count) return;
    next[q] += count;
    const int64_t whole = round_up(count, LANES);
    if ((int64_t)logit.size() < whole + LANES) logit.resize(whole + LANES), row.resize(whole + LANES);
    for (int64_t c = 0; c < count; c++) row[c] = past_key + at[c] * p.key.row;
    for (int64_t c = count; c % FOUR; c++) row[c] = row[0];
    // The rows of a few queries come from main memory. They are prefetched, as many as a core can have under way: first
    // keys, then their values.
    const auto fetch = [&](int64_t first, int64_t last) {
      for (int64_t c = first; alone && c < std::min(last, count); c++) {
        prefetch(row[c], dim * sizeof(R));
        if (SCALED) prefetch(past_scale + at[c] * p.scales.row, 2 * sizeof(float));
      }
    };
    const int64_t ahead = std::max<int64_t>(FOUR, AHEAD / (dim * sizeof(R)));
    fetch(0, ahead);
    for (int64_t c = 0; c < count; c += FOUR) {
      fetch(c + ahead, c + ahead + FOUR);
      for (int64_t v = c; alone && v < std::min<int64_t>(c + FOUR, count); v++)
        prefetch<2>(past_value + at[v] * p.value.row, p.value_dim * sizeof(R));
      four_dots(&row[c], &asked[q * dim], dim, &logit[c]);
    }
    for (int64_t c = 0; SCALED && c < count; c++) logit[c] *= past_scale[at[c] * p.scales.row];
    std::fill(logit.data() + count, logit.data() + whole, -INFINITY);
    vec largest = broadcast(top[q]);
    for (int64_t v = 0; v < whole; v += LANES) largest = max(load(&logit[v]), largest);
    raise(q, max_of_lanes(largest));
    sum[q] += exponentials(logit.data(), whole, top[q]);
    for (int64_t c = 0; SCALED && c < count; c++) logit[c] *= past_scale[at[c] * p.scales.row + 1];
    for (int64_t c = 0; c < count; c++) row[c] = past_value + at[c] * p.value.row;
    for (int64_t c = 0; c < count; c += 2 * FOUR)
      mix_rows(&row[c], &logit[c], std::min<int64_t>(2 * FOUR, count - c), p.value_dim, &mixed[q * wide]);
  }

  // Makes `score` the one whose weight is 1, if it is larger.
  void raise(int64_t q, float score) {
    if (!(score > top[q])) return;
    const float share = exponential(broadcast(top[q] - score))[0];
    top[q] = score, sum[q] *= share;
    scale(&mixed[q * wide], share, wide);
  }

  // Adds the unfinished block and the means to what was attended to, and writes the outputs of a tile.
  void finish(int64_t head, const Asking &asking, int64_t q) {
    const Scan &scan = p.of;
    const int rows = asking.rows;
    const T *at[TILE];
    for (int i = 0; i < rows; i++) at[i] = asking.row<T>(scan, head, i);
    to_lanes(at, rows, dim, p.scale, lanes.data());
    collect(head, asking.seen, p.causal ? std::min(scan.keys, asking.stop + p.offset) : asking.seen);
    const int64_t step = p.steps > 1 ? (asking.start + p.offset) / CODED - p.offset / CODED : 0;
    const int64_t *edges = p.edges + step * (p.means + 1);
    collect_means(head, edges);
    score.resize((near + p.means) * TILE);
    dots(key.data(), dim, near + p.means, dim, lanes.data(), score.data(), rows <= TILE / 2 ? TILE / 2 : TILE);

    Tile tile;
    int64_t last[TILE];
    for (int i = 0; i < TILE; i++) last[i] = i < rows ? asking.query(i) + p.offset : -1;
    hide(tile, head, last, asking.seen);
    for (int i = 0; i < rows; i++) {
      float highest = tile.top[i / LANES][i % LANES];
      weigh_means(i, place.data() + (q + i) * scan.count, kept[q + i], edges, highest);
      raise(q + i, highest);
    }
    for (int w = 0; w < WIDE; w++) tile.top[w] = load(&top[q + w * LANES]), tile.sum[w] = load(&sum[q + w * LANES]);
    tile.settle();
    tile.weigh(score.data(), near + p.means);
    for (int i = 0; near + p.means && i < rows; i += SOME)
      mix(value.data(), wide, near + p.means, wide, &score[i], TILE, &mixed[(q + i) * wide], wide);
    for (int i = 0; i < rows; i++) {
      const float all = tile.sum[i / LANES][i % LANES], inverse = all == 0.0f ? 0.0f : 1.0f / all;
      T *to = (T *)p.out.at<T>(head * scan.gqa_ratio + asking.head(i), asking.query(i));
      for (int64_t d = 0; d < p.value_dim; d++) round_to(mixed[(q + i) * wide + d] * inverse, to[d]);
    }
  }

  // Copies the keys first .. stop - 1 and their values, as float.
  void collect(int64_t head, int64_t first, int64_t stop) {
    near = std::max<int64_t>(0, stop - first);
    key.resize((near + p.means) * dim), value.resize((near + p.means) * wide);
    if (!near) return;
    copy_rows(p.key.at<R>(head, first), p.key.row, near, dim, dim, key.data());
    copy_rows(p.value.at<R>(head, first), p.value.row, near, p.value_dim, wide, value.data());
    for (int j = 0; SCALED && j < near; j++) {
      const float *scale = p.scales.at<float>(head, first + j);
      for (int64_t d = 0; d < dim; d++) key[j * dim + d] *= scale[0];
      for (int64_t d = 0; d < p.value_dim; d++) value[j * wide + d] *= scale[1];
    }
  }

  // Appends the mean key and value of every range, and stores the number of its keys.
  void collect_means(int64_t head, const int64_t *edges) {
    size.resize(p.means);
    std::fill(value.begin() + near * wide, value.end(), 0.0f);
    for (int64_t c = 0; c < p.means; c++) {
      const int64_t start = divide_up(edges[c], CODED), stop = divide_up(edges[c + 1], CODED);
      const double *before = p.total.at<double>(head, start), *after = p.total.at<double>(head, stop);
      const double *real = p.size + head / p.key.heads * (p.blocks + 1);
      const double count = p.size ? real[stop] - real[start] : edges[c + 1] - edges[c];
      const double share = 1 / std::max(count, 1.0);
      for (int64_t d = 0; d < dim; d++) key[(near + c) * dim + d] = (after[d] - before[d]) * share;
      for (int64_t d = 0; d < p.value_dim; d++)
        value[(near + c) * wide + d] = (after[dim + d] - before[dim + d]) * share;
      size[c] = count;
    }
  }

  // Sets the scores of near keys that are padding, or later than the query, to minus infinity. `first`: the first near
  // key.
  void hide(Tile &tile, int64_t head, const int64_t *last, int64_t first) {
    count_multiply_adds(near * TILE);
    const uint8_t *real = real_keys(p.of.real, p.key, head, p.of.keys);
    for (int j = 0; j < near; j++) {
      const bool is_real = !real || real[first + j];
      float *of_key = &score[j * TILE];
      for (int i = 0; i < TILE; i++) of_key[i] = is_real && first + j <= last[i] ? of_key[i] : -INFINITY;
      for (int w = 0; w < WIDE; w++) tile.top[w] = max(tile.top[w], load(of_key + w * LANES));
    }
  }

  // Adds to the score of each mean the logarithm of the number of its keys that query i did not choose. `highest`
  // becomes at least the largest of these scores.
  void weigh_means(int i, const int32_t *chosen, int64_t count, const int64_t *edges, float &highest) {
    int64_t at = 0;
    for (int64_t c = 0; c < p.means; c++) {
      const int64_t before = at;
      while (at < count && chosen[at] < edges[c + 1]) at++;
      const float left = size[c] - (at - before);
      float &of_mean = score[(near + c) * TILE + i];
      of_mean = left > 0 ? of_mean + std::log(left) : -INFINITY;
      highest = std::max(highest, of_mean);
    }
  }
};

// Stores a new row and returns its scale: 1, or that of a row in int8 (`fewkeys.memory.rows`).
template <class T>
static float store_row(const T *from, int64_t dim, T *to) {
  std::copy_n(from, dim, to);
  return 1;
}
template <class T>
static float store_row(const T *from, int64_t dim, int8_t *to) {
  constexpr float LARGEST = 127;
  float most = 0;
  for (int64_t d = 0; d < dim; d++) most = std::max(most, std::fabs(to_float(from[d])));
  const float scale = most / LARGEST, unit = scale > 0 ? scale : 1;
  for (int64_t d = 0; d < dim; d++) to[d] = (int8_t)std::clamp(std::rint(to_float(from[d]) / unit), -LARGEST, LARGEST);
  return scale;
}

// Stores the last key and value of every head, unless a number in them or in the query exceeds the limit.
template <class T, class R>
static void store_new(const ScanAttend &p) {
  const int64_t heads = p.of.heads / p.of.gqa_ratio;
  ivec seen = {};
  for (int64_t head = 0; head < p.of.heads; head++) look_at(p.of.query.at<T>(head, 0), p.of.dim, seen);
  for (int64_t head = 0; head < heads; head++) {
    look_at(p.new_key.at<T>(head, 0), p.of.dim, seen);
    look_at(p.new_value.at<T>(head, 0), p.value_dim, seen);
  }
  int32_t largest = 0, limit;
  for (int l = 0; l < LANES; l++) largest = std::max<int32_t>(largest, seen[l]);
  memcpy(&limit, &p.limit, sizeof limit);
  if (largest > limit) throw Failure{LARGE};
  for (int64_t head = 0; head < heads; head++) {
    const int64_t last = p.of.keys - 1;
    const float of_key = store_row(p.new_key.at<T>(head, 0), p.of.dim, (R *)p.key.at<R>(head, last));
    const float of_value = store_row(p.new_value.at<T>(head, 0), p.value_dim, (R *)p.value.at<R>(head, last));
    if (!p.scales.data) continue;
    float *scale = (float *)p.scales.at<float>(head, last);
    scale[0] = of_key, scale[1] = of_value;
  }
}

// For fewer tiles than would keep all threads busy, and many keys: threads scan parts of the keys for every tile, then
// each computes the outputs of single queries.
template <class T, class R>
static void scan_attend_parts(const ScanAttend &p, int threads, const std::vector<Asking> &tiles, int64_t parts) {
  const int64_t count = tiles.size(), all = p.of.heads / p.of.gqa_ratio * count;
  std::vector<Largest> ready(all * parts * TILE);
  const auto choose = [&](Scanner<T> &scanner, int64_t t) {
    scanner.choose(t / parts / count, tiles[t / parts % count], &ready[t * TILE], t % parts, parts);
  };
  const auto attend = [&](ScanAttention<T, R> &worker, int64_t t) {
    const int64_t i = t % TILE;
    Asking one = tiles[t / TILE % count];
    if (i >= one.rows) return;
    Largest *best = &ready[t / TILE * parts * TILE + i];
    for (int64_t part = 1; part < parts; part++) best->join(best[part * TILE]);
    one.first += i, one.rows = 1;
    worker.attend(t / TILE / count, &one, 1, best);
  };
  in_parallel(threads, all * parts, [&] { return Scanner<T>(p.of); }, choose);
  in_parallel(threads, all * TILE, [&] { return ScanAttention<T, R>(p); }, attend);
}

template <class T, class R>
static void scan_attend_rows(const ScanAttend &p, int threads) {
  if (p.new_key.data) store_new<T, R>(p);
  constexpr int PORTIONS = 4, LEAST = 64;  // parts for each thread, and the least number of blocks of a part
  const std::vector<Asking> tiles = asking(p.of);
  const int64_t all = p.of.heads / p.of.gqa_ratio * tiles.size();
  const int64_t wanted = threads > 1 ? PORTIONS * team_size(threads) / std::max<int64_t>(1, all) : 1;
  const int64_t parts = std::min(wanted, tiles.empty() ? 0 : tiles.back().seen / CODED / LEAST);
  if (parts > 1) return scan_attend_parts<T, R>(p, threads, tiles, parts);
  // Where a cache near the core does not hold all keys, so many tiles are processed together that every key of a chunk
  // is read by a few queries.
  constexpr int MANY_BYTES = 1 << 20, OFTEN = 4, MOST = 64;
  const int64_t bytes = p.of.keys * (p.of.dim + p.value_dim) * sizeof(R);
  const int64_t often = OFTEN * p.of.keys / (TILE * std::max<int64_t>(1, p.of.count));
  by_tiles(
      p.of, threads, bytes < MANY_BYTES ? 1 : std::clamp<int64_t>(often, 1, MOST),
      [&] { return ScanAttention<T, R>(p); },
      [](auto &worker, int64_t head, const Asking *tile, int tiles) { worker.attend(head, tile, tiles); });
}

template <class T>
static void scan_attend(const ScanAttend &p, int threads) {
  p.scales.data ? scan_attend_rows<T, int8_t>(p, threads) : scan_attend_rows<T, T>(p, threads);
}

}  // namespace fewkeys
