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

  void attend(int64_t batch, int64_t head, const Asking &one) {
    const Scan &scan = p.of;
    const int64_t seen = scan.seen[one.start];
    const int rows = one.rows;
    const auto head_of = [&](int i) { return head * scan.gqa_ratio + one.head(i); };
    const T *at[TILE];
    for (int i = 0; i < rows; i++) {
      at[i] = scan.query.at<T>(batch, head_of(i), one.query(i));
      for (int64_t d = 0; d < dim; d++) asked[i * dim + d] = to_float(at[i][d]) * p.scale;
    }
    scanner.choose(batch, head, seen, rows, [&](int i) { return at[i]; });
    to_lanes(at, rows, dim, p.scale, lanes.data());
    collect(batch, head, seen, p.causal ? std::min(scan.keys, one.stop + p.offset) : seen);
    const int64_t step = p.steps > 1 ? (one.start + p.offset) / CODED - p.offset / CODED : 0;
    collect_means(batch, head, p.edges + step * (p.means + 1));
    score.resize((near + p.means) * TILE);
    const int used = rows <= TILE / 2 ? TILE / 2 : TILE;
    dots(key.data(), dim, near + p.means, dim, lanes.data(), score.data(), used);

    Tile tile(1.0f);
    int64_t last[TILE];
    for (int i = 0; i < TILE; i++) last[i] = i < rows ? one.query(i) + p.offset : -1;
    hide(tile, batch, last, seen);
    std::fill(mixed.begin(), mixed.end(), 0.0f);
    Chosen now = chosen(0, batch, head);
    for (int i = 0; i < rows; i++) {
      const Chosen next = i + 1 < rows ? chosen(i + 1, batch, head) : Chosen{};
      weigh_means(i, now, p.edges + step * (p.means + 1));
      mix_chosen(tile, i, now, next);
      now = next;
    }
    tile.settle();
    tile.weigh(score.data(), near + p.means);
    for (int i = 0; near + p.means && i < rows; i += SOME)
      mix(value.data(), wide, near + p.means, wide, &score[i], TILE, &mixed[i * wide], wide);
    for (int i = 0; i < rows; i++) {
      const float sum = tile.sum[i / LANES][i % LANES], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      T *to = (T *)p.out.at<T>(batch, head_of(i), one.query(i));
      for (int64_t d = 0; d < p.value_dim; d++) round_to(mixed[i * wide + d] * inverse, to[d]);
    }
  }

 private:
  // What a query chooses: places, and where the rows of a key head lie.
  struct Chosen {
    const int32_t *place;
    int64_t count;
    const R *key, *value;
    const float *scale;
  };

  const ScanAttend &p;
  const int64_t dim, wide;
  Scanner<T> scanner;
  int near = 0;
  aligned_vector<float> lanes, asked, mixed, key, value, score, logit, size;
  aligned_vector<const R *> row;

  // Whether keys and values have scales.
  static constexpr bool SCALED = std::is_same_v<R, int8_t>;

  Chosen chosen(int i, int64_t batch, int64_t head) {
    Largest &best = scanner.chosen(i);
    const int64_t count = best.finish();
    return {best.places(), count, p.key.at<R>(batch, head, 0), p.value.at<R>(batch, head, 0),
            p.scales.at<float>(batch, head, 0)};
  }

  // Copies the keys first .. stop - 1 and their values.
  void collect(int64_t batch, int64_t head, int64_t first, int64_t stop) {
    near = std::max<int64_t>(0, stop - first);
    key.resize((near + p.means) * dim), value.resize((near + p.means) * wide);
    if (!near) return;
    copy_rows(p.key.at<R>(batch, head, first), p.key.row, near, dim, dim, key.data());
    copy_rows(p.value.at<R>(batch, head, first), p.value.row, near, p.value_dim, wide, value.data());
    for (int j = 0; SCALED && j < near; j++) {
      const float *scale = p.scales.at<float>(batch, head, first + j);
      for (int64_t d = 0; d < dim; d++) key[j * dim + d] *= scale[0];
      for (int64_t d = 0; d < p.value_dim; d++) value[j * wide + d] *= scale[1];
    }
  }

  // Appends the means of ranges, and notes how many keys each is of.
  void collect_means(int64_t batch, int64_t head, const int64_t *edges) {
    size.resize(p.means);
    std::fill(value.begin() + near * wide, value.end(), 0.0f);
    for (int64_t c = 0; c < p.means; c++) {
      const int64_t start = (edges[c] + CODED - 1) / CODED, stop = (edges[c + 1] + CODED - 1) / CODED;
      const double *before = p.total.at<double>(batch, head, start), *after = p.total.at<double>(batch, head, stop);
      const double *real = p.size + batch * (p.blocks + 1);
      const double count = p.size ? real[stop] - real[start] : edges[c + 1] - edges[c], share = 1 / std::max(count, 1.0);
      for (int64_t d = 0; d < dim; d++) key[(near + c) * dim + d] = (after[d] - before[d]) * share;
      for (int64_t d = 0; d < p.value_dim; d++)
        value[(near + c) * wide + d] = (after[dim + d] - before[dim + d]) * share;
      size[c] = count;
    }
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
  void weigh_means(int i, const Chosen &of, const int64_t *edges) {
    int64_t at = 0;
    for (int64_t c = 0; c < p.means; c++) {
      const int64_t before = at;
      while (at < of.count && of.place[at] < edges[c + 1]) at++;
      const float left = size[c] - (at - before);
      float &own = score[(near + c) * TILE + i];
      own = left > 0 ? own + std::log(left) : -INFINITY;
    }
  }

  // Sends for rows that a query chooses, not into the nearest cache: all of them would not fit there.
  void send_for(const Chosen &next, int64_t first, int64_t count) const {
    for (int64_t r = first; r < std::min(first + count, next.count); r++) {
      prefetch<2>(next.key + next.place[r] * p.key.row, dim * sizeof(R));
      prefetch<2>(next.value + next.place[r] * p.value.row, p.value_dim * sizeof(R));
    }
  }

  // Adds the values that query i chooses under their weights; means have been weighed. What the next query chooses is
  // sent for meanwhile.
  void mix_chosen(Tile &tile, int i, const Chosen &of, const Chosen &next) {
    const int64_t count = of.count, room = (count + LANES + FOUR) / LANES * LANES + LANES;
    if ((int64_t)logit.size() < room) logit.resize(room), row.resize(room);
    float top = tile.top[i / LANES][i % LANES];
    for (int64_t c = 0; c < p.means; c++) top = std::max(top, score[(near + c) * TILE + i]);
    if (count) {
      for (int64_t c = 0; c < count; c++) row[c] = of.key + of.place[c] * p.key.row;
      for (int64_t c = count; c % FOUR; c++) row[c] = row[0];
      for (int64_t c = 0; c < count; c += FOUR) {
        four_dots(&row[c], &asked[i * dim], dim, &logit[c]);
        for (int64_t r = c; SCALED && r < std::min(c + FOUR, count); r++) logit[r] *= of.scale[of.place[r] * p.scales.row];
        send_for(next, c / 2, FOUR / 2);
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
      for (int64_t c = 0; SCALED && c < count; c++) logit[c] *= of.scale[of.place[c] * p.scales.row + 1];
      for (int64_t c = 0; c < count; c++) row[c] = of.value + of.place[c] * p.value.row;
      for (int64_t c = 0; c < count; c += 2 * FOUR) {
        mix_rows(&row[c], &logit[c], std::min<int64_t>(2 * FOUR, count - c), p.value_dim, &mixed[i * wide]);
        send_for(next, (count + c) / 2, FOUR);
      }
    }
    tile.top[i / LANES][i % LANES] = top;
  }
};

// For so many key heads from `first` on.
template <class T, class R>
static void scan_attend_heads(const ScanAttend &p, int threads, int64_t first, int64_t count) {
  const std::vector<Asking> all = asking(p.of);
  const int64_t kv_heads = p.of.heads / p.of.gqa_ratio, each = all.size();
  in_parallel(
      threads, count * each, [&] { return std::make_unique<ScanAttention<T, R>>(p); },
      [&](std::unique_ptr<ScanAttention<T, R>> &worker, int64_t t) {
        const int64_t head = first + t / each;
        worker->attend(head / kv_heads, head % kv_heads, all[t % each]);
      });
}

// Rows that no cache near a core holds, and of which each is chosen often, are copied, a key beside its value, one key
// head at a time: a query then finds both at one address.
template <class T, class R>
static void scan_attend_rows(const ScanAttend &p, int threads) {
  constexpr int OFTEN = 16, MANY_BYTES = 4 << 20, SOME = 512;
  const int64_t kv_heads = p.of.heads / p.of.gqa_ratio, heads = p.of.batch * kv_heads, keys = p.of.keys;
  const int64_t both = p.of.dim + p.value_dim, row = round_up(both * sizeof(R), 64) / sizeof(R);
  const int64_t chosen = p.of.queries * p.of.gqa_ratio * p.of.count;
  if (chosen < OFTEN * keys || keys * row * (int64_t)sizeof(R) < MANY_BYTES)
    return scan_attend_heads<T, R>(p, threads, 0, heads);
  HugePages<R> rows(keys * row);
  ScanAttend copied = p;
  copied.key = {rows.data(), 0, 0, row}, copied.value = {rows.data() + p.of.dim, 0, 0, row};
  for (int64_t head = 0; head < heads; head++) {
    in_parallel(threads, (keys + SOME - 1) / SOME, [&](int64_t some) {
      for (int64_t j = some * SOME; j < std::min(keys, (some + 1) * SOME); j++) {
        R *to = rows.data() + j * row;
        std::copy_n(p.key.at<R>(head / kv_heads, head % kv_heads, j), p.of.dim, to);
        std::copy_n(p.value.at<R>(head / kv_heads, head % kv_heads, j), p.value_dim, to + p.of.dim);
      }
    });
    scan_attend_heads<T, R>(copied, threads, head, 1);
  }
}

template <class T>
static void scan_attend(const ScanAttend &p, int threads) {
  p.scales.data ? scan_attend_rows<T, int8_t>(p, threads) : scan_attend_rows<T, T>(p, threads);
}

}  // namespace fewkeys
