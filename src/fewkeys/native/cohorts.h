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
        most(round_up(2 * p.sample)), order(size), others(size), key(size), seeker(size), some(most * wide), by(most),
        half(most), along(wide), turned(wide), middle(wide), metric(wide * wide), square(wide * wide) {}

  void split(int64_t set) {
    rows = p.rows + set * p.rows_each * dim;
    for (int64_t d = 0; d < dim; d++) std::copy_n(p.metric + (set * dim + d) * dim, dim, &metric[d * wide]);
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
  const float *rows = nullptr;
  std::vector<int32_t> order, others;
  std::vector<uint64_t> key;
  Seeker seeker;
  // The sampled rows, their products or weights, and those of a half; matrices are padded on both sides.
  aligned_vector<float> some, by, half, along, turned, middle, metric, square;

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
  void turn() { sum_rows(metric.data(), wide, along.data(), wide, turned.data()); }

  // The direction along which to cut. Rows that fill up to FOUR are zero.
  void look(const int32_t *own, int64_t span, int64_t real) {
    const int64_t step = std::max<int64_t>(1, span / p.sample), count = (real + step - 1) / step;
    const int64_t full = round_up(count, FOUR);
    for (int64_t i = 0; i < full; i++) {
      const bool is_row = i < count;
      copy_rows(rows + own[is_row ? i * step : 0] * dim, 0, 1, is_row ? dim : 0, wide, &some[i * wide]);
      by[i] = is_row;
    }
    sum_rows(some.data(), full, by.data(), wide, middle.data());
    for (float &x : middle) x /= count;
    centre(full);
    turn();
    for (int i = 0; i < p.power; i++) {
      products_with(some.data(), full, turned.data(), wide, by.data());
      sum_rows(some.data(), full, by.data(), wide, along.data());
      turn();
      const float square = product(along.data(), turned.data(), wide), least = std::numeric_limits<float>::min();
      const float length = std::max(least, std::sqrt(std::max(0.0f, square)));
      for (float &x : turned) x /= length;
    }
    const int64_t left = std::min((span + step - 1) / step / 2, count);
    for (int i = 0; i < p.refine; i++) {
      products_with(some.data(), full, turned.data(), wide, by.data());
      mark(count, left);
      sum_rows(some.data(), full, half.data(), wide, along.data());
      turn();
    }
  }

  // Takes the middle from the rows that `by` counts; along <- the longest of what is left.
  void centre(int64_t full) {
    count_multiply_adds(2 * full * wide);
    float longest = -1.0f, found[FOUR];
    int64_t place = 0;
    for (int64_t i = 0; i < full; i += FOUR) {
      vec square[FOUR] = {};
      for (int64_t d = 0; d < wide; d += LANES)
        for (int r = 0; r < FOUR; r++) {
          float *to = &some[(i + r) * wide + d];
          const vec x = load(to) - load(&middle[d]) * by[i + r];
          store(to, x);
          square[r] += x * x;
        }
      sums_of_four(square, found);
      for (int r = 0; r < FOUR; r++)
        if (found[r] > longest) longest = found[r], place = i + r;
    }
    copy(along.data(), &some[place * wide], wide);
  }

  // half <- -1 for the `left` smallest of `count` products, of equal ones the first, and 0 for the others.
  void mark(int64_t count, int64_t left) {
    for (int64_t j = 0; j < count; j++) by[j] = by[j] == by[j] ? by[j] : 0.0f;
    for (int64_t v = 0; v < count; v += LANES) {
      const vec own = load(&by[v]);
      const ivec place = count_up() + int32_t(v);
      ivec rank = {};
      for (int64_t j = 0; j < count; j++) {
        const vec other = broadcast(by[j]);
        rank -= (other < own) | ((other == own) & (place > int32_t(j)));
      }
      store(&half[v], rank < int32_t(left) ? broadcast(-1.0f) : vec{});
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
        score(round_up(std::min(p.keys, SOME_KEYS), CHUNK) * TILE), held(TILE * 2 * p.count) {}

  void choose(int64_t head, int64_t tile) {
    cohorts.read(p.mean + head * p.cohorts * dim, p.cohorts, tile, dim);
    std::fill_n(least, TILE, -INFINITY), std::fill_n(many, TILE, 0);
    const int64_t some = std::min(p.keys, SOME_KEYS);
    for (int64_t first = 0; first < some; first += CHUNK) look(head, first, &score[first * TILE]);
    raise(some);
    std::fill(least + cohorts.count, least + TILE, INFINITY);
    for (int64_t first = 0; first < some; first += CHUNK) take(&score[first * TILE], first);
    for (int64_t first = some; first < p.keys; first += CHUNK) {
      look(head, first, score.data());
      take(score.data(), first);
    }
    for (int i = 0; i < cohorts.count; i++) {
      shrink(i);
      const uint64_t *own = &held[i * 2 * p.count];
      const int64_t to = ((head * p.cohorts) + tile * TILE + i) * p.count;
      for (int64_t s = 0; s < p.count; s++) {
        p.used[to + s] = s < many[i];
        p.index[to + s] = p.used[to + s] ? (uint32_t)own[s] : 0;
      }
      std::sort(p.index + to, p.index + to + many[i]);
    }
  }

 private:
  const Best &p;
  const int dim;
  CohortLanes cohorts;
  aligned_vector<float> copy, score;
  static constexpr int64_t SOME_KEYS = 1024;  // the first ones
  static constexpr int HALVINGS = 10;
  aligned_vector<uint64_t> held;  // of every cohort, the best keys so far, and as many more
  int64_t many[TILE];             // how many these are
  float least[TILE];              // what a score must pass; lanes of no cohort hold nothing

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
    for (int64_t j = first; j < std::min(p.keys, first + CHUNK); j++, own += TILE)
      for (int v = 0; v < cohorts.used; v += LANES)
        for (uint32_t bits = bits_of(load(own + v) > load(least + v)); bits; bits &= bits - 1) {
          const int i = v + __builtin_ctz(bits);
          held[i * 2 * p.count + many[i]++] = sortable(own[i], j);
          if (many[i] == 2 * p.count) shrink(i);
        }
  }

  void shrink(int i) {
    if (many[i] <= p.count) return;
    uint64_t *own = &held[i * 2 * p.count], *last = own + p.count - 1;
    std::nth_element(own, last, own + many[i], std::greater<uint64_t>());
    many[i] = p.count, least[i] = number_of(*last >> 32);
  }
};

template <class T>
static void best(const Best &p, int threads) {
  const int64_t tiles = (p.cohorts + TILE - 1) / TILE;
  const auto choose = [&](Choosing<T> &choosing, int64_t i) { choosing.choose(i / tiles, i % tiles); };
  in_parallel(threads, p.batch * p.heads * tiles, [&] { return Choosing<T>(p); }, choose);
}

}  // namespace fewkeys
