// Softmax over a shared list, a band of near keys and stand-ins: `fewkeys.rest.base.StandIns` has the equations.
#pragma once
#include "matrix.h"

namespace fewkeys {

constexpr float ROUNDING = 1e-5f;

// The keys that some queries of a tile reach.
struct Reach {
  int64_t begin;
  int count;

  // Those of them that so many queries from `position` on reach.
  template <int queries>
  void of_some(const Near &p, int64_t position, int &low, int &high) const {
    low = std::clamp<int64_t>(position - p.left - begin, 0, count);
    high = std::clamp<int64_t>(position + queries + p.right - begin, low, count);
  }
};
static inline Reach reach_of(const Near &p, int64_t first, int rows) {
  const int64_t position = first + p.offset, begin = std::clamp<int64_t>(position - p.left, 0, p.keys);
  return {begin, int(std::clamp<int64_t>(position + rows + p.right, begin, p.keys) - begin)};
}
static inline int64_t most_reached(const Near &p) {
  return std::max<int64_t>(0, std::min<int64_t>(p.keys, TILE + p.left + p.right));
}

// What all queries of a key head, or of a cohort, share, in rows filled up with zeros: the list, the stand-ins, the
// left and right factor of the first-order term. Entries of no key are zero.
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

// How products with keys become weights, a tile of queries after the other.
class NearWeights {
 public:
  aligned_vector<float> score, near;  // of what is shared; of the band
  vec slope[WIDE];             // what the factors of the stand-ins sum up to

  explicit NearWeights(const Near &p)
      : score(round_up(p.entries + p.means + p.rank, STEP) * TILE), near(round_up(most_reached(p), STEP) * TILE), p(p),
        count((p.means + 1) * TILE) {}

  // All but those of the first-order term.
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

  // The same for queries of a cohort: `look(mass)` takes the keys around them from what stand-ins speak for.
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

  // `rank` more columns: what the query is along the left factor, times the slope.
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
  aligned_vector<float> count;  // what every stand-in speaks for; one row more, which `Neighbours` writes
  const ivec lane = count_up();

  void start_counts(const float *start) {
    for (int c = 0; c < p.means; c++)
      for (int v = 0; v < TILE; v += LANES) store(&count[c * TILE + v], broadcast(start[c]));
  }

  // How far queries are from the middle along coordinate r of the first-order term, within reach, from the product
  // with the left factor.
  vec moved(int64_t head, int r, vec product) const {
    const vec along = product * p.scale - broadcast(p.bounds[head * 2 * p.rank + r]);
    const vec reach = broadcast(p.bounds[(head * 2 + 1) * p.rank + r]);
    return -max(-max(along, -reach), -reach);
  }

  // Queries within reach see a key, and no stand-in speaks for it to them.
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
      // A stand-in all of whose keys are kept must vanish exactly, not up to rounding.
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

template <class Products>
class NearAttention {
 public:
  typedef typename Products::Columns Columns;
  typedef typename Products::Number Number;

  explicit NearAttention(const Near &p)
      : p(p), query(p.dim), mixed(p.value_dim), band(p.dim, p.value_dim), weights(p) {}

  // Queries that follow one another, and the band around them.
  void attend(const Columns &shared, int64_t b, int64_t h, int64_t first) {
    const int rows = std::min<int64_t>(TILE, p.queries - first);
    const int64_t shared_head = h / p.gqa_ratio, head = b * (p.heads / p.gqa_ratio) + shared_head;
    const int columns = p.entries + p.means + p.rank;
    const Reach reach = reach_of(p, first, rows);
    float *score = weights.score.data(), *near = weights.near.data();
    query.set(p.query.at<Number>(b, h, first), p.query.row, rows);
    shared.dots(query, columns, score);
    band.read(p.key.at<Number>(b, shared_head, reach.begin), p.key.row, p.value.at<Number>(b, shared_head, reach.begin),
              p.value.row, reach.count);
    band.dots(query, reach.count, near);

    Tile tile(p.scale);
    weights.weigh(tile, head, first, reach);
    weights.weigh_first_order(head);

    mixed.clear();
    shared.mix(score, columns, rows, Everywhere(), mixed);
    const auto reached = [&](int i, int &low, int &high) { reach.of_some<SOME>(p, first + p.offset + i, low, high); };
    band.mix(near, reach.count, rows, reached, mixed);
    tile.write(mixed.rows(), round_up(p.value_dim), (Number *)p.out.at<Number>(b, h, first), p.out.row, rows,
               p.value_dim);
  }

 private:
  const Near &p;
  const typename Products::Session session = {};
  typename Products::Queries query;
  typename Products::Mixed mixed;
  Columns band;
  NearWeights weights;
};

// What a list and its stand-ins hold, side by side, and the rows that they are read from.
template <class Products>
class Shared {
 public:
  typename Products::Columns columns;

  explicit Shared(const Near &p)
      : columns(p.dim, p.value_dim), p(p), count(p.entries + p.means + p.rank), wide(round_up(p.value_dim)) {}

  void read(int64_t b, int64_t h) {
    rows.resize(count * (p.dim + wide));
    float *value = rows.data() + count * p.dim;
    gather_shared<typename Products::Number>(p, b, h, rows.data(), p.dim, value, wide);
    columns.read(rows.data(), p.dim, value, wide, count);
  }

 private:
  const Near &p;
  const int64_t count, wide;
  aligned_vector<float> rows;
};

template <class Products>
static void attend_near(const Near &p, int threads) {
  const int64_t shared_heads = p.heads / p.gqa_ratio, lists = p.batch * shared_heads;
  const int64_t tiles = (p.queries + TILE - 1) / TILE, work = tiles * p.batch * p.heads;
  std::vector<Shared<Products>> shared(lists, Shared<Products>(p));
  const auto read = [&](int, int64_t i) { shared[i].read(i / shared_heads, i % shared_heads); };
  in_parallel(threads, lists, [] { return 0; }, read, 16);
  typedef NearAttention<Products> Attention;
  const auto attend = [&](Attention &attention, int64_t t) {
    const int64_t b = t / tiles / p.heads, h = t / tiles % p.heads;
    attention.attend(shared[b * shared_heads + h / p.gqa_ratio].columns, b, h, t % tiles * TILE);
  };
  in_parallel(threads, work, [&] { return Attention(p); }, attend, 4);
}

}  // namespace fewkeys
