// Centres of clusters from a sample of the keys: what `fewkeys.sketch.clusters` says of Lloyd's steps, head by head.
#pragma once
#include "keys.h"

namespace fewkeys {

template <class T>
class Clustering {
 public:
  explicit Clustering(const Lloyd &p)
      : p(p), dim(p.dim), both(p.dim + p.value_dim), span(round_up(both)), form((dim + 1 + TILE) * dim),
        copy(SOME_ROWS * dim), found(std::max<int64_t>(SOME_ROWS, p.count) * TILE), rows(p.keys * span),
        lanes(both * TILE), centre(p.count * span), sums(p.count * span), half(p.count), mass(p.count), along(p.count),
        importance(p.keys), weight(p.keys), order(p.keys) {}

  void cluster(int64_t head) {
    real = p.real ? p.real + head / p.heads * p.keys : nullptr;
    look(head);
    weigh();
    seed(p.importance + head * p.count);
    for (int64_t step = 0; step < p.steps; step++) move(p.importance + head * p.count);
    for (int64_t c = 0; c < p.count; c++) std::copy_n(&centre[c * span], both, p.centre + (head * p.count + c) * both);
  }

 private:
  struct Ranked {
    float importance;
    int place;
  };
  static constexpr int64_t SOME_ROWS = 128;  // rows looked at together: they stay next to the core
  const Lloyd &p;
  const int dim, both, span;
  const uint8_t *real = nullptr;
  aligned_vector<float> form, copy, found, rows, lanes, centre, sums, half, mass, along, importance, weight;
  aligned_vector<Ranked> order;

  // The features of every key, and its importance.
  void look(int64_t head) {
    const int64_t b = head / p.heads, h = head % p.heads;
    const float *from = p.form + head * (dim + 1) * dim, *shift = p.shift + head * (dim + 1);
    const float *middle = p.middle + head * p.value_dim, unit = p.unit[head];
    for (int c = 0; c <= dim; c += TILE)
      to_lanes(from + c * dim, dim, std::min(TILE, dim + 1 - c), dim, 1.0f, &form[c * dim]);
    for (int64_t first = 0; first < p.keys; first += SOME_ROWS) {
      const int count = std::min(SOME_ROWS, p.keys - first);
      int64_t stride = p.key.row;
      const float *key = floats(p.key.at<T>(b, h, first), stride, count, dim, dim, copy.data());
      for (int c = 0; c <= dim; c += TILE) {
        dots(key, stride, count, dim, &form[c * dim], found.data());
        for (int i = 0; i < count; i++) {
          float *row = &rows[(first + i) * span];
          for (int e = 0; e < std::min(TILE, dim - c); e++) row[c + e] = found[i * TILE + e] - shift[c + e];
          if (c + TILE > dim) importance[first + i] = found[i * TILE + dim - c] - shift[dim];
        }
      }
      for (int i = 0; i < count; i++) {
        float *row = &rows[(first + i) * span];
        const T *value = p.value.at<T>(b, h, first + i);
        const float energy = product(row, row, dim);
        for (int d = 0; d < p.value_dim; d++) row[dim + d] = (to_float(value[d]) - middle[d]) * unit;
        const float x = importance[first + i];
        importance[first + i] = x + 0.5f * (energy - x * x);
      }
    }
  }

  void weigh() {
    float top = -INFINITY;
    for (int64_t j = 0; j < p.keys; j++)
      if (!real || real[j]) top = std::max(top, importance[j]);
    for (int64_t j = 0; j < p.keys; j++)
      weight[j] = real && !real[j] ? 0.0f : std::exp(std::max(p.tilt * (importance[j] - top), p.lowest));
  }

  // A quarter of the most important keys, and others at equal steps of rank.
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

  // One of Lloyd's steps: every key to its nearest centre, every centre to the weighted mean of its keys.
  void move(float *mean_importance) {
    for (int64_t c = 0; c < p.count; c++) half[c] = -0.5f * product(&centre[c * span], &centre[c * span], both);
    for (auto *x : {&sums, &mass, &along}) std::fill(x->begin(), x->end(), 0.0f);
    float closeness[TILE];
    int32_t label[TILE];
    for (int64_t first = 0; first < p.keys; first += TILE) {
      const int count = std::min<int64_t>(TILE, p.keys - first);
      to_lanes(&rows[first * span], span, count, both, 1.0f, lanes.data());
      dots(centre.data(), span, p.count, both, lanes.data(), found.data());
      nearest_of(found.data(), half.data(), p.count, closeness, label);
      for (int i = 0; i < count; i++) {
        const float mine = weight[first + i];
        add(&sums[label[i] * span], &rows[(first + i) * span], mine, span);
        mass[label[i]] += mine;
        along[label[i]] += mine * importance[first + i];
      }
    }
    for (int64_t c = 0; c < p.count; c++) {
      if (!(mass[c] > 0.0f)) continue;
      for (int d = 0; d < span; d++) centre[c * span + d] = sums[c * span + d] / mass[c];
      mean_importance[c] = along[c] / mass[c];
    }
  }
};

template <class T>
static void lloyd(const Lloyd &p, int threads) {
  const auto cluster = [](Clustering<T> &sample, int64_t head) { sample.cluster(head); };
  in_parallel(threads, p.batch * p.heads, [&] { return Clustering<T>(p); }, cluster);
}

}  // namespace fewkeys
