// Cohorts of queries, the keys that each keeps, and the sums of the others as each sees them: `fewkeys.sketch.cohorts`,
// `fewkeys.sketch.tilted`. Cohorts stand in the lanes, keys are rows.
#pragma once
#include "split.h"

namespace fewkeys {

constexpr int CHUNK = 32;  // keys that are looked at together

// A number, and of equal numbers the place: what is sorted. What is no number counts as zero.
static inline uint64_t sortable(float number, int64_t place) {
  return (uint64_t)ordered(number == number ? number : 0.0f) << 32 | (uint64_t)place;
}

// Splits one set of rows after another and describes the parts, as `fewkeys.sketch.cohorts` says. Directions are sums of
// rows; products with them are taken in the metric.
class Halver {
 public:
  explicit Halver(const Halves &p)
      : p(p), dim(p.dim), wide(round_up(dim)), size((p.rows_each + p.count - 1) / p.count * p.count), order(size),
        others(size), key(std::max(size, 2 * SAMPLE)), sorted(size), some(2 * SAMPLE * wide), along(wide),
        turned(wide), middle(wide), square(wide * wide) {}

  void split(int64_t set) {
    rows = p.rows + set * p.rows_each * dim, metric = p.metric + set * dim * dim;
    for (int64_t i = 0; i < size; i++) order[i] = i < p.rows_each ? i : -1;
    for (int64_t span = size; span > size / p.count; span /= 2)
      for (int64_t begin = 0; begin < size; begin += span) cut(&order[begin], span);
    std::copy(order.begin(), order.end(), p.place + set * size);
    describe(set);
  }

 private:
  static constexpr int64_t SAMPLE = 128;
  const Halves &p;
  const int64_t dim, wide, size;
  const float *rows = nullptr, *metric = nullptr;
  std::vector<int32_t> order, others;
  std::vector<uint64_t> key, sorted;
  aligned_vector<float> some, along, turned, middle, square;

  // The smaller half of the real ones to the front; fillings stand at the end all along.
  void cut(int32_t *own, int64_t span) {
    int64_t real = span;
    while (real && own[real - 1] < 0) real--;
    if (real <= span / 2) return;
    look(own, span, real);
    for (int64_t i = 0; i < real; i++) key[i] = sortable(product(rows + own[i] * dim, turned.data(), dim), i);
    std::copy_n(key.begin(), real, sorted.begin());
    std::nth_element(sorted.begin(), sorted.begin() + span / 2, sorted.begin() + real);
    // Rows of a half stay in their old order.
    const uint64_t first = sorted[span / 2];
    int64_t low = 0, high = 0;
    for (int64_t i = 0; i < real; i++) {
      const bool below = key[i] < first;
      others[high] = own[low] = own[i];
      low += below, high += !below;
    }
    std::copy_n(others.begin(), high, own + low);
  }

  // What is multiplied with rows for their products with `along`.
  void turn() {
    std::fill(turned.begin(), turned.end(), 0.0f);
    for (int64_t d = 0; d < dim; d++) add(turned.data(), metric + d * dim, along[d], dim);
  }

  // The direction along which to cut. Rows that fill up to FOUR are zero.
  void look(const int32_t *own, int64_t span, int64_t real) {
    const int64_t step = std::max<int64_t>(1, span / SAMPLE), count = (real + step - 1) / step;
    const int64_t full = round_up(count, FOUR);
    float by[2 * SAMPLE];
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
    for (int i = 0; i < POWER; i++) {
      for (int64_t j = 0; j < full; j += FOUR) four_products(&some[j * wide], wide, turned.data(), wide, by + j);
      sum(by, full);
      turn();
      const float square = product(along.data(), turned.data(), wide), least = std::numeric_limits<float>::min();
      const float length = std::max(least, std::sqrt(std::max(0.0f, square)));
      for (float &x : turned) x /= length;
    }
    const int64_t half = std::min((span + step - 1) / step / 2, count);
    for (int i = 0; i < REFINE; i++) {
      for (int64_t j = 0; j < full; j += FOUR) four_products(&some[j * wide], wide, turned.data(), wide, by + j);
      for (int64_t j = 0; j < count; j++) key[j] = sortable(by[j], j);
      if (half < count) std::nth_element(key.begin(), key.begin() + half, key.begin() + count);
      std::fill_n(by, full, 0.0f);
      for (int64_t j = 0; j < half; j++) by[(uint32_t)key[j]] = -1.0f;
      sum(by, full);
      turn();
    }
  }

  // along <- the sum of the rows, each times its number.
  void sum(const float *by, int64_t count) {
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
      for (int64_t begin = 0; begin < real; begin += SAMPLE) {
        const int count = std::min(SAMPLE, real - begin);
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
    count = std::min<int64_t>(TILE, cohorts - tile * TILE), used = round_up(count, 2 * LANES);
    to_lanes(mean + tile * TILE * dim, dim, count, dim, 1.0f, means.data());
  }
};

template <class T>
class Choosing {
 public:
  explicit Choosing(const Best &p)
      : p(p), dim(p.dim), cohorts(dim), copy(CHUNK * round_up(dim)), score(CHUNK * TILE), held(TILE) {}

  void choose(int64_t head, int64_t tile) {
    cohorts.read(p.mean + head * p.cohorts * dim, p.cohorts, tile, dim);
    std::fill_n(least, TILE, -INFINITY);
    for (auto &own : held) own.clear();
    for (int64_t first = 0; first < p.keys; first += CHUNK) look(head, first);
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
  std::vector<std::vector<uint64_t>> held;  // the best of every cohort so far, and some more
  float least[TILE];                        // what a score must pass

  void look(int64_t head, int64_t first) {
    const int64_t b = head / p.heads, h = head % p.heads, rows = std::min<int64_t>(CHUNK, p.keys - first);
    int64_t stride = p.key.row;
    const float *key = floats(p.key.at<T>(b, h, first), stride, rows, dim, round_up(dim), copy.data());
    dots(key, stride, rows, dim, cohorts.means.data(), score.data(), cohorts.used);
    float best[TILE];
    count_multiply_adds(rows * cohorts.used);
    for (int v = 0; v < cohorts.used; v += LANES) {
      vec top = broadcast(-INFINITY);
      for (int j = 0; j < rows; j++) {
        const vec x = load(&score[j * TILE + v]) + p.offset[head * p.keys + first + j];
        store(&score[j * TILE + v], x);
        top = max(top, x);
      }
      store(best + v, top);
    }
    for (int i = 0; i < cohorts.count; i++)
      for (int j = 0; best[i] > least[i] && j < rows; j++) {
        const float x = score[j * TILE + i];
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

// The real keys of one head, cluster by cluster.
struct Sorted {
  aligned_vector<float> rows, own;       // centred keys and values side by side, filled up; k^T W k / 2
  aligned_vector<float> centre, middle;  // the mean key of every cluster, and its mean k^T W k / 2
  aligned_vector<int32_t> place, begin;
  std::vector<std::pair<int32_t, int32_t>> kept;  // which rows which cohorts keep, in order

  template <class T>
  void sort(const Tilts &p, int64_t head) {
    const int64_t b = head / p.heads, h = head % p.heads, both = p.dim + p.value_dim, wide = round_up(both);
    const int64_t *label = p.label + head * p.keys;
    const uint8_t *real = p.real ? p.real + b * p.keys : nullptr;
    rows.resize(p.keys * wide), own.resize(p.keys), place.resize(p.keys), rank.assign(p.keys, -1);
    begin.assign(p.count + 1, 0), centre.assign(p.count * p.dim, 0.0f), middle.assign(p.count, 0.0f);
    for (int64_t j = 0; j < p.keys; j++)
      if (!real || real[j]) begin[label[j] + 1]++;
    for (int64_t c = 0; c < p.count; c++) begin[c + 1] += begin[c];
    aligned_vector<int32_t> next(begin.begin(), begin.end() - 1);
    for (int64_t j = 0; j < p.keys; j++) {
      if (real && !real[j]) continue;
      const int32_t at = next[label[j]]++;
      float *row = &rows[at * wide];
      rank[j] = at, place[at] = j, own[at] = p.own[head * p.keys + j];
      copy_rows(p.key.at<T>(b, h, j), 0, 1, p.dim, p.dim, row);
      add(row, p.middle + head * p.dim, -1.0f, p.dim);
      copy_rows(p.value.at<T>(b, h, j), 0, 1, p.value_dim, wide - p.dim, row + p.dim);
      add(&centre[label[j] * p.dim], row, 1.0f, p.dim), middle[label[j]] += own[at];
    }
    for (int64_t c = 0; c < p.count; c++) {
      const float size = std::max(1, begin[c + 1] - begin[c]);
      for (int64_t d = 0; d < p.dim; d++) centre[c * p.dim + d] /= size;
      middle[c] /= size;
    }
    kept.clear();
    for (int64_t at = 0; at < p.cohorts * p.kept; at++) {
      const int64_t from = head * p.cohorts * p.kept + at;
      if (p.used[from]) kept.push_back({rank[p.index[from]], int32_t(at / p.kept)});
    }
    std::sort(kept.begin(), kept.end());
  }

 private:
  aligned_vector<int32_t> rank;
};

class Tilting {
 public:
  explicit Tilting(const Tilts &p)
      : p(p), dim(p.dim), wide(round_up(p.dim + p.value_dim)), cohorts(dim), score(CHUNK * TILE), level(TILE),
        sums(TILE * wide) {}

  // The sums of one cluster for a tile of cohorts.
  void add_up(const Sorted &keys, int64_t head, int64_t tile, int64_t cluster) {
    cohorts.read(p.mean + head * p.cohorts * dim, p.cohorts, tile, dim);
    const int64_t tiles = (p.cohorts + TILE - 1) / TILE, first = head * p.cohorts + tile * TILE;
    dots(&keys.centre[cluster * dim], dim, 1, dim, cohorts.means.data(), level.data(), cohorts.used);
    for (float &one : level) one += keys.middle[cluster];
    std::fill(sums.begin(), sums.end(), 0.0f);
    float mass[TILE] = {}, energy[TILE] = {};
    const std::pair<int32_t, int32_t> start(keys.begin[cluster], 0);
    auto kept = std::lower_bound(keys.kept.begin(), keys.kept.end(), start);
    for (int64_t begin = keys.begin[cluster]; begin < keys.begin[cluster + 1]; begin += CHUNK) {
      const int rows = std::min<int64_t>(CHUNK, keys.begin[cluster + 1] - begin);
      dots(&keys.rows[begin * wide], wide, rows, dim, cohorts.means.data(), score.data(), cohorts.used);
      weigh(&keys.own[begin], rows);
      for (; kept != keys.kept.end() && kept->first < begin + rows; kept++)
        if (kept->second / TILE == tile) score[(kept->first - begin) * TILE + kept->second % TILE] = 0.0f;
      total(&keys.own[begin], rows, mass, energy, [&](int j, float x) {
        p.weight[(head * tiles + tile) * p.keys + keys.place[begin + j]] = x;
      });
      for (int i = 0; i < cohorts.count; i += SOME)
        mix(&keys.rows[begin * wide], wide, rows, wide, &score[i], TILE, &sums[i * wide], wide);
    }
    for (int i = 0; i < cohorts.count; i++) {
      const int64_t to = (first + i) * p.count + cluster, both = dim + p.value_dim;
      p.mass[to] = mass[i], p.energy[to] = 2 * energy[i], p.level[to] = level[i];
      std::copy_n(&sums[i * wide], both, p.rows + to * both);
    }
  }

 private:
  const Tilts &p;
  const int dim;
  const int64_t wide;
  CohortLanes cohorts;
  aligned_vector<float> score, level, sums;

  // Scores become e; lanes of no cohort weigh nothing.
  void weigh(const float *own, int rows) {
    const ivec lane = count_up();
    const float most = std::exp(p.largest);
    count_multiply_adds(rows * cohorts.used * 2);
    for (int v = 0; v < cohorts.used; v += LANES) {
      const vec least = load(&level[v]);
      const ivec there = lane + v < cohorts.count;
      for (int j = 0; j < rows; j++) {
        float *to = &score[j * TILE + v];
        vec x = (load(to) + own[j] - least) * p.tilt;
        x = x > p.largest ? broadcast(p.largest) : x;
        x = x < -p.largest ? broadcast(-p.largest) : x;
        x = exponential(x - p.largest) * most;
        store(to, there ? x : vec{});
      }
    }
  }

  template <class Write>
  void total(const float *own, int rows, float *mass, float *energy, Write write) {
    count_multiply_adds(rows * cohorts.used * 2);
    for (int j = 0; j < rows; j++) {
      vec sum = {};
      for (int v = 0; v < cohorts.used; v += LANES) {
        const vec e = load(&score[j * TILE + v]);
        sum += e;
        store(mass + v, load(mass + v) + e);
        store(energy + v, load(energy + v) + e * own[j]);
      }
      write(j, sum_of_lanes(sum));
    }
  }
};

template <class T>
static void tilt(const Tilts &p, int threads) {
  const int64_t tiles = (p.cohorts + TILE - 1) / TILE, heads = p.batch * p.heads;
  const int64_t some = std::min<int64_t>(heads, 4 * team_size(threads));  // heads whose keys are held in order at a time
  std::vector<Sorted> keys(some);
  for (int64_t from = 0; from < heads; from += some) {
    const int64_t now = std::min(some, heads - from);
    in_parallel(threads, now, [&](int64_t i) { keys[i].template sort<T>(p, from + i); });
    const auto add_up = [&](Tilting &tilting, int64_t i) {
      const int64_t head = i / p.count / tiles;
      tilting.add_up(keys[head], from + head, i / p.count % tiles, i % p.count);
    };
    in_parallel(threads, now * tiles * p.count, [&] { return Tilting(p); }, add_up, 4);
  }
}

}  // namespace fewkeys
