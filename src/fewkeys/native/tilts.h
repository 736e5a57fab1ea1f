// Sums over clusters of keys, weighted for each cohort (`fewkeys.sketch.tilted`). Cohorts are in the lanes, keys in the
// rows.
#pragma once
#include <optional>

#include "cohorts.h"

namespace fewkeys {

// The keys of one head without padding, sorted by cluster.
struct ByCluster {
  aligned_vector<int32_t> place, begin;
  std::vector<std::pair<int32_t, int32_t>> kept;  // by chunk: the rank of a key and a cohort whose list has it
  aligned_vector<int32_t> chunk, kept_begin;      // the first chunk of every cluster; the first pair of every chunk

  void sort(const Tilts &p, int64_t head) {
    const int64_t *label = p.label + head * p.keys;
    const uint8_t *real = real_keys(p.real, p.key, head, p.keys);
    place.resize(p.keys), rank.assign(p.keys, -1), begin.assign(p.count + 1, 0);
    for (int64_t j = 0; j < p.keys; j++)
      if (!real || real[j]) begin[label[j] + 1]++;
    for (int64_t c = 0; c < p.count; c++) begin[c + 1] += begin[c];
    next.assign(begin.begin(), begin.end() - 1);
    for (int64_t j = 0; j < p.keys; j++)
      if (!real || real[j]) place[rank[j] = next[label[j]]++] = j;
    const int64_t lists = p.cohorts * p.kept, *index = p.index + head * lists;
    const uint8_t *used = p.used + head * lists;
    chunk.assign(p.count + 1, 0);
    for (int64_t c = 0; c < p.count; c++) chunk[c + 1] = chunk[c] + divide_up(begin[c + 1] - begin[c], CHUNK);
    const auto chunk_of = [&](int64_t key) { return chunk[label[key]] + (rank[key] - begin[label[key]]) / CHUNK; };
    const int64_t chunks = chunk[p.count];
    kept_begin.assign(chunks + 1, 0);
    for (int64_t i = 0; i < lists; i++)
      if (used[i]) kept_begin[chunk_of(index[i]) + 1]++;
    for (int64_t c = 0; c < chunks; c++) kept_begin[c + 1] += kept_begin[c];
    next.assign(kept_begin.begin(), kept_begin.end() - 1);
    kept.resize(kept_begin[chunks]);
    for (int64_t i = 0; i < lists; i++)
      if (used[i]) kept[next[chunk_of(index[i])]++] = {rank[index[i]], int32_t(i / p.kept)};
  }

  // The number of keys of a cluster that are not in the list of each cohort.
  void count_left(int64_t cluster, int64_t cohorts, std::vector<int32_t> &left) const {
    left.assign(cohorts, begin[cluster + 1] - begin[cluster]);
    for (int32_t i = kept_begin[chunk[cluster]]; i < kept_begin[chunk[cluster + 1]]; i++) left[kept[i].second]--;
  }

 private:
  aligned_vector<int32_t> rank, next;
};

// The sums of one cluster of keys at a time, of which CHUNK are read at once.
template <class T>
class Tilting {
 public:
  explicit Tilting(const Tilts &p)
      : p(p), dim(p.dim), deep(round_up(dim)), wide(round_up(p.value_dim)), both(deep + wide),
        lanes(round_up(p.cohorts, LANES)), cohorts(divide_up(p.cohorts, TILE), CohortLanes(dim)),
        level(cohorts.size() * TILE), row(CHUNK * both), score(cohorts.size() * CHUNK * TILE), mass(lanes),
        energy(lanes), sums(lanes * both), weighted(CHUNK * deep) {}

  // Computes the sums of a cluster. `products` (D, Dv) is padded in both dimensions.
  void add_up(const ByCluster &order, int64_t of, int64_t cluster, float *products) {
    if (head != of) take_head(of);
    const int64_t end = order.begin[cluster + 1];
    find_level(order, cluster);
    for (auto *numbers : {&mass, &energy, &sums}) std::fill(numbers->begin(), numbers->end(), 0.0f);
    for (int64_t at = order.begin[cluster], chunk = order.chunk[cluster]; at < end; at += CHUNK, chunk++) {
      const int count = std::min<int64_t>(CHUNK, end - at);
      look(order, at, end, chunk, count);
      for (int64_t i = 0; i < p.cohorts; i += SOME)
        mix(row.data(), both, count, both, &score[i / TILE * CHUNK * TILE + i % TILE], TILE, &sums[i * both], both);
      total(count);
      if (products) multiply(count, products);
    }
    order.count_left(cluster, p.cohorts, left);
    for (int64_t h = 0; h < p.cohorts; h++) {
      const int64_t to = (head * p.cohorts + h) * p.count + cluster;
      p.mass[to] = mass[h], p.energy[to] = 2 * energy[h], p.level[to] = level[h], p.size[to] = left[h];
      std::copy_n(&sums[h * both], dim, p.key_sum + to * dim);
      std::copy_n(&sums[h * both + deep], p.value_dim, p.value_sum + to * p.value_dim);
    }
  }

 private:
  const Tilts &p;
  const int64_t dim, deep, wide, both, lanes;  // deep: a padded key; wide: a padded value; both: deep + wide
  std::vector<CohortLanes> cohorts;            // tile by tile
  Floats level;                                // g_hc of every cohort
  Floats row;                                  // (CHUNK, both): centred keys, values
  Floats score;                                // e (tiles, CHUNK, TILE)
  Floats mass, energy, sums, weighted;
  std::vector<int32_t> left;
  float half_variance[CHUNK];  // k^T W k / 2
  int64_t head = -1;           // whose cohorts `cohorts` has
  const T *first_key = nullptr, *first_value = nullptr;  // of the head

  const T *key(int64_t j) const { return first_key + j * p.key.row; }
  const T *value(int64_t j) const { return first_value + j * p.value.row; }

  void take_head(int64_t of) {
    head = of, first_key = p.key.at<T>(head, 0), first_value = p.value.at<T>(head, 0);
    for (size_t t = 0; t < cohorts.size(); t++) cohorts[t].read(p.mean + head * p.cohorts * dim, p.cohorts, t, dim);
  }

  // level <- g_hc, from the mean key and the mean of k^T W k / 2.
  void find_level(const ByCluster &order, int64_t cluster) {
    const int64_t begin = order.begin[cluster], end = order.begin[cluster + 1];
    std::fill_n(row.begin(), deep, 0.0f);
    float quad = 0.0f;
    for (int64_t i = begin; i < end; i++) {
      prefetch(key(order.place[std::min(i + AHEAD, end - 1)]), dim * sizeof(T));
      add(row.data(), key(order.place[i]), 1.0f, dim), add(row.data(), p.middle + head * dim, -1.0f, dim);
      quad += p.half_variance[head * p.keys + order.place[i]];
    }
    const float size = std::max<int64_t>(1, end - begin);
    for (int64_t d = 0; d < dim; d++) row[d] /= size;
    for (size_t t = 0; t < cohorts.size(); t++)
      dots(row.data(), deep, 1, dim, cohorts[t].means.data(), &level[t * TILE], cohorts[t].used);
    for (float &one : level) one += quad / size;
  }

  // Reads the keys of a chunk and computes their weights e for every cohort.
  void look(const ByCluster &order, int64_t at, int64_t end, int64_t chunk, int count) {
    for (int j = 0; j < count; j++) {
      const int64_t place = order.place[at + j], ahead = order.place[std::min(at + j + AHEAD, end - 1)];
      prefetch(key(ahead), dim * sizeof(T)), prefetch(value(ahead), p.value_dim * sizeof(T));
      float *to = &row[j * both];
      copy_rows(key(place), 0, 1, dim, deep, to);
      add(to, p.middle + head * dim, -1.0f, dim);
      copy_rows(value(place), 0, 1, p.value_dim, wide, to + deep);
      half_variance[j] = p.half_variance[head * p.keys + place];
    }
    for (size_t t = 0; t < cohorts.size(); t++) {
      dots(row.data(), both, count, dim, cohorts[t].means.data(), &score[t * CHUNK * TILE], cohorts[t].used);
      weigh(t, count);
    }
    for (int32_t i = order.kept_begin[chunk]; i < order.kept_begin[chunk + 1]; i++) {
      const auto [rank, cohort] = order.kept[i];
      score[(cohort / TILE * CHUNK + rank - at) * TILE + cohort % TILE] = 0.0f;
    }
  }

  // Turns the scores of a tile of cohorts into e. It is 0 in lanes without a cohort and for empty cohorts.
  void weigh(int64_t tile, int count) {
    const ivec lane = count_up();
    const float most = std::exp(p.largest);
    count_multiply_adds(count * cohorts[tile].used * 2);
    for (int v = 0; v < cohorts[tile].used; v += LANES) {
      const vec least = load(&level[tile * TILE + v]);
      const ivec there = lane + v < std::min(cohorts[tile].count, int(p.filled[head] - tile * TILE));
      for (int j = 0; j < count; j++) {
        float *to = &score[(tile * CHUNK + j) * TILE + v];
        vec x = (load(to) + half_variance[j] - least) * p.tilt;
        x = x > p.largest ? broadcast(p.largest) : x;
        x = x < -p.largest ? broadcast(-p.largest) : x;
        x = exponential(x - p.largest) * most;
        store(to, there ? x : vec{});
      }
    }
  }

  // Adds the products of the keys of a chunk, times the sums of their weights, and of their values.
  void multiply(int count, float *products) {
    for (int j = 0; j < count; j++) {
      vec weight = {};
      for (int64_t v = 0; v < lanes; v += LANES) weight += load(&score[(v / TILE * CHUNK + j) * TILE + v % TILE]);
      copy(&weighted[j * deep], &row[j * both], deep);
      scale(&weighted[j * deep], sum_of_lanes(weight), deep);
    }
    for (int64_t d = 0; d < deep; d += SOME)
      mix(&row[deep], both, count, wide, &weighted[d], deep, products + d * wide, wide);
  }

  void total(int count) {
    count_multiply_adds(count * lanes * 2);
    for (int64_t v = 0; v < lanes; v += LANES) {
      const float *e = &score[v / TILE * CHUNK * TILE + v % TILE];
      vec all = load(&mass[v]), quad = load(&energy[v]);
      for (int j = 0; j < count; j++) all += load(e + j * TILE), quad += load(e + j * TILE) * half_variance[j];
      store(&mass[v], all), store(&energy[v], quad);
    }
  }
};

// The keys of a head by cluster, and sums over portions of clusters, whose number does not depend on the threads.
struct HeadSums {
  static constexpr int64_t PORTIONS = 16;
  const int64_t wide, size;
  ByCluster order;
  Floats products;  // (PORTIONS, D, Dv), padded in both dimensions; empty if not needed

  explicit HeadSums(const Tilts &p) : wide(round_up(p.value_dim)), size(p.together ? round_up(p.dim) * wide : 0) {}

  void sort(const Tilts &p, int64_t head) { order.sort(p, head), products.assign(PORTIONS * size, 0.0f); }

  void finish(const Tilts &p, int64_t head) {
    if (!size) return;
    float *sum = products.data(), *to = p.together + head * p.dim * p.value_dim;
    for (int64_t i = 1; i < PORTIONS; i++) add(sum, sum + i * size, 1.0f, size);
    for (int64_t d = 0; d < p.dim; d++) std::copy_n(sum + d * wide, p.value_dim, to + d * p.value_dim);
  }
};

// If there are many heads, each thread takes whole heads: starting all threads costs as much as several clusters.
template <class T>
static void tilt(const Tilts &p, int threads) {
  struct Thread {
    HeadSums sums;
    std::optional<Tilting<T>> tilting;  // of threads that add up clusters
  };
  constexpr int64_t PORTIONS = HeadSums::PORTIONS;
  const bool whole = p.heads >= 4 * team_size(threads);
  std::vector<HeadSums> shared(whole ? 0 : p.heads, HeadSums(p));
  const auto sums_of = [&](Thread &thread, int64_t head) -> HeadSums & { return whole ? thread.sums : shared[head]; };
  const auto add_up = [&](Thread &thread, int64_t head, int64_t portion) {
    HeadSums &sums = sums_of(thread, head);
    if (!thread.tilting) thread.tilting.emplace(p);
    for (int64_t c = portion * p.count / PORTIONS; c < (portion + 1) * p.count / PORTIONS; c++)
      thread.tilting->add_up(sums.order, head, c, sums.size ? &sums.products[portion * sums.size] : nullptr);
  };
  in_phases(threads, p.heads, whole, [&] { return Thread{HeadSums(p), {}}; },
            Phase{1, [&](Thread &thread, int64_t head, int64_t) { sums_of(thread, head).sort(p, head); }},
            Phase{PORTIONS, add_up},
            Phase{1, [&](Thread &thread, int64_t head, int64_t) { sums_of(thread, head).finish(p, head); }});
}

}  // namespace fewkeys
