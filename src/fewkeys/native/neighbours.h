// Keys around queries that belong to cohorts: attended to where the queries stand, to be joined to what the cohorts keep.
#pragma once
#include "matrix.h"

namespace fewkeys {

// One key head of a sequence: the cohort of every query, and what each cohort does not see through the band.
struct Surroundings {
  std::vector<int32_t> cohort;  // of the queries of all query heads that read the key head; -1 for none
  std::vector<uint8_t> hidden;  // (cohorts, keys), ones for padding and for keys in the cohort's list
  // Of every query: the largest score of its keys, the sum of their weights beside that, and the sum of the values under
  // these weights, filled up to `wide`.
  aligned_vector<float> top, sum, mixed;

  // Of the key head with the cohorts from `first` on, counted through all key heads.
  void read(const Near &p, int64_t first) {
    const int64_t queries = p.asking * p.asked, keys = first / p.cohorts * p.keys;
    cohort.assign(queries, -1), hidden.assign(p.cohorts * p.keys, 0);
    top.resize(queries), sum.resize(queries), mixed.resize(queries * round_up(p.value_dim));
    for (int64_t h = 0; h < p.cohorts; h++) {
      const int64_t *own = p.order + (first + h) * p.queries, *place = p.place + (first + h) * p.entries;
      for (int64_t i = 0; i < p.queries; i++)
        if (own[i] >= 0) cohort[own[i]] = h;
      if (p.hidden) std::copy_n(p.hidden + keys, p.keys, &hidden[h * p.keys]);
      for (int64_t c = 0; c < p.entries; c++)
        if (place[c] < p.keys) hidden[h * p.keys + place[c]] = 1;
    }
  }
};

// How many keys are around a query at `position`, and the first of them.
static inline int keys_around(const Near &p, int64_t position, int64_t &first) {
  first = std::clamp<int64_t>(position - p.left, 0, p.keys);
  return std::clamp<int64_t>(position + p.right + 1, first, p.keys) - first;
}

// Attends to the keys around tiles of queries that follow one another.
template <class Products>
class BandAttention {
 public:
  typedef typename Products::Number Number;

  explicit BandAttention(const Near &p)
      : p(p), query(p.dim), mixed(p.value_dim), band(p.dim, p.value_dim),
        score(round_up(std::clamp<int64_t>(TILE + p.left + p.right, 0, p.keys), STEP) * TILE) {}

  // The queries from `first` on of query head h; `row`: the number of the first one among those of its key head.
  void attend(Surroundings &around, int64_t b, int64_t h, int64_t first, int64_t row) {
    const int rows = std::min<int64_t>(TILE, p.asked - first);
    const int64_t position = first + p.offset, begin = std::clamp<int64_t>(position - p.left, 0, p.keys);
    const int count = std::clamp<int64_t>(position + rows + p.right, begin, p.keys) - begin;
    const int64_t key_head = h / p.asking;
    query.set(p.query.at<Number>(b, h, first), p.query.row, rows);
    band.read(p.key.at<Number>(b, key_head, begin), p.key.row, p.value.at<Number>(b, key_head, begin), p.value.row, count);
    band.dots(query, count, score.data());
    for (int j = 0; j < count; j++) scale(&score[j * TILE], begin + j - position);
    for (int i = 0; i < rows; i++) hide(around, row + i, position + i, begin, i);
    Tile tile(p.scale);
    for (int j = 0; j < count; j++)
      for (int w = 0; w < WIDE; w++) tile.top[w] = max(tile.top[w], load(&score[j * TILE + w * LANES]));
    for (int w = 0; w < WIDE; w++) store(largest + w * LANES, tile.top[w]);
    tile.settle();
    tile.weigh(score.data(), count);
    for (int w = 0; w < WIDE; w++) store(total + w * LANES, tile.sum[w]);
    mixed.clear();
    const auto reached = [&](int i, int &low, int &high) {
      low = std::clamp<int64_t>(position - begin + i - p.left, 0, count);
      high = std::clamp<int64_t>(position - begin + i + SOME + p.right, low, count);
    };
    band.mix(score.data(), count, rows, reached, mixed);
    std::copy_n(largest, rows, &around.top[row]), std::copy_n(total, rows, &around.sum[row]);
    std::copy_n(mixed.rows(), rows * round_up(p.value_dim), &around.mixed[row * round_up(p.value_dim)]);
  }

 private:
  const Near &p;
  const typename Products::Session session = {};
  typename Products::Queries query;
  typename Products::Mixed mixed;
  typename Products::Columns band;
  aligned_vector<float> score;
  float largest[TILE], total[TILE];

  // Products with the key `ahead` of the first query become scores, -inf for queries that do not reach it.
  void scale(float *product, int64_t ahead) const {
    const int low = std::clamp<int64_t>(ahead - p.right, 0, TILE), high = std::clamp<int64_t>(ahead + p.left, -1, TILE);
    count_multiply_adds(TILE);
    for (int v = 0; v < TILE; v += LANES)
      store(product + v, within(count_up() + v, low, high, load(product + v) * p.scale, broadcast(-INFINITY)));
  }

  // Scores of keys that a query's cohort does not see become -inf.
  void hide(const Surroundings &around, int64_t row, int64_t position, int64_t begin, int lane) {
    int64_t first;
    const int reached = keys_around(p, position, first);
    const int32_t cohort = around.cohort[row];
    float *of_lane = &score[(first - begin) * TILE + lane];
    if (cohort < 0) {
      for (int w = 0; w < reached; w++) of_lane[w * TILE] = -INFINITY;
      return;
    }
    const uint8_t *hidden = &around.hidden[cohort * p.keys + first], *at = hidden, *end = hidden + reached;
    for (; (at = (const uint8_t *)memchr(at, 1, end - at)); at++) of_lane[(at - hidden) * TILE] = -INFINITY;
  }
};

// Joins what a tile of queries of a cohort sees around itself to what the cohort keeps.
class Neighbours {
 public:
  explicit Neighbours(const Near &p) : p(p), is_there(p.left + p.right >= 0), wide(round_up(p.value_dim)) {}

  // `count` (means + 2, TILE) loses one for each key that a query sees, at its cluster, and behind the clusters for each
  // other key. `row`: the numbers of the queries.
  void look(const Surroundings &around, Tile &tile, int64_t unit, int32_t cohort, const int64_t *row, int rows,
            float *count) {
    if (!is_there) return;
    const int64_t *label = p.label + unit * p.keys;
    const uint8_t *hidden = &around.hidden[cohort * p.keys];
    std::fill_n(top, TILE, -INFINITY), std::fill_n(sum, TILE, 0.0f);
    for (int i = 0; i < rows; i++) {
      top[i] = around.top[row[i]], sum[i] = around.sum[row[i]];
      if (!p.means) continue;
      int64_t first;
      const int reached = keys_around(p, row[i] % p.asked + p.offset, first);
      for (int64_t j = first; j < first + reached; j++) count[(hidden[j] ? p.means : label[j]) * TILE + i] -= 1.0f;
    }
    for (int w = 0, v = 0; w < WIDE; w++, v += LANES) tile.top[w] = max(tile.top[w], load(top + v));
  }

  // Once the largest scores are known.
  void weigh(Tile &tile) {
    for (int w = 0, v = 0; is_there && w < WIDE; w++, v += LANES) {
      const vec weight = exponential(load(top + v) - tile.top[w]);
      store(top + v, weight);
      tile.sum[w] += load(sum + v) * weight;
    }
  }

  // Adds the values to the sums (TILE, wide).
  void mix(const Surroundings &around, const int64_t *row, float *sums, int rows) const {
    for (int i = 0; is_there && i < rows; i++) add(sums + i * wide, &around.mixed[row[i] * wide], top[i], wide);
  }

 private:
  const Near &p;
  const bool is_there;
  const int64_t wide;
  float top[TILE], sum[TILE];  // of the queries; then the weight of `mixed` in place of the largest score
};

}  // namespace fewkeys
