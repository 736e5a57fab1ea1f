// Attention to the lists and stand-ins of cohorts of queries and to a window around each query. Without an order of
// queries, those of a key head are one cohort.
//
// Cohorts attend to their lists and stand-ins first. Then the queries attend to their windows in the order of the
// sequence. Both parts are joined by their largest scores and their sums of weights.
#pragma once
#include "near.h"
#include "rows.h"

namespace fewkeys {

constexpr int64_t LAST_PLACE = INT32_MAX - 1;  // positions beyond it see the same keys

// The query at a place of a cohort, numbered through all query heads of its key head, or -1.
static inline int64_t member(const Near &p, int64_t cohort, int64_t i) {
  return p.order ? p.order[cohort * p.queries + i] : i;
}

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
      for (int64_t i = 0; i < p.queries; i++)
        if (const int64_t query = member(p, head * p.cohorts + h, i); query >= 0) cohort[query] = h;
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
    to_lanes(asking, rows, p.dim, p.scale, query.data());
    dots(shared.key.data(), p.dim, shared.count, p.dim, query.data(), weights.score.data());

    Tile tile;
    weights.begin(of);
    if (p.means) subtract_windows(around, of, rows);
    weights.finish(tile, of, place);

    std::fill(mixed.begin(), mixed.end(), 0.0f);
    for (int i = 0; i < rows; i += SOME)
      mix(shared.value.data(), around.wide, shared.count, around.wide, weights.score.data() + i, TILE,
          &mixed[i * around.wide], around.wide);
    around.keep(tile, mixed.data(), row, rows);
  }

 private:
  const Near &p;
  Floats query, mixed;
  NearWeights weights;
  Columns<T> shared;
  int64_t gathered = -1;  // the cohort that `shared` holds
  const T *asking[TILE];
  int64_t row[TILE];    // numbers of the queries among all of the key head
  int32_t place[TILE];  // their positions

  // Collects the queries among TILE entries of the cohort's order, and prefetches the next ones, which lie anywhere;
  // returns their number.
  int gather(int64_t of, int64_t first) {
    int queries = 0;
    for (int64_t i = first; i < std::min(p.queries, first + 2 * TILE); i++) {
      const int64_t number = member(p, of, i);
      if (number < 0) continue;
      const uint32_t head = uint32_t(number) / uint32_t(p.asked), at = number - head * p.asked;
      const T *query = p.query.at<T>(of / p.cohorts * p.asking + head, at);
      if (i < first + TILE)
        row[queries] = number, place[queries] = std::min(at + p.offset, LAST_PLACE), asking[queries++] = query;
      else
        prefetch(query, p.dim * sizeof(T));
    }
    return queries;
  }

  // The mass of a stand-in loses an equal part for each key in a query's window that the list does not have. The spare
  // row takes what is subtracted for hidden keys.
  void subtract_windows(const Surroundings &around, int64_t of, int rows) {
    const uint8_t *hidden = &around.hidden[of % p.cohorts * p.keys];
    for (int i = 0; i < rows; i++) {
      const Window window(p, place[i], 1);
      for (int64_t j = window.begin; j < window.begin + window.count; j++) {
        const int64_t c = hidden[j] ? p.means : p.label[around.keys + j];
        weights.mass[c * TILE + i] -= weights.part[c];
      }
    }
  }
};

// Attends to the windows of a tile of consecutive queries, and writes the output. Scores are computed for BAND queries
// at once: for fewer, products are slower; for more, more scores are of keys outside the window.
constexpr int BAND = FILL;
template <class T>
class BandAttention {
 public:
  explicit BandAttention(const Near &p)
      : p(p), most(Window::most(p, TILE)), wide(round_up(p.value_dim)), query(p.dim * TILE), mixed(SOME * wide),
        score(most * TILE), copies(most * (p.dim + wide)) {}

  // The queries of a query head from position `place` on.
  void attend(const Surroundings &around, int64_t head, int64_t place) {
    const int rows = std::min<int64_t>(TILE, p.asked - place);
    const int64_t key_head = head / p.asking, row = head % p.asking * p.asked + place;
    const int32_t *cohort = &around.cohort[row];
    const Window window(p, place + p.offset, rows);
    int64_t key_stride = p.key.row, value_stride = p.value.row;
    const T *first_key = p.key.at<T>(key_head, window.begin), *first_value = p.value.at<T>(key_head, window.begin);
    const float *key = as_floats(first_key, key_stride, window.count, p.dim, p.dim, copies.data());
    float *copy_of_values = copies.data() + window.count * p.dim;
    const float *value = as_floats(first_value, value_stride, window.count, p.value_dim, wide, copy_of_values);
    to_lanes(p.query.at<T>(head, place), p.query.row, rows, p.dim, p.scale, query.data());
    for (int part = 0; part < rows; part += BAND) {
      const int count = std::min(BAND, rows - part);
      const Window seen(p, place + part + p.offset, count);
      float *scores = &score[(seen.begin - window.begin) * TILE + part];
      const float *from = key + (seen.begin - window.begin) * key_stride;
      dots(from, key_stride, seen.count, p.dim, &query[part], scores, BAND);
      hide(around, cohort + part, place + part + p.offset, seen, count, scores);
      std::fill(std::copy_n(&around.top[row + part], count, before + part), before + part + BAND, -INFINITY);
      std::fill(std::copy_n(&around.sum[row + part], count, inverse + part), inverse + part + BAND, 0.0f);
      for (int v = 0; v < BAND; v += LANES) weigh(scores + v, seen.count, before + part + v, inverse + part + v);
    }
    for (int i = 0; i < rows; i += SOME) {
      const int count = std::min(SOME, rows - i);
      for (int q = 0; q < count; q++) {
        const float *from = &around.mixed[(row + i + q) * wide];
        for (int64_t d = 0; d < wide; d += LANES) store(&mixed[q * wide + d], load(from + d) * before[i + q]);
      }
      const Window seen(p, place + i + p.offset, count);
      const int64_t low = seen.begin - window.begin;
      mix(value + low * value_stride, value_stride, seen.count, wide, &score[low * TILE + i], TILE, mixed.data(), wide);
      for (int q = 0; q < count; q++) {
        if (cohort[i + q] < 0) continue;
        T *to = (T *)p.out.at<T>(head, place + i + q);
        for (int d = 0; d < p.value_dim; d++) round_to(mixed[q * wide + d] * inverse[i + q], to[d]);
      }
    }
  }

 private:
  const Near &p;
  const int64_t most, wide;
  Floats query, mixed, score, copies;  // score: (most, TILE)
  float before[TILE], inverse[TILE];   // the factor of the cohort's part, and one over the sum of all weights

  // Hides keys outside the window of a query, and those that its window skips.
  void hide(const Surroundings &around, const int32_t *cohort, int64_t position, const Window &seen, int rows,
            float *scores) {
    const ivec lane = count_up();
    count_multiply_adds(seen.count * BAND);
    for (int j = 0; j < seen.count; j++) {
      const int low = seen.begin + j - p.right - position, high = seen.begin + j + p.left - position;
      for (int v = 0; v < BAND; v += LANES) {
        float *to = scores + j * TILE + v;
        store(to, within(lane + v, low, high, load(to), broadcast(-INFINITY)));
      }
    }
    for (int i = 0; i < rows; i++) {
      const Window window(p, position + i, 1);
      const auto *hidden = (const int8_t *)&around.hidden[std::max(cohort[i], 0) * p.keys + window.begin];
      for (int v = 0; v < window.count; v += LANES)
        for (uint32_t bits = bits_of(load(hidden + v) != vec{}); bits; bits &= bits - 1)
          if (const int j = v + __builtin_ctz(bits); j < window.count)
            scores[(window.begin - seen.begin + j) * TILE + i] = -INFINITY;
    }
  }

  // Turns scores into weights, relative to the largest score of the window and of the cohort's part. top: the largest
  // score of the cohort's part; becomes its factor. sum: its sum of weights; becomes one over the sum of all.
  void weigh(float *scores, int count, float *top, float *sum) {
    count_multiply_adds((count + 1) * LANES);
    const vec of_cohort = load(top);
    vec largest = of_cohort, all = {};
    for (int j = 0; j < count; j++) largest = max(largest, load(scores + j * TILE));
    largest = largest == broadcast(-INFINITY) ? vec{} : largest;
    for (int j = 0; j < count; j++) {
      const vec x = exponential(load(scores + j * TILE) - largest);
      store(scores + j * TILE, x);
      all += x;
    }
    const vec share = exponential(of_cohort - largest);
    all += load(sum) * share;
    store(top, share), store(sum, all == 0.0f ? vec{} : 1.0f / all);
  }
};

// With many key heads, each thread takes whole heads. Otherwise all threads share each head, one after the other in the
// same memory.
template <class T>
static void attend(const Near &p, int threads) {
  const int64_t heads = p.heads / p.cohorts, tiles = divide_up(p.queries, TILE);
  const auto attend_head = [&](Surroundings &around, int64_t head, int team) {
    around.read(head);
    const auto attend_tile = [&](CohortAttention<T> &attention, int64_t i) {
      attention.attend(around, head * p.cohorts + i / tiles, i % tiles * TILE);
    };
    const auto attend_band = [&](BandAttention<T> &band, int64_t i) {
      band.attend(around, head * p.asking + i % p.asking, i / p.asking * TILE);
    };
    in_parallel(team, tiles * p.cohorts, [&] { return CohortAttention<T>(p); }, attend_tile, 4);
    in_parallel(team, divide_up(p.asked, TILE) * p.asking, [&] { return BandAttention<T>(p); }, attend_band, 4);
  };
  const auto new_surroundings = [&] { return Surroundings(p); };
  if (heads >= 4 * threads)
    return in_parallel(threads, heads, new_surroundings,
                       [&](Surroundings &around, int64_t head) { attend_head(around, head, 1); });
  Surroundings around(p);
  for (int64_t head = 0; head < heads; head++) attend_head(around, head, threads);
}

}  // namespace fewkeys
