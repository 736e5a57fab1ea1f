// Cohorts of queries and the keys that each keeps: `fewkeys.sketch.cohorts`, `fewkeys.sketch.tilted.best`. Cohorts stand
// in the lanes, keys are rows.
#pragma once
#include "keys.h"
#include "rows.h"
#include "seeker.h"

namespace fewkeys {

constexpr int CHUNK = 32;  // keys that are looked at together

// Splits one set of rows after another and describes the parts, as `fewkeys.sketch.cohorts` says. Directions are sums of
// rows; products with them are taken in the metric.
class Halver {
 public:
  explicit Halver(const Halves &p)
      : p(p), dim(p.dim), wide(round_up(dim)), size((p.rows_each + p.count - 1) / p.count * p.count),
        most(round_up(2 * p.sample, FOUR)), order(size), others(size), key(std::max(size, most)), seeker(size), some(most * wide), by(most), along(wide), turned(wide), middle(wide), square(wide * wide) {}

  void split(int64_t set) {
    rows = p.rows + set * p.rows_each * dim, metric = p.metric + set * dim * dim;
    for (int64_t i = 0; i < size; i++) order[i] = i < p.rows_each ? i : -1;
    for (int64_t span = size; span > size / p.count; span /= 2)
      for (int64_t begin = 0; begin < size; begin += span) cut(&order[begin], span);
    std::copy(order.begin(), order.end(), p.place + set * size);
    describe(set);
  }

 private:
  static constexpr int64_t AHEAD = 8;
  const Halves &p;
  const int64_t dim, wide, size, most;  // most: rows that directions are found by
  const float *rows = nullptr, *metric = nullptr;
  std::vector<int32_t> order, others;
  std::vector<uint64_t> key;
  Seeker seeker;
  aligned_vector<float> some, by, along, turned, middle, square;

  // The smaller half of the real ones to the front; fillings stand at the end all along.
  void cut(int32_t *own, int64_t span) {
    int64_t real = span;
    while (real && own[real - 1] < 0) real--;
    if (real <= span / 2) return;
    look(own, span, real);
    const uint64_t first = measure(own, real, span / 2);
    // Rows of a half stay in their old order.
    int64_t low = 0, high = 0;
    for (int64_t i = 0; i < real; i++) {
      const bool below = key[i] < first;
      others[high] = own[low] = own[i];
      low += below, high += !below;
    }
    std::copy_n(others.begin(), high, own + low);
  }

  // Writes the keys of all rows, and returns the one of which `rank` are smaller.
  uint64_t measure(const int32_t *own, int64_t real, int64_t rank) {
    for (int64_t i = 0; i < real; i += FOUR) {
      const float *row[FOUR];
      float found[FOUR];
      for (int r = 0; r < FOUR; r++) {
        row[r] = rows + own[std::min(i + r, real - 1)] * dim;
        prefetch(rows + own[std::min(i + r + AHEAD, real - 1)] * dim, dim * sizeof(float));
      }
      four_dots(row, turned.data(), dim, found);
      for (int r = 0; r < FOUR && i + r < real; r++) key[i + r] = sortable(found[r], i + r);
    }
    return seeker.seek(key.data(), real, rank, product(middle.data(), turned.data(), dim));
  }

  // What is multiplied with rows for their products with `along`.
  void turn() {
    std::fill(turned.begin(), turned.end(), 0.0f);
    for (int64_t d = 0; d < dim; d++) add(turned.data(), metric + d * dim, along[d], dim);
  }

  // The direction along which to cut. Rows that fill up to FOUR are zero.
  void look(const int32_t *own, int64_t span, int64_t real) {
    const int64_t step = std::max<int64_t>(1, span / p.sample), count = (real + step - 1) / step;
    const int64_t full = round_up(count, FOUR);
    std::fill(middle.begin(), middle.end(), 0.0f);
    for (int64_t i = 0; i < count; i++) add(middle.data(), rows + own[i * step] * dim, 1.0f, dim);
    for (float &x : middle) x /= count;
    float longest = -1.0f;
    for (int64_t i = 0; i < full; i++) {
      float *row = &some[i * wide];
      std::fill_n(row, wide, 0.0f);
      if (i >= count) continue;
      std::copy_n(rows + own[i * step] * dim, dim, row);
      add(row, middle.data(), -1.0f, wide);
      const float square = product(row, row, wide);
      if (square > longest) longest = square, copy(along.data(), row, wide);
    }
    turn();
    for (int i = 0; i < p.power; i++) {
      for (int64_t j = 0; j < full; j += FOUR) four_products(&some[j * wide], wide, turned.data(), wide, &by[j]);
      sum(full);
      turn();
      const float square = product(along.data(), turned.data(), wide), least = std::numeric_limits<float>::min();
      const float length = std::max(least, std::sqrt(std::max(0.0f, square)));
      for (float &x : turned) x /= length;
    }
    const int64_t half = std::min((span + step - 1) / step / 2, count);
    for (int i = 0; i < p.refine; i++) {
      for (int64_t j = 0; j < full; j += FOUR) four_products(&some[j * wide], wide, turned.data(), wide, &by[j]);
      for (int64_t j = 0; j < count; j++) key[j] = sortable(by[j], j);
      if (half < count) std::nth_element(key.begin(), key.begin() + half, key.begin() + count);
      std::fill_n(by.begin(), full, 0.0f);
      for (int64_t j = 0; j < half; j++) by[(uint32_t)key[j]] = -1.0f;
      sum(full);
      turn();
    }
  }

  // along <- the sum of the rows, each times its number.
  void sum(int64_t count) {
    count_multiply_adds(count * wide);
    for (int64_t d = 0; d < wide; d += LANES) {
      vec all = {};
      for (int64_t j = 0; j < count; j += FOUR) {
#pragma GCC unroll 4
        for (int r = 0; r < FOUR; r++) all += load(&some[(j + r) * wide + d]) * by[j + r];
      }
      store(&along[d], all);
    }
  }

  // The means of the sets, and the covariance around them, of every `step`-th row of each.
  void describe(int64_t set) {
    const int64_t each = size / p.count;
    int64_t all = 0;
    std::fill(square.begin(), square.end(), 0.0f);
    for (int64_t c = 0; c < p.count; c++) {
      const int32_t *own = &order[c * each];
      float *mean = p.mean + (set * p.count + c) * dim;
      std::fill_n(mean, dim, 0.0f);
      int64_t real = 0;
      for (int64_t i = 0; i < each && own[i] >= 0; i += p.step, real++) add(mean, rows + own[i] * dim, 1.0f, dim);
      for (int64_t d = 0; d < dim; d++) mean[d] /= std::max<int64_t>(1, real);
      all += real;
      for (int64_t begin = 0; begin < real; begin += p.sample) {
        const int count = std::min(p.sample, real - begin);
        for (int j = 0; j < count; j++) {
          float *row = &some[j * wide];
          std::fill_n(std::copy_n(rows + own[(begin + j) * p.step] * dim, dim, row), wide - dim, 0.0f);
          add(row, mean, -1.0f, dim);
        }
        for (int64_t d = 0; d < wide; d += SOME)
          mix(some.data(), wide, count, wide, &some[d], wide, &square[d * wide], wide);
      }
    }
    const float rows_seen = std::max<int64_t>(1, all);
    for (int64_t d = 0; d < dim; d++)
      for (int64_t e = 0; e < dim; e++) p.within[(set * dim + d) * dim + e] = square[d * wide + e] / rows_seen;
  }
};

static void halve(const Halves &p, int threads) {
  const auto split = [](Halver &halver, int64_t set) { halver.split(set); };
  in_parallel(threads, p.sets, [&] { return Halver(p); }, split);
}

template <class T>
static void half_variance(const HalfVariance &p, int threads) {
  const int64_t heads = p.batch * p.heads, dim = p.dim, size = (dim + 1) * dim;
  aligned_vector<float> roots(heads * size);  // L^T and what it makes of the mean key
  struct Keys {
    aligned_vector<float> lanes, seen;
    float spread[TILE];
    explicit Keys(int64_t dim) : lanes(dim * TILE), seen(dim * TILE) {}
  };
  const auto factorise = [&](Keys &, int64_t head, int64_t) {
    float *root = &roots[head * size], *shift = root + dim * dim;
    if (!factorise_raised(p.within + head * dim * dim, dim, p.ridge, root))
      __atomic_store_n(p.indefinite, 1, __ATOMIC_RELAXED);
    for (int64_t r = 0; r < dim; r++) shift[r] = product(root + r * dim, p.middle + head * dim, dim);
  };
  const auto look = [&](Keys &tile, int64_t head, int64_t piece) {
    const int64_t first = piece * TILE, rows = std::min<int64_t>(TILE, p.keys - first);
    const float *root = &roots[head * size];
    to_lanes(p.key.at<T>(head / p.heads, head % p.heads, first), p.key.row, rows, dim, 1.0f, tile.lanes.data());
    see_spread(root, root + dim * dim, dim, tile.lanes.data(), tile.seen.data(), tile.spread);
    for (int64_t j = 0; j < rows; j++) p.half[head * p.keys + first + j] = 0.5f * tile.spread[j];
  };
  in_phases(threads, heads, p.keys <= PIECE, [&] { return Keys(dim); }, Phase{1, factorise},
            Phase{(p.keys + TILE - 1) / TILE, look});
}

// The means of a tile of cohorts, in lanes.
struct CohortLanes {
  aligned_vector<float> means;
  int count = 0, used = 0;  // cohorts, and lanes that are computed

  explicit CohortLanes(int dim) : means(dim * TILE) {}
  void read(const float *mean, int64_t cohorts, int64_t tile, int dim) {
    count = std::min<int64_t>(TILE, cohorts - tile * TILE), used = round_up(count, LANES);
    to_lanes(mean + tile * TILE * dim, dim, count, dim, 1.0f, means.data());
  }
};

template <class T>
class Choosing {
 public:
  explicit Choosing(const Best &p)
      : p(p), dim(p.dim), cohorts(dim), copy(CHUNK * round_up(dim)),
        score(round_up(std::min(p.keys, SOME_KEYS), CHUNK) * TILE), held(TILE) {}

  void choose(int64_t head, int64_t tile) {
    cohorts.read(p.mean + head * p.cohorts * dim, p.cohorts, tile, dim);
    std::fill_n(least, TILE, -INFINITY);
    for (auto &own : held) own.clear();
    const int64_t some = std::min(p.keys, SOME_KEYS);
    for (int64_t first = 0; first < some; first += CHUNK) look(head, first, &score[first * TILE]);
    raise(some);
    for (int64_t first = 0; first < some; first += CHUNK) take(&score[first * TILE], first);
    for (int64_t first = some; first < p.keys; first += CHUNK) {
      look(head, first, score.data());
      take(score.data(), first);
    }
    for (int i = 0; i < cohorts.count; i++) {
      shrink(i);
      for (uint64_t &one : held[i]) one = (uint32_t)one;
      std::sort(held[i].begin(), held[i].end());
      const int64_t to = ((head * p.cohorts) + tile * TILE + i) * p.count;
      for (int64_t s = 0; s < p.count; s++) {
        p.used[to + s] = s < (int64_t)held[i].size();
        p.index[to + s] = p.used[to + s] ? held[i][s] : 0;
      }
    }
  }

 private:
  const Best &p;
  const int dim;
  CohortLanes cohorts;
  aligned_vector<float> copy, score;
  static constexpr int64_t SOME_KEYS = 1024;  // the first ones
  static constexpr int HALVINGS = 10;
  std::vector<std::vector<uint64_t>> held;  // the best of every cohort so far, and some more
  float least[TILE];                        // what a score must pass

  // The scores of CHUNK keys.
  void look(int64_t head, int64_t first, float *to) {
    const int64_t b = head / p.heads, h = head % p.heads, rows = std::min<int64_t>(CHUNK, p.keys - first);
    int64_t stride = p.key.row;
    const float *key = floats(p.key.at<T>(b, h, first), stride, rows, dim, round_up(dim), copy.data());
    dots(key, stride, rows, dim, cohorts.means.data(), to, cohorts.used);
    count_multiply_adds(rows * cohorts.used);
    for (int v = 0; v < cohorts.used; v += LANES)
      for (int j = 0; j < rows; j++)
        store(to + j * TILE + v, load(to + j * TILE + v) + p.offset[head * p.keys + first + j]);
  }

  // Halves the range of the first scores until few more than `count` of them pass `least`: most others are never held.
  void raise(int64_t rows) {
    if (rows <= p.count) return;
    for (int v = 0; v < cohorts.used; v += LANES) {
      vec low = broadcast(INFINITY), high = broadcast(-INFINITY), passed = broadcast(-INFINITY);
      for (int64_t j = 0; j < rows; j++) {
        const vec x = load(&score[j * TILE + v]);
        high = max(high, x), low = -max(-low, x > broadcast(-INFINITY) ? -x : broadcast(-INFINITY));
      }
      count_multiply_adds(HALVINGS * rows * LANES);
      for (int step = 0; step < HALVINGS; step++) {
        const vec middle = low * 0.5f + high * 0.5f;
        ivec above = {};
        for (int64_t j = 0; j < rows; j++) above -= load(&score[j * TILE + v]) > middle;
        const ivec enough = above >= int32_t(p.count);
        passed = enough ? middle : passed, low = enough ? middle : low, high = enough ? high : middle;
      }
      store(least + v, passed);
    }
  }

  // Holds what passes `least`.
  void take(const float *own, int64_t first) {
    const int64_t rows = std::min<int64_t>(CHUNK, p.keys - first);
    float best[TILE];
    for (int v = 0; v < cohorts.used; v += LANES) {
      vec top = broadcast(-INFINITY);
      for (int j = 0; j < rows; j++) top = max(top, load(own + j * TILE + v));
      store(best + v, top);
    }
    for (int i = 0; i < cohorts.count; i++)
      for (int j = 0; best[i] > least[i] && j < rows; j++) {
        const float x = own[j * TILE + i];
        if (!(x > least[i])) continue;
        held[i].push_back(sortable(x, first + j));
        if ((int64_t)held[i].size() >= 2 * p.count) shrink(i);
      }
  }

  void shrink(int i) {
    auto &own = held[i];
    if ((int64_t)own.size() <= p.count) return;
    std::nth_element(own.begin(), own.begin() + (p.count - 1), own.end(), std::greater<uint64_t>());
    own.resize(p.count);
    least[i] = number_of(own.back() >> 32);
  }
};

template <class T>
static void best(const Best &p, int threads) {
  const int64_t tiles = (p.cohorts + TILE - 1) / TILE;
  const auto choose = [&](Choosing<T> &choosing, int64_t i) { choosing.choose(i / tiles, i % tiles); };
  in_parallel(threads, p.batch * p.heads * tiles, [&] { return Choosing<T>(p); }, choose);
}

}  // namespace fewkeys
