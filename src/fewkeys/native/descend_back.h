// Gradients of `descend.h`: tile by tile once more, the weights made again from the inputs; what is opened is a choice.
//
// A node's logit is q . mu + log z + min(c spread, most), spread = sum_i q_i^2 D_i. With the gradient S of the logit
// and V = c S where the spread counts, zero beyond, mu gets S q, D gets V q^2, and q gets S mu + 2 V (q D).
#pragma once
#include "back.h"
#include "descend.h"
#include "forest.h"

namespace fewkeys {

// What the queries of a tile find, one after the other: where, under which weights, and the gradients of the logits.
template <class At>
struct FoundBack {
  aligned_vector<At> at;
  aligned_vector<float> weight, grad;
  int64_t start[TILE + 1];  // of each query

  void begin(int i) {
    if (i == 0) at.clear(), weight.clear();
    start[i] = at.size();
  }
  void end(int i) {
    start[i + 1] = at.size();
    grad.resize(at.size() + FOUR);
  }
  void take(const At *some, const float *weights, int count) {
    at.insert(at.end(), some, some + count);
    weight.insert(weight.end(), weights, weights + count);
  }
};

template <class T>
class DescentAttentionBack {
 public:
  DescentAttentionBack(const DescendBack &all, int64_t most)
      : all(all), p(all.of), dim(p.dim), value_dim(p.value_dim), found(p), seen(most, dim, value_dim),
        widths(most, dim, 0), by_score(dim, value_dim), by_spread(dim, 0), grad(most * TILE), out(TILE * value_dim),
        to_query(TILE * dim), to_square(TILE * dim) {}

  // Tile `number` of a key head; threads hand on in the order of these.
  void attend(int64_t sequence, int64_t head, const TileOf &at, int64_t number, Sequencer &order) {
    Tile tile(1.0f);
    found.look(tile, sequence, head, at.step, at.first);
    const int count = found.near + found.entering;
    for (int i = 0; i < found.rows; i++) {
      found.descend(at.step, i);
      found.weigh(tile, i);
      closed.begin(i), leaf.begin(i);
      closed.take(found.closed_at.data(), found.logit.data(), found.closed);
      leaf.take(found.leaves.place.data(), found.logit.data() + found.closed, found.leaves.count);
      closed.end(i), leaf.end(i);
    }
    slope.resize(closed.at.size());
    tile.settle();
    tile.weigh(found.score.data(), count);
    set(count);

    float *weight = found.score.data(), *width = found.spread.data();
    vec inverse[WIDE], mean[WIDE] = {};
    invert(tile, inverse);
    divide(weight, count, inverse);
    by_score.value_products(seen, 0, count, grad.data());
    add_products(weight, grad.data(), count, mean);
    for (int i = 0; i < found.rows; i++) {
      const int w = i / LANES, l = i % LANES;
      mean[w][l] = weigh_own(i, inverse[w][l], mean[w][l]);
    }
    grads_of_scores(weight, grad.data(), count, mean, 1.0f);
    count_multiply_adds(found.entering * TILE);
    for (int64_t v = 0; v < found.entering * TILE; v += LANES) {
      const vec x = load(width + v) * p.curve;
      store(width + v, x > p.highest ? vec{} : p.curve * load(&grad[found.near * TILE + v]));
    }
    by_score.accumulate(weight, grad.data(), seen, 0, count);
    by_spread.accumulate(width, width, widths, 0, found.entering);
    write();

    order.wait(found.tree, number);
    hand_on(at.step);
    order.advance(found.tree);
  }

 private:
  const DescendBack &all;
  const Descend &p;
  const int dim, value_dim;
  Descender<T> found;
  KeyValues seen, widths;               // what all queries of a tile see; the variances of the nodes among it
  TileBack<float> by_score, by_spread;  // scaled queries, and their squares
  aligned_vector<float> grad, out, to_query, to_square, slope;
  FoundBack<ClosedAt> closed;
  FoundBack<int64_t> leaf;
  aligned_vector<const float *> node_row, variance_row;
  aligned_vector<const T *> leaf_row;

  void set(int count) {
    for (int i = 0; i < found.rows; i++)
      copy_rows(all.out.at<T>(found.batch, found.query_head[i], found.query_place[i]), 0, 1, value_dim, value_dim,
                &out[i * value_dim]);
    by_score.set(found.asked.data(), dim, out.data(), value_dim, found.rows);
    by_spread.set(found.squared.data(), dim, out.data(), 0, found.rows);
    copy_rows(found.key.data(), dim, count, dim, seen.deep, seen.key.data());
    copy_rows(found.value.data(), found.wide, count, seen.wide, seen.wide, seen.value.data());
    copy_rows(found.variance.data(), dim, found.entering, dim, widths.deep, widths.key.data());
    std::fill_n(seen.to_key.begin(), count * seen.deep, 0.0f);
    std::fill_n(seen.to_value.begin(), count * seen.wide, 0.0f);
    std::fill_n(widths.to_key.begin(), found.entering * widths.deep, 0.0f);
  }

  // Where the rows lie of what query i finds; the last is repeated, since products are taken FOUR at a time.
  template <class At, class Row, class Of>
  static void point(const FoundBack<At> &list, int i, aligned_vector<Row> &to, Of row_of) {
    to.clear();
    for (int64_t c = list.start[i]; c < list.start[i + 1]; c++) to.push_back(row_of(list.at[c]));
    while (to.size() % FOUR) to.push_back(to.back());
  }
  const T *leaf_of(const Rows &rows, int64_t at) const { return rows.at<T>(found.batch, found.shared, at); }
  const TableOf &table_of(const ClosedAt &at) const { return found.table_of(at.table); }

  // Shares of one, products of the values with the gradient, and their mean, which is added to that of the tile.
  template <class At, class Row>
  float mean_of(FoundBack<At> &list, int i, const Row *row, float inverse) {
    const int64_t from = list.start[i], to = list.start[i + 1];
    float found = 0;
    for (int64_t c = from; c < to; c += FOUR)
      four_dots(row + (c - from), &out[i * value_dim], value_dim, &list.grad[c]);
    count_multiply_adds(3 * (to - from));
    for (int64_t c = from; c < to; c++) found += (list.weight[c] *= inverse) * list.grad[c];
    return found;
  }
  float weigh_own(int i, float inverse, float mean) {
    point(closed, i, node_row, [&](const ClosedAt &at) { return table_of(at).value + at.row * value_dim; });
    point(leaf, i, leaf_row, [&](int64_t at) { return leaf_of(p.value, at); });
    mean += mean_of(closed, i, node_row.data(), inverse);
    mean += mean_of(leaf, i, leaf_row.data(), inverse);
    for (int64_t c = closed.start[i]; c < closed.start[i + 1]; c++) {
      closed.grad[c] = closed.weight[c] * (closed.grad[c] - mean);
      slope[c] = closed.at[c].spread * p.curve > p.highest ? 0.0f : p.curve * closed.grad[c];
    }
    for (int64_t c = leaf.start[i]; c < leaf.start[i + 1]; c++)
      leaf.grad[c] = leaf.weight[c] * (leaf.grad[c] - mean);
    return mean;
  }

  // The gradients of the queries.
  void write() {
    by_score.write(to_query.data()), by_spread.write(to_square.data());
    for (int i = 0; i < found.rows; i++) {
      const int nodes = closed.start[i + 1] - closed.start[i], keys = leaf.start[i + 1] - leaf.start[i];
      float *own = &to_query[i * dim], *square = &to_square[i * dim];
      point(closed, i, node_row, [&](const ClosedAt &at) { return table_of(at).key + at.row * dim; });
      point(closed, i, variance_row, [&](const ClosedAt &at) { return table_of(at).variance + at.row * dim; });
      point(leaf, i, leaf_row, [&](int64_t at) { return leaf_of(p.key, at); });
      mix_rows(node_row.data(), closed.grad.data() + closed.start[i], nodes, dim, own);
      mix_rows(variance_row.data(), slope.data() + closed.start[i], nodes, dim, square);
      mix_rows(leaf_row.data(), leaf.grad.data() + leaf.start[i], keys, dim, own);
      const float *q = &found.asked[i * dim];
      const int64_t head = found.batch * p.heads + found.query_head[i];
      float *to = all.query + (head * all.queries + found.query_place[i]) * dim;
      for (int d = 0; d < dim; d++) to[d] = p.scale * (own[d] + 2 * q[d] * square[d]);
    }
  }

  // Adds what keys, values and nodes get.
  void hand_on(int64_t step) {
    const int64_t head = (found.batch * (p.heads / p.gqa_ratio) + found.shared) * all.keys;
    const auto give_key = [&](int64_t at, const float *q, float by, const float *g, float weight) {
      add(all.key + (head + at) * dim, q, by, dim);
      add(all.value + (head + at) * value_dim, g, weight, value_dim);
    };
    const auto *to = (const TableTo *)all.to;
    for (int j = 0; j < found.near; j++)
      give_key(found.near_at(step, j), &seen.to_key[j * seen.deep], 1.0f, &seen.to_value[j * seen.wide], 1.0f);
    for (int i = 0; i < found.rows; i++)
      for (int64_t c = leaf.start[i]; c < leaf.start[i + 1]; c++)
        if (leaf.weight[c] != 0.0f)
          give_key(leaf.at[c], &found.asked[i * dim], leaf.grad[c], &out[i * value_dim], leaf.weight[c]);
    if (!p.shown) return;
    int j = 0;
    found.each_entering(step, [&](int64_t table, int64_t row) {
      const int64_t c = found.near + j;
      add(to[table].key + row * dim, &seen.to_key[c * seen.deep], 1.0f, dim);
      add(to[table].value + row * value_dim, &seen.to_value[c * seen.wide], 1.0f, value_dim);
      add(to[table].variance + row * dim, &widths.to_key[j++ * widths.deep], 1.0f, dim);
    });
    for (int i = 0; i < found.rows; i++)
      for (int64_t c = closed.start[i]; c < closed.start[i + 1]; c++) {
        if (closed.weight[c] == 0.0f) continue;
        const TableTo &own = to[closed.at[c].table];
        const int64_t row = closed.at[c].row;
        add(own.key + row * dim, &found.asked[i * dim], closed.grad[c], dim);
        add(own.value + row * value_dim, &out[i * value_dim], closed.weight[c], value_dim);
        add(own.variance + row * dim, &found.squared[i * dim], slope[c], dim);
      }
  }
};

template <class T>
static void descend_back(const DescendBack &all, int threads) {
  const Descend &p = all.of;
  const aligned_vector<TileOf> tiles = tiles_of(p);
  const int64_t shared = p.heads / p.gqa_ratio, heads = p.sequences * shared, each = tiles.size();
  // Threads wait for those that are before them at the same head: they work at about half as many heads as they are.
  const int64_t some = std::clamp<int64_t>((threads + 1) / 2, 1, heads), together = some * each;
  Sequencer order(heads);
  const auto attend = [&](DescentAttentionBack<T> &attention, int64_t t) {
    const int64_t first = t / together * some, width = std::min(some, heads - first);
    const int64_t head = first + t % together % width, number = t % together / width;
    attention.attend(head / shared, head % shared, tiles[number], number, order);
  };
  const int64_t most = most_seen(p);
  in_parallel(threads, heads * each, [&] { return DescentAttentionBack<T>(all, most); }, attend);
}

}  // namespace fewkeys
