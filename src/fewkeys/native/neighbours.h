// The window of keys around each query, for queries that belong to cohorts. Cohorts attend to their lists and stand-ins
// first. Then the queries attend to their windows in the order of the sequence. Both parts are joined by their largest
// scores and their sums of weights.
#pragma once
#include "near.h"
#include "rows.h"

namespace fewkeys {

// The number of keys in the window of a query at `position`, and the first of them.
static inline int keys_around(const Near &p, int64_t position, int64_t &first) {
  first = std::clamp<int64_t>(position - p.left, 0, p.keys);
  return std::clamp<int64_t>(position + p.right + 1, first, p.keys) - first;
}

// The most keys of a window, rounded up to whole vectors.
static inline int64_t most_around(const Near &p) {
  return round_up(std::clamp<int64_t>(p.left + p.right + 1, 0, p.keys), LANES);
}

// One key head of a sequence: the cohort of every query, the keys that the windows of each cohort must skip, and the
// partial results of the queries from the lists and stand-ins of their cohorts.
struct Surroundings {
  const int64_t wide;           // padded Dv
  std::vector<int32_t> label;   // the stand-in of each key
  std::vector<int32_t> cohort;  // the cohort of each query of all query heads of the key head; -1 for none
  std::vector<uint8_t> hidden;  // (cohorts, keys): 1 for padding and for keys in the list of the cohort
  // For every query: the largest score, or -inf; the sum of the weights relative to it; and the weighted sum of values,
  // padded to `wide`.
  aligned_vector<float> top, sum, mixed;

  explicit Surroundings(const Near &p) : wide(round_up(p.value_dim)) {}

  // Reads the key head whose cohorts are `first` and after, numbered through all key heads.
  void read(const Near &p, int64_t first) {
    const int64_t queries = p.asking * p.asked, keys = first / p.cohorts * p.keys;
    cohort.assign(queries, -1), hidden.assign(p.cohorts * p.keys + most_around(p), 0);
    top.resize(queries), sum.resize(queries), mixed.resize(queries * wide);
    if (p.means) label.assign(p.label + keys, p.label + keys + p.keys);
    for (int64_t h = 0; h < p.cohorts; h++) {
      const int64_t *members = p.order + (first + h) * p.queries, list = (first + h) * p.entries;
      for (int64_t i = 0; i < p.queries; i++)
        if (members[i] >= 0) cohort[members[i]] = h;
      if (p.hidden) std::copy_n(p.hidden + keys, p.keys, &hidden[h * p.keys]);
      for (int64_t c = 0; c < p.entries; c++)
        if (p.used[list + c]) hidden[h * p.keys + p.place[list + c]] = 1;
    }
  }

  // Prefetches the memory that `keep` will write for the queries `row`.
  void expect(const int64_t *row, int rows) {
    for (int i = 0; i < rows; i++) prefetch_to_write(&mixed[row[i] * wide], wide * sizeof(float));
  }
  // Stores the partial results of a tile.
  void keep(const Tile &tile, const float *sums, const int64_t *row, int rows) {
    float tops[TILE], weights[TILE];
    for (int w = 0; w < WIDE; w++) {
      store(tops + w * LANES, tile.sum[w] == 0.0f ? broadcast(-INFINITY) : tile.top[w]);
      store(weights + w * LANES, tile.sum[w]);
    }
    for (int i = 0; i < rows; i++) {
      top[row[i]] = tops[i], sum[row[i]] = weights[i];
      copy(&mixed[row[i] * wide], sums + i * wide, wide);
    }
  }
};

// Subtracts the keys of the queries' windows from the masses of the stand-ins.
class Neighbours {
 public:
  explicit Neighbours(const Near &p) : p(p), part(p.means + 1) {}

  // mass (means + 1, TILE): of the stand-ins of cohort h, numbered through all key heads. It loses an equal part for
  // each key in a query's window that the list does not have. `place`: the positions of the queries. The last row takes
  // what is subtracted for hidden keys, and is not read.
  void look(const Surroundings &around, int64_t h, const int64_t *place, int rows, float *mass) {
    for (int64_t c = 0; c < p.means; c++) part[c] = p.total[h * p.means + c] / std::max(p.size[h * p.means + c], 1.0f);
    const uint8_t *hidden = &around.hidden[h % p.cohorts * p.keys];
    for (int i = 0; p.means && i < rows; i++) {
      int64_t first;
      const int count = keys_around(p, place[i] + p.offset, first);
      for (int64_t j = first; j < first + count; j++) {
        const int64_t c = hidden[j] ? p.means : around.label[j];
        mass[c * TILE + i] -= part[c];
      }
    }
  }

 private:
  const Near &p;
  std::vector<float> part;  // the mass of a stand-in for one of its keys; zero for hidden keys
};

// Attends to the windows of tiles of consecutive queries, and writes the output. Each step is done for all queries of a
// tile before the next step: the queries are independent, so the processor overlaps their latencies.
template <class T>
class BandAttention {
 public:
  explicit BandAttention(const Near &p)
      : p(p), most(most_around(p)), query(p.dim), mixed(round_up(p.value_dim)), score(TILE * most),
        key(TILE + most + FOUR), value(key.size()) {}

  // The queries of query head h from position `place` on. `row`: the number of the first among all queries of the key
  // head.
  void attend(const Surroundings &around, int64_t b, int64_t h, int64_t place, int64_t row) {
    const int64_t key_head = h / p.asking;
    const int rows = std::min<int64_t>(TILE, p.asked - place);
    const int32_t *cohort = &around.cohort[row];
    int64_t begin, last;
    keys_around(p, place + p.offset, begin);
    const int of_last = keys_around(p, place + rows - 1 + p.offset, last), all = last + of_last - begin;
    for (int64_t j = 0; all && j < all + FOUR; j++) {
      key[j] = p.key.at<T>(b, key_head, begin + std::min<int64_t>(j, all - 1));
      value[j] = p.value.at<T>(b, key_head, begin + std::min<int64_t>(j, all - 1));
    }
    for (int i = 0; i < rows; i++) {
      int64_t stride = p.query.row;
      count[i] = keys_around(p, place + i + p.offset, first[i]);
      const T *its = p.query.at<T>(b, h, place + i);
      const float *asking = floats(its, stride, 1, p.dim, p.dim, query.data());
      for (int j = 0; cohort[i] >= 0 && j < count[i]; j += FOUR)
        four_dots(&key[first[i] - begin + j], asking, p.dim, &score[i * most + j]);
    }
    weigh(around, cohort, row, rows);
    for (int i = 0; i < rows; i++) {
      if (cohort[i] < 0) continue;
      copy(mixed.data(), &around.mixed[(row + i) * around.wide], around.wide);
      scale(mixed.data(), before[i], around.wide);
      mix_rows(&value[first[i] - begin], &score[i * most], count[i], p.value_dim, mixed.data());
      T *to = (T *)p.out.at<T>(b, h, place + i);
      for (int d = 0; d < p.value_dim; d++) round_to(mixed[d] * inverse[i], to[d]);
    }
  }

 private:
  const Near &p;
  const int64_t most;
  aligned_vector<float> query, mixed, score;  // score: (TILE, most)
  std::vector<const T *> key, value;
  int64_t first[TILE];
  int count[TILE];
  float before[TILE], inverse[TILE];  // the factor of the cohort's part, and one over the sum of all weights

  // Turns products into weights, relative to the largest score of the window and of the cohort's part.
  void weigh(const Surroundings &around, const int32_t *cohort, int64_t row, int rows) {
    const ivec lane = count_up();
    float held[TILE] = {}, sum[TILE] = {};
    std::fill_n(before, TILE, 0.0f);
    for (int i = 0; i < rows; i++) {
      if (cohort[i] < 0) continue;
      const auto *hidden = (const int8_t *)&around.hidden[cohort[i] * p.keys + first[i]];
      const float top = around.top[row + i];
      float *scores = &score[i * most];
      vec all = broadcast(top), total = {};
      for (int v = 0; v < count[i]; v += LANES) {
        const ivec is_seen = (lane + v < count[i]) & (load(hidden + v) == vec{});
        const vec x = is_seen ? load(scores + v) * p.scale : broadcast(-INFINITY);
        store(scores + v, x);
        all = max(all, x);
      }
      const float largest = max_of_lanes(all), least = largest == -INFINITY ? 0.0f : largest;
      count_multiply_adds(2 * count[i]);
      for (int v = 0; v < count[i]; v += LANES) {
        const vec x = exponential(load(scores + v) - least);
        store(scores + v, x);
        total += x;
      }
      before[i] = top - least, held[i] = around.sum[row + i], sum[i] = sum_of_lanes(total);
    }
    for (int v = 0; v < TILE; v += LANES) {
      const vec share = exponential(load(before + v)), all = load(held + v) * share + load(sum + v);
      store(before + v, share), store(inverse + v, all == 0.0f ? vec{} : 1.0f / all);
    }
  }
};

}  // namespace fewkeys
