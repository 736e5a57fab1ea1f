// k-means (Lloyd's algorithm) on a sample of the keys of each head, and the cluster of every key
// (`fewkeys.sketch.clusters`).
#pragma once
#include <numeric>

#include "keys.h"

namespace fewkeys {

template <class T>
class Clustering {
 public:
  explicit Clustering(const Clustered &p)
      : p(p), dim(p.dim), both(p.dim + p.value_dim), span(round_up(both, TILE)),
        keys(round_up(p.sampled, TILE)), scores(std::max<int64_t>(dim + 1, p.count) * TILE), rows(keys * span),
        lanes(keys * both), centre(p.count * span), sums(p.count * span), half(p.count), mass(p.count),
        importance(keys), weight(p.sampled), order(p.sampled) {}

  // Finds the centres of a head.
  void seek(int64_t head, int64_t) {
    real = real_keys(p.real, p.sample_key, head, p.sampled);
    for (int64_t first = 0; first < p.sampled; first += TILE) look(head, first);
    weigh();
    seed();
    for (int64_t step = 0; step < p.steps; step++) move();
    for (int64_t c = 0; c < p.count; c++) write(head, c);
  }

  // Computes cluster, distance and half the variance of the scores of a tile of all keys of a head.
  void survey(int64_t head, int64_t tile) {
    const int64_t first = tile * TILE, at = head * p.keys + first;
    const int count = std::min<int64_t>(TILE, p.keys - first);
    float spread[TILE], half[TILE], nearest[TILE], square[TILE], *values = &lanes[dim * TILE];
    int32_t label[TILE];
    to_lanes(p.key.at<T>(head, first), p.key.row, count, dim, 1.0f, lanes.data());
    to_lanes(p.value.at<T>(head, first), p.value.row, count, p.value_dim, 1.0f, values);
    see(form(head), shift(head), dim, lanes.data(), scores.data(), spread, half);
    dots(p.centre + head * p.count * both, both, p.count, both, lanes.data(), scores.data());
    nearest_of(scores.data(), p.constant + head * p.count, p.count, nearest, label);
    measure(values, p.middle + head * p.value_dim, p.value_dim, square);
    std::copy_n(label, count, p.label + at);
    std::copy_n(half, count, p.half_variance + at);
    for (int i = 0; i < count; i++) {
      const float energy = spread[i] + square[i] * (p.unit[head] * p.unit[head]);
      p.distance[at + i] = std::max(energy - 2.0f * nearest[i], p.near * energy);
    }
  }

 private:
  const Clustered &p;
  const int dim, both, span;
  const int64_t keys;
  const uint8_t *real = nullptr;
  // rows and lanes: the features of the keys, in rows and in lanes, tile after tile.
  Floats scores, rows, lanes, centre, sums, half, mass, importance, weight;
  aligned_vector<int> order;

  const float *form(int64_t head) const { return p.form + head * (dim + 1) * dim; }
  const float *shift(int64_t head) const { return p.shift + head * (dim + 1); }

  // Computes the features and the importance of a tile of sampled keys.
  void look(int64_t head, int64_t first) {
    const int count = std::min<int64_t>(TILE, p.sampled - first);
    const float *origin = shift(head), *middle = p.middle + head * p.value_dim, unit = p.unit[head];
    float *features = &lanes[first * both], spread[TILE], half[TILE];
    to_lanes(p.sample_key.at<T>(head, first), p.sample_key.row, count, dim, 1.0f, features);
    see(form(head), origin, dim, features, scores.data(), spread, half);
    for (int i = 0; i < TILE; i++) importance[first + i] = scores[dim * TILE + i] - origin[dim] + half[i];
    for (int d = 0; d < dim; d++)
      for (int v = 0; v < TILE; v += LANES) store(features + d * TILE + v, load(&scores[d * TILE + v]) - origin[d]);
    features += dim * TILE;
    to_lanes(p.sample_value.at<T>(head, first), p.sample_value.row, count, p.value_dim, 1.0f, features);
    for (int d = 0; d < p.value_dim; d++)
      for (int v = 0; v < TILE; v += LANES) {
        float *to = features + d * TILE + v;
        store(to, (load(to) - middle[d]) * unit);
      }
    features = &lanes[first * both];
    for (int d = 0; d < both; d += TILE)
      to_lanes(features + d * TILE, TILE, std::min(TILE, both - d), TILE, 1.0f, &rows[first * span + d], span);
  }

  void weigh() {
    float top = -INFINITY;
    for (int64_t j = 0; j < p.sampled; j++)
      if (!real || real[j]) top = std::max(top, importance[j]);
    for (int64_t j = 0; j < p.sampled; j++)
      weight[j] = real && !real[j] ? 0.0f : std::exp(std::max(p.tilt * (importance[j] - top), p.lowest));
  }

  // The first centres: a quarter are the most important keys, the others are keys at equal steps of rank.
  void seed() {
    std::iota(order.begin(), order.end(), 0);
    const auto heavier = [&](int a, int b) { return importance[a] > importance[b]; };
    const auto counts = [&](int key) { return !real || real[key]; };
    const auto end = std::stable_partition(order.begin(), order.end(), counts);
    std::stable_sort(order.begin(), end, heavier);
    const int64_t last = std::max<int64_t>(end - order.begin(), 1) - 1, head = p.count / 4;
    const int64_t reach = std::max<int64_t>(last - head, 0), parts = std::max<int64_t>(p.count - head - 1, 1);
    for (int64_t c = 0; c < p.count; c++) {
      const int64_t rank = c < head ? c : head + (2 * reach * (c - head) + parts) / (2 * parts);
      const int chosen = order[std::min(rank, last)];
      std::copy_n(&rows[chosen * span], span, &centre[c * span]);
    }
  }

  // One step of Lloyd's algorithm: assigns every key to its nearest centre, and moves every centre to the weighted mean
  // of its keys.
  void move() {
    for (int64_t c = 0; c < p.count; c++) half[c] = -0.5f * product(&centre[c * span], &centre[c * span], both);
    for (auto *x : {&sums, &mass}) std::fill(x->begin(), x->end(), 0.0f);
    float closeness[TILE];
    int32_t label[TILE];
    for (int64_t first = 0; first < p.sampled; first += TILE) {
      const int count = std::min<int64_t>(TILE, p.sampled - first);
      dots(centre.data(), span, p.count, both, &lanes[first * both], scores.data());
      nearest_of(scores.data(), half.data(), p.count, closeness, label);
      for (int i = 0; i < count; i++) {
        const float share = weight[first + i];
        add(&sums[label[i] * span], &rows[(first + i) * span], share, span);
        mass[label[i]] += share;
      }
    }
    for (int64_t c = 0; c < p.count; c++)
      for (int d = 0; mass[c] > 0.0f && d < span; d++) centre[c * span + d] = sums[c * span + d] / mass[c];
  }

  // Writes `x . c - |c|^2 / 2` of features x as a linear function of keys and values.
  void write(int64_t head, int64_t c) {
    const float *centroid = &centre[c * span];
    float *to = p.centre + (head * p.count + c) * both;
    std::fill_n(to, dim, 0.0f);
    for (int d = 0; d < dim; d++) add(to + d, form(head) + d * dim + d, centroid[d], dim - d);
    for (int d = dim; d < both; d++) to[d] = p.unit[head] * centroid[d];
    p.constant[head * p.count + c] = -0.5f * product(centroid, centroid, both) - product(centroid, shift(head), dim) -
                                     product(to + dim, p.middle + head * p.value_dim, p.value_dim);
  }
};

template <class T>
static void cluster(const Clustered &p, int threads) {
  in_phases(threads, p.heads, p.keys <= PIECE, [&] { return Clustering<T>(p); }, Phase{1, &Clustering<T>::seek},
            Phase{divide_up(p.keys, TILE), &Clustering<T>::survey});
}

}  // namespace fewkeys
