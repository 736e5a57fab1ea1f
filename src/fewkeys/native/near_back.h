// Gradients of `near.cpp`: tile by tile once more, the weights made again from the inputs.
#pragma once
#include "back.h"
#include "near.h"

namespace fewkeys {

// The first-order term adds sum_r u_r s right_r to the output, u_r = scale q . left_r - middle_r within reach,
// s = sum_c P_c factor_c. So phi = sum_r u_r (g . right_r) joins the gradient of every stand-in's weight, times its
// factor, and q . left_r has the gradient s (g . right_r) within reach, none beyond.
template <class T>
class NearAttentionBack {
 public:
  static constexpr int TILES = 16;  // whose gradients are added up before they are handed on

  explicit NearAttentionBack(const NearBack &all)
      : all(all), p(all.of), dim(p.dim), value_dim(p.value_dim), columns(p.entries + p.means),
        shared(columns + p.rank, dim, value_dim),
        band(std::min<int64_t>(p.keys, std::max<int64_t>(0, TILES * TILE + p.left + p.right)), dim, value_dim),
        tile_back(dim, value_dim), weights(p), grad_shared(weights.score.size()), grad_near(weights.near.size()) {}

  void attend(int64_t b, int64_t h, int64_t piece, int64_t pieces, Sequencer &order) {
    const int64_t shared_head = h / p.gqa_ratio, head = b * (p.heads / p.gqa_ratio) + shared_head;
    const int64_t begin = piece * TILES * TILE, end = std::min(p.queries, begin + TILES * TILE);
    const Reach all_reached = weights.reach_of(begin, end - begin);
    const int64_t low = all_reached.begin, high = low + all_reached.count;
    take(b, shared_head, low, high);
    for (int64_t first = begin; first < end; first += TILE)
      attend_tile(b, h, head, first, std::min<int64_t>(TILE, end - first), low);
    order.wait(head, h % p.gqa_ratio * pieces + piece);
    hand_on(head, low, high);
    order.advance(head);
  }

 private:
  const NearBack &all;
  const Near &p;
  const int dim, value_dim, columns;
  KeyValues shared, band;
  TileBack<T> tile_back;
  NearWeights weights;
  aligned_vector<float> grad_shared, grad_near;

  void take(int64_t b, int64_t h, int64_t low, int64_t high) {
    gather_shared<T>(p, b, h, shared.key.data(), shared.deep, shared.value.data(), shared.wide);
    copy_rows(p.key.at<T>(b, h, low), p.key.row, high - low, dim, band.deep, band.key.data());
    copy_rows(p.value.at<T>(b, h, low), p.value.row, high - low, value_dim, band.wide, band.value.data());
    shared.clear();
    band.clear();
  }

  void attend_tile(int64_t b, int64_t h, int64_t head, int64_t first, int rows, int64_t low) {
    const Reach reach = weights.reach_of(first, rows);
    const int reached = reach.count, from = reach.begin - low;
    float *score = weights.score.data(), *near = weights.near.data();
    tile_back.set(p.query.at<T>(b, h, first), p.query.row, all.out.at<T>(b, h, first), all.out.row, rows);
    tile_back.key_products(shared, 0, columns + p.rank, score);
    tile_back.key_products(band, from, reached, near);
    tile_back.value_products(shared, 0, columns + p.rank, grad_shared.data());
    tile_back.value_products(band, from, reached, grad_near.data());
    Tile tile(p.scale);
    vec inverse[WIDE], mean[WIDE] = {};
    weights.weigh(tile, head, first, reach);
    invert(tile, inverse);
    first_order(head, inverse);
    weights.weigh_first_order(head);
    divide(near, reached, inverse);
    divide(score, columns + p.rank, inverse);
    add_products(near, grad_near.data(), reached, mean);
    add_products(score, grad_shared.data(), columns, mean);
    grads_of_scores(near, grad_near.data(), reached, mean, p.scale);
    grads_of_scores(score, grad_shared.data(), columns, mean, p.scale);
    tile_back.accumulate(near, grad_near.data(), band, from, reached);
    tile_back.accumulate(score, grad_shared.data(), shared, 0, columns + p.rank);
    tile_back.write(all.query + ((b * p.heads + h) * p.queries + first) * dim);
  }

  // While products with left are what they were.
  void first_order(int64_t head, const vec *inverse) {
    vec phi[WIDE] = {};
    count_multiply_adds((p.rank + p.means) * TILE);
    for (int r = 0; r < p.rank; r++)
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        const int64_t at = (columns + r) * TILE + v;
        float *to = &grad_shared[at];
        const vec along = weights.along(head, r, load(&weights.score[at])), u = weights.cut(head, r, along);
        phi[w] += u * load(to);
        store(to, u == along ? load(to) * weights.slope[w] * inverse[w] * p.scale : vec{});
      }
    for (int c = 0; p.rank && c < p.means; c++)
      for (int w = 0, v = 0; w < WIDE; w++, v += LANES) {
        float *to = &grad_shared[(p.entries + c) * TILE + v];
        store(to, load(to) + phi[w] * p.factor[head * p.means + c]);
      }
  }

  void hand_on(int64_t head, int64_t low, int64_t high) {
    for (int64_t j = low; j < high; j++) {
      add(all.key + (head * p.keys + j) * dim, &band.to_key[(j - low) * band.deep], 1.0f, dim);
      add(all.value + (head * p.keys + j) * value_dim, &band.to_value[(j - low) * band.wide], 1.0f, value_dim);
    }
    const int64_t count = columns + p.rank;
    for (int64_t c = 0; c < count; c++)
      add(all.shared_key + (head * count + c) * dim, &shared.to_key[c * shared.deep], 1.0f, dim);
    add(all.shared_value + head * count * shared.wide, shared.to_value.data(), 1.0f, count * shared.wide);
  }
};

template <class T>
static void attend_back(const NearBack &all, int threads) {
  const Near &p = all.of;
  const int64_t piece = NearAttentionBack<T>::TILES * TILE, pieces = (p.queries + piece - 1) / piece;
  Sequencer order(p.batch * (p.heads / p.gqa_ratio));
  const auto attend = [&](NearAttentionBack<T> &attention, int64_t t) {
    attention.attend(t / pieces / p.heads, t / pieces % p.heads, t % pieces, pieces, order);
  };
  in_parallel(threads, p.batch * p.heads * pieces, [&] { return NearAttentionBack<T>(all); }, attend);
}

}  // namespace fewkeys
