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
        query(most ? p.dim : 0), weight(most), product(round_up(most, FOUR)), row(round_up(most, FOUR)),
        cluster(most ? p.keys : 0) {}

  // Scores of what `rows` queries at `position` reach outside the list of their cohort. `count` (means + 2, TILE) loses
  // one for each such key, at its cluster, and behind the clusters for each other key.
  void look(Tile &tile, int64_t b, int64_t shared_head, const T *queries, const int64_t *position, int rows,
            float *count) {
    if (!most) return;
    take_clusters(b, shared_head);
    std::fill(score.begin(), score.end(), -INFINITY);
    for (int i = 0; i < rows; i++) {
      const int64_t first = from[i] = std::clamp<int64_t>(position[i] - p.left, 0, p.keys);
      const int reached = many[i] = std::clamp<int64_t>(position[i] + p.right + 1, first, p.keys) - first;
      if (!reached) continue;
      for (int64_t d = 0; d < p.dim; d++) query[d] = to_float(queries[i * p.dim + d]);
      take_rows(p.key, first, reached);
      for (int w = 0; w < reached; w += FOUR) four_dots(&row[w], query.data(), p.dim, &product[w]);
      for (int w = 0; w < reached; w++) {
        const int32_t c = cluster[first + w];
        count[c * TILE + i] -= 1.0f;
        score[w * TILE + i] = c == p.means ? -INFINITY : product[w] * p.scale;
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
      if (!many[i]) continue;
      take_rows(p.value, from[i], many[i]);
      for (int w = 0; w < many[i]; w++) weight[w] = score[w * TILE + i];
      mix_rows(row.data(), weight.data(), many[i], p.value_dim, sums + i * wide);
    }
  }

 private:
  const Near &p;
  const int64_t most;  // keys that a query reaches
  aligned_vector<float> score, query, weight, product;
  std::vector<const T *> row;
  std::vector<int32_t> cluster;  // of every key; `means` for padding and for keys in the list of the cohort `listed`
  int64_t listed = -1, batch = -1, key_head = -1, from[TILE];
  int many[TILE];

  // Rows that follow one another; the last one fills up to a multiple of FOUR.
  void take_rows(const Rows &rows, int64_t first, int count) {
    for (int w = 0; w < (int)row.size(); w++) row[w] = rows.at<T>(batch, key_head, first + std::min(w, count - 1));
  }

  void take_clusters(int64_t b, int64_t shared_head) {
    const int64_t head = shared_head / p.cohorts, list = b * p.heads + shared_head;
    if (list == listed) return;
    const int64_t keys = (b * (p.heads / p.cohorts) + head) * p.keys;
    const auto take = [&](int64_t j) {
      cluster[j] = (p.hidden && p.hidden[keys + j]) ? p.means : p.means ? p.label[keys + j] : 1;
    };
    if (b != batch || head != key_head) {
      for (int64_t j = 0; j < p.keys; j++) take(j);
    } else {
      each_listed(listed, take);
    }
    batch = b, key_head = head, listed = list;
    each_listed(list, [&](int64_t j) { cluster[j] = p.means; });
  }

  template <class Visit>
  void each_listed(int64_t list, Visit visit) const {
    for (int64_t c = list * p.entries; c < (list + 1) * p.entries; c++)
      if (p.place[c] < p.keys) visit(p.place[c]);
  }
};

}  // namespace fewkeys
