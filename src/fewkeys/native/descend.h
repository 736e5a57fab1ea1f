// Softmax over what every query finds in a forest of key trees.
#pragma once
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
      const float *weight = found.logit.data();
      mix_rows(found.leaf_value.data(), weight + found.closed, found.keys, p.value_dim, &mixed[i * wide]);
      mix_rows(found.closed_value.data(), weight, found.closed, p.value_dim, &mixed[i * wide]);
    }
    tile.settle();
    tile.weigh(found.score.data(), count);
    for (int i = 0; i < found.rows; i += SOME)
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

template <class T>
static void descend(const Descend &p, int threads) {
  const aligned_vector<TileOf> tiles = tiles_of(p);
  const int64_t heads = p.heads / p.gqa_ratio, each = tiles.size();
  const auto attend = [&](DescentAttention<T> &attention, int64_t t) {
    attention.attend(t / each / heads, t / each % heads, tiles[t % each].step, tiles[t % each].first);
  };
  in_parallel(threads, p.sequences * heads * each, [&] { return DescentAttention<T>(p); }, attend, 4);
}

}  // namespace fewkeys
