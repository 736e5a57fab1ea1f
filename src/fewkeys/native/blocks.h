// Softmax over a list of keys and means of the past for every block of queries: `fewkeys.rest.base.BlockStandIns`.
#pragma once
#include "matrix.h"

namespace fewkeys {

// Writes the places of the keys that a block lists, without placeholders; returns their number.
static int places_of(const Blocks &p, int64_t head, int64_t block, int64_t *place) {
  const int64_t *index = p.place + (head * p.blocks + block) * p.entries;
  return std::copy_if(index, index + p.entries, place, [&](int64_t at) { return at < p.keys; }) - place;
}

// Hides the keys of a list from the queries before them.
static void show_list(const Blocks &p, Tile &tile, const int64_t *place, int count, int64_t position, float *score) {
  const ivec lane = count_up();
  for (int c = 0; c < count; c++)
    tile.show(score + c * TILE, lane, p.causal ? std::clamp<int64_t>(place[c] - position, 0, TILE) : 0, TILE);
}

// The keys of one block, and all queries of the block that read them.
template <class Products>
class BlockAttention {
 public:
  explicit BlockAttention(const Blocks &p)
      : p(p), query(p.dim), mixed(p.value_dim), list(p.dim, p.value_dim), means(p.dim, p.value_dim),
        score((round_up(p.entries, STEP) + round_up(p.means, STEP)) * TILE), place(p.entries) {}

  void attend(int64_t head, int64_t block) {
    const int64_t shared_heads = p.heads / p.gqa_ratio, b = head / shared_heads, h = head % shared_heads;
    const int64_t first_mean = block * p.means;
    const float *bias = p.bias + head * p.blocks * p.means + first_mean;
    const int64_t begin = (p.offset / p.size + block) * p.size - p.offset;
    listed = places_of(p, head, block, place.data());
    gather(b, h);
    means.read(p.mean_key.at<float>(b, h, first_mean), p.mean_key.row, p.mean_value.at<float>(b, h, first_mean),
               p.mean_value.row, p.means);
    const int64_t end = std::min(p.queries, begin + p.size);
    for (int64_t g = h * p.gqa_ratio; g < (h + 1) * p.gqa_ratio; g++)
      for (int64_t first = std::max<int64_t>(0, begin); first < end; first += TILE)
        attend_tile(b, g, first, std::min<int64_t>(TILE, end - first), bias);
  }

 private:
  typedef typename Products::Number Number;
  const Blocks &p;
  const typename Products::Session session = {};
  typename Products::Queries query;
  typename Products::Mixed mixed;
  typename Products::Columns list, means;
  aligned_vector<float> score;
  int listed = 0;
  aligned_vector<int64_t> place;

  void gather(int64_t b, int64_t h) {
    bool in_a_row = true;
    for (int e = 1; e < listed; e++) in_a_row &= place[e] == place[e - 1] + 1;
    const int64_t first = in_a_row && listed ? place[0] : 0;
    const Number *key = p.key.at<Number>(b, h, first), *value = p.value.at<Number>(b, h, first);
    if (in_a_row)
      list.read(key, p.key.row, value, p.value.row, listed);
    else
      list.gather(key, p.key.row, value, p.value.row, place.data(), listed);
  }

  void attend_tile(int64_t b, int64_t h, int64_t first, int rows, const float *bias) {
    const int64_t position = first + p.offset;
    int seen = listed;
    if (p.causal)
      while (seen && place[seen - 1] > position + rows - 1) seen--;
    query.set(p.query.at<Number>(b, h, first), p.query.row, rows);
    float *mean_score = score.data() + round_up(seen, STEP) * TILE;
    list.dots(query, seen, score.data());
    means.dots(query, p.means, mean_score);
    Tile tile(p.scale);
    show_list(p, tile, place.data(), seen, position, score.data());
    tile.show_means(mean_score, bias, p.means);
    tile.settle();
    tile.weigh(score.data(), seen);
    tile.weigh(mean_score, p.means);
    mixed.clear();
    list.mix(score.data(), seen, rows, Everywhere(), mixed);
    means.mix(mean_score, p.means, rows, Everywhere(), mixed);
    tile.write(mixed.rows(), round_up(p.value_dim), (Number *)p.out.at<Number>(b, h, first), p.out.row, rows,
               p.value_dim);
  }
};

template <class Products>
static void attend_blocks(const Blocks &p, int threads) {
  const int64_t work = p.batch * (p.heads / p.gqa_ratio) * p.blocks;
  const auto attend = [&](BlockAttention<Products> &block, int64_t t) { block.attend(t / p.blocks, t % p.blocks); };
  in_parallel(threads, work, [&] { return BlockAttention<Products>(p); }, attend);
}

}  // namespace fewkeys
