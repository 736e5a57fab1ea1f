// Attention to the lists and stand-ins of cohorts of queries and to a window around each query: `near.h` for cohorts.
//
// Cohorts attend to their lists and stand-ins first. Then the queries attend to their windows in the order of the
// sequence. Both parts are joined by their largest scores and their sums of weights.
#pragma once
#include "near.h"
#include "rows.h"

namespace fewkeys {

// What the queries of one key head share. Queries are numbered through all query heads of the key head.
struct Surroundings {
  const Near &p;
  const int64_t wide;           // padded Dv
  int64_t keys = 0;             // the first key of the head, numbered through all heads
  std::vector<int32_t> cohort;  // of each query; -1 for none
  std::vector<uint8_t> hidden;  // (cohorts, keys): 1 for padding and for keys in the list of the cohort
  // Of each query, from the list and the stand-ins of its cohort: the largest score, or -inf; the sum of the weights
  // relative to it; and the weighted sum of values, padded to `wide`.
  Floats top, sum, mixed;

  explicit Surroundings(const Near &p) : p(p), wide(round_up(p.value_dim)) {}

  void read(int64_t head) {
    const int64_t queries = p.asking * p.asked;
    keys = head * p.keys;
    cohort.assign(queries, -1), hidden.assign(p.cohorts * p.keys + round_up(Window::most(p, 1), LANES), 0);
    top.resize(queries), sum.resize(queries), mixed.resize(queries * wide);
    for (int64_t h = 0; h < p.cohorts; h++) {
      const int64_t *members = p.order + (head * p.cohorts + h) * p.queries;
      for (int64_t i = 0; i < p.queries; i++)
        if (members[i] >= 0) cohort[members[i]] = h;
      hide(p, head, head * p.cohorts + h, &hidden[h * p.keys]);
    }
  }

  // Stores the partial results of a tile.
  void keep(const Tile &tile, const float *sums, const int64_t *query, int rows) {
    for (int i = 0; i < rows; i++) {
      const float weights = tile.sum[i / LANES][i % LANES];
      top[query[i]] = weights == 0.0f ? -INFINITY : tile.top[i / LANES][i % LANES], sum[query[i]] = weights;
      copy(&mixed[query[i] * wide], sums + i * wide, wide);
    }
  }
};

// Attends to the lists and stand-ins of cohorts, which are numbered through all key heads.
template <class T>
class CohortAttention {
 public:
  explicit CohortAttention(const Near &p)
      : p(p), query(p.dim * TILE), mixed(TILE * round_up(p.value_dim)), weights(p), shared(p) {}

  // Attends with TILE queries of a cohort, from the entry `first` of its order on, and stores the partial results.
  void attend(Surroundings &around, int64_t of, int64_t first) {
    const int rows = gather(of, first);
    if (!rows) return;
    for (int i = 0; i < rows; i++) prefetch<3, true>(&around.mixed[row[i] * around.wide], around.wide * sizeof(float));
    if (gathered != of) shared.gather(of), gathered = of;
    const int columns = p.entries + p.means + p.rank;
    to_lanes(asking, rows, p.dim, p.scale, query.data());
    shared.dots(query.data(), columns, weights.score.data());

    Tile tile;
    weights.begin(of);
    if (p.means) subtract_windows(around, of, rows);
    weights.finish(tile, of, 0, 0);

    std::fill(mixed.begin(), mixed.end(), 0.0f);
    for (int i = 0; i < rows; i += SOME) shared.mix(&weights.score[i], 0, columns, &mixed[i * around.wide]);
    around.keep(tile, mixed.data(), row, rows);
  }

 private:
  const Near &p;
  Floats query, mixed;
  NearWeights weights;
  Columns<T> shared;
  int64_t gathered = -1;  // the cohort that `shared` holds
  const T *asking[TILE];
  int64_t row[TILE], place[TILE];  // numbers of the queries among all of the key head, and their positions

  // Collects the queries among TILE entries of the cohort's order, and prefetches the next ones, which lie anywhere;
  // returns their number.
  int gather(int64_t of, int64_t first) {
    const int64_t *members = p.order + of * p.queries;
    const auto head = [&](int64_t i) { return of / p.cohorts * p.asking + members[i] / p.asked; };
    const auto at = [&](int64_t i) { return p.query.at<T>(head(i), members[i] % p.asked); };
    int queries = 0;
    for (int64_t i = first; i < std::min(p.queries, first + TILE); i++) {
      if (members[i] < 0) continue;
      row[queries] = members[i], place[queries] = members[i] % p.asked;
      asking[queries++] = at(i);
    }
    for (int64_t i = first + TILE; i < std::min(p.queries, first + 2 * TILE); i++)
      if (members[i] >= 0) prefetch(at(i), p.dim * sizeof(T));
    return queries;
  }

  // The mass of a stand-in loses an equal part for each key in a query's window that the list does not have. The spare
  // row takes what is subtracted for hidden keys.
  void subtract_windows(const Surroundings &around, int64_t of, int rows) {
    const uint8_t *hidden = &around.hidden[of % p.cohorts * p.keys];
    for (int i = 0; i < rows; i++) {
      const Window window(p, place[i] + p.offset, 1);
      for (int64_t j = window.begin; j < window.begin + window.count; j++) {
        const int64_t c = hidden[j] ? p.means : p.label[around.keys + j];
        weights.mass[c * TILE + i] -= weights.part[c];
      }
    }
  }
};

// Attends to the windows of tiles of consecutive queries, and writes the output. Each step is done for all queries of a
// tile before the next step: the queries are independent, so the processor overlaps their latencies.
template <class T>
class BandAttention {
 public:
  explicit BandAttention(const Near &p)
      : p(p), most(round_up(Window::most(p, 1), LANES)), query(p.dim), mixed(round_up(p.value_dim)), score(TILE * most),
        key(TILE + most + FOUR), value(key.size()) {}

  // The queries of a query head from position `place` on.
  void attend(const Surroundings &around, int64_t head, int64_t place) {
    const int rows = std::min<int64_t>(TILE, p.asked - place);
    const int64_t key_head = head / p.asking, row = head % p.asking * p.asked + place;
    const int32_t *cohort = &around.cohort[row];
    const Window all(p, place + p.offset, rows);
    const T *first_key = p.key.at<T>(key_head, all.begin), *first_value = p.value.at<T>(key_head, all.begin);
    for (int64_t j = 0; all.count && j < all.count + FOUR; j++) {
      const int64_t at = std::min<int64_t>(j, all.count - 1);
      key[j] = first_key + at * p.key.row, value[j] = first_value + at * p.value.row;
    }
    for (int i = 0; i < rows; i++) {
      const Window window(p, place + i + p.offset, 1);
      first[i] = window.begin, count[i] = window.count;
      int64_t stride = p.query.row;
      const float *asking = as_floats(p.query.at<T>(head, place + i), stride, 1, p.dim, p.dim, query.data());
      for (int j = 0; cohort[i] >= 0 && j < count[i]; j += FOUR)
        four_dots(&key[first[i] - all.begin + j], asking, p.dim, &score[i * most + j]);
    }
    weigh(around, cohort, row, rows);
    for (int i = 0; i < rows; i++) {
      if (cohort[i] < 0) continue;
      copy(mixed.data(), &around.mixed[(row + i) * around.wide], around.wide);
      scale(mixed.data(), before[i], around.wide);
      mix_rows(&value[first[i] - all.begin], &score[i * most], count[i], p.value_dim, mixed.data());
      T *to = (T *)p.out.at<T>(head, place + i);
      for (int d = 0; d < p.value_dim; d++) round_to(mixed[d] * inverse[i], to[d]);
    }
  }

 private:
  const Near &p;
  const int64_t most;
  Floats query, mixed, score;  // score: (TILE, most)
  std::vector<const T *> key, value;
  int64_t first[TILE];
  int count[TILE];
  float before[TILE], inverse[TILE];  // the factor of the cohort's part, and one over the sum of all weights

  // Turns products into weights, relative to the largest score of the window and of the cohort's part.
  void weigh(const Surroundings &around, const int32_t *cohort, int64_t row, int rows) {
    const ivec lane = count_up();
    float of_cohort[TILE] = {}, sum[TILE] = {};
    std::fill_n(before, TILE, 0.0f);
    for (int i = 0; i < rows; i++) {
      if (cohort[i] < 0) continue;
      const auto *hidden = (const int8_t *)&around.hidden[cohort[i] * p.keys + first[i]];
      const float top = around.top[row + i];
      float *scores = &score[i * most];
      vec largest_of_lanes = broadcast(top);
      for (int v = 0; v < count[i]; v += LANES) {
        const ivec is_seen = (lane + v < count[i]) & (load(hidden + v) == vec{});
        const vec x = is_seen ? load(scores + v) * p.scale : broadcast(-INFINITY);
        store(scores + v, x);
        largest_of_lanes = max(largest_of_lanes, x);
      }
      const float largest = max_of_lanes(largest_of_lanes), least = largest == -INFINITY ? 0.0f : largest;
      before[i] = top - least, of_cohort[i] = around.sum[row + i], sum[i] = exponentials(scores, count[i], least);
    }
    for (int v = 0; v < TILE; v += LANES) {
      const vec share = exponential(load(before + v)), all = load(of_cohort + v) * share + load(sum + v);
      store(before + v, share), store(inverse + v, all == 0.0f ? vec{} : 1.0f / all);
    }
  }
};

// With many key heads, each thread takes whole heads.
template <class T>
static void attend_cohorts(const Near &p, int threads) {
  typedef BandAttention<T> Band;
  typedef CohortAttention<T> Attention;
  const int64_t heads = p.heads / p.cohorts, tiles = divide_up(p.queries, TILE);
  const int64_t cohort_tiles = tiles * p.cohorts, band_tiles = divide_up(p.asked, TILE) * p.asking;
  const auto attend_tile = [&](Attention &attention, Surroundings &around, int64_t head, int64_t i) {
    attention.attend(around, head * p.cohorts + i / tiles, i % tiles * TILE);
  };
  const auto attend_band = [&](Band &band, const Surroundings &around, int64_t head, int64_t i) {
    band.attend(around, head * p.asking + i % p.asking, i / p.asking * TILE);
  };
  if (heads >= 4 * threads) {
    struct Worker {
      Surroundings around;
      Attention attention;
      Band band;
    };
    const auto make = [&] { return Worker{Surroundings(p), Attention(p), Band(p)}; };
    return in_parallel(threads, heads, make, [&](Worker &worker, int64_t head) {
      worker.around.read(head);
      for (int64_t i = 0; i < cohort_tiles; i++) attend_tile(worker.attention, worker.around, head, i);
      for (int64_t i = 0; i < band_tiles; i++) attend_band(worker.band, worker.around, head, i);
    });
  }
  // Otherwise all threads share each head, one head after the other in the same memory.
  Surroundings around(p);
  for (int64_t head = 0; head < heads; head++) {
    around.read(head);
    const auto tile = [&](Attention &attention, int64_t i) { attend_tile(attention, around, head, i); };
    const auto band_tile = [&](Band &band, int64_t i) { attend_band(band, around, head, i); };
    in_parallel(threads, cohort_tiles, [&] { return Attention(p); }, tile, 4);
    in_parallel(threads, band_tiles, [&] { return Band(p); }, band_tile, 4);
  }
}

template <class T>
static void attend(const Near &p, int threads) {
  p.order ? attend_cohorts<T>(p, threads) : attend_near<T>(p, threads);
}

}  // namespace fewkeys
