// Softmax over each query's own block of keys, the keys that it chooses by their codes, and means of what it does not.
//
// Queries of a run have the same own block and the same means: those are columns of a tile, queries in the lanes. What a
// query chooses is its own: there, dimensions are in the lanes, four rows at a time.
#pragma once
#include "code_scan.h"
#include "rows.h"
#include "tile.h"

namespace fewkeys {

// T: of queries and outputs; R: of keys and values as they are held.
template <class T, class R>
class ScanAttention {
 public:
  explicit ScanAttention(const ScanAttend &p)
      : p(p), dim(p.of.dim), wide(round_up(p.value_dim)), scanner(p.of), lanes(dim * TILE), asked(TILE * dim),
        mixed(TILE * wide) {}

  // Queries first .. first + TILE - 1 of those of a run and a key head, group after group.
  void attend(int64_t batch, int64_t head, const Run &run, int64_t first) {
    const Scan &scan = p.of;
    const int64_t length = run.stop - run.start, seen = scan.seen[run.start];
    const int rows = std::min<int64_t>(TILE, scan.gqa_ratio * length - first);
    const auto head_of = [&](int i) { return head * scan.gqa_ratio + (first + i) / length; };
    const auto query_of = [&](int i) { return run.start + (first + i) % length; };
    const T *at[TILE];
    for (int i = 0; i < rows; i++) {
      at[i] = p.query.at<T>(batch, head_of(i), query_of(i));
      for (int64_t d = 0; d < dim; d++) asked[i * dim + d] = to_float(at[i][d]) * p.scale;
    }
    to_lanes(at, rows, dim, p.scale, lanes.data());
    collect(batch, head, seen, p.causal ? std::min(scan.keys, run.stop + p.offset) : seen);
    const int64_t step = p.steps > 1 ? (run.start + p.offset) / p.block - p.offset / p.block : 0;
    const int means = collect_means(batch, head, step);
    score.resize((near + means) * TILE);
    const int used = rows <= TILE / 2 ? TILE / 2 : TILE;
    dots(key.data(), dim, near + means, dim, lanes.data(), score.data(), used);

    Tile tile(1.0f);
    int64_t last[TILE];
    for (int i = 0; i < TILE; i++) last[i] = i < rows ? query_of(i) + p.offset : -1;
    hide(tile, batch, last, seen);
    std::fill(mixed.begin(), mixed.end(), 0.0f);
    const float *size = p.size + (batch * p.steps + step) * p.means;
    const int64_t *edges = p.edges + step * (p.means + 1);
    scanner.choose(
        batch, head, seen, rows,
        [&](int i) { return scan.query + ((batch * scan.heads + head_of(i)) * scan.queries + query_of(i)) * dim; },
        [&](int i, const int32_t *place, int64_t count) {
          weigh_means(i, place, count, means, size, edges);
          mix_chosen(tile, i, batch, head, place, count, means);
        });
    tile.settle();
    tile.weigh(score.data(), near + means);
    for (int i = 0; near + means && i < rows; i += SOME)
      mix(value.data(), wide, near + means, wide, &score[i], TILE, &mixed[i * wide], wide);
    for (int i = 0; i < rows; i++) {
      const float sum = tile.sum[i / LANES][i % LANES], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      T *to = (T *)p.out.at<T>(batch, head_of(i), query_of(i));
      for (int64_t d = 0; d < p.value_dim; d++) round_to(mixed[i * wide + d] * inverse, to[d]);
    }
  }

 private:
  const ScanAttend &p;
  const int64_t dim, wide;
  Scanner scanner;
  int near = 0;
  aligned_vector<float> lanes, asked, mixed, key, value, score, logit;
  aligned_vector<const R *> key_row, value_row;

  // What a key and its value are multiplied by, where they are int8.
  static constexpr bool SCALED = std::is_same_v<R, int8_t>;
  const float *scale_of(int64_t batch, int64_t head, int64_t n) const { return p.scales.at<float>(batch, head, n); }

  // Copies the keys first .. stop - 1 and their values.
  void collect(int64_t batch, int64_t head, int64_t first, int64_t stop) {
    near = std::max<int64_t>(0, stop - first);
    key.resize((near + p.means) * dim), value.resize((near + p.means) * wide);
    if (!near) return;
    copy_rows(p.key.at<R>(batch, head, first), p.key.row, near, dim, dim, key.data());
    copy_rows(p.value.at<R>(batch, head, first), p.value.row, near, p.value_dim, wide, value.data());
    for (int j = 0; SCALED && j < near; j++) {
      const float *scale = scale_of(batch, head, first + j);
      for (int64_t d = 0; d < dim; d++) key[j * dim + d] *= scale[0];
      for (int64_t d = 0; d < p.value_dim; d++) value[j * wide + d] *= scale[1];
    }
  }

  // And the means of a step.
  int collect_means(int64_t batch, int64_t head, int64_t step) {
    if (!p.means) return 0;
    const int64_t from = ((batch * (p.of.heads / p.of.gqa_ratio) + head) * p.steps + step) * p.means;
    std::copy_n(p.mean_key + from * dim, p.means * dim, &key[near * dim]);
    copy_rows(p.mean_value + from * p.value_dim, p.value_dim, p.means, p.value_dim, wide, &value[near * wide]);
    return p.means;
  }

  // Hides the near keys from `first` on that are padding, or later than a query.
  void hide(Tile &tile, int64_t batch, const int64_t *last, int64_t first) {
    count_multiply_adds(near * TILE);
    for (int j = 0; j < near; j++) {
      const bool real = !p.of.real || p.of.real[batch * p.of.keys + first + j];
      float *own = &score[j * TILE];
      for (int i = 0; i < TILE; i++) own[i] = real && first + j <= last[i] ? own[i] : -INFINITY;
      for (int w = 0; w < WIDE; w++) tile.top[w] = max(tile.top[w], load(own + w * LANES));
    }
  }

  // Scores of means become those of all keys that query i does not keep of them.
  void weigh_means(int i, const int32_t *place, int64_t count, int means, const float *size, const int64_t *edges) {
    int64_t at = 0;
    for (int c = 0; c < means; c++) {
      const int64_t before = at;
      while (at < count && place[at] < edges[c + 1]) at++;
      const float left = size[c] - (at - before);
      float &own = score[(near + c) * TILE + i];
      own = left > 0 ? own + std::log(left) : -INFINITY;
    }
  }

  // Adds the values that query i chooses under their weights; means have been weighed.
  void mix_chosen(Tile &tile, int i, int64_t batch, int64_t head, const int32_t *place, int64_t count, int means) {
    const int64_t room = (count + LANES + FOUR) / LANES * LANES + LANES;
    if ((int64_t)logit.size() < room) logit.resize(room), key_row.resize(room), value_row.resize(room);
    for (int64_t c = 0; c < count; c++) {
      key_row[c] = p.key.at<R>(batch, head, place[c]), value_row[c] = p.value.at<R>(batch, head, place[c]);
      prefetch(key_row[c], dim * sizeof(R));
    }
    float top = tile.top[i / LANES][i % LANES];
    for (int c = 0; c < means; c++) top = std::max(top, score[(near + c) * TILE + i]);
    if (count) {
      for (int64_t c = count; c % FOUR; c++) key_row[c] = key_row[0];
      for (int64_t c = 0; c < count; c += FOUR) {
        four_dots(&key_row[c], &asked[i * dim], dim, &logit[c]);
        for (int64_t r = c; r < std::min(c + FOUR, count); r++) {
          if (SCALED) logit[r] *= scale_of(batch, head, place[r])[0];
          prefetch(value_row[r], p.value_dim * sizeof(R));
        }
      }
      const int64_t whole = (count + LANES - 1) / LANES * LANES;
      std::fill(logit.data() + count, logit.data() + whole, -INFINITY);
      vec largest = broadcast(top);
      for (int64_t v = 0; v < whole; v += LANES) largest = max(load(&logit[v]), largest);
      for (int l = 0; l < LANES; l++) top = std::max<float>(top, largest[l]);
      count_multiply_adds(count);
      vec sum = {};
      for (int64_t v = 0; v < whole; v += LANES) {
        const vec x = exponential(load(&logit[v]) - top);
        store(&logit[v], x);
        sum += x;
      }
      tile.sum[i / LANES][i % LANES] = sum_of_lanes(sum);
      for (int64_t c = 0; SCALED && c < count; c++) logit[c] *= scale_of(batch, head, place[c])[1];
      mix_rows(value_row.data(), logit.data(), count, p.value_dim, &mixed[i * wide]);
    }
    tile.top[i / LANES][i % LANES] = top;
  }
};

template <class T, class R>
static void scan_attend_rows(const ScanAttend &p, int threads) {
  struct Piece {
    Run run;
    int64_t first;
  };
  std::vector<Piece> pieces;
  for (const Run &run : runs_of(p.of, CODED))
    for (int64_t first = 0; first < p.of.gqa_ratio * (run.stop - run.start); first += TILE) pieces.push_back({run, first});
  const int64_t kv_heads = p.of.heads / p.of.gqa_ratio, each = pieces.size();
  in_parallel(
      threads, p.of.batch * kv_heads * each, [&] { return ScanAttention<T, R>(p); },
      [&](ScanAttention<T, R> &worker, int64_t t) {
        const Piece &piece = pieces[t % each];
        worker.attend(t / each / kv_heads, t / each % kv_heads, piece.run, piece.first);
      });
}
template <class T>
static void scan_attend(const ScanAttend &p, int threads) {
  p.scales.data ? scan_attend_rows<T, int8_t>(p, threads) : scan_attend_rows<T, T>(p, threads);
}

}  // namespace fewkeys
