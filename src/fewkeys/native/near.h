// What cohorts of queries attend to (`near_cohorts.h`): a list of keys, a window around each query, and stand-ins.
// `fewkeys.rest.base.StandIns` has the equations.
#pragma once
#include "rows.h"
#include "tile.h"

namespace fewkeys {

constexpr float ROUNDING = 1e-5f;

// The keys in the windows of `rows` queries from a position on: begin .. begin + count - 1.
struct Window {
  int64_t begin;
  int count;
  Window(const Near &p, int64_t position, int rows) : begin(std::clamp<int64_t>(position - p.left, 0, p.keys)) {
    count = std::clamp<int64_t>(position + rows + p.right, begin, p.keys) - begin;
  }
  static int64_t most(const Near &p, int rows) { return std::clamp<int64_t>(p.left + p.right + rows, 0, p.keys); }
};

// hidden (keys) <- 1 for padding and for the keys of a list, which windows skip. It holds zeros before.
static void hide(const Near &p, int64_t key_head, int64_t list, uint8_t *hidden) {
  const uint8_t *real = real_keys(p.real, p.key, key_head, p.keys);
  for (int64_t j = 0; real && j < p.keys; j++) hidden[j] = !real[j];
  for (int64_t c = list * p.entries; c < (list + 1) * p.entries; c++)
    if (p.used[c]) hidden[p.place[c]] = 1;
}

// Turns scores into weights, for one tile of a cohort's queries at a time.
class NearWeights {
 public:
  Floats score;  // for the columns: the list, stand-ins and first-order terms
  Floats mass;   // of every stand-in for every query, and a spare row
  Floats part;   // the mass of each stand-in for one of its keys, and a zero

  explicit NearWeights(const Near &p)
      : score((p.entries + p.means + p.rank) * TILE), mass((p.means + 1) * TILE), part(p.means + 1), p(p) {}

  // Begins a tile, before what its queries keep is subtracted from the masses of stand-ins.
  void begin(int64_t cohort) {
    const float *total = p.total + cohort * p.means, *size = p.size + cohort * p.means;
    for (int c = 0; c < p.means; c++) {
      std::fill_n(&mass[c * TILE], TILE, total[c]);
      part[c] = total[c] / std::max(size[c], 1.0f);
    }
  }

  // The weights of all columns for queries at the given positions.
  void finish(Tile &tile, int64_t cohort, const int32_t *position) {
    look_at_list(tile, cohort, position);
    look_at_means(tile, cohort);
    tile.settle();
    tile.weigh(score.data(), p.entries);
    weigh_means(tile, cohort);
    weigh_first_order(cohort);
  }

 private:
  const Near &p;
  vec slope[WIDE];  // the sum of weight * factor over the stand-ins

  // Hides unused entries and, under causality, those behind a query.
  void look_at_list(Tile &tile, int64_t cohort, const int32_t *position) {
    count_multiply_adds(p.entries * TILE);
    for (int c = 0; c < p.entries; c++) {
      const int64_t entry = cohort * p.entries + c;
      const int32_t first = !p.used[entry] ? INT32_MAX : p.causal ? p.place[entry] : INT32_MIN;
      float *to = &score[c * TILE];
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        const vec x = *(const ivec *)(position + v) >= first ? load(to + v) : broadcast(-INFINITY);
        store(to + v, x);
        tile.top[w] = max(tile.top[w], x);
      }
    }
  }

  void look_at_means(Tile &tile, int64_t cohort) {
    count_multiply_adds(p.means * TILE);
    for (int c = 0; c < p.means; c++) {
      const float bias = p.bias ? p.bias[cohort * p.means + c] : 0.0f;
      // A stand-in whose keys are all kept must have no weight at all; rounding leaves a small mass.
      const vec least = broadcast(ROUNDING * p.total[cohort * p.means + c]);
      float *to = &score[(p.entries + c) * TILE];
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        const vec x = load(&mass[c * TILE + v]) > least ? load(to + v) + bias : broadcast(-INFINITY);
        store(to + v, x);
        tile.top[w] = max(tile.top[w], x);
      }
    }
  }

  void weigh_means(Tile &tile, int64_t cohort) {
    for (int w = 0; w < WIDE; w++) slope[w] = vec{};
    count_multiply_adds(p.means * TILE);
    for (int c = 0; c < p.means; c++) {
      const float factor = p.rank ? p.factor[cohort * p.means + c] : 0.0f;
      float *to = &score[(p.entries + c) * TILE];
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        const vec x = exponential(load(to + v) - tile.top[w]) * load(&mass[c * TILE + v]);
        store(to + v, x);
        tile.sum[w] += x;
        slope[w] += x * factor;
      }
    }
  }

  // The weights of `rank` more columns are the slope times the coordinates of a query along the left factor: the
  // distance of its product from the middle, clamped to the reach.
  void weigh_first_order(int64_t cohort) {
    count_multiply_adds(p.rank * TILE);
    for (int r = 0; r < p.rank; r++) {
      const vec middle = broadcast(p.bounds[cohort * 2 * p.rank + r]);
      const vec reach = broadcast(p.bounds[(cohort * 2 + 1) * p.rank + r]);
      float *to = &score[(p.entries + p.means + r) * TILE];
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        const vec along = load(to + v) - middle;
        store(to + v, -max(-max(along, -reach), -reach) * slope[w]);
      }
    }
  }
};

// The columns of a cohort as dense rows: the list, stand-ins, and factors of the first-order term.
template <class T>
struct Columns {
  const Near &p;
  const int count, wide;  // wide: padded Dv
  Floats key, value;

  explicit Columns(const Near &p)
      : p(p), count(p.entries + p.means + p.rank), wide(round_up(p.value_dim)), key(count * p.dim),
        value(count * wide) {}

  // Unused entries of the list become zero.
  void gather(int64_t cohort) {
    const int64_t dim = p.dim, value_dim = p.value_dim, head = cohort / p.cohorts;
    float *to_key = key.data(), *to_value = value.data();
    for (int64_t c = cohort * p.entries; c < (cohort + 1) * p.entries; c++) {  // they lie anywhere
      prefetch(p.key.at<T>(head, p.place[c]), dim * sizeof(T));
      prefetch(p.value.at<T>(head, p.place[c]), value_dim * sizeof(T));
    }
    for (int64_t c = cohort * p.entries; c < (cohort + 1) * p.entries; c++, to_key += dim, to_value += wide) {
      copy_rows(p.key.at<T>(head, p.place[c]), 0, 1, p.used[c] ? dim : 0, dim, to_key);
      copy_rows(p.value.at<T>(head, p.place[c]), 0, 1, p.used[c] ? value_dim : 0, wide, to_value);
    }
    std::copy_n(p.mean_key + cohort * p.means * dim, p.means * dim, to_key);
    copy_rows(p.mean_value + cohort * p.means * value_dim, value_dim, p.means, value_dim, wide, to_value);
    to_key += p.means * dim, to_value += p.means * wide;
    for (int64_t r = 0; r < p.rank; r++)
      for (int64_t d = 0; d < dim; d++) *to_key++ = p.left_factor[(cohort * dim + d) * p.rank + r];
    copy_rows(p.right_factor + cohort * p.rank * value_dim, value_dim, p.rank, value_dim, wide, to_value);
  }
};

}  // namespace fewkeys
