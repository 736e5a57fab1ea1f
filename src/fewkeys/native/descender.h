// What every query finds in a forest of key trees: `fewkeys.tree.descent` has the equations.
//
// Queries of a step see the same keys near them and the same nodes that enter each level: those are columns of a tile,
// queries in the lanes. What a query opens is its own: there, dimensions are in the lanes, four rows at a time.
#pragma once
#include <limits>

#include "leaves.h"
#include "tile.h"

namespace fewkeys {

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
// One of many candidates.
struct Ranked {
  float rank;
  int32_t index;
  bool operator<(const Ranked &other) const {
    return rank < other.rank || (rank == other.rank && index < other.index);
  }
};
struct TableOf {
  const float *key, *value, *variance, *radius;  // radius: null where no bounds are asked for
  int64_t rows;
};
// A node that stands in: its table, its row there beginning with those of the first head, and the variance of its
// scores.
struct ClosedAt {
  int64_t table, row;
  float spread;
};

// What a tile of queries attends to, and its scores.
template <class T>
class Descender {
 public:
  const int64_t dim, wide;
  // Of a tile: how many queries, of which sequence and key head; their heads and places; scaled, as rows, and squared.
  int rows = 0;
  int64_t batch = 0, shared = 0, tree = 0, query_head[TILE], query_place[TILE];
  aligned_vector<float> asked, squared;
  // What all of them see, near keys and then nodes that enter: rows, logits and spreads in lanes.
  int near = 0, entering = 0;
  aligned_vector<float> key, value, variance, score, spread;
  // What one of them finds, nodes that stand in and then keys of leaves: logits, and where their rows are.
  int closed = 0;
  aligned_vector<float> logit;
  aligned_vector<ClosedAt> closed_at;
  aligned_vector<const float *> closed_value;
  Leaves leaves;

  explicit Descender(const Descend &p)
      : dim(p.dim), wide(round_up(p.value_dim)), asked(TILE * dim), squared(TILE * dim), leaves(p), p(p),
        lanes(dim * TILE), lane_squares(dim * TILE) {}

  // Queries first .. first + TILE - 1 of those of a step and a key head, group after group.
  void look(Tile &tile, int64_t sequence, int64_t head, int64_t index, int64_t first) {
    const StepOf &step = step_of(index);
    const int64_t length = step.stop - step.start;
    rows = std::min<int64_t>(TILE, p.gqa_ratio * length - first);
    batch = p.batch ? p.batch[sequence] : sequence, shared = head, tree = sequence * (p.heads / p.gqa_ratio) + head;
    collect(step, index);

    const T *at[TILE];
    for (int i = 0; i < rows; i++) {
      const int64_t h = head * p.gqa_ratio + (first + i) / length, n = step.start + (first + i) % length;
      query_head[i] = h, query_place[i] = n, at[i] = p.query.at<T>(batch, h, n);
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

    look_near(tile);
    weigh_near(tile);
    look_at_entering(tile, step);
  }

  // Query i opens nodes, level by level, and finds the keys of leaves and what it does not open.
  void descend(int64_t index, int i) {
    const StepOf &step = step_of(index);
    const float *q = &asked[i * dim], *square = &squared[i * dim];
    int64_t open = 0;
    int from = 0;
    closed = leaves.count = 0;
    Mass mass{near_top[i / LANES][i % LANES], near_sum[i / LANES][i % LANES], 0.0f, length_of(square)};
    for (int64_t l = 0; l < step.levels; l++) {
      const LevelOf &level = level_of(step, l);
      const TableOf &table = table_of(level.table);
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
        const float *means = table.key + (first + child) * dim, *variances = table.variance + (first + child) * dim;
        const float *key_rows[FOUR], *variance_rows[FOUR];
        for (int r = 0; r < FOUR; r++) {
          key_rows[r] = means + r * dim, variance_rows[r] = variances + r * dim;
          row[c + r] = child + r;
        }
        four_dots(key_rows, q, dim, &own[c]);
        four_dots(variance_rows, square, dim, &width[c]);
      }
      // Ranks, negated: places count what is before.
      const float reach = (1 + std::log2((float)level.size)) / 2, size = std::log((float)level.size);
      count_multiply_adds(4 * count);
      for (int v = 0; v < whole; v += LANES) {
        const vec x = load(&own[v]), w = load(&width[v]);
        const vec negated = -(x + root(w) * reach);
        store(&rank[v], negated == negated ? negated : broadcast(INFINITY));
        store(&staying[v], x + (size + gain(w)));
      }
      int64_t beam = std::min<int64_t>(level.opened, count);
      choose(count, beam);
      if (p.spare >= 0) beam = stop(mass, table, size, first, count, beam, l, step.levels);
      for (int c = 0; c < shared; c++) {
        const bool stays = p.shown && place[c] >= beam;
        score[(near + from + c) * TILE + i] = stays ? staying[c] : -INFINITY;
      }
      // Without branches, which nothing could foretell: what does not stay is written over.
      for (int c = 0; c < count; c++) next[place[c]] = row[c];
      for (int c = shared; p.shown && c < count; c++) {
        logit[closed] = staying[c];
        closed_at[closed] = {level.table, first + row[c], width[c]};
        closed_value[closed] = table.value + (first + row[c]) * p.value_dim;
        closed += place[c] >= beam;
      }
      open = beam, from += shared;
      std::swap(opened, next);
      if (l + 1 < step.levels) {
        const TableOf &below = table_of(level_of(step, l + 1).table);
        for (int64_t o = 0; o < open; o++) {
          const int64_t child = (tree * below.rows + opened[o] * FOUR) * dim;
          prefetch(below.key + child, FOUR * dim * sizeof(float));
          prefetch(below.variance + child, FOUR * dim * sizeof(float));
        }
      }
    }
    const int64_t *order = p.order + tree * p.places;
    for (int64_t o = 0; o < open; o++)
      for (int r = 0; r < LEAF; r++) leaves.take(batch, shared, place_of(order[opened[o] * LEAF + r]));
    for (int c = 0; c < closed; c++) prefetch(closed_value[c], p.value_dim * sizeof(float));
    leaves.score(q, logit.data() + closed);
  }

  // Of query i, logits become weights beside those of the tile.
  void weigh(Tile &tile, int i) {
    const int total = closed + leaves.count;
    if (!total) return;
    const int whole = (total + LANES - 1) / LANES * LANES;
    std::fill(logit.data() + total, logit.data() + whole, -INFINITY);
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
  }

  // Adds what a query that has been weighed finds beside its tile; its weights are of no use afterwards.
  void mix_found(float *into) {
    leaves.mix(logit.data() + closed, into);
    mix_rows(closed_value.data(), logit.data(), closed, p.value_dim, into);
  }

  const TableOf &table_of(int64_t table) const { return ((const TableOf *)p.tables)[table]; }
  // Where near key j of the step that was looked at stands among `key`.
  int64_t near_at(int64_t index, int j) const {
    return place_of(key_near(step_of(index), j) - (j < sinks ? 0 : p.skipped));
  }
  // All nodes that enter: table and row.
  template <class Take>
  void each_entering(int64_t index, Take take) const {
    const StepOf &step = step_of(index);
    for (int64_t l = 0; l < step.levels; l++) {
      const LevelOf &level = level_of(step, l);
      for (int64_t r = 0; r < level.runs; r++) {
        const RunOf &run = ((const RunOf *)p.runs)[level.run + r];
        for (int64_t n = 0; n < run.count; n++) take(level.table, tree * table_of(level.table).rows + run.first + n);
      }
    }
  }

 private:
  const Descend &p;
  int64_t held[2] = {-1, -1};
  int sinks = 0;
  int64_t position[2] = {};  // of near keys, less their number: sinks, others
  aligned_vector<float> lanes, lane_squares;
  int64_t limit[TILE];
  aligned_vector<int64_t> row;                      // candidates: their rows of the table,
  aligned_vector<float> own, width, rank, staying;  // scores, spreads, negated ranks, logits where they stay closed
  aligned_vector<float> lower, upper;  // logarithms of their masses, then these
  aligned_vector<int32_t> place, chosen;
  vec near_top[WIDE], near_sum[WIDE];
  aligned_vector<int64_t> opened, next;
  aligned_vector<Ranked> sorted;

  const StepOf &step_of(int64_t index) const { return ((const StepOf *)p.steps)[index]; }
  const LevelOf &level_of(const StepOf &step, int64_t level) const {
    return ((const LevelOf *)p.levels)[step.level + level];
  }
  int64_t place_of(int64_t key) const { return p.real ? p.real[key] : key; }

  template <class A>
  static void make_room(A &array, int64_t count) {
    if ((int64_t)array.size() < count) array.resize(count);
  }

  // Copies what all queries of a step see.
  void collect(const StepOf &step, int64_t index) {
    if (held[0] == tree && held[1] == index) return;
    held[0] = tree, held[1] = index;
    const int64_t before = std::min<int64_t>(p.sinks, step.seen);
    near = before + step.seen - step.near, sinks = before;
    entering = 0;
    int64_t most = 0, total = 0;
    for (int64_t l = 0; l < step.levels; l++) {
      const LevelOf &level = level_of(step, l);
      for (int64_t r = 0; r < level.runs; r++) entering += ((const RunOf *)p.runs)[level.run + r].count;
      most = std::max(most, level.scored), total += level.scored;
    }
    const int64_t most_keys = step.levels ? LEAF * level_of(step, step.levels - 1).opened : 0;
    const int64_t room = near + entering, whole = round_up(most), all = round_up(total + most_keys);
    make_room(key, room * dim), make_room(value, room * wide), make_room(variance, entering * dim);
    make_room(score, room * TILE), make_room(spread, entering * TILE);
    make_room(row, whole), make_room(own, whole), make_room(width, whole), make_room(rank, whole);
    make_room(staying, whole), make_room(place, whole), make_room(opened, whole + 1), make_room(next, whole + 1);
    if (p.spare >= 0) make_room(lower, whole), make_room(upper, whole), make_room(chosen, whole);
    make_room(logit, all), make_room(closed_value, total + 1), make_room(closed_at, total + 1);
    leaves.make_room(most_keys);
    for (int j = 0; j < near; j++) {
      const int64_t at = near_at(index, j);
      copy_rows(p.key.at<T>(batch, shared, at), 0, 1, dim, dim, &key[j * dim]);
      copy_rows(p.value.at<T>(batch, shared, at), 0, 1, p.value_dim, wide, &value[j * wide]);
      position[j < before ? 0 : 1] = key_near(step, j) - j;
    }
    int64_t to = 0;
    for (int64_t l = 0; l < step.levels; l++) {
      const LevelOf &level = level_of(step, l);
      const TableOf &table = table_of(level.table);
      for (int64_t r = 0; r < level.runs; r++) {
        const RunOf &run = ((const RunOf *)p.runs)[level.run + r];
        const int64_t from = tree * table.rows + run.first;
        std::copy_n(table.key + from * dim, run.count * dim, key.data() + (near + to) * dim);
        std::copy_n(table.variance + from * dim, run.count * dim, variance.data() + to * dim);
        copy_rows(table.value + from * p.value_dim, p.value_dim, run.count, p.value_dim, wide,
                  value.data() + (near + to) * wide);
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
        for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
          const vec width = load(&spread[c * TILE + v]);
          tile.top[w] = max(tile.top[w], load(&score[(near + c) * TILE + v]) + (size + gain(width)));
        }
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

  static vec root(vec x) {
    vec found;
    for (int l = 0; l < LANES; l++) found[l] = std::sqrt(x[l]);
    return found;
  }

  // What a query knows of its mass, in units of e^top: the least that there is beside the nodes of a level, and the
  // most that stays closed. `length`: of the query.
  struct Mass {
    float top, seen, closed, length;
  };
  float length_of(const float *square) const {
    if (p.spare < 0 || !p.certified) return 0.0f;
    float sum = 0.0f;
    for (int64_t d = 0; d < dim; d++) sum += square[d];
    return std::sqrt(sum);
  }

  // The mass of near keys.
  void weigh_near(const Tile &tile) {
    for (int w = 0; w < WIDE; w++) near_top[w] = tile.top[w], near_sum[w] = vec{};
    if (p.spare < 0) return;
    count_multiply_adds(near * TILE);
    for (int j = 0; j < near; j++)
      for (int w = 0; w < WIDE; w++) near_sum[w] += exponential(load(&score[j * TILE + w * LANES]) - near_top[w]);
  }

  // How many of `count` candidates are opened, at most `beam`: `fewkeys.tree.enough`.
  int64_t stop(Mass &mass, const TableOf &table, float size, int64_t first, int count, int64_t beam, int64_t level,
               int64_t levels) {
    const int whole = (count + LANES - 1) / LANES * LANES;
    float top = mass.top;
    count_multiply_adds(6 * count);
    for (int c = 0; c < count; c++) {
      const float w = width[c], expected = w < 2 * size ? size + w / 2 : std::sqrt(w * 2 * size);
      lower[c] = own[c] + (p.certified ? size : expected);
      upper[c] = p.certified ? lower[c] + mass.length * table.radius[first + row[c]] : lower[c];
      top = std::max(top, upper[c]);
    }
    for (int c = count; c < whole; c++) lower[c] = upper[c] = -INFINITY;
    const float by = std::exp(mass.top - top);
    mass.top = top, mass.seen *= by, mass.closed *= by;
    float there = mass.seen, left = mass.closed;
    for (int v = 0; v < whole; v += LANES) {
      store(&lower[v], exponential(load(&lower[v]) - top));
      store(&upper[v], exponential(load(&upper[v]) - top));
    }
    for (int c = 0; c < count; c++) {
      there += lower[c];
      if (place[c] < beam)
        chosen[place[c]] = c;
      else
        left += upper[c], mass.seen += lower[c];
    }
    // What is far below the largest bound has been rounded to zero: then nothing can be told.
    const float allowed = there * p.spare * (level + 1) / levels;
    for (; beam > 0 && allowed > 1e-28f && left + upper[chosen[beam - 1]] <= allowed; beam--)
      left += upper[chosen[beam - 1]], mass.seen += lower[chosen[beam - 1]];
    mass.closed = left;
    return beam;
  }

  // The place of every candidate, the largest rank first; of those that stay closed, only that they do.
  void choose(int count, int64_t opened) {
    count_multiply_adds(count);
    numbers_only(rank.data(), count);
    if (count <= 2 * SMALL || !opened) return places_of(rank.data(), count, place.data());
    make_room(sorted, count);
    for (int c = 0; c < count; c++) sorted[c] = {rank[c], c}, place[c] = count;
    std::nth_element(sorted.begin(), sorted.begin() + opened - 1, sorted.begin() + count);
    std::sort(sorted.begin(), sorted.begin() + opened);
    for (int64_t o = 0; o < opened; o++) place[sorted[o].index] = o;
  }
};

}  // namespace fewkeys
