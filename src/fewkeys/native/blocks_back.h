// Gradients of `blocks.h`: the weights of every block are computed again from the inputs.
#pragma once
#include "back.h"
#include "blocks.h"

namespace fewkeys {

template <class T>
class BlockAttentionBack {
 public:
  explicit BlockAttentionBack(const BlocksBack &all)
      : all(all), p(all.of), dim(p.dim), value_dim(p.value_dim), pairs(p.entries + p.means, dim, value_dim),
        tile_back(dim, value_dim), weight((p.entries + p.means) * TILE), grad((p.entries + p.means) * TILE),
        place(p.entries) {}

  void attend(int64_t head, int64_t block, Sequencer &order) {
    const int64_t shared_heads = p.heads / p.gqa_ratio, b = head / shared_heads, h = head % shared_heads;
    const int64_t begin = (p.offset / p.size + block) * p.size - p.offset, end = std::min(p.queries, begin + p.size);
    take(b, h, head, block);
    pairs.clear();
    for (int64_t g = h * p.gqa_ratio; g < (h + 1) * p.gqa_ratio; g++)
      for (int64_t first = std::max<int64_t>(0, begin); first < end; first += TILE)
        attend_tile(b, g, first, std::min<int64_t>(TILE, end - first));
    for (int64_t c = 0; c < p.means; c++) {
      float *to = all.means + ((head * p.blocks + block) * p.means + c) * (dim + value_dim);
      std::copy_n(&pairs.to_key[(listed + c) * pairs.deep], dim, to);
      std::copy_n(&pairs.to_value[(listed + c) * pairs.wide], value_dim, to + dim);
    }
    order.wait(head, block);
    for (int e = 0; e < listed; e++) {
      add(all.key + (head * p.keys + place[e]) * dim, &pairs.to_key[e * pairs.deep], 1.0f, dim);
      add(all.value + (head * p.keys + place[e]) * value_dim, &pairs.to_value[e * pairs.wide], 1.0f, value_dim);
    }
    order.advance(head);
  }

 private:
  const BlocksBack &all;
  const Blocks &p;
  const int dim, value_dim;
  KeyValues pairs;  // the list, and the means behind it
  TileBack<T> tile_back;
  aligned_vector<float> weight, grad;
  const float *bias = nullptr;
  int listed = 0;
  aligned_vector<int64_t> place;

  void take(int64_t b, int64_t h, int64_t head, int64_t block) {
    listed = places_of(p, head, block, place.data());
    bias = p.bias + (head * p.blocks + block) * p.means;
    for (int e = 0; e < listed; e++) {
      copy_rows(p.key.at<T>(b, h, place[e]), 0, 1, dim, pairs.deep, &pairs.key[e * pairs.deep]);
      copy_rows(p.value.at<T>(b, h, place[e]), 0, 1, value_dim, pairs.wide, &pairs.value[e * pairs.wide]);
    }
    copy_rows(p.mean_key.at<float>(b, h, block * p.means), p.mean_key.row, p.means, dim, pairs.deep,
              pairs.key.data() + listed * pairs.deep);
    copy_rows(p.mean_value.at<float>(b, h, block * p.means), p.mean_value.row, p.means, value_dim, pairs.wide,
              pairs.value.data() + listed * pairs.wide);
  }

  void attend_tile(int64_t b, int64_t h, int64_t first, int rows) {
    const int columns = listed + p.means;
    tile_back.set(p.query.at<T>(b, h, first), p.query.row, all.out.at<T>(b, h, first), all.out.row, rows);
    tile_back.key_products(pairs, 0, columns, weight.data());
    Tile tile(p.scale);
    show_list(p, tile, place.data(), listed, first + p.offset, weight.data());
    tile.show_means(weight.data() + listed * TILE, bias, p.means);
    tile.settle();
    tile.weigh(weight.data(), columns);
    vec inverse[WIDE], mean[WIDE] = {};
    invert(tile, inverse);
    divide(weight.data(), columns, inverse);
    tile_back.value_products(pairs, 0, columns, grad.data());
    add_products(weight.data(), grad.data(), columns, mean);
    grads_of_scores(weight.data(), grad.data(), columns, mean, p.scale);
    tile_back.accumulate(weight.data(), grad.data(), pairs, 0, columns);
    tile_back.write(all.query + ((b * p.heads + h) * p.queries + first) * dim);
  }
};

template <class T>
static void attend_blocks_back(const BlocksBack &all, int threads) {
  const Blocks &p = all.of;
  const int64_t heads = p.batch * (p.heads / p.gqa_ratio);
  Sequencer order(heads);
  const auto attend = [&](BlockAttentionBack<T> &block, int64_t t) {
    block.attend(t / p.blocks, t % p.blocks, order);
  };
  in_parallel(threads, heads * p.blocks, [&] { return BlockAttentionBack<T>(all); }, attend);
}

}  // namespace fewkeys
