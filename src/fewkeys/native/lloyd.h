// k-means (Lloyd's algorithm) on a sample of the keys of each head, and the cluster of every key
// (`fewkeys.sketch.clusters`).
#pragma once
#include "keys.h"

namespace fewkeys {

template <class T>
class Clustering {
 public:
  explicit Clustering(const Lloyd &p)
      : p(p), dim(p.dim), both(p.dim + p.value_dim), span(round_up(both, TILE)), keys(round_up(p.keys, TILE)),
        scores(std::max<int64_t>(dim + 1, p.count) * TILE), rows(keys * span), lanes(keys * both),
        centre(p.count * span), sums(p.count * span), half(p.count), mass(p.count), along(p.count), importance(keys),
        weight(p.keys), order(p.keys) {}

  void cluster(int64_t head) {
    real = p.real ? p.real + head / p.heads * p.keys : nullptr;
    for (int64_t first = 0; first < p.keys; first += TILE) look(head, first);
    weigh();
    seed(p.importance + head * p.count);
    for (int64_t step = 0; step < p.steps; step++) move(p.importance + head * p.count);
    for (int64_t c = 0; c < p.count; c++) write(head, c);
  }

 private:
  struct Ranked {
    float importance;
    int place;
  };
  const Lloyd &p;
  const int dim, both, span;
  const int64_t keys;
  const uint8_t *real = nullptr;
  // rows and lanes: the features of the keys, in rows and in lanes, tile after tile.
  aligned_vector<float> scores, rows, lanes, centre, sums, half, mass, along, importance, weight;
  aligned_vector<Ranked> order;

  // Computes the features and the importance of a tile of keys.
  void look(int64_t head, int64_t first) {
    const int64_t b = head / p.heads, h = head % p.heads;
    const int count = std::min<int64_t>(TILE, p.keys - first);
    const float *shift = p.shift + head * (dim + 1), *middle = p.middle + head * p.value_dim, unit = p.unit[head];
    float *features = &lanes[first * both], spread[TILE];
    to_lanes(p.key.at<T>(b, h, first), p.key.row, count, dim, 1.0f, features);
    see(p.form + head * (dim + 1) * dim, shift, dim, features, scores.data(), spread, &importance[first]);
    for (int d = 0; d < dim; d++)
      for (int v = 0; v < TILE; v += LANES) store(features + d * TILE + v, load(&scores[d * TILE + v]) - shift[d]);
    features += dim * TILE;
    to_lanes(p.value.at<T>(b, h, first), p.value.row, count, p.value_dim, 1.0f, features);
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
    for (int64_t j = 0; j < p.keys; j++)
      if (!real || real[j]) top = std::max(top, importance[j]);
    for (int64_t j = 0; j < p.keys; j++)
      weight[j] = real && !real[j] ? 0.0f : std::exp(std::max(p.tilt * (importance[j] - top), p.lowest));
  }

  // The first centres: a quarter are the most important keys, the others are keys at equal steps of rank.
  void seed(float *mean_importance) {
    for (int j = 0; j < p.keys; j++) order[j] = {importance[j], j};
    const auto heavier = [](const Ranked &a, const Ranked &b) { return a.importance > b.importance; };
    const auto counts = [&](const Ranked &key) { return !real || real[key.place]; };
    const auto end = std::stable_partition(order.begin(), order.end(), counts);
    std::stable_sort(order.begin(), end, heavier);
    const int64_t last = std::max<int64_t>(end - order.begin(), 1) - 1, head = p.count / 4;
    const int64_t reach = std::max<int64_t>(last - head, 0), parts = std::max<int64_t>(p.count - head - 1, 1);
    for (int64_t c = 0; c < p.count; c++) {
      const int64_t rank = c < head ? c : head + (2 * reach * (c - head) + parts) / (2 * parts);
      const int chosen = order[std::min(rank, last)].place;
      std::copy_n(&rows[chosen * span], span, &centre[c * span]);
      mean_importance[c] = importance[chosen];
    }
  }

  // One step of Lloyd's algorithm: assigns every key to its nearest centre, and moves every centre to the weighted mean
  // of its keys.
  void move(float *mean_importance) {
    for (int64_t c = 0; c < p.count; c++) half[c] = -0.5f * product(&centre[c * span], &centre[c * span], both);
    for (auto *x : {&sums, &mass, &along}) std::fill(x->begin(), x->end(), 0.0f);
    float closeness[TILE];
    int32_t label[TILE];
    for (int64_t first = 0; first < p.keys; first += TILE) {
      const int count = std::min<int64_t>(TILE, p.keys - first);
      dots(centre.data(), span, p.count, both, &lanes[first * both], scores.data());
      nearest_of(scores.data(), half.data(), p.count, closeness, label);
      for (int i = 0; i < count; i++) {
        const float share = weight[first + i];
        add(&sums[label[i] * span], &rows[(first + i) * span], share, span);
        mass[label[i]] += share;
        along[label[i]] += share * importance[first + i];
      }
    }
    for (int64_t c = 0; c < p.count; c++) {
      if (!(mass[c] > 0.0f)) continue;
      for (int d = 0; d < span; d++) centre[c * span + d] = sums[c * span + d] / mass[c];
      mean_importance[c] = along[c] / mass[c];
    }
  }

  // Writes `x . c - |c|^2 / 2` of features x as a linear function of keys and values.
  void write(int64_t head, int64_t c) {
    const float *centroid = &centre[c * span];
    const float *form = p.form + head * (dim + 1) * dim, *shift = p.shift + head * (dim + 1);
    float *to = p.centre + (head * p.count + c) * both;
    std::fill_n(to, dim, 0.0f);
    for (int d = 0; d < dim; d++) add(to + d, form + d * dim + d, centroid[d], dim - d);
    for (int d = dim; d < both; d++) to[d] = p.unit[head] * centroid[d];
    p.constant[head * p.count + c] = -0.5f * product(centroid, centroid, both) - product(centroid, shift, dim) -
                                     product(to + dim, p.middle + head * p.value_dim, p.value_dim);
  }
};

// Computes cluster, distance, spread and importance of all keys, a tile at a time.
template <class T>
class Surveyor {
 public:
  explicit Surveyor(const Clustered &p)
      : p(p), of(p.sample), both(of.dim + of.value_dim), lanes(both * TILE),
        scores(std::max(of.dim + 1, of.count) * TILE) {}

  void look(int64_t head, int64_t first) {
    const int64_t b = head / of.heads, h = head % of.heads, at = head * p.keys + first, dim = of.dim;
    const int count = std::min<int64_t>(TILE, p.keys - first);
    float spread[TILE], importance[TILE], nearest[TILE], square[TILE];
    int32_t label[TILE];
    float *values = &lanes[dim * TILE];
    to_lanes(p.key.at<T>(b, h, first), p.key.row, count, dim, 1.0f, lanes.data());
    to_lanes(p.value.at<T>(b, h, first), p.value.row, count, of.value_dim, 1.0f, values);
    see(of.form + head * (dim + 1) * dim, of.shift + head * (dim + 1), dim, lanes.data(), scores.data(), spread,
        importance);
    dots(of.centre + head * of.count * both, both, of.count, both, lanes.data(), scores.data());
    nearest_of(scores.data(), of.constant + head * of.count, of.count, nearest, label);
    measure(values, of.middle + head * of.value_dim, of.value_dim, square);
    std::copy(spread, spread + count, p.spread + at);
    std::copy(importance, importance + count, p.importance + at);
    std::copy(label, label + count, p.label + at);
    for (int i = 0; i < count; i++) {
      const float energy = spread[i] + square[i] * (of.unit[head] * of.unit[head]);
      p.distance[at + i] = std::max(energy - 2.0f * nearest[i], p.near * energy);
    }
  }

 private:
  const Clustered &p;
  const Lloyd &of;
  const int64_t both;
  aligned_vector<float> lanes, scores;
};

template <class T>
static void cluster(const Clustered &p, int threads) {
  struct Worker {
    Clustering<T> centres;
    Surveyor<T> keys;
  };
  const auto seek = [](Worker &worker, int64_t head, int64_t) { worker.centres.cluster(head); };
  const auto look = [](Worker &worker, int64_t head, int64_t tile) { worker.keys.look(head, tile * TILE); };
  const auto make = [&] { return Worker{Clustering<T>(p.sample), Surveyor<T>(p)}; };
  in_phases(threads, p.sample.batch * p.sample.heads, p.keys <= PIECE, make, Phase{1, seek},
            Phase{(p.keys + TILE - 1) / TILE, look});
}

}  // namespace fewkeys
