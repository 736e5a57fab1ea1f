// Attention to a shared list of keys, to the keys of a window (the band) and to stand-ins. `fewkeys.rest.base.StandIns`
// has the equations. Heads are numbered through all sequences.
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

// Turns scores into weights, for one tile of queries at a time.
class NearWeights {
 public:
  Floats score, near;  // for the shared columns; for the band
  Floats mass;         // of every stand-in for every query, and a spare row
  Floats part;         // the mass of each stand-in for one of its keys, and a zero

  explicit NearWeights(const Near &p)
      : score((p.entries + p.means + p.rank) * TILE), near(Window::most(p, TILE) * TILE), mass((p.means + 1) * TILE),
        part(p.means + 1), p(p) {}

  // Begins a tile, before what its queries keep is subtracted from the masses of stand-ins.
  void begin(int64_t head) {
    const float *total = p.total + head * p.means, *size = p.size + head * p.means;
    for (int c = 0; c < p.means; c++) {
      std::fill_n(&mass[c * TILE], TILE, total[c]);
      part[c] = total[c] / std::max(size[c], 1.0f);
    }
  }

  // Scores of the band. A query that sees a key takes its part from the mass of its stand-in.
  void look_near(Tile &tile, int64_t head, int64_t position, const Window &window, const uint8_t *hidden) {
    for (int j = 0; j < window.count; j++) {
      const int64_t at = window.begin + j;
      const int low = std::max<int64_t>(at - p.right - position, 0);
      const int high = std::min<int64_t>(at + p.left - position, TILE);
      tile.show(&near[j * TILE], lane, hidden[at] ? TILE : low, high);
      if (hidden[at] || !p.means) continue;
      count_multiply_adds(TILE);
      const int64_t c = p.label[head * p.keys + at];
      float *left = &mass[c * TILE];
      for (int v = 0; v < TILE; v += LANES)
        store(left + v, load(left + v) - within(lane + v, low, high, broadcast(part[c]), broadcast(0.0f)));
    }
  }

  // The weights of the band, which has `reached` keys, and of all shared columns.
  void finish(Tile &tile, int64_t head, int64_t position, int reached) {
    look_at_list(tile, head, position);
    look_at_means(tile, head);
    tile.settle();
    tile.weigh(near.data(), reached);
    tile.weigh(score.data(), p.entries);
    weigh_means(tile, head);
    weigh_first_order(head);
  }

 private:
  const Near &p;
  vec slope[WIDE];  // the sum of weight * factor over the stand-ins
  const ivec lane = count_up();

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
      const float bias = p.bias ? p.bias[head * p.means + c] : 0.0f;
      // A stand-in whose keys are all kept must have no weight at all; rounding leaves a small mass.
      const vec least = broadcast(ROUNDING * p.total[head * p.means + c]);
      float *to = &score[(p.entries + c) * TILE];
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        const vec x = load(&mass[c * TILE + v]) > least ? load(to + v) + bias : broadcast(-INFINITY);
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
        const vec x = exponential(load(to + v) - tile.top[w]) * load(&mass[c * TILE + v]);
        store(to + v, x);
        tile.sum[w] += x;
        slope[w] += x * factor;
      }
    }
  }

  // The weights of `rank` more columns are the slope times the coordinates of a query along the left factor: the
  // distance of its product from the middle, clamped to the reach.
  void weigh_first_order(int64_t head) {
    count_multiply_adds(p.rank * TILE);
    for (int r = 0; r < p.rank; r++) {
      const vec middle = broadcast(p.bounds[head * 2 * p.rank + r]);
      const vec reach = broadcast(p.bounds[(head * 2 + 1) * p.rank + r]);
      float *to = &score[(p.entries + p.means + r) * TILE];
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        const vec along = load(to + v) - middle;
        store(to + v, -max(-max(along, -reach), -reach) * slope[w]);
      }
    }
  }
};

// Keys and values in rows, which are read in place or copied.
template <class T>
class Columns {
 public:
  explicit Columns(const Near &p) : p(p), wide(round_up(p.value_dim)) {}

  // Takes keys of a head. They are read in place if they are floats, and values if they need no padding, too.
  void read(int64_t head, int64_t first, int64_t count) {
    resize(count);
    key_stride = p.key.row, value_stride = p.value.row;
    key = as_floats(p.key.at<T>(head, first), key_stride, count, p.dim, p.dim, copy.data());
    value = as_floats(p.value.at<T>(head, first), value_stride, count, p.value_dim, wide, copy.data() + count * p.dim);
  }

  // Takes what all queries of a key head, or of a cohort, share: the list, whose unused entries become zero, the
  // stand-ins, and the factors of the first-order term.
  void gather(int64_t head) {
    const int64_t dim = p.dim, value_dim = p.value_dim, count = p.entries + p.means + p.rank;
    resize(count);
    key_stride = dim, value_stride = wide;
    float *to_key = copy.data(), *to_value = to_key + count * dim;
    key = to_key, value = to_value;
    for (int64_t c = head * p.entries; c < (head + 1) * p.entries; c++) {  // they lie anywhere
      prefetch(p.key.at<T>(head / p.cohorts, p.place[c]), dim * sizeof(T));
      prefetch(p.value.at<T>(head / p.cohorts, p.place[c]), value_dim * sizeof(T));
    }
    for (int64_t c = 0; c < p.entries; c++, to_key += dim, to_value += wide) {
      const int64_t place = p.place[head * p.entries + c];
      const bool used = p.used[head * p.entries + c];
      copy_rows(p.key.at<T>(head / p.cohorts, place), 0, 1, used ? dim : 0, dim, to_key);
      copy_rows(p.value.at<T>(head / p.cohorts, place), 0, 1, used ? value_dim : 0, wide, to_value);
    }
    std::copy_n(p.mean_key + head * p.means * dim, p.means * dim, to_key);
    copy_rows(p.mean_value + head * p.means * value_dim, value_dim, p.means, value_dim, wide, to_value);
    to_key += p.means * dim, to_value += p.means * wide;
    for (int64_t r = 0; r < p.rank; r++)
      for (int64_t d = 0; d < dim; d++) *to_key++ = p.left_factor[(head * dim + d) * p.rank + r];
    copy_rows(p.right_factor + head * p.rank * value_dim, value_dim, p.rank, value_dim, wide, to_value);
  }

  // Inner products (count, TILE) of the first `count` keys with queries in lanes.
  void dots(const float *query, int count, float *score) const {
    fewkeys::dots(key, key_stride, count, p.dim, query, score);
  }

  // Adds the weighted sum of the values low .. high - 1 to the sums (SOME, padded Dv) of SOME queries; weights
  // (count, TILE).
  void mix(const float *weight, int low, int high, float *sums) const {
    fewkeys::mix(value + low * value_stride, value_stride, high - low, wide, weight + low * TILE, TILE, sums, wide);
  }

 private:
  const Near &p;
  const int64_t wide;
  const float *key = nullptr, *value = nullptr;
  int64_t key_stride = 0, value_stride = 0;
  Floats copy;

  void resize(int64_t count) {
    if ((int64_t)copy.size() < count * (p.dim + wide)) copy.resize(count * (p.dim + wide));
  }
};

template <class T>
class NearAttention {
 public:
  explicit NearAttention(const Near &p)
      : p(p), wide(round_up(p.value_dim)), query(p.dim * TILE), mixed(TILE * wide), band(p), weights(p) {}

  // Computes the outputs of a tile of consecutive queries of a query head.
  void attend(const Columns<T> &shared, const uint8_t *hidden, int64_t head, int64_t first) {
    const int rows = std::min<int64_t>(TILE, p.queries - first), columns = p.entries + p.means + p.rank;
    const int64_t key_head = head / p.gqa_ratio, position = first + p.offset;
    const Window window(p, position, rows);
    to_lanes(p.query.at<T>(head, first), p.query.row, rows, p.dim, p.scale, query.data());
    shared.dots(query.data(), columns, weights.score.data());
    band.read(key_head, window.begin, window.count);
    band.dots(query.data(), window.count, weights.near.data());

    Tile tile;
    weights.begin(key_head);
    weights.look_near(tile, key_head, position, window, hidden);
    weights.finish(tile, key_head, position, window.count);

    std::fill(mixed.begin(), mixed.end(), 0.0f);
    for (int i = 0; i < rows; i += SOME) shared.mix(&weights.score[i], 0, columns, &mixed[i * wide]);
    for (int i = 0; i < rows; i += SOME) {
      const int low = std::clamp<int64_t>(position + i - window.begin - p.left, 0, window.count);
      const int high = std::clamp<int64_t>(position + i - window.begin + SOME + p.right, low, window.count);
      band.mix(&weights.near[i], low, high, &mixed[i * wide]);
    }
    T *out = (T *)p.out.at<T>(head, first);
    tile.write(mixed.data(), wide, rows, p.value_dim, [&](int i) { return out + i * p.out.row; });
  }

 private:
  const Near &p;
  const int64_t wide;
  Floats query, mixed;
  Columns<T> band;
  NearWeights weights;
};

template <class T>
static void attend_near(const Near &p, int threads) {
  const int64_t lists = p.heads / p.gqa_ratio;
  const int64_t tiles = divide_up(p.queries, TILE);
  std::vector<Columns<T>> shared(lists, Columns<T>(p));
  std::vector<uint8_t> hidden(lists * p.keys);
  const auto gather = [&](int, int64_t head) {
    shared[head].gather(head);
    hide(p, head, head, &hidden[head * p.keys]);
  };
  in_parallel(threads, lists, [] { return 0; }, gather, 16);
  const auto attend = [&](NearAttention<T> &attention, int64_t t) {
    const int64_t list = t / tiles / p.gqa_ratio;
    attention.attend(shared[list], &hidden[list * p.keys], t / tiles, t % tiles * TILE);
  };
  in_parallel(threads, tiles * p.heads, [&] { return NearAttention<T>(p); }, attend, 4);
}

}  // namespace fewkeys
