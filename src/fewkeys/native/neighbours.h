// Keys around the queries of a cohort, which stand anywhere: every query of a tile has rows of its own.
#pragma once
#include "rows.h"
#include "tile.h"

namespace fewkeys {

template <class T>
class Neighbours {
 public:
  explicit Neighbours(const Near &p)
      : p(p), most(p.order ? std::clamp<int64_t>(p.left + p.right + 1, 0, p.keys) : 0), score(most * TILE),
        query(most ? p.dim : 0), weight(most), key(round_up(most, FOUR)), value(most), listed(most ? p.keys : 0) {}

  // Scores of what `rows` queries at `position` reach outside the list of their cohort; `count` (means, TILE) loses
  // one for each such key, at its cluster.
  void look(Tile &tile, int64_t b, int64_t shared_head, const T *queries, const int64_t *position, int rows,
            float *count) {
    if (!most) return;
    batch = b, key_head = shared_head / p.cohorts;
    const int64_t keys_of = (b * (p.heads / p.gqa_ratio / p.cohorts) + key_head) * p.keys;
    mark(b * (p.heads / p.gqa_ratio) + shared_head);
    std::fill(score.begin(), score.end(), -INFINITY);
    for (int i = 0; i < rows; i++) {
      int64_t first;
      const int reached = reach(position[i], first);
      from[i] = first, many[i] = reached;
      if (!reached) continue;
      for (int64_t d = 0; d < p.dim; d++) query[d] = to_float(queries[i * p.dim + d]);
      for (int w = 0; w < (int)round_up(reached, FOUR); w++)
        key[w] = p.key.at<T>(b, key_head, first + std::min(w, reached - 1));
      for (int w = 0; w < reached; w += FOUR) {
        float product[FOUR];
        four_dots(&key[w], query.data(), p.dim, product);
        for (int r = 0; r < FOUR && w + r < reached; r++) {
          const int64_t j = first + w + r;
          if (listed[j] || (p.hidden && p.hidden[keys_of + j])) continue;
          score[(w + r) * TILE + i] = product[r] * p.scale;
          if (p.means) count[p.label[keys_of + j] * TILE + i] -= 1.0f;
        }
      }
    }
    count_multiply_adds(most * TILE);
    for (int64_t w = 0; w < most; w++)
      for (int part = 0, v = 0; part < WIDE; part++, v += LANES)
        tile.top[part] = max(tile.top[part], load(&score[w * TILE + v]));
  }

  void weigh(Tile &tile) { tile.weigh(score.data(), most); }

  // Adds the values under their weights to the sums (TILE, wide) of the same queries.
  void mix(float *sums, int64_t wide, int rows) {
    for (int i = 0; most && i < rows; i++) {
      for (int w = 0; w < many[i]; w++) {
        value[w] = p.value.at<T>(batch, key_head, from[i] + w);
        weight[w] = score[w * TILE + i];
      }
      mix_rows(value.data(), weight.data(), many[i], p.value_dim, sums + i * wide);
    }
  }

 private:
  const Near &p;
  const int64_t most;  // keys that a query reaches
  aligned_vector<float> score, query, weight;
  std::vector<const T *> key, value;
  std::vector<uint8_t> listed;  // ones for the keys in the list of the cohort `marked`
  int64_t marked = -1, batch = 0, key_head = 0, from[TILE];
  int many[TILE];

  int reach(int64_t position, int64_t &first) const {
    first = std::clamp<int64_t>(position - p.left, 0, p.keys);
    return std::clamp<int64_t>(position + p.right + 1, first, p.keys) - first;
  }

  void mark(int64_t head) {
    if (head == marked) return;
    if (marked >= 0) set(marked, 0);
    set(marked = head, 1);
  }
  void set(int64_t head, uint8_t flag) {
    for (int64_t c = head * p.entries; c < (head + 1) * p.entries; c++)
      if (p.place[c] < p.keys) listed[p.place[c]] = flag;
  }
};

}  // namespace fewkeys
