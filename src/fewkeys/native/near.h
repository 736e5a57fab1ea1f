// Attention to a shared list of keys, to the keys of a window (the band) and to stand-ins. `fewkeys.rest.base.StandIns`
// has the equations.
#pragma once
#include "tile.h"

namespace fewkeys {

constexpr float ROUNDING = 1e-5f;

// The keys in the windows of a tile's queries: begin .. begin + count - 1.
struct Reach {
  int64_t begin;
  int count;
};
static inline Reach reach_of(const Near &p, int64_t first, int rows) {
  const int64_t position = first + p.offset, begin = std::clamp<int64_t>(position - p.left, 0, p.keys);
  return {begin, int(std::clamp<int64_t>(position + rows + p.right, begin, p.keys) - begin)};
}
static inline int64_t most_reached(const Near &p) {
  return std::max<int64_t>(0, std::min<int64_t>(p.keys, TILE + p.left + p.right));
}

// Copies what all queries of a key head, or of a cohort, share, in rows padded with zeros: the list, the stand-ins, and
// the left and right factors of the first-order term. Unused entries of the list become zero.
template <class T>
static void gather_shared(const Near &p, int64_t b, int64_t h, float *key, int deep, float *value, int wide) {
  const int64_t head = b * (p.heads / p.gqa_ratio) + h;
  for (int64_t c = 0; c < p.entries; c++, key += deep, value += wide) {
    const int64_t place = p.place[head * p.entries + c];
    const bool used = p.used[head * p.entries + c];
    copy_rows(p.key.at<T>(b, h / p.cohorts, place), 0, 1, used ? p.dim : 0, deep, key);
    copy_rows(p.value.at<T>(b, h / p.cohorts, place), 0, 1, used ? p.value_dim : 0, wide, value);
  }
  copy_rows(p.mean_key + head * p.means * p.dim, p.dim, p.means, p.dim, deep, key);
  copy_rows(p.mean_value + head * p.means * p.value_dim, p.value_dim, p.means, p.value_dim, wide, value);
  key += p.means * deep, value += p.means * wide;
  for (int64_t r = 0; r < p.rank; r++, key += deep)
    for (int64_t d = 0; d < deep; d++)
      key[d] = d < p.dim ? p.left_factor[(head * p.dim + d) * p.rank + r] : 0.0f;
  copy_rows(p.right_factor + head * p.rank * p.value_dim, p.value_dim, p.rank, p.value_dim, wide, value);
}

// Turns products of queries and keys into weights, for one tile of queries at a time.
class NearWeights {
 public:
  aligned_vector<float> score, near;  // for the shared columns; for the band
  vec slope[WIDE];                    // the sum of weight * factor over the stand-ins

  explicit NearWeights(const Near &p)
      : score((p.entries + p.means + p.rank) * TILE), near(most_reached(p) * TILE), p(p),
        count((p.means + 1) * TILE) {}

  // All weights but those of the first-order term.
  void weigh(Tile &tile, int64_t head, int64_t first, const Reach &reach) {
    const int64_t position = first + p.offset;
    look_near(tile, head, position, reach.begin, reach.count);
    look_at_list(tile, head, position);
    look_at_means(tile, head);
    tile.settle();
    tile.weigh(near.data(), reach.count);
    tile.weigh(score.data(), p.entries);
    weigh_means(tile, head);
  }

  // The same for queries of a cohort. `look(mass)` subtracts the keys of the queries' windows from the stand-ins'
  // masses.
  template <class Look>
  void weigh_cohort(Tile &tile, int64_t head, Look look) {
    start_counts(p.total + head * p.means);
    look(count.data());
    look_at_list(tile, head, 0);
    look_at_means(tile, head);
    tile.settle();
    tile.weigh(score.data(), p.entries);
    weigh_means(tile, head);
  }

  // The weights of `rank` more columns: the coordinates of a query along the left factor, times the slope.
  void weigh_first_order(int64_t head) {
    count_multiply_adds(p.rank * TILE);
    for (int r = 0; r < p.rank; r++)
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        float *to = &score[(p.entries + p.means + r) * TILE + v];
        store(to, moved(head, r, load(to)) * slope[w]);
      }
  }

 private:
  const Near &p;
  aligned_vector<float> count;  // the mass of every stand-in for every query, and a spare row for `Neighbours`
  const ivec lane = count_up();

  void start_counts(const float *start) {
    for (int c = 0; c < p.means; c++)
      for (int v = 0; v < TILE; v += LANES) store(&count[c * TILE + v], broadcast(start[c]));
  }

  // Coordinate r of the first-order term: the distance of queries from the middle, clamped to the reach, from their
  // product with the left factor.
  vec moved(int64_t head, int r, vec product) const {
    const vec along = product * p.scale - broadcast(p.bounds[head * 2 * p.rank + r]);
    const vec reach = broadcast(p.bounds[(head * 2 + 1) * p.rank + r]);
    return -max(-max(along, -reach), -reach);
  }

  // Scores of the band. A query that sees a key takes the key's share from the mass of its stand-in.
  void look_near(Tile &tile, int64_t head, int64_t position, int64_t begin, int reached) {
    start_counts(p.total + head * p.means);
    for (int j = 0; j < reached; j++) {
      const int64_t at = begin + j, index = head * p.keys + at;
      const float share = p.means ? p.share[index] : 0.0f;
      const int low = std::max<int64_t>(at - p.right - position, 0);
      const int high = std::min<int64_t>(at + p.left - position, TILE);
      tile.show(&near[j * TILE], lane, p.hidden && p.hidden[index] ? TILE : low, high);
      if (share == 0.0f) continue;
      count_multiply_adds(TILE);
      float *left = &count[p.label[index] * TILE];
      for (int v = 0; v < TILE; v += LANES)
        store(left + v, load(left + v) - within(lane + v, low, high, broadcast(share), broadcast(0.0f)));
    }
  }

  void look_at_list(Tile &tile, int64_t head, int64_t position) {
    for (int c = 0; c < p.entries; c++) {
      const int64_t entry = head * p.entries + c;
      const int low = p.causal ? std::clamp<int64_t>(p.place[entry] - position, 0, TILE) : 0;
      tile.show(&score[c * TILE], lane, p.used[entry] ? low : TILE, TILE);
    }
  }

  void look_at_means(Tile &tile, int64_t head) {
    count_multiply_adds(p.means * TILE);
    for (int c = 0; c < p.means; c++) {
      const float bias = p.bias[head * p.means + c];
      // A stand-in whose keys are all kept must have no weight at all; rounding leaves a small mass.
      const vec least = broadcast(ROUNDING * p.total[head * p.means + c]);
      float *to = &score[(p.entries + c) * TILE];
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        const vec x = load(&count[c * TILE + v]) > least ? load(to + v) * p.scale + bias : broadcast(-INFINITY);
        store(to + v, x);
        tile.top[w] = max(tile.top[w], x);
      }
    }
  }

  void weigh_means(Tile &tile, int64_t head) {
    for (int w = 0; w < WIDE; w++) slope[w] = vec{};
    count_multiply_adds(p.means * TILE);
    for (int c = 0; c < p.means; c++) {
      const float factor = p.rank ? p.factor[head * p.means + c] : 0.0f;
      float *to = &score[(p.entries + c) * TILE];
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        const vec x = exponential(load(to + v) - tile.top[w]) * load(&count[c * TILE + v]);
        store(to + v, x);
        tile.sum[w] += x;
        slope[w] += x * factor;
      }
    }
  }
};

// Rows of keys and of values, read in place or copied.
class Columns {
 public:
  Columns(int dim, int value_dim) : dim(dim), value_dim(value_dim), wide(round_up(value_dim)) {}

  // Takes rows; they are read in place if they are floats without padding.
  template <class T>
  void read(const T *keys, int64_t key_pitch, const T *values, int64_t value_pitch, int64_t count) {
    if ((int64_t)copy.size() < count * (dim + wide)) copy.resize(count * (dim + wide));
    key_stride = key_pitch, value_stride = value_pitch;
    key = floats(keys, key_stride, count, dim, dim, copy.data());
    value = floats(values, value_stride, count, value_dim, wide, copy.data() + count * dim);
  }

  // Inner products (count, TILE) of the first `count` keys with queries in lanes.
  void dots(const float *query, int count, float *score) const {
    fewkeys::dots(key, key_stride, count, dim, query, score);
  }

  // Adds the weighted sum of the first `count` values to the sums (TILE, padded Dv) of `rows` queries; weights
  // (count, TILE). `reach(i, low, high)`: only low .. high - 1 have weights for the queries i .. i + SOME - 1.
  template <class Reach>
  void mix(const float *weight, int count, int rows, float *sums, Reach reach) const {
    for (int i = 0; i < rows; i += SOME) {
      int low = 0, high = count;
      reach(i, low, high);
      fewkeys::mix(value + low * value_stride, value_stride, high - low, wide, weight + low * TILE + i, TILE,
                  sums + i * wide, wide);
    }
  }
  void mix(const float *weight, int count, int rows, float *sums) const {
    mix(weight, count, rows, sums, [](int, int &, int &) {});
  }

 private:
  int dim, value_dim, wide;
  const float *key = nullptr, *value = nullptr;
  int64_t key_stride = 0, value_stride = 0;
  aligned_vector<float> copy;
};

template <class T>
class NearAttention {
 public:
  explicit NearAttention(const Near &p)
      : p(p), wide(round_up(p.value_dim)), query(p.dim * TILE), mixed(TILE * wide), band(p.dim, p.value_dim),
        weights(p) {}

  // Computes the outputs of a tile of consecutive queries.
  void attend(const Columns &shared, int64_t b, int64_t h, int64_t first) {
    const int rows = std::min<int64_t>(TILE, p.queries - first);
    const int64_t key_head = h / p.gqa_ratio, head = b * (p.heads / p.gqa_ratio) + key_head;
    const int columns = p.entries + p.means + p.rank;
    const Reach reach = reach_of(p, first, rows);
    to_lanes(p.query.at<T>(b, h, first), p.query.row, rows, p.dim, 1.0f, query.data());
    shared.dots(query.data(), columns, weights.score.data());
    band.read(p.key.at<T>(b, key_head, reach.begin), p.key.row, p.value.at<T>(b, key_head, reach.begin), p.value.row,
              reach.count);
    band.dots(query.data(), reach.count, weights.near.data());

    Tile tile(p.scale);
    weights.weigh(tile, head, first, reach);
    weights.weigh_first_order(head);

    std::fill(mixed.begin(), mixed.end(), 0.0f);
    shared.mix(weights.score.data(), columns, rows, mixed.data());
    band.mix(weights.near.data(), reach.count, rows, mixed.data(), [&](int i, int &low, int &high) {
      const int64_t from = first + p.offset + i - reach.begin;
      low = std::clamp<int64_t>(from - p.left, 0, reach.count);
      high = std::clamp<int64_t>(from + SOME + p.right, low, reach.count);
    });
    tile.write(mixed.data(), wide, (T *)p.out.at<T>(b, h, first), p.out.row, rows, p.value_dim);
  }

 private:
  const Near &p;
  const int wide;
  aligned_vector<float> query, mixed;
  Columns band;
  NearWeights weights;
};

// The shared columns of a key head or cohort (list, stand-ins, factors), and their memory.
template <class T>
class Shared {
 public:
  Columns columns;

  explicit Shared(const Near &p)
      : columns(p.dim, p.value_dim), p(p), count(p.entries + p.means + p.rank), wide(round_up(p.value_dim)) {}

  void read(int64_t b, int64_t h) {
    rows.resize(count * (p.dim + wide));
    float *value = rows.data() + count * p.dim;
    gather_shared<T>(p, b, h, rows.data(), p.dim, value, wide);
    columns.read(rows.data(), p.dim, value, wide, count);
  }

 private:
  const Near &p;
  const int64_t count, wide;
  aligned_vector<float> rows;
};

template <class T>
static void attend_near(const Near &p, int threads) {
  const int64_t shared_heads = p.heads / p.gqa_ratio, lists = p.batch * shared_heads;
  const int64_t tiles = (p.queries + TILE - 1) / TILE, work = tiles * p.batch * p.heads;
  std::vector<Shared<T>> shared(lists, Shared<T>(p));
  const auto read = [&](int, int64_t i) { shared[i].read(i / shared_heads, i % shared_heads); };
  in_parallel(threads, lists, [] { return 0; }, read, 16);
  const auto attend = [&](NearAttention<T> &attention, int64_t t) {
    const int64_t b = t / tiles / p.heads, h = t / tiles % p.heads;
    attention.attend(shared[b * shared_heads + h / p.gqa_ratio].columns, b, h, t % tiles * TILE);
  };
  in_parallel(threads, work, [&] { return NearAttention<T>(p); }, attend, 4);
}

}  // namespace fewkeys
