// Softmax over what every query finds in a forest of key trees: `fewkeys.tree.descent` has the equations.
//
// Queries of a step see the same keys near them and the same nodes that enter each level: those are columns of a tile,
// queries in the lanes. What a query opens is its own: there, dimensions are in the lanes, four rows at a time.
#pragma once
#include <limits>
#include <memory>

#include "split.h"
#include "tile.h"

namespace fewkeys {

// The sums of the lanes of four vectors.
static inline __attribute__((always_inline)) void sums_of_four(vec (&x)[FOUR], float *found) {
  exchange<1>(x[0], x[1]);
  exchange<1>(x[2], x[3]);
  vec low = x[0] + x[1], high = x[2] + x[3];
  exchange<2>(low, high);
  low += high;
  if constexpr (LANES > 4) low += crossed<4>(low);
  if constexpr (LANES > 8) low += crossed<8>(low);
  for (int r = 0; r < FOUR; r++) found[r] = low[r];
}

// The inner products of four rows with another.
template <class T>
static inline __attribute__((always_inline)) void four_dots(const T *const *row, const float *other, int dim,
                                                            float *found) {
  count_multiply_adds(FOUR * dim);
  vec sum[FOUR] = {};
  int d = 0;
  for (; d + LANES <= dim; d += LANES) {
    const vec x = load(other + d);
#pragma GCC unroll 4
    for (int r = 0; r < FOUR; r++) sum[r] += load(row[r] + d) * x;
  }
  sums_of_four(sum, found);
  for (; d < dim; d++)
    for (int r = 0; r < FOUR; r++) found[r] += to_float(row[r][d]) * other[d];
}

template <int V, class T>
static inline __attribute__((always_inline)) void mix_rows_of(const T *const *row, const float *weight, int count, int d,
                                                              float *into) {
  vec sum[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) sum[v] = load(into + d + v * LANES);
  for (int i = 0; i < count; i++) {
    const T *from = row[i] + d;
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sum[v] += load(from + v * LANES) * weight[i];
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) store(into + d + v * LANES, sum[v]);
}

// Adds rows under weights.
template <class T>
static inline void mix_rows(const T *const *row, const float *weight, int count, int dim, float *into) {
  count_multiply_adds((int64_t)count * dim);
  int d = 0;
  for (; d + 8 * LANES <= dim; d += 8 * LANES) mix_rows_of<8>(row, weight, count, d, into);
  for (; d + 2 * LANES <= dim; d += 2 * LANES) mix_rows_of<2>(row, weight, count, d, into);
  for (; d + LANES <= dim; d += LANES) mix_rows_of<1>(row, weight, count, d, into);
  for (; d < dim; d++)
    for (int i = 0; i < count; i++) into[d] += to_float(row[i][d]) * weight[i];
}

static inline void prefetch(const void *from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b);
}

// How the kernel is told of steps, their levels, the runs of nodes that enter a level, and tables of nodes.
struct StepOf {
  int64_t start, stop, seen, near, level, levels;
};
struct LevelOf {
  int64_t table, size, run, runs, scored, opened;
};
struct RunOf {
  int64_t first, count;
};
// A tile of queries of a step.
struct TileOf {
  int64_t step, first;
};
// One of many candidates.
struct Ranked {
  float rank;
  int32_t index;
  bool operator<(const Ranked &other) const {
    return rank < other.rank || (rank == other.rank && index < other.index);
  }
};
struct TableOf {
  const float *key, *value, *variance;
  int64_t rows;
};

template <class T>
class Descender {
 public:
  explicit Descender(const Descend &p)
      : p(p), dim(p.dim), wide(round_up(p.value_dim)), asked(TILE * dim), squared(TILE * dim), lanes(dim * TILE),
        lane_squares(dim * TILE), mixed(TILE * wide) {}

  // Queries first .. first + TILE - 1 of those of a step and a key head, group after group.
  void attend(int64_t sequence, int64_t head, int64_t index, int64_t first) {
    const StepOf &step = ((const StepOf *)p.steps)[index];
    const int64_t length = step.stop - step.start;
    const int rows = std::min<int64_t>(TILE, p.gqa_ratio * length - first);
    batch = p.batch ? p.batch[sequence] : sequence, shared = head, tree = sequence * (p.heads / p.gqa_ratio) + head;
    collect(step, index);

    const T *at[TILE];
    for (int i = 0; i < rows; i++) {
      const int64_t h = head * p.gqa_ratio + (first + i) / length, n = step.start + (first + i) % length;
      at[i] = p.query.at<T>(batch, h, n);
      for (int d = 0; d < dim; d++) {
        const float x = to_float(at[i][d]) * p.scale;
        asked[i * dim + d] = x, squared[i * dim + d] = x * x;
      }
      limit[i] = p.seen[n];
    }
    std::fill(limit + rows, limit + TILE, 0);
    to_lanes(at, rows, dim, p.scale, lanes.data());
    for (int64_t d = 0; d < dim * TILE; d++) lane_squares[d] = lanes[d] * lanes[d];
    const int used = rows <= TILE / 2 ? TILE / 2 : TILE;
    dots(key.data(), dim, near + entering, dim, lanes.data(), score.data(), used);
    dots(variance.data(), dim, entering, dim, lane_squares.data(), spread.data(), used);

    Tile tile(1.0f);
    look_near(tile);
    look_at_entering(tile, step);
    std::fill(mixed.begin(), mixed.end(), 0.0f);
    if (step.levels)
      for (int i = 0; i < rows; i++) descend(tile, step, i);
    tile.settle();
    tile.weigh(score.data(), near + entering);
    for (int i = 0; i < rows; i += SOME)
      mix(value.data(), wide, near + entering, wide, &score[i], TILE, &mixed[i * wide], wide);
    for (int i = 0; i < rows; i++) {
      const float sum = tile.sum[i / LANES][i % LANES], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      T *to = (T *)p.out.at<T>(batch, head * p.gqa_ratio + (first + i) / length, step.start + (first + i) % length);
      for (int64_t d = 0; d < p.value_dim; d++) round_to(mixed[i * wide + d] * inverse, to[d]);
    }
  }

 private:
  const Descend &p;
  const int64_t dim, wide;
  int64_t batch = 0, shared = 0, tree = 0, held[2] = {-1, -1};
  int near = 0, entering = 0, sinks = 0;                      // of the step
  int64_t position[2] = {};                                   // of near keys, less their number: sinks, others
  aligned_vector<float> key, value, variance, score, spread;  // near keys, then nodes that enter
  aligned_vector<float> asked, squared, lanes, lane_squares, mixed;
  int64_t limit[TILE];
  aligned_vector<int64_t> row;                    // candidates: their rows of the table,
  aligned_vector<float> own, width, rank, logit;  // scores, spreads, negated ranks; logits of what the query attends to
  aligned_vector<int32_t> place;
  aligned_vector<int64_t> opened, next;
  aligned_vector<const float *> closed_value;
  aligned_vector<const char *> leaf_key, leaf_value;
  aligned_vector<Ranked> sorted;

  const LevelOf &level_of(const StepOf &step, int64_t level) const {
    return ((const LevelOf *)p.levels)[step.level + level];
  }
  const TableOf &table_of(const LevelOf &level) const { return ((const TableOf *)p.tables)[level.table]; }
  int64_t place_of(int64_t key) const { return p.real ? p.real[key] : key; }
  const char *leaf_at(const Rows &rows, int64_t at) const {
    return rows.at<char>(batch, shared, at & ((int64_t(1) << p.chunk) - 1)) + (at >> p.chunk) * p.chunk_bytes;
  }

  template <class A>
  static void make_room(A &array, int64_t count) {
    if ((int64_t)array.size() < count) array.resize(count);
  }

  // Copies what all queries of a step see.
  void collect(const StepOf &step, int64_t index) {
    if (held[0] == tree && held[1] == index) return;
    held[0] = tree, held[1] = index;
    const int64_t before = std::min<int64_t>(p.sinks, step.seen);
    near = before + step.seen - step.near;
    entering = 0;
    int64_t most = 0, total = 0;
    for (int64_t l = 0; l < step.levels; l++) {
      const LevelOf &level = level_of(step, l);
      for (int64_t r = 0; r < level.runs; r++) entering += ((const RunOf *)p.runs)[level.run + r].count;
      most = std::max(most, level.scored), total += level.scored;
    }
    const int64_t leaves = step.levels ? level_of(step, step.levels - 1).opened : 0;
    const int64_t room = near + entering, whole = round_up(most), all = round_up(total + leaves * LEAF);
    make_room(key, room * dim), make_room(value, room * wide), make_room(variance, entering * dim);
    make_room(score, room * TILE), make_room(spread, entering * TILE);
    make_room(row, whole), make_room(own, whole), make_room(width, whole), make_room(rank, whole);
    make_room(place, whole), make_room(opened, whole), make_room(next, whole), make_room(logit, all);
    make_room(closed_value, total), make_room(leaf_key, leaves * LEAF), make_room(leaf_value, leaves * LEAF);
    for (int j = 0; j < near; j++) {
      const int64_t at = place_of(key_near(step, j) - (j < before ? 0 : p.skipped));
      copy_rows(p.key.at<T>(batch, shared, at), 0, 1, dim, dim, &key[j * dim]);
      copy_rows(p.value.at<T>(batch, shared, at), 0, 1, p.value_dim, wide, &value[j * wide]);
      position[j < before ? 0 : 1] = key_near(step, j) - j;
    }
    sinks = before;
    int64_t to = 0;
    for (int64_t l = 0; l < step.levels; l++) {
      const LevelOf &level = level_of(step, l);
      const TableOf &table = table_of(level);
      for (int64_t r = 0; r < level.runs; r++) {
        const RunOf &run = ((const RunOf *)p.runs)[level.run + r];
        const int64_t from = tree * table.rows + run.first;
        std::copy_n(table.key + from * dim, run.count * dim, &key[(near + to) * dim]);
        std::copy_n(table.variance + from * dim, run.count * dim, &variance[to * dim]);
        copy_rows(table.value + from * p.value_dim, p.value_dim, run.count, p.value_dim, wide, &value[(near + to) * wide]);
        to += run.count;
      }
    }
  }

  int64_t key_near(const StepOf &step, int64_t j) const {
    const int64_t before = std::min<int64_t>(p.sinks, step.seen);
    return j < before ? j : step.near + j - before;
  }

  void look_near(Tile &tile) {
    ivec last[WIDE];
    for (int i = 0; i < TILE; i++) last[i / LANES][i % LANES] = limit[i];
    count_multiply_adds(near * TILE);
    for (int j = 0; j < near; j++) {
      const int at = position[j < sinks ? 0 : 1] + j;
      for (int w = 0; w < WIDE; w++) {
        float *to = &score[j * TILE + w * LANES];
        const vec x = last[w] > at ? load(to) : broadcast(-INFINITY);
        store(to, x);
        tile.top[w] = max(tile.top[w], x);
      }
    }
  }

  // What a node that stays closed would add. Opened ones are hidden later; then the largest is one that is not there,
  // which is above their keys by the logarithm of their number and `highest` at most.
  void look_at_entering(Tile &tile, const StepOf &step) {
    if (!p.shown) return;
    count_multiply_adds(entering * TILE * 2);
    int c = 0;
    for (int64_t l = 0; l < step.levels; l++) {
      const LevelOf &level = level_of(step, l);
      const float size = std::log((float)level.size);
      for (int64_t stop = c + entering_of(level); c < stop; c++)
        for (int w = 0, v = 0; w < WIDE; w++, v += LANES)
          tile.top[w] = max(tile.top[w], load(&score[(near + c) * TILE + v]) + (size + gain(load(&spread[c * TILE + v]))));
    }
  }
  vec gain(vec spread) const {
    const vec x = spread * p.curve;
    return x > p.highest ? broadcast(p.highest) : x;
  }
  int64_t entering_of(const LevelOf &level) const {
    int64_t found = 0;
    for (int64_t r = 0; r < level.runs; r++) found += ((const RunOf *)p.runs)[level.run + r].count;
    return found;
  }

  // Query i opens nodes, level by level, and attends to the leaves and to what it does not open.
  void descend(Tile &tile, const StepOf &step, int i) {
    const float *q = &asked[i * dim], *square = &squared[i * dim];
    int64_t open = 0;
    int from = 0, closed = 0;
    for (int64_t l = 0; l < step.levels; l++) {
      const LevelOf &level = level_of(step, l);
      const TableOf &table = table_of(level);
      const int shared = entering_of(level), count = shared + FOUR * open, whole = (count + LANES - 1) / LANES * LANES;
      const int64_t first = tree * table.rows;
      for (int c = 0; c < shared; c++) {
        own[c] = score[(near + from + c) * TILE + i];
        width[c] = spread[(from + c) * TILE + i];
      }
      int c = 0;
      for (int64_t r = 0; r < level.runs; r++) {
        const RunOf &run = ((const RunOf *)p.runs)[level.run + r];
        for (int64_t n = 0; n < run.count; n++) row[c++] = run.first + n;
      }
      for (int64_t o = 0; o < open; o++, c += FOUR) {
        const int64_t child = opened[o] * FOUR;
        const float *keys = table.key + (first + child) * dim, *variances = table.variance + (first + child) * dim;
        const float *key_rows[FOUR], *variance_rows[FOUR];
        for (int r = 0; r < FOUR; r++) {
          key_rows[r] = keys + r * dim, variance_rows[r] = variances + r * dim;
          row[c + r] = child + r;
        }
        four_dots(key_rows, q, dim, &own[c]);
        four_dots(variance_rows, square, dim, &width[c]);
      }
      // Ranks, negated: places count what is before.
      const float reach = p.reach * std::log2((float)level.size), size = std::log((float)level.size);
      count_multiply_adds(4 * count);
      for (int v = 0; v < whole; v += LANES) {
        const vec x = load(&own[v]), w = load(&width[v]);
        const vec negated = -(x + root(w) * reach);
        store(&rank[v], negated == negated ? negated : broadcast(INFINITY));
        store(&width[v], x + (size + gain(w)));
      }
      choose(count, level.opened);
      for (int c = 0; c < shared; c++) {
        const bool stays = p.shown && place[c] >= level.opened;
        score[(near + from + c) * TILE + i] = stays ? width[c] : -INFINITY;
      }
      for (int c = 0; c < count; c++) {
        if (place[c] < level.opened) {
          next[place[c]] = row[c];
        } else if (p.shown && c >= shared) {
          logit[closed] = width[c];
          closed_value[closed++] = table.value + (first + row[c]) * p.value_dim;
        }
      }
      open = level.opened, from += shared;
      std::swap(opened, next);
      if (l + 1 < step.levels) {
        const TableOf &below = table_of(level_of(step, l + 1));
        for (int64_t o = 0; o < open; o++) {
          const int64_t child = (tree * below.rows + opened[o] * FOUR) * dim;
          prefetch(below.key + child, FOUR * dim * sizeof(float));
          prefetch(below.variance + child, FOUR * dim * sizeof(float));
        }
      }
    }
    const int64_t *order = p.order + tree * p.places;
    int keys = 0;
    for (int64_t o = 0; o < open; o++)
      for (int r = 0; r < LEAF; r++, keys++) {
        const int64_t at = place_of(order[opened[o] * LEAF + r]) - p.leaf_first;
        leaf_key[keys] = leaf_at(p.leaf_key, at), leaf_value[keys] = leaf_at(p.leaf_value, at);
        prefetch(leaf_key[keys], dim * leaf_bytes());
      }
    for (int c = 0; c < closed; c++) prefetch(closed_value[c], p.value_dim * sizeof(float));
    with_leaves([&](auto type) { score_leaves<decltype(type)>(q, keys, &logit[closed]); });
    finish(tile, i, closed, closed + keys);
  }

  template <class Run>
  void with_leaves(Run run) const {
    p.leaf_type == 0 ? run(float()) : p.leaf_type == 1 ? run(bf16()) : run(int8_t());
  }
  int64_t leaf_bytes() const { return p.leaf_type == 0 ? 4 : p.leaf_type == 1 ? 2 : 1; }

  // Both scales of an int8 leaf stand before its key.
  static const float *scales_of(const char *key) { return (const float *)key - 2; }

  template <class L>
  void score_leaves(const float *q, int keys, float *to) {
    for (int c = 0; c < keys; c += FOUR) {
      four_dots((const L *const *)&leaf_key[c], q, dim, to + c);
      for (int r = 0; r < FOUR; r++) {
        if (sizeof(L) == 1) to[c + r] *= scales_of(leaf_key[c + r])[0];
        prefetch(leaf_value[c + r], p.value_dim * sizeof(L));
      }
    }
  }

  template <class L>
  void mix_leaves(float *weight, int keys, float *into) {
    for (int c = 0; sizeof(L) == 1 && c < keys; c++) weight[c] *= scales_of(leaf_key[c])[1];
    mix_rows((const L *const *)leaf_value.data(), weight, keys, p.value_dim, into);
  }

  static vec root(vec x) {
    vec found;
    for (int l = 0; l < LANES; l++) found[l] = std::sqrt(x[l]);
    return found;
  }

  // The place of every candidate, the largest rank first; of those that stay closed, only that they do.
  void choose(int count, int64_t opened) {
    count_multiply_adds(count);
    if (count <= 2 * SMALL) return places_of(rank.data(), count, place.data());
    make_room(sorted, count);
    for (int c = 0; c < count; c++) sorted[c] = {rank[c], c}, place[c] = count;
    std::nth_element(sorted.begin(), sorted.begin() + opened - 1, sorted.begin() + count);
    std::sort(sorted.begin(), sorted.begin() + opened);
    for (int64_t o = 0; o < opened; o++) place[sorted[o].index] = o;
  }

  // Logits become weights beside those of the tile, and rows are summed under them.
  void finish(Tile &tile, int i, int closed, int total) {
    const int whole = (total + LANES - 1) / LANES * LANES;
    std::fill(&logit[total], &logit[0] + whole, -INFINITY);
    vec largest = broadcast(tile.top[i / LANES][i % LANES]);
    for (int v = 0; v < whole; v += LANES) largest = max(load(&logit[v]), largest);
    float top = largest[0];
    for (int l = 1; l < LANES; l++) top = std::max(top, largest[l]);
    tile.top[i / LANES][i % LANES] = top;
    count_multiply_adds(total);
    vec sum = {};
    for (int v = 0; v < whole; v += LANES) {
      const vec x = exponential(load(&logit[v]) - top);
      store(&logit[v], x);
      sum += x;
    }
    tile.sum[i / LANES][i % LANES] = sum_of_lanes(sum);
    with_leaves([&](auto type) { mix_leaves<decltype(type)>(&logit[closed], total - closed, &mixed[i * wide]); });
    mix_rows(closed_value.data(), logit.data(), closed, p.value_dim, &mixed[i * wide]);
  }
};

// The tiles of a problem, and how many there are in all those before it.
struct TilesOf {
  aligned_vector<TileOf> each;
  int64_t heads, before;
};

template <class T>
static void descend(const Descents &p, int threads) {
  std::vector<TilesOf> tiles;
  int64_t total = 0;
  for (const Descend *one = p.each; one < p.each + p.count; one++) {
    const auto *steps = (const StepOf *)one->steps;
    TilesOf own{{}, one->heads / one->gqa_ratio, total};
    for (int64_t s = 0; s < one->count; s++)
      for (int64_t first = 0; first < one->gqa_ratio * (steps[s].stop - steps[s].start); first += TILE)
        own.each.push_back({s, first});
    total += one->sequences * own.heads * own.each.size();
    tiles.push_back(std::move(own));
  }
  // One problem after the other: a worker holds what it needs of one.
  struct Worker {
    int64_t problem = -1;
    std::unique_ptr<Descender<T>> descender;
  };
  const auto attend = [&](Worker &worker, int64_t t) {
    int64_t i = std::max<int64_t>(worker.problem, 0);
    while (i + 1 < p.count && tiles[i + 1].before <= t) i++;
    if (i != worker.problem) worker.problem = i, worker.descender.reset(new Descender<T>(p.each[i]));
    const TilesOf &own = tiles[i];
    const int64_t each = own.each.size(), at = t - own.before, tile = at % each;
    worker.descender->attend(at / each / own.heads, at / each % own.heads, own.each[tile].step, own.each[tile].first);
  };
  in_parallel(threads, total, [] { return Worker(); }, attend, 4);
}

}  // namespace fewkeys
