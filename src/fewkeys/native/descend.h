// Softmax over what every query finds in a forest of key trees.
#pragma once
#include <memory>

#include "descender.h"

namespace fewkeys {

// A tile of queries of a step.
struct TileOf {
  int64_t step, first;
};

template <class T>
class DescentAttention {
 public:
  explicit DescentAttention(const Descend &p) : p(p), found(p), mixed(TILE * found.wide) {}

  void attend(int64_t sequence, int64_t head, int64_t index, int64_t first) {
    Tile tile(1.0f);
    found.look(tile, sequence, head, index, first);
    const int count = found.near + found.entering;
    const int64_t wide = found.wide;
    std::fill(mixed.begin(), mixed.end(), 0.0f);
    for (int i = 0; i < found.rows; i++) {
      found.descend(index, i);
      found.weigh(tile, i);
      found.mix_found(&mixed[i * wide]);
    }
    tile.settle();
    tile.weigh(found.score.data(), count);
    for (int i = 0; count && i < found.rows; i += SOME)
      mix(found.value.data(), wide, count, wide, &found.score[i], TILE, &mixed[i * wide], wide);
    for (int i = 0; i < found.rows; i++) {
      const float sum = tile.sum[i / LANES][i % LANES], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      T *to = (T *)p.out.at<T>(found.batch, found.query_head[i], found.query_place[i]);
      for (int64_t d = 0; d < p.value_dim; d++) round_to(mixed[i * wide + d] * inverse, to[d]);
    }
  }

 private:
  const Descend &p;
  Descender<T> found;
  aligned_vector<float> mixed;
};

// The tiles of all steps, of one key head.
static inline aligned_vector<TileOf> tiles_of(const Descend &p) {
  const auto *steps = (const StepOf *)p.steps;
  aligned_vector<TileOf> tiles;
  for (int64_t s = 0; s < p.count; s++)
    for (int64_t first = 0; first < p.gqa_ratio * (steps[s].stop - steps[s].start); first += TILE)
      tiles.push_back({s, first});
  return tiles;
}

// The most rows that all queries of a tile see.
static inline int64_t most_seen(const Descend &p) {
  const auto *steps = (const StepOf *)p.steps;
  const auto *levels = (const LevelOf *)p.levels;
  const auto *runs = (const RunOf *)p.runs;
  int64_t most = 0;
  for (int64_t s = 0; s < p.count; s++) {
    int64_t count = std::min<int64_t>(p.sinks, steps[s].seen) + steps[s].seen - steps[s].near;
    for (int64_t l = steps[s].level; l < steps[s].level + steps[s].levels; l++)
      for (int64_t r = levels[l].run; r < levels[l].run + levels[l].runs; r++) count += runs[r].count;
    most = std::max(most, count);
  }
  return most;
}

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
    TilesOf own{tiles_of(*one), one->heads / one->gqa_ratio, total};
    total += one->sequences * own.heads * own.each.size();
    tiles.push_back(std::move(own));
  }
  // One problem after the other: a worker holds what it needs of one.
  struct Worker {
    int64_t problem = -1;
    std::unique_ptr<DescentAttention<T>> attention;
  };
  const auto attend = [&](Worker &worker, int64_t t) {
    int64_t i = std::max<int64_t>(worker.problem, 0);
    while (i + 1 < p.count && tiles[i + 1].before <= t) i++;
    if (i != worker.problem) worker.problem = i, worker.attention.reset(new DescentAttention<T>(p.each[i]));
    const TilesOf &own = tiles[i];
    const int64_t each = own.each.size(), at = t - own.before, tile = at % each;
    worker.attention->attend(at / each / own.heads, at / each % own.heads, own.each[tile].step, own.each[tile].first);
  };
  in_parallel(threads, total, [] { return Worker(); }, attend, 4);
}

}  // namespace fewkeys
