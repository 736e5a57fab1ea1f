// Moments of the queries, keys and values of a head, and the metric that they give. `fewkeys.sketch.clusters.Frame` has
// the equations.
#pragma once
#include "keys.h"

namespace fewkeys {

template <class T>
class Framing {
 public:
  explicit Framing(const Framed &p)
      : p(p), dim(p.dim), wide(p.value_dim), tall(round_up(dim)), key_pieces(divide_up(p.keys, PIECE)),
        query_pieces(p.gqa_ratio * divide_up(p.queries, PIECE)), key_size(dim + wide + 1),
        query_size(dim + tall * tall), copy(FEW * tall) {}

  // The number of pieces (of keys, then of queries), and the size of their sums.
  int64_t pieces() const { return key_pieces + query_pieces; }
  int64_t size() const { return key_pieces * key_size + query_pieces * query_size; }

  void add_piece(int64_t head, int64_t piece, float *sums) {
    if (piece < key_pieces) {
      const int64_t first = piece * PIECE, count = std::min(p.keys - first, PIECE);
      sums += piece * key_size;
      add_rows(p.key.at<T>(head, first), p.key.row, count, dim, sums);
      sums[dim + wide] = add_rows(p.value.at<T>(head, first), p.value.row, count, wide, sums + dim);
      return;
    }
    piece -= key_pieces;
    const int64_t each = query_pieces / p.gqa_ratio, first = piece % each * PIECE;
    sums += key_pieces * key_size + piece * query_size;
    for (int64_t begin = first; begin < std::min(p.queries, first + PIECE); begin += FEW)
      multiply(p.query.at<T>(head * p.gqa_ratio + piece / each, begin), std::min(p.queries - begin, FEW), sums);
  }

  // Returns false if a matrix has no Cholesky factor.
  bool finish(int64_t head, float *sums) {
    float *asked = sums + key_pieces * key_size;
    for (int64_t piece = 1; piece < key_pieces; piece++) add(sums, sums + piece * key_size, 1.0f, key_size);
    for (int64_t piece = 1; piece < query_pieces; piece++) add(asked, asked + piece * query_size, 1.0f, query_size);
    float *form = p.form + head * (dim + 1) * dim, *root = p.root + head * dim * dim;
    float *second = p.second + head * dim * dim, *covariance = p.covariance + head * dim * dim;
    float *mean_query = p.mean_query + head * dim;
    const float queries = p.asked[head / p.key.heads];
    for (int64_t d = 0; d < dim; d++) mean_query[d] = p.scale * asked[d] / queries;
    float size = 0.0f, variance = 0.0f;
    for (int64_t d = 0; d < dim; d++) {
      for (int64_t e = d; e < dim; e++) {
        const float moment = p.scale * p.scale * asked[dim + d * tall + e] / queries;
        second[d * dim + e] = second[e * dim + d] = moment;
        covariance[d * dim + e] = covariance[e * dim + d] = moment - mean_query[d] * mean_query[e];
      }
      size += second[d * dim + d], variance += covariance[d * dim + d];
    }
    // Equal queries have no covariance: what rounding leaves of the difference must not become one.
    if (!(variance > 64 * std::numeric_limits<float>::epsilon() * size)) std::fill_n(covariance, dim * dim, 0.0f);
    centre(head, sums);
    // The form is L^T and the mean query, the root is L.
    const bool is_definite = factorise(second, dim, p.ridge, form);
    for (int64_t d = 0; d < dim; d++)
      for (int64_t e = 0; e < dim; e++) root[e * dim + d] = form[d * dim + e];
    std::copy_n(mean_query, dim, form + dim * dim);
    for (int64_t r = 0; r <= dim; r++)
      p.shift[head * (dim + 1) + r] = product(form + r * dim, p.mean + head * dim, dim);
    return is_definite;
  }

 private:
  const Framed &p;
  const int64_t dim, wide, tall, key_pieces, query_pieces, key_size, query_size;
  Floats copy;

  // Adds queries, and the upper triangle of their outer products.
  void multiply(const T *query, int64_t count, float *sums) {
    int64_t stride = p.query.row;
    add_rows(query, stride, count, dim, sums);
    const float *rows = as_floats(query, stride, count, dim, tall, copy.data());
    add_square(rows, stride, count, tall, sums + dim);
  }

  // Writes the mean key, the mean value and the unit of the values.
  void centre(int64_t head, const float *sums) {
    const float keys = p.real[head / p.key.heads];
    float *value = p.value_mean + head * wide;
    for (int64_t d = 0; d < dim; d++) p.mean[head * dim + d] = sums[d] / keys;
    for (int64_t d = 0; d < wide; d++) value[d] = sums[dim + d] / keys;
    const float square = sums[dim + wide] / keys - product(value, value, wide);
    p.unit[head] = 1.0f / std::sqrt(std::max(square, std::numeric_limits<float>::min()));
  }
};

template <class T>
static void frame(const Framed &p, int threads) {
  const Framing<T> one(p);
  const int64_t size = one.size();
  const bool small = p.keys <= PIECE && p.queries <= PIECE;
  Floats sums(p.heads * size);
  std::atomic<bool> is_definite{true};
  const auto add_piece = [&](Framing<T> &framing, int64_t head, int64_t piece) {
    framing.add_piece(head, piece, sums.data() + head * size);
  };
  const auto finish = [&](Framing<T> &framing, int64_t head, int64_t) {
    if (!framing.finish(head, sums.data() + head * size)) is_definite = false;
  };
  in_phases(threads, p.heads, small, [&] { return Framing<T>(p); }, Phase{one.pieces(), add_piece}, Phase{1, finish});
  if (!is_definite) throw Failure{INDEFINITE};
}

}  // namespace fewkeys
