// Cohorts of queries, the keys that each keeps, and the sums of the others as each sees them: `fewkeys.sketch.cohorts`,
// `fewkeys.sketch.tilted`. Cohorts stand in the lanes, keys are rows.
#pragma once
#include <limits>

#include "tile.h"

namespace fewkeys {

constexpr int CHUNK = 32;  // keys that are looked at together

struct Numbered {
  float number;
  int32_t place;
};
static inline bool before(const Numbered &a, const Numbered &b) {
  return a.number < b.number || (a.number == b.number && a.place < b.place);
}
static inline bool above(const Numbered &a, const Numbered &b) {
  return a.number > b.number || (a.number == b.number && a.place < b.place);
}

// Splits one set of rows after another, as `fewkeys.sketch.cohorts.split` says.
class Halver {
 public:
  explicit Halver(const Halves &p)
      : p(p), dim(p.dim), size((p.rows_each + p.count - 1) / p.count * p.count), order(size), some(2 * SAMPLE * dim),
        along(dim), next(dim), middle(dim), found(std::max(size, 2 * SAMPLE)) {}

  void split(int64_t set) {
    rows = p.rows + set * p.rows_each * dim;
    for (int64_t i = 0; i < size; i++) order[i] = {0.0f, int32_t(i < p.rows_each ? i : -1)};
    for (int64_t span = size; span > size / p.count; span /= 2)
      for (int64_t begin = 0; begin < size; begin += span) cut(&order[begin], span);
    for (int64_t i = 0; i < size; i++) p.place[set * size + i] = order[i].place;
  }

 private:
  static constexpr int64_t SAMPLE = 256;
  static constexpr int POWER = 2, REFINE = 2;
  const Halves &p;
  const int64_t dim, size;
  const float *rows = nullptr;
  std::vector<Numbered> order;
  aligned_vector<float> some, along, next, middle;
  std::vector<Numbered> found;

  // The smaller half of the real ones to the front; fillings stand at the end all along.
  void cut(Numbered *own, int64_t span) {
    int64_t real = span;
    while (real && own[real - 1].place < 0) real--;
    if (real > span / 2) {
      look(own, span, real);
      for (int64_t i = 0; i < real; i++) own[i].number = product(rows + own[i].place * dim, along.data(), dim);
      std::copy(own, own + real, found.begin());
      std::nth_element(found.begin(), found.begin() + span / 2, found.begin() + real, before);
      // Rows of a half stay in their old order.
      const Numbered first = found[span / 2];
      int64_t low = 0, high = 0;
      for (int64_t i = 0; i < real; i++) {
        const bool below = before(own[i], first);
        found[high] = own[low] = own[i];
        low += below, high += !below;
      }
      std::copy_n(found.begin(), high, own + low);
    }
  }

  // The direction along which to cut.
  void look(const Numbered *own, int64_t span, int64_t real) {
    const int64_t step = std::max<int64_t>(1, span / SAMPLE), count = (real + step - 1) / step;
    std::fill(middle.begin(), middle.end(), 0.0f);
    for (int64_t i = 0; i < count; i++) add(middle.data(), rows + own[i * step].place * dim, 1.0f, dim);
    for (float &x : middle) x /= count;
    float longest = -1.0f;
    for (int64_t i = 0; i < count; i++) {
      float *row = &some[i * dim];
      std::copy_n(rows + own[i * step].place * dim, dim, row);
      add(row, middle.data(), -1.0f, dim);
      const float square = product(row, row, dim);
      if (square > longest) longest = square, std::copy_n(row, dim, along.begin());
    }
    for (int i = 0; i < POWER; i++) {
      std::fill(next.begin(), next.end(), 0.0f);
      for (int64_t j = 0; j < count; j++) add(next.data(), &some[j * dim], product(&some[j * dim], along.data(), dim), dim);
      const float norm = std::max(std::sqrt(product(next.data(), next.data(), dim)), std::numeric_limits<float>::min());
      for (int64_t d = 0; d < dim; d++) along[d] = next[d] / norm;
    }
    const int64_t half = (span + step - 1) / step / 2;
    for (int i = 0; i < REFINE; i++) {
      for (int64_t j = 0; j < count; j++) found[j] = {product(&some[j * dim], along.data(), dim), int32_t(j)};
      if (half < count) std::nth_element(found.begin(), found.begin() + half, found.begin() + count, before);
      std::fill(along.begin(), along.end(), 0.0f);
      for (int64_t j = 0; j < std::min(half, count); j++) add(along.data(), &some[found[j].place * dim], -1.0f, dim);
    }
  }
};

static void halve(const Halves &p, int threads) {
  const auto split = [](Halver &halver, int64_t set) { halver.split(set); };
  in_parallel(threads, p.sets, [&] { return Halver(p); }, split);
}

// The means of a tile of cohorts, in lanes.
static int cohorts_to_lanes(const float *mean, int64_t cohorts, int64_t tile, int dim, float *lanes) {
  const int count = std::min<int64_t>(TILE, cohorts - tile * TILE);
  to_lanes(mean + tile * TILE * dim, dim, count, dim, 1.0f, lanes);
  return count;
}

template <class T>
class Choosing {
 public:
  explicit Choosing(const Best &p)
      : p(p), dim(p.dim), lanes(dim * TILE), copy(CHUNK * round_up(dim)), score(CHUNK * TILE), held(TILE) {}

  void choose(int64_t head, int64_t tile) {
    const int count = cohorts_to_lanes(p.mean + head * p.cohorts * dim, p.cohorts, tile, dim, lanes.data());
    std::fill_n(least, TILE, -INFINITY);
    for (auto &own : held) own.clear();
    for (int64_t first = 0; first < p.keys; first += CHUNK) look(head, first, count);
    for (int i = 0; i < count; i++) {
      shrink(i);
      std::sort(held[i].begin(), held[i].end(), [](auto &a, auto &b) { return a.place < b.place; });
      const int64_t to = ((head * p.cohorts) + tile * TILE + i) * p.count;
      for (int64_t s = 0; s < p.count; s++) {
        p.used[to + s] = s < (int64_t)held[i].size();
        p.index[to + s] = p.used[to + s] ? held[i][s].place : 0;
      }
    }
  }

 private:
  const Best &p;
  const int dim;
  aligned_vector<float> lanes, copy, score;
  std::vector<std::vector<Numbered>> held;  // the best of every cohort so far, and some more
  float least[TILE];                        // what a score must pass

  void look(int64_t head, int64_t first, int count) {
    const int64_t b = head / p.heads, h = head % p.heads, rows = std::min<int64_t>(CHUNK, p.keys - first);
    int64_t stride = p.key.row;
    const float *key = floats(p.key.at<T>(b, h, first), stride, rows, dim, round_up(dim), copy.data());
    dots(key, stride, rows, dim, lanes.data(), score.data());
    float best[TILE];
    count_multiply_adds(rows * TILE);
    for (int v = 0; v < TILE; v += LANES) {
      vec top = broadcast(-INFINITY);
      for (int j = 0; j < rows; j++) {
        const vec x = load(&score[j * TILE + v]) + p.offset[head * p.keys + first + j];
        store(&score[j * TILE + v], x);
        top = max(top, x);
      }
      store(best + v, top);
    }
    for (int i = 0; i < count; i++)
      for (int j = 0; best[i] > least[i] && j < rows; j++) {
        const float x = score[j * TILE + i];
        if (!(x > least[i])) continue;
        held[i].push_back({x, int32_t(first + j)});
        if ((int64_t)held[i].size() >= 2 * p.count) shrink(i);
      }
  }

  void shrink(int i) {
    auto &own = held[i];
    if ((int64_t)own.size() <= p.count) return;
    std::nth_element(own.begin(), own.begin() + (p.count - 1), own.end(), above);
    own.resize(p.count);
    least[i] = own.back().number;
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
  aligned_vector<float> rows, own;  // centred keys and values side by side, filled up; k^T W k / 2
  aligned_vector<int32_t> place, rank, begin;

  template <class T>
  void sort(const Tilts &p, int64_t head) {
    const int64_t b = head / p.heads, h = head % p.heads, both = p.dim + p.value_dim, wide = round_up(both);
    const int64_t *label = p.label + head * p.keys;
    const uint8_t *real = p.real ? p.real + b * p.keys : nullptr;
    rows.resize(p.keys * wide), own.resize(p.keys), place.resize(p.keys), rank.assign(p.keys, -1);
    begin.assign(p.count + 1, 0);
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
    }
  }
};

class Tilting {
 public:
  explicit Tilting(const Tilts &p)
      : p(p), dim(p.dim), wide(round_up(p.dim + p.value_dim)), lanes(dim * TILE), score(CHUNK * TILE),
        level(TILE), sums(TILE * wide) {}

  // The sums of one cluster for a tile of cohorts.
  void add_up(const Sorted &keys, int64_t head, int64_t tile, int64_t cluster) {
    const int count = cohorts_to_lanes(p.mean + head * p.cohorts * dim, p.cohorts, tile, dim, lanes.data());
    const int64_t tiles = (p.cohorts + TILE - 1) / TILE, first = head * p.cohorts + tile * TILE;
    for (int i = 0; i < TILE; i++) level[i] = i < count ? p.level[(first + i) * p.count + cluster] : 0.0f;
    std::fill(sums.begin(), sums.end(), 0.0f);
    float mass[TILE] = {}, energy[TILE] = {};
    find_kept(keys, head, first, count, cluster);
    for (int64_t begin = keys.begin[cluster]; begin < keys.begin[cluster + 1]; begin += CHUNK) {
      const int rows = std::min<int64_t>(CHUNK, keys.begin[cluster + 1] - begin);
      dots(&keys.rows[begin * wide], wide, rows, dim, lanes.data(), score.data());
      weigh(&keys.own[begin], rows, count);
      for (const Numbered &kept : hidden)
        if (kept.place >= begin && kept.place < begin + rows) score[(kept.place - begin) * TILE + int(kept.number)] = 0.0f;
      total(&keys.own[begin], rows, mass, energy, [&](int j, float x) {
        p.weight[(head * tiles + tile) * p.keys + keys.place[begin + j]] = x;
      });
      for (int i = 0; i < TILE; i += SOME)
        if (i < count) mix(&keys.rows[begin * wide], wide, rows, wide, &score[i], TILE, &sums[i * wide], wide);
    }
    for (int i = 0; i < count; i++) {
      const int64_t to = (first + i) * p.count + cluster, both = dim + p.value_dim;
      p.mass[to] = mass[i], p.energy[to] = 2 * energy[i];
      std::copy_n(&sums[i * wide], both, p.rows + to * both);
    }
  }

 private:
  const Tilts &p;
  const int dim;
  const int64_t wide;
  aligned_vector<float> lanes, score, level, sums;
  std::vector<Numbered> hidden;  // lane and rank of keys of the cluster that a cohort keeps

  void find_kept(const Sorted &keys, int64_t head, int64_t first, int count, int64_t cluster) {
    hidden.clear();
    for (int i = 0; i < count; i++)
      for (int64_t s = 0; s < p.kept; s++) {
        const int64_t at = (first + i) * p.kept + s;
        if (!p.used[at]) continue;
        const int32_t rank = keys.rank[p.index[at]];
        if (rank >= keys.begin[cluster] && rank < keys.begin[cluster + 1]) hidden.push_back({float(i), rank});
      }
  }

  // Scores become e; lanes of no cohort weigh nothing.
  void weigh(const float *own, int rows, int count) {
    const ivec lane = count_up();
    const float most = std::exp(p.largest);
    count_multiply_adds(rows * TILE * 2);
    for (int v = 0; v < TILE; v += LANES) {
      const vec least = load(&level[v]);
      const ivec there = lane + v < count;
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
    count_multiply_adds(rows * TILE * 2);
    for (int j = 0; j < rows; j++) {
      vec sum = {};
      for (int v = 0; v < TILE; v += LANES) {
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
