// What the queries see of every key, the cluster of every key, and sums over clusters: `fewkeys.sketch.clusters`.
#include <vector>

#include "lanes.h"

struct Statistics {
  Rows key;
  const float *form;    // (B Hkv, D + 1, D): the rows of L^T, and the mean query
  const float *centre;  // (B Hkv, D + 1): what they give for the mean key
  float *spread, *importance;  // (B Hkv, Nk)
  int64_t batch, heads, keys, dim;
};

struct Assign {
  Rows key, value;
  const float *centre;    // (B Hkv, C, D + Dv), in the coordinates of keys and values
  const float *constant;  // (B Hkv, C)
  int64_t *label;         // (B Hkv, Nk)
  float *nearest;         // (B Hkv, Nk): the largest x . centre + constant
  int64_t batch, heads, keys, dim, value_dim, count;
};

struct Sums {
  Rows key, value;
  const int64_t *label;  // (B Hkv, Nk)
  const float *share;    // (B Hkv, Nk)
  float *sums;           // (B Hkv, C, D + Dv)
  int64_t batch, heads, keys, dim, value_dim, count;
};

constexpr int64_t PIECE = 4096;  // keys added up by themselves, so that sums do not depend on the number of threads

template <class T>
static void statistics(const Statistics &p, int threads) {
  const int64_t tiles = (p.keys + TILE - 1) / TILE, work = tiles * p.batch * p.heads;
  const int dim = p.dim;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scratch((2 * dim + 1) * TILE);
    float *lanes = scratch.data(), *found = lanes + dim * TILE;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < work; t++) {
      const int64_t head = t / tiles, first = t % tiles * TILE;
      const int rows = std::min<int64_t>(TILE, p.keys - first);
      to_lanes(p.key.at<T>(head / p.heads, head % p.heads, first), p.key.row, rows, dim, 1.0f, lanes);
      dots(p.form + head * (dim + 1) * dim, dim, dim + 1, dim, lanes, found);
      const float *centre = p.centre + head * (dim + 1);
      float spread[TILE], importance[TILE];
      for (int v = 0; v < TILE; v += LANES) {
        vec sum = {};
        for (int d = 0; d < dim; d++) {
          const vec x = load(found + d * TILE + v) - centre[d];
          sum += x * x;
        }
        const vec along = load(found + dim * TILE + v) - centre[dim];
        store(spread + v, sum);
        // k^T C k = E (q . k)^2 - (m . k)^2
        store(importance + v, along + 0.5f * (sum - along * along));
      }
      memcpy(p.spread + head * p.keys + first, spread, rows * sizeof(float));
      memcpy(p.importance + head * p.keys + first, importance, rows * sizeof(float));
    }
  }
}

template <class T>
static void assign(const Assign &p, int threads) {
  const int64_t tiles = (p.keys + TILE - 1) / TILE, work = tiles * p.batch * p.heads;
  const int dim = p.dim, value_dim = p.value_dim, both = dim + value_dim;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scratch((both + p.count) * TILE);
    float *lanes = scratch.data(), *found = lanes + both * TILE;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < work; t++) {
      const int64_t b = t / tiles / p.heads, h = t / tiles % p.heads, head = t / tiles, first = t % tiles * TILE;
      const int rows = std::min<int64_t>(TILE, p.keys - first);
      to_lanes(p.key.at<T>(b, h, first), p.key.row, rows, dim, 1.0f, lanes);
      to_lanes(p.value.at<T>(b, h, first), p.value.row, rows, value_dim, 1.0f, lanes + dim * TILE);
      dots(p.centre + head * p.count * both, both, p.count, both, lanes, found);
      float nearest[TILE];
      int32_t label[TILE];
      for (int v = 0; v < TILE; v += LANES) {
        vec best = all(-INFINITY);
        ivec whose = {};
        for (int c = 0; c < p.count; c++) {
          const vec x = load(found + c * TILE + v) + p.constant[head * p.count + c];
          const ivec closer = x > best;
          best = closer ? x : best;
          whose = closer ? ivec{} + c : whose;
        }
        store(nearest + v, best);
        memcpy(label + v, &whose, sizeof whose);
      }
      for (int i = 0; i < rows; i++) {
        p.label[head * p.keys + first + i] = label[i];
        p.nearest[head * p.keys + first + i] = nearest[i];
      }
    }
  }
}

template <class T>
static void add(const T *row, float share, int dim, float *into) {
  for (int d = 0; d < dim; d++) into[d] += share * number(row[d]);
}

template <class T>
static void label_sums(const Sums &p, int threads) {
  const int64_t pieces = (p.keys + PIECE - 1) / PIECE, heads = p.batch * p.heads, both = p.dim + p.value_dim;
  const int64_t size = p.count * both;
  std::vector<float> parts(heads * pieces * size);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < heads * pieces; t++) {
      const int64_t head = t / pieces, first = t % pieces * PIECE, last = std::min(p.keys, first + PIECE);
      for (int64_t j = first; j < last; j++) {
        const float share = p.share[head * p.keys + j];
        if (share == 0.0f) continue;
        float *into = parts.data() + t * size + p.label[head * p.keys + j] * both;
        add(p.key.at<T>(head / p.heads, head % p.heads, j), share, p.dim, into);
        add(p.value.at<T>(head / p.heads, head % p.heads, j), share, p.value_dim, into + p.dim);
      }
    }
#pragma omp for schedule(static)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t piece = 0; piece < pieces; piece++)
        for (int64_t i = 0; i < size; i++) p.sums[head * size + i] += parts[(head * pieces + piece) * size + i];
  }
}

extern "C" void fewkeys_statistics(const Statistics *p, int is_bf16, int threads) {
  is_bf16 ? statistics<bf16>(*p, threads) : statistics<float>(*p, threads);
}
extern "C" void fewkeys_assign(const Assign *p, int is_bf16, int threads) {
  is_bf16 ? assign<bf16>(*p, threads) : assign<float>(*p, threads);
}
extern "C" void fewkeys_label_sums(const Sums *p, int is_bf16, int threads) {
  is_bf16 ? label_sums<bf16>(*p, threads) : label_sums<float>(*p, threads);
}
